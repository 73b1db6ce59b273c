"""Time several sessions side by side in one process: warm up, then rounds in which each takes its turn.

A round runs every session for a few tens of milliseconds, forwards in even rounds and backwards in odd ones, so that a
clock or temperature that moves is felt by all alike. Turns, not single inferences, alternate: a model that shares the L2
cache with another between two inferences is not what anybody deploys. Two inferences at the head of a turn are not timed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sparsedeploy.runtime import Feeds, Session

Clock = Callable[[], int]
"""Nanoseconds of the host, monotonic."""

SETTLE = 2
"""Inferences at the head of each turn that are not timed: the cache still holds another model."""
FEWEST_A_TURN = 4
BURST, TRANSFERS = 0.2, 0.15
"""Shares of a turn for inferences enqueued without waiting (throughput) and for inferences with both copies."""
FEWEST_WARM = 5


@dataclass(frozen=True)
class Schedule:
    """How long to measure; durations are of each session."""

    duration_s: float = 2.0
    warmup_s: float = 0.5
    rounds: int = 20

    def __post_init__(self) -> None:
        if not (self.rounds >= 2 and self.duration_s > 0 and self.warmup_s >= 0):
            raise ValueError(f"{self}: needed two or more rounds and positive durations")


@dataclass
class Samples:
    """What was measured of one session, milliseconds, one list a round."""

    first_ms: float = 0.0
    """The first inference, before any warm-up."""
    gpu_ms: list[list[float]] = field(default_factory=list)
    """By the device's clock from the head to the end of one inference that nothing precedes in the stream; by the host's
    where the session has no device clock."""
    wall_ms: list[list[float]] = field(default_factory=list)
    """By the host's clock from the enqueue until the inference was done."""
    enqueue_ms: list[list[float]] = field(default_factory=list)
    """Until `enqueue` returned."""
    h2d_ms: list[list[float]] = field(default_factory=list)
    d2h_ms: list[list[float]] = field(default_factory=list)
    latency_ms: list[list[float]] = field(default_factory=list)
    """From inputs on the host to outputs on the host."""
    per_second: list[float] = field(default_factory=list)
    """Inferences a second where none waits for the one before, one value a round."""


@dataclass(frozen=True)
class _Turn:
    burst: int
    single: int
    transfers: int


@dataclass
class _Copies:
    h2d: list[float] = field(default_factory=list)
    d2h: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)


def measure(
    sessions: Mapping[str, Session],
    feeds: Mapping[str, Feeds],
    schedule: Schedule,
    clock: Clock = time.perf_counter_ns,
    between: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Warm up every session by time and measure all in turns. `between` is called after every round, GPU still warm.

    `feeds` are the inputs of each session. The number of inferences in a turn follows from the warm-up and stays.
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection in the middle of an inference would be its outlier
    try:
        return _measure(sessions, feeds, schedule, clock, between)
    finally:
        if collecting:
            gc.enable()


def _measure(
    sessions: Mapping[str, Session],
    feeds: Mapping[str, Feeds],
    schedule: Schedule,
    clock: Clock,
    between: Callable[[], None],
) -> dict[str, Samples]:
    samples = {name: Samples() for name in sessions}
    turns = {}
    for name, session in sessions.items():
        session.upload(feeds[name])
        samples[name].first_ms = _once(session, clock)
        turns[name] = _warm(session, feeds[name], schedule, clock)
    for number in range(schedule.rounds):
        names = list(sessions) if number % 2 == 0 else list(sessions)[::-1]
        for name in names:
            _take_turn(sessions[name], feeds[name], turns[name], samples[name], clock)
        between()
    return samples


def _once(session: Session, clock: Clock) -> float:
    start = clock()
    session.enqueue()
    session.wait()
    return (clock() - start) / 1e6


def _warm(session: Session, feeds: Feeds, schedule: Schedule, clock: Clock) -> _Turn:
    """Run until the time is over, and share out a turn by what one inference and one copy then take."""
    until, times = clock() + schedule.warmup_s * 1e9, list[float]()
    while len(times) < FEWEST_WARM or clock() < until:
        times.append(_once(session, clock))
    with_copies = min(_transfer(session, feeds, _Copies(), clock) for _ in range(2))
    one, turn = float(np.median(times[-50:])), schedule.duration_s / schedule.rounds * 1e3
    single = (1 - BURST - TRANSFERS) * turn / max(one, 1e-3)
    return _Turn(
        burst=max(FEWEST_A_TURN, int(BURST * turn / max(one, 1e-3))),
        single=max(FEWEST_A_TURN, int(single)),
        transfers=max(1, int(TRANSFERS * turn / max(with_copies, 1e-3))),
    )


def _take_turn(session: Session, feeds: Feeds, turn: _Turn, samples: Samples, clock: Clock) -> None:
    for _ in range(SETTLE):
        session.enqueue()
    session.wait()
    _single(session, turn.single, samples, clock)
    start = clock()
    for _ in range(turn.burst):
        session.enqueue()
    session.wait()
    samples.per_second.append(turn.burst / max(clock() - start, 1) * 1e9)
    copies = _Copies()
    for _ in range(turn.transfers):
        _transfer(session, feeds, copies, clock)
    samples.h2d_ms.append(copies.h2d)
    samples.d2h_ms.append(copies.d2h)
    samples.latency_ms.append(copies.latency)


def _single(session: Session, count: int, samples: Samples, clock: Clock) -> None:
    gpu, wall, enqueue = [], [], []
    for _ in range(count):
        head = session.mark()
        start = clock()
        session.enqueue()
        returned = clock()
        tail = session.mark()
        session.wait()
        done = clock()
        enqueue.append((returned - start) / 1e6)
        wall.append((done - start) / 1e6)
        gpu.append(session.elapsed_us(head, tail) / 1e3 if session.device_clock else wall[-1])
    samples.gpu_ms.append(gpu)
    samples.wall_ms.append(wall)
    samples.enqueue_ms.append(enqueue)


def _transfer(session: Session, feeds: Feeds, copies: _Copies, clock: Clock) -> float:
    """One inference from host to host, its parts appended; returns the whole, milliseconds."""
    start = clock()
    session.upload(feeds)
    uploaded = clock()
    session.enqueue()
    session.wait()
    computed = clock()
    session.download()
    done = clock()
    copies.h2d.append((uploaded - start) / 1e6)
    copies.d2h.append((done - computed) / 1e6)
    copies.latency.append((done - start) / 1e6)
    return copies.latency[-1]
