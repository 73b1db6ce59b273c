"""BatchNormalization folded: same numbers, zeros stay zeros, and what must not be folded is left and named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import SHARED
from onnx import TensorProto, helper, numpy_helper, parser

from sparsedeploy.converters.fold_batchnorm import fold_batchnorm
from sparsedeploy.converters.graph import Array, Model

CONV = "c = Conv<pads=[1,1,1,1]>(x, w)"
NORM = "y = BatchNormalization<epsilon=0.001>(c, s, b, m, v)"


def constants(dtype: str = "float32", group: int = 1, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(6, 4 // group, 3, 3))
    weight[rng.random(weight.shape) < 0.8] = 0
    norm = {"s": rng.normal(size=6), "b": rng.normal(size=6), "m": rng.normal(size=6), "v": rng.random(6) + 0.1}
    return {name: value.astype(dtype) for name, value in {"w": weight, **norm}.items()}


def build(
    lines: list[str], values: dict[str, Array], outputs: tuple[str, ...] = ("y",), opset: int = 13, ir: int = 8
) -> Model:
    dtype = helper.np_dtype_to_tensor_dtype(values["w"].dtype)
    graph = helper.make_graph(
        [parser.parse_node(line) for line in lines],
        "g",
        [helper.make_tensor_value_info("x", dtype, [2, 4, 5, 5])],
        [helper.make_tensor_value_info(name, dtype, [None] * 4) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    if ir < 4:
        graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    onnx.checker.check_model(proto)
    return Model(proto, Path("model.onnx"))


def run(proto: onnx.ModelProto) -> list[Array]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (x,) = session.get_inputs()
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[x.type]
    return list(session.run(None, {x.name: np.random.default_rng(1).normal(size=(2, 4, 5, 5)).astype(dtype)}))


def assert_same_outputs(before: list[Array], after: list[Array], tolerance: float = 1e-5) -> None:
    """Every element within `tolerance` of the output's largest value; NaN fails."""
    assert len(before) == len(after)
    for one, two in zip(before, after, strict=True):
        a, b = one.astype(np.float64), two.astype(np.float64)
        assert a.shape == b.shape
        assert (np.abs(a - b) <= tolerance * np.abs(a).max()).all()


def ops(model: Model) -> list[str]:
    return [node.op_type for node in model.proto.graph.node]


def initializers(model: Model) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.proto.graph.initializer}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("with_bias", [False, True])
def test_folds_into_weight_and_bias(group: int, with_bias: bool) -> None:
    values = constants(group=group)
    conv = f"c = Conv<pads=[1,1,1,1], group={group}>(x, w{', cb' if with_bias else ''})"
    if with_bias:
        values["cb"] = np.linspace(-1, 1, 6, dtype=np.float32)
    model = build([conv, NORM, "z = Relu(y)"], values, outputs=("z",))
    before, relu = run(model.proto), model.proto.graph.node[2].SerializeToString()
    assert fold_batchnorm(model) == 1
    onnx.checker.check_model(model.proto)
    assert ops(model) == ["Conv", "Relu"]
    assert model.proto.graph.node[0].output[0] == "y"
    assert model.proto.graph.node[1].SerializeToString() == relu
    assert len(model.proto.graph.initializer) == 2
    assert model.notes == ["1 BatchNormalization node folded into the convolution before."]
    assert_same_outputs(before, run(model.proto))


def test_weights_are_computed_in_float64_and_rounded_once() -> None:
    values = constants()
    model = build([CONV, NORM], values)
    fold_batchnorm(model)
    factor = values["s"].astype(np.float64) / np.sqrt(values["v"].astype(np.float64) + np.float32(0.001))
    expected = (values["w"].astype(np.float64) * factor[:, None, None, None]).astype(np.float32)
    bias = (values["b"] - values["m"].astype(np.float64) * factor).astype(np.float32)
    after = initializers(model)
    np.testing.assert_array_equal(after["w"], expected)
    np.testing.assert_array_equal(after[model.proto.graph.node[0].input[2]], bias)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_zeros_stay_positive_zeros(dtype: str) -> None:
    values = constants(dtype)
    values["w"][values["w"] == 0] *= -1  # -0.0
    values["s"][:3] = -2
    zeros = values["w"] == 0
    assert np.signbit(values["w"][zeros]).all()
    model = build([CONV, NORM], values)
    assert fold_batchnorm(model) == 1
    weight = initializers(model)["w"]
    assert weight.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(weight == 0, zeros)
    assert not np.signbit(weight[zeros]).any()


def test_half_precision() -> None:
    model = build([CONV, NORM], constants("float16"))
    before = run(model.proto)
    assert fold_batchnorm(model) == 1
    onnx.checker.check_model(model.proto)
    assert_same_outputs(before, run(model.proto), tolerance=5e-3)


def test_bfloat16() -> None:
    bfloat16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    values = {name: value.astype(bfloat16) for name, value in constants().items()}
    model = build([CONV, NORM], values, opset=22, ir=10)
    assert fold_batchnorm(model) == 1
    weight = initializers(model)["w"]
    factor = values["s"].astype(np.float64) / np.sqrt(values["v"].astype(np.float64) + np.float32(0.001))
    expected = values["w"].astype(np.float64) * factor[:, None, None, None]
    assert weight.dtype == bfloat16
    assert (np.abs(weight.astype(np.float64) - expected) <= 2**-8 * np.abs(expected)).all()
    values["s"][:] = 3e38
    assert fold_batchnorm(build([CONV, NORM], values, opset=22, ir=10)) == 0


def test_two_norms_in_a_row() -> None:
    second = "z = BatchNormalization(y, s2, b, m, v)"
    values = constants()
    values["s2"] = values["s"] * 2
    model = build([CONV, NORM, second], values, outputs=("z",))
    before = run(model.proto)
    assert fold_batchnorm(model) == 2
    assert ops(model) == ["Conv"]
    assert_same_outputs(before, run(model.proto))


def test_shared_weight_gets_its_own_copy() -> None:
    lines = [CONV, NORM, "d = Conv<pads=[1,1,1,1]>(x, w)", "z = BatchNormalization(d, s2, b, m, v)", "e = Conv(x, w)"]
    values = constants()
    values["s2"] = -values["s"]
    model = build(lines, values, outputs=("y", "z", "e"))
    before = run(model.proto)
    assert fold_batchnorm(model) == 2
    onnx.checker.check_model(model.proto)
    assert ops(model) == ["Conv", "Conv", "Conv"]
    np.testing.assert_array_equal(initializers(model)["w"], values["w"])
    assert len({node.input[1] for node in model.proto.graph.node}) == 3
    assert_same_outputs(before, run(model.proto))


def test_weight_that_is_an_output_is_kept() -> None:
    values = constants()
    model = build([CONV, NORM], values, outputs=("y", "w"))
    before = run(model.proto)
    assert fold_batchnorm(model) == 1
    assert_same_outputs(before, run(model.proto))
    np.testing.assert_array_equal(initializers(model)["w"], values["w"])


def test_weight_read_in_a_body_is_kept() -> None:
    body = "If(t) <then_branch = a () => (float[q] z) { z = Identity(w) }, else_branch = e () => (float[q] z) { z = Neg(w) }>"
    values = {**constants(), "t": np.array(True)}
    model = build([CONV, NORM, f"i = {body}"], values, outputs=("y", "i"))
    before = run(model.proto)
    assert fold_batchnorm(model) == 1
    assert_same_outputs(before, run(model.proto))


def test_constant_nodes_are_folded_and_removed() -> None:
    values = constants()
    model = build([CONV, NORM], values)
    graph = model.proto.graph
    del graph.initializer[:]
    for name, value in reversed(values.items()):
        node = helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))
        graph.node.insert(0, node)
    before = run(model.proto)
    assert fold_batchnorm(model) == 1
    onnx.checker.check_model(model.proto)
    assert ops(model) == ["Conv"]
    assert_same_outputs(before, run(model.proto))


def test_ir3_input_entries_follow_the_initializers() -> None:
    model = build([CONV, NORM], constants(), opset=9, ir=3)
    assert fold_batchnorm(model) == 1
    onnx.checker.check_model(model.proto)
    names = {value.name for value in model.proto.graph.input}
    assert names == {"x", *initializers(model)}
    assert len(initializers(model)) == 2


def test_shape_entry_of_the_vanished_value_goes() -> None:
    model = build([CONV, NORM, "z = Relu(y)"], constants(), outputs=("z",))
    model.proto.CopyFrom(onnx.shape_inference.infer_shapes(model.proto))
    assert {value.name for value in model.proto.graph.value_info} == {"c", "y"}
    fold_batchnorm(model)
    assert {value.name for value in model.proto.graph.value_info} == {"y"}


def test_external_weight_is_read_from_beside_the_model(tmp_path: Path) -> None:
    model = build([CONV, NORM], constants())
    before, path = run(model.proto), tmp_path / "model.onnx"
    onnx.save_model(model.proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = Model(onnx.load(path, load_external_data=False), path)
    assert fold_batchnorm(model) == 1
    assert_same_outputs(before, run(model.proto))


def test_inference_mode_before_opset_7_is_an_attribute() -> None:
    line = "y = BatchNormalization<is_test=1>(c, s, b, m, v)"
    assert fold_batchnorm(build([CONV, line], constants(), opset=6)) == 1


@pytest.mark.parametrize(
    ("norm", "opset", "outputs", "change", "reason"),
    [
        ("y, a, d = BatchNormalization<training_mode=1>(c, s, b, m, v)", 15, ("y",), {}, "training mode"),
        ("y, a, d, e, f = BatchNormalization(c, s, b, m, v)", 9, ("y",), {}, "training mode"),
        ("y = BatchNormalization(c, s, b, m, v)", 6, ("y",), {}, "training mode"),
        ("y = BatchNormalization<spatial=0>(c, s, b, m, v)", 7, ("y",), {}, "spatial=0"),
        (NORM, 13, ("y", "c"), {}, "output of the model"),
        (NORM, 13, ("y", "r"), {}, "other readers"),
        (NORM, 13, ("y",), {"v": np.full(6, 1e-60)}, "not be finite"),
        (NORM, 13, ("y",), {"v": np.full(6, -1.0)}, "not be finite"),
        (NORM, 13, ("y",), {"s": np.full(6, 3e38)}, "not be finite"),
        (NORM, 13, ("y",), {"s": np.ones(1)}, "shape [1] and the convolution 6"),
        ("y = BatchNormalization(c, s, b, m, u)", 13, ("y",), {}, "its variance is not constant"),
    ],
)
def test_refused_and_named(
    norm: str, opset: int, outputs: tuple[str, ...], change: dict[str, Array], reason: str
) -> None:
    lines = [
        "u = ReduceMean<axes=[0,2,3], keepdims=0>(x)",
        CONV,
        norm.replace("epsilon=0.001", "epsilon=0.0"),
        "r = Relu(c)",
    ]
    lines = [line for line in lines if line[0] in "cy" or (line[0] in outputs) or (line[0] == "u" and ", u)" in norm)]
    values = constants() | {name: value.astype(np.float32) for name, value in change.items()}
    model = build(lines, values, outputs, opset)
    for node in model.proto.graph.node:
        node.name = f"the_{node.op_type}"
    before = model.proto.SerializeToString()
    assert fold_batchnorm(model) == 0
    assert model.proto.SerializeToString() == before
    assert len(model.notes) == 1
    assert reason in model.notes[0]
    assert "the_BatchNormalization" in model.notes[0]
    assert "the_Conv" in model.notes[0]


def test_overflow_in_half_precision_is_refused() -> None:
    values = constants("float16")
    values["s"][:] = 60000
    model = build([CONV, NORM], values)
    assert fold_batchnorm(model) == 0
    assert "float16" in model.notes[0]


def test_weight_that_is_not_constant_is_refused() -> None:
    values = constants()
    model = build(["a = Add(w, w)", "c = Conv<pads=[1,1,1,1]>(x, a)", NORM], values)
    assert fold_batchnorm(model) == 0
    assert "weight is not constant" in model.notes[0]


@pytest.mark.parametrize("name", ["w", "v"])
@pytest.mark.parametrize("damage", [{"raw_data": b"123"}, {"data_type": 99}])
def test_damaged_tensor_is_refused_and_named(name: str, damage: dict[str, object]) -> None:
    model = build([CONV, NORM], constants())
    tensor = model.graph.initializers[name]
    for field, value in damage.items():
        setattr(tensor, field, value)
    assert fold_batchnorm(model) == 0
    assert f"({name}) cannot be read" in model.notes[0]


def test_norm_without_a_convolution_before_is_no_news() -> None:
    values = {name: value[:4] if value.ndim == 1 else value for name, value in constants().items()}
    model = build(["c = Relu(x)", NORM, "z = Conv(y, w)"], values, outputs=("z",))
    assert fold_batchnorm(model) == 0
    assert model.notes == []


@pytest.mark.skipif(SHARED is None, reason="no shared model files")
def test_shared_case() -> None:
    assert SHARED is not None
    path = SHARED / "cases" / "28_conv_bn_relu_unfolded.onnx"
    model = Model(onnx.load(path), path)
    x = {"x": np.random.default_rng(0).normal(size=(1, 32, 16, 16)).astype(np.float32)}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    zeros = [float((a == 0).mean()) for a in initializers(model).values() if a.ndim == 4]
    assert fold_batchnorm(model) == 1
    assert [float((a == 0).mean()) for a in initializers(model).values() if a.ndim == 4] == zeros
    after = onnxruntime.InferenceSession(model.proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert_same_outputs(session.run(None, x), after.run(None, x))
