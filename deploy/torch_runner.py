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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto
from torch import Tensor

from sparsedeploy.converters.fold_batchnorm import fold_batchnorm
from sparsedeploy.converters.fold_constants import fold_constants
from sparsedeploy.converters.fuse import NO_HIGH, NO_LOW, ConvUnit, find_units
from sparsedeploy.converters.graph import Model, bodies, constant_value, node_label
from sparsedeploy.converters.load import load
from sparsedeploy.converters.precision import to_fp16
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.converters.shapes import infer_shapes
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.layer import Precision
from sparsedeploy.max_pool import MaxPool, Pool, max_pool
from sparsedeploy.plugins import host
from sparsedeploy.plugins.node import DOMAIN, OP_TYPE, SparseConv
from sparsedeploy.runtime import Arithmetic, Binding, Feeds, RunnerName, unpacked
from sparsedeploy.torch_operators import IN_PLACE, OPERATORS, VIEWS, Call, ConvForm, build, conv_form, window

Layout = Literal["nchw", "nhwc"]
"""How activations lie in memory: NCHW, or channels last."""
ShapeKey = tuple[tuple[str, tuple[int, ...]], ...]

_PRECISIONS: dict[torch.dtype, Precision] = {torch.float32: "fp32", torch.float16: "fp16"}
_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")


def load_torch(model: Path | Model, arithmetic: Arithmetic = "fp32", device: str | None = None) -> TorchRunner:
    """A runner for an ONNX model, dense or with SparseConv2d nodes.

    `device` is `cpu` or `cuda:0`; None takes the GPU where PyTorch finds one. fp16 of an fp32 model converts it as `convert
    --precision fp16` does. Raises InputError for operators that the runner lacks (all of them listed) and for fp16
    asked of a sparse model that was converted in fp32, MachineError where the device is not there.
    """
    found = load(model) if isinstance(model, Path) else model
    chosen = _device(device)
    notes: list[str] = [f"PyTorch {torch.__version__}"]
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


@contextmanager
def _settings(arithmetic: Arithmetic) -> Iterator[None]:
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


# --- programs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One call of a program."""

    label: str
    """The node's name; of a fused unit its convolution's."""
    form: str
    """What runs: an operator, or for a convolution the form that was fastest."""
    run: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    frees: tuple[str, ...] = ()
    """Values that nothing reads after this step."""


@dataclass(frozen=True)
class Program:
    """The graph at fixed input shapes."""

    steps: tuple[Step, ...]
    constants: Mapping[str, Tensor | None]
    """On the device; "" is None, the absent input."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layout: Layout

    def __call__(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it on tensors on the device, on the current stream."""
        values: dict[str, Tensor | None] = {**self.constants, **feeds}
        for step in self.steps:
            made = step.run(*[values[name] for name in step.inputs])
            if len(step.outputs) == 1:
                values[step.outputs[0]] = made
            else:
                values.update(zip(step.outputs, made, strict=False))
            for name in step.frees:
                del values[name]
        return {name: _given(values[name]) for name in self.outputs}


def _given(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


@dataclass
class _Builder:
    """Makes a program by running the graph once."""

    owner: TorchRunner
    layout: Layout
    values: dict[str, Tensor | None] = field(default_factory=lambda: {"": None})
    constants: dict[str, Tensor] = field(default_factory=dict)
    """On the host."""
    used: dict[str, Tensor | None] = field(default_factory=lambda: {"": None})
    fresh: set[str] = field(default_factory=set)
    """Values in memory of their own, which their only reader may overwrite."""
    steps: list[Step] = field(default_factory=list)

    def build(self, feeds: Mapping[str, Tensor], units: Sequence[ConvUnit]) -> Program:
        owner, graph = self.owner, self.owner.model.graph
        self.graph = graph
        self.constants = dict(owner.constants)
        self.values.update(feeds)
        last = {id(unit.nodes[-1]): unit for unit in units}
        inner = {id(node) for unit in units for node in unit.nodes[:-1]}
        if self.layout == "nhwc":
            self._turn_inputs(feeds)
        for node in owner.model.proto.graph.node:
            if id(node) in inner:
                continue
            if id(node) in last:
                self._unit(last[id(node)])
            elif node.op_type == OP_TYPE and node.domain == DOMAIN:
                self._sparse(node)
            else:
                self._node(node)
        outputs = tuple(value.name for value in owner.model.proto.graph.output)
        for name in outputs:
            self._operand(name)
        return Program(_with_frees(self.steps, outputs), self.used, tuple(feeds), outputs, self.layout)

    # -- kinds of steps

    def _turn_inputs(self, feeds: Mapping[str, Tensor]) -> None:
        for name, value in feeds.items():
            if value.dim() == 4 and value.shape[1] > 1:
                self._emit(name, "channels last", _to_nhwc, (name,), (name,))

    def _node(self, node: NodeProto) -> None:
        names = tuple(node.input)
        constant = tuple(not name or name in self.constants for name in names)
        if node.op_type == "Constant":
            if node.output[0] not in self.constants:
                raise InputError(f"Constant '{node_label(node)}': holds no number, which the torch runner cannot read.")
            return
        shape_only = node.op_type in ("Shape", "Size")
        if (all(constant) or shape_only) and node.op_type not in _RANDOM:
            inputs = tuple(self.constants.get(name, self.values.get(name)) if name else None for name in names)
            made = build(Call(node, self.owner.opset, inputs, constant))(*inputs)
            made = made if isinstance(made, (tuple, list)) else (made,)
            self.constants.update(zip(node.output, made, strict=False))
            return
        inputs = tuple(
            self.constants[name] if name in self.constants else self.values[name] if name else None for name in names
        )
        call = Call(node, self.owner.opset, inputs, constant)
        run = build(call)
        if self._may_overwrite(call):
            run = IN_PLACE[node.op_type]
        outputs = tuple(node.output)
        read = [name for name in outputs[1:] if name in self.graph.outputs or self.graph.readers(name)]
        if read and node.op_type != "Split":
            raise InputError(
                f"{node.op_type} '{node_label(node)}': the torch runner gives only its first output and others are read. Use "
                "--runner onnxruntime, or a TensorRT engine."
            )
        form = node.op_type
        if form == "MaxPool" and self.layout == "nchw" and inputs[0] is not None and inputs[0].is_cuda:
            form, run = self.owner.fastest_pool(call, run)
        self._emit(node_label(node), form, run, names, outputs if node.op_type == "Split" else outputs[:1])
        if node.op_type not in VIEWS:
            self.fresh.update(outputs)

    def _may_overwrite(self, call: Call) -> bool:
        """Whether the result may take its first operand's place: nothing else reads that, and it fits."""
        node = call.node
        if node.op_type not in IN_PLACE or len(node.input) > 2 or node.input[0] not in self.fresh:
            return False
        if self.graph.sole_reader(node.input[0]) is None or node.input[0] in node.input[1:]:
            return False
        first, rest = call.x(), [value for value in call.inputs[1:] if value is not None]
        return all(
            value.dtype == first.dtype and torch.broadcast_shapes(value.shape, first.shape) == first.shape
            for value in rest
        )

    def _sparse(self, node: NodeProto) -> None:
        runner = self.owner.sparse_runner(node.output[0])
        names = tuple(node.input[: 1 + runner.node.has_residual])
        x = _given(self.values[names[0]])
        if x.dtype not in _PRECISIONS:
            raise InputError(f"{runner.node.layer}: its input is {x.dtype}, needed fp32 or fp16.")
        runner.reserve(x.shape[0], _PRECISIONS[x.dtype])
        g = runner.node.geometry
        shape = (x.shape[0], g.oc, g.oh, g.ow)

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
            residual = None if residual is None else residual.contiguous()
            runner.run(x.contiguous(), residual, out, torch.cuda.current_stream(x.device))
            return out

        self._emit(runner.node.layer, f"sparse {runner.node.kernel}", run, names, (node.output[0],))
        self.fresh.add(node.output[0])

    def _unit(self, unit: ConvUnit) -> None:
        names = (unit.x, unit.weight, unit.bias or "", unit.residual or "")
        x, weight = self._operand(unit.x), self._operand(unit.weight)
        bias = self._operand(names[2])
        if bias is not None and bias.dim() != 1:
            flat = f"{unit.bias} as [oc]"
            self.constants[flat] = self.constants[names[2]].reshape(-1)
            names = (names[0], names[1], flat, names[3])
        residual = self._operand(names[3])
        operands = (_given(x), _given(weight), self._operand(names[2]), residual)
        call = Call(unit.conv, self.owner.opset, (x, weight), (False, True))
        inside = self.layout == "nchw" and self.owner.sparse_layers > 0  # a dense model is tried in NHWC as a whole
        forms = _forms(unit, conv_form(call), operands, inside)
        name, run = self.owner.fastest(unit, conv_form(call), operands, self.layout, forms)
        if self.layout == "nhwc" or name.startswith("nhwc"):
            weight = _to_nhwc(_given(weight))
            names = (names[0], f"{unit.weight} channels last", *names[2:])
            self.used[names[1]] = weight
        self._emit(node_label(unit.conv), name, run, names, (unit.output,))
        self.fresh.add(unit.output)

    # -- values

    def _operand(self, name: str) -> Tensor | None:
        """A value on the device, constants brought there once."""
        if name in self.constants:
            if name not in self.used:
                self.used[name] = self.owner.on_device(self.constants[name])
            return self.used[name]
        if name in self.used:
            return self.used[name]
        return self.values[name]

    def _emit(
        self, label: str, form: str, run: Callable[..., Any], names: tuple[str, ...], outputs: tuple[str, ...]
    ) -> None:
        made = run(*[self._operand(name) for name in names])
        self.steps.append(Step(label, form, run, names, outputs))
        for name, value in zip(outputs, made if isinstance(made, (tuple, list)) else (made,), strict=False):
            self.values[name] = value


def _with_frees(steps: Sequence[Step], outputs: Sequence[str]) -> tuple[Step, ...]:
    """Each step with the made values that are read for the last time there."""
    kept, done = set(outputs), []
    made = {name for step in steps for name in step.outputs}
    seen: set[str] = set()
    for step in reversed(steps):
        mine = [name for name in dict.fromkeys((*step.inputs, *step.outputs)) if name in made - kept - seen]
        seen.update(mine)
        done.append(Step(step.label, step.form, step.run, step.inputs, step.outputs, tuple(mine)))
    return tuple(reversed(done))


def _to_nhwc(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _tensor(array: NDArray[Any]) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))


# --- the forms of a convolution -----------------------------------------------------------------------------------

Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""x, weight, bias, residual."""


def _forms(unit: ConvUnit, form: ConvForm, operands: Operands, inside: bool) -> dict[str, Callable[..., Tensor]]:
    """The ways to run a unit, by name; those that start with `nhwc` (only with `inside`) take the weight in that layout."""
    separate = _separate(unit, form)
    if operands[0].device.type == "cpu":
        return {"separate": separate}
    found = {"separate": separate}
    fused = _fused(unit, form)
    if fused is not None:
        found["fused"] = fused
    if inside and operands[0].dtype in _PRECISIONS:
        found |= {f"nhwc inside, {name}": _turned(run) for name, run in list(found.items())}
    return found


def _separate(unit: ConvUnit, form: ConvForm) -> Callable[..., Tensor]:
    activate, place = _activation(unit), unit.epilogue.residual

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if form.extra:
            x = torch.nn.functional.pad(x, form.extra)
        y = torch.conv2d(x, weight, bias, form.strides, form.padding, form.dilations, form.group)
        if place == "before_activation":
            y.add_(_given(residual))
        y = activate(y)
        return y.add_(_given(residual)) if place == "after_activation" else y

    return run


def _activation(unit: ConvUnit) -> Callable[[Tensor], Tensor]:
    e = unit.epilogue
    if e.activation == "relu":
        return torch.relu_
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
        turned_residual = None if residual is None else _to_nhwc(residual)
        return run(_to_nhwc(x), weight, bias, turned_residual).contiguous()

    return turned


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
        self.constants = {name: _tensor(_array(graph.array(name))) for name in graph.initializers if name not in unread}
        for node in model.proto.graph.node:
            value = constant_value(node, str(model.base_dir)) if node.op_type == "Constant" else None
            if value is not None:
                self.constants[node.output[0]] = _tensor(value)
        self._nodes = dict(nodes)
        self._runners: dict[str, host.Runner] = {}
        self._device_constants: dict[int, Tensor] = {}
        self._choices: dict[tuple[Any, ...], str] = {}
        self._pools: dict[tuple[Any, ...], MaxPool | None] = {}
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
        with _settings(self.arithmetic):
            results = program(given)
        if on_host:
            return {name: value.cpu().numpy() for name, value in results.items()}
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
            with _settings(self.arithmetic):
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
        known = infer_shapes(self.model, shapes)
        units = self._pass_biases_on([unit for unit in find_units(self.model, known) if self._is_plain(unit)])
        rng = torch.Generator().manual_seed(0)
        feeds = {
            binding.name: self._example(binding, shapes[binding.name], rng) for binding in self.inputs
        }  # fmt: skip
        first = _Builder(self, "nchw").build(feeds, units)
        images = any(value.dim() == 4 for value in feeds.values())
        if self.torch_device.type == "cpu" or self.sparse_layers or not images:
            return first
        second = _Builder(self, "nhwc").build(feeds, units)
        times = {program.layout: graph_us(lambda program=program: program(feeds)) for program in (first, second)}  # type: ignore[misc]
        size = "x".join(str(size) for size in next(iter(shapes.values())))
        self.measured |= {f"model {size} {layout}": us for layout, us in times.items()}
        chosen = min((first, second), key=lambda program: times[program.layout])
        said = ", ".join(f"{layout} {us:.1f} us" for layout, us in times.items())
        self.notes += (f"{size}: layout {chosen.layout} ({said})",)
        return chosen

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
            self._device_constants[id(constant)] = constant.to(self.torch_device)
        return self._device_constants[id(constant)]

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

    def fastest_pool(self, call: Call, theirs: Callable[..., Tensor]) -> tuple[str, Callable[..., Tensor]]:
        """A MaxPool of PyTorch or ours, whichever is faster here."""
        x, w = call.x(), window(call)
        out = theirs(x)
        if x.dim() != 4 or x.dtype not in _PRECISIONS or out.numel() >= 2**31:
            return "MaxPool", theirs
        pool = Pool(
            input=(x.shape[2], x.shape[3]),
            output=(out.shape[2], out.shape[3]),
            kernel=(w.kernel[0], w.kernel[1]),
            strides=(w.strides[0], w.strides[1]),
            pads=(w.pads[0][0], w.pads[1][0]),
            dilations=(w.dilations[0], w.dilations[1]),
        )
        key = (pool, tuple(x.shape), x.dtype)
        if key not in self._pools:
            made = max_pool(pool, _PRECISIONS[x.dtype], x.device.index or 0)
            ours = None if made is None else _ours(made, tuple(out.shape))
            faster = ours is not None and graph_us(lambda: ours(x), calls=4) < graph_us(lambda: theirs(x), calls=4)
            if made is not None and not faster:
                made.close()
                made = None
            self._pools[key] = made
        chosen = self._pools[key]
        return ("MaxPool", theirs) if chosen is None else ("MaxPool, ours", _ours(chosen, tuple(out.shape)))

    def _time_form(self, name: str, run: Callable[..., Tensor], operands: Operands, layout: Layout) -> float:
        x, weight, bias, residual = operands
        if layout == "nhwc" or name.startswith("nhwc"):
            weight = _to_nhwc(weight)
        try:
            return graph_us(lambda: run(x, weight, bias, residual), calls=4)
        except RuntimeError:
            torch.cuda.synchronize(self.torch_device)
            return math.inf  # cuDNN has no engine for this fusion in this precision

    def _adopt(self, value: Any, binding: Binding) -> Tensor:
        """A tensor over the caller's memory; copied only where type or device differ."""
        if isinstance(value, np.ndarray):
            tensor = torch.from_numpy(np.ascontiguousarray(value))
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


def _ours(pool: MaxPool, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty(shape, dtype=x.dtype, device=x.device)
        pool.launch(x.data_ptr(), y.data_ptr(), shape[0] * shape[1], torch.cuda.current_stream(x.device).cuda_stream)
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
            best = min(best, 1e3 * start.elapsed_time(end) / calls)
            if time.perf_counter() - began > seconds:
                break
    torch.cuda.current_stream().wait_stream(stream)
    return best


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
        with _settings(self._owner.arithmetic), torch.cuda.stream(self._cuda):
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
        with _settings(self._owner.arithmetic), self._on_stream():
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
        with _settings(self._owner.arithmetic), torch.cuda.stream(self._cuda):
            marked = _marked(self.program, events, self._cuda)
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


def _marked(program: Program, events: Sequence[Any], stream: Any) -> Program:
    """The program with an event before every step and one after the last."""

    def with_event(step: Step, at: int) -> Step:
        def run(*operands: Any) -> Any:
            if at == 0:
                events[0].record(stream)
            made = step.run(*operands)
            events[at + 1].record(stream)
            return made

        return Step(step.label, step.form, run, step.inputs, step.outputs, step.frees)

    steps = tuple(with_event(step, at) for at, step in enumerate(program.steps))
    return Program(steps, program.constants, program.inputs, program.outputs, program.layout)
