"""Requests of both dialects, byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.groups.offsets import GroupLag
from headrace.errors import DiskFull, StorageFailed, Unavailable
from headrace.records import RecordBatch
from headrace.wire.rustlog import Dialect
from headrace.wire.rustlog import messages as m
from tests.sessions.rustlog.support import WHO, ListenerContext, Peer, running_server

JSON, BINARY = Dialect.JSON, Dialect.BINARY
both = pytest.mark.parametrize("dialect", Dialect)


@pytest.fixture
async def server() -> AsyncIterator[ListenerContext]:
    async with running_server() as made:
        yield made


@pytest.fixture
async def peer(server: ListenerContext) -> Peer:
    return server.connect()


async def test_the_conversation_of_the_specification(server: ListenerContext, peer: Peer) -> None:
    await server.broker.create_topic(WHO, "orders")
    fetch = '{"Fetch":{"topic":"orders","partition":0,"offset":0,"max_bytes":1048576,"group_id":"processor"}}'
    conversation = [
        ('{"Produce":{"topic":"orders","partition":0,"records":[[10,20],[30,40]]}}', '{"Produce":{"offsets":[0,1]}}'),
        (fetch, '{"Fetch":{"records":[{"offset":0,"payload":[10,20]},{"offset":1,"payload":[30,40]}],"next_offset":2}}'),
        ('{"OffsetCommit":{"topic":"orders","partition":0,"group_id":"processor","offset":2}}', '{"OffsetCommit":{"success":true}}'),
        ('{"Produce":{"topic":"orders","partition":0,"records":[[50,60]]}}', '{"Produce":{"offsets":[2]}}'),
        (fetch, '{"Fetch":{"records":[{"offset":2,"payload":[50,60]}],"next_offset":3}}'),
        ('{"OffsetFetch":{"topic":"orders","partition":0,"group_id":"processor"}}', '{"OffsetFetch":{"offset":2}}'),
        ('{"OffsetFetch":{"topic":"orders","partition":0,"group_id":"new"}}', '{"OffsetFetch":{"offset":null}}'),
        (
            '{"Fetch":{"topic":"nonexistent","partition":0,"offset":0,"max_bytes":1048576,"group_id":null}}',
            '{"Error":{"message":"partition not found: topic=nonexistent, partition=0"}}',
        ),
        ("nonsense", '{"Error":{"message":"failed to parse request: unknown request type: 110"}}'),
        ('{"Produce":', '{"Error":{"message":"failed to parse request: Input data was truncated"}}'),
    ]
    for request, reply in conversation:
        assert await peer.exchange_text(request) == reply


async def test_the_additions_to_the_specification(peer: Peer) -> None:
    conversation = [
        ('"Ping"', '"Pong"'),
        ('{"Ping":{}}', '"Pong"'),
        ('{"CreateTopic":{"topic":"t","partition_count":2}}', '{"CreateTopic":{"success":true}}'),
        ('{"CreateTopic":{"topic":"a","partition_count":1}}', '{"CreateTopic":{"success":true}}'),
        ('"ListTopics"', '{"ListTopics":{"topics":[["a",1],["t",2]]}}'),
        ('{"Produce":{"topic":"t","partition":1,"records":[[1]]}}', '{"Produce":{"offsets":[0]}}'),
        ('{"DescribeTopic":{"topic":"t"}}', '{"DescribeTopic":{"topic":"t","partition_count":2,"partitions":[[0,0],[1,1]]}}'),
        ('{"DescribeTopic":{"topic":"x"}}', '{"Error":{"message":"DescribeTopic failed: Topic \'x\' not found"}}'),
        ('{"DescribePartition":{"topic":"t","partition":1}}', '{"DescribePartition":{"topic":"t","partition":1,"high_watermark":1}}'),
        (
            '{"DescribePartition":{"topic":"t","partition":2}}',
            '{"Error":{"message":"DescribePartition failed: Partition 2 not found in topic \'t\'"}}',
        ),
    ]
    for request, reply in conversation:
        assert await peer.exchange_text(request) == reply


async def test_the_conversation_of_the_original(peer: Peer) -> None:
    conversation = [
        ("00000001 ff", "00000001 ff"),
        ("00000008 05 0001 74 00000002", "00000002 05 01"),
        ("00000008 05 0001 74 00000002", "0000001d fe 000b 0018" + b"Topic 't' already exists".hex()),
        ("00000019 01 0001 74 00000000 00000003 00000001 61 00000000 00000000", "0000000d 01 0000000000000000 00000003"),
        (
            "00000017 02 0001 67 0001 74 00000000 0000000000000000 00000400",
            "0000001a 02 00000003 00000001 61 00000000 00000000 0000000000000003",
        ),
        ("0000000b 04 0001 67 0001 74 00000000", "00000002 04 00"),
        ("00000013 03 0001 67 0001 74 00000000 0000000000000002", "00000002 03 01"),
        ("0000000b 04 0001 67 0001 74 00000000", "0000000a 04 01 0000000000000002"),
        ("00000001 06", "0000000c 06 00000001 0001 74 00000002"),
        ("00000004 07 0001 74", "00000024 07 0001 74 00000002 00000002 00000000 0000000000000003 00000001 0000000000000000"),
        ("00000008 08 0001 74 00000000", "00000010 08 0001 74 00000000 0000000000000003"),
    ]
    for request, reply in conversation:
        assert await peer.exchange_hex(request) == reply.replace(" ", "")


@pytest.mark.parametrize(
    "request_, code, message",
    [
        (m.Produce("x", 3, [b"a"]), 10, "Topic or partition does not exist: topic=x, partition=3"),
        (m.Fetch("x", 3, 0, 1), 10, "Topic or partition does not exist: topic=x, partition=3"),
        (m.CreateTopic("x", 0), 12, "Invalid partition count: 0"),
        (m.DescribeTopic("x"), 13, "DescribeTopic failed: Topic 'x' not found"),
        (m.DescribePartition("x", 3), 14, "DescribePartition failed: Partition 3 not found in topic 'x'"),
        (m.OffsetCommit("x", 0, "g" * 250, 3), 5, "Offset commit failed: group or topic name too long: at most 249 bytes"),
    ],
)
async def test_the_errors_of_the_original_have_their_codes_and_texts(peer: Peer, request_: m.Request, code: int, message: str) -> None:
    assert await peer.exchange(BINARY, request_) == m.ErrorReply(message, code)


async def test_both_dialects_may_be_mixed_on_one_connection(server: ListenerContext, peer: Peer) -> None:
    assert await peer.exchange(BINARY, m.CreateTopic("t", 1)) == m.CreateTopicReply(True)
    assert await peer.exchange(JSON, m.Produce("t", 0, [b"from json"])) == m.ProduceReply(range(1))
    assert await peer.exchange(BINARY, m.Produce("t", 0, [b"from binary"])) == m.ProduceReply(range(1, 2))
    for dialect in Dialect:
        assert await peer.exchange(dialect, m.Fetch("t", 0, 0, 100)) == m.FetchReply(range(2), [b"from json", b"from binary"], 2)


@both
async def test_all_bytes_come_back_as_they_went(peer: Peer, dialect: Dialect) -> None:
    await peer.exchange(dialect, m.CreateTopic("t", 1))
    values = [b"", bytes(range(256)), b"\xff" * 1_000, "größe".encode()]
    await peer.exchange(dialect, m.Produce("t", 0, values))
    for reading in Dialect:
        assert await peer.exchange(reading, m.Fetch("t", 0, 0, 10_000)) == m.FetchReply(range(4), values, 4)


@both
async def test_records_of_other_protocols_are_read_without_their_keys_and_a_tombstone_as_nothing(
    server: ListenerContext, peer: Peer, dialect: Dialect
) -> None:
    await server.broker.create_topic(WHO, "t")
    await server.broker.publish(WHO, "t", RecordBatch([b"v", None], keys=[b"k", b"k"], headers=[(("h", b"1"),), ()]))
    await server.broker.publish(WHO, "t", RecordBatch([b"w"]))
    assert await peer.exchange(dialect, m.Fetch("t", 0, 0, 1_000)) == m.FetchReply(range(3), [b"v", b"", b"w"], 3)


@both
async def test_expired_records_are_passed_over(server: ListenerContext, peer: Peer, dialect: Dialect) -> None:
    await server.broker.create_topic(WHO, "t")
    await server.broker.publish(WHO, "t", RecordBatch([b"gone", b"gone"], expiries=[1, 1]))
    assert await peer.exchange(dialect, m.Fetch("t", 0, 0, 1_000)) == m.FetchReply(range(2, 2), [], 2)
    await server.broker.publish(WHO, "t", RecordBatch([b"here"]))
    assert await peer.exchange(dialect, m.Fetch("t", 0, 0, 1_000)) == m.FetchReply(range(2, 3), [b"here"], 3)


async def test_many_batches_are_read_as_one(server: ListenerContext, peer: Peer) -> None:
    await server.broker.create_topic(WHO, "t")
    values = [b"%d" % index for index in range(50)]
    for value in values:
        await server.broker.publish(WHO, "t", RecordBatch([value]))
    for dialect in Dialect:
        assert await peer.exchange(dialect, m.Fetch("t", 0, 7, 1 << 20)) == m.FetchReply(range(7, 50), values[7:], 50)


async def test_an_offset_the_broker_cannot_keep_is_refused(server: ListenerContext, peer: Peer) -> None:
    await server.broker.create_topic(WHO, "t")
    reply = await peer.exchange(JSON, m.OffsetCommit("t", 0, "g", 2**63))
    assert reply == m.ErrorReply("offset commit failed: offset 9223372036854775808 cannot be committed")
    reply = await peer.exchange(BINARY, m.OffsetCommit("t", 0, "", 1))
    assert isinstance(reply, m.ErrorReply) and reply.code == 5


@pytest.mark.parametrize(
    "failure, code",
    [(DiskFull("no space"), 503), (StorageFailed("no space"), 500), (Unavailable("no space"), 503)],
    ids=lambda value: str(value),
)
async def test_a_write_that_fails_is_told_and_reading_goes_on(
    server: ListenerContext, peer: Peer, failure: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.broker.create_topic(WHO, "t")
    await peer.exchange(BINARY, m.Produce("t", 0, [b"a"]))

    def fail(*_: object, **__: object) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_exception(failure)
        return future

    monkeypatch.setattr(server.broker, "publish_one", fail)
    assert await peer.exchange(BINARY, m.Produce("t", 0, [b"b"])) == m.ErrorReply("Failed to write record: no space", code)
    assert await peer.exchange(JSON, m.Produce("t", 0, [b"b"])) == m.ErrorReply("failed to write record: no space")
    assert await peer.exchange(BINARY, m.Fetch("t", 0, 0, 100)) == m.FetchReply(range(1), [b"a"], 1)


async def test_every_request_is_authorized() -> None:
    requested: list[tuple[Action, str]] = []

    def refuse(who: Principal, action: Action, resource: Resource) -> bool:
        requested.append((action, f"{resource.kind}:{resource.name}"))
        return who.name == "root"

    async with running_server(authorize=refuse) as server:
        await server.broker.create_topic(Principal("root"), "t")
        peer = server.connect()
        requests: list[m.Request] = [
            m.Produce("t", 0, [b"a"]),
            m.Produce("t", 0, []),
            m.Fetch("t", 0, 0, 10),
            m.Fetch("t", 0, 0, 10, "g"),
            m.Fetch("t", 0, 99, 10),
            m.OffsetCommit("t", 0, "g", 1),
            m.OffsetFetch("t", 0, "g"),
            m.CreateTopic("new", 1),
            m.DescribeTopic("t"),
            m.DescribePartition("t", 0),
            m.OffsetCommit("nowhere", 0, "g", 1),
        ]
        for request in requests:
            for dialect in Dialect:
                reply = await peer.exchange(dialect, request)
                assert isinstance(reply, m.ErrorReply), f"{request} was answered with {reply}"
                assert reply.message.startswith("not authorized: tester may not ")
                assert reply.code == (403 if dialect is BINARY else 0)
        assert await peer.exchange(BINARY, m.ListTopics()) == m.ListTopicsReply([])
        assert len(server.context.unattached) == 0


async def test_a_fetch_beyond_the_end_needs_the_permission_to_read() -> None:
    async with running_server(authorize=lambda who, action, _: who.name == "root" or action is Action.DESCRIBE) as server:
        await server.broker.create_topic(Principal("root"), "t")
        reply = await server.connect().exchange(BINARY, m.Fetch("t", 0, 99, 10))
        assert isinstance(reply, m.ErrorReply) and "may not read topic" in reply.message


async def test_the_metrics_count_what_happens(server: ListenerContext, peer: Peer) -> None:
    await peer.exchange(BINARY, m.CreateTopic('t"\\', 1))
    await peer.exchange(BINARY, m.Produce('t"\\', 0, [b"abc", b"de"]))
    await peer.exchange(JSON, m.Fetch('t"\\', 0, 1, 100))
    await peer.exchange(JSON, m.OffsetCommit('t"\\', 0, "g", 1))
    other = server.connect()
    texts = []
    for dialect in Dialect:
        reply = await other.exchange(dialect, m.MetricsFetch())
        assert isinstance(reply, m.MetricsReply)
        texts.append(reply.metrics)
    assert texts[0] == texts[1]
    lines = texts[0].splitlines()
    for line in (
        "messages_produced_total 2",
        "messages_fetched_total 1",
        "bytes_in_total 5",
        "bytes_out_total 2",
        "active_connections 2",
        "slow_consumers_total 0",
        'consumer_lag{topic="t\\"\\\\",partition="0",group="g"} 1',
        "# TYPE messages_produced_total counter",
        "# TYPE active_connections gauge",
    ):
        assert line in lines
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert int(figures["produce_latency_ns_p50"]) > 0 and int(figures["fetch_latency_ns_p99"]) > 0
    other.session.lost()
    server.peers.remove(other)
    assert server.context.connections == 1


async def test_a_long_list_of_lags_is_cut_to_fit_a_frame(server: ListenerContext, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.broker, "groups", lambda who: ["g" * 249] * 200)
    monkeypatch.setattr(server.broker, "lag", lambda who, group: [GroupLag('"' * 249, partition, 0, 1, 1) for partition in range(100)])
    for dialect in Dialect:
        reply = await peer.exchange(dialect, m.MetricsFetch())
        assert isinstance(reply, m.MetricsReply)
        assert reply.metrics.endswith("# the list of lags is cut here\n")
