"""VGG-16, plain and with batch normalisation, with torchvision's structure and layer names.

Simonyan and Zisserman, Very Deep Convolutional Networks (2014). torchvision's batch-normalised convolutions keep a bias.
"""

from __future__ import annotations

from sparsedeploy.models.writer import NetworkWriter, Value

STAGES: tuple[tuple[int, int], ...] = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
"""Convolutions and channels per stage; a stage ends with 2x2 max pooling."""


def vgg16(net: NetworkWriter, x: Value, name: str, num_classes: int) -> Value:
    """Logits [N, num_classes]; `name` is "vgg16" or "vgg16_bn".

    The classifier reads a 7x7 map. A last map of a multiple of 7 is averaged down to it, as torchvision does; any other
    is read as it is, so a small image makes a small classifier (torchvision would stretch the map to 7x7).
    """
    index = 0
    for convs, channels in STAGES:
        for _ in range(convs):
            batchnorm = f"features.{index + 1}" if name == "vgg16_bn" else ""
            x = net.conv(x, f"features.{index}", channels, 3, bias=True, batchnorm=batchnorm, activation="relu")
            index += 3 if batchnorm else 2
        x = net.max_pool(x, f"features.{index}", 2, 2, 0)
        index += 1
    if x.height % 7 == 0 and x.height > 7:
        x = net.average_pool(x, "avgpool", x.height // 7)
    x = net.flatten(x)
    x = net.linear(x, "classifier.0", 4096, "relu")
    x = net.linear(x, "classifier.3", 4096, "relu")
    return net.linear(x, "classifier.6", num_classes)
