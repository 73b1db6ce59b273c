"""Stretched indices: where they point, that the weights are exact, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import SHARED
from conv_cases import EPILOGUES, Case, fill, geometries, layer_of, pruned
from hypothesis import given, settings

from sparsedeploy.devices import find
from sparsedeploy.layer import Geometry
from sparsedeploy.plugins.csr import CSR, OVER_PACKED, plane_shape
from sparsedeploy.plugins.kernel import BuildOptions
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.packed import PACKED
from sparsedeploy.plugins.reference import conv2d

A100 = find("a100")
OPTIONS = BuildOptions("fp32")


def stretch(case: Case) -> SparseConv:
    return CSR.build(case.layer, case.weight, case.bias, A100, {}, OPTIONS).node


def test_an_index_is_the_whole_offset() -> None:
    g = Geometry(oc=2, ic=4, kh=3, kw=2, h=6, w=5, stride=(2, 1), pads=(1, 2, 0, 3), dilation=(2, 3), group=2)
    weight = np.zeros(g.weight_shape, np.float32)
    weight[0, 1, 2, 1] = 0.1
    weight[1, 0, 1, 0] = -7.0
    weight[1, 1, 0, 1] = 3.0
    offsets, indices, values = CSR.build(layer_of(g, weight), weight, None, A100, {}, OPTIONS).node.constants
    rows, pitch = 1 + 6 + 0, 2 + 5 + 3
    assert plane_shape(g) == (rows, pitch)
    assert offsets.tolist() == [0, 1, 3]
    assert indices.tolist() == [
        (1 * rows + 2 * 2) * pitch + 1 * 3,  # group 0 reads channels 0 and 1
        (2 * rows + 1 * 2) * pitch + 0 * 3,  # group 1 reads channels 2 and 3
        (3 * rows + 0 * 2) * pitch + 1 * 3,
    ]
    assert values.view(np.float32).tolist() == [np.float32(0.1), -7.0, 3.0]


def test_a_kernel_that_only_adds_indices_gets_the_convolution() -> None:
    g = Geometry(oc=4, ic=6, kh=3, kw=2, h=7, w=6, stride=(2, 3), pads=(2, 0, 1, 1), dilation=(1, 2), group=2)
    case = fill(g, EPILOGUES[0], 30, batch=1, seed=8)
    offsets, indices, values = stretch(case).constants
    rows, pitch = plane_shape(g)
    image = np.zeros((g.ic, rows, pitch))
    image[:, 2 : 2 + g.h, 0 : g.w] = case.x[0]
    flat, y = image.reshape(-1), np.zeros((g.oc, g.oh, g.ow))
    for oc in range(g.oc):
        for oy in range(g.oh):
            for ox in range(g.ow):
                for j in range(offsets[oc], offsets[oc + 1]):
                    y[oc, oy, ox] += values.view(np.float32)[j] * flat[indices[j] + oy * 2 * pitch + ox * 3]
    np.testing.assert_allclose(y, conv2d(case.x, case.weight, None, g)[0], rtol=1e-12, atol=1e-12)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(geometry=geometries())
def test_a_window_never_leaves_its_plane(geometry: Geometry) -> None:
    g, (rows, pitch) = geometry, plane_shape(geometry)
    nnz = min(500, int(np.prod(g.weight_shape)))
    _, indices, _ = stretch(fill(g, EPILOGUES[0], nnz, batch=1, seed=1)).constants
    top, left = np.divmod(indices % (rows * pitch), pitch)
    assert (top + (g.oh - 1) * g.stride[0] < rows).all()
    assert (left + (g.ow - 1) * g.stride[1] < pitch).all()


def test_weights_are_exact_bit_for_bit() -> None:
    extremes = [1e-45, -1e-38, 3.4e38, 1.0 + 2**-23, -65520.0, 1e-9]
    weight = pruned((4, 5, 3, 3), 60, seed=3)
    weight.reshape(-1)[: len(extremes)] = extremes
    g = Geometry(oc=4, ic=5, kh=3, kw=3, h=8, w=8)
    built = CSR.build(layer_of(g, weight), weight, None, A100, {}, OPTIONS)
    back = CSR.unpack(built.node)[0]
    np.testing.assert_array_equal(back.view(np.int32), weight.view(np.int32))
    assert built.notes == ()


def test_no_nonzero_carries_one_dummy_each() -> None:
    g = Geometry(oc=2, ic=3, kh=3, kw=3, h=5, w=5)
    node = stretch(fill(g, EPILOGUES[0], 0, batch=1, seed=0))
    assert [array.tolist() for array in node.constants] == [[0, 0, 0], [0], [0]]


def test_a_node_serves_one_height_and_width() -> None:
    case = fill(Geometry(oc=2, ic=3, kh=3, kw=3, h=5, w=5), EPILOGUES[0], 9, batch=1, seed=0)
    node = stretch(case)
    assert node.fixed_hw
    with pytest.raises(ValueError, match=r"needed \[N, 3, 5, 5\]"):
        CSR.reference(node, np.zeros((1, 3, 5, 6)))


def test_inputs_beyond_a_32_bit_index_are_refused() -> None:
    weight = np.ones((1, 128, 1, 1), np.float32)
    for h, fits in ((4095, True), (4096, False)):
        g = Geometry(oc=1, ic=128, kh=1, kw=1, h=h, w=4096)
        layer = layer_of(g, weight)
        reason = CSR.supports(layer, A100, "fp32")
        assert (reason is None) == fits
        if reason is None:
            assert CSR.unpack(CSR.build(layer, weight, None, A100, {}, OPTIONS).node)[0].all()
        else:
            assert reason.code == "input-too-large"
            with pytest.raises(ValueError, match="32-bit"):
                CSR.build(layer, weight, None, A100, {}, OPTIONS)


def test_csr_is_predicted_slower_than_packed_and_says_why() -> None:
    g = Geometry(oc=128, ic=64, kh=3, kw=3, h=100, w=100, pads=(1, 1, 1, 1))
    layer = layer_of(g, pruned(g.weight_shape, 64 * 128 * 9 // 10, seed=0))
    ((_, csr),) = CSR.configs(layer, A100, "fp32", 32)
    ((_, packed),) = PACKED.configs(layer, A100, "fp32", 32)
    assert csr.us == pytest.approx(OVER_PACKED * packed.us, rel=1e-9)
    assert "argued" in csr.source
    assert "not measured" in csr.source


def test_malformed_nodes_are_refused() -> None:
    g = Geometry(oc=2, ic=4, kh=2, kw=2, h=6, w=6, stride=(2, 2), dilation=(2, 2), group=2)
    node = stretch(fill(g, EPILOGUES[0], 16, batch=1, seed=0))
    offsets, indices, values = node.constants

    def changed(at: int, value: int) -> SparseConv:
        new = indices.copy()
        new[at] = value
        return replace(node, constants=(offsets, new, values))

    for at, value in ((0, -1), (15, 4 * 36), (15, 4 * 36 - 14)):
        with pytest.raises(ValueError, match="conv3: constant indices points outside"):
            CSR.reference(changed(at, value), np.zeros((1, 4, 6, 6)))
    for at, value in ((7, 2 * 36), (8, 0), (0, 1), (0, 6), (3, 4)):  # other groups' channels, between taps, past them
        with pytest.raises(ValueError, match=r"conv3: constant indices (points beside|is not in ascending)"):
            CSR.unpack(changed(at, value))
    with pytest.raises(ValueError, match="a weight may be there twice"):
        CSR.unpack(changed(1, int(indices[0])))
    with pytest.raises(ValueError, match="constant values has 15 words"):
        CSR.unpack(replace(node, constants=(offsets, indices, values[:-1])))
    for wrong in ([0, 8], [0, 8, 15], [0, 8, 17], [0, -1, 16]):
        with pytest.raises(ValueError, match="constant offsets"):
            CSR.unpack(replace(node, constants=(np.array(wrong, np.int32), indices, values)))


@pytest.mark.parametrize(
    ("file", "prefix", "size", "group"),
    [
        ("resnet50_3x3_90.npz", "bg1", 56, 1),
        ("resnet50_3x3_95.npz", "bg3", 14, 1),
        ("alexnet_a_top1_0.5421.npz", "conv2", 27, 2),
        ("alexnet_a_top1_0.5421.npz", "conv5", 13, 2),
        ("lenet_b.npz", "conv2", 12, 1),
    ],
)
def test_real_filters_come_back_exactly(file: str, prefix: str, size: int, group: int) -> None:
    if SHARED is None or not (path := SHARED / "data" / "pruned_filters" / file).is_file():
        pytest.skip(f"{file} is not on this machine")
    with np.load(path) as arrays:
        weight = arrays[next(name for name in arrays if name.startswith(prefix))]
    oc, ic, kh, kw = weight.shape
    pads = (kh // 2, kw // 2) * 2
    g = Geometry(oc=oc, ic=ic * group, kh=kh, kw=kw, h=size, w=size, pads=pads, group=group)
    node = CSR.build(layer_of(g, weight), weight, None, A100, {}, OPTIONS).node
    np.testing.assert_array_equal(CSR.unpack(node)[0], weight)
    x = np.random.default_rng(0).standard_normal((1, g.ic, size, size))
    scale = conv2d(np.abs(x), np.abs(weight), None, g)
    assert (np.abs(CSR.reference(node, x) - conv2d(x, weight, None, g)) <= 1e-12 * scale).all()
