"""Compiling the plugin: which headers fit, what is said when something is missing, and what the result needs."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.plugins import plugin_build
from sparsedeploy.plugins.plugin_build import (
    Arch,
    Flavour,
    PluginBuildError,
    build_plugin,
    fetched_headers,
    find_toolchain,
    header_version,
    plugin_file,
)

ARCH: Arch = "aarch64" if platform.machine() == "aarch64" else "x86_64"
OTHER: Arch = "x86_64" if ARCH == "aarch64" else "aarch64"


def headers_of(folder: Path, major: str, minor: str = "1", prefix: str = "NV_TENSORRT_") -> Path:
    """A header folder that says its version and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    spelled = {"NV_TENSORRT_": "NV_TENSORRT_{}", "TRT_": "TRT_{}_ENTERPRISE"}[prefix]
    lines = [f"#define {spelled.format(part)} {value}" for part, value in
             (("MAJOR", major), ("MINOR", minor), ("PATCH", "0"))]  # fmt: skip
    (folder / "NvInferVersion.h").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def real_headers() -> Path:
    try:
        return fetched_headers()
    except MachineError as error:
        pytest.skip(str(error))


def needs_compiler() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler (c++) on this machine")


def test_version_is_read_in_both_spellings(tmp_path: Path) -> None:
    assert header_version(headers_of(tmp_path / "a", "8", "2")) == (8, 2, 0)
    assert header_version(headers_of(tmp_path / "b", "11", "1", "TRT_")) == (11, 1, 0)


def test_a_folder_without_headers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no NvInferVersion\.h.*--tensorrt-include"):
        header_version(tmp_path)


@pytest.mark.parametrize(
    ("flavour", "major", "needed"),
    [("v2", "11", "TensorRT 8"), ("v3", "8", "TensorRT 10 and 11"), ("rtx", "8", "TensorRT-RTX")],
)
def test_headers_of_another_major_version(tmp_path: Path, flavour: Flavour, major: str, needed: str) -> None:
    with pytest.raises(InputError, match=f"headers of TensorRT {major}.*is for {needed}.*crashes"):
        build_plugin(tmp_path / "out.so", headers_of(tmp_path / "h", major), flavour, ARCH)


def test_incomplete_headers_show_the_compilers_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiler()
    monkeypatch.setenv("SPARSEDEPLOY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(PluginBuildError, match=r"(?s)exit code 1.*NvInferRuntime\.h") as error:
        build_plugin(tmp_path / "out.so", headers_of(tmp_path / "h", "10"), "v3", ARCH, "system")
    assert "-DSPARSEDEPLOY_ADAPTER=3" in str(error.value)
    assert not (tmp_path / "out.so").exists()


def test_no_compiler_for_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"no C\+\+ compiler for .*pip install ziglang==0\.13\.0"):
        find_toolchain(OTHER)


def test_a_changed_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEDEPLOY_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "kernel_lens-2.0.1-py3-none-any.whl"
    wheel.write_bytes(b"PK something else")
    with pytest.raises(InputError, match=r"kernel_lens.*has sha256 .*needed 07cc714e"):
        fetched_headers(wheel)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEDEPLOY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plugin_build, "HEADERS_WHEEL", "sparsedeploy-has-no-such-package==1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(MachineError, match=r"TensorRT's headers could not be fetched: .*No matching distribution"):
        fetched_headers()


def test_library_names() -> None:
    assert plugin_file("v3", 11) == "libsparsedeploy_trt11.so"
    assert plugin_file("v2", 8) == "libsparsedeploy_trt8.so"
    assert plugin_file("rtx") == "libsparsedeploy_rtx.so"


def test_the_library_needs_neither_tensorrt_nor_cuda(tmp_path: Path, real_headers: Path) -> None:
    needs_compiler()
    if shutil.which("readelf") is None:
        pytest.skip("no readelf on this machine")
    for flavour in ("v2", "v3", "rtx"):
        out = build_plugin(tmp_path / f"{flavour}.so", real_headers, flavour, ARCH, "system")
        text = subprocess.run(["readelf", "-W", "-d", "--dyn-syms", out], capture_output=True, text=True, check=True)
        needed = [line for line in text.stdout.splitlines() if "(NEEDED)" in line]
        assert all("libc.so" in line or "ld-linux" in line for line in needed), needed
        assert "NODELETE" in text.stdout
        symbols = [line.split() for line in text.stdout.splitlines() if " UND " not in line]
        exported = {words[-1].split("@")[0] for words in symbols if len(words) == 8 and words[3] == "FUNC"}
        creators = "getPluginCreators" if flavour == "v2" else "getCreators"
        assert exported == {creators, "setLoggerFinder", "sparsedeployRegister"}


def test_a_second_build_is_the_first_ones_file(
    tmp_path: Path, real_headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler()
    first = build_plugin(tmp_path / "a.so", real_headers, "v3", ARCH, "system").read_bytes()
    monkeypatch.setattr(plugin_build, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert build_plugin(tmp_path / "b.so", real_headers, "v3", ARCH, "system").read_bytes() == first


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the ziglang wheel")
@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_cross_built_library_needs_an_old_glibc_only(tmp_path: Path, real_headers: Path, arch: Arch) -> None:
    out = build_plugin(tmp_path / "out.so", real_headers, "v2", arch, "zig").read_bytes()
    assert out[18:20] == {"x86_64": b"\x3e\0", "aarch64": b"\xb7\0"}[arch]  # e_machine
    versions = {part.split(b"\0")[0] for part in out.split(b"GLIBC_")[1:]}
    assert all(tuple(map(int, version.split(b"."))) <= (2, 17) for version in versions if version[:1].isdigit())
