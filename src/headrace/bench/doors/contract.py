"""What the load generator has to know about a door.

A new door is one module with one class of this shape, named in `headrace.bench.doors.DOORS`. Frames are built before the clock
starts; a meter then does as little as it can per read.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.bench.load import Meter


@dataclass(frozen=True, slots=True)
class ConsumePlan:
    """How one connection reads the history of a topic."""

    request: bytes
    """Sent when the clock starts."""
    meter: Meter


class DoorLoad(Protocol):
    """The load of one wire protocol. It keeps no state of its own: each connection has its meter."""

    name: str

    def handshake(self, sock: socket.socket) -> None:
        """Whatever the protocol says before the first request. The socket blocks."""

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        """The frames that publish these values; the first record of the call is number `first` (from 0) of its connection."""

    def acks(self) -> Meter:
        """Counts acknowledged records."""

    def consume(self, topic: str, records: int, value_bytes: int) -> ConsumePlan:
        """Read the topic from its start; it holds exactly `records` records of `value_bytes` each."""
