"""Ways to make a weight sparse that look like what pruning leaves, and reference networks pruned that way.

Trained and pruned networks differ from uniformly random masks in two ways that decide a kernel's speed: their fullest
output channel holds 2 to 3 times as many nonzeros as the mean (SkimCaffe, SparseRT's filters), and small early layers
keep a larger share of their weights than large late ones. All functions leave their argument alone, keep the dtype,
and give the same result for the same seed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from sparsedeploy.converters.graph import attribute
from sparsedeploy.converters.prune import smallest, smallest_of_groups, zero_count
from sparsedeploy.errors import InputError
from sparsedeploy.models.networks import build

Scalar = TypeVar("Scalar", bound=np.generic)
Recipe = Literal["skewed", "magnitude", "random"]

RECIPES: tuple[Recipe, ...] = ("skewed", "magnitude", "random")

FULLEST = 2.5
"""Nonzeros of the fullest output channel over the mean, as `skewed_magnitude` aims for."""

ROOM = 0.8
"""Where 2.5 times the mean does not fit in a channel, the fullest goes this share of the way from the mean to full."""

SIZE_EXPONENT = 0.3
"""A layer's density goes with its size to the power -0.3: between SparseRT's networks (0: all layers alike) and
SkimCaffe's ResNet-50 (0.5); MobileNetV1 as pruned by its SparseZoo recipe gives 0.28."""

DENSEST = 3.0
"""The largest share of weights that a layer keeps, over the share that all keep."""


def magnitude(weight: NDArray[Scalar], sparsity: float) -> NDArray[Scalar]:
    """The weight with exactly round(sparsity * size) smallest magnitudes set to zero."""
    gone = smallest(np.abs(weight).ravel(), _count(weight.size, sparsity))
    return _without(weight, gone.reshape(weight.shape))


def skewed_magnitude(weight: NDArray[Scalar], sparsity: float, seed: int = 0) -> NDArray[Scalar]:
    """As `magnitude`, within output channels whose numbers of nonzeros are spread log-normally.

    The fullest of the channels (axis 0) holds about 2.5 times the mean; less where a channel cannot hold as many, more
    where so few weights are left that chance alone makes it more. Exactly round(sparsity * size) zeros in all.
    """
    rows = np.abs(weight).reshape(len(weight), -1)
    kept = _skewed_counts(len(rows), rows.shape[1], weight.size - _count(weight.size, sparsity), seed)
    gone = np.stack([smallest(row, len(row) - int(count)) for row, count in zip(rows, kept, strict=True)])
    return _without(weight, gone.reshape(weight.shape))


def random_mask(shape: tuple[int, ...], sparsity: float, seed: int = 0) -> NDArray[np.bool_]:
    """True where a weight is kept; exactly round(sparsity * size) elements are False, anywhere."""
    size = math.prod(shape)
    scores = np.random.Generator(np.random.PCG64(seed)).random(size)
    return ~smallest(scores, _count(size, sparsity)).reshape(shape)


def n_m(weight: NDArray[Scalar], n: int, m: int) -> NDArray[Scalar]:
    """The weight [oc, ic, ...] with the n largest magnitudes of every m consecutive input channels kept."""
    if not 1 <= n < m:
        raise InputError(f"{n}:{m}: an n:m pattern keeps n of every m weights; n is at least 1 and less than m.")
    return _without(weight, smallest_of_groups(weight, n, m))


def pruned(
    name: str,
    sparsity: float,
    *,
    recipe: Recipe = "skewed",
    uniform: bool = False,
    first_and_classifier: bool = False,
    seed: int = 0,
    **options: Any,
) -> onnx.ModelProto:
    """A reference network whose convolutions hold `sparsity` zeros together; options go to `networks.build`.

    Small layers stay denser than large ones (SIZE_EXPONENT) unless `uniform`: then each has that sparsity. Pruning comes before BatchNormalization is fitted and
    folded, and the filters left are brought back to their mean and norm, as retraining would: activations stay in range.
    Depthwise convolutions stay dense; so do the first convolution and the classifier unless `first_and_classifier`.
    """
    if recipe not in RECIPES:
        raise InputError(f"{recipe!r} is not a sparsity recipe; choose one of {', '.join(RECIPES)}.")
    sizes = _prunable(build(name, seed=seed, **options).graph, first_and_classifier)
    sparsities = dict.fromkeys(sizes, sparsity) if uniform else layer_sparsities(sizes, sparsity)

    def sparsify(tensor: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        if tensor not in sparsities:
            return weight
        return _refitted(weight, _recipe(recipe, weight, sparsities[tensor], seed + zlib.crc32(tensor.encode())))

    return build(name, seed=seed, sparsify=sparsify, **options)


def layer_sparsities(sizes: Mapping[str, int], sparsity: float) -> dict[str, float]:
    """Sparsity per layer of these sizes, so that all together have round(sparsity * sum) zeros, exactly.

    Small layers stay denser (SIZE_EXPONENT), but none keeps more than three times the share of all.
    """
    counts = np.array(list(sizes.values()), np.int64)
    total = int(counts.sum())
    keep = total - _count(total, sparsity)
    limits = np.ceil(counts * min(1.0, DENSEST * keep / total)).astype(np.int64)
    kept = _shares(counts.astype(np.float64) ** (1.0 - SIZE_EXPONENT), limits, keep)
    return {name: 1.0 - int(count) / size for (name, size), count in zip(sizes.items(), kept, strict=True)}


def _recipe(recipe: Recipe, weight: NDArray[Scalar], sparsity: float, seed: int) -> NDArray[Scalar]:
    if recipe == "skewed":
        return skewed_magnitude(weight, sparsity, seed)
    if recipe == "magnitude":
        return magnitude(weight, sparsity)
    return _without(weight, ~random_mask(weight.shape, sparsity, seed))


def _prunable(graph: onnx.GraphProto, first_and_classifier: bool) -> dict[str, int]:
    """Names and sizes of the weights to prune, in graph order."""
    layers = [node for node in graph.node if node.op_type in ("Conv", "Gemm") and attribute(node, "group", 1) == 1]
    if not first_and_classifier:
        layers = [node for node in layers[1:] if node.op_type == "Conv"]
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    return {node.input[1]: sizes[node.input[1]] for node in layers}


def _refitted(weight: NDArray[np.float32], sparse: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sparse filters with the mean (0) and the norm that they had, on the nonzeros they have.

    A filter of fewer than 4 nonzeros, or with one that would become zero, keeps its mean.
    """
    axes = tuple(range(1, weight.ndim))
    nonzero = sparse != 0
    count = nonzero.sum(axis=axes, keepdims=True)
    mean = sparse.sum(axis=axes, keepdims=True, dtype=np.float64) / np.maximum(count, 1)
    centred = np.where(nonzero, sparse - mean.astype(np.float32), np.float32(0))
    keeps_mean = (count < 4) | ((centred == 0) & nonzero).any(axis=axes, keepdims=True)
    fitted = np.where(keeps_mean, sparse, centred)
    before, after = (np.square(array, dtype=np.float64).sum(axis=axes, keepdims=True) for array in (weight, fitted))
    scale = np.sqrt(np.divide(before, after, out=np.ones_like(before), where=after > 0))
    return np.asarray(fitted * scale, np.float32)


def _count(size: int, sparsity: float) -> int:
    if not 0.0 <= sparsity < 1.0:
        raise InputError(
            f"sparsity {sparsity}: the share of zeros is a number from 0 up to but not including 1, as 0.9."
        )
    return zero_count(size, sparsity)


def _without(weight: NDArray[Scalar], gone: NDArray[np.bool_]) -> NDArray[Scalar]:
    return np.where(gone, np.zeros((), weight.dtype), weight)


def _skewed_counts(channels: int, size: int, total: int, seed: int) -> NDArray[np.int64]:
    """How many of `size` weights each channel keeps, `total` together.

    Binomial around log-normal expectations, as pruning by a threshold leaves them, so that small channels vary by chance
    alone and may be empty. The log-normal's spread is found by bisection.
    """
    limits = np.full(channels, size)
    mean = total / channels
    fullest = mean * min(FULLEST, 1.0 + ROOM * (size / max(mean, 1.0) - 1.0))
    low, high = 0.0, 2.0
    for _ in range(16):
        generator = np.random.Generator(np.random.PCG64(seed))
        sigma = (low + high) / 2
        expected = _shares(np.exp(sigma * generator.standard_normal(channels)), limits, total)
        drawn = generator.binomial(size, expected / size)
        counts = _shares(drawn + 1e-3, limits, total)
        low, high = (sigma, high) if counts.max() < fullest else (low, sigma)
    return counts


def _shares(wish: NDArray[np.floating[Any]], limits: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Whole numbers in proportion to `wish`, none above its limit, that sum to `total` (at most the limits' sum)."""
    exact = np.zeros(len(wish))
    full = np.zeros(len(wish), np.bool_)
    while True:
        free = total - limits[full].sum()
        exact = np.where(full, limits, wish * (free / max(wish[~full].sum(), np.finfo(np.float64).tiny)))
        over = (exact > limits) & ~full
        if not over.any():
            break
        full |= over
    counts = np.minimum(np.floor(exact).astype(np.int64), limits)
    order = np.argsort(counts - exact, kind="stable")
    for index in order[counts[order] < limits[order]][: total - counts.sum()]:
        counts[index] += 1
    return counts
