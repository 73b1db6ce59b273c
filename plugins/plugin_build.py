"""Building the TensorRT plugin (plugins/trt) from its C++ sources: headers found or fetched, one compiler call.

A plugin fits one major version of TensorRT, so it is compiled with that version's headers; nothing else of TensorRT or
CUDA is needed. Results are cached by the content they are made from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from sparsedeploy.errors import InputError, MachineError, SparseDeployError
from sparsedeploy.plugins.assemble import cache_dir

Flavour = Literal["v2", "v3", "rtx"]
"""v2: TensorRT 8 (IPluginV2DynamicExt). v3: TensorRT 10 and 11 (IPluginV3). rtx: TensorRT-RTX 1.7 (IPluginV3)."""
Arch = Literal["x86_64", "aarch64"]
Compiler = Literal["auto", "system", "zig"]

_MAJORS: dict[Flavour, tuple[int, ...]] = {"v2": (8, 9, 10), "v3": (10, 11), "rtx": (10,)}
_DEFINES: dict[Flavour, tuple[str, ...]] = {
    "v2": ("-DSPARSEDEPLOY_ADAPTER=2",),
    "v3": ("-DSPARSEDEPLOY_ADAPTER=3",),
    "rtx": ("-DSPARSEDEPLOY_ADAPTER=3", "-DSPARSEDEPLOY_RTX"),
}
SOURCES = Path(__file__).resolve().parent / "trt"

ZIG = "ziglang==0.13.0"
"""Cross compiler in a wheel. Its output needs glibc 2.17 only, which JetPack 4.6 and every server has."""
_ZIG_GLIBC = "2.17"

HEADERS_WHEEL = "kernel-lens==2.0.1"
"""Carries the headers of TensorRT 10.14.1 (NVIDIA, Apache-2.0). Nothing else of it is used, nothing of it installed."""
_HEADERS_SHA256 = "07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0"
_HEADERS_VERSION = "10.14.1"
_HEADERS_FOLDER = "kernel_lens/include/tensorrt/"


class PluginBuildError(SparseDeployError):
    """The compiler refused the plugin's sources; the message holds the command and the log."""

    exit_code = 3


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler for one architecture."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    """Beyond what every compiler is given."""


def plugin_file(flavour: Flavour, major: int = 10) -> str:
    """The library's usual name, for TensorRT of that major version: `libsparsedeploy_trt10.so`."""
    return "libsparsedeploy_rtx.so" if flavour == "rtx" else f"libsparsedeploy_trt{major}.so"


def header_version(headers: Path) -> tuple[int, int, int]:
    """TensorRT's (major, minor, patch) by NvInferVersion.h; raises InputError when there is none."""
    path = headers / "NvInferVersion.h"
    if not path.is_file():
        raise InputError(
            f"{headers} has no NvInferVersion.h, needed the folder with TensorRT's C++ headers (NvInfer*.h). On a Jetson "
            f"that is /usr/include/aarch64-linux-gnu; elsewhere the include folder of TensorRT's tar file. Give it with "
            f"--tensorrt-include."
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        # 10.16 and later define NV_TENSORRT_MAJOR by another name, which holds the number.
        found = re.search(rf"#define (?:NV_TENSORRT_{part}|TRT_{part}_ENTERPRISE)\s+(\d+)", text)
        if found is None:
            raise InputError(
                f"{path} does not define NV_TENSORRT_{part} as a number. Give the headers as NVIDIA ships them with "
                f"--tensorrt-include."
            )
        numbers.append(int(found.group(1)))
    return numbers[0], numbers[1], numbers[2]


def system_headers(arch: Arch) -> Path | None:
    """Headers of a TensorRT installed where its packages and tar files put them, or None."""
    places = [Path(f"/usr/include/{arch}-linux-gnu"), Path("/usr/include"), Path("/usr/local/tensorrt/include")]
    places += sorted(Path("/usr/local").glob("TensorRT*/include"), reverse=True)
    return next((place for place in places if (place / "NvInferVersion.h").is_file()), None)


def fetched_headers(wheel: Path | None = None) -> Path:
    """Headers of TensorRT 10.14.1, downloaded once with pip into the cache and checked against a pinned hash.

    `wheel` is a file downloaded before, for machines without a network. Raises MachineError when pip cannot download
    it, InputError when its content is another.
    """
    folder = cache_dir() / "tensorrt-headers" / f"{_HEADERS_VERSION}-{_HEADERS_SHA256[:12]}"
    if (folder / "NvInferVersion.h").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        file = wheel or _download(Path(temporary))
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != _HEADERS_SHA256:
            raise InputError(
                f"{file.name} has sha256 {found}, needed {_HEADERS_SHA256} ({HEADERS_WHEEL} as published). Download it "
                f"again, or give TensorRT's own headers with --tensorrt-include."
            )
        made = Path(temporary, "headers")
        made.mkdir()
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.startswith(_HEADERS_FOLDER) and name.endswith(".h"):
                    (made / Path(name).name).write_bytes(archive.read(name))
        try:
            made.rename(folder)
        except OSError:
            # Another process was first; its content is the same.
            if not (folder / "NvInferVersion.h").is_file():
                raise
    return folder


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", str(folder)]
    result = subprocess.run([*command, HEADERS_WHEEL], capture_output=True, text=True, check=False)
    files = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not files:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise MachineError(
            f"TensorRT's headers could not be fetched: `pip download --no-deps {HEADERS_WHEEL}` failed ({reason}). Run it "
            f"where there is a network and give the wheel, or give TensorRT's own headers with --tensorrt-include."
        )
    return files[0]


def find_toolchain(arch: Arch, compiler: Compiler = "auto") -> Toolchain:
    """The wheel ziglang's compiler if its wheel is installed (its output runs on older systems), else the system's for `arch`.

    Raises MachineError with the pip line when there is none.
    """
    if compiler != "system" and importlib.util.find_spec("ziglang") is not None:
        command = (sys.executable, "-m", "ziglang", "c++")
        return Toolchain(command, _version_of(command), ("-target", f"{arch}-linux-gnu.{_ZIG_GLIBC}", "-s"))
    own = platform.machine() == arch
    path = shutil.which("c++") if own else shutil.which(f"{arch}-linux-gnu-g++")
    if compiler != "zig" and path is not None:
        # What C++ needs at run time goes inside: a target's own library may be older.
        inside = ("-static-libstdc++", "-static-libgcc", "-Wl,-z,defs", "-s")
        return Toolchain((path,), _version_of((path,)), inside)
    raise MachineError(
        f"no C++ compiler for {arch}: neither the wheel ziglang nor {'c++' if own else f'{arch}-linux-gnu-g++'} is "
        f"installed. Run `pip install {ZIG}`."
    )


@cache
def _version_of(command: tuple[str, ...]) -> str:
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, env=_environment())
    return (result.stdout.splitlines() or ["unknown"])[0]


def _environment() -> dict[str, str]:
    folder = str(cache_dir() / "zig")
    return {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}


def build_plugin(out: Path, headers: Path, flavour: Flavour, arch: Arch, compiler: Compiler = "auto") -> Path:
    """Compile the plugin to the file `out`, for the TensorRT whose headers are given; returns `out`.

    Raises InputError when the headers are of a version that the flavour is not for, MachineError when there is no
    compiler for `arch`, PluginBuildError with command and log when it refuses.
    """
    version = header_version(headers)
    if version[0] not in _MAJORS[flavour]:
        raise InputError(
            f"{headers} holds the headers of TensorRT {'.'.join(map(str, version))}; the {flavour} plugin is for "
            f"{_wanted(flavour)}, whose headers are of major version {' or '.join(map(str, _MAJORS[flavour]))}. A plugin "
            f"built with others crashes inside TensorRT: give the headers of the version that will load it."
        )
    toolchain = find_toolchain(arch, compiler)
    sources = sorted(SOURCES.glob("*.cpp"))
    flags = [
        "-std=c++14", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra",
        "-Wno-deprecated-declarations", *_DEFINES[flavour], *toolchain.flags, "-Wl,-z,nodelete",
    ]  # fmt: skip
    key = _key([toolchain.version, arch, *flags], [*_source_files(), *sorted(headers.glob("NvInfer*.h"))])
    cached = cache_dir() / "plugins" / key / plugin_file(flavour, version[0])
    if not cached.is_file():
        command = [*toolchain.command, *flags, "-isystem", str(headers), f"-I{SOURCES / 'cuda_shim'}"]
        command += [f"-Wl,--version-script={SOURCES / 'exports.map'}", *map(str, sources), "-ldl"]
        _compile(command, cached)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(cached, out)
    return out


def _wanted(flavour: Flavour) -> str:
    return {"v2": "TensorRT 8", "v3": "TensorRT 10 and 11", "rtx": "TensorRT-RTX 1.7"}[flavour]


def _source_files() -> list[Path]:
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h", ".map"))


def _key(words: list[str], files: list[Path]) -> str:
    digest = hashlib.sha256("\0".join(words).encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _compile(command: list[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary, target.name)
        result = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, check=False, env=_environment()
        )
        if result.returncode != 0 or not made.is_file():
            raise PluginBuildError(
                f"the compiler refused the TensorRT plugin (exit code {result.returncode}). Check that the headers are "
                f"complete and unchanged, and report it with this text. Command: {' '.join(command)}. Log:\n"
                f"{result.stdout}{result.stderr}"
            )
        made.replace(target)
