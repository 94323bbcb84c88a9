"""Figg frames and messages.

    0      2         4              8
    +------+---------+--------------+---------+
    | type | version | payload size | payload |     all integers big-endian; the payload size excludes these 8 bytes
    | u16  | u16     | u32          |         |
    +------+---------+--------------+---------+

    1 ATTACH    client → server   flags u16, topic, offset u64 (present even if unused)
    2 ATTACHED  server → client   topic, offset u64
    3 DETACH    client → server   topic
    4 DETACHED  server → client   topic
    5 PUBLISH   client → server   topic, sequence number u64, data
    6 ACK       server → client   sequence number u64: this one and all before it
    7 DATA      server → client   topic, offset u64, data
    8 PING      client → server   timestamp u64, opaque
    9 PONG      server → client   the same timestamp

A topic and data are a u32 size and that many bytes. PUBLISH and DATA have the same layout, and adjacent ones for one topic are
decoded as one batch of columns.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, TypeAlias

from headrace.limits import FIGG_TOPIC_BYTES_MAX

VERSION: Final = 1
FROM_OFFSET: Final = 0x8000
"""Flag "bit 1", counted from the most significant bit: the only interpretation of the original server."""
FROM_OFFSET_READINGS: Final = 0x8003
"""All three interpretations of "bit 1" of a u16. The server accepts each."""

HEADER: Final = struct.Struct(">HHI")
assert HEADER.size == 8, "the drawing says 8"
HEADER_BYTES: Final = HEADER.size
NUMBER: Final = struct.Struct(">Q")
SIZE: Final = struct.Struct(">I")
RUN_FIELDS_BYTES: Final = SIZE.size + NUMBER.size + SIZE.size
"""A PUBLISH or DATA payload without its topic and data."""
assert RUN_FIELDS_BYTES == 16


class Role(Enum):
    """Side that decodes."""

    SERVER = "server"
    CLIENT = "client"


class Kind(IntEnum):
    """Type word."""

    ATTACH = 1
    ATTACHED = 2
    DETACH = 3
    DETACHED = 4
    PUBLISH = 5
    ACK = 6
    DATA = 7
    PING = 8
    PONG = 9


RECEIVED: Final[dict[Role, frozenset[int]]] = {
    Role.SERVER: frozenset({Kind.ATTACH, Kind.DETACH, Kind.PUBLISH, Kind.PING}),
    Role.CLIENT: frozenset({Kind.ATTACHED, Kind.DETACHED, Kind.ACK, Kind.DATA, Kind.PONG}),
}
"""Types that each role decodes. All others, including unknown types, are skipped."""

_TOPIC = (SIZE.size, SIZE.size + FIGG_TOPIC_BYTES_MAX)
PAYLOAD_BYTES: Final[dict[int, tuple[int, int]]] = {
    Kind.ATTACH: (_TOPIC[0] + 10, _TOPIC[1] + 10),
    Kind.ATTACHED: (_TOPIC[0] + 8, _TOPIC[1] + 8),
    Kind.DETACH: _TOPIC,
    Kind.DETACHED: _TOPIC,
    Kind.PUBLISH: (RUN_FIELDS_BYTES, (1 << 32) - 1),
    Kind.DATA: (RUN_FIELDS_BYTES, (1 << 32) - 1),
    Kind.ACK: (8, 8),
    Kind.PING: (8, 8),
    Kind.PONG: (8, 8),
}
"""Smallest and largest payload, so that a wrong size is detected in the header. The frame limit applies to batches."""


@dataclass(slots=True)
class Attach:
    """Start delivery. Without an offset, delivery starts at the end of the log."""

    topic: str
    offset: int | None


@dataclass(slots=True)
class Attached:
    """Delivery starts at this offset. All DATA of the topic follows."""

    topic: str
    offset: int


@dataclass(slots=True)
class Detach:
    """Stop delivery."""

    topic: str


@dataclass(slots=True)
class Detached:
    """Delivery has stopped. No DATA of the topic follows."""

    topic: str


@dataclass(slots=True)
class PublishBatch:
    """Adjacent PUBLISH frames for one topic. The client chooses the sequence numbers, in any order."""

    topic: str
    seqs: Sequence[int]
    values: list[bytes]

    @property
    def first_seq(self) -> int:
        return self.seqs[0]

    @property
    def last_seq(self) -> int:
        return self.seqs[-1]


@dataclass(slots=True)
class AckBatch:
    """Adjacent ACK frames. The highest number covers all lower ones."""

    seqs: Sequence[int]


@dataclass(slots=True)
class DataBatch:
    """Adjacent DATA frames for one topic. An offset points past its message, to the next one."""

    topic: str
    offsets: Sequence[int]
    values: list[bytes]


@dataclass(slots=True)
class Ping:
    timestamp: int


@dataclass(slots=True)
class Pong:
    timestamp: int


ClientMessage: TypeAlias = Attach | Detach | PublishBatch | Ping
"""Messages that a server receives."""
ServerMessage: TypeAlias = Attached | Detached | AckBatch | DataBatch | Pong
"""Messages that a client receives."""
