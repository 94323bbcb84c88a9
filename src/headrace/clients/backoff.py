"""How long to wait before the next attempt to connect."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

Backoff: TypeAlias = Callable[[int], float]
"""Seconds to wait before an attempt; they are counted from 0 since the last connection that was of use."""


def chance() -> float:
    """A number in [0, 1). From the system: clients that were started together must not wait alike."""
    return int.from_bytes(os.urandom(4), "big") / (1 << 32)


def exponential(
    *, first_seconds: float = 1.0, seconds_max: float = 30.0, jitter: float = 0.2, chance: Callable[[], float] = chance
) -> Backoff:
    """The first attempt at once, then after 1, 2, 4, … 30 seconds, each up to a fifth more or less."""

    def wait(attempt: int) -> float:
        if attempt == 0:
            return 0.0
        doublings = min(attempt - 1, 64)
        seconds = min(first_seconds * 2.0**doublings, seconds_max)
        return seconds * (1 + jitter * (2 * chance() - 1))

    return wait
