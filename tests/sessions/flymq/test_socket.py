"""The FlyMQ protocol on a real socket: the whole way from bytes to bytes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.net.listener import Listener
from headrace.net.protocol import ServedProtocol
from headrace.sessions.flymq.session import FlyMqSession
from headrace.wire import flymq
from headrace.wire.flymq import ReplyDecoder, encode_request
from headrace.wire.flymq.messages import Broken, Fetch, ProduceBatch, RecordMetadataBatch, ReplyEvent, ReplyFrame

from .support import DEV, running_server


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    async with running_server() as server:
        protocol = ServedProtocol("flymq", flymq.sniff, lambda link: FlyMqSession(link, server.broker, DEV))
        listener = await Listener.open("127.0.0.1", 0, [protocol])
        try:
            yield listener
        finally:
            await listener.drain(5)


async def heard(reader: asyncio.StreamReader, frames: int) -> list[ReplyEvent]:
    decoder, events = ReplyDecoder(), list[ReplyEvent]()
    async with asyncio.timeout(300):
        while sum(len(event) if isinstance(event, RecordMetadataBatch) else 1 for event in events) < frames:
            chunk = await reader.read(1 << 16)
            assert chunk, "the server closed the connection"
            events += decoder.feed(chunk)
    return events


async def test_the_simplest_client_of_the_specification_works() -> None:
    """Written from the pseudocode of the specification, without any of our own code."""
    async with listening() as listener:
        reader, writer = await asyncio.open_connection(listener.host, listener.port)
        topic, value = b"test", b"hello"
        payload = (
            struct.pack(">H", len(topic)) + topic + struct.pack(">I", 0) + struct.pack(">I", len(value)) + value + struct.pack(">i", -1)
        )
        writer.write(bytes([0xAF, 0x01, 0x01, 0x01]) + struct.pack(">I", len(payload)) + payload)
        header = await reader.readexactly(8)
        assert header == bytes.fromhex("AF 01 01 01 00 00 00 22")
        reply = await reader.readexactly(34)
        assert reply[:6] == b"\x00\x04test"
        assert struct.unpack(">iQ", reply[6:18]) == (0, 0)
        assert struct.unpack(">ii", reply[26:]) == (-1, 5)
        writer.close()
        await writer.wait_closed()


async def test_a_flood_of_records_is_answered_one_by_one_and_read_back() -> None:
    async with listening() as listener:
        reader, writer = await asyncio.open_connection(listener.host, listener.port)
        count = 20_000
        writer.write(encode_request(ProduceBatch("t", [b"%09d" % number for number in range(count)])))
        events = await heard(reader, count)
        offsets = [offset for event in events if isinstance(event, RecordMetadataBatch) for offset in event.offsets]
        assert offsets == list(range(count))
        writer.write(encode_request(Fetch("t", 0, 0, count)))
        (reply,) = await heard(reader, 1)
        assert isinstance(reply, ReplyFrame)
        fetched = flymq.decode_reply(reply)
        assert fetched == flymq.messages.Fetched(list(range(count)), [b"%09d" % number for number in range(count)], count)
        writer.close()
        await writer.wait_closed()


async def test_a_peer_that_only_sends_is_answered_when_it_has_finished() -> None:
    async with listening() as listener:
        reader, writer = await asyncio.open_connection(listener.host, listener.port)
        writer.write(encode_request(ProduceBatch("t", [b"1", b"2"])))
        writer.write_eof()
        (batch,) = await heard(reader, 2)
        assert isinstance(batch, RecordMetadataBatch) and list(batch.offsets) == [0, 1]
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_a_broken_stream_affects_no_other_connection() -> None:
    async with listening() as listener:
        good_reader, good_writer = await asyncio.open_connection(listener.host, listener.port)
        bad_reader, bad_writer = await asyncio.open_connection(listener.host, listener.port)
        bad_writer.write(bytes.fromhex("AF 02 08 01 00 00 00 00"))
        answer = await bad_reader.read()
        (event,) = ReplyDecoder().feed(answer)
        assert not isinstance(event, Broken)
        assert answer.endswith(b"unsupported protocol version: 2")
        good_writer.write(encode_request(ProduceBatch("t", [b"1"])))
        assert len(await heard(good_reader, 1)) == 1
        for writer in (good_writer, bad_writer):
            writer.close()
            await writer.wait_closed()


async def test_many_fetches_of_a_peer_that_does_not_read_take_bounded_memory() -> None:
    async with listening() as listener:
        reader, writer = await asyncio.open_connection(listener.host, listener.port, limit=1 << 16)
        writer.write(encode_request(ProduceBatch("t", [bytes(1 << 20)] * 3)))
        await heard(reader, 3)
        requests = 200
        writer.write(encode_request(Fetch("t", 0, 0, 3)) * requests)
        (connection,) = listener._connections
        for _ in range(1_000):
            await asyncio.sleep(0)
            assert connection.unsent_bytes < 8 << 20
        total, size = 0, 8 + 12 + 3 * (16 + (1 << 20))
        async with asyncio.timeout(300):
            while total < requests * size:
                total += len(await reader.read(1 << 20))
        assert total == requests * size
        writer.close()
        await writer.wait_closed()
