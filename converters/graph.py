"""A loaded model and the questions every pass asks of its main graph: who makes this value, who reads it, is it constant.

Passes work on the ModelProto itself, so that a node nobody touches stays byte for byte what it was. Subgraphs (If, Loop,
Scan bodies) are looked into only for what they read from outside; their own nodes are never rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

Array = NDArray[np.generic]


@dataclass
class Model:
    """A model being converted. `proto` is ours to change; `path` is the user's file and is never written."""

    proto: ModelProto
    path: Path
    notes: list[str] = field(default_factory=list)
    """What was done to the graph, one sentence each, for the user."""

    @property
    def base_dir(self) -> Path:
        """Where external data of `path` lies."""
        return self.path.resolve().parent

    @property
    def graph(self) -> Graph:
        """A fresh index of the main graph; take a new one after changing the graph."""
        return Graph(self.proto.graph, self.base_dir)

    def opset(self, domain: str = "") -> int:
        """The imported opset version of a domain; 0 when it is not imported."""
        names = {"", "ai.onnx"} if domain in ("", "ai.onnx") else {domain}
        return max((entry.version for entry in self.proto.opset_import if entry.domain in names), default=0)


class Graph:
    """An index over one GraphProto. Cheap to build: make a new one after every change."""

    def __init__(self, proto: GraphProto, base_dir: Path) -> None:
        self.proto = proto
        self._base_dir = base_dir
        self.initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in proto.initializer}
        self.producers: dict[str, NodeProto] = {}
        self.consumers: dict[str, list[NodeProto]] = {}
        self.outer_uses: dict[str, list[NodeProto]] = {}
        """Values that bodies of control-flow nodes read from this graph, with the node that owns the body."""
        for node in proto.node:
            for name in node.output:
                if name:
                    self.producers[name] = node
            for name in dict.fromkeys(node.input):
                if name:
                    self.consumers.setdefault(name, []).append(node)
            for name in outer_names(node):
                self.outer_uses.setdefault(name, []).append(node)
        self.outputs = {output.name for output in proto.output}

    def inputs(self) -> list[ValueInfoProto]:
        """The inputs a caller must feed: graph inputs that no initializer gives a value."""
        return [value for value in self.proto.input if value.name not in self.initializers]

    def producer(self, name: str) -> NodeProto | None:
        """The main-graph node that makes a value; None for inputs and initializers."""
        return self.producers.get(name)

    def readers(self, name: str) -> list[NodeProto]:
        """Main-graph nodes that read a value, bodies of control flow included (as the node that owns the body)."""
        return self.consumers.get(name, []) + self.outer_uses.get(name, [])

    def sole_reader(self, name: str) -> NodeProto | None:
        """The only node that reads a value; None if there are several, a body reads it, or it is a graph output."""
        if name in self.outputs or name in self.outer_uses:
            return None
        readers = self.consumers.get(name, [])
        return readers[0] if len(readers) == 1 else None

    def array(self, name: str) -> Array | None:
        """The value of an initializer or of a Constant node; None when the name is neither.

        External data is read from beside the model; the caller gets numpy's view of the stored type (bfloat16 and
        float8 as ml_dtypes).
        """
        tensor = self.initializers.get(name)
        if tensor is None:
            node = self.producers.get(name)
            if node is None or node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
                return None
            return constant_value(node, str(self._base_dir))
        return np.asarray(numpy_helper.to_array(tensor, str(self._base_dir)))


def constant_value(node: NodeProto, base_dir: str = "") -> Array | None:
    """The array a Constant node holds; None for forms that are no dense number (strings, sparse_value)."""
    for attribute in node.attribute:
        if attribute.name == "value":
            return np.asarray(numpy_helper.to_array(attribute.t, base_dir))
        if attribute.name in ("value_float", "value_floats"):
            return np.asarray(onnx.helper.get_attribute_value(attribute), np.float32)
        if attribute.name in ("value_int", "value_ints"):
            return np.asarray(onnx.helper.get_attribute_value(attribute), np.int64)
    return None


def attribute(node: NodeProto, name: str, default: object = None) -> object:
    """An attribute's Python value (str for STRING), or the default."""
    for entry in node.attribute:
        if entry.name == name:
            value = onnx.helper.get_attribute_value(entry)
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return default


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs a control-flow node holds."""
    for entry in node.attribute:
        if entry.type == AttributeProto.GRAPH:
            yield entry.g
        elif entry.type == AttributeProto.GRAPHS:
            yield from entry.graphs


def outer_names(node: NodeProto) -> set[str]:
    """Values that the bodies of a node read from the graph around it."""
    names: set[str] = set()
    for body in bodies(node):
        names |= _free_names(body)
    return names


def _free_names(body: GraphProto) -> set[str]:
    known = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
    free: set[str] = set()
    for node in body.node:
        free |= {name for name in node.input if name and name not in known}
        free |= outer_names(node) - known
        known |= set(node.output)
    return free | {value.name for value in body.output if value.name not in known}


def node_label(node: NodeProto) -> str:
    """How messages name a node: its name, else its first output."""
    return str(node.name or (node.output[0] if node.output else node.op_type))


def remove_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Take nodes out of a graph by identity; the others stay the same objects, so references to them stay valid."""
    gone = {id(node) for node in nodes}
    for index in reversed([i for i, node in enumerate(graph.node) if id(node) in gone]):
        del graph.node[index]


def remove_orphans(graph: GraphProto, candidates: Iterable[str]) -> None:
    """Remove those of the named values that nothing reads any more: initializers (and their input entries), and the
    constant nodes that made them, transitively. Values read by a body or a graph output stay.
    """
    index = Graph(graph, Path())  # one for the whole call: an index of a 1700-node graph costs 15 ms
    nodes: dict[int, NodeProto] = {}
    values: set[str] = set()

    def unread(name: str) -> bool:
        return name not in index.outputs and all(id(reader) in nodes for reader in index.readers(name))

    pending = list(candidates)
    while pending:
        name = pending.pop()
        node = index.producer(name)
        if not unread(name) or (node is not None and id(node) in nodes):
            continue
        if node is None:
            values |= {name} & index.initializers.keys()
        elif all(unread(output) for output in node.output):
            nodes[id(node)] = node
            pending += [value for value in node.input if value]
    remove_nodes(graph, nodes.values())
    for entries in (graph.initializer, graph.input):
        for at in reversed([i for i, entry in enumerate(entries) if entry.name in values]):
            del entries[at]


def add_initializer(model: Model, tensor: TensorProto) -> None:
    """Append an initializer; in IR 3 and older every initializer is listed among the graph inputs too."""
    model.proto.graph.initializer.append(tensor)
    if model.proto.ir_version < 4:
        entry = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        model.proto.graph.input.append(entry)


def fresh_name(graph: GraphProto, wish: str) -> str:
    """`wish`, or `wish_1`, `wish_2` ...: a name no value or node of the graph has."""
    taken = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        taken.update(node.output)
        taken.add(node.name)
        taken |= outer_names(node)
    name, count = wish, 0
    while name in taken:
        count += 1
        name = f"{wish}_{count}"
    return name
