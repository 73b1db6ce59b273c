"""Compiling the test programs of trt_host/, and a node's fields as the file that they read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sparsedeploy.plugins.node import FieldValue, SparseConv

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "trt"
HOST = Path(__file__).resolve().parent / "trt_host"
STRICT = ("-Wall", "-Wextra", "-Wshadow", "-Werror", "-Wno-deprecated-declarations")


def compile_native(out: Path, sources: list[Path], *flags: str) -> Path:
    """Compile C++14; skips the test when this machine has no compiler, fails it when the code does not compile."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++) on this machine")
    command = [compiler, "-std=c++14", "-O0", *STRICT, f"-I{HOST}", f"-I{PLUGIN}", *map(str, sources), "-o", str(out)]
    result = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return out


def write_fields(path: Path, fields: dict[str, FieldValue], wide: bool = False, text_end: bytes = b"") -> Path:
    """A node's fields for the test programs; `wide` passes INT64, `text_end` is added to text as some parsers do."""
    lines = []
    for name, value in fields.items():
        if name.startswith("plugin_"):
            continue
        if isinstance(value, str):
            lines.append(f"{name} c {(value.encode() + text_end).hex()}")
        elif isinstance(value, np.ndarray):
            lines.append(f"{name} b {value.tobytes().hex()}")
        else:
            ints = np.array([value] if isinstance(value, int) else value, np.int64 if wide else np.int32)
            lines.append(f"{name} {'l' if wide else 'i'} {ints.tobytes().hex()}")
    path.write_text("\n".join(lines) + "\n")
    return path


def node_file(path: Path, node: SparseConv, wide: bool = False, text_end: bytes = b"") -> Path:
    """`write_fields` of a node."""
    return write_fields(path, node.fields(), wide, text_end)
