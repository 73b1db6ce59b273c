"""build.sh: the exact lines per version, run against a trtexec that only says its version and what it was given."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest
from small_models import network, saved

from sparsedeploy.bundle import DENSE_MODEL, SPARSE_MODEL, read_manifest
from sparsedeploy.convert import Request, convert
from sparsedeploy.devices import find
from sparsedeploy.engines.engine_build import Profile
from sparsedeploy.engines.trtexec import (
    Recipe,
    graph_shapes,
    recipe_for,
    trtexec_arguments,
    trtexec_script,
    write_target_folder,
)
from sparsedeploy.errors import InputError

PROFILES = {"x": Profile(minimum=(1, 3, 8, 8), optimum=(4, 3, 8, 8), maximum=(16, 3, 8, 8))}
PLUGINS = {8: "lib8.so", 10: "lib10.so", 11: "lib11.so"}
RECIPE = Recipe("fp32", PROFILES, PLUGINS)

FAKE = """#!/bin/sh
[ -z "$NUMBER" ] || echo "&&&& RUNNING TensorRT.trtexec [TensorRT v$NUMBER] [b7] # trtexec $*"
[ "$1" != --help ] || exit 0
for word in "$@"; do
    echo "<$word>"
    case $word in --saveEngine=*) [ -n "$WRITES_NOTHING" ] || echo engine > "${word#--saveEngine=}" ;; esac
done
exit "${CODE:-0}"
"""


@pytest.mark.parametrize(
    ("version", "has", "lacks"),
    [
        ((8, 0), ["--plugins=./lib8.so", "--workspace=256", "--buildOnly"], ["--profilingVerbosity=detailed"]),
        ((8, 2), ["--plugins=./lib8.so", "--workspace=256", "--buildOnly", "--profilingVerbosity=detailed"], []),
        ((8, 4), ["--plugins=./lib8.so", "--buildOnly"], ["--workspace=256"]),
        ((8, 6), ["--staticPlugins=./lib8.so", "--skipInference"], ["--plugins=./lib8.so", "--stronglyTyped"]),
        ((10, 0), ["--dynamicPlugins=./lib10.so", "--stronglyTyped", "--skipInference"], ["--fp16"]),
        ((11, 0), ["--dynamicPlugins=./lib11.so", "--skipInference"], ["--fp16", "--stronglyTyped"]),
    ],
)
def test_the_line_of_each_version(version: tuple[int, int], has: list[str], lacks: list[str]) -> None:
    arguments = trtexec_arguments(RECIPE, version)
    assert arguments[:2] == ("--onnx=model.sparse.onnx", "--saveEngine=model.engine")
    assert "--noTF32" in arguments
    assert {"--minShapes=x:1x3x8x8", "--optShapes=x:4x3x8x8", "--maxShapes=x:16x3x8x8"} <= set(arguments)
    assert set(has) <= set(arguments)
    assert not set(lacks) & set(arguments)


def test_choices_become_flags() -> None:
    half = Recipe("fp16", {}, PLUGINS, tf32=True, workspace_mb=512)
    assert {"--fp16", "--workspace=512"} <= set(trtexec_arguments(half, (8, 2)))
    assert {"--fp16", "--memPoolSize=workspace:512"} <= set(trtexec_arguments(half, (8, 6)))
    ten = trtexec_arguments(half, (10, 0))
    assert "--memPoolSize=workspace:512" in ten
    assert not {"--noTF32", "--fp16"} & set(ten)
    assert not any("Shapes=" in word for word in ten)


def test_dense_needs_no_plugin() -> None:
    arguments = trtexec_arguments(RECIPE, (10, 0), dense=True)
    assert arguments[:2] == ("--onnx=../model.dense.onnx", "--saveEngine=model.dense.engine")
    assert not any("lugins" in word for word in arguments)


@pytest.mark.parametrize("name", ["a,b", "a'b"])
def test_a_name_that_trtexec_cannot_take(name: str) -> None:
    with pytest.raises(InputError, match="cannot take a name with a comma or a quote"):
        trtexec_script(Recipe("fp32", {name: PROFILES["x"]}, PLUGINS))


def test_names_that_a_shell_would_read_otherwise(tmp_path: Path) -> None:
    profiles = {'in $HOME `x` "q":0': PROFILES["x"]}
    folder = folder_with(tmp_path, Recipe("fp32", profiles, {10: "lib10.so"}))
    assert '<--minShapes=in $HOME `x` "q":0:1x3x8x8>' in run(folder, "101401").stdout


def folder_with(tmp_path: Path, recipe: Recipe = RECIPE) -> Path:
    """A target folder (with a space in its name) and trtexec beside it."""
    folder = tmp_path / "a 100"
    folder.mkdir()
    (folder / "build.sh").write_text(trtexec_script(recipe))
    (folder / recipe.model).write_bytes(b"sparse")
    (tmp_path / DENSE_MODEL).write_bytes(b"dense")
    fake = tmp_path / "bin" / "trtexec"
    fake.parent.mkdir()
    fake.write_text(FAKE)
    fake.chmod(0o755)
    return folder


def run(folder: Path, number: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """build.sh from another folder, by the strictest shell at hand."""
    shell = shutil.which("dash") or "sh"
    environment = {"PATH": f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}", "NUMBER": number, **variables}
    environment = {"WRITES_NOTHING": "", **environment}
    return subprocess.run(
        [shell, str(folder / "build.sh"), *words], capture_output=True, text=True, check=False, env=environment, cwd="/"
    )


@pytest.mark.parametrize(
    ("number", "version"),
    [
        ("8001", (8, 0)), ("8201", (8, 2)), ("8401", (8, 4)), ("8503", (8, 4)), ("8601", (8, 6)),
        ("100001", (10, 0)), ("100300", (10, 0)), ("101401", (10, 0)), ("101600", (10, 0)),
        ("110000", (11, 0)), ("110100", (11, 0)), ("120000", None), ("7201", None), ("9300", None),
    ],
)  # fmt: skip
def test_the_script_runs_the_line_of_the_version_it_finds(
    tmp_path: Path, number: str, version: tuple[int, int] | None
) -> None:
    done = run(folder_with(tmp_path), number)
    if version is None:
        assert done.returncode == 3
        assert "this folder builds with TensorRT 8 or 10 or 11" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    given = [line[1:-1] for line in done.stdout.splitlines() if line.startswith("<")]
    assert tuple(given) == trtexec_arguments(RECIPE, version)
    assert (tmp_path / "a 100" / "model.engine").is_file()


def test_dense_from_the_same_script(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    done = run(folder, "101401", "dense")
    assert done.returncode == 0, done.stderr
    assert (folder / "model.dense.engine").is_file()
    assert "on this GPU." in done.stdout


def test_embedding(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    done = run(folder, "101401", EMBED="1")
    assert "<--setPluginsToSerialize=./lib10.so>" in done.stdout
    assert "engine_host_code_allowed" in done.stdout
    assert "setPluginsToSerialize" not in run(folder, "101401").stdout
    assert "setPluginsToSerialize" not in run(folder, "8201", EMBED="1").stdout, "8.2 does not know the flag"


def test_what_can_go_wrong(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    assert run(folder, "101401").returncode == 0
    assert run(folder, "101401", CODE="5").returncode == 5
    nothing = run(folder, "101401", WRITES_NOTHING="1")
    assert nothing.returncode == 1
    assert "without writing model.engine" in nothing.stderr
    silent = run(folder, "")
    assert silent.returncode == 3
    assert "does not say which TensorRT it is" in silent.stderr
    assert run(folder, "101401", "both").returncode == 2
    (folder / SPARSE_MODEL).unlink()
    gone = run(folder, "101401")
    assert gone.returncode == 2
    assert "model.sparse.onnx is not there" in gone.stderr
    (tmp_path / "bin" / "trtexec").unlink()
    absent = run(folder, "101401", PATH="/usr/bin:/bin")
    if shutil.which("trtexec", path="/usr/bin:/bin:/usr/src/tensorrt/bin") is None:
        assert absent.returncode == 3
        assert "no trtexec found" in absent.stderr


def test_only_versions_that_have_a_library() -> None:
    text = trtexec_script(Recipe("fp32", PROFILES, {10: "lib10.so"}))
    assert "lib10.so" in text
    assert "8.[01])" not in text
    with pytest.raises(ValueError, match="no plugin library"):
        trtexec_script(Recipe("fp32", PROFILES, {10: "lib10.so"}, majors=(10, 11)))


def test_the_folder_of_a_bundle(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(Request(saved(network(), tmp_path), find("a100"), out, layers=("*=sparse",), batch=2))
    library = tmp_path / "lib10.so"
    library.write_bytes(b"\x7fELF")
    recipe = recipe_for(read_manifest(out), out / SPARSE_MODEL, {10: "lib10.so"}, batch=(1, 2, 8))
    assert recipe.profiles["x"].maximum == (8, 16, 8, 8)
    written = write_target_folder(out / "a100", out / SPARSE_MODEL, recipe, {10: library})
    assert [path.name for path in written] == [SPARSE_MODEL, "lib10.so", "build.sh"]
    assert (out / "a100" / SPARSE_MODEL).read_bytes() == (out / SPARSE_MODEL).read_bytes()
    assert os.access(out / "a100" / "build.sh", os.X_OK)
    again = write_target_folder(out / "a100", out / SPARSE_MODEL, recipe, {10: library})
    assert again == written


def test_shapes_of_a_graph(tmp_path: Path) -> None:
    path = saved(network(), tmp_path)
    assert graph_shapes(path) == ({"x": (-1, 16, 8, 8)}, {"y": (-1, 10)})
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    assert graph_shapes(path)[1] == {"y": None}
