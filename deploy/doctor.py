"""What this machine has for converting, building and running, each with ok or what to do about it."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from sparsedeploy import __version__
from sparsedeploy.engines.engine import BACKENDS, MODULES, Backend, import_backend
from sparsedeploy.engines.engine_build import TITLES, install_hint
from sparsedeploy.engines.trtexec import PLACES
from sparsedeploy.errors import SparseDeployError
from sparsedeploy.gpu import closest, first_gpu
from sparsedeploy.measure.gpu_state import SEVERE, NoProbe, Nvml, probe
from sparsedeploy.plugins.assemble import NVRTC_WHEEL, PINNED, PTXAS_WHEEL, cache_dir, nvrtc_version, tool_version
from sparsedeploy.plugins.plugin_build import Arch, fetched_headers, find_toolchain, header_version, system_headers
from sparsedeploy.record import Document, Record

State = Literal["ok", "absent", "warning", "broken"]
Area = Literal["converting", "building engines", "running"]


class Check(Record):
    """One thing that was looked at."""

    area: Area
    what: str
    state: State
    """`absent` is no fault: something optional that is not here."""
    found: str
    fix: str = ""
    """What to do; empty where nothing is to be done."""


class Diagnosis(Document):
    """What `doctor` found."""

    tool: str = "sparsedeploy"
    version: str = __version__
    checks: tuple[Check, ...]

    @property
    def can_convert(self) -> bool:
        """Whether nothing that converting needs is broken."""
        return not any(check.area == "converting" and check.state == "broken" for check in self.checks)


def diagnose() -> Diagnosis:
    """Look at everything; never raises for what it finds."""
    return Diagnosis(checks=tuple(check for area, examine in _EXAMINED for check in _checks(area, examine)))


def _checks(area: Area, examine: Callable[[], Iterator[Finding]]) -> list[Check]:
    """What one examination finds; a library that breaks when it is touched is a finding, not an end."""
    found: list[Finding] = []
    try:
        found.extend(examine())
    except Exception as error:
        name = examine.__name__.strip("_").replace("_", " ")
        found.append((name, "broken", f"{type(error).__name__}: {error}", "Install it again."))
    return [Check(area=area, what=what, state=state, found=text, fix=fix) for what, state, text, fix in found]


Finding = tuple[str, State, str, str]


# --- converting ---------------------------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    yield "Python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}", ""


def _packages() -> Iterator[Finding]:
    for name in ("numpy", "onnx", "onnxruntime", "pydantic", "typer", "matplotlib", "jinja2"):
        yield _package(name)


def _package(name: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever a broken library raises
        found = f"{type(error).__name__}: {error}"
        return name, "broken", found, f"Install it again: pip install --force-reinstall {name}"
    return name, "ok", str(getattr(module, "__version__", "")) or _installed(name) or "present", ""


def _assembler() -> Iterator[Finding]:
    yield _tool("ptxas", tool_version, PTXAS_WHEEL)
    yield _tool("NVRTC", nvrtc_version, NVRTC_WHEEL)


def _tool(what: str, ask: Callable[[], str], wheel: str) -> Finding:
    try:
        return what, "ok", ask(), ""
    except (SparseDeployError, OSError, subprocess.SubprocessError):
        if platform.system() != "Linux":
            return what, "broken", "its wheel exists for Linux only", "Convert on Linux."
        return (
            what,
            "broken",
            f"the wheel {wheel} is not here or damaged",
            f"pip install --force-reinstall {wheel}=={PINNED}",
        )


def _cache() -> Iterator[Finding]:
    folder = cache_dir()
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if os.access(existing, os.W_OK):
        yield "cache", "ok", str(folder), ""
    else:
        fix = "Set SPARSEDEPLOY_CACHE to a folder you may write."
        yield "cache", "warning", f"{folder} cannot be written: kernels are compiled anew each time", fix


# --- building engines ---------------------------------------------------------------------------------------------


def _tensorrt() -> Iterator[Finding]:
    for backend in BACKENDS:
        yield _backend(backend)
    found = next((shutil.which(place) for place in PLACES if shutil.which(place)), None)
    yield (
        "trtexec",
        "ok" if found else "absent",
        found or "not found",
        "" if found else "It comes with TensorRT's archives and JetPack; only a target's build.sh needs it.",
    )


def _backend(backend: Backend) -> Finding:
    try:
        return TITLES[backend], "ok", str(import_backend(backend).__version__), ""
    except SparseDeployError as error:
        if importlib.util.find_spec(MODULES[backend]) is None:
            return TITLES[backend], "absent", "not installed", install_hint(backend)
        return TITLES[backend], "broken", str(error), install_hint(backend)


def _compiler() -> Iterator[Finding]:
    arch: Arch = "aarch64" if platform.machine() == "aarch64" else "x86_64"
    try:
        toolchain = find_toolchain(arch)
        yield (
            "plugin compiler",
            "ok",
            toolchain.version.splitlines()[0] if toolchain.version else toolchain.command[0],
            "",
        )
    except SparseDeployError as error:
        yield "plugin compiler", "absent", str(error), "pip install ziglang==0.13.0"
    headers = system_headers(arch)
    if headers is not None:
        yield "TensorRT headers", "ok", f"{'.'.join(map(str, header_version(headers)))} in {headers}", ""
        return
    held = (cache_dir() / "tensorrt-headers").glob("*/NvInferVersion.h")
    if any(held):
        yield "TensorRT headers", "ok", f"{'.'.join(map(str, header_version(fetched_headers())))}, fetched before", ""
    else:
        yield (
            "TensorRT headers",
            "absent",
            "not on this machine",
            "The first build fetches those of 10.14 with pip; others are given with --tensorrt-include.",
        )


# --- running ------------------------------------------------------------------------------------------------------


def _driver() -> Iterator[Finding]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        fix = "For running and measuring: install NVIDIA's driver. Converting needs none."
        yield "driver", "absent", "libcuda.so.1 is not here", fix
        return
    status, version = cuda.cuInit(0), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    text = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    state = probe()
    if isinstance(state, Nvml) and state.software().driver:
        text = f"{state.software().driver}, {text}"
    if status != 0:
        yield (
            "driver",
            "broken",
            f"{text}; cuInit fails with CUDA error {status}",
            "See nvidia-smi; in a container start it with --gpus all.",
        )
        return
    yield "driver", "ok", text, ""


def _gpu() -> Iterator[Finding]:
    gpu = first_gpu()
    if gpu is None:
        yield "GPU", "absent", "none", "Models run on the CPU, dense: right answers, no speed."
        return
    memory = _memory_bytes()
    size = f", {memory / 2**30:.0f} GiB" if memory else ""
    row = closest(gpu)
    target = f"; target {row.name}" if row else ""
    yield (
        "GPU",
        "ok",
        f"{gpu.name}, compute capability {gpu.sm // 10}.{gpu.sm % 10}, {gpu.sm_count} SMs{size}{target}",
        (
            ""
            if row
            else "No target has this compute capability yet: kernels ship as PTX for an older one where that is allowed."
        ),
    )


def _memory_bytes() -> int | None:
    cuda, size, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), 0) != 0 or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device) != 0:
        return None
    return int(size.value)


def _clocks() -> Iterator[Finding]:
    if first_gpu() is None:
        return
    found = probe()
    state = None if isinstance(found, NoProbe) else found.read()
    if state is not None:
        parts = [
            f"SM {state.sm_mhz} MHz" if state.sm_mhz is not None else "",
            f"memory {state.memory_mhz} MHz" if state.memory_mhz is not None else "",
            f"{state.temperature_c} C" if state.temperature_c is not None else "",
            f"{state.power_w:.0f} W" if state.power_w is not None else "",
            f"busy {state.utilisation} %" if state.utilisation is not None else "",
            f"held down by {', '.join(state.throttle)}" if state.throttle else "",
        ]
        slow, shared = set(state.throttle) & SEVERE, bool(state.utilisation and state.utilisation > 5)
        fix = (
            "Cool it or lift the limit before measuring."
            if slow
            else "Measure when nobody else uses it."
            if shared
            else ""
        )
        yield (
            "clocks",
            "warning" if slow or shared else "ok",
            ", ".join(part for part in parts if part) or "not told",
            fix,
        )
    yield from _power_mode()


def _power_mode() -> Iterator[Finding]:
    """Jetson's power mode, which caps clocks and switches cores off."""
    if not Path("/etc/nv_tegra_release").is_file() and shutil.which("nvpmodel") is None:
        return
    text = _said("nvpmodel", "-q")
    mode = re.search(r"NV Power Mode:\s*(\S+)", text)
    number = re.search(r"^\s*(\d+)\s*$", text, re.MULTILINE)
    if mode is None and number is None:
        yield (
            "power mode",
            "warning",
            "nvpmodel does not tell",
            "Run `sudo nvpmodel -q`; mode 0 and jetson_clocks give the clocks to measure at.",
        )
        return
    name = mode.group(1) if mode else f"mode {number.group(1) if number else '?'}"
    full = name.upper().startswith("MAXN") or (number is not None and number.group(1) == "0")
    yield (
        "power mode",
        "ok" if full else "warning",
        name,
        "" if full else "`sudo nvpmodel -m 0 && sudo jetson_clocks` before measuring.",
    )


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _cuda_libraries() -> Iterator[Finding]:
    if first_gpu() is None:
        return
    for library in ("cudart", "cublas", "cudnn"):
        found = ctypes.util.find_library(library) or _in_wheels(library)
        fix = "" if found else "PyTorch's and ONNX Runtime's CUDA wheels bring their own; nothing of ours needs it."
        yield f"lib{library}", "ok" if found else "absent", found or "not on the library path", fix


def _in_wheels(library: str) -> str | None:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob(f"*/lib/lib{library}.so.*")):
            return str(path)
    return None


def _torch() -> Iterator[Finding]:
    version = _installed("torch")
    if version is None:
        yield (
            "PyTorch",
            "absent",
            "not installed",
            "pip install torch: runs sparse models without TensorRT, and is the dense baseline of bench and tune.",
        )
        return
    # In a process of its own: PyTorch takes seconds to load, may break, and must not be imported outside its runner.
    script = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available(), torch.backends.cudnn.version())"
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.SubprocessError as error:
        yield "PyTorch", "broken", f"{version}: {error}", "Install it again."
        return
    words = done.stdout.split()
    if done.returncode != 0 or len(words) != 4:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        yield "PyTorch", "broken", f"{version} cannot be imported: {last[:200]}", "Install it again."
        return
    text = (
        f"{words[0]}, CUDA {words[1]}, cuDNN {words[3]}" if words[1] != "None" else f"{words[0]}, a build without CUDA"
    )
    sees = words[2] == "True"
    if first_gpu() is not None and not sees:
        yield (
            "PyTorch",
            "warning",
            f"{text}; it finds no GPU, the driver does",
            "Install a build for the driver's CUDA version.",
        )
    else:
        yield "PyTorch", "ok", text, ""


def _providers() -> Iterator[Finding]:
    import onnxruntime

    found = [name.removesuffix("ExecutionProvider") for name in onnxruntime.get_available_providers()]
    yield "ONNX Runtime providers", "ok", ", ".join(found), ""


def _pillow() -> Iterator[Finding]:
    version = _installed("pillow")
    yield (
        "Pillow",
        "ok" if version else "absent",
        version or "not installed",
        "" if version else "pip install pillow: for run --image.",
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_EXAMINED: tuple[tuple[Area, Callable[[], Iterator[Finding]]], ...] = (
    ("converting", _python),
    ("converting", _packages),
    ("converting", _assembler),
    ("converting", _cache),
    ("building engines", _tensorrt),
    ("building engines", _compiler),
    ("running", _driver),
    ("running", _gpu),
    ("running", _clocks),
    ("running", _cuda_libraries),
    ("running", _torch),
    ("running", _providers),
    ("running", _pillow),
)


def lines_of(diagnosis: Diagnosis) -> list[str]:
    """What to tell a person: by area, one line a check, and one more for what to do about it."""
    lines: list[str] = []
    width = max(len(check.what) for check in diagnosis.checks)
    area = ""
    for check in diagnosis.checks:
        if check.area != area:
            area = check.area
            lines.append(area)
        lines.append(f"  {check.state:<7}  {check.what:<{width}}  {' '.join(check.found.split())}")
        if check.fix:
            lines.append(f"  {'':<7}  {'':<{width}}  {check.fix}")
    return [*lines, summary(diagnosis)]


def summary(diagnosis: Diagnosis) -> str:
    """The last line: what this machine can do."""
    gpu = first_gpu()
    states = {check.what: check.state for check in diagnosis.checks}
    can = ["convert and verify"] if diagnosis.can_convert else []
    can += [f"build engines with {title}" for title in TITLES.values() if states.get(title) == "ok"]
    measures = gpu is not None and states.get("PyTorch") == "ok"
    can.append("run, bench and tune sparse models on the GPU" if measures else "run models (dense, on the CPU)")
    lacks = (
        []
        if measures
        else [name for name, here in (("an NVIDIA GPU", gpu), ("PyTorch", states.get("PyTorch") == "ok")) if not here]
    )
    cannot = f"; bench and tune need {' and '.join(lacks)}" if lacks else ""
    broken = [check.what for check in diagnosis.checks if check.state == "broken"]
    return f"this machine can {', '.join(can)}{cannot}" + (f"; broken: {', '.join(broken)}" if broken else "")
