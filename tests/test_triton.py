"""A Triton model repository: the config's text, the files, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from onnx import TensorProto
from small_models import network, saved

from sparsedeploy.engines.engine_build import Profile
from sparsedeploy.engines.engine_file import EngineRecord, record_path
from sparsedeploy.engines.triton import config_text, write_repository
from sparsedeploy.errors import InputError
from sparsedeploy.reading import file_hash

PROFILES = {"x": Profile(minimum=(1, 16, 8, 8), optimum=(4, 16, 8, 8), maximum=(16, 16, 8, 8))}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Input x [N, 16, 8, 8], output y [N, 10]."""
    return saved(network(), tmp_path)


def test_an_open_batch_is_tritons(model: Path) -> None:
    assert config_text("net", model, PROFILES).splitlines() == [
        'name: "net"',
        'platform: "tensorrt_plan"',
        "max_batch_size: 16",
        "input [",
        '  { name: "x" data_type: TYPE_FP32 dims: [ 16, 8, 8 ] }',
        "]",
        "output [",
        '  { name: "y" data_type: TYPE_FP32 dims: [ 10 ] }',
        "]",
    ]


def test_a_fixed_batch_is_part_of_the_shape(tmp_path: Path) -> None:
    fixed = network(TensorProto.FLOAT16)
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 2
    text = config_text("net", saved(fixed, tmp_path), {})
    assert "max_batch_size: 0" in text
    assert '{ name: "x" data_type: TYPE_FP16 dims: [ 2, 16, 8, 8 ] }' in text
    assert '{ name: "y" data_type: TYPE_FP16 dims: [ 2, 10 ] }' in text


def test_an_unknown_output_is_left_to_triton(tmp_path: Path) -> None:
    proto = network()
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    text = config_text("net", saved(proto, tmp_path), PROFILES)
    assert "output" not in text
    assert "max_batch_size: 0" in text


def test_a_type_that_tensorrt_has_not(tmp_path: Path) -> None:
    proto = network()
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    with pytest.raises(InputError, match="input 'x' has the type DOUBLE"):
        config_text("net", saved(proto, tmp_path), PROFILES)


def engine_of(folder: Path, backend: str) -> Path:
    """A file with the header of an engine, and its record."""
    magic = b"ftrt" if backend == "tensorrt" else b"vtrt"
    path = folder / f"model.{backend}.sm80.engine"
    path.write_bytes(magic + bytes(12) + (28).to_bytes(8, "little") + bytes(4))
    record = EngineRecord.from_json(
        json.dumps(
            {
                "schema": 1, "engine": path.name, "engine_bytes": 28, "engine_hash": file_hash(path), "backend": backend,
                "backend_version": "10.14.1.48", "loads_in": "", "target": "a100", "sm": 80, "which": "sparse",
                "precision": "fp32", "tf32": False, "inputs": {}, "outputs": {}, "profiles": {}, "workspace_mb": None,
                "sparse_layers": 0, "plugin_layers": [], "layer_types": {}, "plugin": None, "model_bytes": 0,
                "sources": {},
            }
        ),
        "test",
    )  # fmt: skip
    record_path(path).write_text(record.to_json())
    return path


def test_a_repository_with_engine_and_plugin(model: Path, tmp_path: Path) -> None:
    library = tmp_path / "lib10.so"
    library.write_bytes(b"\x7fELF")
    engine = engine_of(tmp_path, "tensorrt")
    written = write_repository(tmp_path / "repo", "net", model, PROFILES, engine=engine, plugin=library)
    names = {path.relative_to(tmp_path / "repo").as_posix() for path in written}
    assert names == {"net/config.pbtxt", "net/lib10.so", "net/1/model.plan", "net/start.sh"}
    assert (tmp_path / "repo/net/1/model.plan").read_bytes() == engine.read_bytes()


def test_starting_it(model: Path, tmp_path: Path) -> None:
    library = tmp_path / "lib10.so"
    library.write_bytes(b"\x7fELF")
    fake = tmp_path / "bin" / "tritonserver"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nfor word in "$@"; do echo "<$word>"; done\n')
    fake.chmod(0o755)
    write_repository(tmp_path / "re po", "net", model, PROFILES, plugin=library)
    command = [shutil.which("dash") or "sh", str(tmp_path / "re po/net/start.sh"), "--http-port=9000"]
    environment = {"PATH": f"{fake.parent}:/usr/bin:/bin"}
    first = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert first.returncode == 2
    assert "1/model.plan is missing" in first.stderr
    (tmp_path / "re po/net/1/model.plan").write_bytes(b"engine")
    second = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    root = tmp_path / "re po"
    assert second.stdout.splitlines() == [
        f"<--model-repository={root}>",
        f"<--backend-config=tensorrt,plugins={root}/net/lib10.so>",
        "<--http-port=9000>",
    ]


def test_an_rtx_engine_is_refused(model: Path, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "tensorrt_rtx")
    with pytest.raises(InputError, match="Triton's TensorRT backend cannot load"):
        write_repository(tmp_path / "repo", "net", model, PROFILES, engine=engine)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b"])
def test_names_that_are_no_folder(model: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot be a model's name"):
        write_repository(tmp_path / "repo", name, model, PROFILES)
