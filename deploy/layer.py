"""One convolution of a model as every stage sees it: geometry, zeros, epilogue, and why it cannot run sparse."""

from __future__ import annotations

from typing import Literal

from sparsedeploy.record import Record

Dim = int | str
"""A size, or the symbol of a size that the model leaves open."""

Precision = Literal["fp32", "fp16"]
"""What activations are stored as between layers."""

Activation = Literal["none", "relu", "clip", "leaky_relu"]
ResidualPlace = Literal["none", "before_activation", "after_activation"]

ELEMENT_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2}


class Reason(Record):
    """Why a layer is not eligible: a stable code for programs, a sentence fragment for people."""

    code: str
    text: str


class Epilogue(Record):
    """What follows the sum of one output pixel, fused into the convolution.

    y = act(conv + bias + residual) for residual "before_activation", act(conv + bias) + residual for
    "after_activation". `clip` uses low and high (ReLU6 is 0..6), `leaky_relu` uses slope.
    """

    bias: bool = False
    activation: Activation = "none"
    slope: float = 0.0
    low: float = 0.0
    high: float = 0.0
    residual: ResidualPlace = "none"

    def describe(self) -> str:
        """Short form for tables: `bias+relu+add`."""
        activation = {"none": "", "relu": "relu", "leaky_relu": f"leaky({self.slope:g})"}.get(
            self.activation, "relu6" if (self.low, self.high) == (0.0, 6.0) else f"clip({self.low:g},{self.high:g})"
        )
        parts = ["bias" if self.bias else "", activation]
        if self.residual == "before_activation":
            parts.insert(1, "add")
        elif self.residual == "after_activation":
            parts.append("add")
        return "+".join(part for part in parts if part) or "-"


class Geometry(Record):
    """A 2-D convolution at fixed input height and width; the batch is open.

    Shapes: input [N, ic, h, w], weight [oc, ic // group, kh, kw], output [N, oc, oh, ow]. pads is ONNX's order
    (top, left, bottom, right).
    """

    oc: int
    ic: int
    kh: int
    kw: int
    h: int
    w: int
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    group: int = 1

    @property
    def oh(self) -> int:
        """Output height."""
        return (self.h + self.pads[0] + self.pads[2] - self.dilation[0] * (self.kh - 1) - 1) // self.stride[0] + 1

    @property
    def ow(self) -> int:
        """Output width."""
        return (self.w + self.pads[1] + self.pads[3] - self.dilation[1] * (self.kw - 1) - 1) // self.stride[1] + 1

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """[oc, ic // group, kh, kw]."""
        return (self.oc, self.ic // self.group, self.kh, self.kw)

    @property
    def macs(self) -> int:
        """Dense multiply-adds for one image, padding included as every dense runtime counts it."""
        return self.oc * (self.ic // self.group) * self.kh * self.kw * self.oh * self.ow


class Zeros(Record):
    """How the zeros of one weight lie."""

    nnz: int
    total: int
    nnz_per_channel: tuple[int, float, int]
    """Nonzeros per output channel: minimum, median, maximum."""
    empty_filters: int
    """Output channels without a nonzero: their output is the bias."""
    empty_inputs: int
    """Input channels (per group) that no output channel reads."""
    near_zero: int
    """Weights that are not zero but below 1e-6 of the largest magnitude: pruning that left dust behind."""
    two_four: bool
    """Every 4 consecutive input channels hold at most 2 nonzeros per (output channel, ky, kx): what 2:4 hardware runs."""
    two_four_permuted: bool = False
    """The same holds for some order of the input channels that a bounded search found: the layer before, writing its
    channels in that order, makes this one 2:4 without changing a result. False also where none was found."""
    sparsity: float
    """Share of zeros, 0..1."""


class ConvLayer(Record):
    """One Conv node of a model: what it is, how sparse it is, and what keeps it dense."""

    name: str
    weight: str
    op: str = "Conv"
    dtype: str
    """The weight's stored type: fp32, fp16, bf16, fp64, int8 ..."""
    shape: tuple[int, ...]
    """Weight shape as stored, OIHW for a 2-D Conv."""
    input_shape: tuple[Dim, ...] = ()
    output_shape: tuple[Dim, ...] = ()
    geometry: Geometry | None = None
    """Present when the node is a 2-D Conv with known height and width."""
    zeros: Zeros | None = None
    """Absent when the weight is not constant."""
    epilogue: Epilogue = Epilogue()
    ineligible: tuple[Reason, ...] = ()

    @property
    def eligible(self) -> bool:
        """Whether a kernel at hand can run this layer."""
        return not self.ineligible

    @property
    def sparsity(self) -> float:
        """Share of zeros, 0..1; 0 for a weight that is not constant."""
        return self.zeros.sparsity if self.zeros else 0.0

    @property
    def macs(self) -> int:
        """Dense multiply-adds for one image; 0 while the shape is unknown."""
        return self.geometry.macs if self.geometry else 0
