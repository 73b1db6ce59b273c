"""ONNX Runtime as a runner: the right answer on any machine, dense. SparseConv2d nodes are unpacked into convolutions."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from sparsedeploy.converters.fold_batchnorm import fold_batchnorm
from sparsedeploy.converters.fold_constants import fold_constants
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load, save
from sparsedeploy.converters.precision import to_fp16
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.runners.cuda_stream import cuda, view
from sparsedeploy.runtime import Arithmetic, Binding, Feeds, RunnerName, unpacked

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_TYPES = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64", "tensor(int8)": "int8",
    "tensor(int16)": "int16", "tensor(int32)": "int32", "tensor(int64)": "int64", "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}  # fmt: skip
Shapes = Mapping[str, tuple[int, ...]]


def load_onnxruntime(path: Path, arithmetic: Arithmetic = "fp32", device: str | None = None) -> OnnxRuntimeRunner:
    """A runner for an ONNX model. `device` None takes the CUDA provider where this ONNX Runtime has one.

    Raises MachineError for a GPU asked of an ONNX Runtime without that provider and for tf32 on a CPU, InputError for a model that
    it cannot run.
    """
    has_cuda = CUDA in ort.get_available_providers()
    if device is not None and device != "cpu" and not has_cuda:
        raise MachineError(
            f"onnxruntime on {device}: this ONNX Runtime {ort.__version__} has no CUDA provider. Install one that has (`pip install "
            "onnxruntime-gpu` instead of onnxruntime), or use the device cpu."
        )
    on_gpu = has_cuda and device != "cpu"
    if arithmetic == "tf32" and not on_gpu:
        raise MachineError("onnxruntime: tf32 is an arithmetic of GPUs; on the CPU use fp32.")
    model = load(path)
    nodes = read_nodes(model)
    notes = [f"ONNX Runtime {ort.__version__}"]
    wide = [node.layer for node in nodes.values() if node.precision == "fp32"]
    if arithmetic == "fp16" and wide:
        raise InputError(
            f"{path.name}: its sparse nodes ({wide[0]}, ...) compute in fp32 and fp16 was asked for. Convert the model with "
            "--precision fp16, or run it with --precision fp32."
        )
    if nodes:
        model = unpacked(model, nodes)
        notes.append(f"ran dense: the {len(nodes)} sparse layers were unpacked, ONNX Runtime has no kernel for them")
    elif arithmetic == "fp16":
        fold_constants(model)
        fold_batchnorm(model)
        to_fp16(model)
    return OnnxRuntimeRunner(model, arithmetic, on_gpu, tuple(notes))


class OnnxRuntimeRunner:
    """A session of ONNX Runtime. Nothing is sparse in it."""

    name: RunnerName = "onnxruntime"
    sparse_layers = 0

    def __init__(self, model: Model, arithmetic: Arithmetic, on_gpu: bool, notes: tuple[str, ...]) -> None:
        self.arithmetic, self.notes = arithmetic, notes
        self.device = "cuda:0" if on_gpu else "cpu"
        self._path = model.path
        self._session = _ort_session(model, arithmetic, on_gpu)
        self.inputs = tuple(_binding(model.path, entry) for entry in self._session.get_inputs())
        self.outputs = tuple(_binding(model.path, entry) for entry in self._session.get_outputs())

    def session(self, shapes: Shapes, graph: bool = False) -> OnnxRuntimeSession:
        """Buffers for these shapes. CUDA graphs are not offered: raises MachineError for `graph`."""
        if graph:
            raise MachineError("onnxruntime: this runner captures no CUDA graph. Ask for a session without one.")
        for binding in self.inputs:
            shape = shapes.get(binding.name)
            if shape is None or not _fits(shape, binding):
                found = "x".join(map(str, shape)) if shape else "no shape"
                raise InputError(
                    f"{self._path.name}: {found} was given for input {binding.name!r}, needed "
                    f"{'x'.join(map(str, binding.shape))}."
                )
        return OnnxRuntimeSession(self, self._session, shapes)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One inference. With the CUDA provider, device arrays are used where they lie and outputs stay on the device."""
        missing = sorted({binding.name for binding in self.inputs} - feeds.keys())
        if missing:
            raise InputError(f"{self._path.name}: no array for input {missing[0]!r}.")
        if all(isinstance(value, np.ndarray) for value in feeds.values()):
            typed = {entry.name: feeds[entry.name].astype(entry.dtype, copy=False) for entry in self.inputs}
            names = [entry.name for entry in self.outputs]
            return dict(zip(names, self._call(lambda: self._session.run(names, typed)), strict=True))
        if self.device == "cpu":
            raise InputError(
                "onnxruntime: this runner is on the CPU and takes numpy arrays. Copy device arrays to the host first."
            )
        return self._run_on_device(feeds)

    def _run_on_device(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        gpu = cuda()
        gpu.activate()
        gpu.wait_for_all()  # the session's stream does not wait for what makes these arrays
        binding = self._session.io_binding()
        for entry in self.inputs:
            value = feeds[entry.name]
            if isinstance(value, np.ndarray):
                binding.bind_cpu_input(entry.name, value.astype(entry.dtype, copy=False))
                continue
            address, shape, dtype = view(value, entry.name)
            if dtype != np.dtype(entry.dtype):
                raise InputError(f"input {entry.name!r} is {dtype} on the device, the model takes {entry.dtype}.")
            binding.bind_input(entry.name, "cuda", 0, np.dtype(entry.dtype).type, list(shape), address)
        for entry in self.outputs:
            binding.bind_output(entry.name, "cuda", 0)
        self._call(lambda: self._session.run_with_iobinding(binding))
        names = [entry.name for entry in self.outputs]
        return {name: _OnDevice(value) for name, value in zip(names, binding.get_outputs(), strict=True)}

    def _call(self, work: Any) -> Any:
        try:
            return work()
        except Exception as error:  # ORT raises its own types without a common base
            raise InputError(
                f"{self._path.name}: ONNX Runtime could not run it on these inputs: {' '.join(str(error).split())[:300]}. Check "
                "their shapes and types."
            ) from error

    def close(self) -> None:
        """Free everything."""
        self._session = None


class _OnDevice:
    """An output in the CUDA provider's memory, readable by torch, CuPy and PyCUDA while this object lives."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.shape = tuple(value.shape())

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        kind = np.dtype(_TYPES[self._value.data_type()]).str
        return {
            "shape": self.shape, "typestr": kind, "data": (self._value.data_ptr(), False), "strides": None, "version": 3,
        }  # fmt: skip


def _ort_session(model: Model, arithmetic: Arithmetic, on_gpu: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    gpu = (
        CUDA,
        {"device_id": "0", "use_tf32": "1" if arithmetic == "tf32" else "0", "cudnn_conv_algo_search": "EXHAUSTIVE"},
    )
    with tempfile.TemporaryDirectory(prefix="sparsedeploy-") as folder:
        file = Path(folder) / "model.onnx"
        save(model, file)
        try:
            session = ort.InferenceSession(str(file), options, providers=[gpu, CPU] if on_gpu else [CPU])
        except Exception as error:
            raise InputError(
                f"{model.path.name}: ONNX Runtime {ort.__version__} cannot load it: {' '.join(str(error).split())[:300]}. Try "
                "--runner torch, or a newer onnxruntime."
            ) from error
    if on_gpu and CUDA not in session.get_providers():
        raise MachineError(
            f"onnxruntime: the CUDA provider of ONNX Runtime {ort.__version__} did not start on this machine (its CUDA and cuDNN "
            "libraries must be found). Fix them, or use the device cpu."
        )
    return session


def _binding(path: Path, entry: Any) -> Binding:
    dtype = _TYPES.get(entry.type)
    if dtype is None:
        raise InputError(
            f"{path.name}: {entry.name!r} is {entry.type}, which is no tensor of numbers. Cut the model before it."
        )
    shape = tuple(size if isinstance(size, int) else str(size or f"d{at}") for at, size in enumerate(entry.shape))
    return Binding(entry.name, shape, dtype)


def _fits(shape: tuple[int, ...], binding: Binding) -> bool:
    pairs = zip(shape, binding.shape, strict=False)
    return len(shape) == len(binding.shape) and all(isinstance(want, str) or want == size for size, want in pairs)


class OnnxRuntimeSession:
    """Held at fixed shapes. Calls are synchronous; times are the wall clock's."""

    device_clock = False
    graph = False

    def __init__(self, owner: OnnxRuntimeRunner, session: Any, shapes: Shapes) -> None:
        self._owner, self._session = owner, session
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._names = [entry.name for entry in owner.outputs]
        self._values: dict[str, Any] = {}
        self._results: list[Any] | None = None
        self._binding: Any = None
        self._place = "cuda" if owner.device != "cpu" else "cpu"
        self.upload({entry.name: np.zeros(self._shapes[entry.name], entry.dtype) for entry in owner.inputs})

    def upload(self, feeds: Feeds) -> None:
        """Copy host arrays into the session's inputs."""
        for entry in self._owner.inputs:
            shape = self._shapes[entry.name]
            if entry.name not in feeds or tuple(feeds[entry.name].shape) != shape:
                found = f"is {list(feeds[entry.name].shape)}" if entry.name in feeds else "is missing"
                raise InputError(f"input {entry.name!r} {found}, the session takes {list(shape)}.")
            array = np.ascontiguousarray(feeds[entry.name].astype(entry.dtype))
            if entry.name in self._values:
                self._values[entry.name].update_inplace(array)
            else:
                self._values[entry.name] = ort.OrtValue.ortvalue_from_numpy(array, self._place, 0)
        self._bind()

    def _bind(self) -> None:
        if self._binding is not None:
            return
        self._binding = self._session.io_binding()
        for name, value in self._values.items():
            self._binding.bind_ortvalue_input(name, value)
        for name in self._names:
            self._binding.bind_output(name, self._place, 0)

    def enqueue(self) -> None:
        """One inference; done when it returns."""
        self._owner._call(lambda: self._session.run_with_iobinding(self._binding))
        self._results = self._binding.get_outputs()

    def wait(self) -> None:
        """Nothing is pending."""

    def download(self) -> dict[str, NDArray[Any]]:
        """Every output on the host."""
        if self._results is None:
            raise InputError("nothing was run in this session yet: call enqueue before download.")
        return {name: np.array(value.numpy()) for name, value in zip(self._names, self._results, strict=True)}

    def mark(self) -> object:
        """A reading of the host's clock."""
        return time.perf_counter()

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds of the host's clock between two marks."""
        return float(1e6 * (end - start))

    def close(self) -> None:
        """Free buffers."""
        self._values, self._results, self._binding = {}, None, None
