"""The target's folder and the Triton repository of a bundle, with a compiler that only notes what it was asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_models import network, saved

from sparsedeploy.bundle import check_hashes, read_manifest
from sparsedeploy.convert import Request, convert
from sparsedeploy.devices import find
from sparsedeploy.engines import target_folder
from sparsedeploy.engines.target_folder import majors_of, make_target_folder, make_triton_repository
from sparsedeploy.errors import InputError, MachineError

Asked = list[tuple[str, Path, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for an A100 with three sparse layers."""
    folder = tmp_path_factory.mktemp("made")
    convert(Request(saved(network(), folder), find("a100"), folder / "out", layers=("*=sparse",)))
    return folder / "out"


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "out"))


def headers_of(folder: Path, major: int) -> Path:
    """A folder that says it holds the headers of a version."""
    path = folder / f"h{major}"
    path.mkdir(exist_ok=True)
    text = "".join(f"#define NV_TENSORRT_{part} {n}\n" for part, n in (("MAJOR", major), ("MINOR", 1), ("PATCH", 0)))
    (path / "NvInferVersion.h").write_text(text)
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    """What the compiler was asked: (file name, headers, flavour, architecture)."""
    calls: Asked = []

    def compile_it(target: Path, headers: Path, flavour: str, arch: str) -> Path:
        calls.append((target.name, headers, flavour, arch))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"\x7fELF" + target.name.encode())
        return target

    monkeypatch.setattr(target_folder, "build_plugin", compile_it)
    monkeypatch.setattr(target_folder, "system_headers", lambda arch: None)
    monkeypatch.setattr(target_folder, "fetched_headers", lambda: headers_of(tmp_path, 10))
    return calls


def test_versions_of_a_target() -> None:
    assert majors_of("jetson-nano") == (8,)
    assert majors_of("a100") == (10, 11)
    assert majors_of("orin-nano") == (8, 10)


def test_a_library_for_every_version_with_headers(out: Path, asked: Asked, tmp_path: Path) -> None:
    eleven = headers_of(tmp_path, 11)
    done = make_target_folder(out, headers=[eleven])
    assert asked == [
        ("libsparsedeploy_trt10.so", tmp_path / "h10", "v3", "x86_64"),
        ("libsparsedeploy_trt11.so", eleven, "v3", "x86_64"),
    ]
    assert done.notes == ()
    assert "--dynamicPlugins=./libsparsedeploy_trt11.so" in (out / "a100" / "build.sh").read_text()
    assert check_hashes(out) == len(read_manifest(out).files)
    fewer = make_target_folder(out)
    assert fewer.libraries == {10: "libsparsedeploy_trt10.so"}
    assert "TensorRT 11 runs on a100 too" in fewer.notes[0]
    assert not (out / "a100" / "libsparsedeploy_trt11.so").exists(), "no library that build.sh does not use"
    check_hashes(out)


def test_a_dense_bundle_needs_no_library(tmp_path: Path, asked: Asked) -> None:
    out = tmp_path / "dense"
    convert(Request(saved(network(sparsity=0.0), tmp_path), find("a100"), out))
    done = make_target_folder(out)
    assert asked == []
    assert done.libraries == {}
    assert "--onnx=model.dense.onnx" in (out / "a100" / "build.sh").read_text()


def test_arm_devices_and_version_8(tmp_path: Path, asked: Asked) -> None:
    out = tmp_path / "orin"
    convert(Request(saved(network(), tmp_path), find("orin-nano"), out, layers=("*=sparse",)))
    make_target_folder(out, headers=[headers_of(tmp_path, 8)])
    assert [(name, flavour, arch) for name, _, flavour, arch in asked] == [
        ("libsparsedeploy_trt8.so", "v2", "aarch64"),
        ("libsparsedeploy_trt10.so", "v3", "aarch64"),
    ]


def test_no_library_at_all(out: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network() -> Path:
        raise MachineError("TensorRT's headers could not be fetched.")

    monkeypatch.setattr(target_folder, "fetched_headers", no_network)
    with pytest.raises(MachineError, match="could not be fetched") as caught:
        make_target_folder(out)
    assert "--tensorrt-include" in str(caught.value)
    assert not (out / "a100").exists()
    check_hashes(out)


def test_headers_that_are_none(out: Path, asked: Asked, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no NvInferVersion\.h"):
        make_target_folder(out, headers=[tmp_path])


def test_a_triton_repository(out: Path, asked: Asked, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="holds no plugin library"):
        make_triton_repository(out, tmp_path / "repo", "net")
    make_target_folder(out)
    written = make_triton_repository(out, tmp_path / "repo", "net", batch=(1, 2, 8))
    assert [path.name for path in written] == ["config.pbtxt", "libsparsedeploy_trt10.so", "start.sh"]
    assert "max_batch_size: 8" in written[0].read_text()
