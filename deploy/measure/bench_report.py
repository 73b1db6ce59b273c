"""What a bench says: lines and tables for the console, and the part of report.html that has its pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sparsedeploy.devices import Device
from sparsedeploy.figures import NARROW, WIDE, Point, format_rate, roofline_svg
from sparsedeploy.layer import ConvLayer, Precision
from sparsedeploy.measure.bench_figures import SweepMark, format_ms, latency_svg, sweep_svg, waterfall_svg
from sparsedeploy.measure.results import Case, LayerTime, Results, Speedup, SweepPoint, Timing
from sparsedeploy.measure.statistics import MINIMUM_SAMPLES, Distribution, Ratio
from sparsedeploy.roofline import dense_work, format_us, sparse_work

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
HEADINGS = (
    "milliseconds", "median", "min", "mean", "p90", "p95", "p99", "CV", "samples", "Enqueue Time", "host wall",
    "H2D Latency", "D2H Latency", "Latency", "images/s", "first run", "dense / this",
)  # fmt: skip
CONSOLE = (("GPU Compute Time, ms", (1, 2, 3, 4, 5, 6, 7, 8, 16)), ("medians, ms", (9, 10, 11, 12, 13, 14, 15)))
"""Heads and columns of the two tables that a console has room for."""
WORDS = (
    "As in trtexec: GPU Compute Time is the inference alone; Enqueue Time until the host is free again; H2D and D2H Latency the "
    "copies of inputs and outputs; Latency all of it, from host to host (here by the host's clock). Its "
    "'mean GPU Compute Time' is the column mean. Milliseconds, medians where nothing else is said."
)
MOST_LAYERS = 40
"""Rows of the sweep's table in the report."""


def ratio_text(ratio: Ratio) -> str:
    """`3.412x (95 % interval 3.391 to 3.433)`: digits enough that no rounding puts the estimate outside."""
    return f"{ratio.estimate:.4g}x (95 % interval {ratio.low:.4g} to {ratio.high:.4g})"


def headline(case: Case) -> str:
    """The one sentence of a case."""
    found, best, baseline = case.headline, case.timing(case.best), case.timing(case.baseline)
    times = f"{format_ms(best.gpu_compute.median_ms)} ms against {format_ms(baseline.gpu_compute.median_ms)} ms"
    if not found.ratio.differs:
        said = f"no difference between sparse and dense was shown: {ratio_text(found.ratio)}"
    elif found.ratio.estimate > 1:
        said = f"sparse is {ratio_text(found.ratio)} as fast as the fastest dense of the same precision"
    else:
        said = f"sparse is slower, {ratio_text(found.ratio)} as fast as the fastest dense of the same precision"
    faster = [speedup for speedup in _looser(case, baseline.arithmetic) if speedup.ratio.high < 1]
    rivals = "".join(
        f"; {entry.dense}, whose rounding is coarser, is faster still ({entry.ratio.estimate:.3g}x)" for entry in faster
    )
    return (
        f"batch {case.batch}: {said}: {times} GPU Compute Time ({best.name}; {baseline.name}){rivals}. {verdict(case)}"
    )


def verdict(case: Case) -> str:
    """VALID, or INVALID with every reason."""
    return "VALID" if case.valid else f"INVALID: {'; '.join(case.reasons)}"


def table(case: Case) -> list[tuple[str, ...]]:
    """HEADINGS and under them the variants, fastest first; n/a where there are too few samples."""
    return [
        HEADINGS,
        *(_row(case, timing) for timing in sorted(case.timings, key=lambda timing: timing.gpu_compute.median_ms)),
    ]


def _row(case: Case, timing: Timing) -> tuple[str, ...]:
    gpu, baseline = timing.gpu_compute, case.timing(case.baseline)
    return (
        timing.name,
        format_ms(gpu.median_ms),
        format_ms(gpu.min_ms),
        format_ms(gpu.mean_ms),
        *("n/a" if value is None else format_ms(value) for value in (gpu.p90_ms, gpu.p95_ms, gpu.p99_ms)),
        f"{gpu.cv:.1%}",
        str(gpu.count),
        *(_median(part) for part in (timing.enqueue, timing.wall, timing.h2d, timing.d2h, timing.latency)),
        f"{timing.throughput * case.batch:,.0f}",
        format_ms(timing.first_ms),
        f"{baseline.gpu_compute.median_ms / gpu.median_ms:.2f}x",
    )


def _median(part: Distribution) -> str:
    return format_ms(part.median_ms)


def remarks(case: Case) -> list[str]:
    """What belongs beside the table: speed-ups of other metrics, what was left out, clocks, notes of runners."""
    others = {
        "wall": "by the host's clock", "latency": "with the copies of inputs and outputs", "throughput": "in throughput",
    }  # fmt: skip
    found = [
        f"{others[speedup.metric]}: {ratio_text(speedup.ratio)}"
        for speedup in case.speedups
        if speedup.metric in others and (speedup.dense, speedup.sparse) == (case.baseline, case.best)
    ]
    own = case.timing(case.baseline).arithmetic
    found += [
        f"against {speedup.dense}, whose rounding is coarser: {ratio_text(speedup.ratio)}"
        for speedup in _looser(case, own)
    ]
    found.append(_checked(case))
    short = [p for p in MINIMUM_SAMPLES if any(_percentile(timing, p) is None for timing in case.timings)]
    if short:
        needs = ", ".join(f"p{p} {MINIMUM_SAMPLES[p]}" for p in short)
        found.append(f"n/a: too few samples (needed: {needs}); --duration measures longer")
    found += case.notes
    found += _left_out(case)
    found += [text for text in (_clocks(case),) if text]
    noted: dict[str, list[str]] = {}
    for timing in case.timings:
        for note in timing.notes:
            noted.setdefault(note, []).append(f"{timing.model} {timing.arithmetic}")
    found += [f"{note} ({', '.join(dict.fromkeys(names))})" for note, names in noted.items()]
    return found


def _left_out(case: Case) -> list[str]:
    """By reason; a runner of which nothing could be timed by its name alone."""
    reasons: dict[str, list[str]] = {}
    for entry in case.left_out:
        reasons.setdefault(entry.reason, []).append(entry.name)
    timed = {timing.runner for timing in case.timings}
    lines = []
    for reason, names in reasons.items():
        runners = {name.split(", ")[1] for name in names if ", " in name}
        whole = len(runners) == 1 and len(names) > 1 and not runners & timed
        lines.append(f"left out: {f'all in {runners.pop()}' if whole else '; '.join(names)}: {reason}")
    return lines


def _looser(case: Case, own: str) -> list[Speedup]:
    """The fastest dense variant of each other arithmetic, against the best sparse one."""
    found: dict[str, Speedup] = {}
    for speedup in case.speedups:
        dense = case.timing(speedup.dense)
        if speedup.metric != "gpu_compute" or speedup.sparse != case.best or dense.arithmetic == own:
            continue
        known = found.get(dense.arithmetic)
        if known is None or dense.gpu_compute.median_ms < case.timing(known.dense).gpu_compute.median_ms:
            found[dense.arithmetic] = speedup
    return list(found.values())


def _percentile(timing: Timing, p: int) -> float | None:
    value: float | None = getattr(timing.gpu_compute, f"p{p}_ms")
    return value


def _checked(case: Case) -> str:
    outputs = [output for timing in case.timings for output in timing.outputs]
    worst = min(case.timing(case.best).outputs, key=lambda output: output.margin)
    return (
        f"all {len(case.timings)} variants were checked against ONNX Runtime on the CPU before and after ({len(outputs)} outputs); "
        f"{case.best}: {worst.name} off by {worst.max_abs:.2g}, allowed {worst.tolerance:g} of {worst.largest:.3g}"
    )


def _clocks(case: Case) -> str:
    if case.after is None:
        return ""
    before, after = case.before, case.after
    clocks = [clock for clock in case.clocks_mhz if clock]
    text = f"GPU clock {min(clocks)} to {max(clocks)} MHz while measuring" if clocks else "GPU clock not known"
    if before and before.temperature_c is not None and after.temperature_c is not None:
        text += f", {before.temperature_c} °C before and {after.temperature_c} °C after"
    return text


# --- report.html --------------------------------------------------------------------------------------------------


def section(results: Results, layers: Sequence[ConvLayer], device: Device | None) -> str:
    """The part of the report about a bench. `layers` are the model's convolutions, `device` the row of its roofs."""
    from markupsafe import Markup

    pictures = _sweep_pictures(results)
    text: str = _template("bench.html.jinja").render(
        results=results,
        headlines=[_headline_line(case) for case in results.cases],
        facts=facts(results),
        cases=[_case_view(case, results, layers, device) for case in results.cases],
        sweep_wide=Markup(pictures[0]) if pictures else "",
        sweep_narrow=Markup(pictures[1]) if pictures else "",
        sweep_headings=_sweep_headings(results.sweep),
        sweep_rows=sweep_rows(results.sweep)[:MOST_LAYERS],
    )
    return text


def _headline_line(case: Case) -> dict[str, Any]:
    return {"text": headline(case), "wins": case.valid and case.headline.ratio.low > 1}


def _case_view(case: Case, results: Results, layers: Sequence[ConvLayer], device: Device | None) -> dict[str, Any]:
    from markupsafe import Markup

    anchor = f"bench-{case.batch}"
    points = measured_points(case.layers, layers, results.precision, case.batch) if device else []
    view: dict[str, Any] = {
        "anchor": anchor, "batch": case.batch, "verdict": verdict(case), "remarks": remarks(case),
        "headings": HEADINGS, "rows": table(case)[1:],
    }  # fmt: skip
    for form in (WIDE, NARROW):
        view[f"latency_{form.name}"] = Markup(latency_svg(case, form, f"{anchor}-latency"))
        view[f"waterfall_{form.name}"] = Markup(waterfall_svg(case, form, f"{anchor}-waterfall")) if case.layers else ""
        view[f"roofline_{form.name}"] = (
            Markup(roofline_svg(device, results.precision, points, form, f"{anchor}-roofline"))
            if device and points
            else ""
        )
    return view


def facts(results: Results) -> list[tuple[str, str]]:
    """What the numbers were measured on, and how."""
    machine, settings = results.machine, results.settings
    driver = f", driver {machine.driver}" if machine.driver else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    counts = ", ".join(f"{count} {name}" for name, count in results.kernels.items())
    kernels = f", sparse layers: {counts}" if counts else ""
    return [
        ("GPU", f"{machine.gpu} (sm_{machine.sm}, {machine.sm_count} SMs){driver}"),
        ("Model", f"{results.model}, hash {results.model_hash[:12]}, {results.precision}{kernels}"),
        (
            "How",
            f"{settings.duration_s:g} s a variant in {settings.rounds} rounds that alternate, after {settings.warmup_s:g} s of "
            "warm-up; intervals from the medians of rounds, paired",
        ),
        ("Words", WORDS),
        ("Software", f"sparsedeploy {results.version}{f' ({results.commit[:12]})' if results.commit else ''}, {versions}"),
        ("Measured", results.made),
    ]  # fmt: skip


def measured_points(
    times: Sequence[LayerTime], layers: Sequence[ConvLayer], precision: Precision, batch: int
) -> list[Point]:
    """Marks on the roofline of every convolution that has measured times, dense and, where it runs so, sparse."""
    known = {layer.name: layer for layer in layers}
    points = []
    for time in times:
        layer = known.get(time.name)
        if layer is None or layer.geometry is None or time.dense_us <= 0:
            continue
        work = dense_work(layer.geometry, batch, precision)
        points.append(_point(time.name, "dense", work.intensity, work.flops, time.dense_us, not time.sparse))
        if time.sparse and layer.zeros and layer.zeros.nnz and time.sparse_us > 0:
            work = sparse_work(layer.geometry, layer.zeros.nnz, batch, precision)
            points.append(_point(time.name, "sparse", work.intensity, work.flops, time.sparse_us, True))
    return points


def _point(name: str, form: str, intensity: float, flops: float, us: float, chosen: bool) -> Point:
    tflops = flops / (us * 1e6)
    title = f"{name}: {form}\n{intensity:.3g} FLOP/byte, {format_rate(tflops)}, {format_us(us)} us measured"
    return Point("sparse" if form == "sparse" else "direct", intensity, tflops, chosen, title)


def into_report(page: str, part: str) -> str | None:
    """The report with `part` where a bench's part belongs, an earlier one replaced; None for a page without that place."""
    found = re.search(f"{re.escape(BEGIN)}.*{re.escape(END)}", page, flags=re.DOTALL)
    if found is None:
        return None
    return f"{page[: found.start()]}{BEGIN}\n{part}{END}{page[found.end() :]}"


# --- sweep --------------------------------------------------------------------------------------------------------


def sweep_lines(results: Results) -> list[tuple[str, ...]]:
    """A row a point: zeros, sparse layers, predicted and measured speed-up of each batch."""
    batches = results.settings.batches
    rows: list[tuple[str, ...]] = [
        ("zeros", "sparse layers", "predicted", *(f"batch {b}" for b in batches), *(f"ms at {b}" for b in batches), "")
    ]
    for point in results.sweep:
        by_batch = {case.batch: case for case in point.cases}
        found = [by_batch.get(batch) for batch in batches]
        rows.append(
            (
                f"{point.sparsity:.1%}",
                str(point.sparse_layers),
                "–" if point.predicted is None else f"{point.predicted:.2f}x",
                *(ratio_text(case.headline.ratio) if case else "–" for case in found),
                *(format_ms(case.timing(case.best).gpu_compute.median_ms) if case else "–" for case in found),
                "; ".join([*([point.note] if point.note else []), *(verdict(case) for case in point.cases if not case.valid)]),
            )
        )  # fmt: skip
    return rows


def _sweep_headings(points: Sequence[SweepPoint]) -> tuple[str, ...]:
    return ("Layer, predicted dense / sparse", *(f"{point.sparsity:.1%}" for point in points), "pays above")


def sweep_rows(points: Sequence[SweepPoint]) -> list[tuple[str, ...]]:
    """For each layer how many times faster sparse is at each point, and from which sparsity on; most time first."""
    if not points:
        return []
    longest = sorted(points[0].layers, key=lambda layer: -(layer.dense_us or 0.0))
    rows = []
    for name in (layer.name for layer in longest if layer.dense_us is not None):
        cells, above = [], None
        for point in points:
            layer = next((entry for entry in point.layers if entry.name == name), None)
            timed = layer is not None and layer.dense_us and layer.sparse_us
            cells.append(f"{layer.sparsity:.0%}: {layer.dense_us / layer.sparse_us:.2f}x" if layer and timed else "–")  # type: ignore[operator]
            above = layer.crossover if layer and layer.crossover is not None else above
        rows.append((name, *cells, "–" if above is None else f"{above:.1%}"))
    return rows


def _sweep_pictures(results: Results) -> tuple[str, str] | None:
    measured: dict[int, list[SweepMark]] = {}
    for point in results.sweep:
        for case in point.cases:
            ratio = case.headline.ratio
            measured.setdefault(case.batch, []).append(SweepMark(point.sparsity, ratio.estimate, ratio.low, ratio.high))
    predicted = [
        SweepMark(point.sparsity, point.predicted) for point in results.sweep if point.predicted and point.sparse_layers
    ]
    if not measured and not predicted:
        return None
    wide, narrow = (sweep_svg(measured, predicted, None, form, "sweep") for form in (WIDE, NARROW))
    return wide, narrow


def page(results: Results, layers: Sequence[ConvLayer], device: Device | None) -> str:
    """A page of its own, for results that belong to no bundle."""
    from markupsafe import Markup

    part = Markup(section(results, layers, device))
    text: str = _template("bench_page.html.jinja").render(results=results, section=part)
    return text


def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("sparsedeploy", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template(name)
