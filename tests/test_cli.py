"""The command line as a user meets it: exit codes, first lines, what goes to stdout, and --json alone on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import network, one_conv, saved, sparse_weight
from typer.testing import CliRunner, Result

from sparsedeploy import __version__, cli, devices
from sparsedeploy.bundle import Manifest
from sparsedeploy.cli import app
from sparsedeploy.errors import CheckFailed, InputError, MachineError
from sparsedeploy.gpu import Gpu
from sparsedeploy.plan import Plan
from sparsedeploy.verify import Verification


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(network(sparsity=0.98, channels=64, size=28), tmp_path)


def test_version_and_help() -> None:
    assert call("--version").stdout == f"sparsedeploy {__version__}\n"
    for words in (["--help"], ["-h"], ["convert", "-h"], ["scan", "--help"], ["verify", "-h"], ["prune", "-h"]):
        result = call(*words)
        assert result.exit_code == 0
        assert "Usage" in result.stdout
    assert call("nonsense").exit_code == 2


def test_convert_says_target_verdict_and_next_step(model: Path) -> None:
    result = call("convert", model, "--target", "jetson-nano")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("target jetson-nano: ")
    out = model.parent / "model.sparsedeploy"
    assert any(line.startswith("verified: 3 sparse nodes read back") for line in lines)
    assert any("predicted for all convolutions, not measured" in line for line in lines)
    assert lines[-1].startswith(f"Next: open {out / 'report.html'}")
    assert result.stderr == ""  # progress is for terminals


def test_nothing_to_convert_is_said_first_and_exits_0(tmp_path: Path) -> None:
    result = call("convert", saved(network(sparsity=0.0), tmp_path), "--target", "a100")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].startswith("nothing to convert: 0 % zeros")
    assert result.stdout.splitlines()[-1].startswith("Next: sparsedeploy prune ")


def test_json_is_the_record_and_nothing_else(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = call("convert", model, "--target", "a100", "-o", out, "--layer", "*=sparse", "--json")
    manifest = Manifest.from_json(made.stdout, "stdout")
    assert made.stdout == (out / "manifest.json").read_text() == manifest.to_json()
    checked = call("verify", out, "--json")
    assert Verification.from_json(checked.stdout, "stdout").sparse_nodes_verified == 3
    pruned = call("prune", model, "--sparsity", "0.5", "-o", tmp_path / "p.onnx", "--json")
    assert json.loads(pruned.stdout)["schema"] == 1


def test_scan_plan_edit_convert(model: Path, tmp_path: Path) -> None:
    """The round trip of the README: what the saved plan says is what is converted, target and precision with it."""
    plan = tmp_path / "plan.json"
    assert call("scan", model, "--target", "jetson-nano", "--precision", "fp16", "--save-plan", plan).exit_code == 0
    document = json.loads(plan.read_text())
    for entry, choice in zip(document["layers"], ("csr", "dense", "packed"), strict=True):
        entry["choice"] = choice
    plan.write_text(json.dumps(document))
    result = call("convert", model, "--plan", plan, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    written = Plan.from_json((tmp_path / "out" / "plan.json").read_text(), "plan.json")
    assert [entry.choice for entry in written.layers] == ["csr", "dense", "packed"]
    assert (written.target, written.precision) == ("jetson-nano", "fp16")


def test_the_gpu_here_is_the_target(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "first_gpu", lambda: Gpu("NVIDIA Test", 87, 8))
    first = call("scan", model).stdout.splitlines()[0]
    assert "closest to the GPU here, NVIDIA Test" in first
    assert first.startswith("target orin-nano")
    monkeypatch.setattr(cli, "first_gpu", lambda: Gpu("Old", 35, 8))
    assert call("scan", model).stdout.startswith(f"target {devices.DEFAULT}: ")
    monkeypatch.setattr(cli, "first_gpu", lambda: None)
    assert "no known GPU here" in call("scan", model).stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a b"), 2),
        (CheckFailed("a b"), 1),
        (MachineError("a b"), 3),
        (PermissionError(13, "Permission denied", "a b"), 3),
        (MemoryError(), 3),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a b"), 70),
        (RecursionError("a b"), 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_exit_codes(error: BaseException, code: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("sparsedeploy.reading.read", fail)
    result = call("scan", model)
    assert result.exit_code == code
    assert result.stderr.startswith("sparsedeploy: ")
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n\n") == 0


_STARTED = """
import os, signal, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "sparsedeploy.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stop())
sys.argv = ["sparsedeploy", "--version"]
if {ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
from sparsedeploy.__main__ import main
main()
"""


def test_ctrl_c_while_python_imports_is_one_paragraph_and_130() -> None:
    done = subprocess.run([sys.executable, "-c", _STARTED.format(ignored=False)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "sparsedeploy: Interrupted before anything was begun.\n"


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    done = subprocess.run([sys.executable, "-c", _STARTED.format(ignored=True)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_in_a_command_still_reaches_its_own_handler(model: Path) -> None:
    code = f"""
import os, signal, sys
from sparsedeploy import __main__, reading
reading.read = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["sparsedeploy", "scan", {str(model)!r}]
__main__.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False)
    assert "Nothing half-written" in done.stderr


def test_verify_fails_with_1_and_hashes_only_is_quick(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call("convert", model, "--target", "a100", "-o", out)
    ok = call("verify", out, "--hashes-only")
    assert (ok.exit_code, ok.stdout.count("\n")) == (0, 1)
    no_record = call("verify", out, "--hashes-only", "--json")
    assert (no_record.exit_code, no_record.stdout) == (2, "")
    (out / "report.html").write_text("")
    assert call("verify", out).exit_code == 1


def test_a_broken_pipe_is_no_error(model: Path) -> None:
    code = f"{sys.executable} -m sparsedeploy.cli scan {model} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.returncode == 0
    assert done.stdout.startswith("target ")


def test_rich_markup_in_names_is_text(tmp_path: Path) -> None:
    proto = one_conv(sparse_weight((8, 8, 3, 3)), pads=[1] * 4)
    proto.graph.node[0].name = "[red]conv[/red]"
    path = saved(proto, tmp_path)
    assert "[red]conv[/red]" in call("scan", path).stdout
    assert call("convert", path, "--layer", "[red]conv[/red]=csr").exit_code == 0
    assert "[red]x=csr" in " ".join(call("convert", path, "--layer", "[red]x=csr").stderr.split())
