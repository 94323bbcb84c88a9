"""The Figg client on closed, slow, silent and corrupt connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.clients.figg.client import FiggOptions
from headrace.clients.messages import ConnectionState, Gap
from headrace.errors import DiskFull
from headrace.records import RecordBatch
from headrace.sessions.figg.session import FiggSettings
from headrace.wire.figg import encode
from tests.clients.servers import PROMPT, FiggServer, figg_client, figg_server
from tests.net.polling import until
from tests.net.proxy import FaultProxy
from tests.sessions.figg.peer import WHO


@asynccontextmanager
async def behind_a_proxy(settings: FiggSettings = FiggSettings()) -> AsyncIterator[tuple[FiggServer, FaultProxy]]:
    async with figg_server(settings) as server, FaultProxy(server.host, server.port) as proxy:
        yield server, proxy


def first_seen(values: list[bytes | None]) -> list[bytes | None]:
    """Return the values without duplicates of a resend."""
    return list(dict.fromkeys(values))


async def test_nothing_acknowledged_or_sent_is_lost_when_connections_are_cut() -> None:
    async with behind_a_proxy() as (server, proxy), figg_client(proxy) as client:

        async def cut_now_and_then() -> None:
            for round_ in range(10):
                seen = proxy.connections
                proxy.cut_after_answer_bytes = 17 + 10 * round_  # inside an ACK, most of the time
                await until(lambda seen=seen: proxy.connections > seen)  # type: ignore[misc]  # bound now, on purpose

        cutting = asyncio.ensure_future(cut_now_and_then())
        values = [b"%d" % index for index in range(20_000)]
        sent = 0
        while not cutting.done() or sent < len(values):
            assert sent < len(values), "too few records for ten cuts"
            await client.publish_many("t", values[sent : sent + 100])
            sent += 100
        await cutting
        stored = await server.values_in("t")
        assert proxy.connections >= 11
        assert first_seen(stored) == values, "order kept, at least once"


async def test_a_record_whose_ack_was_lost_is_sent_again() -> None:
    async with behind_a_proxy() as (server, proxy), figg_client(proxy) as client:
        await client.publish("t", b"before")
        proxy.hold_answers()
        future = await client.send("t", b"twice")
        await until(lambda: server.broker.bounds(WHO, "t", 0).end == 2)
        proxy.cut()
        proxy.release_answers()
        await asyncio.wait_for(future, 300)
        assert await server.values_in("t") == [b"before", b"twice", b"twice"]


async def test_a_subscription_resumes_behind_the_last_message() -> None:
    async with behind_a_proxy() as (_server, proxy), figg_client(proxy) as client, figg_client(_server) as writer:
        await writer.publish_many("t", [b"%d" % index for index in range(5_000)])
        proxy.cut_after_answer_bytes = 20_000
        subscription = await client.subscribe("t", "earliest")
        seen = []
        for position in range(5_100):
            if position == 5_000:
                proxy.cut()
                await writer.publish_many("t", [b"%d" % index for index in range(5_000, 5_100)])
            seen.append((await asyncio.wait_for(anext(subscription), 300)).value)
        assert seen == [b"%d" % index for index in range(5_100)]
        assert proxy.connections == 3 and subscription.gaps == []


async def test_a_subscription_without_messages_resumes_where_it_was_attached() -> None:
    async with behind_a_proxy() as (server, proxy), figg_client(proxy) as client, figg_client(server) as writer:
        await writer.publish("t", b"old")
        subscription = await client.subscribe("t", "latest")
        proxy.refusing = True
        proxy.cut()
        await until(lambda: not client.is_connected)
        await writer.publish("t", b"missed while away")
        proxy.refusing = False
        message = await asyncio.wait_for(anext(subscription), 300)
        assert (message.offset, message.value) == (1, b"missed while away")


async def test_an_attach_that_got_no_answer_is_sent_again() -> None:
    async with behind_a_proxy() as (server, proxy), figg_client(proxy) as client, figg_client(server) as writer:
        await writer.publish("t", b"v")
        proxy.hold_answers()
        subscribing = asyncio.ensure_future(client.subscribe("t", "earliest"))
        await asyncio.sleep(0.02)
        proxy.cut()
        proxy.release_answers()
        assert (await anext(await asyncio.wait_for(subscribing, 300))).value == b"v"


async def test_resuming_at_another_offset_is_reported_as_a_gap() -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish_many("t", [b"a", b"b", b"c"])
        subscription = await client.subscribe("t", "earliest")
        for _ in range(3):
            await anext(subscription)
        await server.broker.delete_topic(WHO, "t")
        await until(lambda: subscription.gaps == [Gap(expected=3, actual=0)])
        await client.publish("t", b"new life")
        assert (await anext(subscription)).value == b"new life"


async def test_publishes_made_while_disconnected_leave_when_the_server_is_back() -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish("t", b"a")
        await server.listener.drain(0.0)
        await until(lambda: not client.is_connected)
        future = await client.send("t", b"b")
        await server.open(server.port)
        await asyncio.wait_for(future, 300)
        assert await server.values_in("t") == [b"a", b"b"]


async def test_state_changes_are_reported_in_order_with_a_reason() -> None:
    reported: list[tuple[ConnectionState, str]] = []
    options = FiggOptions(backoff=PROMPT, on_state=lambda state, reason: reported.append((state, reason)))
    async with behind_a_proxy() as (_server, proxy), figg_client(proxy, options) as client:
        await client.publish("t", b"v")
        proxy.cut()
        await until(lambda: len(reported) == 3)
        client.abandon()
        assert [state for state, _ in reported] == [
            ConnectionState.CONNECTED,
            ConnectionState.DISCONNECTED,
            ConnectionState.CONNECTED,
            ConnectionState.CLOSED,
        ]
        assert all(reason for _, reason in reported)


async def test_unanswered_pings_give_the_connection_up() -> None:
    reported: list[str] = []
    options = FiggOptions(backoff=PROMPT, ping_seconds=0.02, on_state=lambda state, reason: reported.append(reason))
    async with behind_a_proxy() as (_server, proxy), figg_client(proxy, options) as client:
        await client.publish("t", b"a")
        proxy.hold_answers()
        await until(lambda: "2 pings unanswered" in reported)
        proxy.release_answers()
        await asyncio.wait_for(client.publish("t", b"b"), 300)


async def test_answered_pings_keep_a_quiet_connection() -> None:
    async with behind_a_proxy(FiggSettings(idle_seconds=1.0)) as (server, proxy):
        async with figg_client(proxy, FiggOptions(backoff=PROMPT, ping_seconds=0.3)) as client:
            await until(lambda: server.counters.bytes_in >= 5 * 16)  # after 1.5 s
            assert client.is_connected and proxy.connections == 1


async def test_a_connection_byte_by_byte_is_a_connection() -> None:
    async with behind_a_proxy() as (_server, proxy), figg_client(proxy) as client:
        proxy.chunk_bytes = 1
        await client.publish_many("t", [b"%d" % index for index in range(20)])
        subscription = await client.subscribe("t", "earliest")
        assert [(await anext(subscription)).value for _ in range(20)] == [b"%d" % index for index in range(20)]


async def test_attempts_follow_the_backoff_and_start_over_after_success() -> None:
    attempts: list[int] = []

    def backoff(attempt: int) -> float:
        attempts.append(attempt)
        return 0.0

    async with behind_a_proxy() as (_server, proxy), figg_client(proxy, FiggOptions(backoff=backoff)) as client:
        await client.publish("t", b"v")
        proxy.refusing = True
        proxy.cut()
        await until(lambda: len(attempts) >= 4)
        proxy.refusing = False
        await asyncio.wait_for(client.publish("t", b"w"), 300)
        assert attempts[:4] == [0, 1, 2, 3]
        attempts.clear()
        proxy.cut()
        await asyncio.wait_for(client.publish("t", b"x"), 300)
        assert attempts[:1] == [0]


async def test_a_server_that_hangs_up_on_every_resend_is_retried_with_growing_delays() -> None:
    """Connecting works and even pings are answered, so only progress may reset the backoff."""
    attempts: list[int] = []

    def backoff(attempt: int) -> float:
        attempts.append(attempt)
        return 0.005

    async with figg_server() as server, figg_client(server, FiggOptions(backoff=backoff)) as client:
        await client.publish("t", b"v")
        server.engine.failure = DiskFull("no room")
        future = await client.send("t", b"poison")
        await until(lambda: len(attempts) >= 6)
        assert attempts[:6] == [0, 1, 2, 3, 4, 5]
        server.engine.failure = None
        await asyncio.wait_for(future, 300)
        assert await server.values_in("t") == [b"v", b"poison"]


async def test_undecodable_bytes_drop_the_connection_and_the_client_reconnects() -> None:
    async def talk_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        await reader.read()
        writer.close()

    reported: list[str] = []
    absurd = await asyncio.start_server(talk_nonsense, "127.0.0.1", 0)
    port = absurd.sockets[0].getsockname()[1]
    options = FiggOptions(backoff=PROMPT, on_state=lambda state, reason: reported.append(reason))
    async with figg_server() as server:
        async with FaultProxy("127.0.0.1", port) as proxy, figg_client(proxy, options) as client:
            await until(lambda: any("undecodable bytes" in reason for reason in reported))
            proxy._target = (server.host, server.port)
            await asyncio.wait_for(client.publish("t", b"v"), 300)
    absurd.close()


async def test_a_draining_server_is_found_again_and_nothing_is_lost() -> None:
    async with figg_server() as server, figg_client(server) as client:
        for round_ in range(5):
            futures = [await client.send("t", b"%d.%d" % (round_, index)) for index in range(50)]
            draining = asyncio.ensure_future(server.listener.drain(5.0))
            await draining
            await server.open(server.port)
            await asyncio.wait_for(asyncio.gather(*futures), 300)
        stored = first_seen(await server.values_in("t"))
        assert stored == [b"%d.%d" % (round_, index) for round_ in range(5) for index in range(50)]


async def test_a_writer_that_floods_is_no_longer_read_until_the_disk_has_caught_up() -> None:
    settings = FiggSettings(in_flight_bytes_max=1 << 20)
    async with figg_server(settings) as server:
        await server.broker.ensure_topic(WHO, "t")
        server.engine.is_holding = True
        reader, writer = await asyncio.open_connection(server.host, server.port)
        frames = encode.publish("t", range(1_000), [bytes(1_000)] * 1_000)
        for _ in range(64):
            writer.write(frames)
        await until(lambda: server.counters.reading_pauses == 1)
        await asyncio.sleep(0.05)
        assert server.counters.bytes_in < 4 << 20
        server.engine.release()
        acks = b""
        async with asyncio.timeout(300):
            while server.broker.bounds(WHO, "t", 0).end < 64_000:
                acks += await reader.read(65_536)
        assert server.counters.open == 1
        writer.close()


async def test_a_subscriber_that_never_reads_costs_a_bounded_amount_and_does_not_slow_the_others() -> None:
    async with figg_server() as server, figg_client(server) as client:
        _, stuck = await asyncio.open_connection(server.host, server.port)
        stuck.write(encode.attach("t", 0))
        await until(lambda: server.counters.accepted == 2)
        subscription = await client.subscribe("t", "earliest")
        for _ in range(40):
            await server.broker.publish(WHO, "t", RecordBatch([bytes(10_000)] * 100), partition=0)
        for offset in range(4_000):
            assert (await asyncio.wait_for(anext(subscription), 300)).offset == offset
        unsent = [session._link.unsent_bytes for session in server.sessions]
        assert max(unsent) < 2 << 20
        stuck.transport.abort()


@pytest.mark.parametrize("noise", [b"\0" * 100, b"\xff" * 100, encode.publish("t", [0], [b"v"])[:-1] + b"\0\0\0\0\0\0\0\0\0"])
async def test_one_malformed_peer_is_closed_and_the_others_notice_nothing(noise: bytes) -> None:
    async with figg_server() as server, figg_client(server) as client:
        await client.publish("t", b"a")
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(noise)
        await reader.read()
        writer.close()
        await client.publish("t", b"b")
        assert sum(server.counters.rejected.values()) == 1
        assert client.is_connected
