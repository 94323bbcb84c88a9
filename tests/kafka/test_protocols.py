"""Every protocol on Kafka: the tests of the embedded engine, and Kafka's own client as one more protocol."""

from __future__ import annotations

import asyncio
from itertools import count, product

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from headrace.kafka_server import Cluster
from tests.protocols.peers import PEERS, QUIC, WAIT_SECONDS, Broker, Peer
from tests.protocols.test_matrix import VALUES, following, values_for, write
from tests.protocols.test_matrix import test_protocols_that_write_in_turns_use_one_sequence_of_offsets as test_one_sequence_of_offsets

__all__ = ["test_one_sequence_of_offsets"]

NAMES = count()
VOICES = PEERS + QUIC
voices = pytest.mark.parametrize("peer", VOICES, ids=str)


@pytest.fixture
async def topic(broker: Broker) -> str:
    name = f"kafka-matrix-{next(NAMES)}"
    async with broker.connect("flymq") as client:
        await client.create_topic(name)
    return name


def kafka_consumer(kafka: Cluster) -> Consumer:
    return Consumer(
        {"bootstrap.servers": kafka.bootstrap, "group.id": "unused", "enable.auto.commit": False, "isolation.level": "read_committed"}
    )


def read_by_kafka(kafka: Cluster, topic: str, records: int) -> list[tuple[bytes | None, bytes | None]]:
    """Return key and value of the first records of partition 0."""
    consumer = kafka_consumer(kafka)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[tuple[bytes | None, bytes | None]] = []
    while len(found) < records:
        message = consumer.poll(WAIT_SECONDS)
        assert message is not None and message.error() is None, (len(found), message)
        found.append((message.key(), message.value()))
    consumer.close()
    return found


def write_by_kafka(kafka: Cluster, topic: str, values: list[bytes], key: bytes | None = None) -> None:
    failed: list[object] = []
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "message.max.bytes": 4 << 20, "log_level": 0})
    for value in values:
        producer.produce(topic, value, key, partition=0, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(WAIT_SECONDS) == 0 and failed == []


@pytest.mark.parametrize("writer, reader", [pytest.param(a, b, id=f"{a}-{b}") for a, b in product(VOICES, VOICES)])
async def test_what_is_written_through_one_protocol_is_read_through_another(broker: Broker, topic: str, writer: Peer, reader: Peer) -> None:
    values = [value for value in values_for(writer) if len(value) < 1024]
    async with following(broker, reader, topic) as subscription:
        await write(broker, writer, topic, values)
        messages = [await anext(subscription) for _ in values]
    assert [message.value for message in messages] == values
    wanted = [b"key of %d" % len(value) if value and writer.writes_keys and reader.reads_keys else None for value in values]
    assert [message.key for message in messages] == wanted


@voices
async def test_a_kafka_client_reads_what_a_protocol_wrote(kafka: Cluster, broker: Broker, topic: str, peer: Peer) -> None:
    values = values_for(peer)
    await write(broker, peer, topic, values)
    found = await asyncio.to_thread(read_by_kafka, kafka, topic, len(values))
    assert [value for _, value in found] == values
    if peer.writes_keys:
        assert [key for key, _ in found] == [b"key of %d" % len(value) if value else None for value in values]


@voices
async def test_a_protocol_reads_what_a_kafka_client_wrote(kafka: Cluster, broker: Broker, topic: str, peer: Peer) -> None:
    async with following(broker, peer, topic) as subscription:
        await asyncio.to_thread(write_by_kafka, kafka, topic, VALUES, b"key")
        messages = [await anext(subscription) for _ in VALUES]
    assert [message.value for message in messages] == VALUES
    if peer.reads_keys:
        assert {message.key for message in messages} == {b"key"}
