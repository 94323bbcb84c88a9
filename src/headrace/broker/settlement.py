"""Settlement: deliveries that wait for an ack or a nack."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.limits import FETCH_BYTES_MAX, IN_FLIGHT_MAX
from headrace.records import Headers


@dataclass(frozen=True, slots=True)
class SettlementPolicy:
    """How patient a queue is."""

    ack_timeout_ms: int = 30_000
    backoff_ms: int = 1_000
    backoff_max_ms: int = 60_000
    attempts_max: int = 5
    """Deliveries of one record. Zero: no limit."""
    in_flight_max: int = IN_FLIGHT_MAX
    dead_letters: bool = True
    """False: a record that was refused `attempts_max` times is dropped."""


@dataclass(slots=True)
class Delivery:
    """One record on its way to a consumer that is to ack it."""

    id: int
    """Known to the queue that took it. A redelivery of the record to the same group has the same id."""
    partition: int
    offset: int
    attempt: int
    """1 for the first delivery. Counted in memory: it starts again when the broker does."""
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class SettlementQueue:
    """One consumer's handle on the work of a group. Several queues of one group and topic split the work between them."""

    async def take(self, records_max: int, bytes_max: int = FETCH_BYTES_MAX, *, wait_ms: int = 0) -> list[Delivery]:
        """Up to so many records, at least one if any is ready however large; waits up to `wait_ms` for the first."""
        raise NotImplementedError

    def ack(self, ids: Sequence[int]) -> list[bool]:
        """These are done. False: unknown, or by now delivered to another queue."""
        raise NotImplementedError

    def nack(self, ids: Sequence[int], delay_ms: int | None = None) -> list[bool]:
        """These are to come again after `delay_ms`, or after the policy's backoff."""
        raise NotImplementedError

    def close(self) -> asyncio.Future[None]:
        """What is in flight goes back. The future resolves when the group's progress is durable; nobody has to await it."""
        raise NotImplementedError
