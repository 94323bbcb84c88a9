"""Several addresses in one URL: every client uses the first that answers and moves on when it is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import count

import pytest

import headrace
from headrace.clients.options import ClientOptions
from headrace.clients.stream import _reason_of
from tests.net.proxy import FaultProxy
from tests.protocols.peers import API_KEY, PEERS, QUIC, WAIT_SECONDS, Broker, Peer, serving

NAMES = count()
CONNECT_SECONDS = 2.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("addresses")) as broker:
        yield broker


@pytest.fixture
def away() -> Iterator[str]:
    """Return an address that refuses TCP connections and answers no datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        yield f"127.0.0.1:{port}"


@pytest.fixture
async def topic(broker: Broker) -> str:
    name = f"addresses-{next(NAMES)}"
    async with broker.connect("flymq") as client:
        await client.create_topic(name)
    return name


def options_of(peer: Peer) -> dict[str, object]:
    options: ClientOptions | None = peer.options
    return {"api_key": API_KEY if peer.needs_api_key else None, "options": options, "connect_seconds": CONNECT_SECONDS}


def live(broker: Broker, peer: Peer) -> str:
    protocols = broker.process.ready["protocols"]
    assert isinstance(protocols, dict)
    return str(protocols[peer.kind][0])


@pytest.mark.parametrize("peer", PEERS + QUIC, ids=str)
async def test_the_next_address_is_used_if_the_first_is_away(broker: Broker, topic: str, away: str, peer: Peer) -> None:
    url = f"{peer.protocol}://{away},{live(broker, peer)}"
    async with headrace.connect(url, **options_of(peer)) as client:  # type: ignore[arg-type]  # arguments by name
        await client.publish(topic, b"hello")


def test_the_blocking_client_takes_several_addresses_too(broker: Broker, topic: str, away: str) -> None:
    with headrace.sync.connect(f"flymq://{away},{broker.address}") as client:
        client.publish(topic, b"hello")


@pytest.mark.parametrize("peer", PEERS, ids=str)
async def test_a_client_that_loses_one_address_goes_on_with_the_next_without_losing_records(broker: Broker, topic: str, peer: Peer) -> None:
    async with AsyncExitStack() as stack:
        host, port = broker.process.addresses[0]
        first, second = [await stack.enter_async_context(FaultProxy(host, port)) for _ in range(2)]
        url = f"{peer.protocol}://{first.host}:{first.port},{second.host}:{second.port}"
        client = await stack.enter_async_context(headrace.connect(url, **options_of(peer)))  # type: ignore[arg-type]  # as above
        await client.publish(topic, b"before")
        assert (first.connections, second.connections) == (1, 0)
        first.refusing = True
        first.cut()
        async with asyncio.timeout(WAIT_SECONDS):
            await client.publish(topic, b"after")
        assert second.connections == 1
        reader = await stack.enter_async_context(broker.connect("flymq"))
        values = {record.value for record in await reader.fetch(topic, 0)}
        assert values == {b"before", b"after"}


async def test_if_no_address_serves_the_protocol_the_error_names_each_with_its_reason(away: str) -> None:
    with pytest.raises(headrace.ConnectFailed, match=rf"cannot connect to {away}: .*refused.*; localhost:1: .*refused"):
        await headrace.connect(f"flymq://{away},localhost:1")


def test_a_host_whose_addresses_all_refuse_has_one_reason() -> None:
    of_asyncio = "Multiple exceptions: [Errno {}] Connect call failed ('::1', 1, 0, 0), [Errno 111] Connect call failed ('127.0.0.1', 1)"
    assert _reason_of(OSError(of_asyncio.format(111))) == "connection refused"
    assert _reason_of(OSError(of_asyncio.format(101))) == of_asyncio.format(101)


async def test_a_refused_login_is_not_tried_at_the_next_address(broker: Broker) -> None:
    async with FaultProxy(*broker.process.addresses[0]) as second:
        with pytest.raises(headrace.LoginRefused):
            await headrace.connect(f"blipmq://{broker.address},{second.host}:{second.port}", api_key="wrong")
        assert second.connections == 0
