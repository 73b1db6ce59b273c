"""Every row of the opset table, run in ONNX Runtime before and after; every refusal, by its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from conftest import OLD_ONNXRUNTIME, SHARED
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from sparsedeploy.converters.graph import Array, Model
from sparsedeploy.converters.opset import (
    RELABELLED,
    REWRITTEN,
    compare_in_ort,
    export_hint,
    lower_opset,
    unsupported_operators,
)
from sparsedeploy.errors import CheckFailed, InputError

TOLERANCE = 1e-6
"""Of the largest output: lowering is a respelling, only rounding of decomposed operators may differ."""


@dataclass
class Case:
    """A model of one node: arrays fed, arrays held as initializers ('' skips an input), attributes."""

    feeds: Mapping[str, Array]
    consts: Mapping[str, Array] = field(default_factory=dict)
    attributes: Mapping[str, object] = field(default_factory=dict)
    order: str = ""
    """Input names in order, '-' for an absent one; feeds then consts when empty."""
    outputs: int = 1
    open_dims: tuple[str, ...] = ()
    """Fed inputs whose shape is left open."""

    def model(self, operator: str, opset: int) -> ModelProto:
        names = self.order.split() if self.order else [*self.feeds, *self.consts]
        outputs = [f"out{i}" for i in range(self.outputs)]
        inputs = ["" if name == "-" else name for name in names]
        node = helper.make_node(operator, inputs, outputs, name="the_node", **self.attributes)
        infos = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(value.dtype),
                [None] * value.ndim if name in self.open_dims else value.shape,
            )
            for name, value in self.feeds.items()
        ]
        graph = helper.make_graph([node], "g", infos, [onnx.ValueInfoProto(name=name) for name in outputs])
        graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in self.consts.items())
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
        inferred = onnx.shape_inference.infer_shapes(model)
        for entry, known in zip(model.graph.output, inferred.graph.output, strict=True):
            entry.CopyFrom(known)
            if not known.type.tensor_type.HasField("shape"):  # GroupNormalization, Loop: onnx infers none
                kind = known.type.tensor_type.elem_type or TensorProto.FLOAT
                rank = 4 if operator == "GroupNormalization" else 2
                entry.CopyFrom(helper.make_tensor_value_info(entry.name, kind, [None] * rank))
        return model


def rand(*shape: int, dtype: type = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def i64(*values: int) -> Array:
    return np.asarray(values, np.int64)


X = rand(2, 4, 6, 6)
UNIT = (rand(3, 4, seed=1) / 4).clip(-0.9, 0.9)
FLOATS = {"x": X}


def unary(x: Array = UNIT) -> Case:
    return Case({"x": x})


def binary(a: Array = X, b: Array | None = None) -> Case:
    return Case({"a": a, "b": rand(*a.shape, seed=2) if b is None else b})


def branch(name: str, op: str) -> onnx.GraphProto:
    node = helper.make_node(op, ["x"], [name], name=f"{op}_inside")
    return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])


def loop_body() -> onnx.GraphProto:
    return onnx.parser.parse_graph(
        "body (int64 i, bool c, float[3, 4] s) => (bool c2, float[3, 4] s2) { c2 = Identity(c)  s2 = Relu(s) }"
    )


def scan_body() -> onnx.GraphProto:
    return onnx.parser.parse_graph(
        "body (float[4] s, float[4] e) => (float[4] s2, float[4] o) { s2 = Add(s, e)  o = Relu(s2) }"
    )


SMALL = {
    **{op: binary() for op in ("Add", "Sub", "Mul", "Equal", "GreaterOrEqual", "LessOrEqual")},
    "Div": binary(X, np.abs(rand(2, 4, 6, 6, seed=3)) + 1),
    "Pow": Case({"x": np.abs(X)}, {"p": np.float32(1.5)}),
    "CumSum": Case(FLOATS, {"axis": i64(1)[0]}),
    "Where": Case({"c": X > 0, "a": X, "b": -2 * X}),
    **{op: unary(X) for op in ("Relu", "Elu", "Selu", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Identity")},
    **{
        op: unary(X)
        for op in ("LeakyRelu", "ThresholdedRelu", "Mish", "Round", "Flatten", "Shape", "Size", "Transpose")
    },
    **{
        op: unary()
        for op in ("Acos", "Asin", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh", "Tan", "Asinh", "IsInf", "IsNaN")
    },
    "Acosh": unary(UNIT + 2),
    "PRelu": Case(FLOATS, {"slope": rand(4, 1, 1)}),
    "Conv": Case(FLOATS, {"w": rand(5, 4, 3, 3), "b": rand(5)}, {"pads": [1, 1, 1, 1]}),
    "ConvTranspose": Case(FLOATS, {"w": rand(4, 3, 2, 2)}, {"strides": [2, 2]}),
    **{op: unary(X) for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "LpNormalization")},
    "InstanceNormalization": Case(FLOATS, {"s": rand(4), "b": rand(4)}),
    "LpPool": Case(FLOATS, attributes={"kernel_shape": [2, 2]}),
    "MaxUnpool": Case(
        {"x": rand(1, 1, 2, 2)},
        {"i": i64(0, 3, 10, 15).reshape(1, 1, 2, 2)},
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    "RoiAlign": Case(
        FLOATS,
        {"r": np.asarray([[0, 0, 3, 3]], np.float32), "n": i64(1)},
        {"output_height": 2, "output_width": 2, "coordinate_transformation_mode": "output_half_pixel"},
    ),
    "Det": unary(rand(2, 3, 3)),
    "Dropout": unary(X),
    "NegativeLogLikelihoodLoss": Case({"x": rand(3, 4), "t": i64(0, 2, 1)}),
    "GRU": Case({"x": rand(2, 1, 3)}, {"w": rand(1, 6, 3), "r": rand(1, 6, 2)}, {"hidden_size": 2}),
    "LSTM": Case({"x": rand(2, 1, 3)}, {"w": rand(1, 8, 3), "r": rand(1, 8, 2)}, {"hidden_size": 2}),
    "RNN": Case({"x": rand(2, 1, 3)}, {"w": rand(1, 2, 3), "r": rand(1, 2, 2)}, {"hidden_size": 2}),
    "Constant": Case({}, attributes={"value": numpy_helper.from_array(X)}),
    "ConstantOfShape": Case({"x": i64(2, 3)}, attributes={"value": numpy_helper.from_array(np.float32([2.5]))}),
    "Reshape": Case(FLOATS, {"shape": i64(0, -1, 3)}),
    "Squeeze": Case({"x": rand(1, 3, 1, 2)}, {"axes": i64(0)}),
    "Unsqueeze": Case(FLOATS, {"axes": i64(1, -1)}),
    "Pad": Case(FLOATS, {"pads": i64(0, 0, 1, 2, 0, 0, 3, 0), "value": np.float32(0.5)}),
    "Cast": Case({"x": 3 * X}, attributes={"to": TensorProto.INT32}),
    "CastLike": Case({"x": 3 * X}, {"like": i64(1)}),
    "EyeLike": unary(),
    "TopK": Case(FLOATS, {"k": i64(2)}, outputs=2),
    "If": Case(
        {"c": np.asarray(True), "x": UNIT},
        attributes={"then_branch": branch("t", "Relu"), "else_branch": branch("e", "Softplus")},
        order="c",
    ),
    "Loop": Case({"x": UNIT}, {"n": i64(3)[0], "c": np.asarray(True)}, {"body": loop_body()}, "n c x"),
    "Scan": Case({"s": rand(4), "x": rand(3, 4)}, attributes={"body": scan_body(), "num_scan_inputs": 1}, outputs=2),
    **{op: Case(FLOATS, {"axes": i64(2, -1)}) for op in ("ReduceMax", "ReduceMin")},
    "QuantizeLinear": Case(FLOATS, {"s": np.float32(0.02), "z": np.int8(3)}),
    "DequantizeLinear": Case({"x": rand(2, 3, seed=1).astype(np.int8)}, {"s": np.float32(0.02), "z": np.int8(3)}),
    "QLinearMatMul": Case(
        {"a": np.arange(6, dtype=np.uint8).reshape(2, 3)},
        {
            "as": np.float32(0.1),
            "az": np.uint8(1),
            "b": np.arange(6, dtype=np.uint8).reshape(3, 2),
            "bs": np.float32(0.2),
            "bz": np.uint8(2),
            "ys": np.float32(0.1),
            "yz": np.uint8(0),
        },
    ),
}
"""One model per operator whose definition only widened its types; run at every opset where it did."""

AXES = {"axes": i64(1, -1)}
SIZES = {"sizes": i64(2, 4, 9, 12)}
FORMS: dict[str, tuple[str, int, Case]] = {
    **{
        f"{op} axes input": (op, 18, Case({"x": np.abs(X) + 0.1}, AXES, {"keepdims": 0}))
        for op in ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin")
    },
    "ReduceProd axes input": ("ReduceProd", 18, Case({"x": np.abs(X) + 0.5}, AXES)),
    "ReduceSumSquare axes input": ("ReduceSumSquare", 18, Case(FLOATS, AXES)),
    "ReduceMean without axes": ("ReduceMean", 18, Case(FLOATS)),
    "ReduceMean noop": ("ReduceMean", 18, Case(FLOATS, attributes={"noop_with_empty_axes": 1})),
    "ReduceMean empty axes": ("ReduceMean", 18, Case(FLOATS, {"axes": i64()}, {"noop_with_empty_axes": 1})),
    "ReduceMean of today": ("ReduceMean", 25, Case(FLOATS, {"axes": i64(2, 3)})),
    "Reshape allowzero 0": ("Reshape", 14, Case(FLOATS, {"shape": i64(0, 24, -1)}, {"allowzero": 0})),
    "Reshape allowzero 1": ("Reshape", 18, Case(FLOATS, {"shape": i64(2, 24, -1)}, {"allowzero": 1})),
    "Shape": ("Shape", 15, Case(FLOATS)),
    "Shape start": ("Shape", 15, Case(FLOATS, attributes={"start": 2})),
    "Shape start end": ("Shape", 17, Case(FLOATS, attributes={"start": -3, "end": -1})),
    "Shape beyond": ("Shape", 21, Case(FLOATS, attributes={"start": 1, "end": 9})),
    "BatchNormalization 14": (
        "BatchNormalization",
        14,
        Case(FLOATS, {"s": rand(4), "b": rand(4), "m": rand(4), "v": np.abs(rand(4))}, {"training_mode": 0}),
    ),
    "BatchNormalization 15": (
        "BatchNormalization",
        22,
        Case(FLOATS, {"s": rand(4), "b": rand(4), "m": rand(4), "v": np.abs(rand(4))}),
    ),
    "AveragePool dilations 1": (
        "AveragePool",
        19,
        Case(FLOATS, attributes={"kernel_shape": [3, 3], "dilations": [1, 1], "pads": [1, 1, 1, 1]}),
    ),
    "AveragePool ceil": (
        "AveragePool",
        22,
        Case({"x": rand(1, 2, 7, 7)}, attributes={"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ),
    "MaxPool ceil": (
        "MaxPool",
        22,
        Case(
            {"x": rand(1, 2, 7, 8)},
            attributes={"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
        ),
    ),
    "MaxPool same": ("MaxPool", 22, Case(FLOATS, attributes={"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"})),
    "LpPool": ("LpPool", 18, Case(FLOATS, attributes={"kernel_shape": [2, 2], "dilations": [1, 1], "ceil_mode": 0})),
    "Pad axes": (
        "Pad",
        18,
        Case(FLOATS, {"pads": i64(1, 2, 3, 0), "value": np.float32(7), "axes": i64(3, 1)}, order="x pads value axes"),
    ),
    "Pad negative axes and pads": (
        "Pad",
        25,
        Case(FLOATS, {"pads": i64(1, -2, 0, 1), "axes": i64(-1, -2)}, {"mode": "constant"}, "x pads - axes"),
    ),
    "Pad reflect": ("Pad", 19, Case(FLOATS, {"pads": i64(0, 0, 1, 2, 0, 0, 1, 2)}, {"mode": "reflect"})),
    "Split even": ("Split", 18, Case(FLOATS, attributes={"num_outputs": 2, "axis": 1}, outputs=2)),
    "Split uneven": ("Split", 18, Case({"x": rand(2, 5)}, attributes={"num_outputs": 3, "axis": -1}, outputs=3)),
    "Split sizes": ("Split", 22, Case(FLOATS, {"s": i64(1, 3)}, {"axis": 1}, outputs=2)),
    "Resize scales": (
        "Resize",
        18,
        Case(FLOATS, {"s": np.float32([1, 1, 2, 1.5])}, {"mode": "linear"}, "x - s"),
    ),
    "Resize sizes": ("Resize", 19, Case(FLOATS, SIZES, {"mode": "cubic"}, "x - - sizes")),
    "Resize scales of axes": (
        "Resize",
        19,
        Case(FLOATS, {"s": np.float32([2, 1.5])}, {"axes": [3, -2], "mode": "linear"}, "x - s"),
    ),
    "Resize sizes of axes": (
        "Resize",
        18,
        Case(FLOATS, {"sizes": i64(9, 4)}, {"axes": [2, 3], "mode": "linear"}, "x - - sizes"),
    ),
    "Resize sizes of axes, open shape": (
        "Resize",
        19,
        Case(FLOATS, {"sizes": i64(9, 4)}, {"axes": [3, 2]}, "x - - sizes", open_dims=("x",)),
    ),
    "Resize antialias that enlarges": (
        "Resize",
        19,
        Case(FLOATS, SIZES, {"mode": "linear", "antialias": 1}, "x - - sizes"),
    ),
    "Resize half_pixel_symmetric": (
        "Resize",
        19,
        Case(
            FLOATS,
            {"s": np.float32([1, 1, 1.5, 2])},
            {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
            "x - s",
        ),
    ),
    "Cast saturate": ("Cast", 19, Case(FLOATS, attributes={"to": TensorProto.FLOAT16, "saturate": 1})),
    "Cast round_mode": ("Cast", 24, Case(FLOATS, attributes={"to": TensorProto.INT64, "round_mode": "up"})),
    "CastLike": ("CastLike", 15, Case(FLOATS, {"like": np.float16([1])})),
    "CastLike saturate": ("CastLike", 19, Case(FLOATS, {"like": i64(1)}, {"saturate": 1})),
    "CastLike round_mode": ("CastLike", 24, Case(FLOATS, {"like": i64(1)}, {"round_mode": "up"})),
    "QuantizeLinear saturate": ("QuantizeLinear", 19, Case(FLOATS, {"s": np.float32(0.1)}, {"saturate": 1})),
    "QuantizeLinear output_dtype": (
        "QuantizeLinear",
        21,
        Case(FLOATS, {"s": np.float32([0.1, 0.2, 0.3, 0.4])}, {"axis": 1, "output_dtype": TensorProto.INT8}),
    ),
    "QuantizeLinear precision": ("QuantizeLinear", 23, Case(FLOATS, {"s": np.float32(0.1)}, {"precision": 0})),
    "DequantizeLinear per channel": (
        "DequantizeLinear",
        21,
        Case({"x": np.arange(12, dtype=np.int8).reshape(3, 4)}, {"s": np.float32([0.1, 0.2, 0.3])}, {"axis": 0, "block_size": 0}),
    ),
    "DequantizeLinear output_dtype": (
        "DequantizeLinear",
        23,
        Case({"x": np.arange(12, dtype=np.int8).reshape(3, 4)}, {"s": np.float32(0.1)}, {"output_dtype": 1}),
    ),
    **{f"{op} layout": (op, 14, Case(SMALL[op].feeds, SMALL[op].consts, {"hidden_size": 2, "layout": 0})) for op in ("GRU", "LSTM", "RNN")},
    "RoiAlign": ("RoiAlign", 16, SMALL["RoiAlign"]),
    "ScatterElements": (
        "ScatterElements",
        16,
        Case({"x": rand(3, 3)}, {"i": i64(1, 0, 2).reshape(1, 3), "u": rand(1, 3)}, {"reduction": "none"}),
    ),
    "ScatterElements 18": ("ScatterElements", 18, Case({"x": rand(3, 3)}, {"i": i64(1, 0, 2).reshape(1, 3), "u": rand(1, 3)})),
    "ScatterND": ("ScatterND", 16, Case({"x": rand(4, 3)}, {"i": i64(1, 3).reshape(2, 1), "u": rand(2, 3)}, {"reduction": "none"})),
    "ScatterND 18": ("ScatterND", 18, Case({"x": rand(4, 3)}, {"i": i64(1, 3).reshape(2, 1), "u": rand(2, 3)})),
    "HardSwish": ("HardSwish", 14, Case({"x": 4 * X})),
    "Mish": ("Mish", 18, Case({"x": 4 * X})),
    "Swish": ("Swish", 24, Case({"x": 4 * X})),
    "Swish alpha": ("Swish", 25, Case({"x": 4 * X}, attributes={"alpha": 1.5})),
    "Gelu": ("Gelu", 20, Case({"x": 2 * X})),
    "Gelu tanh": ("Gelu", 22, Case({"x": 2 * X}, attributes={"approximate": "tanh"})),
    "LayerNormalization": ("LayerNormalization", 17, Case(FLOATS, {"s": rand(6), "b": rand(6)})),
    "LayerNormalization axis": (
        "LayerNormalization",
        21,
        Case(FLOATS, {"s": rand(4, 6, 6)}, {"axis": 1, "epsilon": 1e-3}),
    ),
    "LayerNormalization double": (
        "LayerNormalization",
        17,
        Case({"x": rand(3, 5, dtype=np.float64)}, {"s": rand(5, dtype=np.float64), "b": rand(5, dtype=np.float64)}),
    ),
    "RMSNormalization": ("RMSNormalization", 23, Case(FLOATS, {"s": rand(6, 6)}, {"axis": -2})),
    "GroupNormalization 18": ("GroupNormalization", 18, Case(FLOATS, {"s": rand(2), "b": rand(2)}, {"num_groups": 2})),
    "GroupNormalization 21": ("GroupNormalization", 21, Case(FLOATS, {"s": rand(4), "b": rand(4)}, {"num_groups": 2})),
    "GroupNormalization fed scale": (
        "GroupNormalization",
        22,
        Case({"x": X, "s": rand(4)}, {"b": rand(4)}, {"num_groups": 2, "epsilon": 0.1}),
    ),
}  # fmt: skip
"""Models whose node the older opset says differently: operator, opset, model."""

REFERENCE: dict[tuple[str, int], Callable[[Case], Array]] = {
    ("GlobalLpPool", 22): lambda case: np.sqrt((case.feeds["x"].astype(np.float64) ** 2).sum((2, 3), keepdims=True)),
    ("Swish", 24): lambda case: swish(case.feeds["x"].astype(np.float64), float(case.attributes.get("alpha", 1.0))),
    ("RoiAlign", 22): lambda case: reference(case, "RoiAlign", 22),
}
"""What stands in for ONNX Runtime where it has no kernel for the newer operator."""


def swish(x: Array, alpha: float) -> Array:
    return x / (1 + np.exp(-alpha * x))


def reference(case: Case, operator: str, opset: int) -> Array:
    evaluator = ReferenceEvaluator(case.model(operator, opset))
    return np.asarray(evaluator.run(None, dict(case.feeds))[0])


def since(operator: str, opset: int) -> int:
    return int(onnx.defs.get_schema(operator, opset, "").since_version)


def lowered(model: ModelProto, opset: int = 13) -> Model:
    copy = ModelProto()
    copy.CopyFrom(model)
    result = Model(copy, Path("m.onnx"))
    lower_opset(result, opset)
    return result


def check_case(case: Case, operator: str, opset: int) -> Model:
    stand_in = REFERENCE.get((operator, since(operator, opset)))
    if stand_in is None:
        return check_lowered(case.model(operator, opset), case.feeds)
    after = lowered(case.model(operator, opset))
    onnx.checker.check_model(after.proto, full_check=True)
    result, wanted = run(after.proto, case.feeds), stand_in(case)
    assert result.shape == wanted.shape
    assert np.abs(result - wanted).max() <= TOLERANCE * np.abs(wanted).max()
    return after


def run(model: ModelProto, feeds: Mapping[str, Array]) -> Array:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, dict(feeds))[0])


def check_lowered(
    model: ModelProto, feeds: Mapping[str, Array], opset: int = 13, tolerance: float = TOLERANCE
) -> Model:
    after = lowered(model, opset)
    assert [(entry.domain, entry.version) for entry in after.proto.opset_import] == [("", opset)]
    assert after.proto.ir_version == 8
    onnx.checker.check_model(after.proto, full_check=True)
    try:
        difference = compare_in_ort(model, after.proto, feeds)
    except CheckFailed as error:
        if OLD_ONNXRUNTIME and "the first graph" in str(error):
            pytest.skip("this ONNX Runtime is older than the operator")
        raise
    assert difference <= tolerance, difference
    return after


RELABEL_ROWS = [(op, version) for op, versions in RELABELLED.items() for version in versions]


@pytest.mark.parametrize(("operator", "version"), RELABEL_ROWS, ids=lambda value: str(value))
def test_relabelled_row(operator: str, version: int) -> None:
    case = SMALL[operator]
    assert since(operator, version) == version
    check_case(case, operator, version)


@pytest.mark.parametrize("name", FORMS)
def test_rewritten_row(name: str) -> None:
    operator, opset, case = FORMS[name]
    after = check_case(case, operator, opset)
    assert len(after.notes) == 1
    assert f"opset {opset} lowered to 13" in after.notes[0]


def test_every_row_of_the_table_has_a_case() -> None:
    assert {(op, since(op, opset)) for op, opset, _ in FORMS.values()} >= set(REWRITTEN)
    assert set(SMALL) >= set(RELABELLED)
    assert not set(REWRITTEN) & set(RELABEL_ROWS)


def test_every_operator_version_is_in_the_table_or_refused_by_name() -> None:
    table = set(REWRITTEN) | set(RELABEL_ROWS)
    absent = {
        (schema.name, schema.since_version)
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == "" and 13 < schema.since_version <= 25
    } - table
    assert {name for name, _ in absent} == {
        "AffineGrid", "Attention", "Bernoulli", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "BlackmanWindow",
        "CenterCropPad", "Col2Im", "DFT", "DeformConv", "GridSample", "HammingWindow", "HannWindow", "ImageDecoder",
        "MaxRoiPool", "MelWeightMatrix", "Multinomial", "Optional", "OptionalGetElement", "OptionalHasElement", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike", "RegexFullMatch", "RotaryEmbedding",
        "STFT", "SequenceMap", "SplitToSequence", "StringConcat", "StringSplit", "TensorScatter", "Trilu",
    }  # fmt: skip


REFUSED: dict[str, tuple[str, int, Case, str]] = {
    "computed axes": ("ReduceMean", 18, Case({"x": X, "axes": i64(1)}), "axes are computed in the graph (axes)"),
    "noop of a norm": ("ReduceL1", 18, Case(FLOATS, attributes={"noop_with_empty_axes": 1}), "noop_with_empty_axes"),
    "fed shape": ("Reshape", 14, Case({"x": X, "s": i64(288)}, attributes={"allowzero": 1}), "allowzero is 1"),
    "zero in a shape": (
        "Reshape",
        19,
        Case({"x": np.zeros((0, 3), np.float32)}, {"s": i64(3, 0)}, {"allowzero": 1}),
        "shape s may hold a zero",
    ),
    "training": (
        "BatchNormalization",
        15,
        Case(FLOATS, {"s": rand(4), "b": rand(4), "m": rand(4), "v": np.abs(rand(4))}, {"training_mode": 1}, outputs=3),
        "call model.eval()",
    ),
    "mixed statistics": (
        "BatchNormalization",
        15,
        Case({"x": X.astype(np.float16)}, {"s": rand(4), "b": rand(4), "m": rand(4), "v": np.abs(rand(4))}),
        "differ in element type (float, float16)",
    ),
    "dilated average": ("AveragePool", 19, Case(FLOATS, attributes={"kernel_shape": [2, 2], "dilations": [2, 2]}), "dilated"),
    "ceil and pads count": (
        "AveragePool",
        19,
        Case(FLOATS, attributes={"kernel_shape": [2, 2], "ceil_mode": 1, "count_include_pad": 1}),
        "count_include_pad",
    ),
    "window behind": (
        "MaxPool",
        22,
        Case(FLOATS, attributes={"kernel_shape": [2, 2], "strides": [3, 3], "ceil_mode": 1}),
        "begin behind the input",
    ),
    "pad wrap": ("Pad", 19, Case(FLOATS, {"p": i64(0, 0, 1, 1, 0, 0, 1, 1)}, {"mode": "wrap"}), "mode wrap"),
    "pad of unknown rank": (
        "Pad",
        18,
        Case({"n": i64(2), "x": X}, {"p": i64(1, 1), "axes": i64(-1)}, order="x p - axes"),
        "rank of its input",
    ),
    "split of open size": (
        "Split",
        18,
        Case({"x": rand(4, 6)}, attributes={"num_outputs": 2, "axis": 1}, outputs=2, open_dims=("x",)),
        "unknown size into 2",
    ),
    "antialias": (
        "Resize",
        18,
        Case(FLOATS, {"s": np.float32([1, 1, 0.5, 0.5])}, {"antialias": 1, "mode": "linear"}, "x - s"),
        "antialias is 1",
    ),
    "aspect ratio": (
        "Resize",
        18,
        Case(FLOATS, SIZES, {"keep_aspect_ratio_policy": "not_larger"}, "x - - sizes"),
        "keep_aspect_ratio_policy is not_larger",
    ),
    "symmetric": (
        "Resize",
        19,
        Case(FLOATS, {"s": np.float32([1, 1, 1.3, 1])}, {"coordinate_transformation_mode": "half_pixel_symmetric"}, "x - s"),
        "half_pixel_symmetric",
    ),
    "blocked quantisation": (
        "DequantizeLinear",
        21,
        Case({"x": np.zeros((4, 4), np.int8)}, {"s": np.ones((2, 4), np.float32)}, {"block_size": 2, "axis": 0}),
        "in blocks",
    ),
    "fp16 scale": (
        "DequantizeLinear",
        19,
        Case({"x": np.zeros((4, 4), np.int8)}, {"s": np.float16(1)}),
        "s is float16, which DequantizeLinear does not take there",
    ),
    "int16": ("Add", 14, binary(np.zeros((2, 2), np.int16), np.zeros((2, 2), np.int16)), "a is int16"),
    "layout": ("GRU", 14, Case(SMALL["GRU"].feeds, SMALL["GRU"].consts, {"hidden_size": 2, "layout": 1}), "layout is 1"),
    "reduction": (
        "ScatterND",
        16,
        Case({"x": rand(4, 3)}, {"i": i64(1, 3).reshape(2, 1), "u": rand(2, 3)}, {"reduction": "add"}),
        "reduction is 'add'",
    ),
    "roi": (
        "RoiAlign",
        16,
        Case(SMALL["RoiAlign"].feeds, SMALL["RoiAlign"].consts, {"output_height": 2, "output_width": 2}),
        "half_pixel",
    ),
    "grid sample": ("GridSample", 16, Case({"x": X, "g": rand(2, 3, 3, 2)}), "GridSample is new in opset 16"),
    "grid sample of today": ("GridSample", 22, Case({"x": X, "g": rand(2, 3, 3, 2)}), "GridSample is new in opset 16"),
    "new operator": ("Trilu", 14, Case({"x": rand(3, 3)}), "new in opset 14"),
    "mean output": ("LayerNormalization", 17, Case(FLOATS, {"s": rand(6)}, outputs=2), "mean or deviation output"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    operator, opset, case, words = REFUSED[name]
    model = case.model(operator, opset)
    if name == "pad of unknown rank":
        model.graph.node.insert(0, helper.make_node("Reshape", ["x", "n"], ["r"]))
        model.graph.node[1].input[0] = "r"
        model.graph.input[0].type.tensor_type.shape.ClearField("dim")
        model.graph.input[0].type.tensor_type.shape.dim.add()
        del model.graph.output[0].type.tensor_type.shape.dim[:]
    with pytest.raises(InputError) as caught:
        lowered(model)
    message = str(caught.value)
    assert words in message
    assert message.startswith(f"{operator} node the_node of m.onnx (opset {opset})")
    assert "torch.onnx.export(model, x, 'model.onnx', opset_version=13, dynamo=False)" in message
    assert "\n" not in message


def parsed(text: str, opset: int, ir: int = 10) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> {text}')


def test_old_models_are_left_alone() -> None:
    model = parsed("g (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }", 13, ir=8)
    before = model.SerializeToString()
    result = Model(model, Path("m.onnx"))
    lower_opset(result, 13)
    assert result.proto.SerializeToString() == before
    assert result.notes == []


def test_ir_alone_is_lowered() -> None:
    model = parsed("g (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }", 13, ir=10)
    after = lowered(model)
    assert after.proto.ir_version == 8
    after.proto.ir_version = 10
    assert after.proto == model


def test_untouched_nodes_stay_byte_for_byte() -> None:
    model = parsed(
        """g (float[2, 3] x) => (float[2, 3] y) {
            [first] a = Relu(x)  [second] b = HardSwish(a)  [third] y = Add <unused_by_us = 1> (b, x) }""",
        17,
    )
    del model.graph.node[2].attribute[:]
    kept = [model.graph.node[0].SerializeToString(), model.graph.node[2].SerializeToString()]
    after = check_lowered(model, {"x": rand(2, 3)})
    assert [after.proto.graph.node[0].SerializeToString(), after.proto.graph.node[-1].SerializeToString()] == kept
    assert after.notes == ["opset 17 lowered to 13: 2 nodes relabelled, 1 rewritten (HardSwish)"]


def test_bodies_are_lowered_with_constants_of_the_graph_around() -> None:
    inner = onnx.parser.parse_graph("t () => (float[2, 1, 6, 6] t) { t = ReduceMean(x, axes) }")
    other = onnx.parser.parse_graph(
        "e () => (float[2, 1, 6, 6] e) { a = Constant<value_ints = [1]>()  m = ReduceMax(x, a)  e = Mish(m) }"
    )
    node = helper.make_node("If", ["c"], ["y"], name="choice", then_branch=inner, else_branch=other)
    infos = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4, 6, 6]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 1, 6, 6])]
    graph = helper.make_graph([node], "g", infos, outputs, [numpy_helper.from_array(i64(1), "axes")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    for choice in (True, False):
        after = check_lowered(model, {"x": X, "c": np.asarray(choice)})
    branches = [entry.g for entry in after.proto.graph.node[0].attribute]
    assert {node.op_type for branch_ in branches for node in branch_.node} == {
        "ReduceMean", "ReduceMax", "Softplus", "Tanh", "Mul",
    }  # fmt: skip


def test_a_body_that_cannot_be_lowered_is_named() -> None:
    model = SMALL["If"].model("If", 20)
    model.graph.node[0].attribute[0].g.node[0].op_type = "Gelu"
    model.graph.node[0].attribute[0].g.node[0].attribute.append(helper.make_attribute("approximate", "none"))
    check_lowered(model, SMALL["If"].feeds)
    model.graph.node[0].attribute[0].g.node[0].op_type = "Bernoulli"
    with pytest.raises(InputError, match="Bernoulli node Softplus_inside"):
        lowered(model)


def test_computed_shapes_that_cannot_be_zero() -> None:
    """What torch's newer exporter writes for x.view(x.size(0), -1): allowzero=1 with a computed shape."""
    model = parsed(
        """g (float[n, 4, 6, 6] x) => (float[n, m] y)
        <int64[1] rest = {-1}, int64[1] one = {-1}> {
            s = Shape<start = 0, end = 1>(x)  r = Reshape<allowzero = 1>(s, one)  d = Concat<axis = 0>(r, rest)
            y = Reshape<allowzero = 1>(x, d) }""",
        18,
    )
    check_lowered(model, {"x": X})


SIZE_ARITHMETIC = """g (float[1, 4, h, w] x) => (float[a, b, c] y)
    <int64 low = {LOW}, int64 one = {1}, int64 two = {2}, int64[1] flat = {-1}, int64[1] four = {4}, int64[1] at = {0}> {
        n = Shape<start = 0, end = 1>(x)  hh = Shape<start = 2, end = 3>(x)  h = Squeeze(hh, at)
        ww = Shape<start = 3, end = 4>(x)  w = Squeeze(ww, at)
        h1 = Add(h, low)  h2 = Div(h1, two)  h3 = Add(h2, one)  area = Mul(h3, w)  i = Reshape<allowzero = 1>(area, flat)
        p = MaxPool<kernel_shape = [1, 1], strides = [2, 1]>(x)
        d = Concat<axis = 0>(n, four, i)  y = Reshape<allowzero = 1>(p, d) }"""


def test_sizes_computed_from_open_ones() -> None:
    """(H - 1) // 2 + 1, as torch's newer exporter writes the height behind a stride of 2, is at least 1."""
    check_lowered(parsed(SIZE_ARITHMETIC.replace("LOW", "-1"), 18), {"x": rand(1, 4, 6, 6)})


def test_sizes_that_may_come_out_as_zero() -> None:
    with pytest.raises(InputError, match="allowzero is 1"):
        lowered(parsed(SIZE_ARITHMETIC.replace("LOW", "-3"), 18))


def test_shared_axes_and_orphans() -> None:
    model = parsed(
        """g (float[2, 4, 6, 6] x) => (float[2, 4, 1, 1] y, float[2, 4, 1, 1] z) <int64[2] axes = {2, 3}> {
            a = Constant<value_ints = [-1]>()  y = ReduceMean(x, axes)  b = ReduceMax(x, a)  z = ReduceMin(b, axes) }""",
        18,
    )
    after = check_lowered(model, {"x": X})
    assert [node.op_type for node in after.proto.graph.node] == ["ReduceMean", "ReduceMax", "ReduceMin"]
    assert not after.proto.graph.initializer


def test_other_targets_and_other_domains() -> None:
    model = parsed("g (float[2, 3] x) => (float[2, 3] y) { a = Gelu(x)  b = HardSwish(a)  y = Mish(b) }", 22)
    after = check_lowered(model, {"x": rand(2, 3)}, opset=18)
    assert [node.op_type for node in after.proto.graph.node][-2:] == ["HardSwish", "Mish"]
    model.graph.node[2].domain = "trt.plugins"
    model.opset_import.extend([helper.make_opsetid("trt.plugins", 1)])
    after = lowered(model)
    assert after.proto.graph.node[-1].op_type == "Mish"
    assert [(entry.domain, entry.version) for entry in after.proto.opset_import] == [("", 13), ("trt.plugins", 1)]
    with pytest.raises(InputError, match="to opset 13 at the lowest"):
        lowered(model, 11)


def test_newer_than_the_onnx_package() -> None:
    model = parsed("g (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }", 13)
    model.opset_import[0].version = 99
    with pytest.raises(InputError, match="opset 99 was found"):
        lowered(model)


def test_fp16_normalisation_computes_in_fp32() -> None:
    half = {"x": (40 * X).astype(np.float16)}
    scales = {"s": rand(6).astype(np.float16), "b": rand(6).astype(np.float16)}
    case = Case(half, scales)
    check_lowered(case.model("LayerNormalization", 17), half, tolerance=2e-3)
    group = Case(half, {name: value[:4] for name, value in scales.items()}, {"num_groups": 2})
    model = group.model("GroupNormalization", 21)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    after = lowered(model)
    wanted = np.asarray(x64 := half["x"].astype(np.float64)).reshape(2, 2, -1)
    wanted = (wanted - wanted.mean(-1, keepdims=True)) / np.sqrt(wanted.var(-1, keepdims=True) + 1e-5)
    scale, bias = (group.consts[name].astype(np.float64).reshape(1, 4, 1, 1) for name in "sb")
    expected = wanted.reshape(x64.shape) * scale + bias
    assert np.abs(run(after.proto, half) - expected).max() <= 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("producer", "author", "words"),
    [
        ("pytorch", "", "torch.onnx.export"),
        ("pytorch", "Ultralytics", "yolo export"),
        ("PaddlePaddle", "", "paddle2onnx"),
        ("tf2onnx", "", "python -m tf2onnx.convert"),
        ("", "", "torch.onnx.export"),
    ],
)
def test_export_hint(producer: str, author: str, words: str) -> None:
    model = ModelProto(producer_name=producer)
    if author:
        model.metadata_props.add(key="author", value=author)
    hint = export_hint(Model(model, Path("m.onnx")))
    assert words in hint
    assert "13" in hint


def test_compare_sees_differences() -> None:
    model = parsed("g (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }", 13)
    other = parsed("g (float[2, 3] x) => (float[2, 3] y) { y = LeakyRelu<alpha = 0.5>(x) }", 13)
    wide = parsed("g (float[2, 3] x) => (float[6] y) <int64[1] s = {6}> { y = Reshape(x, s) }", 13)
    not_a_number = parsed("g (float[2, 3] x) => (float[2, 3] y) { y = Log(x) }", 13)
    x = np.float32([[-1, 0, 4], [2, -2, 1]])
    assert compare_in_ort(model, model, {"x": x}) == 0
    assert compare_in_ort(model, other, {"x": x}) == pytest.approx(0.25)
    assert compare_in_ort(model, wide, {"x": x}) == np.inf
    assert compare_in_ort(model, not_a_number, {"x": x}) == np.inf
    assert compare_in_ort(not_a_number, not_a_number, {"x": x}) == 0
    with pytest.raises(CheckFailed, match="second graph"):
        compare_in_ort(model, parsed("g (float[2, 3] x) => (float[2, 3] y) { y = NoSuch(x) }", 13), {"x": x})


def test_unsupported_operators() -> None:
    model = parsed(
        """g (float[1, 2, 6, 6] x, uint8[2] u) => (float[1, 2, 6, 6] y)
        <float[4] scales = {1, 1, 2, 2}, float[4] down = {1, 1, 0.5, 0.5}, int64 last = {-1}> {
            [ok] a = Relu(x)  [round] b = Round(a)  [cubic] c = Resize<mode = "cubic">(b, , scales)
            [fine] d = Resize<mode = "linear">(c, , down)  [gather] e = Gather<axis = 3>(d, last)
            [top] f, i = TopK<largest = 0>(d, u)  [cast] h = Cast<to = 2>(d)  y = Identity(d) }""",
        13,
    )
    sparse = helper.make_node("SparseConv2d", ["x"], ["s"], domain="trt.plugins", name="ours")
    other = helper.make_node("FusedConv", ["x"], ["t"], domain="com.microsoft", name="theirs")
    model.graph.node.extend([sparse, other])
    assert unsupported_operators(Model(model, Path("m.onnx"))) == (
        ("input (uint8)", "u"),
        ("Round", "round"),
        ("Resize (cubic)", "cubic"),
        ("Gather (negative indices)", "gather"),
        ("TopK (largest=0)", "top"),
        ("Cast (to uint8)", "cast"),
        ("FusedConv", "theirs"),
    )


def test_unsupported_in_bodies() -> None:
    model = SMALL["If"].model("If", 13)
    model.graph.node[0].attribute[0].g.node[0].op_type = "Sign"
    assert unsupported_operators(Model(model, Path("m.onnx"))) == (("Sign", "Softplus_inside"),)


@pytest.mark.skipif(SHARED is None, reason="needs the shared cases")
def test_real_new_opset() -> None:
    assert SHARED is not None
    path = SHARED / "cases" / "45_new_ir_and_opset.onnx"
    if not path.is_file():
        pytest.skip("case 45 is absent")
    model = onnx.load(path)
    assert (model.ir_version, model.opset_import[0].version) == (11, 22)
    after = check_lowered(model, {model.graph.input[0].name: rand(1, 32, 16, 16)})
    assert unsupported_operators(after) == ()
