"""A Figg session on a real broker, with a link and an engine that do as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from headrace.broker.authorizer import Authorize, Principal, allow_all
from headrace.broker.broker import Broker
from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import Ack, Appended, Topic, TopicConfig, Write
from headrace.engine.memory import MemoryEngine
from headrace.errors import BrokerError
from headrace.records import RecordBatch
from headrace.sessions.figg.session import FiggSession, FiggSettings
from headrace.wire.figg import AckBatch, Attached, DataBatch, ServerMessage, client_decoder

WHO = Principal("tester", "figg")
WAIT_SECONDS = 300.0


class Clock:
    """Unix ms that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now


class SteeredEngine(MemoryEngine):
    """A disk that takes as long as the test wants, or fails."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.is_holding = False
        self.may_create = asyncio.Event()
        self.may_create.set()
        self.failure: BrokerError | None = None

    def _flush(self) -> None:
        if not self.is_holding:
            super()._flush()

    def release(self) -> None:
        self.is_holding = False
        self._flush()

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        if self.failure is None:
            return super().append(writes, ack=ack, urgent=urgent, owned=owned)
        future: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()
        future.set_exception(self.failure)
        return future

    async def create_topic(self, name: str, partitions: int, config: TopicConfig, *, internal: bool = False) -> Topic:
        await self.may_create.wait()
        return await super().create_topic(name, partitions, config, internal=internal)


class TestLink:
    """Takes everything at once unless it is `clogged`; then it counts what waits."""

    __test__ = False
    peer = "127.0.0.1:1"

    def __init__(self) -> None:
        self.sent = b""
        self.is_clogged = False
        self.waiting_bytes = 0
        self.pauses = 0
        self.closed: tuple[str, bool] | None = None
        self.pause_count = 0

    def send(self, frames: bytes) -> None:
        assert self.closed is None, "a session sends nothing after it closed its link"
        self.sent += frames
        if self.is_clogged:
            self.waiting_bytes += len(frames)

    def close(self, reason: str, *, error: bool = True) -> None:
        if self.closed is None:
            self.closed = reason, error

    def pause_reading(self) -> None:
        self.pauses += 1
        self.pause_count += 1

    def resume_reading(self) -> None:
        assert self.pauses > 0
        self.pauses -= 1

    @property
    def unsent_bytes(self) -> int:
        return self.waiting_bytes


class Peer:
    """Messages as a client sees them."""

    def __init__(self, broker: Broker, engine: SteeredEngine, clock: Clock, settings: FiggSettings) -> None:
        self.broker, self.engine, self.clock = broker, engine, clock
        self.link = TestLink()
        self.session = FiggSession(broker, self.link, WHO, settings)
        self._decoder = client_decoder()
        self._read = 0
        self.messages: list[ServerMessage] = []

    def say(self, *frames: bytes) -> None:
        self.session.receive(b"".join(frames))

    def look(self) -> list[ServerMessage]:
        """Everything the session has sent so far."""
        self.messages += self._decoder.feed(self.link.sent[self._read :])
        self._read = len(self.link.sent)
        return self.messages

    def records(self, topic: str) -> list[tuple[int, bytes]]:
        """(Figg offset, value) of all DATA for a topic."""
        record_batches = [message for message in self.look() if isinstance(message, DataBatch) and message.topic == topic]
        return [pair for record_batch in record_batches for pair in zip(record_batch.offsets, record_batch.values, strict=True)]

    def acks(self) -> list[int]:
        return [seq for message in self.look() if isinstance(message, AckBatch) for seq in message.seqs]

    def attached(self) -> list[Attached]:
        return [message for message in self.look() if isinstance(message, Attached)]

    def is_closed(self) -> bool:
        return self.link.closed is not None

    def is_refused(self) -> bool:
        """Closed, and not as connections usually are."""
        return self.link.closed is not None and self.link.closed[1]

    def reason(self) -> str:
        return "" if self.link.closed is None else self.link.closed[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():  # noqa: ASYNC110  (there is no event for "the session has answered")
                await asyncio.sleep(0)

    async def settle(self) -> None:
        """Let everything happen that can happen without the outside world."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def stored(self, topic: str, values: list[bytes | None]) -> None:
        """Put records there by another way."""
        await self.broker.ensure_topic(WHO, topic)
        await self.broker.publish(WHO, topic, RecordBatch(values, keys=[b"k"] * len(values)), partition=0)

    async def values_in(self, topic: str) -> list[bytes | None]:
        fetched = await self.broker.fetch(WHO, topic, 0, 0, bytes_max=1 << 30)
        return [value for batch in fetched.batches for value in batch.values()]


@asynccontextmanager
async def figg_peer(
    settings: FiggSettings = FiggSettings(), *, broker_settings: BrokerSettings = BrokerSettings(), authorize: Authorize = allow_all
) -> AsyncIterator[Peer]:
    clock = Clock()
    engine = SteeredEngine(clock)
    broker = Broker(engine, clock=clock, settings=broker_settings, authorize=authorize)
    await broker.open()
    peer = Peer(broker, engine, clock, settings)
    try:
        yield peer
    finally:
        peer.session.lost()
        engine.failure = None
        engine.release()
        await broker.close()
