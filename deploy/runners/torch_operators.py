"""ONNX operators of convolutional networks as PyTorch functions.

Our own set: onnx2torch, the library for this, had its last release in August 2024, knows no layouts, no fused cuDNN calls and
no way to leave a node to a launch plan. Each operator is a function that reads a node once, with example values of
its inputs, and returns what runs it. A node whose inputs are all constant runs once, when a session is made, by the
same functions: that is how shape arithmetic disappears.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import NodeProto
from torch import Tensor
from torch.nn import functional

from sparsedeploy.converters.graph import attribute, node_label
from sparsedeploy.errors import InputError

Function = Callable[..., Any]
"""Takes the node's inputs in order (None for an absent one) and returns its output, or a tuple of outputs."""


class UnsupportedFormError(Exception):
    """An operator is known but not in the form that a node uses; the text says which form."""


@dataclass(frozen=True)
class Call:
    """One node and what is known of its inputs when a session is made."""

    node: NodeProto
    opset: int
    inputs: tuple[Tensor | None, ...]
    """Example values: right in shape and type; right in value where constant."""
    constant: tuple[bool, ...]

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute's Python value, or the default."""
        return attribute(self.node, name, default)

    def has(self, slot: int) -> bool:
        """Whether the optional input is given."""
        return slot < len(self.inputs) and self.inputs[slot] is not None

    def x(self, slot: int = 0) -> Tensor:
        """The example value of an input that must be there."""
        value = self.inputs[slot] if slot < len(self.inputs) else None
        if value is None:
            raise UnsupportedFormError(f"without its input {slot}")
        return value

    def values(self, slot: int) -> Any:
        """A constant input as Python numbers (nested lists, or one number)."""
        if not self.constant[slot]:
            raise UnsupportedFormError(f"whose input {slot} depends on what is fed")
        return self.x(slot).tolist()

    def ints(self, name: str, slot: int) -> list[int] | None:
        """Integers that older opsets have as an attribute and newer ones as an input; None where neither is given."""
        if self.has(slot):
            found = self.values(slot)
            return [int(value) for value in (found if isinstance(found, list) else [found])]
        given = self.attr(name)
        return (
            None
            if given is None
            else [int(value) for value in (given if isinstance(given, (list, tuple)) else [given])]
        )


OPERATORS: dict[str, Callable[[Call], Function]] = {}
"""By op_type of the default domain."""

IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "Relu": torch.relu_,
    "Sigmoid": torch.sigmoid_,
    "Tanh": torch.tanh_,
    "Add": lambda a, b: a.add_(b),
    "Sum": lambda a, b: a.add_(b),
    "Mul": lambda a, b: a.mul_(b),
    "Sub": lambda a, b: a.sub_(b),
}
"""What may overwrite its first operand where nothing else reads it and the result has its shape and type."""

VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Slice", "Transpose", "Expand", "Split", "Cast", "DepthToSpace", "SpaceToDepth"})  # fmt: skip
"""Operators whose output may share memory with their input."""

_TYPES = {
    onnx.TensorProto.FLOAT: torch.float32, onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.BFLOAT16: torch.bfloat16, onnx.TensorProto.INT8: torch.int8, onnx.TensorProto.INT16: torch.int16,
    onnx.TensorProto.INT32: torch.int32, onnx.TensorProto.INT64: torch.int64, onnx.TensorProto.UINT8: torch.uint8,
    onnx.TensorProto.BOOL: torch.bool,
}  # fmt: skip


def build(call: Call) -> Function:
    """What runs a node; raises InputError naming the node when its form is not covered."""
    try:
        return OPERATORS[call.node.op_type](call)
    except UnsupportedFormError as problem:
        raise InputError(
            f"{call.node.op_type} '{node_label(call.node)}': the torch runner does not run a {call.node.op_type} {problem}. "
            "Use --runner onnxruntime, or a TensorRT engine."
        ) from problem


def _operator(*names: str) -> Callable[[Callable[[Call], Function]], Callable[[Call], Function]]:
    def register(make: Callable[[Call], Function]) -> Callable[[Call], Function]:
        OPERATORS.update(dict.fromkeys(names, make))
        return make

    return register


# --- elementwise --------------------------------------------------------------------------------------------------

_PLAIN: dict[str, Function] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Exp": torch.exp, "Log": torch.log,
    "Sqrt": torch.sqrt, "Abs": torch.abs, "Neg": torch.neg, "Floor": torch.floor, "Ceil": torch.ceil,
    "Round": torch.round, "Erf": torch.erf, "Reciprocal": torch.reciprocal, "Softplus": functional.softplus,
    "Softsign": functional.softsign, "Mish": functional.mish, "Not": torch.logical_not, "Sign": torch.sign,
    "HardSwish": functional.hardswish, "Sin": torch.sin, "Cos": torch.cos,
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Equal": torch.eq, "Greater": torch.gt, "Less": torch.lt,
    "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le, "And": torch.logical_and, "Or": torch.logical_or,
    "Where": torch.where, "Identity": lambda x: x,
}  # fmt: skip

for _name, _function in _PLAIN.items():
    OPERATORS[_name] = lambda call, function=_function: function  # type: ignore[misc]


@_operator("Dropout")
def _dropout(call: Call) -> Function:
    return lambda x, *_: x


@_operator("Div")
def _div(call: Call) -> Function:
    if call.x().is_floating_point():
        return lambda a, b: torch.div(a, b)
    return lambda a, b: torch.div(a, b, rounding_mode="trunc")


@_operator("Pow")
def _pow(call: Call) -> Function:
    dtype = call.x().dtype
    return lambda a, b: torch.pow(a, b).to(dtype)


@_operator("Min", "Max", "Sum", "Mean")
def _variadic(call: Call) -> Function:
    pair = {"Min": torch.minimum, "Max": torch.maximum}.get(call.node.op_type, torch.add)

    def run(first: Tensor, *rest: Tensor) -> Tensor:
        for other in rest:
            first = pair(first, other)
        return first / (1 + len(rest)) if call.node.op_type == "Mean" else first

    return run


@_operator("LeakyRelu")
def _leaky_relu(call: Call) -> Function:
    slope = float(call.attr("alpha", 0.01))
    return lambda x: functional.leaky_relu(x, slope)


@_operator("PRelu")
def _prelu(call: Call) -> Function:
    return lambda x, slope: torch.where(x < 0, x * slope, x)


@_operator("Elu")
def _elu(call: Call) -> Function:
    alpha = float(call.attr("alpha", 1.0))
    return lambda x: functional.elu(x, alpha)


@_operator("Selu")
def _selu(call: Call) -> Function:
    alpha, gamma = float(call.attr("alpha", 1.67326319)), float(call.attr("gamma", 1.05070102))
    return lambda x: gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@_operator("Gelu")
def _gelu(call: Call) -> Function:
    kind = str(call.attr("approximate", "none"))
    return lambda x: functional.gelu(x, approximate=kind)


@_operator("HardSigmoid")
def _hard_sigmoid(call: Call) -> Function:
    alpha, beta = float(call.attr("alpha", 0.2)), float(call.attr("beta", 0.5))
    if abs(alpha - 1 / 6) < 1e-7 and beta == 0.5:
        return lambda x: functional.hardsigmoid(x)
    return lambda x: (x * alpha + beta).clamp_(0.0, 1.0)


@_operator("ThresholdedRelu")
def _thresholded(call: Call) -> Function:
    alpha = float(call.attr("alpha", 1.0))
    return lambda x: torch.where(x > alpha, x, torch.zeros_like(x))


@_operator("Clip")
def _clip(call: Call) -> Function:
    if call.opset < 11:
        low, high = call.attr("min"), call.attr("max")
    else:
        low = call.values(1) if call.has(1) else None
        high = call.values(2) if call.has(2) else None
    if low is None and high is None:
        return lambda x, *_: x.clone()
    low, high = (value[0] if isinstance(value, list) else value for value in (low, high))
    return lambda x, *_: torch.clamp(x, low, high)


@_operator("Cast")
def _cast(call: Call) -> Function:
    kind = int(call.attr("to"))
    if kind not in _TYPES:
        raise UnsupportedFormError(f"to {onnx.TensorProto.DataType.Name(kind)}")
    dtype = _TYPES[kind]
    return lambda x: x.to(dtype)


@_operator("Softmax", "LogSoftmax")
def _softmax(call: Call) -> Function:
    function = torch.softmax if call.node.op_type == "Softmax" else torch.log_softmax
    if call.opset >= 13:
        axis = int(call.attr("axis", -1))
        return lambda x: function(x, axis)
    shape, axis = call.x().shape, int(call.attr("axis", 1))
    rows = math.prod(shape[: axis % len(shape)])  # before opset 13 all axes from `axis` on are one
    return lambda x: function(x.reshape(rows, -1), 1).reshape(shape)


# --- convolution and pooling --------------------------------------------------------------------------------------


def window_pads(
    call: Call, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[tuple[int, int]]:
    """Padding before and after, per spatial axis, with auto_pad resolved."""
    mode, size = str(call.attr("auto_pad", "NOTSET")), call.x().shape[2:]
    if mode in ("NOTSET", ""):
        pads = list(call.attr("pads", [0] * (2 * len(kernel))))
        return list(zip(pads[: len(kernel)], pads[len(kernel) :], strict=True))
    if mode == "VALID":
        return [(0, 0)] * len(kernel)
    found = []
    for n, k, s, d in zip(size, kernel, strides, dilations, strict=True):
        total = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        half = total // 2
        found.append((half, total - half) if mode == "SAME_UPPER" else (total - half, half))
    return found


def _flat(pads: Sequence[tuple[int, int]]) -> list[int]:
    """torch.nn.functional.pad's order: last axis first."""
    return [size for pair in reversed(pads) for size in pair]


@dataclass(frozen=True)
class ConvForm:
    """A convolution as PyTorch takes it; `extra` is what must be padded beforehand because the sides differ."""

    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilations: tuple[int, ...]
    group: int
    extra: tuple[int, ...]


def conv_form(call: Call) -> ConvForm:
    """Read a Conv."""
    kernel = list(call.x(1).shape[2:])
    strides = tuple(call.attr("strides", [1] * len(kernel)))
    dilations = tuple(call.attr("dilations", [1] * len(kernel)))
    pads = window_pads(call, kernel, strides, dilations)
    symmetric = all(before == after for before, after in pads)
    return ConvForm(
        strides=strides,
        padding=tuple(before for before, _ in pads) if symmetric else (0,) * len(kernel),
        dilations=dilations,
        group=int(call.attr("group", 1)),
        extra=() if symmetric else tuple(_flat(pads)),
    )


@_operator("Conv")
def _conv(call: Call) -> Function:
    form, rank = conv_form(call), call.x().dim() - 2
    if rank not in (1, 2, 3):
        raise UnsupportedFormError(f"over {rank} axes")
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if form.extra:
            x = functional.pad(x, form.extra)
        return convolve(x, weight, bias, form.strides, form.padding, form.dilations, form.group)

    return run


@_operator("ConvTranspose")
def _conv_transpose(call: Call) -> Function:
    rank = call.x().dim() - 2
    if rank not in (1, 2, 3):
        raise UnsupportedFormError(f"over {rank} axes")
    if str(call.attr("auto_pad", "NOTSET")) != "NOTSET" or call.attr("output_shape") is not None:
        raise UnsupportedFormError("with auto_pad or output_shape")
    convolve = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[rank - 1]
    strides, dilations = call.attr("strides", [1] * rank), call.attr("dilations", [1] * rank)
    pads, extra = call.attr("pads", [0] * (2 * rank)), call.attr("output_padding", [0] * rank)
    if list(pads[:rank]) != list(pads[rank:]):
        raise UnsupportedFormError(f"with pads {list(pads)}")
    group = int(call.attr("group", 1))
    return lambda x, w, b=None: convolve(x, w, b, strides, pads[:rank], extra, group, dilations)


@dataclass(frozen=True)
class Window:
    """A pooling's attributes, resolved; pads are (before, after) per axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[tuple[int, int]]
    ceil: bool

    def cut(self, y: Tensor, x: Tensor) -> Tensor:
        """The pooling y of a padded x without windows that start in the padding behind x: PyTorch took it for values."""
        for axis, (step, (before, _)) in enumerate(zip(self.strides, self.pads, strict=True), 2):
            y = y.narrow(axis, 0, min(y.shape[axis], -(-(x.shape[axis] + before) // step)))
        return y


def window(call: Call) -> Window:
    """Read a MaxPool or AveragePool."""
    kernel = list(call.attr("kernel_shape"))
    strides, dilations = list(call.attr("strides", [1] * len(kernel))), list(call.attr("dilations", [1] * len(kernel)))
    pads = window_pads(call, kernel, strides, dilations)
    if call.x().dim() not in (3, 4, 5):
        raise UnsupportedFormError(f"over {call.x().dim() - 2} axes")
    return Window(kernel, strides, dilations, pads, bool(call.attr("ceil_mode", 0)))


@_operator("MaxPool")
def _max_pool(call: Call) -> Function:
    if len(call.node.output) > 1 and call.node.output[1]:
        raise UnsupportedFormError("with indices")
    w, rank = window(call), call.x().dim() - 2
    pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[rank - 1]
    fits = all(before == after and 2 * before <= k for (before, after), k in zip(w.pads, w.kernel, strict=True))
    padding = [before for before, _ in w.pads] if fits else [0] * rank
    extra = [] if fits else _flat(w.pads)
    lowest = float("-inf") if call.x().is_floating_point() else torch.iinfo(call.x().dtype).min

    def run(x: Tensor) -> Tensor:
        if extra:
            return w.cut(
                pool(functional.pad(x, extra, value=lowest), w.kernel, w.strides, padding, w.dilations, w.ceil), x
            )
        return pool(x, w.kernel, w.strides, padding, w.dilations, w.ceil)

    return run


@_operator("AveragePool")
def _average_pool(call: Call) -> Function:
    w, rank, count = window(call), call.x().dim() - 2, bool(call.attr("count_include_pad", 0))
    if any(d != 1 for d in w.dilations):
        raise UnsupportedFormError("with dilations")
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
    if all(before == after and 2 * before <= k for (before, after), k in zip(w.pads, w.kernel, strict=True)):
        padding = [before for before, _ in w.pads]
        return lambda x: pool(x, w.kernel, w.strides, padding, w.ceil, count)
    if count:
        return lambda x: w.cut(pool(functional.pad(x, _flat(w.pads)), w.kernel, w.strides, [0] * rank, w.ceil, True), x)

    # Sides differ and padding does not count: the sum of values over the share of the window inside the input.
    def run(x: Tensor) -> Tensor:
        inside = functional.pad(torch.ones_like(x[:1, :1]), _flat(w.pads))
        shares = pool(inside, w.kernel, w.strides, [0] * rank, w.ceil)
        return w.cut(pool(functional.pad(x, _flat(w.pads)), w.kernel, w.strides, [0] * rank, w.ceil) / shares, x)

    return run


@_operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: Call) -> Function:
    axes = tuple(range(2, call.x().dim()))
    if call.node.op_type == "GlobalMaxPool":
        return lambda x: torch.amax(x, axes, keepdim=True)
    return lambda x: torch.mean(x, axes, keepdim=True)


@_operator("BatchNormalization")
def _batchnorm(call: Call) -> Function:
    if int(call.attr("training_mode", 0)):
        raise UnsupportedFormError("in training mode")
    epsilon = float(call.attr("epsilon", 1e-5))
    return lambda x, scale, bias, mean, variance: functional.batch_norm(
        x, mean, variance, scale, bias, False, 0.0, epsilon
    )


@_operator("InstanceNormalization")
def _instance_norm(call: Call) -> Function:
    epsilon = float(call.attr("epsilon", 1e-5))
    return lambda x, scale, bias: functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@_operator("LayerNormalization")
def _layer_norm(call: Call) -> Function:
    if any(call.node.output[1:]):
        raise UnsupportedFormError("with mean and deviation as outputs")
    shape, epsilon = call.x().shape[int(call.attr("axis", -1)) :], float(call.attr("epsilon", 1e-5))
    return lambda x, scale, bias=None: functional.layer_norm(x, shape, scale, bias, epsilon)


@_operator("LRN")
def _lrn(call: Call) -> Function:
    size = int(call.attr("size"))
    alpha, beta, k = (float(call.attr(name, value)) for name, value in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    if size % 2 == 0:
        raise UnsupportedFormError("of even size")  # the sides differ by one from PyTorch's
    return lambda x: functional.local_response_norm(x, size, alpha, beta, k)


# --- matrices and reductions --------------------------------------------------------------------------------------


@_operator("Gemm")
def _gemm(call: Call) -> Function:
    alpha, beta = float(call.attr("alpha", 1.0)), float(call.attr("beta", 1.0))
    left, right = bool(call.attr("transA", 0)), bool(call.attr("transB", 0))

    def run(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        a, b = a.t() if left else a, b.t() if right else b
        if c is not None:
            return torch.addmm(c, a, b, beta=beta, alpha=alpha)
        return a @ b if alpha == 1.0 else alpha * (a @ b)

    return run


@_operator("MatMul")
def _matmul(call: Call) -> Function:
    return lambda a, b: torch.matmul(a, b)


_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceMean": lambda x, axes, keep: torch.mean(x, axes, keepdim=keep),
    "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keepdim=keep, dtype=x.dtype),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keepdim=keep),
    "ReduceL1": lambda x, axes, keep: torch.linalg.vector_norm(x, 1, axes, keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: torch.sum(x * x, axes, keepdim=keep),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
}


@_operator(*_REDUCTIONS)
def _reduce(call: Call) -> Function:
    function, keep = _REDUCTIONS[call.node.op_type], bool(call.attr("keepdims", 1))
    axes = call.ints("axes", 1) or []
    if call.node.op_type in ("ReduceMean", "ReduceL1", "ReduceL2") and not call.x().is_floating_point():
        raise UnsupportedFormError("of integers")
    if not axes and int(call.attr("noop_with_empty_axes", 0)):
        return lambda x, *_: x.clone()
    chosen = axes or list(range(call.x().dim()))
    return lambda x, *_: function(x, chosen, keep)


@_operator("ArgMax", "ArgMin")
def _arg_extreme(call: Call) -> Function:
    if int(call.attr("select_last_index", 0)):
        raise UnsupportedFormError("with select_last_index")
    function = torch.argmax if call.node.op_type == "ArgMax" else torch.argmin
    axis, keep = int(call.attr("axis", 0)), bool(call.attr("keepdims", 1))
    return lambda x: function(x, axis, keepdim=keep)


# --- shapes -------------------------------------------------------------------------------------------------------


@_operator("Flatten")
def _flatten(call: Call) -> Function:
    shape, axis = call.x().shape, int(call.attr("axis", 1))
    axis = axis % len(shape) if axis < 0 else axis
    rows, columns = math.prod(shape[:axis]), math.prod(shape[axis:])
    return lambda x: x.reshape(rows, columns)


@_operator("Reshape")
def _reshape(call: Call) -> Function:
    wanted, shape = call.ints("shape", 1) or [], call.x().shape
    if not int(call.attr("allowzero", 0)):
        wanted = [shape[at] if size == 0 else size for at, size in enumerate(wanted)]
    return lambda x, *_: x.reshape(wanted)


@_operator("Transpose")
def _transpose(call: Call) -> Function:
    order = list(call.attr("perm", range(call.x().dim())[::-1]))
    return lambda x: x.permute(order)


@_operator("Squeeze")
def _squeeze(call: Call) -> Function:
    shape, axes = call.x().shape, call.ints("axes", 1)
    gone = {axis % len(shape) for axis in axes} if axes else {at for at, size in enumerate(shape) if size == 1}
    left = [size for at, size in enumerate(shape) if at not in gone]
    return lambda x, *_: x.reshape(left)


@_operator("Unsqueeze")
def _unsqueeze(call: Call) -> Function:
    axes, shape = call.ints("axes", 1) or [], list(call.x().shape)
    rank = len(shape) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        shape.insert(axis, 1)
    return lambda x, *_: x.reshape(shape)


@_operator("Concat")
def _concat(call: Call) -> Function:
    axis = int(call.attr("axis"))
    return lambda *parts: torch.cat(parts, axis)


@_operator("Split")
def _split(call: Call) -> Function:
    axis, sizes = int(call.attr("axis", 0)), call.ints("split", 1)
    if sizes is None:
        whole, count = call.x().shape[axis], len(call.node.output)
        each = -(-whole // count)
        sizes = [min(each, whole - at * each) for at in range(count)]
    return lambda x, *_: torch.split(x, sizes, axis)


@_operator("Slice")
def _slice(call: Call) -> Function:
    starts, ends = call.ints("starts", 1) or [], call.ints("ends", 2) or []
    axes, steps = call.ints("axes", 3) or list(range(len(starts))), call.ints("steps", 4) or [1] * len(starts)
    rank = call.x().dim()
    cuts: list[slice] = [slice(None)] * rank
    turned = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis, size = axis % rank, call.x().shape[axis % rank]
        first, last, step = slice(start, end if end > -(2**62) else None, step).indices(size)
        if step < 0:  # PyTorch slices forwards only: take the same elements, then turn them round
            count = len(range(first, last, step))
            first, last, step = first + (count - 1) * step, first + 1, -step
            last = first if count == 0 else last
            turned.append(axis)
        cuts[axis] = slice(first, last, step)
    index = tuple(cuts)
    if turned:
        return lambda x, *_: x[index].flip(turned)
    return lambda x, *_: x[index]


@_operator("Gather")
def _gather(call: Call) -> Function:
    axis = int(call.attr("axis", 0)) % max(call.x().dim(), 1)
    size, shape = call.x().shape[axis], call.x().shape

    def run(x: Tensor, index: Tensor) -> Tensor:
        index = torch.where(index < 0, index + size, index).long()
        return x.index_select(axis, index.reshape(-1)).reshape((*shape[:axis], *index.shape, *shape[axis + 1 :]))

    return run


@_operator("Shape")
def _shape(call: Call) -> Function:
    shape = list(call.x().shape)
    cut = shape[call.attr("start", 0) : call.attr("end", len(shape))]
    return lambda x: torch.tensor(cut, dtype=torch.int64)


@_operator("Size")
def _size(call: Call) -> Function:
    count = call.x().numel()
    return lambda x: torch.tensor(count, dtype=torch.int64)


@_operator("ConstantOfShape")
def _constant_of_shape(call: Call) -> Function:
    held = call.attr("value")
    value = torch.zeros(1) if held is None else torch.from_numpy(np.array(onnx.numpy_helper.to_array(held)))
    sizes = [int(size) for size in call.values(0)]
    return lambda _: value.reshape(()).expand(sizes).clone()


@_operator("Expand")
def _expand(call: Call) -> Function:
    shape = torch.broadcast_shapes(call.x().shape, tuple(call.values(1)))
    return lambda x, *_: x.expand(shape)


@_operator("Tile")
def _tile(call: Call) -> Function:
    counts = call.ints("repeats", 1) or []
    return lambda x, *_: x.repeat(counts)


@_operator("Range")
def _range(call: Call) -> Function:
    start, limit, delta = (call.values(slot) for slot in range(3))
    dtype = call.x().dtype
    return lambda *_: torch.arange(start, limit, delta, dtype=dtype)


@_operator("Pad")
def _pad(call: Call) -> Function:
    mode, rank = str(call.attr("mode", "constant")), call.x().dim()
    sizes = call.ints("pads", 1) or call.attr("paddings")
    if sizes is None:
        raise UnsupportedFormError("without pads")
    value = call.values(2) if call.has(2) else call.attr("value", 0.0)
    value = value[0] if isinstance(value, list) else value
    axes = call.ints("axes", 3) if call.has(3) else list(range(rank))
    pairs = [(0, 0)] * rank
    for at, axis in enumerate(axes or []):
        pairs[axis % rank] = (int(sizes[at]), int(sizes[at + len(axes or [])]))
    if mode == "constant":
        return lambda x, *_: functional.pad(x, _flat(pairs), value=value)
    if mode not in ("reflect", "edge") or any(pair != (0, 0) for pair in pairs[:2]) or rank not in (3, 4, 5):
        raise UnsupportedFormError(f"of mode {mode} over these axes")
    kind = "reflect" if mode == "reflect" else "replicate"
    return lambda x, *_: functional.pad(x, _flat(pairs[2:]), mode=kind)


@_operator("DepthToSpace", "SpaceToDepth")
def _depth_to_space(call: Call) -> Function:
    b, (n, c, h, w) = int(call.attr("blocksize")), call.x().shape
    if call.node.op_type == "SpaceToDepth":
        return lambda x: (
            x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)
        )
    if str(call.attr("mode", "DCR")) == "DCR":
        return lambda x: (
            x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // (b * b), h * b, w * b)
        )
    return lambda x: (
        x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // (b * b), h * b, w * b)
    )


# --- resizing -----------------------------------------------------------------------------------------------------


@_operator("Upsample", "Resize")
def _resize(call: Call) -> Function:
    """Nearest and linear, separable: every axis is indexed (and blended) with places computed once."""
    shape = list(call.x().shape)
    mode = str(call.attr("mode", "nearest"))
    old = call.node.op_type == "Upsample" or call.opset < 11
    places = "asymmetric" if old else str(call.attr("coordinate_transformation_mode", "half_pixel"))
    rounding = "floor" if old else str(call.attr("nearest_mode", "round_prefer_floor"))
    scales, sizes = _scales(call, old)
    if mode == "bilinear":
        mode = "linear"
    if mode not in ("nearest", "linear") or int(call.attr("antialias", 0)):
        raise UnsupportedFormError(f"of mode {mode}")
    if places == "tf_crop_and_resize":
        raise UnsupportedFormError(f"with {places}")
    axes: list[tuple[int, Any, Any, Any]] = []
    device, dtype = call.x().device, call.x().dtype
    for axis, (size, scale, out) in enumerate(zip(shape, scales, sizes, strict=True)):
        if size == out and scale == 1.0:
            continue
        at = _source(np.arange(out, dtype=np.float64), size, out, scale, places)
        if mode == "nearest":
            how = "ceil" if old and scale < 1 else rounding  # as ONNX Runtime reads what the old opsets left open
            index = np.clip(_rounded(at, how), 0, size - 1).astype(np.int64)
            axes.append((axis, torch.from_numpy(index).to(device), None, None))
        else:
            at = np.clip(at, 0, size - 1)
            low = np.floor(at).astype(np.int64)
            share = torch.from_numpy((at - low).reshape([-1] + [1] * (len(shape) - axis - 1))).to(device, dtype)
            high = np.minimum(low + 1, size - 1)
            axes.append((axis, torch.from_numpy(low).to(device), torch.from_numpy(high).to(device), share))

    whole = [int(scale) for scale in scales]
    repeats = (mode, places, rounding, len(shape)) == ("nearest", "asymmetric", "floor", 4)
    if repeats and whole == list(scales) and whole[:2] == [1, 1]:
        return lambda x, *_: functional.interpolate(x, scale_factor=(whole[2], whole[3]), mode="nearest")

    def run(x: Tensor, *_: Any) -> Tensor:
        for axis, low, high, share in axes:
            first = x.index_select(axis, low)
            x = first if high is None else torch.lerp(first, x.index_select(axis, high), share)
        return x

    return run


def _scales(call: Call, old: bool) -> tuple[list[float], list[int]]:
    """Scale and output size per axis."""
    shape = list(call.x().shape)
    if old:
        given = call.values(1) if call.has(1) else call.attr("scales")
        scales = [float(value) for value in given]
        return scales, [math.floor(size * scale) for size, scale in zip(shape, scales, strict=True)]
    named = call.attr("axes")
    axes = [axis % len(shape) for axis in named] if named else list(range(len(shape)))
    if str(call.attr("keep_aspect_ratio_policy", "stretch")) != "stretch":
        raise UnsupportedFormError("that keeps the aspect ratio")
    scales, sizes = [1.0] * len(shape), list(shape)
    if call.has(3) and call.x(3).numel():
        for axis, size in zip(axes, call.values(3), strict=True):
            sizes[axis], scales[axis] = int(size), int(size) / shape[axis]
    else:
        for axis, scale in zip(axes, call.values(2), strict=True):
            sizes[axis], scales[axis] = math.floor(shape[axis] * scale), float(scale)
    return scales, sizes


def _source(out: Any, size: int, new: int, scale: float, places: str) -> Any:
    """Where each output element lies on the input's axis, by ONNX's coordinate transformations."""
    if places == "asymmetric":
        return out / scale
    if places == "align_corners":
        return out * (size - 1) / (new - 1) if new > 1 else out * 0.0
    if places == "pytorch_half_pixel" and new == 1:
        return out * 0.0
    if places == "half_pixel_symmetric":
        return size / 2 * (1 - new / (size * scale)) + (out + 0.5) / scale - 0.5
    if places in ("half_pixel", "pytorch_half_pixel"):
        return (out + 0.5) / scale - 0.5
    raise UnsupportedFormError(f"with {places}")


def _rounded(at: Any, how: str) -> Any:
    if how == "floor":
        return np.floor(at)
    if how == "ceil":
        return np.ceil(at)
    return np.ceil(at - 0.5) if how == "round_prefer_floor" else np.floor(at + 0.5)
