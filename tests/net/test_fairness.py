"""Connections are served in turn: one that sends at full speed does not keep the loop to itself."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter

import uvloop

from headrace.net.connection import READ_BYTES_A_TURN
from headrace.sessions.contract import Link
from tests.net.polling import until
from tests.net.test_listener import Echo, Sessions, listening

SENT_BYTES = 8 << 20


class Sink(Echo):
    """Counts its large reads by turn of the loop."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
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


def test_one_turn_of_the_loop_takes_one_large_read_of_a_connection() -> None:
    """uvloop, because asyncio's own loop reads once in a turn anyway."""
    sinks: list[Sink] = []

    def make(link: Link) -> Sink:
        sinks.append(Sink(link))
        return sinks[-1]

    async def run() -> None:
        async with listening([Sessions(make=make).protocol]) as listener:
            with socket.create_connection((listener.host, listener.port)) as peer:
                sender = threading.Thread(target=peer.sendall, args=(bytes(SENT_BYTES),))
                sender.start()
                await until(lambda: bool(sinks) and sinks[0].received_bytes == SENT_BYTES)
                sender.join()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert max(sinks[0].large_reads.values()) == 1
