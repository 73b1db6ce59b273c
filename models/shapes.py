"""Convolutions to test and to measure on: one enumerator, so that a benchmark runs what a test has checked.

Lists by name: `resnet50_3x3`, `resnet50_1x1`, `paper` (arXiv 2611.17212), `escoin` (the layers SkimCaffe pruned and Escoin
was measured on), `im2win` (cv1 to cv12 of arXiv 2608.20725), `mobilenet_v1_1x1`, and `small` for tests. `real_work` lists
trained and pruned filters from a folder of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.errors import InputError
from sparsedeploy.layer import Geometry
from sparsedeploy.models.sparsity import magnitude


@dataclass(frozen=True)
class Work:
    """One convolution, the batches it is measured at, and the shares of zeros it is measured with."""

    name: str
    geometry: Geometry
    batches: tuple[int, ...] = (1, 8, 32)
    sparsities: tuple[float, ...] = (0.9, 0.95, 0.98)
    """0..1; the published ones where the list's source states them."""


def work(*patterns: str) -> tuple[Work, ...]:
    """The works whose "list/name" matches a pattern ("small/*", "resnet50_3x3/64@56"); a bare list name means all of it.

    Without patterns: every work, in the order of LISTS. Raises InputError for a pattern that matches nothing.
    """
    wanted = [pattern if "/" in pattern else f"{pattern}/*" for pattern in patterns or ("*",)]
    paths = [(f"{name}/{entry.name}", entry) for name, entries in LISTS.items() for entry in entries]
    for pattern in wanted:
        if not any(fnmatchcase(path, pattern) for path, _ in paths):
            raise InputError(f"no shape matches {pattern!r}; the lists are {', '.join(LISTS)}.")
    return tuple(entry for path, entry in paths if any(fnmatchcase(path, pattern) for pattern in wanted))


def pruned_weight(geometry: Geometry, sparsity: float) -> NDArray[np.float32]:
    """Magnitude-pruned random weights [oc, ic // group, kh, kw] of fp16 values, so that every kernel computes the same.

    Scaled so that outputs are of the order of inputs; the same for the same arguments.
    """
    dense = np.random.default_rng(0).standard_normal(geometry.weight_shape).astype(np.float32)
    weight = magnitude(dense, sparsity)
    terms = max(1.0, geometry.ic // geometry.group * geometry.kh * geometry.kw * (1 - sparsity))
    rounded: NDArray[np.float32] = (weight / np.float32(np.sqrt(terms))).astype(np.float16).astype(np.float32)
    return rounded


_REAL: tuple[tuple[str, str, int], ...] = (
    # file, start of the array's name, side of the map
    ("resnet50_3x3_90", "bg1", 56), ("resnet50_3x3_90", "bg2", 28), ("resnet50_3x3_90", "bg3", 14),
    ("resnet50_3x3_95", "bg1", 56), ("resnet50_3x3_95", "bg2", 28), ("resnet50_3x3_95", "bg3", 14),
    ("mobilenetv1_1x1_90", "pw00", 112), ("mobilenetv1_1x1_90", "pw01", 56), ("mobilenetv1_1x1_90", "pw02", 56),
    ("mobilenetv1_1x1_90", "pw03", 28), ("mobilenetv1_1x1_90", "pw04", 28), ("mobilenetv1_1x1_90", "pw05", 14),
    ("mobilenetv1_1x1_90", "pw06", 14), ("mobilenetv1_1x1_90", "pw11", 7),
    ("alexnet_b_top1_0.5626", "conv3", 13),
)  # fmt: skip


def real_work(folder: Path) -> tuple[tuple[Work, NDArray[np.float32]], ...]:
    """Trained, pruned filters (SparseRT's ResNet-50 and MobileNetV1, SkimCaffe's AlexNet) as work, with their weights.

    `folder` holds them as FILE.npz, arrays named layer__shape__sPERCENT. Values are rounded to fp16, as for random
    weights. Files that are not there are left out; raises InputError when none is.
    """
    found = []
    for file, start, side in _REAL:
        path = folder / f"{file}.npz"
        if not path.is_file():
            continue
        with np.load(path) as arrays:
            name = next(key for key in arrays if key.startswith(start) and "_bias_" not in key)
            weight = np.asarray(arrays[name], np.float32)
        weight = weight.reshape(*weight.shape, *(1, 1)[: 4 - weight.ndim]).astype(np.float16).astype(np.float32)
        oc, ic, kernel, _ = weight.shape
        sparsity = 1.0 - float(np.count_nonzero(weight)) / weight.size
        title = f"{file} {start} {ic}-{oc}@{side}" if oc != ic else f"{file} {start} {oc}@{side}"
        found.append((Work(title, square(oc, ic, kernel, side), (1, 32), (round(sparsity, 4),)), weight))
    if not found:
        names = ", ".join(dict.fromkeys(f"{file}.npz" for file, _, _ in _REAL))
        raise InputError(f"{folder}: none of the files {names} is there. Name the folder that holds them.")
    return tuple(found)


def square(
    oc: int, ic: int, kernel: int, side: int, stride: int = 1, pad: int | None = None, group: int = 1
) -> Geometry:
    """A square kernel on a square map; pads are kernel // 2 unless given."""
    pads = kernel // 2 if pad is None else pad
    return Geometry(
        oc=oc, ic=ic, kh=kernel, kw=kernel, h=side, w=side,
        stride=(stride, stride), pads=(pads, pads, pads, pads), group=group,
    )  # fmt: skip


def _resnet50_3x3() -> tuple[Work, ...]:
    return tuple(Work(f"{c}@{side}", square(c, c, 3, side)) for c, side in ((64, 56), (128, 28), (256, 14), (512, 7)))


def _resnet50_1x1() -> tuple[Work, ...]:
    """Every distinct 1x1 of ResNet-50 v1.5, the strided shortcuts included; side is the input's."""
    shapes: dict[tuple[int, int, int, int], None] = {}
    ic, side = 64, 56
    for stage in range(4):
        width, stride = 64 << stage, 1 if stage == 0 else 2
        shapes[(width, ic, side, 1)] = None
        shapes[(4 * width, ic, side, stride)] = None
        ic, side = 4 * width, side // stride
        shapes[(4 * width, width, side, 1)] = None
        shapes[(width, ic, side, 1)] = None
    return tuple(
        Work(f"{ic}-{oc}@{side}" + ("s2" if stride == 2 else ""), square(oc, ic, 1, side, stride))
        for oc, ic, side, stride in shapes
    )


def _paper() -> tuple[Work, ...]:
    """The A100 and the Nano setting; the large one's output channels in steps of 16, the sparsities in steps of 2 %."""
    zeros = (0.90, 0.92, 0.94, 0.96, 0.98)
    large = [Work(f"32-{oc}@256", square(oc, 32, 3, 256), (32,), zeros) for oc in range(48, 129, 16)]
    nano = [Work(f"16-{oc}@128", square(oc, 16, 3, 128), (8,), zeros) for oc in (32, 40, 48)]
    return (*large, *nano)


_ESCOIN: tuple[tuple[str, int, int, int, int, int, float], ...] = (
    # name, ic, oc, kernel, side, group, zeros %; "same" pads, stride 1
    ("caffenet_conv2", 96, 256, 5, 27, 2, 85.65),
    ("caffenet_conv3", 256, 384, 3, 13, 1, 93.10),
    ("caffenet_conv4", 384, 384, 3, 13, 2, 91.81),
    ("caffenet_conv5", 384, 256, 3, 13, 2, 88.49),
    ("googlenet_conv2_3x3", 64, 192, 3, 56, 1, 81.65),
    ("googlenet_3a_3x3", 96, 128, 3, 28, 1, 90.09),
    ("googlenet_3b_3x3", 128, 192, 3, 28, 1, 90.47),
    ("googlenet_4a_3x3", 96, 208, 3, 14, 1, 87.97),
    ("googlenet_4b_3x3", 112, 224, 3, 14, 1, 96.11),
    ("googlenet_4c_3x3", 128, 256, 3, 14, 1, 94.90),
    ("googlenet_4d_3x3", 144, 288, 3, 14, 1, 92.41),
    ("googlenet_4e_3x3", 160, 320, 3, 14, 1, 98.70),
    ("googlenet_5a_3x3", 160, 320, 3, 7, 1, 96.24),
    ("googlenet_5b_3x3", 192, 384, 3, 7, 1, 94.95),
    ("googlenet_3a_5x5", 16, 32, 5, 28, 1, 84.56),
    ("googlenet_3b_5x5", 32, 96, 5, 28, 1, 88.55),
    ("googlenet_4a_5x5", 16, 48, 5, 14, 1, 83.76),
    ("googlenet_4b_5x5", 24, 64, 5, 14, 1, 87.40),
    ("googlenet_4c_5x5", 24, 64, 5, 14, 1, 88.01),
    ("googlenet_4d_5x5", 32, 64, 5, 14, 1, 90.39),
    ("googlenet_4e_5x5", 32, 128, 5, 14, 1, 94.42),
    ("googlenet_5a_5x5", 32, 128, 5, 7, 1, 93.40),
    ("googlenet_5b_5x5", 48, 128, 5, 7, 1, 94.87),
)
_ESCOIN_RESNET50: tuple[tuple[int, int, str, tuple[float, ...]], ...] = (
    (64, 56, "2", (88.00, 83.97, 80.79)),
    (128, 28, "3", (91.76, 91.91, 95.50, 91.13)),
    (256, 14, "4", (96.55, 97.47, 97.15, 96.76, 96.84, 96.84)),
    (512, 7, "5", (97.78, 98.03, 97.92)),
)
"""Channels, side, stage and zeros % of branch2b in blocks a, b, c ... (Caffe's variant: stride on the 1x1)."""


def _escoin() -> tuple[Work, ...]:
    """Sparsities as SkimCaffe's README states them."""
    works = [
        Work(name, square(oc, ic, kernel, side, group=group), (128,), (round(percent / 100, 4),))
        for name, ic, oc, kernel, side, group, percent in _ESCOIN
    ]
    for channels, side, stage, blocks in _ESCOIN_RESNET50:
        for block, percent in zip("abcdef", blocks, strict=False):
            share = (round(percent / 100, 4),)
            works.append(Work(f"resnet50_{stage}{block}_branch2b", square(channels, channels, 3, side), (32,), share))
    return tuple(works)


def _im2win() -> tuple[Work, ...]:
    table = (
        (3, 227, 96, 11, 4), (3, 231, 96, 11, 4), (3, 227, 64, 7, 2), (64, 224, 64, 7, 2), (96, 24, 256, 5, 1),
        (256, 12, 512, 3, 1), (3, 224, 64, 3, 1), (64, 112, 128, 3, 1), (64, 56, 64, 3, 1), (128, 28, 128, 3, 1),
        (256, 14, 256, 3, 1), (512, 7, 512, 3, 1),
    )  # fmt: skip
    return tuple(
        Work(f"cv{index}", square(oc, ic, kernel, side, stride, pad=0), (128,))
        for index, (ic, side, oc, kernel, stride) in enumerate(table, start=1)
    )


def _mobilenet_v1_1x1() -> tuple[Work, ...]:
    """The nine distinct pointwise shapes at 224x224, at the 90 % that SparseRT pruned them to."""
    table = (
        (32, 64, 112), (64, 128, 56), (128, 128, 56), (128, 256, 28), (256, 256, 28), (256, 512, 14), (512, 512, 14),
        (512, 1024, 7), (1024, 1024, 7),
    )  # fmt: skip
    return tuple(Work(f"{ic}-{oc}@{side}", square(oc, ic, 1, side), sparsities=(0.9,)) for ic, oc, side in table)


def _small() -> tuple[Work, ...]:
    """One property of a shape each, all small enough for a float64 reference in numpy."""
    shapes = {
        "plain": square(16, 8, 3, 8),
        "odd": Geometry(oc=17, ic=5, kh=3, kw=3, h=9, w=11, pads=(1, 1, 1, 1)),
        "one_channel": square(1, 1, 3, 6),
        "first_layer": square(8, 3, 3, 10),
        "many_inputs": square(6, 300, 3, 5),
        "many_outputs": square(130, 4, 3, 5),
        "map7": square(24, 16, 3, 7),
        "map1": square(12, 16, 3, 1),
        "map1_1x1": square(12, 16, 1, 1),
        "wide": Geometry(oc=9, ic=6, kh=3, kw=3, h=2, w=67, pads=(1, 1, 1, 1)),
        "tall": Geometry(oc=9, ic=6, kh=3, kw=3, h=67, w=2, pads=(1, 1, 1, 1)),
        "no_pad": square(10, 7, 3, 9, pad=0),
        "pad2": square(10, 7, 3, 6, pad=2),
        "pad_bottom_right": Geometry(oc=8, ic=6, kh=3, kw=3, h=8, w=8, stride=(2, 2), pads=(0, 0, 1, 1)),
        "pad_top_left": Geometry(oc=8, ic=6, kh=3, kw=3, h=8, w=8, stride=(2, 2), pads=(1, 1, 0, 0)),
        "1x1": square(20, 12, 1, 9),
        "1x1_stride2": square(20, 12, 1, 9, 2),
        "stride2": square(12, 10, 3, 13, 2),
        "stride2_even": square(12, 10, 3, 12, 2),
        "stride_2_1": Geometry(oc=8, ic=6, kh=3, kw=3, h=9, w=10, stride=(2, 1), pads=(1, 1, 1, 1)),
        "dilation2": Geometry(oc=8, ic=6, kh=3, kw=3, h=11, w=10, pads=(2, 2, 2, 2), dilation=(2, 2)),
        "dilation_1_3": Geometry(oc=8, ic=6, kh=3, kw=3, h=8, w=13, pads=(1, 3, 1, 3), dilation=(1, 3)),
        "dilation2_stride2": Geometry(
            oc=8, ic=6, kh=3, kw=3, h=12, w=11, stride=(2, 2), pads=(2, 2, 2, 2), dilation=(2, 2)
        ),
        "group2": square(12, 8, 3, 9, group=2),
        "group4_stride2": square(16, 12, 3, 10, 2, group=4),
        "depthwise": square(10, 10, 3, 9, group=10),
        "1x3": Geometry(oc=8, ic=6, kh=1, kw=3, h=7, w=9, pads=(0, 1, 0, 1)),
        "3x1": Geometry(oc=8, ic=6, kh=3, kw=1, h=7, w=9, pads=(1, 0, 1, 0)),
        "2x2": square(8, 6, 2, 8, 2, pad=0),
        "5x5": square(8, 6, 5, 9),
        "5x5_stride2": square(8, 6, 5, 11, 2),
        "7x7_stride2": square(8, 3, 7, 17, 2),
    }
    return tuple(Work(name, geometry, (1, 2, 3), (0.5, 0.9)) for name, geometry in shapes.items())


LISTS: Mapping[str, tuple[Work, ...]] = MappingProxyType(
    {
        "resnet50_3x3": _resnet50_3x3(),
        "resnet50_1x1": _resnet50_1x1(),
        "paper": _paper(),
        "escoin": _escoin(),
        "im2win": _im2win(),
        "mobilenet_v1_1x1": _mobilenet_v1_1x1(),
        "small": _small(),
    }
)
"""Every list by name."""
