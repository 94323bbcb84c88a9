"""Asking again when the broker is away. One failed callback ends a query, and a broker that restarts is away for a second or two."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from headrace.errors import BrokerError, Unavailable
from headrace.spark.options import Options

PAUSE_SECONDS_MAX: Final = 2.0

_log = logging.getLogger("headrace.spark")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Endurance:
    """How long to go on asking: a few times before a query has begun, and a while once it runs."""

    retries: int = 3
    pause_seconds: float = 0.01
    away_seconds: float = 120.0

    @classmethod
    def of(cls, options: Options) -> Endurance:
        return cls(
            retries=options.count("fetchOffset.numRetries", 3, least=0),
            pause_seconds=options.count("fetchOffset.retryIntervalMs", 10, least=0) / 1000,
            away_seconds=options.count("kafkaConsumer.pollTimeoutMs", 120_000, least=0) / 1000,
        )

    def at_first(self, ask: Callable[[], _Answer], addresses: tuple[str, ...]) -> _Answer:
        """Before anything was read: a user is waiting, and the address may be wrong."""
        try:
            return self._ask(ask, give_up=lambda tries, _: tries > self.retries)
        except Unavailable as failure:
            where = ",".join(addresses)
            raise Unavailable(
                f"no broker answers at {where}: is its Flight endpoint open there (headrace serve --listen-flight)? {failure}"
            ) from None

    def throughout(self, ask: Callable[[], _Answer]) -> _Answer:
        """While a query runs: a restart of the broker is only a pause."""
        return self._ask(ask, give_up=lambda tries, seconds: tries > self.retries and seconds > self.away_seconds)

    def _ask(self, ask: Callable[[], _Answer], give_up: Callable[[int, float], bool]) -> _Answer:
        began, tries, pause = time.monotonic(), 0, self.pause_seconds
        while True:
            try:
                return ask()
            except BrokerError as failure:
                tries += 1
                if not failure.retriable or give_up(tries, time.monotonic() - began):
                    raise
                if tries == 1:
                    _log.warning("the broker does not answer, asking again: %s", failure)
            time.sleep(pause)
            pause = min(max(pause * 2, 0.01), PAUSE_SECONDS_MAX)
