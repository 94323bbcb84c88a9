"""Where the specification and the original leave a question open, each answer has its row here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import Cleanup, TopicConfig
from headrace.errors import RecordTooLarge
from headrace.records import RecordBatch
from headrace.sessions.rustlog.session import RustLogSettings
from headrace.wire.rustlog import Dialect
from headrace.wire.rustlog import messages as m
from tests.sessions.rustlog.support import WHO, ListenerContext, Peer, running_server

JSON, BINARY = Dialect.JSON, Dialect.BINARY
both = pytest.mark.parametrize("dialect", Dialect)


@pytest.fixture
async def server() -> AsyncIterator[ListenerContext]:
    async with running_server() as made:
        await made.broker.create_topic(WHO, "orders", partitions=2)
        yield made


@pytest.fixture
async def peer(server: ListenerContext) -> Peer:
    return server.connect()


async def fill(peer: Peer, *values: bytes, partition: int = 0) -> None:
    reply = await peer.exchange(BINARY, m.Produce("orders", partition, values))
    assert isinstance(reply, m.ProduceReply)


async def trimmed(server: ListenerContext) -> None:
    """Topic "trimmed", whose offsets 0 to 2 retention has taken."""
    config = TopicConfig(retention_bytes=1, segment_bytes=65_536)
    await server.broker.create_topic(WHO, "trimmed", config=config)
    await server.broker.publish(WHO, "trimmed", RecordBatch([bytes(40_000)] * 3))
    await server.broker.publish(WHO, "trimmed", RecordBatch([b"kept"]))
    await server.engine.maintain()
    bounds = server.broker.bounds(WHO, "trimmed", 0)
    assert bounds.first == 3 and bounds.end == 4


async def gapped(server: ListenerContext) -> list[int]:
    """Topic "gapped", compacted; the offsets that are left."""
    await server.broker.create_topic(WHO, "gapped", config=TopicConfig(cleanup=Cleanup.COMPACT, segment_bytes=65_536))
    for index in range(20):
        await server.broker.publish(
            WHO, "gapped", RecordBatch([b"v%d" % index + bytes(40_000)], keys=[b"k%d" % (index % 4 if index % 3 else index)])
        )
    await server.engine.maintain()
    fetched = await server.broker.fetch(WHO, "gapped", 0, 0, bytes_max=1 << 30)
    left = [offset for batch in fetched.batches for offset in batch.offsets()]
    assert left != list(range(left[0], left[0] + len(left))), "compaction left no gap to test with"
    return left


@both
async def test_row_1_a_group_reads_on_from_the_higher_of_its_commit_and_the_requested_offset(peer: Peer, dialect: Dialect) -> None:
    await fill(peer, b"a", b"b", b"c", b"d")
    await peer.exchange(dialect, m.OffsetCommit("orders", 0, "g", 2))
    assert await peer.exchange(dialect, m.Fetch("orders", 0, 0, 1_024, "g")) == m.FetchReply(range(2, 4), [b"c", b"d"], 4)
    assert await peer.exchange(dialect, m.Fetch("orders", 0, 3, 1_024, "g")) == m.FetchReply(range(3, 4), [b"d"], 4)


@both
async def test_row_2_a_group_without_a_commit_starts_where_it_asks(peer: Peer, dialect: Dialect) -> None:
    await fill(peer, b"a", b"b")
    assert await peer.exchange(dialect, m.Fetch("orders", 0, 1, 1_024, "new")) == m.FetchReply(range(1, 2), [b"b"], 2)


async def test_row_2_in_binary_a_new_group_finds_an_unknown_partition_empty(peer: Peer) -> None:
    assert await peer.exchange(BINARY, m.Fetch("nowhere", 0, 7, 1_024, "new")) == m.FetchReply(range(0), [], 0)
    assert await peer.exchange(BINARY, m.Fetch("orders", 9, 7, 1_024, "new")) == m.FetchReply(range(0), [], 0)
    assert await peer.exchange(JSON, m.Fetch("nowhere", 0, 7, 1_024, "new")) == m.ErrorReply(
        "partition not found: topic=nowhere, partition=0"
    )


async def test_row_2_with_a_commit_the_unknown_partition_is_an_error_in_binary_too(peer: Peer) -> None:
    await peer.exchange(BINARY, m.OffsetCommit("nowhere", 0, "g", 100))
    error = m.ErrorReply("Topic or partition does not exist: topic=nowhere, partition=0", 10)
    assert await peer.exchange(BINARY, m.Fetch("nowhere", 0, 999, 1_024, "g")) == error


async def test_row_3_an_empty_group_name_is_no_group(peer: Peer) -> None:
    await fill(peer, b"a")
    for group in ('"group_id":"",', '"group_id":null,', ""):
        text = '{"Fetch":{%s"topic":"orders","partition":0,"offset":0,"max_bytes":10}}' % group  # noqa: UP031
        assert await peer.exchange_text(text) == '{"Fetch":{"records":[{"offset":0,"payload":[97]}],"next_offset":1}}'
    assert await peer.exchange(BINARY, m.Fetch("nowhere", 0, 0, 10)) == m.ErrorReply(
        "Topic or partition does not exist: topic=nowhere, partition=0", 10
    )


@both
async def test_row_4_beyond_the_end_there_is_nothing_and_the_end_is_next(peer: Peer, dialect: Dialect) -> None:
    await fill(peer, b"a", b"b")
    for offset in (3, 1_000, 2**64 - 1):
        assert await peer.exchange(dialect, m.Fetch("orders", 0, offset, 1_024)) == m.FetchReply(range(2, 2), [], 2)


@both
async def test_row_5_at_the_end_there_is_nothing_and_the_end_is_next(peer: Peer, dialect: Dialect) -> None:
    assert await peer.exchange(dialect, m.Fetch("orders", 0, 0, 1_024)) == m.FetchReply(range(0), [], 0)
    await fill(peer, b"a", b"b")
    assert await peer.exchange(dialect, m.Fetch("orders", 0, 2, 1_024)) == m.FetchReply(range(2, 2), [], 2)


async def test_row_6_below_the_first_offset_is_an_error_that_names_both(server: ListenerContext, peer: Peer) -> None:
    await trimmed(server)
    text = "offset out of range: requested 1, partition base 3"
    assert await peer.exchange(JSON, m.Fetch("trimmed", 0, 1, 1_024)) == m.ErrorReply(text)
    assert await peer.exchange(BINARY, m.Fetch("trimmed", 0, 1, 1_024)) == m.ErrorReply(f"Fetch failed: {text}", 4)
    assert await peer.exchange(BINARY, m.Fetch("trimmed", 0, 3, 1_024)) == m.FetchReply(range(3, 4), [b"kept"], 4)


@both
async def test_row_7_a_commit_below_the_first_offset_is_the_same_error(server: ListenerContext, peer: Peer, dialect: Dialect) -> None:
    await trimmed(server)
    await peer.exchange(dialect, m.OffsetCommit("trimmed", 0, "g", 2))
    error = await peer.exchange(dialect, m.Fetch("trimmed", 0, 0, 1_024, "g"))
    assert isinstance(error, m.ErrorReply)
    assert error.message.endswith("offset out of range: requested 2, partition base 3")


@pytest.mark.parametrize("dialect, overhead", [(JSON, 0), (BINARY, 12)])
async def test_row_8_max_bytes_counts_payloads_and_in_binary_twelve_bytes_more_for_each(
    peer: Peer, dialect: Dialect, overhead: int
) -> None:
    await fill(peer, *[b"0123456789"] * 5)
    each = 10 + overhead
    for count in (1, 2, 5):
        reply = await peer.exchange(dialect, m.Fetch("orders", 0, 0, count * each))
        assert reply == m.FetchReply(range(count), [b"0123456789"] * count, count)
    assert await peer.exchange(dialect, m.Fetch("orders", 0, 0, 3 * each - 1)) == m.FetchReply(range(2), [b"0123456789"] * 2, 2)


@both
async def test_row_9_even_for_no_bytes_there_is_one_record(peer: Peer, dialect: Dialect) -> None:
    await fill(peer, b"0123456789", b"b")
    assert await peer.exchange(dialect, m.Fetch("orders", 0, 0, 0)) == m.FetchReply(range(1), [b"0123456789"], 1)


@both
async def test_row_10_a_reply_is_cut_so_that_its_frame_fits(server: ListenerContext, peer: Peer, dialect: Dialect) -> None:
    for _ in range(4):
        await server.broker.publish(WHO, "orders", RecordBatch([b"\xff" * 1_000_000] * 4), partition=0)
    read, offset = 0, 0
    while read < 16:
        reply = await peer.exchange(dialect, m.Fetch("orders", 0, offset, 2**32 - 1))
        assert isinstance(reply, m.FetchReply)
        assert len(reply.values) >= 1
        read, offset = read + len(reply.values), reply.next_offset
    assert offset == 16


async def test_row_10_one_record_too_big_for_json_names_its_offset_and_the_other_codec(server: ListenerContext, peer: Peer) -> None:
    await server.broker.publish(WHO, "orders", RecordBatch([b"a", b"\xff" * 3_000_000]), partition=0)
    assert await peer.exchange(JSON, m.Fetch("orders", 0, 0, 2**32)) == m.FetchReply(range(1), [b"a"], 1)
    text = "fetch failed: the record at offset 1 has 3000000 bytes and fits no json frame, use the binary codec"
    assert await peer.exchange(JSON, m.Fetch("orders", 0, 1, 2**32)) == m.ErrorReply(text)
    assert await peer.exchange(BINARY, m.Fetch("orders", 0, 1, 2**32 - 1)) == m.FetchReply(range(1, 2), [b"\xff" * 3_000_000], 2)


async def test_row_10_one_record_too_big_for_either_came_through_another_protocol(server: ListenerContext, peer: Peer) -> None:
    await server.broker.publish(WHO, "orders", RecordBatch([bytes(11_000_000)]), partition=0)
    for dialect in Dialect:
        reply = await peer.exchange(dialect, m.Fetch("orders", 0, 0, 100))
        assert isinstance(reply, m.ErrorReply)
        assert reply.message.endswith("read it through another protocol")


async def test_row_11_a_produce_to_nowhere_is_refused(peer: Peer) -> None:
    for topic, partition in (("nowhere", 0), ("orders", 2), ("orders", 2**32 - 1), ("", 0), ("__offsets", 0), ("a\tb", 0)):
        place = f"topic={topic}, partition={partition}"
        assert await peer.exchange(JSON, m.Produce(topic, partition, [b"a"])) == m.ErrorReply(f"partition not found: {place}")
        assert await peer.exchange(BINARY, m.Produce(topic, partition, [b"a"])) == m.ErrorReply(
            f"Topic or partition does not exist: {place}", 10
        )


async def test_row_12_no_records_are_a_no_op(peer: Peer) -> None:
    await fill(peer, b"a", b"b")
    assert await peer.exchange_text('{"Produce":{"topic":"orders","partition":0,"records":[]}}') == '{"Produce":{"offsets":[]}}'
    assert await peer.exchange_hex("00000011 01 0006 6f7264657273 00000000 00000000") == "0000000d" + "01" + "0000000000000002" + "00000000"
    assert await peer.exchange(JSON, m.Produce("nowhere", 0, [])) == m.ErrorReply("partition not found: topic=nowhere, partition=0")


@both
async def test_row_13_a_record_too_large_for_the_broker_is_refused_by_size(
    server: ListenerContext, peer: Peer, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RecordTooLarge(size_bytes=7, bytes_max=6)

    monkeypatch.setattr(server.broker, "publish_one", refuse)
    reply = await peer.exchange(dialect, m.Produce("orders", 0, [b"0123456"]))
    assert isinstance(reply, m.ErrorReply)
    assert reply.message == f"{'failed' if dialect is JSON else 'Failed'} to write record: record too large: 7 bytes"
    assert reply.code == (0 if dialect is JSON else 500)


@both
async def test_row_14_a_batch_is_written_whole_or_not_at_all(server: ListenerContext, peer: Peer, dialect: Dialect) -> None:
    reply = await peer.exchange(dialect, m.Produce("orders", 5, [b"a", b"b"]))
    assert isinstance(reply, m.ErrorReply)
    assert await peer.exchange(dialect, m.Produce("orders", 1, [b"a", b"b", b"c"])) == m.ProduceReply(range(3))
    assert [server.broker.bounds(WHO, "orders", partition).end for partition in (0, 1)] == [0, 3]


async def test_row_15_a_commit_for_nowhere_fails_in_json_and_is_kept_in_binary(peer: Peer) -> None:
    assert await peer.exchange(JSON, m.OffsetCommit("nowhere", 0, "g", 42)) == m.OffsetCommitReply(False)
    assert await peer.exchange(JSON, m.OffsetCommit("orders", 2, "g", 42)) == m.OffsetCommitReply(False)
    assert await peer.exchange(BINARY, m.OffsetFetch("nowhere", 0, "g")) == m.OffsetFetchReply(None)
    assert await peer.exchange(BINARY, m.OffsetCommit("nowhere", 0, "g", 42)) == m.OffsetCommitReply(True)
    assert await peer.exchange(BINARY, m.OffsetFetch("nowhere", 0, "g")) == m.OffsetFetchReply(42)
    assert await peer.exchange(BINARY, m.OffsetFetch("nowhere", 0, "h")) == m.OffsetFetchReply(None)


async def test_row_15_a_kept_commit_is_shared_by_all_connections_and_yields_to_a_real_one(server: ListenerContext, peer: Peer) -> None:
    await peer.exchange(BINARY, m.OffsetCommit("later", 0, "g", 42))
    other = server.connect()
    assert await other.exchange(BINARY, m.OffsetFetch("later", 0, "g")) == m.OffsetFetchReply(42)
    await other.exchange(BINARY, m.CreateTopic("later", 1))
    await other.exchange(BINARY, m.OffsetCommit("later", 0, "g", 1))
    assert await peer.exchange(BINARY, m.OffsetFetch("later", 0, "g")) == m.OffsetFetchReply(1)
    assert len(server.context.unattached) == 0


async def test_row_15_commits_for_nowhere_cannot_pile_up(server: ListenerContext, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.context.unattached, "_offsets_max", 2)
    for partition in (0, 1):
        assert await peer.exchange(BINARY, m.OffsetCommit("nowhere", partition, "g", 1)) == m.OffsetCommitReply(True)
    error = m.ErrorReply("Offset commit failed: 2 offsets of topics that do not exist are stored: the limit is reached", 5)
    assert await peer.exchange(BINARY, m.OffsetCommit("nowhere", 2, "g", 1)) == error
    assert await peer.exchange(BINARY, m.OffsetCommit("nowhere", 1, "g", 9)) == m.OffsetCommitReply(True)


async def test_row_16_the_offset_of_an_unknown_topic_is_null(peer: Peer) -> None:
    assert await peer.exchange_text('{"OffsetFetch":{"topic":"nowhere","partition":0,"group_id":"g"}}') == '{"OffsetFetch":{"offset":null}}'
    assert await peer.exchange_hex("0000000c 04 0001 67 0002 6e6f 00000000") == "000000020400"


@both
async def test_row_17_a_commit_may_go_back_and_beyond_the_end(peer: Peer, dialect: Dialect) -> None:
    await fill(peer, b"a")
    for offset in (7, 1, 0, 2**63 - 1):
        assert await peer.exchange(dialect, m.OffsetCommit("orders", 0, "g", offset)) == m.OffsetCommitReply(True)
        assert await peer.exchange(dialect, m.OffsetFetch("orders", 0, "g")) == m.OffsetFetchReply(offset)


@both
async def test_row_18_a_commit_is_the_next_offset_to_read(server: ListenerContext, peer: Peer, dialect: Dialect) -> None:
    await fill(peer, b"a", b"b")
    await peer.exchange(dialect, m.OffsetCommit("orders", 0, "g", 1))
    assert await peer.exchange(dialect, m.Fetch("orders", 0, 0, 1_024, "g")) == m.FetchReply(range(1, 2), [b"b"], 2)
    assert server.broker.committed(WHO, "g", "orders", 0) == 1


@both
async def test_row_19_offsets_are_dense_from_zero_in_every_partition(peer: Peer, dialect: Dialect) -> None:
    assert await peer.exchange(dialect, m.Produce("orders", 0, [b"a", b"b"])) == m.ProduceReply(range(0, 2))
    assert await peer.exchange(dialect, m.Produce("orders", 1, [b"c"])) == m.ProduceReply(range(0, 1))
    assert await peer.exchange(dialect, m.Produce("orders", 0, [b"d"])) == m.ProduceReply(range(2, 3))


async def test_row_20_a_binary_reply_never_spans_a_gap_and_a_json_reply_tells_the_offsets(server: ListenerContext, peer: Peer) -> None:
    left = await gapped(server)
    seen: dict[Dialect, list[int]] = {JSON: [], BINARY: []}
    for dialect in Dialect:
        offset = 0
        while offset < 20:
            reply = await peer.exchange(dialect, m.Fetch("gapped", 0, offset, 2**32 - 1))
            assert isinstance(reply, m.FetchReply)
            assert dialect is JSON or isinstance(reply.offsets, range)
            assert [int(value[1:].rstrip(b"\0")) for value in reply.values] == list(reply.offsets), "a value has another's offset"
            seen[dialect] += reply.offsets
            offset = reply.next_offset
    assert seen == {JSON: left, BINARY: left}


@both
async def test_row_21_a_topic_is_not_created_by_use(server: ListenerContext, peer: Peer, dialect: Dialect) -> None:
    await peer.exchange(dialect, m.Produce("new", 0, [b"a"]))
    await peer.exchange(dialect, m.Fetch("new", 0, 0, 10))
    await peer.exchange(dialect, m.OffsetCommit("new", 0, "g", 10))
    assert [topic.name for topic in server.broker.topics(WHO)] == ["orders"]


@both
async def test_row_21_unless_the_operator_says_so(dialect: Dialect) -> None:
    async with running_server(settings=RustLogSettings(auto_create=True)) as server:
        peer = server.connect()
        assert await peer.exchange(dialect, m.Produce("new", 0, [b"a"])) == m.ProduceReply(range(1))
        reply = await peer.exchange(dialect, m.Produce("new", 1, [b"a"]))
        assert isinstance(reply, m.ErrorReply), "one partition is the default, and no request adds a second"
        reply = await peer.exchange(dialect, m.Fetch("other", 0, 0, 1))
        assert isinstance(reply, m.ErrorReply), "reading creates nothing"


async def test_row_21_and_the_broker_allows_it() -> None:
    async with running_server(settings=RustLogSettings(auto_create=True), broker_settings=BrokerSettings(auto_create=False)) as server:
        reply = await server.connect().exchange(JSON, m.Produce("new", 0, [b"a"]))
        assert reply == m.ErrorReply("partition not found: topic=new, partition=0")


@both
async def test_row_22_the_high_watermark_is_the_end_of_the_log(peer: Peer, dialect: Dialect) -> None:
    assert await peer.exchange(dialect, m.DescribePartition("orders", 1)) == m.DescribePartitionReply("orders", 1, 0)
    await fill(peer, b"a", b"b", partition=1)
    assert await peer.exchange(dialect, m.DescribePartition("orders", 1)) == m.DescribePartitionReply("orders", 1, 2)
    assert await peer.exchange(dialect, m.DescribeTopic("orders")) == m.DescribeTopicReply("orders", 2, [(0, 0), (1, 2)])


@both
async def test_row_23_commits_are_the_brokers_and_survive_a_restart(server: ListenerContext, peer: Peer, dialect: Dialect) -> None:
    await peer.exchange(dialect, m.OffsetCommit("orders", 1, "g", 5))
    await server.broker.close()
    reopened = type(server.broker)(server.engine, clock=lambda: 0)
    await reopened.open()
    assert reopened.committed(WHO, "g", "orders", 1) == 5
    await reopened.close()


@both
async def test_row_24_reading_with_a_group_commits_nothing(peer: Peer, dialect: Dialect) -> None:
    await fill(peer, b"a", b"b")
    for _ in range(2):
        assert await peer.exchange(dialect, m.Fetch("orders", 0, 0, 1_024, "g")) == m.FetchReply(range(2), [b"a", b"b"], 2)
        assert await peer.exchange(dialect, m.OffsetFetch("orders", 0, "g")) == m.OffsetFetchReply(None)


@both
async def test_row_25_a_topic_is_created_once(peer: Peer, dialect: Dialect) -> None:
    assert await peer.exchange(dialect, m.CreateTopic("t", 2)) == m.CreateTopicReply(True)
    reply = await peer.exchange(dialect, m.CreateTopic("t", 2))
    assert isinstance(reply, m.ErrorReply)
    assert (reply.message, reply.code) == ("Topic 't' already exists", 11 if dialect is BINARY else 0)


@both
async def test_row_26_an_empty_name_is_refused_and_most_others_are_not(peer: Peer, dialect: Dialect) -> None:
    reply = await peer.exchange(dialect, m.CreateTopic("", 1))
    assert isinstance(reply, m.ErrorReply)
    assert reply.message.startswith("Invalid topic name: ") and reply.code == (12 if dialect is BINARY else 0)
    for name in ("a/b", "../../etc", "größe", "日本語", "a:b*c?"):
        assert await peer.exchange(dialect, m.CreateTopic(name, 1)) == m.CreateTopicReply(True)
        assert await peer.exchange(dialect, m.Produce(name, 0, [b"a"])) == m.ProduceReply(range(1))


@both
@pytest.mark.parametrize("count", [0, 1_001, 2**32 - 1])
async def test_row_27_a_topic_has_one_to_a_thousand_partitions(peer: Peer, dialect: Dialect, count: int) -> None:
    reply = await peer.exchange(dialect, m.CreateTopic("t", count))
    assert isinstance(reply, m.ErrorReply)
    assert (reply.message, reply.code) == (f"Invalid partition count: {count}", 12 if dialect is BINARY else 0)


async def test_row_27_a_thousand_is_allowed(peer: Peer) -> None:
    assert await peer.exchange(BINARY, m.CreateTopic("t", 1_000)) == m.CreateTopicReply(True)


@both
async def test_row_28_a_fetch_is_answered_at_once_whether_there_is_anything_or_not(peer: Peer, dialect: Dialect) -> None:
    assert await peer.exchange(dialect, m.Fetch("orders", 0, 0, 10)) == m.FetchReply(range(0), [], 0)
