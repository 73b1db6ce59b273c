"""The host runner against a driver that records, and (gpu) against the real one."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conv_cases import EPILOGUES, Case, fill
from numpy.typing import NDArray

from sparsedeploy.devices import find
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.layer import Epilogue, Geometry, Precision
from sparsedeploy.plugins import epilogue, host, kernel_named
from sparsedeploy.plugins.host import Call, DeviceArray, Runner, pick_image
from sparsedeploy.plugins.kernel import BuildOptions
from sparsedeploy.plugins.launch import Arg, Expr, Launch, Memset, Variant, const, var
from sparsedeploy.plugins.node import Image, SparseConv
from sparsedeploy.plugins.reference import conv2d

GEOMETRY = Geometry(oc=4, ic=3, kh=1, kw=1, h=6, w=5)
ARGS = (Arg("input"), Arg("output"), Arg("constant", 0), Arg("workspace", 32), Arg("N"), Arg("W"))
LAUNCH = Launch("conv", (var("N") * 2, var("OH"), const(1)), (64, 1, 1), ARGS, 100_000, 2, True)
PLAN = (
    Variant("fp32", (Memset(32, var("N") * 8), LAUNCH), var("N") * 64 + 32, max_n=8),
    Variant("fp16", (replace(LAUNCH, entry="half", cluster=1),)),
)
IMAGES = (
    Image(53, "fp32", "ptx", b"ptx 53"),
    Image(80, "fp32", "ptx", b"ptx 80"),
    Image(90, "fp32", "cubin", b"cubin 90"),
    Image(80, "fp16", "ptx", b"ptx half"),
)
NODE = SparseConv(
    "stage1.conv", "csr", GEOMETRY, Epilogue(), "fp32", (np.arange(5, dtype=np.int32),), (), True, PLAN, IMAGES
)


class FakeDriver:
    """Records what it is asked, and hands out addresses."""

    def __init__(self, capability: int = 90, capturing: bool = False) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.arch, self.is_capturing, self.next = capability, capturing, 0x1000
        self.live: dict[int, int] = {}

    def capability(self, device: int) -> int:
        return self.arch

    def activate(self, device: int) -> None:
        self.device = device

    def load(self, image: bytes) -> int:
        self.log.append(("load", image))
        return 7

    def unload(self, module: int) -> None:
        self.log.append(("unload", module))

    def function(self, module: int, name: str, shared_bytes: int, cluster: int) -> int:
        self.log.append(("function", module, name, shared_bytes, cluster))
        return hash(name)

    def alloc(self, size: int) -> int:
        self.next += 0x10000
        self.live[self.next] = size
        return self.next

    def free(self, address: int) -> None:
        del self.live[address]

    def upload(self, address: int, data: bytes) -> None:
        self.log.append(("upload", address, data))

    def download(self, address: int, size: int) -> bytes:
        return bytes(size)

    def zero(self, address: int, size: int, stream: int) -> None:
        self.log.append(("zero", address, size, stream))

    def capturing(self, stream: int) -> bool:
        return self.is_capturing

    def launch(self, function: int, call: Call, stream: int) -> None:
        self.log.append(("launch", call, stream))

    def said(self, kind: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == kind]


def runner(**options: Any) -> tuple[Runner, FakeDriver]:
    driver = FakeDriver(**options)
    return Runner(NODE, 0, driver), driver


class Foreign:
    """An array of another library."""

    def __init__(self, shape: tuple[int, ...], kind: str = "<f4", strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": kind,
            "data": (0xAB00, False),
            "strides": strides,
            "version": 3,
        }


def test_plan_is_run_in_order_with_every_size_known() -> None:
    made, driver = runner()
    out = made.run(Foreign((3, 3, 6, 5)), stream=99)
    ((call, stream),) = driver.said("launch")
    ((zeroed, size, zero_stream),) = driver.said("zero")
    assert (call.entry, call.grid, call.block) == ("conv", (6, 6, 1), (64, 1, 1))
    assert (call.shared_bytes, call.cluster, call.dependent) == (100_000, 2, True)
    values = [value for value, _ in call.values]
    assert values[0] == 0xAB00
    assert values[1] == out.address
    assert driver.said("upload") == [(values[2], np.arange(5, dtype=np.int32).tobytes())]
    assert values[3] == zeroed
    assert values[4:] == [3, 5]
    assert [width for _, width in call.values] == [8, 8, 8, 8, 4, 4]
    assert (size, stream, zero_stream) == (24, 99, 99)
    assert driver.live[zeroed - 32] == 3 * 64 + 32
    assert out.shape == (3, 4, 6, 5)


def test_images_entries_and_workspace_are_set_up_once() -> None:
    made, driver = runner()
    out = made.run(Foreign((2, 3, 6, 5)))
    before = dict(driver.live)
    for _ in range(3):
        assert made.run(Foreign((2, 3, 6, 5)), out=out) is out
    assert driver.live == before
    assert driver.said("load") == [(b"cubin 90",)]
    assert driver.said("function") == [(7, "conv", 100_000, 2)]
    made.run(Foreign((8, 3, 6, 5)), out=Foreign((8, 4, 6, 5)))
    assert len(driver.live) == len(before) + 1  # a larger workspace; the smaller one may still be in use
    del out
    made.close()
    assert driver.live == {}
    assert driver.said("unload") == [(7,)]


def test_half_takes_its_own_variant_and_image() -> None:
    made, driver = runner()
    made.run(Foreign((9, 3, 6, 5), "<f2"), out=Foreign((9, 4, 6, 5), "<f2"))
    assert driver.said("load") == [(b"ptx half",)]
    assert driver.said("launch")[0][0].entry == "half"


@pytest.mark.parametrize(
    ("capability", "data"),
    [(53, b"ptx 53"), (75, b"ptx 53"), (80, b"ptx 80"), (89, b"ptx 80"), (90, b"cubin 90"), (120, b"ptx 80")],
)
def test_image_is_the_exact_cubin_else_the_newest_older_ptx(capability: int, data: bytes) -> None:
    assert pick_image(NODE, "fp32", capability).data == data


def test_device_that_no_image_fits_is_told_both_sides() -> None:
    with pytest.raises(MachineError, match=r"stage1\.conv.*capability 7\.5.*sm_80 ptx"):
        pick_image(NODE, "fp16", 75)


def test_clusters_need_hopper() -> None:
    made, _ = runner(capability=80)
    with pytest.raises(MachineError, match=r"clusters of 2 blocks.*8\.0"):
        made.run(Foreign((1, 3, 6, 5)))


def test_growing_the_workspace_inside_a_capture_is_refused_and_reserving_helps() -> None:
    made, driver = runner(capturing=True)
    with pytest.raises(InputError, match=r"reserve\(n, dtype\)"):
        made.run(Foreign((1, 3, 6, 5)), out=Foreign((1, 4, 6, 5)))
    driver.is_capturing = False
    made.reserve(4, "fp32")
    driver.is_capturing = True
    made.run(Foreign((1, 3, 6, 5)), out=Foreign((1, 4, 6, 5)))
    assert len(driver.said("launch")) == 1


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (Foreign((1, 3, 5, 6)), r"x is fp32 \[1, 3, 5, 6\]; needed fp32 or fp16 \['N', 3, 6, 5\]"),
        (Foreign((1, 3, 6, 5), "<f8"), "x is <f8"),
        (Foreign((1, 3, 6, 5), strides=(360, 4, 60, 12)), "not contiguous"),
        (Foreign((0, 3, 6, 5)), r"x is fp32 \[0"),
        (Foreign(()), r"x is fp32 \[\]"),
        (Foreign((9, 3, 6, 5)), "nothing in its plan runs fp32 with N=9; it has fp32 N=1..8, fp16 N=1..any"),
        (np.zeros((1, 3, 6, 5), np.float32), "x lies on DLPack device type 1"),
        (object(), "x is a object, needed an array on the GPU"),
    ],
)
def test_unfit_input_is_refused_in_words(x: object, message: str) -> None:
    made, _ = runner()
    with pytest.raises(InputError, match=message):
        made.run(x)


def test_contiguous_strides_are_fine() -> None:
    made, driver = runner()
    made.run(Foreign((1, 3, 6, 5), strides=(9999, 120, 20, 4)), out=Foreign((1, 4, 6, 5), strides=(480, 120, 20, 4)))
    assert len(driver.said("launch")) == 1


def test_output_of_another_type_is_refused() -> None:
    made, _ = runner()
    with pytest.raises(InputError, match=r"out is fp16 .*needed fp32 \[1, 4, 6, 5\]"):
        made.run(Foreign((1, 3, 6, 5)), out=Foreign((1, 4, 6, 5), "<f2"))


def test_residual_goes_exactly_where_the_node_wants_one() -> None:
    made, _ = runner()
    with pytest.raises(InputError, match="takes no residual and the call gives one"):
        made.run(Foreign((1, 3, 6, 5)), Foreign((1, 4, 6, 5)))
    plan = (Variant("fp32", (replace(LAUNCH, args=(Arg("residual"),), cluster=1),)),)
    driver = FakeDriver()
    adding = Runner(replace(NODE, epilogue=Epilogue(residual="before_activation"), plan=plan), 0, driver)
    with pytest.raises(InputError, match="adds residual and the call gives none"):
        adding.run(Foreign((1, 3, 6, 5)))
    adding.run(Foreign((1, 3, 6, 5)), Foreign((1, 4, 6, 5)))
    assert driver.said("launch")[0][0].values == ((0xAB00, 8),)


def test_node_without_code_is_refused() -> None:
    with pytest.raises(InputError, match="carries weights but no code"):
        Runner(replace(NODE, images=()), 0, FakeDriver())


def test_entry_gets_the_most_shared_memory_and_cluster_that_its_launches_ask_for() -> None:
    small, large = replace(LAUNCH, shared_bytes=60_000, cluster=1), replace(LAUNCH, shared_bytes=200_000, cluster=4)
    plan = (Variant("fp32", (small,), max_n=1), Variant("fp32", (large, small)), Variant("fp16", (LAUNCH,)))
    driver = FakeDriver()
    made = Runner(replace(NODE, plan=plan), 0, driver)
    for n in (1, 2):
        made.run(Foreign((n, 3, 6, 5)), out=Foreign((n, 4, 6, 5)))
    assert driver.said("function") == [(7, "conv", 200_000, 4)]
    assert [call.shared_bytes for call, _ in driver.said("launch")] == [60_000, 200_000, 60_000]


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (replace(LAUNCH, entry=""), "a launch without an entry name"),
        (replace(LAUNCH, block=(64, 0, 1)), "conv has a block, cluster or shared size that is not positive"),
        (replace(LAUNCH, cluster=0), "that is not positive"),
        (replace(LAUNCH, shared_bytes=-1), "that is not positive"),
        (replace(LAUNCH, args=(Arg("input"),) * 65), "takes more than 64 arguments"),
        (replace(LAUNCH, args=(Arg("constant", 1),)), "takes constant 1, the node has 1"),
        (replace(LAUNCH, args=(Arg("constant", -1),)), "takes constant -1"),
        (replace(LAUNCH, args=(Arg("workspace", -4),)), "an address before the workspace"),
        (replace(LAUNCH, args=(Arg("residual"),)), "takes a residual, the node has none"),
        (Memset(-1, const(4)), "clears bytes before the workspace"),
    ],
)
def test_damaged_plan_is_refused_before_anything_is_allocated(op: Launch | Memset, message: str) -> None:
    driver = FakeDriver()
    with pytest.raises(InputError, match=rf"stage1\.conv: .*{message}.*convert the model again"):
        Runner(replace(NODE, plan=(Variant("fp32", (op,)),)), 0, driver)
    assert driver.live == {}


@pytest.mark.parametrize("size", [var("N") - 1, var("N") * 2**17])
def test_grid_that_no_device_runs_is_refused(size: Expr) -> None:
    plan = (Variant("fp32", (replace(LAUNCH, grid=(const(1), size, const(1)), cluster=1),), const(64)),)
    with pytest.raises(InputError, match=r"conv with a grid of \d+ along axis 1, a device runs 1 to 65535"):
        Runner(replace(NODE, plan=plan), 0, FakeDriver()).run(Foreign((1, 3, 6, 5)))


def test_clearing_beyond_the_workspace_is_refused_and_of_nothing_left_out() -> None:
    for size, zeroed in ((var("N") * 33, None), (var("N") - 1, 0), (const(32), 1)):
        driver = FakeDriver()
        made = Runner(replace(NODE, plan=(Variant("fp32", (Memset(32, size),), const(64)),)), 0, driver)
        if zeroed is None:
            with pytest.raises(InputError, match="clears bytes beyond its workspace"):
                made.run(Foreign((1, 3, 6, 5)))
        else:
            made.run(Foreign((1, 3, 6, 5)))
            assert len(driver.said("zero")) == zeroed


def test_stream_of_each_library() -> None:
    for name in ("cuda_stream", "ptr", "handle"):
        assert host._stream(type("Stream", (), {name: 42})()) == 42
    assert host._stream(None) == 0
    assert host._stream(17) == 17


class Tensor:
    """A DLPack exporter whose memory is said to lie on a GPU."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None, bits: int = 32) -> None:
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        self.tensor = host._DLTensor(0x5000, 2, 0, len(shape), 2, bits, 1, self.shape, self.strides, 0x20)

    def __dlpack__(self) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def test_dlpack_arrays_are_read_without_copies() -> None:
    made, driver = runner()
    made.run(Tensor((1, 3, 6, 5), None), out=Tensor((1, 4, 6, 5), (120, 30, 5, 1)))
    assert [value for value, _ in driver.said("launch")[0][0].values[:2]] == [0x5020, 0x5020]
    with pytest.raises(InputError, match="not contiguous"):
        made.run(Tensor((1, 3, 6, 5), (90, 1, 15, 3)))
    with pytest.raises(InputError, match="x is float64"):
        made.run(Tensor((1, 3, 6, 5), None, 64))


def test_launch_structure_has_the_drivers_layout() -> None:
    # CUlaunchConfig: 7 unsigned, 4 bytes of padding, two pointers, one unsigned; CUlaunchAttribute: 8 + 64 bytes.
    assert ctypes.sizeof(host._Config) == 56
    assert (host._Config.stream.offset, host._Config.attributes.offset, host._Config.count.offset) == (32, 40, 48)
    assert ctypes.sizeof(host._Attribute) == 72
    call = Call("k", (1, 1, 1), (32, 1, 1), 0, 4, True, ())
    cluster, dependent = host._attributes(call)
    assert (cluster.id, cluster.value.cluster.x, cluster.value.cluster.y) == (4, 4, 1)
    assert (dependent.id, dependent.value.flag) == (6, 1)


def test_machine_without_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(MachineError, match=r"no CUDA driver: libcuda\.so\.1"):
        host.CudaDriver()


@pytest.mark.gpu
def test_device_array_goes_there_and_back() -> None:
    driver = host.cuda_driver()
    driver.activate(0)
    values = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    assert np.array_equal(DeviceArray(driver, values.shape, "fp32").upload(values).numpy(), values)


def on_device(kernel: str, precision: Precision, case: Case) -> SparseConv:
    """The node for the newest architecture that this machine's device runs."""
    archs = {53: "jetson-nano", 80: "a100", 90: "h200"}
    arch = max(known for known in archs if known <= host.cuda_driver().capability(0))
    options = BuildOptions(precision, len(case.x), (arch,))
    return kernel_named(kernel).build(case.layer, case.weight, case.bias, find(archs[arch]), {}, options).node


def check(node: SparseConv, case: Case, got: NDArray[Any]) -> None:
    """Each element against float64, in roundings of its sum of magnitudes."""
    element = np.float32 if node.precision == "fp32" else np.float16
    weight, bias = kernel_named(node.kernel).unpack(node)
    assert case.residual is not None
    sums = conv2d(case.x.astype(element), weight, bias, case.geometry)
    expected = epilogue.apply(case.layer.epilogue, sums, case.residual.astype(element))
    scale = conv2d(np.abs(case.x), np.abs(weight), None, case.geometry) + 8
    assert (np.abs(got - expected) <= scale * (2.0**-20 if node.precision == "fp32" else 2.0**-8)).all()


CASE_GEOMETRY = Geometry(oc=40, ic=24, kh=3, kw=3, h=15, w=14, pads=(1, 1, 1, 1))
EVERY = pytest.mark.parametrize(
    ("kernel", "precision"), [("packed", "fp32"), ("packed", "fp16"), ("csr", "fp32"), ("csr", "fp16")]
)


@pytest.mark.gpu
@EVERY
def test_data_driven_kernels_run_on_the_device(kernel: str, precision: Precision) -> None:
    case = fill(CASE_GEOMETRY, EPILOGUES[2], 900, 3, 4)
    node = on_device(kernel, precision, case)
    made = Runner(node)
    assert case.residual is not None
    x = made.empty(3, node.precision, "input").upload(case.x)
    extra = made.empty(3, node.precision).upload(case.residual)
    first = made.run(x, extra).numpy()
    assert np.array_equal(first, made.run(x, extra).numpy())
    check(node, case, first)


@pytest.mark.gpu
@EVERY
def test_torch_tensors_streams_and_graphs(kernel: str, precision: Precision) -> None:
    torch = pytest.importorskip("torch")
    case = fill(CASE_GEOMETRY, EPILOGUES[2], 900, 3, 4)
    node = on_device(kernel, precision, case)
    made = Runner(node)
    kind = torch.float32 if precision == "fp32" else torch.float16
    x, extra = (torch.from_numpy(values).to("cuda", kind) for values in (case.x, case.residual))
    out = torch.full(extra.shape, float("nan"), device="cuda", dtype=kind)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    assert made.run(x, extra, out, stream) is out
    stream.synchronize()
    check(node, case, out.cpu().numpy())
    once = out.clone()
    made.reserve(3, node.precision)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(x, extra, out, torch.cuda.current_stream())
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, once)
    with pytest.raises(InputError, match="not contiguous"):
        made.run(x.to(memory_format=torch.channels_last), extra)
    with pytest.raises(InputError, match=r"needed an array on the GPU|lies on DLPack device type 1"):
        made.run(x.cpu(), extra)


@pytest.mark.gpu
@EVERY
def test_cupy_arrays_and_streams(kernel: str, precision: Precision) -> None:
    cupy = pytest.importorskip("cupy")
    case = fill(CASE_GEOMETRY, EPILOGUES[2], 900, 3, 4)
    node = on_device(kernel, precision, case)
    made = Runner(node)
    kind = np.float32 if precision == "fp32" else np.float16
    x, extra = (cupy.asarray(values, dtype=kind) for values in (case.x, case.residual))
    stream = cupy.cuda.Stream(non_blocking=True)
    out = cupy.asarray(np.full(extra.shape, np.nan, kind))  # copies alone: CuPy's own kernels need a compiler
    cupy.cuda.get_current_stream().synchronize()
    made.run(x, extra, out, stream)
    stream.synchronize()
    first = cupy.asnumpy(out)
    check(node, case, first)
    ours = made.run(x, extra)  # our own array, read by CuPy without a copy
    assert np.array_equal(cupy.asnumpy(cupy.asarray(ours)), first)
