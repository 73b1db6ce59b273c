"""Input channels woven together in shared memory: one load for two or four of them, whatever shape, tile and split."""

from __future__ import annotations

import re

import numpy as np
import pytest
from baked_check import H200, build, check
from conv_cases import EPILOGUES, Case, fill
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedeploy.layer import Geometry
from sparsedeploy.plugins.assemble import assemble
from sparsedeploy.plugins.baked.choose import candidates, from_config, ranked, to_config
from sparsedeploy.plugins.baked.read import read_image
from sparsedeploy.plugins.baked.schedule import Schedule
from sparsedeploy.plugins.cost import ceilings
from sparsedeploy.plugins.kernel import Config

SMALL = Geometry(oc=12, ic=16, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1))
HOWS: tuple[Config, ...] = (
    {},
    {"splits": 2, "combine": 1},
    {"splits": 2, "combine": 1, "mates": 2, "pieces_first": 1, "dependent": 1},
    {"splits": 3, "combine": 2},
    {"parts": 2, "dependent": 1},
    {"step": 16, "stream": 1},
)


@st.composite
def layers(draw: st.DrawFn) -> Case:
    """A layer whose input channels are a multiple of two, four or, now and then, of neither."""
    oc, ic, group = draw(st.sampled_from([(5, 8, 1), (8, 16, 1), (6, 12, 2), (3, 6, 1), (4, 5, 1), (16, 24, 1)]))
    kh, kw = draw(st.sampled_from([(1, 1), (3, 3), (3, 1), (5, 3)]))
    stride = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    dilation = draw(st.sampled_from([(1, 1), (2, 1)]))
    pads = draw(st.tuples(*[st.integers(0, 2)] * 4))
    h, w = draw(st.integers(3, 9)), draw(st.sampled_from([3, 4, 6, 7, 8, 12]))
    g = Geometry(oc=oc, ic=ic, kh=kh, kw=kw, h=h + 6, w=w, stride=stride, dilation=dilation, pads=pads, group=group)
    nnz = draw(st.integers(0, oc * ic // group * kh * kw))
    return fill(g, draw(st.sampled_from(EPILOGUES)), nnz, draw(st.integers(1, 5)), draw(st.integers(0, 2**31)))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    case=layers(), how=st.sampled_from(HOWS), interleave=st.sampled_from([2, 4]), images=st.integers(0, 3),
    sizes=st.tuples(st.integers(1, 8), st.sampled_from([32, 48, 96]), st.sampled_from([0, 4]), st.sampled_from([4, 8]), st.integers(1, 2)),
    arch=st.sampled_from([53, 80, 90]),
)  # fmt: skip
def test_any_shape_is_computed_read_back_and_assembled(
    case: Case, how: Config, interleave: int, images: int, sizes: tuple[int, ...], arch: int
) -> None:
    channels, pixels, columns, stage, rows = sizes
    g = case.geometry
    pixels = images * -(-g.oh // rows) * g.ow or pixels  # tiles of whole images, or any
    config = {
        "channels": channels, "pixels": min(pixels, 512), "columns": min(columns, g.ow), "stage_channels": stage, "rows": rows,
        "interleave": interleave, "ring": 2,
    }  # fmt: skip
    node = build(case, config | how, "fp32", (arch,))
    check(case, node, "f32", arch)
    assemble(node.images[0].data, arch)


@pytest.mark.parametrize("interleave", [2, 4])
def test_one_load_brings_all_channels_of_a_pixel(interleave: int) -> None:
    """Dense weights: as many loads as taps of every second or fourth channel, and the reader finds every weight behind them."""
    case = fill(SMALL, EPILOGUES[0], SMALL.oc * SMALL.ic * 9, batch=2, seed=3)
    node = build(case, {"channels": 12, "pixels": 98, "stage_channels": 4, "ring": 2, "interleave": interleave}, "fp32")
    text = node.images[0].data.decode()
    assert len(re.findall(rf"ld\.shared\.v{interleave}\.f32", text)) == 16 // interleave * 9
    assert "ld.shared.f32" not in text
    assert "cp.async" not in text
    np.testing.assert_array_equal(read_image(text).weight, case.weight)


def test_a_single_channel_is_loaded_alone() -> None:
    case = fill(SMALL, EPILOGUES[0], 1, batch=1, seed=3)
    text = build(case, {"channels": 12, "pixels": 49, "interleave": 4, "ring": 2}, "fp32").images[0].data.decode()
    assert len(re.findall(r"ld\.shared\.f32 %v\d", text)) == 1
    assert "ld.shared.v4" not in text


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (r"ld\.shared\.v2\.f32 \{%v(\d+), %v(\d+)\}", r"ld.shared.v2.f32 {%v\1, %v\1}", "side by side"),
        (r"(ld\.shared\.v2\.f32 .*%b\+)(\d+)", lambda m: f"{m[1]}{int(m[2]) + 4}", "side by side|outside"),
        (r"abreast=2", "abreast=4", "side by side|outside"),
    ],
)
def test_the_reader_refuses_loads_of_other_channels(old: str, new: str, why: str) -> None:
    case = fill(SMALL, EPILOGUES[0], 400, batch=1, seed=5)
    node = build(case, {"channels": 12, "pixels": 49, "stage_channels": 4, "interleave": 2, "ring": 2}, "fp32")
    text = re.sub(old, new, node.images[0].data.decode(), count=1)
    with pytest.raises(ValueError, match=why):
        read_image(text)


def test_swapped_channels_of_a_load_are_other_weights() -> None:
    case = fill(SMALL, EPILOGUES[0], 400, batch=1, seed=5)
    node = build(case, {"channels": 12, "pixels": 49, "stage_channels": 4, "interleave": 2, "ring": 2}, "fp32")
    text = re.sub(r"\{%v(\d+), %v(\d+)\}, \[%b", r"{%v\2, %v\1}, [%b", node.images[0].data.decode(), count=1)
    assert not np.array_equal(read_image(text).weight, case.weight)


def test_whole_images_load_no_rows_of_zeros() -> None:
    """512@7 by 16 images: 112 rows of 7 elements, where a tile that crosses images has 144 with their borders."""
    g = Geometry(oc=512, ic=512, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1))
    s = from_config(g, "fp32", {"pixels": 784, "interleave": 4, "stage_channels": 4, "ring": 2})
    assert (s.abreast, s.whole_rows, s.positions, s.slots) == (4, 7, 784, 1)
    plain = from_config(g, "fp32", {"pixels": 784, "stage_channels": 4})
    assert (plain.abreast, plain.whole_rows, plain.positions, plain.slots) == (1, 0, 1008, 2)
    assert from_config(g, "fp32", to_config(s)) == s


def test_channels_that_do_not_divide_stay_apart() -> None:
    odd = SMALL.model_copy(update={"ic": 15})
    assert Schedule(odd, "f32", interleave=4).abreast == 1
    assert Schedule(SMALL, "f32", interleave=4, stage_channels=2).abreast == 1
    assert Schedule(SMALL, "h2", pair="image", interleave=4).abreast == 1


def test_only_two_or_four_channels_are_woven_together() -> None:
    with pytest.raises(ValueError, match="weaves 2 or 4 input channels"):
        from_config(SMALL, "fp32", {"interleave": 3})


def test_odd_maps_are_woven_and_wide_rows_are_not() -> None:
    """Where a copy moves 16 bytes weaving gained nothing on a device; no candidate of the search proper asks for it."""
    c = ceilings(H200)
    odd = Geometry(oc=384, ic=384, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1))
    wide = Geometry(oc=64, ic=64, kh=3, kw=3, h=56, w=56, pads=(1, 1, 1, 1))
    assert ranked(odd, "fp32", 32, 130_000, c, (90,), 1)[0][0].interleave == 4
    assert ranked(wide, "fp32", 32, 3686, c, (90,), 1)[0][0].interleave == 1
    assert all(s.interleave == 1 for s in candidates(wide, "fp32", 32, 0.1, True, True))
