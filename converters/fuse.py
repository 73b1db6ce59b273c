"""Which nodes around a convolution one kernel can compute with it: bias, activation and residual addition.

Only recognises; the graph stays as it is. Activation and addition are taken in the order in which they come, so that
ResNet (Add, Relu), VGG (Relu), MobileNetV2 (Add alone) and darknet (LeakyRelu, Add) become one unit each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from sparsedeploy.converters.graph import Graph, Model, attribute
from sparsedeploy.converters.open_sizes import NAMELESS_SIZES, Sizes, has_open_inputs, open_sizes
from sparsedeploy.layer import Dim, Epilogue

Shapes = Mapping[str, tuple[Dim, ...]]

NO_HIGH = float(np.finfo(np.float32).max)
"""High bound of a clip that has none: finite, so that records stay standard JSON and bounds exact in float32."""
NO_LOW = -NO_HIGH
"""Low bound of a clip that has none."""

_DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class ConvUnit:
    """A 2-D Conv and the nodes that can run in its epilogue; `nodes` are all that it replaces, in graph order."""

    conv: NodeProto
    epilogue: Epilogue
    nodes: tuple[NodeProto, ...]
    x: str
    weight: str
    bias: str | None
    """The Conv's bias, shape [oc], or the constant of an Add that acts as one, shape [oc, 1, 1] or [1, oc, 1, 1]."""
    residual: str | None
    output: str
    """Name of the value that the last of `nodes` makes."""


def find_units(model: Model, shapes: Shapes) -> tuple[ConvUnit, ...]:
    """One unit per 2-D Conv of the main graph, in graph order.

    `shapes` gives the known shapes of values, NCHW, open sizes as symbols. A residual is taken only where both shapes
    are known and equal in every size (symbols by name), and, in a model that leaves sizes of its inputs open, where
    they are proven equal whatever those sizes are: the kernel reads a residual as large as its output and broadcasts
    nothing. An inner value of a unit has one reader, is no graph output
    and is read by no body. Where both operands of an Add end a convolution, the one later in graph order takes it.
    Convolutions whose weight is not constant fp32 or fp16 are units of one node.
    """
    graph = model.graph
    known = _Known(graph, model.opset(), shapes, open_sizes(model) if has_open_inputs(model) else None)
    claimed: set[int] = set()
    units = []
    for conv in reversed(model.proto.graph.node):
        if _is(conv, "Conv") and len(conv.input) > 1 and conv.output and _is_2d(graph, conv, shapes):
            unit = _grow(known, conv, claimed)
            claimed.update(id(node) for node in unit.nodes)
            units.append(unit)
    return tuple(reversed(units))


@dataclass(frozen=True)
class _Known:
    """What growing a unit asks about."""

    graph: Graph
    opset: int
    shapes: Shapes
    open: Mapping[str, Sizes] | None
    """Sizes as expressions of the open ones; None where no input leaves a size open."""

    def as_large(self, value: str, other: str) -> bool:
        """Whether two values have equal shapes at every size that the model allows."""
        if self.open is None:
            return True
        sizes = self.open.get(value)
        return sizes is not None and sizes == self.open.get(other)


def _is(node: NodeProto, *op_types: str) -> bool:
    return node.op_type in op_types and node.domain in _DEFAULT_DOMAINS


def _is_2d(graph: Graph, conv: NodeProto, shapes: Shapes) -> bool:
    for name in (conv.input[1], conv.input[0], conv.output[0]):
        shape = _shape(graph, name, shapes)
        if shape is not None:
            return len(shape) == 4
    kernel_shape = attribute(conv, "kernel_shape")
    return isinstance(kernel_shape, list) and len(kernel_shape) == 2


def _tensor(graph: Graph, name: str) -> TensorProto | None:
    """A constant's tensor, unread: external data may be large."""
    node = graph.producer(name)
    if node is None:
        return graph.initializers.get(name)
    if _is(node, "Constant"):
        value = attribute(node, "value")
        return value if isinstance(value, TensorProto) else None
    return None


def _shape(graph: Graph, name: str, shapes: Shapes) -> tuple[Dim, ...] | None:
    tensor = _tensor(graph, name)
    return tuple(tensor.dims) if tensor is not None else shapes.get(name)


@dataclass
class _Chain:
    """A unit while it grows."""

    conv: NodeProto
    oc: int
    value: str
    bias: str | None
    residual: str | None = None
    epilogue: Epilogue = field(default_factory=Epilogue)
    nodes: list[NodeProto] = field(default_factory=list)

    def take(self, node: NodeProto, **epilogue: object) -> None:
        self.nodes.append(node)
        self.value = node.output[0]
        self.epilogue = self.epilogue.model_copy(update=epilogue)

    def unit(self) -> ConvUnit:
        return ConvUnit(
            conv=self.conv, epilogue=self.epilogue, nodes=tuple(self.nodes), x=self.conv.input[0],
            weight=self.conv.input[1], bias=self.bias, residual=self.residual, output=self.value,
        )  # fmt: skip


def _grow(known: _Known, conv: NodeProto, claimed: set[int]) -> ConvUnit:
    graph = known.graph
    weight = _tensor(graph, conv.input[1])
    bias = conv.input[2] if len(conv.input) > 2 and conv.input[2] else None
    chain = _Chain(conv, weight.dims[0] if weight is not None and weight.dims else 0, conv.output[0], bias)
    chain.take(conv, bias=bias is not None)
    if weight is None or weight.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return chain.unit()
    while True:
        reader = graph.sole_reader(chain.value)
        if reader is None or id(reader) in claimed or list(reader.input).count(chain.value) != 1:
            return chain.unit()
        if not (_take_sum(known, chain, reader) or _take_activation(graph, known.opset, chain, reader)):
            return chain.unit()


def _take_sum(known: _Known, chain: _Chain, node: NodeProto) -> bool:
    graph, shapes = known.graph, known.shapes
    if not _is(node, "Add", "Sum") or len(node.input) != 2 or chain.residual is not None:
        return False
    other = node.input[0] if node.input[1] == chain.value else node.input[1]
    plain = chain.epilogue.activation == "none"
    if plain and chain.bias is None and known.opset >= 7 and _acts_as_bias(graph, other, chain.oc):
        chain.bias = other
        chain.take(node, bias=True)
        return True
    own = shapes.get(chain.conv.output[0]) or shapes.get(chain.value)
    if not _proven_equal(own, _shape(graph, other, shapes)) or not known.as_large(chain.conv.output[0], other):
        return False
    chain.residual = other
    chain.take(node, residual="before_activation" if plain else "after_activation")
    return True


def _acts_as_bias(graph: Graph, name: str, oc: int) -> bool:
    tensor = _tensor(graph, name)
    return tensor is not None and tuple(tensor.dims) in ((oc, 1, 1), (1, oc, 1, 1))


def _proven_equal(a: tuple[Dim, ...] | None, b: tuple[Dim, ...] | None) -> bool:
    if a is None or b is None or len(a) != 4 or len(b) != 4:
        return False
    return all(
        type(one) is type(two) and one == two and (one > 0 if isinstance(one, int) else one not in NAMELESS_SIZES)
        for one, two in zip(a, b, strict=True)
    )


def _take_activation(graph: Graph, opset: int, chain: _Chain, node: NodeProto) -> bool:
    if chain.epilogue.activation != "none":
        return False
    if _is(node, "Relu"):
        chain.take(node, activation="relu")
    elif _is(node, "LeakyRelu"):
        slope = attribute(node, "alpha", 0.01)
        if not isinstance(slope, float) or not math.isfinite(slope):
            return False
        chain.take(node, activation="leaky_relu", slope=_float32(slope))
    elif _is(node, "Clip"):
        bounds = _clip_bounds(graph, opset, node)  # None too where the running value is a bound: it is no constant
        if bounds is None:
            return False
        if bounds == (0.0, NO_HIGH):
            chain.take(node, activation="relu")
        else:
            chain.take(node, activation="clip", low=bounds[0], high=bounds[1])
    else:
        return False
    return True


def _float32(value: float) -> float:
    """The float32 that a node's field or attribute stores: 0.1 written there reads 0.10000000149."""
    return float(np.float32(value))


def _clip_bounds(graph: Graph, opset: int, node: NodeProto) -> tuple[float, float] | None:
    """Low and high of a Clip, absent or infinite ones as NO_LOW and NO_HIGH; None when not constant or not ordered."""
    if opset < 11:
        low, high = attribute(node, "min", NO_LOW), attribute(node, "max", NO_HIGH)
    else:
        low, high = _bound(graph, node, 1, NO_LOW), _bound(graph, node, 2, NO_HIGH)
    if not isinstance(low, float) or not isinstance(high, float):
        return None
    low, high = max(_float32(low), NO_LOW), min(_float32(high), NO_HIGH)
    return (low, high) if low <= high else None


def _bound(graph: Graph, node: NodeProto, slot: int, absent: float) -> float | None:
    if slot >= len(node.input) or not node.input[slot]:
        return absent
    tensor = _tensor(graph, node.input[slot])
    if tensor is not None and math.prod(tensor.dims) != 1:
        return None
    value = graph.array(node.input[slot])
    return float(value.reshape(())[()]) if value is not None and value.size == 1 else None
