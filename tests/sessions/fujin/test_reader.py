"""Readers: pushed and fetched messages, stable ids, and unacknowledged messages."""

from __future__ import annotations

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.limits import OUTPUT_HIGH_WATER_BYTES
from headrace.sessions.fujin.settings import Connectors, FujinSettings, ReaderConnector
from headrace.wire.fujin import Disconnected, Failed, ReaderKind, Reply, Request, Stop, encode
from tests.broker.harness import turns
from tests.net.polling import until
from tests.sessions.fujin.support import WHO, ServedProtocol, cid, fujin_protocol


async def put(protocol: ServedProtocol, *values: str, topic: str = "t") -> None:
    await protocol.env.broker.ensure_topic(WHO, topic)
    await protocol.env.put(*values, topic=topic)


async def committed(protocol: ServedProtocol, group: str = "t", topic: str = "t") -> int | None:
    protocol.env.clock.tick(10_000)
    await turns()
    return protocol.env.broker.committed(WHO, group, topic, 0)


async def test_messages_are_pushed_history_first_then_as_they_come() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a", "b")
        reader = await protocol.reader()
        assert [value for _, value in await reader.messages(2)] == [b"a", b"b"]
        await put(protocol, "c")
        assert [value for _, value in await reader.messages(1)] == [b"c"]


@pytest.mark.parametrize("auto_commit", [False, True])
async def test_nothing_is_pushed_before_the_transport_has_acknowledged_the_reply(auto_commit: bool) -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a", "b")
        reader = protocol.peer(with_ids=not auto_commit)
        reader.link.is_clogged = True
        reader.say(encode.connect_reader(ReaderKind.PUSH, auto_commit, "t"))
        await until(lambda: len(reader.link.sent) > 0)
        await turns()
        assert bytes(reader.link.sent) == encode.reader_connected(None), "the reply is alone"
        reader._seen = len(reader.link.sent)
        reader.link.acknowledge()
        assert [value for _, value in await reader.messages(2)] == [b"a", b"b"]


async def test_a_reader_that_ends_before_its_reply_is_acknowledged_gets_no_messages() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a")
        reader = protocol.peer()
        reader.link.is_clogged = True
        reader.say(encode.connect_reader(ReaderKind.PUSH, False, "t") + encode.DISCONNECT)
        await until(lambda: reader.link.closed is not None)
        reader.link.acknowledge()
        await turns()
        assert bytes(reader.link.sent) == encode.reader_connected(None) + encode.DISCONNECT


async def test_an_acknowledged_message_is_the_groups_progress() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a", "b", "c")
        reader = await protocol.reader()
        ids = [id for id, _ in await reader.messages(3)]
        assert await reader.settles(Request.ACK, ids[:2]) == [True, True]
        assert await committed(protocol) == 2


async def test_an_id_is_settled_once_and_an_unknown_one_never() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a", "b")
        reader = await protocol.reader()
        ids = [id for id, _ in await reader.messages(2)]
        assert await reader.settles(Request.ACK, [ids[0], b"never sent", ids[0], b""]) == [True, False, False, False]
        assert await reader.settles(Request.ACK, []) == []


async def test_a_nacked_message_comes_again_after_its_backoff_with_the_same_id() -> None:
    async with fujin_protocol(FujinSettings(backoff_ms=1_000)) as protocol:
        await put(protocol, "a")
        reader = await protocol.reader()
        ((id, _),) = await reader.messages(1)
        assert await reader.settles(Request.NACK, [id]) == [True]
        protocol.env.clock.tick(999)
        assert await reader.hears() == []
        protocol.env.clock.tick(1)
        assert await reader.messages(1) == [(id, b"a")]
        assert await reader.settles(Request.ACK, [id]) == [True]


async def test_a_message_refused_too_often_goes_to_the_dead_letters() -> None:
    async with fujin_protocol(FujinSettings(backoff_ms=100, attempts_max=2)) as protocol:
        await put(protocol, "bad", "good")
        reader = await protocol.reader()
        (bad, _), (good, _) = await reader.messages(2)
        await reader.settles(Request.ACK, [good])
        await reader.settles(Request.NACK, [bad])
        protocol.env.clock.tick(100)
        assert await reader.messages(1) == [(bad, b"bad")]
        await reader.settles(Request.NACK, [bad])
        await turns(100)
        (letter,) = await protocol.env.records("t.dlq")
        assert letter.value == b"bad" and ("x-headrace-source-offset", b"0") in letter.headers
        assert await committed(protocol) == 2


async def test_a_message_without_an_answer_comes_again() -> None:
    async with fujin_protocol(FujinSettings(ack_timeout_ms=5_000)) as protocol:
        await put(protocol, "a")
        reader = await protocol.reader()
        first = await reader.messages(1)
        protocol.env.clock.tick(5_000)
        assert await reader.messages(1) == first


async def test_an_id_of_a_lost_stream_is_good_on_the_next_once_the_message_came_again() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a", "b")
        lost = await protocol.reader()
        old = [id for id, _ in await lost.messages(2)]
        lost.session.lost()
        protocol.peers.remove(lost)
        reader = await protocol.reader()
        assert [id for id, _ in await reader.messages(2)] == old
        assert await reader.settles(Request.ACK, old) == [True, True]
        assert await committed(protocol) == 2


async def test_an_id_does_not_settle_the_record_of_another_topic_with_the_same_place() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "old")
        first = await protocol.reader()
        ((old, _),) = await first.messages(1)
        first.session.lost()
        protocol.peers.remove(first)
        await turns()
        await protocol.env.broker.delete_topic(WHO, "t")
        protocol.env.clock.tick(1)
        await put(protocol, "new")
        second = await protocol.reader()
        ((new, _),) = await second.messages(1)
        assert old != new
        assert await second.settles(Request.ACK, [old]) == [False]


async def test_each_message_goes_to_one_reader_of_a_name() -> None:
    async with fujin_protocol(FujinSettings()) as protocol:
        one, two = await protocol.reader(kind=ReaderKind.PULL), await protocol.reader(kind=ReaderKind.PULL)
        await put(protocol, *"abcdef")
        found = [value for _, value in await one.fetches(3)] + [value for _, value in await two.fetches(3)]
        assert sorted(found) == [b"a", b"b", b"c", b"d", b"e", b"f"]


async def test_a_connector_gives_a_name_its_topics_group_and_start() -> None:
    connectors = Connectors(readers={"sub": ReaderConnector(("x", "y"), "billing", "latest")}, only_named=True)
    async with fujin_protocol(FujinSettings(connectors)) as protocol:
        await put(protocol, "old", topic="x")
        reader = await protocol.reader("sub")
        await put(protocol, "x1", topic="x")
        await put(protocol, "y1", topic="y")
        found = await reader.messages(2)
        assert sorted(value for _, value in found) == [b"x1", b"y1"]
        assert await reader.settles(Request.ACK, [id for id, _ in found]) == [True, True]
        assert (await committed(protocol, "billing", "x"), await committed(protocol, "billing", "y")) == (2, 1)
        other = protocol.peer()
        other.say(encode.connect_reader(ReaderKind.PUSH, True, "x"))
        await turns()
        assert bytes(other.link.sent) == encode.reader_connected("reader not found")
        assert other.link.closed is not None


async def test_several_topics_can_be_fetched_from() -> None:
    connectors = Connectors(readers={"sub": ReaderConnector(("x", "y"), "g")})
    async with fujin_protocol(FujinSettings(connectors)) as protocol:
        await put(protocol, "x1", topic="x")
        await put(protocol, "y1", topic="y")
        reader = await protocol.reader("sub", ReaderKind.PULL)
        found = await reader.fetches(10) + await reader.fetches(10)
        assert sorted(value for _, value in found) == [b"x1", b"y1"]
        assert await reader.settles(Request.ACK, [id for id, _ in found]) == [True, True]


async def test_a_fetch_waits_for_a_first_message() -> None:
    async with fujin_protocol() as protocol:
        reader = await protocol.reader(kind=ReaderKind.PULL)
        reader.say(encode.fetch(cid(1), 10))
        assert await reader.hears() == []
        await put(protocol, "a")
        await until(lambda: bytes(reader.link.sent[2:3]) == b"\x07")
        assert b"a" in reader.link.sent


async def test_a_fetch_that_waits_in_vain_is_answered_with_nothing() -> None:
    async with fujin_protocol(FujinSettings(fetch_wait_ms=500)) as protocol:
        reader = await protocol.reader(kind=ReaderKind.PULL)
        reader.say(encode.fetch(cid(1), 10))
        await turns()
        protocol.env.clock.tick(500)
        await turns()
        assert bytes(reader.link.sent[2:]) == encode.fetched(cid(1), [], [])


async def test_fetches_are_answered_in_order_and_do_not_hold_up_an_ack() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a")
        reader = await protocol.reader(kind=ReaderKind.PULL)
        ((id, _),) = await reader.fetches(1)
        reader.say(encode.fetch(cid(2), 1) + encode.fetch(cid(3), 1))
        assert await reader.settles(Request.ACK, [id]) == [True]
        await put(protocol, "b", "c")
        await turns(100)
        assert [getattr(message, "cid", None) for message in reader.heard()] == [cid(2), cid(3)]


@pytest.mark.parametrize(
    ("kind", "frames", "refused"),
    [
        (ReaderKind.PUSH, encode.fetch(cid(1), 1), Failed(Reply.FETCH, cid(1), "invalid reader type")),
        (ReaderKind.PULL, encode.fetch(cid(1), 0), Failed(Reply.FETCH, cid(1), "fetch arg not provided")),
        (ReaderKind.PUSH, encode.settle(Request.ACK, cid(1), [b"x"]), Failed(Reply.ACK, cid(1), "not supported")),
    ],
)
async def test_what_a_reader_cannot_have_is_refused_and_the_stream_goes_on(kind: ReaderKind, frames: bytes, refused: Failed) -> None:
    async with fujin_protocol() as protocol:
        reader = await protocol.reader(kind=kind, auto_commit=True)
        reader.say(frames)
        assert await reader.hears() == [refused]
        assert reader.link.closed is None


async def test_with_auto_commit_what_has_arrived_is_read() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a", "b")
        reader = await protocol.reader(auto_commit=True)
        assert [value for _, value in await reader.messages(2)] == [b"a", b"b"]
        assert await committed(protocol) == 2


async def test_with_auto_commit_what_has_not_arrived_comes_again() -> None:
    async with fujin_protocol() as protocol:
        reader = await protocol.reader(auto_commit=True)
        reader.link.is_clogged = True
        await put(protocol, "a")
        await reader.messages(1)
        assert await committed(protocol) == 0
        reader.session.lost()
        protocol.peers.remove(reader)
        again = await protocol.reader(auto_commit=True)
        assert [value for _, value in await again.messages(1)] == [b"a"]


async def test_a_reader_that_does_not_drain_is_not_fed() -> None:
    async with fujin_protocol() as protocol:
        reader = await protocol.reader()
        reader.link.is_clogged = True
        for _ in range(8):
            await put(protocol, *["x" * 60_000] * 4)
        await turns(200)
        unsent = reader.link.unsent_bytes
        assert OUTPUT_HIGH_WATER_BYTES < unsent < 2 * OUTPUT_HIGH_WATER_BYTES
        reader.link.is_clogged, reader.link.unsent_bytes = False, 0
        reader.session.drained()
        await until(lambda: len(reader.link.sent) > 8 * 4 * 60_000)


async def test_disconnect_leaves_the_groups_progress_behind() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a", "b")
        reader = await protocol.reader()
        (id, _), _ = await reader.messages(2)
        await reader.settles(Request.ACK, [id])
        reader.say(encode.DISCONNECT)
        assert await reader.hears() == [Disconnected()]
        assert protocol.env.broker.committed(WHO, "t", "t", 0) == 1
        assert reader.link.closed == ("disconnected", False)


async def test_stop_ends_the_push_and_lets_acks_in() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a")
        reader = await protocol.reader()
        ((id, _),) = await reader.messages(1)
        reader.session.closing()
        assert await reader.hears() == [Stop()]
        await put(protocol, "b")
        assert await reader.hears() == []
        assert await reader.settles(Request.ACK, [id]) == [True]


async def test_a_reader_whose_topic_goes_away_is_disconnected() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a")
        reader = await protocol.reader()
        await reader.messages(1)
        await protocol.env.broker.delete_topic(WHO, "t")
        await until(lambda: reader.link.closed is not None)
        assert reader.heard() == [Disconnected()]
        assert reader.link.closed is not None and reader.link.closed[0].startswith("reader failed")


async def test_an_unknown_reader_is_refused_without_a_last_word() -> None:
    async with fujin_protocol(broker=BrokerSettings(auto_create=False)) as protocol:
        reader = protocol.peer()
        reader.say(encode.connect_reader(ReaderKind.PUSH, False, "t"))
        await turns()
        assert bytes(reader.link.sent) == encode.reader_connected("reader not found")
        assert reader.link.closed is not None


@pytest.mark.parametrize("frames", [b"\x02\x03", b"\x02\x01\x02", b"\x02\x01\x01\x00\x00\x00\x00"])
async def test_a_malformed_reader_is_refused_without_a_last_word(frames: bytes) -> None:
    async with fujin_protocol() as protocol:
        reader = protocol.peer()
        reader.say(frames)
        await turns()
        assert bytes(reader.link.sent[:2]) == b"\x01\x01" and not reader.link.sent.endswith(b"\x0a")
        assert reader.link.closed is not None
