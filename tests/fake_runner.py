"""A GPU that is not there: runners with the right answers from ONNX Runtime and times from a clock that tests move."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.bundle import SPARSE_MODEL
from sparsedeploy.converters.load import load, save
from sparsedeploy.converters.rewrite import read_nodes, restore
from sparsedeploy.errors import MachineError
from sparsedeploy.gpu import Gpu
from sparsedeploy.measure.bench import Tools
from sparsedeploy.measure.gpu_state import GpuState
from sparsedeploy.plugins import kernel_named
from sparsedeploy.runtime import Arithmetic, Binding, Feeds, RunnerName
from sparsedeploy.verify import run_file

H200 = Gpu("Fake H200", 90, 132)
CALM = GpuState(sm_mhz=1980, memory_mhz=3201, temperature_c=40, power_w=300.0, utilisation=0, processes=0)


@dataclass
class Bench:
    """The fake machine: its clock, how long things take (microseconds), and what goes wrong."""

    us: dict[tuple[str, str], float] = field(
        default_factory=lambda: {
            ("dense", "fp32"): 1000.0, ("dense", "tf32"): 400.0, ("dense", "fp16"): 300.0, ("sparse", "fp32"): 250.0,
            ("sparse", "fp16"): 200.0,
        }
    )  # fmt: skip
    launch_us: float = 120.0
    """Enqueue without a CUDA graph; 10 with one."""
    gaps_us: float = 30.0
    """What the device waits for launches without a CUDA graph."""
    copy_us: float = 80.0
    noise: float = 0.01
    drift: Callable[[float], float] = lambda seconds: 1.0
    """Factor on every device time, from the seconds since the start."""
    spoil: Callable[[str, str, dict[str, NDArray[Any]]], None] = lambda which, arithmetic, outputs: None
    """May change outputs in place."""
    state: Callable[[float], GpuState | None] = lambda seconds: CALM
    missing: tuple[str, ...] = ("tensorrt", "tensorrt_rtx", "onnxruntime")
    steps: bool = False
    stale: bool = False
    """A CUDA graph that answers for the inputs it was captured with."""
    now_ns: float = 0.0
    busy_until_ns: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(1))
    known: dict[tuple[str, bytes], dict[str, NDArray[Any]]] = field(default_factory=dict)
    open_sessions: int = 0
    open_runners: int = 0

    def clock(self) -> int:
        """Host nanoseconds."""
        return int(self.now_ns)

    def tools(self, gpu: Gpu | None = H200) -> Tools:
        """For bench."""
        return Tools(self.load, gpu, self, self.clock)

    def read(self) -> GpuState | None:
        """As a probe."""
        return self.state(self.now_ns / 1e9)

    def load(self, model: Path, name: RunnerName, arithmetic: Arithmetic) -> FakeRunner:
        """As runtime.load."""
        if name in self.missing:
            raise MachineError(f"{name} is not installed. Install it.")
        self.now_ns += 5e8
        return FakeRunner(self, model, name, arithmetic)


class FakeRunner:
    """One model; answers are ONNX Runtime's."""

    def __init__(self, bench: Bench, model: Path, name: RunnerName, arithmetic: Arithmetic) -> None:
        self.bench, self.model, self.name, self.arithmetic = bench, model, name, arithmetic
        self.device = "cuda:0"
        self.which = "sparse" if model.name == SPARSE_MODEL else "dense"
        found = load(model)
        self.nodes = read_nodes(found)
        self.sparse_layers = len(self.nodes)
        self.notes: tuple[str, ...] = ("PyTorch 0.0 (fake)",)
        self.inputs = tuple(
            Binding(value.name, tuple(dim.dim_value or "N" for dim in value.type.tensor_type.shape.dim), "float32")
            for value in found.graph.inputs()
        )
        self.outputs: tuple[Binding, ...] = ()
        self.restored = restore(found, lambda node: kernel_named(node.kernel).unpack(node)) if self.nodes else found
        bench.open_runners += 1

    def session(self, shapes: Mapping[str, tuple[int, ...]], graph: bool = False) -> FakeSession:
        """A session at these shapes, which it notes once."""
        note = "shapes " + " ".join("x".join(map(str, shape)) for shape in shapes.values())
        self.notes = self.notes if note in self.notes else (*self.notes, note)
        return (SteppedSession if self.bench.steps else FakeSession)(self, shapes, graph)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Not needed here."""
        raise NotImplementedError

    def answer(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """What the model makes of its inputs; run once for all sessions of the machine."""
        key = (str(self.model), b"".join(value.tobytes() for value in feeds.values()))
        if key not in self.bench.known:
            self.bench.known[key] = self.run_restored(feeds)
        return {name: value.copy() for name, value in self.bench.known[key].items()}

    def run_restored(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """By ONNX Runtime, with the weights that the nodes carry."""
        with tempfile.TemporaryDirectory() as folder:
            save(self.restored, Path(folder) / "m.onnx")
            return {name: np.array(value) for name, value in run_file(Path(folder) / "m.onnx", dict(feeds)).items()}

    def close(self) -> None:
        """Count it."""
        self.bench.open_runners -= 1


class FakeSession:
    """Keeps its inputs; times come from the fake clock."""

    device_clock = True

    def __init__(self, runner: FakeRunner, shapes: Mapping[str, tuple[int, ...]], graph: bool) -> None:
        self.runner, self.graph, self.bench = runner, graph, runner.bench
        self.batch = max(shape[0] for shape in shapes.values())
        self.feeds: Feeds = {}
        self.first: Feeds = {}
        self.answers: dict[bytes, dict[str, NDArray[Any]]] = {}
        self.bench.open_sessions += 1

    def upload(self, feeds: Feeds) -> None:
        """Copy in."""
        self.feeds = {name: value.copy() for name, value in feeds.items()}
        self.first = self.first or self.feeds
        self.bench.now_ns += 1e3 * self.bench.copy_us

    def enqueue(self) -> None:
        """The host pays the launch; the device is busy from when it was free."""
        bench = self.bench
        us = bench.us[self.runner.which, self.runner.arithmetic] * self.batch**0.8
        us += 0 if self.graph else bench.gaps_us
        us *= bench.drift(bench.now_ns / 1e9) * (1 + bench.noise * abs(bench.random.gauss(0, 1)))
        start = max(bench.now_ns, bench.busy_until_ns)
        bench.now_ns += 1e3 * (10.0 if self.graph else bench.launch_us)
        bench.busy_until_ns = start + 1e3 * us

    def wait(self) -> None:
        """Until the device is done."""
        self.bench.now_ns = max(self.bench.now_ns, self.bench.busy_until_ns) + 2e3

    def download(self) -> dict[str, NDArray[Any]]:
        """The answer, computed once for each input."""
        self.wait()
        self.bench.now_ns += 1e3 * self.bench.copy_us / 4
        feeds = self.first if self.graph and self.bench.stale else self.feeds
        key = b"".join(np.ascontiguousarray(value).tobytes() for value in feeds.values())
        if key not in self.answers:
            outputs = self.runner.answer(feeds)
            self.bench.spoil(self.runner.which, self.runner.arithmetic, outputs)
            self.answers[key] = outputs
        return self.answers[key]

    def mark(self) -> object:
        """When the device will have come here."""
        return max(self.bench.now_ns, self.bench.busy_until_ns)

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Between two marks."""
        return float(end - start) / 1e3

    def close(self) -> None:
        """Count it."""
        self.bench.open_sessions -= 1


class SteppedSession(FakeSession):
    """One that also times its steps."""

    def step_times(self) -> list[tuple[str, str, float]]:
        """Two convolutions and the rest."""
        sparse = self.runner.which == "sparse"
        form = "sparse csr" if sparse else "nchw fused"
        return [("c1", form, 60.0 if sparse else 500.0), ("c2", form, 90.0 if sparse else 400.0), ("gap", "", 100.0)]
