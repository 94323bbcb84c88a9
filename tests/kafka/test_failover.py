"""Two brokers on one Kafka: one owns the tables, the other waits and takes over."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

import headrace
from headrace.kafka_server import Cluster
from tests.server.process import BrokerProcess

SECONDS = 60


def start(directory: Path, cluster: Cluster, name: str) -> BrokerProcess:
    (directory / name).mkdir()
    engine = ("--engine", "kafka", "--set", f"kafka.bootstrap={cluster.bootstrap}", "--set", f"kafka.prefix={directory.name}-")
    return BrokerProcess(directory / name, *engine, log=directory / f"{name}.log")


def url(broker: BrokerProcess) -> str:
    host, port = broker.addresses[0]
    return f"flymq://{host}:{port}"


async def ready(broker: BrokerProcess) -> None:
    await asyncio.to_thread(broker.wait_ready)


@pytest.mark.kill_loop
async def test_a_standby_takes_over_from_a_paused_owner_with_everything_it_had(kafka: Cluster, tmp_path: Path) -> None:
    first = start(tmp_path, kafka, "first")
    try:
        await ready(first)
        second = start(tmp_path, kafka, "second")
        try:
            async with headrace.connect(url(first)) as client:
                await client.create_topic("t")
                await client.publish("t", b"before")
                await client.commit("t", 1, group="g")
                await client.publish_delayed("t", b"delayed", delay_ms=12_000)
            assert not second.ready_file.exists()
            first.process.send_signal(signal.SIGSTOP)
            await ready(second)
            async with headrace.connect(url(second)) as client:
                assert await client.committed("t", group="g") == 1
                await client.publish("t", b"after")
                first.process.send_signal(signal.SIGCONT)  # it has lost the tables while it slept
                values = list[bytes | None]()
                async with asyncio.timeout(SECONDS):
                    async for message in await client.subscribe("t", start="earliest"):
                        values.append(message.value)
                        if b"delayed" in values:
                            break
                async with asyncio.timeout(SECONDS):
                    while first.ready_file.exists():  # noqa: ASYNC110  # another process removes it
                        await asyncio.sleep(0.05)
                await client.publish("t", b"last")
                assert [message.value for message in await client.fetch("t")] == [b"before", b"after", b"delayed", b"last"]
            second.process.kill()
            await ready(first)
            async with headrace.connect(url(first)) as client:
                assert [message.value for message in await client.fetch("t")] == [b"before", b"after", b"delayed", b"last"]
        finally:
            second.process.kill()
            second.process.communicate()
    finally:
        first.process.send_signal(signal.SIGCONT)
        first.process.kill()
        first.process.communicate()
