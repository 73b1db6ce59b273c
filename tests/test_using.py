"""The documentation for people without our command line: its lines are those that we run, its program compiles."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from sparsedeploy.engines.engine_build import Profile
from sparsedeploy.engines.trtexec import Recipe, trtexec_arguments
from sparsedeploy.errors import MachineError
from sparsedeploy.plugins.plugin_build import fetched_headers, plugin_file

TEXT = (Path(__file__).parents[1] / "plugins" / "trt" / "USING.md").read_text("utf-8")
RECIPE = Recipe(
    "fp32",
    {"input": Profile(minimum=(1, 3, 224, 224), optimum=(8, 3, 224, 224), maximum=(32, 3, 224, 224))},
    {major: plugin_file("v3" if major > 8 else "v2", major) for major in (8, 10, 11)},
)
STUBS = """#pragma once
#include <cstddef>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
enum cudaError_t { cudaSuccess };
cudaError_t cudaMalloc(void**, size_t);
cudaError_t cudaMemset(void*, int, size_t);
cudaError_t cudaFree(void*);
cudaError_t cudaStreamCreate(cudaStream_t*);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamDestroy(cudaStream_t);
"""


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_trtexec_lines_are_those_of_the_script() -> None:
    lines = re.findall(r"# TensorRT (\d+)(?:\.(\d))?[^\n]*\ntrtexec (.*)", blocks("sh")[0])
    assert [(major, minor) for major, minor, _ in lines] == [
        ("8", "0"), ("8", "2"), ("8", "4"), ("8", "6"), ("10", ""), ("11", ""),
    ]  # fmt: skip
    for major, minor, line in lines:
        assert tuple(shlex.split(line)) == trtexec_arguments(RECIPE, (int(major), int(minor or 0))), line


def test_the_program_compiles(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    try:
        headers = fetched_headers()
    except MachineError as error:
        pytest.skip(str(error))
    (program,) = blocks("cpp")
    (tmp_path / "run_engine.cpp").write_text(program)
    (tmp_path / "cuda_runtime_api.h").write_text(STUBS)
    command = [
        compiler,
        "-std=c++17",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{tmp_path}",
        "-isystem",
        str(headers),
    ]
    done = subprocess.run([*command, "run_engine.cpp"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_python_parses() -> None:
    assert len(blocks("python")) == 2
    for code in blocks("python"):
        ast.parse(code)


def test_libraries_are_named_as_we_name_them() -> None:
    named = set(re.findall(r"libsparsedeploy_\w+\.so", TEXT))
    assert named == {*RECIPE.plugins.values(), plugin_file("rtx")}


def test_everything_the_plugin_is_built_from_is_installed() -> None:
    root = Path(__file__).parents[1]
    (line,) = re.findall(
        r'^"sparsedeploy\.plugins" = \[(.*)\]$', (root / "pyproject.toml").read_text("utf-8"), re.MULTILINE
    )
    patterns = re.findall(r'"([^"]+)"', line)
    shipped = {path for pattern in patterns for path in (root / "plugins").glob(pattern)}
    needed = {path for path in (root / "plugins" / "trt").rglob("*.*") if path.suffix != ".md"}
    assert needed - shipped == set()
