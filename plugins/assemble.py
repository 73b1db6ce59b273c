"""Turning kernels into machine code with the pinned wheels: ptxas (PTX to cubin) and NVRTC (CUDA C++ to PTX).

Every cubin goes through ptxas, also one that starts as CUDA C++, so that one tool and one version account for all
machine code that is shipped. Results are cached by the content they were made from; a cache entry is one file
published by one rename, so processes may share the folder without locks.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from sparsedeploy.errors import MachineError, SparseDeployError

PTXAS_WHEEL = "nvidia-cuda-nvcc-cu12"
NVRTC_WHEEL = "nvidia-cuda-nvrtc-cu12"
PINNED = "12.9.86"
"""The last line of both that knows sm_53; pyproject pins the same."""
CACHE_VARIABLE = "SPARSEDEPLOY_CACHE"
_SIDE_BY_SIDE = 4
_CACHE_FORMAT = 2
"""Raised whenever this module makes something else of the same input."""

PTX_VERSIONS: dict[int, str] = {
    53: "6.4", 60: "6.4", 61: "6.4", 62: "6.4", 70: "6.4", 72: "6.4", 75: "6.4",
    80: "7.0", 86: "7.1", 87: "7.4", 89: "7.8", 90: "7.8", 100: "8.6", 120: "8.7",
}  # fmt: skip
"""The PTX ISA to declare for an architecture: the oldest that knows it (PTX ISA manual, release notes), but 6.4 at
least, which JetPack 4.6's driver reads. A driver refuses PTX newer than itself, whatever the text uses."""


class AssembleError(SparseDeployError):
    """A compiler refused its input; the message holds the command and the whole log."""

    exit_code = 3


@dataclass(frozen=True)
class Usage:
    """What one entry takes, as ptxas reports it. Bytes are per thread for spills and stack, per block for shared."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Assembled:
    """A cubin and what making it was like."""

    cubin: bytes
    seconds: float
    """Wall time of the assemble that made it, also when it came from the cache."""
    usage: dict[str, Usage]
    """By entry."""
    log: str

    @property
    def registers(self) -> int:
        """Registers per thread of the hungriest entry."""
        return max((entry.registers for entry in self.usage.values()), default=0)

    @property
    def spill_bytes(self) -> int:
        """Spilled bytes (stores plus loads) over all entries; 0 is what a good kernel has."""
        return sum(entry.spill_bytes for entry in self.usage.values())

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of the entry that has most."""
        return max((entry.shared_bytes for entry in self.usage.values()), default=0)


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made (and, for a cubin, ptxas after it)."""

    data: bytes
    seconds: float
    log: str
    usage: dict[str, Usage]
    """By entry; empty for PTX."""


def cache_dir() -> Path:
    """$SPARSEDEPLOY_CACHE, else $XDG_CACHE_HOME/sparsedeploy, else ~/.cache/sparsedeploy."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsedeploy"


def _wheel_file(package: str, wheel: str, *parts: str) -> Path:
    """A file inside one of the `nvidia.*` wheels; raises MachineError with the pip line when it is not there."""
    try:
        spec = importlib.util.find_spec(f"nvidia.{package}")
    except ModuleNotFoundError:
        spec = None
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root, *parts)
        if path.is_file():
            return path
    raise MachineError(
        f"{parts[-1]} was not found: the wheel {wheel} is not installed in this Python environment (it exists for "
        f"Linux only). Install it with `pip install {wheel}=={PINNED}`, or ship PTX alone with --no-assemble."
    )


@cache
def ptxas_path() -> Path:
    """The pinned wheel's ptxas; raises MachineError with the pip line when it is missing."""
    return _wheel_file("cuda_nvcc", PTXAS_WHEEL, "bin", "ptxas")


@cache
def tool_version() -> str:
    """`ptxas V12.9.86`, as ptxas itself says it: part of every cache key and of a bundle's record."""
    text = subprocess.run([str(ptxas_path()), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V\d+\.\d+\.\d+", text)
    return f"ptxas {found.group() if found else text.strip()}"


@cache
def nvrtc_version() -> str:
    """`nvrtc 12.9.86`: the wheel's version, since the library tells only major and minor."""
    _nvrtc()
    try:
        return f"nvrtc {importlib.metadata.version(NVRTC_WHEEL)}"
    except importlib.metadata.PackageNotFoundError:
        major, minor = ctypes.c_int(), ctypes.c_int()
        _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"nvrtc {major.value}.{minor.value}"


def ptx_version(arch: int) -> str:
    """The `.version` to write for an architecture (compute capability times ten)."""
    if arch not in PTX_VERSIONS:
        raise ValueError(f"sm_{arch} is not among the architectures that PTX is written for: {sorted(PTX_VERSIONS)}")
    return PTX_VERSIONS[arch]


def relabel(ptx: bytes, version: str) -> bytes:
    """The same PTX declaring another ISA version: an older driver then reads it. Assemble the result to prove it.

    NVRTC's `.pragma "used_bytes_mask"`, a hint that ISA 8.3 brought, is left out below that. Raises ValueError unless the text has exactly one `.version` line.
    """
    text, count = re.subn(rb"(?m)^\.version[ \t]+\d+\.\d+[ \t]*$", b".version " + version.encode("ascii"), ptx)
    if count != 1:
        raise ValueError(f"PTX has {count} .version lines, needed one")
    if tuple(int(part) for part in version.split(".")) < (8, 3):
        text = re.sub(rb'(?m)^[ \t]*\.pragma[ \t]+"used_bytes_mask[^"]*";[ \t]*\n', b"", text)
    return text


def assemble(ptx: bytes, arch: int, options: Sequence[str] = ()) -> Assembled:
    """Assemble PTX for sm_<arch>. Raises AssembleError (command and log), MachineError (no ptxas)."""
    flags = [f"-arch=sm_{arch}", "-v", *options]
    key = _key("cubin", tool_version(), flags, ptx)
    entry = _read_entry(key)
    if entry is None:
        started = time.perf_counter()
        cubin, log = _run_ptxas(ptx, flags)
        entry = _write_entry(key, cubin, time.perf_counter() - started, log)
    data, seconds, log = entry
    return Assembled(data, seconds, read_usage(log), log)


def assemble_many(jobs: Sequence[tuple[bytes, int]], workers: int | None = None) -> list[Assembled]:
    """`assemble` each (ptx, arch), in parallel, results in order; equal jobs are assembled once."""
    unique = list(dict.fromkeys(jobs))
    tool_version()
    with ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1) as pool:
        done = dict(zip(unique, pool.map(lambda job: assemble(*job), unique), strict=True))
    return [done[job] for job in jobs]


def reproduces(ptx: bytes, arch: int, cubin: bytes, options: Sequence[str] = (), again: bool = True) -> bool:
    """Whether ptxas turns this PTX into exactly these bytes: run now, past the cache; not `again`, as the cache knows."""
    if not again:
        return assemble(ptx, arch, options).cubin == cubin
    return _run_ptxas(ptx, [f"-arch=sm_{arch}", "-v", *options])[0] == cubin


def _run_ptxas(ptx: bytes, flags: Sequence[str]) -> tuple[bytes, str]:
    # Fixed names in a folder of its own: no path can reach the cubin's bytes.
    with tempfile.TemporaryDirectory(prefix="sparsedeploy-") as folder:
        Path(folder, "kernel.ptx").write_bytes(ptx)
        # Entries are compiled side by side, to the same bytes whatever the number of threads; it costs memory.
        threads = [f"-split-compile={min(_SIDE_BY_SIDE, os.cpu_count() or 1)}"] if ptx.count(b".entry") > 1 else []
        command = [str(ptxas_path()), *flags, *threads, "kernel.ptx", "-o", "kernel.cubin"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        log = result.stdout + result.stderr
        if result.returncode != 0:
            raise AssembleError(
                f"ptxas refused a kernel (exit code {result.returncode}). This is a fault of sparsedeploy or of the "
                f"machine (memory, disk), not of the model; keep the layer dense, and report it with this text. "
                f"Command: {' '.join(command)}. Log:\n{log}"
            )
        return Path(folder, "kernel.cubin").read_bytes(), log


_COMPILING = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def read_usage(log: str) -> dict[str, Usage]:
    """Resources by entry from a log of `ptxas -v`."""
    found: dict[str, Usage] = {}
    name, stack, spill = "", 0, 0
    for line in log.splitlines():
        if match := _COMPILING.search(line):
            name, stack, spill = match.group(1), 0, 0
        elif match := _SPILLS.search(line):
            stack, spill = int(match.group(1)), int(match.group(2)) + int(match.group(3))
        elif name and (match := _REGISTERS.search(line)):
            shared = _SHARED.search(line)
            found[name] = Usage(int(match.group(1)), spill, stack, int(shared.group(1)) if shared else 0)
    return found


def compile_cuda(
    source: str,
    arch: int,
    options: Sequence[str] = (),
    kind: Literal["ptx", "cubin"] = "ptx",
    name: str = "kernel.cu",
    isa: str | None = None,
) -> Compiled:
    """Compile CUDA C++ for compute capability `arch`/10: PTX by NVRTC, and for "cubin" ptxas after it.

    The PTX declares `isa`, by default the oldest ISA version that knows the architecture (`ptx_version`). NVRTC writes
    its own, newest one; that the older label is enough is proved by assembling it. Raises AssembleError, MachineError.
    """
    isa = isa or ptx_version(arch)
    flags = [f"--gpu-architecture=compute_{arch}", "--std=c++17", *options]
    key = _key("ptx", nvrtc_version(), [*flags, name, isa], source.encode())
    entry = _read_entry(key)
    if entry is None:
        started = time.perf_counter()
        ptx, log = _run_nvrtc(source, name, flags)
        ptx = relabel(ptx, isa)
        entry = _write_entry(key, ptx, time.perf_counter() - started, log)
    ptx, seconds, log = entry
    assembled = assemble(ptx, arch)
    if kind == "ptx":
        return Compiled(ptx, seconds, log, {})
    return Compiled(assembled.cubin, seconds + assembled.seconds, log + assembled.log, assembled.usage)


@cache
def _nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(str(_wheel_file("cuda_nvrtc", NVRTC_WHEEL, "lib", "libnvrtc.so.12")))


def _run_nvrtc(source: str, name: str, flags: Sequence[str]) -> tuple[bytes, str]:
    lib, program = _nvrtc(), ctypes.c_void_p()
    _check_nvrtc(lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        array = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
        status = lib.nvrtcCompileProgram(program, len(flags), array)
        log = _nvrtc_text(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program).decode("utf-8", "replace")
        if status != 0:
            raise AssembleError(
                f"NVRTC refused {name} (status {status}). This is a fault of sparsedeploy, not of the model; convert "
                f"with the layer kept dense, and report it with this text. Options: {' '.join(flags)}. Log:\n{log}"
            )
        return _nvrtc_text(lib.nvrtcGetPTXSize, lib.nvrtcGetPTX, program), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_text(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(get(program, buffer))
    return buffer.raw.rstrip(b"\0")


def _check_nvrtc(status: int) -> None:
    if status != 0:
        raise AssembleError(f"NVRTC failed with status {status} outside of compiling; report it with the model's name.")


def _key(kind: str, version: str, flags: Sequence[str], content: bytes) -> str:
    head = json.dumps([_CACHE_FORMAT, kind, version, *flags]).encode()
    return hashlib.sha256(head + b"\0" + content).hexdigest()


Entry = tuple[bytes, float, str]


def _entry_path(key: str) -> Path:
    return cache_dir() / "code" / key[:2] / key


def _read_entry(key: str) -> Entry | None:
    """A cache entry; None when absent, unreadable or damaged (it is then made again)."""
    try:
        head, _, data = _entry_path(key).read_bytes().partition(b"\n")
        fields = json.loads(head)
        if fields["sha256"] != hashlib.sha256(data).hexdigest():
            return None
        return data, float(fields["seconds"]), str(fields["log"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_entry(key: str, data: bytes, seconds: float, log: str) -> Entry:
    """Publish by one rename; a folder that cannot be written costs only the caching."""
    path, seconds = _entry_path(key), round(seconds, 6)
    head = json.dumps({"sha256": hashlib.sha256(data).hexdigest(), "seconds": seconds, "log": log})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(head.encode() + b"\n" + data)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        pass
    return data, seconds, log
