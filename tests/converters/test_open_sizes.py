"""Sizes as expressions: equal ones are equal in ONNX Runtime at every size, and residuals that are not stay apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from sparsedeploy.converters.fuse import find_units
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.open_sizes import has_open_inputs, open_sizes
from sparsedeploy.converters.shapes import infer_shapes

OPEN = "float[N,8,H,W] x"
KERNELS = {"w1": (1, 1), "w2": (2, 2), "w3": (3, 3)}


def model_of(text: str, header: str = OPEN, opset: int = 17, outputs: str = "float[A,B,C,D] y") -> Model:
    """A model of the given nodes with 8-channel weights w1, w2, w3 and a bias b."""
    rng = np.random.default_rng(0)
    proto: ModelProto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g ({header}) => ({outputs}) {{ {text} }}'
    )
    tensors = {name: rng.standard_normal((8, 8, *kernel)) for name, kernel in KERNELS.items()}
    tensors |= {"b": rng.standard_normal(8), "row": rng.standard_normal((1, 8, 1, 1))}
    read = {name for node in proto.graph.node for name in node.input}
    for name, array in tensors.items():
        if name in read:
            proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return Model(proto, Path("model.onnx"))


def sizes_in_ort(model: Model, names: list[str], shape: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """The shapes of values at one input shape; None where the graph does not run there."""
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.output[:]
    proto.graph.output.extend([helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    try:
        results = session.run(names, {"x": np.ones(shape, np.float32)})
    except Exception:  # onnxruntime's exceptions share no base
        return None
    return [tuple(result.shape) for result in results]


EQUAL = {
    "padded 3x3": "a = Conv<pads=[1,1,1,1]>(x, w3) y = Relu(x)",
    "1x1 and padded 3x3, both strided": "a = Conv<strides=[2,2]>(x, w1) y = Conv<pads=[1,1,1,1],strides=[2,2]>(x, w3)",
    "dilated": "a = Conv<pads=[2,2,2,2],dilations=[2,2]>(x, w3) y = Sigmoid(x)",
    "SAME": 'a = Conv<auto_pad="SAME_UPPER",strides=[2,2]>(x, w2) y = Conv<strides=[2,2]>(x, w1)',
    "padded apart": (
        "p = Constant<value_ints=[0,0,1,1,0,0,1,1]>() q = Pad(x, p) a = Conv(q, w3) y = MaxPool<kernel_shape=[3,3],"
        "pads=[1,1,1,1]>(x)"
    ),
    "padded apart, strided": (
        "p = Constant<value_ints=[0,0,0,0,0,0,1,1]>() q = Pad(x, p) a = Conv<strides=[2,2]>(q, w2) "
        "y = Conv<strides=[2,2]>(x, w1)"
    ),
    "shrunk and grown": "m = Conv(x, w3) a = Conv<pads=[2,2,2,2]>(m, w3) y = Relu(x)",
    "gate of one pixel": "m = GlobalAveragePool(x) s = Sigmoid(m) a = Mul(s, x) y = Relu(x)",
    "gate by ReduceMean": "m = ReduceMean<axes=[-1,-2]>(x) s = Sigmoid(m) a = Mul(x, s) y = Relu(x)",
    "split in two": "s, t = Split<axis=1>(x) a = Concat<axis=1>(t, s) y = Relu(x)",
    "channel shuffle": (
        "h = Shape(x) i = Constant<value_ints=[0]>() j = Constant<value_ints=[2,3]>() n = Gather(h, i) s = Gather(h, j) "
        "k = Constant<value_ints=[2,4]>() d = Concat<axis=0>(n, k, s) r = Reshape(x, d) t = Transpose<perm=[0,2,1,3,4]>(r) "
        "e = Constant<value_ints=[8]>() f = Concat<axis=0>(n, e, s) a = Reshape(t, f) y = Relu(x)"
    ),
    "NHWC and back": "t = Transpose<perm=[0,2,3,1]>(x) u = Relu(t) a = Transpose<perm=[0,3,1,2]>(u) y = Relu(x)",
    "resized to another's size": (
        "m = MaxPool<kernel_shape=[2,2],strides=[2,2]>(x) h = Shape(x) a = Resize(m, , , h) y = Relu(x)"
    ),
    "doubled twice the same way": (
        "s = Constant<value_floats=[1.0,1.0,2.0,2.0]>() m = Conv<strides=[2,2]>(x, w1) a = Resize(m, , s) "
        "k = Conv<pads=[1,1,1,1],strides=[2,2]>(x, w3) y = Resize(k, , s)"
    ),
}
DIFFERENT = {
    "pooled by two and strided by two": (
        "a = Conv<strides=[2,2]>(x, w1) y = AveragePool<kernel_shape=[2,2],strides=[2,2]>(x)"
    ),
    "halved and doubled": (
        "s = Constant<value_floats=[1.0,1.0,2.0,2.0]>() m = Conv<strides=[2,2]>(x, w1) a = Resize(m, , s) y = Relu(x)"
    ),
    "one pixel": "a = GlobalAveragePool(x) y = Relu(x)",
    "constant of one image": "a = Identity(row) y = GlobalAveragePool(x)",
    "unpadded": "a = Conv(x, w3) y = Relu(x)",
    "cut": (
        "o = Constant<value_ints=[0]>() e = Constant<value_ints=[6]>() i = Constant<value_ints=[2]>() "
        "a = Slice(x, o, e, i) y = Relu(x)"
    ),
    "ceiling": (
        "a = MaxPool<kernel_shape=[2,2],strides=[2,2],ceil_mode=1>(x) y = MaxPool<kernel_shape=[2,2],strides=[2,2]>(x)"
    ),
}
SHAPES = [(1, 8, 6, 6), (3, 8, 7, 9), (2, 8, 12, 5), (1, 8, 3, 4), (2, 8, 1, 1)]


@pytest.mark.parametrize("case", EQUAL)
def test_equal_expressions_are_equal_sizes(case: str) -> None:
    model = model_of(EQUAL[case])
    sizes = open_sizes(model)
    assert sizes["a"] == sizes["y"]
    ran = [found for shape in SHAPES if (found := sizes_in_ort(model, ["a", "y"], shape)) is not None]
    assert len(ran) >= 3
    assert all(a == y for a, y in ran)


@pytest.mark.parametrize("case", DIFFERENT)
def test_sizes_that_may_differ_are_not_proven_equal(case: str) -> None:
    model = model_of(DIFFERENT[case])
    sizes = open_sizes(model)
    assert sizes.get("a") != sizes["y"]
    ran = [found for shape in SHAPES if (found := sizes_in_ort(model, ["a", "y"], shape)) is not None]
    assert any(a != y for a, y in ran)


def test_nameless_sizes_of_two_inputs_differ() -> None:
    model = model_of("a = Relu(x) y = Relu(r)", "float[?,8,?,?] x, float[?,8,?,?] r")
    sizes = open_sizes(model)
    assert sizes["a"] != sizes["y"]
    assert sizes["a"] == sizes["x"]


def test_static_inputs_are_not_open() -> None:
    assert not has_open_inputs(model_of("y = Relu(x)", "float[1,8,4,4] x"))
    assert has_open_inputs(model_of("y = Relu(x)"))


def test_what_no_rule_covers_equals_nothing() -> None:
    model = model_of("a = NonZero(x) b1 = NonZero(x) y = Relu(x)")
    sizes = open_sizes(model)
    assert "a" not in sizes


@pytest.mark.parametrize(
    ("text", "given", "residual"),
    [
        ("c = Conv<pads=[1,1,1,1]>(x, w3) y = Add(c, x)", (1, 8, 6, 6), True),
        (
            "d = Conv<strides=[2,2]>(x, w1) c = Conv<pads=[1,1,1,1],strides=[2,2]>(x, w3) y = Add(c, d)",
            (1, 8, 6, 6),
            True,
        ),
        # Equal at an even size alone.
        (
            "d = AveragePool<kernel_shape=[2,2],strides=[2,2]>(x) c = Conv<pads=[1,1,1,1],strides=[2,2]>(x, w3) "
            "y = Add(c, d)",
            (1, 8, 6, 6),
            False,
        ),
        # Equal for one image alone: a constant beside a convolution that has its bias already.
        ("g = GlobalAveragePool(x) c = Conv(g, w1, b) y = Add(c, row)", (1, 8, 6, 6), False),
        # Equal for one pixel alone.
        ("g = GlobalAveragePool(x) c = Conv(x, w1, b) y = Add(c, g)", (1, 8, 1, 1), False),
    ],
)
def test_residuals_in_models_with_open_sizes(text: str, given: tuple[int, ...], residual: bool) -> None:
    model = model_of(text)
    units = find_units(model, infer_shapes(model, {"x": given}))
    assert any(unit.residual is not None for unit in units) == residual
    static = model_of(text, f"float[{','.join(map(str, given))}] x")
    assert any(unit.residual is not None for unit in find_units(static, infer_shapes(static, {"x": given})))
