"""fp16 graphs against the graph they came from, with every value really rounded to fp16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import SHARED
from onnx import ModelProto, TensorProto, helper, numpy_helper

from sparsedeploy.converters.graph import Array, Model, node_label
from sparsedeploy.converters.opset import compare_in_ort
from sparsedeploy.converters.precision import to_fp16, with_every_rounding
from sparsedeploy.errors import InputError
from sparsedeploy.plugins.node import DOMAIN, OP_TYPE

TOLERANCE = 1e-2
"""Of the largest output: the bound that verification of an fp16 graph is held to."""
HALF = TensorProto.FLOAT16


def parsed(text: str, opset: int = 13, ir: int = 8) -> Model:
    return Model(onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> {text}'), Path("m.onnx"))


def copy_of(model: Model) -> Model:
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    return Model(proto, model.path)


def rand(*shape: int, seed: int = 0, dtype: type = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def add_weights(model: Model, as_constants: bool = False, **values: Array) -> Model:
    """Initializers under the given names, or Constant nodes at the front."""
    for name, value in values.items():
        tensor = numpy_helper.from_array(np.asarray(value), name)
        if as_constants:
            model.proto.graph.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
        else:
            model.proto.graph.initializer.append(tensor)
            if model.proto.ir_version < 4:
                info = helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
                model.proto.graph.input.append(info)
    return model


def converted(model: Model, keep: tuple[str, ...] = ()) -> Model:
    result = copy_of(model)
    to_fp16(result, keep)
    onnx.checker.check_model(result.proto, full_check=True)
    return result


def check(model: Model, keep: tuple[str, ...] = (), **feeds: Array) -> Model:
    result = converted(model, keep)
    difference = compare_in_ort(model.proto, with_every_rounding(result), feeds)
    assert difference <= TOLERANCE, difference
    same = (model.proto.graph.input, model.proto.graph.output), (result.proto.graph.input, result.proto.graph.output)
    names = [{value.name: value.type.tensor_type.elem_type for value in values} for values in same[0]]
    initializers = {tensor.name for tensor in model.proto.graph.initializer}
    for before, after in zip(names, same[1], strict=True):
        for value in after:
            if value.name in before and value.name not in initializers:
                assert value.type.tensor_type.elem_type == before[value.name]
    return result


def ops(model: Model) -> list[str]:
    return [node.op_type for node in model.proto.graph.node if node.op_type != "Constant"]


def kinds(model: Model) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.proto.graph.initializer}


NET = """g (float[N, 3, 16, 16] x) => (float[N, 10] probs, float[N, 12, 16, 16] map)
{
    [conv1] c1 = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)
    [bn] n1 = BatchNormalization(c1, s, t, m, v)
    [relu1] r1 = Relu(n1)
    [conv2] c2 = Conv<pads = [1, 1, 1, 1]>(r1, w2)
    [add] a = Add(c2, r1)
    [relu2] r2 = Relu(a)
    [pool] p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r2)
    [up] u = RESIZE
    [cat] cat = Concat<axis = 1>(u, r1, x)
    [head] map = Conv(cat, w3, b3)
    [gap] q = GlobalAveragePool(r2)
    [flat] f = Flatten(q)
    [fc] l = Gemm<transB = 1>(f, w4, b4)
    [soft] probs = Softmax<axis = 1>(l)
}"""
RESIZES = {
    8: 'Upsample<mode = "nearest", scales = [1.0, 1.0, 2.0, 2.0]>(p)',
    9: 'Upsample<mode = "nearest">(p, scales)',
    10: 'Resize<mode = "nearest">(p, scales)',
    11: 'Resize<mode = "linear">(p, roi, scales)',
    13: 'Resize<mode = "linear">(p, , scales)',
    19: 'Resize<mode = "linear", axes = [0, 1, 2, 3]>(p, , scales)',
}


def net(opset: int = 13, as_constants: bool = False, ir: int = 8) -> Model:
    model = parsed(NET.replace("RESIZE", RESIZES[opset]), opset, ir)
    weights = {
        "w1": rand(8, 3, 3, 3) / 5, "b1": rand(8), "s": rand(8, seed=1), "t": rand(8, seed=2), "m": rand(8, seed=3),
        "v": np.abs(rand(8, seed=4)) + 0.1, "w2": rand(8, 8, 3, 3, seed=5) / 9, "w3": rand(12, 19, 1, 1, seed=6) / 4,
        "b3": rand(12, seed=7), "w4": rand(10, 8, seed=8), "b4": rand(10, seed=9),
    }  # fmt: skip
    if opset > 8:
        weights["scales"] = np.float32([1, 1, 2, 2])
    if opset == 11:
        weights["roi"] = np.zeros(0, np.float32)
    return add_weights(model, as_constants, **weights)


@pytest.mark.parametrize("as_constants", [False, True], ids=["initializers", "constants"])
@pytest.mark.parametrize("opset", RESIZES)
def test_a_residual_net_at_old_and_new_opsets(opset: int, as_constants: bool) -> None:
    model = net(opset, as_constants)
    result = check(model, x=rand(2, 3, 16, 16))
    assert ops(result).count("Cast") == 3  # one input, two outputs
    assert {node.input[0] for node in result.proto.graph.node if node.op_type == "Cast"} >= {"x"}
    if not as_constants:
        scales = {"scales", "roi"}
        assert {kind for name, kind in kinds(result).items() if name not in scales} == {HALF}
        assert {kind for name, kind in kinds(result).items() if name in scales} <= {TensorProto.FLOAT}
    assert result.notes == ["14 nodes compute in fp16, 3 Casts added"]


def test_names_stay() -> None:
    model = net()
    result = converted(model)
    labels = {node_label(node) for node in result.proto.graph.node}
    assert labels >= {node_label(node) for node in model.proto.graph.node}
    made = {name for node in result.proto.graph.node for name in node.output}
    assert made >= {name for node in model.proto.graph.node for name in node.output}


def test_ir_3_input_entries_follow() -> None:
    result = check(net(9, ir=3), x=rand(1, 3, 16, 16))
    types = {value.name: value.type.tensor_type.elem_type for value in result.proto.graph.input}
    assert types["x"] == TensorProto.FLOAT
    assert types["w1"] == HALF
    assert types["scales"] == TensorProto.FLOAT


def test_kept_nodes() -> None:
    model = net()
    result = check(model, keep=("conv2", "probs"), x=rand(1, 3, 16, 16))
    assert kinds(result)["w2"] == TensorProto.FLOAT
    assert ops(result).count("Cast") == 5  # x; r1 to conv2 and c2 back; l to the kept Softmax; map
    with pytest.raises(InputError, match="named nowhere, which was to stay out of fp16"):
        converted(model, keep=("conv2", "nowhere"))


def test_a_weight_read_in_both_types_is_kept_in_both() -> None:
    model = add_weights(
        parsed(
            "g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y, float[1, 4, 5, 5] z) { [a] y = Conv(x, w)  [b] z = Conv(x, w) }"
        ),
        w=rand(4, 4, 1, 1),
    )
    result = check(model, keep=("b",), x=rand(1, 4, 5, 5))
    assert kinds(result) == {"w": TensorProto.FLOAT, "w_fp16": HALF}


def test_overflow_names_the_tensor() -> None:
    weight = rand(4, 4, 1, 1)
    weight[0, 0] = 65505
    weight[1, 1] = -1e6
    text = "g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { [layer] y = Conv(x, w) }"
    model = add_weights(parsed(text), w=weight)
    before = model.proto.SerializeToString()
    with pytest.raises(
        InputError, match=r"tensor w, read by Conv node layer, has 2 of 16 values beyond .* 65504 .*1e\+06"
    ):
        to_fp16(model)
    assert model.proto.SerializeToString() == before
    weight[0, 0], weight[1, 1] = 65504, -65504
    check(add_weights(parsed(text), w=weight), x=rand(1, 4, 5, 5) / 100)


def test_vanished_values_are_counted() -> None:
    weight = rand(4, 4, 1, 1)
    weight[0] = 0
    weight[1] = 2.0**-26
    model = add_weights(parsed("g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { y = Conv(x, w) }"), w=weight)
    result = check(model, x=rand(1, 4, 5, 5))
    assert result.notes[1] == "too small for fp16, became 0: 4 of the constants' values, 4 of them in w"
    assert np.count_nonzero(numpy_helper.to_array(result.proto.graph.initializer[0])) == 8


@pytest.mark.parametrize(("kind", "dtype"), [("double", np.float64), ("bfloat16", None)])
def test_other_float_types(kind: str, dtype: type | None) -> None:
    text = f"g ({kind}[6, 4] x) => ({kind}[6, 4] y) {{ c = MatMul(x, w)  y = Relu(c) }}"
    weight = rand(4, 4)
    if dtype is not None:
        model = add_weights(parsed(text), w=weight.astype(dtype))
        result = check(model, x=rand(6, 4, dtype=dtype))
    else:
        model = parsed(text, opset=22, ir=10)
        tensor = helper.make_tensor("w", TensorProto.BFLOAT16, weight.shape, weight.ravel().tolist())
        model.proto.graph.initializer.append(tensor)
        result = converted(model)  # ONNX Runtime's CPU provider has no bfloat16 MatMul
        stored = numpy_helper.to_array(tensor).astype(np.float16)
        assert np.array_equal(numpy_helper.to_array(result.proto.graph.initializer[0]), stored)
    assert kinds(result) == {"w": HALF}
    assert ops(result) == ["Cast", "MatMul", "Relu", "Cast"]


def test_an_fp16_model_is_left_alone() -> None:
    model = parsed(
        "g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) { h = Cast<to = 10>(x)  c = Conv(h, w)  y = Cast<to = 1>(c) }"
    )
    add_weights(model, w=rand(4, 4, 1, 1, dtype=np.float16))
    before = model.proto.SerializeToString()
    to_fp16(model)
    assert model.proto.SerializeToString() == before
    assert model.notes == ["the weights are fp16 already: nothing converted"]


def test_converting_twice_changes_nothing_more() -> None:
    once = converted(net())
    twice = converted(once)
    assert twice.proto == once.proto


def test_casts_of_data_follow() -> None:
    model = parsed(
        """g (uint8[1, 3, 6, 6] image) => (float[1, 4, 6, 6] y, int64[1, 6, 6] best, float[1, 3, 6, 6] seen) {
            f = Cast<to = 1>(image)  c = Conv(f, w)  i = ArgMax<axis = 1, keepdims = 0>(c)  best = Identity(i)
            g = Cast<to = 1>(i)  k = Unsqueeze(g, one)  y = Add(c, k)  seen = Cast<to = 1>(image) }"""
    )
    add_weights(model, w=rand(4, 3, 1, 1) / 100, one=np.int64([1]))
    image = np.random.default_rng(0).integers(0, 256, (1, 3, 6, 6)).astype(np.uint8)
    result = converted(model)
    targets = {node.output[0]: node.attribute[0].i for node in result.proto.graph.node if node.op_type == "Cast"}
    assert targets == {"f": HALF, "g": HALF, "seen": TensorProto.FLOAT, "y": TensorProto.FLOAT}
    assert compare_in_ort(model.proto, with_every_rounding(result), {"image": image}) <= TOLERANCE


def test_an_fp16_weight_behind_a_cast_is_used_as_it_is() -> None:
    model = parsed(
        "g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) { w = Cast<to = 1>(h)  c = Conv(x, w)  y = Relu(c) }"
    )
    add_weights(model, h=rand(4, 4, 1, 1, dtype=np.float16))
    result = check(model, x=rand(1, 4, 6, 6))
    assert ops(result) == ["Cast", "Conv", "Relu", "Cast"]
    assert result.proto.graph.node[1].input[1] == "h"


def test_weights_behind_identity_stay_constants() -> None:
    model = parsed(
        "g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) { v = Identity(w)  b = Conv(x, v)  y = Conv(b, w) }"
    )
    result = check(add_weights(model, w=rand(4, 4, 1, 1) / 2), x=rand(1, 4, 6, 6))
    assert ops(result) == ["Cast", "Conv", "Conv", "Cast"]
    assert kinds(result) == {"w_fp16": HALF} or kinds(result) == {"w": HALF}


def test_shape_arithmetic_keeps_its_digits() -> None:
    """An older exporter's Resize: sizes from floats of the shape; 4099 is no fp16 number."""
    model = parsed(
        """g (float[1, 1, 1, W] x) => (float[1, 1, 1, V] y) {
            s = Shape(x)  f = Cast<to = 1>(s)  d = Mul(f, factor)  i = Cast<to = 7>(d)
            c = Conv(x, w)  y = Resize<mode = "linear">(c, , , i) }"""
    )
    add_weights(model, factor=np.float32([1, 1, 1, 1.5]), w=rand(1, 1, 1, 1))
    result = check(model, x=rand(1, 1, 1, 4099))
    assert kinds(result) == {"factor": TensorProto.FLOAT, "w": HALF}


def test_operators_that_keep_their_type() -> None:
    model = parsed(
        """g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 2] top, int64[1, 4, 6, 2] at, float[1, 4, 6, 6] n) {
            c = Conv(x, w)  top, at = TopK(c, k)  i = InstanceNormalization(c, s, b)  q = QuantizeLinear(i, scale, zero)
            d = DequantizeLinear(q, scale, zero)  r = Conv(d, w)  n = LRN<size = 3>(r) }"""
    )
    add_weights(
        model, w=rand(4, 4, 1, 1), k=np.int64([2]), s=rand(4), b=rand(4), scale=np.float32(0.05), zero=np.int8(0)
    )
    result = converted(model)
    held = kinds(result)
    assert held["w"] == HALF
    assert {held[name] for name in ("s", "b", "scale")} == {TensorProto.FLOAT}
    assert compare_in_ort(model.proto, with_every_rounding(result), {"x": rand(1, 4, 6, 6)}) < np.inf
    top = next(node for node in result.proto.graph.node if node.op_type == "TopK")
    assert top.input[0] == "c_fp32"


def test_scalars_that_fp16_would_lose_keep_their_node() -> None:
    model = parsed(
        """g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) {
            c = Conv(x, w)  [plus] p = Add(c, tiny)  [times] q = Mul(p, huge)  [over] y = Div(q, huge) }"""
    )
    add_weights(model, w=np.abs(rand(4, 4, 1, 1)), tiny=np.float32(1e-12), huge=np.float32(1e6))
    result = converted(model)
    assert kinds(result) == {"w": HALF, "tiny": TensorProto.FLOAT, "huge": TensorProto.FLOAT}
    assert compare_in_ort(model.proto, with_every_rounding(result), {"x": rand(1, 4, 6, 6)}) <= TOLERANCE


def test_statistics_beyond_fp16_keep_their_node() -> None:
    model = parsed(
        "g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) { c = Conv(x, w)  y = BatchNormalization(c, s, b, m, v) }"
    )
    add_weights(model, w=100 * rand(4, 4, 1, 1), s=rand(4), b=rand(4), m=rand(4), v=np.float32([7e4, 1, 2, 3]))
    result = check(model, x=rand(1, 4, 6, 6))
    assert kinds(result)["v"] == TensorProto.FLOAT


def test_bounds_beyond_fp16_are_cut() -> None:
    model = parsed("g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) { c = Conv(x, w)  y = Clip(c, zero, big) }")
    add_weights(model, w=rand(4, 4, 1, 1), zero=np.float32(0), big=np.float32(3.4e38))
    result = check(model, x=rand(1, 4, 6, 6))
    bound = next(tensor for tensor in result.proto.graph.initializer if tensor.name == "big")
    assert numpy_helper.to_array(bound) == np.float16(65504)
    assert result.notes[-1] == "bounds beyond fp16's largest number were cut at 65504: big"


def test_nodes_with_bodies_keep_their_type() -> None:
    branches = {
        f"{name}_branch": onnx.parser.parse_graph(f"{name} () => (float[1, 4, 6, 6] {name}) {{ {name} = {op}(c, w2) }}")
        for name, op in (("then", "Add"), ("else", "Mul"))
    }
    model = parsed("g (float[1, 4, 6, 6] x, bool flag) => (float[1, 4, 6, 6] y) { c = Conv(x, w)  y = Conv(c, w) }")
    node = helper.make_node("If", ["flag"], ["chosen"], name="choice", **branches)
    model.proto.graph.node.insert(1, node)
    model.proto.graph.node[2].input[0] = "chosen"
    add_weights(model, w=rand(4, 4, 1, 1), w2=rand(1, 4, 1, 1))
    for flag in (True, False):
        result = check(model, x=rand(1, 4, 6, 6), flag=np.asarray(flag))
    assert kinds(result) == {"w": HALF, "w2": TensorProto.FLOAT}
    choice = next(node for node in result.proto.graph.node if node.op_type == "If")
    assert choice == node


def test_our_node_takes_fp16_and_keeps_its_words() -> None:
    text = "g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) { c = Conv(x, w)  r = Relu(c)  y = Relu(s) }"
    model = parsed(text)
    node = helper.make_node(OP_TYPE, ["c", "r", "words"], ["s"], domain=DOMAIN, name="ours", abi=1)
    model.proto.graph.node.insert(2, node)
    model.proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    add_weights(model, w=rand(4, 4, 1, 1), words=np.arange(2000, dtype=np.int32))
    result = copy_of(model)
    to_fp16(result)
    onnx.checker.check_model(result.proto)
    assert ops(result) == ["Cast", "Conv", "Relu", OP_TYPE, "Relu", "Cast"]
    assert result.proto.graph.node[3] == node
    assert kinds(result) == {"w": HALF, "words": TensorProto.INT32}


def test_a_value_of_unknown_type_is_named() -> None:
    model = parsed("g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) { c = Conv(x, w)  y = Add(c, u) }")
    model.proto.graph.node.insert(1, helper.make_node("Strange", ["c"], ["u"], domain="elsewhere", name="odd"))
    model.proto.opset_import.append(helper.make_opsetid("elsewhere", 1))
    add_weights(model, w=rand(4, 4, 1, 1))
    with pytest.raises(InputError, match="value u, made by Strange node odd"):
        to_fp16(model)
    model.proto.graph.value_info.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, [1, 4, 6, 6]))
    to_fp16(model)
    assert ops(model) == ["Cast", "Conv", "Cast", "Strange", "Cast", "Add", "Cast"]


def test_inputs_and_weights_that_are_outputs() -> None:
    model = parsed(
        "g (float[1, 4, 6, 6] x) => (float[4, 4, 1, 1] w, float[1, 4, 6, 6] same, float[1, 4, 6, 6] y) { same = Identity(x)  y = Conv(x, w) }"
    )
    result = check(add_weights(model, w=rand(4, 4, 1, 1)), x=rand(1, 4, 6, 6))
    assert kinds(result) == {"w": TensorProto.FLOAT, "w_fp16": HALF}


def test_value_info_follows() -> None:
    model = net()
    inferred = onnx.shape_inference.infer_shapes(model.proto)
    model.proto.CopyFrom(inferred)
    assert model.proto.graph.value_info
    result = check(model, x=rand(1, 3, 16, 16))
    wanted = {value.name: HALF for value in model.proto.graph.value_info}
    assert {value.name: value.type.tensor_type.elem_type for value in result.proto.graph.value_info} == wanted


def test_external_data(tmp_path: Path) -> None:
    model = net()
    onnx.save(model.proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=64, location="m.data")
    lazy = Model(onnx.load(tmp_path / "m.onnx", load_external_data=False), tmp_path / "m.onnx")
    assert {tensor.name for tensor in lazy.proto.graph.initializer if tensor.external_data} >= {"w1", "w2", "w3", "w4"}
    to_fp16(lazy)
    assert not [tensor.name for tensor in lazy.proto.graph.initializer if tensor.external_data]
    feeds = {"x": rand(1, 3, 16, 16)}
    assert compare_in_ort(model.proto, with_every_rounding(lazy), feeds, base_dir=tmp_path) <= TOLERANCE


def test_every_rounding_is_done() -> None:
    """ONNX Runtime alone would compute 2048 + 0.5 - 2048 in fp32; fp16 has no 2048.5."""
    model = parsed(
        "g (float16[1, 1, 1, 1] x) => (float16[1, 1, 1, 1] y) { c = Conv(x, w, half)  y = Conv(c, w, back) }"
    )
    one, half, back = (np.float16(value) for value in (1, 0.5, -2048))
    add_weights(model, w=one.reshape(1, 1, 1, 1), half=half.reshape(1), back=back.reshape(1))
    zero = parsed("g (float16[1, 1, 1, 1] x) => (float16[1, 1, 1, 1] y) { y = Sub(x, x) }")
    feeds = {"x": np.full((1, 1, 1, 1), 2048, np.float16)}
    assert compare_in_ort(zero.proto, with_every_rounding(model), feeds) == 0


@pytest.mark.skipif(SHARED is None, reason="needs the shared models")
def test_real_paddle_classifier() -> None:
    """Weights in Constant nodes, 35 BatchNormalizations, Clip with bounds, open dimensions: trained weights."""
    assert SHARED is not None
    path = SHARED / "models" / "rapidocr" / "ch_ppocr_mobile_v2.0_cls_infer.onnx"
    if not path.is_file():
        pytest.skip("the model is absent")
    model = Model(onnx.load(path), path)
    result = copy_of(model)
    to_fp16(result)
    x = np.random.default_rng(0).random((2, 3, 48, 192)).astype(np.float32)
    assert compare_in_ort(model.proto, with_every_rounding(result), {"x": x}) <= TOLERANCE
