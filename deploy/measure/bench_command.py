"""The command `bench`: measure a bundle, sweep over sparsities, or compare two results; what to print, and whether it failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparsedeploy.bundle import MANIFEST, read_manifest
from sparsedeploy.errors import InputError
from sparsedeploy.layer import ConvLayer, Precision
from sparsedeploy.measure.bench import Request, Tools, bench, parse_request
from sparsedeploy.measure.bench_files import bundle_layers, keep_other_part, save_in_bundle, save_to_file
from sparsedeploy.measure.bench_report import CONSOLE, facts, headline, remarks, sweep_lines, table, verdict
from sparsedeploy.measure.compare import Comparison, Condition, Row, compare_results, parse_condition
from sparsedeploy.measure.results import RESULTS, Results, read_results
from sparsedeploy.measure.sweep import Sweep, advice, parse_sweep, sweep
from sparsedeploy.measure.timing import Schedule

Part = str | tuple[tuple[str, ...], ...]
"""A line, or a table whose first row is its head."""
_SHOWN = {
    "median_ms": "median ms",
    "p90_ms": "p90 ms",
    "p99_ms": "p99 ms",
    "throughput": "inferences/s",
    "speedup": "speed-up",
}
MOST_ADVICE = 8


@dataclass(frozen=True)
class Asked:
    """The command line."""

    source: Path | None
    runners: str | None = None
    batch: str | None = None
    precision: str | None = None
    duration_s: float = 2.0
    warmup_s: float = 0.5
    seed: int = 0
    out: Path | None = None
    compare: tuple[Path, Path] | None = None
    fail_if: tuple[str, ...] = ()
    anyway: bool = False
    sweep: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    as_json: bool = False


@dataclass(frozen=True)
class Said:
    """What to print; `failed` is why the exit code is 1, "" where it is 0."""

    record: Results | Comparison
    parts: tuple[Part, ...]
    failed: str = ""


def run(asked: Asked, tell: Callable[[str], None], tools: Tools | None = None) -> Said:
    """Do what the command line asks; raises SparseDeployError. An INVALID bench is said, and not written to the bundle."""
    conditions = [parse_condition(text) for text in asked.fail_if]
    if asked.compare:
        return _compare(asked, asked.compare, conditions)
    if asked.fail_if or asked.anyway:
        raise InputError("--fail-if and --anyway belong to --compare A.json B.json: measure first, then compare.")
    if asked.source is None:
        raise InputError("bench needs the bundle that convert made: `sparsedeploy bench MODEL.sparsedeploy`.")
    if asked.sweep is None and (asked.shapes or asked.layers):
        raise InputError(
            "--shape and --layer belong to --sweep, which converts: the bundle has its shapes and layers already."
        )
    if not asked.source.exists():
        raise InputError(
            f"{asked.source}: no such file or folder. Give the bundle that convert made; with --sweep it may be a model file."
        )
    if asked.sweep is None and not asked.source.is_dir():
        raise InputError(
            f"{asked.source}: is no folder; bench takes the bundle that convert made. Run `sparsedeploy convert "
            f"{asked.source}` first, or sweep over sparsities with --sweep 0.8:0.99."
        )
    schedule = Schedule(asked.duration_s, asked.warmup_s)
    request = Request(asked.source, schedule=schedule, seed=asked.seed, tell=tell)
    request = parse_request(request, asked.runners, asked.batch, None if asked.sweep else asked.precision)
    if asked.sweep:
        return _sweep(asked, request, tools)
    results = bench(request, tools)
    layers = bundle_layers(asked.source, read_manifest(asked.source)) if asked.out else ()
    return _written(asked, results, layers, [*_cases(results), *_facts(results)])


def _sweep(asked: Asked, request: Request, tools: Tools | None) -> Said:
    assert asked.source is not None
    assert asked.sweep is not None
    plan = Sweep(
        asked.source, parse_sweep(asked.sweep), request, _conversion(asked.precision), dict(asked.shapes), asked.layers
    )
    results, layers = sweep(plan, tools)
    parts: list[Part] = [tuple(sweep_lines(results))]
    parts += [f"prune further: {text}" for text in advice(results.sweep)[:MOST_ADVICE]]
    parts.append("Pruned by magnitude without retraining: this is what the time would be, not the accuracy.")
    return _written(asked, results, layers, [*parts, *_facts(results)])


def _conversion(name: str | None) -> Precision | None:
    if name is None or name == "fp32" or name == "fp16":
        return name  # type: ignore[return-value]
    raise InputError(f"--precision {name}: with --sweep it is that of the conversion, fp32 or fp16.")


def _written(asked: Asked, results: Results, layers: tuple[ConvLayer, ...], parts: list[Part]) -> Said:
    assert asked.source is not None
    failed = ""
    if not results.valid:
        reasons = dict.fromkeys(reason for case in results.every_case for reason in case.reasons)
        kept = "" if asked.out else " The bundle is as it was; -o FILE keeps such results."
        failed = f"bench: INVALID: {'; '.join(reasons)}.{kept} Let the GPU be alone and cool, and measure again."
    if asked.out:
        parts += [f"written: {path}" for path in save_to_file(asked.out, results, layers)]
    elif not failed and (asked.source / MANIFEST).is_file():
        results = keep_other_part(asked.source, results)
        parts += save_in_bundle(asked.source, results)
        parts.append(f"written: {asked.source / RESULTS}; pictures in {asked.source / 'report.html'}")
    elif not failed:
        parts.append("Not written: -o FILE keeps the results, with the picture in a page beside them.")
    return Said(results, tuple(parts), failed)


def _cases(results: Results) -> list[Part]:
    parts: list[Part] = []
    for case in results.cases:
        parts.append(headline(case))
        head, *rows = table(case)
        parts += [
            ((title, *(head[i] for i in columns)), *((row[0], *(row[i] for i in columns)) for row in rows))
            for title, columns in CONSOLE
        ]
        parts += [f"  {text}" for text in remarks(case)]
        parts.append("")
    return parts


def _facts(results: Results) -> list[Part]:
    return [f"{label}: {text}" for label, text in facts(results)]


def _compare(asked: Asked, files: tuple[Path, Path], conditions: list[Condition]) -> Said:
    if asked.source is not None:
        raise InputError(f"{asked.source}: --compare measures nothing; give it the two results.json alone.")
    a, b = (read_results(path) for path in files)
    names = (str(files[0]), str(files[1]))
    found = compare_results(a, b, names, conditions, asked.anyway)
    parts: list[Part] = [f"differs: {text}" for text in found.differences]
    shown = [row for row in found.rows if row.metric in _SHOWN]
    parts.append((("batch", "what", names[0], names[1], "change", "95 % intervals"), *map(_compared, shown)))
    for name, results in zip(names, (a, b), strict=True):
        parts += [f"{name}: batch {case.batch}: {verdict(case)}" for case in results.cases if not case.valid]
    parts.append(
        "Intervals are of each run: what differs from run to run besides (clocks, another day) is not in them."
    )
    parts += [f"failed: {text}" for text in found.failed]
    failed = f"bench --compare: {'; '.join(found.failed)}." if found.failed else ""
    return Said(found, tuple(parts), failed)


def _compared(row: Row) -> tuple[str, ...]:
    said = {True: "apart", False: "overlap: no difference shown", None: "–"}[row.shown]
    values = ("n/a" if value is None else f"{value:.4g}" for value in (row.a, row.b))
    change = "–" if row.change is None else f"{row.change:+.1%}"
    return (str(row.batch), f"{row.which} {_SHOWN[row.metric]}", *values, change, said)
