"""What scripts/bench_kernels.py leaves: records of measured times, and the table that holds them against the targets."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from bench_device import DensePrecision

from sparsedeploy.devices import Device
from sparsedeploy.errors import InputError
from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.profile import DensePoint, DeviceProfile, SparsePoint
from sparsedeploy.record import Document, Record
from sparsedeploy.roofline import dense_us


class Row(Record):
    """One kernel with one configuration on one layer at one batch: checked against float64, then timed."""

    case: str
    """list/name of the shape, as models.shapes has it, or real/name for trained filters."""
    geometry: Geometry
    n: int
    sparsity: float
    """As asked for; real filters: as measured."""
    nnz: int
    kernel: str
    precision: Precision
    config: dict[str, int]
    rank: int
    """0 is the kernel's choice: what its table of measured winners has, else what it predicts fastest."""
    error: float
    """Relative L2 against float64."""
    worst: float
    """Largest error of one element over the root mean square of the result."""
    us: float
    """Median per launch in replayed CUDA graphs, caches warm."""
    spread_us: float
    """Largest minus smallest of the replays."""
    cold_us: float | None = None
    """Inside of a network: other layers run between two launches (`Results.between`)."""
    bounds_us: dict[str, float]
    """What each resource alone would take, predicted from counts."""
    predicted_us: float
    code_bytes: int
    """Of the image that ran."""
    constant_bytes: int
    registers: int
    spill_bytes: int
    build_s: float
    """Making PTX or CUDA C++ and assembling it, on one core."""


class DenseRow(Record):
    """cuDNN on the same layer in the same run: full search, best of NCHW and NHWC."""

    case: str
    geometry: Geometry
    n: int
    precision: DensePrecision
    layout: Literal["NCHW", "NHWC"]
    us: float
    spread_us: float
    cold_us: float | None = None


class Missing(Record):
    """What was to be measured and was not."""

    what: str
    why: str


class Results(Document):
    """One run of the benchmark."""

    TITLE = "results of scripts/bench_kernels.py"

    command: str
    commit: str
    """Of the checkout, or "" where it is not known."""
    source_sha256: str
    """Of the kernels' sources (plugins/): what ran, whatever the checkout says."""
    device: str
    driver: str
    clocks: tuple[str, str]
    """SM clock, memory clock, temperature and power before and after, as nvidia-smi prints them."""
    versions: dict[str, str]
    launch_floor_us: float
    """One more near-empty kernel in a graph."""
    copy_tbs: float
    """Read plus write of an elementwise copy far beyond the L2."""
    between: str
    """What runs between two launches for `cold_us`."""
    seconds: float
    rows: tuple[Row, ...]
    dense: tuple[DenseRow, ...]
    missing: tuple[Missing, ...]


def to_text(results: Results) -> str:
    """JSON with a line for every row: a file that a reader can search and a diff can show."""
    fields = []
    for name, value in results.model_dump(mode="json", by_alias=True).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            fields.append(f" {json.dumps(name)}: [\n  {rows}\n ]")
        else:
            fields.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def read(path: Path) -> Results:
    """Results from a file; raises InputError naming the wrong field."""
    return Results.from_json(path.read_text(encoding="utf-8"), path)


class Target(NamedTuple):
    """One row of the table: what was asked for and what was reached. `value` is nan where rows are missing."""

    work: str
    unit: str
    value: float
    least: float
    aim: float
    detail: str

    @property
    def verdict(self) -> str:
        """aim, reached, missed, or not measured."""
        if math.isnan(self.value):
            return "not measured"
        less_is_better = self.unit == "us"
        for bound, word in ((self.aim, "aim reached"), (self.least, "reached")):
            if self.value <= bound if less_is_better else self.value >= bound:
                return word
        return "missed"


LAB_PAPER = "lab/paper"
"""The kernel of a row that measures the published Algorithm 1: a baseline, never counted as ours."""
RESNET = ("resnet50_3x3/64@56", "resnet50_3x3/128@28", "resnet50_3x3/256@14", "resnet50_3x3/512@7")
REAL = (("64@56", 3.8, 3.0), ("128@28", 5.0, 3.6), ("256@14", 5.5, 4.0))


class Table:
    """Lookups in results, warm or cold."""

    def __init__(self, results: Results, cold: bool = False) -> None:
        self.results, self.cold = results, cold

    def us(self, row: Row | DenseRow) -> float:
        """The row's time, warm or cold; nan where cold was not measured."""
        if not self.cold:
            return row.us
        return math.nan if row.cold_us is None else row.cold_us

    def best(self, case: str, n: int, sparsity: float, precision: Precision | None = None) -> Row | None:
        """The fastest row of a layer; None without one."""
        found = [
            row
            for row in self.results.rows
            if (row.case, row.n) == (case, n)
            and abs(row.sparsity - sparsity) < 1e-6
            and precision in (None, row.precision)
            and row.kernel != LAB_PAPER
            and not math.isnan(self.us(row))
        ]
        return min(found, key=self.us, default=None)

    def dense(self, case: str, n: int, precision: DensePrecision) -> float:
        """Time of cuDNN; nan where it was not measured."""
        for row in self.results.dense:
            if (row.case, row.n, row.precision) == (case, n, precision):
                return self.us(row)
        return math.nan

    def ratio(self, case: str, n: int, sparsity: float, precision: Precision | None, against: DensePrecision) -> float:
        """How many times faster the best row is than cuDNN."""
        row = self.best(case, n, sparsity, precision)
        return math.nan if row is None else self.dense(case, n, against) / self.us(row)


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; nan where one is, or none is given."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _mean_row(
    table: Table, work: str, cases: Iterable[str], n: int, sparsity: float, precision: Precision | None, against: DensePrecision,
    least: float, aim: float,
) -> Target:  # fmt: skip
    ratios = {case: table.ratio(case, n, sparsity, precision, against) for case in cases}
    detail = ", ".join(
        f"{case.partition('/')[2]} {'-' if math.isnan(value) else f'{value:.2f}'}" for case, value in ratios.items()
    )
    return Target(work, "x", geomean(ratios.values()), least, aim, detail)


def targets(results: Results, cold: bool = False) -> list[Target]:
    """The speeds asked for, in the order they are listed, with what this run reached."""
    table = Table(results, cold)
    rows = [
        _mean_row(table, "fp32 / cuDNN fp32, 90 %, geomean of four, N=32", RESNET, 32, 0.9, "fp32", "fp32", 7, 10),
        _mean_row(table, "the same, N=1", RESNET, 1, 0.9, "fp32", "fp32", 6, 10),
        _mean_row(table, "fp16 / cuDNN fp16, 90 %, 64@56, N=32", RESNET[:1], 32, 0.9, "fp16", "fp16", 1.8, 2.2),
        _mean_row(table, "best / cuDNN fp16, 95 %, geomean of four, N=32", RESNET, 32, 0.95, None, "fp16", 1.2, 2),
        _mean_row(table, "the same, N=1", RESNET, 1, 0.95, None, "fp16", 1.2, 2),
        _mean_row(
            table, "paper's 64<-32@256, fp32 / cuDNN fp32, 90 %, N=32", ("paper/32-64@256",), 32, 0.9, "fp32", "fp32", 8, 9.5
        ),
    ]  # fmt: skip
    for name, least, aim in REAL:
        rows.append(_real_row(table, name, least, aim))
    pointwise = sorted({row.case for row in results.rows if row.case.startswith("resnet50_1x1/") and row.n == 32})
    rows.append(
        _mean_row(
            table, "1x1 of ResNet-50, fp32 / cuDNN fp32, 90 %, geomean, N=32", pointwise, 32, 0.9, "fp32", "fp32", 2.5, 4
        )
    )  # fmt: skip
    return rows


def _real_row(table: Table, name: str, least: float, aim: float) -> Target:
    """The fp32 time of a trained layer at 91 % and batch 1."""
    work = f"real filters {name}, 91 %, N=1, fp32"
    found = [
        row
        for row in table.results.rows
        if row.case.startswith("real/resnet50") and name in row.case and row.n == 1 and 0.9 < row.sparsity < 0.92
    ]
    row = table.best(found[0].case, 1, found[0].sparsity, "fp32") if found else None
    if row is None:
        return Target(work, "us", math.nan, least, aim, "")
    us = table.us(row)
    ratio = table.dense(row.case, 1, "fp32") / us
    return Target(work, "us", us, least, aim, f"{row.kernel}, {ratio:.1f}x over cuDNN fp32")


def summary(results: Results) -> str:
    """Everything worth reading, as Markdown: the targets, warm and cold, then a line for every layer."""
    lines = [
        f"Measured on an {results.device}, driver {results.driver}, {', '.join(f'{k} {v}' for k, v in results.versions.items())}; "
        f"commit {results.commit or 'not known'}, kernels {results.source_sha256[:12]}. Copy {results.copy_tbs:.2f} TB/s, one more "
        f"kernel in a graph {results.launch_floor_us:.2f} us. {len(results.rows)} rows, {len(results.missing)} not measured.",
        "",
        "| work | least | aim | reached | | cold | each |",
        "|---|---|---|---|---|---|---|",
    ]
    for warm, cold in zip(targets(results), targets(results, cold=True), strict=True):
        lines.append(
            f"| {warm.work} | {warm.least:g}{_unit(warm)} | {warm.aim:g}{_unit(warm)} | {_number(warm)} | {warm.verdict} "
            f"| {_number(cold)} | {warm.detail} |"
        )
    lines += ["", *_layers(results), "", *predictions(results)]
    return "\n".join(lines) + "\n"


def _unit(target: Target) -> str:
    return "x" if target.unit == "x" else " us"


def _number(target: Target) -> str:
    return "-" if math.isnan(target.value) else f"{target.value:.2f}{_unit(target)}"


def _layers(results: Results) -> list[str]:
    """One line per layer, sparsity and batch: the best time by precision beside its largest bound and cuDNN."""
    warm, cold = Table(results), Table(results, cold=True)
    lines = [
        "| layer | zeros | N | best fp32 us (cold) | by | bound us | x fp32 | best fp16 us (cold) | by | bound us | x fp16 | cuDNN fp32 / tf32 / fp16 us |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((row.case, row.sparsity, row.n) for row in results.rows)
    for case, sparsity, n in keys:
        cells = [case, f"{sparsity:.1%}", str(n)]
        for precision, against in (("fp32", "fp32"), ("fp16", "fp16")):
            row = warm.best(case, n, sparsity, precision)  # type: ignore[arg-type]
            if row is None:
                cells += ["-"] * 4
                continue
            chilled = cold.best(case, n, sparsity, precision)  # type: ignore[arg-type]
            name, bound = max(row.bounds_us.items(), key=lambda item: item[1], default=("-", math.nan))
            cells += [
                f"{row.us:.2f} ({'-' if chilled is None else f'{chilled.cold_us:.2f}'})",
                row.kernel + (" hf" if row.config.get("sums") == 32 else ""),
                f"{bound:.1f} {name}",
                f"{warm.dense(case, n, against) / row.us:.2f}",  # type: ignore[arg-type]
            ]
        dense = [warm.dense(case, n, kind) for kind in ("fp32", "tf32", "fp16")]
        cells.append(" / ".join("-" if math.isnan(us) else f"{us:.1f}" for us in dense))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def prediction_error(rows: Iterable[Row]) -> tuple[float, float, int]:
    """Mean |log(measured / predicted)|, the geometric mean of measured / predicted, and their number; nan without rows."""
    logs = [math.log(row.us / row.predicted_us) for row in rows if 0 < row.predicted_us < 1e5]
    if not logs:
        return math.nan, math.nan, 0
    return sum(map(abs, logs)) / len(logs), math.exp(sum(logs) / len(logs)), len(logs)


def regret(results: Results) -> tuple[float, int]:
    """Time of the kernel predicted fastest over that of the fastest measured, geometric mean over layers, and their number."""
    by_layer: dict[tuple[str, float, int, str], list[Row]] = {}
    for row in results.rows:
        if row.kernel == LAB_PAPER:
            continue
        by_layer.setdefault((row.case, row.sparsity, row.n, row.precision), []).append(row)
    ratios = [
        min(rows, key=lambda row: row.predicted_us).us / min(row.us for row in rows) for rows in by_layer.values()
    ]
    return geomean(ratios), len(ratios)


def predictions(results: Results) -> list[str]:
    """Predicted against measured, by kernel and precision, as Markdown."""
    lines = ["| kernel | mean abs log | measured / predicted | rows |", "|---|---|---|---|"]
    for kernel, precision in sorted({(row.kernel, row.precision) for row in results.rows if row.kernel != LAB_PAPER}):
        error, bias, count = prediction_error(
            row for row in results.rows if (row.kernel, row.precision, row.rank) == (kernel, precision, 0)
        )
        lines.append(f"| {kernel} {precision} | {error:.2f} | {bias:.2f} | {count} |" if count else f"| {kernel} {precision} | - | - | 0 |")  # fmt: skip
    ratio, count = regret(results)
    if count:
        lines += [
            "",
            f"Choosing by prediction costs {ratio - 1:.1%} against the fastest measured, over {count} layers.",
        ]
    return lines


def to_profile(results: Results, device: Device) -> DeviceProfile:
    """The cold times as what `scan` and `convert --profile` plan with; raises InputError without one or off the device."""
    if device.name.upper() not in results.device.upper():
        raise InputError(f"the results were measured on an {results.device}, which is not {device.name}.")
    dense = tuple(
        DensePoint(
            geometry=row.geometry, arithmetic=row.precision, batch=row.n, residual=False, us=row.cold_us, spread_us=row.spread_us,
            predicted_us=dense_us(row.geometry, device, "fp16" if row.precision == "fp16" else "fp32", row.n).us,
        )
        for row in results.dense
        if row.cold_us is not None
    )  # fmt: skip
    sparse = tuple(
        SparsePoint(
            geometry=row.geometry, precision=row.precision, batch=row.n, residual=False, nnz=row.nnz, kernel=row.kernel,
            config=row.config, us=row.cold_us, spread_us=row.spread_us, predicted_us=row.predicted_us,
        )
        for row in results.rows
        if row.cold_us is not None and row.kernel != LAB_PAPER
    )  # fmt: skip
    if not dense and not sparse:
        raise InputError(
            "the results hold no cold time, and a profile is of layers inside of a network: measure without --no-cold."
        )
    return DeviceProfile(
        target=device.name, gpu=results.device, sm=device.sm, sm_count=device.sm_count,
        versions={**results.versions, "driver": results.driver},
        conditions=f"scripts/bench_kernels.py, convolutions alone, cold: between two launches run {results.between}",
        ceilings={"copy_gbs": round(1e3 * results.copy_tbs, 1)}, dense=dense, sparse=sparse,
    )  # fmt: skip
