"""The fp32 graph of a model in another float type: double narrowed, bfloat16 and fp16 widened, activations too.

No kernel and no TensorRT computes in double, and bfloat16 is unknown to TensorRT 8: such a graph is relabelled as a whole,
bodies of control flow included, so that every value that was of the one type is fp32. An operator that takes one of these
types takes fp32 as well. Only operators of other domains keep their types, behind Casts.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from sparsedeploy.converters.graph import Model, bodies, fresh_name, node_label, remove_nodes
from sparsedeploy.converters.inference import infer_types
from sparsedeploy.converters.lean import all_nodes, with_bodies
from sparsedeploy.errors import InputError

_TYPE_NAMES = {TensorProto.DOUBLE: "double", TensorProto.BFLOAT16: "bfloat16", TensorProto.FLOAT16: "fp16"}
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision")
"""Attributes that hold an element type."""
_BOUNDS = ("Clip", "Min", "Max", "Where", "Pad")
"""Operators whose constants mean 'as far as numbers go' when they exceed fp32."""
_DEFAULT = ("", "ai.onnx")
_LARGEST = float(np.finfo(np.float32).max)


def convolution_types(model: Model) -> frozenset[int]:
    """Element types (TensorProto) of the constant convolution weights of the main graph."""
    graph, kinds = model.graph, set()
    for node in model.proto.graph.node:
        if node.op_type != "Conv" or node.domain not in _DEFAULT or len(node.input) < 2:
            continue
        tensor = graph.initializers.get(node.input[1])
        if tensor is not None:
            kinds.add(int(tensor.data_type))
        elif (weight := graph.array(node.input[1])) is not None:
            kinds.add(int(helper.np_dtype_to_tensor_dtype(weight.dtype)))
    return frozenset(kinds)


def to_fp32(model: Model, kinds: Collection[int]) -> None:
    """Make every value of the element types `kinds` (of DOUBLE, BFLOAT16, FLOAT16) fp32, in place.

    Graph inputs and outputs of fp16 stay fp16, with a Cast each; double and bfloat16 ones become fp32, since TensorRT 8
    has neither. What was done, and how many values became zero, goes to `model.notes`.

    Raises InputError for a finite double beyond fp32, naming the tensor, and for an operator of another domain that
    reads such a value and whose results have unknown types. The model is then unusable.
    """
    if not kinds:
        return
    _Relabelling(model, frozenset(kinds)).apply()


class _Relabelling:
    """One relabelling of one model."""

    def __init__(self, model: Model, kinds: frozenset[int]) -> None:
        self.model, self.kinds = model, kinds
        self.graph: GraphProto = model.proto.graph
        self.types = infer_types(model)
        self.vanished: dict[str, int] = {}
        self.cut: list[str] = []
        self.made: set[str] = set()
        """New fp32 values."""

    def apply(self) -> None:
        """Change the graph and say so."""
        foreign = self._foreign()
        readers: dict[str, set[str]] = {}
        for node in all_nodes(self.model.proto):
            for name in node.input:
                readers.setdefault(name, set()).add(node.op_type)
        for graph in with_bodies(self.graph):
            for tensor in graph.initializer:
                self._tensor(tensor, tensor.name, readers.get(tensor.name, set()))
            for node in graph.node:
                if node.domain in _DEFAULT:
                    self._attributes(node, readers)
            inner = graph is not self.graph
            for value in (*graph.value_info, *(graph.input if inner else ()), *(graph.output if inner else ())):
                self._type(value.type)
        for node in foreign:
            self._fence(node)
        changed, kept = self._ends()
        self._drop_idle_casts()
        self._note(changed, kept)

    # --- values -------------------------------------------------------------------------------------------------

    def _tensor(self, tensor: TensorProto, name: str, readers: set[str]) -> None:
        if tensor.data_type not in self.kinds:
            return
        wide = np.asarray(numpy_helper.to_array(tensor, str(self.model.base_dir)))
        with np.errstate(over="ignore", under="ignore"):
            narrow = wide.astype(np.float32)
        if tensor.data_type == TensorProto.DOUBLE:
            lost = np.isfinite(wide) & ~np.isfinite(narrow)
            if lost.any():
                if not readers <= set(_BOUNDS):
                    raise InputError(
                        f"{self.model.path}: tensor {name or 'of a Constant'} has {int(lost.sum())} of {wide.size} double values "
                        f"beyond fp32's largest number {_LARGEST:.4g}, and nothing on an NVIDIA device computes a network "
                        "in double. Rescale that layer and export again."
                    )
                self.cut.append(name)
                narrow = np.where(lost, np.copysign(np.float32(_LARGEST), wide).astype(np.float32), narrow)
            vanished = int(np.count_nonzero(wide)) - int(np.count_nonzero(narrow))
            if vanished:
                self.vanished[name] = vanished
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(narrow).reshape(wide.shape), tensor.name))

    def _attributes(self, node: NodeProto, readers: dict[str, set[str]]) -> None:
        for entry in node.attribute:
            if entry.HasField("t"):
                name = node.output[0] if node.output else ""
                self._tensor(entry.t, name, readers.get(name, set()))
            elif entry.HasField("tp"):
                self._type(entry.tp)
            elif entry.name in _TYPE_ATTRIBUTES and entry.i in self.kinds:
                entry.i = TensorProto.FLOAT

    def _type(self, proto: TypeProto) -> None:
        """Relabel a tensor type, also inside sequences and optionals."""
        held = proto.WhichOneof("value")
        if held in ("tensor_type", "sparse_tensor_type"):
            tensor = getattr(proto, held)
            if tensor.elem_type in self.kinds:
                tensor.elem_type = TensorProto.FLOAT
        elif held in ("sequence_type", "optional_type"):
            self._type(getattr(proto, held).elem_type)

    # --- operators of other domains -------------------------------------------------------------------------------

    def _foreign(self) -> list[NodeProto]:
        """Nodes of other domains that read or make values to be relabelled; raises where Casts cannot be placed."""
        found = []
        for node in self.graph.node:
            for body in bodies(node):
                for inner in with_bodies(body):
                    for deep in inner.node:
                        if deep.domain not in _DEFAULT:
                            raise self._refusal(deep, "is inside a body of control flow")
            if node.domain in _DEFAULT:
                continue
            read = [name for name in node.input if self._is_ours(name)]
            made = [name for name in node.output if self._is_ours(name)]
            unknown = [name for name in node.output if name and self.types.get(name).kind == TensorProto.UNDEFINED]
            if read and unknown:
                raise self._refusal(node, f"makes {unknown[0]}, whose element type the model does not say")
            if read or made:
                found.append(node)
        return found

    def _refusal(self, node: NodeProto, what: str) -> InputError:
        names = ", ".join(sorted(_TYPE_NAMES.get(kind, str(kind)) for kind in self.kinds))
        return InputError(
            f"{self.model.path}: operator {node.domain}.{node.op_type} ({node_label(node)}) {what}, so the {names} graph around "
            "it cannot be made fp32. Export the model in fp32, or declare the value's type in its value_info."
        )

    def _is_ours(self, name: str) -> bool:
        return bool(name) and self.types.get(name).kind in self.kinds

    def _fence(self, node: NodeProto) -> None:
        """Give a node of another domain its old types back, by Casts before and after it."""
        at = next(i for i, entry in enumerate(self.graph.node) if entry is node)
        before, after = [], []
        for i, name in enumerate(node.input):
            if self._is_ours(name):
                node.input[i] = own = fresh_name(self.graph, f"{name}_own_type")
                before.append(helper.make_node("Cast", [name], [own], name=own, to=self.types.get(name).kind))
        for i, name in enumerate(node.output):
            if self._is_ours(name):
                node.output[i] = own = fresh_name(self.graph, f"{name}_own_type")
                after.append(helper.make_node("Cast", [own], [name], name=own, to=TensorProto.FLOAT))
        for cast in reversed(after):
            self.graph.node.insert(at + 1, cast)
        for cast in before:
            self.graph.node.insert(at, cast)

    # --- inputs and outputs ---------------------------------------------------------------------------------------

    def _ends(self) -> tuple[list[str], list[str]]:
        """Relabel or cast the graph's inputs and outputs; the names of either kind."""
        changed, kept, first = [], [], 0
        constants = {tensor.name for tensor in self.graph.initializer}
        for value in self.graph.input:
            kind = value.type.tensor_type.elem_type
            if kind != TensorProto.FLOAT16 or kind not in self.kinds or value.name in constants:
                changed += [value.name] if self._is_ours(value.name) and value.name not in constants else []
                self._type(value.type)
                continue
            kept.append(value.name)
            wide = fresh_name(self.graph, f"{value.name}_fp32")
            _rename_reads(self.graph, value.name, wide)
            self.made.add(wide)
            self.graph.node.insert(
                first, helper.make_node("Cast", [value.name], [wide], name=wide, to=TensorProto.FLOAT)
            )
            first += 1
        for value in self.graph.output:
            kind = value.type.tensor_type.elem_type or self.types.get(value.name).kind
            if kind != TensorProto.FLOAT16 or kind not in self.kinds:
                changed += [value.name] if self._is_ours(value.name) else []
                self._type(value.type)
                continue
            kept.append(value.name)
            if value.name not in {entry.name for entry in self.graph.input}:
                self._cast_output(value.name)
        return list(dict.fromkeys(changed)), list(dict.fromkeys(kept))

    def _cast_output(self, name: str) -> None:
        wide = fresh_name(self.graph, f"{name}_fp32")
        self.made.add(wide)
        _rename_reads(self.graph, name, wide)
        for node in self.graph.node:
            for i, output in enumerate(node.output):
                if output == name:
                    node.output[i] = wide
        for entry in (*self.graph.value_info, *self.graph.initializer):
            if entry.name == name:
                entry.name = wide
        self.graph.node.append(helper.make_node("Cast", [wide], [name], name=f"{name}_cast", to=TensorProto.FLOAT16))

    def _drop_idle_casts(self) -> None:
        """Casts from fp32 to fp32, which were between fp16 and fp32: they would stand between a Conv and its Relu."""
        outputs, gone = {value.name for value in self.graph.output}, []
        inputs = {value.name: value.type.tensor_type.elem_type for value in self.graph.input}
        for node in self.graph.node:
            if node.op_type != "Cast" or node.domain not in _DEFAULT or node.output[0] in outputs:
                continue
            source, target = node.input[0], next((entry.i for entry in node.attribute if entry.name == "to"), 0)
            kind = inputs.get(source, TensorProto.FLOAT if source in self.made else self.types.get(source).kind)
            if target == TensorProto.FLOAT and (
                kind == TensorProto.FLOAT or (kind in self.kinds and source not in inputs)
            ):
                _rename_reads(self.graph, node.output[0], source)
                gone.append(node)
        remove_nodes(self.graph, gone)

    def _note(self, changed: list[str], kept: list[str]) -> None:
        names = " and ".join(_TYPE_NAMES.get(kind, str(kind)) for kind in sorted(self.kinds))
        ways = {"narrowed" if kind == TensorProto.DOUBLE else "widened" for kind in self.kinds}
        text = f"{names} {' and '.join(sorted(ways))} to fp32, weights and activations"
        if changed:
            text += f"; {', '.join(changed)} of the graph's inputs and outputs are fp32 now, since TensorRT 8 has no {names}"
        if kept:
            text += f"; {', '.join(kept)} of the graph's inputs and outputs stay fp16"
        self.model.notes.append(text)
        if self.vanished:
            self.model.notes.append(
                f"{sum(self.vanished.values())} values of {len(self.vanished)} tensors are too small for fp32 and became 0"
            )
        if self.cut:
            self.model.notes.append(
                f"bounds beyond fp32's largest number were cut at {_LARGEST:.4g}: {', '.join(self.cut)}"
            )


def _rename_reads(graph: GraphProto, old: str, new: str) -> None:
    """Point every reader of a main-graph value at another one, in bodies too, which cannot shadow it."""
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = new
        for body in bodies(node):
            for inner in with_bodies(body):
                for deep in inner.node:
                    for i, name in enumerate(deep.input):
                        if name == old:
                            deep.input[i] = new
                for value in inner.output:
                    if value.name == old:
                        value.name = new
