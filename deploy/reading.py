"""A model file read into what every later stage works on: a clean graph, and its convolutions with their zeros."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from sparsedeploy.converters.fold_batchnorm import fold_batchnorm
from sparsedeploy.converters.fold_constants import Folding, fold_constants
from sparsedeploy.converters.fuse import ConvUnit, find_units
from sparsedeploy.converters.graph import Graph, Model, attribute, bodies, node_label
from sparsedeploy.converters.load import load
from sparsedeploy.converters.shapes import infer_shapes, resolve_inputs
from sparsedeploy.converters.widen import convolution_types, to_fp32
from sparsedeploy.devices import Device
from sparsedeploy.errors import InputError
from sparsedeploy.layer import ConvLayer, Dim, Epilogue, Geometry, Precision, Reason, Zeros
from sparsedeploy.plugins import KERNELS
from sparsedeploy.two_four import find_order, is_two_four

DUST = 1e-6
"""Weights below this share of the largest are called near zero."""
_FOREIGN: dict[Precision, frozenset[int]] = {
    "fp32": frozenset({TensorProto.DOUBLE, TensorProto.BFLOAT16, TensorProto.FLOAT16}),
    "fp16": frozenset({TensorProto.DOUBLE, TensorProto.BFLOAT16}),
}
"""Types of convolutions that are made fp32 when a model is read for a precision."""
_CONVOLUTIONS = ("Conv", "ConvTranspose", "ConvInteger", "QLinearConv")
_FLOAT_TYPES = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.DOUBLE: "fp64",
}


@dataclass
class Reading:
    """A model read and made clean: constants and BatchNorm folded, shapes known, convolutions seen as units.

    `layers` and `units` go together by position only for 2-D convolutions of the main graph: `unit_of` maps a layer's
    name to its unit.
    """

    model: Model
    model_hash: str
    inputs: dict[str, tuple[int, ...]]
    batch: int
    shapes: dict[str, tuple[Dim, ...]]
    layers: tuple[ConvLayer, ...]
    unit_of: dict[str, ConvUnit]
    precision: Precision
    """What it was read for."""

    def weight(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Weight [oc, ic // group, kh, kw] and bias [oc] of a layer, as float32 (double is narrowed)."""
        unit, graph = self.unit_of[name], self.model.graph
        weight = graph.array(unit.weight)
        assert weight is not None, name
        bias = graph.array(unit.bias) if unit.bias else None
        return weight.astype(np.float32), None if bias is None else bias.reshape(-1).astype(np.float32)


def read(
    path: Path,
    device: Device,
    precision: Precision | None = "fp32",
    given: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    quantized: Collection[str] = (),
) -> Reading:
    """Read a model file into a clean graph and list its convolutions; raises InputError for what cannot be read.

    `quantized` names convolutions whose int8 weights are to be dequantised, so that they become eligible.
    Convolutions in double, bfloat16 and, for fp32, fp16 make the whole graph fp32; precision None is the file's own.
    """
    model = load(path)
    precision = precision or _own_precision(model)
    inputs = resolve_inputs(model, given or {}, batch)
    folding = fold_constants(model, quantized)
    stored = [_stored_type(model.graph, node) for node in _convolutions(model)]
    to_fp32(model, convolution_types(model) & _FOREIGN[precision])
    fold_batchnorm(model)
    shapes = infer_shapes(model, inputs)
    units = find_units(model, shapes)
    named = dict(zip(unit_names(units), units, strict=True))
    # Folding and Casts change neither the convolutions nor their order.
    types = _Stored(_convolutions(model), stored)
    facts = _Facts(model.graph, shapes, folding, types, device, precision)
    layers = [_describe(facts, name, unit) for name, unit in named.items()]
    layers += _other_convolutions(model, {id(unit.conv) for unit in units}, set(named), shapes, types)
    if not layers:
        raise InputError(
            f"{path}: the model has no convolution, so there is nothing sparsedeploy could run sparse. "
            "Give it a convolutional network, exported with its weights."
        )
    size = next((shape[0] for shape in inputs.values() if shape), batch or 1)
    return Reading(model, file_hash(path), inputs, batch or size, shapes, tuple(layers), named, precision)


class _Stored:
    """The types of weights as the file has them, by convolution."""

    def __init__(self, nodes: list[NodeProto], types: list[str]) -> None:
        self.nodes = nodes  # held: an id means nothing once its object is gone
        self.types = {id(node): dtype for node, dtype in zip(nodes, types, strict=True)}

    def get(self, node: NodeProto) -> str:
        """fp32, fp16, bf16, fp64, int8 ...; unknown for a weight that is not constant."""
        return self.types.get(id(node), "unknown")


@dataclass(frozen=True)
class _Facts:
    """What describing a convolution needs to know."""

    graph: Graph
    shapes: Mapping[str, tuple[Dim, ...]]
    folding: Folding
    stored: _Stored
    device: Device
    precision: Precision


def _convolutions(model: Model) -> list[NodeProto]:
    return [node for node in model.proto.graph.node if node.op_type in _CONVOLUTIONS]


def _stored_type(graph: Graph, node: NodeProto) -> str:
    tensor = graph.initializers.get(node.input[1]) if len(node.input) > 1 else None
    if tensor is None:
        return "unknown"
    kind = int(tensor.data_type)
    return _FLOAT_TYPES.get(kind) or str(TensorProto.DataType.Name(kind)).lower()


def stored_precision(path: Path) -> Precision:
    """fp16 for a model whose convolutions are fp16, else fp32; fp32 for a file that cannot be read."""
    try:
        return _own_precision(Model(onnx.load(path, load_external_data=False), path))
    except Exception:  # the loader says what is wrong, once, with more care
        return "fp32"


def _own_precision(model: Model) -> Precision:
    """By the convolutions' weights; where none is a constant, by the model's float inputs."""
    inputs = {value.type.tensor_type.elem_type for value in model.graph.inputs()}
    kinds = convolution_types(model) or frozenset(inputs & set(_FLOAT_TYPES))
    return "fp16" if kinds == {TensorProto.FLOAT16} else "fp32"


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(stream)


def _digest(stream: io.BufferedReader) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def unit_names(units: Iterable[ConvUnit]) -> list[str]:
    """A unique name per unit: its convolution's own, or its output's where names are missing or repeat."""
    names: dict[str, None] = {}
    for unit in units:
        names[_unique(node_label(unit.conv), str(unit.conv.output[0]), names)] = None
    return list(names)


def _unique(name: str, output: str, taken: Collection[str]) -> str:
    """The name, else the output's, else `output:2`, `output:3` ...: what no other convolution has."""
    wishes = (name, output, *(f"{output}:{count}" for count in range(2, len(taken) + 3)))
    return next(wish for wish in wishes if wish not in taken)


def count_zeros(weight: NDArray[np.generic], group: int) -> Zeros:
    """Count the zeros of a weight [oc, ic // group, ...] as fp32 carries it; -0.0 is zero.

    Raises ValueError for an empty weight or one that the groups do not divide.
    """
    oc, icg = weight.shape[:2]
    if not weight.size or group < 1 or oc % group:
        raise ValueError(f"a weight of shape {list(weight.shape)} in {group} groups has nothing to count")
    flat = np.abs(weight.reshape(oc, icg, -1).astype(np.float32, copy=False))
    nonzero = (flat != 0).view(np.uint8)
    per_channel = np.array([np.count_nonzero(row) for row in nonzero])  # faster than a sum along an axis
    nnz = int(per_channel.sum())
    dust = int(np.count_nonzero(flat < DUST * float(flat.max()))) - (flat.size - nnz) if nnz else 0
    read = nonzero.reshape(group, oc // group, -1).max(axis=1).reshape(group, icg, -1).max(axis=2)
    return Zeros(
        nnz=nnz,
        total=flat.size,
        nnz_per_channel=(int(per_channel.min()), float(np.median(per_channel)), int(per_channel.max())),
        empty_filters=int(np.count_nonzero(per_channel == 0)),
        empty_inputs=int(np.count_nonzero(read == 0)),
        near_zero=dust,
        two_four=2 * nnz <= flat.size and is_two_four(nonzero),
        two_four_permuted=_permutes_to_two_four(nonzero, group),
        sparsity=1.0 - nnz / flat.size,
    )


def _permutes_to_two_four(nonzero: NDArray[np.uint8], group: int) -> bool:
    """Whether an order of each group's input channels was found in which [oc, icg, taps] is 2:4."""
    parts = nonzero.reshape(group, -1, *nonzero.shape[1:])
    return all(find_order(part) is not None for part in parts)


def _describe(facts: _Facts, name: str, unit: ConvUnit) -> ConvLayer:
    shapes, folding = facts.shapes, facts.folding
    graph, conv = facts.graph, unit.conv
    x, y = shapes.get(conv.input[0], ()), shapes.get(conv.output[0], ())
    reasons: list[Reason] = []
    zeros, dtype, shape = None, "unknown", tuple(int(d) for d in shapes.get(conv.input[1], ()) if isinstance(d, int))
    tensor = graph.initializers.get(unit.weight)
    key = str(conv.output[0])
    group = int(attribute(conv, "group", 1))  # type: ignore[call-overload]
    if key in folding.quantized:
        found = folding.quantized[key]
        dtype, shape, zeros = found.dtype, found.zeros.shape, count_zeros(found.zeros, group)
        reasons.append(Reason(code="quantized", text="quantized: left dense"))
    elif tensor is None:
        why = folding.unfolded.get(key, f"weight '{unit.weight}' is not constant")
        reasons.append(Reason(code="weight-not-constant", text=why))
    else:
        weight = graph.array(unit.weight)
        assert weight is not None
        dtype, shape = facts.stored.get(conv), weight.shape
        if tensor.data_type in _FLOAT_TYPES:
            zeros = count_zeros(weight, group)
        else:
            reasons.append(Reason(code="dtype", text=f"weights are {dtype}"))
    if unit.bias and graph.array(unit.bias) is None:
        why = folding.unfolded.get(key, f"bias '{unit.bias}' is not constant")
        reasons.append(Reason(code="bias-not-constant", text=why))
    geometry, problem = _geometry(conv, shape, x)
    if problem:
        reasons.append(problem)
    layer = ConvLayer(
        name=name, weight=unit.weight, dtype=dtype, shape=tuple(shape), input_shape=x, output_shape=y, geometry=geometry,
        zeros=zeros, epilogue=unit.epilogue, ineligible=tuple(reasons),
    )  # fmt: skip
    if layer.ineligible:
        return layer
    refusals = [kernel.supports(layer, facts.device, facts.precision) for kernel in KERNELS]
    if all(refusals):
        return layer.model_copy(update={"ineligible": tuple(reason for reason in refusals if reason)})
    return layer


def _geometry(conv: NodeProto, shape: tuple[int, ...], x: tuple[Dim, ...]) -> tuple[Geometry | None, Reason | None]:
    """The convolution's geometry, or the reason why it has none that we can use."""
    if len(shape) != 4:
        text = f"{len(shape) - 2}-D" if len(shape) in (3, 5) else "weight shape unknown"
        return None, Reason(code="rank", text=text)
    if len(x) != 4 or not all(isinstance(dim, int) for dim in x[1:]):
        return None, Reason(code="shape", text=f"input shape {_spell(x)} is not known")
    oc, icg, kh, kw = shape
    h, w = int(x[2]), int(x[3])
    group = int(attribute(conv, "group", 1))  # type: ignore[call-overload]
    stride, dilation = _pair(conv, "strides"), _pair(conv, "dilations")
    pads = _pads(conv, (h, w), (kh, kw), stride, dilation)
    geometry = Geometry(
        oc=oc, ic=icg * group, kh=kh, kw=kw, h=h, w=w, stride=stride, pads=pads, dilation=dilation, group=group
    )
    if int(x[1]) != geometry.ic or geometry.oh < 1 or geometry.ow < 1 or min(*stride, *dilation) < 1 or min(pads) < 0:
        return None, Reason(code="shape", text=f"input {_spell(x)} does not fit the weight {_spell(shape)}")
    return geometry, None


def _pair(conv: NodeProto, name: str) -> tuple[int, int]:
    values = attribute(conv, name) or (1, 1)
    first, second = (int(value) for value in values)  # type: ignore[attr-defined]
    return first, second


def _pads(
    conv: NodeProto, size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Explicit pads, or those that auto_pad means at this input size (ONNX: SAME_UPPER puts the odd one at the end)."""
    auto = str(attribute(conv, "auto_pad", "NOTSET"))
    if auto in ("NOTSET", ""):
        top, left, bottom, right = (int(value) for value in attribute(conv, "pads") or (0, 0, 0, 0))  # type: ignore[attr-defined]
        return top, left, bottom, right
    if auto == "VALID":
        return 0, 0, 0, 0
    begin, end = [], []
    for i in range(2):
        total = max((-(-size[i] // stride[i]) - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 - size[i], 0)
        small, large = total // 2, total - total // 2
        begin.append(small if auto == "SAME_UPPER" else large)
        end.append(large if auto == "SAME_UPPER" else small)
    return begin[0], begin[1], end[0], end[1]


def _spell(shape: Iterable[Dim]) -> str:
    return "x".join(str(dim) for dim in shape) or "?"


def _other_convolutions(
    model: Model, seen: set[int], names: set[str], shapes: Mapping[str, tuple[Dim, ...]], stored: _Stored
) -> list[ConvLayer]:
    """Convolutions that are no units: transposed, quantised operators, and everything inside If and Loop bodies."""
    found: list[ConvLayer] = []
    graph = model.graph
    for node, path in _walk(model.proto.graph.node, ""):
        if id(node) in seen or node.op_type not in _CONVOLUTIONS:
            continue
        if path:
            reason = Reason(code="in-body", text=f"inside {path}")
        elif node.op_type != "Conv":
            reason = Reason(
                code="operator", text="quantized: left dense" if node.op_type != "ConvTranspose" else "ConvTranspose"
            )
        else:
            shape = _weight_shape(graph, node, shapes)
            reason = Reason(code="rank", text=f"{len(shape) - 2}-D" if len(shape) in (3, 5) else "weight shape unknown")
        name = _unique(path + node_label(node), f"{path}{node.output[0]}", names)
        names = names | {name}
        found.append(
            ConvLayer(
                name=name,
                weight=node.input[1] if len(node.input) > 1 else "",
                op=node.op_type,
                **_weight_facts(graph, node, shapes, stored),
                input_shape=shapes.get(node.input[0], ()),
                output_shape=shapes.get(node.output[0], ()),
                epilogue=Epilogue(),
                ineligible=(reason,),
            )
        )
    return found


def _weight_shape(graph: Graph, node: NodeProto, shapes: Mapping[str, tuple[Dim, ...]]) -> tuple[int, ...]:
    name = node.input[1] if len(node.input) > 1 else ""
    tensor = graph.initializers.get(name)
    if tensor is not None:
        return tuple(int(dim) for dim in tensor.dims)
    return tuple(int(dim) for dim in shapes.get(name, ()) if isinstance(dim, int))


class _WeightFacts(TypedDict):
    dtype: str
    shape: tuple[int, ...]
    zeros: Zeros | None


def _weight_facts(
    graph: Graph, node: NodeProto, shapes: Mapping[str, tuple[Dim, ...]], stored: _Stored
) -> _WeightFacts:
    """dtype, shape and zeros of a weight that no kernel runs: counted all the same, where it is a constant float."""
    shape = _weight_shape(graph, node, shapes)
    tensor = graph.initializers.get(node.input[1]) if len(node.input) > 1 else None
    if tensor is None or tensor.data_type not in _FLOAT_TYPES or len(shape) < 3 or 0 in shape:
        return _WeightFacts(dtype="unknown", shape=shape, zeros=None)
    weight = graph.array(tensor.name)
    assert weight is not None
    group = int(attribute(node, "group", 1))  # type: ignore[call-overload]
    if node.op_type == "ConvTranspose":  # its weight is [ic, oc // group, ...]
        weight, group = weight.swapaxes(0, 1), 1
    dtype = stored.get(node)  # a node in a body has no entry
    dtype = _FLOAT_TYPES[tensor.data_type] if dtype == "unknown" else dtype
    return _WeightFacts(dtype=dtype, shape=shape, zeros=count_zeros(weight, group))


def _walk(nodes: Iterable[NodeProto], path: str) -> Iterable[tuple[NodeProto, str]]:
    for node in nodes:
        yield node, path
        for body in bodies(node):
            yield from _walk(body.node, f"{path}{node.op_type} '{node_label(node)}'/{body.name or 'body'}/")
