"""BatchNormalization folded into the convolution before it: one node less, and the zeros of the weight stay zeros.

y = scale * (conv(x) + b - mean) / sqrt(var + eps) + B, so weight' = weight * f and b' = (b - mean) * f + B with
f = scale / sqrt(var + eps) per output channel.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, numpy_helper

from sparsedeploy.converters.graph import (
    Array,
    Graph,
    Model,
    add_initializer,
    attribute,
    fresh_name,
    node_label,
    remove_nodes,
    remove_orphans,
)

Doubles = NDArray[np.float64]
_DEFAULT_DOMAINS = ("", "ai.onnx")


class _RefusedError(Exception):
    """Why one BatchNormalization stays, as the end of the sentence `X was left in place: ...`."""


def fold_batchnorm(model: Model) -> int:
    """Fold every inference-mode BatchNormalization that follows a Conv of constant weight; returns how many.

    New weights are computed in float64 and stored in the weight's dtype; a zero (of either sign) becomes +0.0. The
    convolution takes over the BatchNormalization's output name. Weights and biases that something else reads get their
    own copy. A BatchNormalization behind a Conv that cannot be folded stays and a note says why; nothing raises.
    """
    folded = 0
    while True:  # Conv -> BN -> BN folds in two rounds
        done, refusals = _fold_round(model)
        folded += done
        if not done:
            break
    if folded:
        model.notes.append(f"{folded} BatchNormalization node{'s' * (folded > 1)} folded into the convolution before.")
    model.notes += _sentences(refusals)
    return folded


def _sentences(refusals: Mapping[str, list[str]]) -> list[str]:
    """One sentence per reason: a model in training mode has fifty times the same."""
    said = []
    for reason, nodes in refusals.items():
        who = f"{nodes[0]} was" if len(nodes) == 1 else f"{len(nodes)} BatchNormalization nodes, first {nodes[0]}, were"
        said.append(f"{who} left in place: {reason}.")
    return said


def _fold_round(model: Model) -> tuple[int, dict[str, list[str]]]:
    index = model.graph
    gone: list[NodeProto] = []
    orphans: list[str] = []
    vanished: set[str] = set()
    refusals: dict[str, list[str]] = {}
    for norm in model.proto.graph.node:
        conv = _convolution_before(index, norm)
        if conv is None:
            continue
        try:
            weight, bias = _folded(model, index, conv, norm)
        except _RefusedError as reason:
            what = f"BatchNormalization {node_label(norm)} after convolution {node_label(conv)}"
            refusals.setdefault(str(reason), []).append(what)
            continue
        orphans += [name for name in (*norm.input[1:5], *conv.input[1:3]) if name]
        _store(model, index, conv, 1, weight, f"{conv.input[1]}_folded")
        _store(model, index, conv, 2, bias, f"{conv.input[1]}_folded_bias")
        vanished.add(conv.output[0])
        conv.output[0] = norm.output[0]
        gone.append(norm)
    remove_nodes(model.proto.graph, gone)
    for at in reversed([i for i, value in enumerate(model.proto.graph.value_info) if value.name in vanished]):
        del model.proto.graph.value_info[at]
    remove_orphans(model.proto.graph, dict.fromkeys(orphans))
    return len(gone), refusals


def _convolution_before(index: Graph, norm: NodeProto) -> NodeProto | None:
    if norm.op_type != "BatchNormalization" or norm.domain not in _DEFAULT_DOMAINS or not norm.input or not norm.output:
        return None
    conv = index.producer(norm.input[0])
    if conv is None or conv.op_type != "Conv" or conv.domain not in _DEFAULT_DOMAINS:
        return None
    return conv


def _folded(model: Model, index: Graph, conv: NodeProto, norm: NodeProto) -> tuple[Array, Array]:
    """New weight and bias in the weight's dtype; raises _RefusedError."""
    _require_inference(model, norm)
    value = conv.output[0]
    if value in index.outputs:
        raise _RefusedError("the convolution's own output is an output of the model")
    if index.sole_reader(value) is None or list(norm.input).count(value) != 1:
        raise _RefusedError("the convolution's output has other readers")
    weight = _constant(index, conv.input[1] if len(conv.input) > 1 else "", "the convolution's weight")
    if weight.ndim < 3:
        raise _RefusedError(f"the convolution's weight has shape {list(weight.shape)}")
    channels = weight.shape[0]
    scale, shift, mean, variance = _parameters(index, norm, channels)
    bias = np.zeros(channels)
    if len(conv.input) > 2 and conv.input[2]:
        bias = _vector(index, conv.input[2], channels, "the convolution's bias")
    epsilon = attribute(norm, "epsilon")
    with np.errstate(all="ignore"):  # what is not finite is refused below
        factor = scale / np.sqrt(variance + (epsilon if isinstance(epsilon, float) else np.float32(1e-5)))
        product = weight.astype(np.float64)
        product *= factor.reshape(-1, *[1] * (weight.ndim - 1))
        product += 0.0  # turns -0.0 into 0.0
        new_weight = product.astype(weight.dtype)
        new_bias = ((bias - mean) * factor + shift + 0.0).astype(weight.dtype)
    if not (_finite(new_weight) and _finite(new_bias)):
        raise _RefusedError(f"folded, its weights or bias would not be finite numbers in {weight.dtype}")
    return new_weight, new_bias


def _finite(values: Array) -> bool:
    return bool(np.isfinite(values).all())


def _require_inference(model: Model, norm: NodeProto) -> None:
    # Before opset 7 the default is training; from 7 to 13 further outputs mean training; from 14 an attribute says so.
    training = attribute(norm, "is_test", 0) != 1 if model.opset() < 7 else attribute(norm, "training_mode", 0) != 0
    if training or any(norm.output[1:]):
        raise _RefusedError("it is in training mode; export the model in evaluation mode to have it folded")
    if attribute(norm, "spatial", 1) != 1:
        raise _RefusedError("it normalises every pixel on its own (spatial=0)")


def _parameters(index: Graph, norm: NodeProto, channels: int) -> list[Doubles]:
    if len(norm.input) < 5:
        raise _RefusedError("it lacks inputs")
    words = ("its scale", "its B", "its mean", "its variance")
    return [_vector(index, name, channels, what) for name, what in zip(norm.input[1:5], words, strict=True)]


def _vector(index: Graph, name: str, channels: int, what: str) -> Doubles:
    values = _constant(index, name, what)
    if values.shape != (channels,):
        raise _RefusedError(f"{what} has shape {list(values.shape)} and the convolution {channels} output channels")
    return values.astype(np.float64)


def _constant(index: Graph, name: str, what: str) -> Array:
    try:
        values = index.array(name)
    except (ValueError, KeyError, TypeError) as error:  # a damaged tensor: wrong size, unknown type
        raise _RefusedError(f"{what} ({name}) cannot be read") from error
    if values is None:
        raise _RefusedError(f"{what} is not constant")
    return values


def _store(model: Model, index: Graph, conv: NodeProto, slot: int, values: Array, wish: str) -> None:
    """Give input `slot` of the convolution new values: in place where nobody else sees the old ones."""
    name = conv.input[slot] if slot < len(conv.input) else ""
    private = name in index.initializers and name not in index.outputs and len(index.readers(name)) == 1
    if private and list(conv.input).count(name) == 1:
        index.initializers[name].CopyFrom(numpy_helper.from_array(values, name))
        return
    name = fresh_name(model.proto.graph, wish)
    add_initializer(model, numpy_helper.from_array(values, name))
    if slot < len(conv.input):
        conv.input[slot] = name
    else:
        conv.input.append(name)
