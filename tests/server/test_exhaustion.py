"""A broker process without free descriptors: open connections keep working, and no restart is necessary."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from headrace.clients.flymq.client import FlyMqClient
from tests.server.process import BrokerProcess

PARTITIONS = 50
"""More than the log has descriptors in reserve."""


def take_descriptors(pid: int) -> tuple[int, int]:
    """Leave a process without a free descriptor. Return its previous limits."""
    used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    first_free = next(number for number in range(len(used) + 1) if number not in used)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, hard))
    return soft, hard


async def test_a_broker_without_descriptors_keeps_on_writing_and_recovers(tmp_path: Path) -> None:
    small = ("--set", "storage.journal_size=1MiB", "--set", "storage.checkpoint_interval=1s")
    with BrokerProcess(tmp_path, *small, log=tmp_path / "log") as broker:
        async with await FlyMqClient.connect(*broker.addresses[0]) as client:
            await client.create_topic("t", partitions=PARTITIONS)
            before = take_descriptors(broker.process.pid)
            for turn in range(3 * PARTITIONS):
                await client.publish("t", b"%04d" % turn * 5_000, partition=turn % PARTITIONS)
            resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE, before)
            for turn in range(PARTITIONS):
                await client.publish("t", b"%04d" % turn * 5_000, partition=turn)
        async with await FlyMqClient.connect(*broker.addresses[0]) as client:
            for partition in range(PARTITIONS):
                assert len(await client.fetch("t", 0, partition=partition)) == 4
        code, _, errors = broker.stop()
        assert code == 0
        assert "writes fail until the broker is restarted" not in errors
