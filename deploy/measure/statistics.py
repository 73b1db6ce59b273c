"""What samples of times allow to be said: percentiles with their minimum counts, spread, and intervals of medians and ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sparsedeploy.record import Record

MINIMUM_SAMPLES = {90: 64, 95: 130, 99: 662}
"""Samples that a percentile needs: with fewer, the chance that not one lies beyond it is more than 0.13 % (three sigma),
from (p / 100) ** n <= 0.0013. A percentile of too few is as a rule just their maximum."""

_STUDENT_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom."""
_NORMAL = 1.9600


class Distribution(Record):
    """Samples of one time, milliseconds."""

    count: int
    min_ms: float
    median_ms: float
    mean_ms: float
    max_ms: float
    p90_ms: float | None
    """None where there are fewer samples than MINIMUM_SAMPLES asks for; the same below."""
    p95_ms: float | None
    p99_ms: float | None
    cv: float
    """Coefficient of variation: sample standard deviation over mean; 0 of a single sample."""


class Ratio(Record):
    """A ratio with its 95 % confidence interval."""

    estimate: float
    low: float
    high: float
    pairs: int

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1: else no difference was shown."""
        return not self.low <= 1 <= self.high


def describe(samples_ms: Sequence[float]) -> Distribution:
    """Summary of at least one sample; raises ValueError for none, or for one that is not finite or is negative."""
    values = np.sort(np.asarray(samples_ms, np.float64))
    if not values.size or not np.isfinite(values).all() or values[0] < 0:
        raise ValueError(f"{values.size} samples, all must be finite and not negative")
    mean = float(values.mean())
    spread = float(values.std(ddof=1)) if values.size > 1 else 0.0
    return Distribution(
        count=int(values.size), min_ms=float(values[0]), median_ms=float(np.median(values)), mean_ms=mean,
        max_ms=float(values[-1]), p90_ms=percentile(values, 90), p95_ms=percentile(values, 95),
        p99_ms=percentile(values, 99), cv=spread / mean if mean else 0.0,
    )  # fmt: skip


def percentile(samples: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]], p: int) -> float | None:
    """The smallest sample that at least p % of the samples do not exceed, as trtexec has it; None of too few samples."""
    values = np.sort(np.asarray(samples, np.float64))
    if values.size < MINIMUM_SAMPLES[p]:
        return None
    return float(values[values.size - 1 - (100 - p) * values.size // 100])


def student_t(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; raises ValueError below one degree of freedom."""
    if freedom < 1:
        raise ValueError("an interval needs at least two values")
    if freedom <= len(_STUDENT_T):
        return _STUDENT_T[freedom - 1]
    # Cornish-Fisher: within 1e-4 from 31 degrees on.
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def paired_ratio(dense: Sequence[float], sparse: Sequence[float]) -> Ratio:
    """Ratio dense / sparse with a 95 % interval, from values measured in pairs, one after the other.

    The t interval of the mean of log(dense / sparse). Logarithms because a ratio is not symmetric and its error is
    relative; pairs because what both feel alike (clock, temperature) cancels in each; t, not a bootstrap, because a bench
    has ten to thirty pairs (medians of rounds, nearly normal and nearly independent), for which a bootstrap's interval is
    too narrow. It draws nothing, so the same samples give the same interval. Raises ValueError for fewer than two
    pairs or a time that is not positive.
    """
    a, b = np.asarray(dense, np.float64), np.asarray(sparse, np.float64)
    if a.shape != b.shape or a.size < 2 or not (a.min() > 0 and b.min() > 0):
        raise ValueError("a paired ratio needs two or more pairs of positive times")
    mean, half = _interval(np.log(a) - np.log(b))
    return Ratio(estimate=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), pairs=int(a.size))


def mean_interval(rounds: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the geometric mean of positive values, one per round; what two runs are compared by."""
    mean, half = _interval(np.log(np.asarray(rounds, np.float64)))
    return math.exp(mean - half), math.exp(mean + half)


def _interval(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    return float(values.mean()), student_t(values.size - 1) * float(values.std(ddof=1)) / math.sqrt(values.size)


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation; 0 of fewer than two values."""
    array = np.asarray(values, np.float64)
    return float(array.std(ddof=1) / array.mean()) if array.size > 1 and array.mean() > 0 else 0.0


def halves_differ(values: Sequence[float]) -> float:
    """By what share the median of the second half differs from the first's, signed; 0 of fewer than two values."""
    middle = len(values) // 2
    if not middle:
        return 0.0
    first, second = float(np.median(values[:middle])), float(np.median(values[-middle:]))
    return second / first - 1 if first > 0 else 0.0
