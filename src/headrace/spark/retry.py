"""Retry policy for requests to the broker: one exponential backoff for reads, writes and pipeline restarts.

Spark ends a query when one callback fails, and a broker that restarts is unavailable for a second or two.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final, TypeVar

from headrace.errors import BrokerError, Unavailable
from headrace.spark.options import Options

RETRIES: Final = 3
PAUSE_SECONDS: Final = 0.01
PAUSE_SECONDS_MAX: Final = 2.0
TIMEOUT_SECONDS: Final = 120.0

_log = logging.getLogger("headrace.spark")
_Reply = TypeVar("_Reply")


def backoff(failures: int, first: float = PAUSE_SECONDS, longest: float = PAUSE_SECONDS_MAX) -> float:
    """Return the pause after this many consecutive failures: `first`, doubled with each failure, at most `longest`."""
    return min(first * 2.0 ** min(failures - 1, 30), longest)


def retry(request: Callable[[], _Reply], *, give_up: Callable[[int, float], bool], pause: float = PAUSE_SECONDS) -> _Reply:
    """Repeat an idempotent request after retriable errors, until `give_up(failures, next pause)`."""
    for failures in count(1):
        try:
            return request()
        except BrokerError as failure:
            wait = backoff(failures, pause)
            if not failure.retriable or give_up(failures, wait):
                raise
            if failures == 1:
                _log.warning("the broker does not answer, retrying: %s", failure)
        time.sleep(wait)
    raise AssertionError("count() does not end")


def retry_until(request: Callable[[], _Reply], *, until: float) -> _Reply:
    """Repeat an idempotent request until it succeeds or the monotonic clock reaches `until`."""
    return retry(request, give_up=lambda _, pause: time.monotonic() + pause > until)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits on retries: a count before a query starts, a timeout while it runs."""

    retries: int = RETRIES
    pause_seconds: float = PAUSE_SECONDS
    timeout_seconds: float = TIMEOUT_SECONDS

    @classmethod
    def of(cls, options: Options) -> RetryPolicy:
        return cls(
            retries=options.count("fetchOffset.numRetries", RETRIES, least=0),
            pause_seconds=options.count("fetchOffset.retryIntervalMs", int(PAUSE_SECONDS * 1000), least=0) / 1000,
            timeout_seconds=options.count("kafkaConsumer.pollTimeoutMs", int(TIMEOUT_SECONDS * 1000), least=0) / 1000,
        )

    def before_start(self, request: Callable[[], _Reply], addresses: tuple[str, ...]) -> _Reply:
        """Retry a few times before a query starts: a user is waiting, and the address may be wrong."""
        try:
            return retry(request, give_up=lambda failures, _: failures > self.retries, pause=self._pause)
        except Unavailable as failure:
            where = ",".join(addresses)
            raise Unavailable(
                f"no broker answers at {where}: is its Flight endpoint open there (headrace serve --listen-flight)? {failure}"
            ) from None

    def while_running(self, request: Callable[[], _Reply]) -> _Reply:
        """Retry until the timeout, so that a running query survives a restart of the broker."""
        deadline = time.monotonic() + self.timeout_seconds
        return retry(request, give_up=lambda failures, _: failures > self.retries and time.monotonic() > deadline, pause=self._pause)

    @property
    def _pause(self) -> float:
        """The first pause. Zero would stay zero when doubled."""
        return self.pause_seconds or PAUSE_SECONDS
