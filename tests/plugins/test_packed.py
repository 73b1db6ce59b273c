"""The packed word: its bits, its blocks, its rounding and what it refuses."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import SHARED
from conv_cases import EPILOGUES, fill, layer_of, pruned
from numpy.typing import NDArray

from sparsedeploy.devices import find
from sparsedeploy.layer import Geometry
from sparsedeploy.plugins.kernel import BuildOptions, Built, UnfitWeightsError
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.packed import PACKED

A100 = find("a100")
NORMAL = 2.0**-14
"""fp16's smallest normal number."""


def pack(weight: NDArray[np.float32], group: int = 1) -> Built:
    oc, ic, kh, kw = weight.shape
    g = Geometry(oc=oc, ic=ic * group, kh=kh, kw=kw, h=kh, w=kw, group=group)
    return PACKED.build(layer_of(g, weight), weight, None, A100, {}, BuildOptions("fp32"))


def weights(*values: float) -> NDArray[np.float32]:
    """One filter of as many 1x1 input channels."""
    return np.array(values, np.float32).reshape(1, -1, 1, 1)


def test_the_word_is_the_papers() -> None:
    weight = np.zeros((2, 200, 3, 5), np.float32)
    weight[1, 171, 2, 4] = -1.5  # fp16 0xbe00
    words, offsets = pack(weight).node.constants
    assert words.view(np.uint32).tolist() == [0xBE00_AB42]  # value, ic 0xab, kx 4, ky 2
    assert offsets.tolist() == [0, 0, 1]


def test_rows_are_ordered_by_block_channel_and_place() -> None:
    weight = np.zeros((2, 300, 1, 2), np.float32)
    for oc, ic, kx, value in ((0, 299, 0, 1.0), (0, 2, 1, 2.0), (0, 2, 0, 3.0), (1, 150, 1, 4.0), (1, 149, 0, 5.0)):
        weight[oc, ic, 0, kx] = value
    node = pack(weight).node
    words, offsets = node.constants
    assert node.parameters == (150,)  # two blocks of 150, not 256 + 44
    assert offsets.tolist() == [0, 2, 3, 4, 5]
    values = (words.view(np.uint32) >> 16).astype(np.uint16).view(np.float16)
    assert values.tolist() == [3.0, 2.0, 5.0, 1.0, 4.0]
    assert ((words >> 8) & 0xFF).tolist() == [2, 2, 149, 149, 0]


@pytest.mark.parametrize(("ic", "block"), [(1, 1), (256, 256), (257, 129), (512, 256), (600, 200), (2048, 256)])
def test_blocks_are_even_and_at_most_256_channels(ic: int, block: int) -> None:
    assert pack(np.ones((1, ic, 1, 1), np.float32)).node.parameters == (block,)


def test_no_nonzero_carries_one_dummy_word() -> None:
    node = pack(np.zeros((3, 4, 3, 3), np.float32)).node
    assert [array.tolist() for array in node.constants] == [[0], [0, 0, 0, 0]]


def test_fp16_weights_come_back_exactly() -> None:
    weight = pruned((8, 300, 3, 3), 2000, seed=4).astype(np.float16).astype(np.float32)
    built = pack(weight)
    np.testing.assert_array_equal(PACKED.unpack(built.node)[0], weight)
    assert built.record["rounded_weights"] == built.record["largest_relative_error"] == 0


def test_rounding_is_counted_and_reported() -> None:
    built = pack(weights(1.0, 1.0 + 2**-11, 1.0 + 2**-12, 0.0, -3.0))  # a tie to even, a quarter, exact ones
    assert built.record["nnz"] == 4
    assert built.record["rounded_weights"] == 2
    assert built.record["largest_relative_error"] == pytest.approx(2**-11 / (1 + 2**-11), rel=1e-12)


def test_rounding_never_exceeds_its_bound() -> None:
    rng = np.random.default_rng(9)
    weight = (rng.uniform(1, 2, (1, 256, 15, 15)) * 2.0 ** rng.integers(-14, 15, (1, 256, 15, 15))).astype(np.float32)
    back = PACKED.unpack(pack(weight).node)[0].astype(np.float64)
    assert (np.abs(back - weight) <= 2.0**-11 * np.abs(weight.astype(np.float64))).all()


@pytest.mark.parametrize("fits", [65504.0, 65519.0, NORMAL, NORMAL / 2, 2.0**-24, NORMAL * (1 - 2**-12)])
def test_the_edges_of_fp16_are_carried(fits: float) -> None:
    back = PACKED.unpack(pack(weights(1.0, -fits)).node)[0]
    assert back[0, 1, 0, 0] == pytest.approx(-fits, rel=2**-11)


@pytest.mark.parametrize(
    ("values", "exponent"),
    [
        ((1.0, NORMAL * (1 - 2**-11)), 1),  # a hair above 2^-11 unscaled
        ((1.0, 65520.0, -1e6), -4),
        ((0.5, 1e-9, 0.0), 16),
        ((1.0, 2.0**-25), 11),
        ((3e-7, -2.6e-6, 1.0), 8),
        ((1e-40, -3e-40), 119),  # subnormal in fp32 already
        ((2.0**100, 2.0**110), -95),
    ],
)
def test_weights_outside_fp16_are_scaled_by_a_power_of_two(values: tuple[float, ...], exponent: int) -> None:
    built = pack(weights(*values))
    assert built.node.parameters == (len(values), exponent)
    assert f"times 2^{exponent}" in built.notes[0]
    back = PACKED.unpack(built.node)[0].astype(np.float64)
    given = weights(*values).astype(np.float64)
    assert (np.abs(back - given) <= 2.0**-11 * np.abs(given)).all()
    x = np.random.default_rng(0).standard_normal((1, len(values), 1, 1))
    np.testing.assert_allclose(PACKED.reference(built.node, x), (back * x).sum(1, keepdims=True), rtol=1e-14)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((65536.0, 1e-6), r"conv3: 1 of 2 nonzero weights overflow fp16.*largest of them is 6\.554e\+04"),
        ((60000.0, 1e-9, 0.0), r"conv3: 1 of 2 nonzero weights vanish.*largest of them is 1e-09"),
        ((1.0, 1e-40), r"1 of 2 nonzero weights vanish"),
        ((3e-7, -2.6e-6, 40000.0), r"2 of 3 .*more than 2\^-11.*largest of them is 2\.6e-06.*none serves all"),
    ],
)
def test_weights_that_no_scale_serves_are_refused(values: tuple[float, ...], message: str) -> None:
    with pytest.raises(UnfitWeightsError, match=message):
        pack(weights(*values))


def test_half_sums_bound_the_scale() -> None:
    for count, fits in ((4, True), (5, False)):  # 2^5 is needed; 4 of 1.75 then sum to 224, 5 to 280
        weight = weights(*[1.75] * count, NORMAL / 32 * (1 + 2**-10))
        layer = layer_of(Geometry(oc=1, ic=count + 1, kh=1, kw=1, h=1, w=1), weight)
        assert PACKED.build(layer, weight, None, A100, {}, BuildOptions("fp32")).node.parameters[1:] == (5,)
        if fits:
            assert PACKED.build(layer, weight, None, A100, {}, BuildOptions("fp16")).node.parameters[1:] == (5,)
        else:
            with pytest.raises(UnfitWeightsError, match="1 of 6 nonzero weights vanish"):
                PACKED.build(layer, weight, None, A100, {}, BuildOptions("fp16"))


def test_kernels_above_15x15_are_refused() -> None:
    for shape, fits in (((1, 1, 15, 15), True), ((1, 1, 16, 1), False), ((1, 1, 1, 16), False)):
        g = Geometry(oc=1, ic=1, kh=shape[2], kw=shape[3], h=20, w=20)
        layer = layer_of(g, np.ones(shape, np.float32))
        reason = PACKED.supports(layer, A100, "fp32")
        assert (reason is None) == fits
        if reason:
            assert reason.code == "kernel-too-large"
            with pytest.raises(ValueError, match="reach 15x15"):
                PACKED.build(layer, np.ones(shape, np.float32), None, A100, {}, BuildOptions("fp32"))


def test_one_node_serves_every_height_and_width() -> None:
    g = Geometry(oc=3, ic=5, kh=3, kw=3, h=9, w=9, stride=(2, 1), pads=(1, 2, 0, 1))
    case = fill(g, EPILOGUES[0], 40, batch=1, seed=0)
    node = PACKED.build(case.layer, case.weight, None, A100, {}, BuildOptions("fp32")).node
    assert not node.fixed_hw
    wide = g.model_copy(update={"h": 4, "w": 17})
    other = fill(wide, EPILOGUES[0], 40, batch=2, seed=0)
    again = PACKED.build(other.layer, other.weight, None, A100, {}, BuildOptions("fp32")).node
    assert all(np.array_equal(a, b) for a, b in zip(node.constants, again.constants, strict=True))
    np.testing.assert_array_equal(PACKED.reference(node, other.x), PACKED.reference(again, other.x))
    with pytest.raises(ValueError, match="leaves no output"):
        PACKED.reference(node, np.zeros((1, 5, 1, 9)))


def test_published_throughput_is_the_prediction() -> None:
    g = Geometry(oc=128, ic=64, kh=3, kw=3, h=100, w=100, pads=(1, 1, 1, 1))
    weight = pruned(g.weight_shape, 64 * 128 * 9 // 10, seed=0)
    layer = layer_of(g, weight)
    (_, prediction), *_ = PACKED.configs(layer, A100, "fp32", 32)
    flops = 2 * np.count_nonzero(weight) * 100 * 100 * 32
    assert prediction.us == pytest.approx(flops / 2.4e12 * 1e6, rel=1e-3)  # the paper's 2.4 TFLOP/s at 90 %
    assert prediction.bound == "compute"


def broken(node: SparseConv, words: list[int] | None = None, offsets: list[int] | None = None) -> SparseConv:
    arrays = [
        array if new is None else np.array(new) for array, new in zip(node.constants, (words, offsets), strict=True)
    ]
    return replace(node, constants=tuple(array.astype(np.uint32).view(np.int32) for array in arrays))


def test_malformed_nodes_are_refused() -> None:
    node = pack(np.ones((2, 3, 1, 2), np.float32)).node  # 6 words a row
    good = node.constants[0].view(np.uint32).tolist()
    for offsets in ([0, 6], [0, 6, 11], [0, 6, 13], [1, 6, 12], [0, 13, 12], [0, 6, 12, 12]):
        with pytest.raises(ValueError, match="conv3: constant offsets"):
            PACKED.unpack(broken(node, offsets=offsets))
    for place in (0x0300, 0x0020, 0x0001):  # ic 3, kx 2, ky 1: each one past its end
        with pytest.raises(ValueError, match="points outside a weight"):
            PACKED.unpack(broken(node, words=[*good[:-1], 0x3C00_0000 | place]))
    with pytest.raises(ValueError, match="a weight may be there twice"):
        PACKED.unpack(broken(node, words=[*good[:-1], good[-2]]))
    for parameters in ((), (0,), (257,), (3, 127), (3, 0, 0)):
        with pytest.raises(ValueError, match="channels per block"):
            PACKED.unpack(replace(node, parameters=parameters))


def test_a_large_layer_packs_in_a_second() -> None:
    weight = pruned((512, 512, 3, 3), 512 * 512 * 9 // 10, seed=0)
    start = time.perf_counter()
    pack(weight)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("file", "prefix", "group"),
    [
        ("resnet50_3x3_90.npz", "bg1", 1),
        ("resnet50_3x3_90.npz", "bg3", 1),
        ("resnet50_3x3_95.npz", "bg2", 1),
        ("alexnet_a_top1_0.5421.npz", "conv4", 2),
        ("lenet_a.npz", "conv2", 1),
        ("mobilenetv1_1x1_90.npz", "pw07", 1),
    ],
)
def test_real_filters_are_carried(file: str, prefix: str, group: int) -> None:
    if SHARED is None or not (path := SHARED / "data" / "pruned_filters" / file).is_file():
        pytest.skip(f"{file} is not on this machine")
    with np.load(path) as arrays:
        weight = arrays[next(name for name in arrays if name.startswith(prefix))]
    weight = weight.reshape(*weight.shape, *(1,) * (4 - weight.ndim))
    node = pack(weight, group).node
    # fp16's step is 2^-10 of the value's power of two, but never below 2^-24: count what that step loses.
    exact = weight[weight != 0].astype(np.float64)
    step = 2.0 ** np.maximum(np.floor(np.log2(np.abs(exact))) - 10, -24)
    lost = (np.abs(np.round(exact / step) * step - exact) > 2.0**-11 * np.abs(exact)).any()
    assert (len(node.parameters) == 2) == lost
    back = PACKED.unpack(node)[0]
    assert np.array_equal(back != 0, weight != 0)
    assert (np.abs(back.astype(np.float64) - weight) <= 2.0**-11 * np.abs(weight.astype(np.float64))).all()
