"""1x1 convolutions of a stride above 1: compiled as the dense one of the output's size, whose pixels are picked or gathered."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from baked_check import H200, MODES, build, check
from conv_cases import EPILOGUES, Case, fill, layer_of, pruned
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedeploy.code import check_code, sample_blocks
from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins.assemble import assemble
from sparsedeploy.plugins.baked import BAKED
from sparsedeploy.plugins.baked.choose import estimate, from_config, ranked, to_config
from sparsedeploy.plugins.baked.interpret import run_plan
from sparsedeploy.plugins.baked.measured import winner
from sparsedeploy.plugins.baked.read import read_image
from sparsedeploy.plugins.baked.schedule import Schedule, compiled
from sparsedeploy.plugins.cost import ceilings, time_us
from sparsedeploy.plugins.kernel import Config
from sparsedeploy.plugins.launch import Launch
from sparsedeploy.plugins.node import SparseConv

COMBINES: tuple[Config, ...] = (
    {},
    {"splits": 2, "combine": 1},
    {"splits": 2, "combine": 1, "mates": 2, "pieces_first": 1, "dependent": 1},
    {"splits": 3, "combine": 2},
    {"parts": 2, "dependent": 1},
)
SHORTCUT = Geometry(oc=16, ic=8, kh=1, kw=1, h=12, w=12, stride=(2, 2))


@st.composite
def layers(draw: st.DrawFn) -> Case:
    """A strided 1x1 layer of any map, whose stride need not divide it."""
    oc, ic, group = draw(st.sampled_from([(1, 1, 1), (5, 3, 1), (8, 16, 1), (6, 4, 2), (4, 4, 4)]))
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda s: s != (1, 1)))
    h, w = draw(st.integers(1, 13)), draw(st.one_of(st.integers(1, 13), st.sampled_from([16, 24])))
    g = Geometry(oc=oc, ic=ic, kh=1, kw=1, h=h, w=w, stride=stride, group=group)
    nnz = draw(st.integers(0, oc * ic // group))
    return fill(g, draw(st.sampled_from(EPILOGUES)), nnz, draw(st.integers(1, 5)), draw(st.integers(0, 2**31)))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    case=layers(), name=st.sampled_from(sorted(MODES)), how=st.sampled_from(COMBINES), gather=st.integers(0, 1),
    sizes=st.tuples(st.integers(1, 6), st.sampled_from([32, 48, 64]), st.sampled_from([0, 4, 7]), st.integers(1, 3), st.integers(1, 2)),
    arch=st.sampled_from([53, 80, 90]),
)  # fmt: skip
def test_any_strided_shape_is_computed_read_back_and_assembled(
    case: Case, name: str, how: Config, gather: int, sizes: tuple[int, ...], arch: int
) -> None:
    precision, more, mode = MODES[name]
    channels, pixels, columns, stage, rows = sizes
    config = {
        "channels": channels, "pixels": pixels, "columns": min(columns, case.geometry.ow), "stage_channels": stage, "rows": rows,
        "gather": gather,
    }  # fmt: skip
    node = build(case, config | how | more, precision, (arch,))
    check(case, node, mode, arch)
    assert assemble(node.images[0].data, arch).spill_bytes == 0


@settings(max_examples=8, derandomize=True, deadline=None)
@given(case=layers(), mode=st.sampled_from(["f32", "hf", "h2"]))
def test_what_is_chosen_serves_every_architecture_and_batch(case: Case, mode: str) -> None:
    node = build(
        case, {"sums": 32} if mode == "hf" else {}, "fp32" if mode == "f32" else "fp16", (53, 80, 90), len(case.x) * 4
    )
    for arch in (53, 80, 90):
        check(case, node, mode, arch)


def test_only_rows_that_are_used_are_read() -> None:
    """Rows between them hold NaN, and columns too: a sum that met one would be NaN."""
    for gather in (0, 1):
        case = fill(SHORTCUT, EPILOGUES[0], 60, batch=2, seed=7)
        case.x[:, :, 1::2] = np.nan
        case.x[:, :, :, 1::2] = np.nan
        node = build(case, {"channels": 8, "pixels": 64, "gather": gather}, "fp32")
        y = run_plan(node.plan, node.images, "fp32", case.x.astype(np.float32), None, node.constants, SHORTCUT)
        assert np.isfinite(y).all()


@pytest.mark.parametrize(
    ("side", "precision", "share"),
    [(56, "fp32", 2.0), (28, "fp32", 16 / 7), (14, "fp32", 17 * 32 / 196), (56, "fp16", 16 / 7)],
)
def test_sectors_that_a_fill_fetches_are_counted(side: int, precision: Precision, share: float) -> None:
    """Every second row of 56 floats is 7 sectors of which half is kept; of 28 floats 3.5, of 14 floats 2 or 3."""
    g = Geometry(oc=64, ic=64, kh=1, kw=1, h=side, w=side, stride=(2, 2))
    s = from_config(g, precision, {})
    assert s.sector_share == pytest.approx(share)
    assert replace(s, gather=True).sector_share == 1.0
    one, two = estimate(s, 400, 8), estimate(replace(s, gather=True), 400, 8)
    useful = 8 * 64 * g.oh * g.ow * s.global_bytes
    assert one.read_bytes == pytest.approx(useful * share)
    assert (two.read_bytes, two.ahead_bytes) == (useful, pytest.approx(useful * (1 + share)))


def test_gathering_ahead_is_chosen_where_many_pieces_read_the_input() -> None:
    c = ceilings(H200)
    deep = Geometry(oc=2048, ic=1024, kh=1, kw=1, h=14, w=14, stride=(2, 2))
    flat = Geometry(oc=128, ic=64, kh=1, kw=1, h=56, w=56, stride=(2, 2))
    best = ranked(deep, "fp32", 32, 2048 * 1024 // 10, c, (90,), 1)[0][0]
    assert best.gather
    assert (
        time_us(estimate(replace(best, gather=False), 200_000, 32), c)[0]
        > ranked(deep, "fp32", 32, 200_000, c, (90,))[0][1]
    )
    for batch in (1, 32):
        assert not ranked(flat, "fp32", batch, 819, c, (90,), 1)[0][0].gather
    assert not any(s.gather for s, _, _ in ranked(deep, "fp32", 32, 200_000, c, (80,), 40) if s.combine == "planes")


@pytest.mark.parametrize(("oc", "ic", "side", "batch"), [(512, 256, 56, 32), (2048, 1024, 14, 32), (128, 64, 56, 1)])
def test_what_won_on_the_device_is_the_first_configuration(oc: int, ic: int, side: int, batch: int) -> None:
    g = Geometry(oc=oc, ic=ic, kh=1, kw=1, h=side, w=side, stride=(2, 2))
    known = winner(g, "fp32", batch, 0.1)
    assert known is not None
    assert winner(g.model_copy(update={"stride": (1, 1)}), "fp32", batch, 0.1) is None
    first, predicted = BAKED.configs(layer_of(g, pruned(g.weight_shape, oc * ic // 10, 1)), H200, "fp32", batch)[0]
    assert {key: first[key] for key in known.config} == known.config
    assert predicted.us == known.us


def test_gathered_copy_is_a_launch_ahead_and_has_the_workspace_to_itself() -> None:
    case = fill(SHORTCUT, EPILOGUES[1], 60, batch=2, seed=7)
    (variant,) = build(case, {"channels": 8, "pixels": 64, "gather": 1}, "fp32").plan
    first, conv = (op for op in variant.ops if isinstance(op, Launch))
    assert (first.entry, conv.entry) == ("conv_gather", "conv")
    assert [arg.kind for arg in first.args] == ["input", "workspace", "N"]
    assert conv.args[0].kind == "workspace"
    assert variant.workspace.value({"N": 3}) == 3 * 8 * 6 * 6 * 4
    planes = build(case, {"channels": 8, "pixels": 64, "gather": 1, "splits": 2, "combine": 2}, "fp32").plan[0]
    assert [op.entry for op in planes.ops if isinstance(op, Launch)] == ["conv", "conv_sum"]


def test_a_configuration_names_its_schedule() -> None:
    for s, _, _ in ranked(SHORTCUT, "fp16", 8, 60, ceilings(H200), (90,), 20, (16, 32)):
        assert from_config(SHORTCUT, "fp16", to_config(s)) == s
    dense = SHORTCUT.model_copy(update={"stride": (1, 1)})
    assert "gather" not in to_config(from_config(dense, "fp32", {}))
    assert not from_config(dense, "fp32", {"gather": 1}).gather


def test_padded_and_wider_kernels_are_no_views() -> None:
    for change in ({"pads": (1, 0, 0, 0)}, {"kh": 3, "pads": (1, 0, 1, 0)}, {"stride": (1, 1)}):
        assert compiled(SHORTCUT.model_copy(update=change), "none")[1] is None
    seen, origin = compiled(SHORTCUT, "none")
    assert (seen.h, seen.w, seen.stride, origin) == (1, 36, (1, 1), SHORTCUT)
    assert compiled(SHORTCUT, "row")[0].h == 6
    assert isinstance(from_config(SHORTCUT, "fp32", {}), Schedule)


@pytest.mark.parametrize("gather", [0, 1])
def test_code_is_checked_by_some_of_its_blocks(gather: int) -> None:
    g = Geometry(oc=16, ic=4, kh=1, kw=1, h=40, w=40, stride=(2, 2))
    node = build(fill(g, EPILOGUES[1], 30, 1, 2), {"channels": 4, "pixels": 32, "gather": gather}, "fp32")
    blocks = sample_blocks(node, 4, np.random.default_rng(0))
    assert list(blocks) == [gather]  # what gathers runs whole
    some = check_code(node)
    assert some.passed
    assert 0 < some.pixels < some.of


def text_of(gather: int, g: Geometry = SHORTCUT) -> tuple[SparseConv, str]:
    node = build(
        fill(g, EPILOGUES[1], 60, batch=1, seed=7), {"channels": 8, "pixels": 64, "gather": gather, "parts": 2}, "fp32"
    )
    return node, node.images[0].data.decode()


@pytest.mark.parametrize(
    ("gather", "change", "message"),
    [
        (0, lambda t: t.replace("input=strided", "input=gathered"), "reads what nothing gathers"),
        (1, lambda t: t.replace("input=gathered", "input=strided"), "does not say which input"),
        (1, lambda t: t.replace(" input=gathered", "", 1), "does not say which input"),
        (1, lambda t: t.replace("// gather conv\n", "", 1), "an entry that no comment announces"),
        (0, lambda t: t.replace(" view=12,12,2,2", ""), "does not say which input"),
        (1, lambda t: re.sub(r"(// entry conv_1 .*)( input=gathered)", r"\1", t), "does not say which input"),
    ],
)  # fmt: skip
def test_a_text_that_says_other_input_than_it_reads_is_refused(gather: int, change: Any, message: str) -> None:
    text = text_of(gather)[1]
    assert change(text) != text
    with pytest.raises(ValueError, match=message):
        read_image(change(text))


def test_image_of_another_view_or_plan_without_the_copy_is_refused() -> None:
    node, text = text_of(1)
    other = replace(node.images[0], data=text.replace("view=12,12,2,2", "view=11,12,2,2").encode())
    with pytest.raises(
        ValueError, match=r"every \(2, 2\)-th pixel of 11x12, the node says 1x1, stride \(2, 2\) on 12x12"
    ):
        BAKED.unpack(replace(node, images=(other,)))
    variant = node.plan[0]
    with pytest.raises(
        ValueError, match="the launch plan runs conv_0, conv_1, image sm_90 fp32 has conv_gather, conv_0, conv_1"
    ):
        BAKED.unpack(replace(node, plan=(replace(variant, ops=variant.ops[1:]),)))
