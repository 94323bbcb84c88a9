"""Fujin subscription: a queue between pushed messages and the user.

While the queue is full, the server gets no more credit for the stream and stops sending. Nothing is dropped.

Queued messages of a lost connection are discarded: the server delivers them again. A delivered message can still be acknowledged on the
next connection, where its id names the same record.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from headrace.clients.errors import NothingToSettle, NotSupported
from headrace.clients.messages import Gap, Message, MessageBatch, Settlement, Settler
from headrace.clients.unsupported import READERS
from headrace.wire.fujin import MessageBatch as Arrived
from headrace.wire.fujin import Request

_MESSAGE_OVERHEAD_BYTES = 64


_ID: Final = struct.Struct(">IQQ")
"""The id of a Headrace server: partition, offset and timestamp, then the topic if the reader has several."""
_TIMESTAMP_MAX: Final = 1 << 43
"""Year 2248 in Unix ms: a larger number is not a timestamp, and the id is that of another server."""


@dataclass(frozen=True, slots=True)
class Delivery(Message):
    """One message. Its id is empty with auto commit; partition, offset and timestamp are then None."""

    id: bytes = b""

    @classmethod
    def of(cls, name: str, id: bytes, value: bytes, settler: Settler | None) -> Delivery:
        """Return a delivery with what its id tells. Ids of other servers are opaque."""
        if len(id) >= _ID.size:
            partition, offset, timestamp = _ID.unpack_from(id)
            if timestamp < _TIMESTAMP_MAX:
                topic = id[_ID.size :].decode("utf-8", "replace") or name
                return cls(topic, partition, offset, value, timestamp=timestamp, settler=settler, id=id)
        return cls(name, None, None, value, settler=settler, id=id)


@dataclass(slots=True)
class DeliveryBatch(MessageBatch):
    """A batch whose messages await an ACK."""

    ids: list[bytes] = field(default_factory=list)
    _ack: Callable[[list[bytes]], Awaitable[list[bool]]] | None = None

    async def ack(self) -> bool:
        """Acknowledge all messages. Returns False if the server may deliver one of them again."""
        return all(await self._ack(self.ids)) if self._ack is not None else True


class Settling(Protocol):
    """The methods of a client that a subscription uses."""

    def settle(self, owner: object, request: Request, ids: Sequence[bytes]) -> Awaitable[list[bool]]:
        """Return for each message whether the server has settled it."""

    def settle_without_reply(self, owner: object, request: Request, ids: Sequence[bytes]) -> None:
        """Settle messages without waiting for the reply."""

    def used(self, owner: object, size_bytes: int) -> None:
        """Grant the server credit for `size_bytes` more."""

    def left(self, owner: object) -> Awaitable[None]:
        """Stop following."""


class Subscription:
    """Asynchronous iterator of deliveries, created by `FujinClient.subscribe`."""

    def __init__(self, client: Settling, name: str, *, auto_commit: bool, settlement: Settlement, queue_bytes_max: int) -> None:
        self.topic, self.auto_commit = name, auto_commit
        self.gaps: list[Gap] = []
        """Empty: Fujin has no offsets."""
        self._client, self._settlement, self._queue_bytes_max = client, settlement, queue_bytes_max
        self._queue: list[tuple[bytes, bytes]] = []
        self._taken = 0
        self._queued_bytes = self._withheld_bytes = 0
        self._owed: dict[bytes, None] = {}
        """Ids of delivered, unsettled messages, in order."""
        self._changed = asyncio.Event()
        self._is_closed = False
        self._failure: Exception | None = None

    # Called by the client.

    def arrived(self, batch: Arrived) -> None:
        self._queue += zip(batch.ids or [b""] * len(batch.values), batch.values, strict=True)
        self._queued_bytes += sum(map(len, batch.values)) + _MESSAGE_OVERHEAD_BYTES * len(batch.values)
        self._changed.set()

    def credit(self, size_bytes: int) -> int:
        """Return the credit to grant for received bytes: none while the queue is full."""
        if self._queued_bytes > self._queue_bytes_max:
            self._withheld_bytes += size_bytes
            return 0
        return size_bytes

    def interrupted(self) -> None:
        """Discard queued messages of a lost connection: the server delivers them again, except with auto commit."""
        self._withheld_bytes = 0
        if not self.auto_commit:
            self._queue, self._taken, self._queued_bytes = [], 0, 0

    def stop(self, failure: Exception | None = None) -> None:
        """End the iteration and drop queued messages."""
        self._is_closed, self._failure = True, failure
        self._queue = []
        self._changed.set()

    # Called by the user.

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Delivery:
        self._settle_given()
        if not await self._filled():
            raise StopAsyncIteration
        id, value = self._queue[self._taken]
        self._taken += 1
        self._give([id], [value])
        return Delivery.of(self.topic, id, value, None if self.auto_commit else self)

    async def batches(self) -> AsyncIterator[DeliveryBatch]:
        """Iterate over batches as received, which is faster. Do not mix with iterating over single messages."""
        while True:
            self._settle_given()
            if not await self._filled():
                return
            waiting, self._queue = self._queue[self._taken :], []
            self._taken = 0
            ids, values = [id for id, _ in waiting], [value for _, value in waiting]
            self._give(ids, values)
            yield DeliveryBatch(self.topic, None, (), values, None, ids, None if self.auto_commit else self._ack)

    async def commit(self) -> None:
        """Acknowledge every message delivered so far."""
        if self.auto_commit:
            raise NothingToSettle(self.topic)
        if self._owed:
            await self._ack(list(self._owed))

    async def ack(self, message: Message) -> bool:
        """Acknowledge the message. Returns False if another reader has it or the server will deliver it again."""
        assert isinstance(message, Delivery), "this subscription delivered it"
        return (await self._ack([message.id]))[0]

    async def nack(self, message: Message) -> bool:
        """Request another delivery. The server dead-letters the message after its last attempt."""
        assert isinstance(message, Delivery), "this subscription delivered it"
        self._owed.pop(message.id, None)
        return (await self._client.settle(self, Request.NACK, [message.id]))[0]

    def seek(self, offset: int, *, partition: int = 0) -> None:
        raise NotSupported("Fujin", "offsets", READERS)

    async def close(self) -> None:
        """Stop following and end the iteration. Automatic settlement acknowledges every delivered message."""
        if not self._is_closed:
            if self._settlement == "auto" and self._owed:
                await self.commit()
            self.stop()
            await self._client.left(self)

    # Internals.

    async def _ack(self, ids: list[bytes]) -> list[bool]:
        for id in ids:
            self._owed.pop(id, None)
        return await self._client.settle(self, Request.ACK, ids)

    def _settle_given(self) -> None:
        """Acknowledge delivered messages if settlement is automatic."""
        if self._settlement == "auto" and self._owed:
            ids, self._owed = list(self._owed), {}
            self._client.settle_without_reply(self, Request.ACK, ids)

    def _give(self, ids: list[bytes], values: list[bytes]) -> None:
        if not self.auto_commit:
            self._owed.update(dict.fromkeys(ids))
        if self._taken == len(self._queue):
            self._queue, self._taken = [], 0
        self._queued_bytes -= sum(map(len, values)) + _MESSAGE_OVERHEAD_BYTES * len(values)
        if self._withheld_bytes and self._queued_bytes <= self._queue_bytes_max // 2:
            withheld, self._withheld_bytes = self._withheld_bytes, 0
            self._client.used(self, withheld)

    async def _filled(self) -> bool:
        while self._taken >= len(self._queue) and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        return not self._is_closed
