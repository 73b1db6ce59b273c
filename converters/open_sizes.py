"""Sizes of values as expressions of the sizes that a model leaves open: what is equal at every size, not only at those
that the model is converted for.

A size is an int, or a nested tuple that names an open size of an input and every step from there. Two equal
expressions are equal sizes whatever the inputs are; different ones may still be equal, but nothing proves it. What no
rule covers gets a name of its own, which equals nothing else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto

from sparsedeploy.converters.graph import Graph, Model, attribute

Size = int | tuple[object, ...]
Sizes = tuple[Size, ...]

NAMELESS_SIZES = ("", "?", "-1", "None")
"""What exporters write for "unknown": two of them are not the same size."""

_FEW = 64
"""Elements up to which a constant is followed as a value: shapes, axes and scales are that small."""

_KEEPING = frozenset((
    "Abs", "BatchNormalization", "Cast", "CastLike", "Ceil", "Celu", "Clip", "CumSum", "DequantizeLinear", "Dropout",
    "Elu", "Erf", "Exp", "Floor", "Gelu", "GroupNormalization", "HardSigmoid", "HardSwish", "Identity",
    "InstanceNormalization", "LRN", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "Mish",
    "Neg", "PRelu", "QuantizeLinear", "RMSNormalization", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign",
    "Softmax", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu",
))  # fmt: skip
"""Operators whose first output has the sizes of their first input."""

_BROADCASTING = frozenset(("Add", "Div", "Max", "Mean", "Min", "Mul", "Pow", "Sub", "Sum", "Where"))
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mul": lambda a, b: a * b,
}  # fmt: skip


def has_open_inputs(model: Model) -> bool:
    """Whether an input of the model leaves its rank or a size open."""
    return any(_declared(value) is None or not _all_ints(_declared(value)) for value in model.graph.inputs())


def open_sizes(model: Model) -> dict[str, Sizes]:
    """The sizes of every value of the main graph as expressions; values of unknown rank are absent. Never raises."""
    walk = _Walk(model)
    for node in model.proto.graph.node:
        with contextlib.suppress(ValueError, IndexError, KeyError, TypeError, ZeroDivisionError):
            walk.visit(node)  # a graph that contradicts itself has no sizes here
    return walk.sizes


def forget_nameless(model: Model) -> None:
    """Take the placeholder names off open sizes: TensorRT 10 and later read one name as one size ("?" for H and W).

    Values of the main graph only: TensorRT looks at no other names.
    """
    graph = model.proto.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param") and dim.dim_param in NAMELESS_SIZES:
                dim.ClearField("dim_param")


def _all_ints(sizes: Sizes | None) -> bool:
    return sizes is not None and all(isinstance(size, int) for size in sizes)


def _declared(value: ValueInfoProto) -> Sizes | None:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    sizes: list[Size] = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.dim_value > 0:
            sizes.append(int(dim.dim_value))
        elif dim.dim_param and dim.dim_param not in NAMELESS_SIZES:
            sizes.append(("named", str(dim.dim_param)))
        else:
            sizes.append(("open", str(value.name), axis))
    return tuple(sizes)


class _Walk:
    """One pass over a graph in topological order."""

    def __init__(self, model: Model) -> None:
        self.graph: Graph = model.graph
        self.opset = model.opset()
        self.sizes: dict[str, Sizes] = {}
        self.values: dict[str, tuple[object, ...]] = {}
        """Small integer and float tensors, flattened: what shape arithmetic computes."""
        for name, tensor in self.graph.initializers.items():
            self._constant(name, tuple(int(dim) for dim in tensor.dims), tensor.data_type)
        for value in self.graph.inputs():
            declared = _declared(value)
            if declared is not None:
                self.sizes[value.name] = declared

    def _constant(self, name: str, dims: tuple[int, ...], kind: int) -> None:
        self.sizes[name] = dims
        numbers = (TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT)
        if math.prod(dims) <= _FEW and kind in numbers:
            array = self.graph.array(name)
            if array is not None:
                self.values[name] = tuple(array.reshape(-1).tolist())

    def visit(self, node: NodeProto) -> None:
        """Find the sizes of a node's outputs and, for shape arithmetic, their values."""
        if node.domain != "" or not node.output:
            return
        if node.op_type == "Constant":
            array = self.graph.array(node.output[0])
            if array is not None:
                self.sizes[node.output[0]] = tuple(array.shape)
                if array.size <= _FEW and array.dtype in (np.int64, np.int32, np.float32):
                    self.values[node.output[0]] = tuple(array.reshape(-1).tolist())
            return
        value = self._value(node)
        if value is not None:
            self.values[node.output[0]] = value
            if node.op_type in ("Shape", "Gather"):
                self.sizes[node.output[0]] = (len(value),) if node.op_type == "Shape" else self.sizes[node.input[1]]
                return
        if node.op_type == "Split":
            self._split(node)
            return
        sizes = self._sizes(node)
        if sizes is not None:
            self.sizes[node.output[0]] = sizes

    # --- values of small tensors ---------------------------------------------------------------------------------

    def _value(self, node: NodeProto) -> tuple[object, ...] | None:
        kind = node.op_type
        if kind == "Shape":
            whole = self.sizes.get(node.input[0])
            start, end = attribute(node, "start", 0), attribute(node, "end", None)
            assert isinstance(start, int)
            return None if whole is None else whole[start : end if isinstance(end, int) else None]
        given = [self._vector(name) for name in node.input]
        if not given or given[0] is None:
            return None if kind != "Concat" else self._joined(given)
        first = given[0]
        if kind in ("Identity", "Squeeze", "Unsqueeze"):
            return first
        if kind == "Reshape":
            return first if len(given) > 1 else None
        if kind == "Concat":
            return self._joined(given)
        if kind == "Cast":
            return tuple(_cast(entry, attribute(node, "to")) for entry in first)
        if kind in ("Floor", "Ceil"):
            return tuple((kind, entry) for entry in first)
        if kind == "Gather":
            at = given[1]
            return None if at is None else tuple(first[_int(position)] for position in at)
        if kind == "Slice":
            return self._slice_of(given)
        if kind in ("Add", "Sub", "Mul", "Div") and given[1] is not None:
            return _elementwise(kind, first, given[1])
        return None

    def _vector(self, name: str) -> tuple[object, ...] | None:
        """The value of a scalar or 1-D tensor."""
        return self.values.get(name) if len(self.sizes.get(name, (0, 0))) < 2 else None

    def _joined(self, parts: Sequence[tuple[object, ...] | None]) -> tuple[object, ...] | None:
        whole: list[object] = []
        for part in parts:
            if part is None:
                return None
            whole += part
        return tuple(whole)

    def _slice_of(self, given: Sequence[tuple[object, ...] | None]) -> tuple[object, ...] | None:
        first, rest = given[0], given[1:]
        if first is None or any(part is None for part in rest) or len(rest) < 2:
            return None
        start, end = (_int(part[0]) for part in rest[:2] if part)
        step = _int(rest[3][0]) if len(rest) > 3 and rest[3] else 1
        return first[start:end:step]

    # --- sizes ---------------------------------------------------------------------------------------------------

    def _sizes(self, node: NodeProto) -> Sizes | None:
        kind = node.op_type
        if kind in _BROADCASTING:
            return self._broadcast(node)
        x = self.sizes.get(node.input[0]) if node.input else None
        if x is None:
            return None
        if kind in _KEEPING:
            return x
        rule = _RULES.get(kind)
        return rule(self, node, x) if rule is not None else None

    def fresh(self, node: NodeProto, axis: int) -> Size:
        """A size that equals no other."""
        return ("of", str(node.output[0]), axis)

    def _broadcast(self, node: NodeProto) -> Sizes | None:
        shapes = [self.sizes.get(name) for name in node.input]
        rank = max((len(shape) for shape in shapes if shape is not None), default=0)
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes):
            return None
        padded = [(1,) * (rank - len(shape)) + shape for shape in known]
        return tuple(self.merged(node, axis, [shape[axis] for shape in padded]) for axis in range(rank))

    def merged(self, node: NodeProto, axis: int, sizes: Sequence[Size]) -> Size:
        """One axis of operands that are broadcast: a number wins, because a valid model has no other beside it."""
        wide = {size for size in sizes if size != 1}
        fixed = [size for size in wide if isinstance(size, int)]
        if len(wide) <= 1:
            return wide.pop() if wide else 1
        return fixed[0] if len(fixed) == 1 else self.fresh(node, axis)

    def _split(self, node: NodeProto) -> None:
        x = self.sizes.get(node.input[0])
        if x is None:
            return
        axis = _int(attribute(node, "axis", 0)) % len(x)
        parts = self.values.get(node.input[1]) if len(node.input) > 1 else attribute(node, "split", None)
        count, whole = len(node.output), x[axis]
        if parts is None and isinstance(whole, int):
            chunk = -(-whole // count)
            parts = [min(chunk, whole - chunk * i) for i in range(count)]
        for i, name in enumerate(node.output):
            part: Size = ("part", whole, i, count)
            if isinstance(parts, (list, tuple)):
                part = _size(parts[i])
            self.sizes[name] = (*x[:axis], part, *x[axis + 1 :])

    def constant(self, node: NodeProto, position: int) -> list[int] | None:
        """An input of integers, all of them known."""
        name = node.input[position] if position < len(node.input) else ""
        value = self.values.get(name)
        if value is None or not all(isinstance(entry, int) for entry in value):
            return None
        return [_int(entry) for entry in value]

    def axes(self, node: NodeProto, position: int) -> list[int] | None:
        """Axes given as an attribute (older opsets) or as an input."""
        listed = attribute(node, "axes", None)
        return [_int(axis) for axis in listed] if isinstance(listed, list) else self.constant(node, position)


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(value)
    return value


def _cast(entry: object, to: object) -> object:
    """Integers stay what they are; a size that became a float and comes back is another expression."""
    if to in (TensorProto.INT64, TensorProto.INT32):
        return ("int", entry) if _is_float(entry) else entry
    return ("float", to, entry)


def _is_float(entry: object) -> bool:
    return isinstance(entry, float) or (
        isinstance(entry, tuple) and any(part == "float" or _is_float(part) for part in entry)
    )


def _elementwise(kind: str, a: tuple[object, ...], b: tuple[object, ...]) -> tuple[object, ...] | None:
    if len(a) != len(b):
        if 1 not in (len(a), len(b)):
            return None
        a, b = (a * len(b), b) if len(a) == 1 else (a, b * len(a))
    return tuple(_computed(kind, one, two) for one, two in zip(a, b, strict=True))


def _computed(kind: str, a: object, b: object) -> object:
    if isinstance(a, int) and isinstance(b, int) and kind in _ARITHMETIC:
        return _ARITHMETIC[kind](a, b)
    if isinstance(a, int) and isinstance(b, int) and a >= 0 and b > 0:
        return a // b
    if kind == "Sub" and isinstance(b, int):
        kind, b = "Add", -b
    if kind == "Add" and isinstance(b, int) and isinstance(a, tuple) and a[0] == "Add" and isinstance(a[2], int):
        inner, more = a[1:]
        a, b = inner, more + b
    if (kind in ("Mul", "Div") and b == 1) or (kind == "Add" and b == 0):
        return a
    return (kind, a, b)


def _window(size: Size, extent: int, pads: int, stride: int) -> Size:
    """floor((size + pads - extent) / stride) + 1, in a form that is the same for 1x1 and padded 3x3 kernels."""
    offset = pads - extent
    if isinstance(size, int):
        return (size + offset) // stride + 1
    if stride == 1:
        return _size(_computed("Add", size, offset + 1))
    if size[0] == "Add" and isinstance(size[2], int):
        return ("window", _size(size[1]), offset + size[2], stride)
    return ("window", size, offset, stride)


def _slide(walk: _Walk, node: NodeProto, x: Sizes, kernel: Sequence[int]) -> list[Size]:
    """Spatial sizes behind a convolution or a pooling."""
    count = len(kernel)
    strides, dilations, pads = (
        [_int(entry) for entry in given] if isinstance(given := attribute(node, name, None), list) else default
        for name, default in (("strides", [1] * count), ("dilations", [1] * count), ("pads", [0] * 2 * count))
    )
    auto, result = str(attribute(node, "auto_pad", "NOTSET")), []
    for i in range(count):
        extent = dilations[i] * (kernel[i] - 1) + 1
        if auto.startswith("SAME"):
            result.append(_window(x[2 + i], 1, 0, strides[i]))
        elif attribute(node, "ceil_mode", 0):
            result.append(("ceil", x[2 + i], extent, pads[i], pads[count + i], strides[i]))
        else:
            total = 0 if auto == "VALID" else pads[i] + pads[count + i]
            result.append(_window(x[2 + i], extent, total, strides[i]))
    return result


def _conv(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    weight = walk.sizes.get(node.input[1])
    if weight is None or not _all_ints(weight[2:]) or len(weight) != len(x):
        return None
    return (x[0], weight[0], *_slide(walk, node, x, [_int(size) for size in weight[2:]]))


def _conv_transpose(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    weight = walk.sizes.get(node.input[1])
    if weight is None or not isinstance(weight[1], int):
        return None
    how = tuple(sorted(f"{entry.name}={attribute(node, entry.name)}" for entry in node.attribute))
    channels = weight[1] * _int(attribute(node, "group", 1))
    return (x[0], channels, *(("transposed", size, axis, weight[2:], how) for axis, size in enumerate(x[2:])))


def _pool(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    kernel = attribute(node, "kernel_shape", None)
    return (*x[:2], *_slide(walk, node, x, [_int(k) for k in kernel])) if isinstance(kernel, list) else None


def _global_pool(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes:
    return (*x[:2], *(1,) * (len(x) - 2))


def _reduce(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    given = len(node.input) > 1 and bool(node.input[1])
    axes = walk.axes(node, 1)
    if axes is None:
        if given or attribute(node, "noop_with_empty_axes", 0):
            return None
        axes = list(range(len(x)))
    gone = {axis % len(x) for axis in axes}
    if attribute(node, "keepdims", 1):
        return tuple(1 if axis in gone else size for axis, size in enumerate(x))
    return tuple(size for axis, size in enumerate(x) if axis not in gone)


def _squeeze(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    axes = walk.axes(node, 1)
    gone = None if axes is None else {axis % len(x) for axis in axes}
    return None if gone is None else tuple(size for axis, size in enumerate(x) if axis not in gone)


def _unsqueeze(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    axes = walk.axes(node, 1)
    if axes is None:
        return None
    rank = len(x) + len(axes)
    new, rest = {axis % rank for axis in axes}, iter(x)
    return tuple(1 if axis in new else next(rest) for axis in range(rank))


def _concat(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    parts = [walk.sizes.get(name) for name in node.input]
    axis = _int(attribute(node, "axis", 0)) % len(x)
    known = [part for part in parts if part is not None and len(part) == len(x)]
    along = [part[axis] for part in known]
    if len(known) < len(parts):
        total = walk.fresh(node, axis)
    else:
        total = sum(_int(size) for size in along) if _all_ints(tuple(along)) else ("sum", *along)
    # Concat demands equal sizes everywhere else, so any of them will do; a number says most.
    merged = [next((part[at] for part in known if isinstance(part[at], int)), x[at]) for at in range(len(x))]
    merged[axis] = total
    return tuple(merged)


def _transpose(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes:
    order = attribute(node, "perm", None)
    return tuple(x[_int(axis)] for axis in (order if isinstance(order, list) else reversed(range(len(x)))))


def _reshape(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    wanted = walk.values.get(node.input[1]) if len(node.input) > 1 else None
    if wanted is None or (0 in wanted and attribute(node, "allowzero", 0)):
        return None
    dims: list[Size] = [x[axis] if size == 0 else _size(size) for axis, size in enumerate(wanted)]
    if -1 in dims:
        at = dims.index(-1)
        rest = [size for axis, size in enumerate(dims) if axis != at]
        left = list(x)
        for size in list(rest):  # what both sides share cancels out
            if not isinstance(size, int) and size in left:
                left.remove(size)
                rest.remove(size)
        if _all_ints((*left, *rest)):
            dims[at] = math.prod(_int(size) for size in left) // math.prod(_int(size) for size in rest)
        else:
            dims[at] = ("rest", x, tuple(dims))
    return tuple(dims)


def _size(entry: object) -> Size:
    if isinstance(entry, (int, tuple)):
        return entry
    raise TypeError(entry)


def _flatten(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes:
    axis = _int(attribute(node, "axis", 1))
    sides = (x[:axis], x[axis:])
    return tuple(
        math.prod(_int(size) for size in side) if _all_ints(side) else side[0] if len(side) == 1 else ("product", *side)
        for side in sides
    )


def _slice(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    if len(node.input) < 3:
        return None
    starts, ends = walk.values.get(node.input[1]), walk.values.get(node.input[2])
    axes = walk.constant(node, 3) if len(node.input) > 3 and node.input[3] else list(range(len(starts or ())))
    steps = walk.constant(node, 4) if len(node.input) > 4 and node.input[4] else [1] * len(axes or ())
    if starts is None or ends is None or axes is None or steps is None:
        return None
    result = list(x)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x[axis]
        if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
            result[axis] = len(range(*slice(start, max(end, -size - 1), step).indices(size)))
        elif (start, step) != (0, 1) or not (isinstance(end, int) and end >= 2**31 - 1):
            result[axis] = ("slice", size, start, end, step)
    return tuple(result)


def _pad(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    listed = attribute(node, "pads", None)
    pads = walk.constant(node, 1) if not isinstance(listed, list) else [_int(entry) for entry in listed]
    axes = walk.constant(node, 3) if len(node.input) > 3 and node.input[3] else list(range(len(x)))
    if pads is None or axes is None:
        return None
    result = list(x)
    for i, axis in enumerate(axes):
        added = pads[i] + pads[len(axes) + i]
        result[axis] = _size(_computed("Add", x[axis], added))
    return tuple(result)


def _resize(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    if attribute(node, "coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return None
    if attribute(node, "axes", None) is not None or attribute(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    if len(node.input) > 3 and node.input[3]:
        wanted = walk.values.get(node.input[3])
        return None if wanted is None else tuple(_size(entry) for entry in wanted)
    listed = attribute(node, "scales", None)
    name = node.input[min(2, len(node.input) - 1)] if len(node.input) > 1 else ""
    scales = listed if isinstance(listed, list) else walk.values.get(name)
    if scales is None or len(scales) != len(x):
        return None
    return tuple(
        size
        if scale == 1
        else int(np.floor(size * scale))
        if isinstance(size, int) and isinstance(scale, (int, float))
        else ("scaled", size, scale)
        for size, scale in zip(x, scales, strict=True)
    )


def _expand(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    wanted = walk.values.get(node.input[1])
    if wanted is None:
        return None
    rank = max(len(wanted), len(x))
    sides = [(1,) * (rank - len(side)) + tuple(_size(entry) for entry in side) for side in (x, wanted)]
    return tuple(walk.merged(node, axis, [side[axis] for side in sides]) for axis in range(rank))


def _gemm(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    weight = walk.sizes.get(node.input[1])
    if weight is None:
        return None
    rows = x[1] if attribute(node, "transA", 0) else x[0]
    return (rows, weight[0] if attribute(node, "transB", 0) else weight[1])


def _matmul(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    weight = walk.sizes.get(node.input[1])
    return (*x[:-1], weight[1]) if weight is not None and len(weight) == 2 and len(x) > 1 else None


def _blocks(walk: _Walk, node: NodeProto, x: Sizes) -> Sizes | None:
    block, deeper = _int(attribute(node, "blocksize", 1)), node.op_type == "SpaceToDepth"
    if len(x) != 4 or not isinstance(x[1], int):
        return None
    channels = x[1] * block**2 if deeper else x[1] // block**2
    sizes = tuple(
        (size // block if deeper else size * block) if isinstance(size, int) else (node.op_type, size, block)
        for size in x[2:]
    )
    return (x[0], channels, *sizes)


_RULES: Mapping[str, Callable[[_Walk, NodeProto, Sizes], Sizes | None]] = {
    "Conv": _conv, "ConvTranspose": _conv_transpose, "MaxPool": _pool, "AveragePool": _pool, "LpPool": _pool,
    "GlobalAveragePool": _global_pool, "GlobalMaxPool": _global_pool, "GlobalLpPool": _global_pool,
    "ReduceMean": _reduce, "ReduceMax": _reduce, "ReduceMin": _reduce, "ReduceSum": _reduce, "ReduceL2": _reduce,
    "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Concat": _concat, "Transpose": _transpose, "Reshape": _reshape,
    "Flatten": _flatten, "Slice": _slice, "Pad": _pad, "Resize": _resize, "Upsample": _resize, "Expand": _expand,
    "Gemm": _gemm, "MatMul": _matmul, "SpaceToDepth": _blocks, "DepthToSpace": _blocks,
}  # fmt: skip
