"""Redraw Figures 5 to 7 of arXiv 2611.17212 (speed-up, time, roofline over sparsity and output channels) from measurements.

    python scripts/bench_kernels.py measure --cases paper --out kernels.json     on a GPU
    python scripts/reproduce_paper.py kernels.json --out FOLDER                  anywhere

Its two settings: N=32, 32 input channels, 256x256, 48 to 128 output channels; and N=8, 16 input channels, 128x128, 32 to
48 output channels (there a Jetson Nano; here whatever device was measured). Every point is a row of the file: a result
that was checked against float64 and then timed. Without such rows nothing is drawn. The same file gives the same bytes.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_results import LAB_PAPER, Results, Row, Table, read

from sparsedeploy.devices import Device, find
from sparsedeploy.errors import InputError, SparseDeployError
from sparsedeploy.layer import Geometry
from sparsedeploy.models.shapes import work
from sparsedeploy.roofline import dense_work, sparse_work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SETTINGS = {
    "32-": "N=32, 32 input channels, 256x256",
    "16-": "N=8, 16 input channels, 128x128",
}
"""By the start of a work's name in the list `paper`."""
LEAST_POINTS = 2
"""Sparsities that a line needs."""


class Point(NamedTuple):
    """One layer as measured: the fastest fp32 kernel, the paper's own (nan without), and cuDNN in fp32."""

    oc: int
    n: int
    geometry: Geometry
    sparsity: float
    nnz: int
    us: float
    paper_us: float
    dense_us: float


def points(results: Results, start: str) -> list[Point]:
    """The points of one setting, by output channels and sparsity."""
    table, found = Table(results), []
    for entry in work("paper"):
        if not entry.name.startswith(start):
            continue
        (n,), case = entry.batches, f"paper/{entry.name}"
        for sparsity in entry.sparsities:
            row, dense = table.best(case, n, sparsity, "fp32"), table.dense(case, n, "fp32")
            if row is None or math.isnan(dense):
                continue
            found.append(
                Point(entry.geometry.oc, n, entry.geometry, sparsity, row.nnz, row.us, _published(results, row), dense)
            )
    return found


def _published(results: Results, beside: Row) -> float:
    """The time of the paper's Algorithm 1 on the same layer."""
    times = [
        row.us
        for row in results.rows
        if (row.case, row.n, row.sparsity) == (beside.case, beside.n, beside.sparsity) and row.kernel == LAB_PAPER
    ]
    return min(times, default=math.nan)


def lines(found: Sequence[Point]) -> dict[int, list[Point]]:
    """Points by output channels, each a line over sparsity; a line of too few points is left out."""
    by_oc: dict[int, list[Point]] = {}
    for point in sorted(found, key=lambda point: (point.oc, point.sparsity)):
        by_oc.setdefault(point.oc, []).append(point)
    return {oc: line for oc, line in by_oc.items() if len(line) >= LEAST_POINTS}


def _colours(count: int) -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.9 * k / max(1, count - 1))) for k in range(count)]


def _speedups(axes: Axes, by_oc: dict[int, list[Point]]) -> None:
    """Figure 5: cuDNN's time over ours; dashed, over the paper's kernel."""
    for colour, (oc, line) in zip(_colours(len(by_oc)), by_oc.items(), strict=True):
        zeros = [100 * point.sparsity for point in line]
        axes.plot(zeros, [p.dense_us / p.us for p in line], "o-", color=colour, label=f"{oc} output channels")
        axes.plot(zeros, [p.dense_us / p.paper_us for p in line], "x--", color=colour, linewidth=1, markersize=4)
    axes.axhline(1, color="0.6", linewidth=1)
    axes.set(ylabel="times faster than cuDNN fp32", ylim=(0, None))


def _times(axes: Axes, by_oc: dict[int, list[Point]]) -> None:
    """Figure 6: times; dotted, cuDNN's."""
    for colour, (oc, line) in zip(_colours(len(by_oc)), by_oc.items(), strict=True):
        zeros = [100 * point.sparsity for point in line]
        axes.plot(zeros, [p.us for p in line], "o-", color=colour, label=f"{oc} output channels")
        axes.plot(zeros, [p.paper_us for p in line], "x--", color=colour, linewidth=1, markersize=4)
        axes.plot(zeros, [p.dense_us for p in line], ":", color=colour, linewidth=1)
    axes.set(ylabel="microseconds", yscale="log")


def _roofline(axes: Axes, by_oc: dict[int, list[Point]], device: Device | None, copy_tbs: float) -> None:
    """Figure 7: FLOP of nonzeros per byte of DRAM and per second; filled ours, hollow cuDNN with its dense FLOP."""
    slopes = [(copy_tbs, "--", f"{copy_tbs:.1f} TB/s, copy measured here")]
    if device is not None:
        slopes.append((device.bandwidth_gbs / 1e3, "-", f"{device.bandwidth_gbs / 1e3:g} TB/s, datasheet"))
    peak = device.fp32_tflops if device else math.inf
    for bandwidth, style, name in slopes:
        ends = [0.5, min(1000.0, peak / bandwidth), 1000.0]
        axes.plot(ends, [min(peak, bandwidth * x) for x in ends], style, color="0.3", linewidth=1, label=name)
    for colour, (oc, line) in zip(_colours(len(by_oc)), by_oc.items(), strict=True):
        sparse = [sparse_work(p.geometry, p.nnz, p.n, "fp32") for p in line]
        axes.plot(
            [w.intensity for w in sparse], [w.flops / p.us / 1e6 for w, p in zip(sparse, line, strict=True)], "o-",
            color=colour, markersize=4, linewidth=1, label=f"{oc} output channels",
        )  # fmt: skip
        dense = dense_work(line[0].geometry, line[0].n, "fp32")
        axes.plot([dense.intensity], [dense.flops / line[0].dense_us / 1e6], "o", color=colour, markerfacecolor="none")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s (sparse: of nonzeros)")


def draw(results: Results, device: Device | None) -> dict[str, bytes]:
    """The three figures as SVG by file name; without a device the roofline has no datasheet roofs. Raises InputError when the file holds no setting's points."""
    settings = {start: lines(points(results, start)) for start in SETTINGS}
    settings = {start: by_oc for start, by_oc in settings.items() if by_oc}
    if not settings:
        raise InputError(
            f"the results hold {len(results.rows)} rows, and for no shape of the list `paper` fp32 times at {LEAST_POINTS} sparsities "
            "beside cuDNN's: there is nothing to draw. Measure them: python scripts/bench_kernels.py measure --cases paper "
            "--out FILE.json."
        )
    notes = {
        "paper_figure_5_speedup.svg": "Speed-up of the fastest fp32 kernel over cuDNN fp32 (dashed: the paper's kernel)",
        "paper_figure_6_time.svg": "Time of the fastest fp32 kernel (dashed: the paper's kernel; dotted: cuDNN fp32)",
        "paper_figure_7_roofline.svg": "Roofline: nonzero FLOP of the fastest fp32 kernel, 90 to 98 % zeros (hollow: cuDNN fp32, dense FLOP)",
    }
    drawers: list[Callable[[Axes, dict[int, list[Point]]], None]] = [
        _speedups, _times, lambda axes, by_oc: _roofline(axes, by_oc, device, results.copy_tbs)
    ]  # fmt: skip
    return {
        name: _figure(results, settings, title, drawer)
        for (name, title), drawer in zip(notes.items(), drawers, strict=True)
    }


def _figure(
    results: Results,
    settings: dict[str, dict[int, list[Point]]],
    title: str,
    drawer: Callable[[Axes, dict[int, list[Point]]], None],
) -> bytes:
    """One panel a setting."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "sparsedeploy", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(5.0 * len(settings), 4.2), layout="constrained")
        for axes, (start, by_oc) in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings.items(), strict=True):  # fmt: skip
            drawer(axes, by_oc)
            axes.set_title(SETTINGS[start])
            if not axes.get_xlabel():
                axes.set_xlabel("zeros, %")
                axes.set_xticks(sorted({100 * point.sparsity for line in by_oc.values() for point in line}))
            _plain_ticks(axes)
            axes.grid(color="0.9", linewidth=0.6)
            axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
        figure.suptitle(
            f"{title}\nmeasured on an {results.device}, kernels {results.source_sha256[:12]}, every result checked against float64",
            fontsize=9,
        )
        return _svg(figure)


def _plain_ticks(axes: Axes) -> None:
    """1, 2, 5, 10 ... on logarithmic axes, as numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _svg(figure: Figure) -> bytes:
    text = io.BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 for a file that cannot be drawn from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args(arguments)
    try:
        if not options.results.is_file():
            raise InputError(
                f"{options.results}: no such file. It is what scripts/bench_kernels.py measure --cases paper writes on a GPU; "
                "nothing is drawn without measurements."
            )
        results = read(options.results)
        device = next((find(name) for name in ("h200", "a100") if name.upper() in results.device.upper()), None)
        pictures = draw(results, device)
    except SparseDeployError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    options.out.mkdir(parents=True, exist_ok=True)
    for name, data in pictures.items():
        (options.out / name).write_bytes(data)
        print(options.out / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
