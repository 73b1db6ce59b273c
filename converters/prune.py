"""Sets weights of convolutions to zero, for test models from dense ones. No retraining: accuracy is lost."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, numpy_helper

from sparsedeploy.converters.graph import Array, Graph, Model, attribute, node_label
from sparsedeploy.errors import InputError
from sparsedeploy.record import Document, Record

METHODS: tuple[str, ...] = ("magnitude-global", "magnitude-layer", "random", "n:m")
"""What `prune` knows; "n:m" stands for two numbers, such as 2:4."""

MIN_INPUT_CHANNELS = 8
"""Without patterns, a convolution that reads fewer channels stays dense: it is a first layer, small and sensitive."""

Bools = NDArray[np.bool_]

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
_DATA_FIELDS = ("raw_data", "float_data", "int32_data", "double_data", "external_data", "data_location")
"""Where a floating-point tensor may keep its values."""


class PrunedWeight(Record):
    """One weight after pruning."""

    weight: str
    layers: tuple[str, ...]
    """Every node that reads it: one zeroed weight changes them all, chosen or not."""
    total: int
    zeros_before: int
    zeros_after: int

    @property
    def sparsity(self) -> float:
        """Share of zeros after pruning, 0..1."""
        return self.zeros_after / self.total


class Skipped(Record):
    """A convolution left as it was, and why."""

    layer: str
    reason: str


class PruneReport(Document):
    """What `prune` did; the counts are over all pruned weights together."""

    method: str
    asked: float
    """The share of zeros asked for, 0..1."""
    seed: int
    total: int
    zeros_before: int
    zeros_after: int
    sparsity: float
    """Share of zeros now, 0..1."""
    pruned: tuple[PrunedWeight, ...]
    skipped: tuple[Skipped, ...]


@dataclass
class _Weight:
    """A chosen weight: where it is stored, its values, and what marks them for removal."""

    tensor: TensorProto
    name: str
    array: Array
    layers: tuple[str, ...]

    @property
    def magnitude(self) -> Array:
        """|w| flat, in a type that numpy sorts fast and that keeps every stored value apart."""
        return np.asarray(np.abs(self.array.astype(_sortable(self.array), copy=False)).ravel())


def prune(
    model: Model,
    sparsity: float | None,
    method: str = "magnitude-global",
    layers: Sequence[str] = (),
    seed: int = 0,
) -> PruneReport:
    """Zero weights of the main graph's convolutions in place; returns what was zeroed and what was left alone.

    Methods: "magnitude-global" zeroes the smallest magnitudes of all chosen weights together, "magnitude-layer" of each
    weight alone, "random" any of each weight (seeded by `seed` and the weight's name), and "n:m" (such as "2:4") keeps
    the n largest of every m consecutive input channels. Exactly round(sparsity * size) elements are zero afterwards,
    equal magnitudes going in the order in which they are stored; existing zeros count and stay, so a weight that
    already has more keeps them. For n:m the pattern is the sparsity: pass None or 1 - n / m.

    Chosen are, without `layers`, the 2-D Conv nodes with a constant fp32, fp16, bf16 or fp64 weight, group 1 and at
    least 8 input channels (so the first layer and depthwise stay dense); with `layers`, the Conv nodes whose name
    matches one of these patterns (`*`, `?`, `[...]`), whatever their group and channels. Fold constants first: a weight
    that nodes compute is skipped. Raises InputError for a sparsity outside [0, 1), an unknown method, a pattern that
    matches nothing, NaN weights, or when nothing is left to prune.
    """
    pattern = _pattern(method)
    share = _share(sparsity, pattern)
    if seed < 0:
        raise InputError(f"seed {seed}: a seed is a whole number of 0 or more.")
    graph = model.graph
    chosen, skipped = _choose(graph, layers)
    if not chosen:
        raise InputError(_nothing(model, skipped))
    gone = _mask_of(method, pattern)(chosen, share, seed)
    pruned = tuple(_apply(weight, mask) for weight, mask in zip(chosen, gone, strict=True))
    total = sum(entry.total for entry in pruned)
    before, after = sum(entry.zeros_before for entry in pruned), sum(entry.zeros_after for entry in pruned)
    model.notes.append(
        f"{len(pruned)} weight{'s' * (len(pruned) != 1)} pruned by {method}: {before / total:.1%} zeros before, {after / total:.1%} after. "
        f"Outputs have changed; accuracy needs retraining."
    )
    return PruneReport(
        method=method,
        asked=share,
        seed=seed,
        total=total,
        zeros_before=before,
        zeros_after=after,
        sparsity=after / total,
        pruned=pruned,
        skipped=skipped,
    )


def smallest(scores: Array, count: int) -> Bools:
    """A mask of exactly `count` smallest elements of flat `scores`; of equal ones those that come first."""
    mask = np.zeros(scores.shape, np.bool_)
    if count <= 0:
        return mask
    if count >= scores.size:
        return ~mask
    limit = np.partition(scores, count - 1)[count - 1]
    np.less(scores, limit, out=mask)
    mask[np.flatnonzero(scores == limit)[: count - np.count_nonzero(mask)]] = True
    return mask


def smallest_of_groups(weight: Array, n: int, m: int) -> Bools:
    """A mask [oc, ic, ...] of all but the n largest magnitudes in every m consecutive input channels.

    Channels count from 0; a last group of fewer than m counts as padded with zeros, so it keeps up to n. Of equal
    magnitudes the earlier channel stays.
    """
    oc, ic = weight.shape[:2]
    groups = -(-ic // m)
    padded = np.full((oc, groups * m, *weight.shape[2:]), -1.0, _sortable(weight))
    padded[:, :ic] = np.abs(weight)
    grouped = padded.reshape(oc, groups, m, *weight.shape[2:])
    order = np.argsort(-grouped, axis=2, kind="stable")
    mask = np.zeros(grouped.shape, np.bool_)
    np.put_along_axis(mask, order[:, :, n:], True, axis=2)
    return np.asarray(mask.reshape(padded.shape)[:, :ic])


def parse_pattern(text: str) -> tuple[int, int] | None:
    """(n, m) of "n:m"; None when the text has not that form."""
    found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", text)
    return (int(found[1]), int(found[2])) if found else None


def zero_count(size: int, sparsity: float) -> int:
    """How many of `size` weights a sparsity means: the nearest whole number."""
    return round(size * sparsity)


def _sortable(array: Array) -> type[np.float32 | np.float64]:
    """A type that holds every value of the array exactly: fp16 and bf16 fit in float32."""
    return np.float64 if array.dtype == np.float64 else np.float32


def _zeros(array: Array) -> int:
    return int(np.count_nonzero(array == 0))


def _pattern(method: str) -> tuple[int, int] | None:
    pattern = parse_pattern(method)
    if pattern is None:
        if method not in METHODS or method == "n:m":
            raise InputError(
                f"{method!r} is not a pruning method; choose one of {', '.join(METHODS[:-1])}, or n:m with two "
                f"numbers, such as 2:4."
            )
    elif not 1 <= pattern[0] < pattern[1]:
        raise InputError(
            f"pruning method {method}: n:m keeps n of every m weights, so n is at least 1 and less than m."
        )
    return pattern


def _share(sparsity: float | None, pattern: tuple[int, int] | None) -> float:
    if pattern is None:
        if sparsity is None or not 0.0 <= sparsity < 1.0:
            raise InputError(
                f"sparsity {sparsity}: the share of zeros is a number from 0 up to but not including 1, as 0.9."
            )
        return float(sparsity)
    n, m = pattern
    exact = 1.0 - n / m
    if sparsity is not None and not abs(sparsity - exact) < 0.005:
        raise InputError(
            f"sparsity {sparsity:g} with method {n}:{m}: that pattern leaves exactly {exact:.4g} of the weights zero. "
            f"Leave the sparsity out, give that number, or choose another method."
        )
    return exact


def _choose(graph: Graph, patterns: Sequence[str]) -> tuple[list[_Weight], tuple[Skipped, ...]]:
    convs = [node for node in graph.proto.node if node.op_type == "Conv" and node.domain in ("", "ai.onnx")]
    if convs:
        _check_patterns(patterns, convs)
    chosen: dict[str, _Weight] = {}
    skipped = []
    for node in convs:
        if patterns and not any(_matches(node, pattern) for pattern in patterns):
            skipped.append(Skipped(layer=node_label(node), reason="no pattern names it"))
            continue
        found = _weight_of(graph, node, named=bool(patterns))
        if isinstance(found, str):
            skipped.append(Skipped(layer=node_label(node), reason=found))
        else:
            chosen.setdefault(found.name, found)
    return list(chosen.values()), tuple(skipped)


def _matches(node: NodeProto, pattern: str) -> bool:
    label = node_label(node)
    return label == pattern or fnmatchcase(label, pattern)


def _check_patterns(patterns: Sequence[str], convs: Sequence[NodeProto]) -> None:
    for pattern in patterns:
        if not any(_matches(node, pattern) for node in convs):
            names = [node_label(node) for node in convs]
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise InputError(
                f"the layer pattern {pattern!r} matches no convolution of the model's main graph, which has "
                f"{', '.join(names[:5])}{more}. Give one of these names or a pattern such as 'layer1.*'."
            )


def _weight_of(graph: Graph, node: NodeProto, *, named: bool) -> _Weight | str:
    """The weight of a convolution, or why it is not pruned."""
    name = node.input[1] if len(node.input) > 1 else ""
    tensor = _stored(graph, name)
    if tensor is None:
        maker = graph.producer(name)
        origin = f"{maker.op_type} {node_label(maker)}" if maker is not None else "an input of the model"
        return f"its weight is not constant: it comes from {origin}"
    if tensor.data_type not in _FLOATS:
        return f"its weight is {TensorProto.DataType.Name(tensor.data_type).lower()}, not floating point"
    if len(tensor.dims) != 4:
        return f"it is {max(len(tensor.dims) - 2, 0)}-D, not 2-D"
    group = attribute(node, "group", 1)
    if not named and group != 1:
        return "depthwise" if tensor.dims[1] == 1 else f"group {group}"
    if not named and tensor.dims[1] < MIN_INPUT_CHANNELS:
        return f"{tensor.dims[1]} input channels, fewer than {MIN_INPUT_CHANNELS}: dense unless named"
    array = _read(graph, node, name)
    if array.size == 0:
        return "its weight is empty"
    if np.isnan(array).any():
        raise InputError(
            f"layer {node_label(node)}: its weight {name} holds NaN, so its values have no order by magnitude. Prune a "
            f"model whose weights are numbers."
        )
    return _Weight(tensor, name, array, tuple(node_label(reader) for reader in graph.readers(name)))


def _read(graph: Graph, node: NodeProto, name: str) -> Array:
    try:
        array = graph.array(name)
    except (OSError, ValueError, TypeError, onnx.checker.ValidationError) as error:
        raise InputError(
            f"layer {node_label(node)}: its weight {name} cannot be read: {error}. Its data must lie in the model "
            f"or in a file beside it, as long as its shape says; export the model again or bring that file."
        ) from error
    assert array is not None, name
    return array


def _stored(graph: Graph, name: str) -> TensorProto | None:
    """The tensor that holds a constant value: an initializer, or the value of a Constant node."""
    if name in graph.initializers:
        return graph.initializers[name]
    node = graph.producer(name)
    if node is None or node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    return next((entry.t for entry in node.attribute if entry.name == "value"), None)


def _nothing(model: Model, skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return f"{model.path.name}: the main graph has no convolution, so there is nothing to prune."
    first = "; ".join(f"{entry.layer}: {entry.reason}" for entry in skipped[:3])
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return (
        f"{model.path.name}: none of the chosen convolutions can be pruned ({first}{more}). It takes a 2-D convolution "
        f"with a constant floating-point weight and, unless a layer pattern names it, group 1 and at least "
        f"{MIN_INPUT_CHANNELS} input channels."
    )


_Masks = Callable[[Sequence[_Weight], float, int], list[Bools]]


def _mask_of(method: str, pattern: tuple[int, int] | None) -> _Masks:
    if pattern is not None:
        n, m = pattern
        return lambda weights, share, seed: [smallest_of_groups(weight.array, n, m) for weight in weights]
    return {"magnitude-global": _by_all, "magnitude-layer": _by_layer, "random": _by_chance}[method]


def _by_all(weights: Sequence[_Weight], share: float, seed: int) -> list[Bools]:
    scores = np.concatenate([weight.magnitude for weight in weights])
    mask = smallest(scores, zero_count(scores.size, share))
    ends = np.cumsum([weight.array.size for weight in weights])
    parts = np.split(mask, ends[:-1])
    return [part.reshape(weight.array.shape) for part, weight in zip(parts, weights, strict=True)]


def _by_layer(weights: Sequence[_Weight], share: float, seed: int) -> list[Bools]:
    return [
        smallest(weight.magnitude, zero_count(weight.array.size, share)).reshape(weight.array.shape)
        for weight in weights
    ]


def _by_chance(weights: Sequence[_Weight], share: float, seed: int) -> list[Bools]:
    masks = []
    for weight in weights:
        generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(weight.name.encode())]))
        scores = generator.random(weight.array.size)
        scores[weight.array.ravel() == 0] = -1.0  # existing zeros go first: they are part of the count
        masks.append(smallest(scores, zero_count(scores.size, share)).reshape(weight.array.shape))
    return masks


def _apply(weight: _Weight, mask: Bools) -> PrunedWeight:
    array = weight.array
    pruned = np.where(mask, np.zeros((), array.dtype), array)
    before, after = _zeros(array), _zeros(pruned)
    if after > before:
        _store(weight.tensor, pruned)
    return PrunedWeight(
        weight=weight.name, layers=weight.layers, total=array.size, zeros_before=before, zeros_after=after
    )


def _store(tensor: TensorProto, array: Array) -> None:
    """Put values of the same type and shape into a tensor, inside the model, whatever form it had."""
    written = numpy_helper.from_array(np.ascontiguousarray(array))
    assert written.data_type == tensor.data_type, tensor.name
    for field in _DATA_FIELDS:
        tensor.ClearField(field)
    tensor.raw_data = written.raw_data
