"""File descriptors are divided between storage and connections at the start."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from pathlib import Path

import pytest

from headrace.clients.flymq.client import FlyMqClient
from headrace.limits import CONNECTIONS_MAX, FILES_RESERVED_MIN, FLIGHT_CONNECTIONS_MAX
from headrace.server.descriptors import DescriptorLimits, divide, open_files_max, raise_file_limit, report
from tests.server.process import BrokerProcess

WANTED = {"connections": CONNECTIONS_MAX, "flight_connections": FLIGHT_CONNECTIONS_MAX}


@pytest.mark.parametrize("open_files", [256, 1_024, 4_096, 20_000, 65_536, 1_000_000])
def test_the_log_keeps_its_reserve_whatever_the_limit_is(open_files: int) -> None:
    limits = divide(open_files, **WANTED)
    assert limits.reserve >= max(FILES_RESERVED_MIN, open_files // 4)
    assert limits.reserve + limits.connections + limits.flight_connections <= open_files
    assert 1 <= limits.connections <= CONNECTIONS_MAX and 1 <= limits.flight_connections <= FLIGHT_CONNECTIONS_MAX


def test_a_large_limit_gives_what_is_configured() -> None:
    assert divide(65_536, **WANTED) == DescriptorLimits(65_536, 16_384, CONNECTIONS_MAX, FLIGHT_CONNECTIONS_MAX)
    assert divide(1_024, connections=10_000, flight_connections=0) == DescriptorLimits(1_024, 256, 768, 0)


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, soft), hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert open_files_max() == hard or hard == resource.RLIM_INFINITY
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("open_files", "level"), [(65_536, logging.INFO), (1_024, logging.WARNING)])
def test_what_was_derived_is_logged_and_less_than_configured_is_a_warning(
    open_files: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    limits = divide(open_files, **WANTED)
    with caplog.at_level(logging.INFO):
        report(limits, **WANTED)
    (line,) = caplog.records
    assert (line.levelno, line.__dict__["connections"], line.__dict__["reserved_for_storage"]) == (
        level,
        limits.connections,
        limits.reserve,
    )


FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); from headrace.cli import main; main()"


async def test_peers_that_take_every_connection_leave_the_log_its_descriptors(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, code=FEW_FILES, log=tmp_path / "log", HEADRACE__LIMITS__HANDSHAKE_TIMEOUT="10m") as broker:
        async with await FlyMqClient.connect(*broker.addresses[0]) as client:
            idle = [socket.create_connection(broker.addresses[0]) for _ in range(300)]
            for number in range(20):
                await client.create_topic(f"topic-{number}", partitions=1)
                await client.publish(f"topic-{number}", b"kept")
            for peer in idle:
                peer.close()
            async with asyncio.timeout(300):
                async with await FlyMqClient.connect(*broker.addresses[0]) as other:
                    await other.publish("topic-0", b"afterwards")
        _, _, errors = broker.stop()
    assert "connection limits lowered to fit the limit of open files" in errors and "open_files=256" in errors
    assert "Too many open files" not in errors
