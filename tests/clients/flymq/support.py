"""A FlyMQ server in this process, and a scripted one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.clients.flymq.client import FlyMqClient, FlyMqOptions
from headrace.net.listener import Listener
from headrace.net.protocol import ServedProtocol
from headrace.sessions.flymq.session import FlyMqSession, FlyMqSettings
from headrace.wire.flymq import Dialect, RequestDecoder, encode_reply, opcode_of, sniff
from headrace.wire.flymq import messages as m
from headrace.wire.flymq.advanced_messages import DelayedBatch, TxnBeginBatch, TxnWholeBatch
from tests.sessions.flymq.support import DEV, ListenerContext, running_server

FAST = FlyMqOptions(backoff=lambda attempt: 0.01 if attempt else 0.0, poll_seconds_min=0.001, poll_seconds_max=0.01)
WAIT_SECONDS = 300


@dataclass
class Server:
    """In-memory broker on a real socket."""

    home: ListenerContext
    listener: Listener
    port: int

    async def client(self, options: FlyMqOptions = FAST) -> FlyMqClient:
        return await FlyMqClient.connect("127.0.0.1", self.port, options)

    def cut(self) -> None:
        """End every connection; the port stays open."""
        for connection in list(self.listener._connections):
            connection.abort("cut by the test")

    def stop(self) -> None:
        self.listener.close()

    async def start_again(self) -> None:
        self.listener = await _listen(self.home, self.port, Dialect.SPEC)


async def _listen(home: ListenerContext, port: int, dialect: Dialect) -> Listener:
    protocol = ServedProtocol("flymq", sniff, lambda link: FlyMqSession(link, home.broker, DEV, FlyMqSettings(dialect)))
    return await Listener.open("127.0.0.1", port, [protocol])


@asynccontextmanager
async def serving(dialect: Dialect = Dialect.SPEC) -> AsyncIterator[Server]:
    async with running_server() as home:
        listener = await _listen(home, 0, dialect)
        server = Server(home, listener, listener.port)
        try:
            yield server
        finally:
            server.stop()


Answer: TypeAlias = Callable[[m.Request], m.Reply | bytes | None]
"""Reply to a request, bytes to send instead (none: stay silent), or None: close the connection."""


@dataclass
class Script:
    """Scripted server that keeps the received requests. It receives records one by one."""

    answer: Answer
    port: int = 0
    requests: list[m.Request] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        decoder, is_silent = RequestDecoder(), False
        try:
            while data := await reader.read(1 << 16):
                for request in _one_by_one(decoder.feed(data)):
                    reply = self._reply(request)
                    if reply is None:
                        await writer.drain()
                        return
                    is_silent = is_silent or not reply
                    writer.write(b"" if is_silent else reply)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _reply(self, request: m.Request) -> bytes | None:
        if request == m.Metadata(""):
            return encode_reply(opcode_of(request), m.Failure("topic not found: "))
        self.requests.append(request)
        reply = self.answer(request)
        return reply if isinstance(reply, bytes) or reply is None else encode_reply(opcode_of(request), reply)


def _one_by_one(events: list[m.RequestEvent]) -> list[m.Request]:
    requests: list[m.Request] = []
    for event in events:
        assert not isinstance(event, m.Broken | m.Malformed | m.Packed | m.UnknownOpcode), event
        if isinstance(event, m.ProduceMany):
            requests += event.batches()
        elif isinstance(event, m.CommitBatch):
            requests += event.commits()
        elif isinstance(event, DelayedBatch):
            requests += event.messages()
        elif isinstance(event, TxnBeginBatch):
            requests += event.requests()
        elif isinstance(event, TxnWholeBatch):
            requests += event.split(len(event))[0]
        elif isinstance(event, m.ProduceBatch):
            requests += [m.ProduceBatch(event.topic, [value]) for value in event.values]
        else:
            requests.append(event)
    return requests


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[Script]:
    script = Script(answer)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.port = server.sockets[0].getsockname()[1]
    try:
        yield script
    finally:
        server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110  (the condition depends on a socket)
            await asyncio.sleep(0.002)
