"""The plugin on a real GPU, through TensorRT's interfaces: every kernel against float64, graphs, threads, memory, time.

SPARSEDEPLOY_GPU_CASES names nodes made before (gpu_cases.py), SPARSEDEPLOY_GPU_REPORT a file for what was measured.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
from pathlib import Path

import pytest
from gpu_cases import BATCHES, DTYPES, NETWORKS, NUMBERS, Prepared, faults, network, singles
from trt_gpu import Bare, Layer, Plugin, bit_equal, compared_us, same_bits
from trt_native import HOST, PLUGIN, compile_native

from sparsedeploy.devices import DEVICES
from sparsedeploy.errors import MachineError
from sparsedeploy.layer import Precision
from sparsedeploy.plugins import KERNELS
from sparsedeploy.plugins.host import cuda_driver
from sparsedeploy.plugins.plugin_build import Arch, Flavour, build_plugin, fetched_headers

pytestmark = pytest.mark.gpu

KERNEL_NAMES = [kernel.name for kernel in KERNELS]
NOISE, GRAIN_US = 0.03, 0.1
"""Two measurements of the same thing: by as much do medians of graphs differ on an idle GPU."""


def report(**what: object) -> None:
    """Keep a measurement, one line of JSON each."""
    line = json.dumps(what)
    print(line)
    if path := os.environ.get("SPARSEDEPLOY_GPU_REPORT"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@pytest.fixture(scope="module")
def target() -> str:
    """A target of this GPU's compute capability."""
    try:
        sm = cuda_driver().capability(0)
    except MachineError as error:
        pytest.skip(str(error))
    named = {80: "a100", 90: "h200", 53: "jetson-nano"}
    return named.get(sm) or next(device.name for device in DEVICES if device.sm == sm)


@pytest.fixture(scope="module", params=["v3", "v2"])
def libraries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The host and the plugin, of either generation of interfaces."""
    flavour: Flavour = request.param
    try:
        folder = fetched_headers()
        arch: Arch = "aarch64" if platform.machine() == "aarch64" else "x86_64"
        library = build_plugin(tmp_path_factory.mktemp("plugin") / "plugin.so", folder, flavour, arch, "system")
    except MachineError as error:
        pytest.skip(str(error))
    flags = ("-isystem", str(folder), f"-I{PLUGIN / 'cuda_shim'}", f"-DSPARSEDEPLOY_ADAPTER={flavour[1]}")
    return compile_native("libhost.so", [HOST / "host.cpp"], *flags, "-fPIC", "-shared"), library


@pytest.fixture(scope="module")
def plugin(libraries: tuple[Path, Path], target: str) -> Plugin:
    return Plugin(*libraries)


def case_of(kernel: str, target: str, number: int, dtype: Precision, batch: int) -> Prepared:
    """The case, or a skip."""
    found = singles(target)[kernel, number, dtype, batch]
    if found is None:
        pytest.skip(f"{kernel} does not run this layer on {target}")
    return found


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_every_kernel_against_float64(
    plugin: Plugin, target: str, tmp_path: Path, kernel: str, number: int, dtype: Precision, batch: int
) -> None:
    case = case_of(kernel, target, number, dtype, batch)
    layer = Layer(plugin, tmp_path, case)
    y = layer.run()
    assert faults(y, case) == ""
    assert bit_equal([y, layer.captured()]), case.name
    layer.close()


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_threads_and_contexts(plugin: Plugin, target: str, tmp_path: Path, kernel: str) -> None:
    """4 threads with 2 execution contexts each, 1000 runs of each context on streams of their own: every run's bytes."""
    case = case_of(kernel, target, 1, "fp32", 1)
    layer = Layer(plugin, tmp_path, case)
    y = layer.run()
    assert faults(y, case) == ""
    assert same_bits(layer.threaded(threads=4, contexts=2, runs=1000), y)
    layer.close()


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_memory_is_flat(plugin: Plugin, target: str, tmp_path: Path, kernel: str) -> None:
    """200 cycles of create, attach, run, destroy."""
    case = case_of(kernel, target, 1, "fp32", 1)
    layer = Layer(plugin, tmp_path, case)
    place, _ = layer.place(plugin.stream())
    layer.enqueue(place)
    layer.close()
    before = plugin.free_bytes()
    for _ in range(200):
        layer.made = int(plugin.ask(f"create {tmp_path / 'node'}")["object"])
        layer.attached = layer.attach()
        layer.enqueue(place)
        layer.close()
    assert before - plugin.free_bytes() < 2**20


def test_batch_0_launches_nothing(plugin: Plugin, target: str, tmp_path: Path) -> None:
    layer = Layer(plugin, tmp_path, case_of("csr", target, 1, "fp32", 1))
    place, output = layer.place(plugin.stream())
    layer.n = 0
    layer.enqueue(place)
    assert not (output.numpy() == output.numpy()).any(), "still NaN"
    layer.close()


@pytest.mark.parametrize(("kernel", "dtype"), NETWORKS)
def test_a_whole_resnet18(plugin: Plugin, target: str, tmp_path: Path, kernel: str, dtype: Precision) -> None:
    """Every sparse layer right; all of them in a row take as long as their bare kernels; 5 us of host time each."""
    cases = network(kernel, dtype, target)
    layers: list[Layer] = []
    for number, case in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        layers.append(Layer(plugin, tmp_path / str(number), case))
        assert faults(layers[-1].run(), case) == ""
    assert len(layers) >= 19
    bares = [Bare(plugin, case) for case in cases]
    places = [layer.place(0)[0] for layer in layers]

    def through_plugin(stream: int) -> None:
        for layer, place in zip(layers, places, strict=True):
            place.stream = stream
            layer.enqueue(place)

    def without(stream: int) -> None:
        for bare in bares:
            bare.enqueue(stream)

    ours, theirs = compared_us(plugin, through_plugin, without, 20)
    host = [(layer.host_us(), bare.driver_us(), bare.launches()) for layer, bare in zip(layers, bares, strict=True)]
    own = [all_ - driver for all_, driver, _ in host]
    report(
        network="resnet18", kernel=kernel, dtype=dtype, layers=len(layers), plugin_us=round(ours, 2), bare_us=round(theirs, 2),
        host_us=[round(all_, 2) for all_, _, _ in host], driver_us=[round(driver, 2) for _, driver, _ in host],
        launches=[count for *_, count in host], worst_own_us=round(max(own), 2),
    )  # fmt: skip
    assert abs(ours - theirs) <= NOISE * theirs + GRAIN_US, f"plugin {ours:.2f} us, bare kernels {theirs:.2f} us"
    assert max(own) < 5, f"the launcher takes {max(own):.2f} us a layer"
    for layer in layers:
        layer.close()


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_two_gpus_at_once(libraries: tuple[Path, Path], target: str, tmp_path: Path, kernel: str) -> None:
    """One process, one node, an execution context on each of two devices."""
    count = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) == 0
    if count.value < 2:
        pytest.skip("needs two GPUs")
    case = case_of(kernel, target, 1, "fp32", 1)
    layers = [Layer(Plugin(*libraries, device), tmp_path, case) for device in (0, 1)]
    outputs = [layer.run(layer.plugin.stream()) for layer in layers for _ in range(2)]
    assert faults(outputs[0], case) == ""
    assert bit_equal(outputs)
    for layer in reversed(layers):
        layer.use()
        layer.close()
