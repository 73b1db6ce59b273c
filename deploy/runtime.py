"""What runs a model: one protocol for every library that can, and one for a model held ready at a fixed batch.

A `Runner` is a loaded model. A `Session` is that model at one set of input shapes with its buffers: what `bench` and
`tune` time. Copies to and from the device are apart from the inference, so each can be timed alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

RunnerName = Literal["torch", "onnxruntime", "tensorrt", "tensorrt_rtx"]
Arithmetic = Literal["fp32", "tf32", "fp16"]
"""The precision that convolutions are computed in. tf32 is fp32 data with tensor cores' short mantissa."""

Feeds = Mapping[str, NDArray[np.generic]]


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
