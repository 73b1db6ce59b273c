"""Verification catches what is wrong: a changed word, a wrong layer, NaN, a missing output; and passes what is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from small_models import model_of, network, one_conv, saved, sparse_weight
from typer.testing import CliRunner, Result

from sparsedeploy import verify as module
from sparsedeploy.bundle import DENSE_MODEL, MANIFEST, SPARSE_MODEL, hashes
from sparsedeploy.cli import app
from sparsedeploy.convert import Conversion, Request, convert, verdict
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.devices import find
from sparsedeploy.errors import CheckFailed, InputError
from sparsedeploy.plugins import kernel_named
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.verify import (
    FP16_TOLERANCE,
    FP32_TOLERANCE,
    LAYERS,
    Subject,
    Verification,
    check_weights,
    compare,
    load_feeds,
    random_feeds,
    require,
    run_file,
    tolerance_for,
    verify,
)

Array = NDArray[Any]
NANO = find("jetson-nano")


def converted(proto: onnx.ModelProto, folder: Path, **options: Any) -> Conversion:
    """Converted with every eligible layer sparse, as `csr` unless asked otherwise."""
    options.setdefault("layers", ("*=csr",))
    return convert(Request(saved(proto, folder), NANO, folder / "out", **options))


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def tamper(out: Path, layer: str, constant: int, word: int, value: int) -> None:
    """Change one word of a node's constant, and the manifest's hash so that only verification can notice."""
    model = onnx.load(out / SPARSE_MODEL)
    tensor = next(t for t in model.graph.initializer if t.name == f"{layer}.constant{constant}")
    words = numpy_helper.to_array(tensor).copy()
    words[word] ^= value
    tensor.CopyFrom(numpy_helper.from_array(words, tensor.name))
    onnx.save(model, out / SPARSE_MODEL)
    forge(out)


def forge(out: Path) -> None:
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["files"] = hashes(out)
    (out / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("kernel", ["csr", "packed"])
@pytest.mark.parametrize("value", [1 << 30, 1 << 4, -1], ids=["high bit", "low bit", "all bits"])
def test_a_changed_word_is_caught_with_the_layers_name(kernel: str, value: int, tmp_path: Path) -> None:
    """Wherever it lies: in a value, in an index, in the offsets, in the bias."""
    done = converted(network(), tmp_path, layers=(f"*={kernel}",))
    pristine = (done.out / SPARSE_MODEL).read_bytes()
    node = next(n for n in read_nodes(load(done.out / SPARSE_MODEL)).values() if n.layer == "c1")
    weights = len(node.constants) - (1 if node.plan else 0)  # the last is a table of the code
    for constant in range(weights):
        (done.out / SPARSE_MODEL).write_bytes(pristine)
        tamper(done.out, "c1", constant, 1, value)
        assert call("verify", done.out, "--hashes-only").exit_code == 0
        result = call("verify", done.out)
        assert result.exit_code == 1, (constant, result.output)
        assert "layer c1" in " ".join(result.stderr.split())
        assert "Traceback" not in result.stderr


def test_a_lost_field_is_a_failed_check(tmp_path: Path) -> None:
    done = converted(network(), tmp_path)
    model = onnx.load(done.out / SPARSE_MODEL)
    node = next(node for node in model.graph.node if node.op_type == "SparseConv2d")
    at = next(i for i, entry in enumerate(node.attribute) if entry.name == "constants")
    del node.attribute[at]
    onnx.save(model, done.out / SPARSE_MODEL)
    forge(done.out)
    result = call("verify", done.out)
    assert result.exit_code == 1
    assert "the bundle is damaged" in " ".join(result.stderr.split())


def subject_of(done: Conversion, original: Path) -> Subject:
    sparse = load(done.out / SPARSE_MODEL)
    weights = {}
    for node in read_nodes(sparse).values():
        weights[node.layer] = kernel_named("csr").unpack(node)
    return Subject(sparse, weights, done.out / DENSE_MODEL, original, FP32_TOLERANCE)


FEEDS = {"x": np.random.default_rng(3).random((1, 16, 8, 8)).astype(np.float32)}


class Wrong:
    """The csr kernel with one layer's weights doubled when read back."""

    def __init__(self, layer: str) -> None:
        self.layer, self.real = layer, kernel_named("csr")

    def unpack(self, node: SparseConv) -> tuple[Array, Array | None]:
        weight, bias = self.real.unpack(node)
        return (weight * 2 if node.layer == self.layer else weight), bias


@pytest.mark.parametrize("layer", ["c1", "c2", "c3"])
def test_bisection_finds_the_first_wrong_layer(layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = converted(network(), tmp_path)
    subject = subject_of(done, tmp_path / "model.onnx")
    monkeypatch.setattr(module, "kernel_named", lambda name: Wrong(layer))
    result = verify(subject, FEEDS, "test")
    assert result.first_diverging_layer == layer
    assert [check.layer for check in result.weights if not check.passed] == [layer]
    final = next(entry for entry in result.comparisons if entry.model == SPARSE_MODEL)
    assert not final.passed
    by_layer = next(entry for entry in result.comparisons if entry.model == LAYERS)
    assert sum(not output.passed for output in by_layer.outputs) == 1  # the others, on right inputs, are right
    with pytest.raises(CheckFailed, match=f"layer {layer}"):
        require(result)
    only_outputs = result.model_copy(update={"weights": ()})
    with pytest.raises(CheckFailed, match=rf"First diverging layer: {layer}\..*--layer '{layer}=dense'"):
        require(only_outputs)


def test_a_wrong_layer_behind_a_saturated_output_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything after the layer is multiplied by zero: only the layer's own output shows it."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1] * 4),
        helper.make_node("Clip", ["c", "low", "high"], ["d"]),
        helper.make_node("Add", ["d", "one"], ["y"]),
    ]
    constants = {
        "w": sparse_weight((16, 16, 3, 3)), "low": np.float32(-1e-9).reshape(()), "high": np.float32(1e-9).reshape(()),
        "one": np.ones(1, np.float32),
    }  # fmt: skip
    nodes[1:1] = [helper.make_node("Identity", ["c"], ["i"])]
    nodes[2].input[0] = "i"
    done = converted(model_of(nodes, constants, {"x": ["N", 16, 8, 8]}, ["y"]), tmp_path)
    subject = subject_of(done, tmp_path / "model.onnx")
    monkeypatch.setattr(module, "kernel_named", lambda name: Wrong("conv"))
    result = verify(subject, FEEDS, "test")
    assert next(entry for entry in result.comparisons if entry.model == SPARSE_MODEL).passed
    assert result.first_diverging_layer == "conv"
    assert not result.passed


def test_a_right_bundle_passes_and_says_how_many(tmp_path: Path) -> None:
    done = converted(network(), tmp_path)
    assert done.verification.passed
    assert done.verification.against_original
    assert done.verification.sparse_nodes_verified == 3
    assert verdict(done.verification).startswith("3 sparse nodes read back and run against ONNX Runtime on model.onnx")
    assert {output.tolerance for entry in done.verification.comparisons for output in entry.outputs} == {FP32_TOLERANCE}
    assert done.manifest.evidence.outputs
    text = (done.out / "verify.json").read_text()
    assert Verification.from_json(text, "verify.json") == done.verification


def test_no_sparse_node_reads_nothing_was_converted(tmp_path: Path) -> None:
    done = converted(network(sparsity=0.0), tmp_path, layers=())
    assert done.verification.sparse_nodes_verified == 0
    assert verdict(done.verification).startswith("nothing was converted")
    assert not done.manifest.evidence.weights
    result = call("verify", done.out)
    assert result.exit_code == 0
    assert "nothing was converted" in result.output


def test_batch_of_eight(tmp_path: Path) -> None:
    done = converted(network(), tmp_path, batch=8)
    assert done.manifest.inputs == {"x": (8, 16, 8, 8)}
    assert done.verification.passed
    assert done.verification.comparisons[0].outputs[0].top1_agreement == 1.0


def custom_network() -> onnx.ModelProto:
    proto = network()
    proto.graph.node.append(helper.make_node("Secret", ["y"], ["z"], domain="org.example"))
    proto.opset_import.append(helper.make_opsetid("org.example", 1))
    proto.graph.output[0].name = "z"
    return proto


@pytest.mark.parametrize("kernel", ["csr", "packed"])
def test_a_model_onnx_runtime_cannot_run_is_checked_layer_by_layer(kernel: str, tmp_path: Path) -> None:
    request = {"layers": (f"*={kernel}",), "keep_going": True}
    done = converted(custom_network(), tmp_path, **request)
    (comparison,) = done.verification.comparisons
    assert (comparison.reference, len(comparison.outputs)) == ("float64 convolution", 3)
    assert "ONNX Runtime cannot run model.onnx" in done.verification.note
    assert not done.manifest.evidence.outputs
    tamper(done.out, "c2", 0, 0, 1 << 30)
    assert call("verify", done.out).exit_code == 1


def test_a_double_model_is_checked_as_a_whole_too(tmp_path: Path) -> None:
    done = converted(network(TensorProto.DOUBLE), tmp_path)
    assert [entry.reference for entry in done.verification.comparisons] == ["float64 convolution", DENSE_MODEL]
    assert done.verification.passed
    assert not done.verification.against_original


def test_nan_fails_and_is_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1] * 4),
        helper.make_node("Mul", ["c", "big"], ["m"]),
        helper.make_node("Sub", ["m", "m"], ["y"]),
    ]
    constants = {"w": sparse_weight((16, 16, 3, 3)), "big": np.full(1, np.inf, np.float32)}
    with pytest.raises(CheckFailed, match=r"NaN: .* in the reference.*--input"):
        converted(model_of(nodes, constants, {"x": ["N", 16, 8, 8]}, ["y"]), tmp_path)
    assert not (tmp_path / "out").exists()


def check(expected: Any, got: Any, tolerance: float = FP32_TOLERANCE) -> module.OutputCheck:
    (result,) = compare({"y": np.asarray(expected)}, {"y": np.asarray(got)}, tolerance)
    return result


def test_compare_holds_the_error_against_the_largest() -> None:
    expected = np.array([1.0, -100.0, 3.0], np.float32)
    assert check(expected, expected + np.float32(0.009)).passed
    bad = check(expected, expected + np.float32(0.011))
    assert not bad.passed
    assert bad.margin == pytest.approx(0.01 / 0.011, rel=1e-2)
    assert bad.max_rel == pytest.approx(0.011, rel=1e-2)
    same = check(expected, expected)
    assert (same.max_abs, same.margin) == (0.0, float("inf"))
    assert same.cosine == pytest.approx(1.0)


def test_compare_fails_on_what_is_no_number() -> None:
    one, nan, inf = np.ones(4, np.float32), np.full(4, np.nan, np.float32), np.full(4, np.inf, np.float32)
    for expected, got in ((one, nan), (nan, one), (nan, nan), (one, inf), (inf, one), (inf, -inf)):
        result = check(expected, got)
        assert not result.passed
        assert result.problem
        assert result.margin == 0.0
    assert check(inf, inf).passed


def test_compare_fails_on_missing_outputs_and_other_shapes() -> None:
    one = np.ones((2, 3), np.float32)
    (missing,) = compare({"y": one}, {"z": one}, 1.0)
    assert (missing.passed, missing.problem) == (False, "it is missing")
    assert "[3, 2]" in check(one, one.T).problem
    assert not check(one, one[:, :2], 1.0).passed
    assert not check(one[:0], one, 1.0).passed
    assert check(one[:0], one[:0]).passed
    assert check(np.zeros((0, 5), np.float32), np.zeros((0, 5), np.float32)).passed


def test_compare_zeros() -> None:
    zero = np.zeros(3, np.float32)
    assert check(zero, zero).passed
    assert not check(zero, zero + np.float32(1e-6), FP16_TOLERANCE).passed


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.bool_])
def test_integers_are_equal_or_not(dtype: Any) -> None:
    expected = (np.arange(1000) % 2).astype(dtype)
    assert check(expected, expected).passed
    got = expected.copy()
    got[0] = 1 - got[0]
    assert not check(expected, got, FP32_TOLERANCE).passed  # 1 of 1000 is more than 1e-4
    assert check(expected, got, FP16_TOLERANCE).passed
    got[:20] = 1 - expected[:20]
    failed = check(expected, got, FP16_TOLERANCE)
    assert not failed.passed
    assert failed.problem == "20 of 1000 elements are not equal"


def test_a_near_integer_is_not_near_enough() -> None:
    """A class index of 999 for 998 is another class, though 0.1 % off."""
    assert not check(np.array([998]), np.array([999]), FP16_TOLERANCE).passed


def test_other_types_compare_too() -> None:
    half = np.ones(3, np.float16)
    assert check(half, half.astype(np.float32)).passed
    assert check(np.array(["a", "b"]), np.array(["a", "b"])).passed
    assert not check(np.array(["a", "b"]), np.array(["a", "c"])).passed


def test_top1_is_counted_by_rows() -> None:
    expected = np.eye(4, dtype=np.float32)
    got = expected.copy()
    got[0] = np.roll(got[0], 1)
    assert check(expected, got).top1_agreement == 0.75
    assert check(expected[:, :1], expected[:, :1]).top1_agreement is None


def test_tolerances_are_fixed(tmp_path: Path) -> None:
    done = converted(network(), tmp_path)
    exact = list(read_nodes(load(done.out / SPARSE_MODEL)).values())
    packed = [replace(node, kernel="packed") for node in exact]
    assert tolerance_for(exact, "fp32") == 1e-4
    assert tolerance_for([], "fp32") == 1e-4
    assert tolerance_for(packed, "fp32") == 1e-2
    assert tolerance_for(exact, "fp16") == 1e-2
    assert tolerance_for(exact, "fp32", ["fp32", "fp64"]) == 1e-4
    assert tolerance_for(exact, "fp32", ["fp32", "fp16"]) == 1e-2
    assert tolerance_for(exact, "fp32", ["bf16"]) == 1e-2


def test_weights_must_be_the_models(tmp_path: Path) -> None:
    done = converted(network(), tmp_path)
    node = next(iter(read_nodes(load(done.out / SPARSE_MODEL)).values()))
    weight, bias = kernel_named("csr").unpack(node)
    assert bias is not None
    assert check_weights(node, weight, bias).passed
    at = tuple(index[0] for index in np.nonzero(weight))
    for change in (np.float32(np.nextafter(weight[at], 9)), np.float32(0), np.float32(np.nan)):
        other = weight.copy()
        other[at] = change
        assert not check_weights(node, other, bias).passed
    assert not check_weights(node, weight, bias + 1).passed
    assert not check_weights(node, weight, bias[:1]).passed
    assert not check_weights(node, weight, None).passed
    short = check_weights(node, weight[:, :4], bias)
    assert (short.passed, "carries a weight" in short.problem) == (False, True)


def several() -> onnx.ModelProto:
    """Two inputs, an integer one; outputs of floats, of classes, of booleans and of no element at all."""
    nodes = [
        helper.make_node("Conv", ["a", "w"], ["c"], "conv", pads=[1] * 4),
        helper.make_node("Add", ["c", "b"], ["y"]),
        helper.make_node("ArgMax", ["y"], ["classes"], axis=1, keepdims=0),
        helper.make_node("Greater", ["y", "zero"], ["positive"]),
        helper.make_node("Slice", ["y", "start", "start"], ["empty"]),
        helper.make_node("Gather", ["y", "which"], ["picked"], axis=1),
    ]
    constants: dict[str, Array] = {
        "w": sparse_weight((8, 16, 3, 3)), "zero": np.zeros(1, np.float32), "start": np.zeros(1, np.int64),
    }  # fmt: skip
    proto = model_of(nodes, constants, {"a": ["N", 16, 8, 8], "b": ["N", 8, 8, 8]}, ["y", "empty", "picked"])
    proto.graph.input.append(helper.make_tensor_value_info("which", TensorProto.INT64, [3]))
    proto.graph.output.append(helper.make_tensor_value_info("classes", TensorProto.INT64, ["N", 8, 8]))
    proto.graph.output.append(helper.make_tensor_value_info("positive", TensorProto.BOOL, ["N", 8, 8, 8]))
    return proto


def test_several_inputs_and_outputs_of_every_type(tmp_path: Path) -> None:
    done = converted(several(), tmp_path)
    assert done.verification.passed
    names = [output.name for output in done.verification.comparisons[0].outputs]
    assert names == ["y", "empty", "picked", "classes", "positive"]
    assert call("verify", done.out).exit_code == 0


def test_feeds_are_seeded_and_of_the_models_types(tmp_path: Path) -> None:
    model = load(saved(several(), tmp_path))
    shapes: dict[str, tuple[int, ...]] = {"a": (2, 16, 8, 8), "b": (2, 8, 8, 8), "which": (3,)}
    one, two = random_feeds(model, shapes, 1), random_feeds(model, shapes, 1)
    assert all(np.array_equal(one[name], two[name]) for name in shapes)
    assert not np.array_equal(one["a"], random_feeds(model, shapes, 2)["a"])
    assert [one[name].dtype for name in shapes] == [np.float32, np.float32, np.int64]
    half = random_feeds(Model(network(TensorProto.FLOAT16), tmp_path), {"x": (1, 16, 8, 8)})
    assert half["x"].dtype == np.float16


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"a": np.zeros((1, 16, 8, 8), np.float32)}, "no array named 'b'"),
        ({"which": np.zeros(3)}, "which holds float64"),
        ({"which": np.array(["x", "y", "z"])}, "which holds"),
        ({"a": np.zeros((1, 16, 8, 9), np.float32)}, r"a is \(1, 16, 8, 9\)"),
    ],
)
def test_bad_feeds(arrays: dict[str, Array], text: str, tmp_path: Path) -> None:
    model = load(saved(several(), tmp_path))
    shapes: dict[str, tuple[int, ...]] = {"a": (1, 16, 8, 8), "b": (1, 8, 8, 8), "which": (3,)}
    good: dict[str, Array] = random_feeds(model, shapes)
    given = {**(good if "named" not in text else {}), **arrays}
    np.savez(tmp_path / "x.npz", **given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=text):
        load_feeds(tmp_path / "x.npz", model, shapes)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:-30])
    with pytest.raises(InputError, match=r"cut\.npz"):
        load_feeds(tmp_path / "cut.npz", model, shapes)


def test_own_inputs_are_verified_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.full((1, 16, 8, 8), -3.0))
    done = converted(network(), tmp_path, inputs=tmp_path / "x.npz")
    assert {entry.inputs for entry in done.verification.comparisons} == {"seed 0", "x.npz"}
    result = call("verify", done.out, "--input", tmp_path / "x.npz", "--json")
    assert {entry.inputs for entry in Verification.from_json(result.stdout, "stdout").comparisons} == {"x.npz"}


def test_feeds_are_cast_to_what_a_file_takes(tmp_path: Path) -> None:
    node = helper.make_node("Add", ["x", "x"], ["y"])
    path = saved(model_of([node], {}, {"x": [2]}, ["y"], TensorProto.DOUBLE), tmp_path)
    (y,) = run_file(path, {"x": np.ones(2, np.float32), "unused": np.ones(1)}).values()
    assert y.dtype == np.float64
    assert y.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError):
        run_file(path, {"x": np.ones(3, np.float32)})


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (TensorProto.FLOAT16, "fp32"),
        (TensorProto.FLOAT16, "fp16"),
        (TensorProto.BFLOAT16, "fp32"),
        (TensorProto.BFLOAT16, "fp16"),
        (TensorProto.DOUBLE, "fp16"),
        (TensorProto.FLOAT, "fp16"),
    ],
)
@pytest.mark.parametrize("kernel", ["csr", "packed"])
def test_every_type_converts_and_verifies(kind: int, precision: Any, kernel: str, tmp_path: Path) -> None:
    done = converted(network(kind), tmp_path, precision=precision, layers=(f"*={kernel}",))
    assert done.verification.sparse_nodes_verified == 3
    nodes = read_nodes(load(done.out / SPARSE_MODEL))
    assert {node.precision for node in nodes.values()} == {precision}
    wanted = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16}[precision]
    kinds = {
        value.name: value.type.tensor_type.elem_type
        for value in onnx.load(done.out / SPARSE_MODEL).graph.value_info
        if value.name in nodes
    }
    assert set(kinds.values()) == {wanted}
    assert call("verify", done.out).exit_code == 0


def test_one_conv_of_a_symbolic_batch(tmp_path: Path) -> None:
    done = converted(one_conv(sparse_weight((8, 8, 3, 3)), pads=[1] * 4), tmp_path)
    assert done.verification.passed


def test_fp16_is_also_judged_with_every_value_rounded(tmp_path: Path) -> None:
    """ONNX Runtime's CPU kernels keep fp16 values in fp32 between nodes: an overflow there stays unseen without rounding."""
    weight = np.full((8, 8, 1, 1), 100.0, np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 4, 4])
    down = numpy_helper.from_array(np.float32(1e-4), "down")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "first"),
        helper.make_node("Conv", ["a", "w"], ["b"], "second"),
        helper.make_node("Mul", ["b", "down"], ["y"], "scale"),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w"), down])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    with pytest.raises(CheckFailed, match="rounded to fp16"):
        convert(Request(path, find("a100"), tmp_path / "half", "fp16"))
    fine = convert(Request(path, find("a100"), tmp_path / "full"))
    assert fine.verification.passed
    assert fine.verification.note == ""


def test_saturated_sigmoid_outputs_are_not_held_to_less_than_their_own_error(tmp_path: Path) -> None:
    """A detector's map on noise: every value near 1e-5, where ONNX Runtime's Sigmoid itself is off by 1e-7."""
    weight = sparse_weight((4, 8, 3, 3), 0.0)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 12, 12])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 12, 12])
    four = {name: np.full(4, value, np.float32) for name, value in (("s", 0.7), ("b", -11.0), ("m", 0.1), ("v", 1.3))}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Sigmoid", ["n"], ["p"]),
        helper.make_node("Identity", ["p"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in {"w": weight * 0.01, **four}.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    done = convert(Request(path, find("a100"), tmp_path / "out"))
    (output,) = done.verification.comparisons[0].outputs
    assert output.largest < 1e-4
    assert output.floor == module.RANGE_ONE_ERROR
    assert module.range_one(load(path)) == {"y"}
    assert done.nothing is not None
    assert done.nothing.startswith("0 % zeros")
