"""Double, bfloat16 and fp16 graphs made fp32: against onnx's reference evaluator in the original types."""

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
from small_models import model_of, network, saved, sparse_weight

from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load
from sparsedeploy.converters.widen import convolution_types, to_fp32
from sparsedeploy.errors import InputError

DOUBLE, HALF, BRAIN, FLOAT = TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT


def widened(proto: onnx.ModelProto, kind: int) -> Model:
    """The model made fp32, checked by onnx with full type inference."""
    model = Model(proto, Path("m.onnx"))
    to_fp32(model, {kind})
    onnx.checker.check_model(model.proto, full_check=True)
    return model


def run(model: Model, **feeds: NDArray[Any]) -> list[NDArray[Any]]:
    session = ort.InferenceSession(model.proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def types_of(model: Model) -> tuple[int, int]:
    graph = model.proto.graph
    return graph.input[0].type.tensor_type.elem_type, graph.output[0].type.tensor_type.elem_type


def test_double_equals_itself_computed_in_double() -> None:
    x = np.random.default_rng(0).random((2, 16, 8, 8))
    proto = network(DOUBLE)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    assert expected.dtype == np.float64
    model = widened(proto, DOUBLE)
    (got,) = run(model, x=x.astype(np.float32))
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    assert any("double narrowed" in note and "x, y" in note for note in model.notes)


def test_bfloat16_weights_come_through_exactly() -> None:
    proto = network(BRAIN)
    stored = {t.name: numpy_helper.to_array(t).astype(np.float32) for t in proto.graph.initializer}
    model = widened(proto, BRAIN)
    for tensor in model.proto.graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), stored[tensor.name])
    assert types_of(model) == (FLOAT, FLOAT)
    expected = run(Model(as_float(network(BRAIN)), Path("f.onnx")), x=np.ones((1, 16, 8, 8), np.float32))
    got = run(model, x=np.ones((1, 16, 8, 8), np.float32))[0]
    np.testing.assert_allclose(got, expected[0], rtol=0, atol=1e-6 * np.abs(expected[0]).max())


def as_float(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The network of small_models with the same values in fp32, made without the code under test."""
    other = network(FLOAT)
    del other.graph.initializer[:]
    other.graph.initializer.extend(
        numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
        for tensor in proto.graph.initializer
    )
    return other


def test_fp16_keeps_its_inputs_and_outputs() -> None:
    proto = network(HALF)
    expected = run(Model(as_float(proto), Path("f.onnx")), x=np.ones((1, 16, 8, 8), np.float32))[0]
    model = widened(proto, HALF)
    assert types_of(model) == (HALF, HALF)
    assert [node.op_type for node in model.proto.graph.node].count("Cast") == 2
    (got,) = run(model, x=np.ones((1, 16, 8, 8), np.float16))
    np.testing.assert_array_equal(got, expected.astype(np.float16))
    assert any("x, y" in note and "stay fp16" in note for note in model.notes)


def test_casts_between_fp16_and_fp32_go() -> None:
    """The usual fp16 export with fp32 inputs and outputs becomes a plain fp32 graph: Conv and Relu meet again."""
    weight = sparse_weight((4, 4, 3, 3)).astype(np.float16)
    nodes = [
        helper.make_node("Cast", ["x"], ["xh"], to=HALF),
        helper.make_node("Conv", ["xh", "w"], ["c"], "conv"),
        helper.make_node("Cast", ["c"], ["cf"], to=FLOAT),
        helper.make_node("Relu", ["cf"], ["r"]),
        helper.make_node("Cast", ["r"], ["rh"], to=HALF),
        helper.make_node("Cast", ["rh"], ["y"], to=FLOAT),
    ]
    model = widened(model_of(nodes, {"w": weight}, {"x": [1, 4, 8, 8]}, ["y"]), HALF)
    assert [node.op_type for node in model.proto.graph.node] == ["Conv", "Relu", "Cast"]
    x = np.random.default_rng(0).random((1, 4, 8, 8)).astype(np.float32)
    plain = model_of(
        [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["y"])],
        {"w": weight.astype(np.float32)}, {"x": [1, 4, 8, 8]}, ["y"],
    )  # fmt: skip
    np.testing.assert_array_equal(run(model, x=x)[0], run(Model(plain, Path("p.onnx")), x=x)[0])


def test_types_named_in_attributes_and_bodies() -> None:
    def body(name: str, scale: float) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(name, DOUBLE, None)
        constant = helper.make_node("Constant", [], [f"{name}_s"], value=numpy_helper.from_array(np.float64(scale)))
        return helper.make_graph([constant, helper.make_node("Mul", ["c", f"{name}_s"], [name])], name, [], [out])

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("ReduceSum", ["c"], ["total"], keepdims=0),
        helper.make_node("Less", ["total", "zero"], ["negative"]),
        helper.make_node("If", ["negative"], ["i"], then_branch=body("t", 2.0), else_branch=body("e", 3.0)),
        helper.make_node("Shape", ["c"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["ones"], value=numpy_helper.from_array(np.ones(1))),
        helper.make_node("Cast", ["shape"], ["sd"], to=DOUBLE),
        helper.make_node("ReduceSum", ["sd"], ["count"], keepdims=0),
        helper.make_node("Add", ["i", "ones"], ["j"]),
        helper.make_node("Mul", ["j", "count"], ["y"]),
    ]
    constants = {"w": sparse_weight((4, 4, 3, 3)).astype(np.float64), "zero": np.float64(0.0).reshape(())}
    proto = model_of(nodes, constants, {"x": [1, 4, 8, 8]}, ["y"], DOUBLE)
    x = np.random.default_rng(1).standard_normal((1, 4, 8, 8))
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    (got,) = run(widened(proto, DOUBLE), x=x.astype(np.float32))
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_double_beyond_fp32_is_refused_or_cut() -> None:
    weight = np.zeros((1, 1, 1, 1))
    weight[...] = 1e300
    conv = helper.make_node("Conv", ["x", "w"], ["y"], "conv")
    with pytest.raises(InputError, match=r"tensor w .*1 of 1 double values"):
        widened(model_of([conv], {"w": weight}, {"x": [1, 1, 4, 4]}, ["y"], DOUBLE), DOUBLE)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv"), helper.make_node("Clip", ["c", "", "most"], ["y"])]
    constants = {"w": np.ones((1, 1, 1, 1)), "most": np.float64(1e308).reshape(())}
    model = widened(model_of(nodes, constants, {"x": [1, 1, 4, 4]}, ["y"], DOUBLE), DOUBLE)
    assert any("cut" in note and "most" in note for note in model.notes)
    np.testing.assert_array_equal(run(model, x=np.ones((1, 1, 4, 4), np.float32))[0], 1.0)


def test_values_that_vanish_are_counted() -> None:
    weight = np.ones((1, 1, 1, 2))
    weight[0, 0, 0, 1] = 1e-60
    conv = helper.make_node("Conv", ["x", "w"], ["y"], "conv")
    model = widened(model_of([conv], {"w": weight}, {"x": [1, 1, 4, 4]}, ["y"], DOUBLE), DOUBLE)
    assert any(note.startswith("1 values of 1 tensors") for note in model.notes)


def test_custom_operators_keep_their_types() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("Secret", ["c"], ["s"], domain="org.example"),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    proto = model_of(
        nodes, {"w": sparse_weight((4, 4, 3, 3)).astype(np.float16)}, {"x": [1, 4, 8, 8]}, ["y"], HALF,
        others=[("org.example", 1)],
    )  # fmt: skip
    unknown = onnx.ModelProto()
    unknown.CopyFrom(proto)
    with pytest.raises(InputError, match=r"org\.example\.Secret.*element type the model does not say"):
        to_fp32(Model(unknown, Path("m.onnx")), {HALF})
    proto.graph.value_info.append(helper.make_tensor_value_info("s", HALF, None))
    model = Model(proto, Path("m.onnx"))
    to_fp32(model, {HALF})
    types = {node.op_type: node for node in model.proto.graph.node}
    casts = {node.output[0]: node.attribute[0].i for node in model.proto.graph.node if node.op_type == "Cast"}
    assert casts[types["Secret"].input[0]] == HALF
    assert casts[types["Relu"].input[0]] == FLOAT


def test_ir3_initializers_among_the_inputs(tmp_path: Path) -> None:
    proto = network(DOUBLE)
    proto.ir_version = 3
    proto.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in list(proto.graph.initializer)
    )
    model = load(saved(proto, tmp_path))
    to_fp32(model, convolution_types(model))
    onnx.checker.check_model(model.proto, full_check=True)
    assert {value.type.tensor_type.elem_type for value in model.proto.graph.input} == {FLOAT}
    assert not any("w1" in note for note in model.notes)


def test_types_of_convolutions() -> None:
    assert convolution_types(Model(network(BRAIN), Path("m"))) == {BRAIN}
    assert convolution_types(Model(network(FLOAT), Path("m"))) == {FLOAT}
    before = network(FLOAT)
    model = Model(before, Path("m"))
    to_fp32(model, convolution_types(model) & {DOUBLE})
    assert model.notes == []
    assert before == network(FLOAT)
