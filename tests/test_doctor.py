"""The doctor: every check says ok or what to do, nothing it finds makes it fail, and only converting decides the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsedeploy import doctor
from sparsedeploy.cli import app
from sparsedeploy.doctor import Check, Diagnosis, diagnose, lines_of, summary
from sparsedeploy.engines.engine import Backend
from sparsedeploy.errors import MachineError
from sparsedeploy.gpu import Gpu
from sparsedeploy.measure.gpu_state import GpuState, NoProbe

H200 = Gpu("NVIDIA H200", 90, 132)


def checks(found: Iterator[doctor.Finding]) -> dict[str, tuple[str, str, str]]:
    """What an examination found, by what it looked at: state, text, fix."""
    return {what: (state, text, fix) for what, state, text, fix in found}


def test_the_command() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for what in (
        "Python",
        "ptxas",
        "NVRTC",
        "TensorRT",
        "driver",
        "GPU",
        "PyTorch",
        "ONNX Runtime providers",
        "Pillow",
    ):
        assert f"  {what} " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("this machine can convert and verify")
    record = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert Diagnosis.from_json(json.dumps(record), "doctor").can_convert
    assert all(check["fix"] for check in record["checks"] if check["state"] in ("broken", "warning"))


def test_something_that_converting_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise MachineError("no ptxas here")

    monkeypatch.setattr(doctor, "tool_version", missing)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 3
    assert "pip install --force-reinstall nvidia-cuda-nvcc-cu12==" in result.stdout
    assert "something that converting needs is broken: ptxas" in " ".join(result.stderr.split())
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    assert checks(doctor._assembler())["ptxas"] == ("broken", "its wheel exists for Linux only", "Convert on Linux.")


def test_what_breaks_while_it_is_looked_at_is_a_finding() -> None:
    def _power_supply() -> Iterator[doctor.Finding]:
        yield "first", "ok", "fine", ""
        raise RuntimeError("smoke")

    first, second = doctor._checks("running", _power_supply)
    assert (first.what, first.state) == ("first", "ok")
    assert (second.what, second.state, second.found) == ("power supply", "broken", "RuntimeError: smoke")


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shattered.py").write_text("raise OSError('libwhat.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    what, state, found, fix = doctor._package("shattered")
    assert (what, state) == ("shattered", "broken")
    assert "libwhat.so" in found
    assert fix.endswith("pip install --force-reinstall shattered")


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "first_gpu", lambda: None)
    assert checks(doctor._gpu())["GPU"][0] == "absent"
    assert checks(doctor._clocks()) == {}
    assert checks(doctor._cuda_libraries()) == {}


@pytest.mark.parametrize(
    ("state", "expected", "words"),
    [
        (GpuState(sm_mhz=1980, memory_mhz=3201, temperature_c=40, power_w=300.2, utilisation=0), "ok", "SM 1980 MHz, memory 3201 MHz, 40 C, 300 W, busy 0 %"),
        (GpuState(sm_mhz=900, throttle=("hardware thermal slowdown",)), "warning", "held down by hardware thermal slowdown"),
        (GpuState(sm_mhz=1980, utilisation=80), "warning", "busy 80 %"),
        (GpuState(), "ok", "not told"),
    ],
)  # fmt: skip
def test_clocks(monkeypatch: pytest.MonkeyPatch, state: GpuState, expected: str, words: str) -> None:
    class Probe:
        def read(self) -> GpuState:
            return state

    monkeypatch.setattr(doctor, "first_gpu", lambda: H200)
    monkeypatch.setattr(doctor, "probe", Probe)
    found = checks(doctor._clocks())["clocks"]
    assert found[0] == expected
    assert words in found[1]
    assert bool(found[2]) == (expected == "warning")
    monkeypatch.setattr(doctor, "probe", NoProbe)
    assert "clocks" not in checks(doctor._clocks())


@pytest.mark.parametrize(
    ("text", "expected", "mode"),
    [
        ("NV Fan Mode:quiet\nNV Power Mode: MAXN\n0\n", "ok", "MAXN"),
        ("NV Power Mode: 5W\n1\n", "warning", "5W"),
        ("NVPM WARN: fan mode is not set!\nNV Power Mode: MODE_15W_6CORE\n2\n", "warning", "MODE_15W_6CORE"),
        ("", "warning", "nvpmodel does not tell"),
    ],
)
def test_power_modes_of_a_jetson(monkeypatch: pytest.MonkeyPatch, text: str, expected: str, mode: str) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(doctor, "_said", lambda *command: text)
    state, found, fix = checks(doctor._power_mode())["power mode"]
    assert (state, found) == (expected, mode)
    assert bool(fix) == (expected == "warning")


def test_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def answering(code: int, out: str, error: str = "") -> None:
        done = subprocess.CompletedProcess([sys.executable], code, out, error)
        monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)

    monkeypatch.setattr(doctor, "_installed", lambda name: "2.11.0")
    monkeypatch.setattr(doctor, "first_gpu", lambda: H200)
    answering(0, "2.11.0+cu130 13.0 True 91002\n")
    assert checks(doctor._torch())["PyTorch"] == ("ok", "2.11.0+cu130, CUDA 13.0, cuDNN 91002", "")
    answering(0, "2.11.0+cpu None False None\n")
    state, found, fix = checks(doctor._torch())["PyTorch"]
    assert (state, fix) == ("warning", "Install a build for the driver's CUDA version.")
    assert "a build without CUDA; it finds no GPU" in found
    answering(1, "", "Traceback\nOSError: libcudart.so.13: cannot open\n")
    assert checks(doctor._torch())["PyTorch"][1] == "2.11.0 cannot be imported: OSError: libcudart.so.13: cannot open"
    monkeypatch.setattr(doctor, "_installed", lambda name: None)
    assert checks(doctor._torch())["PyTorch"][0] == "absent"


def test_a_tensorrt_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(backend: Backend) -> Any:
        raise MachineError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(doctor, "import_backend", broken)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    assert doctor._backend("tensorrt")[1] == "broken"
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor._backend("tensorrt")[1:3] == ("absent", "not installed")


def test_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def ok(area: Any, what: str) -> Check:
        return Check(area=area, what=what, state="ok", found="1")

    whole = Diagnosis(
        checks=(ok("converting", "ptxas"), ok("building engines", "TensorRT-RTX"), ok("running", "PyTorch"))
    )
    monkeypatch.setattr(doctor, "first_gpu", lambda: H200)
    assert (
        summary(whole)
        == "this machine can convert and verify, build engines with TensorRT-RTX, run, bench and tune sparse models on the GPU"
    )
    monkeypatch.setattr(doctor, "first_gpu", lambda: None)
    broken = Check(area="converting", what="ptxas", state="broken", found="gone", fix="bring it back")
    assert summary(Diagnosis(checks=(broken,))) == (
        "this machine can run models (dense, on the CPU); bench and tune need an NVIDIA GPU and PyTorch; broken: ptxas"
    )
    assert lines_of(Diagnosis(checks=(broken,)))[2].strip() == "bring it back"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "cache_dir", lambda: tmp_path / "cache")
    assert checks(doctor._cache())["cache"][0] == "ok"
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    state, _, fix = checks(doctor._cache())["cache"]
    assert (state, "SPARSEDEPLOY_CACHE" in fix) == ("warning", True)


def test_everything_at_once() -> None:
    assert {check.area for check in diagnose().checks} == {"converting", "building engines", "running"}
