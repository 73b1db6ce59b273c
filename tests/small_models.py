"""Small models that the tests of the stages share. Weights are seeded; 90 % of them are zero unless asked otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Array = NDArray[Any]
OPSET, IR = 17, 8


def sparse_weight(shape: Sequence[int], sparsity: float = 0.9, seed: int = 0) -> NDArray[np.float32]:
    """Normal weights of fan-in scale, none of the nonzero ones near zero, with that share of zeros."""
    rng = np.random.default_rng(seed)
    signs = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    weight = signs * (0.5 + rng.random(shape)) / np.sqrt(max(1.0, np.prod(shape[1:]) * (1 - sparsity)))
    weight[rng.random(shape) < sparsity] = 0.0
    return np.asarray(weight, np.float32)


def model_of(
    nodes: Sequence[NodeProto],
    constants: dict[str, Array],
    inputs: dict[str, Sequence[int | str]],
    outputs: Sequence[str],
    kind: int = TensorProto.FLOAT,
    opset: int = OPSET,
    others: Sequence[tuple[str, int]] = (),
    output_kind: int | None = None,
) -> ModelProto:
    """A model; every input is of element type `kind`."""
    graph = helper.make_graph(
        list(nodes), "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, output_kind or kind, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(*entry) for entry in others)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10 if opset > 21 else IR)
    inferred = onnx.shape_inference.infer_shapes(model)
    for value, known in zip(graph.output, inferred.graph.output, strict=True):
        value.CopyFrom(known)
    del model.graph.output[:]
    model.graph.output.extend(graph.output)
    return model


def one_conv(weight: Array, size: Sequence[int] = (8, 8), **attributes: Any) -> ModelProto:
    """X -> Conv 'conv' -> y, of a weight [oc, ic // group, kh, kw]."""
    ic = weight.shape[1] * int(attributes.get("group", 1))
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", **attributes)
    kind = helper.np_dtype_to_tensor_dtype(weight.dtype)
    return model_of([node], {"w": weight}, {"x": ["N", ic, *size]}, ["y"], kind)


def network(
    kind: int = TensorProto.FLOAT, sparsity: float = 0.9, channels: int = 16, size: int = 8, seed: int = 0
) -> ModelProto:
    """A residual block and a classifier: c1+Relu, c2+Add+Relu, c3+Relu, pool, Gemm; input x [N, c, s, s], output y [N, 10]."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    weights: dict[str, Array] = {
        f"w{i}": sparse_weight((channels, channels, 3, 3), sparsity, seed + i).astype(dtype) for i in (1, 2, 3)
    }
    rng = np.random.default_rng(seed + 9)
    weights["b1"] = (0.1 * rng.standard_normal(channels)).astype(np.float32).astype(dtype)
    weights["wg"] = rng.standard_normal((10, channels)).astype(np.float32).astype(dtype)
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], "c1", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["ar"], "r1"),
        helper.make_node("Conv", ["ar", "w2"], ["b"], "c2", pads=[1] * 4),
        helper.make_node("Add", ["b", "x"], ["s"], "add"),
        helper.make_node("Relu", ["s"], ["sr"], "r2"),
        helper.make_node("Conv", ["sr", "w3"], ["c"], "c3", pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["cr"], "r3"),
        helper.make_node("GlobalAveragePool", ["cr"], ["g"], "gap"),
        helper.make_node("Flatten", ["g"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "wg"], ["y"], "gemm", transB=1),
    ]
    opset = 22 if kind == TensorProto.BFLOAT16 else OPSET
    return model_of(nodes, weights, {"x": ["N", channels, size, size]}, ["y"], kind, opset)


def saved(model: ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """The model as a file in a folder."""
    path = folder / name
    onnx.save(model, path)
    return path
