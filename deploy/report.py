"""One offline HTML page about one model on one device: the roofline, the time of each layer, and every decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsedeploy.devices import Device
from sparsedeploy.figures import NARROW, WIDE, Bars, Form, Point, format_rate, roofline_svg, times_svg
from sparsedeploy.layer import ConvLayer, Geometry, Precision
from sparsedeploy.plan import DENSE, LayerPlan, Plan
from sparsedeploy.roofline import Work, dense_us, dense_work, format_us, sparse_work, winograd_work
from sparsedeploy.scan import Scan

MIXED = "measured where marked, else predicted"


@dataclass(frozen=True)
class Row:
    """One layer as the page shows it: the scan's record beside the plan's decision."""

    layer: ConvLayer
    entry: LayerPlan | None

    @property
    def sparse(self) -> bool:
        """Whether the plan runs it sparse."""
        return self.entry is not None and self.entry.choice != DENSE

    @property
    def measured(self) -> bool:
        """Whether its times come from the device."""
        return self.entry is not None and self.entry.measured is not None

    @property
    def times(self) -> tuple[float, float] | None:
        """Microseconds dense and sparse, measured before predicted; None where there are neither."""
        if self.entry is None:
            return None
        times = self.entry.measured or self.entry.predicted
        return (times.us_dense, times.us_sparse) if times else None


def render(scan: Scan, plan: Plan, device: Device, facts: Mapping[str, str]) -> str:
    """The page as text: no script, nothing fetched, the same bytes for the same records.

    facts are extra rows of the overview, label to text (the result of verify, sizes). Layers of scan and plan are
    matched by name; a layer that the plan lacks is shown without a decision. Every text is escaped.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    decided = {entry.name: entry for entry in plan.layers}
    rows = [Row(layer, decided.get(layer.name)) for layer in scan.layers]
    basis = _basis(rows)
    mixed = basis == MIXED
    points = [point for row in rows for point in _points(row, device, plan)]
    bars = [_bars(row, mixed) for row in rows]
    pictures = {
        f"{name}_{form.name}": Markup(svg)
        for form in (WIDE, NARROW)
        for name, svg in (
            ("roofline", roofline_svg(device, plan.precision, points, form)),
            ("times", times_svg(bars, basis, form)),
        )
    }
    environment = Environment(
        loader=PackageLoader("sparsedeploy", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("report.html.jinja").render(
        scan=scan,
        plan=plan,
        device=device,
        basis=basis,
        sparse_layers=sum(row.sparse for row in rows),
        no_shape=sum(row.layer.geometry is None for row in rows),
        forms={point.form for point in points},
        overview=[*_overview(scan, plan, device, rows, basis), *facts.items()],
        cells=[_cells(row, mixed) for row in rows],
        dense_rate=format_rate(device.throughput.dense_tflops[plan.precision]),
        **pictures,
    )


def _basis(rows: Sequence[Row]) -> str:
    timed = [row for row in rows if row.times]
    measured = sum(row.measured for row in timed)
    if timed and measured == len(timed):
        return "measured"
    return MIXED if measured else "predicted"


def _points(row: Row, device: Device, plan: Plan) -> list[Point]:
    """The layer's dense form, and its sparse form where it has nonzeros and a time."""
    geometry = row.layer.geometry
    if geometry is None:
        return []
    how = "measured" if row.measured else "predicted"
    us = row.times[0] if row.times else dense_us(geometry, device, plan.precision, plan.batch).us
    work, form = _dense_form(geometry, plan.precision, plan.batch)
    points = [_point(row, form, work.intensity, work.flops, us, how, not row.sparse)]
    zeros = row.layer.zeros
    if row.times and zeros and zeros.nnz:
        work = sparse_work(geometry, zeros.nnz, plan.batch, plan.precision)
        points.append(_point(row, "sparse", work.intensity, work.flops, row.times[1], how, row.sparse))
    return points


def _dense_form(geometry: Geometry, precision: Precision, batch: int) -> tuple[Work, Form]:
    """Winograd where it applies in fp32; in fp16 dense kernels are direct, on tensor cores or half2."""
    winograd = winograd_work(geometry, batch, precision) if precision == "fp32" else None
    return (winograd, "winograd") if winograd else (dense_work(geometry, batch, precision), "direct")


def _point(row: Row, form: Form, intensity: float, flops: float, us: float, how: str, chosen: bool) -> Point:
    tflops = flops / (us * 1e6)
    names = {"direct": "dense", "winograd": "dense as Winograd", "sparse": "sparse"}
    title = (
        f"{row.layer.name}: {names[form]}{', chosen' if chosen else ''}\n"
        f"{intensity:.3g} FLOP/byte, {format_rate(tflops)}, {format_us(us)} us {how}"
    )
    return Point(form=form, intensity=intensity, tflops=tflops, chosen=chosen, title=title)


def _bars(row: Row, mixed: bool) -> Bars:
    dense, sparse = row.times or (None, None)
    name = row.layer.name + (" (measured)" if mixed and row.measured else "")
    return Bars(name=name, dense_us=dense, sparse_us=sparse, sparse_chosen=row.sparse)


def _overview(scan: Scan, plan: Plan, device: Device, rows: Sequence[Row], basis: str) -> list[tuple[str, str]]:
    summary = scan.summary
    cap = (
        "none, every convolution is eligible"
        if summary.gain_cap is None
        else f"{summary.gain_cap:.2f}x for the convolutions, if eligible layers took no time"
    )
    shapes = ", ".join(f"{name} {'x'.join(str(dim) for dim in shape)}" for name, shape in scan.inputs.items())
    texts = [
        ("Model", f"{scan.model}, opset {scan.opset}, hash {scan.model_hash[:12]}"),
        ("Input", shapes or "not known"),
        ("Device", f"{device.title}, {plan.precision}, batch {plan.batch}"),
        ("Runs sparse", f"{sum(row.sparse for row in rows)} of {summary.convolutions} convolutions"),
        ("Eligible", f"{summary.eligible} of {summary.convolutions}, {summary.eligible_macs_share:.1%} of all MACs"),
        ("Cap on any gain", cap),
        ("Zeros", f"{summary.sparsity_by_macs:.1%} by MACs, {summary.sparsity_by_weights:.1%} by weights"),
    ]
    timed = [(row, row.times) for row in rows if row.times]
    if timed:
        dense = sum(times[0] for _, times in timed)
        planned = sum(times[1] if row.sparse else times[0] for row, times in timed)
        ratio = f" ({dense / planned:.2f}x)" if planned > 0 else ""
        missing = len(rows) - len(timed)
        rest = f"; {missing} without times not counted" if missing else ""
        texts.append(
            (f"Convolutions, {basis}", f"{format_us(dense)} us dense, {format_us(planned)} us as planned{ratio}{rest}")
        )
    return [*texts, ("Predictions start from", device.throughput.source)]


def _cells(row: Row, mixed: bool) -> dict[str, str | bool]:
    entry, times = row.entry, row.times
    why = entry.reason if entry else "; ".join(dict.fromkeys(reason.text for reason in row.layer.ineligible))
    return {
        "name": row.layer.name,
        "shape": _shape(row.layer),
        "zeros": f"{row.layer.sparsity:.1%}" if row.layer.zeros else "–",
        "choice": entry.choice if entry else "–",
        "sparse": row.sparse,
        "mark": ("measured" if row.measured else "predicted") if mixed and times else "",
        "dense_us": format_us(times[0]) if times else "–",
        "sparse_us": format_us(times[1]) if times else "–",
        **_crossover(row),
        "bound": _percent(entry.roofline_crossover if entry else None),
        "reason": why or "–",
    }


def _crossover(row: Row) -> dict[str, str | bool]:
    """The measured one where tune took it; a predicted one beside measured times says so."""
    entry = row.entry
    measured = entry.measured_crossover if entry else None
    if measured is not None:
        return {"crossover": _percent(measured), "crossover_mark": "measured"}
    predicted = entry.crossover if entry else None
    mark = "predicted" if row.measured and predicted is not None else ""
    return {"crossover": _percent(predicted), "crossover_mark": mark}


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _shape(layer: ConvLayer) -> str:
    """`64×32×3×3, stride 2, on 56×56`: weight shape OIHW, what is not 1, input height and width."""
    parts = ["×".join(str(dim) for dim in layer.shape) or "shape unknown"]
    geometry = layer.geometry
    if geometry is None:
        return f"{parts[0]}, input size unknown"
    if geometry.stride != (1, 1):
        parts.append(f"stride {_pair(geometry.stride)}")
    if geometry.dilation != (1, 1):
        parts.append(f"dilation {_pair(geometry.dilation)}")
    if geometry.group != 1:
        parts.append(f"group {geometry.group}")
    return ", ".join([*parts, f"on {geometry.h}×{geometry.w}"])


def _pair(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}×{pair[1]}"
