"""`bench --compare`: two results.json side by side, what differs between their machines and settings, and a gate for CI."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sparsedeploy.errors import InputError
from sparsedeploy.measure.results import Case, Results, Timing, Which
from sparsedeploy.measure.statistics import MINIMUM_SAMPLES
from sparsedeploy.record import Document, Record

TIMES = ("min_ms", "median_ms", "mean_ms", "p90_ms", "p95_ms", "p99_ms")
METRICS = (*TIMES, "throughput", "speedup")
_CONDITION = re.compile(
    r"\s*(?:(?P<which>dense|sparse)\.)?(?P<metric>[a-z0-9_]+)\s*(?P<operator>>=|<=|>|<)\s*"
    r"(?P<sign>[+-]?)(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<percent>%?)\s*"
)
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b, "<": lambda a, b: a < b, ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b,
}  # fmt: skip
Against = Literal["share", "change", "value"]


@dataclass(frozen=True)
class Condition:
    """When a comparison fails: `p90_ms>+5%` (a share of the first), `p90_ms>+0.1` (a change), `speedup<3` (the second's)."""

    text: str
    which: Which
    metric: str
    operator: str
    limit: float
    against: Against


class Row(Record):
    """One number of both results at one batch."""

    batch: int
    which: Which
    metric: str
    a: float | None
    """None where there are too few samples."""
    b: float | None
    change: float | None
    """b / a - 1."""
    shown: bool | None
    """Whether the 95 % intervals are apart; None for numbers that have none."""
    interval_a: tuple[float, float] | None = None
    interval_b: tuple[float, float] | None = None


class Comparison(Document):
    """What `bench --compare` prints with --json."""

    a: str
    b: str
    differences: tuple[str, ...]
    """Of machine, settings, models and versions: what besides the change under test may have moved the times."""
    rows: tuple[Row, ...]
    failed: tuple[str, ...] = ()
    """Conditions of --fail-if that hold, with their numbers, and results that are INVALID where there are conditions."""


def parse_condition(text: str) -> Condition:
    """Read METRIC, an operator and a limit; raises InputError with the grammar."""
    found = _CONDITION.fullmatch(text)
    if not found or found["metric"] not in METRICS or (found["metric"] == "speedup" and found["which"]):
        raise InputError(
            f"--fail-if {text}: needed a metric ({', '.join(METRICS)}; dense. or sparse. before a time, sparse unless said), "
            "one of > < >= <=, and a limit: +5% is a change by that share, +0.1 a change by that much, 3 the second "
            "file's own number. As in 'p90_ms>+5%' or 'speedup<3'."
        )
    number = float(found["number"]) * (-1 if found["sign"] == "-" else 1)
    against: Against = "share" if found["percent"] else "change" if found["sign"] else "value"
    return Condition(
        text=text.strip(),
        which="dense" if found["which"] == "dense" else "sparse",
        metric=found["metric"],
        operator=found["operator"],
        limit=number / 100 if found["percent"] else number,
        against=against,
    )


def compare_results(
    a: Results, b: Results, names: tuple[str, str], conditions: Sequence[Condition] = (), anyway: bool = False
) -> Comparison:
    """Numbers of the batches that both have, b against a.

    Raises InputError where device, precision or settings differ and not `anyway`, where no batch is in both, and for a
    condition on a percentile that has too few samples: a gate that cannot be judged must not pass.
    """
    serious, others = differences(a, b)
    if serious and not anyway:
        raise InputError(
            f"{names[0]} and {names[1]} were not measured alike: {'; '.join(serious)}. Their times cannot be held against each "
            "other; measure both in the same way, or pass --anyway to print them side by side with these differences."
        )
    pairs = [(case, other) for case in a.cases for other in b.cases if case.batch == other.batch]
    if not pairs:
        raise InputError(
            f"{names[0]} has batches {_batches(a)}, {names[1]} has {_batches(b)}: there is no batch in both to compare."
        )
    rows = tuple(row for case, other in pairs for row in _rows(case, other))
    failed = [text for condition in conditions for text in _failures(condition, rows, names)]
    if conditions:
        failed += [
            f"{name}: INVALID at batch {case.batch}: {reason}"
            for name, cases in zip(names, zip(*pairs, strict=True), strict=True)
            for case in cases
            for reason in case.reasons
        ]
    return Comparison(a=names[0], b=names[1], differences=(*serious, *others), rows=rows, failed=tuple(failed))


def _batches(results: Results) -> str:
    return ", ".join(str(case.batch) for case in results.cases) or "none (a sweep has no batches to compare)"


def differences(a: Results, b: Results) -> tuple[list[str], list[str]]:
    """What makes times incomparable, and what is only to be known."""
    x, y = a.settings, b.settings
    serious = [
        _differing("device", a.machine.gpu, b.machine.gpu),
        _differing("SMs", a.machine.sm_count, b.machine.sm_count),
        _differing("precision", a.precision, b.precision),
        _differing("runners", ",".join(x.runners), ",".join(y.runners)),
        _differing("duration", f"{x.duration_s:g} s", f"{y.duration_s:g} s"),
        _differing("warm-up", f"{x.warmup_s:g} s", f"{y.warmup_s:g} s"),
        _differing("rounds", x.rounds, y.rounds),
    ]
    others = [
        _differing("model", f"{a.model} {a.model_hash[:12]}", f"{b.model} {b.model_hash[:12]}"),
        _differing("sparsedeploy", _tool(a), _tool(b)),
        _differing("driver", a.machine.driver, b.machine.driver),
        _differing("system", a.machine.system, b.machine.system),
        *(
            _differing(name, a.machine.versions.get(name), b.machine.versions.get(name))
            for name in sorted(a.machine.versions.keys() | b.machine.versions.keys())
        ),
        _differing("VALID", a.valid, b.valid),
    ]
    return [text for text in serious if text], [text for text in others if text]


def _tool(results: Results) -> str:
    return f"{results.version} {(results.commit or '')[:12]}".strip()


def _differing(what: str, a: object, b: object) -> str:
    return "" if a == b else f"{what}: {a} and {b}"


def _rows(a: Case, b: Case) -> list[Row]:
    rows = []
    for which in ("sparse", "dense"):
        x, y = _timing(a, which), _timing(b, which)
        rows += [_row(a.batch, which, metric, x, y) for metric in (*TIMES, "throughput")]
    first, second = a.headline.ratio, b.headline.ratio
    rows.append(
        Row(
            batch=a.batch, which="sparse", metric="speedup", a=first.estimate, b=second.estimate,
            change=second.estimate / first.estimate - 1, shown=first.high < second.low or second.high < first.low,
            interval_a=(first.low, first.high), interval_b=(second.low, second.high),
        )
    )  # fmt: skip
    return rows


def _timing(case: Case, which: Which) -> Timing:
    return case.timing(case.best if which == "sparse" else case.baseline)


def _row(batch: int, which: Which, metric: str, a: Timing, b: Timing) -> Row:
    x, y = (t.throughput if metric == "throughput" else getattr(t.gpu_compute, metric) for t in (a, b))
    interval = metric == "median_ms"
    (low_a, high_a), (low_b, high_b) = a.interval_ms, b.interval_ms
    return Row(
        batch=batch, which=which, metric=metric, a=x, b=y, change=None if x is None or y is None or not x else y / x - 1,
        shown=high_a < low_b or high_b < low_a if interval else None, interval_a=a.interval_ms if interval else None,
        interval_b=b.interval_ms if interval else None,
    )  # fmt: skip


def _failures(condition: Condition, rows: Sequence[Row], names: tuple[str, str]) -> list[str]:
    found = []
    for row in rows:
        if (row.which, row.metric) != (condition.which, condition.metric):
            continue
        needs_a = condition.against != "value"
        if row.b is None or (needs_a and row.a is None):
            short = names[1] if row.b is None else names[0]
            needed = MINIMUM_SAMPLES[int(row.metric[1:3])]
            raise InputError(
                f"--fail-if {condition.text}: {short} has too few samples at batch {row.batch} for {row.metric}: {needed} are "
                "needed. Measure longer with --duration, or hold another percentile."
            )
        a, b = row.a or 0.0, row.b
        value = {"share": b / a - 1 if a else float("inf"), "change": b - a, "value": b}[condition.against]
        if _OPERATORS[condition.operator](value, condition.limit):
            change = f" ({b / a - 1:+.1%})" if a else ""
            found.append(
                f"{condition.text}: {condition.which} {row.metric} at batch {row.batch} went from {a:.4g} to {b:.4g}{change}"
            )
    return found
