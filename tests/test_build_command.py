"""`build`, and what convert and demo do about engines: a fake TensorRT in a real build process, a compiler that only notes."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_models import network, saved
from test_engine import ELF, edited, install_fakes, said
from test_target_folder import headers_of
from typer.main import get_command
from typer.testing import CliRunner, Result

from sparsedeploy import build as builder
from sparsedeploy import demo
from sparsedeploy.build import BuildReport, parse_profile
from sparsedeploy.bundle import check_hashes, hashes, read_manifest
from sparsedeploy.cli import app
from sparsedeploy.convert import Request, convert
from sparsedeploy.devices import find
from sparsedeploy.engines import engine, target_folder
from sparsedeploy.engines.engine_file import EngineRecord, load_check
from sparsedeploy.errors import InputError, MachineError

ROOT = Path(__file__).resolve().parents[1]
RTX_ENGINE = "model.tensorrt_rtx.sm80.engine"
Asked = list[tuple[str, str, str, str]]


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(result: Result, code: int) -> str:
    """The one paragraph of a command that failed with this code, as one line."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("sparsedeploy: ")
    assert result.stderr.count("\n\n") == 0
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for an A100 with three sparse layers and an open batch."""
    folder = tmp_path_factory.mktemp("made")
    convert(Request(saved(network(), folder), find("a100"), folder / "out", layers=("*=sparse",)))
    return folder / "out"


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "out"))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    """No network, no compiler: what it was asked as (file, headers, flavour, architecture)."""
    calls: Asked = []

    def compile_it(target: Path, headers: Path, flavour: str, arch: str) -> Path:
        calls.append((target.name, headers.name, flavour, arch))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(ELF + target.name.encode())
        return target

    for module in (engine, target_folder, builder):
        monkeypatch.setattr(module, "build_plugin", compile_it)
        monkeypatch.setattr(module, "system_headers", lambda arch: None)
        monkeypatch.setattr(module, "fetched_headers", lambda: headers_of(tmp_path, 10))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return calls


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """A fake TensorRT-RTX and TensorRT; called with a fault, they fail so."""
    install_fakes(monkeypatch, tmp_path)
    return lambda fault: monkeypatch.setenv("FAKE_TRT", fault)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with neither TensorRT nor GPU."""
    monkeypatch.setattr(engine, "_installed", lambda module: False)
    monkeypatch.setattr(engine, "first_gpu", lambda: None)


# build


def test_engine_and_folder(out: Path, fake: Callable[[str], None], asked: Asked) -> None:
    result = call("build", out)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{out}/{RTX_ENGINE}: ")
    assert "3 plugin layers" in lines[0]
    assert any(line.startswith("loads in the TensorRT-RTX 1.7.1.116 runtime only") for line in lines)
    assert lines[-2].startswith(f"{out}/a100/: model, plugin, build.sh.")
    assert lines[-1].startswith("note: TensorRT 11 runs on a100 too")
    assert asked == [
        ("libsparsedeploy_rtx.so", "h10", "rtx", "x86_64"),
        ("libsparsedeploy_trt10.so", "h10", "v3", "x86_64"),
    ]
    load_check(out / RTX_ENGINE)
    assert (out / "a100" / "build.sh").is_file()
    assert call("verify", out).exit_code == 0
    again = call("build", out)
    assert again.exit_code == 0
    check_hashes(out)


def test_the_report_as_json(out: Path, fake: Callable[[str], None]) -> None:
    result = call("build", out, "--json")
    report = BuildReport.from_json(result.stdout, "stdout")
    assert result.stdout == report.to_json()
    assert report.engine == EngineRecord.from_json((out / f"{RTX_ENGINE}.json").read_bytes(), "record")
    assert report.engine_seconds is not None
    assert report.folder == "a100"
    assert report.files == ("model.sparse.onnx", "libsparsedeploy_trt10.so", "build.sh")
    assert report.libraries == ("a100/libsparsedeploy_trt10.so",)


def test_options_reach_builder_and_script(out: Path, fake: Callable[[str], None], tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    words = ("--max-batch", 16, "--workspace-mb", 64, "--tf32", "--embed-plugin", "--log", log)
    assert call("build", out, *words, "--backend", "tensorrt_rtx").exit_code == 0
    told = said(out / RTX_ENGINE)
    assert told["profile"] == {"x": [[n, 16, 8, 8] for n in (1, 1, 16)]}
    assert (told["workspace"], told["tf32"]) == (64 << 20, True)
    assert ELF in (out / RTX_ENGINE).read_bytes()
    assert "LayerType" in log.read_text()
    script = (out / "a100" / "build.sh").read_text()
    assert "--maxShapes=x:16x16x8x8" in script
    assert "--memPoolSize=workspace:64" in script
    assert "--noTF32" not in script


def test_sizes_given_outright(out: Path, fake: Callable[[str], None]) -> None:
    assert call("build", out, "--profile", "x=2x16x8x8:4x16x8x8:8x16x8x8").exit_code == 0
    assert said(out / RTX_ENGINE)["profile"] == {"x": [[n, 16, 8, 8] for n in (2, 4, 8)]}
    assert "--minShapes=x:2x16x8x8" in (out / "a100" / "build.sh").read_text()
    text = refused(call("build", out, "--profile", "y=1x16x8x8"), 2)
    assert "has no input 'y'" in text
    assert "Its inputs are x" in text


def test_a_dense_engine_leaves_the_folder_alone(out: Path, fake: Callable[[str], None], asked: Asked) -> None:
    result = call("build", out, "--dense")
    assert result.exit_code == 0
    assert "no plugin layer (dense)" in result.stdout
    assert asked == []
    assert not (out / "a100").exists()
    check_hashes(out)


def test_a_plugin_of_ones_own(out: Path, fake: Callable[[str], None], tmp_path: Path, asked: Asked) -> None:
    (tmp_path / "mine.so").write_bytes(ELF)
    assert call("build", out, "--plugin", tmp_path / "mine.so").exit_code == 0
    assert (out / "mine.so").read_bytes() == ELF
    assert [row[2] for row in asked] == ["v3"]
    assert "no such plugin library" in refused(call("build", out, "--plugin", tmp_path / "no.so"), 3)


def test_headers_of_several_versions(out: Path, fake: Callable[[str], None], asked: Asked, tmp_path: Path) -> None:
    words = ("--tensorrt-include", headers_of(tmp_path, 11), "--tensorrt-include", headers_of(tmp_path, 10))
    result = call("build", out, *words, "--arch", "aarch64")
    assert result.exit_code == 0
    assert asked == [
        ("libsparsedeploy_rtx.so", "h10", "rtx", "x86_64"),
        ("libsparsedeploy_trt10.so", "h10", "v3", "aarch64"),
        ("libsparsedeploy_trt11.so", "h11", "v3", "aarch64"),
    ]
    assert "note:" not in result.stdout
    assert "its TensorRT 10 or 11" in result.stdout


def test_a_triton_repository(out: Path, fake: Callable[[str], None], tmp_path: Path) -> None:
    result = call("build", out, "--triton", tmp_path / "repo", "--max-batch", 8)
    assert result.exit_code == 0, result.stderr
    assert f"{tmp_path}/repo/model/: for Triton" in result.stdout
    assert "max_batch_size: 8" in (tmp_path / "repo" / "model" / "config.pbtxt").read_text()


def test_no_tensorrt_still_makes_the_folder(out: Path, bare: None) -> None:
    text = refused(call("build", out), 3)
    assert "pip install tensorrt-rtx-cu13-bindings==1.7.1.116" in text
    assert f"copy {out}/a100/ there and run its build.sh" in text
    assert (out / "a100" / "build.sh").is_file()
    check_hashes(out)
    assert "no-such-backend" in refused(call("build", out, "--backend", "no-such-backend"), 2)


def test_neither_engine_nor_folder(out: Path, bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network() -> Path:
        raise MachineError("TensorRT's headers could not be fetched.")

    monkeypatch.setattr(target_folder, "fetched_headers", no_network)
    text = refused(call("build", out), 3)
    assert "No engine can be built here" in text
    assert "could not be made either" in text
    assert not (out / "a100").exists()


@pytest.mark.parametrize(("sm", "target", "major"), [(90, "h200", 10), (53, "jetson-nano", 8)])
def test_targets_that_build_their_own(
    out: Path, fake: Callable[[str], None], tmp_path: Path, asked: Asked, sm: int, target: str, major: int
) -> None:
    if sm == 90:
        edited(out, sm=sm, target=target)  # PTX for an A100 runs there too
    else:
        out = convert_for(target, tmp_path)
        text = refused(call("build", out), 3)
        assert "--tensorrt-include DIR" in text
        asked.clear()
    result = call("build", out, *(() if major == 10 else ("--tensorrt-include", headers_of(tmp_path, major))))
    assert result.exit_code == 0, result.stderr
    assert f"no engine from here: TensorRT-RTX does not build for {target}" in result.stdout
    assert f"{out}/{target}/: model, plugin, build.sh." in result.stdout
    assert [row[3] for row in asked] == ["aarch64" if sm == 53 else "x86_64"]
    check_hashes(out)
    for flag in ("--embed-plugin", "--dense"):
        assert f"{flag}: no engine is built here" in refused(call("build", out, flag), 2)
    assert "does not build for" in refused(call("build", out, "--backend", "tensorrt_rtx"), 3)


def convert_for(target: str, folder: Path) -> Path:
    """A bundle of the small network for another device."""
    (folder / target).mkdir()
    convert(Request(saved(network(), folder / target), find(target), folder / target / "out", layers=("*=sparse",)))
    return folder / target / "out"


def test_an_engine_that_fails_is_1(out: Path, fake: Callable[[str], None], tmp_path: Path) -> None:
    before = hashes(out)
    fake("lose_layer")
    text = refused(call("build", out, "--log", tmp_path / "log"), 1)
    assert "'c1' is missing" in text
    assert hashes(out) == before
    assert (tmp_path / "log").is_file()
    fake("abort")
    assert "SIGABRT" in refused(call("build", out), 3)


def test_a_changed_model_is_not_built(out: Path, bare: None) -> None:
    (out / "model.sparse.onnx").write_bytes((out / "model.sparse.onnx").read_bytes() + b"\0")
    assert "was changed after conversion" in refused(call("build", out), 1)
    assert not (out / "a100").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "build needs the bundle"),
        (("--plugin-only", "--tf32"), "--tf32 says how an engine is built"),
        (("--plugin-only", "--max-batch", "4"), "--max-batch says how an engine is built"),
        (("OUT", "--dense", "--triton", "repo"), "--dense with --triton"),
        (("OUT", "--dense", "--embed-plugin"), "there is no plugin to put into its engine"),
        (("OUT", "--dense", "--plugin", "mine.so"), "there is no plugin to load"),
        (("OUT", "--dense", "--arch", "aarch64"), "--arch with --dense"),
        (("OUT", "--dense", "--tensorrt-include", "h"), "--tensorrt-include with --dense"),
        (("OUT", "--arch", "riscv"), "--arch riscv"),
        (("OUT", "--profile", "x=1x2"), "do not fit it"),
        (("OUT", "--profile", "x"), "--profile x: is not understood"),
        (("OUT", "--tensorrt-include", "nowhere"), "no NvInferVersion.h"),
        (("nowhere",), "no bundle here"),
    ],
)
def test_usage(
    words: tuple[str, ...], says: str, out: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out.parent)
    before = hashes(out)
    assert says in refused(call("build", *("out" if word == "OUT" else word for word in words)), 2)
    assert hashes(out) == before


def test_a_batch_that_the_model_does_not_leave_open(tmp_path: Path, fake: Callable[[str], None]) -> None:
    proto = network()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    convert(Request(saved(proto, tmp_path), find("a100"), tmp_path / "out", layers=("*=sparse",)))
    text = refused(call("build", tmp_path / "out", "--max-batch", 8), 2)
    assert "leaves no batch open (input 'x' is 2x16x8x8)" in text


def test_profiles_as_text() -> None:
    name, profile = parse_profile("a=b=1x2:2x2:4x2")
    assert (name, profile.minimum, profile.optimum, profile.maximum) == ("a=b", (1, 2), (2, 2), (4, 2))
    assert parse_profile("x=3X4")[1].optimum == (3, 4)
    for text in ("x=1:2", "=1:2:3", "x=1:2:3:4", "x=0x1", "x=", "x=a:b:c"):
        with pytest.raises(InputError, match="--profile"):
            parse_profile(text)


# --plugin-only


@pytest.mark.parametrize(
    ("words", "majors", "expected"),
    [
        ((), (), [("libsparsedeploy_trt10.so", "h10", "v3", "x86_64"), ("libsparsedeploy_rtx.so", "h10", "rtx", "x86_64")]),
        (("--backend", "tensorrt_rtx"), (), [("libsparsedeploy_rtx.so", "h10", "rtx", "x86_64")]),
        (("--backend", "tensorrt"), (), [("libsparsedeploy_trt10.so", "h10", "v3", "x86_64")]),
        (("--arch", "aarch64"), (8,), [("libsparsedeploy_trt8.so", "h8", "v2", "aarch64")]),
        (("--arch", "aarch64"), (), [("libsparsedeploy_trt10.so", "h10", "v3", "aarch64")]),
        (("--backend", "tensorrt"), (8, 11), [("libsparsedeploy_trt8.so", "h8", "v2", "x86_64"), ("libsparsedeploy_trt11.so", "h11", "v3", "x86_64")]),
    ],
)  # fmt: skip
def test_the_plugin_alone(
    words: tuple[str, ...],
    majors: tuple[int, ...],
    expected: list[tuple[str, ...]],
    asked: Asked,
    bare: None,
    tmp_path: Path,
) -> None:
    given = [word for major in majors for word in ("--tensorrt-include", headers_of(tmp_path, major))]
    result = call("build", tmp_path / "new" / "lib", "--plugin-only", *words, *given)
    assert result.exit_code == 0, result.stderr
    assert asked == expected
    shown = [line.partition(": ")[0] for line in result.stdout.splitlines()]
    assert shown == [f"{tmp_path}/new/lib/{row[0]}" for row in expected]


def test_the_plugin_alone_into_a_bundle(out: Path, bare: None) -> None:
    report = BuildReport.from_json(call("build", out, "--plugin-only", "--json").stdout, "stdout")
    assert set(report.libraries) <= set(read_manifest(out).files)
    check_hashes(out)


# convert and demo


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(network(), tmp_path)


def test_convert_ends_in_an_engine(model: Path, tmp_path: Path, fake: Callable[[str], None]) -> None:
    out = tmp_path / "out"
    result = call("convert", model, "--target", "a100", "-o", out, "--layer", "*=sparse")
    assert result.exit_code == 0
    assert f"{out}/{RTX_ENGINE}: " in result.stdout
    assert f"{out}/a100/: model, plugin, build.sh." in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Next: ")
    load_check(out / RTX_ENGINE)
    assert call("verify", out).exit_code == 0
    plain = call("convert", model, "--target", "a100", "-o", out, "--layer", "*=sparse", "--no-engine")
    assert plain.exit_code == 0
    assert ".engine" not in plain.stdout
    assert "no engine" not in plain.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "manifest.json", "model.dense.onnx", "model.sparse.onnx", "plan.json", "report.html", "verify.json",
    ]  # fmt: skip


def test_converts_json_is_the_manifest_with_the_engine(
    model: Path, tmp_path: Path, fake: Callable[[str], None]
) -> None:
    out = tmp_path / "out"
    result = call("convert", model, "--target", "a100", "-o", out, "--layer", "*=sparse", "--json")
    assert result.stdout == (out / "manifest.json").read_text()
    assert RTX_ENGINE in json.loads(result.stdout)["files"]


@pytest.mark.parametrize("fault", ["abort", "lose_layer", "no_parse"])
def test_a_failed_engine_is_a_note(model: Path, tmp_path: Path, fake: Callable[[str], None], fault: str) -> None:
    fake(fault)
    out = tmp_path / "out"
    result = call("convert", model, "--target", "a100", "-o", out, "--layer", "*=sparse")
    assert (result.exit_code, result.stderr) == (0, "")
    notes = [line for line in result.stdout.splitlines() if "its engine could not be built: " in line]
    assert len(notes) == 1
    check_hashes(out)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("a100", "no engine: no TensorRT is installed. `pip install '.[rtx]'`"),
        ("jetson-nano", "no engine: TensorRT-RTX does not build for jetson-nano"),
        ("h200", "no engine: TensorRT-RTX does not build for h200"),
    ],
)
def test_without_an_engine_one_line_says_why(target: str, says: str, model: Path, tmp_path: Path, bare: None) -> None:
    result = call("convert", model, "--target", target, "-o", tmp_path / "out", "--layer", "*=sparse")
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("no engine: ")]
    assert line.startswith(says)
    assert ("[rtx]" in line) == (target == "a100"), "no wheel is recommended that would not help"


def test_nothing_converted_says_nothing_of_engines(tmp_path: Path, fake: Callable[[str], None]) -> None:
    result = call("convert", saved(network(sparsity=0.0), tmp_path), "--target", "a100")
    assert result.exit_code == 0
    assert "no engine" not in result.stdout
    assert ".engine" not in result.stdout


def test_the_demo_builds_engines(
    model: Path, tmp_path: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "write_model", lambda folder: model)
    result = call("demo", "-o", tmp_path / "demo")
    assert result.exit_code == 0, result.stderr
    assert f"{tmp_path}/demo/a100-forced/{RTX_ENGINE}: " in result.stdout
    assert "no engine: TensorRT-RTX does not build for jetson-nano" in result.stdout
    without = call("demo", "-o", tmp_path / "demo", "--target", "a100", "--no-engine")
    assert without.exit_code == 0
    assert ".engine" not in without.stdout


@pytest.mark.rtx
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="needs the TensorRT-RTX wheels")
def test_the_demo_with_tensorrt_rtx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 4: on a machine without a GPU the demo ends in an engine for an A100, and says how large and what loads it."""
    monkeypatch.undo()  # the real compiler and headers
    result = call("demo", "-o", tmp_path, "--target", "a100")
    assert result.exit_code == 0, result.stderr
    if "could not be fetched" in result.stdout or "no C++ compiler" in result.stdout:
        pytest.skip(result.stdout)
    out = tmp_path / "a100-forced"
    record = load_check(out / RTX_ENGINE, sm=80)
    assert len(record.plugin_layers) == read_manifest(out).sparse_layers == 20
    size = f"{record.engine_bytes / 1e6:.2f} MB, 20 plugin layers of {sum(record.layer_types.values())}"
    assert f"{out}/{RTX_ENGINE}: {size}" in result.stdout
    assert "loads in the TensorRT-RTX 1.7" in result.stdout
    assert (out / "a100" / "libsparsedeploy_trt10.so").is_file()
    assert call("verify", out, "--hashes-only").exit_code == 0


@pytest.mark.rtx
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="needs the TensorRT-RTX wheels")
def test_the_engines_of_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's lines as they stand there, on a smaller model of that name; the extra is what this test runs with."""
    monkeypatch.undo()
    (tmp_path / "sparsedeploy-demo").mkdir()
    saved(network(), tmp_path / "sparsedeploy-demo", "resnet18-90.onnx")
    section = (ROOT / "README.md").read_text("utf-8").split("\n## Engines\n", 1)[1]
    install, *commands = section.split("```sh\n", 1)[1].split("```", 1)[0].splitlines()
    assert "'.[rtx]'" in install
    assert len(commands) == 3
    for command in commands:
        script = command.split("#")[0].replace("sparsedeploy ", f"'{sys.executable}' -m sparsedeploy.cli ", 1)
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), command
    for name in (RTX_ENGINE, "model.dense.tensorrt_rtx.sm80.engine"):
        load_check(tmp_path / "engine" / name, sm=80)
    check_hashes(tmp_path / "engine")


# Words


def test_flags_that_messages_name_exist() -> None:
    known = {option for command in get_command(app).commands.values() for p in command.params for option in p.opts}  # type: ignore[attr-defined]
    ours = [
        *sorted((ROOT / "deploy" / "engines").glob("*.py")),
        ROOT / "deploy" / "build.py",
        ROOT / "plugins" / "plugin_build.py",
    ]
    ours += [ROOT / "plugins" / "trt" / "USING.md"]
    for path in ours:
        text = path.read_text("utf-8")
        named = {f"--{flag}" for flag in re.findall(r"`sparsedeploy (?:build|convert)[^`]*?--([a-z][a-z0-9-]+)", text)}
        named |= {f"--{flag}" for flag in re.findall(r"(?:with|Try|Without|without|Give|to) --([a-z][a-z0-9-]+)", text)}
        assert named <= known, f"{path.name}: {sorted(named - known)}"
