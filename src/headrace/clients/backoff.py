"""Delays between attempts to connect."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

Backoff: TypeAlias = Callable[[int], float]
"""Seconds to wait before an attempt. Attempts count from 0 after the last connection that received a reply."""


def chance() -> float:
    """Return a number in [0, 1) from the system's randomness, so that clients started together wait differently."""
    return int.from_bytes(os.urandom(4), "big") / (1 << 32)


def exponential(
    *, first_seconds: float = 1.0, seconds_max: float = 30.0, jitter: float = 0.2, chance: Callable[[], float] = chance
) -> Backoff:
    """Return exponential backoff with jitter: 0, 1, 2, 4, … 30 seconds, each ± 20 % by default."""

    def wait(attempt: int) -> float:
        if attempt == 0:
            return 0.0
        doublings = min(attempt - 1, 64)
        seconds = min(first_seconds * 2.0**doublings, seconds_max)
        return seconds * (1 + jitter * (2 * chance() - 1))

    return wait
