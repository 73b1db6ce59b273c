"""A graph brought from its opset (up to 25) down to an older one that a target reads, by our own table per operator.

The table is keyed by (operator, version in which the definition last changed): one step leads from there to the
definition before it. RELABELLED steps changed only accepted element types; the steps in REWRITTEN change the node
or spell it in older operators. A version in neither table is refused by name, and so is any element type, attribute or
input that the older definition lacks, so nothing is lowered on trust. Definitions: onnx.defs and onnx's Changelog.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from sparsedeploy.converters.graph import (
    Array,
    Graph,
    Model,
    attribute,
    bodies,
    node_label,
    remove_orphans,
)
from sparsedeploy.converters.inference import Types, ValueType, infer_types
from sparsedeploy.converters.operators import unsupported_operators
from sparsedeploy.errors import CheckFailed, InputError

__all__ = ["compare_in_ort", "export_hint", "lower_opset", "unsupported_operators"]

_DEFAULT = ("", "ai.onnx")
_LOWEST = 13
"""No step leads below this opset, and what steps write is valid from here on."""

RELABELLED: dict[str, tuple[int, ...]] = {
    # Basic arithmetic and comparisons: small integers, bfloat16 or strings were added.
    "Add": (14,), "Sub": (14,), "Mul": (14,), "Div": (14,), "Pow": (15,), "CumSum": (14,), "Where": (16,),
    "Equal": (19,), "GreaterOrEqual": (16,), "LessOrEqual": (16,), "IsInf": (20,), "IsNaN": (20,), "Round": (22,),
    # Activations.
    "Relu": (14,), "LeakyRelu": (16,), "PRelu": (16,), "Elu": (22,), "Selu": (22,), "HardSigmoid": (22,),
    "HardSwish": (22,), "Mish": (22,), "Softplus": (22,), "Softsign": (22,), "ThresholdedRelu": (22,),
    # Trigonometry.
    "Acos": (22,), "Acosh": (22,), "Asin": (22,), "Asinh": (22,), "Atan": (22,), "Atanh": (22,), "Cos": (22,),
    "Cosh": (22,), "Sin": (22,), "Sinh": (22,), "Tan": (22,),
    # Convolutions, pooling, normalisation.
    "Conv": (22,), "ConvTranspose": (22,), "GlobalAveragePool": (22,), "GlobalLpPool": (22,), "GlobalMaxPool": (22,),
    "InstanceNormalization": (22,), "LpNormalization": (22,), "LpPool": (22,),
    "MaxUnpool": (22,), "RoiAlign": (22,), "Det": (22,), "Dropout": (22,),
    "NegativeLogLikelihoodLoss": (22,), "GRU": (22,), "LSTM": (22,), "RNN": (22,),
    # Shapes and data movement: float8, 4-bit and 2-bit types were added.
    "Constant": (19, 21, 23, 24, 25), "ConstantOfShape": (20, 21, 23, 24, 25), "Flatten": (21, 23, 24, 25),
    "Identity": (14, 16, 19, 21, 23, 24, 25), "Reshape": (19, 21, 23, 24, 25), "Shape": (19, 21, 23, 24, 25),
    "Size": (19, 21, 23, 24, 25), "Squeeze": (21, 23, 24, 25), "Unsqueeze": (21, 23, 24, 25),
    "Transpose": (21, 23, 24, 25), "Pad": (21, 23, 24, 25), "Cast": (21, 23, 25), "CastLike": (21, 23, 25),
    "EyeLike": (22,), "TopK": (24,),
    # Control flow.
    "If": (16, 19, 21, 23, 24, 25), "Loop": (16, 19, 21, 23, 24, 25), "Scan": (16, 19, 21, 23, 24, 25),
    # Reductions, quantisation.
    "ReduceMax": (20,), "ReduceMin": (20,), "QuantizeLinear": (24, 25), "DequantizeLinear": (19, 24, 25),
    "QLinearMatMul": (21,),
}  # fmt: skip
"""Operator -> versions that only widened the element types; whether a node uses a newer type is checked apart."""


def lower_opset(model: Model, max_opset: int, max_ir: int = 8) -> None:
    """Bring the default domain of a model down to `max_opset` (13 or more) and its IR version to `max_ir`, in place.

    The bodies of If, Loop and Scan are lowered too; nodes of other domains stay. A model that is already there is not
    touched. Raises InputError naming operator, node and reason where the older opset has no equal form: the model is
    then partly changed and must be dropped. What was done goes to `model.notes`.
    """
    proto = model.proto
    source = model.opset()
    if source > max_opset:
        known = onnx.defs.onnx_opset_version()
        if source > known:
            raise InputError(
                f"{model.path}: opset {source} was found, and the onnx package here ({onnx.__version__}) knows opsets "
                f"up to {known}. Install a newer onnx, or export the model again: {export_hint(model, max_opset)}"
            )
        if max_opset < _LOWEST:
            raise InputError(
                f"{model.path}: opset {source} was found and {max_opset} is needed, but graphs are lowered to opset "
                f"{_LOWEST} at the lowest. Export the model again: {export_hint(model, max_opset)}"
            )
        if proto.functions:
            raise InputError(
                f"{model.path}: model-local functions ({proto.functions[0].name}, ...) are still in the graph and only "
                "plain operators can be lowered to an older opset. Inline them (onnx.inliner) and run this again."
            )
        work = _Work(model, source, max_opset)
        _lower_graph(_Scope(work, proto.graph, infer_types(model)))
        imports = [entry for entry in proto.opset_import if entry.domain not in _DEFAULT]
        del proto.opset_import[:]
        proto.opset_import.extend([helper.make_opsetid("", max_opset), *imports])
        model.notes.append(work.summary())
    if proto.ir_version > max_ir:
        proto.ir_version = max_ir


def compare_in_ort(
    before: ModelProto | Path, after: ModelProto | Path, feeds: Mapping[str, Array], base_dir: Path | None = None
) -> float:
    """Largest difference between two graphs' outputs on the same feeds, relative to the largest value of the output.

    Both run in ONNX Runtime on the CPU with its optimiser off, so that what is compared is what is written. The worst
    output counts; a different number, shape or NaN pattern of outputs gives infinity. `base_dir` is where external
    data of a ModelProto lies. Raises CheckFailed when ONNX Runtime cannot run one of them.
    """
    left, right = (_run(proto, feeds, base_dir, which) for proto, which in ((before, "first"), (after, "second")))
    if len(left) != len(right):
        return math.inf
    return max((_difference(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def export_hint(model: Model, opset: int = _LOWEST) -> str:
    """The command that exports the model again at an opset, by the producer named in the file."""
    producer = model.proto.producer_name.lower()
    author = {entry.key: entry.value for entry in model.proto.metadata_props}.get("author", "")
    if "ultralytics" in author.lower():
        return f"yolo export model=model.pt format=onnx opset={opset} simplify=False"
    if "paddle" in producer:
        return f"paddle2onnx --model_dir DIR --save_file model.onnx --opset_version {opset}"
    if "tf2onnx" in producer:
        return f"python -m tf2onnx.convert --saved-model DIR --output model.onnx --opset {opset}"
    return f"torch.onnx.export(model, x, 'model.onnx', opset_version={opset}, dynamo=False)"


def _run(graph: ModelProto | Path, feeds: Mapping[str, Array], base_dir: Path | None, which: str) -> list[Array]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    if base_dir is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(base_dir))
    source = str(graph) if isinstance(graph, Path) else graph.SerializeToString()
    try:
        session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        return [np.asarray(value) for value in session.run(None, dict(feeds))]
    except Exception as error:  # onnxruntime's exception classes share no base
        raise CheckFailed(f"ONNX Runtime cannot run the {which} graph of a comparison: {error}") from error


def _difference(left: Array, right: Array) -> float:
    if left.shape != right.shape or left.dtype.kind != right.dtype.kind:
        return math.inf
    if left.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(left, right) else math.inf
    a, b = left.astype(np.float64), right.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(same[~finite], np.ones_like(same[~finite])):
        return math.inf
    largest = float(np.abs(a[finite]).max())
    return float(np.abs(a[finite] - b[finite]).max()) / largest if largest else math.inf


@dataclass
class _Work:
    """One lowering of one model, with the counts that its note reports."""

    model: Model
    source: int
    target: int
    relabelled: Counter[str] = field(default_factory=Counter)
    rewritten: Counter[str] = field(default_factory=Counter)
    names: set[str] = field(default_factory=set)
    """Every value and node name of the model, bodies included."""

    def __post_init__(self) -> None:
        self._take(self.model.proto.graph)

    def _take(self, graph: GraphProto) -> None:
        self.names |= {entry.name for entry in (*graph.input, *graph.initializer)}
        for node in graph.node:
            self.names |= {node.name, *node.output}
            for body in bodies(node):
                self._take(body)

    def fresh(self, wish: str) -> str:
        """A name that nothing in the model has."""
        name, count = wish, 0
        while name in self.names:
            count += 1
            name = f"{wish}_{count}"
        self.names.add(name)
        return name

    def summary(self) -> str:
        """What was done, in one sentence."""
        text = f"opset {self.source} lowered to {self.target}: {sum(self.relabelled.values())} nodes relabelled"
        if self.rewritten:
            listed = ", ".join(f"{op} x{count}" if count > 1 else op for op, count in sorted(self.rewritten.items()))
            text += f", {sum(self.rewritten.values())} rewritten ({listed})"
        return text


@dataclass
class _Scope:
    """The main graph or a body, with what its names stand for."""

    work: _Work
    graph: GraphProto
    types: Types
    outer: _Scope | None = None
    released: list[str] = field(default_factory=list)
    """Values that a rewritten node no longer reads."""

    def __post_init__(self) -> None:
        self.index = Graph(self.graph, self.work.model.base_dir)

    def array(self, name: str) -> Array | None:
        """The constant a name stands for, also behind Identity and in the graph around; None when it is none."""
        scope: _Scope | None = self
        while scope is not None:
            value = scope.index.array(name)
            if value is not None:
                return value
            producer = scope.index.producer(name)
            if producer is not None:
                return scope.array(producer.input[0]) if producer.op_type == "Identity" else None
            scope = scope.outer
        return None

    def producer(self, name: str) -> NodeProto | None:
        """The node that makes a value, here or in the graph around."""
        scope: _Scope | None = self
        while scope is not None:
            found = scope.index.producer(name)
            if found is not None:
                return found
            scope = scope.outer
        return None


def _lower_graph(scope: _Scope) -> None:
    graph = scope.graph
    for position, node in reversed(list(enumerate(list(graph.node)))):
        known = scope.types.bodies.get(position, [])
        for at, body in enumerate(bodies(node)):
            inside = known[at] if at < len(known) else Types(outer=scope.types)
            _lower_graph(_Scope(scope.work, body, inside, scope))
        if node.domain not in _DEFAULT:
            continue
        node.domain = ""
        site = _Site(scope, node)
        _lower_node(site)
        for helper_node in reversed(site.before):
            graph.node.insert(position, helper_node)
    remove_orphans(graph, dict.fromkeys(scope.released))


def _lower_node(site: _Site) -> None:
    work = site.scope.work
    operator, version = site.op_type, _since(site.op_type, work.source)
    if version is None:
        site.refuse(f"opset {work.source} does not define this operator, or is newer than the onnx package here knows")
    rewritten, lowered = False, version > work.target
    while version > work.target:
        step, older = REWRITTEN.get((operator, version)), _since(operator, version - 1)
        if step is not None:
            rewritten |= step(site)
            if site.node.op_type != operator:
                break
        if older is None:
            site.refuse(_NO_FORM.get(operator, f"the operator is new in opset {version}"))
        if step is None and version not in RELABELLED.get(operator, ()):
            unknown = f"no step from its definition of opset {version} to the one of {older} is known here"
            site.refuse(_NO_FORM.get(operator, unknown))
        version = older
    if lowered:
        (work.rewritten if rewritten else work.relabelled)[operator] += 1
    site.check_against(work.target)


def _since(operator: str, opset: int) -> int | None:
    """The opset in which the definition of an operator that holds in `opset` appeared."""
    try:
        return int(onnx.defs.get_schema(operator, opset, "").since_version)
    except onnx.defs.SchemaError:
        return None


@dataclass
class _Site:
    """One node being lowered: what is known of its inputs, and the means to change it."""

    scope: _Scope
    node: NodeProto
    before: list[NodeProto] = field(default_factory=list)
    """Nodes to be put before it."""

    def __post_init__(self) -> None:
        self.op_type = self.node.op_type
        self.label = node_label(self.node)

    # What is known.

    def input(self, position: int) -> str:
        """Name of an input; '' when absent."""
        return self.node.input[position] if position < len(self.node.input) else ""

    def type(self, position: int = 0) -> ValueType:
        """Type and shape of an input."""
        return self.scope.types.get(self.input(position))

    def rank(self) -> int:
        """Rank of the first input; refuses the node when it is unknown."""
        shape = self.type().shape
        if shape is None:
            self.refuse(f"the rank of its input {self.input(0)} must be known and is not")
        return len(shape)

    def kind(self) -> int:
        """Element type of the first input; refuses the node when it is unknown."""
        kind = self.type().kind
        if kind == TensorProto.UNDEFINED:
            self.refuse(f"the element type of its input {self.input(0)} must be known and is not")
        return kind

    def array(self, position: int) -> Array | None:
        """The constant that an input is; None when it is none."""
        return self.scope.array(self.input(position)) if self.input(position) else None

    def ints(self, position: int, what: str) -> list[int]:
        """The integers of a constant input; refuses the node when they are computed in the graph."""
        value = self.array(position)
        if value is None:
            self.refuse(f"its {what} are computed in the graph ({self.input(position)}), and must be constant")
        return [int(entry) for entry in np.atleast_1d(np.asarray(value, np.int64))]

    def attribute(self, name: str, default: object = None) -> object:
        """An attribute's value, or the default."""
        return attribute(self.node, name, default)

    def int_attribute(self, name: str, default: int = 0) -> int:
        """An INT attribute's value, or the default."""
        value = attribute(self.node, name, default)
        return int(value) if isinstance(value, int) else default

    def float_attribute(self, name: str, default: float) -> float:
        """A FLOAT attribute's value, or the default."""
        value = attribute(self.node, name, default)
        return float(value) if isinstance(value, (int, float)) else default

    def ints_attribute(self, name: str) -> list[int] | None:
        """An INTS attribute's values; None when absent."""
        value = attribute(self.node, name)
        return [int(entry) for entry in value] if isinstance(value, (list, tuple)) else None

    # What changes it.

    def refuse(self, why: str) -> NoReturn:
        """Stop: this node has no form in the target's opset."""
        work = self.scope.work
        raise InputError(
            f"{self.op_type} node {self.label} of {work.model.path} (opset {work.source}) cannot be lowered to opset "
            f"{work.target}, which the target needs: {why}. Export the model again at that opset, with "
            f"{export_hint(work.model, work.target)}, or choose a target that reads opset {work.source}."
        )

    def drop_attribute(self, *names: str) -> bool:
        """Remove attributes; whether one was there."""
        at = [i for i, entry in enumerate(self.node.attribute) if entry.name in names]
        for i in reversed(at):
            del self.node.attribute[i]
        return bool(at)

    def set_inputs(self, names: Sequence[str]) -> None:
        """Replace the inputs, without trailing absent ones; what is no longer read may become an orphan."""
        names = list(names)
        while names and not names[-1]:
            names.pop()
        self.scope.released += [name for name in self.node.input if name and name not in names]
        self.node.input[:] = names

    def become(self, op_type: str, inputs: Sequence[str], **attributes: object) -> None:
        """Turn the node into another operator with the same outputs."""
        self.node.op_type = op_type
        self.set_inputs(inputs)
        del self.node.attribute[:]
        self.node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())

    def emit(self, op_type: str, inputs: Sequence[str], wish: str, **attributes: object) -> str:
        """Put a node before this one; returns the name of its output."""
        name = self.scope.work.fresh(f"{self.label}/{wish}")
        self.before.append(helper.make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Array, wish: str) -> str:
        """Add a constant in front of this node; returns its name."""
        name = self.scope.work.fresh(f"{self.label}/{wish}")
        tensor = numpy_helper.from_array(np.ascontiguousarray(value), name)
        if self.scope.work.model.proto.ir_version >= 4:
            self.scope.graph.initializer.append(tensor)
        else:
            # Before IR 4 every initializer must be a graph input as well.
            self.before.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
        return name

    def scalar(self, value: float, wish: str) -> str:
        """A scalar constant of the first input's element type."""
        return self.constant(np.asarray(value, helper.tensor_dtype_to_np_dtype(self.kind())), wish)

    def mean(self, source: str, axes: Sequence[int], wish: str) -> str:
        """Put a ReduceMean (keepdims) before this node."""
        if self.scope.work.target < 18:
            return self.emit("ReduceMean", [source], wish, axes=list(axes), keepdims=1)
        listed = self.constant(np.asarray(axes, np.int64), f"{wish}_axes")
        return self.emit("ReduceMean", [source, listed], wish, keepdims=1)

    def check_against(self, opset: int) -> None:
        """Refuse what the operator's definition in `opset` does not accept: attributes, inputs, element types."""
        schema = onnx.defs.get_schema(self.node.op_type, opset, "")
        unknown = [entry.name for entry in self.node.attribute if entry.name not in schema.attributes]
        if unknown:
            self.refuse(f"attribute {unknown[0]} does not exist there")
        if len(self.node.input) > schema.max_input:
            self.refuse(f"it has {len(self.node.input)} inputs and may have {schema.max_input} there")
        allowed = {entry.type_param_str: entry.allowed_type_strs for entry in schema.type_constraints}
        for names, formals in ((self.node.input, schema.inputs), (self.node.output, schema.outputs)):
            for position, name in enumerate(names):
                kind = self.scope.types.get(name).kind
                formal = formals[min(position, len(formals) - 1)].type_str
                if name and kind and _type_string(kind) not in allowed.get(formal, [formal]):
                    self.refuse(f"{name} is {_type_string(kind)[7:-1]}, which {self.node.op_type} does not take there")


def _type_string(kind: int) -> str:
    return f"tensor({TensorProto.DataType.Name(kind).lower()})"


# Steps. Each takes a node from the version in its key to the definition before it, refuses, or spells it in operators
# of the target. They return whether the node itself changed: an attribute that only repeats the old behaviour may go
# without that.


def _drop_default(*defaults: tuple[str, int | str]) -> Callable[[_Site], bool]:
    """A step for attributes that are new: gone when they say what the older definition does, refused otherwise."""

    def step(site: _Site) -> bool:
        for name, value in defaults:
            found = site.attribute(name, value)
            if found != value:
                site.refuse(f"attribute {name} is {found!r}, and the older operator always acts as {value!r}")
        return site.drop_attribute(*(name for name, _ in defaults))

    return step


def _drop(*names: str) -> Callable[[_Site], bool]:
    """A step for attributes that matter only to element types which the older opset lacks and are checked apart."""
    return lambda site: site.drop_attribute(*names)


def _reduce(site: _Site) -> bool:
    axes: list[int] | None = None
    if site.input(1):
        axes = site.ints(1, "axes")
    noop = site.int_attribute("noop_with_empty_axes")
    if not axes and noop:
        # ReduceSumSquare and the like still square, take logarithms ... when they reduce nothing.
        if site.op_type not in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
            site.refuse("noop_with_empty_axes without axes has no older form for it")
        site.become("Identity", [site.input(0)])
        return True
    changed = site.drop_attribute("noop_with_empty_axes") or bool(site.input(1))
    site.set_inputs([site.input(0)])
    if axes:
        site.node.attribute.append(helper.make_attribute("axes", axes))
    return changed


def _reshape_14(site: _Site) -> bool:
    if site.int_attribute("allowzero") and not _never_zero(site.scope, site.input(1)):
        site.refuse(
            f"allowzero is 1 and its shape {site.input(1)} may hold a zero, which the older Reshape reads as 'copy'"
        )
    return site.drop_attribute("allowzero")


_KEEPS_ENTRIES = ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Gather", "Slice", "Expand", "Transpose")


def _never_zero(scope: _Scope, name: str, depth: int = 32) -> bool:
    """Whether no entry of an integer tensor can be zero, as long as no dimension of the model's tensors is zero."""
    value = scope.array(name)
    if value is not None:
        return bool(np.all(np.asarray(value) != 0))
    node = scope.producer(name)
    if node is None or depth == 0 or node.domain not in _DEFAULT:
        return False
    if node.op_type in ("Shape", "Size"):
        return True
    if node.op_type in _KEEPS_ENTRIES:
        return _never_zero(scope, node.input[0], depth - 1)
    if node.op_type in ("Concat", "Mul"):
        return all(_never_zero(scope, entry, depth - 1) for entry in node.input)
    least = _least(scope, name, depth)
    return least is not None and least > 0


def _least(scope: _Scope, name: str, depth: int) -> int | None:
    """A bound that no entry of an integer tensor is below, dimensions being 1 or more; None where none is known.

    For the size arithmetic of torch's exporter: a map behind a strided convolution is (H - 1) // 2 + 1 high.
    """
    value = scope.array(name)
    if value is not None:
        return int(np.min(value)) if value.size and np.issubdtype(value.dtype, np.integer) else None
    node = scope.producer(name)
    if node is None or depth == 0 or node.domain not in _DEFAULT:
        return None
    if node.op_type in ("Shape", "Size"):
        return 1
    if node.op_type in _KEEPS_ENTRIES:
        return _least(scope, node.input[0], depth - 1)
    if node.op_type not in ("Add", "Mul", "Div", "Concat", "Max"):
        return None
    known = [least for entry in node.input if (least := _least(scope, entry, depth - 1)) is not None]
    if node.op_type == "Max":
        return max(known, default=None)
    if len(known) < len(node.input):
        return None
    if node.op_type == "Concat":
        return min(known)
    if node.op_type == "Add":
        return sum(known)
    if min(known) < 0:
        return None
    if node.op_type == "Mul":
        return math.prod(known)
    return 0 if known[1] > 0 else None  # a larger divisor gives less


def _shape_15(site: _Site) -> bool:
    start, end = site.int_attribute("start"), site.attribute("end")
    if start == 0 and end is None:
        return site.drop_attribute("start", "end")
    stop = end if isinstance(end, int) else np.iinfo(np.int64).max
    whole = site.emit("Shape", [site.input(0)], "shape")
    bounds = [site.constant(np.asarray([bound], np.int64), wish) for bound, wish in ((start, "start"), (stop, "end"))]
    site.become("Slice", [whole, *bounds, site.constant(np.asarray([0], np.int64), "axes")])
    return True


def _batchnorm_14(site: _Site) -> bool:
    if site.int_attribute("training_mode"):
        site.refuse("training_mode is 1: the model was exported in training mode, call model.eval() before the export")
    return site.drop_attribute("training_mode")


def _batchnorm_15(site: _Site) -> bool:
    kinds = {kind for position in range(5) if (kind := site.type(position).kind)}
    if len(kinds) > 1:
        names = ", ".join(sorted(_type_string(kind)[7:-1] for kind in kinds))
        site.refuse(f"its input and its statistics differ in element type ({names})")
    return False


def _average_pool_19(site: _Site) -> bool:
    if any(entry != 1 for entry in site.ints_attribute("dilations") or []):
        site.refuse("it is dilated, and the older AveragePool cannot be")
    return _ceil_mode(site) | site.drop_attribute("dilations")


def _ceil_mode(site: _Site) -> bool:
    """With ceil_mode, the definitions differ in windows that begin in the padding behind the input (dropped since 22)
    and, when padding counts, in the divisor at the border: refused wherever that can happen.
    """
    if not site.int_attribute("ceil_mode") or site.attribute("auto_pad", "NOTSET") != "NOTSET":
        return False
    kernel = site.ints_attribute("kernel_shape") or []
    rank = len(kernel)
    pads = site.ints_attribute("pads") or [0] * 2 * rank
    strides = site.ints_attribute("strides") or [1] * rank
    dilations = site.ints_attribute("dilations") or [1] * rank
    if site.int_attribute("count_include_pad"):
        site.refuse("ceil_mode and count_include_pad together divide differently there")
    for axis in range(rank):
        extent = (kernel[axis] - 1) * dilations[axis] + 1
        if pads[rank + axis] + strides[axis] > extent:
            site.refuse("with ceil_mode a window can begin behind the input, which the older pooling keeps")
    return False


def _pad_18(site: _Site) -> bool:
    if not site.input(3):
        return False
    rank = site.rank()
    axes = [axis % rank for axis in site.ints(3, "axes")]
    pads = site.ints(1, "pads")
    full = [0] * 2 * rank
    for i, axis in enumerate(axes):
        full[axis], full[rank + axis] = pads[i], pads[len(axes) + i]
    site.set_inputs([site.input(0), site.constant(np.asarray(full, np.int64), "pads"), site.input(2)])
    return True


def _pad_19(site: _Site) -> bool:
    if site.attribute("mode", "constant") == "wrap":
        site.refuse("mode wrap is new in opset 19")
    return False


def _split_18(site: _Site) -> bool:
    if not site.drop_attribute("num_outputs"):
        return False
    count = len(site.node.output)
    axis = site.int_attribute("axis")
    shape = site.type().shape
    size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
    if size is None:
        site.refuse(f"it splits a dimension of unknown size into {count}, and the older Split needs the sizes")
    chunk = -(-size // count)
    sizes = [min(chunk, max(0, size - i * chunk)) for i in range(count)]
    site.set_inputs([site.input(0), site.constant(np.asarray(sizes, np.int64), "split")])
    return True


def _resize_19(site: _Site) -> bool:
    if site.attribute("coordinate_transformation_mode") != "half_pixel_symmetric":
        return False
    # The symmetric mode corrects for an output size that was rounded; without rounding it is half_pixel.
    if not site.input(3) and any(size != int(size) for size in _scaled_sizes(site)):
        site.refuse("coordinate_transformation_mode half_pixel_symmetric with a rounded size is new in opset 19")
    site.drop_attribute("coordinate_transformation_mode")
    site.node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "half_pixel"))
    return True


def _scaled_sizes(site: _Site) -> list[float]:
    """Sizes that a Resize by scales gives before rounding, for the axes that it scales."""
    scales, shape, axes = site.array(2), site.type().shape, site.ints_attribute("axes")
    if scales is None:
        site.refuse("its scales are computed in the graph, and half_pixel_symmetric is new in opset 19")
    factors = [float(entry) for entry in np.asarray(scales, np.float64)]
    sizes = []
    for axis, factor in zip(axes or range(len(factors)), factors, strict=True):
        size = None if shape is None else shape[axis]
        if factor == int(factor):
            continue
        if size is None:
            site.refuse("a size it scales is unknown, and half_pixel_symmetric is new in opset 19")
        sizes.append(size * factor)
    return sizes


def _resize_18(site: _Site) -> bool:
    axes = site.ints_attribute("axes")
    policy = site.attribute("keep_aspect_ratio_policy", "stretch")
    if axes is not None:
        if site.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
            site.refuse("it crops along chosen axes only")
        rank = site.rank()
        axes = [axis % rank for axis in axes]
    if site.int_attribute("antialias"):
        _check_antialias(site, axes)
    if site.input(3) and policy != "stretch":
        # The coordinates then follow the common ratio and not the rounded sizes, which the older Resize cannot say.
        site.refuse(f"keep_aspect_ratio_policy is {policy}")
    if axes is not None and axes != list(range(site.rank())):
        _resize_all_axes(site, axes)
    return site.drop_attribute("axes", "antialias", "keep_aspect_ratio_policy")


def _resize_all_axes(site: _Site, axes: list[int]) -> None:
    rank = site.rank()
    if site.input(3):
        site.set_inputs([site.input(0), "", "", _sizes_for_all_axes(site, axes, rank)])
        return
    scales = site.array(2)
    if scales is None:
        site.refuse(f"its scales for some axes are computed in the graph ({site.input(2)})")
    full = np.ones(rank, np.float32)
    full[axes] = np.asarray(scales, np.float32)
    site.set_inputs([site.input(0), "", site.constant(full, "scales")])


def _sizes_for_all_axes(site: _Site, axes: list[int], rank: int) -> str:
    sizes, shape = site.array(3), site.type().shape or (None,) * rank
    missing = [axis for axis in range(rank) if axis not in axes]
    if sizes is not None and all(shape[axis] is not None for axis in missing):
        full = np.asarray([shape[axis] or 0 for axis in range(rank)], np.int64)
        full[axes] = np.asarray(sizes, np.int64)
        return site.constant(full, "sizes")
    whole = site.emit("Shape", [site.input(0)], "shape")
    parts = []
    for axis in range(rank):
        source, at = (site.input(3), axes.index(axis)) if axis in axes else (whole, axis)
        start, stop = (site.constant(np.asarray([at + i], np.int64), f"{wish}{axis}") for i, wish in enumerate("se"))
        parts.append(site.emit("Slice", [source, start, stop], f"size{axis}"))
    return site.emit("Concat", parts, "sizes", axis=0)


def _check_antialias(site: _Site, axes: list[int] | None) -> None:
    """Antialiasing does nothing where nothing shrinks and for nearest; elsewhere the older Resize cannot do it."""
    if site.attribute("mode", "nearest") == "nearest":
        return
    scales, sizes, shape = site.array(2), site.array(3), site.type().shape
    if scales is not None and np.size(scales) and bool(np.all(np.asarray(scales, np.float64) >= 1)):
        return
    if sizes is not None and shape is not None:
        old = [shape[axis] for axis in axes or range(len(shape))]
        if all(size is not None and int(want) >= size for want, size in zip(np.asarray(sizes), old, strict=True)):
            return
    site.refuse("antialias is 1 and it may shrink the image: the older Resize has no antialiasing filter")


def _quantize_21(site: _Site) -> bool:
    """To version 19: block_size and output_dtype go; a type given only by output_dtype becomes a zero point."""
    if site.int_attribute("block_size"):
        site.refuse("it quantises in blocks")
    kind = site.int_attribute("output_dtype")
    changed = site.drop_attribute("block_size", "output_dtype")
    if kind and not site.input(2):
        if kind not in (TensorProto.INT8, TensorProto.UINT8):
            site.refuse(f"its output is {_type_string(kind)[7:-1]}")
        scale = site.type(1).shape
        if scale is None or None in scale:
            site.refuse("the shape of its scale is unknown")
        dims = [size or 0 for size in scale]
        zero = np.zeros(dims, np.int8 if kind == TensorProto.INT8 else np.uint8)
        site.set_inputs([site.input(0), site.input(1), site.constant(zero, "zero_point")])
        changed = True
    return changed


def _dequantize_21(site: _Site) -> bool:
    if site.int_attribute("block_size"):
        site.refuse("it dequantises in blocks")
    return site.drop_attribute("block_size")


def _dequantize_23(site: _Site) -> bool:
    kind = site.int_attribute("output_dtype")
    if kind and kind != site.type(1).kind:
        site.refuse("output_dtype differs from the type of its scale")
    return site.drop_attribute("output_dtype")


def _cast_like(site: _Site) -> bool:
    kind = site.type(1).kind
    if not kind:
        site.refuse(f"the element type of {site.input(1)} must be known and is not")
    site.become("Cast", [site.input(0)], to=kind)
    return True


def _hard_swish(site: _Site) -> bool:
    x = site.input(0)
    site.become("Mul", [x, site.emit("HardSigmoid", [x], "hard_sigmoid", alpha=1 / 6, beta=0.5)])
    return True


def _mish(site: _Site) -> bool:
    x = site.input(0)
    site.become("Mul", [x, site.emit("Tanh", [site.emit("Softplus", [x], "softplus")], "tanh")])
    return True


def _swish(site: _Site) -> bool:
    x, alpha = site.input(0), site.float_attribute("alpha", 1.0)
    scaled = x if alpha == 1 else site.emit("Mul", [x, site.scalar(alpha, "alpha")], "scaled")
    site.become("Mul", [x, site.emit("Sigmoid", [scaled], "sigmoid")])
    return True


def _gelu(site: _Site) -> bool:
    x = site.input(0)
    if site.attribute("approximate", "none") == "tanh":
        square = site.emit("Mul", [x, x], "square")
        cube = site.emit("Mul", [site.emit("Mul", [square, x], "cube"), site.scalar(0.044715, "c3")], "cubic")
        inner = site.emit("Mul", [site.emit("Add", [x, cube], "sum"), site.scalar(math.sqrt(2 / math.pi), "c1")], "in")
        curve = site.emit("Tanh", [inner], "tanh")
    else:
        curve = site.emit("Erf", [site.emit("Mul", [x, site.scalar(math.sqrt(0.5), "c1")], "in")], "erf")
    half = site.emit("Mul", [x, site.scalar(0.5, "half")], "half_x")
    site.become("Mul", [half, site.emit("Add", [curve, site.scalar(1, "one")], "gate")])
    return True


def _stash(site: _Site) -> tuple[str, bool]:
    """The first input in the type that its normalisation computes in, and whether that needs casts."""
    if site.int_attribute("stash_type", 1) != TensorProto.FLOAT:
        site.refuse("its stash_type is not float32")
    if site.kind() in (TensorProto.FLOAT, TensorProto.DOUBLE):
        return site.input(0), False
    return site.emit("Cast", [site.input(0)], "float", to=TensorProto.FLOAT), True


def _normalised(site: _Site, centre: bool) -> str:
    """(x - mean) / sqrt(variance + epsilon) over the axes from `axis` on; without `centre`, x / rms."""
    axis = site.int_attribute("axis", -1)
    axes = list(range(axis if axis < 0 else axis - site.rank(), 0))
    x, cast = _stash(site)
    shifted = site.emit("Sub", [x, site.mean(x, axes, "mean")], "centred") if centre else x
    variance = site.mean(site.emit("Mul", [shifted, shifted], "squared"), axes, "variance")
    dtype = np.float64 if site.kind() == TensorProto.DOUBLE else np.float32
    epsilon = site.constant(np.asarray(site.float_attribute("epsilon", 1e-5), dtype), "epsilon")
    deviation = site.emit("Sqrt", [site.emit("Add", [variance, epsilon], "variance_epsilon")], "deviation")
    ratio = site.emit("Div", [shifted, deviation], "normalised")
    return site.emit("Cast", [ratio], "cast_back", to=site.kind()) if cast else ratio


def _layer_norm(site: _Site) -> bool:
    if any(site.node.output[1:]):
        site.refuse("its mean or deviation output is used")
    normalised, scale, bias = _normalised(site, centre=True), site.input(1), site.input(2)
    del site.node.output[1:]
    if bias:
        site.become("Add", [site.emit("Mul", [normalised, scale], "scaled"), bias])
    else:
        site.become("Mul", [normalised, scale])
    return True


def _rms_norm(site: _Site) -> bool:
    site.become("Mul", [_normalised(site, centre=False), site.input(1)])
    return True


def _group_norm(site: _Site) -> bool:
    """Both versions: 18 has one scale per group, 21 one per channel. Spelled as torch spells it before opset 18."""
    x, groups, per_channel = site.input(0), site.int_attribute("num_groups"), _since_of(site) >= 21
    source, cast = _stash(site) if per_channel else (x, False)
    rank, dtype = site.rank(), np.dtype(np.float32) if cast else helper.tensor_dtype_to_np_dtype(site.kind())
    grouped = site.emit("Reshape", [source, site.constant(np.asarray([0, groups, -1], np.int64), "groups")], "grouped")
    if per_channel:
        scale, bias = (site.constant(make(groups, dtype), w) for make, w in ((np.ones, "ones"), (np.zeros, "zeros")))
    else:
        scale, bias = site.input(1), site.input(2)
    epsilon = site.float_attribute("epsilon", 1e-5)
    normal = site.emit("InstanceNormalization", [grouped, scale, bias], "normalised", epsilon=epsilon)
    shape = site.emit("Shape", [x], "shape")
    if not per_channel:
        site.become("Reshape", [normal, shape])
        return True
    back = site.emit("Reshape", [normal, shape], "ungrouped")
    if cast:
        back = site.emit("Cast", [back], "cast_back", to=site.kind())
    scale, bias = (_per_channel(site, position, rank) for position in (1, 2))
    site.become("Add", [site.emit("Mul", [back, scale], "scaled"), bias])
    return True


def _since_of(site: _Site) -> int:
    return _since(site.op_type, site.scope.work.source) or 0


def _per_channel(site: _Site, position: int, rank: int) -> str:
    """An input of shape (C,) as (C, 1, 1 ...), so that it broadcasts over N, C, H, W."""
    wish = ("scale", "bias")[position - 1]
    value = site.array(position)
    if value is not None:
        return site.constant(np.reshape(value, (-1, *[1] * (rank - 2))), wish)
    axes = site.constant(np.asarray(range(1, rank - 1), np.int64), f"{wish}_axes")
    return site.emit("Unsqueeze", [site.input(position), axes], wish) if rank > 2 else site.input(position)


def _lp_pool(site: _Site) -> bool:
    if any(entry != 1 for entry in site.ints_attribute("dilations") or []):
        site.refuse("it is dilated, and the older LpPool cannot be")
    return site.drop_attribute("dilations") | _CEIL_MODE_OFF(site)


_CEIL_MODE_OFF = _drop_default(("ceil_mode", 0))


def _roi_align(site: _Site) -> bool:
    if site.attribute("coordinate_transformation_mode", "half_pixel") != "output_half_pixel":
        site.refuse(
            "coordinate_transformation_mode is half_pixel, and the older RoiAlign always shifts by half a pixel"
        )
    return site.drop_attribute("coordinate_transformation_mode")


_NO_FORM = {
    "GridSample": "GridSample is new in opset 16 and TensorRT 8 has nothing like it",
    "DeformConv": "DeformConv is new in opset 19 and TensorRT 8 has nothing like it",
    "Attention": "Attention is new in opset 23; export with an attention made of MatMul and Softmax",
}

REWRITTEN: dict[tuple[str, int], Callable[[_Site], bool]] = {
    **{
        (f"Reduce{name}", 18): _reduce
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
    ("Reshape", 14): _reshape_14,
    ("Shape", 15): _shape_15,
    ("BatchNormalization", 14): _batchnorm_14,
    ("BatchNormalization", 15): _batchnorm_15,
    ("AveragePool", 19): _average_pool_19,
    ("AveragePool", 22): _ceil_mode,
    ("MaxPool", 22): _ceil_mode,
    ("LpPool", 18): _lp_pool,
    ("Pad", 18): _pad_18,
    ("Pad", 19): _pad_19,
    ("Split", 18): _split_18,
    ("Resize", 18): _resize_18,
    ("Resize", 19): _resize_19,
    ("Cast", 19): _drop("saturate"),
    ("Cast", 24): _drop("round_mode"),
    ("CastLike", 15): _cast_like,
    ("CastLike", 19): _drop("saturate"),
    ("CastLike", 24): _drop("round_mode"),
    ("QuantizeLinear", 19): _drop("saturate"),
    ("QuantizeLinear", 21): _quantize_21,
    ("QuantizeLinear", 23): _drop_default(("precision", 0)),
    ("DequantizeLinear", 21): _dequantize_21,
    ("DequantizeLinear", 23): _dequantize_23,
    ("GRU", 14): _drop_default(("layout", 0)),
    ("LSTM", 14): _drop_default(("layout", 0)),
    ("RNN", 14): _drop_default(("layout", 0)),
    ("RoiAlign", 16): _roi_align,
    ("ScatterElements", 16): _drop_default(("reduction", "none")),
    ("ScatterElements", 18): _drop_default(),
    ("ScatterND", 16): _drop_default(("reduction", "none")),
    ("ScatterND", 18): _drop_default(),
    ("HardSwish", 14): _hard_swish,
    ("Mish", 18): _mish,
    ("Swish", 24): _swish,
    ("Gelu", 20): _gelu,
    ("LayerNormalization", 17): _layer_norm,
    ("RMSNormalization", 23): _rms_norm,
    ("GroupNormalization", 18): _group_norm,
    ("GroupNormalization", 21): _group_norm,
}
"""(operator, version) -> the step from that version to the definition before it."""
