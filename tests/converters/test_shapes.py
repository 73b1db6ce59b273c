"""Input shapes from file, user and batch; shapes of all values from those."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import SHARED
from onnx import NodeProto, TensorProto, helper, numpy_helper

from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load
from sparsedeploy.converters.shapes import infer_shapes, parse_shape, resolve_inputs, value_types
from sparsedeploy.errors import InputError

Dims = Sequence[int | str | None] | None


def model_of(nodes: list[NodeProto], inputs: dict[str, Dims], opset: int = 13, weight_inputs: int = 3) -> Model:
    """A model with output y and a 3x3 weight w of 4 filters; dims may be names, None ("?") or -1."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weight = numpy_helper.from_array(np.ones((4, weight_inputs, 3, 3), np.float32), "w")
    graph = helper.make_graph(nodes, "g", values, [output], [weight])
    proto = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])
    return Model(proto, Path("net.onnx"))


def identities(inputs: dict[str, Dims]) -> Model:
    return model_of([helper.make_node("Sum", list(inputs), ["y"])], inputs)


# --- --shape


@pytest.mark.parametrize(
    ("text", "name", "shape"),
    [
        ("x=1x3x224x224", "x", (1, 3, 224, 224)),
        ("input:0=1X224x224x3", "input:0", (1, 224, 224, 3)),
        ("a=b=2x5", "a=b", (2, 5)),
        ("gpu_0/data_0=7", "gpu_0/data_0", (7,)),
    ],
)
def test_parse_shape(text: str, name: str, shape: tuple[int, ...]) -> None:
    assert parse_shape(text) == (name, shape)


@pytest.mark.parametrize(
    "text", ["", "x", "x=", "=1x3", "1x3x224x224", "x=1x-3", "x=1x0x3", "x=1,3", "x=1x3x", "x=axb", "x=²"]
)
def test_parse_shape_refuses(text: str) -> None:
    with pytest.raises(InputError, match="--shape images=1x3x224x224"):
        parse_shape(text)


# --- inputs


def test_fixed_inputs_need_nothing() -> None:
    assert resolve_inputs(identities({"a": [1, 3, 8, 8], "b": []}), {}, None) == {"a": (1, 3, 8, 8), "b": ()}


@pytest.mark.parametrize("first", ["batch", None, -1, 0, "?", "unk__653"])
def test_open_first_dimension_takes_the_batch(first: int | str | None) -> None:
    model = identities({"a": [first, 3, 8, 8]})
    assert resolve_inputs(model, {}, None) == {"a": (1, 3, 8, 8)}
    assert resolve_inputs(model, {}, 4) == {"a": (4, 3, 8, 8)}
    assert resolve_inputs(model, {"a": (6, 3, 8, 8)}, None) == {"a": (6, 3, 8, 8)}


@pytest.mark.parametrize(("dim", "spelled"), [("height", "height"), (None, "?"), (-1, "-1"), (0, "0"), ("?", "?")])
def test_open_dimension_is_asked_for(dim: int | str | None, spelled: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_inputs(identities({"a": [1, 3, dim, 8]}), {}, None)
    assert f"'a' [1, 3, {spelled}, 8]" in str(caught.value)
    assert "--shape a=1x3xHx8 with numbers for H." in str(caught.value)


def test_every_missing_input_is_listed() -> None:
    inputs: dict[str, Dims] = {"in 1": ["N", 3, "h", "w"], "ok": [1, 3, 8, 8], "n": ["k"], "any": None}
    with pytest.raises(InputError) as caught:
        resolve_inputs(identities(inputs), {}, None)
    text = str(caught.value)
    assert "\n" not in text
    assert "3 inputs open" in text
    assert "'in 1' [N, 3, h, w]" in text
    assert "--shape 'in 1=1x3xHxW'" in text
    assert "--shape n=D0" in text
    assert "'any' without any shape" in text
    assert "'ok'" not in text


def test_input_without_rank_takes_what_is_given() -> None:
    assert resolve_inputs(identities({"a": None}), {"a": (1, 3, 5, 5)}, None) == {"a": (1, 3, 5, 5)}


def test_a_name_is_one_size() -> None:
    model = identities({"a": ["N", 3, "s", "s"], "b": ["N", 1, "s", 4], "c": ["N"]})
    assert resolve_inputs(model, {"a": (2, 3, 8, 8)}, None) == {"a": (2, 3, 8, 8), "b": (2, 1, 8, 4), "c": (2,)}
    assert resolve_inputs(model, {"b": (1, 1, 8, 4)}, None)["a"] == (1, 3, 8, 8)
    with pytest.raises(InputError, match="dimension 's' 9, but another place makes it 8"):
        resolve_inputs(model, {"a": (2, 3, 8, 9)}, None)
    with pytest.raises(InputError, match="dimension 'N' 3"):
        resolve_inputs(model, {"a": (2, 3, 8, 8), "b": (3, 1, 8, 4)}, None)


def test_batch_reaches_every_input_of_that_name() -> None:
    assert resolve_inputs(identities({"a": ["N", 3, 8, 8], "c": ["N"]}), {}, 5) == {"a": (5, 3, 8, 8), "c": (5,)}


def test_unnamed_first_dimensions_follow_what_is_given() -> None:
    model = identities({"a": [None, 3, None, 8], "b": [None, 7]})
    assert resolve_inputs(model, {"a": (4, 3, 8, 8)}, None) == {"a": (4, 3, 8, 8), "b": (4, 7)}


@pytest.mark.parametrize(
    ("given", "batch", "words"),
    [
        ({"z": (1, 3, 8, 8)}, None, "names 'z'"),
        ({"a": (1, 4, 8, 8)}, None, "contradicts net.onnx"),
        ({"a": (1, 3, 8)}, None, "contradicts net.onnx"),
        ({"a": (0, 3, 8, 8)}, None, "contradicts net.onnx"),
        ({"a": (2, 3, 8, 8)}, 3, "--batch 3 contradicts --shape a=2x3x8x8"),
        ({}, 0, "--batch 0"),
    ],
)
def test_contradictions(given: dict[str, tuple[int, ...]], batch: int | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve_inputs(identities({"a": ["N", 3, 8, 8]}), given, batch)


def test_batch_against_a_fixed_file() -> None:
    with pytest.raises(InputError, match="the file fixes the batch at 1"):
        resolve_inputs(identities({"a": [1, 3, 8, 8]}), {}, 8)
    with pytest.raises(InputError, match="nowhere to go"):
        resolve_inputs(identities({"a": [1, 100]}), {}, 8)
    assert resolve_inputs(identities({"a": [8, 3, 8, 8]}), {}, 8) == {"a": (8, 3, 8, 8)}


def test_input_that_is_no_tensor() -> None:
    model = identities({"a": [1, 3, 8, 8]})
    model.proto.graph.input.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
    with pytest.raises(InputError, match="'s' is no tensor"):
        resolve_inputs(model, {}, None)


def test_initializer_among_the_inputs_is_not_asked_for() -> None:
    model = identities({"a": [1, 3, 8, 8], "w": [4, 3, "k", "k"]})
    assert resolve_inputs(model, {}, None) == {"a": (1, 3, 8, 8)}


# --- all values


def conv(inputs: list[str], output: str) -> NodeProto:
    return helper.make_node("Conv", inputs, [output], pads=[1, 1, 1, 1])


def test_dynamic_model_at_its_shape() -> None:
    model = model_of(
        [conv(["x", "w"], "c"), helper.make_node("MaxPool", ["c"], ["y"], kernel_shape=[2, 2], strides=[2, 2])],
        {"x": ["N", 3, "H", "W"]},
    )
    before = model.proto.SerializeToString()
    shapes = infer_shapes(model, {"x": (2, 3, 10, 12)})
    assert shapes == {"x": (2, 3, 10, 12), "w": (4, 3, 3, 3), "c": (2, 4, 10, 12), "y": (2, 4, 5, 6)}
    assert model.proto.SerializeToString() == before
    assert value_types(model, {"x": (2, 3, 10, 12)})["c"] == ("FLOAT", (2, 4, 10, 12))


def test_shapes_recorded_for_another_batch_do_not_win() -> None:
    model = model_of([conv(["x", "w"], "c"), helper.make_node("Relu", ["c"], ["y"])], {"x": ["N", 3, 8, 8]})
    model.proto.graph.value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, [1, 4, 8, 8]))
    model.proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 8, 8]))
    assert infer_shapes(model, {"x": (3, 3, 8, 8)})["y"] == (3, 4, 8, 8)


def test_computed_reshape_is_propagated() -> None:
    """Shape -> Slice -> Concat -> Reshape, as exporters write a flatten that keeps the batch."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Constant", [], ["zero"], value_ints=[0]),
        helper.make_node("Constant", [], ["one"], value_ints=[1]),
        helper.make_node("Slice", ["s", "zero", "one"], ["n"]),
        helper.make_node("Constant", [], ["rest"], value_ints=[3, 4, -1]),
        helper.make_node("Concat", ["n", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        conv(["r", "w"], "y"),
    ]
    assert infer_shapes(model_of(nodes, {"x": ["N", 3, 8, 8]}), {"x": (2, 3, 8, 8)})["y"] == (2, 4, 4, 16)


def data_dependent(op_type: str = "Unique", domain: str = "") -> Model:
    """Conv of an input whose width is the number of distinct values of its data, which no inference can know."""
    unique = helper.make_node(op_type, ["x"], ["u"], domain=domain, **({} if domain else {"sorted": 1}))
    nodes = [
        unique,
        helper.make_node("Constant", [], ["shape"], value_ints=[1, 3, 4, -1]),
        helper.make_node("Reshape", ["u", "shape"], ["r"]),
        conv(["r", "w"], "c"),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    model = model_of(nodes, {"x": [1, 3, 8, 8]})
    if domain:
        model.proto.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def test_one_run_learns_what_inference_cannot() -> None:
    model = data_dependent()
    alone = onnx.shape_inference.infer_shapes(model.proto, data_prop=True)
    recorded = {value.name: value for value in alone.graph.value_info}
    assert not recorded["c"].type.tensor_type.shape.dim[3].HasField("dim_value")
    shapes = infer_shapes(model, {"x": (1, 3, 8, 8)})
    assert shapes["r"] == (1, 3, 4, 16)
    assert shapes["c"] == shapes["y"] == (1, 4, 4, 16)


def test_what_cannot_run_stays_open() -> None:
    shapes = infer_shapes(data_dependent("Mystery", "com.example"), {"x": (1, 3, 8, 8)})
    assert shapes["x"] == (1, 3, 8, 8)
    assert "u" not in shapes
    assert all(isinstance(dim, int) for dim in shapes["w"])
    assert not all(isinstance(dim, int) for dim in shapes.get("c", ("?",)))


def test_contradicting_graph_is_no_crash() -> None:
    """The weight wants 5 input channels and the input has 3: nothing is known, and nobody crashes here."""
    model = model_of([conv(["x", "w"], "y")], {"x": [1, 3, 8, 8]}, weight_inputs=5)
    assert infer_shapes(model, {"x": (1, 3, 8, 8)})["x"] == (1, 3, 8, 8)


@pytest.mark.skipif(SHARED is None, reason="no shared model files here")
@pytest.mark.parametrize(
    ("name", "given", "convs"),
    [
        ("cases/16a_same_upper_s2_even.onnx", {}, {"y": (1, 64, 8, 8)}),
        ("cases/32_dynamic_batch_hw_symbolic.onnx", {"x": (2, 32, 20, 24)}, {"y": (2, 64, 20, 24)}),
        ("cases/33_dim_value_minus1.onnx", {}, {"y": (1, 64, 16, 16)}),
        ("models/onnx_light/light_densenet121.onnx", {}, {}),
        ("models/rapidocr/ch_PP-OCRv4_det_infer.onnx", {"x": (1, 3, 320, 480)}, {}),
        ("models/rapidocr/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (2, 3, 48, 192)}, {}),
    ],
)
def test_real_files(name: str, given: dict[str, tuple[int, ...]], convs: dict[str, tuple[int, ...]]) -> None:
    assert SHARED is not None
    model = load(SHARED / name)
    shapes = infer_shapes(model, resolve_inputs(model, given, None))
    for node in model.proto.graph.node:
        if node.op_type == "Conv":
            assert all(isinstance(dim, int) for dim in (*shapes[node.input[0]], *shapes[node.output[0]]))
    assert {output: shapes[output] for output in convs} == convs
