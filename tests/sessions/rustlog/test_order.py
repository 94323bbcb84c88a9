"""One connection: order, windows, slow peers, and ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from headrace.broker.publishing.published import Published
from headrace.errors import DiskFull
from headrace.limits import (
    FETCHES_AT_ONCE_MAX,
    IN_FLIGHT_BYTES_MAX,
    MIB,
    OUTPUT_BUFFER_BYTES_MAX,
    OUTPUT_HIGH_WATER_BYTES,
    RUSTLOG_REQUESTS_IN_FLIGHT_MAX,
    TURN_BYTES_MIN,
)
from headrace.records import RecordBatch
from headrace.sessions.rustlog.session import RustLogSession, RustLogSettings
from headrace.wire.rustlog import Dialect, encode_request
from headrace.wire.rustlog import messages as m
from tests.sessions.rustlog.support import WHO, ListenerContext, Peer, running_server

JSON, BINARY = Dialect.JSON, Dialect.BINARY


@pytest.fixture
async def server() -> AsyncIterator[ListenerContext]:
    async with running_server() as made:
        await made.broker.create_topic(WHO, "t", partitions=2)
        yield made


@pytest.fixture
async def peer(server: ListenerContext) -> Peer:
    return server.connect()


class Disk:
    """Holds every publish until the test ends it."""

    def __init__(self, server: ListenerContext, monkeypatch: pytest.MonkeyPatch) -> None:
        self.staged: list[tuple[RecordBatch, asyncio.Future[Published]]] = []
        self._end = 0
        monkeypatch.setattr(server.broker, "publish", self._publish)
        monkeypatch.setattr(server.broker, "publish_one", self._publish_one)

    def _publish(self, who: object, topic: str, batch: RecordBatch, *, partition: int) -> asyncio.Future[Published]:
        future: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
        self.staged.append((batch, future))
        return future

    def _publish_one(self, who: object, topic: str, value: bytes, *, partition: int) -> asyncio.Future[Published]:
        return self._publish(who, topic, RecordBatch([value]), partition=partition)

    def sync(self, count: int | None = None) -> None:
        """The oldest publishes are on disk."""
        for _ in range(len(self.staged) if count is None else count):
            batch, future = self.staged.pop(0)
            future.set_result(Published(0, self._end, len(batch), 0))
            self._end += len(batch)


@pytest.fixture
def disk(server: ListenerContext, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(server, monkeypatch)


async def turn() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def frames(*requests: m.Request, dialect: Dialect = BINARY) -> bytes:
    return b"".join(encode_request(dialect, request) for request in requests)


async def test_pipelined_requests_are_answered_in_order_each_in_its_dialect(peer: Peer) -> None:
    stream = b"".join(
        [
            frames(m.Ping()),
            frames(m.Produce("t", 0, [b"a"]), dialect=JSON),
            frames(m.Fetch("t", 0, 0, 100), m.Produce("nowhere", 0, [b"x"]), m.Produce("t", 0, [b"b", b"c"])),
            frames(m.OffsetCommit("t", 0, "g", 1), m.Fetch("t", 0, 0, 100, "g"), dialect=JSON),
            b"\0\0\0\x01\x80",
            frames(m.ListTopics(), m.CreateTopic("u", 1), m.ListTopics()),
        ]
    )
    peer.send(stream)
    replies = await peer.replies(11)
    assert replies == [
        m.Pong(),
        m.ProduceReply(range(1)),
        m.FetchReply(range(1), [b"a"], 1),
        m.ErrorReply("Topic or partition does not exist: topic=nowhere, partition=0", 10),
        m.ProduceReply(range(1, 3)),
        m.OffsetCommitReply(True),
        m.FetchReply(range(1, 3), [b"b", b"c"], 3),
        m.ErrorReply("failed to parse request: unknown request type: 128"),
        m.ListTopicsReply([("t", 2)]),
        m.CreateTopicReply(True),
        m.ListTopicsReply([("t", 2), ("u", 1)]),
    ]
    assert peer.wire.closed is None and peer.wire.pauses == 0


async def test_a_stream_cut_into_bytes_is_served_the_same(peer: Peer) -> None:
    stream = frames(m.Produce("t", 0, [b"a"]), m.Fetch("t", 0, 0, 10), m.Ping())
    for at in range(len(stream)):
        peer.send(stream[at : at + 1])
    assert await peer.replies(3) == [m.ProduceReply(range(1)), m.FetchReply(range(1), [b"a"], 1), m.Pong()]


async def test_produces_are_staged_at_once_and_answered_when_they_are_kept(peer: Peer, disk: Disk) -> None:
    peer.send(frames(*[m.Produce("t", 0, [b"%d" % index]) for index in range(5)]))
    assert len(disk.staged) == 5 and peer.heard() == []
    disk.sync(2)
    await turn()
    assert peer.heard() == [m.ProduceReply(range(1)), m.ProduceReply(range(1, 2))]
    disk.sync()
    assert await peer.replies(3) == [m.ProduceReply(range(index, index + 1)) for index in (2, 3, 4)]


async def test_replies_keep_the_order_of_the_requests_whatever_order_the_disk_has(peer: Peer, disk: Disk) -> None:
    peer.send(frames(m.Produce("t", 0, [b"a"]), m.Produce("t", 1, [b"b"])))
    disk.staged[1][1].set_exception(DiskFull("no space"))
    await turn()
    assert peer.heard() == []
    disk.staged[0][1].set_result(Published(0, 7, 1, 0))
    assert await peer.replies(2) == [m.ProduceReply(range(7, 8)), m.ErrorReply("Failed to write record: no space", 503)]


async def test_one_flush_is_answered_in_one_write(peer: Peer, disk: Disk) -> None:
    peer.send(frames(*[m.Produce("t", 0, [b"%d" % index]) for index in range(100)]))
    disk.sync()
    await peer.replies(100)
    assert peer.wire.sends == 1


async def test_every_other_request_waits_for_the_produces_before_it(peer: Peer, disk: Disk) -> None:
    peer.send(frames(m.Produce("t", 0, [b"a"]), m.Ping(), m.Produce("t", 0, [b"b"])))
    await turn()
    assert len(disk.staged) == 1 and peer.heard() == [] and peer.wire.pauses == 1
    disk.sync()
    assert await peer.replies(2) == [m.ProduceReply(range(1)), m.Pong()]
    assert len(disk.staged) == 1 and peer.wire.pauses == 0
    disk.sync()
    assert await peer.replies(1) == [m.ProduceReply(range(1, 2))]


async def test_a_refused_produce_waits_its_turn(peer: Peer) -> None:
    peer.send(frames(m.Produce("t", 0, [b"a"]), m.Produce("nowhere", 0, [b"x"]), m.Produce("t", 0, [b"b"])))
    first, second, third = await peer.replies(3)
    assert (first, third) == (m.ProduceReply(range(1)), m.ProduceReply(range(1, 2)))
    assert isinstance(second, m.ErrorReply)


async def test_a_flooding_writer_is_not_read_beyond_its_window_of_requests(peer: Peer, disk: Disk) -> None:
    count = RUSTLOG_REQUESTS_IN_FLIGHT_MAX + 10
    peer.send(frames(*[m.Produce("t", 0, [b"a"])] * count))
    assert len(disk.staged) == RUSTLOG_REQUESTS_IN_FLIGHT_MAX
    assert peer.wire.pauses == 1
    disk.sync(1)
    await peer.replies(1)
    assert len(disk.staged) == RUSTLOG_REQUESTS_IN_FLIGHT_MAX and peer.wire.pauses == 1
    disk.sync()
    await turn()
    disk.sync()
    await peer.replies(count - 1)
    assert peer.wire.pauses == 0


async def test_a_flooding_writer_is_not_read_beyond_its_window_of_bytes(peer: Peer, disk: Disk) -> None:
    size_bytes = IN_FLIGHT_BYTES_MAX * 3 // 8
    big = m.Produce("t", 0, [bytes(size_bytes)])
    peer.send(frames(*[big] * 5))
    assert len(disk.staged) == IN_FLIGHT_BYTES_MAX // size_bytes + 1
    assert peer.wire.pauses == 1
    disk.sync(1)
    await peer.replies(1)
    assert len(disk.staged) == 3
    disk.sync()
    await turn()
    disk.sync()
    await peer.replies(4)
    assert peer.wire.pauses == 0 and peer.session._in_flight_bytes == 0


async def test_a_peer_that_does_not_take_its_replies_is_not_served_further_ones(server: ListenerContext, peer: Peer) -> None:
    peer.wire.unsent_bytes = OUTPUT_HIGH_WATER_BYTES + 1
    peer.send(frames(m.Ping(), m.Ping()))
    await turn()
    assert peer.heard() == [] and peer.wire.pauses == 1
    assert server.context.slow_consumers == 1
    peer.wire.unsent_bytes = 0
    peer.session.drained()
    assert await peer.replies(2) == [m.Pong(), m.Pong()]
    assert peer.wire.pauses == 0


async def test_thousands_of_small_requests_are_answered_in_few_writes(peer: Peer) -> None:
    peer.send(frames(*[m.Ping()] * 20_000))
    assert len(await peer.replies(20_000)) == 20_000
    assert peer.wire.sends <= 3


async def test_a_wrong_length_is_answered_after_everything_before_it_and_then_the_link_is_closed(peer: Peer, disk: Disk) -> None:
    peer.send(frames(m.Produce("t", 0, [b"a"])) + bytes(4) + frames(m.Ping()))
    await turn()
    assert peer.heard() == [] and peer.wire.closed is None
    disk.sync()
    assert await peer.replies(2) == [m.ProduceReply(range(1)), m.ErrorReply("Frame error: invalid protocol: zero-length frame", 1)]
    assert await peer.closed() == ("bad frame: Frame error: invalid protocol: zero-length frame", True)
    peer.send(frames(m.Ping()))
    assert peer.heard() == []


async def test_a_drain_completes_what_was_received_and_takes_nothing_new(peer: Peer, disk: Disk) -> None:
    peer.send(frames(m.Produce("t", 0, [b"a"]), m.Fetch("t", 0, 0, 10)))
    peer.session.closing()
    peer.send(frames(m.Ping()))
    await turn()
    assert peer.wire.closed is None
    disk.sync()
    assert await peer.replies(2) == [m.ProduceReply(range(1)), m.FetchReply(range(0), [], 0)]
    assert await peer.closed() == ("drained", False)
    assert peer.heard() == []


async def test_an_idle_connection_is_drained_at_once(peer: Peer) -> None:
    peer.session.closing()
    assert peer.wire.closed == ("drained", False)


async def test_a_peer_that_stops_in_the_middle_of_a_frame_is_closed_and_a_slow_one_is_not() -> None:
    async with running_server(settings=RustLogSettings(stall_seconds=0.05)) as server:
        await server.broker.create_topic(WHO, "t")
        stalled, slow, idle = server.connect(), server.connect(), server.connect()
        frame = frames(m.Produce("t", 0, [b"a" * 20]))
        idle.send(frames(m.Ping()))
        stalled.send(frame[:-1])
        for at in range(len(frame)):
            slow.send(frame[at : at + 1])
            await asyncio.sleep(0.005)
        assert await slow.replies(1) == [m.ProduceReply(range(1))]
        assert await stalled.closed() == (f"stalled: {len(frame) - 1} bytes of an incomplete frame", True)
        assert idle.wire.closed is None and slow.wire.closed is None


async def test_a_lost_connection_leaves_nothing_behind_and_its_writes_stand(server: ListenerContext) -> None:
    peer = server.connect()
    peer.send(frames(m.Produce("t", 0, [b"a"]), m.Fetch("t", 0, 0, 10), m.Ping()))
    server.peers.remove(peer)
    peer.session.lost()
    await turn()
    assert peer.heard() in ([], [m.ProduceReply(range(1))])
    assert server.broker.bounds(WHO, "t", 0).end == 1
    assert server.context.connections == 0


async def test_a_request_under_way_is_given_up_with_its_connection(server: ListenerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(server.broker, "commit", never)
    peer = server.connect()
    peer.send(frames(m.OffsetCommit("t", 0, "g", 1)))
    await turn()
    server.peers.remove(peer)
    peer.session.lost()
    async with asyncio.timeout(300):
        await given_up.wait()


async def test_a_defect_closes_its_own_connection_and_is_reported(server: ListenerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    defect = RuntimeError("a defect")

    async def broken(*_: object, **__: object) -> None:
        raise defect

    monkeypatch.setattr(server.broker, "commit", broken)
    peer, other = server.connect(), server.connect()
    peer.send(frames(m.OffsetCommit("t", 0, "g", 1)))
    assert await peer.closed() == ("internal error: the request could not be completed", True)
    await turn()
    assert reported == [defect]
    assert await other.exchange(BINARY, m.Ping()) == m.Pong()


async def test_a_write_that_ends_in_a_defect_is_not_answered_as_written(server: ListenerContext, peer: Peer, disk: Disk) -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    peer.send(frames(m.Produce("t", 0, [b"a"])))
    defect = RuntimeError("a defect")
    disk.staged[0][1].set_exception(defect)
    assert await peer.closed() == ("internal error: the request could not be completed", True)
    await turn()
    assert peer.heard() == [] and reported == [defect]


@pytest.mark.parametrize("dialect", Dialect)
async def test_a_reply_fits_the_output_buffer_however_much_was_asked_for(server: ListenerContext, dialect: Dialect) -> None:
    values = [bytes([255]) * 100_000] * 100
    await server.broker.publish(WHO, "t", RecordBatch(values), partition=0)
    peer = server.connect()
    reply = await peer.exchange(dialect, m.Fetch("t", 0, 0, 10 * MIB))
    assert isinstance(reply, m.FetchReply) and 0 < len(reply.values) < 100
    assert OUTPUT_BUFFER_BYTES_MAX // 2 < len(peer.wire.sent) + OUTPUT_HIGH_WATER_BYTES <= OUTPUT_BUFFER_BYTES_MAX


async def test_a_single_record_may_fill_a_frame(server: ListenerContext) -> None:
    await server.broker.publish(WHO, "t", RecordBatch([bytes(9 * MIB), b"next"]), partition=0)
    reply = await server.connect().exchange(BINARY, m.Fetch("t", 0, 0, 10 * MIB))
    assert isinstance(reply, m.FetchReply) and list(map(len, reply.values)) == [9 * MIB]


async def test_many_readers_of_a_backlog_take_turns_and_others_are_served_in_between(server: ListenerContext) -> None:
    """Without turns, all replies are encoded before the loop comes to anything else."""
    await server.broker.publish(WHO, "t", RecordBatch([bytes(100_000)] * 20), partition=0)
    readers = [server.connect() for _ in range(30)]
    for reader in readers:
        reader.send(frames(m.Fetch("t", 0, 0, 10 * MIB)))
    served = [0]
    async with asyncio.timeout(300):
        while served[-1] < 30:
            await asyncio.sleep(0)
            served.append(sum(bool(reader.wire.sent) for reader in readers))
    assert max(after - before for before, after in itertools.pairwise(served)) == 1


async def test_a_fetch_looks_again_whether_its_peer_may_be_fed_when_there_is_a_place_for_it(server: ListenerContext) -> None:
    """Hundreds may have found so at once, before the first of them has sent anything."""
    await server.broker.publish(WHO, "t", RecordBatch([b"x"]), partition=0)
    peer = server.connect()
    places = server.context.turns.fetches
    for _ in range(FETCHES_AT_ONCE_MAX):
        await places.acquire()
    peer.send(frames(m.Fetch("t", 0, 0, TURN_BYTES_MIN + 1)))
    await turn()
    peer.wire.unsent_bytes = OUTPUT_HIGH_WATER_BYTES + 1
    for _ in range(FETCHES_AT_ONCE_MAX):
        places.release()
    await turn()
    assert peer.heard() == []
    peer.wire.unsent_bytes = 0
    peer.session.drained()
    assert await peer.replies(1) == [m.FetchReply(range(1), [b"x"], 1)]


async def test_a_small_fetch_of_records_in_memory_starts_no_work(server: ListenerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.broker.publish(WHO, "t", RecordBatch([b"x", b"y"]), partition=0)
    peer = server.connect()
    monkeypatch.setattr(RustLogSession, "_start", None)
    peer.send(frames(m.Fetch("t", 0, 1, 100)))
    assert await peer.replies(1) == [m.FetchReply(range(1, 2), [b"y"], 2)]
