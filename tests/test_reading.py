"""Zeros counted, geometry read and names given, against brute force and ONNX Runtime."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from small_models import model_of, network, one_conv, saved, sparse_weight

from sparsedeploy.devices import find
from sparsedeploy.layer import Precision, Zeros
from sparsedeploy.reading import DUST, Reading, count_zeros, read, stored_precision

A100 = find("a100")


def permutes(weight: NDArray[Any]) -> bool:
    """Whether the input channels fall into groups of 4 with at most 2 nonzeros each per output channel and tap."""
    icg = weight.shape[1]
    if icg not in (4, 8):
        return False
    return any(
        all(
            (np.count_nonzero(weight[:, list(four)], axis=1) <= 2).all()
            for four in (first, set(range(icg)) - set(first))
        )
        for first in itertools.combinations(range(icg), 4)
    )


def brute_force(weight: NDArray[Any], group: int) -> Zeros:
    """The same counts, element by element."""
    oc, icg = weight.shape[:2]
    rows = [[float(v) for v in row.reshape(-1)] for row in weight]
    counts = sorted(sum(v != 0 for v in row) for row in rows)
    largest = max(abs(v) for row in rows for v in row)
    unread = 0
    for g, c in itertools.product(range(group), range(icg)):
        block = weight[g * oc // group : (g + 1) * oc // group, c]
        unread += not any(float(v) for v in block.reshape(-1))
    four = icg % 4 == 0
    for o, start in itertools.product(range(oc), range(0, icg - 3, 4)):
        taps = weight[o, start : start + 4].reshape(4, -1)
        four = four and all(sum(float(v) != 0 for v in taps[:, t]) <= 2 for t in range(taps.shape[1]))
    middle = (counts[(oc - 1) // 2] + counts[oc // 2]) / 2
    total = weight.size
    return Zeros(
        nnz=sum(counts), total=total, nnz_per_channel=(counts[0], middle, counts[-1]), empty_filters=counts.count(0),
        empty_inputs=unread, near_zero=sum(0 < abs(v) < DUST * largest for row in rows for v in row), two_four=four,
        two_four_permuted=all(permutes(weight[g * oc // group : (g + 1) * oc // group]) for g in range(group)),
        sparsity=1 - sum(counts) / total,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_counts_equal_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = int(rng.choice([1, 1, 2, 4]))
    oc, icg, k = group * int(rng.integers(1, 4)), int(rng.choice([1, 3, 4, 8])), int(rng.choice([1, 2, 3]))
    weight = rng.standard_normal((oc, icg, k, k)).astype(np.float32)
    weight[rng.random(weight.shape) < rng.choice([0.0, 0.5, 0.9])] = -0.0 if seed % 2 else 0.0
    weight[rng.random(weight.shape) < 0.1] *= 1e-9
    weight[rng.integers(oc)] = 0.0
    weight[0, 0, 0, 0] = 1.0
    assert count_zeros(weight, group) == brute_force(weight, group)


def test_negative_zero_is_zero() -> None:
    assert count_zeros(np.full((2, 4, 1, 1), -0.0, np.float32), 1).nnz == 0


def test_all_zero_weight() -> None:
    zeros = count_zeros(np.zeros((3, 4, 3, 3), np.float32), 1)
    assert (zeros.nnz, zeros.sparsity, zeros.empty_filters, zeros.empty_inputs, zeros.near_zero) == (0, 1.0, 3, 4, 0)
    assert zeros.two_four


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_counts_of_other_types(dtype: Any) -> None:
    weight = sparse_weight((4, 8, 3, 3), 0.7)
    assert count_zeros(weight.astype(dtype), 1) == count_zeros(weight, 1)


def test_two_four_needs_groups_of_four_channels() -> None:
    weight = np.ones((1, 8, 1, 1), np.float32)
    weight[0, [0, 1, 4, 5]] = 0
    assert count_zeros(weight, 1).two_four
    weight[0, 0] = 1
    assert not count_zeros(weight, 1).two_four
    assert not count_zeros(np.zeros((1, 6, 1, 1), np.float32), 1).two_four
    straddling = np.zeros((1, 8, 1, 1), np.float32)
    straddling[0, 2:6] = 1  # two in either four, although four in a row
    assert count_zeros(straddling, 1).two_four


def test_near_zero_is_relative_to_the_largest() -> None:
    weight = np.array([1e-3, 1e-10, 2e-9, 0], np.float32).reshape(1, 4, 1, 1)
    assert count_zeros(weight, 1).near_zero == 1
    assert count_zeros(weight * np.float32(1e20), 1).near_zero == 1


@pytest.mark.parametrize("group", [0, 3])
def test_nothing_to_count(group: int) -> None:
    with pytest.raises(ValueError, match="nothing to count"):
        count_zeros(np.zeros((4, 1, 1, 1), np.float32), group)


GEOMETRIES = [
    *({"auto_pad": auto, "strides": [s, s]} for auto in ("SAME_UPPER", "SAME_LOWER", "VALID") for s in (1, 2, 3)),
    {"auto_pad": "SAME_UPPER", "strides": [2, 1], "dilations": [1, 1]},
    {"pads": [1, 0, 2, 3], "strides": [2, 1]},
    {"pads": [2, 2, 2, 2], "dilations": [2, 2]},
    {"auto_pad": "NOTSET"},
]


@pytest.mark.parametrize("attributes", GEOMETRIES, ids=str)
@pytest.mark.parametrize("kernel", [(3, 3), (2, 5)])
def test_output_size_is_onnx_runtimes(attributes: dict[str, Any], kernel: tuple[int, int], tmp_path: Path) -> None:
    for size in ((8, 9), (7, 12), (11, 10)):
        path = saved(one_conv(sparse_weight((2, 4, *kernel)), size, **attributes), tmp_path)
        layer = read(path, A100).layers[0]
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {"x": np.zeros((1, 4, *size), np.float32)})
        assert layer.geometry is not None
        assert (layer.geometry.oh, layer.geometry.ow) == y.shape[2:]


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("size", [(8, 8), (9, 7)])
def test_auto_pad_means_these_pads(auto: str, size: tuple[int, int], tmp_path: Path) -> None:
    """The same convolution with the pads spelled out gives the same numbers in ONNX Runtime."""
    weight = sparse_weight((2, 4, 3, 2), 0.5)
    path = saved(one_conv(weight, size, auto_pad=auto, strides=[2, 2]), tmp_path)
    geometry = read(path, A100).layers[0].geometry
    assert geometry is not None
    spelled = saved(one_conv(weight, size, pads=list(geometry.pads), strides=[2, 2]), tmp_path, "spelled.onnx")
    x = np.random.default_rng(0).random((1, 4, *size)).astype(np.float32)
    a, b = (
        ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0] for p in (path, spelled)
    )
    np.testing.assert_array_equal(a, b)


def two_convs(first: str, second: str) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], first, pads=[1] * 4),
        helper.make_node("Conv", ["a", "w"], ["y"], second, pads=[1] * 4),
    ]
    return model_of(nodes, {"w": sparse_weight((4, 4, 3, 3))}, {"x": [1, 4, 8, 8]}, ["y"])


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [("", "", ["a", "y"]), ("c", "c", ["c", "y"]), ("c", "", ["c", "y"]), ("y", "", ["y", "y:2"])],
)
def test_names_are_unique(first: str, second: str, names: list[str], tmp_path: Path) -> None:
    reading = read(saved(two_convs(first, second), tmp_path), A100)
    assert [layer.name for layer in reading.layers] == names
    assert list(reading.unit_of) == names


@pytest.mark.parametrize(
    ("kind", "dtype", "own"),
    [
        (TensorProto.FLOAT, "fp32", "fp32"),
        (TensorProto.FLOAT16, "fp16", "fp16"),
        (TensorProto.BFLOAT16, "bf16", "fp32"),
        (TensorProto.DOUBLE, "fp64", "fp32"),
    ],
)
def test_stored_types(kind: int, dtype: str, own: Precision, tmp_path: Path) -> None:
    path = saved(network(kind), tmp_path)
    reading = read(path, A100, None)
    assert {layer.dtype for layer in reading.layers} == {dtype}
    assert reading.precision == stored_precision(path) == own
    assert all(layer.eligible for layer in reading.layers)
    weight, bias = reading.weight("c1")
    stored = {t.name: numpy_helper.to_array(t).astype(np.float32) for t in network(kind).graph.initializer}
    np.testing.assert_array_equal(weight, stored["w1"])
    assert bias is not None
    np.testing.assert_array_equal(bias, stored["b1"])


def epilogues(reading: Reading) -> list[str]:
    return [layer.epilogue.describe() for layer in reading.layers]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_units_are_those_of_the_fp32_graph(kind: int, tmp_path: Path) -> None:
    plain = read(saved(network(), tmp_path, "plain.onnx"), A100)
    assert epilogues(read(saved(network(kind), tmp_path), A100, "fp32")) == epilogues(plain)


def test_precision_of_a_file_that_casts(tmp_path: Path) -> None:
    """Weights decide, not the inputs: exporters keep fp32 at the ends of an fp16 graph."""
    weight = sparse_weight((4, 4, 3, 3)).astype(np.float16)
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("Conv", ["h", "w"], ["c"], "conv"),
        helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
    ]
    path = saved(model_of(nodes, {"w": weight}, {"x": [1, 4, 8, 8]}, ["y"]), tmp_path)
    assert stored_precision(path) == "fp16"
    assert stored_precision(tmp_path / "nothing.onnx") == "fp32"


def test_external_weights_are_counted_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(network(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    outside = read(Path("../m.onnx"), A100)
    inside = read(saved(network(), tmp_path, "one.onnx"), A100)
    assert [layer.zeros for layer in outside.layers] == [layer.zeros for layer in inside.layers]


def test_convolution_in_a_body_and_transposed(tmp_path: Path) -> None:
    y = helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
    body = helper.make_graph([helper.make_node("Conv", ["up", "w"], ["t"], "inner", pads=[1] * 4)], "then", [], [y])
    other = helper.make_graph(
        [helper.make_node("Identity", ["up"], ["e"])],
        "else",
        [],
        [helper.make_tensor_value_info("e", TensorProto.FLOAT, None)],
    )
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w"], ["up"], "up", pads=[1] * 4),
        helper.make_node("ReduceSum", ["up"], ["sum"], keepdims=0),
        helper.make_node("Less", ["sum", "sum"], ["cond"]),
        helper.make_node("If", ["cond"], ["y"], "choose", then_branch=body, else_branch=other),
    ]
    path = saved(model_of(nodes, {"w": sparse_weight((4, 4, 3, 3))}, {"x": [1, 4, 8, 8]}, ["y"]), tmp_path)
    layers = read(path, A100).layers
    assert [layer.op for layer in layers] == ["ConvTranspose", "Conv"]
    assert [reason.code for layer in layers for reason in layer.ineligible] == ["operator", "in-body"]
    assert all(layer.zeros for layer in layers)
