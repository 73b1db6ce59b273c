"""Make the weight and bias of every convolution an initializer, by evaluating just the constant nodes that make them.

Pruning tools leave masks in the graph (weight = Mul(weight_orig, mask)), exporters put weights into Constant nodes or
behind Cast, Transpose, Identity, biases into an Add behind the convolution. Only Conv nodes and such Adds change; every
other node stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from sparsedeploy.converters.check_convs import check_convs
from sparsedeploy.converters.graph import (
    Array,
    Graph,
    Model,
    add_initializer,
    bodies,
    fresh_name,
    node_label,
    remove_nodes,
    remove_orphans,
)
from sparsedeploy.converters.lean import SMALL, all_tensors, tensor_bytes
from sparsedeploy.converters.shapes import value_types

_RANDOM = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
)
_COMPARISONS = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor"))
_PASSES_VALUES = frozenset(("Cast", "Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "CastLike"))
_NARROW = frozenset((TensorProto.FLOAT16, TensorProto.BFLOAT16))
_EVALUATE_LIMIT = 1 << 31
"""Bytes that one evaluated weight may have; more is no weight but damage."""
_BIAS_LIMIT = 1 << 20
"""Bytes above which the constant of an Add is no bias and is not read."""
_FEEDABLE = frozenset(
    (
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.DOUBLE,
        TensorProto.BOOL,
        TensorProto.INT8,
        TensorProto.UINT8,
        TensorProto.INT16,
        TensorProto.UINT16,
        TensorProto.INT32,
        TensorProto.INT64,
    )
)
"""Types that onnxruntime takes from numpy as they are."""
_SLOTS = {1: "weight", 2: "bias"}


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight behind DequantizeLinear, left as it is."""

    stored: str
    """Name of the integer value that DequantizeLinear reads."""
    zero_point: Array
    """Scalar or one per channel, in the stored type."""
    dtype: str
    """The stored type as numpy names it: int8, uint8, int4 ..."""
    zeros: Array
    """What the convolution multiplies by, OIHW float: exactly 0 where the stored value is the zero-point."""


@dataclass(frozen=True)
class Folding:
    """What folding left undone. Both are keyed by the Conv node's first output."""

    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    unfolded: dict[str, str] = field(default_factory=dict)
    """Why a weight or bias is not constant: "weight is made by MatMul 'foo', which depends on the input 'x'"."""


@dataclass(frozen=True)
class _Job:
    """One input of one convolution that nodes make."""

    conv: NodeProto
    slot: int
    value: str

    @property
    def key(self) -> str:
        return str(self.conv.output[0])


def fold_constants(model: Model, quantized: Collection[str] = ()) -> Folding:
    """Turn weights and biases that are made from constants into initializers, with notes on what was folded.

    A constant per output channel, [oc, 1, 1] or [1, oc, 1, 1], that an Add gives to a convolution without a bias becomes
    its bias; the convolution then makes the value that the Add made.

    A weight behind DequantizeLinear stays and is described, unless the convolution's name or first output is in
    `quantized`: then it is folded to float like any other. Raises InputError for a folded weight that is not finite or
    does not fit its convolution.
    """
    _see_through_identity(model)
    graph = _Index(model)
    causes = _causes(graph)
    sums = _bias_sums(model, graph, causes)
    folding = Folding()
    constant: list[_Job] = []
    for job in _made_inputs(graph):
        if job.value in causes:
            folding.unfolded.setdefault(job.key, _words(graph, job, causes))
        else:
            constant.append(job)
    integer = {job.key for job in constant if job.slot == 1 and _dequantize(graph, job.value) is not None}
    integer -= {job.key for job in constant if {job.key, job.conv.name} & set(quantized)}
    stays = [job for job in constant if job.key in integer]
    jobs = [job for job in constant if job.key not in integer]
    stored = {job.value: _stored_values(graph, job.value) for job in stays if job.slot == 1}
    wanted = [job.value for job in jobs] + [addition.operand for addition in sums]
    wanted += [name for value, names in stored.items() for name in (value, *names) if name]
    values, failures = _evaluate(model, graph, dict.fromkeys(wanted))
    for job in (*jobs, *stays):
        if job.value in failures:
            folding.unfolded.setdefault(job.key, _failed(graph, job, failures[job.value]))
    for job in stays:
        if job.slot == 1 and job.value not in failures:
            folding.quantized[job.key] = _describe(job.value, stored[job.value], values)
    done = [job for job in jobs if job.value not in failures]
    before = _data_bytes(model)
    _note(model, graph, done)
    _replace(model, graph, done, values)
    _note_growth(model, graph, done, _data_bytes(model) - before)
    check_convs(model, {job.key for job in done})
    _add_biases(model, sums, values)
    return folding


# --- finding ------------------------------------------------------------------------------------------------------


def _convs(graph: Graph) -> list[NodeProto]:
    return [node for node in graph.proto.node if node.op_type == "Conv" and node.domain == ""]


def _made_inputs(graph: Graph) -> list[_Job]:
    """Weights and biases that are no initializers."""
    return [
        _Job(conv, slot, str(conv.input[slot]))
        for conv in _convs(graph)
        for slot in _SLOTS
        if slot < len(conv.input) and conv.input[slot] and conv.input[slot] not in graph.initializers
    ]


def _see_through_identity(model: Model) -> None:
    """Let convolutions read the initializer behind Identity nodes itself: no copy of a shared weight is made."""
    graph = model.graph
    passed: list[str] = []
    changed: set[str] = set()
    for job in _made_inputs(graph):
        name = job.value
        while (node := graph.producer(name)) is not None and node.op_type == "Identity" and node.domain == "":
            name = str(node.input[0])
        if name != job.value and name in graph.initializers:
            job.conv.input[job.slot] = name
            passed.append(job.value)
            changed.add(job.key)
    remove_orphans(model.proto.graph, passed)
    if changed:
        model.notes.append(f"weights behind Identity nodes read directly for {_convolutions(len(changed))}")
        check_convs(model, changed)


def _causes(graph: Graph) -> dict[str, str]:
    """Values that are not constant, each with the first thing it depends on that is not, in words."""
    causes = {str(value.name): f"the input '{value.name}'" for value in graph.inputs()}
    for node in graph.proto.node:
        cause = next((causes[name] for name in node.input if name in causes), None) or _own_cause(node)
        if cause:
            causes.update((str(name), cause) for name in node.output)
    return causes


def _own_cause(node: NodeProto) -> str | None:
    """Why a node with constant inputs makes no constant; None when it does."""
    label = f"{node.op_type} '{node_label(node)}'"
    if node.domain != "":
        return f"{label} of domain {node.domain}"
    if node.op_type in _RANDOM or (node.op_type == "Dropout" and len(node.input) > 2):
        return f"{label}, which draws random numbers"
    return f"{label}, which is control flow" if next(bodies(node), None) is not None else None


def _words(graph: Graph, job: _Job, causes: Mapping[str, str]) -> str:
    node, cause = graph.producer(job.value), causes[job.value]
    if node is None:
        return f"{_SLOTS[job.slot]} is {cause}"
    label = f"{node.op_type} '{node_label(node)}'"
    if cause.startswith(label):
        return f"{_SLOTS[job.slot]} is made by {cause}"
    return f"{_SLOTS[job.slot]} is made by {label}, which depends on {cause}"


def _failed(graph: Graph, job: _Job, problem: str) -> str:
    node = graph.producers[job.value]
    return (
        f"{_SLOTS[job.slot]} is made by {node.op_type} '{node_label(node)}', which could not be evaluated ({problem})"
    )


class _Index(Graph):
    """A graph index that also knows where each node stands."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.proto.graph, model.base_dir)
        self._place = {id(node): place for place, node in enumerate(self.proto.node)}

    def ancestors(self, names: Iterable[str]) -> list[NodeProto]:
        """The nodes that values are made by, in the graph's order."""
        pending, found = list(names), dict[int, NodeProto]()
        while pending:
            node = self.producer(pending.pop())
            if node is not None and id(node) not in found:
                found[id(node)] = node
                pending += [str(name) for name in node.input if name]
        return sorted(found.values(), key=lambda node: self._place[id(node)])


def _leaves(graph: Graph, nodes: Iterable[NodeProto]) -> list[str]:
    names = dict.fromkeys(str(name) for node in nodes for name in node.input if name)
    return [name for name in names if name in graph.initializers]


# --- sums that are a bias ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Addition:
    """An Add of a constant behind a convolution that has no bias, as Paddle exports biases."""

    conv: NodeProto
    add: NodeProto
    operand: str


def _bias_sums(model: Model, graph: _Index, causes: Mapping[str, str]) -> list[_Addition]:
    found = []
    for conv in _convs(graph):
        add = graph.sole_reader(str(conv.output[0])) if model.opset() >= 7 else None
        if add is None or add.op_type != "Add" or add.domain != "" or any(conv.input[2:]) or conv.input[1] in causes:
            continue
        operands = [str(name) for name in add.input if name != conv.output[0]]
        tensor = graph.initializers.get(operands[0]) if len(operands) == 1 else None
        small = tensor is None or tensor_bytes(tensor) <= _BIAS_LIMIT
        if len(operands) == 1 and operands[0] not in causes and small:
            found.append(_Addition(conv, add, operands[0]))
    return found


def _add_biases(model: Model, sums: list[_Addition], values: Mapping[str, Array]) -> None:
    """Give the convolution the constant as its bias and drop the Add, where it is one value per output channel."""
    graph = model.graph
    done = []
    for addition in sums:
        conv, value = addition.conv, values.get(addition.operand)
        weight = graph.initializers.get(conv.input[1])
        if weight is None or value is None or len(weight.dims) < 3:
            continue
        if weight.data_type != onnx.helper.np_dtype_to_tensor_dtype(value.dtype) or not np.isfinite(value).all():
            continue
        channels, spatial = int(weight.dims[0]), (1,) * (len(weight.dims) - 2)
        if value.shape not in ((channels, *spatial), (1, channels, *spatial)):
            continue
        name = fresh_name(model.proto.graph, f"{addition.operand}_bias")
        add_initializer(model, numpy_helper.from_array(np.ascontiguousarray(value.reshape(-1)), name))
        del conv.input[2:]
        conv.input.append(name)
        conv.output[0] = addition.add.output[0]
        done.append(addition)
    if not done:
        return
    remove_nodes(model.proto.graph, [addition.add for addition in done])
    remove_orphans(model.proto.graph, list(dict.fromkeys(addition.operand for addition in done)))
    _remove_stale_entries(model, graph)
    model.notes.append(f"constant Add made the bias of {_convolutions(len(done))}")


# --- quantised ----------------------------------------------------------------------------------------------------


def _dequantize(graph: _Index, value: str) -> NodeProto | None:
    nodes = [node for node in graph.ancestors([value]) if node.op_type == "DequantizeLinear"]
    return nodes[-1] if nodes else None


def _stored_values(graph: _Index, value: str) -> tuple[str, str]:
    """Names of the integers and of the zero-point ("" for none) of the last DequantizeLinear before a value."""
    node = _dequantize(graph, value)
    assert node is not None, value
    return str(node.input[0]), str(node.input[2]) if len(node.input) > 2 else ""


def _describe(value: str, names: tuple[str, str], values: Mapping[str, Array]) -> QuantizedWeight:
    stored, zero_point = names
    integers = values[stored]
    zero = values[zero_point] if zero_point else np.zeros((), integers.dtype)
    return QuantizedWeight(stored, zero, integers.dtype.name, values[value])


# --- evaluating ---------------------------------------------------------------------------------------------------


def _evaluate(model: Model, graph: _Index, names: Iterable[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Values of constant names, and for those that cannot be had, why. One session for all of them if possible."""
    values: dict[str, Array] = {}
    rest: list[str] = []
    for name in names:
        array = graph.array(name)
        if array is None:
            rest.append(name)
        else:
            values[name] = array
    failures: dict[str, str] = {}
    for group in _groups(model, graph, rest, failures):
        try:
            values.update(_run(*_cut_out(model, graph, group)))
        except Exception:  # noqa: PERF203 - one value onnxruntime cannot make spoils a session, so each gets its own
            failures.update(_evaluate_alone(model, graph, group, values))
    return values, failures


def _evaluate_alone(model: Model, graph: _Index, names: list[str], values: dict[str, Array]) -> dict[str, str]:
    failures: dict[str, str] = {}
    for name in names:
        try:
            values.update(_run_alone(*_cut_out(model, graph, [name])))
        except Exception as error:  # noqa: PERF203 - onnxruntime, onnx.reference and numpy raise types of their own
            failures[name] = " ".join(str(error).split())[:200] or type(error).__name__
    return failures


def _groups(model: Model, graph: _Index, names: list[str], failures: dict[str, str]) -> list[list[str]]:
    """Values to evaluate together, such that a group's results stay below the limit; oversized ones fail here."""
    if not names:
        return []
    small, _ = _cut_out(model, graph, names)
    types = value_types(Model(small, model.path), {})
    groups: list[list[str]] = [[]]
    total = 0
    for name in names:
        made = [types[out] for node in graph.ancestors([name]) for out in node.output if out in types]
        size = max((_size(dtype, shape) for dtype, shape in made), default=0)
        if size > _EVALUATE_LIMIT:
            failures[name] = f"one of its values has {size / 1e9:.0f} GB"
            continue
        total += size
        if total > _EVALUATE_LIMIT:
            groups.append([])
            total = size
        groups[-1].append(name)
    return [group for group in groups if group]


def _size(dtype: str, shape: tuple[int | str, ...]) -> int:
    if dtype in ("STRING", "UNDEFINED"):
        return 0
    return tensor_bytes(
        TensorProto(data_type=TensorProto.DataType.Value(dtype), dims=[d for d in shape if isinstance(d, int)])
    )


def _cut_out(model: Model, graph: _Index, names: list[str]) -> tuple[ModelProto, dict[str, Array]]:
    """A model of just the ancestors of some values, and what to feed it: large leaves are fed, so that they are not
    serialised; Constant nodes count as leaves.
    """
    nodes = graph.ancestors(names)
    leaves = {name: graph.initializers[name] for name in _leaves(graph, nodes)}
    feeds: dict[str, Array] = {}
    inputs: list[ValueInfoProto] = []
    initializers: list[TensorProto] = []
    kept: list[NodeProto] = []
    for name, tensor in leaves.items():
        if tensor_bytes(tensor) > SMALL and tensor.data_type in _FEEDABLE:
            array = graph.array(name)
            assert array is not None, name
            feeds[name] = array
        elif tensor.data_location == TensorProto.EXTERNAL:
            array = graph.array(name)
            initializers.append(numpy_helper.from_array(np.asarray(array), name))
        else:
            initializers.append(tensor)
    for node in nodes:
        array = graph.array(str(node.output[0])) if node.op_type == "Constant" else None
        if (
            array is not None
            and array.nbytes > SMALL
            and onnx.helper.np_dtype_to_tensor_dtype(array.dtype) in _FEEDABLE
        ):
            feeds[str(node.output[0])] = array
        else:
            kept.append(node)
    for name, array in feeds.items():
        dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        inputs.append(onnx.helper.make_tensor_value_info(name, dtype, array.shape))
    outputs = [ValueInfoProto(name=name) for name in names]
    small = onnx.helper.make_model(
        onnx.helper.make_graph(kept, "constants", inputs, outputs, initializers),
        ir_version=min(max(model.proto.ir_version, 4), 10),
        opset_imports=[onnx.helper.make_opsetid("", model.opset())],
    )
    return small, feeds


def _run(small: ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by onnxruntime on the CPU, without any optimisation."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(small.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [str(value.name) for value in small.graph.output]
    return {name: np.asarray(result) for name, result in zip(names, session.run(names, dict(feeds)), strict=True)}


def _run_alone(small: ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """As `_run`; where onnxruntime has no kernel (bfloat16 mostly), by onnx's reference in numpy."""
    try:
        return _run(small, feeds)
    except Exception:  # onnxruntime's types, one per status code
        from onnx.reference import ReferenceEvaluator

        names = [str(value.name) for value in small.graph.output]
        results = ReferenceEvaluator(small).run(names, dict(feeds))
        return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}


# --- replacing ----------------------------------------------------------------------------------------------------


def _replace(model: Model, graph: _Index, jobs: list[_Job], values: Mapping[str, Array]) -> None:
    """Give each value one initializer. It takes the value's name where only these convolutions read it; else the value
    stays for its other readers.
    """
    slots: dict[str, list[_Job]] = {}
    for job in jobs:
        slots.setdefault(job.value, []).append(job)
    proto = model.proto.graph
    gone: list[NodeProto] = []
    leaves: list[str] = []
    for value, users in slots.items():
        node = graph.producers[value]
        ours = {id(job.conv) for job in users}
        private = value not in graph.outputs and all(id(reader) in ours for reader in graph.readers(value))
        private = private and all(_reads(job.conv, value) == _folded_slots(users, job.conv) for job in users)
        if private and len(node.output) == 1:
            gone.append(node)
            leaves += [str(name) for name in node.input if name]
            name = value
        else:
            name = fresh_name(proto, f"{value}_folded")
            for job in users:
                job.conv.input[job.slot] = name
            leaves.append(value)
        add_initializer(model, numpy_helper.from_array(np.ascontiguousarray(values[value]), name))
    remove_nodes(proto, gone)
    remove_orphans(proto, leaves)
    _remove_stale_entries(model, graph)


def _remove_stale_entries(model: Model, before: Graph) -> None:
    """Drop shape entries of values that were made by nodes before and are no more."""
    proto = model.proto.graph
    made = {name for node in proto.node for name in node.output}
    for at in reversed([i for i, info in enumerate(proto.value_info) if info.name in before.producers]):
        if proto.value_info[at].name not in made:
            del proto.value_info[at]


def _reads(conv: NodeProto, value: str) -> int:
    return sum(name == value for name in conv.input)


def _folded_slots(users: list[_Job], conv: NodeProto) -> int:
    return sum(job.conv is conv for job in users)


# --- saying so ----------------------------------------------------------------------------------------------------


def _note(model: Model, graph: _Index, jobs: list[_Job]) -> None:
    masked: set[str] = set()
    other: set[str] = set()
    operators: set[str] = set()
    for job in jobs:
        nodes = graph.ancestors([job.value])
        if any(_applies_mask(graph, node) for node in nodes):
            masked.add(job.key)
        else:
            other.add(job.key)
            operators |= {str(node.op_type) for node in nodes}
    other -= masked
    if masked:
        model.notes.append(f"masks folded for {_convolutions(len(masked))}")
    if other:
        names = sorted(operators)
        words = " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
        model.notes.append(f"weights behind {words} nodes folded for {_convolutions(len(other))}")


def _convolutions(count: int) -> str:
    return f"{count} convolution" if count == 1 else f"{count} convolutions"


def _applies_mask(graph: Graph, node: NodeProto) -> bool:
    return node.op_type == "Where" or (node.op_type == "Mul" and any(_is_mask(graph, str(name)) for name in node.input))


def _is_mask(graph: Graph, name: str) -> bool:
    """Whether a constant holds flags: booleans, a comparison's result, or numbers that are all 0 or 1."""
    while (node := graph.producer(name)) is not None and node.op_type in _PASSES_VALUES:
        name = str(node.input[0])
    if node is not None and node.op_type in _COMPARISONS:
        return True
    array = graph.array(name)
    if array is None or array.size < 2:
        return False
    return array.dtype == np.bool_ or bool(((array == 0) | (array == 1)).all())


def _data_bytes(model: Model) -> int:
    return sum(tensor_bytes(tensor) for tensor, _ in all_tensors(model.proto))


def _note_growth(model: Model, graph: _Index, jobs: list[_Job], growth: int) -> None:
    """Say it when the file will be larger, and why."""
    nodes = {id(node): node for node in graph.ancestors(job.value for job in jobs)}.values()
    narrow = [node for node in nodes if node.op_type == "Cast" and _element_type(graph, node.input[0]) in _NARROW]
    reasons = ["16-bit weights behind Cast are now stored as 32-bit"] if narrow else []
    if any(node.op_type in ("ConstantOfShape", "Expand", "Tile") for node in nodes):
        reasons.append("weights that ConstantOfShape, Expand or Tile made are now stored in full")
    if growth > 0:
        because = f", because {' and '.join(reasons)}" if reasons else ""
        model.notes.append(f"the file grows by {growth / 1e6:.2f} MB{because}")


def _element_type(graph: Graph, name: str) -> int | None:
    while (node := graph.producer(name)) is not None and node.op_type in _PASSES_VALUES and node.op_type != "Cast":
        name = str(node.input[0])
    if name in graph.initializers:
        return int(graph.initializers[name].data_type)
    array = graph.array(name)
    return None if array is None else int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
