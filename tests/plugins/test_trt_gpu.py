"""The plugin on a real GPU, through TensorRT's interfaces: every kernel against float64, graphs, threads, memory."""

from __future__ import annotations

import ctypes
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conv_cases import EPILOGUES, Case, fill
from numpy.typing import NDArray
from trt_gpu import Layer, Plugin, bit_equal, element, within
from trt_native import HOST, PLUGIN, compile_native

from sparsedeploy.devices import Device, find
from sparsedeploy.errors import MachineError
from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins import KERNELS, epilogue
from sparsedeploy.plugins.host import Runner, cuda_driver
from sparsedeploy.plugins.kernel import BuildOptions, Kernel
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.plugin_build import Arch, Flavour, build_plugin, fetched_headers
from sparsedeploy.plugins.reference import conv2d

pytestmark = pytest.mark.gpu

GEOMETRIES = (
    Geometry(oc=64, ic=64, kh=3, kw=3, h=56, w=56, pads=(1, 1, 1, 1)),
    Geometry(oc=128, ic=64, kh=3, kw=3, h=28, w=28, stride=(2, 2), pads=(1, 1, 1, 1)),
    Geometry(oc=96, ic=33, kh=1, kw=1, h=14, w=9),
    Geometry(oc=512, ic=512, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1)),
)


@dataclass(frozen=True)
class Prepared:
    """A node with its data and what its output must be."""

    name: str
    node: SparseConv
    dtype: Precision
    x: NDArray[np.float64]
    residual: NDArray[np.float64] | None
    expected: NDArray[np.float64]
    magnitudes: NDArray[np.float64]


def rounded(case: Case, dtype: Precision) -> Case:
    """The case with activations that `dtype` holds exactly."""
    x = case.x.astype(element(dtype)).astype(np.float64)
    residual = None if case.residual is None else case.residual.astype(element(dtype)).astype(np.float64)
    return Case(case.layer, case.weight, case.bias, x, residual)


def prepare(kernel: Kernel, device: Device, number: int, dtype: Precision, batch: int) -> Prepared | None:
    """A geometry and an epilogue by number; None when the kernel does not run them on the device."""
    g, chosen = GEOMETRIES[number % len(GEOMETRIES)], EPILOGUES[number % len(EPILOGUES)]
    case = rounded(fill(g, chosen, int(0.1 * np.prod(g.weight_shape)), batch, 100 + number), dtype)
    if kernel.supports(case.layer, device, dtype) is not None:
        return None
    options = BuildOptions(dtype, batch, (device.sm,), assemble=True)
    node = kernel.build(case.layer, case.weight, case.bias, device, {}, options).node
    if not node.executable:
        return None
    weight, bias = kernel.unpack(node)
    # Half kernels multiply by weights rounded to half.
    weight = weight.astype(element(dtype)).astype(np.float32)
    sums = conv2d(np.abs(case.x), np.abs(weight), None if bias is None else np.abs(bias), g)
    expected = epilogue.apply(chosen, conv2d(case.x, weight, bias, g), case.residual)
    return Prepared(
        f"{kernel.name} {g.oc}x{g.ic}x{g.kh}x{g.kw} {chosen.describe()} {dtype} N={batch}",
        node, dtype, case.x, case.residual, expected, sums + (0 if case.residual is None else np.abs(case.residual)),
    )  # fmt: skip


def check(plugin: Plugin, folder: Path, prepared: Prepared) -> None:
    """One layer's output by enqueue and by a captured graph, against float64."""
    layer = Layer(plugin, folder, prepared.node, prepared.x, prepared.residual, prepared.dtype)
    y = layer.run()
    wrong = ~within(y, prepared.expected, prepared.magnitudes, prepared.dtype)
    assert not wrong.any(), f"{prepared.name}: {wrong.sum()} wrong, first at {np.argwhere(wrong)[0]}"
    assert bit_equal([y, layer.captured()]), prepared.name
    layer.close()


def check_threads(plugin: Plugin, folder: Path, prepared: Prepared, runs: int = 1000) -> None:
    """4 threads with 2 execution contexts each, every run on its own stream: all bytes equal."""
    layer = Layer(plugin, folder, prepared.node, prepared.x, prepared.residual, prepared.dtype)
    assert bit_equal([layer.run(), *layer.threaded(8, runs)])


def check_memory(plugin: Plugin, folder: Path, prepared: Prepared, cycles: int = 200) -> int:
    """Create, attach, run, destroy; the bytes of device memory that are gone after it."""
    layer = Layer(plugin, folder, prepared.node, prepared.x, prepared.residual, prepared.dtype)
    layer.run()
    plugin.synchronize()
    layer.close()
    before = plugin.free_bytes()
    for _ in range(cycles):
        made = plugin.ask(f"create {folder / 'node'}")["object"]
        attached = plugin.ask(f"attach {made}")["object"]
        plugin.ask(f"destroy {attached}")
        plugin.ask(f"destroy {made}")
    return before - plugin.free_bytes()


def bare_us(prepared: Prepared, times: int = 200) -> float:
    """Time of the same launches from plugins/host.py, captured in one graph: the kernel without any launcher."""
    plugin_driver = cuda_driver()
    runner = Runner(prepared.node, 0, plugin_driver)
    x = runner.empty(len(prepared.x), prepared.dtype, "input").upload(prepared.x)
    residual = None
    if prepared.residual is not None:
        residual = runner.empty(len(prepared.x), prepared.dtype).upload(prepared.residual)
    return measured(runner, x, residual, times)


def measured(runner: Runner, x: object, residual: object, times: int) -> float:
    """Microseconds of one run in a graph of `times` runs, the best of 5."""
    cuda, stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
    out = runner.run(x, residual=residual, stream=stream.value)
    graph, runnable = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
    for _ in range(times):
        runner.run(x, residual=residual, out=out, stream=stream.value)
    assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(runnable), graph, ctypes.c_ulonglong(0)) == 0
    best = float("inf")
    for _ in range(6):
        cuda.cuCtxSynchronize()
        started = time.perf_counter()
        assert cuda.cuGraphLaunch(runnable, stream) == 0
        cuda.cuCtxSynchronize()
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / times


@pytest.fixture(scope="module", params=["v3", "v2"])
def plugin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plugin:
    flavour: Flavour = request.param
    try:
        folder = fetched_headers()
        arch: Arch = "aarch64" if platform.machine() == "aarch64" else "x86_64"
        library = build_plugin(tmp_path_factory.mktemp("plugin") / "plugin.so", folder, flavour, arch, "system")
    except MachineError as error:
        pytest.skip(str(error))
    flags = ("-isystem", str(folder), f"-I{PLUGIN / 'cuda_shim'}", f"-DSPARSEDEPLOY_ADAPTER={flavour[1]}")
    host = compile_native("libhost.so", [HOST / "host.cpp"], *flags, "-fPIC", "-shared")
    return Plugin(host, library)


@pytest.fixture(scope="module")
def device() -> Device:
    sm = cuda_driver().capability(0)
    named = {80: "a100", 90: "h200", 53: "jetson-nano"}
    return find(named.get(sm, "a100"))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_against_float64(
    plugin: Plugin, device: Device, tmp_path: Path, kernel: Kernel, number: int, dtype: Precision, batch: int
) -> None:
    prepared = prepare(kernel, device, number, dtype, batch)
    if prepared is None:
        pytest.skip(f"{kernel.name} does not run this layer on {device.name}")
    check(plugin, tmp_path, prepared)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_threads_contexts_memory_and_time(plugin: Plugin, device: Device, tmp_path: Path, kernel: Kernel) -> None:
    prepared = prepare(kernel, device, 4, "fp32", 1)
    if prepared is None:
        pytest.skip(f"{kernel.name} does not run this layer on {device.name}")
    check_threads(plugin, tmp_path, prepared)
    assert check_memory(plugin, tmp_path, prepared) < 2**20
    layer = Layer(plugin, tmp_path, prepared.node, prepared.x, prepared.residual, "fp32")
    bare = bare_us(prepared)
    assert layer.us() < bare + 5, f"bare kernel {bare:.2f} us"
