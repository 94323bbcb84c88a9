"""Every client reports a value that is too large with an error that names its size and the limit, and other work is not affected."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.clients.errors import RecordRefused, Refused
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import LimitExceeded
from headrace.flight.client import FlightClient, Servers
from headrace.limits import (
    BLIPMQ_FRAME_BYTES_MAX,
    FLYMQ_PAYLOAD_BYTES_MAX,
    FUJIN_MESSAGE_BYTES_MAX,
    KIB,
    RUSTLOG_FRAME_BYTES_MAX,
    VALUE_BYTES_MAX,
)
from tests.protocols.peers import DIALECTS, PEERS, QUIC, WAIT_SECONDS, Broker, Peer, serving

SIZE = 40_000_000
LIMITS = {
    "figg": VALUE_BYTES_MAX,
    "rustlog": RUSTLOG_FRAME_BYTES_MAX,
    "blipmq": BLIPMQ_FRAME_BYTES_MAX,
    "flymq": FLYMQ_PAYLOAD_BYTES_MAX,
    "fujin": FUJIN_MESSAGE_BYTES_MAX,
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(Path(tmp_path_factory.mktemp("broker")), "--set", "listen.flight=127.0.0.1:0") as running:
        yield running


def check(text: str, limit: int) -> None:
    """It names the size, and the limit less what a frame takes for itself."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    assert SIZE in numbers, text
    assert any(limit - KIB <= number <= limit for number in numbers), text


@pytest.mark.parametrize("peer", PEERS + DIALECTS + QUIC, ids=str)
@pytest.mark.parametrize("way", ["publish", "send_many", "publish_many"])
async def test_a_value_of_40_mb_is_refused_with_its_size_and_the_limit(broker: Broker, peer: Peer, way: str) -> None:
    topic, value = f"{peer}.{way}", b"x" * SIZE
    async with broker.connect("flymq") as maker:
        await maker.create_topic(topic)
    async with broker.connect(peer) as client, asyncio.timeout(4 * WAIT_SECONDS):
        with pytest.raises((LimitExceeded, Refused, RecordRefused)) as refused:
            if way == "publish":
                await client.publish(topic, value)
            elif way == "send_many":
                await (await client.send_many(topic, [value]))
            else:
                await client.publish_many(topic, [value])
        check(str(refused.value), LIMITS[peer.protocol])
        await client.publish(topic, b"the connection is as good as before")


@pytest.mark.parametrize("way", ["delayed", "ttl", "transaction", "key"])
async def test_so_it_is_in_flymqs_other_ways_to_publish(broker: Broker, way: str) -> None:
    value = b"x" * SIZE
    async with broker.connect("flymq") as client, asyncio.timeout(4 * WAIT_SECONDS):
        assert isinstance(client, FlyMqClient)
        with pytest.raises(LimitExceeded) as refused:
            if way == "delayed":
                await client.publish_delayed("t", value, delay_ms=1_000)
            elif way == "ttl":
                await client.publish_with_ttl("t", value, ttl_ms=1_000)
            elif way == "key":
                await client.publish("t", b"", key=value)
            else:
                async with client.transaction() as transaction:
                    await transaction.publish("t", value)
        numbers = [int(number) for number in re.findall(r"\d+", str(refused.value))]
        assert any(SIZE <= number <= SIZE + KIB for number in numbers), "a request is refused with its own size, a little more"
        assert any(FLYMQ_PAYLOAD_BYTES_MAX - KIB <= number <= FLYMQ_PAYLOAD_BYTES_MAX for number in numbers)


def test_so_it_is_by_the_flight_endpoint(broker: Broker) -> None:
    protocols = broker.process.ready["protocols"]
    assert isinstance(protocols, dict)
    with FlightClient(Servers.parse(protocols["flight"][0])) as client:
        client.ensure_topic("flight")
        batch = pa.RecordBatch.from_pydict({"value": [b"x" * SIZE]})
        with pytest.raises(LimitExceeded) as refused:
            client.append("flight", [batch])
        check(str(refused.value), VALUE_BYTES_MAX)
        with pytest.raises(LimitExceeded) as refused:
            client.stage("h", [batch], writer="a", topic="flight")
        check(str(refused.value), VALUE_BYTES_MAX)
