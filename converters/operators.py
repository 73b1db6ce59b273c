"""What the ONNX parsers of TensorRT 8.0 and 8.2 (JetPack 4.6, opset 13) lack, and what they read wrongly in silence.

Sources: docs/operators.md and builtin_op_importers.cpp of onnx/onnx-tensorrt, branches 8.0-GA and 8.2-GA. The graph is
written for 8.0, the older of the two: 8.2 adds Einsum, GatherND, IsNaN, Round, Scatter*, Sign, more padding and negative
Gather indices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from sparsedeploy.converters.graph import (
    Array,
    Graph,
    Model,
    attribute,
    bodies,
    constant_value,
    fresh_name,
    node_label,
    remove_orphans,
)
from sparsedeploy.converters.inference import Types, infer_types

SUPPORTED_8_0: tuple[str, ...] = (
    "Abs", "Acos", "Acosh", "Add", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "AveragePool",
    "BatchNormalization", "Cast", "Ceil", "Celu", "Clip", "Concat", "Constant", "ConstantOfShape", "Conv",
    "ConvTranspose", "Cos", "Cosh", "CumSum", "DepthToSpace", "DequantizeLinear", "Div", "Dropout", "Elu",
    "Equal", "Erf", "Exp", "Expand", "EyeLike", "Flatten", "Floor", "GRU", "Gather", "GatherElements", "Gemm",
    "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "HardSigmoid",
    "Identity", "If", "ImageScaler", "InstanceNormalization", "LRN", "LSTM", "LeakyRelu", "Less", "LessOrEqual",
    "Log", "LogSoftmax", "Loop", "LpNormalization", "LpPool", "MatMul", "Max", "MaxPool", "Mean", "Min", "Mul",
    "Neg", "NonMaxSuppression", "Not", "Or", "PRelu", "Pad", "ParametricSoftplus", "Pow", "QuantizeLinear",
    "RNN", "RandomUniform", "RandomUniformLike", "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
    "Relu", "Reshape", "Resize", "ReverseSequence", "ScaledTanh", "Scan", "Selu", "Shape", "Sigmoid", "Sin",
    "Sinh", "Size", "Slice", "Softmax", "Softplus", "Softsign", "SpaceToDepth", "Split", "Sqrt", "Squeeze",
    "Sub", "Sum", "Tan", "Tanh", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Unsqueeze", "Upsample",
    "Where",
)  # fmt: skip
"""Operators for which TensorRT 8.0 has an importer (Reciprocal has one although operators.md says no)."""

OURS: tuple[str, ...] = ("SparseConv2d",)
"""Operators that our plugin brings."""

ELEMENT_TYPES: tuple[int, ...] = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.INT32,
    TensorProto.INT64, TensorProto.BOOL,
)  # fmt: skip
"""Element types a tensor may have; DOUBLE is narrowed to FLOAT and INT64 to INT32. UINT8 is read in constants only."""


def unsupported_operators(model: Model) -> tuple[tuple[str, str], ...]:
    """(operator, node label) of every node that TensorRT 8.0's parser refuses or reads wrongly, bodies included.

    Where the operator exists and only this form of it is missing, the operator says so: `Resize (cubic)`. Inputs of a
    type that TensorRT lacks are listed as `input (uint8)`. The default domain must be at opset 13 or less already.
    Restrictions that depend on sizes known only at build time are not found here.
    """
    found = []
    for value in model.graph.inputs():
        kind = value.type.tensor_type.elem_type
        if kind not in ELEMENT_TYPES:
            found.append((f"input ({TensorProto.DataType.Name(kind).lower()})", value.name))
    for scope, node in _walk(_Scope(model, model.proto.graph, infer_types(model))):
        reason = _reason(scope, node)
        if reason is not None:
            found.append((f"{node.op_type} ({reason})" if reason else node.op_type, node_label(node)))
    return tuple(found)


class _Scope:
    """A graph or body with its index and types."""

    def __init__(self, model: Model, graph: GraphProto, types: Types, outer: _Scope | None = None) -> None:
        self.model, self.graph, self.types, self.outer = model, graph, types, outer
        self.index = Graph(graph, model.base_dir)

    def array(self, name: str) -> Array | None:
        """The constant that TensorRT sees as weights: an initializer or a Constant, here or in the graph around."""
        value = self.index.array(name)
        if value is None and self.outer is not None and self.index.producer(name) is None:
            return self.outer.array(name)
        return value


def _walk(scope: _Scope) -> Iterator[tuple[_Scope, NodeProto]]:
    for position, node in enumerate(scope.graph.node):
        yield scope, node
        known = scope.types.bodies.get(position, [])
        for at, body in enumerate(bodies(node)):
            types = known[at] if at < len(known) else Types(outer=scope.types)
            yield from _walk(_Scope(scope.model, body, types, scope))


def _reason(scope: _Scope, node: NodeProto) -> str | None:
    """None when the parser takes the node, '' when it lacks the operator, else what about the node it does not take."""
    if node.op_type in OURS:
        return None
    if node.op_type not in SUPPORTED_8_0 or node.domain not in ("", "ai.onnx"):
        return ""
    check = _FORMS.get(node.op_type)
    return check(scope, node) if check is not None else None


def _constant_input(position: int, what: str) -> Callable[[_Scope, NodeProto], str | None]:
    def check(scope: _Scope, node: NodeProto) -> str | None:
        name = node.input[position] if position < len(node.input) else ""
        return f"{what} not constant" if name and scope.array(name) is None else None

    return check


def _resize(scope: _Scope, node: NodeProto) -> str | None:
    mode, transform = attribute(node, "mode", "nearest"), attribute(node, "coordinate_transformation_mode")
    if mode == "cubic":
        return "cubic"
    if transform in ("tf_crop_and_resize", "half_pixel_symmetric"):
        return str(transform)
    has_sizes = len(node.input) == 4 and bool(node.input[3])
    return None if has_sizes else _constant_input(1 if len(node.input) == 2 else 2, "scales")(scope, node)


def _pad(scope: _Scope, node: NodeProto) -> str | None:
    pads = scope.array(node.input[1]) if len(node.input) > 1 else np.asarray(attribute(node, "pads", []))
    if pads is None:
        return "pads not constant"
    amounts = np.asarray(pads, np.int64)
    if not amounts.any():
        return None
    if attribute(node, "mode", "constant") != "constant":
        return f"mode {attribute(node, 'mode')}"
    value = scope.array(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if (len(node.input) > 2 and node.input[2] and value is None) or (value is not None and np.any(value)):
        return "padding other than zero"
    if attribute(node, "value", 0.0) != 0.0:
        return "padding other than zero"
    return "more than two dimensions padded" if int(amounts.reshape(2, -1).any(0).sum()) > 2 else None


def _top_k(scope: _Scope, node: NodeProto) -> str | None:
    # The importer ignores `largest` and would give the largest values without a word.
    return "largest=0" if attribute(node, "largest", 1) == 0 else _constant_input(1, "k")(scope, node)


def _gather(scope: _Scope, node: NodeProto) -> str | None:
    indices = scope.array(node.input[1])
    return "negative indices" if indices is not None and np.any(np.asarray(indices, np.int64) < 0) else None


def _max_pool(scope: _Scope, node: NodeProto) -> str | None:
    if len(node.output) > 1:
        return "indices output"
    return _pool(scope, node)


def _pool(scope: _Scope, node: NodeProto) -> str | None:
    dilations = attribute(node, "dilations")
    return "dilated" if isinstance(dilations, list) and any(entry != 1 for entry in dilations) else None


def _cast(scope: _Scope, node: NodeProto) -> str | None:
    kind = attribute(node, "to")
    known = isinstance(kind, int) and kind in ELEMENT_TYPES
    return None if known else f"to {TensorProto.DataType.Name(kind).lower()}" if isinstance(kind, int) else "to"


def _quantise(scope: _Scope, node: NodeProto) -> str | None:
    if len(node.input) < 3:
        return "no zero point"
    zero = scope.array(node.input[2])
    return "zero point other than 0" if zero is not None and np.any(zero) else None


def _training(scope: _Scope, node: NodeProto) -> str | None:
    flag = scope.array(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    return "training mode" if flag is not None and np.any(flag) else None


def _batch_norm(scope: _Scope, node: NodeProto) -> str | None:
    # Up to opset 13 further outputs mean training; the importer makes one output and knows inference alone.
    return "training mode: call model.eval() before the export" if any(node.output[1:]) else None


_FORMS: dict[str, Callable[[_Scope, NodeProto], str | None]] = {
    "BatchNormalization": _batch_norm,
    "Resize": _resize,
    "Upsample": _constant_input(1, "scales"),
    "Pad": _pad,
    "TopK": _top_k,
    "Gather": _gather,
    "GatherElements": _gather,
    "MaxPool": _max_pool,
    "AveragePool": _pool,
    "Cast": _cast,
    "QuantizeLinear": _quantise,
    "DequantizeLinear": _quantise,
    "Dropout": _training,
    "Split": _constant_input(1, "sizes"),
    "Squeeze": _constant_input(1, "axes"),
    "ReduceSum": _constant_input(1, "axes"),
    "ConvTranspose": _constant_input(1, "weight"),
    "CumSum": _constant_input(1, "axis"),
}
"""Forms that the importers of these operators assert against, or ignore."""


def sidestep_misreadings(model: Model) -> None:
    """Respell what the parsers of TensorRT 8.0 and 8.2 read wrongly or refuse, in place; the meaning stays.

    - Constant value_int and value_ints (read through float fields, they come out as zero and as nothing): `value`.
    - Clip with fp16 bounds (their bytes are read as fp32): Max and Min.
    - BatchNormalization with constant fp16 statistics (computed step by step with an fp32 epsilon): Mul and Add.
    - Pad with an fp16 constant of zero (read as fp32): the constant, which is the default, goes.
    - Gather with constant negative indices (not counted from the end): counted from the start, where sizes are known.
    - The default domain imported as "ai.onnx" (looked up as ""): spelled "".
    - An input that must be constant and is computed from constants alone (the pads of torch's older exporter): computed.
    What was done goes to `model.notes`; a model without any of these is not touched.
    """
    proto = model.proto
    counts: dict[str, int] = dict(_compute_constants(model))
    types = infer_types(model)
    for scope, node in list(_walk(_Scope(model, proto.graph, types))):
        if node.domain in ("", "ai.onnx"):
            operator = node.op_type
            step = _RESPELLED.get(operator)
            if step is not None and step(scope, node):
                counts[operator] = counts.get(operator, 0) + 1
            if node.domain:
                node.domain = ""
    if any(entry.domain == "ai.onnx" for entry in proto.opset_import):
        version = model.opset()
        others = [entry for entry in proto.opset_import if entry.domain not in ("", "ai.onnx")]
        del proto.opset_import[:]
        proto.opset_import.extend([helper.make_opsetid("", version), *others])
    if counts:
        listed = ", ".join(f"{op} x{count}" if count > 1 else op for op, count in sorted(counts.items()))
        model.notes.append(f"respelled for TensorRT 8.0's parser, which refuses or misreads these forms: {listed}")


def _compute_constants(model: Model) -> Counter[str]:
    """Replace inputs of main-graph nodes that must be constant and are made of constants; how many per operator."""
    done: Counter[str] = Counter()
    for node in list(model.proto.graph.node):
        position = _MUST_BE_CONSTANT.get(node.op_type)
        name = node.input[position] if position is not None and position < len(node.input) else ""
        if not name or node.domain not in ("", "ai.onnx") or model.graph.array(name) is not None:
            continue
        value = _computed(model, name)
        if value is not None and position is not None:
            scope = _Scope(model, model.proto.graph, Types())
            node.input[position] = _add(scope, value, f"{node_label(node)}/constant")
            remove_orphans(model.proto.graph, [name])
            done[node.op_type] += 1
    return done


def _computed(model: Model, name: str) -> Array | None:
    """A value that depends on no input of the graph, by ONNX Runtime; None when it does depend on one."""
    import onnxruntime as ort

    index, needed, pending = model.graph, set[str](), [name]
    graph = GraphProto(name="constant", output=[ValueInfoProto(name=name)])
    while pending:
        wanted = pending.pop()
        if wanted in needed or not wanted:
            continue
        needed.add(wanted)
        producer = index.producer(wanted)
        if producer is not None and not any(True for _ in bodies(producer)):
            pending += producer.input
        elif wanted in index.initializers:
            graph.initializer.append(numpy_helper.from_array(np.asarray(index.array(wanted)), wanted))
        else:
            return None
    graph.node.extend(node for node in model.proto.graph.node if not needed.isdisjoint(node.output))
    small = helper.make_model(graph, opset_imports=model.proto.opset_import, ir_version=max(4, model.proto.ir_version))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(small.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return np.asarray(session.run([name], {})[0])
    except Exception:  # onnxruntime's exceptions share no base; the node is then listed as unsupported
        return None


def _constant_as_tensor(scope: _Scope, node: NodeProto) -> bool:
    if not any(entry.name in ("value_int", "value_ints") for entry in node.attribute):
        return False
    value = constant_value(node)
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.asarray(value))))
    return True


def _clip_as_max_min(scope: _Scope, node: NodeProto) -> bool:
    bounds = [name for name in node.input[1:] if name]
    if not bounds or scope.types.get(bounds[0]).kind != TensorProto.FLOAT16:
        return False
    low, high = (node.input[i] if i < len(node.input) else "" for i in (1, 2))
    source = node.input[0]
    if low and high:
        inner = fresh_name(scope.graph, f"{node_label(node)}/max")
        position = next(i for i, entry in enumerate(scope.graph.node) if entry is node)
        scope.graph.node.insert(position, helper.make_node("Max", [source, low], [inner], name=inner))
        source = inner
    node.op_type = "Min" if high else "Max"
    node.input[:] = [source, high or low]
    return True


def _batchnorm_as_mul_add(scope: _Scope, node: NodeProto) -> bool:
    """Also the faster form: TensorRT folds fp32 statistics by itself, fp16 ones it does not."""
    parameters = [scope.array(name) for name in node.input[1:5]]
    shape = scope.types.get(node.input[0]).shape
    if shape is None or any(value is None or value.dtype != np.float16 for value in parameters) or node.output[1:]:
        return False
    gone = list(node.input[1:5])
    scale, bias, mean, variance = (np.asarray(value, np.float64) for value in parameters)
    epsilon = attribute(node, "epsilon", 1e-5)
    factor = scale / np.sqrt(variance + (epsilon if isinstance(epsilon, float) else 1e-5))
    names = []
    for wish, value in (("factor", factor), ("shift", bias - mean * factor)):
        half = value.astype(np.float16)
        if not np.isfinite(half).all():
            return False
        names.append(_add(scope, half.reshape(-1, *[1] * (len(shape) - 2)), f"{node_label(node)}/{wish}"))
    scaled = fresh_name(scope.graph, f"{node_label(node)}/scaled")
    position = next(i for i, entry in enumerate(scope.graph.node) if entry is node)
    multiply = helper.make_node("Mul", [node.input[0], names[0]], [scaled], name=scaled)
    scope.graph.node.insert(position, multiply)
    node.op_type = "Add"
    node.input[:] = [scaled, names[1]]
    del node.attribute[:]
    remove_orphans(scope.graph, gone)
    return True


def _add(scope: _Scope, value: Array, wish: str) -> str:
    """A new constant of the scope's graph; its name."""
    name = fresh_name(scope.graph, wish)
    scope.graph.initializer.append(numpy_helper.from_array(value, name))
    if scope.model.proto.ir_version < 4:
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        scope.graph.input.append(helper.make_tensor_value_info(name, kind, value.shape))
    return name


def _pad_by_default(scope: _Scope, node: NodeProto) -> bool:
    value = scope.array(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if value is None or value.dtype != np.float16 or np.any(value):
        return False
    gone = node.input[2]
    del node.input[2:]
    remove_orphans(scope.graph, [gone])
    return True


def _gather_from_start(scope: _Scope, node: NodeProto) -> bool:
    indices, shape = scope.array(node.input[1]), scope.types.get(node.input[0]).shape
    axis = attribute(node, "axis", 0)
    if indices is None or shape is None or not isinstance(axis, int):
        return False
    size, values = shape[axis], np.asarray(indices, np.int64)
    if size is None or not np.any(values < 0):
        return False
    positive = np.where(values < 0, values + size, values).astype(indices.dtype)
    gone, node.input[1] = node.input[1], _add(scope, positive, f"{node_label(node)}/indices")
    remove_orphans(scope.graph, [gone])
    return True


_MUST_BE_CONSTANT = {
    "Pad": 1, "Resize": 2, "Upsample": 1, "Split": 1, "Squeeze": 1, "ReduceSum": 1, "TopK": 1, "CumSum": 1,
}  # fmt: skip

_RESPELLED: dict[str, Callable[[_Scope, NodeProto], bool]] = {
    "Constant": _constant_as_tensor,
    "Clip": _clip_as_max_min,
    "BatchNormalization": _batchnorm_as_mul_add,
    "Pad": _pad_by_default,
    "Gather": _gather_from_start,
}
