from __future__ import annotations

import asyncio

import pytest

from headrace.clients.errors import Refused
from headrace.clients.messages import ConnectionState
from headrace.sessions.blipmq.settings import BlipMqSettings
from tests.clients.blipmq.server import served
from tests.net.polling import until

PATIENT = BlipMqSettings(retry_backoff_ms=60_000)


async def test_a_client_reconnects_and_reports_each_state_change() -> None:
    states = list[ConnectionState]()
    async with served() as server, await server.client(on_state=lambda state, reason: states.append(state)) as client:
        server.proxy.refusing = True
        server.proxy.cut()
        await until(lambda: not client.is_connected)
        tried = server.proxy.connections
        await until(lambda: server.proxy.connections > tried + 2)
        server.proxy.refusing = False
        await until(lambda: client.is_connected)
        await client.publish("demo", b"v")
    assert states == [ConnectionState.CONNECTED, ConnectionState.DISCONNECTED, ConnectionState.CONNECTED, ConnectionState.CLOSED]


async def test_what_was_not_confirmed_is_sent_again_in_order() -> None:
    values = [b"%05d" % index for index in range(3_000)]
    async with served() as server, await server.client(window_records_max=1_500) as client:
        await client.publish("demo", b"first")
        server.proxy.cut_after_answer_bytes = 5
        assert await client.publish_many("demo", values) == len(values)
        stored = [value for value in server.values("demo") if value is not None][1:]
        assert server.proxy.connections > 1
        assert list(dict.fromkeys(stored)) == values, "every value, first copies in order; a resend may have doubled some"


async def test_publishes_while_disconnected_wait_for_the_connection() -> None:
    async with served() as server, await server.client() as client:
        server.proxy.refusing = True
        server.proxy.cut()
        await until(lambda: not client.is_connected)
        sent = [await client.send("demo", b"%d" % index) for index in range(10)]
        assert not any(done.done() for done in sent)
        server.proxy.refusing = False
        await asyncio.gather(*sent)
        assert server.values("demo") == [b"%d" % index for index in range(10)]


async def test_a_refused_record_is_not_sent_again() -> None:
    async with served() as server, await server.client() as client:
        refused = await client.send("two words", b"v")
        with pytest.raises(Refused):
            await refused
        server.proxy.cut()
        await until(lambda: server.proxy.connections == 2 and client.is_connected)
        await client.publish("demo", b"v")
        assert client.unacknowledged == 0
        assert "two words" not in server.engine.topics()


async def test_a_subscription_goes_on_under_its_id_after_a_lost_connection() -> None:
    async with served(BlipMqSettings(retry_backoff_ms=50, max_retries=1_000)) as server, await server.client() as client:
        subscription = await client.subscribe("demo", settlement="auto")
        id = subscription.id
        values = [b"%03d" % index for index in range(200)]
        await client.publish_many("demo", values)
        seen = list[bytes]()
        async for delivery in subscription:
            seen.append(delivery.value)
            if len(seen) in (20, 90):
                server.proxy.cut()
            if set(seen) == set(values):
                break
        assert subscription.id == id
        assert subscription.restarts == 0
        assert list(dict.fromkeys(seen))[:20] == values[:20]


async def test_a_subscription_lost_by_the_server_is_recreated_and_counted() -> None:
    async with served(PATIENT) as server, await server.client() as client:
        subscription = await client.subscribe("demo")
        await client.publish("demo", b"old")
        old = await anext(subscription)
        before = subscription.id
        assert before is not None
        server.subscriptions._forget(before)
        waiting = asyncio.ensure_future(anext(subscription))
        await until(lambda: subscription.id not in (None, before))
        assert subscription.restarts == 1
        await client.publish("demo", b"new")
        assert (await waiting).value == b"new"
        assert not await old.ack(), "its subscription is gone"


async def test_an_interrupted_subscribe_is_sent_again() -> None:
    async with served() as server, await server.client() as client:
        server.proxy.hold_answers()
        subscribing = asyncio.ensure_future(client.subscribe("demo", settlement="auto"))
        await until(lambda: len(server.subscriptions) == 1)
        server.proxy.cut()
        server.proxy.release_answers()
        subscription = await subscribing
        await client.publish("demo", b"v")
        assert (await anext(subscription)).value == b"v"


async def test_a_silent_connection_is_dropped_and_the_client_reconnects() -> None:
    async with served() as server, await server.client(ping_seconds=0.02, pings_unanswered_max=3) as client:
        server.proxy.hold_answers()
        await until(lambda: not client.is_connected)
        server.proxy.release_answers()
        await until(lambda: client.is_connected)
        await client.publish("demo", b"v")


async def test_an_idle_connection_is_kept() -> None:
    async with served() as server, await server.client(ping_seconds=0.15) as client:
        answered = server.proxy.answer_bytes
        await until(lambda: server.proxy.answer_bytes >= answered + 13 * 8)
        assert client.is_connected
        assert server.proxy.connections == 1


async def test_byte_by_byte_is_only_slower() -> None:
    async with served(PATIENT) as server:
        server.proxy.chunk_bytes = 1
        async with await server.client() as client:
            subscription = await client.subscribe("demo", settlement="auto")
            await client.publish_many("demo", [b"%d" % index for index in range(30)])
            assert [(await anext(subscription)).value for _ in range(30)] == [b"%d" % index for index in range(30)]
