"""Lag of the event loop, with a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headrace.server.loop_lag import BOUNDS_MS, IDLE_INTERVALS_MAX, INTERVAL_SECONDS, LagTimer, LoopLag


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.001, 0), (0.0011, 1), (0.005, 2), (1.0, 9), (1.001, 10), (60.0, 10)])
def test_a_tick_counts_in_the_bucket_of_its_lag(seconds: float, bucket: int) -> None:
    lag = LoopLag()
    lag.note(seconds)
    assert [index for index, count in enumerate(lag.counts) if count] == [bucket]
    assert len(lag.counts) == len(BOUNDS_MS) + 1


def test_percentiles_are_upper_bounds_and_never_above_the_maximum() -> None:
    lag = LoopLag()
    for _ in range(98):
        lag.note(0.0004)
    lag.note(0.007)
    lag.note(3.0)
    assert (lag.percentile_ms(50), lag.percentile_ms(99), lag.percentile_ms(100)) == (1.0, 10.0, 3000.0)
    quiet = LoopLag()
    quiet.note(0.0002)
    assert quiet.percentile_ms(99) == pytest.approx(0.2)


def test_the_latest_maximum_forgets_an_old_one() -> None:
    lag = LoopLag()
    lag.note(0.5)
    for _ in range(round(60 / INTERVAL_SECONDS)):
        lag.note(0.001)
    assert lag.recent_max_seconds == 0.5
    for _ in range(round(60 / INTERVAL_SECONDS)):
        lag.note(0.001)
    assert (lag.recent_max_seconds, lag.max_seconds) == (0.001, 0.5)


async def test_the_timer_notes_how_late_it_runs() -> None:
    ticked = asyncio.Event()

    class Observed(LoopLag):
        def note(self, seconds: float, ticks: int = 1) -> None:
            super().note(seconds, ticks)
            ticked.set()

    lag, now = Observed(), [100.0]
    timer = LagTimer(lag, LoopLag(), lambda: now[0], lambda: 0.0)
    timer.start()
    now[0] += INTERVAL_SECONDS + 0.3
    async with asyncio.timeout(300):
        await ticked.wait()
    timer.stop()
    assert lag.max_seconds == pytest.approx(0.3)


async def test_each_tick_measures_the_cpu_time_of_one_whole_turn() -> None:
    lag, turns, used = LoopLag(), LoopLag(), [0.0]
    loop, measured = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        """Use 7 ms in every turn until one is measured."""
        used[0] += 0.007
        if turns.ticks:
            measured.set()
        else:
            loop.call_soon(work)

    timer = LagTimer(lag, turns, loop.time, lambda: used[0])
    timer.start()
    work()
    async with asyncio.timeout(300):
        await measured.wait()
    timer.stop()
    assert turns.max_seconds == pytest.approx(0.007)


def test_a_tick_of_an_idle_loop_counts_as_those_it_stands_for() -> None:
    every, seldom = LoopLag(), LoopLag()
    for _ in range(8):
        every.note(0.003)
    seldom.note(0.003, 8)
    assert (seldom.counts, seldom.ticks) == (every.counts, every.ticks) and seldom.sum_seconds == pytest.approx(every.sum_seconds)
    seldom.note(0.5, 8)
    for _ in range(2 * round(60 / INTERVAL_SECONDS) // 8):
        seldom.note(0.001, 8)
    assert (seldom.recent_max_seconds, seldom.max_seconds) == (0.001, 0.5)


class ManualLoop:
    """An event loop whose timers the test runs."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.timer: Callable[[], None] = lambda: None

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.delays.append(seconds)
        self.timer = call

    def call_soon(self, call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)


def test_the_timer_of_an_idle_loop_slows_down_until_the_loop_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, now, cpu, lag = ManualLoop(), [0.0], [0.0], LoopLag()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    timer = LagTimer(lag, LoopLag(), lambda: now[0], lambda: cpu[0])

    def pass_interval(*, cpu_fraction: float = 0.001, late: float = 0.0) -> None:
        cpu[0] += loop.delays[-1] * cpu_fraction
        now[0] += loop.delays[-1] + late
        loop.timer()

    timer.start()
    for _ in range(5):
        pass_interval()
    assert loop.delays == pytest.approx([INTERVAL_SECONDS * factor for factor in (1, 2, 4, 8, 8, 8)])
    assert lag.ticks == 1 + 2 + 4 + 8 + 8 and loop.delays[-1] == INTERVAL_SECONDS * IDLE_INTERVALS_MAX
    pass_interval(cpu_fraction=0.06)
    assert loop.delays[-1] == INTERVAL_SECONDS
    pass_interval(late=0.3)  # because of other programs
    assert loop.delays[-1] == 2 * INTERVAL_SECONDS and lag.max_seconds == pytest.approx(0.3)
