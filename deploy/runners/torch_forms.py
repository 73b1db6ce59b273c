"""The ways to run a convolution or a pooling on PyTorch, and how their times are taken: inside CUDA graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from sparsedeploy.converters.fuse import NO_HIGH, NO_LOW, ConvUnit
from sparsedeploy.layer import Precision
from sparsedeploy.runners.max_pool import MaxPool
from sparsedeploy.runners.torch_operators import ConvForm
from sparsedeploy.runtime import Arithmetic

Layout = Literal["nchw", "nhwc"]
"""How activations lie in memory: NCHW, or channels last."""

PRECISIONS: dict[torch.dtype, Precision] = {torch.float32: "fp32", torch.float16: "fp16"}


def given(value: Tensor | None) -> Tensor:
    """The value that must be there."""
    assert value is not None
    return value


def to_nhwc(x: Tensor) -> Tensor:
    """The same values, channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last)


@contextmanager
def settings(arithmetic: Arithmetic) -> Iterator[None]:
    """PyTorch's switches for one piece of work, put back afterwards."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    # PyTorch 2.9 has new switches beside the old, and its matmul refuses to run where they differ. Setting an old one
    # sets both; only the new ones can be read where a caller has used them.
    old = [(cudnn, "allow_tf32"), (matmul, "allow_tf32")]
    others = [(cudnn, "benchmark"), (cudnn, "benchmark_limit")]
    if hasattr(cudnn, "conv"):
        others += [(place, "fp32_precision") for place in (cudnn.conv, cudnn.rnn, matmul)]
    before = [(place, name, value) for place, name in (*old, *others) for value in _readable(place, name)]
    try:
        for place, name in old:
            setattr(place, name, arithmetic == "tf32")
        cudnn.benchmark, cudnn.benchmark_limit = True, 0
        with torch.no_grad():
            yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _readable(place: Any, name: str) -> list[Any]:
    """A switch's value, or nothing where PyTorch refuses to tell."""
    try:
        return [getattr(place, name)]
    except RuntimeError:
        return []


# --- forms --------------------------------------------------------------------------------------------------------

Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""x, weight, bias, residual."""


def forms_of(unit: ConvUnit, form: ConvForm, operands: Operands, inside: bool) -> dict[str, Callable[..., Tensor]]:
    """The ways to run a unit, by name; those that start with `nhwc` (only with `inside`) take the weight in that layout."""
    found = {"separate": _separate(unit, form)}
    if operands[0].device.type == "cpu":
        return found
    fused = _fused(unit, form)
    if fused is not None:
        found["fused"] = fused
    if inside and operands[0].dtype in PRECISIONS:
        found |= {f"nhwc inside, {name}": _turned(run) for name, run in list(found.items())}
    return found


def _separate(unit: ConvUnit, form: ConvForm) -> Callable[..., Tensor]:
    activate, place = _activation(unit), unit.epilogue.residual

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if form.extra:
            x = torch.nn.functional.pad(x, form.extra)
        y = torch.conv2d(x, weight, bias, form.strides, form.padding, form.dilations, form.group)
        if place == "before_activation":
            y.add_(given(residual))
        y = activate(y)
        return y.add_(given(residual)) if place == "after_activation" else y

    return run


def _activation(unit: ConvUnit) -> Callable[[Tensor], Tensor]:
    e = unit.epilogue
    if e.activation == "relu":
        return lambda y: torch.relu_(y)
    if e.activation == "leaky_relu":
        return lambda y: torch.nn.functional.leaky_relu_(y, e.slope)
    if e.activation == "clip":
        low, high = None if e.low == NO_LOW else e.low, None if e.high == NO_HIGH else e.high
        return lambda y: y.clamp_(low, high)
    return lambda y: y


def _fused(unit: ConvUnit, form: ConvForm) -> Callable[..., Tensor] | None:
    """The convolution of cuDNN with bias, addition and ReLU in one call; None for what it does not fuse."""
    e = unit.epilogue
    if e.activation != "relu" or e.residual == "after_activation" or form.extra:
        return None
    where = (form.strides, form.padding, form.dilations, form.group)
    if e.residual == "none":
        return lambda x, weight, bias, _: torch.cudnn_convolution_relu(x, weight, bias, *where)
    return lambda x, weight, bias, z: torch.cudnn_convolution_add_relu(x, weight, z, 1.0, bias, *where)


def _turned(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A form on channels-last copies, between values in NCHW."""

    def turned(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        turned_residual = None if residual is None else to_nhwc(residual)
        return run(to_nhwc(x), weight, bias, turned_residual).contiguous()

    return turned


def pool_by(pool: MaxPool, shape: tuple[int, ...], layout: Layout) -> Callable[[Tensor], Tensor]:
    """Our pooling as a function of tensors in `layout`; `shape` is the output's, N C H W."""
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    planes = shape[0] if layout == "nhwc" else shape[0] * shape[1]

    def run(x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=memory)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory)
        pool.launch(x.data_ptr(), y.data_ptr(), planes, torch.cuda.current_stream(x.device).cuda_stream)
        return y

    return run


_T = TypeVar("_T")


def captured(call: Callable[[], _T]) -> tuple[Any, _T]:
    """A CUDA graph of one call on the current stream, which is not the default one, and what the call returned.

    torch.cuda.graph would collect garbage and empty the allocator's cache each time, which costs more than the capture.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        made = call()
    finally:
        graph.capture_end()
    return graph, made


def graph_us(call: Callable[[], Any], calls: int = 1, seconds: float = 0.02) -> float:
    """Microseconds of one call, from replays of a CUDA graph of `calls` of them: the fastest of several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        stream.synchronize()

        def several() -> None:
            for _ in range(calls):
                call()

        graph, _ = captured(several)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        best, began = math.inf, time.perf_counter()
        while True:
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            best = min(best, 1e3 * float(start.elapsed_time(end)) / calls)
            if time.perf_counter() - began > seconds:
                break
    torch.cuda.current_stream().wait_stream(stream)
    return best
