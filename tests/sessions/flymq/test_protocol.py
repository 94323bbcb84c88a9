"""Frames that are no valid requests, and the dialect of a FlyMQ connection."""

from __future__ import annotations

import asyncio

import pytest

from headrace.wire.flymq import Dialect, encode_request
from headrace.wire.flymq.framing import BINARY, GZIP, HEADER, deflate
from headrace.wire.flymq.messages import (
    ClusterMetadata,
    Consume,
    Failure,
    Fetch,
    GroupEntry,
    ListGroups,
    ListTopics,
    Mode,
    ProduceBatch,
    ReplyFrame,
    Request,
    ResetOffset,
    Subscribe,
    TopicList,
)
from headrace.wire.flymq.opcodes import SPECIFIED
from headrace.wire.flymq.table import SPOKEN

from .support import DEV, Peer, placed, rest, running_server


def raw(opcode: int, payload: bytes = b"", *, flags: int = BINARY, magic: int = 0xAF, version: int = 1, length: int | None = None) -> bytes:
    return HEADER.pack(magic, version, opcode, flags, len(payload) if length is None else length) + payload


def test_every_opcode_of_the_specification_is_spoken() -> None:
    assert SPECIFIED <= SPOKEN


@pytest.mark.parametrize("opcode", [0x00, 0x0C, 0x71, 0x82, 0xFF])
async def test_an_unknown_opcode_is_refused_by_its_number(opcode: int) -> None:
    async with running_server() as server:
        peer = server.peer()
        peer.session.receive(raw(opcode) + raw(0x08))
        assert await peer.replies(2) == [Failure(f"unknown opcode: {opcode}"), TopicList([])]


@pytest.mark.parametrize("opcode", sorted(SPOKEN - {0x08, 0x51, 0x52, 0x62, 0x53, 0x72, 0x76, 0x7B, 0x7D}))
async def test_a_payload_that_cannot_be_read_is_refused_and_the_connection_goes_on(opcode: int) -> None:
    async with running_server() as server:
        peer = server.peer()
        peer.session.receive(raw(opcode, b"\x00") + raw(0x08))
        error, topics = await peer.replies(2)
        assert isinstance(error, Failure) and error.message.startswith("invalid binary format")
        assert topics == TopicList([])


async def test_a_wrong_magic_byte_closes_the_connection_without_a_word() -> None:
    async with running_server() as server:
        peer = server.peer()
        peer.session.receive(b"GET / HTTP/1.1\r\n")
        assert await peer.closed() == ("bad frame: magic byte 0x47 is wrong: expected 0xaf", True)
        assert peer.wire.sent == b""


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (raw(0x08, version=2), "unsupported protocol version: 2"),
        (raw(0x01, length=33_554_433), "message too large: 33554433 bytes, at most 33554432"),
    ],
)
async def test_a_frame_that_cannot_be_followed_is_answered_before_the_connection_closes(frame: bytes, text: str) -> None:
    async with running_server() as server:
        peer = server.peer()
        await server.broker.create_topic(DEV, "t")
        server.engine.hold("t")
        peer.session.receive(encode_request(ProduceBatch("t", [b"1"])) + frame + raw(0x08))
        await rest()
        assert peer.wire.closed is None, "what came before is completed first"
        server.engine.release("t")
        reason, is_error = await peer.closed()
        assert is_error and reason.startswith("bad frame: ")
        record, error = await peer.replies(2)
        assert placed(record) == (0, 0)
        assert error == Failure(text)
        peer.session.receive(raw(0x08))
        await rest()
        assert peer.heard() == []


@pytest.mark.parametrize(
    "signature",
    [
        Subscribe("t", "g", 0, Mode("latest", narrow=True)),
        ResetOffset("t", "g", 0, Mode("latest", narrow=True)),
        Fetch("t", 0, 0, 1, ""),
        ClusterMetadata("t"),
    ],
)
async def test_a_request_only_the_originals_clients_send_latches_their_dialect(signature: Request) -> None:
    async with running_server() as server:
        peer = server.peer()
        peer.send(Consume("none", 0, 0), ProduceBatch("t", [b"1"]), signature, Consume("none", 0, 0))
        replies = await raw_replies(peer, 4)
        text = b"topic not found: none"
        assert replies[0].payload == b"\x00\x00\x15" + text
        assert replies[-1].payload == b"\x00\x00\x00\x01\x00\x15" + text


async def raw_replies(peer: Peer, count: int) -> list[ReplyFrame]:
    """The next replies as they are on the wire, without RecordMetadata."""
    async with asyncio.timeout(300):
        while len(peer.heard()) < count:
            await rest()
    return [reply for reply in peer.heard() if isinstance(reply, ReplyFrame)]


@pytest.mark.parametrize(
    "request_", [Subscribe("t", "g", 0, Mode("latest")), ResetOffset("t", "g", 0, Mode("latest")), Fetch("t", 0, 0, 1), ListTopics()]
)
async def test_every_other_request_leaves_the_dialect_as_it_was(request_: Request) -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.exchange(ProduceBatch("t", [b"1"]), request_)
        peer.send(Consume("none", 0, 0))
        assert (await raw_replies(peer, 1))[0].payload.startswith(b"\x00\x00\x15")


async def test_a_listener_for_the_originals_clients_starts_in_their_dialect() -> None:
    async with running_server() as server:
        peer = server.peer(Dialect.SDK)
        peer.send(Consume("none", 0, 0))
        assert (await raw_replies(peer, 1))[0].payload.startswith(b"\x00\x00\x00\x01\x00\x15")


async def test_a_listener_for_go_clients_sends_bare_errors_whatever_they_request() -> None:
    async with running_server() as server:
        peer = server.peer(Dialect.GO)
        await peer.exchange(ProduceBatch("t", [b"1"]), Subscribe("t", "g", 0, Mode("latest", narrow=True)), dialect=Dialect.SDK)
        peer.send(Consume("none", 0, 0))
        assert (await raw_replies(peer, 1))[0].payload == b"topic not found: none"


async def test_gzip_requests_are_served_and_other_compressions_refused() -> None:
    async with running_server() as server:
        peer = server.peer()
        payload = encode_request(ProduceBatch("t", [b"x" * 1_000]))[8:]
        peer.session.receive(raw(0x01, deflate(payload), flags=BINARY | GZIP) + raw(0x01, payload, flags=0x04) + raw(0x08))
        record, error, topics = await peer.replies(3)
        assert placed(record) == (0, 0)
        assert error == Failure("invalid binary format: compression 0x04 is not supported")
        assert topics == TopicList(["t"])


async def test_much_gzip_in_one_chunk_is_unpacked_step_by_step_and_every_record_arrives() -> None:
    async with running_server() as server:
        peer = server.peer()
        payload = encode_request(ProduceBatch("t", [bytes(12 << 20)]))[8:]
        packed = raw(0x01, deflate(payload), flags=BINARY | GZIP)
        peer.session.receive(packed * 7 + raw(0x08))
        assert peer.wire.pauses > 0
        replies = await peer.replies(8)
        assert [placed(reply) for reply in replies[:7]] == [(0, number) for number in range(7)]
        assert replies[7] == TopicList(["t"])
        await rest()
        assert peer.wire.pauses == 0


async def test_thousands_of_requests_in_one_chunk_let_others_have_their_turn() -> None:
    async with running_server() as server:
        greedy, modest = server.peer(), server.peer()
        greedy.session.receive(raw(0x99) * 5_000)
        modest.session.receive(raw(0x08))
        await modest.replies(1)
        assert 0 < len(greedy.heard()) < 1_000
        assert await greedy.replies(5_000) == [Failure("unknown opcode: 153")] * 5_000


async def test_a_list_of_groups_that_fits_no_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_server() as server:
        entry = GroupEntry("t" * 249, "g" * 249, 0, [])
        monkeypatch.setattr(server.broker, "groups", lambda who: ["g"] * 70_000)
        peer = server.peer()
        monkeypatch.setattr(peer.session._handlers, "_entries", lambda group: [entry])
        assert "exceeds the 33554432 of a frame" in await peer.refused(ListGroups())
        assert await peer.one(ListTopics()) == TopicList([])
