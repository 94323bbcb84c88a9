"""In-memory broker behind a real QUIC listener, and Fujin clients."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.clients.fujin.client import FujinClient, FujinOptions
from headrace.engine.memory import MemoryEngine
from headrace.net.counters import NetCounters
from headrace.net.quic.endpoint import fingerprint
from headrace.net.quic.listener import QuicLimits, QuicListener, QuicProtocol
from headrace.retry import Backoff
from headrace.server.quic import self_signed
from headrace.sessions.contract import StreamedLink
from headrace.sessions.fujin.session import PING_ERROR_CODE, FujinSession
from headrace.sessions.fujin.settings import FujinSettings
from headrace.sessions.fujin.writer import WriterIds
from headrace.wire.fujin import ALPN, encode
from tests.net.quic_peer import NOW
from tests.net.udp_proxy import UdpProxy

WHO = Principal("tester", "fujin")
PROMPT: Backoff = lambda attempt: 0.0 if attempt == 0 else 0.01  # noqa: E731


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class FujinServer:
    """Fujin on a free port; `restart` closes the listener and opens it again on the same one, with the same broker."""

    def __init__(self, directory: Path, settings: FujinSettings, limits: QuicLimits) -> None:
        self.tls = self_signed(directory, now=NOW)
        self.broker = Broker(MemoryEngine(clock=now_ms), clock=now_ms)
        self.counters = NetCounters()
        self.sessions: list[FujinSession] = []
        self._settings, self._limits = settings, limits
        self._ids = WriterIds()
        self.listener: QuicListener

    def open_session(self, link: StreamedLink) -> FujinSession:
        self.sessions.append(FujinSession(self.broker, link, WHO, self._ids, self._settings))
        return self.sessions[-1]

    async def open(self, port: int = 0) -> None:
        protocol = QuicProtocol("fujin", ALPN, self.open_session, encode.PING, PING_ERROR_CODE)
        self.listener = await QuicListener.open("127.0.0.1", port, protocol, self.tls, self._limits, self.counters)

    async def restart(self, drain_seconds: float = 0.0) -> int:
        port = self.listener.port
        late = await self.listener.drain(drain_seconds)
        await self.open(port)
        return late

    @property
    def host(self) -> str:
        return self.listener.host

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.tls)

    async def values_in(self, topic: str) -> list[bytes | None]:
        fetched = await self.broker.fetch(WHO, topic, 0, 0, bytes_max=1 << 30)
        return [value for batch in fetched.batches for value in batch.values()]


@asynccontextmanager
async def fujin_server(
    directory: Path, settings: FujinSettings = FujinSettings(), limits: QuicLimits = QuicLimits()
) -> AsyncIterator[FujinServer]:
    server = FujinServer(directory, settings, limits)
    await server.broker.open()
    await server.open()
    try:
        yield server
    finally:
        server.listener.close()
        await server.broker.close()


@asynccontextmanager
async def fujin_client(server: FujinServer | UdpProxy, options: FujinOptions = FujinOptions(backoff=PROMPT)) -> AsyncIterator[FujinClient]:
    client = await FujinClient.connect(server.host, server.port, options)
    try:
        yield client
    finally:
        client.abandon()
