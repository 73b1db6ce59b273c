"""What a user installs: the wheel holds every package and data file, and README's commands are CI's."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "deploy": "sparsedeploy",
    "plugins": "sparsedeploy/plugins",
    "converters": "sparsedeploy/converters",
    "models": "sparsedeploy/models",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the tracked files as they are now, without network."""
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_wheel_holds_every_file(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }
    assert inside == expected


def test_wheel_has_entry_point_and_licence(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    entry = next(name for name in names if name.endswith("entry_points.txt"))
    assert "sparsedeploy = sparsedeploy.__main__:main" in wheel.read(entry).decode()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def readme_lines(heading: str) -> list[str]:
    """The lines of the first sh block after a heading of README."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1]
    block = re.search(r"```sh\n(.*?)```", section, re.S)
    assert block, f"no sh block under {heading}"
    return block.group(1).strip().splitlines()


def test_ci_runs_the_commands_of_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    for heading in ("Start", "Tests"):
        (command,) = readme_lines(heading)
        assert f"\n{command}\n" in script, f"README's {heading} command is not in .ci/run"


def test_walkthrough_of_readme_runs(tmp_path: Path) -> None:
    """README's walk through the commands, each line as it stands there."""
    for command in readme_lines("Commands"):
        words = command.split("#")[0]
        script = words.replace("sparsedeploy ", f"'{sys.executable}' -m sparsedeploy.cli ", 1)
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stderr == ""


def test_targets_of_readme_are_the_devices() -> None:
    from sparsedeploy.devices import DEVICES

    text = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", text.split("\n## Targets\n", 1)[1].split("\n## ", 1)[0], re.M)
    assert rows == [device.name for device in DEVICES]
