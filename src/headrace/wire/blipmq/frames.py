"""BlipMQ frames, and the messages they carry.

    0         4      5                13
    +---------+------+----------------+-----------+
    | length  | type | correlation id | payload   |     all integers big-endian
    | u32     | u8   | u64            | rest      |
    +---------+------+----------------+-----------+

`length` counts everything after itself: 9 is the least, 16 MiB the most. Payloads by type:

    01 HELLO      u16 version
    02 AUTH       u16 n, n bytes UTF-8 key
    03 PUBLISH    u8 qos, u16 n, n bytes UTF-8 topic, message
    04 SUBSCRIBE  u16 n, n bytes UTF-8 topic, u8 qos          (more bytes are tolerated)
    05 ACK        u64 subscription
    06 NACK       u16 code, u16 n, n bytes UTF-8 text
    07 PING       anything, discarded
    08 PONG       anything, discarded
    09 POLL       u64 subscription

Adjacent PUBLISH frames of one QoS and topic come out as one `PublishBatch`, adjacent ACKs or POLLs of one subscription as one
`AckBatch` or `PollBatch`: the callers work on columns, never on single frames. Which values are allowed (a QoS of 7, an empty
topic, subscription 0) is for the session to say, in the order its table gives; a payload that cannot be taken apart at all
is a `Malformed`, because the answer to it is a NACK and its place among the other replies matters.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

LENGTH: Final = struct.Struct(">I")
HEAD: Final = struct.Struct(">IBQ")
U16: Final = struct.Struct(">H")
U64: Final = struct.Struct(">Q")
TOPIC_HEAD: Final = struct.Struct(">BH")
"""QoS and topic length of a PUBLISH."""
NACK_HEAD: Final = struct.Struct(">HH")

HEAD_BYTES: Final = HEAD.size
COUNTED_HEAD_BYTES: Final = HEAD_BYTES - LENGTH.size
"""The part of the head that `length` counts: no frame can be shorter."""
assert (HEAD_BYTES, COUNTED_HEAD_BYTES) == (13, 9), "the drawing says 13, and 9 of them are counted"

PROTOCOL_VERSION: Final = 1
U16_MAX: Final = 0xFFFF


class FrameType(IntEnum):
    """The type byte."""

    HELLO = 0x01
    AUTH = 0x02
    PUBLISH = 0x03
    SUBSCRIBE = 0x04
    ACK = 0x05
    NACK = 0x06
    PING = 0x07
    PONG = 0x08
    POLL = 0x09


@dataclass(slots=True)
class Hello:
    """Client → server: the protocol version it speaks. Answered by an ACK of subscription 0, or a NACK."""

    cid: int
    version: int = PROTOCOL_VERSION


@dataclass(slots=True, repr=False)
class Auth:
    """Client → server: the API key. Answered as `Hello` is."""

    cid: int
    key: bytes

    def __repr__(self) -> str:
        # A key must not reach a log through a debug line.
        return f"Auth(cid={self.cid}, key=<{len(self.key)} bytes>)"


@dataclass(slots=True)
class PublishBatch:
    """Client → server: records for one topic. Answered only on failure, by a NACK for each.

    Server → client: deliveries. Their `cids` are delivery tags (QoS 1) or the ids of the POLLs they answer (QoS 0).
    """

    qos: int
    topic: str
    cids: list[int]
    values: list[bytes]


@dataclass(slots=True)
class Subscribe:
    """Client → server. Answered by an ACK that names the new subscription, or a NACK."""

    cid: int
    topic: str
    qos: int


@dataclass(slots=True)
class AckBatch:
    """Client → server: these delivery tags of one subscription are done. Server → client: replies that carry a subscription id."""

    subscription: int
    cids: list[int]


@dataclass(slots=True)
class PollBatch:
    """Client → server: as many messages of one subscription as there are ids, if there are any."""

    subscription: int
    cids: list[int]


@dataclass(slots=True)
class Nack:
    """Server → client: why the request of this id failed."""

    cid: int
    code: int
    text: str


@dataclass(slots=True)
class Ping:
    """Client → server: answered by a PONG of the same id once all earlier publishes of the connection are durable."""

    cid: int


@dataclass(slots=True)
class Pong:
    """Server → client."""

    cid: int


@dataclass(slots=True)
class Malformed:
    """A whole frame of a known type whose payload cannot be taken apart. The connection goes on."""

    type: FrameType
    cid: int


Message: TypeAlias = Hello | Auth | PublishBatch | Subscribe | AckBatch | PollBatch | Nack | Ping | Pong | Malformed
