"""2:4 as it stands and after permuting input channels."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sparsedeploy.models.shapes import pruned_weight, work
from sparsedeploy.models.sparsity import n_m
from sparsedeploy.reading import count_zeros
from sparsedeploy.two_four import _count, find_order, is_two_four


def nonzeros(weight: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[oc, icg, taps] of 0 and 1."""
    return (weight != 0).view(np.uint8).reshape(weight.shape[0], weight.shape[1], -1)


def rows_hold(nonzero: NDArray[np.uint8]) -> bool:
    """The definition, place by place."""
    oc, icg, taps = nonzero.shape
    return icg % 4 == 0 and all(
        nonzero[o, i : i + 4, t].sum() <= 2 for o in range(oc) for t in range(taps) for i in range(0, icg, 4)
    )


def shuffled_two_four(seed: int, oc: int = 24, ic: int = 16, kernel: int = 3) -> NDArray[np.float32]:
    """A 2:4 weight whose input channels were mixed."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((oc, ic, kernel, kernel)).astype(np.float32)
    sparse = n_m(dense, 2, 4) * (rng.random(dense.shape) < 0.3)
    return np.ascontiguousarray(sparse[:, rng.permutation(ic)], np.float32)


def test_what_is_two_four_already_keeps_its_order() -> None:
    nonzero = nonzeros(n_m(np.random.default_rng(0).standard_normal((8, 12, 3, 3)).astype(np.float32), 2, 4))
    order = find_order(nonzero)
    assert order is not None
    assert order.tolist() == list(range(12))


@pytest.mark.parametrize("seed", range(6))
def test_an_order_that_is_found_is_one(seed: int) -> None:
    nonzero = nonzeros(shuffled_two_four(seed))
    assert not rows_hold(nonzero)
    order = find_order(nonzero)
    assert order is not None
    assert sorted(order) == list(range(16))
    assert rows_hold(nonzero[:, order])


@pytest.mark.parametrize(("name", "sparsity"), [("64@56", 0.9), ("128@28", 0.95), ("256@14", 0.98)])
def test_layers_at_90_percent_and_more_are_two_four_in_some_order(name: str, sparsity: float) -> None:
    (entry,) = work(f"resnet50_3x3/{name}")
    nonzero = nonzeros(pruned_weight(entry.geometry, sparsity))
    order = find_order(nonzero)
    assert order is not None
    assert is_two_four(nonzero[:, order])


def test_a_row_more_than_half_full_has_no_order() -> None:
    weight = np.zeros((4, 8, 1, 1), np.float32)
    weight[2, :5] = 1
    assert find_order(nonzeros(weight)) is None


def test_a_conflict_among_every_four_channels_has_no_order() -> None:
    # Every three of the 8 channels meet in one row: any group of four breaks three rows or more.
    triples = [(a, b, c) for a in range(8) for b in range(a) for c in range(b)]
    weight = np.zeros((len(triples), 8, 1, 1), np.float32)
    for row, channels in enumerate(triples):
        weight[row, list(channels)] = 1
    assert find_order(nonzeros(weight)) is None


def test_channels_that_are_no_multiple_of_four_have_no_order() -> None:
    assert find_order(np.zeros((3, 6, 1), np.uint8)) is None


def test_the_same_zeros_give_the_same_order() -> None:
    nonzero = nonzeros(shuffled_two_four(9))
    first, second = find_order(nonzero), find_order(nonzero.copy())
    assert first is not None
    assert second is not None
    assert first.tolist() == second.tolist()


def test_zeros_tell_it_and_each_group_has_its_own_order() -> None:
    mixed = shuffled_two_four(1)
    assert not count_zeros(mixed, 1).two_four
    assert count_zeros(mixed, 1).two_four_permuted
    grouped = np.concatenate([mixed, shuffled_two_four(2)])
    assert count_zeros(grouped, 2).two_four_permuted
    full = np.ones((24, 16, 3, 3), np.float32)
    assert not count_zeros(np.concatenate([mixed, full]), 2).two_four_permuted
    assert not count_zeros(full, 1).two_four_permuted


def test_bits_are_counted_alike_without_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 63, (5, 7), np.int64).astype(np.uint64)
    expected = [sum(bin(int(word)).count("1") for word in row) for row in words]
    assert _count(words).tolist() == expected
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert _count(words).tolist() == expected
