"""PRODUCE frames for many topics in turn.

`produce.take_batch` decodes frames for one topic. Here the topic may change with each frame. Sixteen or more frames of the same sizes are
unpacked in blocks; other frames one by one. A frame that names a partition, or of another form, ends the batch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import add
from typing import Final

from headrace.columns import equal_rows, equal_size
from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire.flymq.fields import S16
from headrace.wire.flymq.framing import BINARY, HEADER_BYTES, MAGIC, VERSION
from headrace.wire.flymq.messages import AUTO, ProduceMany
from headrace.wire.flymq.opcodes import Opcode
from headrace.wire.flymq.produce import PLACE

_HEAD: Final = MAGIC << 24 | VERSION << 16 | Opcode.PRODUCE << 8 | BINARY
_FRONT = struct.Struct(">IIH")
_LENGTH, _SIZES = struct.Struct(">I"), struct.Struct(">II")
_OFFSET_AT: Final = 4
"""Position of the offset in a place, after the partition."""
_AUTO_BYTES: Final = struct.pack(">i", AUTO)
_FIXED_BYTES: Final = _FRONT.size + 4 + 4 + 4
"""Bytes of a frame beside topic, key and value."""
MANY_MIN: Final = 16
"""Fewer frames are decoded as one batch for each change of the topic."""
_BLOCK: Final = 64
"""Frames that are unpacked by one call. Slices of the result are columns."""
_SAME_MAX: Final = 32
"""After so many adjacent frames for one topic, `take_batch` is faster."""
_STRETCH_GROWTH: Final = 4
_PATIENCE_MAX: Final = 256
"""Frames decoded one by one after failed attempts, at most, before the next attempt to decode many at once."""


@lru_cache(maxsize=512)
def _rows(topic_bytes: int, value_bytes: int, count: int) -> struct.Struct:
    """From the topic of a frame to that of the next one: topic, sizes of key and value, value, and what lies between the two frames."""
    return struct.Struct(f"{topic_bytes}s8s{value_bytes}s{len(_AUTO_BYTES) + _FRONT.size}s" * count)


_TOPICS: Final[dict[bytes, str]] = {}
"""Names of topics by their bytes. A least-recently-used cache would touch the entries of other topics, too."""
_FRONTS: Final[dict[str, bytes]] = {}
"""First bytes of a RecordMetadata frame by topic."""
_KNOWN_MAX: Final = 65_536
_KNOWN_BYTES_MAX: Final = 256
"""Entries of each of these two, and size of a name in them. A longer one is not that of a topic."""


def _topic(raw: bytes) -> str:
    topic = _TOPICS.get(raw)
    if topic is None:
        topic = raw.decode()
        if len(raw) <= _KNOWN_BYTES_MAX:
            if len(_TOPICS) >= _KNOWN_MAX:
                _TOPICS.clear()
            _TOPICS[raw] = topic
    return topic


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
    head, length, topic_bytes = _FRONT.unpack_from(buffer, position)
    frame_bytes = HEADER_BYTES + length
    count = min(count_max, (end - position) // frame_bytes)
    value_bytes = frame_bytes - _FIXED_BYTES - topic_bytes
    if count < MANY_MIN or value_bytes < 0 or head != _HEAD:
        return 0
    front = buffer[position : position + _FRONT.size]
    stop: int = position + count * frame_bytes
    # The last frame is compared first: if it has another size, so have many.
    last = stop - frame_bytes
    sizes, between = _SIZES.pack(0, value_bytes), _AUTO_BYTES + front
    sizes_at, value_at = last + _FRONT.size + topic_bytes, stop - len(_AUTO_BYTES) - value_bytes
    if not (buffer.startswith(front, last) and buffer.startswith(sizes, sizes_at) and buffer.startswith(_AUTO_BYTES, stop - 4)):
        return 0
    raws: list[bytes] = []
    values: list[bytes] = []
    at, left = position + _FRONT.size, count - 1
    while left:
        # Each row ends before the topic of the next frame. So the last frame is not one of them.
        size = min(left, _BLOCK)
        fields = _rows(topic_bytes, value_bytes, size).unpack_from(buffer, at)
        if fields[1::4].count(sizes) < size or fields[3::4].count(between) < size:
            return 0
        raws += fields[0::4]
        values += fields[2::4]
        at += size * frame_bytes
        left -= size
    raws.append(buffer[last + _FRONT.size : sizes_at])
    if raws.count(raws[0]) == count:
        return 0
    try:
        topics = list(map(_TOPICS.__getitem__, raws))
    except KeyError:
        topics = list(map(_topic, raws))
    many.topics += topics
    many.values += values
    many.values.append(buffer[value_at : stop - 4])
    return stop


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


def _metadata_front(topic: str) -> bytes:
    front = _FRONTS.get(topic)
    if front is None:
        field = S16.write(topic)
        front = struct.pack(">II", _HEAD, len(field) + PLACE.size) + field
        if len(field) <= _KNOWN_BYTES_MAX:
            if len(_FRONTS) >= _KNOWN_MAX:
                _FRONTS.clear()
            _FRONTS[topic] = front
    return front


def encode_metadata_each(
    topics: Sequence[str],
    partitions: Sequence[int],
    offsets: Sequence[int],
    timestamp: int,
    key_sizes: Sequence[int] | None,
    value_sizes: Sequence[int],
    failed: Mapping[int, bytes],
) -> bytes:
    """Return a RecordMetadata frame for each record, or the bytes in `failed` at its index. Without `key_sizes` no record has a key."""
    try:
        fronts = list(map(_FRONTS.__getitem__, topics))
    except KeyError:
        fronts = list(map(_metadata_front, topics))
    count, size = len(fronts), value_sizes[0]
    is_same = key_sizes is None and value_sizes.count(size) == count and partitions.count(partitions[0]) == count
    if is_same and not failed and (front_bytes := equal_size(fronts)) is not None:
        # Nothing but the topic and the offset differs.
        place = PLACE.pack(partitions[0], 0, timestamp, AUTO, size)
        return bytes(equal_rows(fronts, front_bytes, b"", place, numbers=offsets, numbers_at=front_bytes + _OFFSET_AT))
    places = map(PLACE.pack, partitions, offsets, repeat(timestamp), repeat(AUTO) if key_sizes is None else key_sizes, value_sizes)
    frames = list(map(add, fronts, places))
    for index, frame in failed.items():
        frames[index] = frame
    return b"".join(frames)
