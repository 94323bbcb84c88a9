"""The Fujin client under network and server faults."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from headrace.clients.errors import NotSent, OutcomeUnknown
from headrace.clients.fujin.client import FujinOptions
from headrace.clients.messages import ConnectionState
from headrace.net.quic.listener import QuicLimits
from headrace.sessions.fujin.settings import FujinSettings
from tests.clients.fujin.support import PROMPT, fujin_client, fujin_server
from tests.net.polling import until
from tests.net.udp_proxy import UdpProxy

QUICK = QuicLimits(ping_seconds=0.05, pong_seconds=0.5)


async def test_what_was_written_survives_a_restart_of_the_listener(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        await client.publish("t", b"before")
        publishing = asyncio.ensure_future(client.publish_many("t", [b"%d" % number for number in range(5_000)]))
        await until(lambda: client.unacknowledged > 0)
        await server.restart()
        assert await publishing == 5_000
        await client.publish("t", b"after")
        kept = await server.values_in("t")
        assert kept[0] == b"before" and kept[-1] == b"after"
        assert {b"%d" % number for number in range(5_000)} <= set(kept), "at least once"


async def test_a_subscription_goes_on_after_a_restart_of_the_listener(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        await client.publish_many("t", [b"a", b"b"])
        subscription = await client.subscribe("t")
        first = await anext(subscription)
        assert await first.ack()
        held = await anext(subscription)
        await server.restart()
        again = await anext(subscription)
        assert (held.value, again.value) == (b"b", b"b"), "what was not acknowledged comes again"
        assert await held.ack(), "and its old id means the same message"
        await client.publish("t", b"c")
        assert (await anext(subscription)).value == b"c"


async def test_a_graceful_stop_is_answered_by_leaving_and_coming_again(tmp_path: Path) -> None:
    states: list[ConnectionState] = []
    options = FujinOptions(backoff=PROMPT, on_state=lambda state, reason: states.append(state))
    async with fujin_server(tmp_path) as server, fujin_client(server, options) as client:
        subscription = await client.subscribe("t")
        await client.publish("t", b"a")
        assert await (await anext(subscription)).ack()
        assert await server.restart(drain_seconds=5.0) == 0
        await client.publish("t", b"b")
        assert (await anext(subscription)).value == b"b"
        assert states[:3] == [ConnectionState.CONNECTED, ConnectionState.DISCONNECTED, ConnectionState.CONNECTED]


@pytest.mark.parametrize("share", [0.02, 0.1])
async def test_loss_doubling_and_disorder_lose_and_repeat_nothing(tmp_path: Path, share: float) -> None:
    async with fujin_server(tmp_path, limits=dataclasses.replace(QUICK, pong_seconds=10)) as server:
        async with UdpProxy(server.host, server.port) as proxy, fujin_client(proxy) as client:
            proxy.lost = proxy.doubled = proxy.delayed = share
            values = [b"%06d" % number + b"x" * 100 for number in range(5_000)]
            await client.publish_many("t", values)
            subscription = await client.subscribe("t", settlement="auto")
            found = [(await anext(subscription)).value for _ in values]
            assert found == values
            assert await server.values_in("t") == values
            assert proxy.dropped > 0


async def test_a_network_that_is_gone_is_noticed_and_found_again(tmp_path: Path) -> None:
    options = FujinOptions(backoff=PROMPT, idle_seconds=1.0, connect_seconds=1.0)
    async with fujin_server(tmp_path, limits=QUICK) as server:
        async with UdpProxy(server.host, server.port) as proxy, fujin_client(proxy, options) as client:
            subscription = await client.subscribe("t")
            await client.publish("t", b"a")
            assert await (await anext(subscription)).ack()
            proxy.is_cut = True
            publishing = asyncio.ensure_future(client.publish("t", b"b"))
            await until(lambda: not client.is_connected)
            await until(lambda: server.counters.open == 0)
            proxy.is_cut = False
            await publishing
            assert (await anext(subscription)).value == b"b"


async def test_a_client_closed_without_a_connection_says_what_it_knows(tmp_path: Path) -> None:
    options = FujinOptions(backoff=lambda attempt: 0.01, connect_seconds=0.2)
    async with fujin_server(tmp_path) as server, fujin_client(server, options) as client:
        await client.publish("t", b"a")
        server.listener.close()
        await until(lambda: not client.is_connected)
        unsent = await client.send("t", b"b")
        with pytest.raises(NotSent):
            await client.close(timeout=0.05)
        with pytest.raises(NotSent):
            await unsent


async def test_a_write_without_an_answer_is_of_unknown_outcome(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, UdpProxy(server.host, server.port) as proxy, fujin_client(proxy) as client:
        await client.publish("t", b"a")
        proxy.is_cut = True
        unknown = await client.send("t", b"b")
        assert client.abandon() == (1, 0)
        with pytest.raises(OutcomeUnknown):
            await unknown


async def test_a_message_that_is_always_nacked_is_dead_lettered(tmp_path: Path) -> None:
    settings = FujinSettings(backoff_ms=1, backoff_max_ms=1, attempts_max=3)
    async with fujin_server(tmp_path, settings) as server, fujin_client(server) as client:
        await client.publish("t", b"bad")
        subscription = await client.subscribe("t")
        for _ in range(3):
            message = await anext(subscription)
            assert await message.nack()
        letters = await client.subscribe("t.dlq")
        assert (await anext(letters)).value == b"bad"
