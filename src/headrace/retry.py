"""Retry policy of clients, the Flight client, Spark and pipelines: exponential backoff with jitter, until attempts or time are used up.

    failures      0    1      2      3      …
    delay         0    0.1 s  0.2 s  0.4 s  … 5 s, each ± 20 %

The jitter separates clients that have lost the same broker at the same moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from typing import Final, TypeAlias, TypeVar

from headrace.errors import BrokerError

FIRST_SECONDS: Final = 0.1
SECONDS_MAX: Final = 5.0
JITTER: Final = 0.2
ATTEMPTS_MAX: Final = 6
"""Attempts at one request: about 3 seconds with the default delays, in which a broker restarts."""
TIMEOUT_SECONDS: Final = 120.0
"""Deadline of a write or a read that survives a restart of the broker."""

Backoff: TypeAlias = Callable[[int], float]
"""Seconds to wait after this many consecutive failures."""
_Reply = TypeVar("_Reply")


def chance() -> float:
    """Return a number in [0, 1) from the system's randomness, so that clients started together wait differently."""
    return int.from_bytes(os.urandom(4), "big") / (1 << 32)


def exponential(
    *,
    first_seconds: float = FIRST_SECONDS,
    seconds_max: float = SECONDS_MAX,
    jitter: float = JITTER,
    chance: Callable[[], float] = chance,
) -> Backoff:
    """Return exponential backoff with jitter: 0, 0.1, 0.2, 0.4, … 5 seconds, each ± 20 % by default."""

    def wait(failures: int) -> float:
        if failures == 0:
            return 0.0
        seconds = min(first_seconds * 2.0 ** min(failures - 1, 64), seconds_max)
        return seconds * (1 + jitter * (2 * chance() - 1))

    return wait


def retry(
    request: Callable[[], _Reply],
    *,
    give_up: Callable[[int, float], bool],
    backoff: Backoff = exponential(),
    report: Callable[[BrokerError], None] = lambda failure: None,
    sleep: Callable[[float], None] = time.sleep,
) -> _Reply:
    """Repeat an idempotent request after retriable errors, until `give_up(failures, next delay)`. `report` gets the first error."""
    for failures in count(1):
        try:
            return request()
        except BrokerError as failure:
            wait = backoff(failures)
            if not failure.retriable or give_up(failures, wait):
                raise
            if failures == 1:
                report(failure)
        sleep(wait)
    raise AssertionError("count() does not end")
