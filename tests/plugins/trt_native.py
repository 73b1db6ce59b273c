"""Compiling the test programs of trt_host/, and a node's fields as the file that they read."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sparsedeploy.plugins.assemble import cache_dir
from sparsedeploy.plugins.node import FieldValue, SparseConv

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "trt"
HOST = Path(__file__).resolve().parent / "trt_host"
STRICT = ("-Wall", "-Wextra", "-Wshadow", "-Werror", "-Wno-deprecated-declarations")


def compile_native(name: str, sources: list[Path], *flags: str, hashed: tuple[Path, ...] = ()) -> Path:
    """Compile C++14 to a file `name`, once per content (`hashed` are headers given by flags).

    Skips the test when this machine has no compiler, fails it when the code does not compile.
    """
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++) on this machine")
    command = [compiler, "-std=c++14", "-O0", *STRICT, *flags, f"-I{HOST}", f"-I{PLUGIN}", *map(str, sources)]
    digest = hashlib.sha256("\0".join(command).encode())
    for path in (*sources, *sorted(HOST.glob("*.h")), *sorted(PLUGIN.glob("*.h")), *hashed):
        digest.update(path.read_bytes())
    out = cache_dir() / "test-programs" / digest.hexdigest()[:32] / name
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        made = out.with_suffix(f".{os.getpid()}")
        libraries = ["-ldl", "-lpthread"]
        result = subprocess.run([*command, "-o", str(made), *libraries], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        made.replace(out)
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
