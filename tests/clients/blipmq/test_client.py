from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.clients.blipmq import subscription as subscription_module
from headrace.clients.blipmq.client import BlipMqClient, BlipMqOptions
from headrace.clients.blipmq.subscription import BATCH_SECONDS
from headrace.clients.errors import ClientClosed, ConnectFailed, LoginRefused, NotSent, OutcomeUnknown, RecordRefused, Refused
from headrace.clients.messages import ConnectionState
from headrace.errors import RecordTooLarge
from headrace.limits import BLIPMQ_FRAME_BYTES_MAX
from headrace.sessions.blipmq.settings import BlipMqSettings
from tests.clients.blipmq.server import WHO, served
from tests.net.polling import until

PATIENT = BlipMqSettings(retry_backoff_ms=60_000)


async def test_a_publish_returns_when_the_record_is_in_the_log() -> None:
    async with served() as server, await server.client() as client:
        await client.publish("demo", b"hello")
        assert server.values("demo") == [b"hello"]
        assert client.unacknowledged == 0


async def test_qos_0_is_on_its_way_when_it_returns_and_flush_waits_for_it() -> None:
    async with served() as server, await server.client() as client:
        await client.publish("demo", b"hello", qos=0)
        await client.flush()
        assert server.values("demo") == [b"hello"]


@pytest.mark.parametrize("qos", [0, 1])
async def test_many_are_published_in_order_within_a_small_window(qos: int) -> None:
    values = [b"%06d" % index * 10 for index in range(20_000)]
    async with served() as server, await server.client(window_records_max=5_000, window_bytes_max=100_000) as client:
        assert await client.publish_many("demo", values, qos=qos) == len(values)
        await client.flush()
        assert server.values("demo") == values


async def test_many_may_come_from_an_asynchronous_source() -> None:
    async def source() -> AsyncIterator[bytes]:
        for index in range(100):
            yield b"%d" % index

    async with served() as server, await server.client() as client:
        assert await client.publish_many("demo", source()) == 100
        assert server.values("demo") == [b"%d" % index for index in range(100)]


async def test_many_publishers_at_once_share_one_connection_and_their_confirmations() -> None:
    async with served() as server, await server.client() as client:
        await asyncio.gather(*(client.publish("demo", b"%d" % index) for index in range(500)))
        assert sorted(server.values("demo"), key=str) == sorted((b"%d" % index for index in range(500)), key=str)
        assert server.proxy.answer_bytes < 500 * 13, "one PONG confirms many"


async def test_a_rejected_publish_raises_the_servers_error_and_does_not_affect_others() -> None:
    async with served() as server, await server.client() as client:
        good, bad = await client.send("demo", b"good"), await client.send("two words", b"bad")
        await good
        with pytest.raises(Refused, match="white space") as caught:
            await bad
        assert caught.value.code == 400
        with pytest.raises(RecordRefused, match="record 0 was refused: .*; 0 records were kept"):
            await client.publish_many("two words", [b"v"] * 5_000)
        await client.publish("demo", b"still there")
        assert server.values("demo") == [b"good", b"still there"]


async def test_a_value_too_large_for_a_frame_is_refused_before_it_is_sent() -> None:
    async with served() as server, await server.client() as client:
        with pytest.raises(RecordTooLarge):
            await client.publish("demo", bytes(BLIPMQ_FRAME_BYTES_MAX))
        await client.publish("demo", bytes(BLIPMQ_FRAME_BYTES_MAX - 16))


async def test_a_wrong_key_is_refused_at_once() -> None:
    async with served() as server:
        with pytest.raises(LoginRefused, match="invalid API key") as caught:
            await BlipMqClient.connect(server.proxy.host, server.proxy.port, options=BlipMqOptions(api_key="wrong"))
        assert caught.value.kind == "not_authorized"


async def test_no_server_is_an_error_at_once() -> None:
    async with served() as server:
        host, port = server.proxy.host, server.proxy.port
    with pytest.raises(ConnectFailed, match="connection refused"):
        await BlipMqClient.connect(host, port, options=BlipMqOptions(api_key="dev-key"))


async def test_a_server_that_hangs_up_or_speaks_something_else_is_an_error_at_once() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answers.pop())
        await writer.drain()
        writer.close()

    answers = [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"]
    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed, match="undecodable bytes"):
            await BlipMqClient.connect("127.0.0.1", port, options=BlipMqOptions(api_key="k"))
        with pytest.raises(ConnectFailed, match="closed the connection"):
            await BlipMqClient.connect("127.0.0.1", port, options=BlipMqOptions(api_key="k"))


async def test_explicit_acknowledgement_settles_and_its_absence_brings_the_message_again() -> None:
    async with served(BlipMqSettings(retry_backoff_ms=50, max_retries=100)) as server, await server.client() as client:
        subscription = await client.subscribe("demo")
        await client.publish_many("demo", [b"a", b"b"])
        first = await anext(subscription)
        assert (first.topic, first.value, first.tag) == ("demo", b"a", 1)
        seen = [await anext(subscription) for _ in range(3)]
        assert {delivery.value for delivery in seen} == {b"a", b"b"}, "what was not acknowledged came again"
        assert await first.ack()
        for delivery in seen:
            await delivery.ack()
        await client.flush()
        group = f"blipmq-{subscription.id}"
        await until(lambda: server.broker.committed(WHO, group, "demo", 0) == 2)


async def test_automatic_settlement_acknowledges_each_message_when_the_next_is_requested() -> None:
    async with served(PATIENT) as server, await server.client() as client:
        subscription = await client.subscribe("demo", settlement="auto")
        await client.publish_many("demo", [b"%d" % index for index in range(50)])
        values = list[bytes]()
        async for delivery in subscription:
            values.append(delivery.value)
            if len(values) == 50:
                break
        assert values == [b"%d" % index for index in range(50)]
        group = f"blipmq-{subscription.id}"
        await until(lambda: server.broker.committed(WHO, group, "demo", 0) == 49)
        await subscription.close()
        await until(lambda: server.broker.committed(WHO, group, "demo", 0) == 50)
        with pytest.raises(StopAsyncIteration):
            await anext(subscription)


async def test_batches_grow_while_the_user_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_module, "BATCH_SECONDS", 600)  # a slow machine is no slow user
    async with served(PATIENT) as server, await server.client(batch_max=64) as client:
        subscription = await client.subscribe("demo", settlement="auto")
        await client.publish_many("demo", [b"%d" % index for index in range(1_000)])
        sizes, values = list[int](), list[bytes]()
        async for batch in subscription.batches():
            sizes.append(len(batch))
            values += batch.values
            if len(values) == 1_000:
                break
        assert values == [b"%d" % index for index in range(1_000)]
        assert sizes[:7] == [1, 2, 4, 8, 16, 32, 64]
        assert max(sizes) == 64


async def test_a_user_who_falls_behind_is_given_less_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_module, "BATCH_SECONDS", 600)
    async with served(PATIENT) as server, await server.client() as client:
        subscription = await client.subscribe("demo", settlement="auto")
        await client.publish_many("demo", [b"v"] * 100)
        sizes = list[int]()
        async for batch in subscription.batches():
            sizes.append(len(batch))
            if len(batch) == 8:
                monkeypatch.setattr(subscription_module, "BATCH_SECONDS", BATCH_SECONDS)
                await asyncio.sleep(BATCH_SECONDS * 2.5)
            if len(sizes) == 5:
                break
        assert sizes[:4] == [1, 2, 4, 8]
        assert sizes[4] <= 3


async def test_qos_0_needs_no_acknowledgement() -> None:
    async with served() as server, await server.client() as client:
        subscription = await client.subscribe("demo", qos=0)
        await client.publish_many("demo", [b"a", b"b", b"c"])
        deliveries = [await anext(subscription) for _ in range(3)]
        assert [(delivery.value, delivery.tag) for delivery in deliveries] == [(b"a", 0), (b"b", 0), (b"c", 0)]
        assert all([await delivery.ack() for delivery in deliveries])
        assert client.refused_acks == 0


async def test_subscriptions_of_one_client_do_not_get_each_others_messages() -> None:
    async with served(PATIENT) as server, await server.client() as client:
        subscriptions = {topic: await client.subscribe(topic, settlement="auto") for topic in ("a", "b", "c")}
        for topic in subscriptions:
            await client.publish_many(topic, [topic.encode() + b"%d" % index for index in range(20)])

        async def read(topic: str) -> list[bytes]:
            return [(await anext(subscriptions[topic])).value for _ in range(20)]

        for topic, values in zip("abc", await asyncio.gather(*map(read, "abc")), strict=True):
            assert values == [topic.encode() + b"%d" % index for index in range(20)]


async def test_a_message_published_later_reaches_a_user_who_waits() -> None:
    async with served() as server, await server.client() as client, await server.client() as other:
        subscription = await client.subscribe("demo", settlement="auto")
        waiting = asyncio.ensure_future(anext(subscription))
        polled = server.proxy.request_bytes
        await until(lambda: server.proxy.request_bytes > polled)
        await other.publish("demo", b"late")
        assert (await waiting).value == b"late"


async def test_a_user_who_stops_waiting_loses_nothing() -> None:
    async with served(PATIENT) as server, await server.client() as client:
        subscription = await client.subscribe("demo", settlement="auto")
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await anext(subscription)
        await client.publish("demo", b"v")
        assert (await anext(subscription)).value == b"v"


async def test_a_late_ack_is_counted_not_raised() -> None:
    async with served(BlipMqSettings(retry_backoff_ms=20, max_retries=1)) as server, await server.client() as client:
        subscription = await client.subscribe("demo")
        await client.publish("demo", b"v")
        delivery = await anext(subscription)
        await until(lambda: "demo.dlq" in server.engine.topics() and server.values("demo.dlq") == [b"v"])
        await until(lambda: server.broker.committed(WHO, f"blipmq-{subscription.id}", "demo", 0) == 1)
        assert await delivery.ack()
        await client.flush()
        assert client.refused_acks == 1


async def test_a_refused_subscribe_raises() -> None:
    async with served() as server, await server.client() as client:
        with pytest.raises(Refused, match="white space"):
            await client.subscribe("two words")
        with pytest.raises(Refused, match="invalid QoS value"):
            await client.subscribe("demo", qos=2)


async def test_a_closed_client_says_so_and_its_subscriptions_end() -> None:
    states = list[ConnectionState]()
    async with served() as server:
        client = await server.client(on_state=lambda state, reason: states.append(state))
        subscription = await client.subscribe("demo")
        waiting = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises((StopAsyncIteration, ClientClosed)):
            await waiting
        with pytest.raises(ClientClosed):
            await client.publish("demo", b"v")
        with pytest.raises(ClientClosed):
            await client.subscribe("demo")
        await client.close()
        assert states == [ConnectionState.CONNECTED, ConnectionState.CLOSED]


async def test_closing_without_the_confirmation_says_that_the_outcome_is_unknown() -> None:
    async with served() as server:
        client = await server.client()
        server.proxy.hold_answers()
        sent = await client.send("demo", b"v")
        await until(lambda: "demo" in server.engine.topics() and server.values("demo") == [b"v"])
        with pytest.raises(OutcomeUnknown) as caught:
            await client.close(timeout=0.01)
        assert caught.value.count == 1
        with pytest.raises(OutcomeUnknown):
            await sent
        server.proxy.release_answers()


async def test_records_that_never_left_are_not_sent() -> None:
    async with served() as server:
        client = await server.client()
        server.proxy.refusing = True
        server.proxy.cut()
        await until(lambda: not client.is_connected)
        with pytest.raises(NotSent):
            await client.publish("demo", b"v", qos=0)
        sent = await client.send("demo", b"v")
        with pytest.raises(NotSent):
            await client.close(timeout=0.01)
        with pytest.raises(NotSent):
            await sent
