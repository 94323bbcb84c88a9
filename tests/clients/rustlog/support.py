"""A RustLog server in this process, and a scripted one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from headrace.clients.rustlog.client import RustLogClient, RustLogOptions
from headrace.net.listener import Listener
from headrace.net.protocol import ServedProtocol
from headrace.sessions.rustlog.session import RustLogSession
from headrace.wire.rustlog import Dialect, Received, Reply, Request, RequestDecoder, encode_reply, sniff
from headrace.wire.rustlog import messages as m
from tests.sessions.rustlog.support import WHO, ListenerContext, running_server

FAST = RustLogOptions(backoff=lambda attempt: 0.01 if attempt else 0.0, poll_seconds_min=0.001, poll_seconds_max=0.01)
WAIT_SECONDS = 300


@dataclass
class Server:
    """In-memory broker on a real socket."""

    home: ListenerContext
    listener: Listener
    port: int

    async def client(self, options: RustLogOptions = FAST) -> RustLogClient:
        return await RustLogClient.connect("127.0.0.1", self.port, options)

    def cut(self) -> None:
        """End every connection; the port stays open."""
        for connection in list(self.listener._connections):
            connection.abort("cut by the test")

    def stop(self) -> None:
        self.listener.close()

    async def start_again(self) -> None:
        self.listener = await _listen(self.home, self.port)


async def _listen(home: ListenerContext, port: int) -> Listener:
    protocol = ServedProtocol("rustlog", sniff, lambda link: RustLogSession(link, home.broker, WHO, home.context))
    return await Listener.open("127.0.0.1", port, [protocol])


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    async with running_server() as home:
        listener = await _listen(home, 0)
        server = Server(home, listener, listener.port)
        try:
            yield server
        finally:
            server.stop()


Answer: TypeAlias = Callable[[Request], Reply | bytes | None]
"""Reply to a request, bytes to send instead (none: stay silent), or None: close the connection."""


@dataclass
class Script:
    """Scripted server that keeps the received requests."""

    answer: Answer
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    _server: asyncio.Server | None = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        decoder, is_silent = RequestDecoder(), False
        try:
            while data := await reader.read(1 << 16):
                for incoming in decoder.feed(data):
                    assert isinstance(incoming, Received)
                    reply = self._reply(incoming)
                    if reply is None:
                        return
                    is_silent = is_silent or not reply
                    writer.write(b"" if is_silent else reply)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _reply(self, incoming: Received) -> bytes | None:
        if isinstance(incoming.request, m.Ping):
            return encode_reply(incoming.dialect, m.Pong())
        self.requests.append(incoming.request)
        reply = self.answer(incoming.request)
        return reply if isinstance(reply, bytes) or reply is None else encode_reply(incoming.dialect, reply)


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[Script]:
    script = Script(answer)
    server = await asyncio.start_server(script._serve, "127.0.0.1", 0)
    script.port = server.sockets[0].getsockname()[1]
    try:
        yield script
    finally:
        server.close()


def speaking(dialect: Dialect, options: RustLogOptions = FAST) -> RustLogOptions:
    return replace(options, dialect=dialect)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110  (the condition depends on a socket)
            await asyncio.sleep(0.002)
