"""Detection of RustLog from fewer than a hundred bytes. It never waits for a whole frame.

    JSON     length, white space, { or "
    binary   length, type, names and numbers whose sizes add up to the length exactly

A BlipMQ frame is also a length and a small type byte, followed by an eight-byte correlation id where RustLog has the sizes of its names.
Ids below 2³² decode as empty names, which are invalid in RustLog, so such a frame does not match. For other ids the sizes would have to
add up by chance. Figg has a zero in place of the type. The first byte of FlyMQ exceeds any length. A frame that is too large or has bytes
after its last field is accepted only on a listener for RustLog alone.
"""

from __future__ import annotations

import struct
from typing import Final

from headrace.limits import GROUP_NAME_BYTES_MAX, RUSTLOG_FRAME_BYTES_MAX, TOPIC_NAME_BYTES_MAX
from headrace.wire.rustlog import binary
from headrace.wire.rustlog.codec import LENGTH
from headrace.wire.sniff import Sniff

_SPACE: Final = b" \t\r\n"
_SPACE_BYTES_MAX: Final = 64
_NAME_BYTES_MAX: Final = max(TOPIC_NAME_BYTES_MAX, GROUP_NAME_BYTES_MAX)
_NAME_BYTES_PASSED: Final = 64
"""The check does not wait for the fields after a longer name. It only checks that the frame has room for them."""

_U16, _U32 = struct.Struct(">H"), struct.Struct(">I")

_NAMES_AND_REST: Final = {
    # type: (a group before the topic, bytes after the topic)
    binary.FETCH: (True, 4 + 8 + 4),
    binary.OFFSET_COMMIT: (True, 4 + 8),
    binary.OFFSET_FETCH: (True, 4),
    binary.CREATE_TOPIC: (False, 4),
    binary.DESCRIBE_TOPIC: (False, 0),
    binary.DESCRIBE_PARTITION: (False, 4),
}
_ALONE: Final = frozenset((binary.LIST_TOPICS, binary.METRICS_FETCH, binary.PING))


def sniff(first: bytes) -> Sniff:
    """Return YES, NO, or MORE if more bytes are needed. YES and NO are final."""
    if len(first) < LENGTH.size:
        return Sniff.NO if first[:1] not in (b"", b"\0") else Sniff.MORE
    (length,) = LENGTH.unpack_from(first)
    if not 1 <= length <= RUSTLOG_FRAME_BYTES_MAX:
        return Sniff.NO
    if len(first) == LENGTH.size:
        return Sniff.MORE
    head = first[LENGTH.size : LENGTH.size + length]
    kind = head[0]
    if kind in _ALONE and length == 1:
        return Sniff.YES
    if kind in b'{"[' or kind in _SPACE:
        return _json(head, length)
    if kind == binary.PRODUCE:
        return _produce(head, length)
    if kind in _NAMES_AND_REST:
        return _fixed(head, length, *_NAMES_AND_REST[kind])
    return Sniff.NO


def _json(head: bytes, length: int) -> Sniff:
    text = head[:_SPACE_BYTES_MAX].lstrip(_SPACE)
    if not text:
        return Sniff.MORE if len(head) < min(length, _SPACE_BYTES_MAX) else Sniff.NO
    return Sniff.YES if text[0] in b'{"' else Sniff.NO


def _fixed(head: bytes, length: int, has_group: bool, rest: int) -> Sniff:
    at = 1
    if has_group:
        group_bytes = _number(_U16, head, length, at)
        if isinstance(group_bytes, Sniff):
            return group_bytes
        at += _U16.size + group_bytes
        if group_bytes > _NAME_BYTES_PASSED:
            topic_bytes = length - at - _U16.size - rest
            return Sniff.YES if group_bytes <= _NAME_BYTES_MAX and 1 <= topic_bytes <= _NAME_BYTES_MAX else Sniff.NO
    topic = _number(_U16, head, length, at)
    if isinstance(topic, Sniff):
        return topic
    return Sniff.YES if 1 <= topic <= _NAME_BYTES_MAX and at + _U16.size + topic + rest == length else Sniff.NO


def _produce(head: bytes, length: int) -> Sniff:
    """Check a Produce exactly up to the size of its first record."""
    topic = _number(_U16, head, length, 1)
    if isinstance(topic, Sniff):
        return topic
    counted_at = 1 + _U16.size + topic + _U32.size
    if not (1 <= topic <= _NAME_BYTES_MAX and counted_at + _U32.size <= length):
        return Sniff.NO
    if topic > _NAME_BYTES_PASSED:
        return Sniff.YES
    count = _number(_U32, head, length, counted_at)
    if isinstance(count, Sniff):
        return count
    room = length - counted_at - _U32.size - _U32.size * count
    if count == 0 or room < 0:
        return Sniff.YES if room == 0 else Sniff.NO
    size = _number(_U32, head, length, counted_at + _U32.size)
    if isinstance(size, Sniff):
        return size
    return Sniff.YES if size == room or (size < room and count > 1) else Sniff.NO


def _number(kind: struct.Struct, head: bytes, length: int, at: int) -> int | Sniff:
    """Return the number at `at`, if the frame has room for it and its bytes are received."""
    if at + kind.size > length:
        return Sniff.NO
    if at + kind.size > len(head):
        return Sniff.MORE
    return int(kind.unpack_from(head, at)[0])
