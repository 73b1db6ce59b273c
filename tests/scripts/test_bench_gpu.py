"""The benchmark on a real device: a right result passes and is timed, a wrong one does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench_kernels import Case, Job, make, straight_code, weight_of

from sparsedeploy.models.shapes import work

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Any:
    """The GPU of this machine."""
    from bench_device import Gpu

    return Gpu(straight_code())


def job(kernel: str, precision: str) -> Job:
    """A small layer."""
    (entry,) = work("small/map7")
    return Job(Case("small/map7", entry.geometry, 0.9, 2), kernel, precision, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["baked", "packed", "csr"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_right_result_is_timed_warm_and_cold(device: Any, kernel: str, precision: str) -> None:
    made = make(job(kernel, precision))
    assert made.node is not None
    sums = "fp32" if precision == "fp32" else "h2"
    weight = weight_of(job(kernel, precision).case)
    checked, timing, cold = device.sparse(("map7", precision), made.node, weight, 2, sums, True)
    assert checked.error < 6e-3
    assert 0.5 < timing.us < 100
    assert -1 < cold < 100


def test_a_wrong_result_is_refused(device: Any) -> None:
    from bench_device import WrongResultError

    made = make(job("packed", "fp32"))
    assert made.node is not None
    weight = np.array(weight_of(job("packed", "fp32").case))
    weight[0, 0, 0, 0] += 0.25
    with pytest.raises(WrongResultError, match="relative error"):
        device.sparse(("wrong",), made.node, weight, 2, "fp32", False)


def test_dense_times_cover_three_precisions(device: Any) -> None:
    (entry,) = work("small/map7")
    found = device.dense(entry.geometry, 2, True)
    assert set(found) == {"fp32", "tf32", "fp16"}
    assert all(0.5 < dense.timing.us < 200 for dense in found.values())
