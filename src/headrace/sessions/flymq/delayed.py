"""PRODUCE_DELAYED and COMMIT, staged without waiting for the disk, and CANCEL_DELAYED.

Adjacent requests are one append. If one of them fails at once, each is staged on its own, so that it does not fail the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.broker import Broker, Principal
from headrace.errors import BrokerError, InvalidRequest, RecordTooLarge
from headrace.sessions.flymq.errors import error_reply
from headrace.sessions.flymq.staging import OFFSET_MAX, RECORD_BYTES_MAX
from headrace.sessions.session import RECORD_OVERHEAD_BYTES
from headrace.wire.flymq import Dialect, Opcode, encode_failure, encode_reply
from headrace.wire.flymq.advanced_messages import CancelDelayed, DelayedBatch, ProduceDelayed
from headrace.wire.flymq.messages import AUTO, Commit, CommitBatch, Done, Reply
from headrace.wire.flymq.timed import encode_scheduled


class StagedReplies:
    """Requests in flight that are answered together."""

    __slots__ = ("_count", "_encode", "outcome", "size_bytes")

    def __init__(self, count: int, size_bytes: int, outcome: asyncio.Future[Any], encode: Callable[[], bytes]) -> None:
        self._count, self.size_bytes, self.outcome, self._encode = count, size_bytes + count * RECORD_OVERHEAD_BYTES, outcome, encode

    def reply(self, dialect: Dialect) -> bytes:
        """Return one frame for each request."""
        error = self.outcome.exception()
        if isinstance(error, BrokerError):
            return encode_failure(error_reply(error), dialect) * self._count
        return self._encode()


def stage_delayed(broker: Broker, who: Principal, batch: DelayedBatch) -> StagedReplies:
    """Store delayed messages. Raises at once what is known at once; then none is stored."""
    value_sizes, keys = list(map(len, batch.values)), batch.keys or [None] * len(batch)
    for key, value in zip(keys, batch.values, strict=True):
        if len(key or b"") + len(value) > RECORD_BYTES_MAX:
            raise RecordTooLarge(size_bytes=len(key or b"") + len(value), bytes_max=RECORD_BYTES_MAX)
    chosen = [None if number == AUTO else number for number in batch.partitions or [AUTO] * len(batch)]
    now, key_sizes = broker.now, [len(key) if key else AUTO for key in keys]
    staged = broker.stage_delayed(who, batch.topic, batch.values, batch.delays, [key or None for key in keys], chosen)

    def encode() -> bytes:
        return encode_scheduled(batch.topic, [number or 0 for number in chosen], now, key_sizes, value_sizes, staged.ids, staged.dues)

    return StagedReplies(len(batch), sum(value_sizes), staged.outcome, encode)


def stage_commits(broker: Broker, who: Principal, batch: CommitBatch) -> StagedReplies:
    """Commit offsets of one group. Of several for one partition the last one counts. Raises at once what is known at once."""
    for partition, offset in zip(batch.partitions, batch.offsets, strict=True):
        if not 0 <= offset <= OFFSET_MAX:
            raise InvalidRequest(f"offset {offset} out of range")
        if partition < 0:
            raise InvalidRequest(f"partition {partition} not found")
    places = ((batch.topic, partition) for partition in batch.partitions)
    outcome = broker.stage_commit(who, batch.group, dict(zip(places, batch.offsets, strict=True)))
    return StagedReplies(len(batch), 0, outcome, lambda: encode_reply(Opcode.COMMIT, Done(True, "offset committed")) * len(batch))


def batch_of(request: ProduceDelayed | Commit) -> DelayedBatch | CommitBatch:
    """Return a batch of one request."""
    if isinstance(request, Commit):
        return CommitBatch(request.topic, request.group, [request.partition], [request.offset])
    return DelayedBatch(request.topic, [request.value], [request.delay_ms], [request.key or None], [request.partition])


class DelayedHandlers:
    """Requests that wait. `who` returns the current principal."""

    def __init__(self, broker: Broker, who: Callable[[], Principal]) -> None:
        self._broker = broker
        self._who = who

    async def cancel(self, request: CancelDelayed) -> Reply:
        await self._broker.cancel_delayed(self._who(), request.message, topic=request.topic or None)
        return Done(True, "cancelled")
