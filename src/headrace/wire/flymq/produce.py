"""PRODUCE (0x01) and RecordMetadata, the hot path in both directions.

    PRODUCE           topic s16, key b32 (empty: none), value b32, [partition i32, −1: the broker chooses]
    RecordMetadata    topic s16, partition i32, offset u64, timestamp i64 (Unix ms), key size i32 (−1: none), value size i32

Most frames come in long batches for one topic. `take_batch` decodes such a batch directly from the input: one unpack compares each frame
with the header and topic of the first. Sixteen or more frames of the same sizes are decoded faster: without keys they differ only in their
values, so one `bytes.split` at the bytes between two values splits all of them; with keys, `iter_unpack` does. A frame of another form (no
partition, bytes after it, wrong lengths) ends the batch and is decoded alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final

from headrace.columns import EQUAL_ROWS_MIN, numbered_rows
from headrace.errors import InvalidRequest, RecordTooLarge
from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire.flymq.fields import B32, I32, S16
from headrace.wire.flymq.framing import BINARY, HEADER_BYTES, MAGIC, VERSION
from headrace.wire.flymq.messages import AUTO, ProduceBatch, RecordMetadataBatch
from headrace.wire.flymq.opcodes import Opcode
from headrace.wire.flymq.reader import Reader

_HEAD: Final = MAGIC << 24 | VERSION << 16 | Opcode.PRODUCE << 8 | BINARY
"""First four bytes of a frame as one number."""
_HEADER = struct.Struct(">II")
assert _HEADER.size == HEADER_BYTES
_LENGTH, _PARTITION, _TOPIC_LENGTH = struct.Struct(">I"), struct.Struct(">i"), struct.Struct(">H")
_LONE_TAIL = struct.Struct(">II")
"""Key length and, without a key, value length."""
_AUTO_BYTES: Final = _PARTITION.pack(AUTO)
PLACE: Final = struct.Struct(">iQqii")
"""Partition, offset, timestamp, size of the key or `AUTO`, size of the value."""

_STRETCH_MIN: Final = 16
_STRETCH_GROWTH: Final = 4
"""After a successful attempt, the next one is four times as long. This bounds the bytes that failed attempts read."""
_PATIENCE_MAX: Final = 256
"""Frames decoded one by one after failed attempts, at most, before the next attempt."""


@lru_cache(maxsize=1024)
def _front_layout(topic_field_bytes: int) -> struct.Struct:
    """Head, length, topic field, key length and, without a key, value length."""
    return struct.Struct(f">II{topic_field_bytes}sII")


def read_produce(reader: Reader) -> tuple[ProduceBatch, bool]:
    """Decode one PRODUCE payload of any form. Also return whether it names a partition: in the specification's example the length omits
    it."""
    topic, key, value = S16.read(reader), B32.read(reader), B32.read(reader)
    named = reader.left > 0
    partition = I32.read(reader) if named else AUTO
    return ProduceBatch(topic, [value], [key] if key else None, None if partition == AUTO else [partition]), named


def take_batch(buffer: bytes, position: int, end: int) -> tuple[ProduceBatch | None, int]:
    """Return the PRODUCE frames for one topic from `position` on, and their end.

    There is a complete frame at `position`. Returns no batch and the same position if that frame has another form.
    """
    field_from = position + HEADER_BYTES
    if end - field_from < _TOPIC_LENGTH.size:
        return None, position
    topic_end = field_from + 2 + (buffer[field_from] << 8) + buffer[field_from + 1]
    field = buffer[field_from:topic_end]
    try:
        batch = ProduceBatch(field[2:].decode(), [])
    except UnicodeDecodeError:
        return None, position
    (length,) = _LENGTH.unpack_from(buffer, position + 4)
    if field_from + length == end and topic_end + _LONE_TAIL.size <= end:
        # A client that waits for each reply sends one frame at a time, mostly without a key.
        key_bytes, value_bytes = _LONE_TAIL.unpack_from(buffer, topic_end)
        value_at = topic_end + _LONE_TAIL.size
        if not key_bytes and value_at + value_bytes + 4 == end and buffer.endswith(_AUTO_BYTES):
            batch.values.append(buffer[value_at : end - 4])
            return batch, end
    scan = _Scan(buffer, position, end, field, batch)
    scan.exhaust()
    return (batch, scan.position) if batch.values else (None, position)


class _Scan:
    """Decoding of the frames of one batch."""

    __slots__ = ("batch", "buffer", "end", "field", "front", "head", "position")

    def __init__(self, buffer: bytes, position: int, end: int, field: bytes, batch: ProduceBatch) -> None:
        self.buffer, self.position, self.field, self.batch = buffer, position, field, batch
        # The caller has checked the length of the first frame. Inside this window no later one can exceed the limit.
        self.end = min(end, position + HEADER_BYTES + FLYMQ_PAYLOAD_BYTES_MAX)
        self.front = _front_layout(len(field))
        (self.head,) = _LENGTH.unpack_from(buffer, position)

    def exhaust(self) -> None:
        stretch, patience = _STRETCH_MIN, _STRETCH_MIN
        while True:
            if self._take_stretch(stretch):
                stretch, patience = stretch * _STRETCH_GROWTH, _STRETCH_MIN
            elif self._take_singly(patience):
                stretch, patience = _STRETCH_MIN, min(2 * patience, _PATIENCE_MAX)
            else:
                return

    def _take_singly(self, count: int) -> bool:
        """Decode up to `count` frames one by one. Return False at the end of the batch."""
        buffer, position, end, field, head, batch = self.buffer, self.position, self.end, self.field, self.head, self.batch
        unpack, front_bytes = self.front.unpack_from, self.front.size
        last = end - front_bytes - _PARTITION.size
        values, keys, partitions = batch.values, batch.keys, batch.partitions
        for _ in range(count):
            if position > last:
                break
            frame_head, length, topic, key_bytes, value_bytes = unpack(buffer, position)
            frame_end = position + HEADER_BYTES + length
            if frame_head != head or topic != field or frame_end > end:
                break
            value_at = position + front_bytes
            if key_bytes:
                value_at += key_bytes
                if value_at > frame_end:
                    break
                (value_bytes,) = _LENGTH.unpack_from(buffer, value_at - 4)
            value_end = value_at + value_bytes
            if value_end + 4 != frame_end:
                break
            if key_bytes:
                if keys is None:
                    keys = batch.keys = [None] * len(values)
                keys.append(buffer[value_at - 4 - key_bytes : value_at - 4])
            elif keys is not None:
                keys.append(None)
            if partitions is not None:
                partitions += _PARTITION.unpack_from(buffer, value_end)
            elif not buffer.startswith(_AUTO_BYTES, value_end):
                partitions = batch.partitions = [AUTO] * len(values)
                partitions += _PARTITION.unpack_from(buffer, value_end)
            values.append(buffer[value_at:value_end])
            position = frame_end
        else:
            self.position = position
            return True
        self.position = position
        return False

    def _take_stretch(self, count_max: int) -> bool:
        """Decode many frames of the same sizes at once. Return False, with nothing decoded, if there are too few of them."""
        buffer, position, front_bytes = self.buffer, self.position, self.front.size
        if position + front_bytes + 4 > self.end:
            return False
        head, length, topic, key_bytes, value_bytes = self.front.unpack_from(buffer, position)
        frame_bytes = HEADER_BYTES + length
        count = min(count_max, (self.end - position) // frame_bytes)
        if count < _STRETCH_MIN or head != self.head or topic != self.field:
            return False
        constant = buffer[position : position + front_bytes - 4]
        if not buffer.startswith(constant, position + frame_bytes) or not buffer.startswith(constant, position + (count - 1) * frame_bytes):
            return False
        stop = position + count * frame_bytes
        if key_bytes:
            return self._unpack_stretch(constant, key_bytes, frame_bytes, stop)
        if front_bytes + value_bytes + 4 != frame_bytes:
            return False
        if buffer.startswith(buffer[position + frame_bytes - 4 : position + frame_bytes], position + 2 * frame_bytes - 4):
            return self._split_stretch(value_bytes, frame_bytes, stop)
        return self._unpack_stretch(constant, 0, frame_bytes, stop)

    def _split_stretch(self, value_bytes: int, frame_bytes: int, stop: int) -> bool:
        """Decode frames without keys and with one partition: the bytes between two values are always the same."""
        buffer, position = self.buffer, self.position
        value_at = position + self.front.size
        front, partition = buffer[position:value_at], buffer[position + frame_bytes - 4 : position + frame_bytes]
        values = buffer[value_at : stop - 4].split(partition + front)
        count = (stop - position) // frame_bytes
        # If there are as many chunks as frames and none is too long, none is too short, and every separator is the start of a frame.
        if len(values) != count or max(map(len, values)) != value_bytes or not buffer.startswith(partition, stop - 4):
            return False
        (number,) = _PARTITION.unpack(partition)
        self.batch.extend(ProduceBatch(self.batch.topic, values, None, None if number == AUTO else [number] * count))
        self.position = stop
        return True

    def _unpack_stretch(self, constant: bytes, key_bytes: int, frame_bytes: int, stop: int) -> bool:
        """Decode frames with different keys or partitions of the same sizes."""
        value_bytes = frame_bytes - len(constant) - key_bytes - 8
        if value_bytes < 0:
            return False
        rows = struct.iter_unpack(f">{len(constant)}s{key_bytes}sI{value_bytes}si", memoryview(self.buffer)[self.position : stop])
        fronts, keys, lengths, values, partitions = zip(*rows, strict=True)
        count = len(values)
        if fronts.count(constant) != count or lengths.count(value_bytes) != count:
            return False
        explicit = None if partitions.count(AUTO) == count else list(partitions)
        self.batch.extend(ProduceBatch(self.batch.topic, list(values), list(keys) if key_bytes else None, explicit))
        self.position = stop
        return True


def encode_batch(batch: ProduceBatch) -> bytes:
    """Return a PRODUCE frame for each record. The partition of a record and the head of the next are joined as one part."""
    field = S16.write(batch.topic)
    count, values = len(batch), batch.values
    partitions = [AUTO] * count if batch.partitions is None else batch.partitions
    before = [AUTO, *partitions[:-1]]
    if batch.keys is None:
        extra = len(field) + 12
        lengths = [extra + len(value) for value in values]
        parts: list[bytes] = [b""] * (2 * count)
        parts[0::2] = map(
            struct.Struct(f">iII{len(field)}sII").pack, before, repeat(_HEAD), lengths, repeat(field), repeat(0), map(len, values)
        )
        parts[1::2] = values
    else:
        keys = [key or b"" for key in batch.keys]
        extra = len(field) + 12
        lengths = [extra + len(key) + len(value) for key, value in zip(keys, values, strict=True)]
        parts = [b""] * (4 * count)
        parts[0::4] = map(struct.Struct(f">iII{len(field)}sI").pack, before, repeat(_HEAD), lengths, repeat(field), map(len, keys))
        parts[1::4] = keys
        parts[2::4] = map(_LENGTH.pack, map(len, values))
        parts[3::4] = values
    check_sizes(lengths, extra)
    parts[0] = parts[0][4:]
    parts.append(_PARTITION.pack(partitions[-1]))
    return b"".join(parts)


def check_sizes(sizes: Sequence[int], extra: int) -> None:
    """Return the payload sizes of a batch, with `extra` bytes in addition to key and value. Raises `InvalidRequest`, `RecordTooLarge`."""
    if not sizes:
        raise InvalidRequest("a batch has at least one record")
    if max(sizes) > FLYMQ_PAYLOAD_BYTES_MAX:
        raise RecordTooLarge(size_bytes=max(sizes) - extra, bytes_max=FLYMQ_PAYLOAD_BYTES_MAX - extra)


def encode_metadata(batch: RecordMetadataBatch, opcode: int = Opcode.PRODUCE) -> bytes:
    """Return a RecordMetadata frame for each record. They differ only in their last 28 bytes."""
    field = S16.write(batch.topic)
    front = _HEADER.pack(_HEAD & ~0xFF00 | opcode << 8, len(field) + PLACE.size) + field
    return place_rows(front, batch.partitions, batch.offsets, batch.timestamps, batch.key_sizes, batch.value_sizes)


def place_rows(
    front: bytes,
    partitions: Sequence[int],
    offsets: Sequence[int],
    timestamps: Sequence[int],
    key_sizes: Sequence[int],
    value_sizes: Sequence[int],
) -> bytes:
    """Return the front and the place of each record. Where only the offsets differ, they are written a column at a time."""
    count = len(offsets)
    others = (partitions, timestamps, key_sizes, value_sizes)
    if count >= EQUAL_ROWS_MIN and all(column.count(column[0]) == count for column in others):
        row = front + PLACE.pack(partitions[0], 0, timestamps[0], key_sizes[0], value_sizes[0])
        return bytes(numbered_rows(row, offsets, len(front) + _PARTITION.size))
    return front + front.join(map(PLACE.pack, partitions, offsets, timestamps, key_sizes, value_sizes))


@lru_cache(maxsize=1024)
def _metadata_front(topic: str) -> bytes:
    field = S16.write(topic)
    return _HEADER.pack(_HEAD, len(field) + PLACE.size) + field


def encode_metadata_one(topic: str, partition: int, offset: int, timestamp: int, key_size: int, value_size: int) -> bytes:
    """Return the RecordMetadata frame of a single record."""
    return _metadata_front(topic) + PLACE.pack(partition, offset, timestamp, key_size, value_size)


def take_metadata(buffer: bytes, position: int, end: int) -> tuple[RecordMetadataBatch | None, int]:
    """Return the RecordMetadata frames for one topic from `position` on, and their end.

    There is a complete frame at `position`. Returns no batch and the same position if that frame is too short or has extra bytes.
    """
    field_from = position + HEADER_BYTES
    if end - field_from < _TOPIC_LENGTH.size:
        return None, position
    (topic_bytes,) = _TOPIC_LENGTH.unpack_from(buffer, field_from)
    front = buffer[position : field_from + 2 + topic_bytes]
    frame_bytes = len(front) + PLACE.size
    if _LENGTH.unpack_from(buffer, position + 4) != (frame_bytes - HEADER_BYTES,):
        return None, position
    try:
        topic = front[HEADER_BYTES + 2 :].decode()
    except UnicodeDecodeError:
        return None, position
    layout = struct.Struct(f">{len(front)}s{PLACE.format[1:]}")
    columns: tuple[list[int], ...] = ([], [], [], [], [])
    stretch = _STRETCH_MIN
    while (count := min(stretch, (end - position) // frame_bytes)) > 0:
        fronts, *rows = zip(*layout.iter_unpack(memoryview(buffer)[position : position + count * frame_bytes]), strict=True)
        same = count if fronts.count(front) == count else next(index for index, other in enumerate(fronts) if other != front)
        for column, row in zip(columns, rows, strict=True):
            column += row if same == count else row[:same]
        position += same * frame_bytes
        if same < count:
            break
        stretch *= _STRETCH_GROWTH
    return RecordMetadataBatch(topic, *columns), position


def read_metadata(reader: Reader) -> RecordMetadataBatch:
    """Decode one RecordMetadata payload. Extra bytes are allowed."""
    topic = S16.read(reader)
    row = PLACE.unpack(reader.take(PLACE.size))
    return RecordMetadataBatch(topic, *([number] for number in row))
