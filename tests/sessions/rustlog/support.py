"""A broker in memory, and RustLog peers without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.broker.authorizer import Authorize, Principal, allow_all
from headrace.broker.broker import Broker
from headrace.broker.settings import BrokerSettings
from headrace.engine.memory import MemoryEngine
from headrace.sessions.rustlog.session import RustLogContext, RustLogSession, RustLogSettings
from headrace.wire.rustlog import Dialect, ReplyDecoder, encode_request
from headrace.wire.rustlog import messages as m
from tests.sessions.wire import Wire

WHO = Principal("tester", "rustlog")
NOW = 1_700_000_000_000
WAIT_SECONDS = 300


class Peer:
    """A client's end of one connection."""

    def __init__(self, session: RustLogSession, wire: Wire) -> None:
        self.session, self.wire = session, wire
        self._decoder = ReplyDecoder()
        self._taken = 0
        self._heard: list[m.Reply] = []

    def send(self, frames: bytes) -> None:
        self.session.receive(frames)

    async def replies(self, count: int) -> list[m.Reply]:
        """The next replies, as soon as there are so many."""
        async with asyncio.timeout(WAIT_SECONDS):
            while len(self._take()) < count:
                self.wire.changed.clear()
                await self.wire.changed.wait()
        taken, self._heard = self._heard[:count], self._heard[count:]
        return taken

    def heard(self) -> list[m.Reply]:
        """Return the replies received so far that `replies` has not returned."""
        taken, self._heard = self._take(), []
        return taken

    def _take(self) -> list[m.Reply]:
        fresh = bytes(self.wire.sent[self._taken :])
        self._taken += len(fresh)
        self._heard += self._decoder.feed(fresh)
        return self._heard

    async def exchange(self, dialect: Dialect, request: m.Request) -> m.Reply:
        self.send(encode_request(dialect, request))
        (reply,) = await self.replies(1)
        return reply

    async def exchange_text(self, text: str) -> str:
        """Send a JSON request and return the bytes of its reply as text."""
        start = len(self.wire.sent)
        self.send(len(text.encode()).to_bytes(4, "big") + text.encode())
        await self.replies(1)
        return self.wire.sent[start + 4 :].decode()

    async def exchange_hex(self, text: str) -> str:
        """Send a binary frame and return the bytes of its reply in hex."""
        start = len(self.wire.sent)
        self.send(bytes.fromhex(text))
        await self.replies(1)
        return bytes(self.wire.sent[start:]).hex()

    async def closed(self) -> tuple[str, bool]:
        async with asyncio.timeout(WAIT_SECONDS):
            while self.wire.closed is None:
                self.wire.changed.clear()
                await self.wire.changed.wait()
        return self.wire.closed


@dataclass
class ListenerContext:
    """A broker and the shared state of its RustLog connections."""

    engine: MemoryEngine
    broker: Broker
    context: RustLogContext
    peers: list[Peer] = field(default_factory=list)

    def connect(self, who: Principal = WHO) -> Peer:
        wire = Wire()
        peer = Peer(RustLogSession(wire, self.broker, who, self.context), wire)
        self.peers.append(peer)
        return peer


@asynccontextmanager
async def running_server(
    *, settings: RustLogSettings | None = None, authorize: Authorize = allow_all, broker_settings: BrokerSettings | None = None
) -> AsyncIterator[ListenerContext]:
    """Ends every connection before the broker."""
    engine = MemoryEngine(clock=lambda: NOW)
    broker = Broker(engine, clock=lambda: NOW, settings=broker_settings or BrokerSettings(), authorize=authorize)
    await broker.open()
    made = ListenerContext(engine, broker, RustLogContext(settings, ticks_ns=iter(range(0, 1 << 62, 1_000)).__next__))
    try:
        yield made
    finally:
        for peer in made.peers:
            peer.session.lost()
        await broker.close()
