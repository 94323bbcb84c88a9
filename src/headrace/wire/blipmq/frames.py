"""BlipMQ frames and messages.

    0         4      5                13
    +---------+------+----------------+-----------+
    | length  | type | correlation id | payload   |     all integers big-endian
    | u32     | u8   | u64            | rest      |
    +---------+------+----------------+-----------+

`length` counts everything after itself, from 9 bytes to 16 MiB. Payloads by type:

    01 HELLO      u16 version
    02 AUTH       u16 n, n bytes UTF-8 key
    03 PUBLISH    u8 qos, u16 n, n bytes UTF-8 topic, message
    04 SUBSCRIBE  u16 n, n bytes UTF-8 topic, u8 qos, [u16 n, n bytes UTF-8 group, u8 options]    (other bytes are ignored)
    05 ACK        u64 subscription
    06 NACK       u16 code, u16 n, n bytes UTF-8 text
    07 PING       anything, ignored
    08 PONG       anything, ignored
    09 POLL       u64 subscription

Adjacent PUBLISH frames of one QoS and topic are decoded as one `PublishBatch`, adjacent ACKs or POLLs of one subscription as one `AckBatch`
or `PollBatch`. The session checks the values (a QoS of 7, an empty topic, subscription 0). An undecodable payload is a `Malformed`,
because it is answered by a NACK in its place among the other replies.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal, TypeAlias

LENGTH: Final = struct.Struct(">I")
HEAD: Final = struct.Struct(">IBQ")
U16: Final = struct.Struct(">H")
U64: Final = struct.Struct(">Q")
TOPIC_HEAD: Final = struct.Struct(">BH")
"""QoS and topic length of a PUBLISH."""
NACK_HEAD: Final = struct.Struct(">HH")

HEAD_BYTES: Final = HEAD.size
COUNTED_HEAD_BYTES: Final = HEAD_BYTES - LENGTH.size
"""Part of the head that `length` counts: the smallest length of a frame."""
assert (HEAD_BYTES, COUNTED_HEAD_BYTES) == (13, 9), "the drawing says 13, and 9 of them are counted"

GROUP_MODES: Final[tuple[Literal["", "ordered", "shared"], ...]] = ("", "ordered", "shared")
GROUP_EARLIEST: Final = 4
"""Options of a group in a SUBSCRIBE: the index of the mode, and a bit for the position of a new group."""
PROTOCOL_VERSION: Final = 1
U16_MAX: Final = 0xFFFF


class FrameType(IntEnum):
    """Type byte."""

    HELLO = 0x01
    AUTH = 0x02
    PUBLISH = 0x03
    SUBSCRIBE = 0x04
    ACK = 0x05
    NACK = 0x06
    PING = 0x07
    PONG = 0x08
    POLL = 0x09


PUBLISH: Final = 0x03
ACK: Final = 0x05
POLL: Final = 0x09
assert (PUBLISH, ACK, POLL) == (FrameType.PUBLISH, FrameType.ACK, FrameType.POLL), "the value of an enum member costs a call"
SUBSCRIPTION_FRAME: Final = struct.Struct(">IBQQ")
"""Length, type, id and subscription: an ACK or a POLL."""


@dataclass(slots=True)
class Hello:
    """Client → server: protocol version. Answered by an ACK of subscription 0, or a NACK."""

    cid: int
    version: int = PROTOCOL_VERSION


@dataclass(slots=True, repr=False)
class Auth:
    """Client → server: API key. Answered like `Hello`."""

    cid: int
    key: bytes

    def __repr__(self) -> str:
        # A key must not appear in a log.
        return f"Auth(cid={self.cid}, key=<{len(self.key)} bytes>)"


@dataclass(slots=True)
class PublishBatch:
    """Client → server: records for one topic. Only a failure is answered, by a NACK for each record.

    Server → client: deliveries. Their `cids` are delivery tags (QoS 1) or the ids of the POLLs that they answer (QoS 0).
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
    group: str = ""
    """Only Headrace has groups: the members of a group share the messages. Empty: the subscription has all messages to itself."""
    mode: Literal["", "ordered", "shared"] = ""
    """Options 1 and 2 of a group; empty: that of the group."""
    earliest: bool = False
    """Option 4 of a group: a new group begins at the earliest message instead of the next one."""


@dataclass(slots=True, init=False)
class AckBatch:
    """Client → server: acknowledgement of these delivery tags. Server → client: replies that carry a subscription id."""

    subscription: int
    cids: list[int]

    # Written out, because mypyc does not compile a generated constructor, and a client sends these one at a time.
    def __init__(self, subscription: int, cids: list[int]) -> None:
        self.subscription, self.cids = subscription, cids


@dataclass(slots=True, init=False)
class PollBatch:
    """Client → server: request for as many messages of one subscription as there are ids."""

    subscription: int
    cids: list[int]

    def __init__(self, subscription: int, cids: list[int]) -> None:
        self.subscription, self.cids = subscription, cids


@dataclass(slots=True)
class Nack:
    """Server → client: the error of the request with this id."""

    cid: int
    code: int
    text: str


@dataclass(slots=True)
class Ping:
    """Client → server: answered by a PONG with the same id when all earlier publishes of the connection are durable."""

    cid: int


@dataclass(slots=True)
class Pong:
    """Server → client: answer to a PING."""

    cid: int


@dataclass(slots=True)
class Malformed:
    """A complete frame of a known type whose payload cannot be decoded. The connection stays open."""

    type: FrameType
    cid: int


Message: TypeAlias = Hello | Auth | PublishBatch | Subscribe | AckBatch | PollBatch | Nack | Ping | Pong | Malformed
