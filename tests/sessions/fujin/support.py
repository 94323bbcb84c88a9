"""Fujin sessions on a broker whose time and disk the test turns by hand, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.broker import Principal
from headrace.broker.authorizer import Authorize, allow_all
from headrace.broker.settings import BrokerSettings
from headrace.sessions.fujin.session import FujinSession
from headrace.sessions.fujin.settings import FujinSettings
from headrace.sessions.fujin.writer import WriterIds
from headrace.wire.fujin import Fetched, MessageBatch, ReaderKind, ReplyDecoder, Request, ServerMessage, Settled, encode
from tests.broker.harness import Harness, turns
from tests.net.polling import until

WHO = Principal("tester", "fujin")


def cid(number: int) -> bytes:
    return number.to_bytes(4, "big")


class StreamLink:
    """Takes everything at once, unless it is clogged: then it counts what waits."""

    peer = "127.0.0.1:1#0"

    def __init__(self) -> None:
        self.sent = bytearray()
        self.closed: tuple[str, bool] | None = None
        self.pauses = 0
        self.is_clogged = False
        self.unsent_bytes = 0
        self.acknowledged: Callable[[], None] | None = None

    def send(self, frames: bytes) -> None:
        assert self.closed is None, "nothing is sent on a closed stream"
        self.sent += frames
        if self.is_clogged:
            self.unsent_bytes += len(frames)

    def close(self, reason: str, *, error: bool = True) -> None:
        assert self.closed is None, "a stream is closed once"
        self.closed = reason, error

    def when_acknowledged(self, callback: Callable[[], None]) -> None:
        if self.unsent_bytes:
            self.acknowledged = callback
        else:
            callback()

    def when_sent(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    def acknowledge(self) -> None:
        """Take everything that waits, as a peer that acknowledges it."""
        self.is_clogged, self.unsent_bytes = False, 0
        callback, self.acknowledged = self.acknowledged, None
        if callback is not None:
            callback()

    def pause_reading(self) -> None:
        self.pauses += 1

    def resume_reading(self) -> None:
        assert self.pauses > 0
        self.pauses -= 1


class Peer:
    """The client's end of one stream."""

    def __init__(self, open_session: Callable[[StreamLink], FujinSession], *, with_ids: bool = True) -> None:
        self.link = StreamLink()
        self.session = open_session(self.link)
        self._decoder = ReplyDecoder(with_ids=with_ids)
        self._seen = 0

    def say(self, frames: bytes) -> None:
        self.session.receive(frames)

    async def hears(self) -> list[ServerMessage]:
        """Return everything received since the last call, once the session is idle."""
        await turns()
        return self.heard()

    def heard(self) -> list[ServerMessage]:
        fresh, self._seen = bytes(self.link.sent[self._seen :]), len(self.link.sent)
        return list(self._decoder.feed(fresh))

    async def messages(self, count: int) -> list[tuple[bytes, bytes]]:
        """(id, value) of the next pushed messages."""
        found: list[tuple[bytes, bytes]] = []

        def enough() -> bool:
            for message in self.heard():
                assert isinstance(message, MessageBatch), message
                found.extend(zip(message.ids or [b""] * len(message.values), message.values, strict=True))
            return len(found) >= count

        await until(enough)
        assert len(found) == count
        return found

    async def fetches(self, count: int, number: int = 1) -> list[tuple[bytes, bytes]]:
        self.say(encode.fetch(cid(number), count))
        found: list[ServerMessage] = []

        def answered() -> bool:
            found.extend(self.heard())
            return bool(found)

        await until(answered)
        (reply,) = found
        assert isinstance(reply, Fetched) and reply.cid == cid(number)
        return list(zip(reply.ids or [b""] * len(reply.values), reply.values, strict=True))

    async def settles(self, request: Request, ids: list[bytes]) -> list[bool]:
        self.say(encode.settle(request, cid(9), ids))
        (reply,) = await self.hears()
        assert isinstance(reply, Settled) and reply.ids == ids and reply.cid == cid(9)
        return [error is None for error in reply.errors]


class ServedProtocol:
    """Opens sessions with the shared state of a protocol."""

    def __init__(self, env: Harness, settings: FujinSettings) -> None:
        self.env, self.settings = env, settings
        self.ids = WriterIds()
        self.peers: list[Peer] = []

    def peer(self, *, with_ids: bool = True) -> Peer:
        peer = Peer(lambda link: FujinSession(self.env.broker, link, WHO, self.ids, self.settings), with_ids=with_ids)
        self.peers.append(peer)
        return peer

    async def writer(self, id: int | bytes | None = None) -> Peer:
        peer = self.peer()
        peer.say(encode.connect_writer(id))
        return peer

    async def reader(self, name: str = "t", kind: ReaderKind = ReaderKind.PUSH, *, auto_commit: bool = False) -> Peer:
        peer = self.peer(with_ids=not auto_commit)
        peer.say(encode.connect_reader(kind, auto_commit, name))
        await until(lambda: bytes(peer.link.sent[:2]) == b"\x01\x00")
        peer._seen = 2
        return peer


@asynccontextmanager
async def fujin_protocol(
    settings: FujinSettings = FujinSettings(), *, broker: BrokerSettings | None = None, authorize: Authorize = allow_all
) -> AsyncIterator[ServedProtocol]:
    env = Harness(broker, authorize)
    await env.broker.open()
    protocol = ServedProtocol(env, settings)
    try:
        yield protocol
    finally:
        env.engine.error = None
        env.engine.let_go()
        for peer in protocol.peers:
            peer.session.lost()
        await turns()
        await env.broker.close()
