"""A loaded engine: its inputs and outputs, and contexts that run it on device memory, given a TensorRT module's objects.

Imports no TensorRT: engine.py, its only importer, makes a `LoadedEngine` (`load_engine`). Both back ends, TensorRT 10
and 11 and TensorRT-RTX 1.7, have the calls used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsedeploy.engines.engine_build import DTYPES, TITLES, Profile, Tensor, spell
from sparsedeploy.engines.engine_file import EngineRecord
from sparsedeploy.errors import InputError, MachineError

PROFILE = 0
"""`build` makes engines with one optimisation profile."""


@dataclass
class LoadedEngine:
    """An engine on this machine's GPU, with what must live as long as it. Contexts of one engine may run at once, each
    in a thread and on a stream of its own.
    """

    path: Path
    record: EngineRecord
    module: Any
    """The back end's Python module, `tensorrt` or `tensorrt_rtx_bindings`."""
    engine: Any
    """The module's ICudaEngine; None after close."""
    runtime: Any
    logger: Any
    errors: list[str]
    """What TensorRT's logger said at level ERROR, in order."""
    inputs: dict[str, Tensor] = field(init=False)
    """By name, in the engine's order: dtype (`fp32`, `fp16`, `int32`, ...) and shape, -1 for an open dimension."""
    outputs: dict[str, Tensor] = field(init=False)
    profiles: dict[str, Profile] = field(init=False)
    """Smallest, usual and largest size of each input that leaves a dimension open."""

    def __post_init__(self) -> None:
        mode, engine = self.module.TensorIOMode, self.engine
        names = [str(engine.get_tensor_name(i)) for i in range(engine.num_io_tensors)]
        tensors = {
            name: Tensor(dtype=_dtype(engine, name), shape=_ints(engine.get_tensor_shape(name))) for name in names
        }
        self.inputs = {name: one for name, one in tensors.items() if engine.get_tensor_mode(name) == mode.INPUT}
        self.outputs = {name: one for name, one in tensors.items() if name not in self.inputs}
        self.profiles = {
            name: _profile(engine.get_tensor_profile_shape(name, PROFILE))
            for name, one in self.inputs.items()
            if -1 in one.shape
        }

    @property
    def title(self) -> str:
        """`TensorRT-RTX 1.7.1.116`."""
        return f"{TITLES[self.record.backend]} {self.record.backend_version}"

    def context(self) -> ExecutionContext:
        """A new execution context; it holds device memory until closed. Raises MachineError where that cannot be had."""
        told = len(self.errors)
        made = self.engine.create_execution_context()
        if made is None:
            raise MachineError(
                f"{self.path}: {self.title} cannot make an execution context: {self.said(told)}. Free some memory of the GPU "
                "(nvidia-smi shows who holds it), or build for smaller batches."
            )
        return ExecutionContext(self, made)

    def said(self, since: int = 0) -> str:
        """The errors that TensorRT's logger was told since that many."""
        return "; ".join(dict.fromkeys(self.errors[since:])) or "it gives no reason"

    def close(self) -> None:
        """Free the engine; its contexts must be closed before."""
        self.engine, self.runtime = None, None


class ExecutionContext:
    """An engine at one set of input shapes, running on device memory of the caller. Not shared between threads."""

    def __init__(self, loaded: LoadedEngine, context: Any) -> None:
        self._loaded = loaded
        self._context = context

    def set_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Set the shapes of all inputs; the shapes of the outputs, by name.

        Raises InputError for a name or size that the engine does not take. Work enqueued before must be done.
        """
        loaded = self._loaded
        if set(shapes) != set(loaded.inputs):
            raise InputError(
                f"{loaded.path}: was given the inputs {_list(shapes)}, needed are {_list(loaded.inputs)}. Name them as the model "
                "does."
            )
        for name, shape in shapes.items():
            _check_shape(loaded, name, tuple(shape))
        told = len(loaded.errors)
        for name, shape in shapes.items():
            if not self._context.set_input_shape(name, tuple(shape)):
                raise InputError(
                    f"{loaded.path}: {loaded.title} refuses input '{name}' at {spell(shape)}: {loaded.said(told)}. Give a size "
                    "that the engine was built for."
                )
        if missing := self._context.infer_shapes():
            raise MachineError(
                f"{loaded.path}: {loaded.title} cannot infer shapes: {_list(missing)} not specified. Engines with shapes as "
                "inputs are not supported; convert a model whose shapes follow from its inputs' shapes."
            )
        made = {name: _ints(self._context.get_tensor_shape(name)) for name in loaded.outputs}
        if unknown := [name for name, shape in made.items() if min(shape, default=0) < 0]:
            raise InputError(
                f"{loaded.path}: the size of output '{unknown[0]}' depends on the data, so no buffer can be made for it. Cut "
                "the model before that output and convert it again."
            )
        return made

    def set_address(self, name: str, address: int) -> None:
        """Where an input or output lies in device memory, contiguous and 256-byte aligned; the caller keeps it alive.

        Raises InputError for an unknown name, MachineError where TensorRT refuses the address.
        """
        loaded = self._loaded
        if name not in loaded.inputs and name not in loaded.outputs:
            raise InputError(
                f"{loaded.path}: has no tensor '{name}'; its inputs are {_list(loaded.inputs)}, its outputs "
                f"{_list(loaded.outputs)}. Name one of these."
            )
        told = len(loaded.errors)
        if not self._context.set_tensor_address(name, address):
            raise MachineError(
                f"{loaded.path}: {loaded.title} refuses the address {address:#x} for '{name}': {loaded.said(told)}. Give device "
                "memory aligned to 256 bytes."
            )

    def enqueue(self, stream: int) -> None:
        """One inference in stream order (a CUstream's handle, not the default stream); returns before it is done.

        Under CUDA-graph capture it is recorded instead; run it once before. Raises MachineError with TensorRT's words.
        """
        loaded = self._loaded
        told = len(loaded.errors)
        if not self._context.execute_async_v3(stream):
            raise MachineError(
                f"{loaded.path}: {loaded.title} could not run it: {loaded.said(told)}. Check that every input and output has "
                "its address and that the GPU has free memory."
            )

    def close(self) -> None:
        """Free the context and its device memory; work that it enqueued must be done."""
        self._context = None


def _check_shape(loaded: LoadedEngine, name: str, shape: tuple[int, ...]) -> None:
    declared, profile = loaded.inputs[name].shape, loaded.profiles.get(name)
    low, high = (profile.minimum, profile.maximum) if profile else (declared, declared)
    if len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True)):
        return
    held = spell(low) if low == high else f"{spell(low)} to {spell(high)}"
    raise InputError(
        f"{loaded.path}: input '{name}' is {spell(shape)}, the engine was built for {held}. Give such a size, or build again "
        "with `sparsedeploy build --max-batch N` or --profile."
    )


def _dtype(engine: Any, name: str) -> str:
    kind = str(engine.get_tensor_dtype(name).name)
    return DTYPES.get(kind, kind.lower())


def _profile(shapes: Any) -> Profile:
    minimum, optimum, maximum = (_ints(shape) for shape in shapes)
    return Profile(minimum=minimum, optimum=optimum, maximum=maximum)


def _ints(shape: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in shape)


def _list(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def numpy_name(dtype: str) -> str:
    """Numpy's name of a `Tensor.dtype`: `fp32` is `float32`; raises InputError for types that numpy lacks."""
    known = {"fp32": "float32", "fp16": "float16"}
    name = known.get(dtype, dtype)
    if name not in (*known.values(), "int8", "int32", "int64", "uint8", "bool"):
        raise InputError(
            f"the engine has an input or output of type {dtype}, which numpy does not know. Cast it in the model."
        )
    return name
