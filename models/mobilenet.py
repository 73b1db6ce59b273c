"""MobileNetV1 (Howard et al., 2017) and MobileNetV2 (Sandler et al., 2018; torchvision's structure and layer names)."""

from __future__ import annotations

from sparsedeploy.models.writer import NetworkWriter, Value

V1_BLOCKS: tuple[tuple[int, int], ...] = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2),
    (512, 1), (512, 1), (512, 1), (512, 1), (512, 1), (1024, 2), (1024, 1),
)  # fmt: skip
"""Output channels and stride of the depthwise convolution, per block."""

V2_STAGES: tuple[tuple[int, int, int, int], ...] = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""Expansion, output channels, blocks and first stride, per stage."""


def mobilenet_v1(net: NetworkWriter, x: Value, name: str, num_classes: int) -> Value:
    """Logits [N, num_classes]. torchvision has no V1: block i is features.i with depthwise and pointwise."""
    x = net.conv(x, "features.0.conv", 32, 3, stride=2, batchnorm="features.0.bn", activation="relu")
    for index, (channels, stride) in enumerate(V1_BLOCKS, start=1):
        block = f"features.{index}"
        x = net.conv(
            x, f"{block}.depthwise", x.channels, 3, stride=stride, group=x.channels,
            batchnorm=f"{block}.bn1", activation="relu",
        )  # fmt: skip
        x = net.conv(x, f"{block}.pointwise", channels, 1, batchnorm=f"{block}.bn2", activation="relu")
    return net.linear(net.flatten(net.global_average_pool(x, "avgpool")), "classifier", num_classes)


def mobilenet_v2(net: NetworkWriter, x: Value, name: str, num_classes: int) -> Value:
    """Logits [N, num_classes]; linear bottlenecks, ReLU6 elsewhere."""
    x = net.conv(x, "features.0.0", 32, 3, stride=2, batchnorm="features.0.1", activation="relu6")
    index = 1
    for expansion, channels, blocks, first_stride in V2_STAGES:
        for block in range(blocks):
            x = _inverted(net, x, f"features.{index}", expansion, channels, first_stride if block == 0 else 1)
            index += 1
    x = net.conv(x, f"features.{index}.0", 1280, 1, batchnorm=f"features.{index}.1", activation="relu6")
    return net.linear(net.flatten(net.global_average_pool(x, "avgpool")), "classifier.1", num_classes)


def _inverted(net: NetworkWriter, x: Value, name: str, expansion: int, channels: int, stride: int) -> Value:
    hidden, y, part = expansion * x.channels, x, 0
    if expansion != 1:
        y = net.conv(y, f"{name}.conv.0.0", hidden, 1, batchnorm=f"{name}.conv.0.1", activation="relu6")
        part = 1
    y = net.conv(
        y, f"{name}.conv.{part}.0", hidden, 3, stride=stride, group=hidden,
        batchnorm=f"{name}.conv.{part}.1", activation="relu6",
    )  # fmt: skip
    residual = stride == 1 and x.channels == channels
    gain = 0.5 if residual else 1.0
    y = net.conv(y, f"{name}.conv.{part + 1}", channels, 1, batchnorm=f"{name}.conv.{part + 2}", gain=gain)
    return net.add(x, y, f"{name}.add") if residual else y
