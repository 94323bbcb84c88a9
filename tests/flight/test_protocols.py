"""Records published through another protocol are read through Flight and vice versa, with the same bytes, offsets and groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa
import pytest

from headrace.flight.client import FlightClient, Servers
from headrace.flight.request import HEADERS
from tests.flight.harness import rows, values
from tests.protocols.peers import WAIT_SECONDS, Broker, serving

SAMPLES = [b"plain", "späße ☃".encode(), bytes(range(256)), b"x" * 100_000, b"\0"]
WRITERS = ["figg", "rustlog", "blipmq", "flymq"]
READERS = ["figg", "rustlog", "flymq"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("protocols"), "--listen-flight", "127.0.0.1:0", quic=False) as running:
        yield running


@pytest.fixture
def flight_client(broker: Broker) -> Iterator[FlightClient]:
    protocols = broker.process.ready["protocols"]
    assert isinstance(protocols, dict)
    with FlightClient(Servers.parse(protocols["flight"][0])) as client:
        yield client


@pytest.mark.parametrize("protocol", WRITERS)
async def test_what_is_published_through_a_protocol_is_read_through_the_endpoint(
    broker: Broker, flight_client: FlightClient, protocol: str
) -> None:
    topic = f"from-{protocol}"
    flight_client.create_topic(topic)
    async with broker.connect(protocol) as client:
        for value in SAMPLES:
            await client.publish(topic, value)
    assert [row["value"] for row in rows(flight_client, topic)] == SAMPLES
    assert [row["offset"] for row in rows(flight_client, topic)] == list(range(len(SAMPLES)))


@pytest.mark.parametrize("protocol", READERS)
async def test_what_is_appended_through_the_endpoint_is_read_through_a_protocol(
    broker: Broker, flight_client: FlightClient, protocol: str
) -> None:
    topic = f"to-{protocol}"
    flight_client.create_topic(topic)
    flight_client.append(topic, [values(*SAMPLES[:2]), values(*SAMPLES[2:])])
    async with broker.connect(protocol) as client:
        subscription = await client.subscribe(topic, "earliest")
        async with asyncio.timeout(WAIT_SECONDS):
            found = [await anext(subscription) for _ in SAMPLES]
    assert [message.value for message in found] == SAMPLES
    assert [message.offset for message in found] == list(range(len(SAMPLES)))


async def test_keys_and_headers_cross_over(broker: Broker, flight_client: FlightClient) -> None:
    flight_client.create_topic("keyed", 4)
    async with broker.connect("flymq") as client:
        for number in range(20):
            await client.publish("keyed", b"%d" % number, key=b"key %d" % (number % 6))
    before = {row["key"]: partition for partition in range(4) for row in rows(flight_client, "keyed", partition)}
    batch = values(
        *(b"flight %d" % number for number in range(6)),
        key=pa.array([b"key %d" % number for number in range(6)], pa.binary()),
        headers=pa.array([[{"key": "from", "value": b"flight"}]] * 6, HEADERS),
    )
    flight_client.append("keyed", [batch])
    found = [(partition, row) for partition in range(4) for row in rows(flight_client, "keyed", partition)]
    assert len(found) == 26
    assert {row["key"]: partition for partition, row in found} == before
    assert sum(row["headers"] == [{"key": "from", "value": b"flight"}] for _, row in found) == 6


async def test_a_group_has_one_position_through_all_protocols(broker: Broker, flight_client: FlightClient) -> None:
    flight_client.create_topic("shared")
    flight_client.append("shared", [values(*SAMPLES)])
    flight_client.commit("readers", {"shared": {0: 3}})
    async with broker.connect("rustlog") as client:
        assert await client.committed("shared", group="readers") == 3
        await client.commit("shared", 4, group="readers")
    assert flight_client.committed("readers", "shared") == {0: 4}
