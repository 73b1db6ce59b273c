"""Kernel `baked`: PTX compiled from the weights, one fma with an immediate per nonzero (see emit.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.devices import Device
from sparsedeploy.errors import MachineError
from sparsedeploy.layer import ConvLayer, Geometry, Precision, Reason
from sparsedeploy.plugins import nonzeros as rows
from sparsedeploy.plugins.assemble import assemble_many, ptx_version
from sparsedeploy.plugins.baked.choose import (
    estimate,
    from_config,
    mode_of,
    parted,
    portable,
    ranked,
    shared_limit,
    smallest,
    to_config,
)
from sparsedeploy.plugins.baked.emit import GATHER_THREADS, SUM_THREADS, Entry, gather_pixels, module
from sparsedeploy.plugins.baked.measured import Winner, winner
from sparsedeploy.plugins.baked.read import read_weights
from sparsedeploy.plugins.baked.schedule import Nonzeros, Piece, Schedule, nonzeros, parts, pieces
from sparsedeploy.plugins.cost import ceilings, time_us
from sparsedeploy.plugins.kernel import BuildOptions, Built, Config, Floats, Prediction, UnfitWeightsError
from sparsedeploy.plugins.launch import Arg, ArgKind, Launch, Plan, Variant, const, var
from sparsedeploy.plugins.node import Image, SparseConv
from sparsedeploy.plugins.reference import conv2d

MAX_NNZ = 400_000
"""Nonzeros of one layer at most: 16 bytes of code each, and minutes of ptxas beyond."""
SMALL_NNZ = 20_000
"""Up to so many nonzeros a second schedule for small batches is carried beside the one for the profile's batch."""


def _entries(
    geometry: Geometry, precision: Precision, device: Device, config: Config, options: BuildOptions, nnz: int, archs: tuple[int, ...]
) -> list[tuple[Entry, int, int]]:  # fmt: skip
    """(entry, smallest batch, largest batch or 0): the schedule of each range of N."""
    bits = (32,) if mode_of(precision, config) == "hf" else (16,)
    sizing = {key: value for key, value in config.items() if key != "sums"}
    if sizing:
        main = portable(from_config(geometry, precision, config), archs)
        main = parted(main, nnz, archs)
    else:
        main = _best(geometry, precision, device, options.batch, nnz, archs, bits)
    if sizing or options.batch < 4 or nnz > SMALL_NNZ:
        return [(Entry("conv", main), 1, 0)]
    # One module has one compiled geometry: a flattened one pairs images, also where a single image comes.
    paired = main.pair == "image" and main.geometry != geometry
    small = _best(geometry, precision, device, 2 if paired else 1, nnz, archs, bits)
    cut = max(1, options.batch // 4)
    return [(Entry("conv_small", small), 1, cut), (Entry("conv", main), cut + 1, 0)]


def _winner(
    geometry: Geometry,
    precision: Precision,
    device: Device,
    batch: int,
    nnz: int,
    archs: tuple[int, ...],
    bits: tuple[int, ...],
) -> Winner | None:
    """What was measured to win, where it was measured: on that device, for code for it alone."""
    if device.name != "h200" or archs != (90,) or 16 not in bits:
        return None
    return winner(
        geometry, precision, batch, nnz / (geometry.oc * (geometry.ic // geometry.group) * geometry.kh * geometry.kw)
    )


def _best(
    geometry: Geometry,
    precision: Precision,
    device: Device,
    batch: int,
    nnz: int,
    archs: tuple[int, ...],
    bits: tuple[int, ...],
) -> Schedule:
    known = _winner(geometry, precision, device, batch, nnz, archs, bits)
    if known is not None:
        best = from_config(geometry, precision, known.config)
    else:
        best = ranked(geometry, precision, batch, nnz, ceilings(device), archs, 1, bits)[0][0]
    return parted(best, nnz, archs)


def _plan(
    entries: Sequence[tuple[Entry, int, int]], weights: Nonzeros, node: SparseConv, archs: tuple[int, ...]
) -> Plan:
    variants = []
    for entry, least, most in entries:
        s = entry.schedule
        cut = parts(s, pieces(s, weights))
        g = s.geometry
        planes = s.combine == "planes"
        residual: list[ArgKind] = ["residual"] if node.has_residual else []
        names: list[ArgKind] = [
            "workspace" if s.gather else "input",
            "workspace" if planes else "output",
            *([] if planes else residual),
            "N",
        ]
        ops = []
        workspace = const(0)
        if s.gather:
            pixels = var("N") * (g.ic * g.oh * g.ow)
            workspace = pixels * s.global_bytes
            ops.append(
                Launch(
                    f"{entry.name}_gather", (pixels.ceil_div(gather_pixels(s)), const(1), const(1)), (GATHER_THREADS, 1, 1),
                    (Arg("input"), Arg("workspace"), Arg("N")),
                )
            )  # fmt: skip
        for number, part in enumerate(cut):
            shared = _shared_bytes(s, part, archs)
            if shared > shared_limit(archs):
                raise ValueError(
                    f"{node.layer}: {shared} bytes of shared memory for a block, {shared_limit(archs)} are to be had"
                )
            ops.append(
                Launch(
                    entry.part_name(number), s.grid(len(part) // s.splits), (s.threads, 1, 1),
                    tuple(Arg(name) for name in names), shared, cluster=s.cluster, dependent=s.dependent,
                )
            )  # fmt: skip
        if planes:
            outputs = var("N") * (g.oc * g.oh * g.ow)
            workspace = outputs * (4 * s.splits)
            names = ["workspace", "output", *residual, "N"]
            ops.append(
                Launch(
                    f"{entry.name}_sum", (outputs.ceil_div(SUM_THREADS), const(1), const(1)), (SUM_THREADS, 1, 1),
                    tuple(Arg(name) for name in names),
                )
            )  # fmt: skip
        variants.append(Variant(node.precision, tuple(ops), workspace, least, most))
    return tuple(variants)


def _shared_bytes(s: Schedule, part: Sequence[Piece], archs: tuple[int, ...]) -> int:
    """Dynamic shared memory of a block of one launch, on whichever of these architectures needs most."""
    largest = max(len(piece.oc) for piece in part)
    return max(replace(s, use_async=flag).block_bytes(largest) for flag in {arch >= 80 for arch in archs})


def _check_half(layer: ConvLayer, weight: Floats, bias: Floats | None) -> tuple[str, ...]:
    """Notes on rounding weights to fp16.

    Raises UnfitWeightsError where a value overflows, or a weight vanishes or is rounded by more than 2^-11 of itself, as
    numbers below fp16's normal range are: that is more than verification allows.
    """
    changed = 0
    for name, values in (("weight", weight), ("bias", bias)):
        if values is None:
            continue
        with np.errstate(over="ignore", under="ignore"):
            half = values.astype(np.float16)
        overflowing = int((~np.isfinite(half)).sum())
        with np.errstate(invalid="ignore"):
            off = np.abs(half.astype(np.float64) - values) > 2.0**-11 * np.abs(values.astype(np.float64))
        small = 0 if name == "bias" else int(off.sum()) - overflowing
        if overflowing or small:
            raise UnfitWeightsError(
                f"{layer.name}: {overflowing} values of its {name} overflow fp16 and {small} are so small that they vanish in it "
                "or lose digits. Keep the layer dense, or give baked fp32 sums (configuration sums=32), which keeps weights exact."
            )
        changed += int((half.astype(np.float32) != values).sum())
    return (f"{layer.name}: {changed} weights and biases rounded to fp16, by at most 2^-11 of each",) if changed else ()


class Baked:
    """Code generated from the weights. Exact fp32 weights in fp32 (and fp16 with fp32 sums); fp16 weights with half2 sums."""

    name = "baked"
    quick = False

    def automatic(self, device: Device) -> bool:
        """On Hopper only, where it was measured (an H200); elsewhere its predictions are scaled and it is asked for."""
        return device.sm == 90

    def supports(self, layer: ConvLayer, device: Device, precision: Precision) -> Reason | None:
        """`nonzeros.unsupported`, "too-many-nonzeros" past MAX_NNZ, "too-wide" where no tile fits shared memory."""
        reason = rows.unsupported(layer)
        if reason is not None or layer.geometry is None:
            return reason
        g = layer.geometry
        if layer.zeros is not None and layer.zeros.nnz > MAX_NNZ:
            return Reason(
                code="too-many-nonzeros",
                text=f"{layer.zeros.nnz} nonzeros would be {layer.zeros.nnz * 16 >> 20} MB of code",
            )
        if g.oc * g.oh * g.ow * 4 >= 2**31 or g.ic * g.h * g.w * 4 >= 2**31:
            return Reason(code="too-large", text="one image of its input or output is beyond 2 GB")
        try:
            smallest(g, precision, 1, shared_limit((device.sm,)), device.sm >= 80)
        except ValueError:
            return Reason(code="too-wide", text="no tile of its input fits the device's shared memory")
        return None

    def configs(
        self, layer: ConvLayer, device: Device, precision: Precision, batch: int
    ) -> tuple[tuple[Config, Prediction], ...]:
        """The five schedules predicted fastest for this batch; fp16 offers half2 and fp32 sums."""
        if layer.geometry is None or layer.zeros is None:
            raise ValueError(f"{layer.name}: a prediction needs geometry and zeros")
        nnz = layer.zeros.nnz
        c = ceilings(device)
        found = ranked(
            layer.geometry, precision, batch, nnz, c, (device.sm,), 5, (16,) if precision == "fp32" else (16, 32)
        )
        source = f"baked code, bounds counted from shape and nonzeros; ceilings {c.source}"
        result = [(to_config(s), Prediction(us=round(us, 2), bound=bound, source=source)) for s, us, bound in found]
        known = _winner(layer.geometry, precision, device, batch, nnz, (device.sm,), (16,))
        if known is None:
            return tuple(result)
        s = from_config(layer.geometry, precision, known.config)
        us, bound = time_us(estimate(s, nnz, batch), c)
        if abs(layer.sparsity - (1 - known.density)) < 0.015 and batch in (1, 32):
            us, source = known.us, f"measured on an H200 with random weights, {1 - known.density:.0%} zeros"
        first = (to_config(s), Prediction(us=round(us, 2), bound=bound, source=source))
        # It won against these on the device: no prediction of theirs may come before it.
        others = [
            (config, predicted.model_copy(update={"us": max(predicted.us, first[1].us)}))
            for config, predicted in result if config != first[0]
        ]  # fmt: skip
        return (first, *others)

    def build(
        self,
        layer: ConvLayer,
        weight: Floats,
        bias: Floats | None,
        device: Device,
        config: Config,
        options: BuildOptions,
    ) -> Built:
        """PTX per architecture (the device's where the options name none), cubins too where the options ask.

        An empty config (or one that only says `sums`) takes the schedule predicted fastest at the options' batch, and,
        for layers of at most SMALL_NNZ nonzeros, another one for small batches. Deterministic.
        """
        g = rows.checked_geometry(layer, weight, bias)
        archs = tuple(sorted(set(options.archs))) or (device.sm,)
        precision = options.precision
        notes = _check_half(layer, weight, bias) if mode_of(precision, config) == "h2" else ()
        started = time.perf_counter()
        count = int(np.count_nonzero(weight))
        entries = _entries(g, precision, device, config, options, count, archs)
        node = SparseConv(
            layer=layer.name, kernel=self.name, geometry=g, epilogue=layer.epilogue, precision=precision,
            constants=(np.zeros(1, np.int32),),
        )  # fmt: skip
        compiled = entries[0][0].schedule.geometry
        weights = nonzeros(weight, compiled)
        plan = _plan(entries, weights, node, archs)
        images = [
            Image(arch, precision, "ptx", self._text(weights, bias, layer, entries, arch).encode("ascii"))
            for arch in archs
        ]
        record = {
            "nnz": float(count), "entries": float(len(entries)), "ptx_bytes": float(sum(len(image.data) for image in images)),
            "emit_s": time.perf_counter() - started,
        }  # fmt: skip
        if options.assemble:
            try:
                made = assemble_many([(image.data, image.arch) for image in images])
            except MachineError as error:
                notes = (*notes, f"{layer.name}: PTX alone, for the driver to assemble: {error}")
            else:
                images += [
                    Image(image.arch, precision, "cubin", m.cubin) for image, m in zip(images, made, strict=False)
                ]
                record |= {
                    "assemble_s": sum(m.seconds for m in made), "cubin_bytes": float(sum(len(m.cubin) for m in made)),
                    "registers": float(max(m.registers for m in made)), "spill_bytes": float(max(m.spill_bytes for m in made)),
                }  # fmt: skip
        return Built(replace(node, plan=plan, images=tuple(images)), notes, record)

    def _text(
        self,
        weights: Nonzeros,
        bias: Floats | None,
        layer: ConvLayer,
        entries: Sequence[tuple[Entry, int, int]],
        arch: int,
    ) -> str:
        fitting = [Entry(entry.name, _for_arch(entry.schedule, arch)) for entry, _, _ in entries]
        return module(fitting[0].schedule.geometry, weights, bias, layer.epilogue, fitting, arch, ptx_version(arch))

    def unpack(self, node: SparseConv) -> tuple[Floats, Floats | None]:
        """Weight and bias read from the shipped PTX itself (fp16-rounded where sums are half2).

        Raises ValueError for another kernel's node, naming it, and for a text that does not say whole weights.
        """
        if node.kernel != self.name:
            raise ValueError(f"{node.layer}: made by kernel {node.kernel}, not {self.name}")
        return read_weights(node)

    def reference(
        self, node: SparseConv, x: NDArray[np.float64], residual: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Output [N, oc, oh, ow] by the weights that the code holds."""
        weight, bias = self.unpack(node)
        return rows.finish(_without_bias(node), conv2d(x, weight, bias, node.geometry), residual)


def _without_bias(node: SparseConv) -> SparseConv:
    # conv2d has added it already.
    return replace(node, epilogue=node.epilogue.model_copy(update={"bias": False}))


def _for_arch(s: Schedule, arch: int) -> Schedule:
    return replace(s, use_async=s.use_async and arch >= 80)


BAKED = Baked()
