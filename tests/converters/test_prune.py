"""Pruning a model file: exact counts, the right weights, every way a weight is stored, and refusals in words."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.prune import PruneReport, prune, smallest
from sparsedeploy.errors import InputError
from sparsedeploy.models.networks import build

DTYPES = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16]


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def conv(name: str, x: str, weight: str, y: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node("Conv", [x, weight], [y], name=name, **attributes)


def model_of(nodes: list[onnx.NodeProto], tensors: dict[str, NDArray[np.generic]], channels: int = 8) -> Model:
    """A model of 3x3 convolutions; its file does not exist."""
    kind = helper.np_dtype_to_tensor_dtype(next(iter(tensors.values())).dtype) if tensors else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, [1, channels, 6, 6])],
        [helper.make_tensor_value_info("y", kind, [1, None, None, None])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 22)]
    return Model(helper.make_model(graph, opset_imports=opsets, ir_version=10), Path("test.onnx"))


def chain(*weights: NDArray[np.generic]) -> Model:
    """conv0, conv1 ... one after the other, pads 1."""
    nodes = [
        conv(f"conv{i}", "x" if i == 0 else f"v{i - 1}", f"w{i}", f"v{i}", pads=[1] * 4) for i in range(len(weights))
    ]
    nodes[-1].output[0] = "y"
    return model_of(nodes, {f"w{i}": weight for i, weight in enumerate(weights)}, weights[0].shape[1])


def values(model: Model) -> dict[str, NDArray[np.generic]]:
    return {t.name: numpy_helper.to_array(t, str(model.base_dir)) for t in model.proto.graph.initializer}


def zeros(array: NDArray[np.generic]) -> int:
    return int(np.count_nonzero(array == 0))


@pytest.mark.parametrize("sparsity", [0.0, 0.37, 0.5, 0.9, 0.999])
def test_global_magnitude_is_one_exact_threshold(sparsity: float) -> None:
    weights = [normal(16, 8, 3, 3, seed=1), 3 * normal(16, 16, 3, 3, seed=2), normal(4, 16, 1, 1, seed=3)]
    model = chain(*weights)
    report = prune(model, sparsity)
    after = list(values(model).values())
    total = sum(w.size for w in weights)
    assert sum(map(zeros, after)) == report.zeros_after == round(total * sparsity)
    assert (report.total, report.zeros_before) == (total, 0)
    assert report.sparsity == report.zeros_after / total
    gone = np.concatenate([np.abs(w[a == 0]) for w, a in zip(weights, after, strict=True)])
    kept = np.concatenate([np.abs(a[a != 0]) for a in after])
    assert gone.max(initial=0) <= kept.min()
    for weight, pruned in zip(weights, after, strict=True):
        np.testing.assert_array_equal(pruned[pruned != 0], weight[pruned != 0])
    if sparsity == 0.5:
        assert zeros(after[0]) > 0.6 * after[0].size  # the middle weight is three times as large, so it keeps more
        assert zeros(after[1]) < 0.4 * after[1].size


@pytest.mark.parametrize("method", ["magnitude-layer", "random"])
def test_layer_methods_are_exact_in_each_layer(method: str) -> None:
    weights = [normal(16, 8, 3, 3, seed=1), 3 * normal(16, 16, 3, 3, seed=2)]
    model = chain(*weights)
    report = prune(model, 0.83, method, seed=4)
    for entry, weight, pruned in zip(report.pruned, weights, values(model).values(), strict=True):
        assert zeros(pruned) == entry.zeros_after == round(weight.size * 0.83)
        np.testing.assert_array_equal(pruned[pruned != 0], weight[pruned != 0])
        smaller = np.abs(weight[pruned == 0]).max() <= np.abs(pruned[pruned != 0]).min()
        assert smaller == (method == "magnitude-layer")


def test_random_follows_the_seed() -> None:
    def run(seed: int) -> NDArray[np.generic]:
        model = chain(normal(16, 8, 3, 3))
        prune(model, 0.5, "random", seed=seed)
        return values(model)["w0"]

    np.testing.assert_array_equal(run(1), run(1))
    assert (run(1) != run(2)).any()


def test_equal_magnitudes_go_in_stored_order() -> None:
    model = chain(np.ones((4, 8, 1, 1), np.float32), -np.ones((4, 8, 1, 1), np.float32))
    prune(model, 0.625)
    w0, w1 = values(model).values()
    assert zeros(w0) == 32
    np.testing.assert_array_equal(w1.ravel(), [0.0] * 8 + [-1.0] * 24)


@settings(max_examples=200, deadline=None)
@given(scores=st.lists(st.integers(0, 5), min_size=1, max_size=60), data=st.data())
def test_smallest_is_a_stable_sort(scores: list[int], data: st.DataObject) -> None:
    array = np.array(scores, np.float32)
    count = data.draw(st.integers(0, len(scores)))
    expected = np.zeros(len(scores), np.bool_)
    expected[np.argsort(array, kind="stable")[:count]] = True
    np.testing.assert_array_equal(smallest(array, count), expected)


@pytest.mark.parametrize("method", ["magnitude-global", "magnitude-layer", "random"])
def test_existing_zeros_count_and_stay(method: str) -> None:
    weight = normal(16, 8, 3, 3)
    weight[np.random.default_rng(1).random(weight.shape) < 0.6] = 0
    weight[0, 0, 0, 0] = -0.0
    before = zeros(weight)
    model = chain(weight)
    report = prune(model, 0.9, method)
    assert (report.zeros_before, report.zeros_after) == (before, round(0.9 * weight.size))
    assert (values(model)["w0"][weight == 0] == 0).all()
    sparser = model.proto.SerializeToString()
    again = prune(model, 0.5, method)
    assert again.zeros_before == again.zeros_after == round(0.9 * weight.size)
    assert model.proto.SerializeToString() == sparser


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_is_kept(dtype: type) -> None:
    weight = normal(16, 8, 3, 3).astype(dtype)
    for method in ("magnitude-global", "2:4", "random"):
        model = chain(weight)
        prune(model, 0.5, method)
        pruned = values(model)["w0"]
        assert pruned.dtype == weight.dtype
        assert zeros(pruned) == weight.size // 2
        np.testing.assert_array_equal(pruned[pruned != 0], weight[pruned != 0])
        onnx.checker.check_model(model.proto)


def test_typed_data_fields_are_replaced() -> None:
    weight = normal(4, 8, 1, 1)
    model = chain(weight)
    tensor = model.proto.graph.initializer[0]
    tensor.CopyFrom(helper.make_tensor("w0", TensorProto.FLOAT, weight.shape, weight.ravel().tolist()))
    tensor.doc_string = "kept"
    prune(model, 0.5)
    assert not tensor.float_data
    assert tensor.doc_string == "kept"
    assert zeros(values(model)["w0"]) == 16


@pytest.mark.parametrize(("method", "n", "m"), [("2:4", 2, 4), ("1:4", 1, 4), ("1:2", 1, 2)])
def test_n_m_along_input_channels(method: str, n: int, m: int) -> None:
    weight = normal(6, 16, 3, 3)
    model = chain(weight)
    report = prune(model, None, method)
    assert report.asked == report.sparsity == 1 - n / m
    pruned = values(model)["w0"]
    kept = pruned.reshape(6, 16 // m, m, 3, 3)
    assert (np.count_nonzero(kept, axis=2) == n).all()
    gone = np.where(kept == 0, np.abs(weight.reshape(kept.shape)), 0).max(axis=2)
    assert (gone <= np.where(kept == 0, np.inf, np.abs(kept)).min(axis=2)).all()


def test_default_choice_leaves_first_grouped_and_other_ranks() -> None:
    tensors = {
        "first": normal(16, 3, 3, 3),
        "grouped": normal(16, 8, 3, 3),
        "depthwise": normal(16, 1, 3, 3),
        "plain": normal(16, 16, 3, 3),
    }
    nodes = [
        conv("c_first", "x", "first", "a", pads=[1] * 4),
        conv("c_grouped", "a", "grouped", "b", pads=[1] * 4, group=2),
        conv("c_depthwise", "b", "depthwise", "c", pads=[1] * 4, group=16),
        conv("c_plain", "c", "plain", "y"),
    ]
    model = model_of(nodes, tensors, channels=3)
    report = prune(model, 0.5)
    assert [entry.weight for entry in report.pruned] == ["plain"]
    reasons = {entry.layer: entry.reason for entry in report.skipped}
    assert list(reasons) == ["c_first", "c_grouped", "c_depthwise"]
    assert "3 input channels" in reasons["c_first"]
    assert reasons["c_grouped"] == "group 2"
    assert reasons["c_depthwise"] == "depthwise"
    after = values(model)
    assert all(zeros(after[name]) == 0 for name in ("first", "grouped", "depthwise"))
    named = prune(model, 0.5, "magnitude-layer", layers=["c_[fg]*"])
    assert [entry.weight for entry in named.pruned] == ["first", "grouped"]
    assert {entry.reason for entry in named.skipped} == {"no pattern names it"}


def test_names_with_brackets_match_themselves() -> None:
    model = chain(normal(4, 8, 1, 1), normal(4, 4, 1, 1))
    model.proto.graph.node[0].name = "block[0]/conv"
    assert len(prune(model, 0.5, layers=["block[0]/conv"]).pruned) == 1


def test_shared_weight_is_pruned_once_and_names_its_readers() -> None:
    nodes = [
        conv("a", "x", "w", "p", pads=[1] * 4),
        conv("b", "x", "w", "q", pads=[2] * 4, dilations=[2, 2]),
        helper.make_node("Add", ["p", "q"], ["y"], name="sum"),
    ]
    model = model_of(nodes, {"w": normal(8, 8, 3, 3)})
    report = prune(model, 0.75)
    assert [(entry.weight, entry.layers) for entry in report.pruned] == [("w", ("a", "b"))]
    assert report.total == 576
    assert zeros(values(model)["w"]) == 432


def test_weight_in_a_constant_node() -> None:
    weight = normal(8, 8, 3, 3)
    constant = helper.make_node("Constant", [], ["w"], name="c", value=numpy_helper.from_array(weight))
    model = model_of([constant, conv("conv", "x", "w", "y")], {})
    prune(model, 0.5)
    pruned = model.graph.array("w")
    assert pruned is not None
    assert zeros(pruned) == 288
    onnx.checker.check_model(model.proto)


def test_external_data_is_read_and_brought_into_the_model(tmp_path: Path) -> None:
    weight = normal(8, 8, 3, 3)
    path = tmp_path / "m.onnx"
    onnx.save_model(chain(weight).proto, path, save_as_external_data=True, location="m.data", size_threshold=0)
    before = (tmp_path / "m.data").read_bytes()
    model = Model(onnx.load(path, load_external_data=False), path)
    prune(model, 0.5)
    tensor = model.proto.graph.initializer[0]
    assert tensor.data_location == TensorProto.DEFAULT
    assert not tensor.external_data
    assert zeros(numpy_helper.to_array(tensor)) == 288
    assert (tmp_path / "m.data").read_bytes() == before
    (tmp_path / "m.data").unlink()
    with pytest.raises(InputError, match=r"conv0.*w0.*cannot be read"):
        prune(Model(onnx.load(path, load_external_data=False), path), 0.5)


def test_computed_and_integer_weights_are_skipped_with_their_maker() -> None:
    nodes = [
        helper.make_node("Mul", ["w", "mask"], ["masked"], name="apply_mask"),
        conv("masked_conv", "x", "masked", "a", pads=[1] * 4),
        conv("conv", "a", "w", "b", pads=[1] * 4),
        conv("input_conv", "b", "x", "y"),
    ]
    model = model_of(nodes, {"w": normal(8, 8, 3, 3), "mask": normal(8, 8, 3, 3)})
    reasons = {entry.layer: entry.reason for entry in prune(model, 0.5).skipped}
    assert reasons == {
        "masked_conv": "its weight is not constant: it comes from Mul apply_mask",
        "input_conv": "its weight is not constant: it comes from an input of the model",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sparsity": 1.0}, "from 0 up to but not including 1"),
        ({"sparsity": -0.1}, "from 0 up to"),
        ({"sparsity": math.nan}, "from 0 up to"),
        ({"sparsity": None}, "from 0 up to"),
        ({"sparsity": 90.0}, "from 0 up to"),
        ({"sparsity": 0.5, "method": "lottery"}, "magnitude-global"),
        ({"sparsity": 0.5, "method": "n:m"}, "2:4"),
        ({"sparsity": 0.5, "method": "4:4"}, "less than m"),
        ({"sparsity": 0.5, "method": "0:4"}, "less than m"),
        ({"sparsity": 0.9, "method": "2:4"}, "exactly 0.5"),
        ({"sparsity": math.nan, "method": "2:4"}, "exactly 0.5"),
        ({"sparsity": 0.5, "layers": ["conv0", "layer9.*"]}, r"'layer9\.\*' matches no convolution.*conv0, conv1"),
        ({"sparsity": 0.5, "seed": -1}, "seed"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(arguments: dict[str, object], said: str) -> None:
    model = chain(normal(8, 8, 3, 3), normal(8, 8, 3, 3))
    before = model.proto.SerializeToString()
    with pytest.raises(InputError, match=said):
        prune(model, **arguments)  # type: ignore[arg-type]
    assert model.proto.SerializeToString() == before


def test_nan_weights_and_nothing_to_prune_are_refused() -> None:
    weight = normal(8, 8, 3, 3)
    weight[1, 2, 0, 0] = np.nan
    with pytest.raises(InputError, match=r"conv1.*w1.*NaN"):
        prune(chain(normal(8, 8, 3, 3), weight), 0.5)
    with pytest.raises(InputError, match="conv0: 3 input channels"):
        prune(chain(normal(8, 3, 3, 3)), 0.5)
    with pytest.raises(InputError, match="no convolution"):
        prune(model_of([helper.make_node("Relu", ["x"], ["y"])], {}), 0.5)


def test_report_round_trips_and_the_model_notes_it() -> None:
    model = chain(normal(8, 8, 3, 3), normal(8, 8, 3, 3))
    report = prune(model, 0.5, layers=["conv1"])
    assert PruneReport.from_json(report.to_json(), "report") == report
    assert model.notes == [
        "1 weight pruned by magnitude-global: 0.0% zeros before, 50.0% after. Outputs have changed; accuracy needs "
        "retraining."
    ]


def test_resnet18_keeps_its_first_layer_and_runs() -> None:
    model = Model(build("resnet18", image_size=32, num_classes=10), Path("resnet18.onnx"))
    report = prune(model, 0.9)
    assert len(report.pruned) == 19
    assert report.zeros_after == round(0.9 * report.total)
    assert [entry.layer for entry in report.skipped] == ["conv1"]
    session = onnxruntime.InferenceSession(model.proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.isfinite(session.run(None, {"input": normal(1, 3, 32, 32)})[0]).all()


REAL = {
    # file: convolutions pruned by default (group 1, 8 or more input channels), convolutions of the main graph
    "rapidocr/ch_PP-OCRv4_det_infer.onnx": (43, 62),
    "rapidocr/ch_ppocr_mobile_v2.0_cls_infer.onnx": (40, 53),
    "opennsfw/open-nsfw.onnx": (52, 53),
    "ddddocr/common_det.onnx": (83, 83),
}


def shared(path: str) -> Path:
    if SHARED is None or not (SHARED / path).is_file():
        pytest.skip(f"{path} is not on this machine")
    return SHARED / path


@pytest.mark.parametrize("file", REAL)
def test_real_files_get_exactly_the_zeros_asked_for(file: str) -> None:
    path = shared(f"models/{file}")
    model = Model(onnx.load(path), path)
    report = prune(model, 0.9)
    chosen, convs = REAL[file]
    assert len(report.pruned) == chosen
    assert len(report.pruned) + len(report.skipped) == convs
    assert report.zeros_after == round(0.9 * report.total)
    arrays = [model.graph.array(entry.weight) for entry in report.pruned]
    assert sum(zeros(array) for array in arrays if array is not None) == report.zeros_after
    onnx.checker.check_model(model.proto)
    onnxruntime.InferenceSession(model.proto.SerializeToString(), providers=["CPUExecutionProvider"])


def test_computed_weights_of_a_real_file_say_what_makes_them() -> None:
    path = shared("models/onnx_light/light_resnet50.onnx")
    with pytest.raises(InputError, match=r"light_resnet50\.onnx: none of the chosen convolutions.*ConstantOfShape"):
        prune(Model(onnx.load(path), path), 0.9)
