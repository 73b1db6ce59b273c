"""Engines from bundles, with a fake TensorRT in a real build process: settings, records, and every refusal in words."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import network, saved

from sparsedeploy import bundle
from sparsedeploy.bundle import check_hashes, read_manifest
from sparsedeploy.convert import Request as Conversion
from sparsedeploy.convert import convert
from sparsedeploy.devices import find
from sparsedeploy.engines import engine, engine_build, engine_file
from sparsedeploy.engines.engine import Build, build_engine, choose_backend, load_engine
from sparsedeploy.engines.engine_build import Profile, Request, profile_of
from sparsedeploy.engines.engine_file import EngineRecord, check_header, describe, load_check, record_path
from sparsedeploy.errors import CheckFailed, InputError, MachineError, SparseDeployError
from sparsedeploy.gpu import Gpu

FAKE = Path(__file__).parent / "fake_tensorrt"
LIBRARY = "libtensorrt_rtx.so.1"
RTX_ENGINE = "model.tensorrt_rtx.sm80.engine"
ELF = b"\x7fELF" + bytes(range(256)) * 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for an A100 with three executable sparse layers, one of them with a residual."""
    folder = tmp_path_factory.mktemp("made")
    model = saved(network(), folder)
    convert(Conversion(model, find("a100"), folder / "out", layers=("*=sparse",)))
    return folder / "out"


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "out"))


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A file that begins like a shared library: the fake loads anything."""
    path = tmp_path / "libsparse.so"
    path.write_bytes(ELF)
    return path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """The fake wheels before any real ones, here and in the build process; called with a fault, they fail so."""
    install_fakes(monkeypatch, tmp_path)
    return lambda fault: monkeypatch.setenv("FAKE_TRT", fault)


def install_fakes(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Copies, so that a test may damage them."""
    wheels = Path(shutil.copytree(FAKE, folder / "wheels"))
    (wheels / "tensorrt_rtx_libs" / LIBRARY).write_bytes(b"library")
    patch.syspath_prepend(str(wheels))
    patch.setenv("PYTHONPATH", str(wheels))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setenv("FAKE_TRT", "")
    patch.setattr(engine, "first_gpu", lambda: None)


def said(path: Path) -> dict[str, Any]:
    """What the fake builder was told."""
    decoded: dict[str, Any] = json.JSONDecoder().raw_decode(path.read_bytes()[28:].decode("latin-1"))[0]
    return decoded


def edited(out: Path, **changes: object) -> Path:
    """The bundle with fields of its manifest changed."""
    manifest = json.loads((out / bundle.MANIFEST).read_text())
    (out / bundle.MANIFEST).write_text(json.dumps({**manifest, **changes}))
    return out


def refusal(action: Callable[[], object], kind: type[SparseDeployError]) -> str:
    """The one paragraph that an action refuses with."""
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert "Traceback" not in text
    assert type(caught.value) is kind
    return text


# What a build leaves


def test_a_sparse_engine_its_record_and_the_manifest(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    record = build_engine(out, Build(plugin=plugin))
    assert record.engine == RTX_ENGINE
    assert record == EngineRecord.from_json((out / f"{RTX_ENGINE}.json").read_bytes(), "record")
    assert (record.backend, record.backend_version, record.sm, record.which) == (
        "tensorrt_rtx",
        "1.7.1.116",
        80,
        "sparse",
    )
    assert [layer.name for layer in record.plugin_layers] == ["c1", "c2", "c3"]
    assert record.sparse_layers == 3
    assert record.plugin_layers[0].inputs == ("[-1,16,8,8] Float (Linear) Row major linear format",)
    assert record.plugin is not None
    assert not record.plugin.embedded
    assert (out / "libsparse.so").read_bytes() == ELF
    assert record.engine_bytes == (out / RTX_ENGINE).stat().st_size
    assert set(record.sources) == {bundle.SPARSE_MODEL}
    assert {RTX_ENGINE, f"{RTX_ENGINE}.json", "libsparse.so"} <= set(read_manifest(out).files)
    check_hashes(out)
    assert load_check(out / RTX_ENGINE, backend="tensorrt_rtx", version="1.7.1.116", sm=80) == record


def test_what_reaches_the_builder(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    build_engine(out, Build(plugin=plugin, batch=(1, 4, 16), workspace_mb=64))
    told = said(out / RTX_ENGINE)
    assert told["flags"] == 1 << 1, "strongly typed: types are the graph's own"
    assert told["capabilities"] == ["SM80"]
    assert told["count"] == 1
    assert told["tf32"] is False
    assert told["workspace"] == 64 << 20
    assert told["profile"] == {"x": [[n, 16, 8, 8] for n in (1, 4, 16)]}


def test_the_soname_that_the_parser_opens_is_there(
    out: Path, plugin: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/mine")
    build_engine(out, Build(plugin=plugin))
    told = said(out / RTX_ENGINE)
    first, *others = told["library_path"].split(":")
    assert others == ["/opt/mine"]
    assert "libtensorrt_rtx.so" in told["folder"], "the build runs in the folder that LD_LIBRARY_PATH names first"
    assert not Path(first).exists(), "the folder goes when the build is done"


def test_dense_beside_sparse(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    build_engine(out, Build(plugin=plugin))
    dense = build_engine(out, Build(which="dense", tf32=True))
    assert said(out / dense.engine)["tf32"] is True
    assert dense.engine == "model.dense.tensorrt_rtx.sm80.engine"
    assert (dense.plugin_layers, dense.plugin, dense.sparse_layers) == ((), None, 0)
    assert "no plugin" in dense.loads_in
    assert (out / RTX_ENGINE).is_file()
    check_hashes(out)


def test_nothing_converted_builds_dense(tmp_path: Path, fake: Callable[[str], None]) -> None:
    convert(Conversion(saved(network(sparsity=0.0), tmp_path), find("a100"), tmp_path / "out"))
    assert build_engine(tmp_path / "out").which == "dense"


def test_an_embedded_plugin_is_inside(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    record = build_engine(out, Build(plugin=plugin, embed_plugin=True))
    assert record.plugin is not None
    assert record.plugin.embedded
    assert ELF in (out / RTX_ENGINE).read_bytes()
    assert not (out / "libsparse.so").exists()
    assert "engine_host_code_allowed" in record.loads_in
    load_check(out / RTX_ENGINE)


def test_an_embedded_plugin_that_is_not_inside(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    fake("drop_plugin")
    text = refusal(lambda: build_engine(out, Build(plugin=plugin, embed_plugin=True)), CheckFailed)
    assert "libsparse.so" in text
    assert not (out / RTX_ENGINE).exists()


def test_tensorrt_on_the_gpu_it_is_for(
    out: Path, plugin: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "first_gpu", lambda: Gpu("NVIDIA A100", 80, 108))
    cache = tmp_path / "cache" / "sparsedeploy" / "timing.tensorrt.sm80.NVIDIA-A100.10.14.1.48.cache"
    record = build_engine(out, Build(plugin=plugin))
    assert record.engine == "model.tensorrt.sm80.engine"
    assert said(out / record.engine)["capabilities"] == []
    assert check_header(out / record.engine) == "tensorrt"
    assert cache.read_bytes() == b"+timed"
    build_engine(out, Build(plugin=plugin))
    assert cache.read_bytes() == b"+timed+timed", "the cache is read again"
    cache.write_bytes(b"of another version")
    build_engine(out, Build(plugin=plugin))
    assert cache.read_bytes() == b"+timed", "a cache that TensorRT does not take is started anew"


def test_tensorrt_without_a_layer_table_is_inspected(
    out: Path, plugin: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "first_gpu", lambda: Gpu("A100", 80, 108))
    fake("no_table")
    record = build_engine(out, Build(plugin=plugin))
    assert [layer.name for layer in record.plugin_layers] == ["c1", "c2 [decorated]", "c3"]
    assert record.layer_types == {"PluginV3": 3, "gemm": 1}
    monkeypatch.setenv("FAKE_TRT_LAYERS", "2")
    text = refusal(lambda: build_engine(out, Build(plugin=plugin)), CheckFailed)
    assert "has 2 plugin layers, the model has 3" in text


def test_both_spellings_of_the_inspector() -> None:
    shape = [1, 16, 8, 8]
    old = {"Name": "x", "Dimensions": shape, "Format/Datatype": "Row major linear FP32"}
    new = {"Name": "x", "Dimensions": shape, "DataType": "Float", "Format": "Row major linear FP32 format (kLINEAR)"}
    for tensor, words in ((old, "Row major linear FP32"), (new, "Float Row major linear FP32 format (kLINEAR)")):
        layer = engine_build._inspected({"Name": "c1", "LayerType": "PluginV3", "Inputs": [tensor], "Outputs": []})
        assert layer.inputs == (f"{shape} {words}",)
        assert layer.is_plugin


def test_rtx_without_a_layer_table_is_no_success(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    fake("no_table")
    assert "has 0 plugin layers" in refusal(lambda: build_engine(out, Build(plugin=plugin)), CheckFailed)


def test_the_log_is_kept_where_asked(out: Path, plugin: Path, fake: Callable[[str], None], tmp_path: Path) -> None:
    build_engine(out, Build(plugin=plugin, log=tmp_path / "build.log"))
    assert "LayerType: custom_layer" in (tmp_path / "build.log").read_text()


def test_what_a_person_is_told(loadable: Path) -> None:
    text = "\n".join(describe(load_check(loadable)))
    assert "3 plugin layers" in text
    assert "x 1x16x8x8 : 4x16x8x8 : 16x16x8x8" in text
    assert "TensorRT-RTX 1.7.1.116 runtime only" in text
    assert "not TensorRT, trtexec, Triton" in text


# Builds that end badly


def test_an_abort_is_one_paragraph(out: Path, plugin: Path, fake: Callable[[str], None], tmp_path: Path) -> None:
    fake("abort")
    before = bundle.hashes(out)
    text = refusal(lambda: build_engine(out, Build(plugin=plugin, log=tmp_path / "build.log")), MachineError)
    assert "SIGABRT" in text
    assert "while reading model.sparse.onnx" in text
    assert "terminate called" in text
    assert bundle.hashes(out) == before
    assert (tmp_path / "build.log").is_file()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("lose_layer", CheckFailed, "2 plugin layers, the model has 3 sparse nodes; 'c1' is missing"),
        ("no_build", CheckFailed, "Could not find any implementation for node c9"),
        ("no_creator", MachineError, "no plugin SparseConv2d, version 1, namespace ''"),
        ("no_parse", InputError, "createPlugin returned null; SparseConv2d c1: its code is for sm_53"),
        ("old", MachineError, "1.6.1.120 is installed"),
    ],
)
def test_what_tensorrt_refuses(
    out: Path, plugin: Path, fake: Callable[[str], None], fault: str, kind: type[SparseDeployError], words: str
) -> None:
    fake(fault)
    before = bundle.hashes(out)
    text = refusal(lambda: build_engine(out, Build(plugin=plugin)), kind)
    assert words in text
    assert "cudaError" not in text, "a missing driver is no reason on a machine without a GPU"
    assert bundle.hashes(out) == before


def test_a_build_that_takes_too_long(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    fake("hang")
    assert "within 1 s" in refusal(lambda: build_engine(out, Build(plugin=plugin, timeout_s=1)), MachineError)


def test_the_plugin_is_compiled_where_none_is_given(
    out: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[object, ...]] = []

    def compile_it(target: Path, *how: object) -> Path:
        asked.append(how)
        target.write_bytes(ELF)
        return target

    monkeypatch.setattr(engine, "build_plugin", compile_it)
    monkeypatch.setattr(engine, "header_version", lambda headers: (int(headers.name), 1, 0))
    record = build_engine(out, Build(headers=(tmp_path / "11", tmp_path / "10")))
    assert asked == [(tmp_path / "10", "rtx", platform.machine())], "of several headers those that fit"
    assert record.plugin is not None
    assert record.plugin.file == "libsparsedeploy_rtx.so"
    assert (out / record.plugin.file).read_bytes() == ELF


def test_headers_of_another_tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "_installed_major", lambda: 11)
    monkeypatch.setattr(engine, "header_version", lambda headers: (10, 14, 1))
    text = refusal(lambda: engine.compile_plugin("tensorrt", tmp_path, tmp_path), MachineError)
    assert "TensorRT 11 is installed" in text
    assert "--tensorrt-include" in text


def test_the_plugins_own_words_come_first(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    fake("plugin_speaks")
    text = refusal(lambda: build_engine(out, Build(plugin=plugin)), InputError)
    assert text.startswith(
        "model.sparse.onnx: SparseConv2d c2: the residual that it adds is [1, 2], its output [3]. TensorRT-RTX"
    )


def test_a_plugin_that_is_not_there_or_is_none(out: Path, fake: Callable[[str], None], tmp_path: Path) -> None:
    absent = Build(plugin=tmp_path / "absent.so")
    assert "absent.so: no such plugin" in refusal(lambda: build_engine(out, absent), MachineError)
    text = Build(plugin=out / bundle.MANIFEST)
    assert "no shared library" in refusal(lambda: build_engine(out, text), MachineError)


def test_nodes_without_code(tmp_path: Path, plugin: Path, fake: Callable[[str], None], out: Path) -> None:
    model = out / bundle.SPARSE_MODEL
    strip_code(model)
    changed = refusal(lambda: build_engine(out, Build(plugin=plugin)), CheckFailed)
    assert "model.sparse.onnx was changed after conversion" in changed
    bundle.add_to_manifest(out, read_manifest(out), [model.name])
    text = refusal(lambda: build_engine(out, Build(plugin=plugin)), CheckFailed)
    assert "'c2' carries weights but no code" in text


def strip_code(model: Path) -> None:
    """Take plan and images from the node of c2."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    proto = onnx.load(model)
    (node,) = (node for node in proto.graph.node if node.name == "c2")
    for entry in node.attribute:
        if entry.name in ("launch_plan", "image_table"):
            entry.ints[:] = [0]
        if entry.name == "images":
            entry.t.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int8), "images"))
    onnx.save(proto, model)


def test_code_for_another_architecture(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    edited(out, sm=75, target="rtx-20")
    text = refusal(lambda: build_engine(out, Build(plugin=plugin)), CheckFailed)
    assert "'c1' carries code for sm_80, not for rtx-20 (sm_75)" in text


def test_nodes_of_another_abi(out: Path, plugin: Path, fake: Callable[[str], None]) -> None:
    edited(out, plugin_abi=99)
    assert "ABI 99" in refusal(lambda: build_engine(out, Build(plugin=plugin)), InputError)


def test_no_bundle(tmp_path: Path, fake: Callable[[str], None]) -> None:
    assert "no bundle here" in refusal(lambda: build_engine(tmp_path), InputError)


# Back ends


@pytest.mark.parametrize(("sm", "target"), [(53, "jetson-nano"), (87, "orin-nano"), (90, "h200")])
def test_targets_that_rtx_does_not_build_for(out: Path, fake: Callable[[str], None], sm: int, target: str) -> None:
    edited(out, sm=sm, target=target)
    for asked in (None, "tensorrt_rtx"):
        text = refusal(lambda asked=asked: build_engine(out, Build(backend=asked)), MachineError)  # type: ignore[misc]
        assert f"compute capability {sm // 10}.{sm % 10}" in text
        assert ("no kit that was tried there yet" if sm == 53 else f"copy {target}/ there and run its build.sh") in text


def test_no_wheel(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_installed", lambda module: False)
    text = refusal(lambda: build_engine(out), MachineError)
    assert "pip install tensorrt-rtx-cu13-bindings==1.7.1.116 tensorrt-rtx-cu13-libs==1.7.1.116" in text
    assert "pip install 'tensorrt>=10.3'" in text


def test_bindings_without_their_libraries(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_installed", lambda module: module != "tensorrt_rtx_libs")
    assert "tensorrt-rtx-cu13-libs" in refusal(lambda: build_engine(out, Build(backend="tensorrt_rtx")), MachineError)


def test_an_incomplete_wheel(out: Path, plugin: Path, fake: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "wheels" / "tensorrt_rtx_libs" / LIBRARY).unlink()
    assert "incomplete" in refusal(lambda: build_engine(out, Build(plugin=plugin)), MachineError)


def test_the_hint_names_the_version_that_pyproject_pins() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
    for part in ("bindings", "libs"):
        assert f"tensorrt-rtx-cu13-{part}=={engine_build.RTX_WHEEL};" in text


def test_tensorrt_without_its_gpu(out: Path, fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(out)
    assert "this machine has none" in refusal(lambda: choose_backend("tensorrt", manifest), MachineError)
    monkeypatch.setattr(engine, "first_gpu", lambda: Gpu("H200", 90, 132))
    text = refusal(lambda: choose_backend("tensorrt", manifest), MachineError)
    assert "here H200, compute capability 9.0; a100 has 8.0" in text
    assert choose_backend(None, manifest) == "tensorrt_rtx"
    monkeypatch.setattr(engine, "first_gpu", lambda: Gpu("A100", 80, 108))
    assert choose_backend(None, manifest) == "tensorrt"


# Profiles


def request_for(batch: tuple[int, int, int] = (1, 2, 4), **changes: object) -> Request:
    fields: dict[str, Any] = {"inputs": {"x": (2, 3, 32, 48)}, **changes}
    return Request(
        backend="tensorrt_rtx", model="m.onnx", engine="e", log="l", sm=80, tf32=False, batch=batch, **fields
    )


def test_open_dimensions_get_sizes() -> None:
    profile = profile_of("x", (-1, 3, -1, 48), request_for())
    assert profile == Profile(minimum=(1, 3, 32, 48), optimum=(2, 3, 32, 48), maximum=(4, 3, 32, 48))
    assert profile_of("x", (2, 3, 32, 48), request_for()) is None
    given = Profile(minimum=(1, 3, 16, 48), optimum=(2, 3, 32, 48), maximum=(4, 3, 64, 48))
    assert profile_of("x", (-1, 3, -1, 48), request_for(profiles={"x": given})) == given


@pytest.mark.parametrize(
    ("shape", "changes", "words"),
    [
        ((1, 3, 32, 48), {"batch": (2, 2, 4)}, "fixed at 1x3x32x48, asked for was a batch of 2 to 4"),
        ((-1, 3, 32, 48), {"batch": (4, 2, 1)}, "smallest over usual to largest"),
        ((-1, 3, 32, 48), {"batch": (0, 2, 4)}, "at least 1"),
        ((-1, 7), {}, "manifest gives 2x3x32x48"),
        ((-1, 3, 32, 48), {"inputs": {}}, "no shape"),
    ],
)
def test_sizes_that_do_not_fit(shape: tuple[int, ...], changes: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: profile_of("x", shape, request_for(**changes)), InputError)


# Loading


@pytest.fixture(scope="module")
def built(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with its engine."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "libsparse.so").write_bytes(ELF)
    with pytest.MonkeyPatch.context() as patch:
        install_fakes(patch, folder)
        out = Path(shutil.copytree(made, folder / "out"))
        build_engine(out, Build(plugin=folder / "libsparse.so", batch=(1, 4, 16)))
    return out


@pytest.fixture
def loadable(built: Path, tmp_path: Path) -> Path:
    """An engine with its record and plugin that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "copy")) / RTX_ENGINE


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"sm": 86}, "built for compute capability 8.0 (a100), this GPU has 8.6"),
        ({"sm": 90}, "this GPU has 9.0"),
        ({"version": "1.8.0.1"}, "built by TensorRT-RTX 1.7.1.116, installed is 1.8.0.1"),
        ({"backend": "tensorrt"}, "cannot be loaded by TensorRT"),
    ],
)
def test_engines_for_something_else(loadable: Path, asked: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: load_check(loadable, **asked), InputError)


def test_a_truncated_engine(loadable: Path) -> None:
    whole = loadable.read_bytes()
    for size in (0, 3, 20, 28, len(whole) // 2, len(whole) - 1):
        loadable.write_bytes(whole[:size])
        text = refusal(lambda: load_check(loadable), InputError)
        assert ("truncated" if size >= 28 else "no engine") in text


def test_an_engine_with_a_changed_byte(loadable: Path) -> None:
    data = bytearray(loadable.read_bytes())
    data[-1] ^= 1
    loadable.write_bytes(data)
    assert "another SHA-256" in refusal(lambda: load_check(loadable), InputError)


def test_an_engine_without_its_record(loadable: Path) -> None:
    record_path(loadable).unlink()
    assert "cannot be read" in refusal(lambda: load_check(loadable), InputError)
    record_path(loadable).write_text("{}")
    said = refusal(lambda: load_check(loadable), InputError)
    assert "Field required" in said
    assert "that `build` leaves beside an engine" in said


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: load_check(tmp_path / "none.engine"), InputError)


def test_an_engine_of_another_abi(loadable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_file, "ABI_VERSION", 2)
    assert "plugin ABI 1" in refusal(lambda: load_check(loadable), InputError)


def test_a_plugin_that_is_missing_or_another(loadable: Path, tmp_path: Path) -> None:
    assert "is not there" in refusal(lambda: load_check(loadable, plugin=tmp_path / "no.so"), MachineError)
    other = tmp_path / "other.so"
    other.write_bytes(ELF + b"x")
    assert "another SHA-256" in refusal(lambda: load_check(loadable, plugin=other), MachineError)
    (loadable.parent / "libsparse.so").unlink()
    assert "libsparse.so" in refusal(lambda: load_check(loadable), MachineError)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Fake wheels in this process too; called, the machine's GPU has that compute capability."""
    install_fakes(monkeypatch, tmp_path)
    for name in ("fake_trt", "tensorrt_rtx_bindings", "tensorrt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return lambda sm: monkeypatch.setattr(engine, "first_gpu", lambda: Gpu("some GPU", sm, 100))


def test_loading(loadable: Path, gpu: Callable[[int], None]) -> None:
    gpu(80)
    loaded = load_engine(loadable)
    assert loaded.record.sparse_layers == 3
    libraries = loaded.runtime.get_plugin_registry().libraries
    assert libraries == [str((loadable.parent / "libsparse.so").resolve())]


def test_loading_what_cannot_be_loaded(
    loadable: Path, gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "shows none" in refusal(lambda: load_engine(loadable), MachineError)
    gpu(90)
    assert "this GPU has 9.0" in refusal(lambda: load_engine(loadable), InputError)
    gpu(80)
    monkeypatch.setenv("FAKE_TRT", "old")
    assert "installed is 1.6.1.120" in refusal(lambda: load_engine(loadable), InputError)


def test_loading_that_tensorrt_refuses(
    loadable: Path, gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(80)
    monkeypatch.setenv("FAKE_TRT", "no_load")
    assert "refused it: The engine cannot run on this GPU" in refusal(lambda: load_engine(loadable), MachineError)
