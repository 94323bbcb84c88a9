"""PRODUCE frames for many topics in turn.

`produce.take_batch` decodes frames for one topic. Here the topic may change with each frame. Sixteen or more frames of the same sizes are
decoded by one `iter_unpack`; other frames one by one. A frame that names a partition, or of another form, ends the batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, repeat
from typing import Final

from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire.flymq.fields import S16
from headrace.wire.flymq.framing import BINARY, HEADER_BYTES, MAGIC, VERSION
from headrace.wire.flymq.messages import AUTO, ProduceMany
from headrace.wire.flymq.opcodes import Opcode
from headrace.wire.flymq.produce import PLACE

_HEAD: Final = MAGIC << 24 | VERSION << 16 | Opcode.PRODUCE << 8 | BINARY
_FRONT = struct.Struct(">IIH")
_LENGTH = struct.Struct(">I")
_AUTO_BYTES: Final = struct.pack(">i", AUTO)
_FIXED_BYTES: Final = _FRONT.size + 4 + 4 + 4
"""Bytes of a frame beside topic, key and value."""
MANY_MIN: Final = 16
"""Fewer frames are decoded as one batch for each change of the topic."""
_SAME_MAX: Final = 32
"""After so many adjacent frames for one topic, `take_batch` is faster."""
_STRETCH_GROWTH: Final = 4
_PATIENCE_MAX: Final = 256
"""Frames decoded one by one after failed attempts, at most, before the next attempt to decode many at once."""


@lru_cache(maxsize=1024)
def _row(topic_bytes: int, value_bytes: int) -> struct.Struct:
    return struct.Struct(f">IIH{topic_bytes}sII{value_bytes}s4s")


@lru_cache(maxsize=65_536)
def _topic(raw: bytes) -> str:
    return raw.decode()


def take_many(buffer: bytes, position: int, end: int) -> tuple[ProduceMany | None, int]:
    """Return the PRODUCE frames from `position` on, and their end. Returns None and the same position for fewer than `MANY_MIN`."""
    begin = position
    # The caller has checked the length of the first frame. Inside this window no later one can exceed the limit.
    end = min(end, position + HEADER_BYTES + FLYMQ_PAYLOAD_BYTES_MAX)
    many = ProduceMany([], [])
    stretch = patience = MANY_MIN
    try:
        while True:
            if ahead := _take_stretch(many, buffer, position, end, stretch):
                position, stretch, patience = ahead, stretch * _STRETCH_GROWTH, MANY_MIN
                continue
            ahead, is_over = _take_singly(many, buffer, position, end, patience)
            position, stretch, patience = ahead, MANY_MIN, min(2 * patience, _PATIENCE_MAX)
            if is_over:
                break
    except UnicodeDecodeError:
        return None, begin
    return (many, position) if len(many) >= MANY_MIN else (None, begin)


def _take_stretch(many: ProduceMany, buffer: bytes, position: int, end: int, count_max: int) -> int:
    """Decode many frames without keys and of the same sizes at once. Return 0, with nothing decoded, if that is not possible."""
    if position + _FIXED_BYTES > end or many.keys is not None:
        return 0
    _, length, topic_bytes = _FRONT.unpack_from(buffer, position)
    frame_bytes = HEADER_BYTES + length
    count = min(count_max, (end - position) // frame_bytes)
    value_bytes = frame_bytes - _FIXED_BYTES - topic_bytes
    if count < MANY_MIN or value_bytes < 0:
        return 0
    if not buffer.startswith(buffer[position : position + _FRONT.size], position + (count - 1) * frame_bytes):
        return 0
    stop = position + count * frame_bytes
    rows = _row(topic_bytes, value_bytes).iter_unpack(memoryview(buffer)[position:stop])
    heads, lengths, sizes, topics, key_sizes, value_sizes, values, partitions = zip(*rows, strict=True)
    for column, expected in (
        (heads, _HEAD),
        (lengths, length),
        (sizes, topic_bytes),
        (key_sizes, 0),
        (value_sizes, value_bytes),
        (partitions, _AUTO_BYTES),
    ):
        if column.count(expected) != count:
            return 0
    if topics.count(topics[0]) == count:
        return 0
    many.topics += map(_topic, topics)
    many.values += values
    return int(stop)


def _take_singly(many: ProduceMany, buffer: bytes, position: int, end: int, count: int) -> tuple[int, bool]:
    """Decode up to `count` frames one by one. Return the position after them, and whether the batch ends there."""
    topics, values = many.topics, many.values
    unpack, last, same = _FRONT.unpack_from, end - _FIXED_BYTES, 0
    for _ in range(count):
        if position > last:
            return position, True
        head, length, topic_bytes = unpack(buffer, position)
        behind = position + HEADER_BYTES + length
        topic_end = position + _FRONT.size + topic_bytes
        if head != _HEAD or behind > end or topic_end + 12 > behind:
            return position, True
        (key_bytes,) = _LENGTH.unpack_from(buffer, topic_end)
        value_at = topic_end + 8 + key_bytes
        if value_at + 4 > behind:
            return position, True
        (value_bytes,) = _LENGTH.unpack_from(buffer, value_at - 4)
        if value_at + value_bytes + 4 != behind or not buffer.startswith(_AUTO_BYTES, behind - 4):
            return position, True
        topic = _topic(buffer[position + _FRONT.size : topic_end])
        same = same + 1 if topics and topics[-1] == topic else 0
        if same >= _SAME_MAX:
            return position, True
        if key_bytes and many.keys is None:
            many.keys = [None] * len(values)
        if many.keys is not None:
            many.keys.append(buffer[topic_end + 4 : value_at - 4] or None)
        topics.append(topic)
        values.append(buffer[value_at : behind - 4])
        position = behind
    return position, False


@lru_cache(maxsize=65_536)
def _metadata_front(topic: str) -> bytes:
    field = S16.write(topic)
    return struct.pack(">II", _HEAD, len(field) + PLACE.size) + field


def encode_metadata_each(
    topics: Iterable[str],
    partitions: Iterable[int],
    offsets: Iterable[int],
    timestamp: int,
    key_sizes: Iterable[int],
    value_sizes: Iterable[int],
) -> list[bytes]:
    """Return two parts of a RecordMetadata frame for each record: all up to the topic, and the rest."""
    rows = map(PLACE.pack, partitions, offsets, repeat(timestamp), key_sizes, value_sizes)
    return list(chain.from_iterable(zip(map(_metadata_front, topics), rows, strict=True)))
