"""Connections are served in turn: one that sends at full speed does not keep the loop to itself."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import uvloop

from headrace.net.connection import READ_BYTES_A_TURN, Connection
from headrace.sessions.contract import Link
from tests.net.polling import until
from tests.net.test_listener import Echo, Sessions, listening

SENT_BYTES = 8 << 20


class Sink(Echo):
    """Counts its large reads by turn of the loop."""

    def __init__(self, link: Link, refill: Callable[[], None]) -> None:
        super().__init__(link)
        self._refill = refill
        self.turn = self.received_bytes = 0
        self.large_reads: Counter[int] = Counter()
        self.count_turns()

    def count_turns(self) -> None:
        self.turn += 1
        if self.received_bytes < SENT_BYTES:
            asyncio.get_running_loop().call_soon(self.count_turns)

    def receive(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self.large_reads[self.turn] += len(data) >= READ_BYTES_A_TURN
        self._refill()


def test_one_turn_of_the_loop_takes_one_large_read_of_a_connection() -> None:
    """uvloop, because asyncio's own loop reads once in a turn anyway. The peer fills its socket after each read, so that there is always
    more to read."""
    sinks: list[Sink] = []
    left = SENT_BYTES

    async def run() -> None:
        def refill() -> None:
            nonlocal left
            with suppress(BlockingIOError):
                while left:
                    left -= peer.send(bytes(min(left, 1 << 20)))

        def make(link: Link) -> Sink:
            assert isinstance(link, Connection) and link._transport is not None
            link._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * READ_BYTES_A_TURN)
            sinks.append(Sink(link, refill))
            return sinks[-1]

        async with listening([Sessions(make=make).protocol]) as listener:
            with socket.create_connection((listener.host, listener.port)) as peer:
                peer.setblocking(False)
                refill()
                await until(lambda: bool(sinks) and sinks[0].received_bytes == SENT_BYTES)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert max(sinks[0].large_reads.values()) == 1
