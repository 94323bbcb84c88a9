"""Interface between the load generator and a protocol.

A new protocol is one module with one class of this shape, listed in `headrace.bench.protocols.PROTOCOLS`. Frames are built before the
clock starts; a meter does minimal work per read.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.bench.children import BenchFailed
from headrace.bench.load import Meter


@dataclass(frozen=True, slots=True)
class ConsumePlan:
    """First request and meter of one connection that reads a topic."""

    request: bytes
    """Sent when the clock starts."""
    meter: Meter


class ProtocolLoad(Protocol):
    """Load of one wire protocol. Stateless: each connection has its meter."""

    name: str
    batch_records: int
    """Records of one publish request."""
    reads_history: bool
    """Whether a reader receives records published before it connected; if not, it must `subscribe` first."""

    def handshake(self, sock: socket.socket, key: bytes) -> None:
        """Complete the handshake on a blocking socket. `key` is the API key of protocols that need one."""

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        """Create the topic before the clock starts."""

    def subscribe(self, sock: socket.socket, topic: str) -> int:
        """Subscribe to records published from now on and return the id for `consume`; 0 where none is needed."""

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        """Encode the frames that publish these values; `first` is the index of the first record on its connection."""

    def acks(self, topic: str) -> Meter:
        """Return a meter that counts acknowledged records."""

    def consume(self, topic: str, records: int, value_bytes: int, subscription: int) -> ConsumePlan:
        """Plan to read the whole topic, which holds exactly `records` records of `value_bytes` each."""


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Receive `size` bytes during set-up."""
    received = b""
    while len(received) < size:
        chunk = sock.recv(size - len(received))
        if not chunk:
            raise BenchFailed(f"the peer closed the connection during set-up, after {received!r}")
        received += chunk
    return received
