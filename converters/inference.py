"""Element types and shapes of every value of a model, inferred without its weights, so that large models stay cheap.

onnx's shape inference serialises the whole model; it is given a copy whose large tensors keep only their type and shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, numpy_helper

from sparsedeploy.converters.graph import Model, bodies

_SMALL = 1024
"""Elements up to which a tensor keeps its data: shapes and axes are computed from such tensors."""
_SAME_TYPE_AS_INPUT = ("trt.plugins",)
"""Domains whose nodes give what they take: unknown to onnx, but their output type is that of their first input."""


@dataclass(frozen=True)
class ValueType:
    """What is known of a value. `shape` is None when even the rank is unknown, a None in it is an unknown dimension."""

    kind: int = TensorProto.UNDEFINED
    """TensorProto element type; UNDEFINED when unknown or when the value is no tensor."""
    shape: tuple[int | None, ...] | None = None
    is_tensor: bool = True
    """False for sequences, maps and optionals."""


@dataclass
class Types:
    """Types of one graph's values, with the graphs inside it. Names not known here are looked up in the graph around."""

    values: dict[str, ValueType] = field(default_factory=dict)
    bodies: dict[int, list[Types]] = field(default_factory=dict)
    """Index of a node with bodies -> the types inside each, in the order of graph.bodies."""
    outer: Types | None = None

    def get(self, name: str) -> ValueType:
        """The type of a value, as far as it is known."""
        scope: Types | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        return ValueType()


def infer_types(model: Model) -> Types:
    """Types and shapes of all values; what onnx cannot infer is simply absent. Never raises for odd models."""
    skeleton = ModelProto(ir_version=model.proto.ir_version, opset_import=model.proto.opset_import)
    skeleton.functions.extend(model.proto.functions)
    skeleton.graph.CopyFrom(_without_weights(model.proto.graph, str(model.base_dir)))
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=True)
    except Exception:  # onnx raises several unrelated types; declared types still help
        inferred = skeleton
    return _collect(inferred.graph, None)


def _without_weights(graph: GraphProto, base_dir: str) -> GraphProto:
    bare = GraphProto(name=graph.name, input=graph.input, output=graph.output, value_info=graph.value_info)
    bare.initializer.extend(_bare_tensor(tensor, base_dir) for tensor in graph.initializer)
    bare.node.extend(_bare_node(node, base_dir) for node in graph.node)
    return bare


def _bare_node(node: NodeProto, base_dir: str) -> NodeProto:
    if node.domain in _SAME_TYPE_AS_INPUT:
        # Expand to an unknown shape: the element type of the input, nothing said about the shape.
        return NodeProto(op_type="Expand", input=[*node.input[:1], ""], output=node.output[:1])
    if node.op_type == "GroupNormalization":
        # onnx infers nothing for it; it keeps type and shape.
        return NodeProto(op_type="Identity", input=node.input[:1], output=node.output[:1])
    if not any(entry.HasField("t") or entry.HasField("g") or entry.graphs for entry in node.attribute):
        return node
    bare = NodeProto(name=node.name, op_type=node.op_type, domain=node.domain, input=node.input, output=node.output)
    for entry in node.attribute:
        if entry.type == AttributeProto.TENSOR:
            bare.attribute.add(name=entry.name, type=entry.type, t=_bare_tensor(entry.t, base_dir))
        elif entry.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            copy = bare.attribute.add(name=entry.name, type=entry.type)
            if entry.type == AttributeProto.GRAPH:
                copy.g.CopyFrom(_without_weights(entry.g, base_dir))
            copy.graphs.extend(_without_weights(body, base_dir) for body in entry.graphs)
        else:
            bare.attribute.append(entry)
    return bare


def _bare_tensor(tensor: TensorProto, base_dir: str) -> TensorProto:
    count = 1
    for dim in tensor.dims:
        count *= dim
    if count > _SMALL:
        return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        try:
            return numpy_helper.from_array(numpy_helper.to_array(tensor, base_dir), tensor.name)
        except (OSError, ValueError, onnx.checker.ValidationError):
            return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return tensor


def _collect(graph: GraphProto, outer: Types | None) -> Types:
    types = Types(outer=outer)
    for tensor in graph.initializer:
        types.values[tensor.name] = ValueType(tensor.data_type, tuple(tensor.dims))
    for sparse in graph.sparse_initializer:
        types.values[sparse.values.name] = ValueType(sparse.values.data_type, tuple(sparse.dims))
    declared: Iterable[ValueInfoProto] = [*graph.value_info, *graph.output, *graph.input]
    for value in declared:
        types.values.setdefault(value.name, _value_type(value.type))
    for index, node in enumerate(graph.node):
        inside = [_collect(body, types) for body in bodies(node)]
        if inside:
            types.bodies[index] = inside
    return types


def _value_type(proto: TypeProto) -> ValueType:
    if proto.WhichOneof("value") not in (None, "tensor_type"):
        return ValueType(is_tensor=False)
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return ValueType(tensor.elem_type)
    dims = tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None for dim in tensor.shape.dim)
    return ValueType(tensor.elem_type, dims)
