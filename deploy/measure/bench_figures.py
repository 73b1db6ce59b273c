"""A bench's pictures as inline SVG: latency bars, the waterfall of layers, speed-up over sparsity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsedeploy.figures import (
    DENSE,
    DENSE_PALE,
    GRID,
    INK,
    MUTED,
    SPARSE,
    SPARSE_PALE,
    Format,
    as_svg,
    canvas,
    short_names,
)
from sparsedeploy.measure.results import Case, LayerTime

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALL_STEP = 0.004
"""Steps that change the total by less than this share are shown as one."""
MARKERS = ("s", "o", "D", "^", "v", "P")


@dataclass(frozen=True)
class SweepMark:
    """Speed-up at one sparsity; low and high are None for what was predicted."""

    sparsity: float
    ratio: float
    low: float | None = None
    high: float | None = None


def format_ms(ms: float) -> str:
    """Milliseconds to three digits: `0.340`, `4.11`, `15.2`, `1,520`."""
    return f"{ms:,.0f}" if ms >= 99.95 else f"{ms:#.3g}"


def latency_svg(case: Case, form: Format, name: str) -> str:
    """Median GPU Compute Time of every variant with its 95 % interval; the headline's two are solid."""
    timings = sorted(case.timings, key=lambda timing: timing.gpu_compute.median_ms)
    rows = [
        _Bar(
            timing.name, 0.0, timing.gpu_compute.median_ms, format_ms(timing.gpu_compute.median_ms),
            _colour(timing.model == "sparse", timing.name in (case.best, case.baseline)),
            timing.name in (case.best, case.baseline), timing.interval_ms,
        )
        for timing in timings
    ]  # fmt: skip
    label = f"GPU Compute Time at batch {case.batch}, median, milliseconds"
    return _bars_svg(rows, label, form, name)


def waterfall_svg(case: Case, form: Format, name: str) -> str:
    """From the baseline's time down to the sparse model's: what each layer takes off, in the network's order, microseconds."""
    dense, sparse = (sum(getattr(layer, key) for layer in case.layers) for key in ("dense_us", "sparse_us"))
    rows = [_Bar("all steps, dense", 0.0, dense, f"{dense:,.0f}", DENSE, True)]
    at = dense
    for label, change, steps_sparse in _steps(case.layers, SMALL_STEP * dense):
        colour = _colour(steps_sparse, True) if change <= 0 else DENSE_PALE
        rows.append(_Bar(label, at + min(change, 0.0), abs(change), f"{change:+,.1f}", colour, False))
        at += change
    rows.append(_Bar("all steps, sparse", 0.0, sparse, f"{sparse:,.0f}", SPARSE, True))
    return _bars_svg(rows, f"microseconds per inference at batch {case.batch}, measured step by step", form, name)


def _steps(layers: Sequence[LayerTime], small: float) -> list[tuple[str, float, bool]]:
    """Label, change in time, whether it runs sparse; what hardly changes the total as one step at the end."""
    changes = [(layer, layer.sparse_us - layer.dense_us) for layer in layers]
    shown = [(layer.name, change, layer.sparse) for layer, change in changes if abs(change) >= small]
    rest = [change for _, change in changes if abs(change) < small]
    return [*shown, *([(f"{len(rest)} others", sum(rest), False)] if rest else [])]


def sweep_svg(
    measured: dict[int, list[SweepMark]], predicted: Sequence[SweepMark], now: float | None, form: Format, name: str
) -> str:
    """Speed-up over sparsity, density on a logarithmic axis: measured per batch with intervals, predicted hollow.

    `now` is the sparsity that the model has.
    """
    marks = [mark for each in measured.values() for mark in each] + list(predicted)
    with canvas(form, form.width * (0.5 if form.names_beside else 0.85)) as (figure, axes):
        densities = [1 - mark.sparsity for mark in marks] + ([] if now is None or now >= 1 else [1 - now])
        left, right = max(densities) * 1.25, min(densities) / 1.6
        tops = [mark.high or mark.ratio for mark in marks] + [1.0]
        lows = [mark.low or mark.ratio for mark in marks] + [1.0]
        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(lows) / 1.25, max(tops) * 1.35))
        _sweep_axes(axes, [mark.sparsity for mark in marks])
        axes.axhline(1.0, color=DENSE, linewidth=1.4, zorder=3)
        axes.annotate(
            "dense", (left, 1.0), xytext=(3, 3), textcoords="offset points", color=DENSE, ha="left", va="bottom"
        )
        if now is not None and 0 < now < 1:
            axes.axvline(1 - now, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=2)
            axes.annotate(
                "as it is", (1 - now, axes.get_ylim()[0]), xytext=(3, 3), textcoords="offset points", color=MUTED,
                ha="left", va="bottom",
            )  # fmt: skip
        titles: dict[str, list[str]] = {}
        if predicted:
            gid = f"{name}-{form.name}-predicted"
            axes.plot(
                [1 - mark.sparsity for mark in predicted], [mark.ratio for mark in predicted], linestyle=(0, (2, 3)),
                color=MUTED, marker="o", markersize=5, markerfacecolor="none", markeredgecolor=MUTED, gid=gid, zorder=3,
            )  # fmt: skip
            titles[gid] = [f"{mark.sparsity:.1%}: {mark.ratio:.3g}x predicted" for mark in predicted]
        for marker, (batch, series) in zip(MARKERS * len(measured), sorted(measured.items()), strict=False):
            _draw_series(axes, series, marker, batch)
        return as_svg(figure, f"{name}-{form.name}", "Speed-up over sparsity", titles)


def _sweep_axes(axes: Axes, sparsities: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    shown = sorted({round(sparsity, 4) for sparsity in sparsities})
    kept: list[float] = []
    for sparsity in shown:  # labels need room: a fifth of an octave apart
        if not kept or math.log((1 - kept[-1]) / max(1 - sparsity, 1e-6)) > 0.25:
            kept.append(sparsity)
    axes.xaxis.set_major_locator(FixedLocator([1 - sparsity for sparsity in kept]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda density, _: f"{100 * (1 - density):.3g} %"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=2, subs=(1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}x"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("zeros, share of the pruned weights")
    axes.set_ylabel("times as fast as dense")
    axes.grid(color=GRID, linewidth=0.7)
    axes.tick_params(which="both", length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _draw_series(axes: Axes, series: Sequence[SweepMark], marker: str, batch: int) -> None:
    x, y = [1 - mark.sparsity for mark in series], [mark.ratio for mark in series]
    below = [mark.ratio - (mark.low if mark.low is not None else mark.ratio) for mark in series]
    above = [(mark.high if mark.high is not None else mark.ratio) - mark.ratio for mark in series]
    axes.errorbar(
        x, y, yerr=[below, above], color=SPARSE, linewidth=1.4, marker=marker, markersize=5, ecolor=SPARSE, capsize=2,
        zorder=5,
    )  # fmt: skip
    axes.annotate(
        f"batch {batch}", (x[-1], y[-1]), xytext=(6, 0), textcoords="offset points", color=INK, ha="left", va="center"
    )


@dataclass(frozen=True)
class _Bar:
    label: str
    start: float
    length: float
    text: str
    colour: str
    bold: bool
    interval: tuple[float, float] | None = None


def _colour(sparse: bool, solid: bool) -> str:
    return (SPARSE if solid else SPARSE_PALE) if sparse else (DENSE if solid else DENSE_PALE)


def _bars_svg(rows: Sequence[_Bar], label: str, form: Format, name: str) -> str:
    row = 0.24 if form.names_beside else 0.4
    height = row * max(len(rows), 1) + 0.5
    with canvas(form, height) as (figure, axes):
        margin = 2.75 if form.names_beside else 0.1
        figure.subplots_adjust(
            left=margin / form.width, right=1 - 0.1 / form.width, top=1 - 0.43 / height, bottom=0.07 / height
        )
        limit = 1.2 * max([bar.start + bar.length for bar in rows] + [1e-9])
        axes.set(xlim=(0, limit), ylim=(max(len(rows), 1) - 0.5, -0.5), yticks=[])
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_xlabel(label)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.tick_params(length=0)
        for side in ("left", "right", "bottom", "top"):
            axes.spines[side].set_visible(False)
        _draw(axes, rows, limit, form)
        return as_svg(figure, f"{name}-{form.name}", label, {})


def _draw(axes: Axes, rows: Sequence[_Bar], limit: float, form: Format) -> None:
    gap = 3 * limit / (axes.get_window_extent().width * 72 / axes.figure.dpi)
    names = short_names([bar.label for bar in rows], 38 if form.names_beside else 52)
    for i, (bar, label) in enumerate(zip(rows, names, strict=True)):
        if form.names_beside:
            axes.text(-2 * gap, i, label, ha="right", va="center", color=INK, parse_math=False)
            thick, centre = 0.66, float(i)
        else:
            axes.text(0, i - 0.28, label, ha="left", va="center", color=INK, parse_math=False)
            thick, centre = 0.4, i + 0.14
        axes.barh(centre, bar.length, left=bar.start, height=thick, color=bar.colour, linewidth=0)
        end = bar.start + bar.length
        if bar.interval:
            axes.plot(bar.interval, [centre, centre], color=INK, linewidth=1.0)
            end = max(end, bar.interval[1])
        axes.text(
            end + gap, centre, bar.text, va="center", fontsize=form.points - 1.0, color=INK if bar.bold else MUTED,
            fontweight="bold" if bar.bold else "normal", parse_math=False,
        )  # fmt: skip
