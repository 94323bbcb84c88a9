"""A broker in memory whose disk can be slow or broken, and FlyMQ peers without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from headrace.access.access import Access, AccessSettings
from headrace.broker.authorizer import Authorize, Principal, allow_all
from headrace.broker.broker import Broker
from headrace.broker.groups.members import SettlementPolicy
from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import Ack, Appended, Write
from headrace.engine.memory import MemoryEngine
from headrace.errors import BrokerError
from headrace.sessions.flymq.access import FlyMqAccess
from headrace.sessions.flymq.members import SHARED
from headrace.sessions.flymq.session import FlyMqSession, FlyMqSettings
from headrace.wire.flymq import Dialect, ReplyDecoder, decode_reply, encode_request
from headrace.wire.flymq.messages import Failure, ProduceBatch, RecordMetadataBatch, Reply, ReplyFrame, Request
from tests.access.harness import ADMIN_PASSWORD, bytes_in_order, quick_passwords
from tests.sessions.wire import Wire

NOW = 1_700_000_000_000
DEV = Principal("dev", "flymq")


class Disk(MemoryEngine):
    """An engine whose user topics can be held back (`hold`, `release`) or fail. The broker's own tables never do."""

    failure: BrokerError | None = None

    def __init__(self, *, clock: Callable[[], int]) -> None:
        super().__init__(clock=clock)
        self._held: dict[str, list[Callable[[], None]]] = {}

    def hold(self, topic: str) -> None:
        self._held[topic] = []

    def release(self, topic: str) -> None:
        for go_on in self._held.pop(topic):
            go_on()

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        answer: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()
        if self.failure is not None and not any(write.topic.startswith("__") for write in writes):
            answer.set_exception(self.failure)
            return answer
        staged = super().append(writes, ack=ack, urgent=urgent, owned=owned)
        waiting = [self._held[write.topic] for write in writes if write.topic in self._held]
        if not waiting:
            return staged

        def go_on() -> None:
            staged.add_done_callback(lambda done: answer.set_result(done.result()))

        waiting[0].append(go_on)
        return answer


class Peer:
    """A client's end of one connection."""

    def __init__(self, session: FlyMqSession, wire: Wire) -> None:
        self.session, self.wire = session, wire
        self._decoder = ReplyDecoder()
        self._taken = 0
        self._rows: list[Reply | ReplyFrame] = []

    def send(self, *requests: Request) -> None:
        self.session.receive(b"".join(map(encode_request, requests)))

    def heard(self) -> list[Reply | ReplyFrame]:
        """Replies received and not taken yet: RecordMetadata one by one, the rest undecoded."""
        fresh = bytes(self.wire.sent[self._taken :])
        self._taken += len(fresh)
        for event in self._decoder.feed(fresh):
            if isinstance(event, RecordMetadataBatch):
                columns = (event.partitions, event.offsets, event.timestamps, event.key_sizes, event.value_sizes)
                self._rows += [RecordMetadataBatch(event.topic, *([field] for field in row)) for row in zip(*columns, strict=True)]
            else:
                assert isinstance(event, ReplyFrame), event
                self._rows.append(event)
        return self._rows

    async def replies(self, count: int, dialect: Dialect = Dialect.SPEC) -> list[Reply]:
        """The next so many replies."""
        async with asyncio.timeout(300):
            while len(self.heard()) < count:
                assert self.wire.closed is None, f"closed: {self.wire.closed}"
                self.wire.changed.clear()
                await self.wire.changed.wait()
        taken, self._rows = self._rows[:count], self._rows[count:]
        return [decode_reply(reply, dialect) if isinstance(reply, ReplyFrame) else reply for reply in taken]

    async def exchange(self, *requests: Request, dialect: Dialect = Dialect.SPEC) -> list[Reply]:
        """All at once; every reply, in order."""
        self.send(*requests)
        return await self.replies(sum(len(one) if isinstance(one, ProduceBatch) else 1 for one in requests), dialect)

    async def one(self, request: Request, dialect: Dialect = Dialect.SPEC) -> Reply:
        (reply,) = await self.exchange(request, dialect=dialect)
        return reply

    async def refused(self, request: Request, dialect: Dialect = Dialect.SPEC) -> str:
        """The text of the ERROR that answers it."""
        reply = await self.one(request, dialect)
        assert isinstance(reply, Failure), reply
        return reply.message

    async def closed(self) -> tuple[str, bool]:
        async with asyncio.timeout(300):
            while self.wire.closed is None:
                self.wire.changed.clear()
                await self.wire.changed.wait()
        return self.wire.closed


class ListenerContext:
    """A broker and its FlyMQ protocol."""

    def __init__(self, settings: BrokerSettings, authorize: Authorize, access: AccessSettings) -> None:
        self.now = NOW
        self.engine = Disk(clock=lambda: self.now)
        self.access = Access(
            self.engine, clock=lambda: self.now, random_bytes=bytes_in_order(), settings=access, passwords=quick_passwords()
        )
        self.broker = Broker(
            self.engine,
            clock=lambda: self.now,
            settings=settings,
            authorize=lambda *question: authorize(*question) and self.access.authorize(*question),
            audit_hook=self.access.record_decision,
            random_bytes=bytes_in_order(),
        )
        self.access.listen(self.broker.access_changed)

    def peer(
        self, dialect: Dialect = Dialect.SPEC, who: Principal = DEV, address: str = Wire.peer, shared: SettlementPolicy = SHARED
    ) -> Peer:
        wire = Wire()
        wire.peer = address
        settings = FlyMqSettings(dialect, shared=shared)
        return Peer(FlyMqSession(wire, self.broker, who, settings, FlyMqAccess(self.access, who, address)), wire)


@asynccontextmanager
async def running_server(
    settings: BrokerSettings = BrokerSettings(), authorize: Authorize = allow_all, access: AccessSettings = AccessSettings()
) -> AsyncIterator[ListenerContext]:
    built = ListenerContext(settings, authorize, access)
    await built.broker.open()
    await built.access.open(ADMIN_PASSWORD)
    try:
        yield built
    finally:
        await built.access.close()
        await built.broker.close()


async def rest() -> None:
    """Run enough turns of the loop for all work that waits for neither time nor disk."""
    for _ in range(50):
        await asyncio.sleep(0)


def placed(reply: Reply) -> tuple[int, int]:
    """(partition, offset) of a RecordMetadata."""
    assert isinstance(reply, RecordMetadataBatch), reply
    return reply.partitions[0], reply.offsets[0]
