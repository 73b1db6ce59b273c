"""Kernel `packed`: one 32-bit word per nonzero, the format of arXiv 2611.17212.

A word holds the weight as fp16 in bits 31:16 and where it applies: ic in 15:8, kx in 7:4, ky in 3:0. Eight bits of ic
reach 256 channels, so the input channels of a group are cut into blocks of at most 256 and ic counts within its block.
Kernels up to 15x15 fit. ky and kx are positions in the kernel (before dilation); stride, pads, dilation and group stay
in the geometry, so the words hold for every input size.

Constants (INT32): `words` [nnz], `offsets` [blocks * oc + 1], `bias` [oc] as fp32 bits where there is one. Words of
block b and output channel o are offsets[b * oc + o] up to offsets[b * oc + o + 1], ascending in (ic, ky, kx). A layer
without a nonzero carries one zero word, which no offset reaches. Parameters: (block_ic,), input channels per block.

Rounding to fp16 (nearest even) changes a weight by at most 2^-11 of its value; weights for which that cannot hold,
because they overflow or fall below fp16's normal range, are refused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.devices import Device
from sparsedeploy.layer import ConvLayer, Geometry, Precision, Reason
from sparsedeploy.plugins import direct, nonzeros
from sparsedeploy.plugins.kernel import BuildOptions, Built, Config, Floats, Prediction, UnfitWeightsError
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.nonzeros import Ints
from sparsedeploy.plugins.reference import padded, tap

MAX_BLOCK_IC = 256
MAX_KERNEL = 15
MAX_RELATIVE_ERROR = 2.0**-11
"""Of one weight, by rounding to fp16."""


def block_channels(geometry: Geometry) -> int:
    """Input channels per block: as few blocks as fit, of equal size (257 channels make 129 + 128, not 256 + 1)."""
    channels = geometry.ic // geometry.group
    return -(-channels // -(-channels // MAX_BLOCK_IC))


def _starts(geometry: Geometry, block_ic: int) -> range:
    return range(0, geometry.ic // geometry.group, block_ic)


def _refuse(layer: str, values: Floats, lost: NDArray[np.bool_], why: str) -> None:
    if lost.any():
        raise UnfitWeightsError(
            f"{layer}: {int(lost.sum())} of {values.size} nonzero weights {why}: the largest of them is "
            f"{np.abs(values[lost]).max():.4g}. packed carries weights as fp16; csr would carry this layer exactly"
        )


def _round(layer: str, values: Floats) -> tuple[NDArray[np.float16], NDArray[np.float64]]:
    """fp16 values and their relative errors; raises UnfitWeightsError for what fp16 cannot hold to 2^-11."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    _refuse(layer, values, ~np.isfinite(halves), "overflow fp16, which ends at 65504")
    exact = values.astype(np.float64)
    errors = np.abs(halves.astype(np.float64) - exact) / np.abs(exact)
    why = "vanish or lose more than 2^-11 of their value below fp16's normal range, which starts at 6.1e-05"
    _refuse(layer, values, errors > MAX_RELATIVE_ERROR, why)
    return halves, errors


def _pack(layer: str, weight: Floats, starts: range) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Words, offsets and relative rounding errors of a weight [oc, ic // group, kh, kw]."""
    counts, values, places = [], [], []
    for start in starts:
        block = weight[:, start : start + starts.step]
        oc, ic, ky, kx = np.nonzero(block)
        counts.append(np.bincount(oc, minlength=len(weight)))
        values.append(block[oc, ic, ky, kx])
        places.append((ic << 8 | kx << 4 | ky).astype(np.uint32))
    halves, errors = _round(layer, np.concatenate(values))
    words = halves.view(np.uint16).astype(np.uint32) << 16 | np.concatenate(places)
    return words.view(np.int32), nonzeros.row_offsets(np.concatenate(counts)), errors


class _Words:
    """The node's words taken apart, one entry per nonzero; raises ValueError where they do not fit the geometry."""

    def __init__(self, node: SparseConv) -> None:
        g = node.geometry
        words, offsets = nonzeros.arrays_of(node, "packed", ("words", "offsets"))
        if len(node.parameters) != 1 or not 1 <= node.parameters[0] <= MAX_BLOCK_IC:
            raise ValueError(f"{node.layer}: parameters {node.parameters}, packed has one: channels per block, 1..256")
        starts = _starts(g, node.parameters[0])
        row = nonzeros.rows_of(node, offsets, len(starts) * g.oc, words.size)
        bits = words[: row.size].view(np.uint32)
        place = (bits & 0xFFFF).astype(np.int64)
        self.value = (bits >> 16).astype(np.uint16).view(np.float16)
        self.ky, self.kx, in_block = place & 15, place >> 4 & 15, place >> 8
        block, self.oc = np.divmod(row, g.oc)
        self.ic = block * starts.step + in_block
        if (
            (in_block >= starts.step).any()
            or (self.ic >= g.ic // g.group).any()
            or (self.ky >= g.kh).any()
            or (self.kx >= g.kw).any()
        ):
            raise ValueError(f"{node.layer}: constant words points outside a weight of {g.weight_shape}")
        nonzeros.check_ascending(node, row, (in_block * g.kh + self.ky) * g.kw + self.kx, "words")


class Packed:
    """The paper's weight format. Runs any batch, height and width; fp32 sums over fp16 weights."""

    name = "packed"
    quick = True

    def automatic(self, device: Device) -> bool:
        """Always: the throughputs it is predicted from are published, measured or scaled for every device."""
        return True

    def supports(self, layer: ConvLayer, device: Device, precision: Precision) -> Reason | None:
        """`nonzeros.unsupported`, or "kernel-too-large" above 15x15."""
        reason = nonzeros.unsupported(layer)
        if reason is None and max(layer.shape[2:]) > MAX_KERNEL:
            kh, kw = layer.shape[2:]
            return Reason(code="kernel-too-large", text=f"{kh}x{kw} kernel, packed words reach 15x15")
        return reason

    def configs(
        self, layer: ConvLayer, device: Device, precision: Precision, batch: int
    ) -> tuple[tuple[Config, Prediction], ...]:
        """The one configuration, at the device's published throughput."""
        g = layer.geometry
        rows = 0 if g is None else len(_starts(g, block_channels(g))) * g.oc
        carried = nonzeros.Carried(per_nonzero=4, offsets=rows + 1)
        return (({}, nonzeros.predict(layer, device, precision, batch, carried)),)

    def build(
        self,
        layer: ConvLayer,
        weight: Floats,
        bias: Floats | None,
        device: Device,
        config: Config,
        options: BuildOptions,
    ) -> Built:
        """Pack the weights, with code for the options' architectures; without any the node carries weights alone."""
        g = nonzeros.checked_geometry(layer, weight, bias)
        nonzeros.only_default(self.name, config)
        if max(g.kh, g.kw) > MAX_KERNEL:
            raise ValueError(f"{layer.name}: {g.kh}x{g.kw} kernel, packed words reach 15x15")
        starts = _starts(g, block_channels(g))
        words, offsets, errors = _pack(layer.name, weight, starts)
        constants = nonzeros.with_bias((nonzeros.or_dummy(words), offsets), bias)
        rounded, worst = int(np.count_nonzero(errors)), float(errors.max(initial=0.0))
        node = SparseConv(
            layer=layer.name,
            kernel=self.name,
            geometry=g,
            epilogue=layer.epilogue,
            precision=options.precision,
            constants=constants,
            parameters=(starts.step,),
            fixed_hw=False,
        )
        record = {
            "nnz": words.size,
            "constant_bytes": sum(array.nbytes for array in constants),
            "rounded_weights": rounded,
            "largest_relative_error": worst,
        }
        return direct.with_code(Built(node, record=record), "packed", self.places(node), device, options)

    def places(self, node: SparseConv) -> direct.Nonzeros:
        """Where each nonzero that the node carries belongs; raises ValueError when the node is malformed."""
        words, g = _Words(node), node.geometry
        return direct.Nonzeros(
            row=words.ic // node.parameters[0] * g.oc + words.oc,
            oc=words.oc,
            ic=words.oc // (g.oc // g.group) * (g.ic // g.group) + words.ic,
            block_ic=node.parameters[0],
        )

    def unpack(self, node: SparseConv) -> tuple[Floats, Floats | None]:
        """The weights as carried (fp16 values in fp32) and the exact bias; ValueError when the node is malformed."""
        words = _Words(node)
        weight = np.zeros(node.geometry.weight_shape, np.float32)
        weight[words.oc, words.ic, words.ky, words.kx] = words.value
        return weight, nonzeros.bias_of(node)

    def reference(
        self, node: SparseConv, x: NDArray[np.float64], residual: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Output [N, oc, oh, ow] for x [N, ic, H, W] of any H and W: word by word, each over all pixels."""
        g = node.geometry
        if x.ndim == 4:
            g = g.model_copy(update={"h": x.shape[2], "w": x.shape[3]})
        words, plane = _Words(node), padded(x, g)
        if g.oh < 1 or g.ow < 1:
            raise ValueError(f"{node.layer}: an input of {g.h}x{g.w} leaves no output")
        channel = words.oc // (g.oc // g.group) * (g.ic // g.group) + words.ic
        sums = np.zeros((len(x), g.oc, g.oh, g.ow))
        for value, oc, ic, ky, kx in zip(
            words.value.astype(np.float64), words.oc, channel, words.ky, words.kx, strict=True
        ):
            sums[:, oc] += value * tap(plane[:, ic], ky, kx, g)
        return nonzeros.finish(node, sums, residual)


PACKED = Packed()
