"""What the tests of scripts/ share: a stand-in for the GPU, and results with numbers made by a formula."""

from __future__ import annotations

from typing import Any

import numpy as np
from bench_device import Checked, Dense, Timing, WrongResultError
from bench_results import LAB_PAPER, DenseRow, Missing, Results, Row

from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.models.shapes import work
from sparsedeploy.plugins import kernel_named
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.reference import conv2d

DENSE_US = {"fp32": 40.0, "tf32": 12.0, "fp16": 8.0}


class StandIn:
    """Computes what a node carries in numpy and compares it with the weights it is given; its times are counts."""

    between = "nothing: a stand-in"

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self.dense_calls, self.sparse_calls = wrong, 0, 0

    def describe(self) -> tuple[str, str, dict[str, str]]:
        """No device."""
        return "stand-in", "0", {"torch": "none"}

    def clocks(self) -> str:
        """No clocks."""
        return "no clock"

    def floors(self) -> tuple[float, float]:
        """Of an H200."""
        return 0.7, 4.2

    def dense(self, g: Geometry, n: int, cold: bool) -> dict[str, Dense]:
        """DENSE_US for every layer."""
        self.dense_calls += 1
        return {name: Dense("NCHW", Timing(us, 0.1), us + 1 if cold else None) for name, us in DENSE_US.items()}

    def sparse(
        self, key: tuple[Any, ...], node: SparseConv, weight: Any, n: int, sums: str, cold: bool
    ) -> tuple[Checked, Timing, float | None]:
        """4 us, once the node's own weights give the layer's result."""
        self.sparse_calls += 1
        if node.kernel == self.wrong:
            raise WrongResultError("relative error 1.0e+00, allowed 1e-06")
        assert all(image.kind == "cubin" and image.data[:4] == b"\x7fELF" for image in node.images)
        del key
        if node.kernel == "baked":  # its weights are read from PTX, which a worker has left behind
            return Checked(0.0, 0.0), Timing(4.0, 0.1), 6.0 if cold else None
        carried, _ = kernel_named(node.kernel).unpack(node)
        x = np.random.default_rng(n).standard_normal((n, node.geometry.ic, node.geometry.h, node.geometry.w))
        want, got = (conv2d(x, w, None, node.geometry) for w in (weight, carried))
        error = float(np.linalg.norm(want - got) / np.linalg.norm(want))
        assert error < 1e-6, sums
        return Checked(error, error), Timing(4.0, 0.1), 6.0 if cold else None


def row(case: str, geometry: Geometry, n: int, sparsity: float, us: float, **changes: Any) -> Row:
    """A row with a time; the rest says nothing."""
    nnz = round((1 - sparsity) * geometry.oc * geometry.ic // geometry.group * geometry.kh * geometry.kw)
    values: dict[str, Any] = {
        "case": case, "geometry": geometry, "n": n, "sparsity": sparsity, "nnz": nnz, "kernel": "baked", "precision": "fp32",
        "config": {}, "rank": 0, "error": 1e-7, "worst": 1e-6, "us": us, "spread_us": 0.1, "cold_us": us + 2,
        "bounds_us": {"fma": us / 2, "memory": us / 3}, "predicted_us": us, "code_bytes": 1, "constant_bytes": 1,
        "registers": 1, "spill_bytes": 0, "build_s": 0.0,
    }  # fmt: skip
    return Row(**(values | changes))


def dense_rows(case: str, geometry: Geometry, n: int, times: dict[str, float]) -> list[DenseRow]:
    """The rows of cuDNN for a layer."""
    return [
        DenseRow(case=case, geometry=geometry, n=n, precision=name, layout="NCHW", us=us, spread_us=0.1, cold_us=us + 1)  # type: ignore[arg-type]
        for name, us in times.items()
    ]


def results(rows: list[Row], dense: list[DenseRow], missing: tuple[Missing, ...] = ()) -> Results:
    """Results around rows."""
    return Results(
        command="a test", commit="", source_sha256="0" * 64, device="NVIDIA H200", driver="0", clocks=("", ""), versions={},
        launch_floor_us=0.7, copy_tbs=4.2, between="", seconds=0.0, rows=tuple(rows), dense=tuple(dense), missing=missing,
    )  # fmt: skip


def paper_results(precision: Precision = "fp32") -> Results:
    """Every point of the list `paper`: times in proportion to nonzeros plus the bytes' time."""
    rows, dense = [], []
    for entry in work("paper"):
        g, (n,) = entry.geometry, entry.batches
        dense += dense_rows(f"paper/{entry.name}", g, n, {"fp32": g.macs * n / 3e7, "tf32": 1.0, "fp16": 1.0})
        for sparsity in entry.sparsities:
            us = g.macs * n * (1 - sparsity) / 2e7 + n * (g.ic + g.oc) * g.h * g.w / 1e6
            for kernel, factor in (("baked", 1.0), ("packed", 3.0), (LAB_PAPER, 8.0)):
                rows.append(row(f"paper/{entry.name}", g, n, sparsity, us * factor, kernel=kernel, precision=precision))
    return results(rows, dense)
