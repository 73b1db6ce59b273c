"""Baked code against float64: what ships is interpreted, read back and assembled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from baked_check import H200, MODES, build, check
from conv_cases import EPILOGUES, Case, cases, fill, layer_of, pruned
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparsedeploy.code import check_code, sample_blocks
from sparsedeploy.devices import DEVICES
from sparsedeploy.layer import Epilogue, Geometry, Precision
from sparsedeploy.plugins.assemble import assemble
from sparsedeploy.plugins.baked import BAKED, MAX_NNZ
from sparsedeploy.plugins.baked.choose import SHARED_KB, from_config, ranked, to_config
from sparsedeploy.plugins.baked.emit import Entry, module
from sparsedeploy.plugins.baked.measured import winner
from sparsedeploy.plugins.baked.schedule import Schedule, cluster_channels, columns, flatten, nonzeros, pieces
from sparsedeploy.plugins.cost import ceilings
from sparsedeploy.plugins.kernel import Config, UnfitWeightsError
from sparsedeploy.plugins.launch import Launch

SQUARE = Geometry(oc=8, ic=6, kh=3, kw=3, h=9, w=8, pads=(1, 1, 1, 1))
ODD = Geometry(oc=8, ic=6, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1))


CONFIGS: tuple[Config, ...] = (
    {},
    {"channels": 4, "pixels": 64, "stage_channels": 2, "step": 16},
    {"channels": 4, "pixels": 96, "stage_channels": 1, "ring": 2, "rows": 2},
    {"channels": 3, "pixels": 32, "splits": 2, "combine": 1, "stage_channels": 2},
    {"channels": 3, "pixels": 32, "splits": 2, "combine": 1, "mates": 2, "pieces_first": 1, "dependent": 1},
    {
        "channels": 3,
        "pixels": 32,
        "splits": 2,
        "combine": 1,
        "stage_channels": 1,
        "sync": 2,
        "dependent": 1,
        "parts": 2,
    },
    {"channels": 2, "pixels": 64, "splits": 3, "combine": 2},
    {"channels": 2, "pixels": 32, "splits": 3, "combine": 2, "pieces_first": 1, "mates": 2},
    {"channels": 8, "pixels": 64, "columns": 8, "stage_channels": 4},
)


@pytest.mark.parametrize(("precision", "more", "mode"), MODES.values(), ids=list(MODES))
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: " ".join(f"{k}={v}" for k, v in config.items()) or "default"
)
@pytest.mark.parametrize("geometry", [SQUARE, ODD], ids=["9x8", "7x7"])
def test_every_schedule_computes_the_convolution(
    geometry: Geometry, config: Config, precision: Precision, more: Config, mode: str
) -> None:
    case = fill(geometry, EPILOGUES[1], 90, batch=3, seed=3)
    settings = {} if not config and "pair_rows" in more else more  # pairing is a schedule's, not the default's
    check(case, build(case, config | settings, precision, (90,)), mode, 90)


@settings(max_examples=14, derandomize=True, deadline=None)
@given(case=cases(), arch=st.sampled_from([53, 75, 80, 90]), mode=st.sampled_from(["f32", "hf", "h2"]))
def test_any_convolution_on_any_architecture(case: Case, arch: int, mode: str) -> None:
    precision: Precision = "fp32" if mode == "f32" else "fp16"
    node = build(case, {"sums": 32} if mode == "hf" else {}, precision, (arch,), batch=len(case.x))
    check(case, node, mode, arch)


@pytest.mark.parametrize("how", EPILOGUES, ids=lambda how: how.describe())
@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[3], CONFIGS[6]], ids=["whole", "cluster", "planes"])
@pytest.mark.parametrize("mode", ["f32", "h2"])
def test_every_epilogue(how: Epilogue, config: Config, mode: str) -> None:
    case = fill(SQUARE, how, 100, batch=2, seed=5)
    check(case, build(case, config, "fp32" if mode == "f32" else "fp16", (90,)), mode, 90)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_one_plan_serves_every_batch(batch: int) -> None:
    g = Geometry(oc=16, ic=8, kh=3, kw=3, h=6, w=6, pads=(1, 1, 1, 1))
    case = fill(g, EPILOGUES[0], 120, batch, seed=1)
    for precision, _, mode in (MODES["f32"], MODES["h2"]):
        node = build(case, {}, precision, (80, 90), batch=8)
        assert len(node.plan) == 2
        assert node.plan[0].max_n + 1 == node.plan[1].min_n
        assert node.plan[1].max_n == 0
        for arch in (80, 90):
            check(case, node, mode, arch)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
def test_weights_and_bias_are_read_back_exactly(sparsity: float) -> None:
    total = int(np.prod(SQUARE.weight_shape))
    case = fill(SQUARE, EPILOGUES[1], round(total * (1 - sparsity)), batch=1, seed=9)
    weight, bias = BAKED.unpack(build(case, {}, "fp32", (53, 90), batch=8))
    np.testing.assert_array_equal(weight, case.weight)
    np.testing.assert_array_equal(bias, case.bias)
    half, _ = BAKED.unpack(build(case, {}, "fp16", (90,)))
    np.testing.assert_array_equal(half, case.weight.astype(np.float16).astype(np.float32))


def test_building_twice_gives_the_same_bytes() -> None:
    case = fill(SQUARE, EPILOGUES[2], 100, batch=1, seed=4)
    first, second = (build(case, {}, "fp16", (53, 80, 90), batch=8) for _ in range(2))
    assert first.same_as(second)


ARCHS = tuple(sorted({device.sm for device in DEVICES}))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("config", [{"sums": 16}, {"sums": 32}], ids=["h2", "hf"])
def test_code_assembles_for_every_target(arch: int, config: Config) -> None:
    case = fill(ODD, EPILOGUES[2], 60, batch=1, seed=6)
    node = build(case, config, "fp16", (arch,))
    assert assemble(node.images[0].data, arch).cubin[:4] == b"\x7fELF"
    single = build(case, CONFIGS[6], "fp32", (arch,))
    made = assemble(single.images[0].data, arch)
    assert set(made.usage) == {"conv", "conv_sum"}
    assert made.spill_bytes == 0


def test_a_large_layer_is_launched_in_parts_that_overlap_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsedeploy.plugins.baked.choose.WHOLE_FMAS", 50)
    monkeypatch.setattr("sparsedeploy.plugins.baked.choose.PART_FMAS", 40)
    case = fill(SQUARE, EPILOGUES[0], 100, batch=1, seed=6)
    for archs, overlap in (((90,), True), ((80, 90), False)):
        node = build(case, {"channels": 2, "pixels": 32, "stage_channels": 2}, "fp32", archs)
        ops = [op for variant in node.plan for op in variant.ops if isinstance(op, Launch)]
        assert [op.entry for op in ops] == ["conv_0", "conv_1", "conv_2"]
        assert all(op.dependent == overlap for op in ops)
        check(case, node, "f32", archs[0])
        assert set(assemble(node.images[0].data, archs[0]).usage) == {"conv_0", "conv_1", "conv_2"}


def test_every_part_of_a_layer_is_sampled_when_its_code_is_checked() -> None:
    """As many launches as blocks to run: one block of each, the layer's first and last among them."""
    case = fill(Geometry(oc=16, ic=4, kh=3, kw=3, h=20, w=20, pads=(1, 1, 1, 1)), EPILOGUES[1], 100, batch=1, seed=6)
    node = build(case, {"channels": 4, "pixels": 64, "stage_channels": 2, "parts": 4}, "fp32", (90,))
    blocks = sample_blocks(node, 4, np.random.default_rng(0))
    assert [len(chosen) for chosen in blocks.values()] == [1, 1, 1, 1]
    assert (blocks[0], blocks[3]) == ([0], [6])
    some = check_code(node)
    assert some.passed
    assert 0 < some.pixels < some.of


def test_splits_are_summed_in_a_cluster_only_where_every_image_has_clusters() -> None:
    g = Geometry(oc=64, ic=256, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1))
    for archs, combines in (((90,), {"none", "cluster"}), ((80, 90), {"none", "planes"})):
        found = ranked(g, "fp32", 1, 14000, ceilings(H200), archs, 40)
        assert {s.combine for s, _, _ in found} <= combines
        assert all(s.cluster == 1 or min(archs) >= 90 for s, _, _ in found)


def test_a_configuration_for_one_architecture_is_fitted_to_others() -> None:
    case = fill(SQUARE, EPILOGUES[2], 100, batch=3, seed=8)
    config = {
        "channels": 4,
        "pixels": 96,
        "splits": 2,
        "combine": 1,
        "mates": 2,
        "dependent": 1,
        "stage_channels": 3,
        "ring": 4,
    }
    node = build(case, config, "fp32", (53, 80, 90))
    assert all(getattr(op, "cluster", 1) == 1 for variant in node.plan for op in variant.ops)
    for arch in (53, 80, 90):
        check(case, node, "f32", arch)
    wide = Geometry(oc=8, ic=32, kh=3, kw=3, h=56, w=56, pads=(1, 1, 1, 1))
    case = fill(wide, EPILOGUES[0], 200, batch=1, seed=8)
    node = build(case, {"channels": 8, "pixels": 512, "stage_channels": 16, "ring": 2}, "fp32", (53, 90))
    assert all(op.shared_bytes <= 48 * 1024 for variant in node.plan for op in variant.ops if isinstance(op, Launch))


def test_another_kernels_node_is_refused() -> None:
    case = fill(SQUARE, EPILOGUES[0], 10, batch=1, seed=2)
    node = replace(build(case, {}, "fp32", (90,)), kernel="packed")
    with pytest.raises(ValueError, match="made by kernel packed"):
        BAKED.unpack(node)


def test_a_configuration_names_its_schedule() -> None:
    for precision, _, _ in (MODES["f32"], MODES["h2"]):
        for s, _, _ in ranked(SQUARE, precision, 8, 43, ceilings(H200), (90,), 20):
            assert from_config(SQUARE, precision, to_config(s)) == s
    with pytest.raises(ValueError, match="no parameter warp"):
        from_config(SQUARE, "fp32", {"warp": 3})


def test_no_block_asks_for_more_shared_memory_than_the_architecture_has() -> None:
    wide = Geometry(oc=64, ic=64, kh=3, kw=3, h=56, w=56, pads=(1, 1, 1, 1))
    for device in DEVICES:
        for s, _, _ in ranked(wide, "fp32", 8, 3700, ceilings(device), (device.sm,), 3):
            assert s.block_bytes(min(wide.oc, s.channels + s.channels // 8)) <= SHARED_KB[device.sm] * 1024


def test_pixels_of_a_warp_meet_no_bank_twice() -> None:
    for side in (56, 28, 14, 7):
        g = Geometry(oc=64, ic=64, kh=3, kw=3, h=side, w=side, pads=(1, 1, 1, 1))
        assert Schedule(g, "f32", pixels=384).load_wavefronts == 1.0


def test_channels_are_spread_evenly_and_by_the_columns_they_share() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 60, 48)
    weight = np.zeros((48, 20, 3, 3), np.float32)
    for row, count in zip(weight.reshape(48, -1), counts, strict=True):
        row[rng.permutation(180)[:count]] = 1.0
    g = Geometry(oc=48, ic=20, kh=3, kw=3, h=4, w=4)
    used = columns(nonzeros(weight, g), g)
    groups = cluster_channels(used, range(48), 4, 14)
    assert sorted(oc for group in groups for oc in group) == list(range(48))
    loads = [counts[list(group)].sum() for group in groups]
    assert max(loads) <= 1.1 * np.mean(loads)
    # Two families of channels with disjoint columns do not mix.
    family: NDArray[np.bool_] = np.zeros((16, 40), np.bool_)
    family[::2, :20], family[1::2, 20:] = True, True
    assert {tuple(oc % 2 for oc in group) for group in cluster_channels(family, range(16), 2, 8)} == {
        (0,) * 8,
        (1,) * 8,
    }


def test_pieces_hold_every_weight_once() -> None:
    for g in (SQUARE, SQUARE.model_copy(update={"group": 2}), SQUARE.model_copy(update={"oc": 6, "group": 6})):
        for splits in (1, 2, 4):
            weight = pruned(g.weight_shape, 20, 1)
            found = nonzeros(weight, g)
            parts = pieces(Schedule(g, "f32", channels=3, splits=splits), found)
            assert len(parts) % splits == 0
            held = [
                sum(oc in part.oc and part.ic[0] <= ic < part.ic[1] for part in parts)
                for oc, ic in zip(found.oc, found.ic, strict=True)
            ]
            assert held == [1] * found.count


def test_halves_that_overflow_or_vanish_are_refused_unless_sums_are_fp32() -> None:
    case = fill(SQUARE, EPILOGUES[0], 10, batch=1, seed=2)
    for value in (1e6, 1e-9, 1.2345e-5):  # the last lies between fp16's subnormal numbers, 5.5e-4 of itself off
        weight = case.weight.copy()
        weight[0, 0, 0, 0] = value
        bad = replace(case, weight=weight, layer=layer_of(SQUARE, weight))
        with pytest.raises(UnfitWeightsError, match="sums=32"):
            build(bad, {}, "fp16", (90,))
        np.testing.assert_array_equal(BAKED.unpack(build(bad, {"sums": 32}, "fp16", (90,)))[0], weight)


@pytest.mark.parametrize(("oc", "ic", "k", "side"), [(64, 32, 3, 256), (256, 64, 1, 56), (256, 1024, 1, 14)])
def test_what_won_on_the_device_comes_before_what_is_predicted(oc: int, ic: int, k: int, side: int) -> None:
    g = Geometry(oc=oc, ic=ic, kh=k, kw=k, h=side, w=side, pads=(k // 2,) * 4)
    layer = layer_of(g, pruned(g.weight_shape, oc * ic * k * k // 10, 1))
    (first, *others) = BAKED.configs(layer, H200, "fp32", 32)
    known = winner(g, "fp32", 32, 0.1)
    assert known is not None
    assert {key: first[0][key] for key in known.config} == known.config
    assert first[1].us == known.us
    assert "measured" in first[1].source
    assert all(other.us >= known.us for _, other in others)
    assert winner(g, "fp32", 4, 0.1) is None


def test_groups_share_inputs_where_their_code_fits_together() -> None:
    """A 1x1 layer of four groups, whose inputs are beyond L2: blocks of all groups beside each other."""
    pointwise = Geometry(oc=256, ic=64, kh=1, kw=1, h=56, w=56)
    assert all(s.pieces_first for s, _, _ in ranked(pointwise, "fp32", 32, 1638, ceilings(H200), (90,), 3))
    one = Geometry(oc=64, ic=64, kh=3, kw=3, h=56, w=56, pads=(1, 1, 1, 1))
    assert not any(s.pieces_first for s, _, _ in ranked(one, "fp32", 32, 3687, ceilings(H200), (90,), 3))


def test_supports_says_why_not() -> None:
    case = fill(SQUARE, EPILOGUES[0], 10, batch=1, seed=2)
    assert BAKED.supports(case.layer, H200, "fp32") is None
    assert case.layer.zeros is not None
    many = case.layer.model_copy(update={"zeros": case.layer.zeros.model_copy(update={"nnz": MAX_NNZ + 1})})
    reason = BAKED.supports(many, H200, "fp32")
    assert reason is not None
    assert reason.code == "too-many-nonzeros"
    transposed = BAKED.supports(case.layer.model_copy(update={"op": "ConvTranspose"}), H200, "fp32")
    assert transposed is not None
    assert transposed.code == "operator"


@pytest.mark.parametrize(
    ("arch", "version", "stream", "marked"),
    [(80, "7.0", True, False), (90, "7.8", True, True), (90, "7.8", False, False)],
)
def test_activations_leave_the_l2_first_where_they_stream(arch: int, version: str, stream: bool, marked: bool) -> None:
    g = Geometry(oc=4, ic=3, kh=3, kw=3, h=6, w=8, pads=(1, 1, 1, 1))
    weight = np.ones(g.weight_shape, np.float32)
    entry = Entry("k", Schedule(g, "f32", stream=stream))
    lines = module(g, nonzeros(weight, g), None, Epilogue(), [entry], arch, version).splitlines()
    copies = [line for line in lines if "cp.async." in line and ".shared.global" in line]
    stores = [line for line in lines if "st.global" in line]
    assert copies
    assert len(stores) == g.oc
    assert all((".L2::cache_hint" in line and line.endswith(", %first;")) == marked for line in copies)
    assert all(("st.global.cs." in line) == marked for line in stores)
    assert any("createpolicy" in line for line in lines) == marked


def test_a_flattened_convolution_says_so_in_its_header() -> None:
    g = Geometry(oc=4, ic=4, kh=1, kw=1, h=6, w=10)
    text = module(
        flatten(g),
        nonzeros(pruned(g.weight_shape, 5, 0), g),
        None,
        Epilogue(),
        [Entry("k", Schedule(flatten(g), "f32"))],
        90,
        "7.8",
    )
    assert "// baked 1 ic=4 oc=4 kh=1 kw=1 stride=1,1 dilation=1,1 pads=0,0,0,0 h=1 w=60 group=1" in text
