"""Checking and timing on a GPU through torch: graph replays, warm and inside of a network, and cuDNN beside them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins.host import Runner, cuda_driver
from sparsedeploy.plugins.node import SparseConv

TOLERANCE = {"fp32": 1e-6, "hf": 1e-3, "h2": 6e-3}
"""Largest relative L2 error against float64: rounding of the sums, for fp16 also of the output and of half2 sums."""
WORST = 30.0
"""Largest error of one element, in units of tolerance times the root mean square of the result."""
REPLAYS = 7
LAUNCHES = 20
REPLAY_US = 4000.0
"""A replay holds LAUNCHES launches, fewer where they take longer than this together."""
NETWORK = ((64, 256, 56), (512, 128, 28), (1024, 256, 14), (2048, 512, 7))
"""Input channels, output channels and side of the dense 1x1 layers that run between two launches for a cold time."""
BETWEEN = (
    "four dense fp16 1x1 layers of ResNet-50 at the same batch (64-256@56, 512-128@28, 1024-256@14, 2048-512@7), a kernel "
    "of 256 KB of straight-line code on every SM (the other layers' code), then a copy that writes the layer's input; their "
    "own time, replayed in turn, is subtracted"
)


SMS_PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry mark(.param .u64 seen)
{
.reg .u32 %r<6>;
.reg .u64 %rd<4>;
.reg .pred %p;
ld.param.u64 %rd0, [seen];
cvta.to.global.u64 %rd1, %rd0;
mov.u32 %r0, %smid;
mul.wide.u32 %rd2, %r0, 4;
add.u64 %rd3, %rd1, %rd2;
mov.u32 %r1, 1;
st.global.u32 [%rd3], %r1;
mov.u32 %r2, %clock;
stay:
mov.u32 %r3, %clock;
sub.u32 %r4, %r3, %r2;
setp.lt.u32 %p, %r4, 20000;
@%p bra stay;
ret;
}
"""
"""Marks the SM it runs on, and stays there for 10 us: a grid of it fills every SM that it may use."""
MOST_SMS = 1024


class Timing(NamedTuple):
    """Microseconds per launch: the median of replays and their range."""

    us: float
    spread_us: float


class Checked(NamedTuple):
    """Errors against float64: relative L2, and the worst element over the root mean square."""

    error: float
    worst: float


class WrongResultError(RuntimeError):
    """A kernel computed something else than the layer."""


def _graph(call: Callable[[], object], launches: int) -> Any:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_us(graph: Any) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def time_us(call: Callable[[], object], launches: int = LAUNCHES, replays: int = REPLAYS) -> Timing:
    """Time one call by replaying a graph of `launches` of them."""
    import torch

    call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    count = max(1, min(launches, int(REPLAY_US / max(1.0, start.elapsed_time(end) * 1e3))))
    graph = _graph(call, count)
    times = [_replay_us(graph) / count for _ in range(replays)]
    return Timing(float(np.median(times)), max(times) - min(times))


class Between:
    """What other layers of a network do between two launches: see BETWEEN."""

    def __init__(self, n: int, code: bytes) -> None:
        import torch

        self.layers = []
        for ic, oc, side in NETWORK:
            x = torch.randn(n, ic, side, side, device="cuda", dtype=torch.float16)
            w = torch.randn(oc, ic, 1, 1, device="cuda", dtype=torch.float16)
            self.layers.append([a.contiguous(memory_format=torch.channels_last) for a in (x, w)])
        self.driver = cuda_driver()
        self.function = self.driver.function(self.driver.load(code), "k", 0, 1)
        self.blocks = torch.cuda.get_device_properties(0).multi_processor_count
        self.sink = torch.zeros(1 << 20, device="cuda")
        self.clocks = torch.zeros(1 << 21, dtype=torch.int64, device="cuda")

    def __call__(self) -> None:
        """Enqueue it on the current stream."""
        import torch
        from torch.nn import functional

        from sparsedeploy.plugins.host import Call

        for x, w in self.layers:
            functional.conv2d(x, w)
        values = ((self.clocks.data_ptr(), 8), (self.sink.data_ptr(), 8), (1, 4))
        call = Call("k", (self.blocks, 1, 1), (128, 1, 1), 0, 1, False, values)
        self.driver.launch(self.function, call, torch.cuda.current_stream().cuda_stream)

    def cold_us(self, call: Callable[[], object], x: Any) -> float:
        """Time of one call after the others ran and its input was written, in microseconds."""
        source = x.clone()

        def others() -> None:
            self()
            x.copy_(source)

        def all_of_it() -> None:
            others()
            call()

        for _ in range(2):
            all_of_it()
        launches = 10
        alone, together = _graph(others, launches), _graph(all_of_it, launches)
        times = [(_replay_us(together) - _replay_us(alone)) / launches for _ in range(REPLAYS)]
        return float(np.median(times))


DensePrecision = Literal["fp32", "tf32", "fp16"]


class Dense(NamedTuple):
    """cuDNN's best layout for one precision."""

    layout: Literal["NCHW", "NHWC"]
    timing: Timing
    cold_us: float | None


class Gpu:
    """The device that `bench_kernels` measures on. `code` is a cubin of straight-line code with entry k, for cold times."""

    between = BETWEEN

    def __init__(self, code: bytes | None) -> None:
        import torch

        self.code = code
        self.betweens: dict[int, Between] = {}
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0  # 0: every algorithm
        torch.zeros(1, device="cuda")
        self._inputs: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    # -- the machine

    def describe(self) -> tuple[str, str, dict[str, str]]:
        """Name, driver, versions of what runs here."""
        import platform

        import torch

        query = _smi("driver_version")
        versions = {
            "torch": str(torch.__version__), "cudnn": str(torch.backends.cudnn.version()), "python": platform.python_version(),
        }  # fmt: skip
        return torch.cuda.get_device_properties(0).name, query, versions

    def clocks(self) -> str:
        """What nvidia-smi says of clocks, temperature and power."""
        return _smi("clocks.sm,clocks.mem,temperature.gpu,power.draw")

    def floors(self) -> tuple[float, float]:
        """Microseconds of one more near-empty kernel in a graph, and TB/s (read plus write) of a large copy."""
        import torch

        tiny = torch.zeros(1, device="cuda")
        big = torch.randn(1 << 28, device="cuda")
        other = torch.empty_like(big)
        for _ in range(20):  # clocks up
            torch.add(big, 1.0, out=other)
        copy = time_us(lambda: torch.add(big, 1.0, out=other), 5).us
        return time_us(tiny.zero_).us, 2 * big.numel() * 4 / copy / 1e6

    # -- the layers

    def dense(self, g: Geometry, n: int, cold: bool) -> dict[DensePrecision, Dense]:
        """Time of cuDNN with full search in fp32, tf32 and fp16: the better of NCHW and NHWC, layouts converted before timing."""
        import torch
        from torch.nn import functional

        x = torch.randn(n, g.ic, g.h, g.w, device="cuda")
        w = torch.randn(*g.weight_shape, device="cuda") / np.sqrt(g.ic // g.group * g.kh * g.kw)
        padding: Any = tuple(g.pads[:2])
        if g.pads[:2] != g.pads[2:]:
            x = functional.pad(x, (g.pads[1], g.pads[3], g.pads[0], g.pads[2]))
            padding = 0
        found: dict[DensePrecision, Dense] = {}
        forms: tuple[tuple[DensePrecision, bool, Any], ...] = (
            ("fp32", False, torch.float32), ("tf32", True, torch.float32), ("fp16", False, torch.float16),
        )  # fmt: skip
        for name, tf32, kind in forms:
            torch.backends.cudnn.allow_tf32 = tf32
            best: Dense | None = None
            winner: tuple[Callable[[], object], Any] | None = None
            for layout, order in (("NCHW", torch.contiguous_format), ("NHWC", torch.channels_last)):
                a, b = x.to(kind).contiguous(memory_format=order), w.to(kind).contiguous(memory_format=order)

                def call(a: Any = a, b: Any = b) -> object:
                    return functional.conv2d(a, b, None, tuple(g.stride), padding, tuple(g.dilation), g.group)

                timing = time_us(call)
                if best is None or timing.us < best.timing.us:
                    best, winner = Dense(layout, timing, None), (call, a)  # type: ignore[arg-type]
            assert best is not None
            assert winner is not None
            found[name] = best._replace(cold_us=self._between(n).cold_us(*winner)) if cold and self.code else best
        torch.backends.cudnn.allow_tf32 = False
        return found

    def sparse(
        self, key: tuple[Any, ...], node: SparseConv, weight: Any, n: int, sums: str, cold: bool
    ) -> tuple[Checked, Timing, float | None]:
        """Check against float64, then time. `key` names input and reference, which rows of one layer share.

        Raises WrongResultError when an element is not within tolerance or two runs differ in a bit.
        """
        import torch

        x, want = self._reference(key, node.geometry, weight, n)
        kind = torch.float32 if node.precision == "fp32" else torch.float16
        x = x.to(kind)
        runner = Runner(node)
        try:
            runner.reserve(n, node.precision)
            y = torch.full(want.shape, float("nan"), device="cuda", dtype=kind)
            checked = _check(lambda: runner.run(x, out=y, stream=torch.cuda.current_stream()), y, want, sums)
            first = y.clone()

            def call() -> object:
                return runner.run(x, out=y, stream=torch.cuda.current_stream())

            timing = time_us(call)
            chilled = self._between(n).cold_us(call, x) if cold and self.code else None
            torch.cuda.synchronize()
            if not torch.equal(first, y):
                raise WrongResultError("the result changed while it was timed")
        finally:
            torch.cuda.synchronize()
            runner.close()
        return checked, timing, chilled

    def _between(self, n: int) -> Between:
        import torch

        if n not in self.betweens:
            assert self.code is not None
            self.betweens[n] = Between(n, self.code)
            for _ in range(3):
                self.betweens[n]()
            torch.cuda.synchronize()
        return self.betweens[n]

    def _reference(self, key: tuple[Any, ...], g: Geometry, weight: Any, n: int) -> tuple[Any, Any]:
        """Input with fp16 values and the layer in float64; only the last layer's are kept."""
        import torch
        from torch.nn import functional

        if key not in self._inputs:
            self._inputs.clear()
            generator = torch.Generator(device="cuda").manual_seed(17 + n)
            x = torch.randn(n, g.ic, g.h, g.w, device="cuda", generator=generator).half().float()
            top, left, bottom, right = g.pads
            # A search among algorithms in double takes seconds and buys nothing.
            torch.backends.cudnn.benchmark = False
            want = functional.conv2d(
                functional.pad(x.double(), (left, right, top, bottom)), torch.from_numpy(weight).cuda().double(), None,
                tuple(g.stride), 0, tuple(g.dilation), g.group,
            )  # fmt: skip
            torch.backends.cudnn.benchmark = True
            self._inputs[key] = x, want
        return self._inputs[key]


def _check(call: Callable[[], object], y: Any, want: Any, sums: str) -> Checked:
    import torch

    call()
    torch.cuda.synchronize()
    first = y.clone()
    difference = first.double() - want
    norm = want.norm().clamp_min(1e-30)
    error = float(difference.norm() / norm)
    worst = float(difference.abs().max() / (norm / want.numel() ** 0.5))
    allowed = TOLERANCE[sums]
    if not error < allowed or not worst < WORST * allowed:
        at = np.unravel_index(int(torch.nan_to_num(difference.abs(), nan=torch.inf).argmax()), want.shape)
        raise WrongResultError(
            f"relative error {error:.2e}, allowed {allowed:.0e}; worst element {worst:.2e} of the root mean square, allowed "
            f"{WORST * allowed:.0e}, at {tuple(int(i) for i in at)}"
        )
    y.fill_(float("nan"))
    call()
    torch.cuda.synchronize()
    if not torch.equal(first, y):
        raise WrongResultError("two runs differ")
    return Checked(error, worst)


def sms_in_use() -> int:
    """On how many SMs work launched here runs, on a stream of its own and in a CUDA graph: what confining really came to."""
    import torch

    from sparsedeploy.plugins.host import Call

    driver = cuda_driver()
    function = driver.function(driver.load(SMS_PTX), "mark", 0, 1)
    seen = torch.zeros(MOST_SMS, dtype=torch.int32, device="cuda")
    call = Call("mark", (4 * MOST_SMS, 1, 1), (1024, 1, 1), 0, 1, False, ((seen.data_ptr(), 8),))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        driver.launch(function, call, stream.cuda_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            driver.launch(function, call, torch.cuda.current_stream().cuda_stream)
        graph.replay()
    torch.cuda.synchronize()
    return int(seen.sum().item())


def _smi(fields: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def sums_of(precision: Precision, config: dict[str, int], kernel: str) -> str:
    """What a kernel sums in: fp32, hf (fp16 data, fp32 sums) or h2 (half2 sums)."""
    if precision == "fp32":
        return "fp32"
    return "hf" if kernel == "baked" and config.get("sums") == 32 else "h2"
