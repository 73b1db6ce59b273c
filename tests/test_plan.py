"""Plans: the crossover against direct comparison, overrides, edited files, and reasons in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from small_models import model_of, network, one_conv, saved, sparse_weight

from sparsedeploy.convert import Request, convert
from sparsedeploy.devices import DEVICES, Device, find
from sparsedeploy.errors import InputError
from sparsedeploy.layer import ConvLayer, Precision
from sparsedeploy.plan import (
    DENSE,
    Plan,
    judge,
    load_plan,
    make_plan,
    nothing_to_convert,
    override,
    totals,
    with_kernel,
)
from sparsedeploy.plugins import KERNELS
from sparsedeploy.plugins.baked import BAKED
from sparsedeploy.plugins.kernel import Prediction
from sparsedeploy.reading import read
from sparsedeploy.roofline import dense_us
from sparsedeploy.scan import Scan, scan

NANO, A100 = find("jetson-nano"), find("a100")


def scanned(path: Path, device: Device = NANO, precision: Precision = "fp32") -> Scan:
    return scan(read(path, device, precision), device)


@pytest.fixture
def found(tmp_path: Path) -> Scan:
    """The scan of a network of c1, c2 and c3 at 90 % zeros."""
    return scanned(saved(network(), tmp_path))


def at(layer: ConvLayer, sparsity: float) -> ConvLayer:
    assert layer.zeros is not None
    nnz = round(layer.zeros.total * (1 - sparsity))
    zeros = layer.zeros.model_copy(update={"nnz": nnz, "sparsity": 1 - nnz / layer.zeros.total})
    return layer.model_copy(update={"zeros": zeros})


@pytest.mark.parametrize("device", [find("jetson-nano"), find("a100"), find("orin-nano")], ids=lambda d: d.name)
@pytest.mark.parametrize("size", [8, 56])
def test_crossover_agrees_with_comparing_directly(device: Device, size: int, tmp_path: Path) -> None:
    layer = scanned(
        saved(one_conv(sparse_weight((64, 64, 3, 3)), (size, size), pads=[1] * 4), tmp_path), device
    ).layers[0]
    assert layer.geometry is not None
    entry = make_plan(scanned(tmp_path / "model.onnx", device), device, "fp32").layers[0]
    dense, _ = dense_us(layer.geometry, device, "fp32", 1)
    for step in range(1, 200):
        sparsity = step / 200
        best = min(
            kernel.configs(at(layer, sparsity), device, "fp32", 1)[0][1].us
            for kernel in KERNELS
            if kernel.automatic(device) and kernel.supports(layer, device, "fp32") is None
        )
        if entry.crossover is None:
            assert best >= dense
        elif abs(sparsity - entry.crossover) > 0.0025:
            assert (best < dense) == (sparsity > entry.crossover), sparsity


def test_crossover_of_a_kernel_that_predicts_slowly_is_near(tmp_path: Path) -> None:
    """baked, automatic on an H200, is interpolated: within 10 points of where the predictions really cross."""
    h200 = find("h200")
    path = saved(one_conv(sparse_weight((64, 64, 3, 3)), (56, 56), pads=[1] * 4), tmp_path)
    layer = scanned(path, h200).layers[0]
    assert layer.geometry is not None
    entry = make_plan(scanned(path, h200), h200, "fp32").layers[0]
    dense, _ = dense_us(layer.geometry, h200, "fp32", 1)
    pays = [
        s / 20 for s in range(20) if BAKED.configs(at(layer, s / 20), h200, "fp32", 1)[0][1].us < dense
    ]  # fmt: skip
    assert entry.choice == "baked"
    assert entry.crossover is not None
    assert abs(entry.crossover - min(pays)) < 0.1


def test_a_kernel_not_measured_on_the_device_must_be_asked_for(tmp_path: Path) -> None:
    a100 = find("a100")
    path = saved(one_conv(sparse_weight((64, 64, 3, 3), 0.97), (28, 28), pads=[1] * 4), tmp_path)
    found = scanned(path, a100)
    plan = make_plan(found, a100, "fp32")
    assert plan.layers[0].choice in ("packed", "csr")
    assert override(plan, found, a100, ["*=sparse"]).layers[0].choice in ("packed", "csr")
    assert override(plan, found, a100, ["*=baked"]).layers[0].choice == "baked"


def test_the_choice_follows_the_prediction(tmp_path: Path) -> None:
    for sparsity in (0.0, 0.5, 0.9, 0.97):
        found = scanned(saved(one_conv(sparse_weight((64, 64, 3, 3), sparsity), (28, 28), pads=[1] * 4), tmp_path))
        entry = make_plan(found, NANO, "fp32").layers[0]
        assert entry.predicted is not None
        pays = entry.predicted.us_sparse < entry.predicted.us_dense and sparsity > 0
        assert (entry.choice != DENSE) == pays
        if entry.choice != DENSE:
            assert entry.choice == entry.predicted.kernel
            assert "pays above" in entry.reason
        if sparsity == 0:
            assert entry.reason == "0 % zeros"


def test_a_layer_without_kernel_says_why(tmp_path: Path) -> None:
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], "up")
    proto = model_of([node], {"w": sparse_weight((4, 4, 3, 3))}, {"x": [1, 4, 8, 8]}, ["y"])
    found = scanned(saved(proto, tmp_path))
    plan = make_plan(found, NANO, "fp32")
    assert (plan.layers[0].choice, plan.layers[0].reason, plan.layers[0].predicted) == (DENSE, "ConvTranspose", None)
    assert nothing_to_convert(found, plan) == "none of 1 convolutions can run sparse (ConvTranspose)"


def choices(plan: Plan) -> list[str]:
    return [entry.choice for entry in plan.layers]


def test_overrides_apply_in_order_and_remember_the_plans_reason(found: Scan) -> None:
    plan = make_plan(found, NANO, "fp32")
    done = override(plan, found, NANO, ["*=csr", "c2=dense", "c?=packed", "c3=dense"])
    assert choices(done) == ["packed", "packed", "dense"]
    assert [entry.forced for entry in done.layers] == [True, True, True]
    assert done.layers[1].reason == f"packed as asked; {plan.layers[1].reason}"
    assert done.layers[1].predicted is not None
    assert done.layers[1].predicted.kernel == "packed"
    back = override(plan, found, NANO, ["*=dense", "c1=sparse"])
    assert back.layers[0].reason == f"sparse as asked; {plan.layers[0].reason}"
    assert back.layers[1].reason == "dense as asked"
    assert override(plan, found, NANO, []) == plan


def test_everything_dense_as_asked(found: Scan) -> None:
    plan = override(make_plan(found, NANO, "fp32"), found, NANO, ["*=dense"])
    assert nothing_to_convert(found, plan) == "every layer is dense as asked"


@pytest.mark.parametrize("choice", ["c9=sparse", "c1", "c1=fast", "=sparse", "", "x*=dense"])
def test_bad_overrides(found: Scan, choice: str) -> None:
    with pytest.raises(InputError, match="--layer"):
        override(make_plan(found, NANO, "fp32"), found, NANO, [choice])


@pytest.mark.parametrize("name", ["a=b", "layer[0]/Conv", "x[ab]", "block.1/conv 2", "a*b", "[!x]"])
def test_odd_names_can_be_chosen(name: str, tmp_path: Path) -> None:
    weight = sparse_weight((16, 16, 3, 3))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["m"], name, pads=[1] * 4),
        helper.make_node("Conv", ["m", "w"], ["y"], "axb" if name != "axb" else "q", pads=[1] * 4),
    ]
    found = scanned(saved(model_of(nodes, {"w": weight}, {"x": [1, 16, 8, 8]}, ["y"]), tmp_path))
    plan = override(make_plan(found, NANO, "fp32"), found, NANO, ["*=dense", f"{name}=csr"])
    assert choices(plan) == ["csr", "dense"]


def test_brackets_in_a_pattern_are_brackets(tmp_path: Path) -> None:
    weight = sparse_weight((16, 16, 3, 3))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["m"], "stage[0].a", pads=[1] * 4),
        helper.make_node("Conv", ["m", "w"], ["y"], "stage0.a", pads=[1] * 4),
    ]
    found = scanned(saved(model_of(nodes, {"w": weight}, {"x": [1, 16, 8, 8]}, ["y"]), tmp_path))
    plan = override(make_plan(found, NANO, "fp32"), found, NANO, ["*=dense", "stage[0]*=csr"])
    assert choices(plan) == ["csr", "dense"]


def test_a_wildcard_leaves_out_what_the_kernel_cannot_run(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "wide"], ["m"], "wide", pads=[8] * 4),
        helper.make_node("Conv", ["m", "w"], ["y"], "plain", pads=[1] * 4),
    ]
    constants = {"wide": sparse_weight((16, 16, 17, 17), 0.99), "w": sparse_weight((16, 16, 3, 3))}
    found = scanned(saved(model_of(nodes, constants, {"x": [1, 16, 20, 20]}, ["y"]), tmp_path))
    plan = make_plan(found, NANO, "fp32")
    assert choices(override(plan, found, NANO, ["*=dense", "*=packed"])) == ["dense", "packed"]
    with pytest.raises(InputError, match="wide: packed was asked for"):
        override(plan, found, NANO, ["wide=packed"])
    assert choices(override(plan, found, NANO, ["*=sparse"])) == ["csr", plan.layers[1].predicted.kernel]  # type: ignore[union-attr]


Edit = Callable[[dict[str, Any]], None]


def edited(found: Scan, folder: Path, edit: Edit) -> Path:
    """A saved plan with every layer dense, edited as JSON by hand would be."""
    plan = override(make_plan(found, NANO, "fp32"), found, NANO, ["*=dense"])
    document = json.loads(plan.to_json())
    edit(document)
    path = folder / "plan.json"
    path.write_text(json.dumps(document))
    return path


def put(key: str, value: object, layer: int | None = 1) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        (document if layer is None else document["layers"][layer])[key] = value

    return edit


def test_an_untouched_plan_comes_back(found: Scan, tmp_path: Path) -> None:
    plan = make_plan(found, NANO, "fp32")
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert Plan.from_json(plan.to_json(), "plan") == plan
    assert load_plan(tmp_path / "plan.json", found, NANO) == plan


def test_an_edited_choice_is_taken_and_explained(found: Scan, tmp_path: Path) -> None:
    plan = load_plan(edited(found, tmp_path, put("choice", "csr")), found, NANO)
    assert choices(plan)[1] == "csr"
    assert plan.layers[1].predicted is not None
    assert (plan.layers[1].predicted.kernel, plan.layers[1].forced) == ("csr", True)
    assert "csr as plan.json says" in plan.layers[1].reason
    fastest = make_plan(found, NANO, "fp32").layers[1].predicted
    assert fastest is not None
    assert choices(load_plan(edited(found, tmp_path, put("choice", "sparse")), found, NANO))[1] == fastest.kernel


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (put("choice", "warp"), "layers.1.choice: 'warp' is none of dense, sparse, packed"),
        (put("choice", 1), "layers.1.choice"),
        (put("name", "c9"), "layers.1.name: the model has no convolution 'c9'"),
        (put("name", "c1"), "layers.1.name: 'c1' has an entry already, layers.0"),
        (put("layers", [], None), "layers: no entry for 'c1' (3 missing)"),
        (put("target", "a100", None), "target: the plan is for a100"),
        (put("precision", "int8", None), "precision"),
        (put("schema", 2, None), "schema"),
        (put("sparse", True), "layers.1.sparse"),
        (put("config", {"tile": 4}), "layers.1.config.tile: kernel csr has no such parameter"),
        (put("config", {"tile": "wide"}), "layers.1.config.tile"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_by_its_path(edit: Edit, where: str, found: Scan, tmp_path: Path) -> None:
    def both(document: dict[str, Any]) -> None:
        document["layers"][1]["choice"] = "csr"
        edit(document)

    with pytest.raises(InputError) as error:
        load_plan(edited(found, tmp_path, both), found, NANO)
    assert f"plan.json: {where}" in str(error.value)


def test_a_layer_that_cannot_run_sparse_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], "up")
    found = scanned(saved(model_of([node], {"w": sparse_weight((4, 4, 3, 3))}, {"x": [1, 4, 8, 8]}, ["y"]), tmp_path))
    with pytest.raises(InputError, match=r"layers\.0\.choice: csr cannot run up: ConvTranspose"):
        load_plan(edited(found, tmp_path, put("choice", "csr", 0)), found, NANO)


def test_a_plan_of_another_checkpoint_is_predicted_anew(found: Scan, tmp_path: Path) -> None:
    path = edited(found, tmp_path, put("choice", "csr"))
    other = scanned(saved(network(sparsity=0.5, seed=5), tmp_path, "other.onnx"))
    plan = load_plan(path, other, NANO)
    assert (plan.model, plan.model_hash) == ("other.onnx", other.model_hash)
    assert choices(plan) == ["dense", "csr", "dense"]
    assert [entry.sparsity for entry in plan.layers] == [layer.sparsity for layer in other.layers]
    assert "made for another file, model.onnx" in plan.layers[1].reason


def test_precision_of_the_request_wins(found: Scan, tmp_path: Path) -> None:
    path = edited(found, tmp_path, put("choice", "csr"))
    half = load_plan(path, found, NANO, "fp16")
    assert half.precision == "fp16"
    assert half.layers[1].predicted != load_plan(path, found, NANO).layers[1].predicted


def test_measured_times_are_kept(found: Scan, tmp_path: Path) -> None:
    times = {"us_dense": 10.0, "us_sparse": 4.0, "spread_us": 0.1}
    plan = load_plan(edited(found, tmp_path, put("measured", times)), found, NANO)
    assert plan.layers[1].measured is not None
    assert plan.layers[1].measured.us_sparse == 4.0


def test_weights_that_fp16_cannot_hold_go_to_csr_or_stay_dense(tmp_path: Path) -> None:
    weight = sparse_weight((16, 16, 3, 3))
    weight[0, 0, 0, :2] = 1e6, 1e-6  # no power of two brings both into fp16's range
    path = saved(one_conv(weight, pads=[1] * 4), tmp_path)
    forced = convert(Request(path, NANO, tmp_path / "forced", layers=("conv=packed",)))
    assert choices(forced.plan) == ["csr"]
    assert "overflow fp16" in forced.plan.layers[0].reason
    assert any(note.endswith("csr instead") for note in forced.notes)


def test_words_for_nothing_to_convert(tmp_path: Path) -> None:
    dense = scanned(saved(network(sparsity=0.0), tmp_path), A100)
    plan = make_plan(dense, A100, "fp32")
    assert (nothing_to_convert(dense, plan) or "").startswith("0 % zeros (eligible layers hold 100.0%")
    some = scanned(saved(network(sparsity=0.3), tmp_path), A100)
    why = nothing_to_convert(some, make_plan(some, A100, "fp32")) or ""
    assert "no layer is predicted to be faster sparse on a100: zeros reach 3" in why
    assert why.endswith("predicted, not measured)")


def test_totals_and_verdict(tmp_path: Path) -> None:
    found = scanned(saved(network(sparsity=0.98, channels=64, size=28), tmp_path))
    plan = make_plan(found, NANO, "fp32")
    total = totals(plan.layers)
    predicted = [entry.predicted for entry in plan.layers]
    assert total.dense_us == pytest.approx(sum(entry.us_dense for entry in predicted if entry))
    chosen = zip(plan.layers, predicted, strict=True)
    assert total.planned_us == pytest.approx(
        sum(p.us_dense if e.choice == DENSE else p.us_sparse for e, p in chosen if p)
    )
    verdict = judge(found, plan, "m.onnx")
    assert verdict.verdict.startswith(f"convert: {total.sparse_layers} of 3 convolutions are predicted faster sparse")
    assert verdict.verdict.endswith("Predicted, not measured.")
    assert verdict.next_command == "sparsedeploy convert m.onnx --target jetson-nano"


def test_the_next_command_can_be_pasted(found: Scan) -> None:
    plan = override(make_plan(found, NANO, "fp32"), found, NANO, ["*=dense"])
    judged = judge(found, plan, "my models/a b.onnx", ["--shape", "x=1x3x8x8"])
    command = "sparsedeploy convert 'my models/a b.onnx' --target jetson-nano --shape x=1x3x8x8 --layer '*=sparse'"
    assert judged.next_command == command


def test_another_kernel_keeps_the_dense_time(found: Scan) -> None:
    entry = make_plan(found, NANO, "fp32").layers[0]
    assert entry.predicted is not None
    changed = with_kernel(entry, "csr", {}, Prediction(us=1.0, bound="memory", source="here"), "why", forced=False)
    assert changed.predicted is not None
    assert changed.predicted.us_dense == entry.predicted.us_dense
    assert (changed.predicted.us_sparse, changed.predicted.kernel, changed.reason) == (1.0, "csr", "why")


def test_every_device_plans(found: Scan) -> None:
    for device in DEVICES:
        for precision in ("fp32", "fp16"):
            plan = make_plan(found, device, precision)
            assert all(entry.reason and entry.predicted and entry.predicted.source for entry in plan.layers)
            assert np.isfinite([entry.predicted.us_sparse for entry in plan.layers if entry.predicted]).all()
