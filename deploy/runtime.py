"""What runs a model: one protocol for every library that can, and one for a model held ready at a fixed batch.

A `Runner` is a loaded model. A `Session` is that model at one set of input shapes with its buffers: what `bench` and
`tune` time. Copies to and from the device are apart from the inference, so each can be timed alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.bundle import DENSE_MODEL, SPARSE_MODEL, read_manifest
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.rewrite import restore
from sparsedeploy.engines.engine import BACKENDS, import_backend
from sparsedeploy.engines.engine_build import TITLES, Backend
from sparsedeploy.engines.engine_file import EngineRecord, Which, record_path
from sparsedeploy.errors import InputError, MachineError, SparseDeployError
from sparsedeploy.gpu import first_gpu
from sparsedeploy.plugins import kernel_named
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.reading import stored_precision

RunnerName = Literal["torch", "onnxruntime", "tensorrt", "tensorrt_rtx"]
Arithmetic = Literal["fp32", "tf32", "fp16"]
"""The precision that convolutions are computed in. tf32 is fp32 data with tensor cores' short mantissa."""

Feeds = Mapping[str, NDArray[np.generic]]

RUNNERS: tuple[RunnerName, ...] = ("tensorrt", "tensorrt_rtx", "torch", "onnxruntime")
"""In the order in which `load` tries them where none is named."""


@dataclass(frozen=True)
class Binding:
    """One input or output: its name, shape with names for open dimensions, and numpy dtype name."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


class Session(Protocol):
    """A model ready at fixed input shapes. Not shared between threads."""

    device_clock: bool
    """Whether `mark` and `elapsed_us` measure on the device; False on a CPU, where only the wall clock exists."""
    graph: bool
    """Whether `enqueue` replays a captured CUDA graph."""

    def upload(self, feeds: Feeds) -> None:
        """Copy host arrays into the session's input buffers and wait."""

    def enqueue(self) -> None:
        """One inference on the buffers, in stream order: returns before it is done where the device allows it."""

    def wait(self) -> None:
        """Until everything enqueued is done."""

    def download(self) -> dict[str, NDArray[Any]]:
        """Wait, and copy every output to the host."""

    def mark(self) -> object:
        """A point in stream order (a CUDA event); meaningless on a CPU."""

    def elapsed_us(self, start: object, end: object) -> float:
        """Microseconds between two marks, after waiting for the second."""

    def close(self) -> None:
        """Free buffers and graphs."""


class Runner(Protocol):
    """A loaded model."""

    name: RunnerName
    arithmetic: Arithmetic
    device: str
    """`cpu` or `cuda:0`, for people."""
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    sparse_layers: int
    """Layers that run a sparse kernel: 0 for a dense model, and for a sparse one that ran dense."""
    notes: tuple[str, ...]
    """What people must know to read the times: what ran dense, which layout, which library version."""

    def session(self, shapes: Mapping[str, tuple[int, ...]], graph: bool = False) -> Session:
        """Buffers for these input shapes; with `graph`, inference captured in a CUDA graph. Raises InputError where the
        model does not allow the shapes, MachineError where the device or library cannot.
        """

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One inference. Arrays on the device (torch, CuPy, PyCUDA: `__cuda_array_interface__` or DLPack) are used where they
        lie and outputs stay on the device as such arrays; host arrays (numpy) give host arrays.
        """

    def close(self) -> None:
        """Free everything."""


def load(
    path: Path, runner: RunnerName | None = None, arithmetic: Arithmetic | None = None, device: str | None = None
) -> Runner:
    """A runner for a bundle (its sparse model where it has one), one of its two models, any ONNX file, or an engine.

    Without `runner`: the bundle's engine where one loads here, else PyTorch where it finds a GPU, else ONNX Runtime.
    `arithmetic` is the bundle's precision, else that of the model's weights. `device` (`cpu`, `cuda:0`) is for torch and
    onnxruntime; None takes a GPU where the library finds one. Raises InputError, MachineError.
    """
    if not path.exists():
        raise InputError(
            f"{path}: no such file or folder. Give a bundle that convert made, an ONNX model or an engine."
        )
    model, own = _model_in(path)
    chosen = arithmetic or own
    if path.suffix == ".engine":
        return _load_engine(path, arithmetic)
    if runner is not None:
        return _load_named(model, runner, chosen, device)
    skipped: list[tuple[RunnerName, SparseDeployError]] = []
    for name in RUNNERS if first_gpu() is not None and device != "cpu" else ("onnxruntime",):
        if name != "onnxruntime" and not _is_there(name, model):
            continue
        try:
            return _load_named(model, name, chosen, device)
        except SparseDeployError as error:
            skipped.append((name, error))
    if len(skipped) == 1:
        raise skipped[0][1]
    reasons = " ".join(f"{name}: {error}" for name, error in skipped)
    raise MachineError(f"{path}: no library on this machine runs it. {reasons}")


def unpacked(model: Model, nodes: Mapping[str, SparseConv]) -> Model:
    """The model with its sparse nodes as dense convolutions again, by the weights that they carry.

    Raises InputError for a node whose weights this version cannot read.
    """

    def unpack(node: SparseConv) -> tuple[NDArray[np.generic], NDArray[np.generic] | None]:
        try:
            return kernel_named(node.kernel).unpack(node)
        except ValueError as error:
            raise InputError(
                f"{model.path.name}: the weights of layer {node.layer} cannot be read from its {node.kernel} node ({error}). It is "
                "damaged or of another version of sparsedeploy: convert the model again."
            ) from error

    return restore(model, unpack) if nodes else model


def _model_in(path: Path) -> tuple[Path, Arithmetic]:
    """The ONNX file that a path stands for, and the precision it is meant for."""
    if path.suffix == ".engine":
        return path, "fp32"
    if not path.is_dir():
        return path, stored_precision(path)
    manifest = read_manifest(path)
    return path / (SPARSE_MODEL if manifest.sparse_layers else DENSE_MODEL), manifest.precision


def _is_there(name: RunnerName, model: Path) -> bool:
    if name == "torch":
        return importlib.util.find_spec("torch") is not None
    return name in BACKENDS and bool(engines_beside(model, name))


def _load_named(model: Path, name: RunnerName, arithmetic: Arithmetic, device: str | None) -> Runner:
    if name == "torch":
        try:
            from sparsedeploy.runners.torch_runner import load_torch
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            raise MachineError(
                "the torch runner needs PyTorch, which is not installed here. Install it with `pip install torch` (a CUDA build "
                "for the GPU), or use --runner onnxruntime."
            ) from error
        return load_torch(model, arithmetic, device)
    if name == "onnxruntime":
        from sparsedeploy.runners.onnxruntime_runner import load_onnxruntime

        return load_onnxruntime(model, arithmetic, device)
    if name == "tensorrt" or name == "tensorrt_rtx":
        return _load_engine(_engine_of(model, name, arithmetic), arithmetic)
    raise InputError(f"--runner {name}: no such runner; this version has {', '.join(RUNNERS)}.")


def _load_engine(engine: Path, arithmetic: Arithmetic | None) -> Runner:
    from sparsedeploy.runners.engine_runner import load_engine_runner

    return load_engine_runner(engine, arithmetic)


def engines_beside(model: Path, backend: Backend) -> tuple[Path, ...]:
    """The engines in a bundle that were built by `backend` from that model, any GPU."""
    if model.name not in (SPARSE_MODEL, DENSE_MODEL):
        return ()
    which: Which = "dense" if model.name == DENSE_MODEL else "sparse"
    found = []
    for path in sorted(model.parent.glob(f"model.*{backend}.sm*.engine")):
        try:
            record = EngineRecord.from_json(record_path(path).read_bytes(), record_path(path))
        except (OSError, InputError):
            continue  # loading it by name says what is wrong with it
        if record.backend == backend and record.which == which:
            found.append(path)
    return tuple(found)


def _engine_of(model: Path, backend: Backend, arithmetic: Arithmetic) -> Path:
    """The engine of that model for this GPU; raises in words where there is none, or no library to load it."""
    import_backend(backend)
    gpu = first_gpu()
    if gpu is None:
        raise MachineError(
            f"{TITLES[backend]} runs on an NVIDIA GPU and this machine shows none. Use --runner onnxruntime, which gives the "
            "right answer on the CPU."
        )
    found = engines_beside(model, backend)
    fitting = [path for path in found if f".sm{gpu.sm}." in path.name]
    if fitting:
        return fitting[0]
    held = f"it holds {', '.join(path.name for path in found)}" if found else "it holds none"
    dense = " --dense" if model.name == DENSE_MODEL else ""
    raise MachineError(
        f"{model.parent}: no engine of {TITLES[backend]} for this GPU (sm_{gpu.sm}) and {model.name}; {held}. Build one with "
        f"`sparsedeploy build {model.parent} --backend {backend}{dense}{' --tf32' if arithmetic == 'tf32' else ''}`."
    )
