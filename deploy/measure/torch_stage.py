"""The stage on PyTorch: the torch runner's program with single steps exchanged for launch plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from sparsedeploy.converters.fuse import NO_HIGH, NO_LOW, ConvUnit, find_units
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.shapes import infer_shapes
from sparsedeploy.errors import MachineError
from sparsedeploy.gpu import Gpu, first_gpu
from sparsedeploy.layer import Epilogue, Geometry, Precision
from sparsedeploy.measure.stage import Timed
from sparsedeploy.plugins import host
from sparsedeploy.plugins.kernel import Floats
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.runners.torch_forms import captured, settings
from sparsedeploy.runners.torch_program import Builder, Program, with_events, with_frees
from sparsedeploy.runners.torch_runner import TorchRunner, TorchSession, load_torch
from sparsedeploy.runtime import Arithmetic, Feeds, Session

_WARM_REPLAYS = 10
_IMAGES = 8
"""Images that a float64 reference computes at once."""


def open_stage(
    model: Model,
    units: Mapping[str, ConvUnit],
    shapes: Mapping[str, tuple[int, ...]],
    arithmetic: Arithmetic,
    feeds: Feeds,
    precision: Precision,
) -> TorchStage:
    """A dense model on the first GPU; raises MachineError where there is none. The stage changes and keeps the model."""
    gpu = first_gpu()
    if gpu is None or not torch.cuda.is_available():
        raise MachineError(
            f"tune measures on a GPU, and PyTorch {torch.__version__} finds none on this machine. Run it on the device, "
            "with its driver and a CUDA build of PyTorch; `scan --profile FILE` plans here with what was measured there."
        )
    again = Model(type(model.proto)(), model.path)
    again.proto.CopyFrom(model.proto)
    dense, mixed = (load_torch(each, arithmetic, "cuda:0") for each in (again, model))
    return TorchStage(dense, mixed, gpu, units, shapes, feeds, precision)


class TorchStage:
    """A dense model in two torch runners: as it is, and with layers exchanged. `units` are `mixed`'s convolutions by layer."""

    def __init__(
        self, dense: TorchRunner, mixed: TorchRunner, gpu: Gpu, units: Mapping[str, ConvUnit],
        shapes: Mapping[str, tuple[int, ...]], feeds: Feeds, precision: Precision,
    ) -> None:  # fmt: skip
        self.gpu, self.sm, self.sm_count = gpu.name, gpu.sm, gpu.sm_count
        self.versions = {
            "torch": str(torch.__version__), "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())
        }  # fmt: skip
        self.shapes, self.feeds, self.precision = dict(shapes), feeds, precision
        self.dense, self.mixed = dense, mixed
        mixed.sparse_layers = len(
            units
        )  # its dense layers are those of a sparse model: NCHW outside, any layout inside
        self._found = find_units(mixed.model, infer_shapes(mixed.model, self.shapes))
        self._loaded: dict[int, tuple[SparseConv, host.Runner]] = {}
        self._base = self._variant({})
        known = {step.outputs[0] for step in self._base.steps}
        # Convolutions whose weight is computed in the graph run as bare nodes: they stay dense and have no time of their own.
        self.units = {name: unit for name, unit in units.items() if unit.output in known}

    # -- what tune asks

    def layer_times(self, nodes: Mapping[str, SparseConv], replays: int) -> dict[str, Timed]:
        """See stage.Stage. An event before and after every step costs time: what the steps' sum exceeds the same network
        without events by is taken off all steps alike.
        """
        program = self._variant(nodes)
        session = TorchSession(self.mixed, program, self.shapes, False)
        try:
            session.upload(self.feeds)
            samples, whole = _step_samples(self.mixed, session, replays)
        finally:
            session.close()
        overhead = max(0.0, (float(np.median(samples.sum(axis=1))) - whole) / samples.shape[1])
        at = {step.outputs[0]: number for number, step in enumerate(program.steps)}
        times = {name: Timed.of(samples[:, at[unit.output]]) for name, unit in self.units.items()}
        return {name: replace(t, us=max(t.us - overhead, 0.1 * t.us)) for name, t in times.items()}

    def error(self, layer: str, node: SparseConv, weight: Floats, bias: Floats | None) -> float:
        """See stage.Stage."""
        unit = self.units[layer]
        x, residual = self._operands(unit)
        runner, e, g = self._runner(node), node.epilogue, node.geometry
        out = torch.full((x.shape[0], g.oc, g.oh, g.ow), math.nan, dtype=x.dtype, device=x.device)
        runner.reserve(x.shape[0], self.precision)
        stream = torch.cuda.current_stream(x.device)
        runner.run(x, residual, out, stream)
        stream.synchronize()
        w = torch.from_numpy(np.asarray(weight, np.float64)).to(x.device)
        b = None if bias is None else torch.from_numpy(np.asarray(bias, np.float64)).to(x.device)
        worst, largest = 0.0, 0.0
        for first in range(0, x.shape[0], _IMAGES):
            part = slice(first, first + _IMAGES)
            with torch.inference_mode():
                y = _conv64(x[part], w, b, g)
                y = _finish64(y, None if residual is None else residual[part].double(), e)
                difference = (out[part].double() - y).abs().max().item()
            worst = math.inf if math.isnan(difference) else max(worst, difference)
            largest = max(largest, y.abs().max().item())
        share = worst / largest if largest else worst
        return share if math.isfinite(share) else math.inf

    def session(self, nodes: Mapping[str, SparseConv]) -> Session:
        """See stage.Stage."""
        if nodes:
            return TorchSession(self.mixed, self._variant(nodes), self.shapes, True)
        return self.dense.session(self.shapes, True)

    def ceilings(self) -> dict[str, float]:
        """Device-to-device copy and a square fp32 product (no TF32), each the best of a few."""
        source = torch.empty(1 << 26, dtype=torch.float32, device="cuda")
        copy_us = _best_us(lambda: source.clone(), 5)
        a = torch.randn(4096, 4096, device="cuda")
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            product_us = _best_us(lambda: a @ a, 5)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return {
            "copy_gbs": round(2 * 4 * (1 << 26) / copy_us / 1e3, 1),
            "fp32_matmul_tflops": round(2 * 4096**3 / product_us / 1e6, 2),
        }

    def close(self) -> None:
        """Free everything."""
        torch.cuda.synchronize()
        for _, runner in self._loaded.values():
            runner.close()
        self._loaded.clear()
        self.dense.close()
        self.mixed.close()

    # -- inside

    def _runner(self, node: SparseConv) -> host.Runner:
        if id(node) not in self._loaded:  # the node is held, so that its id stays its own
            _ready()
            self._loaded[id(node)] = (node, host.Runner(node))
        return self._loaded[id(node)][1]

    def _variant(self, nodes: Mapping[str, SparseConv]) -> Program:
        """The program in NCHW with these layers run by their nodes: what the runner makes of such a sparse model."""
        sparse = {self.units[name].output: self._runner(node) for name, node in nodes.items()} if nodes else {}
        owner = self.mixed
        plain = [unit for unit in self._found if owner._is_plain(unit)]
        # Biases pass on between dense layers only: a node carries its own.
        units = owner._pass_biases_on([unit for unit in plain if unit.output not in sparse])
        units += [unit for unit in plain if unit.output in sparse]
        rng = torch.Generator().manual_seed(0)
        feeds = {binding.name: owner._example(binding, self.shapes[binding.name], rng) for binding in owner.inputs}
        with settings(owner.arithmetic):
            return _Mixing(owner, "nchw", sparse=sparse).build(feeds, units)

    def _operands(self, unit: ConvUnit) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the unit reads in the dense network, run up to there."""
        wanted = [name for name in (unit.x, unit.residual) if name]
        inputs = {
            name: torch.from_numpy(np.ascontiguousarray(value)).to(self.mixed.torch_device, self._input_type(name))
            for name, value in self.feeds.items()
        }
        base = self._base
        last = max([at for at, step in enumerate(base.steps) if set(step.outputs) & set(wanted)], default=-1)
        steps = with_frees(base.steps[: last + 1], wanted)
        with settings(self.mixed.arithmetic):
            values = Program(steps, base.constants, base.inputs, tuple(wanted), base.layout)(inputs)
        return values[unit.x].contiguous(), values[unit.residual].contiguous() if unit.residual else None

    def _input_type(self, name: str) -> torch.dtype:
        binding = next(binding for binding in self.mixed.inputs if binding.name == name)
        found: torch.dtype = getattr(torch, binding.dtype)
        return found


@dataclass
class _Mixing(Builder):
    """Makes a program in which units are run by nodes where there is one for their output."""

    sparse: Mapping[str, host.Runner] = field(default_factory=dict)

    def _unit(self, unit: ConvUnit) -> None:
        runner = self.sparse.get(unit.output)
        if runner is None:
            super()._unit(unit)
            return
        names = (unit.x, unit.residual) if unit.residual else (unit.x,)
        x = self._operand(unit.x)
        assert x is not None
        precision, g = runner.node.precision, runner.node.geometry
        runner.reserve(x.shape[0], precision)
        shape = (x.shape[0], g.oc, g.oh, g.ow)

        def run(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
            residual = None if residual is None else residual.contiguous()
            runner.run(x.contiguous(), residual, out, torch.cuda.current_stream(x.device))
            return out

        self._emit(runner.node.layer, f"sparse {runner.node.kernel}", run, names, (unit.output,))
        self.fresh.add(unit.output)


def _ready() -> None:
    torch.zeros(1, device="cuda")  # PyTorch makes the primary context with its own flags


def _step_samples(runner: TorchRunner, session: TorchSession, replays: int) -> tuple[NDArray[np.float64], float]:
    """Microseconds [replays, steps] of every step of the session's program, from events inside a CUDA graph; and the median
    of the same graph with an event at its head and end alone.
    """
    program, stream, inputs = session.program, session._cuda, session._inputs
    events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(len(program.steps) + 1)]
    ends = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
    with settings(runner.arithmetic), torch.cuda.stream(stream):

        def bare() -> None:
            ends[0].record(stream)
            program(inputs)
            ends[1].record(stream)

        marked = with_events(program, events, stream)
        marked(inputs)
        stream.synchronize()
        plain, _ = captured(bare)
        graph, _ = captured(lambda: marked(inputs))
        rows, whole = [], []
        for number in range(replays + _WARM_REPLAYS):
            plain.replay()
            graph.replay()
            stream.synchronize()
            if number >= _WARM_REPLAYS:
                whole.append(1e3 * ends[0].elapsed_time(ends[1]))
                rows.append([1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)])
    return np.asarray(rows, np.float64), float(np.median(whole))


def _best_us(call: Callable[[], Any], repeats: int) -> float:
    best = math.inf
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, 1e3 * start.elapsed_time(end))
    return best


def _conv64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, g: Geometry) -> torch.Tensor:
    top, left, bottom, right = g.pads
    padded = functional.pad(x.double(), (left, right, top, bottom))
    return torch.conv2d(padded, weight, bias, g.stride, (0, 0), g.dilation, g.group)


def _finish64(y: torch.Tensor, residual: torch.Tensor | None, e: Epilogue) -> torch.Tensor:
    if e.residual == "before_activation":
        assert residual is not None
        y = y + residual
    if e.activation == "relu":
        y = y.clamp_min(0.0)
    elif e.activation == "clip":
        y = y.clamp(None if e.low == NO_LOW else e.low, None if e.high == NO_HIGH else e.high)
    elif e.activation == "leaky_relu":
        y = functional.leaky_relu(y, e.slope)
    if e.residual == "after_activation":
        assert residual is not None
        y = y + residual
    return y
