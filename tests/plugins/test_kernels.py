"""What holds for every kernel of KERNELS: weights come back, the reference computes the convolution, nodes survive."""

from __future__ import annotations

import numpy as np
import pytest
from conv_cases import CHANNELS, EPILOGUES, KERNEL_SIZES, Case, cases, fill, layer_of, pruned
from hypothesis import given, settings
from numpy.typing import NDArray

from sparsedeploy.devices import DEVICES, find
from sparsedeploy.errors import InputError
from sparsedeploy.layer import ELEMENT_BYTES, ConvLayer, Epilogue, Geometry, Precision
from sparsedeploy.plugins import KERNELS, epilogue, kernel_named
from sparsedeploy.plugins.kernel import BuildOptions, Kernel, UnfitWeightsError
from sparsedeploy.plugins.node import PRECISIONS, SparseConv
from sparsedeploy.plugins.packed import MAX_RELATIVE_ERROR
from sparsedeploy.plugins.reference import conv2d

A100 = find("a100")
WEIGHT_ERROR = {"packed": MAX_RELATIVE_ERROR, "csr": 0.0, "baked": 0.0}
"""Largest relative error that a kernel's format may make of one weight."""

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def build(kernel: Kernel, case: Case) -> SparseConv:
    return kernel.build(case.layer, case.weight, case.bias, A100, {}, BuildOptions("fp32")).node


def check_reference(
    kernel: Kernel,
    case: Case,
    y: NDArray[np.float64],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> None:
    """Y against the dense float64 convolution by `weight`, within 1e-12 of each pixel's sum of magnitudes.

    `bias` is the case's own unless the node carries a rounded one.
    """
    bias = case.bias if bias is None else bias
    expected = epilogue.apply(case.layer.epilogue, conv2d(case.x, weight, bias, case.geometry), case.residual)
    magnitudes = conv2d(np.abs(case.x), np.abs(weight), None if case.bias is None else np.abs(case.bias), case.geometry)
    if case.residual is not None:
        magnitudes += np.abs(case.residual)
    assert y.shape == expected.shape
    assert (np.abs(y - expected) <= 1e-12 * magnitudes).all()


@every_kernel
@settings(max_examples=40, derandomize=True, deadline=None)
@given(case=cases())
def test_weights_come_back_and_the_reference_convolves(kernel: Kernel, case: Case) -> None:
    node = build(kernel, case)
    weight, bias = kernel.unpack(node)
    error = np.abs(weight.astype(np.float64) - case.weight)
    assert (error <= WEIGHT_ERROR[kernel.name] * np.abs(case.weight)).all()
    assert (bias is None) == (case.bias is None)
    if bias is not None:
        np.testing.assert_array_equal(bias, case.bias)
    check_reference(kernel, case, kernel.reference(node, case.x, case.residual), weight)


@every_kernel
@pytest.mark.parametrize("channels", CHANNELS, ids=str)
@pytest.mark.parametrize("size", KERNEL_SIZES, ids=str)
def test_every_channel_count_with_every_kernel_size(
    kernel: Kernel, channels: tuple[int, int, int], size: tuple[int, int]
) -> None:
    (oc, ic, group), (kh, kw) = channels, size
    g = Geometry(oc=oc, ic=ic, kh=kh, kw=kw, h=kh + 2, w=kw + 3, pads=(1, 0, 2, 1), stride=(2, 3), group=group)
    nnz = min(300, int(np.prod(g.weight_shape)))
    case = fill(g, EPILOGUES[0], nnz, batch=2, seed=oc + ic + kh)
    node = build(kernel, case)
    weight, _ = kernel.unpack(node)
    error = np.abs(weight.astype(np.float64) - case.weight)
    assert (error <= WEIGHT_ERROR[kernel.name] * np.abs(case.weight)).all()
    assert np.count_nonzero(weight) == nnz
    check_reference(kernel, case, kernel.reference(node, case.x), weight)


@every_kernel
@settings(max_examples=15, derandomize=True, deadline=None)
@given(case=cases())
def test_nodes_survive_their_fields(kernel: Kernel, case: Case) -> None:
    node = build(kernel, case)
    again = SparseConv.from_fields(node.fields(), node.constants)
    assert again.same_as(node)
    assert all(array.size and array.dtype == np.int32 for array in node.constants)
    np.testing.assert_array_equal(
        kernel.reference(again, case.x, case.residual), kernel.reference(node, case.x, case.residual)
    )


@every_kernel
@pytest.mark.parametrize("how", EPILOGUES, ids=lambda how: how.describe())
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_epilogue_and_precision(kernel: Kernel, how: Epilogue, precision: Precision) -> None:
    g = Geometry(oc=6, ic=9, kh=3, kw=3, h=7, w=5, stride=(2, 1), pads=(1, 0, 1, 2), group=3)
    case = fill(g, how, 31, batch=2, seed=5)
    built = kernel.build(case.layer, case.weight, case.bias, A100, {}, BuildOptions(precision))
    assert built.node.precision == precision
    # baked is its code; the others are data, and carry code only for the architectures asked for
    assert built.node.executable == (kernel.name == "baked")
    y = kernel.reference(built.node, case.x, case.residual)
    weight, bias = kernel.unpack(built.node)
    if case.bias is not None and bias is not None:
        rounding = (
            MAX_RELATIVE_ERROR if (kernel.name, precision) == ("baked", "fp16") else 0.0
        )  # half2 code has half biases
        assert (np.abs(bias.astype(np.float64) - case.bias) <= rounding * np.abs(case.bias)).all()
    check_reference(kernel, case, y, weight, bias)


@every_kernel
def test_a_layer_without_nonzeros_is_its_bias(kernel: Kernel) -> None:
    g = Geometry(oc=4, ic=300, kh=3, kw=3, h=5, w=5, pads=(1, 1, 1, 1))
    case = fill(g, EPILOGUES[5].model_copy(update={"residual": "none"}), 0, batch=1, seed=1)
    assert case.bias is not None
    node = build(kernel, case)
    assert not kernel.unpack(node)[0].any()
    expected = np.broadcast_to(case.bias.astype(np.float64)[:, None, None], (1, 4, 5, 5))
    np.testing.assert_array_equal(kernel.reference(node, case.x), expected)


@every_kernel
def test_negative_zero_is_a_zero(kernel: Kernel) -> None:
    g = Geometry(oc=2, ic=2, kh=1, kw=1, h=2, w=2)
    weight = np.array([[-0.0, 1.0], [0.0, -0.0]], np.float32).reshape(2, 2, 1, 1)
    built = kernel.build(layer_of(g, weight), weight, None, A100, {}, BuildOptions("fp32"))
    assert built.record["nnz"] == 1
    assert not np.signbit(kernel.unpack(built.node)[0]).any()


@every_kernel
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(kernel: Kernel, broken: float) -> None:
    case = fill(Geometry(oc=2, ic=2, kh=3, kw=3, h=4, w=4), EPILOGUES[1], 5, batch=1, seed=2)
    bad = case.weight.copy()
    bad[1, 0, 2, 2] = broken
    with pytest.raises(UnfitWeightsError, match="conv3: 1 values of its weight"):
        kernel.build(case.layer, bad, case.bias, A100, {}, BuildOptions("fp32"))
    with pytest.raises(UnfitWeightsError, match="conv3: 2 values of its bias"):
        kernel.build(case.layer, case.weight, np.full(2, broken, np.float32), A100, {}, BuildOptions("fp32"))


@every_kernel
def test_callers_mistakes_are_refused(kernel: Kernel) -> None:
    case = fill(Geometry(oc=2, ic=2, kh=3, kw=3, h=4, w=4), EPILOGUES[0], 5, batch=1, seed=2)
    options = BuildOptions("fp32")
    with pytest.raises(ValueError, match="needed float32"):
        kernel.build(case.layer, case.weight[:1], None, A100, {}, options)
    with pytest.raises(ValueError, match="needed float32"):
        kernel.build(case.layer, case.weight.astype(np.float64), None, A100, {}, options)
    with pytest.raises(ValueError, match="bias=False"):
        kernel.build(case.layer, case.weight, np.zeros(2, np.float32), A100, {}, options)
    with pytest.raises(ValueError, match="no parameter tile"):
        kernel.build(case.layer, case.weight, None, A100, {"tile": 8}, options)


@every_kernel
def test_layers_that_no_kernel_takes_have_a_reason(kernel: Kernel) -> None:
    def code(shape: tuple[int, ...], op: str = "Conv", geometry: Geometry | None = None) -> str | None:
        layer = ConvLayer(name="c", weight="w", op=op, dtype="fp32", shape=shape, geometry=geometry)
        reason = kernel.supports(layer, A100, "fp32")
        return reason.code if reason else None

    fits = Geometry(oc=2, ic=2, kh=3, kw=3, h=8, w=8)
    assert code((2, 2, 3, 3), geometry=fits) is None
    assert code((2, 2, 3, 3), op="ConvTranspose") == "operator"
    assert code((2, 2, 3, 3, 3)) == "rank"
    assert code((2, 2, 3)) == "rank"
    assert code((2, 2, 3, 3)) == "shape"
    assert code((2, 2, 3, 3), geometry=fits.model_copy(update={"h": 2})) == "shape"
    assert code((2, 2, 3, 3), geometry=fits.model_copy(update={"pads": (0, -1, 0, 0)})) == "shape"


@every_kernel
def test_predictions_respect_bandwidth_and_name_their_source(kernel: Kernel) -> None:
    g = Geometry(oc=64, ic=64, kh=3, kw=3, h=56, w=56, pads=(1, 1, 1, 1))
    weight = pruned(g.weight_shape, 3686, seed=0)
    layer = layer_of(g, weight)
    for device in DEVICES:
        (config, prediction), *_ = kernel.configs(layer, device, "fp32", 32)
        if kernel.name != "baked":
            measured = "fitted on an H200" in prediction.source
            assert config == {}
            assert measured == (device.sm == 90)
            assert measured or prediction.source.startswith(device.throughput.source)
        assert prediction.source
        least_us = 32 * 2 * 64 * 56 * 56 * 4 / device.bandwidth_gbs / 1e3
        assert prediction.us >= least_us
    with pytest.raises(ValueError, match="geometry and zeros"):
        kernel.configs(layer.model_copy(update={"zeros": None}), A100, "fp32", 1)
    if not kernel.quick:  # predicted from counted instructions and launches, not from bytes alone
        return
    empty = layer_of(g, np.zeros_like(weight))
    for precision, size in ELEMENT_BYTES.items():
        (_, prediction), *_ = kernel.configs(empty, A100, precision, 32)  # type: ignore[arg-type]
        assert prediction.bound == "memory"
        activations_us = 32 * 2 * 64 * 56 * 56 * size / A100.bandwidth_gbs / 1e3
        assert prediction.us == pytest.approx(activations_us, rel=1e-3)


def test_kernels_are_found_by_name() -> None:
    assert [kernel_named(kernel.name) for kernel in KERNELS] == list(KERNELS)
    with pytest.raises(InputError, match=r"no such kernel.*packed, csr, baked"):
        kernel_named("winograd")


@every_kernel
def test_a_node_of_another_kernel_or_with_constants_missing_is_refused(kernel: Kernel) -> None:
    case = fill(Geometry(oc=2, ic=2, kh=3, kw=3, h=4, w=4), EPILOGUES[1], 5, batch=1, seed=2)
    node = build(kernel, case)
    other = next(k for k in KERNELS if k is not kernel)
    with pytest.raises(ValueError, match=f"made by kernel {kernel.name}"):
        other.unpack(node)
    if node.executable:  # its weights are in the code: the constants are one dummy word
        return
    fields = {**node.fields(), "constants": len(node.constants) - 1}
    with pytest.raises(ValueError, match="constants"):
        kernel.unpack(SparseConv.from_fields(fields, node.constants[:-1]))
    short = (*node.constants[:-1], node.constants[-1][:1])
    with pytest.raises(ValueError, match="constant bias"):
        kernel.unpack(SparseConv.from_fields(node.fields(), short))
    wide = (node.constants[0].astype(np.int64), *node.constants[1:])
    with pytest.raises(ValueError, match="needed a vector of int32"):
        kernel.reference(SparseConv.from_fields(node.fields(), wide), case.x)  # type: ignore[arg-type]
