"""Runs a node's launch plan on a GPU from Python: arrays of torch, CuPy, PyCUDA, or our own.

The driver is reached through ctypes on libcuda.so.1, as the TensorRT plugin reaches it by dlopen: every machine with a
driver has it, it ties us to no version of a binding package, and the one structure that must be laid out by hand
(CUlaunchConfig) is part of the driver's stable ABI. Launching through it is plain stream work: CUDA graphs capture it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.layer import ELEMENT_BYTES, Precision
from sparsedeploy.plugins.launch import Launch, Memset, Variant, choose
from sparsedeploy.plugins.node import Image, SparseConv

_NUMPY_NAMES: dict[str, Precision] = {"<f4": "fp32", "<f2": "fp16"}
_DYNAMIC_SHARED_DEFAULT = 48 * 1024
_PORTABLE_CLUSTER = 8
_MAX_ARGS = 64
"""Parameters of one launch, as in plugins/trt/plan.h."""
_MAX_GRID = (2**31 - 1, 65535, 65535)


class Driver(Protocol):
    """What the runner needs of a CUDA driver; handles are integers."""

    def capability(self, device: int) -> int:
        """Compute capability times ten."""

    def activate(self, device: int) -> None:
        """Make the device's context current for this thread."""

    def load(self, image: bytes) -> int:
        """Load a cubin or NUL-terminated PTX; the module."""

    def unload(self, module: int) -> None:
        """Undo `load`."""

    def function(self, module: int, name: str, shared_bytes: int, cluster: int) -> int:
        """Look an entry up and allow it that much dynamic shared memory and that cluster size."""

    def alloc(self, size: int) -> int:
        """Device memory of `size` bytes."""

    def free(self, address: int) -> None:
        """Undo `alloc`."""

    def upload(self, address: int, data: bytes) -> None:
        """Copy to the device and wait."""

    def download(self, address: int, size: int) -> bytes:
        """Copy from the device after all work on it, and wait."""

    def zero(self, address: int, size: int, stream: int) -> None:
        """Zero bytes in stream order."""

    def capturing(self, stream: int) -> bool:
        """Whether a graph is being captured from the stream."""

    def launch(self, function: int, call: Call, stream: int) -> None:
        """Launch one kernel in stream order."""


@dataclass(frozen=True)
class Call:
    """One launch with every size known. `values` are parameters: (value, bytes)."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: int
    dependent: bool
    values: tuple[tuple[int, int], ...]


class _Dim(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class _AttributeValue(ctypes.Union):
    # CUlaunchAttributeValue is 64 bytes, whatever it holds.
    _fields_ = (("pad", ctypes.c_char * 64), ("cluster", _Dim), ("flag", ctypes.c_int))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _AttributeValue))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", _Dim), ("block", _Dim), ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


_ATTRIBUTE_CLUSTER, _ATTRIBUTE_DEPENDENT = 4, 6
_DEVICE_MAJOR, _DEVICE_MINOR = 75, 76
_FUNCTION_SHARED, _FUNCTION_WIDE_CLUSTER = 8, 14


class CudaDriver:
    """libcuda.so.1 by ctypes. Raises MachineError when there is no driver or no device, and with the driver's words
    when a call fails.
    """

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MachineError(
                "no CUDA driver: libcuda.so.1 cannot be loaded on this machine. Running kernels needs an NVIDIA GPU and its "
                "driver; everything up to the bundle (scan, convert, verify) works without one."
            ) from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._check(self._lib.cuInit(0), "cuInit")

    def _check(self, status: int, what: str) -> None:
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._lib.cuGetErrorString(status, ctypes.byref(text))
        words = text.value.decode() if text.value else "unknown error"
        raise MachineError(
            f"{what} failed: {words} (CUDA error {status}). Check the GPU with nvidia-smi and run again."
        )

    def capability(self, device: int) -> int:
        """Compute capability times ten."""
        handle, value = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
        self._check(self._lib.cuDeviceGet(ctypes.byref(handle), device), f"opening CUDA device {device}")
        for cell, attribute in zip(value, (_DEVICE_MAJOR, _DEVICE_MINOR), strict=True):
            self._check(self._lib.cuDeviceGetAttribute(ctypes.byref(cell), attribute, handle), "cuDeviceGetAttribute")
        return 10 * value[0].value + value[1].value

    def activate(self, device: int) -> None:
        """Make the device's primary context, which torch and CuPy share, current."""
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self._check(self._lib.cuDeviceGet(ctypes.byref(handle), device), f"opening CUDA device {device}")
            self._check(self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
            self._contexts[device] = context
        self._check(self._lib.cuCtxSetCurrent(self._contexts[device]), "cuCtxSetCurrent")

    def load(self, image: bytes) -> int:
        """Load a cubin or PTX."""
        module = ctypes.c_void_p()
        self._check(self._lib.cuModuleLoadData(ctypes.byref(module), image + b"\0"), "loading a kernel image")
        return int(module.value or 0)

    def unload(self, module: int) -> None:
        """Undo `load`."""
        self._check(self._lib.cuModuleUnload(ctypes.c_void_p(module)), "cuModuleUnload")

    def function(self, module: int, name: str, shared_bytes: int, cluster: int) -> int:
        """Look an entry up and configure it."""
        function = ctypes.c_void_p()
        status = self._lib.cuModuleGetFunction(ctypes.byref(function), ctypes.c_void_p(module), name.encode())
        self._check(status, f"looking up kernel {name}")
        if shared_bytes > _DYNAMIC_SHARED_DEFAULT:
            status = self._lib.cuFuncSetAttribute(function, _FUNCTION_SHARED, shared_bytes)
            self._check(status, f"allowing kernel {name} {shared_bytes} bytes of shared memory")
        if cluster > _PORTABLE_CLUSTER:
            status = self._lib.cuFuncSetAttribute(function, _FUNCTION_WIDE_CLUSTER, 1)
            self._check(status, f"allowing kernel {name} clusters of {cluster}")
        return int(function.value or 0)

    def alloc(self, size: int) -> int:
        """Device memory."""
        address = ctypes.c_uint64()
        self._check(self._lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), f"allocating {size} bytes")
        return int(address.value)

    def free(self, address: int) -> None:
        """Undo `alloc`."""
        self._check(self._lib.cuMemFree_v2(ctypes.c_uint64(address)), "cuMemFree")

    def upload(self, address: int, data: bytes) -> None:
        """Copy to the device."""
        self._check(
            self._lib.cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))), "cuMemcpyHtoD"
        )

    def download(self, address: int, size: int) -> bytes:
        """Copy from the device."""
        self._check(self._lib.cuCtxSynchronize(), "running the kernels")
        buffer = ctypes.create_string_buffer(size)
        self._check(self._lib.cuMemcpyDtoH_v2(buffer, ctypes.c_uint64(address), ctypes.c_size_t(size)), "cuMemcpyDtoH")
        return buffer.raw

    def zero(self, address: int, size: int, stream: int) -> None:
        """Zero bytes in stream order."""
        status = self._lib.cuMemsetD8Async(
            ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        )
        self._check(status, "cuMemsetD8Async")

    def capturing(self, stream: int) -> bool:
        """Whether a graph is being captured."""
        state = ctypes.c_int()
        self._check(self._lib.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(state)), "cuStreamIsCapturing")
        return state.value != 0

    def launch(self, function: int, call: Call, stream: int) -> None:
        """Launch one kernel; cuLaunchKernelEx only where an attribute needs it, since older drivers lack it."""
        cells = [(ctypes.c_uint64 if size == 8 else ctypes.c_int32)(value) for value, size in call.values]
        pointers = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells])
        if call.cluster == 1 and not call.dependent:
            status = self._lib.cuLaunchKernel(
                ctypes.c_void_p(function),
                *call.grid,
                *call.block,
                call.shared_bytes,
                ctypes.c_void_p(stream),
                pointers,
                None,
            )
        else:
            attributes = _attributes(call)
            config = _Config(
                _Dim(*call.grid), _Dim(*call.block), call.shared_bytes, stream, attributes, len(attributes)
            )  # fmt: skip
            status = self._lib.cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
        self._check(status, f"launching kernel {call.entry}")


def _attributes(call: Call) -> ctypes.Array[_Attribute]:
    made: list[_Attribute] = []
    if call.cluster > 1:
        attribute = _Attribute(id=_ATTRIBUTE_CLUSTER)
        attribute.value.cluster = _Dim(call.cluster, 1, 1)
        made.append(attribute)
    if call.dependent:
        attribute = _Attribute(id=_ATTRIBUTE_DEPENDENT)
        attribute.value.flag = 1
        made.append(attribute)
    return (_Attribute * len(made))(*made)


@cache
def cuda_driver() -> CudaDriver:
    """The process's driver; raises MachineError when there is none."""
    return CudaDriver()


class DeviceArray:
    """A C-contiguous fp32 or fp16 array on a device that any `__cuda_array_interface__` library can read."""

    def __init__(self, driver: Driver, shape: tuple[int, ...], dtype: Precision) -> None:
        self._driver, self.shape, self.dtype = driver, shape, dtype
        self._bytes = int(np.prod(shape)) * ELEMENT_BYTES[dtype]
        self.address = driver.alloc(max(self._bytes, 1))

    def __del__(self) -> None:
        address, self.address = getattr(self, "address", 0), 0
        if address:
            self._driver.free(address)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3 of numba's protocol."""
        kind = "<f4" if self.dtype == "fp32" else "<f2"
        return {"shape": self.shape, "typestr": kind, "data": (self.address, False), "strides": None, "version": 3}

    def upload(self, values: NDArray[Any]) -> DeviceArray:
        """Fill from the host, rounding to the array's type; returns itself."""
        element = np.float32 if self.dtype == "fp32" else np.float16
        self._driver.upload(self.address, np.ascontiguousarray(np.broadcast_to(values, self.shape), element).tobytes())
        return self

    def numpy(self) -> NDArray[Any]:
        """A copy on the host, after all work on the device."""
        element = np.float32 if self.dtype == "fp32" else np.float16
        raw: NDArray[Any] = np.frombuffer(self._driver.download(self.address, self._bytes), element)
        return np.array(raw.reshape(self.shape))


@dataclass(frozen=True)
class _View:
    """Where an array lies."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    contiguous: bool


def pick_image(node: SparseConv, dtype: Precision, capability: int) -> Image:
    """The image a device runs: the cubin made for it, else the newest PTX that is not newer than it.

    Raises MachineError listing the architectures inside and the device's.
    """
    images = [image for image in node.images if image.dtype == dtype]
    exact = [image for image in images if image.kind == "cubin" and image.arch == capability]
    portable = [image for image in images if image.kind == "ptx" and image.arch <= capability]
    if exact:
        return exact[0]
    if portable:
        return max(portable, key=lambda image: image.arch)
    inside = ", ".join(f"sm_{image.arch} {image.kind}" for image in images) or "none"
    raise MachineError(
        f"{node.layer}: no image for this device: it has compute capability {capability // 10}.{capability % 10}, the node's "
        f"{dtype} images are {inside}. Convert again for a target with this architecture."
    )


def _check_plan(node: SparseConv) -> None:
    """The checks of plugins/trt/params.cpp: a damaged plan must not become a wild address. Raises InputError."""
    for op in (op for variant in node.plan for op in variant.ops):
        fault = _memset_fault(op) if isinstance(op, Memset) else _launch_fault(op, node)
        if fault:
            raise InputError(f"{node.layer}: {fault}. The node is damaged or was edited: convert the model again.")


def _memset_fault(op: Memset) -> str:
    return "its launch plan clears bytes before the workspace" if op.offset < 0 else ""


def _launch_fault(op: Launch, node: SparseConv) -> str:
    """What is wrong with a launch, or nothing."""
    what = f"its launch plan's {op.entry}"
    if not op.entry:
        return "its launch plan holds a launch without an entry name"
    if min(*op.block, op.cluster) < 1 or op.shared_bytes < 0:
        return f"{what} has a block, cluster or shared size that is not positive"
    if len(op.args) > _MAX_ARGS:
        return f"{what} takes more than {_MAX_ARGS} arguments"
    for arg in op.args:
        if arg.kind == "constant" and not 0 <= arg.index < len(node.constants):
            return f"{what} takes constant {arg.index}, the node has {len(node.constants)}"
        if arg.kind == "workspace" and arg.index < 0:
            return f"{what} takes an address before the workspace"
        if arg.kind == "residual" and not node.has_residual:
            return f"{what} takes a residual, the node has none"
    return ""


class Runner:
    """One node made ready on one device: images loaded, entries configured, constants uploaded, all once.

    Raises MachineError when the device cannot run it, InputError when its launch plan is malformed.
    """

    def __init__(self, node: SparseConv, device: int = 0, driver: Driver | None = None) -> None:
        if not node.executable:
            raise InputError(
                f"{node.layer}: this node carries weights but no code to run (kernel {node.kernel}). Convert it for a target "
                f"and kernel that ship code."
            )
        _check_plan(node)
        self.node, self.device = node, device
        self._driver: Driver = driver or cuda_driver()
        self._driver.activate(device)
        self.capability = self._driver.capability(device)
        self._modules: dict[Precision, int] = {}
        self._functions: dict[tuple[Precision, str], int] = {}
        self._constants: list[int] = []
        self._workspace, self._workspace_bytes = 0, 0
        self._retired: list[int] = []
        for table in node.constants:
            data = np.ascontiguousarray(table).tobytes()
            self._constants.append(self._driver.alloc(max(len(data), 1)))
            self._driver.upload(self._constants[-1], data)

    def close(self) -> None:
        """Free everything; graphs captured from this runner may not be replayed afterwards."""
        for address in [*self._constants, *self._retired, *([self._workspace] if self._workspace else [])]:
            self._driver.free(address)
        for module in self._modules.values():
            self._driver.unload(module)
        self._constants, self._retired, self._workspace, self._workspace_bytes = [], [], 0, 0
        self._modules, self._functions = {}, {}

    def empty(self, n: int, dtype: Precision, which: str = "output") -> DeviceArray:
        """A new array of the shape of the node's "input" or "output" for batch n."""
        g = self.node.geometry
        shape = (n, g.ic, g.h, g.w) if which == "input" else (n, g.oc, g.oh, g.ow)
        return DeviceArray(self._driver, shape, dtype)

    def reserve(self, n: int, dtype: Precision) -> None:
        """Load what batch n of dtype needs and make room for its workspace: needed before a graph is captured."""
        self._driver.activate(self.device)
        variant = self._variant(dtype, n)
        self._prepare(dtype, variant)
        self._room(variant.workspace.value(self._sizes(n)), 0)

    def run(self, x: Any, residual: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Run the node on x [N, ic, h, w], fp32 or fp16, and return `out` (made here when None), in stream order.

        Arrays are anything with `__cuda_array_interface__` or DLPack, C-contiguous, on this device. `stream` is a
        handle, a torch or CuPy stream, or None for the default stream. Raises InputError for what does not fit.
        """
        self._driver.activate(self.device)
        handle = _stream(stream)
        view = self._view(x, "x")
        n = view.shape[0] if view.shape else 0
        dtype = self._fitting(view, "x", None, self._shape(n, "input"))
        if out is None:
            out = self.empty(n, dtype)
        target = self._view(out, "out")
        self._fitting(target, "out", dtype, self._shape(n, "output"))
        extra = self._residual(residual, dtype, n)
        variant = self._variant(dtype, n)
        self._prepare(dtype, variant)
        sizes = self._sizes(n)
        self._room(variant.workspace.value(sizes), handle)
        for op in variant.ops:
            if isinstance(op, Memset):
                self._clear(op, variant, sizes, handle)
            else:
                pointers = {"input": view.address, "output": target.address, "residual": extra}
                self._driver.launch(self._functions[dtype, op.entry], self._call(op, sizes, pointers), handle)
        return out

    # -- inside

    def _shape(self, n: int, which: str) -> tuple[int, ...]:
        g = self.node.geometry
        return (n, g.ic, g.h, g.w) if which == "input" else (n, g.oc, g.oh, g.ow)

    def _sizes(self, n: int) -> dict[str, int]:
        g = self.node.geometry
        return {"N": n, "H": g.h, "W": g.w, "OH": g.oh, "OW": g.ow}

    def _variant(self, dtype: Precision, n: int) -> Variant:
        variant = choose(self.node.plan, dtype, n)
        if variant is None:
            held = ", ".join(f"{v.dtype} N={v.min_n}..{v.max_n or 'any'}" for v in self.node.plan)
            raise InputError(
                f"{self.node.layer}: nothing in its plan runs {dtype} with N={n}; it has {held}. Convert for this batch."
            )
        return variant

    def _prepare(self, dtype: Precision, variant: Variant) -> None:
        missing = [op for op in variant.ops if isinstance(op, Launch) and (dtype, op.entry) not in self._functions]
        if not missing:
            return
        if dtype not in self._modules:
            self._modules[dtype] = self._driver.load(pick_image(self.node, dtype, self.capability).data)
        for entry in dict.fromkeys(op.entry for op in missing):
            # The settings belong to the entry, not to one launch of it: the most that any of its launches asks for.
            launches = self._launches(dtype, entry)
            cluster = max(op.cluster for op in launches)
            if cluster > 1 and self.capability < 90:
                raise MachineError(
                    f"{self.node.layer}: its plan launches clusters of {cluster} blocks, which need compute capability 9.0; "
                    f"this device has {self.capability // 10}.{self.capability % 10}. Convert again for this device."
                )
            shared_bytes = max(op.shared_bytes for op in launches)
            self._functions[dtype, entry] = self._driver.function(self._modules[dtype], entry, shared_bytes, cluster)

    def _launches(self, dtype: Precision, entry: str) -> list[Launch]:
        ops = [op for variant in self.node.plan if variant.dtype == dtype for op in variant.ops]
        return [op for op in ops if isinstance(op, Launch) and op.entry == entry]

    def _clear(self, op: Memset, variant: Variant, sizes: dict[str, int], stream: int) -> None:
        size = op.bytes.value(sizes)
        if not 0 <= size <= variant.workspace.value(sizes) - op.offset:
            raise InputError(f"{self.node.layer}: its plan clears bytes beyond its workspace. Convert the model again.")
        if size:
            self._driver.zero(self._workspace + op.offset, size, stream)

    def _room(self, size: int, stream: int) -> None:
        """Grow the workspace; old ones stay, since work in flight and captured graphs may use them."""
        if size <= self._workspace_bytes:
            return
        if self._driver.capturing(stream):
            raise InputError(
                f"{self.node.layer}: {size} bytes of workspace would have to be allocated while a CUDA graph is captured. "
                f"Call reserve(n, dtype) before capturing."
            )
        if self._workspace:
            self._retired.append(self._workspace)
        self._workspace, self._workspace_bytes = self._driver.alloc(size), size

    def _call(self, op: Launch, sizes: dict[str, int], pointers: dict[str, int]) -> Call:
        values: list[tuple[int, int]] = []
        for arg in op.args:
            if arg.kind in ("N", "H", "W"):
                values.append((sizes[arg.kind], 4))
            elif arg.kind == "constant":
                values.append((self._constants[arg.index], 8))
            elif arg.kind == "workspace":
                values.append((self._workspace + arg.index, 8))
            else:
                values.append((pointers[arg.kind], 8))
        x, y, z = (size.value(sizes) for size in op.grid)
        for axis, (size, most) in enumerate(zip((x, y, z), _MAX_GRID, strict=True)):
            if not 1 <= size <= most:
                raise InputError(
                    f"{self.node.layer}: its plan launches {op.entry} with a grid of {size} along axis {axis}, a device runs "
                    f"1 to {most}. Convert for a smaller batch."
                )
        dependent = op.dependent and self.capability >= 90
        return Call(op.entry, (x, y, z), op.block, op.shared_bytes, op.cluster, dependent, tuple(values))

    def _residual(self, residual: Any, dtype: Precision, n: int) -> int:
        if (residual is not None) != self.node.has_residual:
            raise InputError(
                f"{self.node.layer}: the node {'adds' if self.node.has_residual else 'takes no'} residual and the call gives "
                f"{'none' if residual is None else 'one'}. Pass it exactly when the node fuses an addition."
            )
        if residual is None:
            return 0
        view = self._view(residual, "residual")
        self._fitting(view, "residual", dtype, self._shape(n, "output"))
        return view.address

    def _view(self, array: Any, name: str) -> _View:
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is not None:
            shape = tuple(interface["shape"])
            kind = str(interface["typestr"])
            dtype = _NUMPY_NAMES.get(kind, kind)
            strides = interface.get("strides")
            width = int(kind[2:]) if kind[2:].isdigit() else 0
            contiguous = strides is None or _is_contiguous(shape, [step // max(width, 1) for step in strides])
            return _View(int(interface["data"][0]), shape, dtype, contiguous)
        if hasattr(array, "__dlpack__"):
            return _from_dlpack(array, f"{self.node.layer}: {name}")
        raise InputError(
            f"{self.node.layer}: {name} is a {type(array).__name__}, needed an array on the GPU (torch, CuPy, PyCUDA: anything "
            f"with __cuda_array_interface__ or DLPack). Move it to the device first."
        )

    def _fitting(self, view: _View, name: str, dtype: Precision | None, shape: tuple[int, ...]) -> Precision:
        found = f"{name} is {view.dtype} {list(view.shape)}{'' if view.contiguous else ', not contiguous'}"
        wanted = f"{dtype or 'fp32 or fp16'} {['N', *shape[1:]] if name == 'x' else list(shape)}, contiguous (NCHW)"
        typed = view.dtype in ("fp32", "fp16") and dtype in (None, view.dtype)
        if typed and view.contiguous and view.shape == shape and shape[0] >= 1:
            return "fp32" if view.dtype == "fp32" else "fp16"
        raise InputError(f"{self.node.layer}: {found}; needed {wanted}. Convert or copy it before the call.")


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _stream(stream: Any) -> int:
    """A stream's handle: torch's `cuda_stream`, CuPy's `ptr`, PyCUDA's `handle`, or the number itself."""
    if stream is None:
        return 0
    for name in ("cuda_stream", "ptr", "handle"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    return int(stream)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int), ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


_DL_CUDA, _DL_FLOAT = 2, 2


def _from_dlpack(array: Any, name: str) -> _View:
    """Read a DLPack capsule without consuming it: its own destructor then releases it."""
    capsule = array.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # DLManagedTensor begins with its DLTensor.
    tensor = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    if tensor.device_type != _DL_CUDA:
        raise InputError(
            f"{name} lies on DLPack device type {tensor.device_type}, needed CUDA ({_DL_CUDA}). Move it there first."
        )
    shape = tuple(tensor.shape[k] for k in range(tensor.ndim))
    contiguous = not tensor.strides or _is_contiguous(shape, [tensor.strides[k] for k in range(tensor.ndim)])
    dtype = (
        {32: "fp32", 16: "fp16"}.get(tensor.bits, f"float{tensor.bits}")
        if tensor.code == _DL_FLOAT
        else f"code {tensor.code}"
    )
    return _View((tensor.data or 0) + tensor.byte_offset, shape, dtype, contiguous)
