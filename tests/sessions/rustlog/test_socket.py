"""RustLog over real sockets, beside its neighbours on the port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.net.listener import Listener
from headrace.net.protocol import ServedProtocol
from headrace.sessions.rustlog.session import RustLogSession
from headrace.wire.rustlog import Dialect, ReplyDecoder, encode_request, sniff
from headrace.wire.rustlog import messages as m
from headrace.wire.sniff import Sniff
from tests.sessions.rustlog.support import WHO, ListenerContext, running_server

JSON, BINARY = Dialect.JSON, Dialect.BINARY
WAIT_SECONDS = 300


class Socket:
    """A client that knows nothing but the wire."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = ReplyDecoder()
        self._heard: list[m.Reply] = []

    async def replies(self, count: int) -> list[m.Reply]:
        async with asyncio.timeout(WAIT_SECONDS):
            while len(self._heard) < count:
                data = await self.reader.read(1 << 16)
                if not data:
                    raise ConnectionError(f"closed after {len(self._heard)} of {count} replies")
                self._heard += self._decoder.feed(data)
        taken, self._heard = self._heard[:count], self._heard[count:]
        return taken

    async def exchange(self, dialect: Dialect, request: m.Request) -> m.Reply:
        self.writer.write(encode_request(dialect, request))
        (reply,) = await self.replies(1)
        return reply

    async def end(self) -> bytes:
        """Return the bytes received until the server closes."""
        async with asyncio.timeout(WAIT_SECONDS):
            return await self.reader.read(-1)


@asynccontextmanager
async def listening(server: ListenerContext, *, shared: bool = False) -> AsyncIterator[Listener]:
    protocols = [ServedProtocol("rustlog", sniff, lambda link: RustLogSession(link, server.broker, WHO, server.context))]
    if shared:
        protocols.append(ServedProtocol("nobody", lambda first: Sniff.NO, protocols[0].open))
    listener = await Listener.open("127.0.0.1", 0, protocols)
    try:
        yield listener
    finally:
        listener.close()


@asynccontextmanager
async def connected(listener: Listener) -> AsyncIterator[Socket]:
    reader, writer = await asyncio.open_connection(listener.host, listener.port)
    try:
        yield Socket(reader, writer)
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dialect", Dialect)
async def test_records_go_in_and_come_out(dialect: Dialect, shared: bool) -> None:
    async with running_server() as server, listening(server, shared=shared) as listener, connected(listener) as client:
        assert await client.exchange(dialect, m.CreateTopic("t", 1)) == m.CreateTopicReply(True)
        values = [bytes([index % 256]) * index for index in range(500)]
        assert await client.exchange(dialect, m.Produce("t", 0, values)) == m.ProduceReply(range(500))
        assert await client.exchange(dialect, m.Fetch("t", 0, 0, 1 << 20)) == m.FetchReply(range(500), values, 500)


async def test_pipelined_batches_are_answered_in_order_while_another_connection_reads() -> None:
    async with running_server() as server, listening(server) as listener, connected(listener) as writer, connected(listener) as reader:
        await writer.exchange(BINARY, m.CreateTopic("t", 1))
        batch = encode_request(BINARY, m.Produce("t", 0, [b"x" * 100] * 100))
        writer.writer.write(batch * 300)
        replies = await writer.replies(300)
        assert replies == [m.ProduceReply(range(100 * index, 100 * index + 100)) for index in range(300)]
        read, offset = 0, 0
        while read < 30_000:
            reply = await reader.exchange(BINARY, m.Fetch("t", 0, offset, 1 << 20))
            assert isinstance(reply, m.FetchReply) and reply.values
            read, offset = read + len(reply.values), reply.next_offset
        assert (read, offset) == (30_000, 30_000)


async def test_a_frame_of_ten_mebibytes_goes_through_and_a_longer_one_is_refused_by_its_length() -> None:
    async with running_server() as server, listening(server) as listener, connected(listener) as client, connected(listener) as liar:
        await client.exchange(BINARY, m.CreateTopic("t", 1))
        largest = m.Produce("t", 0, [bytes(10_485_760 - 20)])
        assert await client.exchange(BINARY, largest) == m.ProduceReply(range(1))
        assert await client.exchange(BINARY, m.Fetch("t", 0, 0, 0)) == m.FetchReply(range(1), largest.records, 1)
        liar.writer.write((10_485_761).to_bytes(4, "big"))
        assert await liar.end() == len(TOO_LONG).to_bytes(4, "big") + TOO_LONG
        assert await client.exchange(BINARY, m.Ping()) == m.Pong()


TOO_LONG = b'{"Error":{"message":"max frame size exceeded: 10485761 bytes (max 10485760)"}}'


async def test_a_reader_that_does_not_read_is_sent_a_bounded_amount_and_delays_no_other() -> None:
    async with running_server() as server, listening(server) as listener, connected(listener) as slow, connected(listener) as other:
        await other.exchange(BINARY, m.CreateTopic("t", 1))
        await other.exchange(BINARY, m.Produce("t", 0, [bytes(1_000_000)] * 8))
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a read transport too: it belongs to a socket
        slow.writer.write(encode_request(BINARY, m.Fetch("t", 0, 0, 1 << 23)) * 50)
        async with asyncio.timeout(WAIT_SECONDS):
            while server.context.slow_consumers == 0:  # noqa: ASYNC110  (the other side is a socket)
                await asyncio.sleep(0.005)
        sent = server.context.messages_fetched
        assert sent < 50
        assert await other.exchange(BINARY, m.Produce("t", 0, [b"on"])) == m.ProduceReply(range(8, 9))
        assert server.context.messages_fetched <= sent + 8
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        replies = await slow.replies(50)
        assert len(replies) == 50 and all(isinstance(reply, m.FetchReply) and reply.values for reply in replies)


async def test_a_drain_answers_what_was_received_and_closes() -> None:
    async with running_server() as server, listening(server) as listener, connected(listener) as client:
        await client.exchange(BINARY, m.CreateTopic("t", 1))
        client.writer.write(encode_request(BINARY, m.Produce("t", 0, [b"a"])))
        await client.replies(1)
        draining = asyncio.create_task(listener.drain(WAIT_SECONDS))
        assert await client.end() == b""
        client.writer.close()
        assert await draining == 0, "no connection had to be cut off"


async def test_a_client_that_leaves_in_the_middle_of_a_frame_leaves_nothing() -> None:
    async with running_server() as server, listening(server) as listener:
        async with connected(listener) as client:
            await client.exchange(BINARY, m.CreateTopic("t", 1))
            client.writer.write(encode_request(BINARY, m.Produce("t", 0, [b"a" * 1_000]))[:-1])
        async with asyncio.timeout(WAIT_SECONDS):
            while server.context.connections:  # noqa: ASYNC110  (the other side is a socket)
                await asyncio.sleep(0.005)
        assert server.broker.bounds(WHO, "t", 0).end == 0


async def test_bytes_of_no_protocol_are_closed_on_a_shared_port_and_answered_on_an_own_one() -> None:
    async with running_server() as server:
        async with listening(server, shared=True) as listener, connected(listener) as client:
            client.writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await client.end() == b""
            assert listener.counters.rejected == {"unknown protocol": 1}
        async with listening(server) as listener, connected(listener) as client:
            client.writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert b"max frame size exceeded: 1195725856 bytes" in await client.end()
