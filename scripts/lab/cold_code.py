"""What a baked layer pays when its code is not in the L2: cold code and cold input apart (scripts/lab/NOTES.md).

python scripts/lab/cold_code.py     needs torch and an NVIDIA H200; builds 128@28 and 256@14 at 90 % zeros, N=32, fp32
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch

from sparsedeploy.devices import find
from sparsedeploy.layer import ConvLayer, Epilogue, Geometry
from sparsedeploy.plugins.baked import BAKED
from sparsedeploy.plugins.host import Runner
from sparsedeploy.plugins.kernel import BuildOptions
from sparsedeploy.plugins.node import SparseConv

N = 32
SHAPES = ((128, 28, 16), (256, 14, 8))
"""Channels, side, most modules in turn."""


def graph_us(calls: Sequence[Callable[[], object]], rounds: int = 12) -> float:
    """Microseconds of the calls together: the median of nine replays of a graph of `rounds` of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        times = []
        for _ in range(9):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(1e3 * float(start.elapsed_time(end)) / rounds)
    return statistics.median(times)


def node_of(channels: int, side: int) -> tuple[SparseConv, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """A layer with random weights, the 10 % largest kept."""
    weight = np.random.default_rng(0).standard_normal((channels, channels, 3, 3)).astype(np.float32)
    weight[np.abs(weight) < np.quantile(np.abs(weight), 0.9)] = 0
    geometry = Geometry(oc=channels, ic=channels, kh=3, kw=3, h=side, w=side, pads=(1, 1, 1, 1))
    name = f"{channels}@{side}"
    layer = ConvLayer(name=name, weight=name, dtype="fp32", shape=weight.shape, geometry=geometry, epilogue=Epilogue())
    options = BuildOptions("fp32", N, (90,), assemble=True)
    return BAKED.build(layer, weight, None, find("h200"), {}, options).node, weight


def check(runner: Runner, x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises RuntimeError where a result is off; NaN is."""
    out.fill_(float("nan"))
    runner.run(x, None, out, torch.cuda.current_stream())
    expected = torch.conv2d(x.double(), weight.double(), None, 1, 1)
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    if not error < 1e-5:
        raise RuntimeError(f"relative error {error}")


def measure(channels: int, side: int, most: int) -> None:
    """Print the rows of one shape."""
    node, weight = node_of(channels, side)
    xs = [torch.randn(N, channels, side, side, device="cuda") for _ in range(4)]
    outs = [torch.empty_like(x) for x in xs]
    runners = [Runner(node) for _ in range(most)]
    for runner in runners:
        runner.reserve(N, "fp32")
        check(runner, xs[0], outs[0], torch.from_numpy(weight).cuda())
    big = torch.ones(50_000_000, device="cuda")

    def run(code: int = 0, data: int = 0) -> None:
        runners[code].run(xs[data], None, outs[data], torch.cuda.current_stream())

    def turn(codes: int, data: int) -> float:
        count = max(codes, data)
        return graph_us([lambda i=i: run(i % codes, i % data) for i in range(count)]) / count  # type: ignore[misc]

    def after(*ahead: Callable[[], object]) -> float:
        return graph_us([*ahead, run]) - graph_us(ahead)

    print(f"{channels}@{side}, us: warm {graph_us([run]):.1f}")
    print(f"  L2 flushed {after(big.max):.1f}, then the input read back {after(big.max, xs[0].max):.1f}")
    print(
        f"  {most} codes in turn {turn(most, 1):.1f}, 4 inputs and outputs {turn(1, 4):.1f}, both of 4 {turn(4, 4):.1f}"
    )


if __name__ == "__main__":
    for shape in SHAPES:
        measure(*shape)
