"""Many kernels built at once, each in a process of its own that is ended when its compile budget is spent.

Workers are plain `python -m sparsedeploy.measure.candidate_build` processes that read jobs from stdin and answer on stdout: they
import no torch, touch no GPU and share nothing with a caller that does. Killing one with its process group ends the
assembler under it, which a thread or a pool of the standard library cannot do.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, Any, Protocol

from sparsedeploy.devices import Device
from sparsedeploy.errors import InputError, SparseDeployError
from sparsedeploy.layer import ConvLayer, Precision
from sparsedeploy.plugins import KERNELS, kernel_named
from sparsedeploy.plugins.baked.choose import PART_FMAS, WHOLE_FMAS
from sparsedeploy.plugins.kernel import BuildOptions, Built, Config, Floats, Prediction, UnfitWeightsError

MOST_CORES = 4
"""What plugins/assemble.py lets one ptxas use."""


@dataclass(frozen=True)
class Job:
    """One kernel to build for one layer."""

    layer: ConvLayer
    weight: Floats
    bias: Floats | None
    kernel: str
    config: Config
    device: Device
    options: BuildOptions

    @property
    def weigh(self) -> tuple[bool, int]:
        """What takes longest sorts last: generated code first of all, by its nonzeros."""
        return (self.kernel == "baked", self._nnz)

    @property
    def cores(self) -> int:
        """Cores that building it keeps busy: large generated kernels are compiled in parts side by side."""
        fmas = self._nnz * self.config.get("rows", 1)
        if self.kernel != "baked" or fmas <= WHOLE_FMAS:
            return 1
        return min(MOST_CORES, self.config.get("parts") or -(-fmas // PART_FMAS))

    @property
    def _nnz(self) -> int:
        return self.layer.zeros.nnz if self.layer.zeros else 0


@dataclass(frozen=True)
class Made:
    """What became of a job: a node, or why there is none."""

    built: Built | None
    why: str = ""
    seconds: float = 0.0


def build_one(job: Job) -> Made:
    """Build here and now. Weights that do not fit and compilers that refuse are answers, not exceptions."""
    started = time.perf_counter()
    try:
        built = kernel_named(job.kernel).build(job.layer, job.weight, job.bias, job.device, job.config, job.options)
    except UnfitWeightsError as error:
        return Made(None, f"cannot carry the weights: {error}", time.perf_counter() - started)
    except (SparseDeployError, ValueError) as error:
        return Made(None, f"was not built: {' '.join(str(error).split())[:400]}", time.perf_counter() - started)
    seconds = time.perf_counter() - started
    if not built.node.executable:
        return Made(None, f"has no code: {'; '.join(built.notes) or 'no compiler'}", seconds)
    return Made(built, "", seconds)


@dataclass(frozen=True)
class Search:
    """Which configurations of every kernel are worth building for one layer."""

    layer: ConvLayer
    device: Device
    precision: Precision
    batch: int
    per_kernel: int
    kernels: tuple[str, ...] = ()
    """Names; empty: every kernel."""
    hopeless: float = math.inf
    """Configurations predicted to take so many times the fastest one's time are not worth compiling."""


@dataclass(frozen=True)
class Option:
    """One kernel and configuration, and its predicted time."""

    kernel: str
    config: Config
    prediction: Prediction


def search(asked: Search) -> tuple[Option, ...]:
    """Up to `per_kernel` different configurations of each kernel, predicted fastest first; kernels that no plan would choose
    unasked too.
    """
    found = []
    for kernel in KERNELS:
        if asked.kernels and kernel.name not in asked.kernels:
            continue
        if kernel.supports(asked.layer, asked.device, asked.precision) is None:
            ranked = kernel.configs(asked.layer, asked.device, asked.precision, asked.batch)
            options = [Option(kernel.name, config, prediction) for config, prediction in ranked]
            found += _different(options, asked.per_kernel)
    best = min((option.prediction.us for option in found), default=0.0)
    return tuple(option for option in found if option.prediction.us <= asked.hopeless * best)


def _different(options: Sequence[Option], count: int) -> list[Option]:
    """The first `count` that are not all but the same: 767 and 768 pixels measure alike, and compile twice."""
    chosen: list[Option] = []
    for option in options:
        if len(chosen) < count and not any(_alike(option.config, other.config) for other in chosen):
            chosen.append(option)
    return chosen


def _alike(a: Config, b: Config) -> bool:
    """Whether no parameter differs by more than a tenth."""
    return a.keys() == b.keys() and all(abs(a[key] - b[key]) <= 0.1 * max(abs(a[key]), abs(b[key])) for key in a)


class Builder(Protocol):
    """Where kernels are built."""

    def build(self, jobs: Sequence[Job]) -> list[Made]:
        """Every job, results in the order of `jobs`."""

    def search(self, asked: Sequence[Search]) -> list[tuple[Option, ...]]:
        """Every search, results in order; an empty answer where one failed."""


class Builders:
    """A pool of processes that build. Use as a context manager: leaving it ends them and removes their files. No more is
    begun at a time than `workers` cores (None: all that this process may use) can compile side by side.

    A job that takes longer than `budget_s` seconds of wall time is ended and answered with that. Raises InputError for
    a budget that is not positive.
    """

    def __init__(self, budget_s: float, workers: int | None = None) -> None:
        if not budget_s > 0:
            raise InputError(f"compile budget of {budget_s:g} seconds: it must be positive.")
        self.budget_s, self.count = budget_s, workers or _usable()
        self._cores, self._interrupted = _Cores(self.count), False
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._all: list[_Worker] = []

    def __enter__(self) -> Builders:
        self._folder = tempfile.TemporaryDirectory(prefix="sparsedeploy-build-", ignore_cleanup_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.close()
        self._folder.cleanup()

    def build(self, jobs: Sequence[Job]) -> list[Made]:
        """Longest first, in parallel."""
        order = sorted(range(len(jobs)), key=lambda at: jobs[at].weigh, reverse=True)
        answers = self._ask([jobs[at] for at in order])
        made: dict[int, Made] = dict(zip(order, answers, strict=True))
        return [made[at] for at in range(len(jobs))]

    def search(self, asked: Sequence[Search]) -> list[tuple[Option, ...]]:
        """In parallel; like layers together, since a worker remembers what it searched for."""
        return [() if isinstance(answer, Made) else answer for answer in self._ask(asked)]

    def _ask(self, jobs: Sequence[Any]) -> list[Any]:
        if not jobs:
            return []
        with ThreadPoolExecutor(max_workers=min(self.count, len(jobs))) as threads:
            try:
                return list(threads.map(self._one, jobs))
            except BaseException:  # an interrupt must not wait for compilers: workers have a session of their own
                self._interrupted = True
                for worker in self._all:
                    worker.end()
                raise

    def _one(self, job: Any) -> Any:
        with self._cores.held(job.cores if isinstance(job, Job) else 1):
            return Made(None, "was not built: interrupted") if self._interrupted else self._built(job)

    def _built(self, job: Any) -> Any:
        try:
            worker = self._idle.get_nowait()
        except Empty:
            worker = _Worker(self._folder.name)
            self._all.append(worker)
        started = time.perf_counter()
        try:
            answer = worker.ask(job, self.budget_s)
        except (EOFError, OSError, pickle.UnpicklingError):
            worker.close()
            seconds = time.perf_counter() - started
            if seconds >= self.budget_s:
                return Made(None, f"was not compiled within {self.budget_s:g} s", seconds)
            return Made(None, f"ended its compiler process (exit code {worker.process.returncode})", seconds)
        self._idle.put(worker)
        return answer


class _Cores:
    """Cores dealt out to jobs in the order of asking. Compilers that take turns on too few cores would all run out of
    budget: what is begun must be able to end.
    """

    def __init__(self, count: int) -> None:
        self.count, self.free = count, count
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, wanted: int) -> Iterator[None]:
        """Wait for `wanted` cores (all there are, where that is more), and give them back."""
        wanted, ticket = min(wanted, self.count), object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and self.free >= wanted)
            self._waiting.popleft()
            self.free -= wanted
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.free += wanted
                self._changed.notify_all()


def _usable() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """One process, and the pipe to it."""

    def __init__(self, folder: str) -> None:
        # The caller's own path, so that a checkout that was put there by hand is found too; one thread each, since
        # there is a worker per core.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        environment |= {"TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparsedeploy.measure.candidate_build"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def ask(self, job: Any, budget_s: float) -> Any:
        """Raises EOFError or OSError when the process is gone: ended by the timer, or by itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(budget_s, self.end)
        timer.start()
        try:
            pickle.dump(job, self.process.stdin)
            self.process.stdin.flush()
            return pickle.load(self.process.stdout)
        finally:
            timer.cancel()

    def end(self) -> None:
        """Kill it with everything under it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End and forget it."""
        self.end()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()


def answer(job: Job | Search) -> Made | tuple[Option, ...]:
    """What a worker does with what it is sent."""
    return build_one(job) if isinstance(job, Job) else search(job)


def _jobs(stream: IO[bytes]) -> Iterator[Any]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(stream)


def _serve() -> None:
    """Answer jobs until stdin ends. Whatever prints goes to stderr: stdout is the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # As the module that callers know: pickled under `__main__` their classes and ours would differ.
    from sparsedeploy.measure import candidate_build

    for job in candidate_build._jobs(sys.stdin.buffer):
        pickle.dump(candidate_build.answer(job), answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
