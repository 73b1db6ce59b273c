"""Every shape of plugin node through the real parser and builder of TensorRT-RTX, on the CPU, with the real plugin."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from small_models import network, saved

from sparsedeploy.bundle import MANIFEST, SPARSE_MODEL, add_to_manifest, check_hashes, read_manifest
from sparsedeploy.convert import Request, convert
from sparsedeploy.converters.load import load, save
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.devices import DEVICES, Device, find
from sparsedeploy.engines import engine
from sparsedeploy.engines.engine import RTX_SMS, Build, build_engine, compile_plugin, load_check
from sparsedeploy.engines.engine_file import Which
from sparsedeploy.errors import CheckFailed, InputError, MachineError, SparseDeployError
from sparsedeploy.layer import Precision
from sparsedeploy.models.sparsity import pruned
from sparsedeploy.plugins import KERNELS
from sparsedeploy.plugins.node import OP_TYPE
from sparsedeploy.plugins.plugin_build import build_plugin, fetched_headers

pytestmark = [
    pytest.mark.rtx,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="needs the TensorRT-RTX wheels (.[rtx])"
    ),
]

OLDEST = "rtx-20"
"""PTX for it runs on every later GPU, so one conversion serves all of them."""
TARGETS = [device for device in DEVICES if device.sm in RTX_SMS]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin, compiled here."""
    try:
        return compile_plugin("tensorrt_rtx", tmp_path_factory.mktemp("plugin"))
    except MachineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def resnets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Precision], Path]:
    """Bundles of pruned ResNets, every eligible layer sparse, the kernels taking turns; each made once."""
    folder = tmp_path_factory.mktemp("resnets")
    kernels = [kernel.name for kernel in KERNELS]

    def bundle_of(name: str, precision: Precision) -> Path:
        out = folder / f"{name}-{precision}"
        if not out.exists():
            model = saved(pruned(name, 0.9, image_size=32, num_classes=10), folder, f"{name}.onnx")
            turns = tuple(f"layer{i}*={kernels[i % len(kernels)]}" for i in range(1, 5))
            convert(Request(model, find(OLDEST), out, precision, layers=("*=sparse", *turns)))
        return out

    return bundle_of


@pytest.fixture
def small(small_bundle: Path, tmp_path: Path) -> Path:
    """A bundle of a residual block for an A100 that a test may change."""
    return Path(shutil.copytree(small_bundle, tmp_path / "out"))


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    convert(Request(saved(network(), folder), find("a100"), folder / "out", layers=("*=sparse",)))
    return folder / "out"


def aimed_at(source: Path, target: Path, device: Device) -> Path:
    """A copy of a bundle for another GPU."""
    out = Path(shutil.copytree(source, target))
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps({**manifest, "sm": device.sm, "target": device.name}))
    return out


def refusal(action: Callable[[], object], kind: type[SparseDeployError]) -> str:
    """The one paragraph that an action refuses with."""
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert type(caught.value) is kind
    return text


# Whole networks


@pytest.mark.parametrize("device", TARGETS, ids=lambda device: f"sm{device.sm}-{device.name}")
def test_resnet18_for_every_architecture(
    device: Device, resnets: Callable[[str, Precision], Path], plugin: Path, tmp_path: Path
) -> None:
    # TensorRT-RTX has no fp32 matrix product for Turing, which the classifier needs.
    precision: Precision = "fp16" if device.sm == 75 else "fp32"
    out = aimed_at(resnets("resnet18", precision), tmp_path / "out", device)
    record = build_engine(out, Build(plugin=plugin, batch=(1, 8, 32)))
    nodes = read_nodes(load(out / SPARSE_MODEL)).values()
    assert Counter(layer.name for layer in record.plugin_layers) == Counter(node.layer for node in nodes)
    assert {node.kernel for node in nodes} == {kernel.name for kernel in KERNELS}, "different kernels in one network"
    residuals = {node.layer for node in nodes if node.has_residual}
    assert len(residuals) == 8
    assert {layer.name for layer in record.plugin_layers if len(layer.inputs) == 2} == residuals
    assert record.profiles["input"].maximum == (32, 3, 32, 32)
    check_hashes(out)
    load_check(out / record.engine, backend="tensorrt_rtx", sm=device.sm)


def test_fp16_stays_fp16(resnets: Callable[[str, Precision], Path], plugin: Path, tmp_path: Path) -> None:
    out = aimed_at(resnets("resnet18", "fp16"), tmp_path / "out", find("a100"))
    record = build_engine(out, Build(plugin=plugin))
    # A plugin's workspace is listed as an output too: bytes in one dimension.
    listed = [tensor for layer in record.plugin_layers for tensor in (*layer.inputs, *layer.outputs)]
    tensors = [tensor for tensor in listed if not re.fullmatch(r"\[\d+\] UInt8 .*", tensor)]
    assert len(tensors) > 2 * 19
    assert {tensor.split()[1] for tensor in tensors} == {"Half"}
    assert all("(Linear)" in tensor for tensor in tensors)


def test_sparse_engines_are_smaller(resnets: Callable[[str, Precision], Path], plugin: Path, tmp_path: Path) -> None:
    out = aimed_at(resnets("resnet18", "fp32"), tmp_path / "out", find("a100"))
    sparse, dense = build_engine(out, Build(plugin=plugin)), build_engine(out, Build(which="dense"))
    assert (dense.plugin_layers, dense.layer_types.get("custom_layer", 0)) == ((), 0)
    # 10 % of the weights in 8 bytes (index and value) or 4 (packed), plus the kernels' code.
    assert sparse.engine_bytes < 0.35 * dense.engine_bytes
    assert dense.engine_bytes > 0.9 * dense.model_bytes


@pytest.mark.slow
def test_resnet50(resnets: Callable[[str, Precision], Path], plugin: Path, tmp_path: Path) -> None:
    out = aimed_at(resnets("resnet50", "fp32"), tmp_path / "out", find("a100"))
    record = build_engine(out, Build(plugin=plugin, batch=(1, 1, 4)))
    assert len(record.plugin_layers) == len(read_nodes(load(out / SPARSE_MODEL))) == 53


# One block


def test_the_library_inside_the_engine(small: Path, plugin: Path) -> None:
    alone = build_engine(small, Build(plugin=plugin))
    assert plugin.read_bytes() not in (small / alone.engine).read_bytes()
    record = build_engine(small, Build(plugin=plugin, embed_plugin=True))
    assert plugin.read_bytes() in (small / record.engine).read_bytes()
    assert record.engine_bytes - alone.engine_bytes >= plugin.stat().st_size
    assert record.plugin is not None
    assert record.plugin.embedded


def test_a_second_build_leaves_the_same_bytes(small: Path, plugin: Path) -> None:
    build_engine(small, Build(plugin=plugin))
    first = {path.name: path.read_bytes() for path in small.iterdir()}
    record = build_engine(small, Build(plugin=plugin))
    assert {path.name: path.read_bytes() for path in small.iterdir()} == first
    assert record.engine in first


def test_the_real_registry_takes_the_library_once(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What load_engine does before it reads an engine: TensorRT-RTX itself refuses a library that it has already."""
    registry = importlib.import_module("tensorrt_rtx_bindings").get_plugin_registry()
    monkeypatch.setattr(engine, "_libraries", {})
    for _ in range(2):
        engine._load_library(registry, plugin, "its hash", "TensorRT-RTX", [])
    assert [creator.name for creator in registry.all_creators].count(OP_TYPE) == 1
    text = refusal(lambda: engine._load_library(registry, plugin, "another", "TensorRT-RTX", []), MachineError)
    assert "another build of the plugin is loaded in this process already" in text


def test_the_header_says_what_the_record_says(small: Path, plugin: Path) -> None:
    record = build_engine(small, Build(plugin=plugin))
    header = (small / record.engine).read_bytes()[:28]
    assert header[:4] == b"vtrt"
    assert int.from_bytes(header[16:24], "little") == record.engine_bytes
    assert ".".join(map(str, (header[24], header[25], header[26], header[27]))) == record.backend_version


def test_a_fixed_batch_needs_no_profile(tmp_path: Path, plugin: Path) -> None:
    model = network()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 2
    convert(Request(saved(model, tmp_path), find("a100"), tmp_path / "out", layers=("*=sparse",)))
    record = build_engine(tmp_path / "out", Build(plugin=plugin))
    assert record.profiles == {}
    assert record.inputs["x"].shape == (2, 16, 8, 8)
    text = refusal(lambda: build_engine(tmp_path / "out", Build(plugin=plugin, batch=(4, 4, 4))), InputError)
    assert "fixed at 2x16x8x8" in text


def test_weights_in_a_side_file(small: Path, plugin: Path) -> None:
    whole = small / SPARSE_MODEL
    model = load(whole.rename(small / "whole.onnx"))
    written = save(model, whole, side_file_above=100)
    assert len(written) == 2
    add_to_manifest(small, read_manifest(small), [path.name for path in written])
    record = build_engine(small, Build(plugin=plugin))
    assert set(record.sources) == {SPARSE_MODEL, f"{SPARSE_MODEL}.data"}
    assert record.sparse_layers == 3


def test_sizes_that_an_exporter_all_calls_by_one_placeholder(tmp_path: Path, plugin: Path) -> None:
    model = network()
    for axis in (0, 2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = "?"
    shapes = {"x": (1, 16, 8, 12)}
    convert(Request(saved(model, tmp_path), find("a100"), tmp_path / "out", layers=("*=packed",), shapes=shapes))
    kinds: tuple[Which, ...] = ("sparse", "dense")
    for which in kinds:
        record = build_engine(tmp_path / "out", Build(plugin=plugin if which == "sparse" else None, which=which))
        assert record.profiles["x"].maximum == (1, 16, 8, 12)


def test_workspace_and_tf32(small: Path, plugin: Path) -> None:
    record = build_engine(small, Build(plugin=plugin, workspace_mb=64, tf32=True))
    assert (record.workspace_mb, record.tf32) == (64, True)


# What is refused


def test_without_the_soname_the_process_ends_and_that_is_a_message(
    small: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_place_soname", lambda work: None)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    text = refusal(lambda: build_engine(small, Build(plugin=plugin)), MachineError)
    assert "SIGABRT" in text
    assert "while reading model.sparse.onnx" in text


def test_a_library_that_is_no_plugin(small: Path) -> None:
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    assert spec is not None
    assert spec.submodule_search_locations
    other = next(Path(spec.submodule_search_locations[0]).glob("libtensorrt_onnxparser_rtx.so*"))
    text = refusal(lambda: build_engine(small, Build(plugin=other)), MachineError)
    assert "finds no plugin SparseConv2d" in text


def test_the_plugin_of_another_tensorrt(small: Path, plugin: Path, tmp_path: Path) -> None:
    other = build_plugin(tmp_path / "other.so", fetched_headers(), "v3", "x86_64")
    text = refusal(lambda: build_engine(small, Build(plugin=other)), MachineError)
    assert "built for TensorRT 10, the process runs TensorRT-RTX 1" in text


def test_a_truncated_library(small: Path, plugin: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.so"
    half.write_bytes(plugin.read_bytes()[: plugin.stat().st_size // 2])
    text = refusal(lambda: build_engine(small, Build(plugin=half)), MachineError)
    assert "half.so" in text


def edit_node(out: Path, name: str, edit: Callable[[onnx.NodeProto], None]) -> Path:
    """The bundle with one sparse node changed in the file."""
    path = out / SPARSE_MODEL
    model = onnx.load(path)
    (node,) = (node for node in model.graph.node if node.name == name)
    edit(node)
    onnx.save(model, path)
    add_to_manifest(out, read_manifest(out), [SPARSE_MODEL])
    return out


def field_of(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    """One field of a node."""
    (entry,) = (entry for entry in node.attribute if entry.name == name)
    return entry


def test_a_residual_of_another_shape(small: Path, plugin: Path) -> None:
    # c3 is strided: what it makes is smaller than what it reads.
    def read_y(node: onnx.NodeProto) -> None:
        node.input[1] = "short"

    edit_node(small, "c2", read_y)
    model = onnx.load(small / SPARSE_MODEL)
    pool = onnx.helper.make_node("MaxPool", ["x"], ["short"], "pool", kernel_shape=[2, 2], strides=[2, 2])
    model.graph.node.insert(0, pool)
    onnx.save(model, small / SPARSE_MODEL)
    add_to_manifest(small, read_manifest(small), [SPARSE_MODEL])
    text = refusal(lambda: build_engine(small, Build(plugin=plugin)), CheckFailed)
    assert "SparseConv2d c2" in text
    assert "they must have one shape" in text


def test_another_height_than_converted(tmp_path: Path, plugin: Path) -> None:
    convert(Request(saved(network(), tmp_path), find("a100"), tmp_path / "out", layers=("*=csr",)))
    out = edit_node(tmp_path / "out", "c1", lambda node: field_of(node, "geometry").ints.__setitem__(4, 99))
    text = refusal(lambda: build_engine(out, Build(plugin=plugin)), InputError)
    assert "SparseConv2d c1: its input is [-1, 16, 8, 8], needed [N, 16, 99, 8]" in text


@pytest.mark.parametrize(("name", "value"), [("plugin_version", b"2"), ("plugin_namespace", b"other")])
def test_a_node_that_asks_for_another_plugin(small: Path, plugin: Path, name: str, value: bytes) -> None:
    edit_node(small, "c2", lambda node: setattr(field_of(node, name), "s", value))
    text = refusal(lambda: build_engine(small, Build(plugin=plugin)), MachineError)
    assert "no plugin for node 'c2'" in text


def test_an_operator_that_rtx_does_not_know(small: Path, plugin: Path) -> None:
    edit_node(small, "gap", lambda node: setattr(node, "op_type", "Unheard"))
    text = refusal(lambda: build_engine(small, Build(plugin=plugin)), InputError)
    assert "has no operator Unheard: node 'gap'" in text


def test_fp32_on_turing_says_what_to_do(tmp_path: Path, plugin: Path) -> None:
    convert(Request(saved(network(), tmp_path), find(OLDEST), tmp_path / "out", layers=("*=sparse",)))
    text = refusal(lambda: build_engine(tmp_path / "out", Build(plugin=plugin)), CheckFailed)
    assert "--precision fp16" in text
