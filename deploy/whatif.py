"""What if a model were pruned further: zeros imposed in memory, smallest weights first, and times predicted.

Nothing here is the model's own: imposing zeros without retraining costs accuracy that nobody has measured, so every line and
every record says `imposed`. The table is for those who prune: which layers to prune further, how far, and what each step brings.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparsedeploy.converters.prune import MIN_INPUT_CHANNELS, smallest, zero_count
from sparsedeploy.devices import Device
from sparsedeploy.errors import InputError
from sparsedeploy.layer import ConvLayer, Precision
from sparsedeploy.plan import DENSE, LayerPlan, basis, make_plan, totals
from sparsedeploy.profile import DeviceProfile
from sparsedeploy.reading import Reading, count_zeros
from sparsedeploy.record import Document, Record
from sparsedeploy.roofline import format_us
from sparsedeploy.scan import Scan, summarise

LADDER = (0.8, 0.9, 0.95, 0.98)
"""Sparsities that the table shows besides the one asked for."""
_WHERE = f"every eligible layer of one group and {MIN_INPUT_CHANNELS} or more input channels"
WORTH = 0.005
"""A rung is worth climbing for a layer when that takes at least this share off all convolutions' planned time."""


class WhatIfLayer(Record):
    """One eligible layer at one imposed sparsity. Microseconds, predicted."""

    name: str
    sparsity: float
    """Share of zeros after imposing: at least what was asked for, more where the layer had more."""
    imposed: bool
    """Whether zeros were imposed; False where the layer has that many itself."""
    us_dense: float | None
    us_planned: float | None
    """By the plan's choice."""
    choice: str


class WhatIfPoint(Record):
    """All eligible layers at one imposed sparsity."""

    asked: float
    sparse_layers: int
    dense_us: float
    planned_us: float
    layers: tuple[WhatIfLayer, ...]

    @property
    def gain(self) -> float:
        """Predicted dense over planned time of all convolutions whose times are known."""
        return self.dense_us / self.planned_us if self.planned_us else 1.0


class Advice(Record):
    """What pruning one layer further would bring."""

    name: str
    sparsity_now: float
    crossover: float | None
    """Sparsity above which it is predicted faster sparse."""
    prune_to: float | None
    """The highest rung that still saves at least WORTH more than the one below; None: pruning it further is not worth it."""
    saves_us: float
    """Predicted time saved there, against the plan for the model as it is."""


class WhatIf(Document):
    """The answer of `scan --impose-sparsity`: the model's own scan, and predictions with imposed zeros."""

    imposed_sparsity: float
    note: str
    scan: Scan
    """With zeros imposed; its verdict says so."""
    own: WhatIfPoint
    """The model as it is."""
    points: tuple[WhatIfPoint, ...]
    """Rising sparsities, all imposed."""
    advice: tuple[Advice, ...]
    """Largest saving first."""
    basis: str
    """What the times rest on."""


def parse_sparsity(text: str) -> float:
    """A share of zeros from 0 to below 1; raises InputError."""
    try:
        share = float(text)
    except ValueError:
        share = float("nan")
    if not 0 <= share < 1:
        raise InputError(f"--impose-sparsity {text}: needed a share of zeros from 0 to below 1, as in 0.95.")
    return share


def impose(reading: Reading, sparsity: float) -> tuple[ConvLayer, ...]:
    """The layers with each eligible one's smallest weights counted as zeros, down to that share; the reading stays.

    As `prune` does it: groups and layers of fewer than 8 input channels keep their weights, being small and sensitive.
    """
    return tuple(_imposed(reading, layer, sparsity) for layer in reading.layers)


def _imposed(reading: Reading, layer: ConvLayer, sparsity: float) -> ConvLayer:
    g = layer.geometry
    if not layer.eligible or layer.zeros is None or g is None or layer.sparsity >= sparsity:
        return layer
    if g.group != 1 or g.ic < MIN_INPUT_CHANNELS:
        return layer
    weight, _ = reading.weight(layer.name)
    gone = smallest(np.abs(weight).ravel(), zero_count(weight.size, sparsity)).reshape(weight.shape)
    zeros = count_zeros(np.where(gone, np.float32(0), weight), g.group)
    return layer.model_copy(update={"zeros": zeros})


def _from_here(path: Path) -> Path:
    """As it would be typed: below the working directory without what leads there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def what_if(
    reading: Reading,
    scanned: Scan,
    device: Device,
    precision: Precision,
    sparsity: float,
    profile: DeviceProfile | None = None,
) -> WhatIf:
    """Predict the model as it is, at `sparsity` and at the ladder's rungs. Raises InputError where no layer is eligible."""
    if not any(layer.eligible for layer in reading.layers):
        raise InputError(
            f"{scanned.model}: --impose-sparsity {sparsity:g}: no convolution could run sparse whatever its zeros are; `scan` without "
            "it says why."
        )
    asked = sorted({*LADDER, sparsity})
    imposed = {share: impose(reading, share) for share in asked}
    plan = make_plan(scanned, device, precision, profile)
    own = _point(0.0, reading.layers, reading.layers, plan.layers)
    points = []
    for share in asked:
        layers = imposed[share]
        now = make_plan(scanned.model_copy(update={"layers": layers}), device, precision, profile, crossovers=False)
        points.append(_point(share, reading.layers, layers, now.layers))
    here = next(point for point in points if point.asked == sparsity)
    layers = imposed[sparsity]
    verdict = (
        f"imposed, not the model's own: with at least {sparsity:.1%} zeros in {_WHERE}, {here.sparse_layers} of "
        f"{scanned.summary.convolutions} convolutions would be faster sparse on {device.name} ({precision}, batch {scanned.batch}): all "
        f"convolutions {format_us(here.dense_us)} us dense, {format_us(here.planned_us)} us as planned ({here.gain:.2f}x; as the model is "
        f"{own.gain:.2f}x). {basis(plan)}; what it costs in accuracy nobody knows before retraining."
    )
    return WhatIf(
        imposed_sparsity=sparsity,
        note=f"zeros imposed by magnitude to at least {sparsity:.1%} of {_WHERE}; weights were not retrained",
        scan=scanned.model_copy(
            update={
                "layers": layers, "summary": summarise(layers), "verdict": verdict,
                "notes": (*scanned.notes, f"zeros imposed to at least {sparsity:.1%} of {_WHERE}: not the model's own"),
                "hints": (),
                "next_command": f"sparsedeploy prune {shlex.quote(str(_from_here(reading.model.path)))} --method magnitude-layer --sparsity {sparsity:g}",
            }
        ),
        own=own, points=tuple(points), advice=_advice(own, plan.layers, points), basis=basis(plan),
    )  # fmt: skip


def _point(
    asked: float, before: Sequence[ConvLayer], layers: Sequence[ConvLayer], entries: Sequence[LayerPlan]
) -> WhatIfPoint:
    total = totals(entries)
    rows = []
    for was, layer, entry in zip(before, layers, entries, strict=True):
        if layer.eligible:
            times = entry.predicted
            planned = None if times is None else times.us_dense if entry.choice == DENSE else times.us_sparse
            rows.append(
                WhatIfLayer(
                    name=layer.name, sparsity=layer.sparsity, imposed=layer.sparsity != was.sparsity, us_dense=times.us_dense if times else None,
                    us_planned=planned, choice=entry.choice,
                )
            )  # fmt: skip
    return WhatIfPoint(
        asked=asked, sparse_layers=total.sparse_layers, dense_us=total.dense_us, planned_us=total.planned_us, layers=tuple(rows)
    )  # fmt: skip


def _advice(own: WhatIfPoint, plan: Sequence[LayerPlan], points: Sequence[WhatIfPoint]) -> tuple[Advice, ...]:
    """Per layer the highest rung up to which every step is worth its share of the zeros."""
    crossovers = {entry.name: entry.crossover for entry in plan}
    by_name = {point.asked: {layer.name: layer for layer in point.layers} for point in points}
    found = []
    for layer in own.layers:
        to, saves, least = None, 0.0, WORTH * own.planned_us
        for share, there in by_name.items():
            now = (layer.us_planned or 0.0) - (there[layer.name].us_planned or 0.0)
            if there[layer.name].imposed and now - saves >= least > 0:
                to, saves = share, now
        found.append(
            Advice(
                name=layer.name, sparsity_now=layer.sparsity, crossover=crossovers[layer.name], prune_to=to, saves_us=saves
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda each: -each.saves_us))


# --- words --------------------------------------------------------------------------------------------------------

Part = str | tuple[tuple[str, ...], ...]


def parts(found: WhatIf) -> list[Part]:
    """Lines, and tables whose first row is their head."""
    points = (found.own, *found.points)
    head = (
        "convolution",
        "zeros % now",
        "pays above %",
        "us now",
        *(f"us at {_share(p.asked)}" for p in found.points),
        "prune to",
    )
    table = [head]
    by_name = [{layer.name: layer for layer in point.layers} for point in found.points]
    advised = {each.name: each for each in found.advice}
    for layer in found.own.layers:
        each = advised[layer.name]
        cells = [_cell(there[layer.name]) for there in by_name]
        to = "-" if each.prune_to is None else f"{_share(each.prune_to)} (saves {format_us(each.saves_us)} us)"
        above = "-" if each.crossover is None else f"{100 * each.crossover:.1f}"
        table.append((layer.name, f"{100 * layer.sparsity:.1f}", above, _cell(layer), *cells, to))
    summary = [("", *("as it is" if p is found.own else f"imposed {_share(p.asked)}" for p in points))]
    summary += [
        ("sparse layers", *(str(p.sparse_layers) for p in points)),
        ("all convolutions, us", *(format_us(p.planned_us) for p in points)),
        ("gain over dense", *(f"{p.gain:.2f}x" for p in points)),
    ]
    return [
        f"what if: {found.note}. * dense is faster. prune to: as far as each step saves {WORTH:.1%} of all convolutions. {found.basis}.",
        tuple(table),
        tuple(summary),
        found.scan.verdict,
        f"Next: {found.scan.next_command} -o PRUNED.onnx (a test model: accuracy needs retraining)",
    ]


def _cell(layer: WhatIfLayer) -> str:
    if layer.us_planned is None:
        return "-"
    return f"{format_us(layer.us_planned)}{'*' if layer.choice == DENSE else ''}"


def _share(value: float) -> str:
    return f"{100 * value:g}%"
