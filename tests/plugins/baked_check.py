"""Baked nodes made from cases, and checked: their code interpreted, compared with float64 and read back."""

from __future__ import annotations

import numpy as np
from conv_cases import Case

from sparsedeploy.devices import find
from sparsedeploy.layer import Precision
from sparsedeploy.plugins import epilogue
from sparsedeploy.plugins.baked import BAKED
from sparsedeploy.plugins.baked.interpret import run_plan
from sparsedeploy.plugins.kernel import BuildOptions, Config
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.reference import conv2d

H200 = find("h200")
RELATIVE = {"f32": 2.0**-22, "hf": 2.0**-10, "h2": 2.0**-9}
"""Error allowed, as a share of an output's sum of magnitudes: a few roundings of fp32 sums, of fp16 output, of half2 sums."""
MODES: dict[str, tuple[Precision, Config, str]] = {
    "f32": ("fp32", {}, "f32"),
    "hf": ("fp16", {"sums": 32}, "hf"),
    "h2": ("fp16", {}, "h2"),
    "h2 rows": ("fp16", {"pair_rows": 1}, "h2"),
}


def build(
    case: Case, config: Config, precision: Precision, archs: tuple[int, ...] = (90,), batch: int = 1
) -> SparseConv:
    return BAKED.build(case.layer, case.weight, case.bias, H200, config, BuildOptions(precision, batch, archs)).node


def check(case: Case, node: SparseConv, mode: str, arch: int) -> None:
    """The interpreted plan against float64, element by element; an output that nothing wrote is NaN and fails."""
    element = np.float32 if node.precision == "fp32" else np.float16
    x = case.x.astype(element)
    residual = None if case.residual is None else case.residual.astype(element)
    y = run_plan(node.plan, node.images, node.precision, x, residual, node.constants, node.geometry, arch=arch)
    weight, bias = BAKED.unpack(node)
    np.testing.assert_array_equal(weight, case.weight if mode != "h2" else case.weight.astype(np.float16))
    added = None if residual is None else residual.astype(np.float64)
    expected = epilogue.apply(node.epilogue, conv2d(x, weight, bias, node.geometry), added)
    size = conv2d(np.abs(x), np.abs(weight), None if bias is None else np.abs(bias), node.geometry)
    size += 0 if residual is None else np.abs(residual)
    bad = ~(
        np.abs(y - expected) <= RELATIVE[mode] * np.maximum(1, np.log2(size.size)) * size + 2.0**-14 * (mode != "f32")
    )
    assert not bad.any(), f"{bad.sum()} of {bad.size} wrong, first at {np.argwhere(bad)[0]}"
