"""Units rewritten to SparseConv2d and back: node counts, size, numbers in ONNX Runtime, the checker, untouched nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import SHARED
from onnx import AttributeProto, TensorProto, helper, numpy_helper, parser

from sparsedeploy.converters.fuse import ConvUnit, find_units
from sparsedeploy.converters.graph import Array, Model, attribute
from sparsedeploy.converters.rewrite import read_nodes, restore, rewrite
from sparsedeploy.errors import InputError
from sparsedeploy.layer import Dim, Geometry
from sparsedeploy.plugins.node import DOMAIN, OP_TYPE, Image, SparseConv

CONV = "c = Conv<pads=[1,1,1,1]>(x, w)"
BIASED = "c = Conv<pads=[1,1,1,1]>(x, w, b)"
Shapes = dict[str, tuple[Dim, ...]]


def values(dtype: type[np.floating] = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(4, 4, 3, 3)) * (rng.random((4, 4, 3, 3)) < 0.3) for name in ("w", "w2")}
    scalars = {"lo": np.array(0.0), "hi": np.array(1.5)}
    weights["grouped"] = rng.normal(size=(4, 2, 3, 2))
    arrays = {**weights, "b": rng.normal(size=4), "k": rng.normal(size=(1, 4, 1, 1)), **scalars}
    return {**{name: value.astype(dtype) for name, value in arrays.items()}, "t": np.array(True)}


def build(
    lines: list[str],
    outputs: tuple[str, ...] = ("y",),
    opset: int = 13,
    ir: int = 8,
    dtype: type[np.floating] = np.float32,
    shape: tuple[Dim, ...] = (2, 4, 6, 6),
) -> Model:
    """A model with inputs x and r and those of `values` that the lines use."""
    element, text = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), " ".join(lines)
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split()) | set(outputs)
    tensors = [numpy_helper.from_array(value, name) for name, value in values(dtype).items() if name in words]
    inputs = [helper.make_tensor_value_info(name, element, shape) for name in ("x", "r")]
    if ir < 4:
        inputs += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors]
    results = [helper.make_tensor_value_info(name, element, [None] * 4) for name in outputs]
    graph = helper.make_graph([parser.parse_node(line) for line in lines], "g", inputs, results, tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    onnx.checker.check_model(proto)
    return Model(proto, Path("model.onnx"))


def shapes_of(model: Model) -> Shapes:
    graph = onnx.shape_inference.infer_shapes(model.proto).graph
    shapes: Shapes = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        dims = value.type.tensor_type.shape.dim
        shapes[value.name] = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims)
    return shapes


def pack(model: Model, unit: ConvUnit, **changes: object) -> SparseConv:
    """A node that carries the dense weight, its floats bit-cast: what a kernel would make, without a kernel."""
    weight = model.graph.array(unit.weight)
    assert weight is not None
    oc, per_group, kh, kw = weight.shape
    group = attribute(unit.conv, "group", 1)
    sizes = [d.dim_value for v in model.proto.graph.input if v.name == "x" for d in v.type.tensor_type.shape.dim]
    geometry = Geometry(
        oc=oc, ic=per_group * group, kh=kh, kw=kw, h=sizes[2], w=sizes[3], group=group,
        stride=tuple(attribute(unit.conv, "strides", [1, 1])), pads=tuple(attribute(unit.conv, "pads", [0, 0, 0, 0])),
        dilation=tuple(attribute(unit.conv, "dilations", [1, 1])),
    )  # fmt: skip
    parts = [weight] + ([] if unit.bias is None else [model.graph.array(unit.bias)])
    constants = tuple(np.asarray(part, np.float32).reshape(-1).view(np.int32) for part in parts)
    fields = {
        "layer": unit.conv.name or unit.conv.output[0], "kernel": "dense", "geometry": geometry,
        "epilogue": unit.epilogue, "precision": "fp16" if weight.dtype == np.float16 else "fp32",
        "constants": constants, "parameters": (3, 4),
    }  # fmt: skip
    return SparseConv(**{**fields, **changes})  # type: ignore[arg-type]


def unpack(sparse: SparseConv) -> tuple[Array, Array | None]:
    weight, *bias = (words.view(np.float32) for words in sparse.constants)
    return weight.reshape(sparse.geometry.weight_shape), bias[0] if bias else None


def convert(model: Model, keep: Collection[str] = (), **changes: object) -> dict[str, SparseConv]:
    """Rewrite every unit but those whose convolution's output is in `keep`; the checker must pass."""
    shapes = shapes_of(model)
    units = find_units(model, shapes)
    nodes = {u.conv.output[0]: pack(model, u, **changes) for u in units if u.conv.output[0] not in keep}
    rewrite(model, nodes, units, shapes)
    onnx.checker.check_model(model.proto)
    return nodes


def run(proto: onnx.ModelProto, shape: tuple[int, ...] = (2, 4, 6, 6)) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    rng, feed = np.random.default_rng(1), {}
    for value in session.get_inputs():
        feed[value.name] = rng.normal(size=shape).astype(np.float16 if "float16" in value.type else np.float32)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feed), strict=True))


def assert_same_outputs(before: dict[str, Array], after: dict[str, Array], tolerance: float = 1e-5) -> None:
    """Every element within `tolerance` of the output's largest value; NaN fails."""
    assert before.keys() == after.keys()
    for name in before:
        a, b = before[name].astype(np.float64), after[name].astype(np.float64)
        assert a.shape == b.shape
        assert np.abs(a).max() > 0
        assert (np.abs(a - b) <= tolerance * np.abs(a).max()).all(), name


def ops(model: Model) -> list[str]:
    return [node.op_type for node in model.proto.graph.node]


def check_round_trip(model: Model, count: int, tolerance: float = 1e-5, **changes: object) -> Model:
    """Convert, read back, restore, compare; returns the rewritten model."""
    before, size = run(model.proto), len(model.proto.graph.node)
    units = find_units(model, shapes_of(model))
    nodes = convert(model, **changes)
    assert len(nodes) == count
    assert len(model.proto.graph.node) <= size - sum(len(unit.nodes) - 1 for unit in units)
    back = read_nodes(model)
    assert len(back) == count
    for unit in units:
        one, two = nodes[unit.conv.output[0]], back[unit.output]
        assert one.fields().keys() == two.fields().keys()
        for field, value in one.fields().items():
            np.testing.assert_array_equal(value, two.fields()[field])
        for a, b in zip(one.constants, two.constants, strict=True):
            np.testing.assert_array_equal(a, b)
    rewritten = model.proto.SerializeToString()
    restored = restore(model, unpack)
    assert model.proto.SerializeToString() == rewritten
    onnx.checker.check_model(restored.proto, full_check=True)
    assert OP_TYPE not in ops(restored)
    assert all(entry.domain != DOMAIN for entry in restored.proto.opset_import)
    assert [v.name for v in restored.graph.inputs()] == [v.name for v in model.graph.inputs()]
    assert_same_outputs(before, run(restored.proto), tolerance)
    return model


ORDERS = {
    "bare": ["y = Conv<pads=[1,1,1,1]>(x, w)"],
    "bias": ["y = Conv<pads=[1,1,1,1]>(x, w, b)"],
    "bias add": [CONV, "y = Add(c, k)"],
    "relu": [BIASED, "y = Relu(c)"],
    "leaky": [BIASED, "y = LeakyRelu<alpha=0.1>(c)"],
    "add": [BIASED, "y = Add(r, c)"],
    "add relu": [BIASED, "a = Add(c, r)", "y = Relu(a)"],
    "bias add, add leaky": [CONV, "a = Add(c, k)", "d = Sum(a, r)", "y = LeakyRelu(d)"],
    "relu add": [CONV, "a = Relu(c)", "y = Add(r, a)"],
    "leaky add": [BIASED, "a = LeakyRelu(c)", "y = Add(a, r)"],
}
CLIPS = {
    "clip": ("Clip(c, lo, hi)", "Clip<min=0.0, max=1.5>(c)"),
    "min only": ("Clip(c, lo)", "Clip<min=0.0>(c)"),
    "max only": ("Clip(c, , hi)", "Clip<max=1.5>(c)"),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order(order: str, dtype: type[np.floating]) -> None:
    model = build(ORDERS[order], dtype=dtype)
    check_round_trip(model, 1, 1e-5 if dtype == np.float32 else 2e-3)
    assert ops(model) == [OP_TYPE]
    assert all(tensor.data_type == TensorProto.INT32 for tensor in model.proto.graph.initializer)


@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("add", ["", "y = Add(d, r)"])
def test_clips_in_both_forms(clip: str, opset: int, add: str) -> None:
    line = CLIPS[clip][0 if opset >= 11 else 1]
    model = build([BIASED, f"{'d' if add else 'y'} = {line}", *([add] if add else [])], opset=opset)
    check_round_trip(model, 1)
    assert ops(model) == [OP_TYPE]


def test_half_precision_keeps_its_clip() -> None:
    check_round_trip(build([BIASED, "y = Clip(c, lo, hi)"], dtype=np.float16), 1, 2e-3)


def test_geometry_comes_back() -> None:
    line = "y = Conv<strides=[2,1], pads=[0,1,2,3], dilations=[2,1], group=2>(x, grouped, b)"
    check_round_trip(build([line]), 1)


NETWORK = [
    "n = Neg(x)", "c = Conv<pads=[1,1,1,1]>(n, w, b)", "d = Relu(c)", "e = Conv<pads=[1,1,1,1]>(d, w2)",
    "f = Add(e, n)", "g = Clip(f, lo, hi)", "h = MaxPool<kernel_shape=[2,2]>(g)", "i = Conv<pads=[1,1,1,1]>(g, w)",
    "j = Sigmoid(i)", "y = Mul(i, j)",
]  # fmt: skip


def test_a_network_and_its_untouched_nodes() -> None:
    model = build(NETWORK, outputs=("y", "h"))
    names = ("Neg", "MaxPool", "Sigmoid", "Mul")
    untouched = {n.op_type: n.SerializeToString() for n in model.proto.graph.node if n.op_type in names}
    frame = [value.SerializeToString() for value in (*model.proto.graph.input, *model.proto.graph.output)]
    check_round_trip(model, 3)
    assert ops(model) == ["Neg", OP_TYPE, OP_TYPE, "MaxPool", OP_TYPE, "Sigmoid", "Mul"]
    assert untouched == {n.op_type: n.SerializeToString() for n in model.proto.graph.node if n.op_type in names}
    assert frame == [value.SerializeToString() for value in (*model.proto.graph.input, *model.proto.graph.output)]
    assert [(o.domain, o.version) for o in model.proto.opset_import] == [("", 13), (DOMAIN, 1)]


def test_part_of_a_network() -> None:
    model = build(NETWORK)
    before = run(model.proto)
    kept = {n.output[0]: n.SerializeToString() for n in model.proto.graph.node}
    convert(model, keep=("c", "i"))
    assert Counter(ops(model)) == Counter(["Neg", "Conv", "Relu", OP_TYPE, "MaxPool", "Conv", "Sigmoid", "Mul"])
    assert all(n.SerializeToString() == kept[n.output[0]] for n in model.proto.graph.node if n.op_type != OP_TYPE)
    names = {tensor.name for tensor in model.proto.graph.initializer}
    assert names == {"w", "b", "e.constant0"}
    assert_same_outputs(before, run(restore(model, unpack).proto))


def test_nothing_to_rewrite_changes_nothing() -> None:
    model = build(NETWORK)
    before = model.proto.SerializeToString()
    rewrite(model, {}, find_units(model, shapes_of(model)))
    assert model.proto.SerializeToString() == before


def test_both_operands_of_an_add_are_rewritten() -> None:
    lines = [BIASED, "d = Relu(c)", "e = Conv<pads=[1,1,1,1]>(r, w2)", "f = Add(d, e)", "y = Relu(f)"]
    model = build(lines)
    check_round_trip(model, 2)
    assert ops(model) == [OP_TYPE, OP_TYPE]
    first, second = model.proto.graph.node
    assert list(second.input[:2]) == ["r", first.output[0]]


def test_the_earlier_convolution_moves_behind_its_residual() -> None:
    model = build([CONV, "d = Conv<pads=[1,1,1,1]>(r, w2)", "e = Add(d, x)", "f = Neg(e)", "y = Add(c, f)"])
    check_round_trip(model, 2)
    assert ops(model) == [OP_TYPE, "Neg", OP_TYPE]


def random_network(seed: int) -> list[str]:
    """A random graph of 16 nodes over values of one shape, ending in the sum of a few of them."""
    rng, names, lines = np.random.default_rng(seed), ["x", "r"], []
    for number in range(16):
        recent = names[-1:] if rng.random() < 0.6 else names[-4:]
        one, two = (recent[at] for at in rng.integers(0, len(recent), 2))
        forms = (
            f"Conv<pads=[1,1,1,1]>({one}, w)", f"Conv<pads=[1,1,1,1]>({one}, w2, b)", f"Add({one}, {two})",
            f"Relu({one})", f"Clip({one}, lo, hi)", f"LeakyRelu({one})", f"Sum({one}, {two})", f"Sigmoid({one})",
        )  # fmt: skip
        lines.append(f"v{number} = {forms[rng.choice(8, p=[0.2, 0.2, 0.2, 0.1, 0.05, 0.05, 0.1, 0.1])]}")
        names.append(f"v{number}")
    return [*lines, f"y = Sum({', '.join(names[-3:])})"]


@pytest.mark.parametrize("seed", range(40))
def test_random_networks(seed: int) -> None:
    model = build(random_network(seed))
    units = find_units(model, shapes_of(model))
    nodes = [id(node) for unit in units for node in unit.nodes]
    assert len(nodes) == len(set(nodes))
    check_round_trip(model, len(units))


def test_a_convolution_with_two_readers() -> None:
    check_round_trip(build([BIASED, "y = Relu(c)", "z = Neg(c)"], outputs=("y", "z")), 1)


def test_a_convolution_that_is_an_output() -> None:
    check_round_trip(build([BIASED, "y = Relu(c)"], outputs=("y", "c")), 1)


def test_broadcast_residual_stays_an_add() -> None:
    model = build(["p = GlobalAveragePool(r)", BIASED, "y = Add(c, p)"])
    check_round_trip(model, 1)
    assert ops(model) == ["GlobalAveragePool", OP_TYPE, "Add"]


def test_shared_weight_goes_with_its_last_reader() -> None:
    lines = [CONV, "d = Conv<dilations=[2,2], pads=[2,2,2,2]>(x, w)", "y = Sub(c, d)"]
    model = build(lines)
    convert(model, keep=("d",))
    assert "w" in {tensor.name for tensor in model.proto.graph.initializer}
    model = build(lines)
    check_round_trip(model, 2)
    assert "w" not in {tensor.name for tensor in model.proto.graph.initializer}


def test_weight_that_is_an_output_stays() -> None:
    model = build([CONV, "y = Relu(c)"], outputs=("y", "w"))
    check_round_trip(model, 1)
    assert "w" in {tensor.name for tensor in model.proto.graph.initializer}


IF = (
    "z = If(t) <then_branch = p () => (float[2,4,4,4] o) { o = Conv(x, w) }, "
    "else_branch = q () => (float[2,4,4,4] o) { o = Conv(r, w2) }>"
)


def test_weight_used_in_a_branch_stays() -> None:
    model = build(["c = Conv(x, w)", "y = Relu(c)", IF], outputs=("y", "z"))
    branches = model.proto.graph.node[2].SerializeToString()
    check_round_trip(model, 1)
    assert {"w", "w2"} <= {tensor.name for tensor in model.proto.graph.initializer}
    assert ops(model) == [OP_TYPE, "If"]
    assert model.proto.graph.node[1].SerializeToString() == branches


def test_old_ir_lists_constants_as_inputs() -> None:
    model = build([BIASED, "y = Relu(c)"], opset=9, ir=3)
    check_round_trip(model, 1)
    assert {value.name for value in model.proto.graph.input} == {"x", "r", "c.constant0", "c.constant1"}


def test_constant_nodes_of_a_unit_go() -> None:
    model = build(["hi2 = Constant<value_float=1.0>()", BIASED, "y = Clip(c, lo, hi2)"])
    check_round_trip(model, 1)
    assert ops(model) == [OP_TYPE]


def test_constants_in_constant_nodes_are_read_and_not_restored() -> None:
    model = build([BIASED, "y = Relu(c)"])
    before = run(model.proto)
    convert(model)
    graph = model.proto.graph
    for tensor in list(graph.initializer):
        graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    del graph.initializer[:]
    restored = restore(model, unpack)
    assert ops(restored) == ["Conv", "Relu"]
    assert_same_outputs(before, run(restored.proto))


def test_shape_entries_follow_the_values() -> None:
    model = build(NETWORK)
    model.proto.CopyFrom(onnx.shape_inference.infer_shapes(model.proto))
    entries = {value.name: value.SerializeToString() for value in model.proto.graph.value_info}
    convert(model)
    after = {value.name: value.SerializeToString() for value in model.proto.graph.value_info}
    assert after == {name: entry for name, entry in entries.items() if name in set("ndghij")}


@pytest.mark.parametrize("shape", [(2, 4, 6, 6), ("N", 4, 6, 6)])
@pytest.mark.parametrize("known", [True, False])
def test_shapes_downstream_stay_inferable(shape: tuple[Dim, ...], known: bool) -> None:
    model = build([BIASED, "d = Relu(c)", "e = Conv(d, w2)", "y = Neg(e)"], shape=shape)
    shapes = shapes_of(model)
    units = find_units(model, shapes)
    nodes = {unit.conv.output[0]: pack(model, unit) for unit in units}
    rewrite(model, nodes, units, shapes if known else None)
    after = shapes_of(model)
    assert {name: after[name] for name in ("d", "e", "y")} == {name: shapes[name] for name in ("d", "e", "y")}


def test_open_height_and_width_stay_open() -> None:
    model = build([BIASED, "d = Relu(c)", "y = Neg(d)"], shape=("N", 4, "H", "W"))
    shapes = {**shapes_of(model), "c": ("N", 4, "H", "W"), "d": ("N", 4, "H", "W")}
    units = find_units(model, shapes)
    rewrite(model, {"c": pack(model, units[0], fixed_hw=False)}, units, shapes)
    assert shapes_of(model)["d"] == ("N", 4, "H", "W")


def test_names_in_use_are_avoided() -> None:
    model = build([BIASED, "y = Relu(c)"])
    for taken in ("c.constant0", "c.weight", "c.conv"):
        model.proto.graph.node.append(helper.make_node("Neg", ["x"], [taken]))
    onnx.checker.check_model(model.proto)
    check_round_trip(model, 1)


def test_fields_have_the_types_of_the_contract() -> None:
    model = build([BIASED, "y = Relu(c)"])
    convert(model, images=(Image(53, "fp32", "ptx", b"text"),))
    (node,) = model.proto.graph.node
    kinds = {entry.name: entry.type for entry in node.attribute}
    assert (node.op_type, node.domain, list(node.input[:1])) == (OP_TYPE, DOMAIN, ["x"])
    assert kinds["plugin_namespace"] == kinds["layer"] == AttributeProto.STRING
    assert kinds["precision"] == kinds["constants"] == AttributeProto.INT
    assert kinds["geometry"] == kinds["launch_plan"] == AttributeProto.INTS
    (images,) = (entry.t for entry in node.attribute if entry.name == "images")
    assert images.data_type == TensorProto.INT8
    assert images.raw_data
    assert all(tensor.raw_data and tensor.data_type == TensorProto.INT32 for tensor in model.proto.graph.initializer)
    assert read_nodes(model)["y"].images == (Image(53, "fp32", "ptx", b"text"),)


def test_restoring_does_not_copy_what_it_replaces() -> None:
    model = build([BIASED, "y = Relu(c)"])
    convert(model, images=(Image(53, "fp32", "ptx", np.random.default_rng(0).bytes(100_000)),))
    assert model.proto.ByteSize() > 100_000
    restored = restore(model, unpack)
    assert restored.proto.ByteSize() < 3_000
    assert {tensor.data_type for tensor in restored.proto.graph.initializer} == {TensorProto.FLOAT}


@pytest.mark.parametrize("reader", ["output", "node", "branch"])
def test_restoring_keeps_constants_that_others_read(reader: str) -> None:
    model = build([BIASED, "y = Relu(c)"])
    convert(model)
    graph, name = model.proto.graph, "c.constant1"
    if reader == "output":
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT32, [4]))
    else:
        line = "z = Identity(constant_one)"
        if reader == "branch":
            graph.initializer.append(numpy_helper.from_array(np.array(True), "t"))
            branches = (
                f"{at} = {at} () => (int32[4] o) {{ o = Identity(constant_one) }}"
                for at in ("then_branch", "else_branch")
            )
            line = f"z = If(t) <{', '.join(branches)}>"
        graph.node.append(parser.parse_node(line))
        graph.output.append(helper.make_tensor_value_info("z", TensorProto.INT32, [4]))
        _rename(graph.node[1], "constant_one", name)
    restored = restore(model, unpack)
    onnx.checker.check_model(restored.proto)
    words = run(restored.proto)[graph.output[1].name]
    np.testing.assert_array_equal(words.view(np.float32), values()["b"])


def _rename(node: onnx.NodeProto, old: str, new: str) -> None:
    """Replace an input name in a node and in its branches; the parser takes no dots in names."""
    node.input[:] = [new if name == old else name for name in node.input]
    for entry in node.attribute:
        for inner in entry.g.node:
            _rename(inner, old, new)


def test_restoring_without_shape_entries_goes_by_the_precision() -> None:
    for dtype in (np.float32, np.float16):
        model = build([BIASED, "d = Relu(c)", "y = Neg(d)"], dtype=dtype)
        before = run(model.proto)
        model.proto.graph.node.insert(0, helper.make_node("Identity", ["x"], ["plain"]))
        model.proto.graph.node[1].input[0] = "plain"
        convert(model)
        del model.proto.graph.value_info[:]
        assert_same_outputs(before, run(restore(model, unpack).proto), 1e-5 if dtype == np.float32 else 2e-3)


def test_restoring_keeps_the_rest_of_the_model() -> None:
    model = build([BIASED, "y = Relu(c)"])
    model.proto.producer_name, model.proto.doc_string = "someone", "words"
    model.proto.metadata_props.add(key="a", value="b")
    convert(model)
    model.notes.append("note")
    restored = restore(model, unpack)
    assert (restored.proto.producer_name, restored.proto.doc_string, restored.notes) == ("someone", "words", ["note"])
    assert restored.proto.metadata_props == model.proto.metadata_props
    assert restored.proto.graph.name == "g"


def test_mistakes_of_the_caller() -> None:
    model = build([BIASED, "a = Add(c, r)", "y = Relu(a)"])
    (unit,) = units = find_units(model, shapes_of(model))
    sparse, before = pack(model, unit), model.proto.SerializeToString()
    with pytest.raises(ValueError, match="1 nodes, 0 units"):
        rewrite(model, {"other": sparse}, units)
    for change in ({"residual": "none"}, {"residual": "after_activation"}, {"activation": "none"}, {"bias": False}):
        other = pack(model, unit, epilogue=unit.epilogue.model_copy(update=change))
        with pytest.raises(ValueError, match="disagree"):
            rewrite(model, {"c": other}, units)
    with pytest.raises(ValueError, match="0 of these in the graph"):
        rewrite(build([BIASED, "y = Relu(c)"]), {"c": sparse}, units)
    assert model.proto.SerializeToString() == before


@pytest.mark.parametrize("computed", ["weight", "bias"])
def test_computed_weight_or_bias_is_never_lost(computed: str) -> None:
    lines = {
        "weight": ["v = Neg(w)", "y = Conv<pads=[1,1,1,1]>(x, v, b)"],
        "bias": ["v = ReduceMean<axes=[0,2,3], keepdims=0>(r)", "y = Conv<pads=[1,1,1,1]>(x, w, v)"],
    }[computed]
    model = build(lines)
    (unit,) = units = find_units(model, shapes_of(model))
    constant = build(["y = Conv<pads=[1,1,1,1]>(x, w, b)"])
    sparse = pack(constant, *find_units(constant, {}))
    with pytest.raises(ValueError, match="computed in the graph"):
        rewrite(model, {unit.conv.output[0]: sparse}, units)


def _set(name: str, **change: object) -> Callable[[Model], None]:
    def act(model: Model) -> None:
        (entry,) = (entry for entry in model.proto.graph.node[0].attribute if entry.name == name)
        entry.CopyFrom(helper.make_attribute(name, change["to"]))

    return act


def _drop(name: str) -> Callable[[Model], None]:
    def act(model: Model) -> None:
        attributes = model.proto.graph.node[0].attribute
        del attributes[[entry.name for entry in attributes].index(name)]

    return act


def _drop_input(model: Model) -> None:
    del model.proto.graph.node[0].input[-1]


def _no_inputs(model: Model) -> None:
    del model.proto.graph.node[0].input[:]


def _float_constant(model: Model) -> None:
    tensor = model.proto.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(np.ones(tensor.dims, np.float32), tensor.name))


def _short_constant(model: Model) -> None:
    model.proto.graph.initializer[0].raw_data = b"1234"


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        *(
            (_drop(name), name)
            for name in ("abi", "constants", "geometry", "epilogue", "kernel", "images", "launch_plan")
        ),
        (_set("abi", to=2), "abi"),
        (_set("constants", to=7), "constants"),
        (_set("constants", to=-1), "constants"),
        (_set("constants", to=[1]), "constants"),
        (_set("constants", to=1), "inputs before the constants"),
        (_set("geometry", to=[1, 2, 3]), "geometry"),
        (_set("epilogue", to=[1, 9, 0, 0, 0, 0]), "malformed"),
        (_set("epilogue", to=[1, 1, 0, 2**40, 0, 0]), "malformed"),
        (_set("epilogue", to=[1, 1, 1, 0, 0, 0]), "inputs before the constants"),
        (_set("launch_plan", to=[3, 0]), "launch plan"),
        (_set("image_table", to=[1, 53, 0, 0, 1, 1]), "malformed"),
        (_set("images", to=1.5), "images"),
        (_set("kernel", to=np.float32(1)), "kernel"),
        (_drop_input, "constants"),
        (_no_inputs, "inputs"),
        (_float_constant, "INT32"),
        (_short_constant, "malformed"),
    ],
)
def test_malformed_nodes_are_named(damage: Callable[[Model], None], word: str) -> None:
    model = build([BIASED, "y = Relu(c)"])
    model.proto.graph.node[0].name = "stem"
    convert(model)
    damage(model)
    for use in (read_nodes, lambda broken: restore(broken, unpack)):
        with pytest.raises(InputError, match=word) as caught:
            use(model)
        assert "stem" in str(caught.value)
        assert "model.onnx" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_named() -> None:
    model = build([BIASED, "y = Relu(c)"])
    convert(model)
    with pytest.raises(InputError, match=r"\[1, 2, 3, 4\]"):
        restore(model, lambda sparse: (np.zeros((1, 2, 3, 4), np.float32), None))


@pytest.mark.skipif(SHARED is None, reason="no shared model files")
def test_shared_weight_case() -> None:
    assert SHARED is not None
    path = SHARED / "cases" / "34_shared_weight_two_convs.onnx"
    model = Model(onnx.load(path), path)
    before = run(model.proto, (1, 32, 16, 16))
    units = find_units(model, shapes_of(model))
    plain = next(unit for unit in units if attribute(unit.conv, "dilations", [1, 1]) == [1, 1])
    rewrite(model, {plain.conv.output[0]: pack(model, plain)}, units)
    onnx.checker.check_model(model.proto)
    assert Counter(ops(model))["Conv"] == 1
    assert plain.weight in {tensor.name for tensor in model.proto.graph.initializer}
    assert_same_outputs(before, run(restore(model, unpack).proto, (1, 32, 16, 16)))
