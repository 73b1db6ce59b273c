"""Sparsity recipes: exact counts, the right weights, realistic skew, and pruned networks that still compute."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper

from sparsedeploy.errors import InputError
from sparsedeploy.models.sparsity import (
    RECIPES,
    layer_sparsities,
    magnitude,
    n_m,
    pruned,
    random_mask,
    skewed_magnitude,
)

SHAPES = [(64, 64, 3, 3), (17, 5, 3, 3), (128, 64, 1, 1), (1, 3, 1, 1), (10, 12)]
SPARSITIES = [0.0, 0.5, 0.9, 0.98, 0.999]


def normal(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def zeros(array: NDArray[np.generic]) -> int:
    return array.size - int(np.count_nonzero(array))


def per_channel(weight: NDArray[np.generic]) -> NDArray[np.int64]:
    return np.count_nonzero(weight.reshape(len(weight), -1), axis=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_zeros_are_counted_exactly(shape: tuple[int, ...], sparsity: float) -> None:
    weight = normal(shape)
    expected = round(weight.size * sparsity)
    before = weight.copy()
    for sparse in (magnitude(weight, sparsity), skewed_magnitude(weight, sparsity, 3)):
        assert zeros(sparse) == expected
        assert (sparse[sparse != 0] == weight[sparse != 0]).all()
    assert np.count_nonzero(~random_mask(shape, sparsity, 3)) == expected
    np.testing.assert_array_equal(weight, before)


def test_magnitude_keeps_the_largest_and_breaks_ties_in_order() -> None:
    weight = normal((32, 16, 3, 3))
    sparse = magnitude(weight, 0.9)
    assert np.abs(weight[sparse == 0]).max() <= np.abs(sparse[sparse != 0]).min()
    equal = np.ones((4, 5), np.float32)
    np.testing.assert_array_equal(magnitude(equal, 0.5).ravel(), [0.0] * 10 + [1.0] * 10)


@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (128, 128, 3, 3), (512, 512, 3, 3), (256, 64, 1, 1)])
@pytest.mark.parametrize("sparsity", [0.8, 0.9, 0.98])
def test_fullest_channel_has_two_to_three_times_the_mean(shape: tuple[int, ...], sparsity: float) -> None:
    weight = normal(shape)
    counts = per_channel(skewed_magnitude(weight, sparsity, 1))
    uniform = per_channel(magnitude(weight, sparsity))
    assert counts.std() > uniform.std()
    if counts.mean() > 10:  # of fewer, chance alone gives some channel more
        assert 2.0 < counts.max() / counts.mean() < 3.0


def test_skewed_magnitude_keeps_the_largest_of_each_channel() -> None:
    weight = normal((20, 9, 3, 3))
    sparse = skewed_magnitude(weight, 0.7, 5)
    for row, kept in zip(weight.reshape(20, -1), sparse.reshape(20, -1), strict=True):
        if 0 < np.count_nonzero(kept) < kept.size:
            assert np.abs(row[kept == 0]).max() <= np.abs(kept[kept != 0]).min()


def test_recipes_depend_on_the_seed_only() -> None:
    weight = normal((64, 32, 3, 3))
    np.testing.assert_array_equal(skewed_magnitude(weight, 0.9, 7), skewed_magnitude(weight, 0.9, 7))
    assert (skewed_magnitude(weight, 0.9, 7) != skewed_magnitude(weight, 0.9, 8)).any()
    np.testing.assert_array_equal(random_mask((50, 40), 0.9, 7), random_mask((50, 40), 0.9, 7))
    assert (random_mask((50, 40), 0.9, 7) != random_mask((50, 40), 0.9, 8)).any()


def test_dtype_is_kept() -> None:
    half = normal((16, 8, 3, 3)).astype(np.float16)
    assert {array.dtype for array in (magnitude(half, 0.5), skewed_magnitude(half, 0.5), n_m(half, 2, 4))} == {
        half.dtype
    }


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (1, 2), (4, 8)])
def test_n_m_keeps_the_largest_of_each_group_of_input_channels(n: int, m: int) -> None:
    weight = normal((6, 16, 3, 3))
    groups = n_m(weight, n, m).reshape(6, 16 // m, m, 3, 3)
    original = weight.reshape(groups.shape)
    assert (np.count_nonzero(groups, axis=2) == n).all()
    kept_least = np.where(groups == 0, np.inf, np.abs(groups)).min(axis=2)
    gone_most = np.where(groups == 0, np.abs(original), 0).max(axis=2)
    assert (gone_most <= kept_least).all()


def test_n_m_treats_a_last_partial_group_as_padded_with_zeros() -> None:
    sparse = n_m(normal((3, 7)), 2, 4)
    assert (np.count_nonzero(sparse[:, :4], axis=1) == 2).all()
    assert (np.count_nonzero(sparse[:, 4:], axis=1) == 2).all()
    assert (n_m(normal((3, 6)), 2, 4)[:, 4:] != 0).all()


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, math.nan, math.inf])
def test_impossible_sparsities_are_refused(sparsity: float) -> None:
    weight = normal((4, 4))
    for attempt in (
        lambda: magnitude(weight, sparsity),
        lambda: skewed_magnitude(weight, sparsity),
        lambda: random_mask((4, 4), sparsity),
        lambda: layer_sparsities({"a": 10}, sparsity),
    ):
        with pytest.raises(InputError, match="sparsity"):
            attempt()
    for n, m in ((0, 4), (4, 4), (5, 4)):
        with pytest.raises(InputError, match="n:m"):
            n_m(weight, n, m)


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=40), sparsity=st.floats(0, 0.9999))
def test_layer_sparsities_add_up_exactly(sizes: list[int], sparsity: float) -> None:
    shares = layer_sparsities({str(index): size for index, size in enumerate(sizes)}, sparsity)
    zero = [round(size * share) for size, share in zip(sizes, shares.values(), strict=True)]
    assert all(0 <= share <= 1 for share in shares.values())
    assert sum(zero) == round(sum(sizes) * sparsity)


def test_large_layers_are_sparser_than_small_ones() -> None:
    shares = layer_sparsities({"small": 36_864, "middle": 147_456, "large": 2_359_296}, 0.9)
    assert 0.6 < shares["small"] < shares["middle"] < 0.9 < shares["large"] < 0.95


def weights(model: onnx.ModelProto) -> dict[str, NDArray[np.float32]]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if len(t.dims) in (2, 4)}


@pytest.mark.parametrize(("name", "sparsity"), [("resnet18", 0.9), ("resnet50", 0.95), ("mobilenet_v1", 0.8)])
def test_pruned_network_has_exact_zeros_and_sane_outputs(name: str, sparsity: float) -> None:
    model = pruned(name, sparsity, image_size=96, num_classes=50)
    dense = {key: value for key, value in weights(model).items() if not zeros(value)}
    sparse = {key: value for key, value in weights(model).items() if zeros(value)}
    first, *_, last = weights(model)
    assert {first, last} <= set(dense)
    assert all(key in (first, last) or value.shape[1] == 1 for key, value in dense.items())
    total = sum(value.size for value in sparse.values())
    assert sum(zeros(value) for value in sparse.values()) == round(total * sparsity)
    for value in sparse.values():
        counts = per_channel(value)
        assert counts.max() > 1.3 * counts.mean()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input": normal((2, 3, 96, 96))})[0]
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3.0


def test_pruned_can_prune_everything_and_use_other_recipes() -> None:
    for recipe in RECIPES:
        model = pruned("mobilenet_v1", 0.7, recipe=recipe, first_and_classifier=True, num_classes=50, image_size=32)
        chosen = [value for value in weights(model).values() if value.ndim == 2 or value.shape[1] > 1]
        assert all(zeros(value) for value in chosen)
        assert sum(map(zeros, chosen)) == round(0.7 * sum(value.size for value in chosen))
        assert (
            model.SerializeToString()
            == (
                pruned("mobilenet_v1", 0.7, recipe=recipe, first_and_classifier=True, num_classes=50, image_size=32)
            ).SerializeToString()
        )


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(InputError, match="skewed"):
        pruned("resnet18", 0.9, recipe="lottery")  # type: ignore[arg-type]


def test_uniform_gives_every_layer_the_same_sparsity() -> None:
    model = pruned("resnet18", 0.9, recipe="magnitude", uniform=True, num_classes=50, image_size=32)
    first, *middle, last = weights(model).values()
    assert zeros(first) == zeros(last) == 0
    assert all(zeros(value) == round(0.9 * value.size) for value in middle)
