"""Handlers of PRODUCE_DELAYED, CANCEL_DELAYED and PRODUCE_WITH_TTL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.broker import Broker, Principal
from headrace.errors import InvalidRequest, RecordTooLarge
from headrace.records import NEVER, RecordBatch
from headrace.sessions.flymq.staging import RECORD_BYTES_MAX
from headrace.wire.flymq.advanced_messages import CancelDelayed, Placed, ProduceDelayed, ProduceWithTtl, Scheduled
from headrace.wire.flymq.messages import AUTO, Done, Reply

TTL_MS_MAX: Final = 1 << 53
"""Upper bound of a duration. Its sum with a time fits 64 bits."""


class DelayedHandlers:
    """Records with a delay or an expiry. `who` returns the current principal."""

    def __init__(self, broker: Broker, who: Callable[[], Principal]) -> None:
        self._broker = broker
        self._who = who

    async def produce_delayed(self, request: ProduceDelayed) -> Reply:
        who, partition = self._who(), _partition(request.partition)
        _check_size(request.key, request.value)
        await self._broker.ensure_topic(who, request.topic)
        id, due = await self._broker.publish_delayed(
            who, request.topic, request.value, delay_ms=request.delay_ms, key=request.key or None, partition=partition
        )
        now = due - max(0, request.delay_ms)
        return Scheduled(request.topic, partition or 0, 0, now, len(request.key) or AUTO, len(request.value), id, due)

    async def cancel(self, request: CancelDelayed) -> Reply:
        await self._broker.cancel_delayed(self._who(), request.message, topic=request.topic or None)
        return Done(True, "cancelled")

    async def produce_with_ttl(self, request: ProduceWithTtl) -> Reply:
        """Publish a record that expires. A time to live of zero means the topic's own."""
        if not 0 <= request.ttl_ms <= TTL_MS_MAX:
            raise InvalidRequest(f"a record cannot live for {request.ttl_ms} ms")
        who = self._who()
        _check_size(request.key, request.value)
        await self._broker.prepare(who, request.topic, [request.value])
        expiry = self._broker.now + request.ttl_ms if request.ttl_ms else NEVER
        batch = RecordBatch([request.value], [request.key] if request.key else None, expiries=[expiry] if expiry else None)
        published = await self._broker.publish(who, request.topic, batch, partition=_partition(request.partition))
        return Placed(
            request.topic, published.partition, published.base_offset, published.timestamp, len(request.key) or AUTO, len(request.value)
        )


def _partition(number: int) -> int | None:
    return None if number == AUTO else number


def _check_size(key: bytes, value: bytes) -> None:
    """Reject a record that no FETCH reply can carry."""
    if len(key) + len(value) > RECORD_BYTES_MAX:
        raise RecordTooLarge(size_bytes=len(key) + len(value), bytes_max=RECORD_BYTES_MAX)
