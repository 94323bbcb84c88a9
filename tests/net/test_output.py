"""The unsent bytes of all connections are limited, and peers that never read are disconnected."""

from __future__ import annotations

import asyncio
import socket

import pytest

import headrace.net.counters
from headrace.limits import OUTPUT_BUFFER_BYTES_MAX, OUTPUT_FREE_BYTES, OUTPUT_HIGH_WATER_BYTES
from headrace.net.counters import OutputBudget
from headrace.net.listener import Listener, NetLimits
from headrace.sessions.contract import Link
from tests.net.polling import until
from tests.net.test_listener import Echo, Sessions, connect, listening

REPLY_BYTES = 4 << 20
TOTAL_BYTES = 16 << 20


class Fetching(Echo):
    """Replies to every byte with 4 MiB as soon as the output allows it."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.owed = 0

    def receive(self, data: bytes) -> None:
        self.owed += len(data)
        self.drained()

    def drained(self) -> None:
        while self.owed and self.link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES:
            self.owed -= 1
            self.link.send(bytes(REPLY_BYTES))


def never_reading(listener: Listener, count: int) -> list[socket.socket]:
    made = []
    for _ in range(count):
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        peer.connect((listener.host, listener.port))
        peer.sendall(b"xxxx")
        made.append(peer)
    return made


async def test_peers_that_never_read_are_bounded_together_and_make_room_for_one_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.net.counters, "OUTPUT_STALL_SECONDS", 0.5)
    monkeypatch.setattr(headrace.net.counters, "OUTPUT_CHECK_SECONDS", 0.05)
    sessions = Sessions(make=Fetching)
    async with listening([sessions.protocol], NetLimits(output_total_bytes_max=TOTAL_BYTES)) as listener:
        output = listener.counters.output
        silent = never_reading(listener, 40)
        await until(lambda: len(sessions.opened) == 40)
        assert output.unsent_bytes <= TOTAL_BYTES * 5 // 4 + REPLY_BYTES, "40 replies would be ten times as much"
        reader, writer = await connect(listener)
        writer.write(b"x")
        async with asyncio.timeout(300):
            assert len(await reader.readexactly(REPLY_BYTES)) == REPLY_BYTES
        assert listener.counters.rejected.get("peer does not read", 0) == output.disconnected > 0
        writer.close()
        for peer in silent:
            peer.close()
        await until(lambda: listener.counters.open == 0)
        assert output.unsent_bytes == 0


async def test_below_the_bound_a_slow_reader_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.net.counters, "OUTPUT_STALL_SECONDS", 0.0)
    monkeypatch.setattr(headrace.net.counters, "OUTPUT_CHECK_SECONDS", 0.01)
    sessions = Sessions(make=Fetching)
    async with listening([sessions.protocol], NetLimits(output_total_bytes_max=TOTAL_BYTES)) as listener:
        reader, writer = await connect(listener)
        writer.write(b"xx")
        await until(lambda: listener.counters.output.unsent_bytes > OUTPUT_FREE_BYTES)
        await asyncio.sleep(0.1)
        assert len(await reader.readexactly(2 * REPLY_BYTES)) == 2 * REPLY_BYTES
        assert listener.counters.output.disconnected == 0
        await until(lambda: listener.counters.output.unsent_bytes == 0)
        writer.close()


async def test_many_readers_at_once_are_all_served_although_not_all_fit() -> None:
    sessions = Sessions(make=Fetching)
    async with listening([sessions.protocol], NetLimits(output_total_bytes_max=TOTAL_BYTES)) as listener:
        peers = [await connect(listener) for _ in range(20)]
        for _, writer in peers:
            writer.write(b"xx")

        async def read(reader: asyncio.StreamReader) -> int:
            return len(await reader.readexactly(2 * REPLY_BYTES))

        async with asyncio.timeout(300):
            assert await asyncio.gather(*(read(reader) for reader, _ in peers)) == [2 * REPLY_BYTES] * 20
        assert listener.counters.output.disconnected == 0
        for _, writer in peers:
            writer.close()


class Peer:
    def __init__(self) -> None:
        self.waiting_bytes = self.kept_bytes = self.fed = 0

    def feed(self) -> None:
        self.fed += 1

    def disconnect(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize(("others_bytes", "own_bytes", "must_wait"), [(100, 1, False), (101, 1, True), (125, 0, False), (126, 0, True)])
async def test_who_must_wait_at_the_bound_and_beyond_it(others_bytes: int, own_bytes: int, must_wait: bool) -> None:
    unit = OUTPUT_FREE_BYTES
    budget, other, peer = OutputBudget(), Peer(), Peer()
    budget.update(other, others_bytes * unit, 100 * unit)
    assert budget.must_wait(peer, own_bytes, 100 * unit) is must_wait
    budget.left(other)
    await asyncio.sleep(0)
    assert peer.fed == must_wait and budget.unsent_bytes == 0
    assert budget._timer is not None
    budget._timer.cancel()


async def test_those_that_wait_are_fed_as_soon_as_a_peer_has_read_and_as_many_as_there_is_room_for() -> None:
    bytes_max = 4 * OUTPUT_BUFFER_BYTES_MAX
    budget, other, waiting = OutputBudget(), Peer(), [Peer() for _ in range(10)]
    budget.update(other, 2 * bytes_max, bytes_max)
    assert all(budget.must_wait(peer, 0, bytes_max) for peer in waiting)
    budget.update(other, bytes_max - 2 * OUTPUT_BUFFER_BYTES_MAX, bytes_max)
    await asyncio.sleep(0)
    assert [peer.fed for peer in waiting] == [1] * 3 + [0] * 7
    budget.left(other)
    assert budget._timer is not None
    budget._timer.cancel()
