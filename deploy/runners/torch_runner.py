"""A clean ONNX graph run by PyTorch: dense layers by cuDNN at its best, SparseConv2d by their launch plans, in one CUDA graph.

A program is made by running the graph once, node by node, at the session's shapes: every shape is then known, what
depends only on shapes has become a constant, and each convolution was timed in every form that cuDNN offers (fused and
not, both layouts), so that the dense time is the strongest that this library gives. On a CPU the same program runs
without sparse kernels: SparseConv2d nodes become dense convolutions again, and the notes say so.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor

from sparsedeploy.converters.fold_batchnorm import fold_batchnorm
from sparsedeploy.converters.fold_constants import fold_constants
from sparsedeploy.converters.fuse import ConvUnit, find_units
from sparsedeploy.converters.graph import Model, bodies, constant_value, node_label
from sparsedeploy.converters.load import load
from sparsedeploy.converters.precision import to_fp16
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.converters.shapes import infer_shapes
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.layer import Precision
from sparsedeploy.plugins import host
from sparsedeploy.plugins.node import DOMAIN, OP_TYPE, SparseConv
from sparsedeploy.runners.max_pool import MaxPool, Pool, max_pool
from sparsedeploy.runners.torch_forms import (
    PRECISIONS,
    Layout,
    Operands,
    captured,
    graph_us,
    pool_by,
    settings,
    to_nhwc,
)
from sparsedeploy.runners.torch_operators import OPERATORS, Call, ConvForm, window
from sparsedeploy.runners.torch_program import Builder, Program, with_events
from sparsedeploy.runtime import Arithmetic, Binding, Feeds, RunnerName, unpacked

ShapeKey = tuple[tuple[str, tuple[int, ...]], ...]


def load_torch(model: Path | Model, arithmetic: Arithmetic = "fp32", device: str | None = None) -> TorchRunner:
    """A runner for an ONNX model, dense or with SparseConv2d nodes.

    `device` is `cpu` or `cuda:0`; None takes the GPU where PyTorch finds one. fp16 of an fp32 model converts it as `convert
    --precision fp16` does. Raises InputError for operators that the runner lacks (all of them listed) and for fp16
    asked of a sparse model that was converted in fp32, MachineError where the device is not there.
    """
    found = load(model) if isinstance(model, Path) else model
    chosen = _device(device)
    notes: list[str] = [f"PyTorch {torch.__version__}{_cudnn(chosen)}"]
    nodes = read_nodes(found)
    if arithmetic == "fp16":
        _make_half(found, nodes)
    elif any(node.precision == "fp16" for node in nodes.values()):
        raise InputError(
            f"{found.path.name}: its sparse nodes compute in fp16, {arithmetic} was asked for. Run it with --precision "
            "fp16, or convert it again with --precision fp32."
        )
    dense_again = bool(nodes) and (chosen.type == "cpu" or not all(node.executable for node in nodes.values()))
    if dense_again:
        found = unpacked(found, nodes)
        why = "there is no GPU" if chosen.type == "cpu" else "they carry no code"
        notes.append(f"ran dense: the {len(nodes)} sparse layers were unpacked, because {why}")
    elif not nodes:
        fold_constants(found)
        fold_batchnorm(found)
    return TorchRunner(found, arithmetic, chosen, {} if dense_again else nodes, tuple(notes))


def _cudnn(device: torch.device) -> str:
    """The library behind dense convolutions: what a dense time is worth hangs on its version."""
    version = torch.backends.cudnn.version() if device.type == "cuda" else None
    return f", cuDNN {version}" if version else ""


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        build_of = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        raise MachineError(
            f"{name}: PyTorch {torch.__version__} ({build_of}) finds no such GPU. Check nvidia-smi, install a CUDA build of "
            "PyTorch, or use the device cpu."
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _make_half(model: Model, nodes: Mapping[str, SparseConv]) -> None:
    """The graph in fp16, its inputs too where they are only cast: a device array then needs no pass over it first."""
    wide = next((node.layer for node in nodes.values() if node.precision == "fp32"), None)
    if wide is not None:
        raise InputError(
            f"{model.path.name}: its sparse nodes ({wide}, ...) compute in fp32 and fp16 was asked for. Convert the model with "
            "--precision fp16, or run it with --precision fp32."
        )
    if not nodes:
        fold_constants(model)
        fold_batchnorm(model)
        to_fp16(model)
    for value in model.graph.inputs():
        readers, kind = model.graph.readers(value.name), value.type.tensor_type
        casts = [node for node in readers if node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT16]
        if kind.elem_type == TensorProto.FLOAT and readers and len(casts) == len(readers):
            kind.elem_type = TensorProto.FLOAT16
            for node in casts:
                node.op_type = "Identity"
                del node.attribute[:]


def tensor_of(array: NDArray[Any]) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))


# --- the runner ---------------------------------------------------------------------------------------------------


class TorchRunner:
    """A model in PyTorch. Sessions of one runner share the workspaces of its sparse kernels: run them one at a time."""

    name: RunnerName = "torch"

    def __init__(
        self, model: Model, arithmetic: Arithmetic, device: torch.device, nodes: Mapping[str, SparseConv],
        notes: tuple[str, ...],
    ) -> None:  # fmt: skip
        _check_operators(model)
        self.model, self.arithmetic, self.notes = model, arithmetic, notes
        self.torch_device, self.device, self.opset = device, str(device), model.opset()
        self.sparse_layers = len(nodes)
        self.inputs = tuple(_binding(value) for value in model.graph.inputs())
        self.outputs = tuple(_binding(value) for value in model.proto.graph.output)
        graph = model.graph
        unread = {name for node in model.proto.graph.node if node.op_type == OP_TYPE for name in node.input[1:]}
        self.constants = {
            name: tensor_of(_array(graph.array(name))) for name in graph.initializers if name not in unread
        }
        for node in model.proto.graph.node:
            value = constant_value(node, str(model.base_dir)) if node.op_type == "Constant" else None
            if value is not None:
                self.constants[node.output[0]] = tensor_of(value)
        self._nodes = dict(nodes)
        self._runners: dict[str, host.Runner] = {}
        self._device_constants: dict[int, tuple[Tensor, Tensor]] = {}
        """By the host tensor's id, with that tensor: an id is only its own while it lives."""
        self._choices: dict[tuple[Any, ...], str] = {}
        self._pools: dict[tuple[Pool, Precision], MaxPool | None] = {}
        self._programs: dict[ShapeKey, Program] = {}
        self.measured: dict[str, float] = {}
        """Microseconds of each choice that was timed, by what it was; for reports."""

    def session(self, shapes: Mapping[str, tuple[int, ...]], graph: bool = False) -> TorchSession:
        """Buffers for these shapes; with `graph`, the inference captured in a CUDA graph."""
        if graph and self.torch_device.type == "cpu":
            raise MachineError(
                "a CUDA graph needs a GPU, and this runner is on the CPU. Ask for a session without a graph."
            )
        return TorchSession(self, self.program(shapes), shapes, graph)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """One inference, on PyTorch's current stream. Arrays on the device are read where they lie."""
        known = {binding.name for binding in self.inputs}
        missing = sorted(known - feeds.keys())
        if missing:
            raise InputError(f"no array for input {missing[0]!r}; the model takes {', '.join(sorted(known))}.")
        on_host = all(isinstance(value, np.ndarray) for value in feeds.values())
        given = {binding.name: self._adopt(feeds[binding.name], binding) for binding in self.inputs}
        program = self.program({name: tuple(value.shape) for name, value in given.items()})
        with settings(self.arithmetic):
            results = program(given)
        if on_host:
            return {name: np.array(value.cpu().numpy()) for name, value in results.items()}
        return dict(results)

    def close(self) -> None:
        """Free everything."""
        for runner in self._runners.values():
            runner.close()
        for pool in self._pools.values():
            if pool is not None:
                pool.close()
        self._runners.clear()
        self._pools.clear()
        self._programs.clear()
        self._device_constants.clear()

    # -- for programs

    def program(self, shapes: Mapping[str, tuple[int, ...]]) -> Program:
        """The program for these shapes, made once: in the layout that is faster where both can run."""
        key = self._key(shapes)
        if key not in self._programs:
            with settings(self.arithmetic):
                self._programs[key] = self._make(dict(key))
        return self._programs[key]

    def _key(self, shapes: Mapping[str, tuple[int, ...]]) -> ShapeKey:
        found = []
        for binding in self.inputs:
            shape = shapes.get(binding.name)
            fits = shape is not None and len(shape) == len(binding.shape) and all(
                isinstance(want, str) or want == size for size, want in zip(shape, binding.shape, strict=True)
            )  # fmt: skip
            if shape is None or not fits or min(shape, default=1) < 1:
                what = "no shape" if shape is None else f"the shape {'x'.join(map(str, shape))}"
                raise InputError(
                    f"{self.model.path.name}: {what} was given for input {binding.name!r}, needed "
                    f"{'x'.join(map(str, binding.shape))}."
                )
            found.append((binding.name, tuple(shape)))
        return tuple(found)

    def _make(self, shapes: dict[str, tuple[int, ...]]) -> Program:
        units = self.units(shapes)
        rng = torch.Generator().manual_seed(0)
        feeds = {
            binding.name: self._example(binding, shapes[binding.name], rng) for binding in self.inputs
        }  # fmt: skip
        first = Builder(self, "nchw").build(feeds, units)
        images = any(value.dim() == 4 for value in feeds.values())
        if self.torch_device.type == "cpu" or self.sparse_layers or not images:
            return first
        second = Builder(self, "nhwc").build(feeds, units)
        times = {program.layout: graph_us(lambda program=program: program(feeds)) for program in (first, second)}  # type: ignore[misc]
        size = "x".join(str(size) for size in next(iter(shapes.values())))
        self.measured |= {f"model {size} {layout}": us for layout, us in times.items()}
        chosen = min((first, second), key=lambda program: times[program.layout])
        said = ", ".join(f"{layout} {us:.1f} us" for layout, us in times.items())
        self.notes += (f"{size}: layout {chosen.layout} ({said})",)
        return chosen

    def units(self, shapes: Mapping[str, tuple[int, ...]]) -> list[ConvUnit]:
        """The dense convolutions, each with what follows it and runs with it at these input shapes."""
        with _fixed(self.model, shapes):
            found = find_units(self.model, infer_shapes(self.model, shapes))
        return self._pass_biases_on([unit for unit in found if self._is_plain(unit)])

    def _pass_biases_on(self, units: Sequence[ConvUnit]) -> list[ConvUnit]:
        """A bias whose sum is only added to another convolution's moves into that one's bias: cuDNN fuses it there, and
        here it would cost a pass over the output.
        """
        by_residual = {unit.residual: at for at, unit in enumerate(units) if unit.residual}
        found, graph = list(units), self.model.graph
        for at, unit in enumerate(found):
            other = by_residual.get(unit.output)
            bare = unit.epilogue.activation == "none" and unit.epilogue.residual == "none"
            if other is None or not bare or unit.bias is None or len(graph.readers(unit.output)) > 1:
                continue
            taker = found[other]
            if taker.bias is None or taker.epilogue.residual != "before_activation" or unit.output in graph.outputs:
                continue
            name = f"{taker.bias} + {unit.bias}"
            self.constants[name] = self.constants[taker.bias].reshape(-1) + self.constants[unit.bias].reshape(-1)
            found[other] = replace(taker, bias=name)
            found[at] = replace(unit, bias=None, epilogue=unit.epilogue.model_copy(update={"bias": False}))
        return found

    def _is_plain(self, unit: ConvUnit) -> bool:
        """Whether weight and bias are constants of ours; the rest runs node by node."""
        names = [name for name in (unit.weight, unit.bias) if name]
        return all(name in self.constants for name in names)

    def _example(self, binding: Binding, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        dtype = getattr(torch, binding.dtype)
        value = torch.rand(shape, generator=rng) if dtype.is_floating_point else torch.zeros(shape)
        return value.to(dtype).to(self.torch_device)

    def sparse_runner(self, output: str) -> host.Runner:
        """The launch-plan runner of the node that makes `output`, loaded once."""
        if output not in self._runners:
            torch.zeros(1, device=self.torch_device)  # PyTorch makes the primary context with its own flags
            self._runners[output] = host.Runner(self._nodes[output], self.torch_device.index or 0)
        return self._runners[output]

    def on_device(self, constant: Tensor) -> Tensor:
        """A host constant on the device, copied once."""
        if id(constant) not in self._device_constants:
            self._device_constants[id(constant)] = (constant, constant.to(self.torch_device))
        return self._device_constants[id(constant)][1]

    def fastest(
        self, unit: ConvUnit, form: ConvForm, operands: Operands, layout: Layout,
        forms: Mapping[str, Callable[..., Tensor]],
    ) -> tuple[str, Callable[..., Tensor]]:  # fmt: skip
        """The fastest form on these operands, timed once per distinct convolution."""
        if len(forms) == 1:
            return next(iter(forms.items()))
        shapes = tuple(None if value is None else tuple(value.shape) for value in operands)
        key = (form, unit.epilogue.describe(), shapes, operands[0].dtype, layout)
        if key not in self._choices:
            times = {name: self._time_form(name, run, operands, layout) for name, run in forms.items()}
            self._choices[key] = min(times, key=lambda name: times[name])
            label = f"{'x'.join(map(str, shapes[0] or ()))} * {'x'.join(map(str, shapes[1] or ()))} {unit.epilogue.describe()} {layout}"
            self.measured |= {f"{label}: {name}": us for name, us in times.items()}
        return self._choices[key], forms[self._choices[key]]

    def quickest(self, call: Call, plain: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
        """The fastest way to run an operator other than a convolution, timed once per operator and shapes."""
        if self.torch_device.type == "cpu":
            return call.node.op_type, plain
        forms = {call.node.op_type: plain} | self._our_pool(call, plain)
        if len(forms) == 1:
            return call.node.op_type, plain
        operands = [None if value is None else value.to(self.torch_device) for value in call.inputs]
        shapes = tuple(None if value is None else (tuple(value.shape), value.stride()) for value in operands)
        key = (call.node.SerializeToString(), shapes, call.x().dtype)
        if key not in self._choices:
            times = {name: graph_us(lambda run=run: run(*operands), calls=4) for name, run in forms.items()}  # type: ignore[misc]
            self._choices[key] = min(times, key=lambda name: times[name])
            self.measured |= {f"{'x'.join(map(str, call.x().shape))} {name}": us for name, us in times.items()}
        return self._choices[key], forms[self._choices[key]]

    def _our_pool(self, call: Call, theirs: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
        """Our MaxPool, for the poolings that it can do."""
        if call.node.op_type != "MaxPool":
            return {}
        x = call.x()
        if x.dim() != 4 or x.dtype not in PRECISIONS or x.numel() >= 2**29:
            return {}
        layout: Layout = "nchw" if x.is_contiguous() else "nhwc"
        w, shape = window(call), tuple(theirs(x).shape)
        pool = Pool(
            input=(x.shape[2], x.shape[3]),
            output=(shape[2], shape[3]),
            kernel=(w.kernel[0], w.kernel[1]),
            strides=(w.strides[0], w.strides[1]),
            pads=(w.pads[0][0], w.pads[1][0]),
            dilations=(w.dilations[0], w.dilations[1]),
            channels=shape[1] if layout == "nhwc" else 1,
        )
        key = (pool, PRECISIONS[x.dtype])
        if key not in self._pools and math.prod(shape) < 2**29:
            self._pools[key] = max_pool(*key, x.device.index or 0)
        made = self._pools.get(key)
        return {} if made is None else {"MaxPool, ours": pool_by(made, shape, layout)}

    def _time_form(self, name: str, run: Callable[..., Tensor], operands: Operands, layout: Layout) -> float:
        x, weight, bias, residual = operands
        if layout == "nhwc" or name.startswith("nhwc"):
            weight = to_nhwc(weight)
        try:
            return graph_us(lambda: run(x, weight, bias, residual), calls=4)
        except RuntimeError:
            torch.cuda.synchronize(self.torch_device)
            return math.inf  # cuDNN has no engine for this fusion in this precision

    def _adopt(self, value: Any, binding: Binding) -> Tensor:
        """A tensor over the caller's memory; copied only where type or device differ."""
        if isinstance(value, np.ndarray):
            tensor = torch.from_numpy(np.require(value, requirements=["C", "W"]))  # PyTorch warns of read-only memory
        elif isinstance(value, Tensor):
            tensor = value
        elif hasattr(value, "__dlpack__"):
            tensor = torch.from_dlpack(value)
        elif hasattr(value, "__cuda_array_interface__"):
            tensor = torch.as_tensor(value, device=self.torch_device)
        else:
            raise InputError(
                f"input {binding.name!r} is a {type(value).__name__}, needed an array: numpy, or on the device torch, CuPy or "
                "PyCUDA."
            )
        return tensor.to(self.torch_device, getattr(torch, binding.dtype))


def _array(value: NDArray[Any] | None) -> NDArray[Any]:
    assert value is not None
    return value


def _binding(value: onnx.ValueInfoProto) -> Binding:
    tensor = value.type.tensor_type
    shape = tuple(
        int(dim.dim_value) if dim.dim_value > 0 else str(dim.dim_param or f"d{at}")
        for at, dim in enumerate(tensor.shape.dim)
    )
    return Binding(value.name, shape, str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)))


@contextmanager
def _fixed(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """The model with its inputs, and the outputs of sparse nodes, at sizes of one session: what is equal then is equal."""
    graph = model.proto.graph
    sparse = {node.output[0] for node in graph.node if node.op_type == OP_TYPE}
    inputs = [value for value in graph.input if value.name in shapes]
    touched = [*inputs, *(value for value in (*graph.value_info, *graph.output) if value.name in sparse)]
    before = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in touched]
    sizes: dict[str, int] = {}
    for value in inputs:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
            if dim.dim_param:
                sizes[dim.dim_param] = size
            dim.dim_value = size
    for value in touched:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    try:
        yield
    finally:
        for value, old in zip(touched, before, strict=True):
            value.CopyFrom(old)


def _check_operators(model: Model) -> None:
    missing: dict[str, str] = {}
    for node in model.proto.graph.node:
        known = node.op_type in OPERATORS or node.op_type == "Constant" if node.domain in ("", "ai.onnx") else (
            node.op_type == OP_TYPE and node.domain == DOMAIN
        )  # fmt: skip
        if not known or any(True for _ in bodies(node)):
            missing.setdefault(f"{node.domain}.{node.op_type}" if node.domain else node.op_type, node_label(node))
    if missing:
        shown = ", ".join(f"{operator} ('{label}')" for operator, label in list(missing.items())[:6])
        raise InputError(
            f"{model.path.name}: the torch runner has no {shown}{' and more' if len(missing) > 6 else ''}. Use --runner "
            "onnxruntime, or a TensorRT engine."
        )


# --- the session --------------------------------------------------------------------------------------------------


class TorchSession:
    """A program with its buffers and a stream of its own; on a GPU, host copies go through pinned memory."""

    def __init__(
        self, owner: TorchRunner, program: Program, shapes: Mapping[str, tuple[int, ...]], graph: bool
    ) -> None:
        self._owner, self.program, self.graph = owner, program, graph
        self.device_clock = owner.torch_device.type == "cuda"
        self._cuda: Any = torch.cuda.Stream(owner.torch_device) if self.device_clock else None
        self._inputs: dict[str, Tensor] = {}
        self._pinned: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._results: dict[str, Tensor] = {}
        self._captured: Any = None
        rng = torch.Generator().manual_seed(0)
        for binding in owner.inputs:
            self._inputs[binding.name] = owner._example(binding, tuple(shapes[binding.name]), rng)
            self._pinned[binding.name] = torch.empty(
                tuple(shapes[binding.name]), dtype=self._inputs[binding.name].dtype, pin_memory=self.device_clock
            )
        if self.device_clock:
            torch.cuda.synchronize(owner.torch_device)
        if graph:
            self._capture()

    def _capture(self) -> None:
        with settings(self._owner.arithmetic), torch.cuda.stream(self._cuda):
            for _ in range(2):
                self.program(self._inputs)
            self._cuda.synchronize()
            self._captured, self._outputs = captured(lambda: self.program(self._inputs))
            self._cuda.synchronize()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if not self.device_clock:
            yield
            return
        with torch.cuda.stream(self._cuda):
            yield

    def upload(self, feeds: Feeds) -> None:
        """Copy host arrays into the input buffers and wait."""
        for name, buffer in self._inputs.items():
            if name not in feeds or tuple(feeds[name].shape) != tuple(buffer.shape):
                found = f"is {list(feeds[name].shape)}" if name in feeds else "is missing"
                raise InputError(f"input {name!r} {found}, the session takes {list(buffer.shape)}.")
            np.copyto(self._pinned[name].numpy(), feeds[name], casting="unsafe")
        with self._on_stream():
            for name, buffer in self._inputs.items():
                buffer.copy_(self._pinned[name], non_blocking=True)
        self.wait()

    def enqueue(self) -> None:
        """One inference in stream order."""
        if self._captured is not None:
            with torch.cuda.stream(self._cuda):
                self._captured.replay()
            return
        with settings(self._owner.arithmetic), self._on_stream():
            self._outputs = self.program(self._inputs)

    def wait(self) -> None:
        """Until everything enqueued is done."""
        if self.device_clock:
            self._cuda.synchronize()

    def download(self) -> dict[str, NDArray[Any]]:
        """Wait, and copy every output to the host."""
        if not self._outputs:
            raise InputError("nothing was run in this session yet: call enqueue before download.")
        found = {}
        with self._on_stream():
            for name, value in self._outputs.items():
                if name not in self._results:
                    self._results[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=self.device_clock)
                self._results[name].copy_(value, non_blocking=True)
        self.wait()
        for name, value in self._results.items():
            found[name] = np.array(value.numpy())
        return found

    def mark(self) -> object:
        """A CUDA event in stream order; on a CPU a reading of the clock."""
        if not self.device_clock:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._cuda)
        return event

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two marks, after waiting for the second."""
        if not self.device_clock:
            return float(1e6 * (end - start))
        end.synchronize()
        return float(1e3 * start.elapsed_time(end))

    def close(self) -> None:
        """Free buffers and graphs."""
        self.wait()
        self._captured = None
        for buffers in (self._inputs, self._outputs, self._pinned, self._results):
            buffers.clear()

    def step_times(self, replays: int = 20) -> list[tuple[str, str, float]]:
        """Label, form and median microseconds of every step, in its place in the network: events inside a CUDA graph.

        Each step's code is as cold as in a real inference. An event costs about a microsecond, which is in the times.
        """
        if not self.device_clock:
            raise MachineError("the time of single layers needs a GPU, and this session is on the CPU.")
        steps = self.program.steps
        events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(len(steps) + 1)]
        with settings(self._owner.arithmetic), torch.cuda.stream(self._cuda):
            marked = with_events(self.program, events, self._cuda)
            marked(self._inputs)
            self._cuda.synchronize()
            graph, _ = captured(lambda: marked(self._inputs))
            rows = []
            for _ in range(replays):
                graph.replay()
                self._cuda.synchronize()
                rows.append([1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)])
        medians = np.median(np.array(rows), axis=0)
        return [(step.label, step.form, float(us)) for step, us in zip(steps, medians, strict=True)]
