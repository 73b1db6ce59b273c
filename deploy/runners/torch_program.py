"""A graph at fixed input shapes as a list of PyTorch calls, made by running it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from onnx import NodeProto
from torch import Tensor

from sparsedeploy.converters.fuse import ConvUnit
from sparsedeploy.converters.graph import node_label
from sparsedeploy.errors import InputError
from sparsedeploy.plugins.node import DOMAIN, OP_TYPE
from sparsedeploy.runners.torch_forms import PRECISIONS, Layout, forms_of, given, to_nhwc
from sparsedeploy.runners.torch_operators import IN_PLACE, VIEWS, Call, build, conv_form

if TYPE_CHECKING:
    from sparsedeploy.runners.torch_runner import TorchRunner

_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")


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
            if isinstance(made, (tuple, list)):
                values.update(zip(step.outputs, made, strict=False))
            else:
                values[step.outputs[0]] = made
            for name in step.frees:
                del values[name]
        return {name: given(values[name]) for name in self.outputs}


@dataclass
class Builder:
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
        """Run the graph on example inputs; `units` are the convolutions that become one step with what follows them."""
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
        return Program(with_frees(self.steps, outputs), self.used, tuple(feeds), outputs, self.layout)

    # -- kinds of steps

    def _turn_inputs(self, feeds: Mapping[str, Tensor]) -> None:
        for name, value in feeds.items():
            if value.dim() == 4 and value.shape[1] > 1:
                self._emit(name, "channels last", to_nhwc, (name,), (name,))

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
        run, form = build(call), node.op_type
        outputs = tuple(node.output)
        read = [name for name in outputs[1:] if name in self.graph.outputs or self.graph.readers(name)]
        if read and node.op_type != "Split":
            raise InputError(
                f"{node.op_type} '{node_label(node)}': the torch runner gives only its first output and others are read. Use "
                "--runner onnxruntime, or a TensorRT engine."
            )
        overwrites = self._may_overwrite(call)
        if overwrites:
            run = IN_PLACE[node.op_type]
        else:
            form, run = self.owner.quickest(call, run)
        self._emit(node_label(node), form, run, names, outputs if node.op_type == "Split" else outputs[:1])
        if overwrites or (node.op_type not in VIEWS and not self._is_an_input(names, outputs[0])):
            self.fresh.update(outputs)

    def _may_overwrite(self, call: Call) -> bool:
        """Whether the result may take its first operand's place: nothing else reads that, and it fits."""
        node = call.node
        if node.op_type not in IN_PLACE or len(node.input) > 2 or node.input[0] not in self.fresh:
            return False
        if self.graph.sole_reader(node.input[0]) is None or node.input[0] in node.input[1:]:
            return False
        if node.op_type == "Sum" and len(node.input) == 1:
            return False
        first, rest = call.x(), [value for value in call.inputs[1:] if value is not None]
        return all(
            value.dtype == first.dtype and torch.broadcast_shapes(value.shape, first.shape) == first.shape
            for value in rest
        )

    def _is_an_input(self, names: Sequence[str], output: str) -> bool:
        """Whether an operator gave an input back, as a Sum of one term and a Resize to the same size do."""
        memory = given(self.values[output]).untyped_storage().data_ptr()
        operands = [self._operand(name) for name in names]
        return any(value is not None and value.untyped_storage().data_ptr() == memory for value in operands)

    def _sparse(self, node: NodeProto) -> None:
        runner = self.owner.sparse_runner(node.output[0])
        names = tuple(node.input[: 1 + runner.node.has_residual])
        x = given(self.values[names[0]])
        if x.dtype not in PRECISIONS:
            raise InputError(f"{runner.node.layer}: its input is {x.dtype}, needed fp32 or fp16.")
        runner.reserve(x.shape[0], PRECISIONS[x.dtype])
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
        operands = (given(x), given(weight), self._operand(names[2]), residual)
        call = Call(unit.conv, self.owner.opset, (x, weight), (False, True))
        inside = self.layout == "nchw" and self.owner.sparse_layers > 0  # a dense model is tried in NHWC as a whole
        forms = forms_of(unit, conv_form(call), operands, inside)
        name, run = self.owner.fastest(unit, conv_form(call), operands, self.layout, forms)
        if self.layout == "nhwc" or name.startswith("nhwc"):
            weight = to_nhwc(given(weight))
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


def with_frees(steps: Sequence[Step], outputs: Sequence[str]) -> tuple[Step, ...]:
    """Each step with the made values that are read for the last time there."""
    kept, done = set(outputs), []
    made = {name for step in steps for name in step.outputs}
    seen: set[str] = set()
    for step in reversed(steps):
        mine = [name for name in dict.fromkeys((*step.inputs, *step.outputs)) if name in made - kept - seen]
        seen.update(mine)
        done.append(Step(step.label, step.form, step.run, step.inputs, step.outputs, tuple(mine)))
    return tuple(reversed(done))


def with_events(program: Program, events: Sequence[Any], stream: Any) -> Program:
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
