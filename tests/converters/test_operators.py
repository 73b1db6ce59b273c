"""Forms that TensorRT 8.0's parser misreads, respelled without a change of meaning; its operator list as it stands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from sparsedeploy.converters.graph import Array, Model
from sparsedeploy.converters.operators import SUPPORTED_8_0, sidestep_misreadings, unsupported_operators
from sparsedeploy.converters.opset import compare_in_ort

X = np.random.default_rng(0).standard_normal((1, 4, 6, 6))


def parsed(text: str, opset: int = 13, ir: int = 8) -> Model:
    return Model(onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> {text}'), Path("m.onnx"))


def with_constants(model: Model, **values: Array) -> Model:
    for name, value in values.items():
        model.proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return model


def respelled(model: Model, feeds: Mapping[str, Array], tolerance: float = 0.0) -> Model:
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    result = Model(proto, model.path)
    sidestep_misreadings(result)
    onnx.checker.check_model(result.proto, full_check=True)
    assert compare_in_ort(model.proto, result.proto, feeds) <= tolerance
    return result


def ops(model: Model) -> list[str]:
    return [node.op_type for node in model.proto.graph.node]


def test_integer_constants_become_tensors() -> None:
    model = parsed(
        """g (float[1, 4, 6, 6] x) => (float[24, 6] y, int64 n) {
            a = Constant<value_ints = [24, 6]>()  y = Reshape(x, a)  b = Constant<value_int = 7>()  n = Identity(b)
            c = Constant<value_float = 2.0>() }"""
    )
    result = respelled(model, {"x": X.astype(np.float32)})
    assert [entry.name for node in result.proto.graph.node for entry in node.attribute] == [
        "value",
        "value",
        "value_float",
    ]
    assert result.notes == ["respelled for TensorRT 8.0's parser, which refuses or misreads these forms: Constant x2"]


@pytest.mark.parametrize(("bounds", "wanted"), [("low, high", ["Max", "Min"]), ("low", ["Max"]), (", high", ["Min"])])
def test_fp16_clip(bounds: str, wanted: list[str]) -> None:
    text = f"g (float16[1, 4, 6, 6] x) => (float16[1, 4, 6, 6] y) {{ [act] y = Clip(x, {bounds}) }}"
    model = with_constants(parsed(text), low=np.float16(-0.5), high=np.float16(0.75))
    assert ops(respelled(model, {"x": X.astype(np.float16)})) == wanted


def test_fp32_clip_and_old_clip_stay() -> None:
    model = parsed("g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) { y = Clip(x, low) }")
    before = with_constants(model, low=np.float32(0)).proto.SerializeToString()
    sidestep_misreadings(model)
    assert model.proto.SerializeToString() == before
    assert model.notes == []
    old = parsed("g (float16[1, 4, 6, 6] x) => (float16[1, 4, 6, 6] y) { y = Clip<min = 0.0, max = 6.0>(x) }", opset=9)
    sidestep_misreadings(old)
    assert ops(old) == ["Clip"]


def test_fp16_batchnorm() -> None:
    rng = np.random.default_rng(1)
    model = parsed(
        "g (float16[1, 4, 6, 6] x) => (float16[1, 4, 6, 6] y) { [bn] y = BatchNormalization<epsilon = 0.01>(x, s, b, m, v) }"
    )
    values = {name: rng.standard_normal(4).astype(np.float16) for name in "sbm"}
    with_constants(model, **values, v=np.abs(rng.standard_normal(4)).astype(np.float16))
    result = respelled(model, {"x": X.astype(np.float16)}, tolerance=4e-3)
    assert ops(result) == ["Mul", "Add"]
    assert len(result.proto.graph.initializer) == 2


def test_fp16_pad_of_zero() -> None:
    text = "g (float16[1, 4, 6, 6] x) => (float16[1, 4, 8, 6] y) { y = Pad(x, pads, value) }"
    pads = np.int64([0, 0, 1, 0, 0, 0, 1, 0])
    result = respelled(with_constants(parsed(text), pads=pads, value=np.float16(0)), {"x": X.astype(np.float16)})
    assert list(result.proto.graph.node[0].input) == ["x", "pads"]
    other = with_constants(parsed(text), pads=pads, value=np.float16(1))
    assert list(respelled(other, {"x": X.astype(np.float16)}).proto.graph.node[0].input) == ["x", "pads", "value"]
    assert unsupported_operators(other) == (("Pad (padding other than zero)", "y"),)


def test_negative_gather() -> None:
    model = parsed("g (float[1, 4, 6, 6] x) => (float[1, 4, 2, 6] y) { y = Gather<axis = 2>(x, i) }")
    with_constants(model, i=np.int32([-1, 2]))
    assert unsupported_operators(model) == (("Gather (negative indices)", "y"),)
    result = respelled(model, {"x": X.astype(np.float32)})
    assert unsupported_operators(result) == ()
    assert numpy_helper.to_array(result.proto.graph.initializer[0]).tolist() == [5, 2]


def test_computed_pads() -> None:
    """What torch's older exporter writes for F.pad: pads turned round in the graph."""
    model = parsed(
        """g (float[1, 4, 6, 6] x) => (float[1, 4, H, W] y) {
            given = Constant<value = int64[4] {1, 2, 0, 1}>()  left = Constant<value = int64[1] {4}>()
            zeros = ConstantOfShape<value = int64[1] {0}>(left)  all = Concat<axis = 0>(given, zeros)
            rows = Constant<value = int64[2] {-1, 2}>()  m = Reshape(all, rows)
            from = Constant<value = int64[1] {-1}>()  to = Constant<value = int64[1] {-9223372036854775807}>()
            axis = Constant<value = int64[1] {0}>()  r = Slice(m, from, to, axis, from)  t = Transpose<perm = [1, 0]>(r)
            flat = Constant<value = int64[1] {-1}>()  f = Reshape(t, flat)  pads = Cast<to = 7>(f)
            [pad] y = Pad(x, pads) }"""
    )
    assert unsupported_operators(model) == (("Pad (pads not constant)", "pad"),)
    result = respelled(model, {"x": X.astype(np.float32)})
    assert ops(result) == ["Pad"]
    assert numpy_helper.to_array(result.proto.graph.initializer[0]).tolist() == [0, 0, 0, 1, 0, 0, 1, 2]
    fed = parsed("g (float[1, 4, 6, 6] x, int64[8] p) => (float[1, 4, H, W] y) { [pad] y = Pad(x, p) }")
    sidestep_misreadings(fed)
    assert unsupported_operators(fed) == (("Pad (pads not constant)", "pad"),)


def test_default_domain_is_spelled_empty() -> None:
    model = parsed("g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) { y = Relu(x) }")
    model.proto.graph.node[0].domain = "ai.onnx"
    del model.proto.opset_import[:]
    model.proto.opset_import.extend([helper.make_opsetid("other", 1), helper.make_opsetid("ai.onnx", 13)])
    sidestep_misreadings(model)
    assert model.proto.graph.node[0].domain == ""
    assert [(entry.domain, entry.version) for entry in model.proto.opset_import] == [("", 13), ("other", 1)]


def test_the_list_is_the_parsers() -> None:
    """Counted in the importer table of onnx-tensorrt 8.0-GA, and some that 8.2 added."""
    assert len(SUPPORTED_8_0) == len(set(SUPPORTED_8_0)) == 122
    assert list(SUPPORTED_8_0) == sorted(SUPPORTED_8_0)
    added_in_8_2 = {"Einsum", "GatherND", "IsNaN", "Round", "ScatterElements", "ScatterND", "Sign"}
    assert not added_in_8_2 & set(SUPPORTED_8_0)
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    assert set(SUPPORTED_8_0) - known == {"ImageScaler", "ParametricSoftplus", "ScaledTanh"}
