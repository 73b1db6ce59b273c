"""Who wins by measurement: which layers share candidates, when sparse pays, and what the whole model says to that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from sparsedeploy.layer import ConvLayer, Geometry
from sparsedeploy.measure.stage import Stage, Timed
from sparsedeploy.measure.statistics import Ratio, paired_ratio
from sparsedeploy.measure.timing import Schedule, measure
from sparsedeploy.measure.tuning import Step
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.runtime import Feeds, Session

SIMILAR_NNZ = 1.15
"""Layers of one shape share candidates up to this ratio of nonzeros."""


def pays(dense: Timed, sparse: Timed) -> bool:
    """Whether the sparse time is lower by more than either was seen to vary."""
    return dense.us - sparse.us > max(dense.spread_us, sparse.spread_us)


def grouped(layers: Sequence[ConvLayer]) -> list[list[ConvLayer]]:
    """Layers of one geometry, with or without an addition, whose nonzeros differ by at most SIMILAR_NNZ; each group's first
    is its middle one. (An addition reads as much as the layer writes: what wins without it may lose with it.)
    """
    by_shape: dict[tuple[Geometry, bool], list[ConvLayer]] = {}
    for layer in layers:
        assert layer.geometry is not None
        by_shape.setdefault((layer.geometry, layer.epilogue.residual != "none"), []).append(layer)
    groups: list[list[ConvLayer]] = []
    for same in by_shape.values():
        started: list[ConvLayer] = []
        for layer in sorted(same, key=nnz_of):
            if started and nnz_of(layer) > SIMILAR_NNZ * max(1, nnz_of(started[0])):
                groups.append(started)
                started = []
            started.append(layer)
        groups.append(started)
    return [[group[len(group) // 2], *group[: len(group) // 2], *group[len(group) // 2 + 1 :]] for group in groups]


def nnz_of(layer: ConvLayer) -> int:
    return layer.zeros.nnz if layer.zeros else 0


def crossing(dense_us: float, here: tuple[float, float], far: tuple[float, float]) -> tuple[float | None, str]:
    """Sparsity at which a line through two (sparsity, us) meets the dense time, and whether it lies between them."""
    (s0, t0), (s1, t1) = sorted((here, far))
    slope = (t1 - t0) / (s1 - s0)
    if slope >= 0:  # so few nonzeros that they do not show: faster or slower at any sparsity
        return (0.0, "nonzeros do not show") if t1 < dense_us else (None, "slower at any sparsity")
    crossed = s0 + (dense_us - t0) / slope
    if crossed >= 1:
        return None, "slower at any sparsity"
    return max(crossed, 0.0), "interpolated" if s0 <= crossed <= s1 else "extrapolated"


def race(before: Session, tried: Session, feeds: Feeds, schedule: Schedule) -> tuple[Ratio, float, float]:
    """Time of `before` over time of `tried`, measured in turns, and both medians in milliseconds."""
    samples = measure({"before": before, "tried": tried}, {"before": feeds, "tried": feeds}, schedule)
    rounds = {name: [float(np.median(turn)) for turn in each.gpu_ms] for name, each in samples.items()}
    ratio = paired_ratio(rounds["before"], rounds["tried"])
    return ratio, float(np.median(rounds["before"])), float(np.median(rounds["tried"]))


@contextmanager
def held(stage: Stage, nodes: Mapping[str, SparseConv]) -> Iterator[Session]:
    session = stage.session(nodes)
    try:
        yield session
    finally:
        session.close()


@dataclass
class Dropped:
    """What is left after dropping, and how it came to that."""

    kept: dict[str, SparseConv]
    steps: list[Step] = field(default_factory=list)


def drop_useless(
    stage: Stage,
    nodes: Mapping[str, SparseConv],
    order: Sequence[str],
    schedule: Schedule,
    patience: int | None = None,
) -> Dropped:
    """Give layers back to dense, in `order`, each time that makes the whole model faster beyond doubt.

    Goes through the layers again until a round drops none, or ends a round after `patience` failures in a row.
    """
    state = Dropped(dict(nodes))
    while _one_round(stage, state, [name for name in order if name in state.kept], schedule, patience):
        pass
    return state


def _one_round(stage: Stage, state: Dropped, order: Sequence[str], schedule: Schedule, patience: int | None) -> bool:
    """Whether anything was dropped."""
    failures, any_dropped = 0, False
    before = stage.session(state.kept)
    try:
        for name in order:
            if len(state.kept) == 1:
                break  # the last one is compared with the dense model as a whole
            fewer = {each: node for each, node in state.kept.items() if each != name}
            with held(stage, fewer) as tried:
                ratio, _, _ = race(before, tried, stage.feeds, schedule)
            helps = ratio.low > 1
            state.steps.append(Step(what=f"{name} dense again", ratio=ratio, taken=helps))
            if helps:
                state.kept, any_dropped, failures = fewer, True, 0
                before.close()
                before = stage.session(state.kept)
            else:
                failures += 1
                if patience is not None and failures >= patience:
                    break
    finally:
        before.close()
    return any_dropped
