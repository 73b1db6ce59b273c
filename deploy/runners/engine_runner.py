"""Engines of TensorRT and TensorRT-RTX as runners: device memory, streams and CUDA graphs through the driver, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.engines.engine import LoadedEngine, load_engine
from sparsedeploy.engines.engine_run import numpy_name
from sparsedeploy.errors import InputError
from sparsedeploy.runners.cuda_stream import Cuda, DeviceBuffer, Event, cuda, view
from sparsedeploy.runtime import Arithmetic, Binding, Feeds, RunnerName

Shapes = Mapping[str, tuple[int, ...]]


def load_engine_runner(engine: Path, arithmetic: Arithmetic | None = None, plugin: Path | None = None) -> EngineRunner:
    """An engine and its plugin on this machine's first GPU.

    Raises InputError where the engine was built for another arithmetic than asked for, and what `engine.load_engine`
    raises.
    """
    gpu = cuda()
    loaded = load_engine(engine, plugin)
    held: Arithmetic = "tf32" if loaded.record.tf32 and loaded.record.precision == "fp32" else loaded.record.precision
    if arithmetic is not None and arithmetic != held:
        loaded.close()
        raise InputError(
            f"{engine}: was built for {held}, {arithmetic} was asked for. Build one for that: `sparsedeploy build --tf32` for tf32, "
            "`sparsedeploy convert --precision fp16` for fp16."
        )
    return EngineRunner(loaded, held, gpu)


class EngineRunner:
    """A loaded engine."""

    device = "cuda:0"

    def __init__(self, loaded: LoadedEngine, arithmetic: Arithmetic, gpu: Cuda) -> None:
        self._loaded, self._cuda = loaded, gpu
        self.name: RunnerName = loaded.record.backend
        self.arithmetic = arithmetic
        self.inputs = tuple(_binding(name, tensor) for name, tensor in loaded.inputs.items())
        self.outputs = tuple(_binding(name, tensor) for name, tensor in loaded.outputs.items())
        self.sparse_layers = len(loaded.record.plugin_layers)
        self.notes: tuple[str, ...] = (loaded.title, f"engine {loaded.path.name}")
        self._ready: dict[tuple[tuple[str, tuple[int, ...]], ...], EngineSession] = {}

    def session(self, shapes: Shapes, graph: bool = False) -> EngineSession:
        """Buffers and a context for these shapes; with `graph`, the inference captured in a CUDA graph."""
        return EngineSession(self._loaded, self._cuda, self._bindings(), shapes, graph)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One inference, done when this returns. Device arrays must be contiguous and of the engine's types."""
        missing = sorted({binding.name for binding in self.inputs} - feeds.keys())
        if missing:
            raise InputError(f"no array for input {missing[0]!r}; the engine takes {', '.join(self._loaded.inputs)}.")
        on_host = all(isinstance(value, np.ndarray) for value in feeds.values())
        shapes = {binding.name: tuple(feeds[binding.name].shape) for binding in self.inputs}
        session = self._session_for(shapes)
        if on_host:
            session.upload(feeds)
            session.enqueue()
            return dict(session.download())
        return session.run_on_device(feeds)

    def _session_for(self, shapes: Shapes) -> EngineSession:
        key = tuple(sorted((name, tuple(shape)) for name, shape in shapes.items()))
        if key not in self._ready:
            for old in self._ready.values():  # one set of buffers: sizes rarely alternate, memory is scarce
                old.close()
            self._ready = {key: self.session(shapes)}
        return self._ready[key]

    def _bindings(self) -> dict[str, Binding]:
        return {binding.name: binding for binding in (*self.inputs, *self.outputs)}

    def close(self) -> None:
        """Free everything."""
        for session in self._ready.values():
            session.close()
        self._ready = {}
        self._loaded.close()


def _binding(name: str, tensor: Any) -> Binding:
    shape = tuple(size if size >= 0 else ("N" if at == 0 else f"d{at}") for at, size in enumerate(tensor.shape))
    return Binding(name, shape, numpy_name(tensor.dtype))


class EngineSession:
    """An execution context with its buffers, a stream of its own and pinned memory for copies."""

    device_clock = True

    def __init__(
        self, loaded: LoadedEngine, gpu: Cuda, bindings: Mapping[str, Binding], shapes: Shapes, graph: bool
    ) -> None:
        self.graph = graph
        self._cuda, self._captured = gpu, 0
        self._pinned: dict[str, NDArray[Any]] = {}
        self._buffers: dict[str, DeviceBuffer] = {}
        gpu.activate()
        self._context = loaded.context()
        self._stream = gpu.stream()
        try:
            made = self._context.set_shapes({name: tuple(shape) for name, shape in shapes.items()})
            self._inputs, self._outputs = tuple(shapes), tuple(made)
            for name, shape in {**shapes, **made}.items():
                buffer = DeviceBuffer(gpu, tuple(shape), bindings[name].dtype)
                self._buffers[name] = buffer
                self._pinned[name] = gpu.pinned(buffer.nbytes).view(buffer.dtype).reshape(buffer.shape)
                self._context.set_address(name, buffer.address)
            if graph:
                self._capture()
        except BaseException:
            self.close()
            raise

    def _capture(self) -> None:
        self.upload({name: np.zeros(self._buffers[name].shape, self._buffers[name].dtype) for name in self._inputs})
        self._context.enqueue(self._stream)  # TensorRT settles what it does lazily before it may be captured
        self.wait()
        self._captured = self._cuda.capture(self._stream, lambda: self._context.enqueue(self._stream))

    def upload(self, feeds: Feeds) -> None:
        """Copy host arrays into the input buffers and wait."""
        self._cuda.activate()
        for name in self._inputs:
            shape = self._buffers[name].shape
            if name not in feeds or tuple(feeds[name].shape) != shape:
                found = f"is {list(feeds[name].shape)}" if name in feeds else "is missing"
                raise InputError(f"input {name!r} {found}, the session takes {list(shape)}.")
            np.copyto(self._pinned[name], feeds[name], casting="unsafe")
            self._cuda.copy_in(self._buffers[name].address, _raw(self._pinned[name]), self._stream)
        self.wait()

    def enqueue(self) -> None:
        """One inference in stream order."""
        self._cuda.activate()
        if self._captured:
            self._cuda.launch_graph(self._captured, self._stream)
        else:
            self._context.enqueue(self._stream)

    def wait(self) -> None:
        """Until everything enqueued is done."""
        self._cuda.wait(self._stream)

    def download(self) -> dict[str, NDArray[Any]]:
        """Wait, and copy every output to the host."""
        self._cuda.activate()
        for name in self._outputs:
            self._cuda.copy_out(_raw(self._pinned[name]), self._buffers[name].address, self._stream)
        self.wait()
        return {name: np.array(self._pinned[name]) for name in self._outputs}

    def run_on_device(self, feeds: Mapping[str, Any]) -> dict[str, DeviceBuffer]:
        """One inference on arrays where they lie, once they are made; outputs in new arrays on the device."""
        self._cuda.activate()
        self._cuda.wait_for_all()
        made = {
            name: DeviceBuffer(self._cuda, self._buffers[name].shape, self._buffers[name].dtype.str)
            for name in self._outputs
        }
        kept = []  # arrays that stand in for what cannot be used where it lies must live until the work is done
        try:
            for name in self._inputs:
                address, kept_array = self._address(name, feeds[name])
                kept.append(kept_array)
                self._context.set_address(name, address)
            for name, buffer in made.items():
                self._context.set_address(name, buffer.address)
            self._context.enqueue(self._stream)
            self.wait()
        finally:
            for name, own in self._buffers.items():
                self._context.set_address(name, own.address)
        return made

    def _address(self, name: str, value: Any) -> tuple[int, Any]:
        own = self._buffers[name]
        if isinstance(value, np.ndarray):
            np.copyto(self._pinned[name], value, casting="unsafe")
            self._cuda.copy_in(own.address, _raw(self._pinned[name]), self._stream)
            return own.address, value
        address, shape, dtype = view(value, name)
        if shape != own.shape or dtype != own.dtype:
            raise InputError(
                f"input {name!r} is {dtype} {list(shape)} on the device, the engine takes {own.dtype} {list(own.shape)}. Convert it "
                "before the call."
            )
        return address, value

    def mark(self) -> object:
        """A CUDA event in stream order."""
        return Event(self._cuda, self._stream)

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two marks."""
        return self._cuda.elapsed_us(start.handle, end.handle)

    def close(self) -> None:
        """Free buffers, graph, context and stream."""
        if not self._stream:
            return
        self._cuda.activate()
        self.wait()
        if self._captured:
            self._cuda.end_graph(self._captured)
        self._context.close()
        for memory in self._pinned.values():
            self._cuda.unpin(_raw(memory))
        self._pinned, self._buffers = {}, {}
        self._cuda.end_stream(self._stream)
        self._stream, self._captured = 0, 0


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
