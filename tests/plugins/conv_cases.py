"""Convolutions that kernel tests draw: geometry, weights of a chosen sparsity, epilogues, and layers made of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparsedeploy.layer import ConvLayer, Epilogue, Geometry, Zeros

Floats = NDArray[np.float32]

KERNEL_SIZES = ((1, 1), (3, 3), (5, 5), (7, 7), (15, 15), (1, 3), (3, 1))
CHANNELS = (  # oc, ic, group
    (1, 1, 1),
    (4, 3, 1),
    (3, 256, 1),
    (3, 257, 1),
    (2, 600, 1),
    (6, 4, 2),
    (4, 514, 2),
    (6, 3, 3),
    (8, 8, 8),
    (16, 8, 8),
)
EPILOGUES = (
    Epilogue(),
    Epilogue(bias=True, activation="relu"),
    Epilogue(bias=True, activation="clip", low=0.0, high=6.0, residual="before_activation"),
    Epilogue(activation="leaky_relu", slope=0.125, residual="after_activation"),
    Epilogue(bias=True, activation="relu", residual="before_activation"),
    Epilogue(bias=True, residual="after_activation"),
)
MAX_NNZ = 3000


@dataclass(frozen=True)
class Case:
    """One convolution with its data."""

    layer: ConvLayer
    weight: Floats
    bias: Floats | None
    x: NDArray[np.float64]
    residual: NDArray[np.float64] | None

    @property
    def geometry(self) -> Geometry:
        assert self.layer.geometry is not None
        return self.layer.geometry


def count_zeros(weight: Floats) -> Zeros:
    """The zeros record, as far as predictions read it."""
    per_channel = (weight != 0).reshape(len(weight), -1).sum(1)
    nnz = int(per_channel.sum())
    return Zeros(
        nnz=nnz,
        total=weight.size,
        nnz_per_channel=(int(per_channel.min()), float(np.median(per_channel)), int(per_channel.max())),
        empty_filters=int((per_channel == 0).sum()),
        empty_inputs=0,
        near_zero=0,
        two_four=False,
        sparsity=1.0 - nnz / weight.size,
    )


def layer_of(geometry: Geometry, weight: Floats, epilogue: Epilogue = EPILOGUES[0], name: str = "conv3") -> ConvLayer:
    """A layer as scan would describe it."""
    return ConvLayer(
        name=name,
        weight=f"{name}.weight",
        dtype="fp32",
        shape=weight.shape,
        geometry=geometry,
        zeros=count_zeros(weight),
        epilogue=epilogue,
    )


def pruned(shape: tuple[int, ...], nnz: int, seed: int) -> Floats:
    """Weights with exactly nnz nonzeros, all within fp16's normal range."""
    rng = np.random.default_rng(seed)
    weight = np.zeros(int(np.prod(shape)), np.float32)
    values = rng.standard_normal(nnz) * 2.0 ** rng.integers(-4, 5, nnz)
    values = np.copysign(np.maximum(np.abs(values), 2.0**-14), values)
    weight[rng.permutation(weight.size)[:nnz]] = values.astype(np.float32)
    return weight.reshape(shape)


def fill(geometry: Geometry, epilogue: Epilogue, nnz: int, batch: int, seed: int) -> Case:
    """A case with data drawn from the seed."""
    g, rng = geometry, np.random.default_rng(seed + 1)
    weight = pruned(g.weight_shape, nnz, seed)
    bias = rng.standard_normal(g.oc).astype(np.float32) if epilogue.bias else None
    x = rng.standard_normal((batch, g.ic, g.h, g.w))
    residual = rng.standard_normal((batch, g.oc, g.oh, g.ow)) if epilogue.residual != "none" else None
    return Case(layer_of(g, weight, epilogue), weight, bias, x, residual)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Any convolution the formats must take, on a map just large enough for a few output pixels."""
    oc, ic, group = draw(st.sampled_from(CHANNELS))
    kh, kw = draw(st.sampled_from(KERNEL_SIZES))
    stride, dilation = draw(st.tuples(*[st.integers(1, 3)] * 2)), draw(st.tuples(*[st.integers(1, 2)] * 2))
    pads = draw(st.tuples(*[st.integers(0, 3)] * 4))
    span_h = dilation[0] * (kh - 1) + 1 - pads[0] - pads[2]
    span_w = dilation[1] * (kw - 1) + 1 - pads[1] - pads[3]
    h, w = max(1, span_h + draw(st.integers(0, 5))), max(1, span_w + draw(st.integers(0, 5)))
    return Geometry(oc=oc, ic=ic, kh=kh, kw=kw, h=h, w=w, stride=stride, pads=pads, dilation=dilation, group=group)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A geometry with an epilogue, a batch of 1 to 3 and from no to all weights (at most MAX_NNZ) nonzero."""
    g = draw(geometries())
    total = int(np.prod(g.weight_shape))
    nnz = draw(st.sampled_from((0, 1, -(-total // 10), total)))
    epilogue = draw(st.sampled_from(EPILOGUES))
    return fill(g, epilogue, min(nnz, MAX_NNZ), draw(st.integers(1, 3)), draw(st.integers(0, 2**31)))
