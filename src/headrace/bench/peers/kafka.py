"""Kafka's own clients on the cluster that is below Headrace: aiokafka with whole batches, and Kafka's load generator in Java.

Both write to one topic with one partition and wait for all replicas. The reader parses raw Fetch responses into lists of values. It has one
request under way, asks for as many bytes as the engine does, and checks no checksum.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

from headrace.bench.children import BenchFailed, PeerMissing
from headrace.bench.load import Tick
from headrace.extras import needs
from headrace.kafka_server import Cluster, JarsUnavailable, KafkaFailed, jars

BATCH_RECORDS: Final = 1_000
BATCHES_IN_FLIGHT: Final = 16
FETCH_BYTES: Final = 4 << 20
READ_COMMITTED: Final = 1
JAVA_SECONDS_MAX: Final = 600
_TOPICS = count()
_RATE: Final = re.compile(r"([\d.]+) records/sec")


@contextmanager
def server(directory: Path, nodes: int) -> Iterator[Cluster]:
    """Run a Kafka cluster in the directory."""
    try:
        with Cluster(directory / "kafka", nodes) as cluster:
            yield cluster
    except JarsUnavailable as missing:
        raise PeerMissing(str(missing)) from None
    except KafkaFailed as failure:
        raise BenchFailed(str(failure)) from None


def check() -> None:
    """Raise `PeerMissing` or `MissingExtra` if Kafka or its client is not there."""
    with needs("headrace bench compare --engine kafka", "aiokafka"):
        import aiokafka  # noqa: F401
    try:
        jars.resolved(jars.KAFKA)
        jars.resolved(jars.TOOLS)
    except JarsUnavailable as missing:
        raise PeerMissing(str(missing)) from None


def new_topic(cluster: Cluster, partitions: int = 1) -> str:
    """Create a topic and return its name."""
    return asyncio.run(_new_topic(cluster, partitions))


async def _new_topic(cluster: Cluster, partitions: int) -> str:
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic

    name = f"bench-kafka-{next(_TOPICS)}"
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, partitions, min(3, len(cluster.nodes)))])
    finally:
        await admin.close()
    return name


def publish(cluster: Cluster, topic: str, values: Sequence[bytes], records: int, tick: Tick | None = None) -> float:
    """Write with aiokafka's `send_batch`. Returns the seconds from the first batch to the last acknowledgement."""
    return asyncio.run(_publish(cluster, topic, values, records, tick))


async def _publish(cluster: Cluster, topic: str, values: Sequence[bytes], records: int, tick: Tick | None) -> float:
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(
        bootstrap_servers=cluster.bootstrap, acks="all", enable_idempotence=True, max_batch_size=1 << 20, linger_ms=0
    )
    await producer.start()
    in_flight: list[asyncio.Future[object]] = []
    try:
        await producer.partitions_for(topic)
        began = time.perf_counter()
        for start in range(0, records, BATCH_RECORDS):
            if len(in_flight) == BATCHES_IN_FLIGHT:
                await in_flight.pop(0)
            batch = producer.create_batch()
            for number in range(start, min(start + BATCH_RECORDS, records)):
                batch.append(key=None, value=values[number % len(values)], timestamp=None)
            in_flight.append(await producer.send_batch(batch, topic, partition=0))
            if tick is not None:
                tick(start)
        for future in in_flight:
            await future
        return time.perf_counter() - began
    finally:
        await producer.stop()


def consume(cluster: Cluster, topic: str, records: int, tick: Tick | None = None) -> float:
    """Read with raw Fetch requests and aiokafka's parser into lists. Returns the seconds."""
    return asyncio.run(_consume(cluster, topic, records, tick))


async def _consume(cluster: Cluster, topic: str, records: int, tick: Tick | None) -> float:
    from aiokafka.client import AIOKafkaClient
    from aiokafka.protocol.fetch import FetchRequest
    from aiokafka.record.memory_records import MemoryRecords
    from aiokafka.structs import TopicPartition

    client = AIOKafkaClient(bootstrap_servers=cluster.bootstrap)
    await client.bootstrap()
    found = offset = 0
    try:
        await client.set_topics([topic])
        node = client.cluster.leader_for_partition(TopicPartition(topic, 0))
        await client.ready(node)
        began = time.perf_counter()
        while found < records:
            request = FetchRequest(500, 1, FETCH_BYTES, READ_COMMITTED, [(topic, [(0, offset, FETCH_BYTES)])])
            content = (await client.send(node, request)).topics[0][1][0][-1]
            parsed = MemoryRecords(content)
            while parsed.has_next():
                batch = parsed.next_batch()
                found += len([record.value for record in batch])
                offset = batch.next_offset
            if tick is not None:
                tick(found)
        return time.perf_counter() - began
    finally:
        await client.close()


def publish_with_java(cluster: Cluster, topic: str, records: int, value_bytes: int) -> float:
    """Write with Kafka's load generator. Returns records per second as it reports them, without its start."""
    path = f"{jars.resolved(jars.TOOLS)}/*:{jars.resolved(jars.KAFKA)}/*"
    command = [jars.java(), "-Xmx256m", "-cp", path, "org.apache.kafka.tools.ProducerPerformance"]
    command += ["--topic", topic, "--num-records", str(records), "--record-size", str(value_bytes), "--throughput", "-1"]
    properties = ["acks=all", f"bootstrap.servers={cluster.bootstrap}", "batch.size=131072", "linger.ms=5"]
    done = subprocess.run(
        [*command, "--producer-props", *properties], capture_output=True, text=True, timeout=JAVA_SECONDS_MAX, check=False
    )
    rates = _RATE.findall(done.stdout)
    if done.returncode or not rates:
        raise BenchFailed(f"Kafka's load generator ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")
    return float(rates[-1])
