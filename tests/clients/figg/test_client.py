"""The Figg client against a real listener."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from headrace.clients.errors import AlreadySubscribed, ClientClosed, ConnectFailed, NotSent, OutcomeUnknown
from headrace.clients.figg.client import FiggClient, FiggOptions
from headrace.clients.messages import ConnectionState, Message, Receipt
from headrace.errors import InvalidTopicName, RecordTooLarge
from headrace.limits import VALUE_BYTES_MAX
from tests.clients.servers import PROMPT, figg_client, figg_server
from tests.net.polling import until


async def test_a_publish_returns_when_the_record_is_acknowledged() -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish("t", b"one")
        assert await server.values_in("t") == [b"one"]
        server.engine.is_holding = True
        publishing = asyncio.ensure_future(client.publish("t", b"two"))
        await until(lambda: client.unacknowledged == 1)
        await asyncio.sleep(0.02)
        assert not publishing.done()
        server.engine.release()
        await asyncio.wait_for(publishing, 300)


async def test_a_send_calls_back_when_the_acknowledgement_comes() -> None:
    async with figg_server() as server, figg_client(server) as client:
        done: list[asyncio.Future[Receipt]] = []
        futures = [await client.send("t", b"%d" % index) for index in range(20)]
        for future in futures:
            future.add_done_callback(done.append)
        await client.flush()
        await asyncio.gather(*futures)
        assert done == futures


async def test_many_values_arrive_in_order_from_any_kind_of_source() -> None:
    async def arriving() -> AsyncIterator[bytes]:
        for index in range(300):
            yield b"a%d" % index

    count = 3 * FiggClient.batch_records_max + 7
    async with figg_server() as server, figg_client(server) as client:
        assert await client.publish_many("t", (b"%d" % index for index in range(count))) == count
        assert await client.publish_many("t", arriving()) == 300
        assert await client.publish_many("t", []) == 0
        assert await server.values_in("t") == [b"%d" % index for index in range(count)] + [b"a%d" % index for index in range(300)]


async def test_concurrent_publishers_keep_their_own_order() -> None:
    async with figg_server() as server, figg_client(server, FiggOptions(window_records_max=10)) as client:

        async def publish(name: int) -> None:
            for index in range(50):
                await client.send("t", b"%d.%d" % (name, index))

        await asyncio.gather(*(publish(name) for name in range(8)))
        await client.flush()
        stored = [tuple(map(int, (value or b"").split(b"."))) for value in await server.values_in("t")]
        for name in range(8):
            assert [index for who, index in stored if who == name] == list(range(50))


async def test_a_full_window_makes_the_publisher_wait() -> None:
    async with figg_server() as server, figg_client(server, FiggOptions(window_records_max=5)) as client:
        await client.publish("t", b"made")
        server.engine.is_holding = True
        for _ in range(5):
            await client.send("t", b"v")
        waiting = asyncio.ensure_future(client.send("t", b"waits"))
        await asyncio.sleep(0.02)
        assert not waiting.done() and client.unacknowledged == 5
        server.engine.release()
        await (await asyncio.wait_for(waiting, 300))


async def test_a_subscription_gives_history_then_live_messages_with_record_offsets() -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish_many("t", [b"a", b"b", b"c"])
        subscription = await client.subscribe("t", "earliest")
        assert await subscription.started == 0
        await client.publish("t", b"d")
        assert [await anext(subscription) for _ in range(4)] == [
            Message("t", 0, index, value) for index, value in enumerate([b"a", b"b", b"c", b"d"])
        ]


@pytest.mark.parametrize("start, first", [("latest", 3), (1, 1), (3, 3), (99, 3)])
async def test_a_subscription_may_start_anywhere(start: int, first: int) -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish_many("t", [b"0", b"1", b"2"])
        subscription = await client.subscribe("t", start)
        assert await subscription.started == first
        await client.publish("t", b"3")
        assert (await anext(subscription)).offset == first


async def test_batches_give_columns() -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish_many("t", [b"%d" % index for index in range(5_000)])
        offsets: list[int] = []
        async for batch in (await client.subscribe("t", "earliest")).batches():
            assert len(batch) == len(batch.offsets) == len(batch.values)
            offsets += batch.offsets
            if len(offsets) == 5_000:
                break
        assert offsets == list(range(5_000))


async def test_an_unsubscribed_topic_gives_nothing_more_and_can_be_followed_again() -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish_many("t", [b"a", b"b"])
        subscription = await client.subscribe("t", "earliest")
        assert (await anext(subscription)).value == b"a"
        with pytest.raises(AlreadySubscribed):
            await client.subscribe("t")
        await subscription.close()
        assert [message async for message in subscription] == []
        again = await client.subscribe("t", 1)
        assert (await anext(again)).value == b"b"


async def test_hasty_unsubscribes_and_subscribes_do_not_mix_their_data() -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish_many("t", [b"%d" % index for index in range(100)])
        for first in (0, 50, 10, 99):
            subscription = await client.subscribe("t", first)
            leaving = asyncio.ensure_future(client.unsubscribe("t"))
            await asyncio.sleep(0)
            after = await client.subscribe("t", first)
            assert (await anext(after)).offset == first
            await leaving
            await after.close()
            assert [message async for message in subscription] == []


async def test_an_abandoned_subscribe_leaves_the_topic_free() -> None:
    async with figg_server() as server, figg_client(server) as client:
        server.engine.may_create.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.subscribe("slow"), 0.05)
        server.engine.may_create.set()
        await client.publish("slow", b"v")
        subscription = await client.subscribe("slow", "earliest")
        assert (await anext(subscription)).value == b"v"


async def test_a_slow_reader_is_waited_for_and_loses_nothing() -> None:
    options = FiggOptions(backoff=PROMPT, queue_bytes_max=100_000, ping_seconds=0.2)
    async with figg_server() as server, figg_client(server, options) as client, figg_client(server) as writer:
        subscription = await client.subscribe("t", "earliest")
        await writer.publish_many("t", [bytes(1_000)] * 20_000)
        await asyncio.sleep(1.0)  # five pings
        assert server.counters.bytes_out < 12 << 20, "the rest waits in the log, not in somebody's memory"
        assert [(await anext(subscription)).offset for _ in range(20_000)] == list(range(20_000))
        assert server.counters.accepted == 2, "a connection that is not read on purpose is not a lost one"


async def test_a_client_that_cannot_connect_says_so_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectFailed, match=f"cannot connect to 127.0.0.1:{port}: connection refused"):
        await FiggClient.connect("127.0.0.1", port)


async def test_closing_waits_for_the_outstanding_acknowledgements() -> None:
    states: list[ConnectionState] = []
    async with figg_server() as server:
        async with await FiggClient.connect(
            server.host, server.port, FiggOptions(on_state=lambda state, _: states.append(state))
        ) as client:
            for _ in range(100):
                await client.send("t", b"v")
        assert len(await server.values_in("t")) == 100
        assert states == [ConnectionState.CONNECTED, ConnectionState.CLOSED]
        with pytest.raises(ClientClosed):
            await client.publish("t", b"late")
        with pytest.raises(ClientClosed):
            await client.subscribe("t")


async def test_closing_with_acknowledgements_missing_says_that_the_outcome_is_unknown() -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish("t", b"made")
        server.engine.is_holding = True
        future = await client.send("t", b"v")
        with pytest.raises(OutcomeUnknown, match="1 record was sent but not acknowledged"):
            await client.close(timeout=0.05)
        with pytest.raises(OutcomeUnknown):
            await future


async def test_closing_before_anything_could_be_sent_says_so() -> None:
    async with figg_server() as server, figg_client(server, FiggOptions(backoff=lambda attempt: 60.0)) as client:
        await server.listener.drain(0.0)
        await until(lambda: not client.is_connected)
        future = await client.send("t", b"v")
        with pytest.raises(NotSent, match="1 record was never sent"):
            await client.close(timeout=0.05)
        with pytest.raises(NotSent):
            await future


async def test_closing_ends_the_iteration_and_what_waits() -> None:
    async with figg_server() as server, figg_client(server) as client:
        subscription = await client.subscribe("t")
        reading = asyncio.ensure_future(anext(subscription, None))
        server.engine.may_create.clear()
        subscribing = asyncio.ensure_future(client.subscribe("another"))
        await asyncio.sleep(0.02)
        client.abandon()
        assert await asyncio.wait_for(reading, 300) is None
        with pytest.raises(ClientClosed):
            await asyncio.wait_for(subscribing, 300)


async def test_what_the_protocol_cannot_carry_is_refused_before_it_is_sent() -> None:
    async with figg_server() as server, figg_client(server) as client:
        with pytest.raises(RecordTooLarge):
            await client.publish("t", bytes(VALUE_BYTES_MAX + 1))
        with pytest.raises(InvalidTopicName):
            await client.publish("x" * 1_025, b"v")
        await client.publish("t", bytes(VALUE_BYTES_MAX))
        assert client.is_connected
