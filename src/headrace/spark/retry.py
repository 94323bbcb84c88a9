"""Retries of requests to the broker, by the options of the data source. The policy is that of `headrace.retry`.

Spark ends a query when one callback fails, and a broker that restarts is unavailable for a second or two.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from headrace import retry as policy
from headrace.errors import NotCoordinator, Unavailable
from headrace.retry import TIMEOUT_SECONDS, Backoff, exponential
from headrace.spark.options import Options

RETRIES: Final = 3
PAUSE_SECONDS: Final = 0.01
"""The defaults of Kafka's options of these names."""

_log = logging.getLogger("headrace.spark")
_Reply = TypeVar("_Reply")


def retry(request: Callable[[], _Reply], *, give_up: Callable[[int, float], bool], backoff: Backoff | None = None) -> _Reply:
    """Repeat an idempotent request after retriable errors, until `give_up(failures, next pause)`. The first error is logged."""
    return policy.retry(
        request,
        give_up=give_up,
        backoff=exponential(first_seconds=PAUSE_SECONDS) if backoff is None else backoff,
        report=lambda failure: _log.warning("the broker does not answer, retrying: %s", failure),
    )


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

    @property
    def backoff(self) -> Backoff:
        """The pauses between requests. A first one of zero would stay zero when doubled."""
        return exponential(first_seconds=self.pause_seconds or PAUSE_SECONDS)

    def before_start(self, request: Callable[[], _Reply], addresses: tuple[str, ...]) -> _Reply:
        """Retry a few times before a query starts: a user is waiting, and the address may be wrong."""
        try:
            return retry(request, give_up=lambda failures, _: failures > self.retries, backoff=self.backoff)
        except NotCoordinator:
            raise  # its text names the broker to connect to
        except Unavailable as failure:
            where = ",".join(addresses)
            raise Unavailable(
                f"no broker answers at {where}: is its Flight endpoint open there (headrace serve --listen-flight)? {failure}"
            ) from None

    def while_running(self, request: Callable[[], _Reply]) -> _Reply:
        """Retry until the timeout, so that a running query survives a restart of the broker."""
        deadline = time.monotonic() + self.timeout_seconds
        return retry(request, give_up=lambda failures, _: failures > self.retries and time.monotonic() > deadline, backoff=self.backoff)
