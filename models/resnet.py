"""ResNet-18, -34 and -50 with torchvision's structure and layer names.

He et al., Deep Residual Learning (2015). ResNet-50 is torchvision's v1.5: the stride sits
in the 3x3, not in the first 1x1.
"""

from __future__ import annotations

from sparsedeploy.models.writer import NetworkWriter, Value

BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
}
"""Residual blocks per stage."""

BRANCH_GAIN = 0.5
"""Scale of a residual branch's last BatchNormalization: small enough that a stage's sum stays of order 1."""


def resnet(net: NetworkWriter, x: Value, name: str, num_classes: int) -> Value:
    """Logits [N, num_classes]."""
    bottleneck = name == "resnet50"
    x = net.conv(x, "conv1", 64, 7, stride=2, batchnorm="bn1", activation="relu")
    x = net.max_pool(x, "maxpool", 3, 2, 1)
    for stage, blocks in enumerate(BLOCKS[name]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            block_of = _bottleneck if bottleneck else _basic
            x = block_of(net, x, f"layer{stage + 1}.{block}", 64 << stage, stride)
    x = net.flatten(net.global_average_pool(x, "avgpool"))
    return net.linear(x, "fc", num_classes)


def _basic(net: NetworkWriter, x: Value, name: str, width: int, stride: int) -> Value:
    y = net.conv(x, f"{name}.conv1", width, 3, stride=stride, batchnorm=f"{name}.bn1", activation="relu")
    y = net.conv(y, f"{name}.conv2", width, 3, batchnorm=f"{name}.bn2", gain=BRANCH_GAIN)
    return _join(net, x, y, name, stride)


def _bottleneck(net: NetworkWriter, x: Value, name: str, width: int, stride: int) -> Value:
    y = net.conv(x, f"{name}.conv1", width, 1, batchnorm=f"{name}.bn1", activation="relu")
    y = net.conv(y, f"{name}.conv2", width, 3, stride=stride, batchnorm=f"{name}.bn2", activation="relu")
    y = net.conv(y, f"{name}.conv3", 4 * width, 1, batchnorm=f"{name}.bn3", gain=BRANCH_GAIN)
    return _join(net, x, y, name, stride)


def _join(net: NetworkWriter, x: Value, y: Value, name: str, stride: int) -> Value:
    if stride != 1 or x.channels != y.channels:
        x = net.conv(x, f"{name}.downsample.0", y.channels, 1, stride=stride, batchnorm=f"{name}.downsample.1")
    return net.activate(net.add(y, x, f"{name}.add"), name, "relu")
