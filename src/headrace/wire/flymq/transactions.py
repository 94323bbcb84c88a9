"""Layouts of the transaction requests (0x40–0x43) and of their replies.

    TXN_BEGIN      [timeout u32]                                                      → id s16, success bool
    TXN_COMMIT     id s16                                                             → id s16, success bool, list of RecordMetadata
    TXN_ROLLBACK   id s16                                                             → id s16, success bool
    TXN_PRODUCE    id s16, topic s16, value b32, [key b32, partition i32]             → RecordMetadata, offset 0

Only Headrace has the timeout (ms), key, partition and the list in the reply to TXN_COMMIT. Group offsets join a transaction when COMMIT
names it (see `table.py`).

TXN_PRODUCE frames come in long batches, as PRODUCE frames do. `take_batch` decodes a batch directly from the input: one unpack compares
each frame with the header, transaction and topic of the first. `take_whole` decodes adjacent transactions together with their commits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final

from headrace.columns import equal_rows
from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire.flymq.advanced_messages import (
    PlacedBatch,
    TxnBegin,
    TxnBeginBatch,
    TxnBegun,
    TxnCommit,
    TxnEnded,
    TxnProduceBatch,
    TxnRollback,
    TxnWholeBatch,
)
from headrace.wire.flymq.blocks import equal_values
from headrace.wire.flymq.fields import B32, BOOL, I32, S16, U32, Layout, Trailing
from headrace.wire.flymq.framing import BINARY, HEADER_BYTES, MAGIC, VERSION
from headrace.wire.flymq.messages import AUTO
from headrace.wire.flymq.opcodes import Opcode
from headrace.wire.flymq.produce import PLACE, check_sizes, place_rows
from headrace.wire.flymq.reader import Reader

_HEAD: Final = MAGIC << 24 | VERSION << 16 | Opcode.TXN_PRODUCE << 8 | BINARY
_HEADER = struct.Struct(">II")
_LENGTH, _PARTITION = struct.Struct(">I"), struct.Struct(">i")
_SIZE = struct.Struct(">i")
_BEGIN_HEAD: Final = MAGIC << 24 | VERSION << 16 | Opcode.TXN_BEGIN << 8 | BINARY
_COMMIT_HEAD: Final = MAGIC << 24 | VERSION << 16 | Opcode.TXN_COMMIT << 8 | BINARY
_BLOCK: Final = 64
"""Whole transactions that are unpacked by one call. Slices of the result are columns."""
_STRETCH_MIN: Final = 16
_BEGINS_MIN: Final = 2
_BEGINS_STRETCH: Final = 64
_TAIL_BYTES: Final = 8
"""An empty key and a partition."""


class TxnProduceLayout:
    """A single frame. The decoder joins adjacent ones."""

    message = TxnProduceBatch

    def read(self, reader: Reader, /) -> TxnProduceBatch:
        transaction, topic, value = S16.read(reader), S16.read(reader), B32.read(reader)
        key = B32.read(reader) if reader.left else b""
        partition = I32.read(reader) if reader.left else AUTO
        return TxnProduceBatch(transaction, topic, [value], [key] if key else None, None if partition == AUTO else [partition])

    def write(self, value: TxnProduceBatch, /) -> bytes:
        raise AssertionError("a batch is several frames: see encode_batch")


TXN_BEGIN = Layout(TxnBegin, timeout_ms=Trailing(U32, 0))
TXN_COMMIT = Layout(TxnCommit, transaction=S16)
TXN_ROLLBACK = Layout(TxnRollback, transaction=S16)
TXN_PRODUCE = TxnProduceLayout()

TXN_BEGUN = Layout(TxnBegun, transaction=S16, success=BOOL)


class PlacesLayout:
    """List of RecordMetadata at the end of TXN_COMMIT's reply, in columns. Empty if missing."""

    def read(self, reader: Reader, /) -> list[PlacedBatch]:
        topics: list[tuple[str, list[tuple[int, ...]]]] = []
        for _ in range(U32.read(reader) if reader.left else 0):
            topic, row = S16.read(reader), PLACE.unpack(reader.take(PLACE.size))
            if not topics or topics[-1][0] != topic:
                topics.append((topic, []))
            topics[-1][1].append(row)
        return [PlacedBatch(topic, *(list(column) for column in zip(*rows, strict=True))) for topic, rows in topics]

    def write(self, value: list[PlacedBatch], /) -> bytes:
        if not value:
            return b""
        parts = [U32.write(sum(map(len, value)))]
        for batch in value:
            field = S16.write(batch.topic)
            parts.append(place_rows(field, batch.partitions, batch.offsets, batch.timestamps, batch.key_sizes, batch.value_sizes))
        return b"".join(parts)


def encode_staged(topic: str, partition: int, timestamp: int, value_sizes: Sequence[int]) -> bytes:
    """Return the replies to TXN_PRODUCEs without keys to one partition: they differ only in the size of the value."""
    field = S16.write(topic)
    front = _HEADER.pack(_HEAD, len(field) + PLACE.size) + field + PLACE.pack(partition, 0, timestamp, AUTO, 0)[: -_SIZE.size]
    if value_sizes.count(value_sizes[0]) == len(value_sizes):
        return (front + _SIZE.pack(value_sizes[0])) * len(value_sizes)
    return front + front.join(map(_SIZE.pack, value_sizes))


def encode_begun(ids: Sequence[str]) -> bytes:
    """Return the replies to TXN_BEGINs."""
    names = list(map(str.encode, ids))
    if _are_equal(names):
        front = _HEADER.pack(_BEGIN_HEAD, len(names[0]) + 3) + len(names[0]).to_bytes(2, "big")
        return b"".join((front, (b"\x01" + front).join(names), b"\x01"))
    fields = [S16.write(id) + b"\x01" for id in ids]
    return b"".join([_HEADER.pack(_BEGIN_HEAD, len(field)) + field for field in fields])


def _are_equal(items: Sequence[bytes]) -> bool:
    """Return whether there are any, and all have the same size."""
    return len(set(map(len, items))) == 1


def encode_whole(
    topic: str, transactions: Sequence[str], counts: Sequence[int], placed: tuple[int, int, int], sizes: Sequence[int]
) -> bytes:
    """Return the replies to the frames of whole transactions. `placed`: partition, first offset and timestamp of all records, `sizes`: of
    their values."""
    partition, offset, timestamp = placed
    field, ids, size = S16.write(topic), list(map(str.encode, transactions)), sizes[0]
    id_bytes = len(ids[0])
    if len(sizes) == len(ids) and sizes.count(size) == len(sizes) and _are_equal(ids):
        # Only ids and offsets differ.
        place = PLACE.pack(partition, 0, timestamp, AUTO, size)
        front = encode_staged(topic, partition, timestamp, [size])
        front += _HEADER.pack(_COMMIT_HEAD, 2 + id_bytes + 5 + len(field) + PLACE.size) + id_bytes.to_bytes(2, "big")
        middle = b"\x01" + _LENGTH.pack(1) + field
        offset_at = len(front) + id_bytes + len(middle) + _PARTITION.size
        offsets = range(offset, offset + len(ids))
        return bytes(equal_rows(ids, id_bytes, front, middle + place, numbers=offsets, numbers_at=offset_at))
    frames, first = list[bytes](), 0
    for id, count in zip(transactions, counts, strict=True):
        own, begin = sizes[first : first + count], offset + first
        first += count
        places = place_rows(field, [partition] * count, range(begin, begin + count), [timestamp] * count, [AUTO] * count, own)
        ended = b"".join((S16.write(id), b"\x01", _LENGTH.pack(count), places))
        frames += (encode_staged(topic, partition, timestamp, own), _HEADER.pack(_COMMIT_HEAD, len(ended)), ended)
    return b"".join(frames)


TXN_ENDED = Layout(TxnEnded, transaction=S16, success=BOOL, batches=PlacesLayout())


def encode_batch(batch: TxnProduceBatch) -> bytes:
    """Return a TXN_PRODUCE frame for each record. Key and partition are omitted if no record has one."""
    field = S16.write(batch.transaction) + S16.write(batch.topic)
    count, values = len(batch), batch.values
    if batch.keys is None and batch.partitions is None:
        tails: list[bytes] = []
        sizes = [len(field) + 4 + len(value) for value in values]
    else:
        keys, partitions = batch.keys or [None] * count, batch.partitions or [AUTO] * count
        tails = [B32.write(key or b"") + _PARTITION.pack(partition) for key, partition in zip(keys, partitions, strict=True)]
        sizes = [len(field) + 4 + len(value) + len(tail) for value, tail in zip(values, tails, strict=True)]
    check_sizes(sizes, len(field) + (12 if tails else 4))
    width = 3 if tails else 2
    parts = [b""] * (width * count)
    parts[0::width] = map(_front_layout(len(field)).pack, repeat(_HEAD), sizes, repeat(field), map(len, values))
    parts[1::width] = values
    if tails:
        parts[2::width] = tails
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _front_layout(field_bytes: int) -> struct.Struct:
    """Head, length, transaction and topic fields, value length."""
    return struct.Struct(f">II{field_bytes}sI")


def take_batch(buffer: bytes, position: int, end: int) -> tuple[TxnProduceBatch | None, int]:
    """Return the TXN_PRODUCE frames of one transaction and topic from `position` on, and their end.

    There is a complete frame at `position`. Returns no batch and the same position if that frame has another form.
    """
    head, length = _HEADER.unpack_from(buffer, position)
    field_from, behind = position + HEADER_BYTES, position + HEADER_BYTES + length
    if head != _HEAD or length < 4:
        return None, position
    topic_at = field_from + 2 + int.from_bytes(buffer[field_from : field_from + 2], "big")
    value_at = topic_at + 2 + int.from_bytes(buffer[topic_at : topic_at + 2], "big") if topic_at + 2 <= behind else behind + 1
    if value_at + 4 > behind:
        return None, position
    field = buffer[field_from:value_at]
    try:
        batch = TxnProduceBatch(field[2 : topic_at - field_from].decode(), field[topic_at - field_from + 2 :].decode(), [])
    except UnicodeDecodeError:
        return None, position
    return (batch, ahead) if (ahead := _extend(batch, field, buffer, position, end)) > position else (None, position)


def take_begins(buffer: bytes, position: int, end: int) -> tuple[TxnBeginBatch | None, int]:
    """Return equal TXN_BEGIN frames from `position` on, and their end; None for too few. There is a complete frame at `position`."""
    head, length = _HEADER.unpack_from(buffer, position)
    if head != _BEGIN_HEAD or length not in (0, _LENGTH.size):
        return None, position
    behind = position + HEADER_BYTES + length
    frame, count = buffer[position:behind], 1
    stretch = min(_BEGINS_STRETCH, (end - behind) // len(frame))
    while stretch:
        # Compares many frames at once, then fewer: a client sends hundreds of them.
        if buffer.startswith(frame * stretch, behind):
            behind += len(frame) * stretch
            count += stretch
            stretch = min(stretch, (end - behind) // len(frame))
        else:
            stretch //= 2
    if count < _BEGINS_MIN:
        return None, position
    return TxnBeginBatch(count, int.from_bytes(frame[HEADER_BYTES:], "big")), behind


def take_whole(buffer: bytes, position: int, end: int) -> tuple[TxnWholeBatch | TxnProduceBatch | None, int]:
    """Return the transactions from `position` on whose frames are all there, and their end. If the first one is not, return its frames as
    `take_batch` does."""
    batch, ahead = take_batch(buffer, position, end)
    if batch is None or batch.keys is not None or batch.partitions is not None:
        return batch, ahead
    commit = _commit(batch.transaction)
    if not buffer.startswith(commit, ahead):
        return batch, ahead
    topic = batch.topic
    if len(batch) == 1:
        whole, ahead = _take_singles(topic, batch.transaction, len(batch.values[0]), buffer, position, end)
    else:
        whole, ahead = TxnWholeBatch(topic, [batch.transaction], [len(batch)], batch.values), ahead + len(commit)
    while end - ahead > HEADER_BYTES and _HEADER.unpack_from(buffer, ahead)[0] == _HEAD:
        if end - ahead < HEADER_BYTES + _HEADER.unpack_from(buffer, ahead)[1]:
            break
        batch, behind = take_batch(buffer, ahead, end)
        if batch is None or batch.topic != topic or batch.keys is not None or batch.partitions is not None:
            break
        commit = _commit(batch.transaction)
        if not buffer.startswith(commit, behind):
            break
        whole.transactions.append(batch.transaction)
        whole.counts.append(len(batch))
        whole.values += batch.values
        ahead = behind + len(commit)
    return whole, ahead


def _commit(transaction: str) -> bytes:
    field = S16.write(transaction)
    return _HEADER.pack(_COMMIT_HEAD, len(field)) + field


@lru_cache(maxsize=512)
def _singles_layout(sizes: tuple[int, ...], count: int) -> struct.Struct:
    return struct.Struct("".join(f"{size}s" for size in sizes) * count)


def _take_singles(topic: str, transaction: str, value_bytes: int, buffer: bytes, position: int, end: int) -> tuple[TxnWholeBatch, int]:
    """Decode transactions of one record whose frames have the sizes of the first one's: nothing but ids and values differs. The first one
    is complete."""
    id_bytes, topic_field = len(transaction.encode()), S16.write(topic)
    front = HEADER_BYTES + 2
    sizes = (front, id_bytes, len(topic_field) + 4, value_bytes, front, id_bytes)
    frame_bytes, whole, stretch = sum(sizes), TxnWholeBatch(topic, [], [], []), _STRETCH_MIN
    first: tuple[bytes, ...] = ()
    while (count := min(stretch, (end - position) // frame_bytes)) > 0:
        fields = _singles_layout(sizes, count).unpack_from(buffer, position)
        fronts, ids, topics, values, commits, committed = (fields[column :: len(sizes)] for column in range(len(sizes)))
        first = first or (fronts[0], topics[0], commits[0])
        same = count
        if fronts.count(first[0]) < count or topics.count(first[1]) < count or commits.count(first[2]) < count or ids != committed:
            columns = zip(fronts, topics, commits, ids, committed, strict=True)
            same = next(index for index, (*same_as, id, other) in enumerate(columns) if tuple(same_as) != first or id != other)
        try:
            whole.transactions += map(bytes.decode, ids[:same])
        except UnicodeDecodeError:
            del whole.transactions[len(whole.values) :]
            if not whole.values:  # the first one is known to be valid
                whole.transactions.append(transaction)
                whole.values.append(values[0])
                position += frame_bytes
            break
        whole.values += values[:same]
        position += same * frame_bytes
        if same < count:
            break
        stretch = _BLOCK
    whole.counts = [1] * len(whole)
    return whole, position


def _extend(batch: TxnProduceBatch, field: bytes, buffer: bytes, position: int, end: int) -> int:
    layout = _front_layout(len(field))
    unpack, front_bytes = layout.unpack_from, layout.size
    values = batch.values
    # The caller has checked the length of the first frame. Inside this window no later one can exceed the limit.
    end = min(end, position + HEADER_BYTES + FLYMQ_PAYLOAD_BYTES_MAX)
    look_at = 0
    """Frame, counted in values, from which the fast path is tried again, so that it is not tried at every frame."""
    while end - position >= front_bytes:
        if batch.keys is None and batch.partitions is None and len(values) >= look_at:
            if ahead := _take_stretch(values, field, buffer, position, end):
                position = ahead
                continue
            look_at = len(values) + _STRETCH_MIN
        head, length, named, value_bytes = unpack(buffer, position)
        behind, value_end = position + HEADER_BYTES + length, position + front_bytes + value_bytes
        if head != _HEAD or named != field or behind > end:
            break
        if value_end == behind:
            if batch.keys is not None or batch.partitions is not None:
                _put(batch, None, AUTO)
        else:
            tail = behind - value_end
            if tail < _TAIL_BYTES or _LENGTH.unpack_from(buffer, value_end)[0] != tail - _TAIL_BYTES:
                break
            _put(batch, buffer[value_end + 4 : behind - 4], _PARTITION.unpack_from(buffer, behind - 4)[0])
        values.append(buffer[position + front_bytes : value_end])
        position = behind
    return position


def _take_stretch(values: list[bytes], field: bytes, buffer: bytes, position: int, end: int) -> int:
    """Decode many frames of the same sizes at once: the bytes between two values are always the same. Return 0 if that is not possible."""
    layout = _front_layout(len(field))
    front_bytes, front = layout.size, buffer[position : position + layout.size]
    head, length, named, value_bytes = layout.unpack(front)
    frame_bytes = front_bytes + value_bytes
    if head != _HEAD or named != field or length != frame_bytes - HEADER_BYTES:
        return 0
    count = _stretch(front, buffer, position, frame_bytes, (end - position) // frame_bytes)
    if count < _STRETCH_MIN:
        return 0
    stop: int = position + count * frame_bytes
    found = equal_values(buffer, position + front_bytes, value_bytes, front, count)
    if not found:
        return 0
    values += found
    return stop


def _stretch(front: bytes, buffer: bytes, position: int, frame_bytes: int, count_max: int) -> int:
    """Return how many frames have the same head, found by bisection. It assumes that such frames are contiguous; the caller detects a
    wrong guess."""
    low, high = min(1, count_max), count_max
    while low < high:
        middle = (low + high + 1) // 2
        if buffer.startswith(front, position + (middle - 1) * frame_bytes):
            low = middle
        else:
            high = middle - 1
    return low


def _put(batch: TxnProduceBatch, key: bytes | None, partition: int) -> None:
    """Columns in addition to the values, which do not contain this record yet."""
    if key and batch.keys is None:
        batch.keys = [None] * len(batch)
    if batch.keys is not None:
        batch.keys.append(key or None)
    if partition != AUTO and batch.partitions is None:
        batch.partitions = [AUTO] * len(batch)
    if batch.partitions is not None:
        batch.partitions.append(partition)
