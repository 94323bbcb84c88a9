"""A broker in memory, a clock that is turned by hand, and peers without sockets."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from headrace.broker.authorizer import Authorize, Principal, allow_all
from headrace.broker.broker import Broker
from headrace.broker.groups.subscriptions import SubscriptionBook
from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import Ack, Appended, Write
from headrace.engine.memory import MemoryEngine
from headrace.errors import BrokerError
from headrace.sessions.blipmq.session import BlipMqSession
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.sessions.blipmq.subscriptions import Subscriptions
from headrace.wire.blipmq import AckBatch, Decoder, Message, Nack, Pong, PublishBatch, encoder
from tests.sessions.wire import Wire

KEYS = {b"dev-key": Principal("dev", "blipmq"), b"ops-key": Principal("ops", "blipmq")}
FENCE = 1 << 60
"""The correlation id of the PING that ends an exchange: replies come in order, so what has not come before its PONG never will."""


class Clockwork:
    """Unix ms and timers that only `advance` moves."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000
        self._timers: list[tuple[float, int, Callable[[], object], list[bool]]] = []
        self._count = 0

    def __call__(self) -> int:
        return self.now

    def later(self, seconds: float, call: Callable[[], object]) -> _Timer:
        self._count += 1
        alive = [True]
        heapq.heappush(self._timers, (self.now + seconds * 1000, self._count, call, alive))
        return _Timer(alive)

    async def advance(self, ms: int) -> None:
        """Let the time pass, timer by timer, and let what they started come to rest."""
        end = self.now + ms
        while self._timers and self._timers[0][0] <= end:
            at, _, call, alive = heapq.heappop(self._timers)
            self.now = max(self.now, round(at))
            if alive[0]:
                call()
            await rest()
        self.now = end
        await rest()


class _Timer:
    def __init__(self, alive: list[bool]) -> None:
        self._alive = alive

    def cancel(self) -> None:
        self._alive[0] = False


async def rest() -> None:
    """Run enough turns of the loop for all work that waits for neither time nor disk."""
    for _ in range(50):
        await asyncio.sleep(0)


class Peer:
    """A client's end of one connection."""

    def __init__(self, session: BlipMqSession, wire: Wire) -> None:
        self.session, self.wire = session, wire
        self._decoder = Decoder()
        self._taken = 0

    def heard(self) -> list[Message]:
        """Return what was received since the last call."""
        fresh = bytes(self.wire.sent[self._taken :])
        self._taken += len(fresh)
        return list(self._decoder.feed(fresh))

    async def exchange(self, frames: bytes) -> list[Message]:
        """Send, and return every reply."""
        self.session.receive(frames + encoder.ping(FENCE))
        return await self.answers()

    async def answers(self) -> list[Message]:
        """Every reply up to that of the fence."""
        found = self.heard()
        async with asyncio.timeout(300):
            while not found or found[-1] not in (Pong(FENCE), Nack(FENCE, 401, "unauthenticated")):
                assert self.wire.closed is None, f"closed: {self.wire.closed}"
                self.wire.changed.clear()
                await self.wire.changed.wait()
                found += self.heard()
        return found[:-1]

    async def closed(self) -> tuple[str, bool]:
        async with asyncio.timeout(300):
            while self.wire.closed is None:
                self.wire.changed.clear()
                await self.wire.changed.wait()
        return self.wire.closed

    async def login(self, key: bytes = b"dev-key") -> Peer:
        assert await self.exchange(encoder.hello(1) + encoder.auth(2, key)) == [AckBatch(0, [1, 2])]
        return self

    async def subscribe(self, topic: str, qos: int = 1) -> int:
        (reply,) = await self.exchange(encoder.subscribe(3, topic, qos))
        assert isinstance(reply, AckBatch) and reply.cids == [3]
        return reply.subscription

    async def publish(self, topic: str, *values: bytes, qos: int = 1) -> None:
        assert await self.exchange(encoder.publishes(qos, topic, range(len(values)), values)) == []

    async def poll(self, subscription: int, count: int = 1) -> list[tuple[int, int, bytes]]:
        """(qos, cid, value) of each delivery."""
        found: list[tuple[int, int, bytes]] = []
        for message in await self.exchange(encoder.polls(subscription, range(1_000, 1_000 + count))):
            assert isinstance(message, PublishBatch), message
            found += [(message.qos, cid, value) for cid, value in zip(message.cids, message.values, strict=True)]
        return found


class Disk(MemoryEngine):
    """An engine whose disk can be slow (`hold`, `release`) or broken (`failure`)."""

    failure: BrokerError | None = None
    _held = False

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        self._flush()

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        if self.failure is None:
            return super().append(writes, ack=ack, urgent=urgent, owned=owned)
        failed: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()
        failed.set_exception(self.failure)
        return failed

    def _flush(self) -> None:
        if not self._held:
            super()._flush()


class ListenerContext:
    """A broker with its subscriptions, which can be restarted over the same engine."""

    def __init__(self, settings: BlipMqSettings, broker_settings: BrokerSettings, authorize: Authorize) -> None:
        self.clock = Clockwork()
        self.engine = Disk(clock=self.clock)
        self._settings, self._broker_settings, self._authorize = settings, broker_settings, authorize
        self.broker: Broker
        self.subscriptions: Subscriptions

    async def open(self) -> None:
        self.broker = Broker(
            self.engine, clock=self.clock, settings=self._broker_settings, authorize=self._authorize, later=self.clock.later
        )
        await self.broker.open()
        book = SubscriptionBook(self.engine, "blipmq")
        self.subscriptions = Subscriptions(self.broker, book, clock=self.clock, settings=self._settings, later=self.clock.later)
        await self.subscriptions.open()

    async def close(self) -> None:
        await self.subscriptions.close()
        await self.broker.close()

    async def restart(self) -> None:
        await self.close()
        await self.open()

    def connect(self) -> Peer:
        wire = Wire()
        return Peer(BlipMqSession(wire, self.broker, self.subscriptions, verify_key=KEYS.get), wire)

    async def client(self, key: bytes = b"dev-key") -> Peer:
        return await self.connect().login(key)

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        """Return the contents of the log, read directly."""
        log = self.engine._find(topic, partition)
        return [value for batch in log.batches for value in batch.values()]


@asynccontextmanager
async def running_server(
    settings: BlipMqSettings = BlipMqSettings(), broker: BrokerSettings = BrokerSettings(), authorize: Authorize = allow_all
) -> AsyncIterator[ListenerContext]:
    built = ListenerContext(settings, broker, authorize)
    await built.open()
    try:
        yield built
    finally:
        await built.close()
