"""Units found around convolutions: every order that exports use, and every case where fusing would be wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import SHARED
from onnx import TensorProto, helper, numpy_helper, parser

from sparsedeploy.converters.fold_batchnorm import fold_batchnorm
from sparsedeploy.converters.fuse import NO_HIGH, NO_LOW, ConvUnit, find_units
from sparsedeploy.converters.graph import Array, Model
from sparsedeploy.layer import Dim, Epilogue

CONV = "c = Conv<pads=[1,1,1,1]>(x, w)"
BIASED = "c = Conv<pads=[1,1,1,1]>(x, w, b)"
RELU6 = {"lo": np.float32(0), "hi": np.float32(6)}


def build(
    lines: list[str],
    values: dict[str, Array] | None = None,
    outputs: tuple[str, ...] = ("y",),
    opset: int = 13,
    shape: tuple[Dim, ...] = (1, 4, 8, 8),
    dtype: type[np.floating] = np.float32,
) -> tuple[Model, dict[str, tuple[Dim, ...]]]:
    """A model with inputs x and r of `shape` and a 4x4x3x3 weight w; shapes by onnx's own inference."""
    default: dict[str, Array] = {"w": np.ones((4, 4, 3, 3), dtype), "b": np.ones(4, dtype)}
    values = {**default, **{name: np.asarray(value) for name, value in (values or {}).items()}}
    used = {name for line in lines for name in parser.parse_node(line).input} | set(outputs)
    body_text = " ".join(line for line in lines if "then_branch" in line)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [parser.parse_node(line) for line in lines],
        "g",
        [helper.make_tensor_value_info(name, element, shape) for name in ("x", "r")],
        [helper.make_tensor_value_info(name, element, [None] * 4) for name in outputs],
        [numpy_helper.from_array(a, name) for name, a in values.items() if name in used or f"({name})" in body_text],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(proto)
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    shapes: dict[str, tuple[Dim, ...]] = {}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        dims = value.type.tensor_type.shape.dim
        shapes[value.name] = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims)
    return Model(proto, Path("model.onnx")), shapes


def only(lines: list[str], **kwargs: object) -> ConvUnit:
    """The one unit of a model, after checking that it covers what it says."""
    (unit,) = find_units(*build(lines, **kwargs))  # type: ignore[arg-type]
    assert unit.nodes[0] is unit.conv
    assert unit.nodes[-1].output[0] == unit.output
    for before, after in zip(unit.nodes, unit.nodes[1:], strict=False):
        assert before.output[0] in after.input
    return unit


def kinds(unit: ConvUnit) -> list[str]:
    return [node.op_type for node in unit.nodes]


ACTIVATIONS = {
    "Relu({})": {"activation": "relu"},
    "LeakyRelu<alpha=0.1>({})": {"activation": "leaky_relu", "slope": float(np.float32(0.1))},
    "LeakyRelu({})": {"activation": "leaky_relu", "slope": float(np.float32(0.01))},
    "Clip({}, lo, hi)": {"activation": "clip", "low": 0.0, "high": 6.0},
}


@pytest.mark.parametrize("text", ACTIVATIONS)
@pytest.mark.parametrize("conv", [CONV, BIASED])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("add", ["Add", "Sum"])
@pytest.mark.parametrize("order", ["act", "add", "add act", "act add"])
def test_every_order(text: str, conv: str, swap: bool, add: str, order: str) -> None:
    lines, value, expected = [conv], "c", {"bias": conv == BIASED}
    for number, step in enumerate(order.split()):
        name = "y" if number == len(order.split()) - 1 else "i"
        if step == "act":
            lines.append(f"{name} = {text.format(value)}")
            expected |= ACTIVATIONS[text]
        else:
            lines.append(f"{name} = {add}({'r, ' + value if swap else value + ', r'})")
            expected["residual"] = "after_activation" if order == "act add" else "before_activation"
        value = name
    unit = only(lines, values=RELU6)
    assert unit.epilogue == Epilogue(**expected)
    assert (unit.x, unit.weight, unit.output) == ("x", "w", "y")
    assert unit.bias == ("b" if conv == BIASED else None)
    assert unit.residual == ("r" if "add" in order else None)
    assert len(unit.nodes) == 1 + len(order.split())


@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 6, {"activation": "clip", "low": 0.0, "high": 6.0}),
        (-1.5, 2.5, {"activation": "clip", "low": -1.5, "high": 2.5}),
        (0, None, {"activation": "relu"}),
        (0, np.inf, {"activation": "relu"}),
        (None, 6, {"activation": "clip", "low": NO_LOW, "high": 6.0}),
        (-np.inf, 6, {"activation": "clip", "low": NO_LOW, "high": 6.0}),
        (-1, None, {"activation": "clip", "low": -1.0, "high": NO_HIGH}),
        (2, 1, None),
        (np.nan, 1, None),
    ],
)
def test_clip_bounds(
    opset: int, dtype: type[np.floating], low: float | None, high: float | None, expected: dict[str, object] | None
) -> None:
    values: dict[str, Array] = {}
    attributes: dict[str, float] = {}
    for name, bound in (("min", low), ("max", high)):
        if bound is not None:
            values[name], attributes[name] = np.asarray(bound, dtype), float(bound)
    line = f"y = Clip(c, {'min' if 'min' in values else ''}, {'max' if 'max' in values else ''})"
    model, shapes = build([CONV, line if opset >= 11 else "y = Clip(c)"], values, opset=opset, dtype=dtype)
    if opset < 11:
        node = model.proto.graph.node[1]
        node.attribute.extend(helper.make_attribute(name, bound) for name, bound in attributes.items())
    (unit,) = find_units(model, shapes)
    assert unit.epilogue == (Epilogue(**expected) if expected else Epilogue())
    assert len(unit.nodes) == (2 if expected else 1)


def test_clip_bound_of_a_constant_node_and_one_that_is_computed() -> None:
    constant = "zero = Constant<value_float=0.0>()"
    assert only([constant, CONV, "y = Clip(c, zero, hi)"], values=RELU6).epilogue.describe() == "relu6"
    computed = "m = ReduceMax<keepdims=0>(x)"
    assert kinds(only([computed, CONV, "y = Clip(c, lo, m)"], values=RELU6)) == ["Conv"]
    as_bound = "y = Clip(lo, lo, c)"  # the convolution's output is a bound, not the input
    assert kinds(only([CONV, as_bound], values=RELU6)) == ["Conv"]


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1)])
@pytest.mark.parametrize("operands", ["c, k", "k, c"])
def test_constant_add_is_a_bias(shape: tuple[int, ...], operands: str) -> None:
    constant = {"k": np.ones(shape, np.float32)}
    unit = only([CONV, f"a = Add({operands})", "s = Add(a, r)", "y = Relu(s)"], values=constant)
    assert unit.bias == "k"
    assert unit.epilogue == Epilogue(bias=True, activation="relu", residual="before_activation")
    assert kinds(only([BIASED, f"y = Add({operands})"], values=constant)) == ["Conv"]
    assert kinds(only([CONV, "a = Relu(c)", f"y = Add({operands.replace('c', 'a')})"], values=constant)) == [
        "Conv",
        "Relu",
    ]


@pytest.mark.parametrize("shape", [(), (1,), (4,), (8,), (1, 1, 1), (1, 4, 8, 1), (1, 1, 8, 8), (2, 4, 8, 8)])
def test_constant_of_another_shape_stays_an_add(shape: tuple[int, ...]) -> None:
    values = {"k": np.ones(shape, np.float32)}
    lines = [CONV, "y = Add(c, k)"]
    if shape == (4,):  # would broadcast along width, which is 8
        model, shapes = build(["y = Conv(x, w)"])
        model.proto.graph.node[0].output[0] = "c"
        model.proto.graph.node.append(helper.make_node("Add", ["c", "k"], ["y"]))
        model.proto.graph.initializer.append(numpy_helper.from_array(values["k"], "k"))
        (unit,) = find_units(model, {**shapes, "c": (1, 4, 6, 6)})
    else:
        unit = only(lines, values=values)
    assert kinds(unit) == ["Conv"]


def test_constant_of_the_full_shape_is_a_residual() -> None:
    unit = only([CONV, "y = Add(c, k)"], values={"k": np.ones((1, 4, 8, 8), np.float32)})
    assert (unit.residual, unit.bias) == ("k", None)


@pytest.mark.parametrize(
    ("own", "other", "fused"),
    [
        ((1, 4, 8, 8), (1, 4, 8, 8), True),
        (("N", 4, "H", "W"), ("N", 4, "H", "W"), True),
        (("N", 4, 8, 8), ("M", 4, 8, 8), False),
        (("N", 4, 8, 8), (1, 4, 8, 8), False),
        ((1, 4, 8, 8), (1, 4, 1, 1), False),
        ((1, 4, 8, 8), (1, 1, 8, 8), False),
        ((2, 4, 8, 8), (1, 4, 8, 8), False),
        ((1, 4, 8, 8), (4, 8, 8), False),
        ((1, 4, 8, 8), (), False),
        (("?", 4, 8, 8), ("?", 4, 8, 8), False),
        (("", 4, 8, 8), ("", 4, 8, 8), False),
        ((-1, 4, 8, 8), (-1, 4, 8, 8), False),
        ((0, 4, 8, 8), (0, 4, 8, 8), False),
        (None, (1, 4, 8, 8), False),
        ((1, 4, 8, 8), None, False),
        (None, None, False),
    ],
)
def test_residual_needs_proof_of_equal_shape(
    own: tuple[Dim, ...] | None, other: tuple[Dim, ...] | None, fused: bool
) -> None:
    model, _ = build([CONV, "s = Add(c, r)", "y = Relu(s)"])
    shapes = {name: shape for name, shape in (("c", own), ("r", other)) if shape is not None}
    (unit,) = find_units(model, shapes)
    assert kinds(unit) == (["Conv", "Add", "Relu"] if fused else ["Conv"])


def test_broadcast_residuals_are_refused_whichever_operand_is_small() -> None:
    pooled = "p = GlobalAveragePool(r)"
    assert kinds(only([pooled, CONV, "y = Add(c, p)"])) == ["Conv"]
    small = ["p = GlobalAveragePool(x)", "c = Conv<pads=[1,1,1,1]>(p, w)", "y = Add(c, r)"]
    assert kinds(only(small)) == ["Conv"]


def test_two_readers_an_output_or_a_body_end_the_unit() -> None:
    assert kinds(only([CONV, "y = Relu(c)", "z = Neg(c)"], outputs=("y", "z"))) == ["Conv"]
    assert kinds(only([CONV, "y = Relu(c)"], outputs=("y", "c"))) == ["Conv"]
    body = "z = If(t) <then_branch = p () => (float[1,4,8,8] o) { o = Neg(c) }, else_branch = q () => (float[1,4,8,8] o) { o = Abs(x) }>"
    assert kinds(only([CONV, "y = Relu(c)", body], values={"t": np.array(True)}, outputs=("y", "z"))) == ["Conv"]
    later = [CONV, "s = Add(c, r)", "y = Relu(s)", "z = Neg(s)"]
    assert kinds(only(later, outputs=("y", "z"))) == ["Conv", "Add"]


def test_sum_of_a_value_with_itself_and_of_three_stay() -> None:
    assert kinds(only([CONV, "y = Add(c, c)"])) == ["Conv"]
    assert kinds(only([CONV, "y = Sum(c, r, x)"])) == ["Conv"]
    assert kinds(only([CONV, "y = Sum(c)"])) == ["Conv"]


@pytest.mark.parametrize(
    "rest",
    [
        ["g = Sigmoid(c)", "y = Mul(c, g)"],
        ["y = PRelu(c, k)"],
        ["y = Sigmoid(c)"],
        ["y = Mul(c, r)"],
        ["y = Sub(c, r)"],
        ["y = Identity(c)"],
    ],
)
def test_other_operators_stay(rest: list[str]) -> None:
    assert kinds(only([CONV, *rest], values={"k": np.ones((4, 1, 1), np.float32)})) == ["Conv"]


def test_one_activation_and_one_residual_at_most() -> None:
    assert kinds(only([CONV, "a = Relu(c)", "y = LeakyRelu(a)"])) == ["Conv", "Relu"]
    assert kinds(only([CONV, "a = Add(c, r)", "y = Add(a, x)"])) == ["Conv", "Add"]
    assert kinds(only([CONV, "a = Relu(c)", "s = Add(a, r)", "y = Relu(s)"])) == ["Conv", "Relu", "Add"]


def test_add_of_two_convolutions_goes_to_the_later() -> None:
    lines = [CONV, "d = Conv<pads=[1,1,1,1]>(r, w)", "a = Relu(c)", "s = Add(a, d)", "y = Relu(s)"]
    first, second = find_units(*build(lines))
    assert kinds(first) == ["Conv", "Relu"]
    assert kinds(second) == ["Conv", "Add", "Relu"]
    assert (second.conv.output[0], second.residual, second.bias) == ("d", "a", None)


def test_add_goes_to_the_earlier_when_the_later_has_its_residual() -> None:
    lines = [CONV, "d = Conv<pads=[1,1,1,1]>(r, w)", "e = Add(d, x)", "y = Add(c, e)"]
    first, second = find_units(*build(lines))
    assert (kinds(first), first.residual) == (["Conv", "Add"], "e")
    assert (kinds(second), second.residual) == (["Conv", "Add"], "x")


def test_residual_blocks_in_a_row_share_no_node() -> None:
    lines = [
        CONV, "a = Relu(c)", "d = Conv<pads=[1,1,1,1]>(a, w)", "s = Add(d, x)", "t = Relu(s)",
        "e = Conv<pads=[1,1,1,1]>(t, w)", "f = Clip(e, lo, hi)", "h = Conv<pads=[1,1,1,1]>(f, w)", "y = Add(t, h)",
    ]  # fmt: skip
    units = find_units(*build(lines, RELU6))
    assert [unit.epilogue.describe() for unit in units] == ["relu", "add+relu", "relu6", "add"]
    assert [unit.residual for unit in units] == [None, "x", None, "t"]
    nodes = [id(node) for unit in units for node in unit.nodes]
    assert len(nodes) == len(set(nodes)) == len(lines)


def test_dtype_and_rank() -> None:
    assert kinds(only([CONV, "y = Relu(c)"], dtype=np.float16)) == ["Conv", "Relu"]
    assert kinds(only([CONV, "y = Relu(c)"], dtype=np.float64)) == ["Conv"]
    three_d = {"w": np.ones((4, 4, 3, 3, 3), np.float32)}
    model, shapes = build(["y = Conv(x, w)"], three_d, shape=(1, 4, 8, 8, 8))
    assert find_units(model, shapes) == ()


def test_computed_weight_is_a_unit_of_one_node() -> None:
    unit = only(["v = Mul(w, w)", "c = Conv<pads=[1,1,1,1]>(x, v)", "y = Relu(c)"])
    assert (kinds(unit), unit.weight) == (["Conv"], "v")


def test_old_broadcasting_is_no_bias() -> None:
    model, shapes = build(["y = Conv(x, w)"], opset=6)
    model.proto.graph.node[0].output[0] = "c"
    model.proto.graph.node.append(helper.make_node("Add", ["c", "k"], ["y"], broadcast=1))
    model.proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 1, 1), np.float32), "k"))
    (unit,) = find_units(model, shapes)
    assert kinds(unit) == ["Conv"]


def test_foreign_domains_are_not_ours() -> None:
    model, shapes = build([CONV, "y = Relu(c)"])
    model.proto.graph.node[1].domain = "com.example"
    (unit,) = find_units(model, shapes)
    assert kinds(unit) == ["Conv"]
    model.proto.graph.node[0].domain = "com.example"
    assert find_units(model, shapes) == ()


def test_the_graph_is_not_touched() -> None:
    model, shapes = build([BIASED, "s = Add(c, r)", "y = Clip(s, lo, hi)"], RELU6)
    before = model.proto.SerializeToString()
    find_units(model, shapes)
    assert model.proto.SerializeToString() == before


@pytest.mark.skipif(SHARED is None, reason="no shared model files")
def test_convolutions_in_branches_are_no_units() -> None:
    assert SHARED is not None
    path = SHARED / "cases" / "36_conv_in_if_branches.onnx"
    assert find_units(Model(onnx.load(path), path), {}) == ()


def _initialise(proto: onnx.ModelProto) -> None:
    """Turn the ConstantOfShape nodes that stand for weights in onnx's light models into initializers."""
    dims = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type != "ConstantOfShape"]
    for node in proto.graph.node:
        if node.op_type == "ConstantOfShape":
            tensor = numpy_helper.from_array(np.full(dims[node.input[0]], 0.5, np.float32), node.output[0])
            proto.graph.initializer.append(tensor)
            proto.graph.input.append(helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


@pytest.mark.skipif(SHARED is None, reason="no shared model files")
@pytest.mark.parametrize(
    ("name", "folded", "epilogues"),
    [
        ("resnet50", 53, {"bias": 4, "bias+relu": 33, "bias+add+relu": 16}),
        ("shufflenet", 49, {"bias": 19, "bias+relu": 17, "bias+add+relu": 13}),
        ("squeezenet", 0, {"bias+relu": 26}),
    ],
)
def test_real_topologies(name: str, folded: int, epilogues: dict[str, int]) -> None:
    assert SHARED is not None
    path = SHARED / "models" / "onnx_light" / f"light_{name}.onnx"
    proto = onnx.load(path)
    _initialise(proto)
    model = Model(proto, path)
    assert fold_batchnorm(model) == folded
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    values = (*inferred.input, *inferred.value_info)
    shapes = {value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim) for value in values}
    assert Counter(unit.epilogue.describe() for unit in find_units(model, shapes)) == epilogues
