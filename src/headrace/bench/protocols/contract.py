"""What the load generator has to know about a protocol.

A new protocol is one module with one class of this shape, named in `headrace.bench.protocols.PROTOCOLS`. Frames are built before the clock
starts; a meter then does as little as it can per read.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.bench.faults import BenchFailed
from headrace.bench.load import Meter


@dataclass(frozen=True, slots=True)
class ConsumePlan:
    """How one connection reads a topic."""

    request: bytes
    """Sent when the clock starts."""
    meter: Meter


class ProtocolLoad(Protocol):
    """The load of one wire protocol. It keeps no state of its own: each connection has its meter."""

    name: str
    batch_records: int
    """Records of one request that publishes; 1 where each record is a frame of its own."""
    reads_history: bool
    """Whether a reader finds what was published before it came; if not, it has to `subscribe` first."""

    def handshake(self, sock: socket.socket, key: bytes) -> None:
        """Whatever the protocol says before the first request. The socket blocks. `key` is for protocols that ask for one."""

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        """Make the topic before the clock starts, as is done for every other broker too."""

    def subscribe(self, sock: socket.socket, topic: str) -> int:
        """The number that `consume` needs of a reader that is to read what is published from now on; 0 where none is needed."""

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        """The frames that publish these values; the first record of the call is number `first` (from 0) of its connection."""

    def acks(self, topic: str) -> Meter:
        """Counts acknowledged records."""

    def consume(self, topic: str, records: int, value_bytes: int, subscription: int) -> ConsumePlan:
        """Read the topic from its start; it holds exactly `records` records of `value_bytes` each."""


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes of a set-up phase."""
    received = b""
    while len(received) < size:
        piece = sock.recv(size - len(received))
        if not piece:
            raise BenchFailed(f"the connection was closed during the set-up, after {received!r}")
        received += piece
    return received
