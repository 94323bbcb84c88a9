"""BlipMQ subscription: the client polls when the user requests more.

The server waits briefly for an ACK (100 ms by default), then delivers again, and dead-letters the message after three deliveries. So
messages must not wait in the client: a poll requests one message at first, twice as many while the user keeps up, and fewer when handling
them takes longer than `BATCH_SECONDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from headrace.clients.errors import NotSupported
from headrace.clients.messages import Gap, Message, MessageBatch, Settlement
from headrace.clients.polling import pause
from headrace.clients.unsupported import READERS

BATCH_SECONDS: Final = 0.05
"""Longest time to handle the messages of one poll: half of the shortest ACK timeout."""
IDLE_SECONDS_FIRST: Final = 0.005
IDLE_SECONDS_MAX: Final = 0.05
"""Bounds of the delay between polls of an empty subscription."""


class Poller(Protocol):
    """The methods of a client that a subscription uses."""

    def poll(self, subscription: Subscription, count: int) -> Awaitable[None]:
        """Request up to `count` messages. Done when `arrived` has received all available ones."""

    def acknowledge(self, subscription: Subscription, tags: list[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Delivery(Message):
    """One message. A QoS 0 message has tag 0 and needs no ACK; acknowledging it does nothing."""

    tag: int = 0
    subscription_id: int | None = None
    """Id of the subscription at delivery; the ACK must contain it."""


@dataclass(slots=True)
class DeliveryBatch(MessageBatch):
    """A batch whose messages await an ACK."""

    tags: list[int] = field(default_factory=list)
    """Delivery tags; 0 where no ACK is needed."""
    _ack: Callable[[], bool] = lambda: True

    async def ack(self) -> bool:
        """Acknowledge all messages. Returns False if they may be delivered again."""
        return self._ack()


class Subscription:
    """Asynchronous iterator of deliveries, created by `BlipMqClient.subscribe`."""

    def __init__(self, poller: Poller, topic: str, qos: int, *, settlement: Settlement, batch_max: int) -> None:
        self.topic, self.qos = topic, qos
        self.group, self.earliest = "", False
        self.mode: Literal["", "ordered", "shared"] = ""
        """Group of the subscription, whether a new group begins at the earliest record, and its mode; empty: none."""
        self.gaps: list[Gap] = []
        """Empty: BlipMQ has no offsets."""
        self.id: int | None = None
        """Id assigned by the server; None until it replies."""
        self.restarts = 0
        """Number of times the server lost the subscription; the new one may have missed messages."""
        self._poller = poller
        self._settlement = settlement
        self._batch, self._batch_max = 1, batch_max
        self._batch_began: float | None = None
        self._batch_count = 0
        self._queue: dict[int, bytes] = {}
        """Values by tag, in order; a redelivery of a queued message replaces it. QoS 0 values, without tags, count down from 0."""
        self._untagged = 0
        self._owed: dict[int, None] = {}
        """Tags of delivered, unacknowledged messages, in order."""
        self._is_closed = False
        self._closed = asyncio.Event()

    # Called by the client.

    def began(self, id: int) -> None:
        """Store the id of the created or recreated subscription."""
        self.id = id

    def forgotten(self) -> None:
        """Drop queued messages of a subscription that the server has lost: they cannot be acknowledged."""
        if self.id is not None:
            self.id = None
            self.restarts += 1
            self._queue.clear()
            self._owed.clear()

    def arrived(self, qos: int, tags: list[int], values: list[bytes]) -> None:
        if not qos:
            tags = list(range(self._untagged, self._untagged - len(values), -1))
            self._untagged -= len(values)
        self._queue.update(zip(tags, values, strict=True))

    def stop(self) -> None:
        """End the iteration and drop queued messages, which the server delivers to the next poll."""
        self._is_closed = True
        self._queue.clear()
        self._closed.set()

    # Called by the user.

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Delivery:
        if self._settlement == "auto":
            await self.commit()
        if not await self._filled():
            raise StopAsyncIteration
        tag = next(iter(self._queue))
        value = self._queue.pop(tag)
        self._owe([tag])
        return Delivery(self.topic, None, None, value, settler=self, tag=max(tag, 0), subscription_id=self.id)

    async def batches(self) -> AsyncIterator[DeliveryBatch]:
        """Iterate over batches as received, which is faster. Do not mix with iterating over single messages."""
        while True:
            if self._settlement == "auto":
                await self.commit()
            if not await self._filled():
                return
            queue, self._queue = self._queue, {}
            tags, id = list(queue), self.id
            self._owe(tags)

            def ack(id: int | None = id, tags: list[int] = tags) -> bool:
                return self._settle(id, tags)

            yield DeliveryBatch(self.topic, None, (), list(queue.values()), None, [max(tag, 0) for tag in tags], ack)

    async def commit(self) -> None:
        """Acknowledge every message delivered so far."""
        self._settle(self.id, list(self._owed))

    async def ack(self, message: Message) -> bool:
        """Acknowledge the message. Returns False if the subscription was recreated since: the message may be delivered again."""
        assert isinstance(message, Delivery), "this subscription delivered it"
        return self._settle(message.subscription_id, [message.tag])

    async def nack(self, message: Message) -> bool:
        raise NotSupported("BlipMQ", "nack", "the server delivers unacknowledged messages again")

    def seek(self, offset: int, *, partition: int = 0) -> None:
        raise NotSupported("BlipMQ", "offsets", READERS)

    async def close(self) -> None:
        """Stop following the topic and end the iteration. Automatic settlement acknowledges the last delivery."""
        if self._settlement == "auto" and not self._is_closed:
            await self.commit()
        self.stop()

    # Internals.

    def _owe(self, tags: list[int]) -> None:
        self._owed.update((tag, None) for tag in tags if tag > 0)

    def _settle(self, id: int | None, tags: list[int]) -> bool:
        """Acknowledge deliveries once: the server rejects a second ACK."""
        if id != self.id and any(tag > 0 for tag in tags):
            return False
        owed = [tag for tag in tags if tag in self._owed]
        for tag in owed:
            self._queue.pop(tag, None)  # redelivered while the user handled it
            del self._owed[tag]
        if owed:
            self._poller.acknowledge(self, owed)
        return True

    async def _filled(self) -> bool:
        """Wait until the queue has a message. Returns False if the subscription is closed."""
        if not self._queue:
            self._adapt()
        idle = IDLE_SECONDS_FIRST
        while not self._queue and not self._is_closed:
            await self._poller.poll(self, self._batch)
            if not self._queue and not self._is_closed:
                await pause(idle, self._closed)
                idle = min(idle * 2, IDLE_SECONDS_MAX)
        if self._batch_began is None:
            self._batch_began, self._batch_count = asyncio.get_running_loop().time(), len(self._queue)
        return not self._is_closed

    def _adapt(self) -> None:
        """Adapt the size of the next poll to the time that the last messages took."""
        if self._batch_began is None:
            return
        took = asyncio.get_running_loop().time() - self._batch_began
        self._batch_began = None
        if took > BATCH_SECONDS:
            self._batch = max(1, int(self._batch_count * BATCH_SECONDS / took))
        elif self._batch_count >= self._batch:
            self._batch = min(self._batch * 2, self._batch_max)
