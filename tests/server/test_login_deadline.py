"""With enforced access, a connection without a login is closed, and administrators always get one."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from headrace.clients.errors import ConnectFailed, Refused
from headrace.clients.flymq.client import FlyMqClient
from headrace.wire.figg import encode
from tests.server.test_access import enforced, log_in

LATE = ("--set", "limits.login_timeout=10m")


async def ended(address: tuple[str, int], first: bytes) -> bool:
    """Return whether the broker closes a connection that sends these bytes and nothing else."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(first)
    try:
        async with asyncio.timeout(300):
            while await reader.read(4_096):
                pass
    except ConnectionError:
        pass
    writer.close()
    return True


async def test_an_anonymous_peer_loses_its_connection_at_the_deadline_and_a_user_keeps_it(tmp_path: Path) -> None:
    with enforced(tmp_path, "--set", "limits.login_timeout=5s") as broker:
        async with await log_in(broker) as admin:
            anonymous = await FlyMqClient.connect(*broker.addresses[0])
            await anonymous.who_am_i()
            assert await ended(broker.addresses[0], encode.ping(1))
            await asyncio.sleep(0.1)
            assert (await admin.who_am_i()).roles == ["admin"]
            await anonymous.close()
        _, _, errors = broker.stop()
    assert "no login in time" in errors


async def test_when_anonymous_peers_hold_every_place_an_administrator_still_logs_in(tmp_path: Path) -> None:
    with enforced(tmp_path, *LATE, "--set", "limits.connections=16", "--set", "limits.connections_reserved=4") as broker:
        async with asyncio.timeout(300):
            idle = [socket.create_connection(broker.addresses[0]) for _ in range(12)]
            for peer in idle:
                peer.sendall(encode.ping(1))
                assert peer.recv(64)
            async with await log_in(broker) as admin:
                assert (await admin.who_am_i()).roles == ["admin"]
                with pytest.raises((ConnectFailed, Refused, ConnectionError)):
                    async with await log_in(broker, user="nobody", password="a wrong password"):
                        pass
        for peer in idle:
            peer.close()
