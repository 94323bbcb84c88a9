"""Lag of the event loop: how late a periodic timer runs, and how long the turns of the loop are.

The timer is late by the rest of the turn of the loop that was under way when it became due. Every request waits as long, so the lag is the
part of all latencies that other requests cause. It includes time in which the machine ran other programs or another thread had the
interpreter. The CPU time of a turn does not; one turn is measured after each tick:

    timer ─ tick ─┐ rest of the turn │ one turn │
                  └─ call_soon ──────┴──────────┴─ the CPU time between the two calls

While the loop has nothing to do, the timer runs less often, and such a tick counts as many as it stands for. The counts are therefore those
of a timer that always runs at the shortest interval.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

INTERVAL_SECONDS: Final = 0.02
"""Interval while the loop is busy. Short enough to meet a long turn soon."""
IDLE_INTERVALS_MAX: Final = 8
"""Longest interval of an idle loop, in multiples of the shortest."""
_BUSY_FRACTION: Final = 0.05
"""Fraction of CPU time from which on the loop is busy. The timer itself takes about 0.5 %."""
BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
"""Upper bounds of the buckets. The last bucket has none."""
_RECENT_TICKS: Final = round(60 / INTERVAL_SECONDS)


def percentile_bound(counts: Sequence[int], percent: float) -> float:
    """Return the upper bound in milliseconds of the bucket with this percentile."""
    left = sum(counts) * percent / 100
    for bound, count in zip(BOUNDS_MS, counts, strict=False):
        left -= count
        if left <= 0:
            return float(bound)
    return math.inf


@dataclass(slots=True)
class LoopLag:
    """Counters of the lag, or of the lengths of turns, since the start."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    """Ticks by bucket of `BOUNDS_MS`."""
    ticks: int = 0
    sum_seconds: float = 0.0
    max_seconds: float = 0.0
    _recent: tuple[float, float] = (0.0, 0.0)
    """Maximum of the current minute and of the one before."""

    def note(self, seconds: float, ticks: int = 1) -> None:
        """Count a tick that was late by so much and stands for this many."""
        minute = self.ticks // _RECENT_TICKS
        self.ticks += ticks
        self.sum_seconds += seconds * ticks
        index = 0
        for bound in BOUNDS_MS:
            if seconds * 1e3 <= bound:
                break
            index += 1
        self.counts[index] += ticks
        if seconds > self.max_seconds:
            self.max_seconds = seconds
        current, before = self._recent
        self._recent = (seconds, current) if self.ticks // _RECENT_TICKS != minute else (max(current, seconds), before)

    @property
    def recent_max_seconds(self) -> float:
        """The maximum of the last one to two minutes."""
        return max(self._recent)

    def percentile_ms(self, percent: float) -> float:
        """Return the upper bound of the bucket with this percentile, but at most the maximum."""
        return min(percentile_bound(self.counts, percent), self.max_seconds * 1e3)

    def report(self) -> dict[str, object]:
        """Return the lag for `headrace status`: percentiles since the start, and the latest maximum."""
        return {
            "p50_ms": round(self.percentile_ms(50), 3),
            "p99_ms": round(self.percentile_ms(99), 3),
            "max_ms": round(self.max_seconds * 1e3, 3),
            "recent_max_ms": round(self.recent_max_seconds * 1e3, 3),
            "bounds_ms": list(BOUNDS_MS),
            "counts": list(self.counts),
        }


class LagTimer:
    """Measures the running loop from `start` to `stop`. `clock` returns seconds, `cpu_clock` the CPU seconds of the thread."""

    def __init__(self, lag: LoopLag, turns: LoopLag, clock: Callable[[], float], cpu_clock: Callable[[], float]) -> None:
        self._lag, self._turns, self._clock, self._cpu_clock = lag, turns, clock, cpu_clock
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._cpu_before = 0.0
        self._intervals = 1
        """Shortest intervals until the next tick."""

    def start(self) -> None:
        self._cpu_before = self._cpu_clock()
        # Not the time of the loop: it stands still during a turn.
        self._due = self._clock() + INTERVAL_SECONDS * self._intervals
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_SECONDS * self._intervals, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        lag, ticks = max(0.0, self._clock() - self._due), self._intervals
        self._lag.note(lag, ticks)
        used = self._cpu_clock() - self._cpu_before
        # Not the lag: on a machine that runs other programs the timer is late without any work of the loop.
        self._intervals = 1 if used > _BUSY_FRACTION * INTERVAL_SECONDS * ticks else min(ticks * 2, IDLE_INTERVALS_MAX)
        self.start()
        asyncio.get_running_loop().call_soon(self._begin_turn, ticks)

    def _begin_turn(self, ticks: int) -> None:
        asyncio.get_running_loop().call_soon(self._end_turn, self._cpu_clock(), ticks)

    def _end_turn(self, began: float, ticks: int) -> None:
        self._turns.note(self._cpu_clock() - began, ticks)
