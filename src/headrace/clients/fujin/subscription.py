"""A name followed over Fujin: messages are pushed, and taken out by the user at leisure.

When the user takes too long, the server gets no more credit for the stream and stops sending. Nothing is dropped.

A message that waits here when its connection is lost is forgotten: the server delivers it again. One that the user has can still be
acknowledged on the next connection, since its id means the same record there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.clients.errors import NothingToSettle, NotSupported
from headrace.clients.messages import Gap, Message, MessageBatch, Settlement
from headrace.clients.unsupported import READERS
from headrace.wire.fujin import MessageBatch as Arrived
from headrace.wire.fujin import Request

_MESSAGE_OVERHEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class Delivery(Message):
    """One message; its id is empty with auto commit."""

    id: bytes = b""


@dataclass(slots=True)
class DeliveryBatch(MessageBatch):
    """A run whose messages wait for an ACK."""

    ids: list[bytes] = field(default_factory=list)
    _ack: Callable[[list[bytes]], Awaitable[list[bool]]] | None = None

    async def ack(self) -> bool:
        """Done with all of them; False if the server did not know one of them any more: it may come again."""
        return all(await self._ack(self.ids)) if self._ack is not None else True


class Settling(Protocol):
    """What a subscription asks of its client."""

    def settle(self, owner: object, request: Request, ids: Sequence[bytes]) -> Awaitable[list[bool]]:
        """Which of these the server has settled."""

    def settle_unheard(self, owner: object, request: Request, ids: Sequence[bytes]) -> None:
        """The same for whoever does not want to know."""

    def used(self, owner: object, size_bytes: int) -> None:
        """The server may send so many bytes more."""

    def left(self, owner: object) -> Awaitable[None]:
        """Stop following."""


class Subscription:
    """An asynchronous iterator of deliveries. Made by `FujinClient.subscribe`."""

    def __init__(self, client: Settling, name: str, *, auto_commit: bool, settlement: Settlement, queue_bytes_max: int) -> None:
        self.topic, self.auto_commit = name, auto_commit
        self.gaps: list[Gap] = []
        """Empty: Fujin has no offsets."""
        self._client, self._settlement, self._queue_bytes_max = client, settlement, queue_bytes_max
        self._queue: list[tuple[bytes, bytes]] = []
        self._taken = 0
        self._queued_bytes = self._withheld_bytes = 0
        self._owed: dict[bytes, None] = {}
        """The ids of what was given to the user and not settled, in order."""
        self._changed = asyncio.Event()
        self._is_closed = False
        self._failure: Exception | None = None

    # What the client tells us.

    def arrived(self, batch: Arrived) -> None:
        self._queue += zip(batch.ids or [b""] * len(batch.values), batch.values, strict=True)
        self._queued_bytes += sum(map(len, batch.values)) + _MESSAGE_OVERHEAD_BYTES * len(batch.values)
        self._changed.set()

    def credit(self, size_bytes: int) -> int:
        """How much more the server may send, after so many bytes have come: nothing while the queue is full."""
        if self._queued_bytes > self._queue_bytes_max:
            self._withheld_bytes += size_bytes
            return 0
        return size_bytes

    def interrupted(self) -> None:
        """The connection is lost: what waits here comes again. With auto commit it does not, so it stays."""
        self._withheld_bytes = 0
        if not self.auto_commit:
            self._queue, self._taken, self._queued_bytes = [], 0, 0

    def stop(self, failure: Exception | None = None) -> None:
        """Nothing more will come, and nothing that waits is given out."""
        self._is_closed, self._failure = True, failure
        self._queue = []
        self._changed.set()

    # What the user does.

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Delivery:
        self._settle_given()
        if not await self._filled():
            raise StopAsyncIteration
        id, value = self._queue[self._taken]
        self._taken += 1
        self._give([id], [value])
        return Delivery(self.topic, None, None, value, settler=None if self.auto_commit else self, id=id)

    async def batches(self) -> AsyncIterator[DeliveryBatch]:
        """Messages as they come, in runs: the fast way. Do not mix with iterating over single messages."""
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
        """Done with everything that was given out."""
        if self.auto_commit:
            raise NothingToSettle(self.topic)
        if self._owed:
            await self._ack(list(self._owed))

    async def ack(self, message: Message) -> bool:
        """Done with this one. False: the server has delivered it to another reader, or will deliver it again."""
        assert isinstance(message, Delivery), "this subscription gave it out"
        return (await self._ack([message.id]))[0]

    async def nack(self, message: Message) -> bool:
        """It comes again after a while, and goes to the dead letters when that does not help."""
        assert isinstance(message, Delivery), "this subscription gave it out"
        self._owed.pop(message.id, None)
        return (await self._client.settle(self, Request.NACK, [message.id]))[0]

    def seek(self, offset: int, *, partition: int = 0) -> None:
        raise NotSupported("Fujin", "offsets", READERS)

    async def close(self) -> None:
        """Stop following. The iteration ends; with automatic settlement everything that was given out counts as done."""
        if not self._is_closed:
            if self._settlement == "auto" and self._owed:
                await self.commit()
            self.stop()
            await self._client.left(self)

    # The rest.

    async def _ack(self, ids: list[bytes]) -> list[bool]:
        for id in ids:
            self._owed.pop(id, None)
        return await self._client.settle(self, Request.ACK, ids)

    def _settle_given(self) -> None:
        """With automatic settlement, asking for more says that what was given is done."""
        if self._settlement == "auto" and self._owed:
            ids, self._owed = list(self._owed), {}
            self._client.settle_unheard(self, Request.ACK, ids)

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
