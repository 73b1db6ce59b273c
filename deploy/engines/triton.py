"""A model repository for the Triton server: config.pbtxt, the engine in its version folder, and how to start."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

from sparsedeploy.engines.engine_build import Profile
from sparsedeploy.engines.engine_file import load_check
from sparsedeploy.engines.trtexec import graph_shapes
from sparsedeploy.errors import InputError

PLAN = "model.plan"
START = "start.sh"
_TYPES = {
    TensorProto.FLOAT: "TYPE_FP32",
    TensorProto.FLOAT16: "TYPE_FP16",
    TensorProto.INT8: "TYPE_INT8",
    TensorProto.UINT8: "TYPE_UINT8",
    TensorProto.INT32: "TYPE_INT32",
    TensorProto.INT64: "TYPE_INT64",
    TensorProto.BOOL: "TYPE_BOOL",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def write_repository(
    root: Path,
    name: str,
    model: Path,
    profiles: Mapping[str, Profile],
    *,
    engine: Path | None = None,
    plugin: Path | None = None,
) -> tuple[Path, ...]:
    """Write `root/name/config.pbtxt`, `root/name/1/` and `root/name/start.sh`; returns the files written.

    model is the ONNX file that the engine is built from: Triton's ports are its inputs and outputs. Without an engine the
    version folder stays empty and start.sh says what belongs there. Raises InputError for a TensorRT-RTX engine, which
    Triton cannot load, and for a name that is no folder name.
    """
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InputError(
            f"--triton: '{name}' cannot be a model's name. Use letters, digits, dots, dashes and underscores."
        )
    if engine is not None:
        _check_engine(engine)
    folder = root / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    config = folder / "config.pbtxt"
    config.write_text(config_text(name, model, profiles), "utf-8")
    written = [config]
    if plugin is not None:
        shutil.copyfile(plugin, folder / plugin.name)
        written.append(folder / plugin.name)
    if engine is not None:
        shutil.copyfile(engine, folder / "1" / PLAN)
        written.append(folder / "1" / PLAN)
    start = folder / START
    start.write_text(_start_text(plugin.name if plugin else None), "utf-8")
    start.chmod(0o755)
    return (*written, start)


def _check_engine(engine: Path) -> None:
    record = load_check(engine)
    if record.backend != "tensorrt":
        raise InputError(
            f"{engine}: is an engine of TensorRT-RTX, which Triton's TensorRT backend cannot load. Build one on the device with "
            f"the bundle's {record.target}/build.sh and put it into the repository as 1/{PLAN}."
        )


def config_text(name: str, model: Path, profiles: Mapping[str, Profile]) -> str:
    """config.pbtxt. Triton batches over the first dimension where every input and output leaves it open."""
    inputs, outputs = graph_shapes(model)
    shapes = [*inputs.values(), *outputs.values()]
    batched = bool(profiles) and all(shape is not None and shape[:1] == (-1,) for shape in shapes)
    largest = min(profile.maximum[0] for profile in profiles.values()) if batched else 0
    lines = [f"name: {json.dumps(name)}", 'platform: "tensorrt_plan"', f"max_batch_size: {largest}"]
    types = _types(model)
    if all(shape is not None for shape in shapes):  # else Triton reads the ports from the engine
        lines += _ports("input", inputs, types, profiles, batched)
        lines += _ports("output", {key: shape or () for key, shape in outputs.items()}, types, {}, batched)
    return "\n".join(lines) + "\n"


def _types(model: Path) -> dict[str, int]:
    graph = onnx.load(model, load_external_data=False).graph
    return {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}


def _ports(
    kind: str,
    shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, int],
    profiles: Mapping[str, Profile],
    batched: bool,
) -> list[str]:
    blocks = []
    for name, shape in shapes.items():
        fixed = _fix(shape, profiles.get(name))
        dims = fixed[1:] if batched else fixed
        if types[name] not in _TYPES:
            raise InputError(
                f"{kind} '{name}' has the type {TensorProto.DataType.Name(types[name])}, which a TensorRT engine does not take. "
                "Export the model with fp32 inputs and outputs."
            )
        blocks.append(
            f"  {{ name: {json.dumps(name)} data_type: {_TYPES[types[name]]} dims: [ {', '.join(map(str, dims))} ] }}"
        )
    return [f"{kind} [", ",\n".join(blocks), "]"]


def _fix(shape: tuple[int, ...], profile: Profile | None) -> tuple[int, ...]:
    """Dimensions that the profile leaves one size are that size."""
    if profile is None:
        return shape
    pairs = zip(shape, profile.minimum, profile.maximum, strict=True)
    return tuple(low if size == -1 and low == high else size for size, low, high in pairs)


def _start_text(plugin: str | None) -> str:
    """Both ways of loading the library are documented; the backend's own option needs no LD_PRELOAD for the whole server."""
    option = f' \\\n    --backend-config=tensorrt,plugins="$here/{plugin}"' if plugin else ""
    return f"""#!/bin/sh
# Starts Triton with this repository. The engine must be built by the TensorRT that this Triton release holds.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ ! -s "$here/1/{PLAN}" ]; then
    echo "{START}: $here/1/{PLAN} is missing. Build the engine on this machine with the bundle's build.sh and copy it there." >&2
    exit 2
fi
exec tritonserver --model-repository="$(dirname "$here")"{option} "$@"
"""
