"""The fp16 graph: what may compute in fp16 does, what may not keeps its type behind Casts, inputs and outputs stay.

Each node is judged by its operator's definition in the model's opset: a type variable that takes float16 is converted,
an input that must be float (the scales of Resize and Upsample, of QuantizeLinear before opset 19) is not. Nodes that no
graph input reaches except through Shape compute shapes, masks and anchors: they keep their type too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from sparsedeploy.converters.graph import (
    Array,
    Model,
    bodies,
    node_label,
    outer_names,
    remove_orphans,
)
from sparsedeploy.converters.inference import ValueType, infer_types
from sparsedeploy.errors import InputError
from sparsedeploy.plugins.node import DOMAIN, OP_TYPE

LARGEST = 65504.0
"""Largest finite fp16 number."""

_WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_HALF = TensorProto.FLOAT16
_DEFAULT = ("", "ai.onnx")

KEPT = frozenset(
    {
        # Ranks and decisions that rounding would change.
        "TopK", "NonMaxSuppression", "RoiAlign",
        # Sums of squares, exponentials or long runs: they leave fp16's range or lose its digits.
        "CumSum", "InstanceNormalization", "LRN", "LpNormalization", "MeanVarianceNormalization", "ReduceL2",
        "ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "ReduceSumSquare",
        # Scales of integers, and values made from nothing.
        "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear",
        "Bernoulli", "EyeLike", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike", "Range",
    }
)  # fmt: skip
"""Operators that keep their type although their definition takes float16."""

_KEPT_INPUTS = {"Resize": (1, 2), "GridSample": (1,)}
"""Inputs that keep their type: regions and coordinates need more digits than fp16 has."""
_BOUNDS = ("Clip", "Min", "Max", "Where", "Pad")
"""Operators whose constants mean 'as far as numbers go' when they exceed fp16: they are cut at its largest number."""
_STATISTICS = ("BatchNormalization",)
"""Operators that keep their type when one of their constants exceeds fp16."""
_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", OP_TYPE)
_THROUGH_SHAPE_ONLY = ("Shape", "Size")


def to_fp16(model: Model, keep: Collection[str] = ()) -> None:
    """Make the model compute in fp16, in place; graph inputs and outputs keep their types, with one Cast each.

    `keep` names nodes (or their outputs) that keep their type. Float32, double and bfloat16 are narrowed alike. Nodes
    with bodies, and nodes of domains other than ours, keep their type. A model whose convolutions and matrix products
    have fp16 weights already is not touched. What was done, and how many weights became zero, goes to `model.notes`.

    Raises InputError for a weight that exceeds 65504, naming the tensor; for a value whose type cannot be told, naming
    the node that makes it; for a name in `keep` that the model does not have. The model is then unchanged.
    """
    if model.proto.functions:
        raise InputError(
            f"{model.path}: model-local functions ({model.proto.functions[0].name}, ...) are still in the graph, and "
            "only plain operators can be converted to fp16. Inline them (onnx.inliner) and run this again."
        )
    conversion = _Conversion(model, frozenset(keep))
    if conversion.is_half_already():
        model.notes.append("the weights are fp16 already: nothing converted")
        return
    conversion.plan()
    conversion.apply()


@dataclass
class _Plan:
    """What becomes of one node."""

    node: NodeProto
    position: int
    half_inputs: set[int] = field(default_factory=set)
    half_outputs: set[int] = field(default_factory=set)


@dataclass
class _Uses:
    """Who needs a float value, and in which type."""

    half: list[tuple[NodeProto, int]] = field(default_factory=list)
    wide: list[tuple[NodeProto, int]] = field(default_factory=list)
    any: list[tuple[NodeProto, int]] = field(default_factory=list)
    """Casts, which read either."""
    pinned: bool = False
    """A graph output or a body needs it under its own name, in its own type."""


class _Conversion:
    """One conversion of one model's main graph: first everything is decided and checked, then the graph is changed."""

    def __init__(self, model: Model, keep: frozenset[str]) -> None:
        self.model = model
        self.keep = keep
        self.graph: GraphProto = model.proto.graph
        self.index = model.graph
        self.types = infer_types(model)
        self.opset = model.opset()
        self.plans: list[_Plan] = []
        self.uses: dict[str, _Uses] = {}
        self.half_natively: set[str] = set()
        self.constants: dict[str, Array] = {}
        self.vanished: dict[str, int] = {}
        self.cut: list[str] = []
        self.bypassed: list[str] = []
        """Constants behind Identity whose readers take the constant itself."""
        self.casts: list[tuple[int, NodeProto]] = []
        self.names = {value.name for value in (*self.graph.input, *self.graph.initializer)}
        for node in self.graph.node:
            self.names |= {node.name, *node.output, *outer_names(node)}

    def is_half_already(self) -> bool:
        """Whether the operators that hold weights have them in fp16, all of them."""
        weights = [node.input[1] for node in self.graph.node if node.op_type in _WEIGHTED[:-1] and len(node.input) > 1]
        kinds = {self.types.get(name).kind for name in weights}
        return kinds == {_HALF}

    # --- deciding -----------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Decide for every node and value; check every constant that will be narrowed. Changes nothing."""
        self._check_keep()
        reached = self._reached_by_data()
        for position, node in enumerate(self.graph.node):
            plan = _Plan(node, position)
            if node.op_type != "Cast" and self._may_convert(node, reached):
                self._choose(plan)
            self.plans.append(plan)
            self.half_natively |= {node.output[i] for i in plan.half_outputs}
        self._collect_uses()
        for plan in self.plans:
            self._choose_cast(plan, reached)
        for name, uses in self.uses.items():
            if uses.half and self._is_constant(name):
                self.constants[name] = self._narrowed(name, [node for node, _ in uses.half])

    def _check_keep(self) -> None:
        known = {name for node in self.graph.node for name in (node.name, *node.output)}
        missing = sorted(self.keep - known)
        if missing:
            raise InputError(
                f"{self.model.path} has no node or value named {', '.join(missing)}, which was to stay out of fp16. "
                "`sparsedeploy scan` lists the convolutions; any node's name or output's name can be given."
            )

    def _reached_by_data(self) -> set[str]:
        """Values that depend on what a caller feeds, not only on its shape."""
        reached = {value.name for value in self.index.inputs()}
        for node in self.graph.node:
            if node.op_type in _THROUGH_SHAPE_ONLY and node.domain in _DEFAULT:
                continue
            if not reached.isdisjoint(node.input) or not reached.isdisjoint(outer_names(node)):
                reached.update(name for name in node.output if name)
        return reached

    def _may_convert(self, node: NodeProto, reached: set[str]) -> bool:
        if node.domain == DOMAIN and node.op_type == OP_TYPE:
            return not self._is_to_keep(node)
        floats = [name for name in node.input if name and self._is_wide(name)]
        return (
            node.domain in _DEFAULT
            and node.op_type not in KEPT
            and not any(True for _ in bodies(node))
            and not self._is_to_keep(node)
            and not reached.isdisjoint(floats)
            and all(self.types.get(name).is_tensor for name in (*node.input, *node.output) if name)
            and not self._loses_a_constant(node)
        )

    def _is_to_keep(self, node: NodeProto) -> bool:
        return not self.keep.isdisjoint((node.name, *node.output))

    def _loses_a_constant(self, node: NodeProto) -> bool:
        """Whether a scalar that matters (an epsilon, a scale) would become 0 or infinite, or a statistic infinite."""
        for name in node.input:
            if not name or not self._is_wide(name) or node.op_type in _BOUNDS:
                continue
            if node.op_type not in _STATISTICS and self._size(name) != 1:
                continue
            value = self.index.array(name)
            if value is None:
                continue
            wide = np.abs(value.astype(np.float64))
            vanishes = node.op_type not in _STATISTICS and np.any((wide > 0) & (_half(wide) == 0))
            if vanishes or np.any(wide[np.isfinite(wide)] > LARGEST):
                return True
        return False

    def _size(self, name: str) -> int | None:
        shape = self.types.get(name).shape
        if shape is None or any(dim is None for dim in shape):
            return None
        return int(np.prod([dim or 0 for dim in shape], dtype=np.int64))

    def _choose(self, plan: _Plan) -> None:
        node = plan.node
        if node.domain == DOMAIN:
            plan.half_inputs = {i for i, name in enumerate(node.input) if self._is_wide(name)}
            plan.half_outputs = {i for i, name in enumerate(node.output) if self._is_wide(name)}
            return
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opset, "")
        except onnx.defs.SchemaError:
            return
        takes = {
            entry.type_param_str for entry in schema.type_constraints if "tensor(float16)" in entry.allowed_type_strs
        }
        self._require_types(node)
        kept = _KEPT_INPUTS.get(node.op_type, ())
        variables = set()
        for i, name in enumerate(node.input):
            variable = schema.inputs[min(i, len(schema.inputs) - 1)].type_str
            if name and i not in kept and self._is_wide(name) and variable in takes:
                plan.half_inputs.add(i)
                variables.add(variable)
        for i, name in enumerate(node.output):
            if name and self._is_wide(name) and schema.outputs[min(i, len(schema.outputs) - 1)].type_str in variables:
                plan.half_outputs.add(i)

    def _require_types(self, node: NodeProto) -> None:
        for name in (*node.input, *node.output):
            known = self.types.get(name)
            unknown = known.is_tensor and known.kind == TensorProto.UNDEFINED
            if name and unknown and self.index.readers(name):
                maker = self.index.producer(name)
                made = f"{maker.op_type} node {node_label(maker)}" if maker is not None else "no node"
                raise InputError(
                    f"{self.model.path}: the element type of value {name}, made by {made} and read by {node_label(node)}, "
                    "cannot be told, so the graph cannot be converted to fp16. Declare it in the model's value_info, or "
                    "convert with --precision fp32."
                )

    def _collect_uses(self) -> None:
        for plan in self.plans:
            for i, name in enumerate(plan.node.input):
                if not name or not self._is_wide(name):
                    continue
                uses = self.uses.setdefault(name, _Uses())
                is_cast = plan.node.op_type == "Cast" and plan.node.domain in _DEFAULT
                if i in plan.half_inputs:
                    self._half_uses(name).append((plan.node, i))
                else:
                    (uses.any if is_cast else uses.wide).append((plan.node, i))
            for name in outer_names(plan.node):
                if self._is_wide(name):
                    self.uses.setdefault(name, _Uses()).pinned = True
        for name in self.index.outputs:
            if self._is_wide(name):
                self.uses.setdefault(name, _Uses()).pinned = True

    def _half_uses(self, name: str) -> list[tuple[NodeProto, int]]:
        """Where to list who needs a value in fp16: at the constant itself when the value is one behind Identity."""
        root = name
        while (producer := self.index.producer(root)) is not None and producer.op_type == "Identity":
            root = producer.input[0]
        if root != name and self._is_constant(root):
            self.bypassed.append(name)
            name = root
        return self.uses.setdefault(name, _Uses()).half

    def _choose_cast(self, plan: _Plan, reached: set[str]) -> None:
        """A Cast to a wide type gives fp16 instead where only fp16 is wanted of it."""
        node = plan.node
        if node.op_type != "Cast" or node.domain not in _DEFAULT or self._is_to_keep(node):
            return
        output = node.output[0]
        uses = self.uses.get(output)
        if uses is None or not self._is_wide(output) or output not in reached:
            return
        if uses.half and not uses.wide and not uses.pinned:
            plan.half_outputs.add(0)
            self.half_natively.add(output)

    # --- constants ----------------------------------------------------------------------------------------------

    def _is_constant(self, name: str) -> bool:
        """Whether a wide value is an initializer or a dense Constant; its data is not read."""
        producer = self.index.producer(name)
        is_node = producer is not None and producer.op_type == "Constant" and producer.domain in _DEFAULT
        return self._is_wide(name) and (name in self.index.initializers or is_node)

    def _narrowed(self, name: str, readers: list[NodeProto]) -> Array:
        wide = np.asarray(self.index.array(name))
        if wide.dtype not in (np.float32, np.float64):
            wide = wide.astype(np.float32)  # bfloat16
        half = _half(wide)
        largest = float(np.abs(wide).max(initial=0, where=np.isfinite(wide)))
        if largest > LARGEST:
            too_large = np.isfinite(wide) & (np.abs(wide) > LARGEST)
            reader = next((node for node in readers if node.op_type not in _BOUNDS), None)
            if reader is not None:
                raise InputError(
                    f"{self.model.path}: tensor {name}, read by {reader.op_type} node {node_label(reader)}, has "
                    f"{int(too_large.sum())} of {wide.size} values beyond fp16's largest number {LARGEST:g} (up to "
                    f"{largest:g}). Rescale that layer, or convert with --precision fp32."
                )
            self.cut.append(name)
            half = np.where(too_large, np.copysign(np.float16(LARGEST), half), half)
        vanished = int(np.count_nonzero(wide)) - int(np.count_nonzero(half))
        if vanished:
            self.vanished[name] = vanished
        return half

    # --- changing the graph -------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Change the graph as planned."""
        for plan in self.plans:
            if plan.node.op_type == "Cast" and plan.half_outputs:
                _set_cast(plan.node, _HALF)
        positions = {name: plan.position for plan in self.plans for name in plan.node.output if name}
        orphans = self.bypassed
        for name, uses in list(self.uses.items()):
            if name in self.constants:
                self._convert_constant(name, uses)
            elif name in self.half_natively:
                self._widen(name, uses, positions[name])
            elif uses.half:
                orphans += self._narrow(name, uses, positions.get(name, -1))
        for name in self.half_natively:
            self._declare_half(name)
        for position, cast in sorted(self.casts, key=lambda entry: entry[0], reverse=True):
            self.graph.node.insert(position, cast)
        remove_orphans(self.graph, orphans)
        self._note()

    def _convert_constant(self, name: str, uses: _Uses) -> None:
        half = numpy_helper.from_array(self.constants[name], name)
        if uses.wide or uses.any or uses.pinned:
            half.name = self._fresh(f"{name}_fp16")
            self.graph.initializer.append(half)
            if self.model.proto.ir_version < 4:
                self.graph.input.append(helper.make_tensor_value_info(half.name, _HALF, half.dims))
            _point(uses.half, half.name)
            return
        if name in self.index.initializers:
            self.index.initializers[name].CopyFrom(half)
            for value in self.graph.input:
                if value.name == name:
                    value.type.tensor_type.elem_type = _HALF
        else:
            node = self.index.producers[name]
            del node.attribute[:]
            half.name = ""
            node.attribute.append(helper.make_attribute("value", half))
        self._declare_half(name)

    def _widen(self, name: str, uses: _Uses, position: int) -> None:
        """A value that is fp16 now: give those who need its old type a Cast, under its old name if that is pinned."""
        if not uses.pinned and not uses.wide:
            return
        kind = self.types.get(name).kind
        if not uses.pinned:
            self._add_cast(position, name, widened := self._fresh(f"{name}_fp32"), kind)
            _point(uses.wide, widened)
            return
        producer = self.index.producers[name]
        narrow = self._fresh(f"{name}_fp16")
        producer.output[list(producer.output).index(name)] = narrow
        _point(uses.half + uses.any, narrow)
        self._add_cast(position, narrow, name, kind)
        self.half_natively.discard(name)

    def _narrow(self, name: str, uses: _Uses, position: int) -> list[str]:
        """A value that keeps its type: those who need fp16 get a Cast, or what it was cast from if that is fp16."""
        producer = self.index.producer(name)
        if producer is not None and producer.op_type == "Cast" and self.types.get(producer.input[0]).kind == _HALF:
            _point(uses.half, producer.input[0])
            return [name]
        self._add_cast(position, name, narrow := self._fresh(f"{name}_fp16"), _HALF)
        _point(uses.half, narrow)
        return []

    def _add_cast(self, position: int, source: str, target: str, kind: int) -> None:
        name = self._fresh(f"{target}_cast")
        self.casts.append((position + 1, helper.make_node("Cast", [source], [target], name=name, to=kind)))

    def _declare_half(self, name: str) -> None:
        for value in self.graph.value_info:
            if value.name == name:
                value.type.tensor_type.elem_type = _HALF

    def _fresh(self, wish: str) -> str:
        name, count = wish, 0
        while name in self.names:
            count += 1
            name = f"{wish}_{count}"
        self.names.add(name)
        return name

    def _is_wide(self, name: str) -> bool:
        known: ValueType = self.types.get(name)
        return known.is_tensor and known.kind in _WIDE

    def _note(self) -> None:
        halves = sum(bool(plan.half_inputs or plan.half_outputs) for plan in self.plans)
        others = sum(
            any(self._is_wide(name) for name in (*plan.node.input, *plan.node.output))
            and not plan.half_inputs
            and not plan.half_outputs
            and plan.node.op_type not in ("Cast", "Constant", "Identity")
            for plan in self.plans
        )
        text = f"{halves} nodes compute in fp16"
        if others:
            text += f", {others} keep their type"
        self.model.notes.append(f"{text}, {len(self.casts)} Casts added")
        if self.vanished:
            total, worst = sum(self.vanished.values()), max(self.vanished, key=lambda name: self.vanished[name])
            self.model.notes.append(
                f"too small for fp16, became 0: {total} of the constants' values, {self.vanished[worst]} of them in {worst}"
            )
        if self.cut:
            self.model.notes.append(f"bounds beyond fp16's largest number were cut at 65504: {', '.join(self.cut)}")


def with_every_rounding(model: Model) -> ModelProto:
    """A copy for ONNX Runtime on the CPU in which every fp16 value of the main graph is really rounded to fp16.

    Its CPU provider runs most operators in fp32 and drops the casts between them, even with its optimiser off: an fp16
    graph then looks better than any device that stores its values in fp16. Two Identities after each value keep the
    rounding (one alone is run in fp32 too), as long as the optimiser is off, as in compare_in_ort.
    """
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    types = infer_types(model)
    taken = {name for node in proto.graph.node for name in (node.name, *node.output)}
    for position, node in reversed(list(enumerate(list(proto.graph.node)))):
        for i, name in enumerate(node.output):
            if not name or types.get(name).kind != _HALF or node.op_type == "Constant":
                continue
            exact = f"{name}_unrounded"
            while not taken.isdisjoint((exact, f"{exact}_1")):
                exact += "_"
            node.output[i] = exact
            proto.graph.node.insert(position + 1, helper.make_node("Identity", [f"{exact}_1"], [name]))
            proto.graph.node.insert(position + 1, helper.make_node("Identity", [exact], [f"{exact}_1"]))
    return proto


def _half(values: Array) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _point(uses: list[tuple[NodeProto, int]], name: str) -> None:
    for node, position in uses:
        node.input[position] = name


def _set_cast(node: NodeProto, kind: int) -> None:
    for entry in node.attribute:
        if entry.name == "to":
            entry.i = kind
