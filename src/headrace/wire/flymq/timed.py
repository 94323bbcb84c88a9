"""Adjacent COMMIT, PRODUCE_DELAYED and PRODUCE_WITH_TTL frames, decoded and answered in batches.

    COMMIT             topic s16, group s16, partition i32, offset u64
    PRODUCE_DELAYED    topic s16, value b32, delay i64 (ms), [key b32, partition i32]
    PRODUCE_WITH_TTL   topic s16, value b32, TTL i64 (ms), [key b32, partition i32]

A batch holds frames for one topic (and group), without keys, named partitions and transactions. Any other frame ends it and is decoded
alone, as are fewer than `BATCH_MIN` frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final

from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire.flymq.advanced_messages import DelayedBatch
from headrace.wire.flymq.blocks import equal_values
from headrace.wire.flymq.fields import S16
from headrace.wire.flymq.framing import BINARY, HEADER_BYTES, MAGIC, VERSION
from headrace.wire.flymq.messages import AUTO, CommitBatch, ProduceBatch
from headrace.wire.flymq.opcodes import Opcode

BATCH_MIN: Final = 4
_HEAD_BYTES: Final = bytes((MAGIC, VERSION))
_TOPIC_LENGTH, _TIME = struct.Struct(">H"), struct.Struct(">q")
_TAIL: Final = struct.pack(">Ii", 0, AUTO)
"""No key, and no partition."""
_STRETCH_MIN: Final = 16
_STRETCH_GROWTH: Final = 4
_BLOCK: Final = 16
"""Frames of the same sizes that are decoded by one call."""


@lru_cache(maxsize=1024)
def _front_layout(field_bytes: int) -> struct.Struct:
    """Head, length, topic, value length."""
    return struct.Struct(f">4sI{field_bytes}sI")


def _topic_field(buffer: bytes, at: int, end: int) -> bytes | None:
    if end - at < 2:
        return None
    return buffer[at : at + 2 + _TOPIC_LENGTH.unpack_from(buffer, at)[0]]


def take_timed(buffer: bytes, position: int, end: int) -> tuple[ProduceBatch | DelayedBatch | None, int]:
    """Return the frames of one opcode for one topic from `position` on, and their end; None for too few."""
    begin = position
    field = _topic_field(buffer, position + HEADER_BYTES, end)
    if field is None:
        return None, begin
    head, layout = buffer[position : position + 4], _front_layout(len(field))
    unpack, front_bytes, time_of = layout.unpack_from, layout.size, _TIME.unpack_from
    # The caller has checked the length of the first frame. Inside this window no later one can exceed the limit.
    end = min(end, position + HEADER_BYTES + FLYMQ_PAYLOAD_BYTES_MAX)
    values: list[bytes] = []
    times: list[int] = []
    last = end - front_bytes - _TIME.size
    look_at = 0
    """Frame, counted in values, from which the fast path is tried again, so that it is not tried at every frame."""
    while position <= last:
        if len(values) >= look_at:
            position += _take_stretch(values, times, buffer, position, end, (head, field))
            look_at = len(values) + _STRETCH_MIN
            if position > last:
                break
        frame_head, length, topic, value_bytes = unpack(buffer, position)
        value_at, behind = position + front_bytes, position + HEADER_BYTES + length
        time_at = value_at + value_bytes
        rest = behind - time_at - 8
        if frame_head != head or topic != field or behind > end:
            break
        if rest and (rest != 8 or not buffer.startswith(_TAIL, behind - 8)):
            break
        values.append(buffer[value_at:time_at])
        times += time_of(buffer, time_at)
        position = behind
    if len(values) < BATCH_MIN:
        return None, begin
    try:
        name = field[2:].decode()
    except UnicodeDecodeError:
        return None, begin
    if head[2] == Opcode.PRODUCE_WITH_TTL:
        return ProduceBatch(name, values, ttls=times), position
    return DelayedBatch(name, values, times), position


def _take_stretch(values: list[bytes], times: list[int], buffer: bytes, position: int, end: int, same: tuple[bytes, bytes]) -> int:
    """Decode many frames of the same sizes at once: nothing but value and time differs, and mostly only the value. Return their size; 0 if
    there are too few.

    `same` is the head and the topic of the batch. There are enough bytes for a frame with an empty value.
    """
    head, field = same
    layout = _front_layout(len(field))
    frame_head, length, topic, value_bytes = layout.unpack_from(buffer, position)
    tail_bytes = length + HEADER_BYTES - layout.size - value_bytes - _TIME.size
    if frame_head != head or topic != field or tail_bytes not in (0, len(_TAIL)):
        return 0
    front, tail = buffer[position : position + layout.size], _TAIL[:tail_bytes]
    frame_bytes = HEADER_BYTES + length
    begin, stretch = position, _STRETCH_MIN
    while (count := min(stretch, (end - position) // frame_bytes)) >= _STRETCH_MIN:
        after = buffer[position + frame_bytes - tail_bytes - _TIME.size : position + frame_bytes - tail_bytes] + tail
        stop = position + count * frame_bytes
        if not (buffer.startswith(front, position) and buffer.startswith(after, stop - len(after))):
            break
        found = equal_values(buffer, position + len(front), value_bytes, after + front, count)
        if not found:
            break
        values += found
        times += _TIME.unpack_from(after) * count
        position = stop
        stretch *= _STRETCH_GROWTH
    while (end - position) // frame_bytes >= _BLOCK and buffer.startswith(front, position + (_BLOCK - 1) * frame_bytes):
        fields = _block(len(front), value_bytes, tail_bytes).unpack_from(buffer, position)
        if fields[0::4].count(front) < _BLOCK or fields[3::4].count(tail) < _BLOCK:
            break
        values += fields[1::4]
        times += fields[2::4]
        position += _BLOCK * frame_bytes
    return position - begin


@lru_cache(maxsize=64)
def _block(front_bytes: int, value_bytes: int, tail_bytes: int) -> struct.Struct:
    """Front, value, time and tail of each frame. Slices of these fields are columns, without an object for each frame."""
    return struct.Struct(">" + f"{front_bytes}s{value_bytes}sq{tail_bytes}s" * _BLOCK)


def take_commits(buffer: bytes, position: int, end: int) -> tuple[CommitBatch | None, int]:
    """Return the COMMIT frames for one topic and group from `position` on, and their end; None for too few."""
    begin = position
    topic = _topic_field(buffer, position + HEADER_BYTES, end)
    group = None if topic is None else _topic_field(buffer, position + HEADER_BYTES + len(topic), end)
    if topic is None or group is None:
        return None, begin
    front = buffer[position : position + HEADER_BYTES + len(topic) + len(group)]
    frame_bytes = len(front) + 12
    if len(front) != HEADER_BYTES + len(topic) + len(group) or int.from_bytes(front[4:8], "big") != frame_bytes - HEADER_BYTES:
        return None, begin
    layout = struct.Struct(f">{len(front)}siQ")
    partitions: list[int] = []
    offsets: list[int] = []
    stretch = _STRETCH_MIN
    while (count := min(stretch, (end - position) // frame_bytes)) > 0:
        fronts, places, numbers = zip(*layout.iter_unpack(memoryview(buffer)[position : position + count * frame_bytes]), strict=True)
        same = count if fronts.count(front) == count else next(index for index, other in enumerate(fronts) if other != front)
        partitions += places[:same]
        offsets += numbers[:same]
        position += same * frame_bytes
        if same < count:
            break
        stretch *= _STRETCH_GROWTH
    if len(offsets) < BATCH_MIN:
        return None, begin
    try:
        return CommitBatch(topic[2:].decode(), group[2:].decode(), partitions, offsets), position
    except UnicodeDecodeError:
        return None, begin


def encode_scheduled(
    topic: str, partitions: Sequence[int], now: int, key_sizes: Sequence[int], value_sizes: Sequence[int], ids: list[str], dues: list[int]
) -> bytes:
    """Return the reply to PRODUCE_DELAYED for each message. All ids have the same length."""
    field, id_bytes = S16.write(topic), len(ids[0])
    layout = struct.Struct(f">iQqiiH{id_bytes}sq")
    head = _HEAD_BYTES + bytes((Opcode.PRODUCE_DELAYED, BINARY))
    front = head + (len(field) + layout.size).to_bytes(4, "big") + field
    names = list(map(str.encode, ids))
    if all(column.count(column[0]) == len(ids) for column in (partitions, key_sizes, value_sizes, dues)):
        # Only the ids differ.
        whole = front + layout.pack(partitions[0], 0, now, key_sizes[0], value_sizes[0], id_bytes, names[0], dues[0])
        id_at = len(whole) - _TIME.size - id_bytes
        before, after = whole[:id_at], whole[id_at + id_bytes :]
        return b"".join((before, (after + before).join(names), after))
    rows = map(layout.pack, partitions, repeat(0), repeat(now), key_sizes, value_sizes, repeat(id_bytes), names, dues)
    return front + front.join(rows)
