"""Measure every kernel on a GPU: each row checked against float64, then timed warm and inside of a network, beside cuDNN.

    python scripts/bench_kernels.py list [--cases ...]          what would be measured (no GPU)
    python scripts/bench_kernels.py measure --out FILE.json     builds in worker processes while the GPU measures
    python scripts/bench_kernels.py prepare --out FILE.xz       CUDA C++ compiled beforehand, for --ptx where NVRTC is missing
    python scripts/bench_kernels.py summary FILE.json           the table against the targets (no GPU)
    python scripts/bench_kernels.py profile FILE.json --out P   its cold times as a device profile for --profile (no GPU)

The paper's own kernel (scripts/lab/paper_packed.cu, row lab/paper) is measured beside ours on the paper's layers.
Cases, in order of importance: `targets` (all that the table of targets needs), `paper` (the paper's grid), `resnet`
(ResNet-50's 3x3 at every batch and sparsity), `pointwise` (its 1x1), `real` (trained filters, with --filters), `escoin`,
`im2win`, `mobilenet`, and `small` for a trial. Lists given by --also come after those of --cases, with one configuration
a kernel and without csr, which runs packed's code on another format. `measure` needs torch and a driver besides sparsedeploy; the file is
written every second, and rows that the time limit leaves out are listed in it.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_device import Checked, Dense, DensePrecision, Gpu, Timing, WrongResultError, sums_of
from bench_results import LAB_PAPER, DenseRow, Missing, Results, Row, read, summary, to_profile, to_text

from sparsedeploy.devices import Device, find
from sparsedeploy.errors import InputError, MachineError, SparseDeployError
from sparsedeploy.layer import ELEMENT_BYTES, ConvLayer, Geometry, Precision
from sparsedeploy.models.shapes import pruned_weight, real_work, work
from sparsedeploy.plugins import KERNELS, kernel_named
from sparsedeploy.plugins import assemble as compiler
from sparsedeploy.plugins.assemble import assemble, read_usage, tool_version
from sparsedeploy.plugins.baked.choose import estimate, from_config
from sparsedeploy.plugins.cost import bounds_us, ceilings
from sparsedeploy.plugins.kernel import BuildOptions, Config, UnfitWeightsError
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.reading import count_zeros

DEVICE = "h200"
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
WRITE_S = 1.0
SECOND_BEST_NNZ = 40_000
"""Layers of more nonzeros get one configuration of baked only: assembling another takes minutes."""


class Case(NamedTuple):
    """One layer at one sparsity and batch."""

    name: str
    geometry: Geometry
    sparsity: float
    n: int
    filters: str = ""
    """The folder its trained weights come from; "" for random ones."""


class Job(NamedTuple):
    """One row to be: a kernel's `rank`th configuration for a case."""

    case: Case
    kernel: str
    precision: Precision
    rank: int


# ---------------------------------------------------------------- the work list
def _grid(patterns: Sequence[str], sparsities: Sequence[float], batches: Sequence[int]) -> Iterator[Case]:
    """Work by name; its own sparsities and batches where none are given."""
    for entry in work(*patterns):
        name = next(f"{pattern.partition('/')[0]}/{entry.name}" for pattern in patterns if entry in work(pattern))
        for sparsity in sparsities or entry.sparsities:
            for n in batches or entry.batches:
                yield Case(name, entry.geometry, sparsity, n)


def _real(filters: Path | None, batches: Sequence[int], only: str = "") -> Iterator[Case]:
    if filters is None:
        return
    for entry, _ in real_work(filters):
        if only in entry.name:
            for n in batches or entry.batches:
                yield Case(f"real/{entry.name}", entry.geometry, entry.sparsities[0], n, str(filters))


def cases(names: Iterable[str], filters: Path | None = None) -> list[Case]:
    """The named lists' cases, each once, in the order of the names; raises InputError for a name that is none."""
    lists = {
        "targets": lambda: [
            *_grid(["resnet50_3x3"], (0.9,), (32, 1)),
            *_real(filters, (1,), "resnet50_3x3_90"),
            *_grid(["paper/32-64@256"], (0.9,), (32,)),
            *_grid(["resnet50_3x3"], (0.95,), (32, 1)),
            *_grid(["resnet50_1x1"], (0.9,), (32,)),
        ],
        "paper": lambda: sorted(_grid(["paper"], (), ()), key=lambda case: case.sparsity not in (0.9, 0.98, 0.94)),
        "resnet": lambda: sorted(_grid(["resnet50_3x3"], (), ()), key=lambda case: (case.n == 8, case.sparsity)),
        "pointwise": lambda: sorted(_grid(["resnet50_1x1"], (0.9,), (32, 1, 8)), key=lambda case: (32, 1, 8).index(case.n)),
        "real": lambda: [*_real(filters, (1,)), *_real(filters, (32,))],
        "escoin": lambda: [*_grid(["escoin"], (), ())],
        "im2win": lambda: [*_grid(["im2win"], (0.9,), ())],
        "mobilenet": lambda: [*_grid(["mobilenet_v1_1x1"], (), (1, 32))],
        "small": lambda: [*_grid(["small/plain", "small/map7", "small/1x1"], (0.9,), (2,))],
    }  # fmt: skip
    found: dict[Case, None] = {}
    for name in names:
        if name not in lists:
            raise InputError(f"--cases {name}: no such list; there are {', '.join(lists)}.")
        found |= dict.fromkeys(lists[name]())
    return list(found)


def jobs(
    found: Iterable[Case], kernels: Sequence[str], precisions: Sequence[Precision], top: int
) -> Iterator[tuple[Case, list[Job]]]:
    """The rows of each case, `top` configurations a kernel at most; data-driven kernels first: they are built in a second."""
    order = sorted(kernels, key=lambda name: name == "baked")
    for case in found:
        made = []
        for kernel in order:
            nnz = case.geometry.oc * case.geometry.ic // case.geometry.group * case.geometry.kh * case.geometry.kw
            several = kernel != "baked" or nnz * (1 - case.sparsity) <= SECOND_BEST_NNZ
            for precision in precisions:
                made += [Job(case, kernel, precision, rank) for rank in range(top if several else 1)]
        if case.name.startswith("paper/") and "fp32" in precisions:
            made.insert(0, Job(case, LAB_PAPER, "fp32", 0))
        yield case, made


@lru_cache(maxsize=8)
def weight_of(case: Case) -> NDArray[np.float32]:
    """The case's weights [oc, ic // group, kh, kw]: fp16 values in float32."""
    if not case.filters:
        return pruned_weight(case.geometry, case.sparsity)
    found = {f"real/{entry.name}": weight for entry, weight in real_work(Path(case.filters))}
    return found[case.name]


def layer_of(case: Case) -> ConvLayer:
    """The case as scan would describe it: the convolution alone, nothing fused."""
    weight = weight_of(case)
    return ConvLayer(
        name=case.name, weight="w", dtype="fp32", shape=weight.shape, geometry=case.geometry,
        zeros=count_zeros(weight, case.geometry.group),
    )  # fmt: skip


# ---------------------------------------------------------------- building, in worker processes
@dataclass(frozen=True)
class Made:
    """A job built, or why not."""

    node: SparseConv | None
    config: Config
    predicted_us: float = 0.0
    seconds: float = 0.0
    registers: int = 0
    spill_bytes: int = 0
    why: str = ""


def make(job: Job) -> Made:
    """Build a job's node with a cubin alone; `why` says why there is none."""
    try:
        return _paper(job) if job.kernel == LAB_PAPER else _make(job)
    except (UnfitWeightsError, SparseDeployError, ValueError) as error:
        return Made(None, {}, why=str(error)[:500])


def _make(job: Job) -> Made:
    device, layer, kernel = find(DEVICE), layer_of(job.case), kernel_named(job.kernel)
    reason = kernel.supports(layer, device, job.precision)
    if reason is not None:
        return Made(None, {}, why=reason.text)
    # What was measured to win comes first, whatever others promise.
    ranked = sorted(
        kernel.configs(layer, device, job.precision, job.case.n),
        key=lambda entry: not entry[1].source.startswith("measured"),
    )
    if job.rank >= len(ranked):
        return Made(None, {})
    config, prediction = ranked[job.rank]
    options = BuildOptions(job.precision, job.case.n, (device.sm,))
    started = time.perf_counter()
    built = kernel.build(layer, weight_of(job.case), None, device, config, options)
    found = [image for image in built.node.images if image.kind == "ptx"]
    if not found:
        return Made(None, config, why="; ".join(built.notes) or "no code")
    image, node = found[0], built.node
    assembled = assemble(image.data, device.sm)
    node = replace(node, images=(replace(image, kind="cubin", data=assembled.cubin),))
    usage = read_usage(assembled.log).values()
    return Made(
        node, config, prediction.us, time.perf_counter() - started, max((u.registers for u in usage), default=0),
        sum(u.spill_bytes for u in usage),
    )  # fmt: skip


def _paper(job: Job) -> Made:
    """Algorithm 1 of the paper as it stands, for comparison."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "lab"))
    from bench_direct import paper_work

    started = time.perf_counter()
    node = paper_work(job.case.geometry, weight_of(job.case), job.case.sparsity, job.case.n).node
    (image,) = node.images
    usage = None
    if image.kind == "ptx":
        assembled = assemble(image.data, image.arch)
        (usage,) = assembled.usage.values()
        node = replace(node, images=(replace(image, kind="cubin", data=assembled.cubin),))
    seconds = time.perf_counter() - started
    return Made(node, {}, 0.0, seconds, usage.registers if usage else 0, usage.spill_bytes if usage else 0)


Texts = dict[str, bytes]
"""PTX as NVRTC made it, by the hash of what it was made from."""
_known: Texts = {}
"""What an earlier `prepare` into the same file made, in a worker process."""


def know_texts(path: Path) -> None:
    """Start of a worker process of `prepare`."""
    if path.is_file():
        _known.update(pickle.loads(lzma.decompress(path.read_bytes())))


def _text_key(source: str, name: str, flags: Sequence[str]) -> str:
    return hashlib.sha256("\0".join([source, name, *flags]).encode()).hexdigest()


def compile_only(job: Job) -> Texts:
    """What NVRTC makes for a job; nothing is assembled."""
    texts: Texts = {}
    nvrtc, ptxas = compiler._run_nvrtc, compiler._run_ptxas

    def record(source: str, name: str, flags: Sequence[str]) -> tuple[bytes, str]:
        key = _text_key(source, name, flags)
        texts[key] = _known[key] if key in _known else nvrtc(source, name, flags)[0]
        return texts[key], ""

    with tempfile.TemporaryDirectory() as folder:  # what is not assembled must not reach the user's cache
        before = os.environ.get(compiler.CACHE_VARIABLE)
        os.environ[compiler.CACHE_VARIABLE] = folder
        compiler._run_nvrtc, compiler._run_ptxas = record, lambda ptx, flags: (b"", "")
        try:
            make(job)
        finally:
            compiler._run_nvrtc, compiler._run_ptxas = nvrtc, ptxas
            os.environ.pop(compiler.CACHE_VARIABLE)
            if before is not None:
                os.environ[compiler.CACHE_VARIABLE] = before
    return texts


def use_texts(path: Path | None) -> None:
    """Take PTX that `prepare` compiled instead of calling NVRTC; None changes nothing. For a worker process's start."""
    if path is None:
        return
    texts: Texts = pickle.loads(lzma.decompress(path.read_bytes()))

    def look_up(source: str, name: str, flags: Sequence[str]) -> tuple[bytes, str]:
        text = texts.get(_text_key(source, name, flags))
        if text is None:
            raise MachineError(
                f"{name} for this layer is not in {path.name}: prepare it again, with the sources of today."
            )
        return text, ""

    compiler._run_nvrtc, compiler.nvrtc_version = look_up, lambda: f"nvrtc, beforehand: {path.name}"  # type: ignore[assignment]


def straight_code() -> bytes:
    """The cubin that stands for other layers' code between two launches."""
    from measure_device import probe

    from sparsedeploy.plugins.assemble import ptx_version

    sm = find(DEVICE).sm
    return assemble(probe(16384, 0, sm, ptx_version(sm)).encode(), sm).cubin


# ---------------------------------------------------------------- bounds
def bounds_of(job: Job, config: Config, nnz: int, device: Device) -> dict[str, float]:
    """Time by each resource alone, microseconds: counted from the schedule for baked, from the layer for the others.

    fma: nonzeros x pixels at the peak rate. memory: input and output once, from HBM. shared: for the kernels that read
    weights as data one word per fma; for baked its loads. l2, fetch and issue: baked alone, waves counted (plugins/cost.py).
    """
    g, c = job.case.geometry, ceilings(device)
    products = nnz * g.oh * g.ow * job.case.n
    half = sums_of(job.precision, config, job.kernel) == "h2"
    per_clock = c.sm_count * c.clock_ghz * 1e3
    activations = job.case.n * (g.ic * g.h * g.w + g.oc * g.oh * g.ow) * ELEMENT_BYTES[job.precision]
    found = {"fma": products / (per_clock * 128 * (2 if half else 1)), "memory": activations / (c.hbm_tbs * 1e6)}
    if job.kernel == "baked":
        counted = bounds_us(estimate(from_config(g, job.precision, config), nnz, job.case.n), c)
        found |= {name if name != "compute" else "issue": us for name, us in counted.items() if name != "memory"}
    else:
        found["shared"] = products / (per_clock * c.shared_bytes / (2 if half else 4))
    return {name: round(us, 3) for name, us in found.items()}


# ---------------------------------------------------------------- measuring
class Bench(Protocol):
    """What measures: bench_device.Gpu, or a stand-in for tests."""

    between: str

    def describe(self) -> tuple[str, str, dict[str, str]]:
        """Device, driver, versions."""

    def clocks(self) -> str:
        """Clocks, temperature, power in words."""

    def floors(self) -> tuple[float, float]:
        """Microseconds of one more kernel in a graph, TB/s of a copy."""

    def dense(self, g: Geometry, n: int, cold: bool) -> dict[DensePrecision, Dense]:
        """Times of cuDNN in fp32, tf32 and fp16."""

    def sparse(
        self, key: tuple[Any, ...], node: SparseConv, weight: Any, n: int, sums: str, cold: bool
    ) -> tuple[Checked, Timing, float | None]:
        """Errors and times of a node; raises WrongResultError."""


class Run:
    """One run: what was measured so far, written after every row."""

    def __init__(self, bench: Bench, out: Path, command: str, commit: str, cold: bool, cudnn: bool) -> None:
        self.bench, self.out, self.cold, self.cudnn = bench, out, cold, cudnn
        self.started = time.monotonic()
        self.rows: list[Row] = []
        self.dense: dict[tuple[str, int], list[DenseRow]] = {}
        self.missing: list[Missing] = []
        name, driver, versions = bench.describe()
        floor, copy = bench.floors()
        self.clocks = (bench.clocks(), "")
        self.written = -WRITE_S
        self.head: dict[str, Any] = {
            "command": command, "commit": commit, "source_sha256": source_hash(), "device": name, "driver": driver,
            "versions": {**versions, "ptxas": tool_version(), "numpy": np.__version__}, "launch_floor_us": floor, "copy_tbs": copy,
            "between": bench.between if cold else "",
        }  # fmt: skip

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.started

    def results(self) -> Results:
        """The record as it stands."""
        return Results(
            **self.head, clocks=self.clocks, seconds=round(self.seconds, 1), rows=tuple(self.rows),
            dense=tuple(row for rows in self.dense.values() for row in rows), missing=tuple(self.missing),
        )  # fmt: skip

    def write(self, last: bool = False) -> None:
        """Publish by one rename, every second or two: a run that is stopped leaves what it had."""
        if last:
            self.clocks = (self.clocks[0], self.bench.clocks())
        elif self.seconds - self.written < WRITE_S:
            return
        self.written = self.seconds
        temporary = self.out.with_suffix(".part")
        temporary.write_text(to_text(self.results()), encoding="utf-8")
        temporary.replace(self.out)

    def measure_dense(self, case: Case) -> None:
        """The dense side of a case, once per shape and batch; cases of one shape share it."""
        key = str(case.geometry), case.n
        if not self.cudnn or any(row.case == case.name and row.n == case.n for row in self.dense.get(key, [])):
            return
        if key in self.dense:  # another name of the same shape
            known = {row.precision: row for row in self.dense[key]}
            self.dense[key] += [row.model_copy(update={"case": case.name}) for row in known.values()]
            return
        try:
            found = self.bench.dense(case.geometry, case.n, self.cold)
        except RuntimeError as error:
            self.dense[key] = []
            self.missing.append(Missing(what=f"cuDNN {case.name} N={case.n}", why=str(error)[:500]))
            return
        self.dense[key] = [
            DenseRow(
                case=case.name,
                geometry=case.geometry,
                n=case.n,
                precision=precision,
                layout=dense.layout,
                us=dense.timing.us,
                spread_us=dense.timing.spread_us,
                cold_us=dense.cold_us,
            )
            for precision, dense in found.items()
        ]
        cells = " ".join(f"{row.precision} {row.us:.1f}" for row in self.dense[key])
        print(f"{self.seconds:6.1f} s  {case.name} N={case.n} cuDNN {cells} us", flush=True)

    def measure(self, job: Job, made: Made) -> None:
        """One row, or the reason why there is none."""
        case, label = (
            job.case,
            f"{job.kernel} {job.precision} #{job.rank} {job.case.name} {job.case.sparsity} N={job.case.n}",
        )
        if made.node is None:
            if made.why:
                self.missing.append(Missing(what=label, why=made.why))
            return
        weight = weight_of(case)
        sums = sums_of(job.precision, made.config, job.kernel)
        try:
            key = (case.name, case.sparsity, case.n)
            checked, timing, cold = self.bench.sparse(key, made.node, weight, case.n, sums, self.cold)
        except (WrongResultError, MachineError, InputError) as error:
            print(f"{self.seconds:6.1f} s  FAILED {label}: {error}", flush=True)
            self.missing.append(Missing(what=label, why=str(error)[:500]))
            return
        nnz = int(np.count_nonzero(weight))
        row = Row(
            case=case.name, geometry=case.geometry, n=case.n, sparsity=case.sparsity, nnz=nnz, kernel=job.kernel,
            precision=job.precision, config=made.config, rank=job.rank, error=checked.error, worst=checked.worst, us=timing.us,
            spread_us=timing.spread_us, cold_us=cold, bounds_us=bounds_of(job, made.config, nnz, find(DEVICE)),
            predicted_us=made.predicted_us, code_bytes=len(made.node.images[0].data),
            constant_bytes=sum(table.nbytes for table in made.node.constants), registers=made.registers,
            spill_bytes=made.spill_bytes, build_s=round(made.seconds, 2),
        )  # fmt: skip
        self.rows.append(row)
        name, bound = max(row.bounds_us.items(), key=lambda item: item[1])
        chilled = "" if cold is None else f" cold {cold:.2f}"
        print(
            f"{self.seconds:6.1f} s  {label} {row.us:.2f} us +-{row.spread_us:.2f}{chilled} predicted {row.predicted_us:.1f} "
            f"{name} {bound:.1f} error {row.error:.1e}",
            flush=True,
        )


def run(
    work_list: Sequence[tuple[Case, list[Job]]], bench: Bench, measured: Run, pool: futures.Executor, limit_s: float
) -> None:
    """Measure in order of importance whatever is built; while nothing is, the next layer's dense side."""
    waiting = {pool.submit(make, job): (number, job) for number, (_, made) in enumerate(work_list) for job in made}
    dense_left = [case for case, _ in work_list]
    while waiting and measured.seconds < limit_s:
        ready = [future for future in waiting if future.done()]
        if not ready and dense_left:
            measured.measure_dense(dense_left.pop(0))
        elif not ready:
            futures.wait(waiting, timeout=1.0, return_when=futures.FIRST_COMPLETED)
        else:
            future = min(ready, key=lambda future: waiting[future][0])
            _, job = waiting.pop(future)
            if job.case in dense_left:
                dense_left.remove(job.case)
                measured.measure_dense(job.case)
            try:
                measured.measure(job, future.result())
            except BrokenProcessPool as error:
                raise MachineError(
                    f"a building process died (out of memory?): {error}. Use fewer --workers."
                ) from error
        measured.write()
    for future, (_, job) in waiting.items():
        future.cancel()
        text = f"{job.kernel} {job.precision} #{job.rank} {job.case.name} {job.case.sparsity} N={job.case.n}"
        why = "built, not measured in time" if future.done() and not future.cancelled() else "not built in time"
        measured.missing.append(Missing(what=text, why=why))
    measured.write(last=True)


def source_hash() -> str:
    """SHA-256 over the kernels' sources, names and contents."""
    digest = hashlib.sha256()
    root = Path(str(files("sparsedeploy.plugins")))
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cu"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# ---------------------------------------------------------------- command line
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="what", required=True)
    for name in ("list", "measure", "prepare"):
        made = sub.add_parser(name)
        made.add_argument("--cases", default="targets", help="lists, by commas, most important first")
        made.add_argument("--also", default="", help="further lists, each kernel's own choice only, without csr")
        made.add_argument("--filters", type=Path, help="folder of trained filters (*.npz) for the list `real`")
        made.add_argument("--only", default="", help="cases whose 'name sparsity N=n' contains this")
        made.add_argument("--kernels", default=",".join(kernel.name for kernel in KERNELS))
        made.add_argument("--precisions", default=",".join(PRECISIONS))
        made.add_argument("--top", type=int, default=2, help="configurations of each kernel, best predicted first")
        if name != "list":
            made.add_argument("--out", type=Path, required=True)
            made.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
        if name == "measure":
            made.add_argument("--ptx", type=Path, help="what `prepare` made, in place of NVRTC")
            made.add_argument("--limit-s", type=float, default=3600.0)
            made.add_argument("--commit", default="", help="recorded where the checkout has no git folder")
            made.add_argument("--no-cold", action="store_true")
            made.add_argument("--no-cudnn", action="store_true")
    sub.add_parser("summary").add_argument("file", type=Path)
    profile = sub.add_parser("profile")
    profile.add_argument("file", type=Path)
    profile.add_argument("--out", type=Path, required=True)
    return parser


def _work_list(options: argparse.Namespace) -> list[tuple[Case, list[Job]]]:
    def wanted(names: str) -> list[Case]:
        found = cases([name for name in names.split(",") if name], options.filters)
        return [case for case in found if options.only in f"{case.name} {case.sparsity} N={case.n}"]

    kernels, precisions = options.kernels.split(","), options.precisions.split(",")
    first = wanted(options.cases)
    rest = [case for case in wanted(options.also) if case not in first]
    if not first and not rest:
        raise InputError(f"--only {options.only!r} leaves no case of {options.cases}; `list` shows what there is.")
    few = [kernel for kernel in kernels if kernel != "csr"]
    return [*jobs(first, kernels, precisions, options.top), *jobs(rest, few, precisions, 1)]


def _prepare(options: argparse.Namespace) -> int:
    """Compile the work list's CUDA C++ on this machine."""
    listed = [job for _, made in _work_list(options) for job in made if job.kernel != "baked"]
    texts: Texts = {}
    with futures.ProcessPoolExecutor(
        options.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=know_texts,
        initargs=(options.out,),
    ) as pool:
        for made in pool.map(compile_only, listed, chunksize=4):
            texts |= made
    options.out.write_bytes(lzma.compress(pickle.dumps(texts), preset=9))
    print(f"{len(texts)} texts for {len(listed)} rows, {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


def _measure(options: argparse.Namespace) -> int:
    """Measure on this machine's GPU; 1 when a result was wrong."""
    work_list = _work_list(options)
    # Workers start before the driver does: a forked process cannot use CUDA, and a spawned one is slow to import.
    context = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(
        options.workers, mp_context=context, initializer=use_texts, initargs=(options.ptx,)
    )
    code = None if options.no_cold else pool.submit(straight_code)
    bench = Gpu(code.result() if code else None)
    command = " ".join(["python scripts/bench_kernels.py", *sys.argv[1:]])
    measured = Run(
        bench, options.out, command, options.commit or _commit(), cold=not options.no_cold, cudnn=not options.no_cudnn
    )
    run(work_list, bench, measured, pool, options.limit_s)
    results = measured.results()
    print(summary(results))
    wrong = any("relative error" in entry.why or "differ" in entry.why for entry in results.missing)
    sys.stdout.flush()
    for process in list((pool._processes or {}).values()):  # builds that came too late
        process.terminate()
    os._exit(int(wrong))


def main() -> int:
    """Command line."""
    options = _parser().parse_args()
    try:
        if options.what == "summary":
            print(summary(read(options.file)))
            return 0
        if options.what == "profile":
            options.out.write_text(to_profile(read(options.file), find(DEVICE)).to_json(), encoding="utf-8")
            return 0
        if options.what == "list":
            for case, made in _work_list(options):
                print(f"{case.name} {case.sparsity:g} N={case.n}: {len(made)} rows")
            return 0
        return _prepare(options) if options.what == "prepare" else _measure(options)
    except SparseDeployError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
