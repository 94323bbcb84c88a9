"""Detection of BlipMQ from at most the first 16 bytes of a connection.

A HELLO is certain after five bytes. A client that skips HELLO gets `NACK 401 unauthenticated`, but its first frame may look like a request
of RustLog's binary dialect, whose frames are also a u32 length and a small type byte:

    BlipMQ   length  type  correlation id (8 bytes) ...
    RustLog  length  type  u16 name length, name, ...

The protocol that parses exactly is used. A correlation id below 2³² starts with four zero bytes, which are empty names in RustLog, and no
request with an empty topic is valid there. Ids from 2³² on match only in a HELLO. Lengths inside the payload must match that of the frame
exactly. A listener for BlipMQ alone does not use this check.
"""

from __future__ import annotations

from typing import Final

from headrace.limits import BLIPMQ_FRAME_BYTES_MAX
from headrace.wire.blipmq.frames import COUNTED_HEAD_BYTES, HEAD_BYTES, LENGTH, TOPIC_HEAD, U16, U64, FrameType
from headrace.wire.sniff import Sniff

_HELLO_START: Final = LENGTH.pack(COUNTED_HEAD_BYTES + U16.size) + bytes([FrameType.HELLO])
_PAYLOAD_BYTES_LOOKED_AT: Final = TOPIC_HEAD.size


def sniff(first: bytes) -> Sniff:
    """Return YES, NO, or MORE if more bytes are needed."""
    if len(first) < LENGTH.size:
        return Sniff.MORE
    (length,) = LENGTH.unpack_from(first)
    if not COUNTED_HEAD_BYTES <= length <= BLIPMQ_FRAME_BYTES_MAX:
        return Sniff.NO
    if len(first) == LENGTH.size:
        return Sniff.MORE
    if first.startswith(_HELLO_START):
        return Sniff.YES
    if first[4] not in _EXACT or not b"\0\0\0\0".startswith(first[5:9]):
        return Sniff.NO
    payload_bytes = length - COUNTED_HEAD_BYTES
    if len(first) < HEAD_BYTES + min(payload_bytes, _PAYLOAD_BYTES_LOOKED_AT):
        return Sniff.MORE
    return Sniff.YES if _EXACT[first[4]](payload_bytes, first[HEAD_BYTES:]) else Sniff.NO


def _auth(size: int, start: bytes) -> bool:
    return size >= U16.size and bool(size == U16.size + U16.unpack_from(start)[0])


def _publish(size: int, start: bytes) -> bool:
    if size <= TOPIC_HEAD.size:
        return False
    qos, topic_bytes = TOPIC_HEAD.unpack_from(start)
    return bool(qos <= 1 and 1 <= topic_bytes <= size - TOPIC_HEAD.size)


def _subscribe(size: int, start: bytes) -> bool:
    return size > U16.size + 1 and bool(size == U16.size + U16.unpack_from(start)[0] + 1)


def _subscription(size: int, _: bytes) -> bool:
    return size == U64.size


def _empty(size: int, _: bytes) -> bool:
    return size == 0


_EXACT: Final = {
    FrameType.AUTH.value: _auth,
    FrameType.PUBLISH.value: _publish,
    FrameType.SUBSCRIBE.value: _subscribe,
    FrameType.ACK.value: _subscription,
    FrameType.PING.value: _empty,
    FrameType.POLL.value: _subscription,
}
