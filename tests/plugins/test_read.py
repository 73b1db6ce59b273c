"""Weights read back from emitted PTX, bit for bit; and texts that were tampered with are refused by line."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from conv_cases import pruned
from numpy.typing import NDArray

from sparsedeploy.layer import Epilogue, Geometry
from sparsedeploy.plugins.baked import emit
from sparsedeploy.plugins.baked.read import read_image, read_weights
from sparsedeploy.plugins.baked.schedule import Schedule, flatten, nonzeros
from sparsedeploy.plugins.launch import Launch, Variant, const
from sparsedeploy.plugins.node import Image, SparseConv

Floats = NDArray[np.float32]
MAP = Geometry(oc=12, ic=10, kh=3, kw=3, h=9, w=8, pads=(1, 1, 1, 1))
GROUPED = Geometry(oc=8, ic=6, kh=5, kw=3, h=13, w=12, pads=(2, 1, 0, 2), stride=(2, 2), dilation=(1, 2), group=2)
POINTWISE = Geometry(oc=16, ic=20, kh=1, kw=1, h=5, w=7)


def data(g: Geometry) -> tuple[Floats, Floats]:
    weight = pruned(g.weight_shape, max(1, int(np.prod(g.weight_shape)) // 5), 3)
    return weight.astype(np.float16).astype(np.float32), np.arange(1, g.oc + 1, dtype=np.float32) / 8


def ptx(g: Geometry, weight: Floats, bias: Floats | None, **options: object) -> str:
    schedule = Schedule(geometry=flatten(g), **{"mode": "f32", "pixels": 64, **options})  # type: ignore[arg-type]
    entry = emit.Entry("conv", schedule)
    return emit.module(
        flatten(g), nonzeros(weight, g), bias, Epilogue(bias=bias is not None, activation="relu"), [entry], 90, "7.8"
    )


SCHEDULES = {
    "f32": {},
    "rows": {"rows": 3},
    "groups": {"channels": 5},
    "cluster": {"channels": 6, "splits": 2, "combine": "cluster"},
    "planes": {"channels": 6, "splits": 2, "combine": "planes"},
    "plain": {"use_async": False, "stage_channels": 3},
    "hf": {"mode": "hf"},
    "image pairs": {"mode": "h2", "pair": "image", "rows": 2},
    "row pairs": {"mode": "h2", "pair": "row"},
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("g", [MAP, GROUPED, POINTWISE], ids=["3x3", "grouped", "1x1"])
def test_weights_come_back_bit_for_bit(g: Geometry, options: dict[str, object]) -> None:
    if g is GROUPED and options.get("splits"):
        pytest.skip("splits are for ungrouped layers")
    weight, bias = data(g)
    read = read_image(ptx(g, weight, bias, **options))
    assert np.array_equal(read.weight.view(np.uint32), weight.view(np.uint32))
    assert np.array_equal(read.bias, bias)
    assert read.half == (options.get("mode") == "h2")


def test_full_precision_weights_and_no_bias() -> None:
    weight = pruned(MAP.weight_shape, 100, 5)
    read = read_image(ptx(MAP, weight, None))
    assert np.array_equal(read.weight.view(np.uint32), weight.view(np.uint32))
    assert not read.bias.any()


@pytest.mark.parametrize("nnz", [0, 1, 12 * 10 * 9])
def test_empty_single_and_full(nnz: int) -> None:
    weight = pruned(MAP.weight_shape, nnz, 1)
    assert np.array_equal(read_image(ptx(MAP, weight, None)).weight, weight)


def line_of(text: str, pattern: str, which: int = 0) -> str:
    return [line for line in text.splitlines() if re.match(pattern, line)][which]


FMA, LOAD = r"fma\.rn\.f32 %a", r"ld\.shared\.f32 %v"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, f, ld: t.replace(f, "@%p1 " + f, 1), "written in a way that is not accounted for"),
        (lambda t, f, ld: t.replace(f, f + "\n" + f, 1), "added twice"),
        (lambda t, f, ld: t.replace(f, re.sub(r"0f[0-9A-F]{8}", "0f00000000", f), 1), "a weight of 0.0"),
        (lambda t, f, ld: t.replace(f, re.sub(r"0f[0-9A-F]{8}", "0f7FC00000", f), 1), "a weight of nan"),
        (lambda t, f, ld: t.replace(f, re.sub(r"%v\d+", "%v999", f), 1), "holds nothing that was loaded"),
        (lambda t, f, ld: t.replace(f, re.sub(r"%a(\d+)", "%a999", f), 1), "an fma that is no sum of this piece"),
        (lambda t, f, ld: t.replace(f, f + "\nadd.f32 %a0, %a0, %v0;", 1), "%a0 is written"),
        (lambda t, f, ld: t.replace(f, f + "\nadd.s32 %b, %b, 4;", 1), "%b is written"),
        (lambda t, f, ld: t.replace(f, f + "\nbra somewhere;", 1), "a sum outside of a piece's arithmetic"),
        (lambda t, f, ld: t.replace(ld, re.sub(r"%b\+\d+", "%b+999999", ld), 1), "a load outside of stage"),
        (lambda t, f, ld: t.replace(ld, re.sub(r"%b\+(\d+)", lambda m: f"%b+{int(m.group(1)) + 2}", ld), 1), "a load outside of stage"),
        (lambda t, f, ld: re.sub(r"// piece [^\n]*\n", "", t, count=1), "a sum outside of a piece"),
        (lambda t, f, ld: t.replace("// baked 1 ", "// baked 2 ", 1), "a header of another form"),
        (lambda t, f, ld: re.sub(r"mov\.f32 %a0, 0f[0-9A-F]{8};\n", "", t, count=1), "ahead of its start|never starts"),
        (lambda t, f, ld: re.sub(r"// entry [^\n]*\n", "", t, count=1), "an entry that no comment announces"),
        (lambda t, f, ld: t.replace("// stage", "// stag", 1), "ahead of its stage"),
    ],
)  # fmt: skip
def test_tampering_is_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    weight, bias = data(MAP)
    text = ptx(MAP, weight, bias)
    changed = change(text, line_of(text, FMA, 5), line_of(text, LOAD, 3))
    assert changed != text
    with pytest.raises(ValueError, match=message) as error:
        read_image(changed)
    assert "line" in str(error.value)


def test_other_weight_is_read_as_it_stands() -> None:
    weight, bias = data(MAP)
    text = ptx(MAP, weight, bias)
    line = line_of(text, FMA, 5)
    read = read_image(text.replace(line, re.sub(r"0f[0-9A-F]{8}", "0f3FC00000", line), 1))
    assert (read.weight != weight).sum() == 1
    assert read.weight[read.weight != weight] == 1.5


def test_missing_row_of_a_thread_is_refused() -> None:
    weight, bias = data(MAP)
    text = ptx(MAP, weight, bias, rows=3)
    with pytest.raises(ValueError, match="is missing in some of the 3 rows"):
        read_image(text.replace(line_of(text, FMA, 4) + "\n", "", 1))


def node_of(*texts: tuple[int, str, str], bias: bool = True) -> SparseConv:
    images = tuple(Image(arch, dtype, "ptx", text.encode()) for arch, dtype, text in texts)  # type: ignore[arg-type]
    return SparseConv(
        "conv1", "baked", MAP, Epilogue(bias=bias, activation="relu"), "fp32", (np.zeros(1, np.int32),), images=images
    )


def test_node_reads_all_its_images() -> None:
    weight, bias = data(MAP)
    exact = pruned(MAP.weight_shape, 100, 5)
    half = ptx(MAP, exact, bias, mode="h2", pair="image")
    full = ptx(MAP, exact, bias)
    got, got_bias = read_weights(node_of((80, "fp16", half), (53, "fp32", full), (90, "fp32", full)))
    assert np.array_equal(got, exact)
    assert got_bias is not None
    assert np.array_equal(got_bias, bias)
    with pytest.raises(ValueError, match="conv1: images sm_53 fp32 and sm_90 fp32 carry different weights"):
        read_weights(node_of((53, "fp32", full), (90, "fp32", ptx(MAP, weight, bias))))
    with pytest.raises(ValueError, match="carry different bias"):
        read_weights(node_of((53, "fp32", full), (90, "fp32", ptx(MAP, exact, bias + 1))))
    with pytest.raises(ValueError, match="adds a bias, the node says there is none"):
        read_weights(node_of((53, "fp32", full), bias=False))
    with pytest.raises(ValueError, match="no PTX to read"):
        read_weights(node_of())


def with_residual(**options: object) -> tuple[str, Floats, Floats]:
    weight, bias = data(MAP)
    how = Epilogue(bias=True, activation="relu", residual="before_activation")
    schedule = Schedule(geometry=MAP, **{"mode": "f32", "pixels": 64, **options})  # type: ignore[arg-type]
    return emit.module(MAP, nonzeros(weight, MAP), bias, how, [emit.Entry("conv", schedule)], 90, "7.8"), weight, bias


@pytest.mark.parametrize("name", SCHEDULES)
def test_bias_is_read_where_a_residual_starts_the_sums(name: str) -> None:
    text, weight, bias = with_residual(**SCHEDULES[name])
    assert bool(re.search(r"ld\.global\.[fb]32 %a", text)) == (name not in ("planes", "hf", "cluster"))
    read = read_image(text)
    assert np.array_equal(read.weight, weight)
    assert np.array_equal(read.bias, bias)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, b: t.replace(b, b + "\n" + b, 1), "a bias out of its place"),
        (lambda t, b: t.replace(b, b.replace("%a0, %a0", "%a0, %a1"), 1), "a bias out of its place"),
        (lambda t, b: t.replace(b, "", 1).replace("// stage", b + "\n// stage", 2).replace("// stage", b + "\n// stage", 1), "a bias out of its place"),
        (lambda t, b: re.sub(r"@%s0 ld\.global\.f32 %a0, [^\n]*\n", "", t, count=1), "a bias out of its place"),
        (lambda t, b: t.replace("mov.f32 %a0, 0f00000000;", "mov.f32 %a0, 0f3F800000;", 1), "start unlike"),
        (lambda t, b: re.sub(r"(// stage [^\n]*\n)", r"\1@%s0 ld.global.f32 %a0, [%q2+0];\n", t, count=1), "%a0 is written"),
    ],
)  # fmt: skip
def test_a_sum_that_a_residual_starts_cannot_be_tampered_with(change, message: str) -> None:  # type: ignore[no-untyped-def]
    text, _, _ = with_residual()
    changed = change(text, line_of(text, r"add\.f32 %a0, %a0"))
    assert changed != text
    with pytest.raises(ValueError, match=message):
        read_image(changed)


def test_parts_are_read_together_or_not_at_all() -> None:
    weight, bias = data(MAP)
    text = ptx(MAP, weight, bias, channels=3, parts=3)
    assert text.count(".visible .entry") == 3
    read = read_image(text)
    assert np.array_equal(read.weight, weight)
    assert read.launches == (("conv_0", "conv_1", "conv_2"),)
    start, middle, last = (text.index(f"// entry conv_{number}") for number in range(3))
    with pytest.raises(ValueError, match="conv: 2 of its 3 parts are there"):
        read_image(text[:last])
    for changed in (text[:start] + text[middle:], text[:middle] + text[last:]):
        with pytest.raises(ValueError, match="of 3 out of its place"):
            read_image(changed)


def test_plan_must_launch_every_part() -> None:
    weight, bias = data(MAP)
    node = node_of((90, "fp32", ptx(MAP, weight, bias, channels=3, parts=3)))
    ops = tuple(Launch(f"conv_{number}", (const(1), const(1), const(1)), (64, 1, 1), ()) for number in range(3))
    whole = replace(node, plan=(Variant("fp32", ops),))
    assert np.array_equal(read_weights(whole)[0], weight)
    with pytest.raises(
        ValueError, match="the launch plan runs conv_0, conv_2, image sm_90 fp32 has conv_0, conv_1, conv_2"
    ):
        read_weights(replace(node, plan=(Variant("fp32", ops[::2]),)))


def test_image_of_another_layer_is_refused() -> None:
    g = MAP.model_copy(update={"stride": (2, 1)})
    weight, bias = data(g)
    with pytest.raises(ValueError, match=r"was made for stride \(2, 1\), the node says \(1, 1\)"):
        read_weights(node_of((90, "fp32", ptx(g, weight, bias))))
    broken = node_of((90, "fp32", ptx(g, weight, bias).replace("// baked", "// boiled")))
    with pytest.raises(ValueError, match="conv1: image sm_90 fp32"):
        read_weights(replace(broken, layer="conv1"))
