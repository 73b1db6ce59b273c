"""Running a loaded engine, both back ends as fakes: bindings, shapes, addresses, stream, and every refusal in words."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import network, saved
from test_engine import ELF, install_fakes, refusal

from sparsedeploy.convert import Request, convert
from sparsedeploy.devices import find
from sparsedeploy.engines import engine
from sparsedeploy.engines.engine import Backend, Build, build_engine, load_engine
from sparsedeploy.engines.engine_build import Profile, Tensor
from sparsedeploy.engines.engine_run import LoadedEngine, numpy_name
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.gpu import Gpu

X, Y = 0x7F0000000000, 0x7F0000010000


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The small network as an engine of either back end, batches 1 to 16, the plugin beside it."""
    folder = tmp_path_factory.mktemp("engines")
    convert(Request(saved(network(), folder), find("a100"), folder / "out", layers=("*=sparse",)))
    (folder / "libsparse.so").write_bytes(ELF)
    with pytest.MonkeyPatch.context() as patch:
        install_fakes(patch, folder)
        patch.setattr(engine, "first_gpu", lambda: Gpu("A100", 80, 108))
        backends: tuple[Backend, ...] = ("tensorrt", "tensorrt_rtx")
        options = [Build(backend, plugin=folder / "libsparse.so", batch=(1, 4, 16)) for backend in backends]
        made = [build_engine(folder / "out", option).engine for option in options]
    return {backend: folder / "out" / name for backend, name in zip(backends, made, strict=True)}


@pytest.fixture(autouse=True)
def fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Fake wheels in this process, an A100; called, their next import fails in that way."""
    install_fakes(monkeypatch, tmp_path)
    for name in ("fake_trt", "tensorrt_rtx_bindings", "tensorrt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(engine, "first_gpu", lambda: Gpu("A100", 80, 108))
    monkeypatch.setattr(engine, "_libraries", {})
    return lambda kind: monkeypatch.setenv("FAKE_TRT", kind)


@pytest.fixture(params=["tensorrt", "tensorrt_rtx"])
def loaded(engines: dict[str, Path], request: pytest.FixtureRequest) -> LoadedEngine:
    return load_engine(engines[request.param])


def test_bindings(loaded: LoadedEngine) -> None:
    assert loaded.inputs == {"x": Tensor(dtype="fp32", shape=(-1, 16, 8, 8))}
    assert list(loaded.outputs) == ["y"]
    assert loaded.profiles == {
        "x": Profile(minimum=(1, 16, 8, 8), optimum=(4, 16, 8, 8), maximum=(16, 16, 8, 8)),
    }
    assert (
        loaded.title
        == {"tensorrt": "TensorRT 10.14.1.48", "tensorrt_rtx": "TensorRT-RTX 1.7.1.116"}[loaded.record.backend]
    )


def test_a_run_reaches_tensorrt(loaded: LoadedEngine) -> None:
    context = loaded.context()
    shapes = context.set_shapes({"x": (8, 16, 8, 8)})
    assert shapes == {"y": (8, *loaded.outputs["y"].shape[1:])}
    context.set_address("x", X)
    context.set_address("y", Y)
    context.enqueue(77)
    fake: Any = importlib.import_module("fake_trt")
    assert [{"stream": 77, "tensors": {"x": (X, (8, 16, 8, 8)), "y": (Y, shapes["y"])}}] == fake.CALLS
    context.close()
    loaded.close()
    assert loaded.engine is None


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"x": (17, 16, 8, 8)}, "input 'x' is 17x16x8x8, the engine was built for 1x16x8x8 to 16x16x8x8"),
        ({"x": (0, 16, 8, 8)}, "input 'x' is 0x16x8x8"),
        ({"x": (1, 16, 8, 9)}, "input 'x' is 1x16x8x9"),
        ({"x": (1, 16, 8)}, "input 'x' is 1x16x8,"),
        ({"z": (1, 16, 8, 8)}, "was given the inputs 'z', needed are 'x'"),
        ({}, "was given the inputs none, needed are 'x'"),
    ],
)
def test_shapes_that_the_engine_does_not_take(loaded: LoadedEngine, shapes: Any, words: str) -> None:
    assert words in refusal(lambda: loaded.context().set_shapes(shapes), InputError)


def test_addresses(loaded: LoadedEngine) -> None:
    context = loaded.context()
    context.set_shapes({"x": (1, 16, 8, 8)})
    assert "has no tensor 'z'" in refusal(lambda: context.set_address("z", X), InputError)
    assert "address is not aligned" in refusal(lambda: context.set_address("x", X + 4), MachineError)
    context.set_address("x", X)
    assert "Address is not set" in refusal(lambda: context.enqueue(1), MachineError)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt_rtx"])
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("no_context", MachineError, "cannot make an execution context: Requested size was 17 bytes, out of memory."),
        ("no_shape", InputError, "refuses input 'x' at 1x16x8x8: Static dimension mismatch."),
        ("no_run", MachineError, "could not run it: Address is not set for output tensor y."),
    ],
)
def test_what_tensorrt_refuses(
    engines: dict[str, Path], fault: Callable[[str], None], backend: str, kind: str, error: Any, words: str
) -> None:
    fault(kind)
    loaded = load_engine(engines[backend])

    def run() -> None:
        context = loaded.context()
        context.set_shapes({"x": (1, 16, 8, 8)})
        context.enqueue(1)

    assert words in refusal(run, error)


def test_one_library_a_process(engines: dict[str, Path], tmp_path: Path) -> None:
    first = load_engine(engines["tensorrt"])
    again = load_engine(engines["tensorrt"])
    assert again.runtime.get_plugin_registry().libraries == [str(engines["tensorrt"].with_name("libsparse.so"))]
    engine._libraries[first.title] = "another build's hash"
    text = refusal(lambda: load_engine(engines["tensorrt"]), MachineError)
    assert "another build of the plugin is loaded in this process already" in text


def test_a_library_without_the_plugin(engines: dict[str, Path], fault: Callable[[str], None]) -> None:
    fault("no_creator")
    assert "finds no plugin SparseConv2d in it" in refusal(lambda: load_engine(engines["tensorrt"]), MachineError)


def test_an_engine_with_the_plugin_inside(engines: dict[str, Path], tmp_path: Path) -> None:
    out = Path(shutil.copytree(engines["tensorrt"].parent, tmp_path / "out"))
    record = build_engine(out, Build("tensorrt_rtx", plugin=out / "libsparse.so", embed_plugin=True))
    (out / "libsparse.so").unlink()
    loaded = load_engine(out / record.engine)
    assert loaded.runtime.engine_host_code_allowed
    assert loaded.runtime.get_plugin_registry().libraries == []
    assert loaded.profiles["x"].maximum == (1, 16, 8, 8)


REAL = {
    "Builder": "Builder",
    "Config": "IBuilderConfig",
    "Context": "IExecutionContext",
    "Creator": "IPluginCreatorV3One",
    "Engine": "ICudaEngine",
    "ILogger": "ILogger",
    "Inspector": "EngineInspector",
    "Network": "INetworkDefinition",
    "OnnxParser": "OnnxParser",
    "ParserError": "ParserError",
    "Profile": "IOptimizationProfile",
    "Registry": "IPluginRegistry",
    "Runtime": "Runtime",
    "Tensor": "ITensor",
    "TimingCache": "ITimingCache",
    "TensorIOMode": "TensorIOMode",
}
"""Classes of the fake, and what they stand for."""
LEAN = ("Context", "Engine", "Registry", "Runtime", "TensorIOMode")
"""What runs engines: TensorRT's lean runtime has these alone."""


@pytest.mark.rtx
@pytest.mark.parametrize("module", ["tensorrt", "tensorrt_rtx_bindings", "tensorrt_lean_bindings"])
def test_the_fake_has_no_call_that_the_real_one_lacks(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = importlib.import_module("fake_trt")
    for name in ("tensorrt", "tensorrt_rtx_bindings"):  # the real ones, if any, from here on
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "fake_trt.py").is_file()])
    real = pytest.importorskip(module, exc_type=ImportError)
    pairs = {ours: theirs for ours, theirs in REAL.items() if ours in LEAN or "lean" not in module}
    for ours, theirs in pairs.items():
        faked = {name for name in vars(getattr(fake, ours)) if not name.startswith("_")} - {
            "libraries",
            "graph",
            "flags",
        }
        lacking = sorted(name for name in faked if not hasattr(getattr(real, theirs), name))
        assert lacking == [], f"{module}.{theirs}"


def test_names_of_types() -> None:
    assert [numpy_name(name) for name in ("fp32", "fp16", "int32", "bool")] == ["float32", "float16", "int32", "bool"]
    assert "fp8" in refusal(lambda: numpy_name("fp8"), InputError)
