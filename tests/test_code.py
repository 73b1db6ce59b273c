"""The interpreter as part of verification: the code that ships is run, and wrong code fails with the layer's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_models import one_conv, saved, sparse_weight

from sparsedeploy.bundle import SPARSE_MODEL, read_manifest
from sparsedeploy.code import check_code
from sparsedeploy.convert import Conversion, Request, convert, verdict
from sparsedeploy.converters.load import load
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.devices import find
from sparsedeploy.errors import CheckFailed
from sparsedeploy.layer import Precision
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.verify import require


def converted(
    tmp_path: Path, kernel: str, precision: Precision = "fp32", size: int = 30
) -> tuple[Conversion, SparseConv]:
    """One 3x3 convolution with borders that fit no tile, and its node."""
    path = saved(one_conv(sparse_weight((16, 8, 3, 3), 0.8), (size, size + 1), pads=[1] * 4), tmp_path)
    done = convert(Request(path, find("a100"), tmp_path / kernel, precision, layers=(f"*={kernel}",)))
    (node,) = read_nodes(load(tmp_path / kernel / SPARSE_MODEL)).values()
    return done, node


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kernel", ["packed", "csr", "baked"])
def test_code_of_every_kernel_is_interpreted(kernel: str, precision: Precision, tmp_path: Path) -> None:
    done, node = converted(tmp_path, kernel, precision)
    assert node.kernel == kernel
    (check,) = done.verification.code
    assert check.passed
    assert 0 < check.worst <= 1
    assert check.pixels > 0
    assert read_manifest(done.out).evidence.code
    assert "interpreted" in verdict(done.verification)


def test_samples_reach_every_border(tmp_path: Path) -> None:
    """All blocks: every element is computed; a few: fewer are, and none of them wrongly."""
    _, node = converted(tmp_path, "csr", size=60)
    whole, some = check_code(node, blocks=10**6), check_code(node, blocks=3)
    assert whole.pixels == whole.of
    assert 0 < some.pixels < some.of
    assert whole.passed
    assert some.passed


def test_wrong_code_is_found(tmp_path: Path) -> None:
    """An instruction nobody knows: the check fails and the message names the layer."""
    done, node = converted(tmp_path, "baked")
    (image,) = node.images
    text = image.data.decode()
    broken = check_code(
        replace(node, images=(replace(image, data=text.replace("fma.rn.f32", "fma.rn.f33", 1).encode()),))
    )
    assert not broken.passed
    failed = done.verification.model_copy(update={"code": (broken,)})
    with pytest.raises(CheckFailed, match=f"layer {node.layer}: its code"):
        require(failed)


def test_a_wrong_launch_plan_is_found(tmp_path: Path) -> None:
    """Half the grid leaves outputs unwritten; a swapped constant computes something else."""
    _, node = converted(tmp_path, "csr", size=60)
    (variant, *others) = node.plan
    (launch, *rest) = variant.ops
    one = replace(launch, args=tuple(reversed(launch.args)))  # type: ignore[arg-type]
    wrong = replace(node, plan=(replace(variant, ops=(one, *rest)), *others))
    assert not check_code(wrong).passed
    x, y, z = launch.grid  # type: ignore[union-attr]
    short = replace(launch, grid=(x.at_most(1), y.at_most(1), z.at_most(1)))  # type: ignore[arg-type]
    check = check_code(replace(node, plan=(replace(variant, ops=(short, *rest)), *others)))
    assert not check.passed
    assert "not written" in check.problem
