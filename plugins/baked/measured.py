"""Schedules that won on a device: what the cost model, right within a fifth on average, cannot tell apart.

A row holds for one shape, dtype and range of batches, between 4 and 20 % nonzeros (up to 7 % where it was measured at 5 %);
its time was measured at 10 or 5 %, fp16 with half2 sums. Measured by scripts/bench_kernels.py and
scripts/lab/bench_baked.py (scripts/lab/NOTES.md).
"""

from __future__ import annotations

from typing import NamedTuple

from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins.kernel import Config

LEAST_DENSITY, MOST_DENSITY = 0.04, 0.20
_SPARSE_DENSITY = 0.07


class Winner(NamedTuple):
    """The best schedule found for a square convolution, padded by half its kernel, on an H200."""

    oc: int
    ic: int
    side: int
    precision: Precision
    batches: tuple[int, int]
    config: Config
    us: float
    """At the larger end of `batches` for 32, at 1 else."""
    k: int = 3
    stride: int = 1
    density: float = 0.10
    """Share of nonzeros at which it was measured."""


_FEW, _SOME, _MANY = (1, 2), (6, 12), (16, 64)
H200: tuple[Winner, ...] = (
    Winner(
        128, 128, 28, "fp16", _MANY,
        {"channels": 43, "splits": 2, "combine": 1, "pixels": 640, "stage_channels": 4, "step": 64, "dependent": 1}, 13.5,
        density=0.05,
    ),
    Winner(
        256, 256, 14, "fp16", _MANY,
        {
            "channels": 43, "splits": 4, "combine": 1, "pieces_first": 1, "pixels": 640, "stage_channels": 4, "step": 64,
            "dependent": 1,
        }, 16.7, density=0.05,
    ),
    Winner(
        512, 512, 7, "fp16", _MANY,
        {
            "channels": 35, "splits": 8, "combine": 1, "pieces_first": 1, "pixels": 784, "stage_channels": 4, "step": 64,
            "dependent": 1, "parts": 2,
        }, 27.4, density=0.05,
    ),
    Winner(64, 64, 56, "fp32", _FEW, {"channels": 32, "splits": 4, "combine": 1, "pixels": 224, "stage_channels": 16, "ring": 4, "dependent": 1}, 3.7),
    Winner(64, 64, 56, "fp32", _MANY, {"channels": 64, "pixels": 384, "min_blocks": 2, "dependent": 1}, 22.9),
    Winner(
        128, 128, 28, "fp32", _FEW,
        {
            "channels": 26, "splits": 8, "combine": 1, "pieces_first": 1, "pixels": 262, "stage_channels": 16, "ring": 2,
            "interleave": 2,
        }, 4.71,
    ),
    Winner(
        128, 128, 28, "fp32", _MANY,
        {"channels": 64, "splits": 2, "combine": 1, "pieces_first": 1, "pixels": 768, "dependent": 1}, 24.7,
    ),
    Winner(
        256, 256, 14, "fp32", _FEW,
        {
            "channels": 18, "splits": 8, "combine": 1, "pieces_first": 1, "pixels": 196, "stage_channels": 16, "ring": 2,
            "interleave": 4,
        }, 4.67,
    ),
    Winner(
        256, 256, 14, "fp32", _SOME,
        {
            "channels": 37, "splits": 8, "combine": 1, "pieces_first": 1, "pixels": 784, "stage_channels": 4, "ring": 2,
            "interleave": 4, "dependent": 1,
        }, 14.2,
    ),
    Winner(
        256, 256, 14, "fp32", _MANY,
        {"channels": 32, "splits": 2, "combine": 1, "pixels": 784, "ring": 2, "interleave": 2, "dependent": 1}, 26.4,
    ),
    Winner(
        512, 512, 7, "fp32", _FEW,
        {"channels": 32, "splits": 8, "combine": 1, "pixels": 49, "stage_channels": 32}, 23.0,
    ),
    Winner(
        512, 512, 7, "fp32", _SOME,
        {
            "channels": 35, "splits": 8, "combine": 1, "pieces_first": 1, "pixels": 392, "stage_channels": 4, "ring": 2,
            "interleave": 4, "dependent": 1, "parts": 2,
        }, 14.4,
    ),
    Winner(
        512, 512, 7, "fp32", _MANY,
        {
            "channels": 35, "splits": 4, "combine": 1, "pieces_first": 1, "pixels": 784, "stage_channels": 4, "ring": 2,
            "interleave": 4, "dependent": 1, "parts": 2,
        }, 28.6,
    ),
    Winner(
        512, 256, 14, "fp32", _MANY,
        {
            "channels": 35, "splits": 4, "combine": 1, "pieces_first": 1, "pixels": 784, "stage_channels": 4, "ring": 2,
            "interleave": 2, "dependent": 1, "parts": 2,
        }, 38.0, 3, 2,
    ),
    Winner(
        256, 64, 56, "fp32", _MANY,
        {
            "channels": 64, "pieces_first": 1, "pixels": 352, "columns": 352, "stage_channels": 8, "ring": 4, "min_blocks": 2,
            "dependent": 1, "stream": 1,
        }, 40.5, 1,
    ),
    Winner(64, 64, 56, "fp32", _MANY, {"channels": 64, "pixels": 352, "columns": 352, "stage_channels": 8, "ring": 4, "dependent": 1, "stream": 1}, 14.8, 1),
    Winner(64, 256, 56, "fp32", _MANY, {"channels": 64, "pixels": 352, "columns": 352, "stage_channels": 8, "ring": 4, "dependent": 1, "stream": 1}, 37.9, 1),
    Winner(128, 256, 56, "fp32", _MANY, {"channels": 64, "pixels": 352, "columns": 352, "stage_channels": 8, "ring": 4, "dependent": 1, "stream": 1}, 71.5, 1),
    Winner(128, 512, 28, "fp32", _MANY, {"channels": 64, "pixels": 400, "columns": 400, "stage_channels": 8, "ring": 4, "dependent": 1, "stream": 1}, 23.9, 1),
    Winner(256, 512, 28, "fp32", _MANY, {"channels": 64, "pixels": 400, "columns": 400, "stage_channels": 8, "ring": 4, "dependent": 1, "stream": 1}, 50.1, 1),
    Winner(256, 1024, 14, "fp32", _MANY, {"channels": 64, "pixels": 256, "columns": 64, "splits": 2, "combine": 1, "stage_channels": 8, "ring": 4, "dependent": 1, "stream": 1}, 32.0, 1),
    Winner(512, 128, 28, "fp32", _MANY, {"channels": 64, "pixels": 400, "columns": 400, "stage_channels": 8, "ring": 4, "dependent": 1, "stream": 1}, 36.8, 1),
    Winner(512, 1024, 14, "fp32", _MANY, {"channels": 64, "pixels": 256, "columns": 64, "stage_channels": 8, "ring": 4, "dependent": 1, "stream": 1}, 64.8, 1),
    Winner(512, 2048, 7, "fp32", _MANY, {"channels": 35, "splits": 4, "combine": 1, "pieces_first": 1, "pixels": 784, "stage_channels": 8, "ring": 2, "interleave": 4, "dependent": 1}, 40.2, 1),
    Winner(1024, 256, 14, "fp32", _MANY, {"channels": 64, "pixels": 256, "columns": 64, "stage_channels": 8, "ring": 4, "min_blocks": 2, "dependent": 1, "stream": 1}, 31.6, 1),
    Winner(2048, 512, 7, "fp32", _MANY, {"channels": 48, "pieces_first": 1, "pixels": 392, "stage_channels": 8, "ring": 2, "min_blocks": 2, "interleave": 4, "dependent": 1}, 34.5, 1),
    Winner(
        512, 256, 56, "fp32", _MANY,
        {
            "channels": 64, "pieces_first": 1, "pixels": 392, "columns": 392, "stage_channels": 8, "ring": 4, "min_blocks": 2,
            "dependent": 1, "gather": 1,
        }, 74.0, 1, 2,
    ),
    Winner(
        1024, 512, 28, "fp32", _MANY,
        {"channels": 86, "pieces_first": 1, "pixels": 392, "stage_channels": 8, "ring": 4, "dependent": 1, "stream": 1, "gather": 1}, 84.5, 1, 2,
    ),
    Winner(
        2048, 1024, 14, "fp32", _MANY,
        {"channels": 64, "pixels": 392, "stage_channels": 8, "ring": 2, "interleave": 4, "dependent": 1, "gather": 1}, 82.6, 1, 2,
    ),
    Winner(
        128, 64, 56, "fp32", _MANY,
        {"channels": 128, "pixels": 196, "columns": 196, "stage_channels": 8, "ring": 4, "min_blocks": 2, "dependent": 1}, 10.4, 1, 2,
    ),
    Winner(
        256, 128, 28, "fp32", _MANY,
        {"channels": 128, "pixels": 98, "columns": 98, "stage_channels": 8, "ring": 4, "min_blocks": 2, "dependent": 1}, 8.06, 1, 2,
    ),
    Winner(
        512, 256, 14, "fp32", _MANY,
        {
            "channels": 64, "splits": 2, "combine": 1, "pixels": 320, "stage_channels": 8, "ring": 4, "dependent": 1, "gather": 1,
        }, 12.9, 1, 2,
    ),
    Winner(
        128, 64, 56, "fp32", _FEW,
        {"channels": 11, "pixels": 136, "columns": 136, "stage_channels": 8, "ring": 4, "dependent": 1}, 3.23, 1, 2,
    ),
    Winner(
        512, 256, 14, "fp32", _FEW,
        {"channels": 43, "splits": 8, "combine": 1, "pieces_first": 1, "pixels": 49, "stage_channels": 32, "ring": 2}, 3.71, 1, 2,
    ),
    Winner(64, 64, 56, "fp32", _FEW, {"channels": 8, "pieces_first": 1, "pixels": 352, "columns": 352, "stage_channels": 8, "ring": 4}, 2.64, 1),
    Winner(64, 256, 56, "fp32", _FEW, {"channels": 22, "splits": 4, "combine": 1, "pieces_first": 1, "pixels": 352, "columns": 352, "stage_channels": 8, "ring": 4}, 4.63, 1),
    Winner(128, 256, 56, "fp32", _FEW, {"channels": 43, "splits": 4, "combine": 1, "pieces_first": 1, "pixels": 352, "columns": 352, "stage_channels": 8, "ring": 4}, 5.87, 1),
    Winner(128, 512, 28, "fp32", _FEW, {"channels": 64, "splits": 8, "combine": 1, "pieces_first": 1, "pixels": 160, "columns": 160, "stage_channels": 8, "ring": 4}, 4.85, 1),
    Winner(256, 64, 56, "fp32", _FEW, {"channels": 32, "pieces_first": 1, "pixels": 352, "columns": 352, "stage_channels": 8, "ring": 4}, 3.48, 1),
    Winner(256, 512, 28, "fp32", _FEW, {"channels": 64, "splits": 4, "combine": 1, "pieces_first": 1, "pixels": 160, "columns": 160, "stage_channels": 8, "ring": 4}, 7.34, 1),
    Winner(256, 1024, 14, "fp32", _FEW, {"channels": 64, "splits": 8, "combine": 1, "pieces_first": 1, "pixels": 64, "columns": 64, "stage_channels": 8, "ring": 4}, 8.02, 1),
    Winner(512, 128, 28, "fp32", _FEW, {"channels": 22, "pixels": 200, "columns": 200, "stage_channels": 8, "ring": 4}, 3.93, 1),
    Winner(512, 256, 56, "fp32", _FEW, {"channels": 64, "splits": 4, "combine": 1, "pieces_first": 1, "pixels": 160, "columns": 160, "stage_channels": 8, "ring": 4}, 7.43, 1, 2),
    Winner(1024, 256, 14, "fp32", _FEW, {"channels": 32, "pixels": 64, "columns": 64, "stage_channels": 8, "ring": 4}, 4.79, 1),
    Winner(
        64, 64, 56, "fp16", _FEW,
        {"channels": 32, "splits": 4, "combine": 1, "pixels": 224, "stage_channels": 16, "pair_rows": 1}, 4.03,
    ),
    Winner(64, 64, 56, "fp16", _MANY, {"channels": 64, "pixels": 192, "min_blocks": 2, "stage_channels": 8, "dependent": 1}, 12.3),
    Winner(
        128, 128, 28, "fp16", _FEW,
        {
            "channels": 32, "splits": 8, "combine": 1, "pieces_first": 1, "pixels": 196, "stage_channels": 16, "ring": 2,
            "pair_rows": 1,
        }, 5.14,
    ),
    Winner(128, 128, 28, "fp16", _MANY, {"channels": 22, "pixels": 640, "stage_channels": 8, "dependent": 1}, 22.1),
    Winner(
        256, 256, 14, "fp16", _MANY,
        {"channels": 43, "splits": 4, "combine": 1, "pieces_first": 1, "pixels": 640, "stage_channels": 8, "dependent": 1}, 24.0,
    ),
    Winner(
        64, 32, 256, "fp32", _MANY,
        {"channels": 64, "pixels": 256, "columns": 32, "min_blocks": 3, "ring": 6, "dependent": 1}, 240.0,
    ),
    Winner(
        64, 32, 256, "fp16", _MANY,
        {"channels": 64, "pixels": 320, "columns": 32, "min_blocks": 2, "stage_channels": 8, "dependent": 1}, 197.0,
    ),
)  # fmt: skip


def winner(geometry: Geometry, precision: Precision, batch: int, density: float) -> Winner | None:
    """The row for this layer at this batch, or None."""
    if not LEAST_DENSITY <= density <= MOST_DENSITY:
        return None
    for row in H200:
        pad = row.k // 2
        shape = Geometry(
            oc=row.oc, ic=row.ic, kh=row.k, kw=row.k, h=row.side, w=row.side, pads=(pad, pad, pad, pad),
            stride=(row.stride, row.stride),
        )  # fmt: skip
        near = density <= _SPARSE_DENSITY or row.density > _SPARSE_DENSITY  # sparse rows stand first
        if near and geometry == shape and precision == row.precision and row.batches[0] <= batch <= row.batches[1]:
            return row
    return None
