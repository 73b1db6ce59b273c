"""The interpreter as part of verification: the code that ships is run, and wrong code fails with the layer's name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_models import one_conv, saved, sparse_weight
from typer.testing import CliRunner

from sparsedeploy import code
from sparsedeploy.bundle import MANIFEST, SPARSE_MODEL, VERIFY, hashes, read_manifest
from sparsedeploy.cli import app
from sparsedeploy.code import check_code, check_cubins
from sparsedeploy.convert import Conversion, Request, convert, verdict
from sparsedeploy.converters.load import load
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.devices import find
from sparsedeploy.errors import CheckFailed, MachineError
from sparsedeploy.layer import Activation, ConvLayer, Epilogue, Geometry, Precision
from sparsedeploy.plugins.baked import BAKED
from sparsedeploy.plugins.kernel import BuildOptions
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.reading import count_zeros
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


def assembled(tmp_path: Path, *more: str, target: str = "a100") -> tuple[Path, SparseConv]:
    """A bundle made on the command line, of one layer run by baked code, and its node."""
    path = saved(one_conv(sparse_weight((16, 8, 3, 3), 0.8), (12, 13), pads=[1] * 4), tmp_path)
    out = tmp_path / "out"
    words = ["convert", str(path), "-t", target, "-o", str(out), "--layer", "*=baked", "--no-engine", *more]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (node,) = read_nodes(load(out / SPARSE_MODEL)).values()
    return out, node


def test_convert_ships_machine_code_and_verify_assembles_it_again(tmp_path: Path) -> None:
    out, node = assembled(tmp_path)
    assert [image.kind for image in node.images] == ["ptx", "cubin"]
    recorded = json.loads((out / VERIFY).read_text())["cubins"]
    assert [(entry["passed"], entry["compiler"].startswith("ptxas V12.9")) for entry in recorded] == [(True, True)]
    result = CliRunner().invoke(app, ["verify", str(out)])
    assert result.exit_code == 0, result.output
    assert "ptxas V12.9.86 makes the same machine code of it" in " ".join(result.output.split())


@pytest.mark.parametrize(("target", "more"), [("a100", ["--no-assemble"]), ("jetson-nano", [])])
def test_no_machine_code_where_it_is_not_wanted(target: str, more: list[str], tmp_path: Path) -> None:
    _, node = assembled(tmp_path, *more, target=target)
    assert [image.kind for image in node.images] == ["ptx"]


def test_the_nanos_machine_code_is_made_on_request(tmp_path: Path) -> None:
    _, node = assembled(tmp_path, "--assemble", target="jetson-nano")
    assert [(image.arch, image.kind) for image in node.images] == [(53, "ptx"), (53, "cubin")]


def test_a_tampered_cubin_fails(tmp_path: Path) -> None:
    """One bit of it, with the node's table of images and the manifest's hashes made to fit."""
    out, node = assembled(tmp_path)
    ptx, cubin = node.images
    data = bytearray(cubin.data)
    data[len(data) // 2] ^= 1
    changed = replace(node, images=(ptx, replace(cubin, data=bytes(data))))
    (check,) = check_cubins(changed)
    assert not check.passed
    assert "makes other bytes" in check.problem
    model = onnx.load(out / SPARSE_MODEL)
    old, new = node.fields(), changed.fields()
    (sparse,) = (n for n in model.graph.node if n.op_type == "SparseConv2d")
    for attribute in sparse.attribute:
        if attribute.name in ("images", "image_table"):
            assert not np.array_equal(old[attribute.name], new[attribute.name])
            attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, attribute_value(new[attribute.name])))
    onnx.save(model, out / SPARSE_MODEL)
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps({**manifest, "files": hashes(out)}))
    result = CliRunner().invoke(app, ["verify", str(out)])
    assert result.exit_code == 1
    assert "its machine code for sm_80 fp32 is not that of its PTX" in " ".join(result.output.split())


def attribute_value(value: object) -> object:
    return numpy_helper.from_array(value) if isinstance(value, np.ndarray) else list(value)  # type: ignore[call-overload]


def test_without_a_compiler_a_cubin_is_neither_proven_nor_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, node = converted(tmp_path, "baked")
    (ptx,) = node.images
    made = replace(node, images=(ptx, replace(ptx, kind="cubin", data=b"whatever")))

    def missing() -> str:
        raise MachineError("no ptxas here")

    monkeypatch.setattr(code, "tool_version", missing)
    (check,) = check_cubins(made)
    assert not check.passed
    assert not check.checked
    result = done.verification.model_copy(update={"cubins": (check,)})
    assert result.passed
    assert not result.code_proven
    assert "1 cubins not verified: no ptxas is here" in verdict(result)
    require(result)
    (alone,) = check_cubins(replace(made, images=made.images[1:]))
    assert "0 PTX images lie beside it" in alone.problem


@pytest.mark.parametrize("activation", ["none", "relu", "clip"])
def test_sums_over_several_blocks_are_compared_where_all_were_run(activation: Activation) -> None:
    """Input channels split over blocks, their sums added by a second launch: with some blocks interpreted, the sums of the
    others are unknown, and neither right nor wrong, also behind a ReLU that makes 0 of them.
    """
    g = Geometry(oc=16, ic=32, kh=3, kw=3, h=24, w=20, pads=(1, 1, 1, 1))
    weight = sparse_weight(g.weight_shape, 0.8)
    epilogue = Epilogue(bias=True, activation=activation, low=0.0, high=6.0 if activation == "clip" else 0.0)
    layer = ConvLayer(
        name="c",
        weight="w",
        dtype="fp32",
        shape=weight.shape,
        geometry=g,
        zeros=count_zeros(weight, 1),
        epilogue=epilogue,
    )
    bias = np.linspace(-1, 1, 16, dtype=np.float32)
    for splits in (2, 4):
        config = {"channels": 8, "pixels": 64, "splits": splits, "combine": 2}
        node = BAKED.build(layer, weight, bias, find("a100"), config, BuildOptions("fp32", 1, (80,))).node
        check = check_code(node, blocks=2)
        assert 0 < check.pixels < check.of
        assert check.passed, check
