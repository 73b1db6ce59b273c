"""What the kernels that read weights as data share: which layers they take, rows of nonzeros, predicted times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.devices import Device
from sparsedeploy.layer import ELEMENT_BYTES, ConvLayer, Geometry, Precision, Reason
from sparsedeploy.plugins import epilogue
from sparsedeploy.plugins.kernel import Config, Floats, Prediction, UnfitWeightsError
from sparsedeploy.plugins.node import SparseConv

Ints = NDArray[np.int32]


def unsupported(layer: ConvLayer) -> Reason | None:
    """Why no such kernel takes the layer, with scan's codes "operator", "rank" and "shape"; None when one may."""
    if layer.op != "Conv":
        return Reason(code="operator", text=f"{layer.op} is not a Conv")
    if len(layer.shape) != 4:
        return Reason(code="rank", text=f"{len(layer.shape) - 2}-D")
    g = layer.geometry
    if g is None:
        return Reason(code="shape", text="its input height and width are not known")
    if min(g.pads) < 0:
        return Reason(code="shape", text=f"its pads {g.pads} cut the input")
    if g.oh < 1 or g.ow < 1:
        return Reason(code="shape", text=f"its output of {g.oh}x{g.ow} is empty")
    return None


def checked_geometry(layer: ConvLayer, weight: Floats, bias: Floats | None) -> Geometry:
    """The layer's geometry once weight and bias are proven to be of it and finite.

    Raises UnfitWeightsError for NaN and infinity, ValueError for a caller's mistake (shape, type, a bias that the
    epilogue does not know of).
    """
    g = layer.geometry
    if g is None:
        raise ValueError(f"{layer.name}: no kernel takes a convolution of unknown height and width")
    if weight.shape != g.weight_shape or weight.dtype != np.float32 or g.oc % g.group or g.ic % g.group:
        raise ValueError(f"{layer.name}: weight {weight.dtype}{weight.shape}, needed float32{g.weight_shape}")
    if layer.epilogue.bias != (bias is not None):
        raise ValueError(f"{layer.name}: the epilogue says bias={layer.epilogue.bias}, which was not what was given")
    if bias is not None and (bias.shape != (g.oc,) or bias.dtype != np.float32):
        raise ValueError(f"{layer.name}: bias {bias.dtype}{bias.shape}, needed float32{(g.oc,)}")
    for name, values in (("weight", weight), ("bias", bias)):
        broken = 0 if values is None else values.size - int(np.isfinite(values).sum())
        if broken:
            raise UnfitWeightsError(f"{layer.name}: {broken} values of its {name} are NaN or infinite")
    return g


def only_default(kernel: str, config: Config) -> None:
    """Raises ValueError for a parameter that the kernel does not have."""
    if config:
        raise ValueError(
            f"kernel {kernel} has no parameter {', '.join(sorted(config))}: its only configuration is {{}}"
        )


@dataclass(frozen=True)
class Carried:
    """Bytes of weights that a format carries for one layer."""

    per_nonzero: int
    offsets: int
    """Number of row offsets, 4 bytes each."""


def predict(
    layer: ConvLayer, device: Device, precision: Precision, batch: int, carried: Carried, slowdown: float = 1.0
) -> Prediction:
    """Time from the device's sparse throughput, not below the time its bandwidth needs.

    Compute: 2 FLOPs for each nonzero and output pixel at `throughput.sparse_tflops`, times `slowdown`. Memory: input
    and output once, weights as carried. The throughputs were published for large batches: where few pixels leave a
    device idle, the time is a lower bound. Raises ValueError for a layer without geometry or zeros.
    """
    g, zeros = layer.geometry, layer.zeros
    if g is None or zeros is None:
        raise ValueError(f"{layer.name}: a time cannot be predicted without its geometry and zeros")
    flops = 2.0 * zeros.nnz * g.oh * g.ow * batch
    compute_us = slowdown * flops / device.throughput.sparse_tflops(zeros.sparsity) / 1e6
    activations = batch * (g.ic * g.h * g.w + g.oc * g.oh * g.ow) * ELEMENT_BYTES[precision]
    memory_us = (activations + carried.per_nonzero * zeros.nnz + 4 * carried.offsets) / device.bandwidth_gbs / 1e3
    return Prediction(
        us=max(compute_us, memory_us),
        bound="compute" if compute_us >= memory_us else "memory",
        source=device.throughput.source,
    )


def row_offsets(counts: NDArray[np.int64]) -> Ints:
    """Where each row starts, and where the last one ends: [0, c0, c0 + c1, ...]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def or_dummy(values: Ints) -> Ints:
    """The values, or one zero word: a node carries no empty tensor."""
    return values if values.size else np.zeros(1, np.int32)


def with_bias(arrays: tuple[Ints, ...], bias: Floats | None) -> tuple[Ints, ...]:
    """A node's constants: the format's arrays, then the bias as fp32 bits if there is one."""
    return arrays if bias is None else (*arrays, np.ascontiguousarray(bias).view(np.int32))


def arrays_of(node: SparseConv, kernel: str, names: tuple[str, ...]) -> tuple[Ints, ...]:
    """The format's constants in order; the bias is checked and left to `bias_of`.

    Raises ValueError, naming the layer, when the node is another kernel's or a constant is missing or malformed.
    """
    if node.kernel != kernel:
        raise ValueError(f"{node.layer}: made by kernel {node.kernel}, not {kernel}")
    expected = (*names, "bias") if node.epilogue.bias else names
    if node.plan:
        expected = (*expected, "table")
    if len(node.constants) != len(expected):
        raise ValueError(f"{node.layer}: {len(node.constants)} constants, {kernel} carries {', '.join(expected)}")
    for name, array in zip(expected, node.constants, strict=True):
        if array.dtype != np.int32 or array.ndim != 1 or not array.size:
            raise ValueError(f"{node.layer}: constant {name} is {array.dtype}{array.shape}, needed a vector of int32")
    if node.epilogue.bias and node.constants[len(names)].size != node.geometry.oc:
        found = node.constants[len(names)].size
        raise ValueError(f"{node.layer}: constant bias has {found} values, needed {node.geometry.oc}")
    return node.constants[: len(names)]


def bias_of(node: SparseConv) -> Floats | None:
    """The bias [oc] that the node carries, or None."""
    if not node.epilogue.bias:
        return None
    last = node.constants[-2] if node.plan else node.constants[-1]  # a node with code ends with its table
    return np.ascontiguousarray(last).view(np.float32)


def rows_of(node: SparseConv, offsets: Ints, rows: int, stored: int) -> NDArray[np.int64]:
    """The row of each nonzero, [nnz]. Raises ValueError when the offsets do not split the `stored` nonzeros."""
    ends = offsets.astype(np.int64)
    steps = ends[1:] - ends[:-1]
    if offsets.size != rows + 1 or offsets[0] != 0 or (steps < 0).any() or max(int(offsets[-1]), 1) != stored:
        raise ValueError(f"{node.layer}: constant offsets does not split {stored} nonzeros into {rows} rows")
    return np.repeat(np.arange(rows), steps)


def check_ascending(node: SparseConv, rows: NDArray[np.int64], columns: NDArray[np.int64], name: str) -> None:
    """Raises ValueError unless columns ascend within each row: then no weight is carried twice."""
    if ((np.diff(rows) == 0) & (np.diff(columns) <= 0)).any():
        raise ValueError(f"{node.layer}: constant {name} is not in ascending order: a weight may be there twice")


def finish(node: SparseConv, sums: NDArray[np.float64], residual: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Bias and epilogue on the sums [N, oc, oh, ow]."""
    bias = bias_of(node)
    if bias is not None:
        sums = sums + bias.astype(np.float64)[:, None, None]
    return epilogue.apply(node.epilogue, sums, residual)
