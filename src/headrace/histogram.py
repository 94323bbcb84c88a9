"""Histogram of durations or sizes: plain numbers that one thread adds to and any thread may read."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

SECONDS: Final[Sequence[float]] = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of durations."""
FEW_SECONDS: Final[Sequence[float]] = (0.001, 0.005, 0.025, 0.1, 1.0)
"""Some of these, where each bucket is multiplied by the number of topics."""
BYTES: Final[Sequence[float]] = tuple(4.0**power for power in range(5, 14))
"""Upper bounds of sizes: 1 KiB to 64 MiB."""


class Histogram:
    """Counts of observations by upper bound. The last count is of those above every bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of all observations."""

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, other: Histogram) -> None:
        """Add the observations of another histogram with the same bounds."""
        self.counts = [*map(operator.add, self.counts, other.counts)]
        self.total += other.total

    def coarse(self, bounds: Sequence[float]) -> Histogram:
        """Return the same observations in fewer buckets. `bounds` are some of the bounds of this one."""
        found = Histogram(bounds)
        for bound, count in zip((*self.bounds, math.inf), list(self.counts), strict=True):
            found.counts[bisect_left(bounds, bound)] += count
        found.total = self.total
        return found

    def cumulative(self) -> list[tuple[str, int]]:
        """Return (upper bound, observations at or below it), as Prometheus has them."""
        found: list[tuple[str, int]] = []
        so_far = 0
        for bound, count in zip([*map(_text, self.bounds), "+Inf"], list(self.counts), strict=True):
            so_far += count
            found.append((bound, so_far))
        return found


def _text(bound: float) -> str:
    return repr(float(bound))
