"""The RustLog client against the real session, in both dialects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from headrace.broker.authorizer import Action, Principal, Resource
from headrace.clients.errors import ClientClosed, ConnectFailed, NotSupported, RecordRefused, Refused
from headrace.clients.messages import ConnectionState, Gap, Message, Receipt
from headrace.clients.polling import PollingSubscription
from headrace.clients.rustlog.client import RustLogClient
from headrace.engine.contract import TopicConfig
from headrace.errors import (
    InvalidRequest,
    InvalidTopicName,
    LimitExceeded,
    NotAuthorized,
    OffsetOutOfRange,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from headrace.records import RecordBatch
from headrace.wire.rustlog import Dialect
from tests.clients.rustlog.support import FAST, WAIT_SECONDS, Server, serving, speaking
from tests.sessions.rustlog.support import WHO


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as made:
        yield made


@pytest.fixture(params=Dialect)
async def client(server: Server, request: pytest.FixtureRequest) -> AsyncIterator[RustLogClient]:
    async with asyncio.timeout(WAIT_SECONDS), await server.client(speaking(request.param)) as made:
        await made.create_topic("t", partitions=2)
        yield made


async def test_a_record_is_published_with_its_place_and_fetched(client: RustLogClient) -> None:
    assert await client.publish("t", b"a", partition=1) == Receipt("t", 1, 0)
    assert await client.publish("t", b"b", partition=1) == Receipt("t", 1, 1)
    assert await client.fetch("t", 0, partition=1) == [Message("t", 1, 0, b"a"), Message("t", 1, 1, b"b")]
    assert await client.fetch("t", 1, partition=1) == [Message("t", 1, 1, b"b")]


async def test_an_empty_fetch_is_an_empty_list(client: RustLogClient) -> None:
    assert await client.fetch("t", 0) == []
    assert await client.fetch("t", 99) == []


async def test_many_records_are_published_in_order_and_counted(client: RustLogClient) -> None:
    values = [b"%d" % index for index in range(3 * RustLogClient.batch_records_max + 7)]
    assert await client.publish_many("t", values) == len(values)

    async def more() -> AsyncIterator[bytes]:
        yield b"x"
        yield b"y"

    assert await client.publish_many("t", more()) == 2
    assert await client.publish_many("t", []) == 0
    read: list[bytes] = []
    while len(read) < len(values) + 2:
        batch, _ = await client.read("t", len(read))
        assert list(batch.offsets) == list(range(len(read), len(read) + len(batch)))
        read += batch.values
    assert read == [*values, b"x", b"y"]


async def test_records_sent_ahead_give_their_offsets_later(client: RustLogClient) -> None:
    futures = [await client.send_many("t", [b"a", b"b"]) for _ in range(5)]
    assert client.unacknowledged == 10
    assert [await future for future in futures] == [[Receipt("t", 0, 2 * index), Receipt("t", 0, 2 * index + 1)] for index in range(5)]
    assert client.unacknowledged == 0
    assert await (await client.send_many("t", [])) == []


@pytest.mark.parametrize("dialect", Dialect)
async def test_more_than_a_window_waits_and_all_of_it_arrives(server: Server, dialect: Dialect) -> None:
    options = replace(speaking(dialect), window_records_max=2, window_bytes_max=4_096)
    async with asyncio.timeout(WAIT_SECONDS), await server.client(options) as client:
        await client.create_topic("t")
        values = [bytes([index % 256]) * 3_000 for index in range(200)]
        assert sum(await asyncio.gather(*(client.publish_many("t", values[at : at + 50]) for at in range(0, 200, 50)))) == 200
        assert await client.end_offset("t") == 200


async def test_a_record_for_no_frame_is_refused_before_it_is_sent(client: RustLogClient) -> None:
    with pytest.raises(LimitExceeded):
        await client.publish("t", bytes(10_485_760))
    with pytest.raises(LimitExceeded):
        await client.send_many("t", [b"a", bytes(10_485_760)])
    assert await client.fetch("t", 0) == []
    with pytest.raises(RecordRefused, match="record 1 was refused: a record of 10485760 bytes takes .*; 1 record was kept") as caught:
        await client.publish_many("t", [b"a", bytes(10_485_760), b"c"])
    assert isinstance(caught.value.failure, LimitExceeded)
    assert [message.value for message in await client.fetch("t", 0)] == [b"a"]


async def test_large_values_go_in_as_many_requests_as_they_need(client: RustLogClient) -> None:
    values = [b"\xff" * 1_000_000] * 12
    assert await (await client.send_many("t", values)) == [Receipt("t", 0, offset) for offset in range(12)]
    assert await client.end_offset("t") == 12


async def test_a_group_continues_where_it_has_committed(client: RustLogClient) -> None:
    await client.publish_many("t", [b"a", b"b", b"c"])
    assert await client.committed("t", group="g") is None
    await client.commit("t", 2, group="g")
    assert await client.committed("t", group="g") == 2
    assert await client.fetch("t", 0, group="g") == [Message("t", 0, 2, b"c")]


async def test_topics_are_created_listed_and_described(client: RustLogClient) -> None:
    await client.create_topic("u")
    assert await client.partition_counts() == {"t": 2, "u": 1}
    await client.publish("t", b"a", partition=1)
    assert await client.describe_topic("t") == {0: 0, 1: 1}
    await client.ping()
    assert "messages_produced_total 1\n" in await client.metrics()


async def test_a_server_error_is_raised_as_the_matching_broker_error(client: RustLogClient) -> None:
    with pytest.raises(UnknownPartition, match="'nowhere' has no partition 3"):
        await client.publish("nowhere", b"a", partition=3)
    with pytest.raises(UnknownPartition):
        await client.fetch("t", 0, partition=2)
    with pytest.raises(UnknownPartition):
        await client.end_offset("nowhere")
    with pytest.raises(TopicExists):
        await client.create_topic("t")
    with pytest.raises(InvalidTopicName):
        await client.create_topic("")
    with pytest.raises(InvalidRequest, match="Invalid partition count: 0"):
        await client.create_topic("u", partitions=0)
    with pytest.raises(UnknownTopic):
        await client.describe_topic("nowhere")
    with pytest.raises(Refused, match="cannot be committed"):
        await client.commit("t", 2**63, group="g")
    with pytest.raises(InvalidRequest):
        await client.publish("\ud800", b"a")
    await client.ping()


async def test_a_commit_for_nowhere_is_unknown_in_json_and_kept_in_binary(server: Server) -> None:
    async with asyncio.timeout(WAIT_SECONDS), await server.client(speaking(Dialect.JSON)) as client:
        with pytest.raises(UnknownPartition):
            await client.commit("nowhere", 3, group="g")
        assert await client.committed("nowhere", group="g") is None
    async with asyncio.timeout(WAIT_SECONDS), await server.client(speaking(Dialect.BINARY)) as client:
        await client.commit("nowhere", 3, group="g")
        assert await client.committed("nowhere", group="g") == 3


async def test_what_may_not_be_done_says_who_and_what(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.home.broker.create_topic(WHO, "t")

    def refuse(who: Principal, action: Action, resource: Resource) -> bool:
        return action is not Action.PUBLISH

    monkeypatch.setattr(server.home.broker._authorizer, "_authorize", refuse)
    server.home.broker.access_changed()
    for dialect in Dialect:
        async with asyncio.timeout(WAIT_SECONDS), await server.client(speaking(dialect)) as client:
            with pytest.raises(NotAuthorized, match="tester may not publish topic 't'"):
                await client.publish("t", b"a")


async def test_what_rustlog_cannot_say_has_a_named_error(client: RustLogClient) -> None:
    with pytest.raises(NotSupported, match="RustLog does not support keys"):
        await client.publish("t", b"a", key=b"k")
    with pytest.raises(NotSupported, match="headers"):
        await client.publish("t", b"a", headers=(("h", b"1"),))
    with pytest.raises(NotSupported, match="deleting topics"):
        await client.delete_topic("t")


# Subscriptions


async def test_a_subscription_reads_history_and_then_what_comes(client: RustLogClient) -> None:
    await client.publish_many("t", [b"a", b"b"])
    subscription = await client.subscribe("t", "earliest", partition=0)
    assert [(await anext(subscription)).value for _ in range(2)] == [b"a", b"b"]
    waiting = asyncio.create_task(anext(subscription))
    await asyncio.sleep(0)
    await client.publish("t", b"c")
    assert await waiting == Message("t", 0, 2, b"c")
    assert isinstance(subscription, PollingSubscription)
    assert subscription.positions == {0: 3}


async def test_a_subscription_at_the_end_sees_only_what_is_to_come(client: RustLogClient) -> None:
    await client.publish_many("t", [b"a", b"b"])
    subscription = await client.subscribe("t")
    await client.publish("t", b"c")
    assert (await anext(subscription)).value == b"c"


async def test_a_subscription_from_an_offset_that_is_yet_to_come_waits_for_it(client: RustLogClient) -> None:
    subscription = await client.subscribe("t", 2)
    waiting = asyncio.create_task(anext(subscription))
    await client.publish_many("t", [b"a", b"b", b"c"])
    assert await waiting == Message("t", 0, 2, b"c")


async def test_without_a_partition_the_binary_dialect_follows_all_of_them(server: Server) -> None:
    async with asyncio.timeout(WAIT_SECONDS), await server.client(speaking(Dialect.BINARY)) as client:
        await client.create_topic("t", partitions=3)
        for partition in range(3):
            await client.publish("t", b"%d" % partition, partition=partition)
        subscription = await client.subscribe("t", "earliest")
        assert {(message.partition, message.value) for message in [await anext(subscription) for _ in range(3)]} == {
            (0, b"0"),
            (1, b"1"),
            (2, b"2"),
        }


async def test_batches_are_the_same_messages_in_columns(client: RustLogClient) -> None:
    await client.publish_many("t", [b"a", b"b", b"c"])
    subscription = await client.subscribe("t", "earliest")
    async for batch in subscription.batches():
        assert (batch.topic, batch.partition, list(batch.offsets), batch.values) == ("t", 0, [0, 1, 2], [b"a", b"b", b"c"])
        await subscription.close()


async def test_seeking_drops_what_was_fetched_and_goes_on_elsewhere(client: RustLogClient) -> None:
    await client.publish_many("t", [b"a", b"b", b"c"])
    subscription = await client.subscribe("t", "earliest", partition=0)
    assert (await anext(subscription)).value == b"a"
    subscription.seek(2)
    assert isinstance(subscription, PollingSubscription)
    assert subscription.positions == {0: 2}
    assert (await anext(subscription)).value == b"c"
    subscription.seek(0)
    assert (await anext(subscription)).value == b"a"


async def test_a_group_commits_delivered_messages_on_commit(client: RustLogClient) -> None:
    await client.publish_many("t", [b"a", b"b", b"c"])
    first = await client.subscribe("t", "earliest", group="g")
    assert [(await anext(first)).value for _ in range(2)] == [b"a", b"b"]
    assert await client.committed("t", group="g") is None
    await first.commit()
    assert await client.committed("t", group="g") == 2
    await first.close()
    second = await client.subscribe("t", "earliest", group="g")
    assert (await anext(second)).value == b"c"


async def test_a_group_may_commit_by_itself_as_it_goes_on(client: RustLogClient) -> None:
    await client.publish_many("t", [b"a", b"b"])
    subscription = await client.subscribe("t", "earliest", group="g", settlement="auto")
    assert [(await anext(subscription)).value for _ in range(2)] == [b"a", b"b"]
    assert await client.committed("t", group="g") is None, "the last one is still being dealt with"
    waiting = asyncio.create_task(anext(subscription))
    await client.publish("t", b"c")
    assert (await waiting).value == b"c"
    assert await client.committed("t", group="g") == 2
    await subscription.close()
    assert await client.committed("t", group="g") == 3
    with pytest.raises(StopAsyncIteration):
        await anext(subscription)


async def test_settlement_needs_a_group(client: RustLogClient) -> None:
    with pytest.raises(ValueError, match="needs a group"):
        await client.subscribe("t", settlement="auto")
    with pytest.raises(ValueError, match="nothing to settle"):
        await (await client.subscribe("t")).commit()


async def test_a_reader_overtaken_by_retention_goes_on_and_remembers_the_gap(server: Server, client: RustLogClient) -> None:
    broker = server.home.broker
    await broker.create_topic(WHO, "trimmed", config=TopicConfig(retention_bytes=1, segment_bytes=65_536))
    await broker.publish(WHO, "trimmed", RecordBatch([bytes(40_000)] * 3))
    await broker.publish(WHO, "trimmed", RecordBatch([b"kept"]))
    await broker.maintain()
    with pytest.raises(OffsetOutOfRange) as caught:
        await client.fetch("trimmed", 0)
    assert (caught.value.wanted, caught.value.first) == (0, 3)
    subscription = await client.subscribe("trimmed", 0)
    assert await anext(subscription) == Message("trimmed", 0, 3, b"kept")
    assert subscription.gaps == [Gap(0, 3)]
    subscription = await client.subscribe("trimmed", "earliest")
    assert await anext(subscription) == Message("trimmed", 0, 3, b"kept")
    assert subscription.gaps == []


async def test_closing_the_client_ends_its_subscriptions(server: Server) -> None:
    client = await server.client()
    await client.create_topic("t")
    subscription = await client.subscribe("t", "earliest")
    waiting = asyncio.create_task(anext(subscription))
    await asyncio.sleep(0)
    await client.close()
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(StopAsyncIteration):
            await waiting
    with pytest.raises(ClientClosed):
        await client.publish("t", b"a")
    await client.close()


async def test_state_changes_are_reported(server: Server) -> None:
    states: list[ConnectionState] = []
    client = await server.client(replace(FAST, on_state=lambda state, reason: states.append(state)))
    await client.close()
    assert states == [ConnectionState.CONNECTED, ConnectionState.CLOSED]
    server.stop()
    with pytest.raises(ConnectFailed):
        await server.client()
