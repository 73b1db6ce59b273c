"""Check what a model says of its convolutions, so that no later pass has to doubt it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import NodeProto

from sparsedeploy.converters.graph import Array, Graph, Model, attribute, node_label
from sparsedeploy.errors import InputError


def check_convs(model: Model, outputs: Collection[str] | None = None) -> None:
    """Check attributes, constant weights and constant biases of the main graph's Conv nodes (of those that make
    `outputs`, if given). Raises InputError naming the node, what was found and what was needed.
    """
    only = None if outputs is None else set(outputs)
    graph = model.graph
    finite: set[str] = set()
    for node in model.proto.graph.node:
        if node.op_type == "Conv" and node.domain == "" and (only is None or node.output[0] in only):
            start = f"{model.path}: Conv '{node_label(node)}'"
            weight = _constant(graph, node, 1, start)
            bias = _constant(graph, node, 2, start)
            _check_attributes(node, weight, start)
            if weight is not None and bias is not None and bias.shape != weight.shape[:1]:
                raise InputError(
                    f"{start}: its bias '{node.input[2]}' has shape {list(bias.shape)}, but {weight.shape[0]} output "
                    "channels "
                    f"need [{weight.shape[0]}]. The exporter wrote it wrong: export again, with another exporter "
                    "version or "
                    f"torch.onnx.export(..., dynamo=False)."
                )
            for array, name, what in ((weight, node.input[1], "weight"), (bias, "".join(node.input[2:3]), "bias")):
                if array is not None and name not in finite:
                    _check_finite(array, f"{start}: its {what} '{name}'")
                    finite.add(name)


def _constant(graph: Graph, node: NodeProto, slot: int, start: str) -> Array | None:
    name = node.input[slot] if slot < len(node.input) else ""
    try:
        return graph.array(name) if name else None
    except (OSError, ValueError, TypeError, onnx.checker.ValidationError) as error:
        raise InputError(
            f"{start}: the constant '{name}' cannot be read ({' '.join(str(error).split())}). Export it again."
        ) from error


def _check_attributes(node: NodeProto, weight: Array | None, start: str) -> None:
    """The attributes of a Conv among themselves and against a weight [oc, ic // group, k...]."""
    lists = {name: attribute(node, name) for name in ("kernel_shape", "strides", "dilations", "pads")}
    given = {name: [int(x) for x in value] for name, value in lists.items() if isinstance(value, (list, tuple))}
    lengths = {len(value) // (2 if name == "pads" else 1): name for name, value in given.items()}
    spatial = weight.ndim - 2 if weight is not None else next(iter(lengths), None)
    if weight is not None and (weight.ndim < 3 or weight.size == 0):
        raise InputError(
            f"{start}: its weight '{node.input[1]}' has shape {list(weight.shape)}; a convolution needs at least 3 "
            "dimensions, "
            f"[oc, ic // group, k...], none of them 0. Export the model again."
        )
    for name, value in given.items():
        length, least = (2 * (spatial or 0), 0) if name == "pads" else (spatial, 1)
        if len(value) != length or min(value, default=1) < least:
            raise InputError(
                f"{start}: {name} is {value}, but its {spatial} spatial dimensions need {length} values of at least "
                f"{least}. "
                f"Export the model again."
            )
    if weight is not None and "kernel_shape" in given and tuple(given["kernel_shape"]) != weight.shape[2:]:
        raise InputError(
            f"{start}: kernel_shape is {given['kernel_shape']}, but its weight '{node.input[1]}' has shape "
            f"{list(weight.shape)}, so {list(weight.shape[2:])} was needed. Export the model again."
        )
    group = attribute(node, "group", 1)
    if not isinstance(group, int) or group < 1 or (weight is not None and weight.shape[0] % group):
        channels = "" if weight is None else f" and its {weight.shape[0]} output channels must be a multiple of it"
        raise InputError(f"{start}: group is {group}, but it must be at least 1{channels}. Export the model again.")
    if attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"):
        raise InputError(f"{start}: auto_pad is '{attribute(node, 'auto_pad')}', which ONNX does not define.")


def _check_finite(array: Array, what: str) -> None:
    if array.dtype.kind not in "fV" or (array.dtype.kind == "V" and "float" not in array.dtype.name):
        return
    finite = np.isfinite(array)
    if not finite.all():
        bad = int(array.size - np.count_nonzero(finite))
        first = [int(i) for i in np.argwhere(~finite)[0]]
        raise InputError(
            f"{what} holds {bad} values of {array.size} that are NaN or infinite, the first at {first}. Such a model "
            "computes "
            f"nothing of use: export a checkpoint whose weights are finite."
        )
