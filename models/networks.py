"""Reference networks by name, made directly as ONNX: no torch, no download, the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from sparsedeploy.errors import InputError
from sparsedeploy.models.mobilenet import mobilenet_v1, mobilenet_v2
from sparsedeploy.models.resnet import resnet
from sparsedeploy.models.vgg import vgg16
from sparsedeploy.models.writer import NetworkWriter, Sparsify, Value, check_opset

_WRITERS: dict[str, Callable[[NetworkWriter, Value, str, int], Value]] = {
    "resnet18": resnet,
    "resnet34": resnet,
    "resnet50": resnet,
    "vgg16": vgg16,
    "vgg16_bn": vgg16,
    "mobilenet_v1": mobilenet_v1,
    "mobilenet_v2": mobilenet_v2,
}

NETWORKS: tuple[str, ...] = tuple(_WRITERS)
"""Names that `build` knows, spelled as torchvision spells them."""


def build(
    name: str,
    *,
    num_classes: int = 1000,
    image_size: int = 224,
    opset: int = 13,
    with_batchnorm: bool = False,
    seed: int = 0,
    sparsify: Sparsify | None = None,
) -> onnx.ModelProto:
    """A reference network with random weights.

    Input "input" [N, 3, image_size, image_size] and output "output" [N, num_classes] are float32; the batch is the
    symbol "N". Weights are He normal, seeded; the BatchNormalization statistics
    fit them, so a normalised input gives logits of order 1. `with_batchnorm` keeps BatchNormalization as nodes where
    the network has it; otherwise it is folded into the convolutions, as exporters do. vgg16 has none either way.
    `sparsify` changes each convolution's and linear layer's weight before the statistics are fitted to it.
    `image_size` is a multiple of 32. Raises InputError for an unknown name, size, class count, opset or seed.
    """
    if name not in _WRITERS:
        raise InputError(f"{name!r} is not a reference network; choose one of {', '.join(NETWORKS)}.")
    if image_size < 32 or image_size % 32:
        raise InputError(
            f"image size {image_size}: reference networks halve the image five times; use a multiple of 32."
        )
    if num_classes < 1:
        raise InputError(f"{num_classes} classes: a classifier needs at least one; give a positive number.")
    if seed < 0:
        raise InputError(f"seed {seed}: a seed is a whole number of 0 or more.")
    check_opset(opset)
    net = NetworkWriter(seed=seed, with_batchnorm=with_batchnorm, sparsify=sparsify)
    x = net.input(3, image_size)
    return net.finish(name, x, _WRITERS[name](net, x, name, num_classes), opset)
