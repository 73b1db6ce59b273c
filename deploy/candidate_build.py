"""Many kernels built at once, each in a process of its own that is ended when its compile budget is spent.

Workers are plain `python -m sparsedeploy.candidate_build` processes that read jobs from stdin and answer on stdout: they
import no torch, touch no GPU and share nothing with a caller that does. Killing one with its process group ends the
assembler under it, which a thread or a pool of the standard library cannot do.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO

from sparsedeploy.devices import Device
from sparsedeploy.errors import InputError, SparseDeployError
from sparsedeploy.layer import ConvLayer
from sparsedeploy.plugins import kernel_named
from sparsedeploy.plugins.kernel import BuildOptions, Built, Config, Floats, UnfitWeightsError


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
        return (self.kernel == "baked", self.layer.zeros.nnz if self.layer.zeros else 0)


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


def build_many(
    jobs: Sequence[Job],
    budget_s: float,
    workers: int | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> list[Made]:
    """Build every job, longest first, results in the order of `jobs`; `tell` hears how many are done.

    A job that takes longer than `budget_s` seconds of wall time is ended and answered with that. Raises InputError for
    a budget that is not positive.
    """
    if budget_s <= 0:
        raise InputError(f"compile budget {budget_s:g} s: it must be positive.")
    if not jobs:
        return []
    order = sorted(range(len(jobs)), key=lambda at: jobs[at].weigh, reverse=True)
    count = min(workers or os.cpu_count() or 1, len(jobs))
    results: dict[int, Made] = {}
    with _Workers(budget_s) as pool, ThreadPoolExecutor(max_workers=count) as threads:

        def work(at: int) -> None:
            results[at] = pool.build(jobs[at])
            tell(len(results))

        for future in [threads.submit(work, at) for at in order]:
            future.result()
    return [results[at] for at in range(len(jobs))]


class _Worker:
    """One process, and the pipe to it."""

    def __init__(self, folder: str) -> None:
        # The caller's own path, so that a checkout that was put there by hand is found too; one thread each, since
        # there is a worker per core.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        environment |= {"TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparsedeploy.candidate_build"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def ask(self, job: Job, budget_s: float) -> Made:
        """Raises EOFError or OSError when the process is gone: ended by the timer, or by itself."""
        assert self.process.stdin and self.process.stdout
        timer = threading.Timer(budget_s, self.end)
        timer.start()
        try:
            pickle.dump(job, self.process.stdin)
            self.process.stdin.flush()
            answer = pickle.load(self.process.stdout)
        finally:
            timer.cancel()
        assert isinstance(answer, Made)
        return answer

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


class _Workers:
    """Idle workers to take one from; their temporary files go with them."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self.idle: SimpleQueue[_Worker] = SimpleQueue()
        self.all: list[_Worker] = []

    def __enter__(self) -> _Workers:
        self.folder = tempfile.TemporaryDirectory(prefix="sparsedeploy-build-", ignore_cleanup_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.all:
            worker.close()
        self.folder.cleanup()

    def build(self, job: Job) -> Made:
        worker = self._take()
        started = time.perf_counter()
        try:
            made = worker.ask(job, self.budget_s)
        except (EOFError, OSError, pickle.UnpicklingError):
            worker.close()
            seconds = time.perf_counter() - started
            if seconds >= self.budget_s:
                return Made(None, f"was not compiled within {self.budget_s:g} s", seconds)
            return Made(None, f"ended its compiler process (exit code {worker.process.returncode})", seconds)
        self.idle.put(worker)
        return made

    def _take(self) -> _Worker:
        try:
            return self.idle.get_nowait()
        except Empty:
            worker = _Worker(self.folder.name)
            self.all.append(worker)
            return worker


def _jobs(stream: IO[bytes]) -> Iterator[Job]:
    while True:
        try:
            job = pickle.load(stream)
        except EOFError:
            return
        assert isinstance(job, Job)
        yield job


def _serve() -> None:
    """Answer jobs until stdin ends. Whatever prints goes to stderr: stdout is the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # As the module that callers know: pickled under `__main__` their classes and ours would differ.
    from sparsedeploy import candidate_build

    for job in candidate_build._jobs(sys.stdin.buffer):
        pickle.dump(candidate_build.build_one(job), answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
