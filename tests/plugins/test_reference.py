"""The references themselves: held against plain loops and against ONNX Runtime's reading of the same attributes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conv_cases import Case, cases, fill
from hypothesis import given, settings
from numpy.typing import NDArray
from onnx import TensorProto, helper

from sparsedeploy.layer import Epilogue, Geometry
from sparsedeploy.plugins import epilogue
from sparsedeploy.plugins.reference import conv2d


def loops(x: NDArray[np.float64], weight: NDArray[np.float32], g: Geometry) -> NDArray[np.float64]:
    """The definition: every output pixel a sum over taps that lie inside the input."""
    y = np.zeros((len(x), g.oc, g.oh, g.ow))
    channels, filters = g.ic // g.group, g.oc // g.group
    for n, o, i, j in itertools.product(*map(range, y.shape)):
        for c, ky, kx in itertools.product(range(channels), range(g.kh), range(g.kw)):
            row = i * g.stride[0] - g.pads[0] + ky * g.dilation[0]
            column = j * g.stride[1] - g.pads[1] + kx * g.dilation[1]
            if 0 <= row < g.h and 0 <= column < g.w:
                y[n, o, i, j] += float(weight[o, c, ky, kx]) * x[n, o // filters * channels + c, row, column]
    return y


SMALL = (
    Geometry(oc=2, ic=3, kh=3, kw=3, h=5, w=4, pads=(1, 1, 1, 1)),
    Geometry(oc=4, ic=2, kh=1, kw=1, h=3, w=5, stride=(2, 2)),
    Geometry(oc=4, ic=6, kh=2, kw=3, h=7, w=6, stride=(2, 1), pads=(0, 2, 1, 0), dilation=(1, 2), group=2),
    Geometry(oc=3, ic=3, kh=3, kw=3, h=6, w=6, stride=(3, 2), pads=(2, 0, 1, 3), dilation=(2, 1), group=3),
    Geometry(oc=1, ic=1, kh=5, kw=1, h=1, w=3, pads=(2, 0, 3, 0)),
)


@pytest.mark.parametrize("geometry", SMALL)
def test_conv2d_is_the_definition(geometry: Geometry) -> None:
    total = int(np.prod(geometry.weight_shape))
    case = fill(geometry, Epilogue(bias=True), total, batch=2, seed=3)
    assert case.bias is not None
    expected = loops(case.x, case.weight, geometry) + case.bias[:, None, None]
    np.testing.assert_allclose(conv2d(case.x, case.weight, case.bias, geometry), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=15, derandomize=True, deadline=None)
@given(case=cases())
def test_conv2d_reads_attributes_as_onnx_runtime_does(case: Case) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    g, x = case.geometry, case.x.astype(np.float32)
    node = helper.make_node(
        "Conv", ["x", "w"], ["y"], strides=g.stride, pads=g.pads, dilations=g.dilation, group=g.group
    )
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, case.weight.shape),
    ]
    graph = helper.make_graph([node], "conv", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x, "w": case.weight})
    # fp32 sums of at most MAX_NNZ terms against float64: 1e-5 of the sum of magnitudes bounds their rounding.
    scale = conv2d(np.abs(x), np.abs(case.weight), None, g)
    error = np.abs(y - conv2d(x, case.weight, None, g))
    assert y.shape == error.shape
    assert (error <= 1e-5 * scale + 1e-30).all()


def test_conv2d_refuses_other_shapes() -> None:
    g = SMALL[0]
    with pytest.raises(ValueError, match=r"needed \[N, 3, 5, 4\]"):
        conv2d(np.zeros((1, 3, 4, 5)), np.zeros(g.weight_shape), None, g)
    with pytest.raises(ValueError, match="do not fit"):
        conv2d(np.zeros((1, 3, 5, 4)), np.zeros((2, 3, 3, 2)), None, g)
    with pytest.raises(ValueError, match="do not fit"):
        conv2d(np.zeros((1, 3, 5, 4)), np.zeros(g.weight_shape), np.zeros(3), g)


Y = np.array([-3.0, -0.5, 0.0, 2.0, 9.0]).reshape(1, 1, 1, 5)
R = np.array([4.0, -1.0, -2.0, 5.0, -10.0]).reshape(1, 1, 1, 5)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Epilogue(), [-3.0, -0.5, 0.0, 2.0, 9.0]),
        (Epilogue(activation="relu"), [0.0, 0.0, 0.0, 2.0, 9.0]),
        (Epilogue(activation="clip", low=0.0, high=6.0), [0.0, 0.0, 0.0, 2.0, 6.0]),
        (Epilogue(activation="clip", low=5.0, high=1.0), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (Epilogue(activation="leaky_relu", slope=0.5), [-1.5, -0.25, 0.0, 2.0, 9.0]),
        (Epilogue(activation="relu", residual="before_activation"), [1.0, 0.0, 0.0, 7.0, 0.0]),
        (Epilogue(activation="relu", residual="after_activation"), [4.0, -1.0, -2.0, 7.0, -1.0]),
        (Epilogue(activation="leaky_relu", slope=0.5, residual="before_activation"), [1.0, -0.75, -1.0, 7.0, -0.5]),
        (Epilogue(residual="after_activation"), [1.0, -1.5, -2.0, 7.0, -1.0]),
    ],
)
def test_epilogue_order_and_activations(how: Epilogue, expected: list[float]) -> None:
    residual = R if how.residual != "none" else None
    np.testing.assert_array_equal(epilogue.apply(how, Y, residual).ravel(), expected)


@pytest.mark.parametrize("activation", ["none", "relu", "clip", "leaky_relu"])
def test_epilogue_keeps_nan(activation: str) -> None:
    how = Epilogue.model_validate({"activation": activation, "high": 6.0})
    assert np.isnan(epilogue.apply(how, np.array([np.nan]))).all()


def test_epilogue_refuses_wrong_residuals() -> None:
    adds = Epilogue(residual="after_activation")
    with pytest.raises(ValueError, match="none was given"):
        epilogue.apply(adds, Y)
    with pytest.raises(ValueError, match="adds none"):
        epilogue.apply(Epilogue(), Y, R)
    with pytest.raises(ValueError, match="the residual has shape"):
        epilogue.apply(adds, Y, np.zeros((1, 1, 1, 1)))
