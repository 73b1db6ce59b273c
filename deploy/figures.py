"""The report's pictures as inline SVG: drawn by matplotlib, coloured by the page, the same bytes from run to run."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

from sparsedeploy.devices import Device
from sparsedeploy.layer import Precision
from sparsedeploy.roofline import format_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch

INK, MUTED, GRID, DENSE, SPARSE, DENSE_PALE, SPARSE_PALE = (f"#01010{i}" for i in range(1, 8))
"""Stand-ins: matplotlib wants colours, the page wants variables that follow light and dark."""
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    DENSE: "dense",
    SPARSE: "sparse",
    DENSE_PALE: "dense-pale",
    SPARSE_PALE: "sparse-pale",
}

Form = Literal["direct", "winograd", "sparse"]
MARKERS: dict[Form, str] = {"direct": "o", "winograd": "D", "sparse": "s"}


@dataclass(frozen=True)
class Point:
    """One form of one layer on the roofline: FLOP/byte, TFLOP/s, and what to say when pointed at."""

    form: Form
    intensity: float
    tflops: float
    chosen: bool
    title: str


@dataclass(frozen=True)
class Bars:
    """Dense and sparse time of one layer, microseconds; None where there is no prediction."""

    name: str
    dense_us: float | None
    sparse_us: float | None
    sparse_chosen: bool


@dataclass(frozen=True)
class Format:
    """Width in inches and how the picture adapts to it; text is drawn at `points` and scales with the page."""

    name: str
    width: float
    points: float
    names_beside: bool


WIDE = Format("wide", 8.4, 8.0, names_beside=True)
NARROW = Format("narrow", 3.9, 7.5, names_beside=False)


def format_rate(tflops: float) -> str:
    """FLOP/s in the unit that reads best."""
    return f"{tflops:.4g} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.4g} GFLOP/s"


def roofline_svg(
    device: Device, precision: Precision, points: Sequence[Point], form: Format, name: str = "roofline"
) -> str:
    """The device's roofs, log-log, with the layers on them. `name` tells pictures of one page apart."""
    with canvas(form, form.width * (0.56 if form.names_beside else 0.95)) as (figure, axes):
        unit = 1.0 if device.fp32_tflops >= 1 else 1e3
        _frame_roofline(axes, device, precision, points, unit, form)
        _draw_roofs(axes, device, precision, unit, form)
        titles = _draw_points(axes, points, unit, "" if name == "roofline" else f"{name}-{form.name}-")
        return as_svg(figure, f"{name}-{form.name}", f"Roofline of the model on {device.title}", titles)


def times_svg(bars: Sequence[Bars], basis: str, form: Format) -> str:
    """Two horizontal bars a layer, dense above sparse; the chosen one is solid and its number bold."""
    row = 0.29 if form.names_beside else 0.42
    height = row * max(len(bars), 1) + 0.5
    with canvas(form, height) as (figure, axes):
        margin = 2.75 if form.names_beside else 0.1
        figure.subplots_adjust(
            left=margin / form.width, right=1 - 0.1 / form.width, top=1 - 0.43 / height, bottom=0.07 / height
        )
        limit = _time_limit(bars)
        axes.set(xlim=(0, limit), ylim=(max(len(bars), 1) - 0.5, -0.5), yticks=[])
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.xaxis.set_major_formatter(lambda value, _: format_us(value) if value else "0")
        axes.set_xlabel(f"microseconds per layer, {basis}")
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        if all(bar.dense_us is None and bar.sparse_us is None for bar in bars):
            axes.set(xticks=[], xlabel="")
        axes.tick_params(length=0)
        for side in ("left", "right", "bottom", "top"):
            axes.spines[side].set_visible(False)
        _draw_bars(axes, bars, limit, form)
        return as_svg(figure, f"times-{form.name}", f"Time per layer, dense and sparse, {basis}", {})


def _draw_points(axes: Axes, points: Sequence[Point], unit: float, prefix: str) -> dict[str, list[str]]:
    """Plot the points, one artist per look; returns the titles of each artist's marks by its id.

    A point outside the frame is drawn at its edge: its title still has its numbers.
    """
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    looks: dict[tuple[Form, bool], list[Point]] = {}
    for point in points:
        looks.setdefault((point.form, point.chosen), []).append(point)
    titles = {}
    for (form, chosen), group in sorted(looks.items()):
        colour, gid = SPARSE if form == "sparse" else DENSE, f"{prefix}{form}-{'chosen' if chosen else 'not'}"
        axes.plot(
            [min(max(point.intensity, left), right) for point in group],
            [min(max(point.tflops * unit, bottom), top) for point in group],
            linestyle="none", marker=MARKERS[form], markersize=5.5, markerfacecolor=colour if chosen else "none",
            markeredgecolor=colour, markeredgewidth=1.0, alpha=0.85, gid=gid, zorder=4 + chosen,
        )  # fmt: skip
        titles[gid] = [point.title for point in group]
    return titles


def _frame_roofline(
    axes: Axes, device: Device, precision: Precision, points: Sequence[Point], unit: float, form: Format
) -> None:
    from matplotlib.ticker import NullLocator

    room_for_labels = 5 if form.names_beside else 12
    ridges = [device.ridge_point("fp32"), device.ridge_point("fp16")]
    tops = [device.fp32_tflops, device.fp16_tflops, device.throughput.dense_tflops[precision]]
    xs = [*(max(point.intensity, min(ridges) * 1e-4) for point in points), *ridges, min(ridges) / 8]
    left, right = min(xs) / 1.5, max(xs) * room_for_labels
    ys = [
        *(max(point.tflops, max(tops) * 1e-5) for point in points),
        max(left, min(ridges) / 50) * device.bandwidth_gbs / 1e3,
    ]
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(ys) / 1.5 * unit, max(tops) * 2.2 * unit))
    axes.set_xlabel("arithmetic intensity, FLOP per byte moved")
    axes.set_ylabel("TFLOP/s" if unit == 1.0 else "GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axis.set_minor_locator(NullLocator())
    axes.grid(color=GRID, linewidth=0.7)
    axes.tick_params(which="both", length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _draw_roofs(axes: Axes, device: Device, precision: Precision, unit: float, form: Format) -> None:
    low, high = axes.get_xlim()
    slope = device.bandwidth_gbs / 1e3 * unit
    flat = _flat_roofs(device, precision, form)
    highest = max(tflops for tflops, _, _ in flat) * unit
    axes.plot([low, highest / slope], [low * slope, highest], color=INK, linewidth=1.4, zorder=3)
    bottom = max(low, axes.get_ylim()[0] / slope)
    ridge = device.ridge_point(precision)
    at = math.exp(0.62 * math.log(bottom) + 0.38 * math.log(ridge))
    axes.text(
        at, at * slope * 1.12, f"{device.bandwidth_gbs:g} GB/s", color=INK, rotation=_slope_angle(axes),
        rotation_mode="anchor", ha="center", va="bottom", parse_math=False,
    )  # fmt: skip
    sides = _label_sides(axes, [tflops for tflops, _, _ in flat])
    for tflops, label, style in flat:
        y, above = tflops * unit, sides[tflops]
        axes.plot(
            [y / slope, high], [y, y], color=MUTED if style else INK, linewidth=1.2, linestyle=style or "-", zorder=3
        )
        axes.annotate(
            label, (high, y), xytext=(-2, 3 if above else -3), textcoords="offset points", color=INK, ha="right",
            va="bottom" if above else "top", parse_math=False,
        )  # fmt: skip
    peak = device.peak_tflops(precision) * unit
    axes.plot([ridge, ridge], [axes.get_ylim()[0], peak], color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=2)
    axes.annotate(
        f"ridge {ridge:.2f}", (ridge, axes.get_ylim()[0]), xytext=(4, 5), textcoords="offset points", color=MUTED,
        ha="left", va="bottom", parse_math=False,
    )  # fmt: skip


def _label_sides(axes: Axes, heights: Sequence[float]) -> dict[float, bool]:
    """Whether each roof's label goes above its line: it does unless the next roof is too near for a line of text."""
    bottom, top = axes.get_ylim()
    decades_a_line = 1.7 * 8 / (axes.get_window_extent().height * 72 / axes.figure.dpi) * math.log10(top / bottom)
    sides: dict[float, bool] = {}
    next_height, next_above = math.inf, True
    for height in sorted(heights, reverse=True):
        room = math.log10(next_height / height) / (1 if next_above else 2)
        next_height, next_above = height, room >= decades_a_line
        sides[height] = next_above
    return sides


LineStyle = tuple[int, tuple[int, ...]] | None


def _flat_roofs(device: Device, precision: Precision, form: Format) -> list[tuple[float, str, LineStyle]]:
    """(TFLOP/s, label, dashes) of each horizontal roof; the plan's own CUDA-core peak is the solid one."""
    where = " (CUDA cores)" if form.names_beside else ""
    dense = device.throughput.dense_tflops[precision]
    roofs: list[tuple[float, str, LineStyle]] = []
    if device.fp32_tflops == device.fp16_tflops:
        roofs.append((device.fp32_tflops, f"fp32, fp16 peak {format_rate(device.fp32_tflops)}{where}", None))
    else:
        peaks: tuple[tuple[Precision, float], ...] = (("fp32", device.fp32_tflops), ("fp16", device.fp16_tflops))
        for name, tflops in peaks:
            roofs.append(
                (tflops, f"{name} peak {format_rate(tflops)}{where}", None if name == precision else (0, (6, 3)))
            )
    assumed = ", assumed" if form.names_beside else ""
    roofs.append((dense, f"dense{assumed} {format_rate(dense)}", (0, (1, 2))))
    return roofs


def _slope_angle(axes: Axes) -> float:
    """Angle on paper of a line of slope 1 in log-log axes, degrees."""
    (x0, y0), (x1, y1) = axes.transAxes.transform([(0, 0), (1, 1)])
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    per_x, per_y = (x1 - x0) / math.log(right / left), (y1 - y0) / math.log(top / bottom)
    return math.degrees(math.atan2(per_y, per_x))


def _time_limit(bars: Sequence[Bars]) -> float:
    """Where the axis ends: a hopeless sparse time (no zeros) must not flatten every other bar."""
    dense = [bar.dense_us for bar in bars if bar.dense_us is not None]
    sparse = [bar.sparse_us for bar in bars if bar.sparse_us is not None]
    chosen = [bar.sparse_us for bar in bars if bar.sparse_us is not None and bar.sparse_chosen]
    longest = max([*dense, *chosen, min(max(sparse, default=0.0), 2 * max(dense, default=0.0)), 1e-3])
    return 1.16 * longest


def _draw_bars(axes: Axes, bars: Sequence[Bars], limit: float, form: Format) -> None:
    box = axes.get_window_extent()
    gap = 3 * limit / (box.width * 72 / axes.figure.dpi)
    """3 points in microseconds."""
    boxes: dict[str, list[tuple[float, float]]] = {}
    names = short_names([bar.name for bar in bars], 38 if form.names_beside else 52)
    for i, (bar, name) in enumerate(zip(bars, names, strict=True)):
        if form.names_beside:
            axes.text(-2 * gap, i, name, ha="right", va="center", color=INK, parse_math=False)
            thick, centres = 0.34, (i - 0.19, i + 0.19)
        else:
            axes.text(0, i - 0.31, name, ha="left", va="center", color=INK, parse_math=False)
            thick, centres = 0.26, (i - 0.01, i + 0.27)
        if bar.dense_us is None and bar.sparse_us is None:
            axes.text(gap, centres[0], "no prediction", va="center", color=MUTED, fontstyle="italic")
        for us, centre, colour, chosen in (
            (bar.dense_us, centres[0], DENSE_PALE if bar.sparse_chosen else DENSE, not bar.sparse_chosen),
            (bar.sparse_us, centres[1], SPARSE if bar.sparse_chosen else SPARSE_PALE, bar.sparse_chosen),
        ):
            if us is None:
                continue
            length = limit * 0.82 if us > limit else us
            boxes.setdefault(colour, []).append((length, centre))
            axes.text(
                length + gap, centre, f"› {format_us(us)}, bar cut" if us > limit else format_us(us), va="center",
                fontsize=form.points - 1.2, color=INK if chosen else MUTED, fontweight="bold" if chosen else "normal",
                parse_math=False,
            )  # fmt: skip
    for colour, ends in boxes.items():
        axes.add_patch(rectangles(ends, thick, colour))


def rectangles(ends: Sequence[tuple[float, float]], thick: float, colour: str) -> PathPatch:
    """All bars of one look as a single path: (length, centre) each, from 0."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    vertices = [
        corner
        for length, y in ends
        for corner in (
            (0.0, y - thick / 2), (length, y - thick / 2), (length, y + thick / 2), (0.0, y + thick / 2), (0.0, 0.0),
        )
    ]  # fmt: skip
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(ends)
    return PathPatch(Path(vertices, codes), facecolor=colour, linewidth=0)


def short_names(names: Sequence[str], length: int) -> list[str]:
    """Names as the chart shows them: whole when all fit, else without the folders that all share at either end."""
    names = ["".join(letter if letter.isprintable() else " " for letter in name) for name in names]
    if len(names) > 1 and max(map(len, names)) > length:
        paths = [name.split("/") for name in names]
        first, last = _shared(paths), _shared([path[::-1] for path in paths])
        names = ["/".join(path[first : len(path) - last]) or name for path, name in zip(paths, names, strict=True)]
    return [_cut(name, length) for name in names]


def _shared(paths: Sequence[Sequence[str]]) -> int:
    """How many leading parts all paths have in common."""
    return next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), min(map(len, paths)))


def _cut(name: str, length: int) -> str:
    """Cut out the middle: both ends of a layer's name tell it from its neighbours."""
    if len(name) <= length:
        return name
    tail = length * 2 // 3
    return f"{name[: length - tail - 1]}…{name[-tail:]}"


@contextmanager
def canvas(form: Format, height: float) -> Iterator[tuple[Figure, Axes]]:
    """A bare figure under fixed settings: what a user's matplotlibrc says must not change the report."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing", category=UserWarning)
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none", "font.size": form.points, "axes.labelcolor": MUTED, "xtick.color": MUTED,
                "ytick.color": MUTED, "axes.labelsize": form.points, "xtick.labelsize": form.points,
                "ytick.labelsize": form.points, "axes.axisbelow": True, "svg.image_inline": True,
            }
        )  # fmt: skip
        figure = Figure(figsize=(form.width, height))
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        left, bottom = (0.62, 0.48) if form.names_beside else (0.52, 0.46)
        figure.subplots_adjust(
            left=left / form.width, right=1 - 0.22 / form.width, bottom=bottom / height, top=1 - 0.08 / height
        )
        yield figure, axes


def as_svg(figure: Figure, salt: str, label: str, titles: Mapping[str, Sequence[str]]) -> str:
    """The figure as an <svg> element for HTML: no prolog, no metadata, no fixed size, colours as variables."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = salt
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box is not None
    svg = re.sub(r"<svg[^>]*>", f'<svg {box[0]} role="img" aria-label="{escape(label)}">', svg, count=1)
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r" *<defs>\s*<style.*?</style>\s*</defs>\n", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", svg)
    for gid, texts in titles.items():
        svg = _with_titles(svg, gid, texts)
    return svg


def _with_titles(svg: str, gid: str, titles: Sequence[str]) -> str:
    """Give each mark of an artist its title, which a browser shows when it is pointed at."""
    head, group, rest = svg.partition(f'<g id="{gid}">')
    parts = re.split(r"(<use [^>]*?)/>", rest, maxsplit=len(titles))
    marks = [f"{mark}><title>{escape(title)}</title></use>" for mark, title in zip(parts[1::2], titles, strict=True)]
    between = parts[0::2]
    return head + group + "".join(text + mark for text, mark in zip(between, [*marks, ""], strict=True))
