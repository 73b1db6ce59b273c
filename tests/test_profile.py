"""A device's measured profile: what it answers, how it is read, and plans made with it."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import pytest
from small_models import one_conv, sparse_weight
from typer.testing import CliRunner

from sparsedeploy.bundle import Manifest
from sparsedeploy.cli import app
from sparsedeploy.devices import find
from sparsedeploy.engines.engine_file import EngineRecord
from sparsedeploy.errors import InputError
from sparsedeploy.layer import Geometry
from sparsedeploy.measure.results import Results
from sparsedeploy.plan import DENSE, Plan, make_plan
from sparsedeploy.plugins.kernel import Prediction
from sparsedeploy.profile import DensePoint, DeviceProfile, SparsePoint, at_nnz, fit, load_profile, merged
from sparsedeploy.reading import read
from sparsedeploy.record import Record
from sparsedeploy.roofline import Bound
from sparsedeploy.scan import Scan, scan

NANO = find("jetson-nano")
SHAPE = Geometry(oc=16, ic=16, kh=3, kw=3, h=8, w=8, pads=(1, 1, 1, 1))
NNZ = 200


def dense(us: float, geometry: Geometry = SHAPE, residual: bool = False, batch: int = 1) -> DensePoint:
    return DensePoint(
        geometry=geometry, arithmetic="fp32", batch=batch, residual=residual, us=us, spread_us=0.1, predicted_us=us / 2
    )


def sparse(
    us: float, nnz: int = NNZ, kernel: str = "csr", size: int = 0, predicted: float | None = 10.0
) -> SparsePoint:
    return SparsePoint(
        geometry=SHAPE, precision="fp32", batch=1, residual=False, nnz=nnz, kernel=kernel, config={"size": size} if size else {},
        us=us, spread_us=0.1, predicted_us=predicted,
    )  # fmt: skip


def profile(
    *points: DensePoint | SparsePoint, target: str = "jetson-nano", sm: int = 53, gpu: str = "Tegra X1"
) -> DeviceProfile:
    return DeviceProfile(
        target=target, gpu=gpu, sm=sm, sm_count=1, versions={"torch": "1.10"}, conditions="in a test",
        dense=tuple(p for p in points if isinstance(p, DensePoint)), sparse=tuple(p for p in points if isinstance(p, SparsePoint)),
    )  # fmt: skip


@pytest.fixture
def scanned(tmp_path: Path) -> Scan:
    path = tmp_path / "model.onnx"
    onnx.save_model(one_conv(sparse_weight((16, 16, 3, 3)), pads=[1, 1, 1, 1]), path)
    return scan(read(path, NANO, "fp32"), NANO)


@pytest.mark.parametrize(
    ("points", "nnz", "us", "how"),
    [
        ([(100, 5.0)], 101, 5.0, "measured"),
        ([(100, 5.0)], 110, 5.0, "measured at similar sparsity"),
        ([(100, 5.0), (200, 15.0)], 150, 10.0, "interpolated between times measured"),
        ([(100, 5.0), (200, 15.0)], 300, 25.0, "extrapolated from times measured"),
        ([(100, 5.0), (200, 15.0), (400, 17.0)], 300, 16.0, "interpolated between times measured"),
        ([(100, 5.0), (200, 15.0)], 10, 2.5, "extrapolated from times measured"),  # never below half of the least
    ],
)
def test_time_at_a_number_of_nonzeros(points: list[tuple[int, float]], nnz: int, us: float, how: str) -> None:
    found = at_nnz(points, nnz)
    assert found == (pytest.approx(us), how)


def test_one_point_far_away_says_nothing() -> None:
    assert at_nnz([(100, 5.0)], 200) is None
    assert at_nnz([], 200) is None


def test_fit_is_the_geometric_mean_and_names_the_worst() -> None:
    found = fit("csr", "fp32", [("a", 20.0, 10.0), ("b", 5.0, 10.0), ("c", 40.0, 10.0)])
    assert found.factor == pytest.approx((2 * 0.5 * 4) ** (1 / 3))
    assert found.mean_abs_log == pytest.approx((2 * math.log(2) + math.log(4)) / 3)
    assert found.worst == "c: measured 4.00 of predicted"


def test_points_without_a_prediction_are_no_part_of_the_fit() -> None:
    known = profile(sparse(20.0), sparse(100.0, nnz=100, predicted=None))
    found = known.fit("csr", "fp32")
    assert found is not None
    assert (found.points, found.factor) == (1, pytest.approx(2.0))
    assert known.fit("csr", "fp16") is None
    assert known.fit("packed", "fp32") is None


def test_dense_times_measured_then_scaled_then_predicted() -> None:
    other = SHAPE.model_copy(update={"h": 16, "w": 16})
    predicted = Bound(7.0, "compute")
    known = profile(dense(20.0), dense(25.0, residual=True))
    assert known.dense_us(SHAPE, "fp32", 1, False, predicted)[0].us == 20.0
    bound, source = known.dense_us(SHAPE, "fp32", 1, True, predicted)
    assert (bound.us, source) == (25.0, "measured on Tegra X1 (profile)")
    bound, source = known.dense_us(other, "fp32", 1, False, predicted)
    assert bound.us == pytest.approx(14.0)
    assert source.startswith("predicted, times 2.00 as fitted to 2 points measured on Tegra X1")
    bound, source = known.dense_us(SHAPE, "fp16", 1, False, predicted)
    assert bound.us == 7.0
    assert "holds no dense fp16 time" in source


def test_a_plan_takes_measured_times_and_says_so(scanned: Scan) -> None:
    nnz = scanned.layers[0].zeros.nnz  # type: ignore[union-attr]
    fast = profile(dense(20.0), sparse(5.0, nnz))
    entry = make_plan(scanned, NANO, "fp32", fast).layers[0]
    assert entry.choice == "csr"
    assert entry.predicted is not None
    assert (entry.predicted.us_dense, entry.predicted.us_sparse) == (20.0, 5.0)
    assert "measured on Tegra X1 (profile)" in entry.predicted.source
    # Packed is predicted faster than it was measured: only what was measured on the layer competes.
    slow = profile(dense(3.0), sparse(5.0, nnz))
    assert make_plan(scanned, NANO, "fp32", slow).layers[0].choice == DENSE


def test_the_fastest_measured_configuration_is_planned(scanned: Scan) -> None:
    layer = scanned.layers[0]
    nnz = layer.zeros.nnz  # type: ignore[union-attr]
    known = profile(sparse(9.0, nnz, "baked", 1), sparse(5.0, nnz, "baked", 2), sparse(7.0, nnz, "baked", 3))
    offered = (({"size": 1}, Prediction(us=1.0, bound="compute", source="model")),)
    found = known.sparse_us(layer, "fp32", 1, "baked", offered)
    assert [config["size"] for config, _ in found] == [2, 3, 1]


def test_without_a_point_nearby_predictions_are_scaled(scanned: Scan) -> None:
    layer = scanned.layers[0].model_copy(update={"geometry": SHAPE.model_copy(update={"h": 20, "w": 20})})
    offered = (({}, Prediction(us=4.0, bound="memory", source="model")),)
    ((_, scaled),) = profile(sparse(20.0)).sparse_us(layer, "fp32", 1, "csr", offered)
    assert (scaled.us, scaled.bound) == (8.0, "memory")
    assert "times 2.00" in scaled.source
    assert profile(dense(1.0)).sparse_us(layer, "fp32", 1, "csr", offered) == offered


def test_a_kernel_measured_there_may_be_planned_unasked(scanned: Scan) -> None:
    nnz = scanned.layers[0].zeros.nnz  # type: ignore[union-attr]
    assert make_plan(scanned, NANO, "fp32").layers[0].choice != "baked"
    known = profile(dense(1000.0), sparse(0.5, nnz, "baked", 1), sparse(700.0, nnz), sparse(800.0, nnz, "packed"))
    assert make_plan(scanned, NANO, "fp32", known).layers[0].choice == "baked"


def test_a_layer_without_zeros_is_sparse_only_where_that_was_measured(tmp_path: Path) -> None:
    onnx.save_model(one_conv(sparse_weight((16, 16, 3, 3), 0.0), pads=[1, 1, 1, 1]), tmp_path / "full.onnx")
    full = scan(read(tmp_path / "full.onnx", NANO, "fp32"), NANO)
    nnz = 16 * 16 * 9
    assert full.layers[0].sparsity == 0
    known = make_plan(full, NANO, "fp32", profile(dense(20.0), sparse(5.0, nnz))).layers[0]
    assert known.choice == "csr"
    assert "pays above" in known.reason
    unknown = make_plan(full, NANO, "fp32", profile(dense(20.0))).layers[0]
    assert (unknown.choice, unknown.reason) == (DENSE, "0 % zeros")


def test_merging_keeps_both_and_the_newer_of_the_same() -> None:
    both = merged(profile(dense(20.0), sparse(5.0)), profile(dense(22.0), sparse(4.0, nnz=100), dense(9.0, batch=8)))
    assert sorted(point.us for point in both.dense) == [9.0, 22.0]
    assert {(point.nnz, point.us) for point in both.sparse} == {(NNZ, 5.0), (100, 4.0)}
    assert merged(None, both) == both


def test_two_devices_do_not_merge() -> None:
    with pytest.raises(InputError, match="do not belong in one file"):
        merged(profile(gpu="one"), profile(gpu="other"))


def test_round_trip_and_refusals(tmp_path: Path) -> None:
    path = tmp_path / "nano.json"
    known = profile(dense(20.0), sparse(5.0))
    path.write_text(known.to_json(), "utf-8")
    assert load_profile(path, NANO) == known
    with pytest.raises(
        InputError, match=r"measured on Tegra X1 \(target jetson-nano, sm_53\).*planned for a100.*--target jetson-nano"
    ):
        load_profile(path, find("a100"))
    with pytest.raises(InputError, match="No such file"):
        load_profile(tmp_path / "none.json", NANO)
    path.write_text(known.to_json().replace('"us": 20.0', '"us": "fast"'), "utf-8")
    with pytest.raises(InputError, match=r"dense\.0\.us"):
        load_profile(path, NANO)


@pytest.mark.parametrize("us", [0.0, -1.0, math.nan, math.inf])
def test_times_that_nobody_measured_are_refused(tmp_path: Path, us: float) -> None:
    path = tmp_path / "nano.json"
    for points, field in (((dense(us),), r"dense\.0\.us"), ((dense(20.0), sparse(us)), r"sparse\.0\.us")):
        path.write_text(profile(*points).to_json(), "utf-8")
        with pytest.raises(InputError, match=field):
            load_profile(path, NANO)
    path.write_text(profile(sparse(5.0, predicted=us)).to_json(), "utf-8")
    with pytest.raises(InputError, match=r"sparse\.0\.predicted_us"):
        load_profile(path, NANO)


def test_command_line(tmp_path: Path, scanned: Scan) -> None:
    nnz = scanned.layers[0].zeros.nnz  # type: ignore[union-attr]
    file, plan = tmp_path / "nano.json", tmp_path / "plan.json"
    file.write_text(profile(dense(20.0), sparse(5.0, nnz), sparse(6.0, nnz, "packed")).to_json(), "utf-8")
    model = str(tmp_path / "model.onnx")
    result = CliRunner().invoke(
        app, ["scan", model, "-t", "jetson-nano", "--profile", str(file), "--save-plan", str(plan)]
    )
    assert result.exit_code == 0, result.output
    assert "Predicted from a measured profile, this model not measured" in " ".join(result.output.split())
    assert f"--target jetson-nano --profile {file}" in result.output.replace("\n", " ").split("Next: ")[1]
    entry = Plan.from_json(plan.read_bytes(), plan).layers[0]
    assert entry.choice == "csr"
    assert entry.predicted is not None
    assert entry.predicted.us_sparse == 5.0
    out = str(tmp_path / "out")
    result = CliRunner().invoke(
        app, ["convert", model, "-t", "jetson-nano", "--profile", str(file), "-o", out, "--no-engine"]
    )
    assert result.exit_code == 0, result.output
    assert Plan.from_json((tmp_path / "out/plan.json").read_bytes(), "plan").layers[0].choice == "csr"
    result = CliRunner().invoke(app, ["scan", model, "-t", "a100", "--profile", str(file)])
    assert result.exit_code == 2


def test_words_that_no_plan_asks_for_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "nano.json"
    path.write_text(profile(dense(20.0), sparse(5.0), sparse(5.0, kernel="bakde")).to_json(), "utf-8")
    with pytest.raises(InputError, match=r"sparse\.1\.kernel is 'bakde'.*it has packed, csr, baked"):
        load_profile(path, NANO)
    path.write_text(profile(dense(20.0)).to_json().replace('"arithmetic": "fp32"', '"arithmetic": "fp23"'), "utf-8")
    with pytest.raises(InputError, match=r"dense\.0\.arithmetic is 'fp23'.*fp32, tf32, fp16"):
        load_profile(path, NANO)


def test_a_file_that_is_none_is_told_in_the_users_words(tmp_path: Path) -> None:
    path = tmp_path / "nano.json"
    path.write_text(profile(dense(20.0)).to_json().replace('"us": 20.0', '"us": "fast"'), "utf-8")
    with pytest.raises(InputError) as told:
        load_profile(path, NANO)
    assert "DeviceProfile" not in str(told.value)
    assert "found 'fast'" in str(told.value)
    assert "a device profile, as of `tune --save-profile`" in str(told.value)


def test_no_message_about_a_file_says_a_class(tmp_path: Path) -> None:
    for kind in (DeviceProfile, EngineRecord, Manifest, Plan, Results):
        with pytest.raises(InputError) as told:
            kind.from_json("{}", tmp_path / "some.json")
        assert kind.__name__ not in str(told.value)
        assert kind.TITLE in str(told.value)
        assert kind.TITLE != Record.TITLE
