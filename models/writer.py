"""Writes a network layer by layer as an ONNX graph, with seeded weights that keep activations in range."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from sparsedeploy.errors import InputError

Floats = NDArray[np.float32]
Sparsify = Callable[[str, Floats], Floats]
"""(tensor name, weight [oc, ic / group, kh, kw] or [out, in]) to the weight the network gets, of the same shape."""

Statistics = tuple[Floats, Floats, Floats, Floats]
ActivationName = Literal["none", "relu", "relu6"]

EPSILON = 1e-5
"""BatchNormalization's epsilon, PyTorch's default."""


@dataclass(frozen=True)
class Value:
    """A value of the graph for one image, and how it is expected to be distributed.

    The expectation scales the next layer's statistics, so that depth does not change magnitudes.
    """

    name: str
    channels: int
    height: int
    width: int
    mean: float
    variance: float


class NetworkWriter:
    """Collects nodes and initializers under torchvision's layer names.

    Every tensor draws from its own generator, seeded with (seed, CRC-32 of the tensor's name): a layer's weights do not
    depend on the layers before it, nor on whether BatchNormalization is folded.
    """

    def __init__(self, *, seed: int, with_batchnorm: bool, sparsify: Sparsify | None = None) -> None:
        self._model = onnx.ModelProto()
        self._seed = seed
        self._with_batchnorm = with_batchnorm
        self._sparsify = sparsify or (lambda name, weight: weight)

    def input(self, channels: int, size: int) -> Value:
        """The network's input [N, channels, size, size], expected normalised (mean 0, variance 1)."""
        return Value("input", channels, size, size, 0.0, 1.0)

    def conv(
        self,
        x: Value,
        name: str,
        oc: int,
        kernel: int,
        *,
        stride: int = 1,
        group: int = 1,
        bias: bool = False,
        batchnorm: str = "",
        activation: ActivationName = "none",
        gain: float = 1.0,
    ) -> Value:
        """Convolution with pads kernel // 2 and He weights, then BatchNormalization named `batchnorm`, then activation.

        `gain` scales BatchNormalization's gamma: a residual branch ends with less than 1, as trained ones do. Folded,
        a convolution always ends up with a bias.
        """
        shape = (oc, x.channels // group, kernel, kernel)
        weight = self._sparsify(f"{name}.weight", self._he(f"{name}.weight", shape, centred=group == 1))
        variance = 2.0 * (x.variance if group == 1 else x.variance + x.mean**2)
        window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        attributes = {"dilations": [1, 1], "group": group, **window}
        mean = _means(weight, x.mean)
        offset = self._normal(f"{name}.bias", (oc,), 0.05 * math.sqrt(variance)) - mean if bias else None
        if not batchnorm:
            out = self._conv(x.name, name, weight, offset, attributes)
        else:
            mean = mean if offset is None else mean + offset
            statistics = self._statistics(batchnorm, mean, variance, gain)
            variance = gain * gain
            if self._with_batchnorm:
                out = self._batchnorm(self._conv(x.name, name, weight, offset, attributes), batchnorm, statistics)
            else:
                out = self._conv(x.name, name, *_fold(weight, offset, *statistics), attributes)
        height, width = ((side + 2 * (kernel // 2) - kernel) // stride + 1 for side in (x.height, x.width))
        return self.activate(Value(out, oc, height, width, 0.0, variance), name, activation)

    def activate(self, x: Value, name: str, activation: ActivationName) -> Value:
        """ReLU or ReLU6 (a Clip with scalar initializers), or x itself for "none"."""
        if activation == "none":
            return x
        if activation == "relu":
            out = self._node("Relu", f"{name}.relu", [x.name])
        else:
            bounds = [self._shared("relu6.low", 0.0), self._shared("relu6.high", 6.0)]
            out = self._node("Clip", f"{name}.relu6", [x.name, *bounds])
        mean, variance = _rectified(x.mean, x.variance)
        return replace(x, name=out, mean=mean, variance=variance)

    def add(self, x: Value, y: Value, name: str) -> Value:
        """Elementwise sum of equal shapes."""
        assert (x.channels, x.height, x.width) == (y.channels, y.height, y.width), name
        out = self._node("Add", name, [x.name, y.name])
        return replace(x, name=out, mean=x.mean + y.mean, variance=x.variance + y.variance)

    def max_pool(self, x: Value, name: str, kernel: int, stride: int, pad: int) -> Value:
        """Max pooling of a square window."""
        window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        out = self._node("MaxPool", name, [x.name], **window)
        height, width = ((side + 2 * pad - kernel) // stride + 1 for side in (x.height, x.width))
        # The largest of some rectified normals lies about one deviation higher; its spread hardly changes.
        return Value(out, x.channels, height, width, x.mean + math.sqrt(x.variance), x.variance)

    def average_pool(self, x: Value, name: str, kernel: int) -> Value:
        """Average pooling of square windows that do not overlap."""
        out = self._node("AveragePool", name, [x.name], kernel_shape=[kernel] * 2, strides=[kernel] * 2)
        return replace(x, name=out, height=x.height // kernel, width=x.width // kernel)

    def global_average_pool(self, x: Value, name: str) -> Value:
        """Mean over height and width: what is left of the variance is mostly between channels."""
        out = self._node("GlobalAveragePool", name, [x.name])
        return Value(out, x.channels, 1, 1, x.mean, x.variance / 4)

    def flatten(self, x: Value, name: str = "flatten") -> Value:
        """[N, C, H, W] to [N, C * H * W]."""
        out = self._node("Flatten", name, [x.name], axis=1)
        return Value(out, x.channels * x.height * x.width, 1, 1, x.mean, x.variance)

    def linear(self, x: Value, name: str, features: int, activation: ActivationName = "none") -> Value:
        """Fully connected layer (Gemm, weight [features, in]); without activation it is scaled to variance 1."""
        weight = self._sparsify(f"{name}.weight", self._he(f"{name}.weight", (features, x.channels), centred=True))
        variance = 2.0 * x.variance
        if activation == "none":
            weight = weight / np.float32(math.sqrt(variance))
            variance = 1.0
        bias = self._normal(f"{name}.bias", (features,), 0.05) - _means(weight, x.mean)
        inputs = [x.name, self._constant(f"{name}.weight", weight), self._constant(f"{name}.bias", bias)]
        out = self._node("Gemm", name, inputs, transB=1)
        return self.activate(Value(out, features, 1, 1, 0.0, variance), name, activation)

    def finish(self, name: str, x: Value, y: Value, opset: int) -> onnx.ModelProto:
        """The finished model: input [N, C, H, W] float32, output [N, classes] float32, symbol N for the batch."""
        graph = self._model.graph
        graph.name = name
        graph.node[-1].output[0] = "output"
        image = ["N", x.channels, x.height, x.width]
        graph.input.append(helper.make_tensor_value_info(x.name, TensorProto.FLOAT, image))
        graph.output.append(helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", y.channels]))
        self._model.opset_import.append(helper.make_opsetid("", opset))
        self._model.ir_version = max(8, helper.find_min_ir_version_for(self._model.opset_import))
        self._model.producer_name = "sparsedeploy"
        return self._model

    def _statistics(self, name: str, mean: Floats, variance: float, gain: float) -> Statistics:
        """gamma, beta, running mean and variance [channels], as training leaves them for maps so distributed."""
        channels = len(mean)
        gamma = self._uniform(f"{name}.weight", channels, 0.8 * gain, 1.2 * gain)
        beta = self._normal(f"{name}.bias", (channels,), 0.1 * gain)
        running_mean = mean + self._normal(f"{name}.running_mean", (channels,), 0.1 * math.sqrt(variance))
        running_var = self._uniform(f"{name}.running_var", channels, 0.8 * variance, 1.2 * variance)
        return gamma, beta, running_mean, running_var

    def _conv(self, x: str, name: str, weight: Floats, bias: Floats | None, attributes: dict[str, object]) -> str:
        inputs = [x, self._constant(f"{name}.weight", weight)]
        if bias is not None:
            inputs.append(self._constant(f"{name}.bias", bias))
        return self._node("Conv", name, inputs, **attributes)

    def _batchnorm(self, x: str, name: str, statistics: Statistics) -> str:
        fields = ("weight", "bias", "running_mean", "running_var")
        inputs = [self._constant(f"{name}.{field}", array) for field, array in zip(fields, statistics, strict=True)]
        return self._node("BatchNormalization", name, [x, *inputs], epsilon=EPSILON)

    def _node(self, op: str, name: str, inputs: list[str], **attributes: object) -> str:
        self._model.graph.node.append(helper.make_node(op, inputs, [f"{name}.out"], name=name, **attributes))
        return f"{name}.out"

    def _constant(self, name: str, array: Floats) -> str:
        # Added in place: make_graph and make_model would copy every weight twice more.
        self._model.graph.initializer.add(
            name=name, data_type=TensorProto.FLOAT, dims=array.shape, raw_data=array.astype("<f4", copy=False).tobytes()
        )
        return name

    def _shared(self, name: str, value: float) -> str:
        if all(tensor.name != name for tensor in self._model.graph.initializer):
            self._constant(name, np.array(value, np.float32))
        return name

    def _he(self, name: str, shape: tuple[int, ...], *, centred: bool) -> Floats:
        """He normal weights, fan-in mode: variance 2 / fan_in, fan_in the product of all dimensions but the first.

        `centred` filters have mean zero, so the positive mean that every rectified map shares does not add up layer by
        layer until the output hardly depends on the image. (A depthwise filter so centred would be a high-pass.)
        """
        weight = self._normal(name, shape, math.sqrt(2.0 / math.prod(shape[1:])))
        if centred:
            axes = tuple(range(1, len(shape)))
            weight -= weight.mean(axis=axes, dtype=np.float64, keepdims=True).astype(np.float32)
        return weight

    def _normal(self, name: str, shape: tuple[int, ...], scale: float) -> Floats:
        values = self._generator(name).standard_normal(shape, np.float32)
        values *= np.float32(scale)
        return values

    def _uniform(self, name: str, count: int, low: float, high: float) -> Floats:
        return (low + (high - low) * self._generator(name).random(count)).astype(np.float32)

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self._seed, zlib.crc32(name.encode())]))


def _means(weight: Floats, mean: float) -> Floats:
    """Each filter's expected sum where all it reads has this mean: what its bias or running mean takes away."""
    sums = weight.sum(axis=tuple(range(1, weight.ndim)), dtype=np.float64)
    return np.asarray(mean * sums, np.float32)


def _fold(
    weight: Floats, bias: Floats | None, gamma: Floats, beta: Floats, mean: Floats, variance: Floats
) -> tuple[Floats, Floats]:
    """Weight [oc, ic / group, kh, kw] and bias [oc] of the convolution that equals Conv then BatchNormalization."""
    scale = gamma / np.sqrt(variance + np.float32(EPSILON))
    offset = mean if bias is None else mean - bias
    return weight * scale[:, None, None, None], beta - offset * scale


def _rectified(mean: float, variance: float) -> tuple[float, float]:
    """Mean and variance of max(x, 0) for normal x."""
    deviation = math.sqrt(variance)
    a = mean / deviation
    above = 0.5 * (1.0 + math.erf(a / math.sqrt(2.0)))
    density = math.exp(-0.5 * a * a) / math.sqrt(2.0 * math.pi)
    first = mean * above + deviation * density
    second = (mean * mean + variance) * above + mean * deviation * density
    return first, second - first * first


def check_opset(opset: int) -> None:
    """Raise InputError for an opset in which these graphs would be written differently."""
    newest = onnx.defs.onnx_opset_version()
    if not 11 <= opset <= newest:
        raise InputError(
            f"opset {opset}: reference networks are written for opsets 11 to {newest}; choose one of those."
        )
