"""`bench --sweep`: prune a model to rising sparsities, convert and measure each, for those who decide how far to prune."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from sparsedeploy import bundle
from sparsedeploy.convert import Conversion, convert
from sparsedeploy.convert import Request as Conversions
from sparsedeploy.converters.fold_constants import fold_constants
from sparsedeploy.converters.load import load, save
from sparsedeploy.converters.prune import prune
from sparsedeploy.devices import Device
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.gpu import closest
from sparsedeploy.layer import ConvLayer, Precision
from sparsedeploy.measure.bench import Request, Tools, bench, commit, machine, tools_here
from sparsedeploy.measure.results import Results, Settings, SweepLayer, SweepPoint
from sparsedeploy.plan import DENSE, totals
from sparsedeploy.reading import file_hash

POINTS = 6
METHOD = "magnitude-global"
SAME = 0.002
"""Points whose zeros differ by less are one."""


@dataclass(frozen=True)
class Sweep:
    """What to sweep over."""

    source: Path
    """A model file, or a bundle: its dense model is pruned further."""
    sparsities: tuple[float, ...]
    bench: Request
    """How each point is measured; its bundle is replaced."""
    precision: Precision | None = None
    """None: the bundle's, fp32 for a file."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    """Passed to convert: '*=sparse' forces layers."""


def parse_sweep(text: str) -> tuple[float, ...]:
    """`0.8:0.99` (six points, evenly in the logarithm of density), `0.8:0.99:4`, or `0.8,0.9,0.95`; raises InputError."""
    number = r"(0(?:\.[0-9]+)?|\.[0-9]+)"
    if found := re.fullmatch(rf"{number}:{number}(?::([0-9]{{1,2}}))?", text.strip()):
        low, high, count = float(found[1]), float(found[2]), int(found[3] or POINTS)
        if low < high and count >= 2:
            first, step = 1 - low, ((1 - high) / (1 - low)) ** (1 / (count - 1))
            return tuple(round(1 - first * step**i, 4) for i in range(count))
    elif re.fullmatch(rf"{number}(,{number})*", text.strip()):
        values = sorted({float(part) for part in text.split(",")})
        if values:
            return tuple(values)
    raise InputError(
        f"--sweep {text}: needed LOW:HIGH (as in 0.8:0.99), LOW:HIGH:POINTS, or shares of zeros with commas between "
        "(0.8,0.9,0.95), each from 0 to below 1."
    )


def sweep(request: Sweep, tools: Tools | None = None) -> tuple[Results, tuple[ConvLayer, ...]]:
    """Measure every point; returns the results and the layers of the source. Nothing is written.

    Points that the source exceeds already (it has more zeros) are left out and say so. Raises MachineError without a
    GPU, and what prune, convert and bench raise.
    """
    model, precision = _source(request)
    name, model_hash = _identity(request.source)
    tools = tools or tools_here()
    if tools.gpu is None:
        raise MachineError(
            f"{request.source}: bench --sweep prunes, converts and measures on an NVIDIA GPU, and this machine shows none. Run it "
            "on the device. Without one, `sparsedeploy scan MODEL --impose-sparsity 0.95` predicts each layer at a sparsity."
        )
    device = closest(tools.gpu)
    if device is None:
        raise MachineError(
            f"{request.source}: no device row of compute capability {tools.gpu.sm / 10} to plan for ({tools.gpu.name}). Convert "
            "for the closest device with --target, and bench that bundle."
        )
    points: list[SweepPoint] = []
    measured: Results | None = None
    layers: tuple[ConvLayer, ...] = ()
    with tempfile.TemporaryDirectory(prefix="sparsedeploy-sweep-") as folder:
        for number, asked in enumerate(request.sparsities):
            request.bench.tell(f"{asked:.1%} zeros: pruning and converting")
            done, share = _converted(request, model, precision, device, asked, Path(folder) / str(number))
            if share > asked + SAME and points and abs(points[-1].sparsity - share) < SAME:
                continue  # the source has more zeros than this and the one before
            result = None if done.nothing else bench(replace(request.bench, bundle=done.out), tools)
            measured = result or measured
            points.append(_point(asked, share, done, result))
            layers = done.scan.layers
    results = Results(
        commit=commit(),
        made=datetime.now(timezone.utc).replace(microsecond=0).isoformat(),
        model=name,
        model_hash=model_hash,
        target=device.name,
        precision=precision,
        settings=measured.settings if measured else _settings(request.bench),
        machine=machine(tools.gpu, tools.probe),
        sweep=tuple(points),
    )
    return results, layers


def _source(request: Sweep) -> tuple[Path, Precision]:
    source = request.source
    if not source.is_dir():
        return source, request.precision or "fp32"
    manifest = bundle.read_manifest(source)
    if request.precision not in (None, manifest.precision):
        raise InputError(
            f"--precision {request.precision}: {source} is a bundle in {manifest.precision}, and its model is pruned as it is. Give "
            "the model file instead to sweep in another precision."
        )
    return source / bundle.DENSE_MODEL, manifest.precision


def _identity(source: Path) -> tuple[str, str]:
    """Name and hash of the model; a bundle's are those of the file it was made of."""
    if source.is_dir():
        manifest = bundle.read_manifest(source)
        return manifest.model, manifest.model_hash
    return source.name, file_hash(source)


def _converted(
    request: Sweep, model: Path, precision: Precision, device: Device, asked: float, folder: Path
) -> tuple[Conversion, float]:
    """The model pruned to a share of zeros, converted; and the share it has now."""
    folder.mkdir(parents=True)
    loaded = load(model)
    fold_constants(loaded)
    report = prune(loaded, asked, METHOD, (), 0)
    pruned = folder / "model.onnx"
    save(loaded, pruned)
    shapes, batch = dict(request.shapes), max(request.bench.batches or (1,))
    if request.source.is_dir():
        manifest = bundle.read_manifest(request.source)
        shapes = {**manifest.inputs, **shapes}
    done = convert(
        Conversions(
            pruned, device, folder / "out", precision, None if shapes else batch, shapes, layers=request.layers,
            tell=request.bench.tell,
        )
    )  # fmt: skip
    return done, report.sparsity


def _point(asked: float, share: float, done: Conversion, result: Results | None) -> SweepPoint:
    total = totals(done.plan.layers)
    sparsities = {layer.name: layer.sparsity for layer in done.scan.layers}
    return SweepPoint(
        asked=asked,
        sparsity=share,
        sparse_layers=total.sparse_layers,
        predicted=total.dense_us / total.planned_us if total.planned_us > 0 else None,
        cases=result.cases if result else (),
        layers=tuple(
            SweepLayer(
                name=entry.name, sparsity=sparsities[entry.name],
                dense_us=entry.predicted.us_dense if entry.predicted else None,
                sparse_us=entry.predicted.us_sparse if entry.predicted else None,
                crossover=entry.crossover, sparse=entry.choice != DENSE,
            )
            for entry in done.plan.layers
        ),
        note=done.nothing or ("" if share <= asked + SAME else f"the model has {share:.1%} zeros already"),
    )  # fmt: skip


def _settings(request: Request) -> Settings:
    """Where no point was measured."""
    return Settings(
        batches=request.batches or (1,), runners=request.runners, arithmetics=request.arithmetics,
        duration_s=request.schedule.duration_s, warmup_s=request.schedule.warmup_s, rounds=request.schedule.rounds,
        seed=request.seed, limits=request.limits,
    )  # fmt: skip


def advice(points: Sequence[SweepPoint]) -> list[str]:
    """Which layers to prune further, and how far: those still dense at the last point that more zeros would make pay."""
    if not points:
        return []
    waiting = [
        (layer.dense_us or 0.0, f"{layer.name}: has {layer.sparsity:.1%}, pays above {layer.crossover:.1%} (predicted)")
        for layer in points[-1].layers
        if not layer.sparse and layer.crossover is not None and layer.crossover > layer.sparsity
    ]
    return [text for _, text in sorted(waiting, key=lambda entry: -entry[0])]
