"""Attaching over Figg: each row of the rules is a test."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.broker.authorizer import Action, Principal, Resource
from headrace.engine.contract import TopicConfig
from headrace.limits import OUTPUT_BUFFER_BYTES_MAX, OUTPUT_HIGH_WATER_BYTES, SUBSCRIPTIONS_PER_CONNECTION_MAX
from headrace.records import RecordBatch
from headrace.sessions.figg.attachments import CREDIT_BYTES
from headrace.wire.figg import Attached, DataBatch, Detached, Pong, encode
from tests.sessions.figg.peer import WHO, figg_peer


async def test_attached_comes_before_the_first_data() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a", b"b"])
        peer.say(encode.attach("t", 0))
        await peer.until(lambda: len(peer.records("t")) == 2)
        assert peer.look() == [Attached("t", 0), DataBatch("t", [1, 2], [b"a", b"b"])]


async def test_a_plain_attach_starts_at_the_end_and_says_so() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a", b"b", b"c"])
        peer.say(encode.attach("t"))
        await peer.settle()
        assert peer.look() == [Attached("t", 3)]
        await peer.stored("t", [b"d"])
        await peer.until(lambda: peer.records("t") == [(4, b"d")])


async def test_a_plain_attach_waits_for_no_turn_of_the_loop() -> None:
    """A thousand subscribers that come at once would wait for a thousand turns."""
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.say(encode.attach("t"))
        (cursor,) = peer.broker._cursors._open
        assert cursor.is_live


async def test_a_plain_attach_misses_nothing_published_after_it() -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.say(encode.attach("t"), encode.publish("t", [0], [b"mine"]))
        await peer.until(lambda: peer.records("t") == [(1, b"mine")] and peer.acks() == [0])


async def test_attaching_makes_the_topic() -> None:
    async with figg_peer() as peer:
        peer.engine.may_create.clear()
        peer.say(encode.attach("new"), encode.ping(1))
        await peer.settle()
        assert (peer.look(), peer.link.pauses) == ([], 1)
        peer.engine.may_create.set()
        await peer.until(lambda: peer.look() == [Attached("new", 0), Pong(1)])


async def test_an_offset_is_where_the_next_message_is_so_the_last_one_received_resumes() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a", b"b", b"c"])
        peer.say(encode.attach("t", 2))
        await peer.until(lambda: peer.records("t") == [(3, b"c")])
        assert peer.attached() == [Attached("t", 2)]


async def test_an_expired_offset_becomes_the_oldest() -> None:
    async with figg_peer() as peer:
        await peer.broker.create_topic(WHO, "t", config=TopicConfig(retention_ms=1_000, segment_bytes=1 << 20))
        for value in (b"old", b"old too"):
            await peer.broker.publish(WHO, "t", RecordBatch([value]), partition=0)
        peer.clock.now += 10_000
        await peer.broker.publish(WHO, "t", RecordBatch([b"young"]), partition=0)
        await peer.broker.maintain()
        first = peer.broker.bounds(WHO, "t", 0).first
        assert first > 0
        peer.say(encode.attach("t", 0))
        await peer.until(lambda: peer.records("t")[-1:] == [(3, b"young")])
        assert peer.attached() == [Attached("t", first)]
        assert peer.records("t")[0][0] == first + 1


@pytest.mark.parametrize("offset", [4, 255, 1 << 62, (1 << 64) - 1])
async def test_a_future_offset_becomes_the_end_and_nothing_is_skipped(offset: int) -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a", b"b", b"c"])
        peer.say(encode.attach("t", offset))
        await peer.until(lambda: peer.attached() == [Attached("t", 3)])
        await peer.stored("t", [b"d"])
        await peer.until(lambda: peer.records("t") == [(4, b"d")])


async def test_a_future_offset_of_an_empty_topic_becomes_zero() -> None:
    async with figg_peer() as peer:
        peer.say(encode.attach("t", 255))
        await peer.until(lambda: peer.attached() == [Attached("t", 0)])


async def test_a_second_attach_replaces_the_first() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a", b"b"])
        peer.say(encode.attach("t", 1))
        await peer.until(lambda: len(peer.records("t")) == 1)
        peer.say(encode.attach("t", 0))
        await peer.until(lambda: len(peer.records("t")) == 3)
        await peer.stored("t", [b"live"])
        await peer.settle()
        assert peer.attached() == [Attached("t", 1), Attached("t", 0)]
        assert peer.records("t") == [(2, b"b"), (1, b"a"), (2, b"b"), (3, b"live")]


async def test_nothing_follows_a_detached() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a"])
        peer.say(encode.attach("t", 0))
        await peer.until(lambda: len(peer.records("t")) == 1)
        peer.say(encode.detach("t"))
        await peer.stored("t", [b"b"])
        await peer.settle()
        assert peer.look() == [Attached("t", 0), DataBatch("t", [1], [b"a"]), Detached("t")]


async def test_a_detach_in_the_same_read_as_its_attach_delivers_nothing() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a"])
        peer.say(encode.attach("t", 0), encode.detach("t"))
        await peer.settle()
        assert peer.look() == [Attached("t", 0), Detached("t")]


async def test_a_detach_is_answered_even_if_nothing_was_attached() -> None:
    async with figg_peer() as peer:
        peer.say(encode.detach("never heard of"))
        assert peer.look() == [Detached("never heard of")]


async def test_attach_detach_attach_ends_attached() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a"])
        peer.say(encode.attach("t", 0), encode.detach("t"), encode.attach("t", 0))
        await peer.until(lambda: peer.records("t") == [(1, b"a")])
        assert peer.look() == [Attached("t", 0), Detached("t"), Attached("t", 0), DataBatch("t", [1], [b"a"])]


async def test_a_lost_connection_is_sent_nothing_and_others_go_on() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a"])
        peer.say(encode.attach("t", 0))
        await peer.until(lambda: len(peer.records("t")) == 1)
        peer.session.lost()
        await peer.stored("t", [b"b"])
        await peer.settle()
        assert peer.records("t") == [(1, b"a")]


async def test_history_passes_into_live_records_without_gap_or_duplicate() -> None:
    chance = random.Random(5)
    async with figg_peer() as peer:
        sent = 0
        for _ in range(20):
            await peer.stored("t", [b"%d" % number for number in range(sent, sent + 100)])
            sent += 100
        peer.say(encode.attach("t", 0))
        for _ in range(200):
            await peer.stored("t", [b"%d" % number for number in range(sent, sent + 10)])
            sent += 10
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        await peer.until(lambda: len(peer.records("t")) >= sent)
        assert peer.records("t") == [(number + 1, b"%d" % number) for number in range(sent)]


async def test_a_tombstone_is_sent_as_empty_data() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a", None, b"c"])
        peer.say(encode.attach("t", 0))
        await peer.until(lambda: peer.records("t") == [(1, b"a"), (2, b""), (3, b"c")])


async def test_expired_records_leave_gaps_in_the_offsets() -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        soon = peer.clock.now + 1_000
        await peer.broker.publish(WHO, "t", RecordBatch([b"a", b"b", b"c"], expiries=[0, soon, 0]), partition=0)
        peer.clock.now = soon
        peer.say(encode.attach("t", 0))
        await peer.until(lambda: peer.records("t") == [(1, b"a"), (3, b"c")])


async def test_a_deleted_topic_closes_the_connection() -> None:
    async with figg_peer() as peer:
        await peer.stored("t", [b"a"])
        peer.say(encode.attach("t"))
        await peer.settle()
        await peer.broker.delete_topic(WHO, "t")
        await peer.until(peer.is_closed)
        assert peer.reason().startswith("unknown_topic: ")


async def test_who_may_not_read_is_closed() -> None:
    def authorize(who: Principal, action: Action, resource: Resource) -> bool:
        return action is not Action.READ

    async with figg_peer(authorize=authorize) as peer:
        await peer.stored("t", [b"secret"])
        peer.say(encode.attach("t", 0))
        await peer.until(peer.is_closed)
        assert peer.reason().startswith("not_authorized: ")
        assert peer.records("t") == []


async def test_one_attachment_more_than_allowed_closes_the_connection() -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        for index in range(SUBSCRIPTIONS_PER_CONNECTION_MAX):
            await peer.broker.ensure_topic(WHO, f"t{index}")
            peer.say(encode.attach(f"t{index}"))
        peer.say(encode.attach("t0"))
        await peer.settle()
        assert not peer.is_closed()
        peer.say(encode.attach("t"))
        await peer.until(peer.is_closed)
        assert peer.reason().startswith("limit_exceeded: ")


async def test_a_peer_that_does_not_read_is_fed_no_more_than_the_bound_and_still_gets_its_pong() -> None:
    async with figg_peer() as peer:
        for _ in range(16):
            await peer.stored("t", [bytes(1_000)] * 1_000)
        peer.link.is_clogged = True
        peer.say(encode.attach("t", 0))
        await peer.settle()
        queued = peer.link.waiting_bytes
        assert OUTPUT_HIGH_WATER_BYTES < queued <= OUTPUT_HIGH_WATER_BYTES + 2 * CREDIT_BYTES + (1 << 20)
        peer.say(encode.ping(7))
        assert peer.look()[-1] == Pong(7)
        while peer.link.waiting_bytes:
            peer.link.waiting_bytes = 0
            peer.session.drained()
            await peer.settle()
        assert [offset for offset, _ in peer.records("t")] == list(range(1, 16_001))


async def test_many_attachments_to_deep_topics_stay_within_the_output_limit_and_all_arrive() -> None:
    async with figg_peer() as peer:
        for index in range(40):
            await peer.stored(f"t{index}", [bytes(10_000)] * 100)
        peer.link.is_clogged = True
        peer.say(*(encode.attach(f"t{index}", 0) for index in range(40)))
        most = 0
        while sum(len(peer.records(f"t{index}")) for index in range(40)) < 4_000:
            await peer.settle()
            assert peer.link.waiting_bytes > 0, "the feeding has come to a halt"
            most = max(most, peer.link.waiting_bytes)
            peer.link.waiting_bytes = 0
            peer.session.drained()
        assert most <= OUTPUT_BUFFER_BYTES_MAX + (1 << 20)
        for index in range(40):
            assert [offset for offset, _ in peer.records(f"t{index}")] == list(range(1, 101))


async def test_live_attachments_that_all_burst_at_once_are_parked_and_lose_nothing() -> None:
    """Each has credit of its own; together they would exceed the output limit."""
    async with figg_peer() as peer:
        for index in range(40):
            await peer.broker.ensure_topic(WHO, f"t{index}")
            peer.say(encode.attach(f"t{index}"))
        await peer.settle()
        await peer.settle()
        peer.link.is_clogged = True
        for index in range(40):
            await peer.stored(f"t{index}", [bytes(10_000)] * 30)
        await peer.settle()
        assert OUTPUT_HIGH_WATER_BYTES < peer.link.waiting_bytes <= OUTPUT_BUFFER_BYTES_MAX + (1 << 20)
        async with asyncio.timeout(300):
            while sum(len(peer.records(f"t{index}")) for index in range(40)) < 1_200:
                peer.link.waiting_bytes = 0
                peer.session.drained()
                await peer.settle()
        for index in range(40):
            assert [offset for offset, _ in peer.records(f"t{index}")] == list(range(1, 31))
