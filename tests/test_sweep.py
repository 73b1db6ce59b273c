"""bench --sweep: points parsed, pruned, converted and measured on a machine that is not there; the picture and the advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_runner import Bench
from small_models import network, saved
from typer.testing import CliRunner

from sparsedeploy import bundle
from sparsedeploy.cli import app
from sparsedeploy.convert import Request as Conversion
from sparsedeploy.convert import convert
from sparsedeploy.devices import find
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.gpu import Gpu
from sparsedeploy.measure.bench import Request
from sparsedeploy.measure.bench_command import Asked, run
from sparsedeploy.measure.bench_report import BEGIN, END, page, sweep_lines, sweep_rows
from sparsedeploy.measure.results import Results, SweepLayer, SweepPoint, read_results
from sparsedeploy.measure.sweep import Sweep, advice, parse_sweep, sweep
from sparsedeploy.measure.timing import Schedule

QUICK = Schedule(0.05, 0.0, 20)


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("0.8:0.99", (0.8, 0.8901, 0.9397, 0.9669, 0.9818, 0.99)),
        ("0.75:0.9375:3", (0.75, 0.875, 0.9375)),
        ("0:0.75:3", (0.0, 0.5, 0.75)),
        ("0.9,0.8,.95,0.9", (0.8, 0.9, 0.95)),
        ("0.9", (0.9,)),
    ],
)
def test_points(text: str, points: tuple[float, ...]) -> None:
    assert parse_sweep(text) == points


@pytest.mark.parametrize(
    "text", ["", "0.9:0.8", "0.8:1", "0.8:0.99:1", "1", "80:99", "0.8-0.9", "0.8,,0.9", "0.8:0.9:x"]
)
def test_points_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match=r"--sweep .*LOW:HIGH"):
        parse_sweep(text)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """The network without zeros."""
    return saved(network(sparsity=0.0), tmp_path)


def swept(source: Path, points: tuple[float, ...], fake: Bench | None = None) -> Results:
    request = Sweep(source, points, Request(source, schedule=QUICK), layers=("*=csr",))
    return sweep(request, (fake or Bench()).tools())[0]


def test_every_point_is_pruned_converted_and_measured(dense: Path) -> None:
    found = swept(dense, (0.5, 0.9))
    assert [round(point.sparsity, 2) for point in found.sweep] == [0.5, 0.9]
    assert [point.sparse_layers for point in found.sweep] == [3, 3]
    for point in found.sweep:
        assert point.predicted is not None
        assert point.cases[0].headline.ratio.estimate == pytest.approx(4.0, rel=0.03)
        assert len(point.layers) == 3
    assert found.model == "model.onnx"
    assert found.valid
    first, second = (point.layers[0].sparse_us for point in found.sweep)
    assert first is not None
    assert second is not None
    assert second < first, "fewer nonzeros are predicted faster"
    lines = sweep_lines(found)
    assert lines[0][:3] == ("zeros", "sparse layers", "predicted")
    assert lines[2][0] == "90.0%"
    assert lines[2][3].startswith(("4x", "4.0", "3.9"))
    html = page(found, (), find("h200"))
    assert html.count("<svg") == 2
    assert "90.0%: " in html
    assert Results.from_json(found.to_json(), "x") == found


def test_nothing_converted_is_a_point_without_times(dense: Path) -> None:
    request = Sweep(dense, (0.0,), Request(dense, schedule=QUICK))
    found, layers = sweep(request, Bench().tools())
    point = found.sweep[0]
    assert point.cases == ()
    assert point.sparse_layers == 0
    assert point.note
    assert len(layers) == 3
    assert sweep_lines(found)[1][3] == "–"


def test_zeros_that_are_there_are_not_taken_away(tmp_path: Path) -> None:
    found = swept(saved(network(sparsity=0.9), tmp_path), (0.5, 0.8, 0.95))
    assert [round(point.sparsity, 2) for point in found.sweep] == [0.9, 0.95]
    assert found.sweep[0].note == "the model has 89.7% zeros already"
    assert found.sweep[1].note == ""


def test_into_a_bundle_beside_its_own_bench(tmp_path: Path) -> None:
    convert(Conversion(saved(network(), tmp_path), find("h200"), tmp_path / "out", layers=("*=csr",)))
    asked = Asked(tmp_path / "out", duration_s=0.05, warmup_s=0.0)
    run(asked, lambda stage: None, Bench().tools())
    one = read_results(tmp_path / "out")
    said = run(replace(asked, sweep="0.95", layers=("*=csr",)), lambda stage: None, Bench().tools())
    both = read_results(tmp_path / "out")
    assert both.cases == one.cases
    assert len(both.sweep) == 1
    assert said.record == both
    report = (tmp_path / "out" / "report.html").read_text()
    assert report[report.index(BEGIN) : report.index(END)].count("Speed-up over sparsity</h3>") == 1
    bundle.check_hashes(tmp_path / "out")
    run(asked, lambda stage: None, Bench().tools())
    assert read_results(tmp_path / "out").sweep == both.sweep


def test_a_model_file_is_not_written_unless_asked(dense: Path, tmp_path: Path) -> None:
    asked = Asked(dense, duration_s=0.05, warmup_s=0.0, sweep="0.9", layers=("*=csr",))
    before = sorted(tmp_path.rglob("*"))
    said = run(asked, lambda stage: None, Bench().tools())
    assert sorted(tmp_path.rglob("*")) == before
    assert any("-o FILE" in str(part) for part in said.parts)
    run(replace(asked, out=tmp_path / "s.json"), lambda stage: None, Bench().tools())
    assert read_results(tmp_path / "s.json").sweep[0].asked == 0.9
    assert "Speed-up over sparsity" in (tmp_path / "s.html").read_text()


def test_without_a_gpu_it_says_what_it_needs(dense: Path) -> None:
    with pytest.raises(MachineError, match=r"measures on an NVIDIA GPU.*--impose-sparsity"):
        sweep(Sweep(dense, (0.9,), Request(dense)), Bench().tools(None))
    with pytest.raises(MachineError, match=r"no device row of compute capability 3\.5"):
        sweep(Sweep(dense, (0.9,), Request(dense)), Bench().tools(Gpu("K40", 35, 15)))
    result = CliRunner().invoke(app, ["bench", str(dense), "--sweep", "0.8:0.99"])
    assert result.exit_code == 3
    assert "Traceback" not in result.output


def test_options_that_go_elsewhere(dense: Path) -> None:
    for changes in ({"layers": ("*=csr",)}, {"shapes": {"x": (1, 16, 8, 8)}}):
        with pytest.raises(InputError, match="belong to --sweep"):
            run(replace(Asked(dense), **changes), lambda stage: None, Bench().tools())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="fp32 or fp16"):
        run(Asked(dense, sweep="0.9", precision="tf32"), lambda stage: None, Bench().tools())


def layer(name: str, sparsity: float, dense_us: float, crossover: float | None, sparse: bool) -> SweepLayer:
    return SweepLayer(
        name=name, sparsity=sparsity, dense_us=dense_us, sparse_us=dense_us * 2, crossover=crossover, sparse=sparse
    )


def test_advice_names_what_more_zeros_would_make_pay_longest_first() -> None:
    layers = (
        layer("runs", 0.9, 50.0, 0.8, True), layer("short", 0.9, 5.0, 0.95, False), layer("long", 0.7, 20.0, 0.8, False),
        layer("never", 0.9, 90.0, None, False),
    )  # fmt: skip
    point = SweepPoint(asked=0.9, sparsity=0.9, sparse_layers=1, predicted=1.2, layers=layers)
    assert advice((point,)) == [
        "long: has 70.0%, pays above 80.0% (predicted)",
        "short: has 90.0%, pays above 95.0% (predicted)",
    ]
    assert advice(()) == []
    assert [row[0] for row in sweep_rows((point,))] == ["never", "runs", "long", "short"]
