"""Requests that cost the broker much more than their peer: searches over large topics, and compressed payloads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.access.access import AccessSettings, Mode
from headrace.access.policy import ANONYMOUS
from headrace.broker import Principal
from headrace.limits import FLYMQ_LOGIN_INFLATED_BYTES_MAX, FLYMQ_LOOP_INFLATED_BYTES_MAX, FLYMQ_PAYLOAD_BYTES_MAX
from headrace.records import RecordBatch
from headrace.sessions.flymq import session as flymq_session
from headrace.wire.flymq import Dialect, decode_reply, encode_request
from headrace.wire.flymq.access_messages import Auth
from headrace.wire.flymq.framing import BINARY, GZIP, deflate, frame, inflate
from headrace.wire.flymq.messages import Failure, Fetch, Fetched, ListTopics, ProduceBatch, RecordMetadataBatch, ReplyFrame, TopicList
from tests.access.harness import ADMIN_PASSWORD

from .support import DEV, ListenerContext, running_server

NOBODY = Principal(ANONYMOUS, "flymq")
ENFORCED = AccessSettings(Mode.ENFORCED)


def packed(size_bytes: int, topic: str = "t") -> bytes:
    """A compressed PRODUCE of so many bytes."""
    return frame(0x01, deflate(encode_request(ProduceBatch(topic, [bytes(size_bytes)]))[8:]), BINARY | GZIP)


# Compressed payloads.


async def test_before_a_login_a_small_compressed_payload_is_read_and_a_large_one_refused() -> None:
    async with running_server(access=ENFORCED) as server:
        peer = server.peer(who=NOBODY)
        peer.session.receive(packed(100) + packed(FLYMQ_LOGIN_INFLATED_BYTES_MAX + 1) + packed(FLYMQ_PAYLOAD_BYTES_MAX // 2))
        refused = await peer.replies(3)
        assert all(isinstance(reply, Failure) for reply in refused)
        texts = [reply.message for reply in refused if isinstance(reply, Failure)]
        assert "compressed" not in texts[0]
        assert all(text.endswith(f"exceeds {FLYMQ_LOGIN_INFLATED_BYTES_MAX} bytes before login") for text in texts[1:])


async def test_before_a_login_nothing_is_unpacked_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(payload: bytes) -> bytes:
        raise AssertionError("unpacked for somebody who has not logged in")

    monkeypatch.setattr(flymq_session, "inflate", fail)
    async with running_server(access=ENFORCED) as server:
        peer = server.peer(who=NOBODY)
        peer.session.receive(packed(FLYMQ_PAYLOAD_BYTES_MAX // 2) * 10)
        assert all(isinstance(reply, Failure) for reply in await peer.replies(10))


async def test_a_login_and_a_large_compressed_payload_may_come_in_one_chunk() -> None:
    async with running_server(access=ENFORCED) as server:
        peer = server.peer(who=NOBODY)
        peer.session.receive(encode_request(Auth("admin", ADMIN_PASSWORD)) + packed(1 << 20) + packed(1 << 20))
        _, *records = await peer.replies(3)
        assert all(isinstance(record, RecordMetadataBatch) for record in records)


@pytest.mark.parametrize(("extra", "threads"), [(-1_000, 0), (1, 1)])
async def test_a_large_payload_is_unpacked_beside_the_loop(monkeypatch: pytest.MonkeyPatch, extra: int, threads: int) -> None:
    used: list[threading.Thread] = []

    def watched(payload: bytes) -> bytes:
        used.append(threading.current_thread())
        return inflate(payload)

    monkeypatch.setattr(flymq_session, "inflate", watched)
    async with running_server() as server:
        peer = server.peer()
        peer.session.receive(packed(FLYMQ_LOOP_INFLATED_BYTES_MAX + extra) + encode_request(ListTopics()))
        record, topics = await peer.replies(2)
        assert isinstance(record, RecordMetadataBatch) and topics == TopicList(["t"])
    assert len(used) == threads and threading.main_thread() not in used


async def test_a_bomb_is_refused_and_the_stream_goes_on() -> None:
    async with running_server() as server:
        peer = server.peer()
        bomb = frame(0x01, deflate(bytes(FLYMQ_PAYLOAD_BYTES_MAX + 1)), BINARY | GZIP)
        peer.session.receive(bomb + encode_request(ListTopics()))
        refused, topics = await peer.replies(2)
        assert isinstance(refused, Failure) and f"exceeds {FLYMQ_PAYLOAD_BYTES_MAX} bytes" in refused.message
        assert topics == TopicList([])


async def test_an_unpacked_record_keeps_its_place_among_plain_ones() -> None:
    async with running_server() as server:
        peer = server.peer()
        plain = encode_request(ProduceBatch("t", [b"plain"]))
        peer.session.receive(plain + packed(1 << 20) + b"\xff\xff\xff\xff" + plain)
        await peer.replies(3)
        fetched = await server.broker.fetch(DEV, "t", 0, 0, bytes_max=1 << 22)
        assert [len(value or b"") for batch in fetched.batches for value in batch.values()] == [5, 1 << 20, 5]


# Searches over large topics.


async def test_a_search_stops_when_its_peer_has_left() -> None:
    async with running_server() as server:
        peer, other = server.peer(), server.peer()
        await large_topic(server, 400)
        peer.send(Fetch("large", 0, 0, 10, "n(o|0)thing+x"))
        await asyncio.sleep(0)
        peer.wire.has_peer_left = True
        (reply,) = await peer.replies(1, Dialect.SDK)
        assert isinstance(reply, Fetched) and reply.offsets == [] and reply.next_offset < 400 * 100
        other.send(ListTopics())
        await other.replies(1)


async def test_a_search_stops_when_the_broker_drains() -> None:
    async with running_server() as server:
        peer = server.peer()
        await large_topic(server, 400)
        peer.send(Fetch("large", 0, 0, 10, "n(o|0)thing+x"))
        await asyncio.sleep(0)
        peer.session.closing()
        assert await peer.closed() == ("drained", False)
        (frame,) = peer.heard()
        assert isinstance(frame, ReplyFrame)
        reply = decode_reply(frame, Dialect.SDK)
        assert isinstance(reply, Fetched) and reply.next_offset < 400 * 100


async def test_a_search_lets_others_have_their_turn() -> None:
    async with running_server() as server:
        searchers, modest = [server.peer() for _ in range(5)], server.peer()
        await large_topic(server, 100)
        for searcher in searchers:
            searcher.send(Fetch("large", 0, 0, 10, "n(o|0)thing+x"))
        for _ in range(20):
            modest.send(ListTopics())
            await modest.replies(1)
        assert not any(searcher.heard() for searcher in searchers)
        for searcher in searchers:
            searcher.session.lost()


async def test_a_search_of_a_lost_connection_ends_at_once() -> None:
    async with running_server() as server:
        peer = server.peer()
        await large_topic(server, 100)
        peer.send(Fetch("large", 0, 0, 10, "n(o|0)thing+x"))
        for _ in range(5):
            await asyncio.sleep(0)
        tasks = asyncio.all_tasks()
        peer.session.lost()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) < len(tasks)


async def large_topic(server: ListenerContext, batches: int) -> None:
    """A topic `large` of so many times 100 records of 100 bytes."""
    await server.broker.create_topic(DEV, "large")
    for _ in range(batches):
        await server.broker.publish(DEV, "large", RecordBatch([b"0123456789" * 10] * 100))
