"""Reference networks: structure, sizes and arithmetic as published, and activations that stay in range."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from sparsedeploy.converters.graph import attribute
from sparsedeploy.errors import InputError
from sparsedeploy.models.networks import NETWORKS, build

# Parameters and multiply-adds (convolutions and linear layers, one 224x224 image) as torchvision's model pages give
# them, to the last digit where they print one; MobileNetV1 as its paper: 4.2 M and 569 M.
PUBLISHED = {
    # name: convolutions, parameters, multiply-adds
    "resnet18": (20, 11_689_512, 1.814e9),
    "resnet34": (36, 21_797_672, 3.664e9),
    "resnet50": (53, 25_557_032, 4.089e9),
    "vgg16": (13, 138_357_544, 15.470e9),
    "vgg16_bn": (13, 138_365_992, 15.470e9),
    "mobilenet_v1": (27, 4_231_976, 0.569e9),
    "mobilenet_v2": (52, 3_504_872, 0.301e9),
}


def run(model: onnx.ModelProto, batch: int = 2, seed: int = 1) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    _, *shape = session.get_inputs()[0].shape
    image = np.random.default_rng(seed).standard_normal((batch, *shape), np.float32)
    return session.run(None, {"input": image})[0]


def nodes(model: onnx.ModelProto, op: str) -> dict[str, onnx.NodeProto]:
    return {node.name: node for node in model.graph.node if node.op_type == op}


def dims(model: onnx.ModelProto) -> dict[str, list[int]]:
    """Shapes of all values for one image. Drops the weights, whose values shape inference of these graphs never reads."""
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        tensor.ClearField("raw_data")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    inferred = onnx.shape_inference.infer_shapes(model).graph
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        shapes[value.name] = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    return shapes


def trained(model: onnx.ModelProto) -> int:
    """Number of trained parameters: running statistics and the scalars of Clip are none."""
    tensors = [t for t in model.graph.initializer if t.dims and not t.name.endswith(("running_mean", "running_var"))]
    return sum(math.prod(tensor.dims) for tensor in tensors)


def test_every_network_has_published_numbers() -> None:
    assert set(PUBLISHED) == set(NETWORKS)


SLOW_VGG = [pytest.param(name, marks=pytest.mark.slow) if name.startswith("vgg") else name for name in NETWORKS]


@pytest.mark.parametrize("name", SLOW_VGG)
def test_sizes_are_the_published_ones(name: str) -> None:
    convs, parameters, macs = PUBLISHED[name]
    model = build(name, with_batchnorm=True)
    assert len(nodes(model, "Conv")) == convs
    assert trained(model) == parameters
    shapes = dims(model)
    counted = sum(
        math.prod(shapes[node.input[1]]) * math.prod(shapes[node.output[0]][2:])
        for node in model.graph.node
        if node.op_type in ("Conv", "Gemm")
    )
    assert abs(counted - macs) < 0.5e6


@pytest.mark.parametrize("name", ["vgg16", "vgg16_bn"])
def test_vgg_has_the_published_parameters_but_for_its_first_linear_layer(name: str) -> None:
    model = build(name, image_size=32, with_batchnorm=True)
    assert len(nodes(model, "Conv")) == 13
    assert trained(model) + 4096 * 512 * (7 * 7 - 1) == PUBLISHED[name][1]


def test_resnet50_is_v1_5_under_torchvision_names() -> None:
    model = build("resnet50", image_size=32)
    convs = nodes(model, "Conv")
    assert attribute(convs["layer2.0.conv1"], "strides") == [1, 1]
    assert attribute(convs["layer2.0.conv2"], "strides") == [2, 2]
    assert attribute(convs["layer2.0.downsample.0"], "strides") == [2, 2]
    assert attribute(convs["layer1.0.downsample.0"], "strides") == [1, 1]
    assert attribute(convs["conv1"], "pads") == [3, 3, 3, 3]
    assert "layer1.1.downsample.0" not in convs
    assert list(nodes(model, "Gemm")) == ["fc"]
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    assert shapes["layer3.5.conv2.weight"] == (256, 256, 3, 3)
    assert shapes["fc.weight"] == (1000, 2048)


def test_other_networks_carry_torchvision_names() -> None:
    vgg = build("vgg16_bn", image_size=32, with_batchnorm=True)
    assert list(nodes(vgg, "Conv"))[-1] == "features.40"
    assert list(nodes(vgg, "BatchNormalization"))[-1] == "features.41"
    assert list(nodes(vgg, "Gemm")) == ["classifier.0", "classifier.3", "classifier.6"]
    v2 = nodes(build("mobilenet_v2", image_size=32), "Conv")
    assert {"features.1.conv.1", "features.17.conv.1.0", "features.17.conv.2", "features.18.0"} <= set(v2)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "vgg16_bn"])
def test_runs_with_logits_of_order_one_that_depend_on_the_image(name: str) -> None:
    model = build(name, image_size=32 if name.startswith("vgg") else 96, num_classes=100)
    if not name.startswith("vgg"):
        onnx.checker.check_model(model, full_check=True)
    logits = run(model)
    assert logits.shape == (2, 100)
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3.0
    assert np.std(logits[0] - logits[1]) > 0.05 * logits.std()


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg16_bn", "mobilenet_v2"])
def test_folded_and_unfolded_batchnorm_agree(name: str) -> None:
    folded = build(name, image_size=32, num_classes=10)
    unfolded = build(name, image_size=32, num_classes=10, with_batchnorm=True)
    assert not nodes(folded, "BatchNormalization")
    assert len(nodes(unfolded, "BatchNormalization")) == len(nodes(unfolded, "Conv"))
    a, b = run(folded), run(unfolded)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max(), equal_nan=False)


def test_same_bytes_in_another_process() -> None:
    code = (
        "import hashlib; from sparsedeploy.models.networks import build;"
        "print(hashlib.sha256(build('mobilenet_v2', with_batchnorm=True).SerializeToString()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    here = build("mobilenet_v2", with_batchnorm=True).SerializeToString()
    assert other.stdout.strip() == hashlib.sha256(here).hexdigest()
    assert build("mobilenet_v2", with_batchnorm=True, seed=1).SerializeToString() != here


def test_batch_is_open_and_header_is_as_asked() -> None:
    model = build("resnet18", image_size=64, num_classes=7)
    assert model.ir_version == 8
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 13)]
    (value,) = model.graph.input
    assert value.name == "input"
    assert [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] == ["N", 3, 64, 64]
    assert run(model, batch=1).shape == (1, 7)
    assert run(model, batch=5).shape == (5, 7)
    assert all(tensor.HasField("raw_data") for tensor in model.graph.initializer)


@pytest.mark.parametrize("opset", [11, 17, 21])
def test_other_opsets_give_the_same_outputs(opset: int) -> None:
    options = {"image_size": 32, "num_classes": 10, "with_batchnorm": True}
    model = build("mobilenet_v2", opset=opset, **options)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_array_equal(run(model), run(build("mobilenet_v2", **options)))


@pytest.mark.slow
def test_vgg_averages_a_larger_map_to_7x7() -> None:
    model = build("vgg16", image_size=448, num_classes=10)
    assert len(nodes(model, "AveragePool")) == 1
    assert [list(t.dims) for t in model.graph.initializer if t.name == "classifier.0.weight"] == [[4096, 25088]]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet19", {}, "resnet18"),
        ("resnet18", {"image_size": 100}, "multiple of 32"),
        ("resnet18", {"image_size": 0}, "multiple of 32"),
        ("resnet18", {"num_classes": 0}, "at least one"),
        ("resnet18", {"opset": 9}, "11 to"),
        ("resnet18", {"opset": 999}, "11 to"),
        ("resnet18", {"seed": -1}, "seed"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        build(name, **options)
