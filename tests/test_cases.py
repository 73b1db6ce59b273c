"""Every minimal case in shared/cases: one way each in which a pruned network reaches a deployment tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from conftest import SHARED
from onnx import numpy_helper

from sparsedeploy.bundle import DENSE_MODEL, SPARSE_MODEL
from sparsedeploy.convert import Conversion, Request, convert
from sparsedeploy.converters.load import load
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.devices import find
from sparsedeploy.layer import Precision

pytestmark = pytest.mark.skipif(SHARED is None, reason="needs shared/cases")


@dataclass(frozen=True)
class Case:
    """What a case must show when every eligible layer is forced sparse."""

    name: str
    sparse: int
    """Layers that become SparseConv2d."""
    zeros: float | None = 0.9038
    """Sparsity of the first convolution, or None where none is counted."""
    dense_because: str = ""
    """Text among the reasons of layers that stay dense."""
    note: str = ""
    """Text among the notes."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


CASES = [
    Case("01_mask_mul", 1, note="masks folded for 1 conv"),
    Case("02_mask_bool_cast_where", 1, note="masks folded for 1 conv"),
    Case("04_constant_node_weight", 1),
    Case("05_initializer_is_graph_input_ir3", 1, note="input"),
    Case("09_fp16_weight_cast_to_fp32", 1, note="MB"),
    Case("12_dq_int8_per_channel_weight", 0, 0.9044, dense_because="quantized: left dense"),
    Case("16a_same_upper_s2_even", 1),
    Case("16b_same_lower_s2_even", 1),
    Case("17_asymmetric_pads", 1),
    Case("19_dilated", 1),
    Case("20_grouped", 1, 0.8941),
    Case("21_depthwise", 1, 0.8924),
    Case("22_convtranspose", 0, None, dense_because="ConvTranspose"),
    Case("24_conv3d", 0, 0.8978, dense_because="3-D"),
    Case("26_no_bias_no_kernel_shape_attr", 1),
    Case("28_conv_bn_relu_unfolded", 1),
    Case("30_nhwc_tf2onnx", 1),
    Case("31_weight_transposed_in_graph", 1),
    Case("32_dynamic_batch_hw_symbolic", 1, shapes={"x": (2, 32, 16, 16)}),
    Case("33_dim_value_minus1", 1),
    Case("34_shared_weight_two_convs", 2),
    Case("36_conv_in_if_branches", 0, None, dense_because="inside If"),
    Case("39_two_four_along_cin", 1, 0.5),
    Case("40_dead_filters_and_channels", 1, 0.954),
    Case("45_new_ir_and_opset", 1),
]
TARGETS: list[tuple[str, Precision]] = [("a100", "fp32"), ("jetson-nano", "fp16"), ("jetson-nano", "fp32")]


def path_of(name: str) -> Path:
    """The file of a case."""
    assert SHARED is not None
    path = SHARED / "cases" / f"{name}.onnx"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here")
    return path


def forced(case: Case, target: str, precision: Precision, out: Path) -> Conversion:
    """Convert with every eligible layer sparse. Verification is part of it: a difference raises."""
    return convert(Request(path_of(case.name), find(target), out, precision, shapes=case.shapes, layers=("*=sparse",)))


@pytest.mark.parametrize(("target", "precision"), TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forced(case: Case, target: str, precision: Precision, tmp_path: Path) -> None:
    done = forced(case, target, precision, tmp_path / "out")
    assert done.manifest.sparse_layers == case.sparse
    assert done.verification.sparse_nodes_verified == case.sparse
    assert done.verification.passed
    if done.verification.comparisons:
        assert any(entry.outputs for entry in done.verification.comparisons)
    first = done.scan.layers[0]
    if case.zeros is not None:
        assert first.sparsity == pytest.approx(case.zeros, abs=2e-4)
    reasons = "; ".join(reason.text for layer in done.scan.layers for reason in layer.ineligible)
    assert case.dense_because in reasons
    assert case.note in "; ".join(done.notes)
    assert (tmp_path / "out" / SPARSE_MODEL).exists() == bool(case.sparse)
    if case.sparse:
        onnx.checker.check_model(str(tmp_path / "out" / DENSE_MODEL))
        assert len(read_nodes(load(tmp_path / "out" / SPARSE_MODEL))) == case.sparse


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dense_model_equals_original(case: Case, tmp_path: Path) -> None:
    """Independently of verify: 1e-5 of the largest output, on inputs of another seed and sign."""
    done = forced(case, "a100", "fp32", tmp_path / "out")
    rng, feeds = np.random.default_rng(7), {}
    session = ort.InferenceSession(str(path_of(case.name)), providers=["CPUExecutionProvider"])
    for entry in session.get_inputs():
        shape = done.manifest.inputs[entry.name]
        feeds[entry.name] = (
            np.array(True) if entry.type == "tensor(bool)" else rng.standard_normal(shape).astype(np.float32)
        )
    expected = session.run(None, feeds)
    got = ort.InferenceSession(str(tmp_path / "out" / DENSE_MODEL), providers=["CPUExecutionProvider"]).run(None, feeds)
    for a, b in zip(got, expected, strict=True):
        assert np.all(np.isfinite(a))
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_dense_control_is_no_error(tmp_path: Path) -> None:
    done = convert(Request(path_of("47_dense_control"), find("a100"), tmp_path / "out"))
    assert done.nothing is not None
    assert done.nothing.startswith("0 % zeros")
    assert len(done.scan.hints) <= 1
    assert not (tmp_path / "out" / SPARSE_MODEL).exists()


def test_quantized_weight_is_replaced_only_when_named(tmp_path: Path) -> None:
    path = path_of("12_dq_int8_per_channel_weight")
    name = convert(Request(path, find("a100"), tmp_path / "plain")).scan.layers[0].name
    done = convert(Request(path, find("a100"), tmp_path / "named", layers=(f"{name}=sparse",)))
    assert done.manifest.sparse_layers == 1
    assert done.verification.passed


def test_two_four_is_named_with_what_the_device_has(tmp_path: Path) -> None:
    path = path_of("39_two_four_along_cin")
    a100 = convert(Request(path, find("a100"), tmp_path / "a"))
    nano = convert(Request(path, find("jetson-nano"), tmp_path / "n"))
    assert a100.nothing is not None
    assert any("2:4" in hint and "--sparsity=enable" in hint for hint in a100.scan.hints)
    assert any("2:4 has no hardware on jetson-nano" in hint for hint in nano.scan.hints)


def test_dead_filters_are_counted(tmp_path: Path) -> None:
    done = convert(Request(path_of("40_dead_filters_and_channels"), find("a100"), tmp_path / "out"))
    zeros = done.scan.layers[0].zeros
    assert zeros is not None
    assert (zeros.empty_filters, zeros.empty_inputs) == (32, 1)


def test_new_opset_is_kept_or_lowered(tmp_path: Path) -> None:
    path = path_of("45_new_ir_and_opset")
    original = onnx.load(path)
    convert(Request(path, find("a100"), tmp_path / "a"))
    convert(Request(path, find("jetson-nano"), tmp_path / "n"))
    kept, lowered = onnx.load(tmp_path / "a" / DENSE_MODEL), onnx.load(tmp_path / "n" / DENSE_MODEL)
    assert (kept.ir_version, kept.opset_import[0].version) == (original.ir_version, original.opset_import[0].version)
    assert lowered.opset_import[0].version == 13
    assert lowered.ir_version <= 8


def test_open_dimensions_stay_open_where_the_kernel_allows(tmp_path: Path) -> None:
    original = onnx.load(path_of("32_dynamic_batch_hw_symbolic"))
    weight = next(t for t in original.graph.initializer if len(t.dims) == 4)
    array = numpy_helper.to_array(weight)
    # packed refuses weights that fp16 cannot hold to 2^-11; this test is about shapes
    weight.CopyFrom(numpy_helper.from_array(np.where(np.abs(array) < 1e-3, 0, array), weight.name))
    path, shapes = tmp_path / "m.onnx", {"x": (2, 32, 16, 16)}
    onnx.save(original, path)
    convert(Request(path, find("a100"), tmp_path / "p", shapes=shapes, layers=("*=packed",)))
    convert(Request(path, find("a100"), tmp_path / "c", shapes=shapes, layers=("*=csr",)))

    def dims(folder: str) -> list[str | int]:
        shape = onnx.load(tmp_path / folder / SPARSE_MODEL).graph.input[0].type.tensor_type.shape
        return [dim.dim_param or dim.dim_value for dim in shape.dim]

    assert dims("p") == ["batch", 32, "height", "width"]
    assert dims("c") == ["batch", 32, 16, 16]


@pytest.mark.parametrize("target", ["a100", "jetson-nano"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("ch_PP-OCRv4_det_infer", (1, 3, 160, 160)), ("ch_ppocr_mobile_v2.0_cls_infer", (1, 3, 48, 192))],
)
def test_unpruned_real_models_say_so(name: str, shape: tuple[int, ...], target: str, tmp_path: Path) -> None:
    assert SHARED is not None
    path = SHARED / "models" / "rapidocr" / f"{name}.onnx"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here")
    done = convert(Request(path, find(target), tmp_path / "out", shapes={"x": shape}))
    assert done.nothing is not None
    assert done.nothing.startswith("0 % zeros (eligible layers hold ")
    assert done.verification.passed
    assert not (tmp_path / "out" / SPARSE_MODEL).exists()
