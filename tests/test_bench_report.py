"""A bench's part of the report: complete, escaped, well formed, in the page's colours, the same bytes twice."""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_compare import results
from test_report import Outline, conv, resnet18, resnet18_page, square

from sparsedeploy.devices import find
from sparsedeploy.figures import NARROW, WIDE
from sparsedeploy.measure.bench_figures import SweepMark, format_ms, latency_svg, sweep_svg, waterfall_svg
from sparsedeploy.measure.bench_report import (
    BEGIN,
    END,
    into_report,
    measured_points,
    page,
    ratio_text,
    remarks,
    section,
)
from sparsedeploy.measure.results import Case, LayerTime, LeftOut, Results
from sparsedeploy.measure.statistics import Ratio
from sparsedeploy.verify import OutputCheck

LAYERS = resnet18()
CHECKED = OutputCheck(
    name="y", max_abs=1e-6, max_rel=1e-5, cosine=1.0, top1_agreement=1.0, largest=3.0, tolerance=1e-4, margin=300.0,
    passed=True,
)  # fmt: skip


def steps() -> tuple[LayerTime, ...]:
    convolutions = tuple(
        LayerTime(name=layer.name, dense_us=60.0 + i, sparse_us=12.0 if i else 58.0, sparse=i > 0)
        for i, layer in enumerate(LAYERS)
    )
    return (*convolutions, LayerTime(name="pool", dense_us=8.0, sparse_us=9.0, sparse=False))


def benched(model: str = "resnet18.onnx", **changes: Any) -> Results:
    """Results with checked outputs and steps at two batches."""
    found = results(batches=(1, 8))
    cases = []
    for case in found.cases:
        timings = tuple(timing.model_copy(update={"outputs": (CHECKED,)}) for timing in case.timings)
        cases.append(case.model_copy(update={"timings": timings, "layers": steps(), **changes}))
    return found.model_copy(update={"cases": tuple(cases), "model": model})


def part_of(found: Results) -> str:
    return section(found, LAYERS, find("h200"))


@pytest.fixture(scope="module")
def whole() -> str:
    """A report with the part in it."""
    drawn = into_report(resnet18_page(), part_of(benched()))
    assert drawn is not None
    return drawn


def test_it_is_well_formed_loads_nothing_and_has_no_id_twice(whole: str) -> None:
    outline = Outline(whole)
    assert not outline.open
    assert not re.search(r"https?:|@import|url\((?!#)|<script", whole)
    part = whole[whole.index(BEGIN) : whole.index(END)]
    ids = re.findall(r'\bid="([^"]+)"', part)
    own = [name for name in ids if name.startswith("bench") or name in ("sweep",)]
    assert len(own) == len(set(own)), "ids that we give"
    for name in re.findall(r'(?:href|clip-path)="(?:url\()?#([^")]+)', part):
        assert name in ids


def test_colours_are_the_pages(whole: str) -> None:
    part = whole[whole.index(BEGIN) : whole.index(END)]
    assert not re.findall(r"#[0-9a-fA-F]{6}\b|(?<=[:\s])black|(?<=[:\s])white", part)
    assert set(re.findall(r"var\(--([a-z-]+)\)", part)) >= {"dense", "sparse", "ink", "muted", "grid"}


def test_the_same_bytes_twice(whole: str) -> None:
    assert part_of(benched()) == part_of(benched())
    assert into_report(whole, part_of(benched())) == whole, "replaced by the same"


def test_what_is_said(whole: str) -> None:
    text = " ".join(" ".join(Outline(whole).text).split())
    for needed in (
        "Measured on H200", "batch 1: sparse is 3.9", "batch 8: sparse is 3.9", "GPU H200 (sm_90, 132 SMs), driver 580.1",
        "2 s a variant in 20 rounds", "y off by 1e-06, allowed 0.0001 of 3", "mean GPU Compute Time", "torch 2.11",
    ):  # fmt: skip
        assert needed in text, needed
    invalid = " ".join(Outline(part_of(benched(reasons=("throttled: power brake",)))).text)
    assert "INVALID: throttled: power brake" in invalid
    left = benched(left_out=(LeftOut(name="dense fp16, torch", reason="its outputs are wrong"),), notes=("a note",))
    assert "left out: dense fp16, torch: its outputs are wrong" in " ".join(Outline(part_of(left)).text)


def test_names_are_escaped() -> None:
    nasty = "<script>alert(1)</script>&\"'$x^2$"
    layers = [conv(nasty, square(64, 64, 3, 56), 0.9)]
    found = benched(nasty, layers=(LayerTime(name=nasty, dense_us=9.0, sparse_us=3.0, sparse=True),), notes=(nasty,))
    for text in (page(found, layers, find("h200")), section(found, layers, find("h200"))):
        outline = Outline(text)
        assert not outline.open
        assert not {tag for tag, _ in outline.tags} & {"script"}
        assert nasty in "".join(outline.text)


def test_without_steps_or_a_device_row_pictures_are_left_out() -> None:
    assert part_of(benched()).count("<svg") == 2 * 2 * 3
    assert part_of(benched(layers=())).count("<svg") == 2 * 2
    assert section(benched(), LAYERS, None).count("<svg") == 2 * 2 * 2
    assert section(benched(), (), find("h200")).count("<svg") == 2 * 2 * 2


def case() -> Case:
    return benched().cases[0]


def test_the_waterfall_goes_from_one_total_to_the_other() -> None:
    for form in (WIDE, NARROW):
        svg = waterfall_svg(case(), form, "w")
        dense, sparse = sum(step.dense_us for step in steps()), sum(step.sparse_us for step in steps())
        assert f"{dense:,.0f}" in svg
        assert f"{sparse:,.0f}" in svg
        assert "others" in svg, "the pool's microsecond more, and a first layer that stayed dense"


def test_latency_bars_name_every_variant() -> None:
    for form in (WIDE, NARROW):
        svg = latency_svg(case(), form, "l")
        for timing in case().timings:
            assert timing.name in svg
            assert format_ms(timing.gpu_compute.median_ms) in svg


def test_measured_points_are_work_over_time() -> None:
    layer = LAYERS[1]  # 64 to 64, 3x3, 56x56
    assert layer.geometry is not None
    assert layer.zeros is not None
    points = measured_points(
        [LayerTime(name=layer.name, dense_us=30.0, sparse_us=10.0, sparse=True)], LAYERS, "fp32", 2
    )
    dense, sparse = points
    assert dense.tflops == pytest.approx(2 * 2 * 64 * 64 * 9 * 56 * 56 / 30.0 / 1e6)
    assert sparse.tflops == pytest.approx(2 * 2 * layer.zeros.nnz * 56 * 56 / 10.0 / 1e6)
    assert (dense.chosen, sparse.chosen) == (False, True)
    assert "30" in dense.title
    unknown = [LayerTime(name="no such layer", dense_us=1.0, sparse_us=1.0, sparse=True)]
    assert measured_points(unknown, LAYERS, "fp32", 1) == []


@pytest.mark.parametrize("form", [WIDE, NARROW], ids=lambda form: form.name)
def test_the_sweeps_picture(form: Any) -> None:
    series = [SweepMark(0.8, 1.5, 1.4, 1.6), SweepMark(0.9, 3.0, 2.9, 3.1), SweepMark(0.99, 6.0, 5.9, 6.1)]
    predicted = [SweepMark(0.8, 1.2), SweepMark(0.9, 2.5)]
    svg = sweep_svg({1: series, 8: series[:1]}, predicted, 0.85, form, "sweep")
    for needed in ("80 %", "90 %", "99 %", "batch 1", "batch 8", "as it is", "dense", "90.0%: 2.5x predicted"):
        assert needed in svg, needed
    assert sweep_svg({}, predicted, None, form, "sweep").count("batch") == 0
    assert sweep_svg({1: series[:1]}, (), None, form, "sweep")


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.34, "0.340"), (4.114, "4.11"), (15.25, "15.2"), (99.96, "100"), (1520.4, "1,520"), (0.0, "0.00")],
)
def test_milliseconds(ms: float, text: str) -> None:
    assert format_ms(ms) == text


def test_an_estimate_is_not_rounded_out_of_its_interval() -> None:
    assert (
        ratio_text(Ratio(estimate=3.9767, low=3.9754, high=3.9781, pairs=20)) == "3.977x (95 % interval 3.975 to 3.978)"
    )


def test_a_runner_that_is_not_there_is_named_once() -> None:
    names = [f"{which}, {runner}" for runner in ("tensorrt", "torch") for which in ("sparse fp32", "dense fp32")]
    left = tuple(LeftOut(name=name, reason="not installed" if "tensorrt" in name else "no graph") for name in names)
    lines = remarks(benched(left_out=left).cases[0])
    assert "left out: all in tensorrt: not installed" in lines
    assert "left out: sparse fp32, torch; dense fp32, torch: no graph" in lines
