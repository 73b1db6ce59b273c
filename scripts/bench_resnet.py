"""Whole networks end to end on this machine's GPU: dense by PyTorch and cuDNN, sparse as `tune` chooses, in turns in one process.

    python scripts/bench_resnet.py run --out scripts/results/networks_h200.json      every network; --help for less
    python scripts/bench_resnet.py table scripts/results/networks_h200.json          the table, as in README
    python scripts/bench_resnet.py draw scripts/results/networks_h200.json           pictures beside the file

Networks have seeded He weights, pruned by magnitude; the first convolution and the classifier keep theirs. `uniform` gives every
other convolution the same sparsity, `skewed` leaves small layers denser, as trained networks have it. Dense is what PyTorch makes
of the folded graph at its fastest: layout, fusion and cuDNN algorithm chosen by measuring, CUDA graph, fp32 without TF32, TF32
and fp16. Every output is held against ONNX Runtime on the CPU before it is timed. --sms limits all of it to so many SMs of
the GPU (a CUDA green context), which says something about small GPUs' balance of SMs, and nothing about their memory.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from sparsedeploy.errors import InputError, SparseDeployError
from sparsedeploy.gpu import first_gpu
from sparsedeploy.layer import Precision
from sparsedeploy.measure.bench import commit, machine
from sparsedeploy.measure.candidate_build import Builders
from sparsedeploy.measure.gpu_state import GpuState, probe
from sparsedeploy.measure.results import Machine
from sparsedeploy.measure.statistics import Distribution, Ratio, describe, paired_ratio
from sparsedeploy.measure.timing import Samples, Schedule, measure
from sparsedeploy.measure.tune import QUICK, Settings, Subject, Tuned, gpu_device, stage_of, tune_on
from sparsedeploy.models.networks import NETWORKS
from sparsedeploy.models.sparsity import pruned
from sparsedeploy.reading import read
from sparsedeploy.record import Document, Record
from sparsedeploy.runtime import Arithmetic, Feeds, Runner, Session
from sparsedeploy.verify import tolerance_for

ARITHMETICS: tuple[Arithmetic, ...] = get_args(Arithmetic)
SCHEDULE = Schedule(duration_s=0.4, warmup_s=0.15, rounds=16)
INPUT = "input"
SM_STEP = 8
"""Green contexts come in steps: more than asked for, by less than this, may be given."""
_CONFINED: list[object] = []
FEW = "{sms} of {all} SMs (a CUDA green context; L2 cache, memory and clocks are the whole GPU's)"
ANOTHER_NETWORK = 0.1
"""A dense baseline further off, as a share of its largest output, computes something else. TF32 and fp16 are 1–3 % off in deep
networks of random weights; that is in the row, and no reason to leave the faster rival out."""


class Dense(Record):
    """The dense network in one arithmetic."""

    arithmetic: Arithmetic
    gpu: Distribution
    error: float
    """Largest difference from ONNX Runtime as a share of the largest output."""
    notes: tuple[str, ...]


class Layer(Record):
    """One convolution in its place in the network, microseconds."""

    name: str
    choice: str
    sparsity: float
    us_dense: float | None
    us_sparse: float | None


class Sparse(Record):
    """The network with the layers that tuning chose."""

    precision: Precision
    gpu: Distribution
    error: float
    allowed: float
    ratios: dict[str, Ratio]
    """Dense over sparse, by the dense one's arithmetic, paired by rounds."""
    kernels: dict[str, int]
    """Layers by kernel, dense ones included."""
    layers: tuple[Layer, ...]
    tune_s: float


class Row(Record):
    """One network at one sparsity and batch."""

    network: str
    recipe: str
    sparsity: float
    batch: int
    sms: int
    """SMs that all kernels were confined to."""
    dense: tuple[Dense, ...]
    sparse: tuple[Sparse, ...]
    problems: tuple[str, ...] = ()
    state: GpuState | None = None
    """Of the GPU right after."""


class Networks(Document):
    """What `run` writes."""

    TITLE = "results of scripts/bench_resnet.py run"

    made: str
    commit: str | None
    command: str
    machine: Machine
    schedule: dict[str, float]
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Unit:
    """What one row is made of."""

    network: str
    uniform: bool
    sparsity: float
    batch: int
    precisions: tuple[Precision, ...]

    @property
    def recipe(self) -> str:
        """How zeros are spread over layers."""
        return "uniform" if self.uniform else "skewed"

    def describe(self) -> str:
        """For progress and messages."""
        return f"{self.network} {self.sparsity:.0%} {self.recipe} N={self.batch}"


# --- measuring ----------------------------------------------------------------------------------------------------


class Bench:
    """Dense fp32 is the model that tuning opened; TF32's and fp16's are loaded once per network: their time depends on no weight."""

    def __init__(self, folder: Path, settings: Settings, sms: int) -> None:
        self.folder, self.settings, self.sms = folder, settings, sms
        self._runners: dict[tuple[str, Arithmetic], tuple[Runner, Path]] = {}
        """With the model file that each was loaded from."""
        self._models: dict[tuple[Any, ...], Path] = {}
        self.probe = probe()

    def row(self, unit: Unit) -> Row:
        """Tune and measure; what one precision cannot do is a problem in the row, not the end."""
        path = self._model(unit)
        x = np.random.default_rng(0).standard_normal((unit.batch, 3, 224, 224)).astype(np.float32)
        expected = _reference(path, x)
        problems: list[str] = []
        with ExitStack() as stack:
            sessions: dict[str, Session] = {}
            feeds: dict[str, Feeds] = {}
            dense: dict[str, tuple[Runner, float]] = {}
            tuned: dict[str, tuple[Tuned, float, float, float]] = {}
            opened: dict[Arithmetic, tuple[Runner, Path]] = {}
            for precision in unit.precisions:
                started = time.perf_counter()
                try:
                    result, session, runner = stack.enter_context(self._tuned(path, unit, precision))
                except SparseDeployError as error:
                    problems.append(f"sparse {precision}: {error}")
                    continue
                if (
                    runner is not None and precision == "fp32"
                ):  # the very graph of the file; fp16's was made by our conversion
                    opened[precision] = (runner, path)
                if not result.nodes:
                    problems.append(f"sparse {precision}: {result.tuning.verdict}")
                    continue
                name = f"sparse {precision}"
                feeds[name] = {INPUT: x.astype(np.float16) if precision == "fp16" else x}
                allowed = tolerance_for(list(result.nodes.values()), precision)
                error_share = _error(session, feeds[name], expected)
                if not error_share <= allowed:
                    problems.append(f"{name}: off by {error_share:.2g} of the largest output, allowed {allowed:g}")
                    continue
                sessions[name] = session
                tuned[name] = (result, error_share, allowed, time.perf_counter() - started)
            for arithmetic in ARITHMETICS:
                name = f"dense {arithmetic}"
                runner, loaded = opened.get(arithmetic) or self._runner(unit, path, arithmetic)
                session = runner.session({INPUT: x.shape}, graph=True)
                stack.callback(session.close)
                feeds[name] = {INPUT: x.astype(runner.inputs[0].dtype)}
                # Other weights of the same shapes may be loaded: times are the same, outputs are checked against their own.
                error_share = _error(session, feeds[name], _reference(loaded, x))
                if not error_share <= ANOTHER_NETWORK:
                    problems.append(f"{name}: off by {error_share:.2g} of the largest output")
                    continue
                sessions[name] = session
                dense[name] = (runner, error_share)
            samples = measure(sessions, feeds, SCHEDULE)
            state = self.probe.read()
        return _row(unit, self.sms, dense, tuned, samples, problems, state)

    def _model(self, unit: Unit) -> Path:
        key = (unit.network, unit.uniform, unit.sparsity)
        if key not in self._models:
            path = self.folder / f"{unit.network}-{unit.recipe}-{unit.sparsity:g}.onnx"
            model = pruned(
                unit.network, unit.sparsity, recipe="magnitude" if unit.uniform else "skewed", uniform=unit.uniform
            )
            onnx.save_model(model, path)
            self._models[key] = path
        return self._models[key]

    def _runner(self, unit: Unit, path: Path, arithmetic: Arithmetic) -> tuple[Runner, Path]:
        from sparsedeploy.runners.torch_runner import load_torch

        key = (unit.network, arithmetic)
        if key not in self._runners:
            self._runners[key] = (load_torch(path, arithmetic, "cuda:0"), path)
        return self._runners[key]

    @contextmanager
    def _tuned(self, path: Path, unit: Unit, precision: Precision) -> Iterator[tuple[Tuned, Session, Runner | None]]:
        """The outcome, a session of the network as chosen, and the dense model that it was tuned against."""
        device = gpu_device()
        reading = read(path, device, precision, {}, unit.batch)
        stage = stage_of(reading, precision, precision)
        try:
            subject = Subject(
                path.name, reading.model_hash, reading.layers, reading.weight, device, precision, precision, unit.batch
            )  # fmt: skip
            with Builders(self.settings.compile_s, self.settings.workers) as builder:
                result = tune_on(stage, subject, builder, self.settings)
            session = stage.session(result.nodes)
            try:
                yield result, session, getattr(stage, "dense", None)
            finally:
                session.close()
        finally:
            stage.close()


def _reference(path: Path, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The network's output by ONNX Runtime on the CPU, kept beside the model."""
    kept = path.with_suffix(f".n{len(x)}.npy")
    if not kept.exists():
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        np.save(kept, session.run(None, {INPUT: x})[0])
    result: NDArray[np.float32] = np.load(kept)
    return result


def _error(session: Session, feeds: Feeds, expected: NDArray[np.float32]) -> float:
    """Largest difference as a share of the largest output; infinity for NaN."""
    session.upload(feeds)
    session.enqueue()
    session.wait()
    (output,) = session.download().values()
    worst = float(np.abs(output.astype(np.float64) - expected).max())
    return worst / float(np.abs(expected).max()) if np.isfinite(worst) else float("inf")


def _row(
    unit: Unit,
    sms: int,
    dense: Mapping[str, tuple[Runner, float]],
    tuned: Mapping[str, tuple[Tuned, float, float, float]],
    samples: Mapping[str, Samples],
    problems: Sequence[str],
    state: GpuState | None,
) -> Row:
    times = {name: [ms for turn in each.gpu_ms for ms in turn] for name, each in samples.items()}
    rounds = {name: [float(np.median(turn)) for turn in each.gpu_ms] for name, each in samples.items()}
    return Row(
        network=unit.network, recipe=unit.recipe, sparsity=unit.sparsity, batch=unit.batch, sms=sms,
        dense=tuple(
            Dense(arithmetic=runner.arithmetic, gpu=describe(times[name]), error=error, notes=runner.notes)
            for name, (runner, error) in dense.items()
        ),
        sparse=tuple(
            Sparse(
                precision=result.tuning.precision, gpu=describe(times[name]), error=error, allowed=allowed,
                ratios={other.removeprefix("dense "): paired_ratio(rounds[other], rounds[name]) for other in dense},
                kernels=dict(Counter(layer.choice for layer in result.tuning.layers)),
                layers=tuple(
                    Layer(name=layer.name, choice=layer.choice, sparsity=layer.sparsity, us_dense=layer.us_dense, us_sparse=layer.us_sparse)
                    for layer in result.tuning.layers
                ),
                tune_s=round(seconds, 1),
            )
            for name, (result, error, allowed, seconds) in tuned.items()
        ),
        problems=tuple(problems), state=state,
    )  # fmt: skip


def confine(sms: int) -> int:
    """Confine this process's CUDA work from now on to `sms` SMs; 0 leaves it all of them. Returns on how many it then ran."""
    if not sms:
        return 0
    import torch
    from torch.cuda.green_contexts import GreenContext

    torch.zeros(1, device="cuda")
    # Streams that PyTorch makes from here on belong to it, and what is launched on them keeps to its SMs.
    context = GreenContext.create(sms, 0)
    _CONFINED.append(context)  # freed with its last reference, and everything launched in it then fails
    context.set_context()
    from bench_device import sms_in_use

    found = sms_in_use()
    if not sms <= found <= sms + SM_STEP:
        raise SystemExit(
            f"bench_resnet: asked for {sms} SMs, and a kernel ran on {found} of them. This driver does not confine as asked: rows "
            "would say something that is not so."
        )
    return found


def units(args: argparse.Namespace) -> list[Unit]:
    """In the order asked for: networks within sparsities within batches within recipes vary slowest first."""
    return [
        Unit(network, recipe == "uniform", sparsity, batch, tuple(args.precisions))
        for recipe, sparsity, network, batch in itertools.product(
            args.recipes, args.sparsities, args.networks, args.batches
        )
    ]


def run(args: argparse.Namespace, command: str) -> None:
    """Measure unit by unit, writing the file after each; a unit that would begin after the limit is left out, and said."""
    gpu = first_gpu()
    if gpu is None:
        raise SystemExit("bench_resnet: this machine has no NVIDIA GPU that its driver shows. Run it on one.")
    # The row's own comparison is the long one; these only choose.
    brief = Schedule(duration_s=0.12, warmup_s=0.03, rounds=8)
    settings = replace(
        QUICK, per_kernel=args.per_kernel, kernels=tuple(args.kernels), compile_s=args.compile_seconds, workers=args.workers,
        patience=2, race=brief, final=brief,
    )  # fmt: skip
    before = Networks.from_json(args.out.read_bytes(), args.out).rows if args.out.exists() and args.keep else ()
    document = Networks(
        made=datetime.now(timezone.utc).isoformat(timespec="seconds"), commit=args.commit or commit(), command=command,
        machine=machine(gpu, probe()), schedule={"duration_s": SCHEDULE.duration_s, "warmup_s": SCHEDULE.warmup_s, "rounds": SCHEDULE.rounds},
        rows=before,
    )  # fmt: skip
    began = time.perf_counter()
    found = confine(args.sms)
    with tempfile.TemporaryDirectory(prefix="networks-") as folder:
        bench = Bench(Path(folder), settings, found or gpu.sm_count)
        for unit in units(args):
            if time.perf_counter() - began > args.limit_s:
                print(f"{unit.describe()}: left out, {args.limit_s:g} s are over", flush=True)
                continue
            started = time.perf_counter()
            row = bench.row(unit)
            kept = [other for other in document.rows if _key(other) != _key(row)]
            document = document.model_copy(update={"rows": (*kept, row)})
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(document.to_json(), "utf-8")
            print("\n".join([_line(row), *(f"  {problem}" for problem in row.problems)]), end=" ")
            print(f"({time.perf_counter() - started:.0f} s)", flush=True)


def _key(row: Row) -> tuple[Any, ...]:
    return (row.network, row.recipe, row.sparsity, row.batch, row.sms)


def merge(documents: Sequence[Networks]) -> Networks:
    """Rows of all, the later ones' where two have the same; raises InputError for another commit or machine."""
    first = documents[0]
    for other in documents[1:]:
        if (other.commit, other.machine) != (first.commit, first.machine) or other.schedule != first.schedule:
            raise InputError(
                "merge: the files are of different commits, machines or schedules; measure them in one go."
            )
    rows = {_key(row): row for document in documents for row in document.rows}
    commands = dict.fromkeys(document.command for document in documents)
    return first.model_copy(update={"rows": tuple(rows.values()), "command": "; ".join(commands)})


# --- telling ------------------------------------------------------------------------------------------------------

HEAD = (
    "| network | zeros | N | dense fp32 / tf32 / fp16 ms | sparse fp32 ms | x dense fp32 | sparse fp16 ms | x dense fp16 |\n"
    "|---|---|---|---|---|---|---|---|"
)


def _line(row: Row) -> str:
    times = {each.arithmetic: f"{each.gpu.median_ms:.3f}" for each in row.dense}
    dense = " / ".join(times.get(arithmetic, "–") for arithmetic in ARITHMETICS)
    cells = [
        f"{row.network}{'' if row.recipe == 'uniform' else ' (skewed)'}",
        f"{row.sparsity:.0%}",
        str(row.batch),
        dense,
    ]
    for precision in ("fp32", "fp16"):
        found = next((each for each in row.sparse if each.precision == precision), None)
        ratio = found and found.ratios.get(precision)
        cells.append(f"{found.gpu.median_ms:.3f}" if found else "–")
        cells.append(f"**{ratio.estimate:.2f}** [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "–")
    return f"| {' | '.join(cells)} |"


def table(document: Networks) -> str:
    """Markdown: one table for each number of SMs."""
    parts = []
    for sms in sorted({row.sms for row in document.rows}, reverse=True):
        rows = sorted(
            (row for row in document.rows if row.sms == sms), key=lambda row: (row.recipe != "uniform", *_key(row))
        )
        title = f"{document.machine.gpu}" + (
            "" if sms == document.machine.sm_count else ", " + FEW.format(sms=sms, all=document.machine.sm_count)
        )
        parts.append("\n".join([title, "", HEAD, *map(_line, rows)]))
    return "\n\n".join(parts)


def draw(document: Networks, folder: Path, stem: str) -> list[Path]:
    """One picture per number of SMs: times of dense and sparse over zeros, a panel for each network and batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for sms in sorted({row.sms for row in document.rows}, reverse=True):
        rows = [row for row in document.rows if row.sms == sms and row.recipe == "uniform"]
        panels = sorted({(row.network, row.batch) for row in rows})
        if not panels:
            continue
        columns = min(3, len(panels))
        figure, axes = pyplot.subplots(
            -(-len(panels) // columns),
            columns,
            figsize=(4.2 * columns, 3.2 * -(-len(panels) // columns)),
            squeeze=False,
        )
        for axis, panel in itertools.zip_longest(axes.flat, panels):
            if panel is None:
                axis.set_axis_off()
                continue
            _panel(axis, panel, [row for row in rows if (row.network, row.batch) == panel])
        axes.flat[0].legend(fontsize=7)
        whole = sms == document.machine.sm_count
        where = f"{sms} SMs" if whole else FEW.format(sms=sms, all=document.machine.sm_count)
        figure.suptitle(f"{document.machine.gpu}, {where}: whole network, median ms", fontsize=10)
        figure.tight_layout()
        path = folder / f"{stem}{'' if sms == document.machine.sm_count else f'_{sms}sms'}.png"
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)
        made.append(path)
    return made


COLOURS = {"fp32": "#1f77b4", "tf32": "#7f7f7f", "fp16": "#d62728"}


def _panel(axis: Any, panel: tuple[str, int], rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=lambda row: row.sparsity)
    for arithmetic in ARITHMETICS:
        times = [each.gpu.median_ms for row in rows for each in row.dense if each.arithmetic == arithmetic]
        if times:
            middle = float(np.median(times))
            axis.axhline(middle, color=COLOURS[arithmetic], linestyle="--", linewidth=1, label=f"dense {arithmetic}")
    for precision in ("fp32", "fp16"):
        points = [
            (100 * row.sparsity, each.gpu.median_ms)
            for row in rows
            for each in row.sparse
            if each.precision == precision
        ]
        if points:
            axis.plot(*zip(*points, strict=True), color=COLOURS[precision], marker="o", label=f"sparse {precision}")
    axis.set(title=f"{panel[0]}, N={panel[1]}", xlabel="zeros, %", ylabel="ms", yscale="log")
    for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        ticks(lambda value, _: f"{value:g}")
    axis.tick_params(axis="y", which="minor", labelsize=7)
    shown = {round(100 * row.sparsity) for row in rows}
    axis.set(xlim=(min(shown) - 2, max(shown) + 2), xticks=sorted(shown))
    axis.title.set_fontsize(9)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("run")
    measured.add_argument(
        "--networks", nargs="+", default=["resnet18", "resnet50", "resnet34", "vgg16", "mobilenet_v1"], choices=NETWORKS
    )
    measured.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.95, 0.8, 0.98])
    measured.add_argument("--batches", nargs="+", type=int, default=[1, 32, 8])
    measured.add_argument("--precisions", nargs="+", default=["fp32", "fp16"], choices=get_args(Precision))
    measured.add_argument("--recipes", nargs="+", default=["uniform"], choices=["uniform", "skewed"])
    measured.add_argument("--sms", type=int, default=0, help="confine everything to so many SMs; 0: all")
    measured.add_argument(
        "--kernels", nargs="+", default=["baked", "csr"], help="those to try; packed rounds fp32 weights to fp16"
    )
    measured.add_argument("--per-kernel", type=int, default=2, help="configurations of each kernel that are tried")
    measured.add_argument("--compile-seconds", type=float, default=60.0, help="what building one candidate may take")
    measured.add_argument("--workers", type=int, help="processes that build; default: one per core")
    measured.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing after so many seconds")
    measured.add_argument("--keep", action="store_true", help="add to the rows that --out holds")
    measured.add_argument("--commit", help="of the source, where there is no git")
    measured.add_argument("--out", type=Path, required=True)
    for name in ("table", "draw"):
        commands.add_parser(name).add_argument("file", type=Path)
    merged = commands.add_parser("merge", help="rows of several runs of one commit on one kind of machine in one file")
    merged.add_argument("files", type=Path, nargs="+")
    merged.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    args = parse()
    if args.command == "run":
        import shlex
        import sys

        run(args, f"python scripts/bench_resnet.py {shlex.join(sys.argv[1:])}")
        return
    if args.command == "merge":
        documents = [Networks.from_json(file.read_bytes(), file) for file in args.files]
        args.out.write_text(merge(documents).to_json(), "utf-8")
        return
    document = Networks.from_json(args.file.read_bytes(), args.file)
    if args.command == "table":
        print(table(document))
    else:
        for path in draw(document, args.file.parent, args.file.stem):
            print(path)


if __name__ == "__main__":
    main()
