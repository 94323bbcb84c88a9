"""The FlyMQ client against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from headrace.clients.errors import ClientClosed, ConnectFailed, NotSupported, RecordRefused, Refused
from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.messages import ConnectionState, Message, Receipt
from headrace.clients.polling import PollingSubscription
from headrace.errors import (
    DiskFull,
    InvalidRequest,
    InvalidTopicName,
    OffsetOutOfRange,
    RecordTooLarge,
    UnknownPartition,
    UnknownTopic,
)
from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.records import Bounds
from headrace.wire.flymq import Dialect
from headrace.wire.flymq.messages import GroupEntry, PartitionOffset
from tests.clients.flymq.support import FAST, WAIT_SECONDS, serving, until
from tests.sessions.flymq.support import NOW


async def taken(subscription: AsyncIterator[Message], count: int) -> list[Message]:
    async with asyncio.timeout(WAIT_SECONDS):
        return [await anext(subscription) for _ in range(count)]


async def test_a_record_is_published_with_a_receipt_and_fetched() -> None:
    async with serving() as server, await server.client() as client:
        assert await client.publish("t", b"hello", key=b"k") == Receipt("t", 0, 0, NOW)
        assert await client.publish("t", b"again") == Receipt("t", 0, 1, NOW)
        assert await client.fetch("t", 0) == [Message("t", 0, 0, b"hello", b"k"), Message("t", 0, 1, b"again")]
        assert await client.consume("t", 0) == Message("t", 0, 0, b"hello", b"k")


async def test_a_fetch_of_nothing_is_an_empty_list() -> None:
    async with serving() as server, await server.client() as client:
        await client.create_topic("t")
        assert await client.fetch("t", 0) == []
        assert await client.fetch("t", 99) == []


@pytest.mark.parametrize(("dialect", "listener"), [(Dialect.SPEC, Dialect.SPEC), (Dialect.SDK, Dialect.SPEC), (Dialect.SDK, Dialect.SDK)])
async def test_a_client_of_either_dialect_is_understood_and_the_originals_on_every_listener(dialect: Dialect, listener: Dialect) -> None:
    async with serving(listener) as server, await server.client(replace(FAST, dialect=dialect)) as client:
        await client.create_topic("t", partitions=2)
        await client.publish("t", b"1", partition=1)
        assert await client.describe_topic("t") == {0: Bounds(0, 0), 1: Bounds(0, 1)}
        assert await client.fetch("t", 0, partition=1) == [Message("t", 1, 0, b"1")]
        subscription = await client.subscribe("t", "earliest")
        assert await taken(subscription, 1) == [Message("t", 1, 0, b"1")]
        with pytest.raises(UnknownTopic, match="none"):
            await client.fetch("none", 0)


async def test_the_server_applies_the_filter_and_the_connection_stays_usable() -> None:
    async with serving() as server, await server.client() as client:
        await client.publish_many("t", [b"%d" % number for number in range(100)])
        assert [message.offset for message in await client.fetch("t", 0, pattern="^.7$")] == [17, 27, 37, 47, 57, 67, 77, 87, 97]
        assert len(await client.fetch("t", 0)) == 100
        batch, next_offset = await client.read("t", 0, pattern="nothing like it")
        assert len(batch) == 0 and next_offset == 100


async def test_many_records_are_pipelined_and_all_arrive_in_order() -> None:
    async with serving() as server, await server.client(replace(FAST, window_records_max=4_096, window_bytes_max=64 * 1024)) as client:
        values = [b"%d" % number for number in range(30_000)]
        assert await client.publish_many("t", values) == 30_000
        batch, next_offset = await client.read("t", 0, records_max=50_000)
        assert batch.values == values and next_offset == 30_000


async def test_values_may_come_one_by_one_from_an_asynchronous_source() -> None:
    async def source() -> AsyncIterator[bytes]:
        for number in range(50):
            await asyncio.sleep(0)
            yield b"%d" % number

    async with serving() as server, await server.client() as client:
        assert await client.publish_many("t", source()) == 50


async def test_a_window_that_is_full_holds_the_publisher_back() -> None:
    async with serving() as server, await server.client(replace(FAST, window_records_max=10)) as client:
        await client.create_topic("t")
        server.home.engine.hold("t")
        futures = [await client.send_many("t", [b"1"] * 5) for _ in range(2)]
        third = asyncio.create_task(client.send_many("t", [b"2"]))
        await asyncio.sleep(0.02)
        assert not third.done() and client.unacknowledged == 10
        await until(lambda: bool(server.home.engine._held["t"]))
        server.home.engine.release("t")
        receipts = await futures[0]
        assert [receipt.offset for receipt in receipts] == [0, 1, 2, 3, 4]
        await (await third)
        await client.flush()
        assert client.unacknowledged == 0


async def test_named_partitions_and_keys_go_where_they_should() -> None:
    async with serving() as server, await server.client() as client:
        await client.create_topic("t", partitions=3)
        assert (await client.publish("t", b"1", partition=2)).partition == 2
        receipts = await (await client.send_many("t", [b"1", b"2"], key={b"1": b"user-123"}.get))
        assert receipts[0].partition == 0x8C93CC93 % 3
        with pytest.raises(UnknownPartition):
            await client.publish("t", b"1", partition=3)


async def test_errors_have_the_shared_words() -> None:
    async with serving() as server, await server.client() as client:
        await client.create_topic("t")
        with pytest.raises(UnknownTopic):
            await client.describe_topic("none")
        with pytest.raises(OffsetOutOfRange):
            await client.consume("t", 5)
        with pytest.raises(InvalidTopicName):
            await client.create_topic("a b")
        with pytest.raises(RecordTooLarge):
            await client.publish("t", b"v", key=bytes(65_537))
        with pytest.raises(Refused, match="unknown|partitions"):
            await client.create_topic("u", partitions=100_000)
        with pytest.raises(NotSupported):
            await client.publish("t", b"v", headers=(("h", b"1"),))
        server.home.engine.failure = DiskFull("no space")
        with pytest.raises(DiskFull, match="no space"):
            await client.publish("t", b"v")
        server.home.engine.failure = None
        assert (await client.publish("t", b"v")).offset == 0, "the connection is as good as before"


async def test_a_record_no_frame_can_hold_is_refused_before_it_is_sent() -> None:
    async with serving() as server, await server.client() as client:
        with pytest.raises(RecordTooLarge):
            await client.publish("t", bytes(FLYMQ_PAYLOAD_BYTES_MAX))
        with pytest.raises(InvalidRequest):
            await client.publish("t" * 70_000, b"v")
        assert await (await client.send_many("t", [])) == []
        assert client.unacknowledged == 0
        assert (await client.publish("t", b"v")).offset == 0


async def test_an_error_inside_a_batch_is_raised_and_the_other_records_are_written() -> None:
    async with serving() as server, await server.client() as client:
        future = await client.send_many("t", [b"1", b"2", b"3"], key={b"2": bytes(65_537)}.get)
        with pytest.raises(RecordRefused) as caught:
            await future
        assert (caught.value.index, caught.value.kept, type(caught.value.failure)) == (1, 2, RecordTooLarge)
        assert [message.value for message in await client.fetch("t", 0)] == [b"1", b"3"]


# Subscriptions.


async def test_a_subscription_brings_history_and_then_what_comes() -> None:
    async with serving() as server, await server.client() as client:
        await client.publish_many("t", [b"1", b"2"])
        subscription = await client.subscribe("t", "earliest")
        assert [message.value for message in await taken(subscription, 2)] == [b"1", b"2"]
        await client.publish("t", b"3")
        assert [message.value for message in await taken(subscription, 1)] == [b"3"]


@pytest.mark.parametrize(("start", "first"), [("earliest", b"0"), ("latest", b"new"), (3, b"3")])
async def test_a_subscription_begins_at_its_start_position(start: str, first: bytes) -> None:
    async with serving() as server, await server.client() as client:
        await client.publish_many("t", [b"%d" % number for number in range(5)])
        subscription = await client.subscribe("t", start)  # type: ignore[arg-type]  # the parameters are right one by one
        await client.publish("t", b"new")
        assert (await taken(subscription, 1))[0].value == first


async def test_all_partitions_of_a_topic_are_followed() -> None:
    async with serving() as server, await server.client() as client:
        await client.create_topic("t", partitions=3)
        for partition in range(3):
            await client.publish("t", b"%d" % partition, partition=partition)
        subscription = await client.subscribe("t", "earliest")
        assert sorted(message.value for message in await taken(subscription, 3)) == [b"0", b"1", b"2"]
        assert isinstance(subscription, PollingSubscription)
        assert subscription.positions == {0: 1, 1: 1, 2: 1}


async def test_a_group_goes_on_where_it_has_committed() -> None:
    async with serving() as server, await server.client() as client:
        await client.publish_many("t", [b"%d" % number for number in range(5)])
        first = await client.subscribe("t", "earliest", group="g")
        await taken(first, 2)
        await first.commit()
        assert await client.committed("t", group="g") == 2
        await taken(first, 1)
        await first.close()
        again = await client.subscribe("t", "earliest", group="g")
        assert (await taken(again, 1))[0].value == b"2", "what was not committed comes again"


async def test_automatic_settlement_commits_what_was_dealt_with() -> None:
    async with serving() as server, await server.client(replace(FAST, fetch_records_max=2)) as client:
        await client.publish_many("t", [b"%d" % number for number in range(5)])
        subscription = await client.subscribe("t", "earliest", group="g", settlement="auto")
        await taken(subscription, 2)
        assert await client.committed("t", group="g") is None, "the second message may still be in work"
        await taken(subscription, 1)
        assert await client.committed("t", group="g") == 2
        await subscription.close()
        assert await client.committed("t", group="g") == 3
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)


async def test_automatic_settlement_needs_a_group_and_so_does_a_commit() -> None:
    async with serving() as server, await server.client() as client:
        await client.create_topic("t")
        with pytest.raises(ValueError, match="group"):
            await client.subscribe("t", settlement="auto")
        with pytest.raises(ValueError, match="group"):
            await (await client.subscribe("t")).commit()


async def test_a_subscription_may_seek() -> None:
    async with serving() as server, await server.client() as client:
        await client.publish_many("t", [b"%d" % number for number in range(5)])
        subscription = await client.subscribe("t", "earliest")
        await taken(subscription, 3)
        subscription.seek(1)
        assert isinstance(subscription, PollingSubscription)
        assert subscription.positions == {0: 1}
        assert [message.offset for message in await taken(subscription, 2)] == [1, 2]
        with pytest.raises(ValueError, match="partition 4"):
            subscription.seek(0, partition=4)


async def test_the_filter_applies_to_batches() -> None:
    async with serving() as server, await server.client() as client:
        await client.publish_many("t", [b"even" if number % 2 == 0 else b"odd" for number in range(10)])
        subscription = await client.subscribe("t", "earliest", pattern="even")
        async with asyncio.timeout(WAIT_SECONDS):
            async for batch in subscription.batches():
                assert list(batch.offsets) == [0, 2, 4, 6, 8]
                break
        assert isinstance(subscription, PollingSubscription)
        assert subscription.positions == {0: 10}


async def test_closing_the_client_ends_its_subscriptions() -> None:
    async with serving() as server:
        client = await server.client()
        await client.create_topic("t")
        subscription = await client.subscribe("t")
        waiting = asyncio.create_task(anext(subscription, None))
        await asyncio.sleep(0.01)
        await client.close()
        assert await asyncio.wait_for(waiting, WAIT_SECONDS) is None
        with pytest.raises(ClientClosed):
            await client.topics()


# Groups and topics.


async def test_groups_are_committed_listed_measured_and_deleted() -> None:
    async with serving() as server, await server.client() as client:
        await client.publish_many("t", [b"v"] * 5)
        assert await client.committed("t", group="g") is None
        await client.commit("t", 3, group="g")
        assert await client.committed("t", group="g") == 3
        assert await client.lag("t", group="g") == 2
        assert await client.list_groups() == [GroupEntry("t", "g", 0, [PartitionOffset(0, 3)])]
        await client.delete_group("g", "t")
        assert await client.list_groups() == []
        with pytest.raises(Refused, match="consumer group not found"):
            await client.delete_group("g", "t")


async def test_a_group_seeks_to_a_time() -> None:
    async with serving() as server, await server.client() as client:
        await client.publish("t", b"1")
        server.home.now += 1_000
        await client.publish("t", b"2")
        assert await client.offset_for_time("t", NOW + 1) == 1
        assert await client.committed("t", group="g") is None
        assert await client.seek("t", group="g", timestamp=NOW + 1) == 1
        assert await client.committed("t", group="g") == 1


async def test_topics_are_created_listed_and_deleted() -> None:
    async with serving() as server, await server.client() as client:
        await client.create_topic("b", partitions=2)
        await client.create_topic("b", partitions=5)
        await client.create_topic("a")
        assert await client.topics() == ["a", "b"]
        assert len(await client.describe_topic("b")) == 2
        await client.delete_topic("b")
        await client.delete_topic("b")
        assert await client.topics() == ["a"]


async def test_state_changes_are_reported_and_an_unreachable_server_is_an_error() -> None:
    states: list[ConnectionState] = []
    async with serving() as server:
        client = await server.client(replace(FAST, on_state=lambda state, reason: states.append(state)))
        server.cut()
        await until(lambda: states.count(ConnectionState.CONNECTED) == 2)
        await client.close()
        port = server.port
    assert states == ["connected", "disconnected", "connected", "closed"]
    with pytest.raises(ConnectFailed):
        await FlyMqClient.connect("127.0.0.1", port, FAST)


async def test_a_subscription_and_a_publisher_survive_cuts_and_a_restart() -> None:
    async with serving() as server, await server.client() as publisher, await server.client() as reader:
        await publisher.create_topic("t")
        subscription = await reader.subscribe("t", "earliest")
        seen: list[bytes] = []
        for round_ in range(6):
            values = [b"%d-%d" % (round_, number) for number in range(50)]
            publishing = asyncio.create_task(publisher.publish_many("t", values))
            await asyncio.sleep(0)
            if round_ % 2:
                server.cut()
            elif round_ == 4:
                server.stop()
                await server.start_again()
            assert await asyncio.wait_for(publishing, WAIT_SECONDS) == 50
            while values[-1] not in seen:
                seen += [message.value for message in await taken(subscription, 1)]
        expected = [b"%d-%d" % (round_, number) for round_ in range(6) for number in range(50)]
        assert list(dict.fromkeys(seen)) == expected, "nothing is lost; what is repeated is repeated in order"
