"""Statistics of a bench against numpy and scipy on known samples, and the coverage of its intervals."""

from __future__ import annotations

import numpy as np
import pytest

from sparsedeploy.measure.statistics import (
    MINIMUM_SAMPLES,
    describe,
    halves_differ,
    mean_interval,
    paired_ratio,
    percentile,
    student_t,
    variation,
)


def test_describe_agrees_with_numpy() -> None:
    values = np.random.default_rng(0).gamma(9.0, 0.1, 700)
    found = describe(values.tolist())
    assert found.count == 700
    assert (found.min_ms, found.max_ms) == (values.min(), values.max())
    assert found.median_ms == pytest.approx(np.median(values), rel=1e-12)
    assert found.mean_ms == pytest.approx(values.mean(), rel=1e-12)
    assert found.cv == pytest.approx(values.std(ddof=1) / values.mean(), rel=1e-12)
    for p, value in ((90, found.p90_ms), (95, found.p95_ms), (99, found.p99_ms)):
        assert value == np.percentile(values, p, method="inverted_cdf")


@pytest.mark.parametrize(("p", "needed"), [(90, 64), (95, 130), (99, 662)])
def test_a_percentile_needs_its_samples(p: int, needed: int) -> None:
    assert MINIMUM_SAMPLES[p] == needed
    assert percentile([1.0] * (needed - 1), p) is None
    assert percentile([1.0] * needed, p) == 1.0
    # Where the numbers come from: the chance that none of n samples lies beyond the percentile.
    assert (p / 100) ** needed <= 0.0013 < (p / 100) ** (needed - 1)


def test_every_count_takes_the_rank_of_numpy_and_trtexec() -> None:
    for count in (*range(64, 140), 662, 1000):
        values = np.arange(count, dtype=np.float64)
        assert percentile(values.tolist(), 90) == np.percentile(values, 90, method="inverted_cdf"), count
        # trtexec: timings[all - 1 - int((1 - p / 100) * all)], in exact arithmetic
        assert percentile(values.tolist(), 90) == values[count - 1 - count // 10]


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [1.0, float("inf")], [-1e-9]])
def test_samples_that_are_none_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="samples"):
        describe(bad)


def test_one_sample_has_no_spread() -> None:
    assert describe([2.0]).cv == 0.0
    assert variation([2.0]) == 0.0
    assert halves_differ([2.0]) == 0.0


def test_student_t_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in range(1, 300):
        assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1.5e-4), freedom


def test_paired_ratio_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(3)
    dense, sparse = rng.normal(4, 0.2, 20), rng.normal(1.3, 0.05, 20)
    logs = np.log(dense / sparse)
    low, high = stats.t.interval(0.95, 19, loc=logs.mean(), scale=stats.sem(logs))
    found = paired_ratio(dense.tolist(), sparse.tolist())
    assert found.pairs == 20
    assert found.estimate == pytest.approx(np.exp(logs.mean()), rel=1e-12)
    assert (found.low, found.high) == pytest.approx((np.exp(low), np.exp(high)), rel=1e-5)
    assert mean_interval(dense.tolist()) == pytest.approx(
        tuple(np.exp(stats.t.interval(0.95, 19, loc=np.log(dense).mean(), scale=stats.sem(np.log(dense))))), rel=1e-5
    )


@pytest.mark.parametrize("pairs", [10, 20])
def test_interval_holds_the_true_ratio_as_often_as_it_says(pairs: int) -> None:
    """4000 benches whose rounds share a wandering clock: 95 % of the intervals hold the truth, give or take chance."""
    rng, held, runs = np.random.default_rng(5), 0, 4000
    for _ in range(runs):
        clock = np.cumsum(rng.normal(0, 0.02, pairs))
        dense = 3.0 * np.exp(clock + rng.normal(0, 0.01, pairs))
        sparse = 1.0 * np.exp(clock + rng.normal(0, 0.01, pairs))
        found = paired_ratio(dense.tolist(), sparse.tolist())
        held += found.low <= 3.0 <= found.high
    # Standard error of the share: sqrt(0.95 * 0.05 / 4000) = 0.34 %; 4 of them.
    assert abs(held / runs - 0.95) < 0.014


def test_pairing_cancels_what_both_feel() -> None:
    clock = np.linspace(1, 2, 20)
    wiggle = 1 + 0.001 * np.sin(np.arange(20))
    found = paired_ratio((3 * clock * wiggle).tolist(), clock.tolist())
    assert found.high / found.low < 1.001
    assert found.differs
    assert not paired_ratio((clock * wiggle).tolist(), clock.tolist()).differs


@pytest.mark.parametrize(
    ("a", "b"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, float("nan")], [1.0, 1.0])]
)
def test_pairs_that_are_none_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        paired_ratio(a, b)


def test_halves() -> None:
    assert halves_differ([1.0] * 10 + [1.1] * 10) == pytest.approx(0.1)
    assert halves_differ([2.0, 1.0, 2.0, 1.0, 2.0]) == pytest.approx(0.0)
    assert halves_differ([4.0, 4.0, 9.0, 3.0, 3.0]) == pytest.approx(-0.25)
