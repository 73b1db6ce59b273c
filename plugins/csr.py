"""Kernel `csr`: exact fp32 weights in compressed rows with Escoin's stretched indices (Chen 2018).

A stretched index is the whole offset of a tap into a padded input, made once at conversion, so that a kernel adds it to
the output pixel's base address and multiplies:

- One image is ic planes in channel order without gaps, each of `rows` = top + h + bottom rows of `pitch` = left + w +
  right elements, the border zero. A window never leaves its plane. Escoin lets neighbouring rows and planes share a
  border; here they do not, so that asymmetric pads are no special case.
- The base of output pixel (oy, ox) is oy * stride_h * pitch + ox * stride_w.
- The index of weight (ic, ky, kx) is (ic * rows + ky * dilation_h) * pitch + kx * dilation_w, with ic counted over the
  whole input, not within the group: a kernel needs not know of groups.

So the indices hold for one h and w (`fixed_hw`), and for any kernel, stride, dilation and pads.

Constants (INT32): `offsets` [oc + 1], `indices` [nnz], `values` [nnz] as fp32 bits, `bias` [oc] as fp32 bits where
there is one. Row o is offsets[o] up to offsets[o + 1], ascending in index. A layer without a nonzero carries one zero
index and one zero value, which no offset reaches. -0.0 is a zero. No parameters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.devices import Device
from sparsedeploy.layer import ConvLayer, Geometry, Precision, Reason
from sparsedeploy.plugins import direct, nonzeros
from sparsedeploy.plugins.kernel import BuildOptions, Built, Config, Floats, Prediction
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.nonzeros import Ints
from sparsedeploy.plugins.reference import padded

Longs = NDArray[np.int64]

OVER_PACKED = 1.75
"""Time of csr over packed where computation binds: argued, not measured.

Escoin's inner loop compiles to 7 instructions per FMA (112 per 16 for sm_90), most of them 64-bit address arithmetic
for an input load through the cache. A packed word is loaded and taken apart once (about 8 instructions); shared by 4
output pixels, each with its shared-memory load and FMA, that makes about 4 per FMA. 7 / 4 = 1.75. That a nonzero is 8
bytes here and 4 there points the same way.
"""
_GATHERED = 1 << 20
"""Elements that the reference gathers at a time: 8 MB."""


def plane_shape(geometry: Geometry) -> tuple[int, int]:
    """(rows, pitch) of one padded input plane."""
    top, left, bottom, right = geometry.pads
    return top + geometry.h + bottom, left + geometry.w + right


def _stretch(geometry: Geometry, oc: Longs, ic: Longs, ky: Longs, kx: Longs) -> Longs:
    """Stretched indices of weights at [oc, ic, ky, kx], ic within the group."""
    g, (rows, pitch) = geometry, plane_shape(geometry)
    channel = oc // (g.oc // g.group) * (g.ic // g.group) + ic
    return (channel * rows + ky * g.dilation[0]) * pitch + kx * g.dilation[1]


def _too_large(geometry: Geometry) -> bool:
    rows, pitch = plane_shape(geometry)
    return geometry.ic * rows * pitch >= 2**31


def _open(node: SparseConv) -> tuple[Longs, Ints, Floats]:
    """Row, index and value of each nonzero; raises ValueError when a constant is malformed."""
    g, (plane_rows, pitch) = node.geometry, plane_shape(node.geometry)
    offsets, indices, bits = nonzeros.arrays_of(node, "csr", ("offsets", "indices", "values"))
    if indices.size != bits.size:
        raise ValueError(f"{node.layer}: constant values has {bits.size} words, constant indices {indices.size}")
    row = nonzeros.rows_of(node, offsets, g.oc, indices.size)
    index = indices[: row.size]
    last = g.ic * plane_rows * pitch - (g.oh - 1) * g.stride[0] * pitch - (g.ow - 1) * g.stride[1]
    if ((index < 0) | (index >= last)).any():
        raise ValueError(f"{node.layer}: constant indices points outside the padded input")
    nonzeros.check_ascending(node, row, index.astype(np.int64), "indices")
    return row, index, np.ascontiguousarray(bits[: row.size]).view(np.float32)


class Csr:
    """Escoin's weight format. Exact weights, any geometry, one input height and width."""

    name = "csr"
    quick = True

    def automatic(self, device: Device) -> bool:
        """Always: what it is predicted from is measured, published or scaled for every device."""
        return True

    def supports(self, layer: ConvLayer, device: Device, precision: Precision) -> Reason | None:
        """`nonzeros.unsupported`, or "input-too-large" where an offset into one image does not fit 31 bits."""
        reason = nonzeros.unsupported(layer)
        if reason is None and layer.geometry is not None and _too_large(layer.geometry):
            return Reason(code="input-too-large", text="its padded input has more elements than a 32-bit index reaches")
        return reason

    def configs(
        self, layer: ConvLayer, device: Device, precision: Precision, batch: int
    ) -> tuple[tuple[Config, Prediction], ...]:
        """The one configuration: by the kernel's bounds on devices they were measured on, else at packed's published
        throughput, OVER_PACKED times slower.
        """
        if measured := direct.measured(layer, device, precision, batch, per_nonzero=8):
            return (({}, measured),)
        oc = layer.geometry.oc if layer.geometry else 0
        carried = nonzeros.Carried(per_nonzero=8, offsets=oc + 1)
        predicted = nonzeros.predict(layer, device, precision, batch, carried, OVER_PACKED)
        source = (
            f"{predicted.source}; csr taken as {OVER_PACKED} times slower: argued from instruction counts, not measured"
        )
        return (({}, predicted.model_copy(update={"source": source})),)

    def build(
        self,
        layer: ConvLayer,
        weight: Floats,
        bias: Floats | None,
        device: Device,
        config: Config,
        options: BuildOptions,
    ) -> Built:
        """Stretch the indices, with code for the options' architectures; without any the node carries weights alone."""
        g = nonzeros.checked_geometry(layer, weight, bias)
        nonzeros.only_default(self.name, config)
        if _too_large(g):
            raise ValueError(f"{layer.name}: a padded input of {g.ic}x{plane_shape(g)} does not fit 32-bit indices")
        oc, ic, ky, kx = np.nonzero(weight)
        indices = _stretch(g, oc, ic, ky, kx).astype(np.int32)
        values = weight[oc, ic, ky, kx].view(np.int32)
        offsets = nonzeros.row_offsets(np.bincount(oc, minlength=g.oc))
        constants = nonzeros.with_bias((offsets, nonzeros.or_dummy(indices), nonzeros.or_dummy(values)), bias)
        node = SparseConv(
            layer=layer.name,
            kernel=self.name,
            geometry=g,
            epilogue=layer.epilogue,
            precision=options.precision,
            constants=constants,
        )
        record = {"nnz": float(indices.size), "constant_bytes": float(sum(array.nbytes for array in constants))}
        return direct.with_code(Built(node, record=record), "csr", self.places(node), device, options)

    def places(self, node: SparseConv) -> direct.Nonzeros:
        """Where each nonzero that the node carries belongs; raises ValueError when the node is malformed."""
        oc, index, _ = _open(node)
        rows, pitch = plane_shape(node.geometry)
        return direct.Nonzeros(
            row=oc, oc=oc, ic=index.astype(np.int64) // (rows * pitch), block_ic=node.geometry.ic // node.geometry.group
        )

    def unpack(self, node: SparseConv) -> tuple[Floats, Floats | None]:
        """The exact weights and bias (-0.0 as 0.0); raises ValueError when the node is malformed."""
        g, (plane_rows, pitch) = node.geometry, plane_shape(node.geometry)
        oc, index, value = _open(node)
        line, column = np.divmod(index.astype(np.int64), pitch)
        channel, row = np.divmod(line, plane_rows)
        ic = channel - oc // (g.oc // g.group) * (g.ic // g.group)
        (ky, off_row), (kx, off_column) = np.divmod(row, g.dilation[0]), np.divmod(column, g.dilation[1])
        inside = (ic >= 0) & (ic < g.ic // g.group) & (ky < g.kh) & (kx < g.kw)
        if not (inside & (off_row == 0) & (off_column == 0)).all():
            raise ValueError(f"{node.layer}: constant indices points beside the taps of {g.weight_shape}")
        weight = np.zeros(g.weight_shape, np.float32)
        weight[oc, ic, ky, kx] = value
        return weight, nonzeros.bias_of(node)

    def reference(
        self, node: SparseConv, x: NDArray[np.float64], residual: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Output [N, oc, oh, ow] for x [N, ic, h, w]: row by row, indices added to the pixels' bases."""
        g, pitch = node.geometry, plane_shape(node.geometry)[1]
        _, index, value = _open(node)
        image = padded(x, g).reshape(len(x), -1)
        base = (np.arange(g.oh)[:, None] * (g.stride[0] * pitch) + np.arange(g.ow) * g.stride[1]).reshape(-1)
        sums = np.zeros((len(x), g.oc, base.size))
        step = max(1, _GATHERED // max(1, base.size * len(x)))
        offsets = node.constants[0]
        for oc in range(g.oc):
            for start in range(offsets[oc], offsets[oc + 1], step):
                part = slice(start, min(start + step, offsets[oc + 1]))
                sums[:, oc] += value[part].astype(np.float64) @ image[:, index[part, None] + base]
        return nonzeros.finish(node, sums.reshape(len(x), g.oc, g.oh, g.ow), residual)


CSR = Csr()
