"""Kernel `packed`: one 32-bit word per nonzero, the format of arXiv 2611.17212.

A word holds the weight as fp16 in bits 31:16 and where it applies: ic in 15:8, kx in 7:4, ky in 3:0. Eight bits of ic
reach 256 channels, so the input channels of a group are cut into blocks of at most 256 and ic counts within its block.
Kernels up to 15x15 fit. ky and kx are positions in the kernel (before dilation); stride, pads, dilation and group stay
in the geometry, so the words hold for every input size.

Constants (INT32): `words` [nnz], `offsets` [blocks * oc + 1], `bias` [oc] as fp32 bits where there is one. Words of
block b and output channel o are offsets[b * oc + o] up to offsets[b * oc + o + 1], ascending in (ic, ky, kx). A layer
without a nonzero carries one zero word, which no offset reaches. Parameters: (block_ic,), input channels per block,
or (block_ic, exponent): words then hold the weights times 2^exponent, and the kernel multiplies its sums by 2^-exponent
ahead of the bias, which is exact.

Rounding to fp16 (nearest even) changes a weight by at most 2^-11 of its value. Where that does not hold, because weights
overflow or fall below fp16's normal range, the layer is scaled by the power of two nearest to 1 with which it does; weights
that no scale serves are refused.
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
MAX_EXPONENT = 126
"""Either way: 2^-exponent is then a normal fp32 value."""
MAX_SCALED_SUM = 256.0
"""Of the magnitudes of one output channel's weights scaled up, where sums are fp16: inputs up to 255 cannot overflow them."""


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
            f"{np.abs(values[lost]).max():.4g}. packed carries weights as fp16 times one power of two, and none serves all of "
            "this layer's; csr would carry it exactly"
        )


def _relative_errors(values: NDArray[np.float64], exponent: int) -> NDArray[np.float64]:
    """Of each value times 2^exponent by rounding to fp16; infinite where it overflows."""
    scaled = np.ldexp(values, exponent)
    with np.errstate(over="ignore"):
        halves = scaled.astype(np.float16).astype(np.float64)
    return np.abs(halves - scaled) / np.abs(scaled)


def _exponent(weight: Floats, precision: Precision) -> int:
    """The scale nearest to 2^0 with which every nonzero weight rounds to within 2^-11; 0 when there is none."""
    values = weight[weight != 0].astype(np.float64)
    if not values.size or (_relative_errors(values, 0) <= MAX_RELATIVE_ERROR).all():
        return 0
    # frexp's exponents are one above the leading bit's: smallest * 2^least >= 2^-14, largest * 2^most < 2^16.
    smallest, largest = np.frexp([np.abs(values).min(), np.abs(values).max()])[1]
    least, most = max(-13 - int(smallest), -MAX_EXPONENT), min(16 - int(largest), MAX_EXPONENT)
    if precision == "fp16":
        sums = np.abs(weight.astype(np.float64)).sum(axis=(1, 2, 3))
        most = min(most, max(0, int(np.floor(np.log2(MAX_SCALED_SUM / sums.max())))))
    nearest = min(max(0, least), most)
    fits = [k for k in (nearest, nearest - 1) if (_relative_errors(values, k) <= MAX_RELATIVE_ERROR).all()]
    return fits[0] if fits else 0


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
        block_ic, exponent = (*node.parameters, 0)[:2] if len(node.parameters) in (1, 2) else (0, 0)
        if not 1 <= block_ic <= MAX_BLOCK_IC or abs(exponent) > MAX_EXPONENT:
            raise ValueError(
                f"{node.layer}: parameters {node.parameters}, packed has channels per block, 1..256, and the scale's "
                f"exponent, -{MAX_EXPONENT}..{MAX_EXPONENT}"
            )
        starts = _starts(g, block_ic)
        row = nonzeros.rows_of(node, offsets, len(starts) * g.oc, words.size)
        bits = words[: row.size].view(np.uint32)
        place = (bits & 0xFFFF).astype(np.int64)
        self.value = np.ldexp((bits >> 16).astype(np.uint16).view(np.float16).astype(np.float64), -exponent)
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
        """Always: what it is predicted from is measured, published or scaled for every device."""
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
        """The one configuration: by the kernel's bounds on devices they were measured on, else at published throughput."""
        if measured := direct.measured(layer, device, precision, batch, per_nonzero=4):
            return (({}, measured),)
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
        exponent = _exponent(weight, options.precision)
        words, offsets, errors = _pack(layer.name, np.ldexp(weight, exponent), starts)
        constants = nonzeros.with_bias((nonzeros.or_dummy(words), offsets), bias)
        rounded, worst = int(np.count_nonzero(errors)), float(errors.max(initial=0.0))
        node = SparseConv(
            layer=layer.name,
            kernel=self.name,
            geometry=g,
            epilogue=layer.epilogue,
            precision=options.precision,
            constants=constants,
            parameters=(starts.step, exponent) if exponent else (starts.step,),
            fixed_hw=False,
        )
        record = {
            "nnz": words.size,
            "constant_bytes": sum(array.nbytes for array in constants),
            "rounded_weights": rounded,
            "largest_relative_error": worst,
        }
        notes = (f"{layer.name}: weights carried times 2^{exponent}, so that fp16 holds each",) if exponent else ()
        built = Built(node, notes, record)
        return direct.with_code(built, "packed", self.places(node), device, options, scale=2.0**-exponent)

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
        """The weights as carried (fp16 values, unscaled, in fp32) and the exact bias; ValueError when malformed."""
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
        for value, oc, ic, ky, kx in zip(words.value, words.oc, channel, words.ky, words.kx, strict=True):
            sums[:, oc] += value * tap(plane[:, ic], ky, kx, g)
        return nonzeros.finish(node, sums, residual)


PACKED = Packed()
