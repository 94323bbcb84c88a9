"""Writers: what is answered, when, and what a transaction and its id mean."""

from __future__ import annotations

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.errors import DiskFull
from headrace.limits import IN_FLIGHT_BYTES_MAX
from headrace.sessions.fujin.settings import Connectors, FujinSettings
from headrace.wire.fujin import Disconnected, Failed, Reply, Request, Stop, Transacted, WrittenBatch, encode
from tests.broker.harness import turns
from tests.net.polling import until
from tests.sessions.fujin.support import ServedProtocol, cid, fujin_protocol


async def values(protocol: ServedProtocol, topic: str) -> list[bytes | None]:
    return [record.value for record in await protocol.env.records(topic)]


async def test_a_write_is_answered_when_it_is_durable() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("t", [cid(1)], [b"first"]))
        assert await writer.hears() == [WrittenBatch([cid(1)])]
        protocol.env.engine.hold()
        writer.say(encode.writes("t", [cid(2), cid(3)], [b"a", b"b"]))
        assert await writer.hears() == []
        protocol.env.engine.let_go()
        assert await writer.hears() == [WrittenBatch([cid(2), cid(3)])]
        assert await values(protocol, "t") == [b"first", b"a", b"b"]


async def test_headers_are_kept() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("t", [cid(1)], [b"v"], [(("k", b"x"),)]))
        await writer.hears()
        assert [record.headers for record in await protocol.env.records("t")] == [(("k", b"x"),)]


async def test_answers_leave_in_the_order_of_completion() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("slow", [cid(1)], [b"x"]) + encode.writes("fast", [cid(2)], [b"x"]))
        await writer.hears()
        protocol.env.engine.topic, protocol.env.engine.error = "fast", DiskFull("no room")
        protocol.env.engine.hold()
        writer.say(encode.writes("slow", [cid(3)], [b"x"]) + encode.writes("fast", [cid(4)], [b"x"]))
        (failed,) = await writer.hears()
        assert failed == Failed(Reply.WRITE, cid(4), "disk_full: no room")
        protocol.env.engine.let_go()
        assert await writer.hears() == [WrittenBatch([cid(3)])]


async def test_one_refused_write_leaves_the_stream_open() -> None:
    async with fujin_protocol(broker=BrokerSettings(auto_create=False)) as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("t", [cid(1)], [b"x"]))
        assert await writer.hears() == [Failed(Reply.WRITE, cid(1), "writer not found")]
        assert writer.link.closed is None


async def test_a_writers_name_is_what_its_connector_says() -> None:
    settings = FujinSettings(Connectors(writers={"pub": "orders"}, only_named=True))
    async with fujin_protocol(settings) as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("pub", [cid(1)], [b"x"]) + encode.writes("orders", [cid(2)], [b"x"]))
        assert {type(message) for message in await writer.hears()} == {WrittenBatch, Failed}
        assert await values(protocol, "orders") == [b"x"]


async def test_a_writer_that_floods_is_not_read() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("t", [cid(0)], [b"x"]))
        await writer.hears()
        protocol.env.engine.hold()
        value = b"x" * 60_000
        for number in range(IN_FLIGHT_BYTES_MAX // len(value) + 2):
            writer.say(encode.writes("t", [cid(number)], [value]))
        assert writer.link.pauses == 1
        protocol.env.engine.let_go()
        await until(lambda: writer.link.pauses == 0)


async def test_disconnect_is_said_after_everything_is_durable() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("t", [cid(1)], [b"x"]))
        await writer.hears()
        protocol.env.engine.hold()
        writer.say(encode.writes("t", [cid(2)], [b"y"]) + encode.DISCONNECT)
        assert await writer.hears() == [] and writer.link.closed is None
        protocol.env.engine.let_go()
        assert await writer.hears() == [WrittenBatch([cid(2)]), Disconnected()]
        assert writer.link.closed == ("disconnected", False)


async def test_the_end_of_the_stream_is_a_disconnect() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("t", [cid(1)], [b"x"]))
        writer.session.finished()
        assert await writer.hears() == [WrittenBatch([cid(1)]), Disconnected()]


async def test_stop_asks_the_writer_to_leave_and_goes_on_answering() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.session.closing()
        writer.say(encode.writes("t", [cid(1)], [b"x"]))
        assert await writer.hears() == [Stop(), WrittenBatch([cid(1)])]
        writer.say(encode.DISCONNECT)
        assert await writer.hears() == [Disconnected()]
        assert writer.link.closed is not None


async def test_a_writer_that_does_not_leave_is_left() -> None:
    async with fujin_protocol(FujinSettings(stop_seconds=0.02)) as protocol:
        writer = await protocol.writer()
        writer.session.closing()
        await until(lambda: writer.link.closed is not None)
        assert writer.heard() == [Stop(), Disconnected()]


@pytest.mark.parametrize(
    ("frames", "sent"),
    [
        (b"\x63", b""),
        (b"\x03", b""),
        (encode.connect_writer() + b"\x07", encode.DISCONNECT),
        (encode.connect_writer() + b"\x01", encode.DISCONNECT),
    ],
)
async def test_what_a_writer_may_not_say_ends_its_stream(frames: bytes, sent: bytes) -> None:
    async with fujin_protocol() as protocol:
        peer = protocol.peer()
        peer.say(frames)
        await turns()
        assert bytes(peer.link.sent) == sent
        assert peer.link.closed is not None and peer.link.closed[1]


async def test_an_empty_value_is_refused_after_a_moment_and_ends_the_stream() -> None:
    async with fujin_protocol(FujinSettings(doubt_seconds=0.01)) as protocol:
        writer = await protocol.writer()
        writer.say(b"\x03" + cid(1) + b"\x00\x00\x00\x01t" + b"\x00\x00\x00\x00")
        await until(lambda: writer.link.closed is not None)
        assert writer.heard() == [Failed(Reply.WRITE, cid(1), "write size arg not provided"), Disconnected()]


async def test_a_value_that_is_too_large_is_refused_and_the_stream_goes_on() -> None:
    async with fujin_protocol(FujinSettings(message_bytes_max=10)) as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("t", [cid(1), cid(2)], [b"x" * 11, b"y"]))
        assert await writer.hears() == [Failed(Reply.WRITE, cid(1), "message too large: 11 bytes, at most 10"), WrittenBatch([cid(2)])]


# Transactions.


def begin(number: int = 1) -> bytes:
    return encode.transact(Request.BEGIN, cid(number))


def commit(number: int = 2) -> bytes:
    return encode.transact(Request.COMMIT, cid(number))


def rollback(number: int = 3) -> bytes:
    return encode.transact(Request.ROLLBACK, cid(number))


async def test_a_transaction_is_visible_when_it_is_committed_and_not_before() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer(7)
        writer.say(begin() + encode.writes("a", [cid(10)], [b"x"]) + encode.writes("b", [cid(11)], [b"y"]))
        assert await writer.hears() == [Transacted(Reply.BEGIN, cid(1)), WrittenBatch([cid(10), cid(11)])]
        assert await values(protocol, "a") == []
        writer.say(commit())
        assert await writer.hears() == [Transacted(Reply.COMMIT, cid(2))]
        assert (await values(protocol, "a"), await values(protocol, "b")) == ([b"x"], [b"y"])


async def test_a_rolled_back_transaction_leaves_nothing() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(begin() + encode.writes("a", [cid(10)], [b"x"]) + rollback())
        assert (await writer.hears())[-1] == Transacted(Reply.ROLLBACK, cid(3))
        assert await values(protocol, "a") == []
        writer.say(encode.writes("a", [cid(11)], [b"after"]))
        await writer.hears()
        assert await values(protocol, "a") == [b"after"]


@pytest.mark.parametrize(
    ("frames", "reply"), [(commit(1), Reply.COMMIT), (rollback(1), Reply.ROLLBACK), (begin(5) + begin(1), Reply.BEGIN)]
)
async def test_a_step_out_of_turn_is_refused(frames: bytes, reply: Reply) -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(frames)
        assert (await writer.hears())[-1] == Failed(reply, cid(1), "invalid tx state")
        assert writer.link.closed is None


async def test_disconnect_rolls_back() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer(b"me")
        writer.say(begin() + encode.writes("a", [cid(10)], [b"x"]) + encode.DISCONNECT)
        assert (await writer.hears())[-1] == Disconnected()
        assert await values(protocol, "a") == []
        assert len(protocol.ids) == 0


async def test_a_failed_commit_may_be_tried_again() -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer(b"me")
        writer.say(begin() + encode.writes("a", [cid(10)], [b"x"]))
        await writer.hears()
        protocol.env.engine.topic, protocol.env.engine.error = "a", DiskFull("no room")
        writer.say(commit())
        assert await writer.hears() == [Failed(Reply.COMMIT, cid(2), "disk_full: no room")]
        protocol.env.engine.error = None
        writer.say(commit(4))
        assert await writer.hears() == [Transacted(Reply.COMMIT, cid(4))]
        assert await values(protocol, "a") == [b"x"]


@pytest.mark.parametrize("id", [7, b"me"])
async def test_a_second_writer_with_the_same_id_fences_the_first(id: int | bytes) -> None:
    async with fujin_protocol() as protocol:
        old = await protocol.writer(id)
        old.say(begin() + encode.writes("a", [cid(10)], [b"old"]))
        await old.hears()
        new = await protocol.writer(id)
        new.say(begin() + encode.writes("a", [cid(10)], [b"new"]) + commit())
        assert (await new.hears())[-1] == Transacted(Reply.COMMIT, cid(2))
        old.say(encode.writes("a", [cid(11)], [b"late"]) + commit() + rollback() + begin(4))
        failures = await old.hears()
        assert [type(message) for message in failures] == [Failed, Failed, Transacted, Failed]
        assert all("fenced" in message.error for message in failures if isinstance(message, Failed))
        assert await values(protocol, "a") == [b"new"]


async def test_a_successor_waits_for_a_commit_that_is_under_way() -> None:
    async with fujin_protocol() as protocol:
        old = await protocol.writer(7)
        old.say(begin() + encode.writes("a", [cid(10)], [b"old"]))
        await old.hears()
        protocol.env.engine.hold()
        old.say(commit())
        await old.hears()
        new = await protocol.writer(7)
        new.say(begin() + encode.writes("a", [cid(10)], [b"new"]) + commit())
        assert await new.hears() == []
        protocol.env.engine.let_go()
        assert await old.hears() == [Transacted(Reply.COMMIT, cid(2))]
        assert (await new.hears())[-1] == Transacted(Reply.COMMIT, cid(2))
        assert await values(protocol, "a") == [b"old", b"new"]


async def test_writers_without_an_id_do_not_know_each_other() -> None:
    async with fujin_protocol() as protocol:
        first, second = await protocol.writer(), await protocol.writer()
        first.say(begin() + encode.writes("a", [cid(10)], [b"x"]))
        second.say(begin() + encode.writes("a", [cid(10)], [b"y"]) + commit())
        await second.hears()
        first.say(commit())
        assert (await first.hears())[-1] == Transacted(Reply.COMMIT, cid(2))


async def test_a_transaction_that_takes_too_long_is_rolled_back() -> None:
    async with fujin_protocol(FujinSettings(transaction_timeout_ms=1_000)) as protocol:
        writer = await protocol.writer(7)
        writer.say(begin() + encode.writes("a", [cid(10)], [b"x"]))
        await writer.hears()
        protocol.env.clock.tick(1_001)
        writer.say(commit())
        (failed,) = await writer.hears()
        assert isinstance(failed, Failed) and "took too long" in failed.error
        writer.say(rollback() + begin())
        assert await writer.hears() == [Transacted(Reply.ROLLBACK, cid(3)), Transacted(Reply.BEGIN, cid(1))]


@pytest.mark.parametrize("later", range(12))
async def test_a_write_that_comes_in_any_turn_of_a_topics_creation_is_answered(later: int) -> None:
    async with fujin_protocol() as protocol:
        writer = await protocol.writer()
        writer.say(encode.writes("new", [cid(1)], [b"x"]))
        await turns(later)
        writer.say(encode.writes("new", [cid(2)], [b"y"]))
        await until(lambda: len(writer.link.sent) == 12)
        assert await values(protocol, "new") == [b"x", b"y"]
