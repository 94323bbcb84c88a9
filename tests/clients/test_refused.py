"""A server that ends every connection: the client backs off, then gives up and says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import headrace
from headrace.clients.messages import ConnectionState
from headrace.errors import DiskFull
from tests.clients.servers import figg_server
from tests.clients.test_publishing import broker as broker
from tests.net.polling import until
from tests.net.proxy import FaultProxy
from tests.protocols.peers import API_KEY, PEERS, WAIT_SECONDS, Broker, Peer

REASONS = "not logged in or not allowed, an unknown topic, or another protocol on this port"
peers = pytest.mark.parametrize("peer", PEERS, ids=str)


class Delays:
    """A backoff that notes the attempts and does not wait."""

    def __init__(self) -> None:
        self.attempts: list[int] = []

    def __call__(self, failures: int) -> float:
        self.attempts.append(failures)
        return 0.0


@asynccontextmanager
async def through_a_proxy(broker: Broker, peer: Peer, **options: object) -> AsyncIterator[tuple[FaultProxy, headrace.Client]]:
    host, port = broker.process.addresses[0]
    async with asyncio.timeout(WAIT_SECONDS), FaultProxy(host, port) as proxy:
        client = await headrace.connect(
            f"{peer.protocol}://{proxy.host}:{proxy.port}",
            api_key=API_KEY if peer.needs_api_key else None,
            **options,  # type: ignore[arg-type]  # those of the test
        )
        try:
            yield proxy, client
        finally:
            client.abandon()


@peers
async def test_a_client_whose_every_connection_is_closed_gives_up_with_the_likely_reasons(broker: Broker, peer: Peer) -> None:
    delays, states = Delays(), list[tuple[ConnectionState, str]]()
    options = {"backoff": delays, "refused_connections_max": 5, "on_state": lambda *state: states.append(state)}
    async with through_a_proxy(broker, peer, **options) as (proxy, client):
        proxy.refusing = True
        future = await client.send("refused", b"waits")
        proxy.cut()
        with pytest.raises(headrace.RefusedRepeatedly, match=REASONS) as caught:
            await client.publish("refused", b"waits too")
        assert (caught.value.count, caught.value.port) == (5, proxy.port)
        assert proxy.connections <= 6
        assert delays.attempts == list(range(len(delays.attempts)))
        with pytest.raises(headrace.RefusedRepeatedly):
            await future
        for late in (client.publish("refused", b"late"), client.subscribe("refused"), client.ping()):
            with pytest.raises(headrace.RefusedRepeatedly):
                await late
        await client.close()
    assert states[-1] == (ConnectionState.CLOSED, str(caught.value))


@peers
async def test_an_idle_client_reconnects_however_often_its_connection_is_closed(broker: Broker, peer: Peer) -> None:
    delays = Delays()
    async with through_a_proxy(broker, peer, backoff=delays, refused_connections_max=2) as (proxy, client):
        await client.ping()
        proxy.refusing = True
        proxy.cut()
        await until(lambda: len(delays.attempts) >= 6)
        proxy.refusing = False
        await client.ping()
        assert client.is_connected


@peers
async def test_a_server_that_cannot_be_reached_is_retried_without_limit(broker: Broker, peer: Peer) -> None:
    delays = Delays()
    async with through_a_proxy(broker, peer, backoff=delays, refused_connections_max=2) as (proxy, client):
        proxy._server.close()
        proxy.cut()
        await until(lambda: len(delays.attempts) >= 6)
        assert not client.is_connected
        assert await client.send("refused", b"waits") is not None


async def test_pings_on_a_connection_that_serves_nothing_are_no_progress() -> None:
    """Figg has no error frame: a server with a full disk answers the ping of every connection and closes it at the record."""
    delays = Delays()
    async with asyncio.timeout(WAIT_SECONDS), figg_server() as server:
        options = headrace.FiggOptions(backoff=delays, refused_connections_max=4)
        async with await headrace.FiggClient.connect(server.host, server.port, options) as client:
            await client.publish("t", b"v")
            server.engine.failure = DiskFull("no room")
            with pytest.raises(headrace.RefusedRepeatedly, match="ended 4 connections in a row"):
                await client.publish("t", b"w", timeout=0)
            with pytest.raises(headrace.RefusedRepeatedly):
                await client.subscribe("t")
    assert delays.attempts == [0, 1, 2]


async def test_a_subscription_that_is_closed_again_and_again_raises_the_error(broker: Broker) -> None:
    async with through_a_proxy(broker, PEERS[0], backoff=Delays(), refused_connections_max=3) as (proxy, client):
        await client.publish("refused", b"first")
        subscription = await client.subscribe("refused", "earliest")
        assert (await anext(subscription)).value is not None
        proxy.refusing = True
        proxy.cut()
        with pytest.raises(headrace.RefusedRepeatedly):
            while True:
                await anext(subscription)


async def test_progress_on_a_connection_starts_the_count_over(broker: Broker) -> None:
    async with through_a_proxy(broker, PEERS[0], backoff=Delays(), refused_connections_max=3) as (proxy, client):
        for _ in range(6):
            future = await client.send("refused", b"v")
            proxy.cut()
            await future


async def test_closing_raises_an_error_that_nobody_has_seen(broker: Broker) -> None:
    closed = asyncio.Event()
    options = {"backoff": Delays(), "refused_connections_max": 2, "on_state": lambda state, _: closed.set() if state == "closed" else None}
    async with through_a_proxy(broker, PEERS[0], **options) as (proxy, client):
        proxy.refusing = True
        await client.send("refused", b"lost")
        proxy.cut()
        await closed.wait()
        with pytest.raises(headrace.RefusedRepeatedly):
            await client.close()
        await client.close()
