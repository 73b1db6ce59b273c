"""Weights and biases behind constant nodes become initializers; everything else keeps its bytes and its results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import SHARED
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from sparsedeploy.converters.fold_constants import fold_constants
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load, save
from sparsedeploy.errors import InputError

Array = NDArray[Any]
RNG = np.random.default_rng(11)
MASK = RNG.random((8, 4, 3, 3)) < 0.1
DENSE = RNG.standard_normal(MASK.shape).astype(np.float32)
WEIGHT = np.where(MASK, DENSE, np.float32(0))
BIAS = RNG.standard_normal(8).astype(np.float32)
X = RNG.standard_normal((1, 4, 6, 6)).astype(np.float32)


def conv(weight: str = "w", bias: str = "", output: str = "y", name: str = "conv1", **attributes: object) -> NodeProto:
    names = ["x", weight] + ([bias] if bias else [])
    return helper.make_node("Conv", names, [output], name, **{"pads": [1, 1, 1, 1], **attributes})


def write(
    folder: Path,
    nodes: list[NodeProto],
    constants: Mapping[str, Array],
    outputs: Sequence[str] = ("y",),
    inputs: Sequence[str] = ("x",),
    opset: int = 13,
    ir_version: int = 8,
    external: bool = False,
) -> Path:
    """A model over x [1, 4, 6, 6] and other float inputs [4, 4], with untyped outputs where they are not y."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, X.shape if name == "x" else [4, 4]) for name in inputs
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list("NCHW")) for name in outputs]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    if ir_version < 4:
        values += [helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in tensors]
    graph = helper.make_graph(nodes, "g", values, ends, tensors)
    proto = helper.make_model(graph, ir_version=ir_version, opset_imports=[helper.make_opsetid("", opset)])
    path = folder / "model.onnx"
    onnx.save(proto, path, save_as_external_data=external, location="model.data", size_threshold=0)
    return path


def results(path: Path, feeds: Mapping[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # quicker on large weights
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [np.asarray(result) for result in session.run(None, dict(feeds))]


def assert_same(path: Path, model: Model, folder: Path, feeds: Mapping[str, Array] | None = None) -> None:
    """The folded model computes what the file does: 1e-5 of the largest output, NaN refused; the checker agrees."""
    feeds = {"x": X} if feeds is None else feeds
    (out,) = save(model, folder / "folded.onnx")
    onnx.checker.check_model(str(out))
    for before, after in zip(results(path, feeds), results(out, feeds), strict=True):
        assert np.isfinite(before).all()
        assert before.shape == after.shape
        assert np.abs(before - after).max(initial=0) <= 1e-5 * np.abs(before).max(initial=0)


def stored(model: Model, name: str) -> Array:
    return np.asarray(numpy_helper.to_array(model.graph.initializers[name]))


def op_types(model: Model) -> list[str]:
    return [node.op_type for node in model.proto.graph.node]


def constant(name: str, values: Array) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(values, name))


# --- what is folded


@pytest.mark.parametrize(
    ("nodes", "constants", "note"),
    [
        ([helper.make_node("Mul", ["o", "m"], ["w"])], {"o": DENSE, "m": MASK.astype(np.float32)}, "masks"),
        ([helper.make_node("Mul", ["m", "o"], ["w"])], {"o": DENSE, "m": MASK.astype(np.float32)}, "masks"),
        (
            [helper.make_node("Cast", ["m"], ["f"], to=TensorProto.FLOAT), helper.make_node("Mul", ["o", "f"], ["w"])],
            {"o": DENSE, "m": MASK},
            "masks",
        ),
        (
            [helper.make_node("Where", ["m", "o", "z"], ["w"])],
            {"o": DENSE, "m": MASK, "z": np.float32(0)},
            "masks",
        ),
        (
            [
                helper.make_node("Abs", ["o"], ["a"]),
                helper.make_node("Greater", ["a", "t"], ["g"]),
                helper.make_node("Cast", ["g"], ["f"], to=TensorProto.FLOAT),
                helper.make_node("Mul", ["o", "f"], ["w"]),
            ],
            {"o": WEIGHT, "t": np.float32(0)},
            "masks",
        ),
        (
            [constant("o", DENSE), constant("m", MASK.astype(np.float32)), helper.make_node("Mul", ["o", "m"], ["w"])],
            {},
            "masks",
        ),
        ([constant("w", WEIGHT)], {}, "weights behind Constant nodes"),
        (
            [helper.make_node("Transpose", ["hwio"], ["w"], perm=[3, 2, 0, 1])],
            {"hwio": np.ascontiguousarray(WEIGHT.transpose(2, 3, 1, 0))},
            "weights behind Transpose nodes",
        ),
        (
            [helper.make_node("Reshape", ["flat", "shape"], ["w"])],
            {"flat": WEIGHT.reshape(-1), "shape": np.array(WEIGHT.shape)},
            "weights behind Reshape nodes",
        ),
        (
            [constant("c", WEIGHT), helper.make_node("Identity", ["c"], ["w"])],
            {},
            "weights behind Constant and Identity nodes",
        ),
        (
            [helper.make_node("Mul", ["o", "scale"], ["w"])],
            {"o": WEIGHT, "scale": np.float32(1)},
            "weights behind Mul nodes",
        ),
        (
            [helper.make_node("Cast", ["d"], ["w"], to=TensorProto.FLOAT)],
            {"d": WEIGHT.astype(np.float64)},
            "weights behind Cast",
        ),
    ],
    ids=[
        "mul",
        "mul-first",
        "bool-cast",
        "where",
        "threshold",
        "constants",
        "constant",
        "transpose",
        "reshape",
        "identity-of-constant",
        "scale",
        "double",
    ],
)
@pytest.mark.parametrize("ir_version", [3, 8])
def test_weight_becomes_an_initializer(
    tmp_path: Path, nodes: list[NodeProto], constants: dict[str, Array], note: str, ir_version: int
) -> None:
    path = write(tmp_path, [*nodes, conv(bias="b")], {**constants, "b": BIAS}, ir_version=ir_version)
    model = load(path)
    last = model.proto.graph.node[-1].SerializeToString()
    folding = fold_constants(model)
    assert not folding.unfolded
    assert not folding.quantized
    assert op_types(model) == ["Conv"]
    assert model.proto.graph.node[0].SerializeToString() == last  # the value's name is kept
    assert set(model.graph.initializers) == {"w", "b"}
    assert {value.name for value in model.proto.graph.input} == ({"x", "w", "b"} if ir_version == 3 else {"x"})
    np.testing.assert_array_equal(stored(model, "w"), WEIGHT)
    assert any(entry.startswith(note) and entry.endswith("folded for 1 convolution") for entry in model.notes), (
        model.notes
    )
    assert_same(path, model, tmp_path)


def test_half_weight_behind_cast(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        [helper.make_node("Cast", ["h"], ["w"], to=TensorProto.FLOAT), conv()],
        {"h": WEIGHT.astype(np.float16)},
    )
    model = load(path)
    fold_constants(model)
    assert stored(model, "w").dtype == np.float32
    assert np.count_nonzero(stored(model, "w")) == np.count_nonzero(WEIGHT.astype(np.float16))
    assert any("grows by 0.00 MB, because 16-bit weights" in note for note in model.notes), model.notes
    assert_same(path, model, tmp_path)


@pytest.mark.parametrize("cast", [False, True])
def test_bfloat16(tmp_path: Path, cast: bool) -> None:
    """Onnxruntime multiplies no bfloat16 on the CPU; the reference in numpy does, and the stored type stays."""
    low = DENSE.astype(ml_dtypes.bfloat16)
    nodes = [helper.make_node("Mul", ["o", "m"], ["p" if cast else "w"])]
    nodes += [helper.make_node("Cast", ["p"], ["w"], to=TensorProto.FLOAT)] if cast else []
    model = load(write(tmp_path, [*nodes, conv()], {"o": low, "m": MASK.astype(ml_dtypes.bfloat16)}))
    assert fold_constants(model).unfolded == {}
    weight = stored(model, "w")
    assert weight.dtype == (np.float32 if cast else ml_dtypes.bfloat16)
    np.testing.assert_array_equal(weight.astype(np.float32), np.where(MASK, low.astype(np.float32), np.float32(0)))
    assert "masks folded for 1 convolution" in model.notes


def test_constant_of_shape(tmp_path: Path) -> None:
    value = numpy_helper.from_array(np.array([0.02], np.float32))
    path = write(
        tmp_path, [helper.make_node("ConstantOfShape", ["s"], ["w"], value=value), conv()], {"s": np.array(MASK.shape)}
    )
    model = load(path)
    fold_constants(model)
    np.testing.assert_array_equal(stored(model, "w"), np.full(MASK.shape, 0.02, np.float32))
    assert any("ConstantOfShape" in note and "stored in full" in note for note in model.notes)
    assert_same(path, model, tmp_path)


def test_bias_is_folded_too(tmp_path: Path) -> None:
    path = write(tmp_path, [helper.make_node("Neg", ["n"], ["b"]), conv(bias="b")], {"w": WEIGHT, "n": -BIAS})
    model = load(path)
    fold_constants(model)
    np.testing.assert_array_equal(stored(model, "b"), BIAS)
    assert_same(path, model, tmp_path)


def test_identity_is_looked_through_without_a_copy(tmp_path: Path) -> None:
    """One convolution reads the initializers, the other Identity outputs of them, as torch 1.13 exported it."""
    nodes = [
        helper.make_node("Identity", ["w"], ["w2"]),
        helper.make_node("Identity", ["w2"], ["w3"]),
        helper.make_node("Identity", ["b"], ["b2"]),
        conv("w", "b", "y1"),
        conv("w3", "b2", "y2", "conv2"),
        helper.make_node("Add", ["y1", "y2"], ["y"]),
    ]
    path = write(tmp_path, nodes, {"w": WEIGHT, "b": BIAS})
    model = load(path)
    fold_constants(model)
    assert op_types(model) == ["Conv", "Conv", "Add"]
    assert list(model.proto.graph.node[1].input) == ["x", "w", "b"]
    assert set(model.graph.initializers) == {"w", "b"}
    assert "weights behind Identity nodes read directly for 1 convolution" in model.notes
    assert_same(path, model, tmp_path)


def test_weight_in_a_side_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [helper.make_node("Mul", ["o", "m"], ["w"]), conv(bias="b")]
    path = write(tmp_path, nodes, {"o": DENSE, "m": MASK.astype(np.float32), "b": BIAS}, external=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = load(path)
    fold_constants(model)
    np.testing.assert_array_equal(stored(model, "w"), WEIGHT)
    assert_same(path, model, tmp_path / "elsewhere")


# --- sharing


def masked(extra: list[NodeProto]) -> list[NodeProto]:
    return [helper.make_node("Mul", ["o", "m"], ["w"], "mask"), conv(output="c"), *extra]


CONSTANTS = {"o": DENSE, "m": MASK.astype(np.float32)}


def test_shared_by_two_convolutions_folds_once(tmp_path: Path) -> None:
    nodes = masked(
        [
            conv(output="d", name="conv2", dilations=[2, 2], pads=[2, 2, 2, 2]),
            helper.make_node("Add", ["c", "d"], ["y"]),
        ]
    )
    path = write(tmp_path, nodes, CONSTANTS)
    model = load(path)
    fold_constants(model)
    assert op_types(model) == ["Conv", "Conv", "Add"]
    assert set(model.graph.initializers) == {"w"}
    assert "masks folded for 2 convolutions" in model.notes
    assert_same(path, model, tmp_path)


def branch(name: str, nodes: list[NodeProto]) -> GraphProto:
    return helper.make_graph(nodes, name, [], [helper.make_empty_tensor_value_info(f"{name}_out")])


@pytest.mark.parametrize("reader", ["output", "node", "body", "intermediate"])
def test_other_readers_keep_the_original(tmp_path: Path, reader: str) -> None:
    """A weight that is an output, read by another node or by an If body stays for them; only our Conv changes."""
    outputs = ["y"]
    if reader == "output":
        nodes, outputs = masked([helper.make_node("Relu", ["c"], ["y"])]), ["y", "w"]
    elif reader == "node":
        nodes = masked([helper.make_node("ReduceSum", ["w"], ["s"], "sum"), helper.make_node("Add", ["c", "s"], ["y"])])
    elif reader == "intermediate":
        nodes = [helper.make_node("Neg", ["o"], ["n"]), helper.make_node("Mul", ["n", "m"], ["w"]), conv(output="c")]
        nodes += [helper.make_node("ReduceSum", ["n"], ["s"]), helper.make_node("Add", ["c", "s"], ["y"])]
    else:
        bodies = {
            "then_branch": branch("then", [conv(output="then_out", name="inner")]),
            "else_branch": branch("else", [helper.make_node("Neg", ["c"], ["else_out"])]),
        }
        nodes = masked([constant("flag", np.array(True)), helper.make_node("If", ["flag"], ["i"], "if", **bodies)])
        nodes.append(helper.make_node("Add", ["c", "i"], ["y"]))
    path = write(tmp_path, nodes, CONSTANTS, outputs)
    model = load(path)
    untouched = [node.SerializeToString() for node in model.proto.graph.node if node.op_type != "Conv"]
    fold_constants(model)
    left = [node for node in model.proto.graph.node if node.op_type != "Conv"]
    if reader == "intermediate":
        untouched.pop(1)  # the Mul had no other reader
        assert [node.op_type for node in left] == ["Neg", "ReduceSum", "Add"]
        assert "o" in model.graph.initializers
    else:
        folded = next(node for node in model.proto.graph.node if node.op_type == "Conv").input[1]
        assert folded == "w_folded"
        np.testing.assert_array_equal(stored(model, folded), WEIGHT)
        assert set(model.graph.initializers) == {"o", "m", folded}
    assert [node.SerializeToString() for node in left] == untouched
    assert_same(path, model, tmp_path)


def test_part_of_a_split(tmp_path: Path) -> None:
    """A producer with several outputs goes only when none of them is read any more."""
    both = np.concatenate([WEIGHT, DENSE])
    split = helper.make_node("Split", ["both"], ["w", "w2"], axis=0)
    nodes = [
        split,
        conv("w", output="c"),
        conv("w2", output="d", name="conv2"),
        helper.make_node("Add", ["c", "d"], ["y"]),
    ]
    path = write(tmp_path, nodes, {"both": both})
    model = load(path)
    fold_constants(model)
    assert op_types(model) == ["Conv", "Conv", "Add"]
    assert "both" not in model.graph.initializers
    assert_same(path, model, tmp_path)


# --- what is not folded


def test_weight_that_depends_on_an_input(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["k", "r"], ["p"], "project"),
        helper.make_node("Reshape", ["p", "s"], ["w"], "foo"),
        conv(),
    ]
    constants = {"r": np.eye(4, dtype=np.float32), "s": np.array([4, 4, 1, 1])}
    path = write(tmp_path, [*nodes[:2], conv(pads=[0, 0, 0, 0])], constants, inputs=("x", "k"))
    model = load(path)
    before = model.proto.SerializeToString()
    folding = fold_constants(model)
    assert folding.unfolded == {"y": "weight is made by Reshape 'foo', which depends on the input 'k'"}
    assert model.proto.SerializeToString() == before
    assert model.notes == []


def test_weight_that_is_an_input(tmp_path: Path) -> None:
    model = load(write(tmp_path, [helper.make_node("Conv", ["x", "k4"], ["y"])], {}, inputs=("x", "k4")))
    assert fold_constants(model).unfolded == {"y": "weight is the input 'k4'"}


@pytest.mark.parametrize("wrapped", [False, True])
def test_random_is_not_constant(tmp_path: Path, wrapped: bool) -> None:
    noise = helper.make_node("RandomNormal", [], ["n" if wrapped else "w"], "noise", shape=list(MASK.shape), seed=1.0)
    nodes = [noise, *([helper.make_node("Neg", ["n"], ["w"], "neg")] if wrapped else []), conv()]
    model = load(write(tmp_path, nodes, {}))
    start = "weight is made by " + ("Neg 'neg', which depends on " if wrapped else "")
    assert fold_constants(model).unfolded == {"y": f"{start}RandomNormal 'noise', which draws random numbers"}
    assert "Conv" in op_types(model)
    assert len(op_types(model)) == len(nodes)


def test_control_flow_is_not_constant(tmp_path: Path) -> None:
    bodies = {
        "then_branch": branch("then", [helper.make_node("Neg", ["o"], ["then_out"])]),
        "else_branch": branch("else", [helper.make_node("Abs", ["o"], ["else_out"])]),
    }
    nodes = [constant("flag", np.array(True)), helper.make_node("If", ["flag"], ["w"], "if", **bodies), conv()]
    model = load(write(tmp_path, nodes, {"o": DENSE}))
    assert fold_constants(model).unfolded == {"y": "weight is made by If 'if', which is control flow"}


def test_foreign_operator_is_named_and_the_rest_is_folded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Decompress", ["o"], ["w1"], "d", domain="com.example"),
        conv("w1", output="c"),
        helper.make_node("Mul", ["o", "m"], ["w2"]),
        conv("w2", output="d", name="conv2"),
        helper.make_node("Add", ["c", "d"], ["y"]),
    ]
    model = load(write(tmp_path, nodes, CONSTANTS))
    assert fold_constants(model).unfolded == {"c": "weight is made by Decompress 'd' of domain com.example"}
    assert "w2" in model.graph.initializers
    assert "o" in model.graph.initializers


def test_one_that_cannot_be_evaluated_spoils_no_other(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["o", "bad"], ["w1"], "wrong"),
        conv("w1", output="c"),
        helper.make_node("Mul", ["o", "m"], ["w2"]),
        conv("w2", output="d", name="conv2"),
        helper.make_node("Add", ["c", "d"], ["y"]),
    ]
    model = load(write(tmp_path, nodes, {**CONSTANTS, "bad": np.array([7, -1, 3, 3])}))
    unfolded = fold_constants(model).unfolded
    assert set(unfolded) == {"c"}
    assert "Reshape 'wrong', which could not be evaluated" in unfolded["c"]
    np.testing.assert_array_equal(stored(model, "w2"), WEIGHT)


def test_absurd_size_is_not_evaluated(tmp_path: Path) -> None:
    nodes = [helper.make_node("ConstantOfShape", ["s"], ["w"], "huge"), conv()]
    model = load(write(tmp_path, nodes, {"s": np.array([1 << 20, 1 << 20, 3, 3])}))
    started = time.monotonic()
    unfolded = fold_constants(model).unfolded
    assert "'huge'" in unfolded["y"]
    assert "GB" in unfolded["y"]
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("what", ["nan", "bias"])
def test_folded_values_are_checked(tmp_path: Path, what: str) -> None:
    scale = np.full(MASK.shape, np.inf if what == "nan" else 1, np.float32)
    nodes = [
        helper.make_node("Mul", ["o", "m"], ["w"]),
        constant("b", BIAS[: 8 if what == "nan" else 7]),
        conv(bias="b"),
    ]
    model = load(write(tmp_path, nodes, {"o": DENSE, "m": scale}))
    with pytest.raises(InputError, match=r"conv1.*(NaN or infinite|need \[8\])"):
        fold_constants(model)


# --- quantised


def quantised(folder: Path, dtype: str, transposed: bool = False) -> tuple[Path, Array, Array]:
    """A weight in integers whose zero-point is not 0; returns the file, the integers and the float weight."""
    kind = np.dtype(dtype)
    zero = np.arange(8, dtype=kind) + (100 if dtype == "uint8" else -3)
    zero = zero.astype(kind)
    scale = np.linspace(0.01, 0.05, 8, dtype=np.float32)
    levels = RNG.integers(1, 20, MASK.shape).astype(kind)
    column = (slice(None), None, None, None)
    integers = np.where(MASK, zero[column] + levels, np.broadcast_to(zero[column], MASK.shape)).astype(kind)
    weight = (integers.astype(np.float32) - zero[column].astype(np.float32)) * scale[column]
    if transposed:
        integers = np.ascontiguousarray(integers.transpose(2, 3, 1, 0))
    nodes = [
        helper.make_node(
            "DequantizeLinear", ["q", "scale", "zero"], ["f" if transposed else "w"], axis=3 if transposed else 0
        )
    ]
    nodes += [helper.make_node("Transpose", ["f"], ["w"], perm=[3, 2, 0, 1])] if transposed else []
    nodes += [helper.make_node("DequantizeLinear", ["qb", "sb"], ["b"]), conv(bias="b")]
    constants = {"q": integers, "scale": scale, "zero": zero, "qb": np.arange(8, dtype=np.int32), "sb": np.float32(0.1)}
    return write(folder, nodes, constants), integers, weight


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_quantised_weight_is_described_and_left(tmp_path: Path, dtype: str, transposed: bool) -> None:
    path, _, weight = quantised(tmp_path, dtype, transposed)
    model = load(path)
    before = model.proto.SerializeToString()
    folding = fold_constants(model)
    assert folding.unfolded == {}
    found = folding.quantized["y"]
    assert (found.stored, found.dtype) == ("q", dtype)
    assert found.zero_point.dtype == np.dtype(dtype)
    assert found.zero_point.shape == (8,)
    np.testing.assert_allclose(np.asarray(found.zeros, np.float64), weight, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(found.zeros == 0, ~MASK)
    assert model.proto.SerializeToString() == before


@pytest.mark.parametrize("named", ["conv1", "y"])
def test_quantised_weight_is_folded_on_demand(tmp_path: Path, named: str) -> None:
    path, _, weight = quantised(tmp_path, "int8")
    model = load(path)
    folding = fold_constants(model, quantized=[named])
    assert folding.quantized == {}
    np.testing.assert_allclose(stored(model, "w"), weight, rtol=1e-6, atol=0)
    assert op_types(model) == ["Conv"]
    assert_same(path, model, tmp_path)


def test_weight_quantised_in_the_graph(tmp_path: Path) -> None:
    """QuantizeLinear then DequantizeLinear of a float weight, as quantisation-aware training exports it."""
    nodes = [
        helper.make_node("QuantizeLinear", ["o", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"]),
        conv(),
    ]
    model = load(write(tmp_path, nodes, {"o": WEIGHT, "s": np.float32(0.05), "z": np.int8(5)}))
    found = fold_constants(model).quantized["y"]
    assert (found.stored, found.dtype, int(found.zero_point)) == ("q", "int8", 5)
    np.testing.assert_array_equal(
        found.zeros, np.clip(np.rint(WEIGHT / np.float32(0.05)), -133, 122) * np.float32(0.05)
    )


# --- real files


SHAPES = {
    "32_dynamic_batch_hw_symbolic": {"x": (2, 32, 16, 16)},
    "33_dim_value_minus1": {"x": (2, 32, 16, 16)},
    "ch_PP-OCRv4_det_infer": {"x": (1, 3, 96, 64)},
    "ch_ppocr_mobile_v2.0_cls_infer": {"x": (2, 3, 48, 192)},
}
SLOW = {"light_vgg19", "light_bvlc_alexnet", "light_zfnet512"}
"""Their dense layers, made by ConstantOfShape at run time, take hundreds of megabytes."""


def files() -> list[object]:
    if SHARED is None:
        return []
    paths = sorted(path for name in ("cases", "models") for path in (SHARED / name).rglob("*.onnx"))
    return [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in paths]


def feeds_for(model: Model, name: str) -> dict[str, Array]:
    feeds: dict[str, Array] = {}
    for value in model.graph.inputs():
        shape = SHAPES.get(name, {}).get(value.name) or tuple(
            dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim
        )
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return feeds


@pytest.mark.parametrize("path", files())
def test_real_files_compute_the_same(path: Path, tmp_path: Path) -> None:
    model = load(path)
    convs = [node for node in model.proto.graph.node if node.op_type == "Conv"]
    other = {node.SerializeToString() for node in model.proto.graph.node if node.op_type != "Conv"}
    started = time.monotonic()
    folding = fold_constants(model)
    seconds = time.monotonic() - started
    assert folding.unfolded == {}
    assert seconds < 4  # densenet 121 takes 0.6 s on two quiet cores
    assert all(node.input[1] in model.graph.initializers for node in convs if node.output[0] not in folding.quantized)
    assert bool(folding.quantized) == path.stem.startswith("12_")
    assert {node.SerializeToString() for node in model.proto.graph.node if node.op_type != "Conv"} <= other
    assert_same(path, model, tmp_path, feeds_for(model, path.stem))


@pytest.mark.skipif(SHARED is None, reason="no shared model files here")
@pytest.mark.parametrize(
    "name",
    [
        "01_mask_mul",
        "02_mask_bool_cast_where",
        "04_constant_node_weight",
        "09_fp16_weight_cast_to_fp32",
        "31_weight_transposed_in_graph",
    ],
)
def test_zeros_of_the_cases(name: str) -> None:
    assert SHARED is not None
    model = load(SHARED / "cases" / f"{name}.onnx")
    fold_constants(model)
    weight = model.graph.array(next(node for node in model.proto.graph.node if node.op_type == "Conv").input[1])
    assert weight is not None
    assert weight.shape == (64, 32, 3, 3)
    assert round(100 * float(np.mean(weight == 0)), 1) == 90.4


# --- an Add that is a bias


def add(operand: str, value: str = "c", output: str = "y") -> NodeProto:
    return helper.make_node("Add", [value, operand], [output], f"add_{output}")


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1, 1)])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("opset", "ir_version"), [(11, 3), (13, 8)])
def test_constant_add_becomes_the_bias(
    tmp_path: Path, shape: tuple[int, ...], swap: bool, opset: int, ir_version: int
) -> None:
    """As Paddle writes it: Reshape(Constant, Constant)."""
    node = add("r")
    if swap:
        node.input[:] = ["r", "c"]
    nodes = [
        constant("b", BIAS),
        constant("s", np.array(shape)),
        helper.make_node("Reshape", ["b", "s"], ["r"]),
        conv(output="c"),
        node,
    ]
    path = write(tmp_path, nodes, {"w": WEIGHT}, opset=opset, ir_version=ir_version)
    model = load(path)
    fold_constants(model)
    assert op_types(model) == ["Conv"]
    (only,) = model.proto.graph.node
    assert list(only.output) == ["y"]
    assert np.array_equal(stored(model, only.input[2]), BIAS)
    assert "constant Add made the bias of 1 convolution" in model.notes
    assert_same(path, model, tmp_path)


def test_one_constant_behind_two_convolutions(tmp_path: Path) -> None:
    nodes = [conv(output="c"), add("r"), conv(output="d", name="conv2"), add("r", "d", "z")]
    path = write(tmp_path, nodes, {"w": WEIGHT, "r": BIAS.reshape(8, 1, 1)}, outputs=("y", "z"))
    model = load(path)
    fold_constants(model)
    assert op_types(model) == ["Conv", "Conv"]
    assert "r" not in model.graph.initializers
    assert_same(path, model, tmp_path)


def test_constant_that_something_else_reads_stays_for_it(tmp_path: Path) -> None:
    nodes = [conv(output="c"), add("r"), helper.make_node("Mul", ["y", "r"], ["z"])]
    path = write(tmp_path, nodes, {"w": WEIGHT, "r": BIAS.reshape(1, 8, 1, 1)}, outputs=("z",))
    model = load(path)
    fold_constants(model)
    assert op_types(model) == ["Conv", "Mul"]
    assert_same(path, model, tmp_path)


SQUARE = RNG.standard_normal((1, 8, 6, 6)).astype(np.float32)


@pytest.mark.parametrize(
    ("nodes", "constants", "outputs"),
    [
        # One value for all, one per row, one per pixel: no bias.
        ([conv(output="c"), add("r")], {"r": np.float32(3)}, ("y",)),
        ([conv(output="c"), add("r")], {"r": BIAS[:6].reshape(6, 1)}, ("y",)),
        ([conv(output="c"), add("r")], {"r": SQUARE}, ("y",)),
        # It would widen the output to two images.
        ([conv(output="c"), add("r")], {"r": np.stack([BIAS, BIAS]).reshape(2, 8, 1, 1)}, ("y",)),
        # Five dimensions make the output one more.
        ([conv(output="c"), add("r")], {"r": BIAS.reshape(1, 1, 8, 1, 1)}, ("y",)),
        # The convolution has a bias, or its own output is wanted elsewhere.
        ([conv(bias="b", output="c"), add("r")], {"b": BIAS, "r": BIAS.reshape(8, 1, 1)}, ("y",)),
        ([conv(output="c"), add("r")], {"r": BIAS.reshape(8, 1, 1)}, ("y", "c")),
        (
            [conv(output="c"), add("r"), helper.make_node("Relu", ["c"], ["z"])],
            {"r": BIAS.reshape(8, 1, 1)},
            ("y", "z"),
        ),
        # Doubled, or subtracted from.
        ([conv(output="c"), add("c")], {}, ("y",)),
        ([conv(output="c"), helper.make_node("Sub", ["c", "r"], ["y"])], {"r": BIAS.reshape(8, 1, 1)}, ("y",)),
    ],
)
def test_sums_that_are_no_bias_stay(
    tmp_path: Path, nodes: list[NodeProto], constants: dict[str, Array], outputs: tuple[str, ...]
) -> None:
    path = write(tmp_path, nodes, {"w": WEIGHT, **constants}, outputs=outputs)
    model = load(path)
    before = op_types(model)
    fold_constants(model)
    assert op_types(model) == before
    assert not any("Add" in note for note in model.notes)
    assert_same(path, model, tmp_path)


def test_infinite_constant_is_no_bias(tmp_path: Path) -> None:
    endless = np.where(np.arange(8) == 3, np.float32(np.inf), BIAS).reshape(8, 1, 1)
    model = load(write(tmp_path, [conv(output="c"), add("r")], {"w": WEIGHT, "r": endless}))
    fold_constants(model)
    assert op_types(model) == ["Conv", "Add"]
