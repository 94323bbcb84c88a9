"""A QUIC listener with test sessions, and a client without a protocol."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.net.counters import NetCounters
from headrace.net.quic.connection import Windows
from headrace.net.quic.endpoint import ClientEndpoint, ClientTls, ServerTls, fingerprint
from headrace.net.quic.listener import QuicLimits, QuicListener, QuicProtocol
from headrace.server.quic import self_signed
from headrace.sessions.contract import Link

ALPN = "test"
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


class Echo:
    """A session that records its input and echoes it, unless it is mute."""

    def __init__(self, link: Link, is_mute: bool) -> None:
        self.link, self.is_mute = link, is_mute
        self.heard = bytearray()
        self.calls: list[str] = []

    def receive(self, data: bytes) -> None:
        self.heard += data
        if not self.is_mute:
            self.link.send(data)

    def finished(self) -> None:
        self.calls.append("finished")
        self.link.close("finished", error=False)

    def drained(self) -> None:
        self.calls.append("drained")

    def closing(self) -> None:
        self.calls.append("closing")
        self.link.close("draining", error=False)

    def lost(self) -> None:
        self.calls.append("lost")


class Client:
    """Records every callback."""

    def __init__(self, endpoint: ClientEndpoint) -> None:
        self.endpoint, self.carrier = endpoint, endpoint.carrier
        self.is_answering_pings = True
        self.is_taking = True
        self.pings = 0
        self.heard: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.resets: list[int] = []
        self.reason: str | None = None
        self.up = asyncio.Event()
        self.carrier.attach(self)

    def connected(self) -> None:
        self.up.set()

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        if stream & 3 == 1:
            self.pings += finished
            if self.is_answering_pings and finished:
                self.carrier.send(stream, b"pong", finish=True)
            return
        if self.is_taking:
            self.carrier.taken(stream, len(data))
        self.heard.setdefault(stream, bytearray()).extend(data)
        if finished:
            self.ended.add(stream)

    def reset(self, stream: int) -> None:
        self.resets.append(stream)

    def progressed(self) -> None: ...

    def lost(self, reason: str) -> None:
        self.reason = reason
        self.up.set()

    def said(self, stream: int) -> bytes:
        """Return the bytes received on the stream so far."""
        return bytes(self.heard.get(stream, b""))

    def say(self, data: bytes, *, finish: bool = False) -> int:
        stream = self.carrier.open_stream()
        self.carrier.send(stream, data, finish=finish)
        return stream


class Server:
    def __init__(self, tls: ServerTls, limits: QuicLimits) -> None:
        self.tls, self.limits = tls, limits
        self.counters = NetCounters()
        self.sessions: list[Echo] = []
        self.is_mute = self.needs_login = False
        self.listener: QuicListener
        self._clients: list[Client] = []

    def open_session(self, link: Link) -> Echo:
        self.sessions.append(Echo(link, self.is_mute))
        return self.sessions[-1]

    async def open(self) -> None:
        protocol = QuicProtocol("test", ALPN, self.open_session, b"ping", 3, lambda: self.needs_login)
        self.listener = await QuicListener.open("127.0.0.1", 0, protocol, self.tls, self.limits, self.counters)

    async def client(
        self, port: int | None = None, *, alpn: str = ALPN, tls: ClientTls | None = None, windows: Windows = Windows()
    ) -> Client:
        endpoint = await ClientEndpoint.open(
            "127.0.0.1",
            port or self.listener.port,
            alpn=alpn,
            tls=tls or ClientTls(fingerprint=fingerprint(self.tls)),
            windows=windows,
            idle_seconds=10,
        )
        client = Client(endpoint)
        self._clients.append(client)
        endpoint.start()
        async with asyncio.timeout(300):
            await client.up.wait()
        return client

    def close(self) -> None:
        for client in self._clients:
            client.carrier.close(0, "")
            client.carrier.give_up("test is over")
            client.endpoint.close()
        self.listener.close()


@asynccontextmanager
async def quic_server(directory: Path, limits: QuicLimits = QuicLimits()) -> AsyncIterator[Server]:
    server = Server(self_signed(directory, now=NOW), limits)
    await server.open()
    try:
        yield server
    finally:
        server.close()
