"""Two brokers on one Kafka: when the coordinator is paused or killed, the other becomes it, and its clients go on.

Delayed messages that were published through a relay arrive once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import cast

import pytest

import headrace
from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.messages import ConnectionState
from headrace.errors import HeadraceError, NotCoordinator
from headrace.kafka_server import Cluster
from tests.conftest import Proof
from tests.server.process import BrokerProcess

SECONDS = 300
ATTEMPT_SECONDS = 10


def start(directory: Path, cluster: Cluster, name: str) -> BrokerProcess:
    (directory / name).mkdir()
    engine = ("--engine", "kafka", "--set", f"kafka.bootstrap={cluster.bootstrap}", "--set", f"kafka.prefix={directory.name}-")
    return BrokerProcess(directory / name, *engine, log=directory / f"{name}.log")


def url(broker: BrokerProcess) -> str:
    host, port = broker.addresses[0]
    return f"flymq://{host}:{port}"


async def ready(broker: BrokerProcess) -> None:
    await asyncio.to_thread(broker.wait_ready)


async def known(topic: str, client: headrace.Client) -> None:
    """Wait until the broker has heard of the topic."""
    async with asyncio.timeout(SECONDS):
        while topic not in await client.topics():  # noqa: ASYNC110  # it reads the topics of others at intervals
            await asyncio.sleep(0.05)


async def stepped_down(broker: BrokerProcess) -> None:
    """Wait until the broker serves and is not the coordinator. It closes its listeners before, and may open them on other ports: a client
    of the old one would try for ever."""
    async with asyncio.timeout(SECONDS):
        while True:
            await ready(broker)
            with contextlib.suppress(HeadraceError, OSError, TimeoutError):
                async with asyncio.timeout(ATTEMPT_SECONDS), headrace.connect(url(broker), refused_connections_max=1) as client:
                    if not (await cast(FlyMqClient, client).call("status"))["server"]["is_coordinator"]:
                        return
            await asyncio.sleep(0.05)


async def committed(client: headrace.Client) -> int | None:
    """Return the committed offset. On a slow machine the election may take longer than a broker waits for it."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                return await client.committed("t", group="g")
            except NotCoordinator:
                await asyncio.sleep(0.05)


@pytest.mark.kill_loop
async def test_the_other_broker_takes_over_from_a_paused_coordinator_and_its_own_clients_do_not_notice(
    kafka: Cluster, tmp_path: Path, proof: Proof
) -> None:
    first = start(tmp_path, kafka, "first")
    states: list[ConnectionState] = []
    try:
        await ready(first)
        second = start(tmp_path, kafka, "second")
        try:
            await ready(second)
            async with headrace.connect(url(first)) as client:
                await client.create_topic("t")
                await client.publish("t", b"before")
                await client.commit("t", 1, group="g")
            async with (
                headrace.connect(url(second), on_state=lambda state, reason: states.append(state)) as client,
                contextlib.AsyncExitStack() as stack,
            ):
                await known("t", client)
                subscription = await client.subscribe("t", start="earliest")
                assert (await anext(subscription)).value == b"before"
                relayed = await stack.enter_async_context(headrace.connect(url(second)))
                assert await relayed.committed("t", group="g") == 1, "the coordinator has answered"
                await relayed.publish_delayed("t", b"delayed", delay_ms=5_000)
                first.process.send_signal(signal.SIGSTOP)
                paused_at = time.monotonic()
                await client.publish("t", b"while nobody is the coordinator")
                assert await committed(relayed) == 1, "at the same address"
                proof("ms until another broker was the coordinator", round(1000 * (time.monotonic() - paused_at)))
                first.process.send_signal(signal.SIGCONT)  # it has lost the tables while it slept
                values = list[bytes | None]()
                async with asyncio.timeout(SECONDS):
                    while b"delayed" not in values:
                        values.append((await anext(subscription)).value)
                await stepped_down(first)
                async with headrace.connect(url(first)) as other:
                    await other.publish("t", b"last")
                    assert (await anext(subscription)).value == b"last"
                    assert states == [ConnectionState.CONNECTED], "its connection was open the whole time"
                    assert await other.committed("t", group="g") == 1, "the new coordinator has answered"
                    await other.publish_delayed("t", b"delayed again", delay_ms=5_000)
                    second.process.kill()
                    assert await committed(other) == 1
                    wanted = [b"before", b"while nobody is the coordinator", b"delayed", b"last", b"delayed again"]
                    found = list[bytes | None]()
                    async with asyncio.timeout(SECONDS):
                        while len(found) < len(wanted):
                            await asyncio.sleep(0.05)
                            found = [message.value for message in await other.fetch("t")]
                    assert found == wanted, "each delayed message once"
                    await other.publish("t", b"end")
                    assert [message.value for message in await other.fetch("t")] == [*wanted, b"end"]
                client.abandon()
                relayed.abandon()
        finally:
            second.process.kill()
            second.process.communicate()
    finally:
        first.process.send_signal(signal.SIGCONT)
        first.process.kill()
        first.process.communicate()
