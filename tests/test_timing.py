"""The measuring loop: who runs when, what is counted, on a clock that only the sessions move."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from sparsedeploy.measure.timing import FEWEST_A_TURN, FEWEST_WARM, SETTLE, Schedule, measure
from sparsedeploy.runtime import Feeds


class Machine:
    """A clock, and a diary of who did what."""

    def __init__(self) -> None:
        self.now = 0
        self.diary: list[tuple[str, str]] = []

    def clock(self) -> int:
        return self.now


class Fixed:
    """A session that takes a fixed time."""

    graph, device_clock = False, True

    def __init__(self, machine: Machine, name: str, us: int, device_clock: bool = True) -> None:
        self.machine, self.name, self.us, self.device_clock = machine, name, us, device_clock
        self.pending = 0

    def note(self, what: str) -> None:
        self.machine.diary.append((self.name, what))

    def upload(self, feeds: Feeds) -> None:
        self.note(f"upload {next(iter(feeds))}")
        self.machine.now += 7_000

    def enqueue(self) -> None:
        self.note("enqueue")
        self.machine.now += 3_000
        self.pending += 1

    def wait(self) -> None:
        self.note("wait")
        self.machine.now += 1000 * self.us * self.pending
        self.pending = 0

    def download(self) -> dict[str, Any]:
        self.note("download")
        self.machine.now += 5_000
        return {}

    def mark(self) -> object:
        return self.machine.now + 1000 * self.us * self.pending

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(end - start) / 1000

    def close(self) -> None:
        """Nothing to free."""


FEEDS = {"a": {"xa": np.zeros(1)}, "b": {"xb": np.zeros(1)}}


def test_turns_alternate_and_everything_is_counted_once() -> None:
    machine, rounds = Machine(), 6
    sessions = {"a": Fixed(machine, "a", 100), "b": Fixed(machine, "b", 40)}
    marks: list[int] = []
    found = measure(sessions, FEEDS, Schedule(0.06, 0.002, rounds), machine.clock, lambda: marks.append(machine.now))
    assert len(marks) == rounds
    who = [name for name, _ in machine.diary]
    turns = [name for i, name in enumerate(who) if i == 0 or who[i - 1] != name]
    # Warm-up of a and b, then ab ba ab ba ab ba: neighbours of the same name are one.
    assert turns == ["a", "b", *"abababa"]
    for name, us in (("a", 100), ("b", 40)):
        samples = found[name]
        single = {len(each) for each in samples.gpu_ms}
        assert single == {int(0.65 * 10_000 / (us + 3))}, "a turn of 10 ms, its share of single inferences"
        assert len(samples.gpu_ms) == len(samples.per_second) == len(samples.latency_ms) == rounds
        assert {round(value, 6) for each in samples.gpu_ms for value in each} == {(us + 3) / 1e3}
        assert {round(value, 6) for each in samples.wall_ms for value in each} == {(us + 3) / 1e3}
        assert {round(value, 6) for each in samples.enqueue_ms for value in each} == {0.003}
        assert {round(value, 6) for each in samples.h2d_ms for value in each} == {0.007}
        assert {round(value, 6) for each in samples.d2h_ms for value in each} == {0.005}
        assert {round(value, 6) for each in samples.latency_ms for value in each} == {(us + 15) / 1e3}
        assert samples.per_second[0] == pytest.approx(1e6 / (us + 3))
        assert samples.first_ms == pytest.approx((us + 3) / 1e3)


def test_the_head_of_a_turn_is_not_timed() -> None:
    """The first inferences after another model's are slow; they are not in the samples."""
    machine = Machine()

    class Cold(Fixed):
        def wait(self) -> None:
            others = [name for name, _ in machine.diary[-40:] if name != self.name]
            mine = next((i for i, (name, _) in enumerate(reversed(machine.diary)) if name != self.name), 10**6)
            self.us = 500 if others and mine <= SETTLE + 1 else 50
            super().wait()

    sessions = {"a": Cold(machine, "a", 50), "b": Cold(machine, "b", 50)}
    found = measure(sessions, FEEDS, Schedule(0.05, 0.001, 4), machine.clock)
    assert max(value for each in found["a"].wall_ms for value in each) == pytest.approx(0.053)


def test_warm_up_is_by_time_and_a_slow_model_still_has_its_samples() -> None:
    machine = Machine()
    sessions = {"a": Fixed(machine, "a", 20_000)}
    found = measure({"a": sessions["a"]}, FEEDS, Schedule(0.01, 0.5, 3), machine.clock)
    before = machine.diary.index(("a", "download"))
    warm = machine.diary[:before].count(("a", "enqueue"))
    assert warm >= 0.5 / 0.020
    assert [len(each) for each in found["a"].gpu_ms] == [FEWEST_A_TURN] * 3
    quick = Machine()
    measure({"a": Fixed(quick, "a", 100)}, FEEDS, Schedule(0.01, 0.0, 2), quick.clock)
    assert quick.diary[: quick.diary.index(("a", "download"))].count(("a", "enqueue")) >= FEWEST_WARM


def test_without_a_device_clock_the_hosts_is_taken() -> None:
    machine = Machine()
    found = measure({"a": Fixed(machine, "a", 50, False)}, FEEDS, Schedule(0.01, 0.0, 2), machine.clock)
    assert found["a"].gpu_ms == found["a"].wall_ms


def test_each_session_gets_its_own_inputs() -> None:
    machine = Machine()
    measure({"a": Fixed(machine, "a", 9), "b": Fixed(machine, "b", 9)}, FEEDS, Schedule(0.01, 0.0, 2), machine.clock)
    assert {entry for entry in machine.diary if entry[1].startswith("upload")} == {
        ("a", "upload xa"),
        ("b", "upload xb"),
    }


def test_no_garbage_is_collected_while_measuring() -> None:
    machine, seen = Machine(), []
    session = Fixed(machine, "a", 50)
    measure({"a": session}, FEEDS, Schedule(0.01, 0.0, 2), machine.clock, lambda: seen.append(gc.isenabled()))
    assert seen == [False, False]
    assert gc.isenabled()

    def broken() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        measure({"a": session}, FEEDS, Schedule(0.01, 0.0, 2), machine.clock, broken)
    assert gc.isenabled()


@pytest.mark.parametrize("bad", [(1.0, 0.1, 1), (0.0, 0.1, 20), (1.0, -1.0, 20), (float("nan"), 0.1, 20)])
def test_schedules_that_are_none(bad: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="rounds and positive durations"):
        Schedule(*bad)
