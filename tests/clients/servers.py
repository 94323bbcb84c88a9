"""In-memory broker behind a real listener."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.broker.broker import Broker
from headrace.clients.figg.client import FiggClient, FiggOptions
from headrace.net.counters import NetCounters
from headrace.net.listener import Listener, NetLimits
from headrace.net.protocol import ServedProtocol
from headrace.retry import Backoff
from headrace.sessions.figg.session import FiggSession, FiggSettings
from headrace.wire.figg import sniff
from tests.net.proxy import FaultProxy
from tests.sessions.figg.peer import WHO, Clock, SteeredEngine

PROMPT: Backoff = lambda attempt: 0.0 if attempt == 0 else 0.01  # noqa: E731


class FiggServer:
    """Figg on a free port; `restart` closes the listener and opens it again on the same one."""

    def __init__(self, settings: FiggSettings, limits: NetLimits) -> None:
        self.engine = SteeredEngine(Clock())
        self.broker = Broker(self.engine, clock=Clock())
        self.counters = NetCounters()
        self.sessions: list[FiggSession] = []
        self._limits = limits
        self._settings = settings
        self.listener: Listener

    def protocol(self) -> ServedProtocol:
        def remembered(link: object) -> FiggSession:
            self.sessions.append(FiggSession(self.broker, link, WHO, self._settings))  # type: ignore[arg-type]  # a Link, as ServedProtocol says
            return self.sessions[-1]

        return ServedProtocol("figg", sniff, remembered)

    async def open(self, port: int = 0) -> None:
        self.listener = await Listener.open("127.0.0.1", port, [self.protocol()], self._limits, self.counters)

    async def restart(self) -> None:
        port = self.listener.port
        await self.listener.drain(0.0)
        await self.open(port)

    @property
    def host(self) -> str:
        return self.listener.host

    @property
    def port(self) -> int:
        return self.listener.port

    async def values_in(self, topic: str) -> list[bytes | None]:
        fetched = await self.broker.fetch(WHO, topic, 0, 0, bytes_max=1 << 30)
        return [value for batch in fetched.batches for value in batch.values()]


@asynccontextmanager
async def figg_server(settings: FiggSettings = FiggSettings(), limits: NetLimits = NetLimits()) -> AsyncIterator[FiggServer]:
    server = FiggServer(settings, limits)
    await server.broker.open()
    await server.open()
    try:
        yield server
    finally:
        server.engine.failure = None
        server.engine.may_create.set()
        server.engine.release()
        await server.listener.drain(0.0)
        await server.broker.close()


@asynccontextmanager
async def figg_client(server: FiggServer | FaultProxy, options: FiggOptions = FiggOptions(backoff=PROMPT)) -> AsyncIterator[FiggClient]:
    client = await FiggClient.connect(server.host, server.port, options)
    try:
        yield client
    finally:
        client.abandon()
