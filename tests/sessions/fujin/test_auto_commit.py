"""Auto commit in chunks: readers take turns, no chunk is lost with a reader, and readers of both kinds share a group."""

from __future__ import annotations

import pytest

from headrace.errors import DiskFull
from headrace.limits import OUTPUT_HIGH_WATER_BYTES
from headrace.wire.fujin import MessageBatch, ReaderKind, Request, encode
from tests.broker.harness import turns
from tests.net.polling import until
from tests.sessions.fujin.support import WHO, Peer, ServedProtocol, fujin_protocol


async def put(protocol: ServedProtocol, *values: str, topic: str = "t", partition: int | None = None) -> None:
    await protocol.env.broker.ensure_topic(WHO, topic)
    await protocol.env.put(*values, topic=topic, partition=partition)


def committed(protocol: ServedProtocol, partition: int = 0) -> int | None:
    protocol.env.clock.tick(protocol.env.settings.settlement_commit_ms)
    return protocol.env.broker.committed(WHO, "t", "t", partition)


def lose(protocol: ServedProtocol, peer: Peer) -> None:
    peer.session.lost()
    protocol.peers.remove(peer)


def values(peer: Peer) -> list[bytes]:
    return [value for message in peer.heard() if isinstance(message, MessageBatch) for value in message.values]


async def test_readers_take_turns_and_each_message_goes_to_one_of_them() -> None:
    async with fujin_protocol() as protocol:
        one, two = await protocol.reader(auto_commit=True), await protocol.reader(auto_commit=True)
        for number in range(10):
            await put(protocol, str(number))
            await turns()
        first, second = values(one), values(two)
        assert sorted(first + second) == [b"%d" % number for number in range(10)]
        assert len(first) == len(second) == 5
        await until(lambda: committed(protocol) == 10)


async def test_the_progress_is_the_first_message_that_has_not_arrived() -> None:
    async with fujin_protocol() as protocol:
        stuck, quick = await protocol.reader(auto_commit=True), await protocol.reader(auto_commit=True)
        stuck.link.is_clogged = True
        for number in range(4):
            await put(protocol, str(number))
            await turns()
        missing = min(int(value) for value in values(stuck))
        await until(lambda: committed(protocol) == missing)
        lose(protocol, stuck)
        await until(lambda: committed(protocol) == 4)
        assert {int(value) for value in values(quick)} == {0, 1, 2, 3}, "what the lost one had comes to the other"


async def test_the_last_to_leave_leaves_the_groups_progress_behind() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a", "b")
        reader = await protocol.reader(auto_commit=True)
        await reader.messages(2)
        reader.say(encode.DISCONNECT)
        await until(lambda: reader.link.closed is not None)
        assert committed(protocol) == 2
        again = await protocol.reader(auto_commit=True)
        await put(protocol, "c")
        assert [value for _, value in await again.messages(1)] == [b"c"]


@pytest.mark.parametrize("kind", list(ReaderKind))
async def test_readers_that_acknowledge_and_readers_that_do_not_share_a_group(kind: ReaderKind) -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a")
        automatic = await protocol.reader(auto_commit=True)
        await automatic.messages(1)
        manual = await protocol.reader(kind=kind)
        await put(protocol, *"bcdefg")
        found: list[bytes] = []
        if kind is ReaderKind.PULL:
            manual.say(encode.fetch(b"cids", 2))

        def all_there() -> bool:
            for peer in (automatic, manual):
                for message in peer.heard():
                    found.extend(getattr(message, "values", []))
            return len(found) == 6

        await until(all_there)
        assert sorted(found) == [b"b", b"c", b"d", b"e", b"f", b"g"]


async def test_a_reader_that_does_not_drain_is_not_fed() -> None:
    async with fujin_protocol() as protocol:
        reader = await protocol.reader(auto_commit=True)
        reader.link.is_clogged = True
        for _ in range(8):
            await put(protocol, *["x" * 60_000] * 4)
        await turns(200)
        assert OUTPUT_HIGH_WATER_BYTES < reader.link.unsent_bytes < 2 * OUTPUT_HIGH_WATER_BYTES
        reader.link.is_clogged, reader.link.unsent_bytes = False, 0
        reader.session.drained()
        await until(lambda: len(reader.link.sent) > 8 * 4 * 60_000)


async def test_partitions_that_are_added_are_read_from_their_start() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a")
        reader = await protocol.reader(auto_commit=True)
        await reader.messages(1)
        await protocol.env.broker.alter_topic(WHO, "t", partitions=2)
        await put(protocol, "b", partition=1)
        assert [value for _, value in await reader.messages(1)] == [b"b"]
        await until(lambda: committed(protocol, 1) == 1)


async def test_progress_that_cannot_be_committed_now_is_committed_later() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a")
        reader = await protocol.reader(auto_commit=True)
        await until(lambda: committed(protocol) == 1)
        protocol.env.engine.topic, protocol.env.engine.error = "__offsets", DiskFull("no room")
        await put(protocol, "b")
        await reader.messages(2)
        before = protocol.env.engine.appends
        await until(lambda: committed(protocol) == 1 and protocol.env.engine.appends > before)
        protocol.env.engine.error = None
        await until(lambda: committed(protocol) == 2)


async def test_a_topic_that_goes_away_disconnects_its_readers() -> None:
    async with fujin_protocol() as protocol:
        await put(protocol, "a")
        reader = await protocol.reader(auto_commit=True)
        await reader.messages(1)
        await protocol.env.broker.delete_topic(WHO, "t")
        await until(lambda: reader.link.closed is not None)
        assert bytes(reader.link.sent).endswith(b"\x0a")


async def test_a_settlement_with_auto_commit_is_an_error() -> None:
    async with fujin_protocol() as protocol:
        reader = await protocol.reader(auto_commit=True)
        reader.say(encode.settle(Request.ACK, b"cids", [b"x"]))
        (failed,) = await reader.hears()
        assert getattr(failed, "error", "") == "not supported"
