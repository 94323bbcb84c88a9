"""CONSUME and FETCH."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.broker import Principal
from headrace.broker.reading.fetch import Fetched as BrokerFetched
from headrace.errors import CorruptData
from headrace.limits import FLYMQ_FETCH_BYTES_MAX, FLYMQ_PAYLOAD_BYTES_MAX
from headrace.records import RecordBatch
from headrace.sessions.flymq.reading import RECORDS_DEFAULT
from headrace.sessions.flymq.session import FlyMqSession
from headrace.wire.flymq import Dialect
from headrace.wire.flymq.fetching import FRONT_BYTES, RECORD_OVERHEAD_BYTES
from headrace.wire.flymq.messages import Consume, Consumed, ConsumeZeroCopy, Fetch, FetchBinary, Fetched, ProduceBatch

from .support import DEV, NOW, ListenerContext, Peer, running_server


async def filled(server: ListenerContext, *values: bytes, keys: list[bytes | None] | None = None) -> Peer:
    peer = server.peer()
    await peer.exchange(ProduceBatch("t", list(values), keys))
    return peer


@pytest.mark.parametrize("kind", [Consume, ConsumeZeroCopy])
async def test_one_record_is_read_by_its_offset(kind: type[Consume]) -> None:
    async with running_server() as server:
        peer = await filled(server, b"a", b"b" * 100_000, keys=[None, b"k"])
        assert await peer.exchange(kind("t", 0, 1), kind("t", 0, 0)) == [Consumed(b"k", b"b" * 100_000), Consumed(b"", b"a")]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Consume("t", 0, 1), "offset 1 out of range"),
        (Consume("t", 0, 2**64 - 1), "offset 18446744073709551615 out of range"),
        (Consume("t", 1, 0), "partition 1 not found"),
        (Consume("t", -1, 0), "partition -1 not found"),
        (Consume("none", 0, 0), "topic not found: none"),
        (Fetch("none", 0, 0, 1), "topic not found: none"),
        (Fetch("t", 7, 0, 1), "partition 7 not found"),
        (Fetch("t", -1, 0, 1), "partition -1 not found"),
        (Fetch("__offsets", 0, 0, 1), "topic not found: __offsets"),
    ],
)
async def test_what_is_not_there_is_refused_by_name(request_: Consume | Fetch, text: str) -> None:
    async with running_server() as server:
        assert await (await filled(server, b"a")).refused(request_) == text


async def test_a_fetch_brings_records_and_says_where_to_go_on() -> None:
    async with running_server() as server:
        peer = await filled(server, b"a", b"b", b"c", keys=[None, b"k", None])
        assert await peer.one(Fetch("t", 0, 1, 10)) == Fetched([1, 2], [b"b", b"c"], 3, [b"k", None])
        assert await peer.one(Fetch("t", 0, 0, 2)) == Fetched([0, 1], [b"a", b"b"], 2, [None, b"k"])


@pytest.mark.parametrize("offset", [3, 4, 2**64 - 1])
async def test_a_fetch_at_or_past_the_end_is_empty_and_stays_where_it_is(offset: int) -> None:
    async with running_server() as server:
        assert await (await filled(server, b"a", b"b", b"c")).one(Fetch("t", 0, offset, 10)) == Fetched([], [], offset)


@pytest.mark.parametrize("wanted", [0, -1, -(2**31)])
async def test_a_fetch_of_none_brings_ten(wanted: int) -> None:
    async with running_server() as server:
        fetched = await (await filled(server, *[b"v"] * 30)).one(Fetch("t", 0, 0, wanted))
        assert isinstance(fetched, Fetched) and len(fetched.offsets) == RECORDS_DEFAULT


async def test_the_layout_follows_the_dialect_and_a_filter_asks_for_the_originals() -> None:
    async with running_server() as server:
        expected = Fetched([0], [b"a"], 1)
        await filled(server, b"a")
        assert await server.peer().one(Fetch("t", 0, 0, 1), Dialect.SPEC) == expected
        assert await server.peer(Dialect.SDK).one(Fetch("t", 0, 0, 1), Dialect.SDK) == expected
        peer = server.peer()
        assert await peer.one(Fetch("t", 0, 0, 1, ""), Dialect.SDK) == expected
        assert await peer.one(Fetch("t", 0, 0, 1), Dialect.SDK) == expected, "the connection is latched"
        assert await server.peer().one(FetchBinary("t", 0, 0, 1)) == expected


async def test_a_reply_stops_where_the_next_record_would_not_fit() -> None:
    async with running_server() as server:
        size = 100_000
        peer = server.peer()
        for _ in range(5):
            await peer.exchange(ProduceBatch("t", [bytes(size)] * 10))
        fetched = await peer.one(Fetch("t", 0, 0, 1_000))
        assert isinstance(fetched, Fetched)
        count = (FLYMQ_FETCH_BYTES_MAX - FRONT_BYTES) // (size + RECORD_OVERHEAD_BYTES)
        assert len(fetched.offsets) == count == fetched.next_offset
        rest = await peer.one(Fetch("t", 0, fetched.next_offset, 1_000))
        assert isinstance(rest, Fetched) and list(rest.offsets) == list(range(count, 50))


async def test_a_reply_is_filled_from_as_many_batches_as_it_takes() -> None:
    async with running_server() as server:
        peer = server.peer()
        for first in range(0, 100, 10):
            await peer.exchange(ProduceBatch("t", [b"%d" % number for number in range(first, first + 10)]))
        for begin in range(0, 98, 7):
            expected = list(range(begin, begin + 7))
            assert await peer.one(Fetch("t", 0, begin, 7)) == Fetched(expected, [b"%d" % number for number in expected], begin + 7)


async def test_what_was_read_before_a_read_that_failed_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.exchange(ProduceBatch("t", [bytes(300_000)] * 4))
        fetch, damaged = server.broker.fetch, CorruptData("batch 2 is damaged")

        async def read(who: Principal, topic: str, partition: int, offset: int, **wanted: Any) -> BrokerFetched:
            if offset >= 2:
                raise damaged
            return await fetch(who, topic, partition, offset, **wanted)

        monkeypatch.setattr(server.broker, "fetch", read)
        assert await peer.one(Fetch("t", 0, 0, 9)) == Fetched([0, 1], [bytes(300_000)] * 2, 2)
        assert "damaged" in await peer.refused(Fetch("t", 0, 2, 9))


async def test_a_record_larger_than_the_usual_reply_comes_alone() -> None:
    async with running_server() as server:
        large = bytes(FLYMQ_FETCH_BYTES_MAX + 1)
        peer = await filled(server, b"a", large, b"b")
        assert await peer.one(Fetch("t", 0, 0, 9)) == Fetched([0], [b"a"], 1)
        assert await peer.one(Fetch("t", 0, 1, 9)) == Fetched([1], [large], 2)
        assert await peer.one(Fetch("t", 0, 2, 9)) == Fetched([2], [b"b"], 3)


async def test_a_record_from_another_protocol_that_fits_no_frame_is_named() -> None:
    async with running_server() as server:
        await server.broker.create_topic(DEV, "t")
        await server.broker.publish(DEV, "t", RecordBatch([bytes(FLYMQ_PAYLOAD_BYTES_MAX), b"next"]))
        peer = server.peer()
        text = f"message at offset 0 is too large for this protocol: {FLYMQ_PAYLOAD_BYTES_MAX} bytes"
        assert await peer.refused(Fetch("t", 0, 0, 9)) == text
        assert await peer.refused(Consume("t", 0, 0)) == text
        assert await peer.one(Fetch("t", 0, 1, 9)) == Fetched([1], [b"next"], 2)


async def test_a_missing_value_reads_as_an_empty_one() -> None:
    async with running_server() as server:
        await server.broker.create_topic(DEV, "t")
        await server.broker.publish(DEV, "t", RecordBatch([None, b"v"], [b"k", b"l"]))
        peer = server.peer()
        assert await peer.one(Fetch("t", 0, 0, 9)) == Fetched([0, 1], [b"", b"v"], 2, [b"k", b"l"])
        assert await peer.one(Consume("t", 0, 0)) == Consumed(b"k", b"")


async def test_expired_records_are_passed_over_and_named() -> None:
    async with running_server() as server:
        await server.broker.create_topic(DEV, "t")
        await server.broker.publish(DEV, "t", RecordBatch([b"a", b"b", b"c"], expiries=[NOW + 5, 0, NOW + 5]))
        peer = server.peer()
        server.now += 10
        assert await peer.one(Fetch("t", 0, 0, 9)) == Fetched([1], [b"b"], 3)
        assert await peer.one(Fetch("t", 0, 2, 9)) == Fetched([], [], 3)
        assert await peer.refused(Consume("t", 0, 0)) == "message expired: offset 0"
        assert await peer.one(Consume("t", 0, 1)) == Consumed(b"", b"b")


async def test_a_filter_brings_what_passes_and_goes_on_behind_what_it_looked_at() -> None:
    async with running_server() as server:
        peer = await filled(server, *[json.dumps({"n": number} if number % 3 else {"m": number}).encode() for number in range(10)])
        fetched = await peer.one(Fetch("t", 0, 0, 100, "$.m"), Dialect.SDK)
        assert isinstance(fetched, Fetched) and list(fetched.offsets) == [0, 3, 6, 9] and fetched.next_offset == 10
        part = await peer.one(Fetch("t", 0, 1, 2, "$.m"), Dialect.SDK)
        assert isinstance(part, Fetched) and list(part.offsets) == [3, 6]
        assert part.next_offset == 9, "the first record for which there was no room"


async def test_a_filter_searches_on_until_something_passes() -> None:
    async with running_server() as server:
        peer = server.peer()
        for _ in range(4):
            await peer.exchange(ProduceBatch("t", [bytes(1_000)] * 1_000))
        await peer.exchange(ProduceBatch("t", [b"needle"]))
        assert await peer.one(Fetch("t", 0, 0, 5, "NEEDLE"), Dialect.SDK) == Fetched([4_000], [b"needle"], 4_001)
        assert await peer.one(Fetch("t", 0, 0, 5, "nowhere"), Dialect.SDK) == Fetched([], [], 4_001)


async def test_keys_of_filtered_records_stay_with_their_values() -> None:
    async with running_server() as server:
        peer = await filled(server, b"a", b"b", b"c", keys=[b"x1", None, b"x3"])
        assert await peer.one(Fetch("t", 0, 0, 5, "x[13]"), Dialect.SDK) == Fetched([0, 2], [b"a", b"c"], 3, [b"x1", b"x3"])


async def test_a_peer_that_does_not_take_its_replies_gets_no_further_ones() -> None:
    async with running_server() as server:
        peer = await filled(server, b"a")
        peer.wire.unsent_bytes = 1 << 30
        peer.send(*[Fetch("t", 0, 0, 1)] * 3)
        for _ in range(3):
            assert peer.heard() == []
            peer.wire.unsent_bytes = 0
            peer.session.drained()
            assert await peer.replies(3) == [Fetched([0], [b"a"], 1)] * 3
            peer.wire.unsent_bytes = 1 << 30
            peer.send(*[Fetch("t", 0, 0, 1)] * 3)
        assert peer.wire.pauses == 1, "and it is not read meanwhile"
        peer.session.lost()


async def test_a_read_of_records_in_memory_starts_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_server() as server:
        peer = await filled(server, b"a", b"b", b"c")
        monkeypatch.setattr(FlyMqSession, "_start", None)
        assert await peer.one(Consume("t", 0, 1)) == Consumed(b"", b"b")
        assert await peer.one(Fetch("t", 0, 1, 1)) == Fetched([1], [b"b"], 2)
        assert await peer.one(Fetch("t", 0, 1, 9)) == Fetched([1, 2], [b"b", b"c"], 3)


async def test_a_large_page_is_encoded_in_a_later_turn_than_it_is_read() -> None:
    async with running_server() as server:
        peer, other = server.peer(), server.peer()
        await server.broker.create_topic(DEV, "t")
        await server.broker.publish(DEV, "t", RecordBatch([bytes(1_000)] * 2_000))
        peer.send(Fetch("t", 0, 0, 2_000))
        other.send(Fetch("t", 0, 0, 10))
        (small,) = await other.replies(1)
        assert isinstance(small, Fetched) and len(small.offsets) == 10
        assert not peer.wire.sent, "the small page does not wait for the large one"
        (large,) = await peer.replies(1)
        assert isinstance(large, Fetched) and len(large.offsets) == 2_000
