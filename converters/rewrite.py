"""Convolution units replaced by SparseConv2d nodes, and the way back: a graph that ONNX Runtime can run.

The node's fields are defined in plugins.node. Everything that is not a replaced node, its constants or its shape
entries stays byte for byte what it was.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from sparsedeploy.converters.fuse import NO_HIGH, NO_LOW, ConvUnit, Shapes
from sparsedeploy.converters.graph import (
    Array,
    Graph,
    Model,
    add_initializer,
    fresh_name,
    node_label,
    remove_nodes,
    remove_orphans,
)
from sparsedeploy.converters.open_sizes import NAMELESS_SIZES
from sparsedeploy.errors import InputError
from sparsedeploy.layer import Dim
from sparsedeploy.plugins.node import DOMAIN, OP_TYPE, FieldValue, SparseConv

Unpack = Callable[[SparseConv], tuple[Array, Array | None]]
"""Weight [oc, ic // group, kh, kw] and bias [oc] or None of what a node carries."""

_Step = tuple[str, list[str], dict[str, Any]]
"""Operator, operands after the running value, attributes."""

_MALFORMED = (
    ValueError, KeyError, IndexError, TypeError, OverflowError, StopIteration, OSError, struct.error, zlib.error,
)  # fmt: skip
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_ELEMENT = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16}


def rewrite(
    model: Model, nodes: Mapping[str, SparseConv], units: Sequence[ConvUnit], shapes: Shapes | None = None
) -> None:
    """Replace each unit whose convolution's output name (`unit.conv.output[0]`) is a key of `nodes`.

    The node stands where the unit's last node stood, so the order stays topological. Constants become INT32
    initializers `<layer>.constant<k>`; weights, biases and clip bounds that nothing reads any more go. No shape
    inference knows the operator, so each node's output gets a shape entry: sizes that the graph does not say come from
    `shapes`, which must hold for every run of the model (open sizes as symbols), else from the node's geometry.
    Raises ValueError, before any change, where nodes and units do not fit: a mistake of the caller.
    """
    chosen = [(unit, nodes[unit.conv.output[0]]) for unit in units if unit.conv.output[0] in nodes]
    places = _places(model, chosen)
    if not len(nodes) == len(chosen) == len(places):
        raise ValueError(f"{len(nodes)} nodes, {len(chosen)} units for them, {len(places)} of these in the graph")
    if differing := [node.layer for unit, node in chosen if not _agree(unit, node)]:
        raise ValueError(f"node and unit disagree about bias, activation or residual: {differing}")
    index = model.graph
    if computed := [node.layer for unit, node in chosen if not _is_constant(index, unit.weight, unit.bias)]:
        raise ValueError(f"weight or bias is computed in the graph, a node cannot carry it: {computed}")
    if not chosen:
        return
    graph = model.proto.graph
    _describe_outputs(model, chosen, shapes or {})
    for at, unit, sparse in reversed(places):
        graph.node.insert(at + 1, _sparse_node(model, unit, sparse))
    remove_nodes(graph, [node for unit, _ in chosen for node in unit.nodes])
    kept = {name for unit, _ in chosen for name in (unit.x, unit.residual, unit.output)}
    inner = {name for unit, _ in chosen for node in unit.nodes for name in node.output} - kept
    constants = {name for unit, _ in chosen for node in unit.nodes for name in node.input if name} - inner - kept
    remove_orphans(graph, sorted(constants))
    _remove_shape_entries(model, inner | constants)
    if not model.opset(DOMAIN):
        model.proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def _agree(unit: ConvUnit, sparse: SparseConv) -> bool:
    """Whether the node does all that the unit's nodes do; slopes and bounds may have been rounded since."""
    mine, its = unit.epilogue, sparse.epilogue
    return mine.bias <= its.bias and (mine.activation, mine.residual) == (its.activation, its.residual)


def _is_constant(index: Graph, *names: str | None) -> bool:
    makers = {name: index.producer(name) for name in names if name}
    return all(name in index.initializers or (node and node.op_type == "Constant") for name, node in makers.items())


def _places(model: Model, chosen: Sequence[tuple[ConvUnit, SparseConv]]) -> list[tuple[int, ConvUnit, SparseConv]]:
    """Each unit with the position of its last node, in graph order."""
    last = {id(unit.nodes[-1]): (unit, node) for unit, node in chosen}
    return [(at, *last[id(node)]) for at, node in enumerate(model.proto.graph.node) if id(node) in last]


def _sparse_node(model: Model, unit: ConvUnit, sparse: SparseConv) -> NodeProto:
    inputs = [unit.x] if unit.residual is None else [unit.x, unit.residual]
    for number, words in enumerate(sparse.constants):
        name = fresh_name(model.proto.graph, f"{sparse.layer}.constant{number}")
        add_initializer(model, numpy_helper.from_array(np.asarray(words, np.int32), name))
        inputs.append(name)
    node = helper.make_node(OP_TYPE, inputs, [unit.output], name=unit.conv.name or sparse.layer, domain=DOMAIN)
    node.attribute.extend(_attribute(name, value) for name, value in sparse.fields().items())
    return node


def _attribute(name: str, value: FieldValue) -> AttributeProto:
    """Types said outright: onnx's helper guesses them from the value."""
    entry = AttributeProto(name=name)
    if isinstance(value, str):
        entry.type, entry.s = AttributeProto.STRING, value.encode("utf-8")
    elif isinstance(value, int):
        entry.type, entry.i = AttributeProto.INT, value
    elif isinstance(value, tuple):
        entry.type = AttributeProto.INTS
        entry.ints.extend(value)
    else:
        entry.type = AttributeProto.TENSOR
        entry.t.CopyFrom(numpy_helper.from_array(value, name))
    return entry


def _describe_outputs(model: Model, chosen: Sequence[tuple[ConvUnit, SparseConv]], shapes: Shapes) -> None:
    """Write a shape entry for every new node's output that has none or an incomplete one."""
    graph, index = model.proto.graph, model.graph
    entries = {value.name: value for group in (graph.input, graph.output, graph.value_info) for value in group}
    for unit, sparse in chosen:
        g, present = sparse.geometry, entries.get(unit.output)
        batch = _sizes(shapes.get(unit.x)) or _dims(entries.get(unit.x)) or ("",)
        own = (batch[0], g.oc, *((g.oh, g.ow) if sparse.fixed_hw else ("", "")))
        dims = _first_known(_dims(present), _sizes(shapes.get(unit.output)), own)
        if unit.output in index.outputs or _dims(present) == dims:
            continue
        element = _weight_type(index, unit, sparse)
        value = helper.make_tensor_value_info(unit.output, element, [size or None for size in dims])
        if present is None:
            entries[unit.output] = graph.value_info.add()
        entries[unit.output].CopyFrom(value)


def _sizes(shape: Sequence[Dim] | None) -> tuple[Dim, ...] | None:
    """The shape with "" for every size that says nothing."""
    if shape is None:
        return None
    return tuple("" if size in NAMELESS_SIZES or (isinstance(size, int) and size < 1) else size for size in shape)


def _dims(value: ValueInfoProto | None) -> tuple[Dim, ...] | None:
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    dims = value.type.tensor_type.shape.dim
    return _sizes([dim.dim_value if dim.HasField("dim_value") else str(dim.dim_param) for dim in dims])


def _first_known(*shapes: tuple[Dim, ...] | None) -> tuple[Dim, ...]:
    """Per axis the first size that says something."""
    ranked = [shape for shape in shapes if shape is not None and len(shape) == 4]
    return tuple(next((size for size in sizes if size != ""), "") for sizes in zip(*ranked, strict=True))


def _weight_type(index: Graph, unit: ConvUnit, sparse: SparseConv) -> int:
    """Element type of the output, which for a Conv is its weight's."""
    tensor = index.initializers.get(unit.weight)
    if tensor is not None:
        return int(tensor.data_type)
    weight = index.array(unit.weight)
    return int(_ELEMENT[sparse.precision] if weight is None else helper.np_dtype_to_tensor_dtype(weight.dtype))


def _remove_shape_entries(model: Model, suspects: set[str]) -> None:
    index, entries = model.graph, model.proto.graph.value_info
    gone = {name for name in suspects if name not in index.producers and name not in index.initializers}
    for at in reversed([i for i, value in enumerate(entries) if value.name in gone]):
        del entries[at]


def read_nodes(model: Model) -> dict[str, SparseConv]:
    """Every SparseConv2d of the main graph by the name of its output; raises InputError naming a malformed node."""
    index = model.graph
    return {node.output[0]: _read(model, index, node) for node in model.proto.graph.node if _is_sparse(node)}


def _is_sparse(node: NodeProto) -> bool:
    return bool(node.op_type == OP_TYPE and node.domain == DOMAIN and node.output)


def _read(model: Model, index: Graph, node: NodeProto) -> SparseConv:
    try:
        fields = {entry.name: _field(entry) for entry in node.attribute}
        count = fields["constants"]
        if not isinstance(count, int) or not 0 <= count < len(node.input):
            raise ValueError(f"field constants is {count!r} and the node has {len(node.input)} inputs")
        first = len(node.input) - count
        sparse = SparseConv.from_fields(fields, tuple(_constant(index, name) for name in node.input[first:]))
        if first != 1 + sparse.has_residual:
            raise ValueError(f"{first} inputs before the constants, the epilogue needs {1 + sparse.has_residual}")
    except _MALFORMED as error:
        what = f"lacks field {error}" if isinstance(error, KeyError) else f"is malformed: {error}"
        raise InputError(
            f"{model.path}: {OP_TYPE} node {node_label(node)} {what}. Such a node must be as this version of "
            f"sparsedeploy writes it; convert the original model again."
        ) from error
    return sparse


def _field(entry: AttributeProto) -> FieldValue:
    if entry.type == AttributeProto.STRING:
        return str(entry.s.decode("utf-8"))
    if entry.type == AttributeProto.INT:
        return int(entry.i)
    if entry.type == AttributeProto.INTS:
        return tuple(entry.ints)
    if entry.type == AttributeProto.TENSOR and entry.t.data_type == TensorProto.INT8:
        return np.asarray(numpy_helper.to_array(entry.t), np.int8)
    raise ValueError(f"field {entry.name} has attribute type {entry.type}")


def _constant(index: Graph, name: str) -> NDArray[np.int32]:
    words = index.array(name)
    if words is None or words.dtype != np.int32:
        raise ValueError(f"input {name} is no INT32 constant")
    return words.astype(np.int32, copy=False)


def restore(model: Model, unpack: Unpack) -> Model:
    """A new model in which every SparseConv2d is a Conv again, with Add, Relu, Clip or LeakyRelu per its epilogue.

    `unpack` gives the weights that a node carries; they are cast to the element type of the node's output. Operators
    take the form of the model's own opset. What the sparse nodes alone read is not copied, the rest is copied once.
    Raises InputError for a malformed node or weights that do not fit its geometry.
    """
    nodes = read_nodes(model)
    source, target = model.proto.graph, ModelProto()
    unread = _read_as_constants_alone(model.graph, nodes)
    others = any(node.domain == DOMAIN and not _is_sparse(node) for node in source.node)
    _copy_fields(model.proto, target, {"graph", "opset_import"})
    _copy_fields(source, target.graph, {"node", "initializer", "input"})
    target.opset_import.extend(entry for entry in model.proto.opset_import if others or entry.domain != DOMAIN)
    target.graph.initializer.extend(tensor for tensor in source.initializer if tensor.name not in unread)
    target.graph.input.extend(value for value in source.input if value.name not in unread)
    stubs: list[NodeProto] = []
    for node in source.node:
        if _is_sparse(node):  # keeps its place, and its names in sight of fresh_name; the fields may be megabytes
            stub = target.graph.node.add(op_type=OP_TYPE, domain=DOMAIN, name=node.name)
            stub.input.extend(node.input)
            stub.output.extend(node.output)
            stubs.append(stub)
        elif not (node.op_type == "Constant" and unread.issuperset(node.output)):
            target.graph.node.append(node)
    restored = Model(target, model.path, list(model.notes))
    types = {v.name: v.type.tensor_type.elem_type for v in (*source.value_info, *source.input, *source.output)}
    for stub in stubs:
        sparse = nodes[stub.output[0]]
        said = [types[name] for name in (stub.output[0], stub.input[0]) if types.get(name) in _FLOATS]
        element = said[0] if said else _ELEMENT[sparse.precision]
        _restore_node(restored, stub, sparse, unpack(sparse), helper.tensor_dtype_to_np_dtype(element))
    remove_nodes(target.graph, stubs)
    return restored


def _copy_fields(source: ModelProto | GraphProto, target: ModelProto | GraphProto, skipped: set[str]) -> None:
    for field, value in source.ListFields():
        if field.name in skipped:
            continue
        if hasattr(value, "MergeFrom"):  # messages and repeated fields alike
            getattr(target, field.name).MergeFrom(value)
        else:
            setattr(target, field.name, value)


def _read_as_constants_alone(index: Graph, nodes: Mapping[str, SparseConv]) -> set[str]:
    """Values that serve only as constants of sparse nodes."""
    constants: set[str] = set()
    others = set(index.outputs)
    for node in index.proto.node:
        first = len(node.input) - (len(nodes[node.output[0]].constants) if _is_sparse(node) else 0)
        constants.update(node.input[first:])
        others.update(node.input[:first])
    return constants - others - index.outer_uses.keys()


def _restore_node(
    model: Model, stub: NodeProto, sparse: SparseConv, carried: tuple[Array, Array | None], dtype: np.dtype[Any]
) -> None:
    """Put the operators of one node before its stub, which the caller removes."""
    graph = model.proto.graph
    at = next(i for i, node in enumerate(graph.node) if node is stub)
    value, steps = stub.input[0], _steps(model, stub, sparse, carried, dtype)
    for number, (op_type, operands, attributes) in enumerate(steps):
        last = number == len(steps) - 1
        output = stub.output[0] if last else fresh_name(graph, f"{sparse.layer}.{op_type.lower()}")
        node = helper.make_node(op_type, [value, *operands], [output], name="" if number else stub.name, **attributes)
        graph.node.insert(at + number, node)
        value = output


def _steps(
    model: Model, stub: NodeProto, sparse: SparseConv, carried: tuple[Array, Array | None], dtype: np.dtype[Any]
) -> list[_Step]:
    """The operators that one node stands for; their constants are added to the graph."""
    g, (weight, bias) = sparse.geometry, carried
    if weight.shape != g.weight_shape or (bias is not None and bias.shape != (g.oc,)):
        raise InputError(
            f"{model.path}: {OP_TYPE} node {node_label(stub)} carries a weight of shape {list(weight.shape)} and a "
            f"bias of {None if bias is None else list(bias.shape)}; its geometry needs {list(g.weight_shape)} and "
            f"{[g.oc]}. Convert the original model again."
        )
    weights = [_add_constant(model, f"{sparse.layer}.weight", weight, dtype)]
    if bias is not None:
        weights.append(_add_constant(model, f"{sparse.layer}.bias", bias, dtype))
    attributes = {"kernel_shape": (g.kh, g.kw), "strides": g.stride, "pads": g.pads, "dilations": g.dilation}
    conv: _Step = ("Conv", weights, {**attributes, "group": g.group})
    add: list[_Step] = [("Add", [stub.input[1]], {})] if sparse.has_residual else []
    activation = _activation_steps(model, sparse, dtype)
    if sparse.epilogue.residual == "after_activation":
        return [conv, *activation, *add]
    return [conv, *add, *activation]


def _activation_steps(model: Model, sparse: SparseConv, dtype: np.dtype[Any]) -> list[_Step]:
    e = sparse.epilogue
    if e.activation == "relu":
        return [("Relu", [], {})]
    if e.activation == "leaky_relu":
        return [("LeakyRelu", [], {"alpha": e.slope})]
    if e.activation == "none":
        return []
    bounds = {key: bound for key, bound in (("min", e.low), ("max", e.high)) if bound not in (NO_LOW, NO_HIGH)}
    if model.opset() < 11:
        return [("Clip", [], bounds)]
    names = [
        _add_constant(model, f"{sparse.layer}.{key}", np.array(bounds[key]), dtype) if key in bounds else ""
        for key in ("min", "max")
    ]
    return [("Clip", names, {})]


def _add_constant(model: Model, wish: str, values: Array, dtype: np.dtype[Any]) -> str:
    name = fresh_name(model.proto.graph, wish)
    with np.errstate(over="ignore"):  # an overflow in fp16 shows in the outputs
        add_initializer(model, numpy_helper.from_array(values.astype(dtype), name))
    return name
