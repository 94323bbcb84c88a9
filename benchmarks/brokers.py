"""Benchmark of one and two brokers on one Kafka node: `python -m benchmarks.brokers`.

Four clients publish to, and then read from, one topic with four partitions. They are divided between the brokers. On a machine with few
cores Kafka, the brokers and the clients share them, so the rate says little: the CPU time of the brokers per record decides how much two
machines could do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from benchmarks import main
from headrace.bench import options
from headrace.bench.children import Served, cpu_seconds, serving
from headrace.bench.report import Figure, NoteValue
from headrace.clients.flymq.client import FlyMqClient
from headrace.kafka_server import Cluster

PARTITIONS = 4
BATCH = 1_000


async def publish(places: Sequence[str], topic: str, records: int, value: bytes) -> None:
    """Publish from one client per partition. Client n uses broker n modulo their number."""

    async def one(partition: int) -> None:
        async with await connected(places, partition) as client:
            for _ in range(records // PARTITIONS // BATCH):
                await client.send_many(topic, [value] * BATCH, partition=partition)
            await client.flush()

    await asyncio.gather(*(one(partition) for partition in range(PARTITIONS)))


async def read(places: Sequence[str], topic: str, records: int) -> None:
    async def one(partition: int) -> None:
        position = 0
        async with await connected(places, partition) as client:
            while position < records // PARTITIONS:
                _, position = await client.read(topic, position, partition=partition)

    await asyncio.gather(*(one(partition) for partition in range(PARTITIONS)))


async def connected(places: Sequence[str], partition: int) -> FlyMqClient:
    host, _, port = places[partition % len(places)].rpartition(":")
    return await FlyMqClient.connect(host, int(port))


async def measure(brokers: Sequence[Served], topic: str, records: int, value: bytes) -> list[tuple[float, float]]:
    """Return records/s and µs of CPU per record of all brokers, for publishing and reading."""
    places = [served.protocols["tcp"][0] for served in brokers]
    async with await connected(places, 0) as client:
        await client.create_topic(topic, partitions=PARTITIONS)
    for place in places:
        async with await connected([place], 0) as client:
            while topic not in await client.topics():  # noqa: ASYNC110  # a broker reads the topics of others at intervals
                await asyncio.sleep(0.1)
    found = []
    for work in (publish(places, topic, records, value), read(places, topic, records)):
        began, before = time.perf_counter(), sum(cpu_seconds(served.pid) for served in brokers)
        await work
        cpu = sum(cpu_seconds(served.pid) for served in brokers) - before
        found.append((records / (time.perf_counter() - began), cpu / records * 1e6))
    return found


@click.command()
@options.common
@options.records(400_000)
@options.size()
def brokers(repeat: int, output: str, parent: Path | None, records: int, value_bytes: int) -> None:
    """Measure publishing and reading through one and through two brokers on one Kafka."""
    records -= records % (PARTITIONS * BATCH)
    config: dict[str, NoteValue] = {"records": records, "value_bytes": value_bytes}
    found: dict[int, list[list[tuple[float, float]]]] = {1: [], 2: []}
    with options.measuring("brokers", repeat, output, parent, config) as running, ExitStack() as stack:
        kafka = stack.enter_context(Cluster(running.directory))
        served = []
        for number in range(2):
            directory = running.directory / f"broker-{number}"
            directory.mkdir()
            flags = ("--engine", "kafka", "--set", f"kafka.bootstrap={kafka.bootstrap}")
            served.append(stack.enter_context(serving(directory, flags, environment={})))
        for turn in range(repeat):
            for count, runs in found.items():
                with running.steps.step(f"{count} of 2 brokers, {turn + 1}/{repeat}", records):
                    runs.append(asyncio.run(measure(served[:count], f"t-{count}-{turn}", records, bytes(value_bytes))))
        for index, work in enumerate(("publish", "read")):
            for count, runs in found.items():
                name = f"{work}, {count} broker{'s' if count > 1 else ''}"
                running.report.add(Figure(name, "records/s", [run[index][0] for run in runs]))
                running.report.add(Figure(f"{name}: CPU of the brokers", "µs/record", [run[index][1] for run in runs]))


if __name__ == "__main__":
    main(brokers, "brokers")
