"""The main job: what ends up in the bundle, for every kind of model file and every way to ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from small_models import model_of, network, one_conv, saved, sparse_weight

from sparsedeploy import convert as module
from sparsedeploy.bundle import DENSE_MODEL, SPARSE_MODEL, check_hashes, read_manifest
from sparsedeploy.convert import Conversion, Request, convert
from sparsedeploy.converters.load import load, save
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.devices import find
from sparsedeploy.errors import CheckFailed, InputError
from sparsedeploy.layer import Precision
from sparsedeploy.plan import Plan
from sparsedeploy.plugins import kernel_named
from sparsedeploy.reverify import verify_bundle
from sparsedeploy.verify import Verification, verify

A100, NANO = find("a100"), find("jetson-nano")
Array = NDArray[Any]


def run(model: Path, **options: Any) -> Conversion:
    options.setdefault("layers", ("*=csr",))
    options.setdefault("out", model.parent / "out")
    options.setdefault("device", A100)
    return convert(Request(model, **options))


def outputs(path: Path, x: Array) -> list[Array]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": x}))


def ends(path: Path) -> tuple[int, int]:
    graph = onnx.load(path).graph
    return graph.input[0].type.tensor_type.elem_type, graph.output[0].type.tensor_type.elem_type


def test_the_bundle_says_what_it_is(tmp_path: Path) -> None:
    done = run(saved(network(), tmp_path), batch=2)
    manifest = read_manifest(done.out)
    assert manifest == done.manifest
    assert (manifest.model, manifest.target, manifest.sm, manifest.precision) == ("model.onnx", "a100", 80, "fp32")
    assert (manifest.batch, manifest.inputs, manifest.sparse_layers) == (2, {"x": (2, 16, 8, 8)}, 3)
    assert manifest.evidence.weights
    assert manifest.evidence.outputs
    assert not manifest.evidence.device
    plan = Plan.from_json((done.out / "plan.json").read_text(), "plan.json")
    assert plan == done.plan
    assert [entry.choice for entry in plan.layers] == ["csr"] * 3
    assert Verification.from_json((done.out / "verify.json").read_text(), "verify.json") == done.verification
    assert check_hashes(done.out) == 5


def test_weights_carried_are_the_files(tmp_path: Path) -> None:
    done = run(saved(network(), tmp_path))
    stored = {t.name: numpy_helper.to_array(t) for t in network().graph.initializer}
    for node in read_nodes(load(done.out / SPARSE_MODEL)).values():
        weight, bias = kernel_named("csr").unpack(node)
        np.testing.assert_array_equal(weight, stored["w" + node.layer[1:]])
        assert (bias is None) == (node.layer != "c1")


def test_a_converted_plan_converts_again_to_the_same_bundle(tmp_path: Path) -> None:
    model = saved(network(), tmp_path)
    first = run(model, layers=("c1=csr", "c2=packed", "c3=dense"))
    files = {path.name: path.read_bytes() for path in first.out.iterdir()}
    (tmp_path / "plan.json").write_bytes(files["plan.json"])
    second = run(model, plan=tmp_path / "plan.json", layers=())
    assert [entry.choice for entry in second.plan.layers] == ["csr", "packed", "dense"]
    assert (second.out / SPARSE_MODEL).read_bytes() == files[SPARSE_MODEL]
    assert (second.out / DENSE_MODEL).read_bytes() == files[DENSE_MODEL]


def test_a_config_that_the_kernel_refuses_is_named(tmp_path: Path) -> None:
    done = run(saved(network(), tmp_path))
    entry = done.plan.layers[0].model_copy(update={"config": {"tile": 3}})
    plan = done.plan.model_copy(update={"layers": (entry, *done.plan.layers[1:])})
    (tmp_path / "plan.json").write_text(plan.to_json())
    with pytest.raises(InputError, match=r"layers\.0\.config\.tile"):
        run(tmp_path / "model.onnx", plan=tmp_path / "plan.json", layers=())


def test_nothing_to_convert_is_a_dense_bundle(tmp_path: Path) -> None:
    done = run(saved(network(sparsity=0.0), tmp_path), layers=())
    assert done.nothing is not None
    assert done.nothing.startswith("0 % zeros")
    assert not (done.out / SPARSE_MODEL).exists()
    assert not done.manifest.executable
    assert done.manifest.evidence.outputs
    assert not done.manifest.evidence.weights
    assert "sparsedeploy prune" in done.scan.next_command


def test_fp16_keeps_fp32_at_the_ends(tmp_path: Path) -> None:
    done = run(saved(network(), tmp_path), precision="fp16")
    assert ends(done.out / DENSE_MODEL) == (TensorProto.FLOAT, TensorProto.FLOAT)
    kinds = {t.data_type for t in onnx.load(done.out / DENSE_MODEL).graph.initializer}
    assert kinds == {TensorProto.FLOAT16}


@pytest.mark.parametrize(("precision", "inner"), [("fp16", TensorProto.FLOAT16), ("fp32", TensorProto.FLOAT)])
def test_an_fp16_model_as_either(precision: Precision, inner: int, tmp_path: Path) -> None:
    """Its inputs and outputs stay fp16; --precision fp32 gives a graph whose inside is fp32 throughout."""
    done = run(saved(network(TensorProto.FLOAT16), tmp_path), precision=precision)
    for name in (DENSE_MODEL, SPARSE_MODEL):
        assert ends(done.out / name) == (TensorProto.FLOAT16, TensorProto.FLOAT16)
    assert {t.data_type for t in onnx.load(done.out / DENSE_MODEL).graph.initializer} == {inner}
    x = np.random.default_rng(1).random((1, 16, 8, 8)).astype(np.float16)
    (got,), (expected,) = outputs(done.out / DENSE_MODEL, x), outputs(tmp_path / "model.onnx", x)
    assert np.abs(got.astype(np.float64) - expected).max() <= 1e-2 * np.abs(expected).max()


def test_a_double_model_is_narrowed_throughout(tmp_path: Path) -> None:
    proto = network(TensorProto.DOUBLE)
    done = run(saved(proto, tmp_path))
    for name in (DENSE_MODEL, SPARSE_MODEL):
        graph = onnx.load(done.out / name).graph
        types = {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
        assert types == {TensorProto.FLOAT}
    assert any(note.startswith("double narrowed to fp32") for note in done.notes)
    x = np.random.default_rng(1).random((1, 16, 8, 8))
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    (got,) = outputs(done.out / DENSE_MODEL, x.astype(np.float32))
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("device", ["a100", "jetson-nano"])
def test_a_bfloat16_model_is_widened(device: str, tmp_path: Path) -> None:
    done = run(saved(network(TensorProto.BFLOAT16), tmp_path), device=find(device))
    plain = network()
    for tensor in plain.graph.initializer:
        value = numpy_helper.to_array(
            next(t for t in network(TensorProto.BFLOAT16).graph.initializer if t.name == tensor.name)
        )
        tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), tensor.name))
    x = np.random.default_rng(1).random((1, 16, 8, 8)).astype(np.float32)
    (got,), (expected,) = outputs(done.out / DENSE_MODEL, x), outputs(saved(plain, tmp_path, "plain.onnx"), x)
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


def test_external_data_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    onnx.save(network(), home / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    monkeypatch.chdir(tmp_path)
    for device in (A100, NANO):
        done = run(Path("home/m.onnx"), out=Path("out"), device=device, layers=("c1=csr",))
        assert done.verification.against_original
    monkeypatch.chdir(home)
    assert verify_bundle(Path("../out"), Path("m.onnx"), None, 0).passed
    assert sorted(path.name for path in home.iterdir()) == ["m.onnx", "w.bin"]


def test_a_model_too_large_for_one_message_is_written_with_a_side_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threshold is lowered instead of making 1.5 GB of weights."""
    monkeypatch.setattr(module, "save", lambda model, path: save(model, path, side_file_above=1000))
    proto = network(channels=32)
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    done = run(tmp_path / "m.onnx", layers=("c2=csr",))
    assert (done.out / f"{DENSE_MODEL}.data").is_file()
    assert check_hashes(done.out) >= 6
    done.out.rename(tmp_path / "moved")
    (tmp_path / "m.onnx").unlink()
    (tmp_path / "w.bin").unlink()
    monkeypatch.chdir("/")
    assert verify_bundle(tmp_path / "moved", None, None, 0).passed


def test_failing_verification_leaves_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(*words: Any, **options: Any) -> Verification:
        result = verify(*words, **options)
        check = result.weights[0].model_copy(update={"passed": False})
        return result.model_copy(update={"weights": (check,)})

    monkeypatch.setattr(module, "verify", worse)
    with pytest.raises(CheckFailed, match="layer c1"):
        run(saved(network(), tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_layers_that_cannot_be_carried_fall_back_in_words(tmp_path: Path) -> None:
    weight = sparse_weight((16, 16, 3, 3))
    weight[np.nonzero(weight)[0][0]] *= 1e-11  # no scale brings them and the others into range of fp16
    done = run(saved(one_conv(weight, pads=[1] * 4), tmp_path), layers=("*=packed",))
    (entry,) = done.plan.layers
    assert entry.choice == "csr"
    assert "packed cannot carry its weights" in entry.reason
    assert entry.predicted is not None
    assert entry.predicted.kernel == "csr"
    assert Plan.from_json((done.out / "plan.json").read_text(), "plan").layers == (entry,)


def test_all_zero_layer_and_empty_filters(tmp_path: Path) -> None:
    weight = sparse_weight((8, 8, 3, 3))
    weight[3] = 0
    for kernel in ("csr", "packed"):
        for values in (weight, np.zeros_like(weight)):
            done = run(saved(one_conv(values, pads=[1] * 4), tmp_path), layers=(f"*={kernel}",))
            assert done.verification.passed
            assert done.manifest.sparse_layers == 1


def test_layers_with_odd_names(tmp_path: Path) -> None:
    weight = sparse_weight((16, 16, 3, 3))
    names = ["", "a b/c[0]=d", "ünï 層"]
    nodes = [
        helper.make_node("Conv", [f"v{i}" if i else "x", "w"], [f"v{i + 1}"], name, pads=[1] * 4)
        for i, name in enumerate(names)
    ]
    model = saved(model_of(nodes, {"w": weight}, {"x": [1, 16, 8, 8]}, ["v3"]), tmp_path)
    done = run(model)
    assert [entry.name for entry in done.plan.layers] == ["v1", *names[1:]]
    assert done.manifest.sparse_layers == 3
    assert verify_bundle(done.out, None, None, 1).passed
    one = run(model, layers=("*=dense", "a b/c[0]=d=csr"))
    assert [entry.choice for entry in one.plan.layers] == ["dense", "csr", "dense"]


def test_stages_are_told_in_order(tmp_path: Path) -> None:
    told: list[str] = []
    run(saved(network(), tmp_path), tell=told.append)
    assert told[0] == "reading the model"
    assert told[-1] == "writing the report"
    assert "verifying" in told


def test_the_users_file_is_not_touched(tmp_path: Path) -> None:
    model = saved(network(), tmp_path)
    before = model.read_bytes()
    run(model, device=NANO, precision="fp16")
    assert model.read_bytes() == before
