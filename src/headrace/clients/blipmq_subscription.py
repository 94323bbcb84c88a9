"""A topic followed over BlipMQ: the client polls when the user wants more, and as much as the user can handle in time.

The server waits only a moment for an ACK (100 ms unless its operator chose otherwise), then delivers again, and after three times
gives up. So messages must not lie about here: polling starts with one message at a time, doubles while the user keeps up, and
falls back as soon as it takes longer than `BATCH_SECONDS` to get through what one poll has brought.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

AckMode: TypeAlias = Literal["explicit", "auto"]
"""`auto` acknowledges a delivery when the next one is asked for: by then the user is done with it."""

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


@dataclass(slots=True)
class Delivery:
    """One message. A QoS 0 message has the tag 0 and needs no ACK."""

    topic: str
    value: bytes
    tag: int
    _ack: Callable[[], bool]

    def ack(self) -> bool:
        """Done with it. False: the subscription was made anew since, and the message may come again."""
        return self._ack()


@dataclass(slots=True)
class DeliveryRun:
    """Adjacent messages, column by column: for whoever has many to handle."""

    topic: str
    values: list[bytes]
    tags: list[int]
    """0 where no ACK is needed."""
    _ack: Callable[[], bool]

    def __len__(self) -> int:
        return len(self.values)

    def ack(self) -> bool:
        """Done with all of them; False as for a single one."""
        return self._ack()


class Subscription:
    """An asynchronous iterator of deliveries. Made by `BlipMqClient.subscribe`."""

    def __init__(self, poller: Poller, topic: str, qos: int, *, ack: AckMode, batch_max: int) -> None:
        self.topic, self.qos = topic, qos
        self.id: int | None = None
        """The server's id; None while it is being asked for one."""
        self.restarts = 0
        """How often the server had forgotten the subscription, so that it began anew and may have missed messages."""
        self._poller = poller
        self._mode = ack
        self._batch, self._batch_max = 1, batch_max
        self._batch_began: float | None = None
        self._batch_count = 0
        self._queue: dict[int, bytes] = {}
        """By tag, in order: what comes again while it still waits here is the same message. QoS 0 has no tags; these count down from 0."""
        self._untagged = 0
        self._open_ack: Callable[[], bool] | None = None
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
        self._settle_previous()
        if not await self._filled():
            raise StopAsyncIteration
        tag = next(iter(self._queue))
        delivery = Delivery(self.topic, self._queue.pop(tag), max(tag, 0), self._acknowledger([tag]))
        if self._mode == "auto":
            self._open_ack = delivery.ack
        return delivery

    async def runs(self) -> AsyncIterator[DeliveryRun]:
        """Messages as they come, in runs: the fast way. Do not mix with iterating over single messages."""
        while True:
            self._settle_previous()
            if not await self._filled():
                return
            queue, self._queue = self._queue, {}
            run = DeliveryRun(self.topic, list(queue.values()), [max(tag, 0) for tag in queue], self._acknowledger(list(queue)))
            if self._mode == "auto":
                self._open_ack = run.ack
            yield run

    def close(self) -> None:
        """Stop following the topic. The iteration ends; with automatic acknowledgement the last delivery counts as done."""
        self._settle_previous()
        self.stop()

    # The rest.

    def _settle_previous(self) -> None:
        if self._open_ack is not None:
            self._open_ack()
            self._open_ack = None

    def _acknowledger(self, tags: list[int]) -> Callable[[], bool]:
        id = self.id
        owed = [tag for tag in tags if tag > 0]

        def ack() -> bool:
            if not owed:
                return True
            if id != self.id:
                return False
            for tag in owed:
                self._queue.pop(tag, None)  # it came again while the user was at it
            self._poller.acknowledge(self, list(owed))
            owed.clear()
            return True

        return ack

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
