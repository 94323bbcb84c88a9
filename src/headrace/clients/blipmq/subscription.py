"""A topic followed over BlipMQ: the client polls when the user wants more, and as much as the user can handle in time.

The server waits only a moment for an ACK (100 ms unless its operator chose otherwise), then delivers again, and after three times
gives up. So messages must not lie about here: polling starts with one message at a time, doubles while the user keeps up, and
falls back as soon as it takes longer than `BATCH_SECONDS` to get through what one poll has brought.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from headrace.clients.errors import NotSupported
from headrace.clients.messages import Gap, Message, MessageBatch, Settlement
from headrace.clients.unsupported import READERS

BATCH_SECONDS: Final = 0.05
"""How long the messages of one poll may take: half of the shortest time for an ACK."""
IDLE_SECONDS_FIRST: Final = 0.005
IDLE_SECONDS_MAX: Final = 0.05
"""Between two polls of an empty subscription."""


class Poller(Protocol):
    """What a subscription asks of its client."""

    def poll(self, subscription: Subscription, count: int) -> Awaitable[None]:
        """Ask for so many messages; done when all there were have been given to `arrived`."""

    def acknowledge(self, subscription: Subscription, tags: list[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Delivery(Message):
    """One message. A QoS 0 message has the tag 0 and needs no ACK; acknowledging it does nothing."""

    tag: int = 0
    subscription_id: int | None = None
    """What the server called the subscription when it delivered this: an ACK must name it."""


@dataclass(slots=True)
class DeliveryBatch(MessageBatch):
    """A run whose messages wait for an ACK."""

    tags: list[int] = field(default_factory=list)
    """0 where no ACK is needed."""
    _ack: Callable[[], bool] = lambda: True

    async def ack(self) -> bool:
        """Done with all of them; False as for a single one."""
        return self._ack()


class Subscription:
    """An asynchronous iterator of deliveries. Made by `BlipMqClient.subscribe`."""

    def __init__(self, poller: Poller, topic: str, qos: int, *, settlement: Settlement, batch_max: int) -> None:
        self.topic, self.qos = topic, qos
        self.gaps: list[Gap] = []
        """Empty: BlipMQ has no offsets."""
        self.id: int | None = None
        """The server's id; None while it is being asked for one."""
        self.restarts = 0
        """How often the server had forgotten the subscription, so that it began anew and may have missed messages."""
        self._poller = poller
        self._settlement = settlement
        self._batch, self._batch_max = 1, batch_max
        self._batch_began: float | None = None
        self._batch_count = 0
        self._queue: dict[int, bytes] = {}
        """By tag, in order: what comes again while it still waits here is the same message. QoS 0 has no tags; these count down from 0."""
        self._untagged = 0
        self._owed: dict[int, None] = {}
        """The tags of what was given to the user and not acknowledged, in order."""
        self._is_closed = False
        self._closed = asyncio.Event()

    # What the client tells us.

    def began(self, id: int) -> None:
        """The server has made it, for the first time or anew."""
        self.id = id

    def forgotten(self) -> None:
        """The server does not know it any more; what it delivered cannot be acknowledged, and is not given out."""
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
        """Nothing more will come, and nothing that waits is given out: the server delivers it to whoever polls next."""
        self._is_closed = True
        self._queue.clear()
        self._closed.set()

    # What the user does.

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
        """Messages as they come, in runs: the fast way. Do not mix with iterating over single messages."""
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
        """Done with everything that was given out."""
        self._settle(self.id, list(self._owed))

    async def ack(self, message: Message) -> bool:
        """Done with this one. False: the subscription was made anew since, and the message may come again."""
        assert isinstance(message, Delivery), "this subscription gave it out"
        return self._settle(message.subscription_id, [message.tag])

    async def nack(self, message: Message) -> bool:
        raise NotSupported("BlipMQ", "nack", "what is not acknowledged comes again after a while")

    def seek(self, offset: int, *, partition: int = 0) -> None:
        raise NotSupported("BlipMQ", "offsets", READERS)

    async def close(self) -> None:
        """Stop following the topic. The iteration ends; with automatic settlement the last delivery counts as done."""
        if self._settlement == "auto" and not self._is_closed:
            await self.commit()
        self.stop()

    # The rest.

    def _owe(self, tags: list[int]) -> None:
        self._owed.update((tag, None) for tag in tags if tag > 0)

    def _settle(self, id: int | None, tags: list[int]) -> bool:
        """A second ACK of the same delivery is not sent: the server would refuse it."""
        if id != self.id and any(tag > 0 for tag in tags):
            return False
        owed = [tag for tag in tags if tag in self._owed]
        for tag in owed:
            self._queue.pop(tag, None)  # it came again while the user was at it
            del self._owed[tag]
        if owed:
            self._poller.acknowledge(self, owed)
        return True

    async def _filled(self) -> bool:
        """Wait until there is something in the queue; False if there never will be."""
        if not self._queue:
            self._adapt()
        idle = IDLE_SECONDS_FIRST
        while not self._queue and not self._is_closed:
            await self._poller.poll(self, self._batch)
            if not self._queue and not self._is_closed:
                await self._rest(idle)
                idle = min(idle * 2, IDLE_SECONDS_MAX)
        if self._batch_began is None:
            self._batch_began, self._batch_count = asyncio.get_running_loop().time(), len(self._queue)
        return not self._is_closed

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            pass

    def _adapt(self) -> None:
        """The queue is empty: see how long its messages took, and ask for more or fewer of them next time."""
        if self._batch_began is None:
            return
        took = asyncio.get_running_loop().time() - self._batch_began
        self._batch_began = None
        if took > BATCH_SECONDS:
            self._batch = max(1, int(self._batch_count * BATCH_SECONDS / took))
        elif self._batch_count >= self._batch:
            self._batch = min(self._batch * 2, self._batch_max)
