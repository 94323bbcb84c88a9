"""Kafka record batches that are built a column at a time.

Most batches have neither headers nor expiries nor tombstones, and one timestamp for each append. All their bytes besides keys and values
follow from the sizes, which are few, and from the place in the batch, so that no Python code runs for a single record. `equal_sizes` has
the layout of a record. Other batches are built by the client library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import Final

from aiokafka.record.util import calc_crc32c
from google_crc32c import extend as crc32c_extend
from google_crc32c import value as crc32c

from headrace.engine.kafka.codec import LENGTH_END, MAGIC, TRANSACTIONAL
from headrace.records import RecordBatch
from headrace.storage.batch import CHECKSUMS_IN_C

_FRONT: Final = struct.Struct(">qiibI")
"""Base offset, length of what follows it, epoch of the leader, version of the format, checksum of what follows."""
_HEAD: Final = struct.Struct(">hiqqqhii")
"""Attributes, last offset, first and highest timestamp, producer, its epoch and sequence, number of records."""
_NO_EPOCH: Final = -1
_OFFSET_ENDS: Final = (1 << 6, 1 << 13, 1 << 17)
"""The first offsets that need a longer varint; the last one limits the records of a batch."""
_RECORDS_MIN: Final = 32
"""Below it, the client library is not slower."""
_MORE: Final = 0x80
_NO_KEY: Final = b"\x01"
_NO_HEADERS: Final = b"\x00"
_NO_ATTRIBUTES: Final = b"\x00"


class EncodedBatch:
    """A record batch whose records are encoded. Has the methods that the client library calls on its own batch builder."""

    __slots__ = ("_attributes", "_content", "_count", "_producer", "_records", "_timestamps")

    def __init__(self, records: bytes, count: int, timestamps: tuple[int, int], *, is_transactional: bool) -> None:
        """`timestamps` are that of the first record, to which all others are relative, and the highest."""
        self._records, self._count, self._timestamps = records, count, timestamps
        self._attributes = TRANSACTIONAL if is_transactional else 0
        self._producer = (-1, -1, 0)
        self._content: bytes | None = None

    def record_count(self) -> int:
        return self._count

    def size(self) -> int:
        return _FRONT.size + _HEAD.size + len(self._records) if self._content is None else len(self._content)

    def close(self) -> None:
        """No record can be added anyway."""

    def closed(self) -> bool:
        return True

    def _set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        self._producer = (producer_id, producer_epoch, base_sequence)

    def _build(self) -> bytes:
        if self._content is None:
            head = _HEAD.pack(self._attributes, self._count - 1, *self._timestamps, *self._producer, self._count)
            crc = crc32c_extend(crc32c(head), self._records) if CHECKSUMS_IN_C else calc_crc32c(head + self._records)
            length = _FRONT.size + _HEAD.size + len(self._records) - LENGTH_END
            self._content = b"".join((_FRONT.pack(0, length, _NO_EPOCH, MAGIC, crc), head, self._records))
            self._records = b""
        return self._content


def encode_plain(appends: Sequence[tuple[RecordBatch, int]], *, is_transactional: bool) -> EncodedBatch | None:
    """Encode the records of batches, each with one timestamp, as one record batch. Returns None if the client library has to do it, because
    some record is not plain or there are few."""
    count = sum(len(batch) for batch, _ in appends)
    if not _RECORDS_MIN <= count <= _OFFSET_ENDS[-1]:
        return None
    if any(batch.headers is not None or batch.expiries is not None or batch.timestamps is not None for batch, _ in appends):
        return None
    chunks: list[bytes] = []
    for batch, timestamp, offsets in _stretches(appends):
        try:
            chunks += _chunks(batch, _NO_ATTRIBUTES + timestamp, offsets)
        except TypeError:  # a key or value is None and has no length; testing each for it takes longer
            return None
    # Each record begins with the last byte of the one before it.
    chunks[0] = chunks[0].removeprefix(_NO_HEADERS)
    chunks.append(_NO_HEADERS)
    timestamps = appends[0][1], max(timestamp for _, timestamp in appends)
    return EncodedBatch(b"".join(chunks), count, timestamps, is_transactional=is_transactional)


def _stretches(appends: Sequence[tuple[RecordBatch, int]]) -> Iterator[tuple[RecordBatch, bytes, Sequence[bytes]]]:
    """Yield records whose varints of timestamps and offsets have equal lengths, with these varints."""
    offset = 0
    for batch, timestamp in appends:
        start = 0
        while start < len(batch):
            count = min(len(batch) - start, next(end for end in _OFFSET_ENDS if end > offset) - offset)
            stretch = batch if count == len(batch) else batch[start : start + count]
            yield stretch, _varint(timestamp - appends[0][1]), _offset_varints(offset + count)[offset : offset + count]
            start += count
            offset += count


def _chunks(batch: RecordBatch, fixed: bytes, offsets: Sequence[bytes]) -> list[bytes]:
    """Return four chunks for each record: what precedes the offset, the offset, the size of the value, the value. With keys six."""
    columns = [_Column(batch.values, _NO_KEY)] if batch.keys is None else [_Column(batch.keys), _Column(batch.values)]
    rest = len(fixed) + len(offsets[0]) + len(_NO_HEADERS)
    lengths = [rest + sum(column.length for column in columns)]
    if any(column.is_mixed for column in columns):
        lengths = [rest] * len(batch)
        for column in columns:
            lengths = list(map(add, lengths, column.lengths()))
    heads = {length: _NO_HEADERS + _varint(length) + fixed for length in set(lengths)}
    # Filling every fourth place takes half as long as chaining tuples.
    step = 2 + 2 * len(columns)
    chunks = [heads[lengths[0]]] * (step * len(batch))
    if len(lengths) > 1:
        chunks[::step] = map(heads.__getitem__, lengths)
    chunks[1::step] = offsets
    for place, column in enumerate(columns, 1):
        chunks[2 * place :: step], chunks[2 * place + 1 :: step] = column.starts(), column.items
    return chunks


class _Column:
    """Keys or values of records. Raises `TypeError` if one is None."""

    __slots__ = ("_sizes", "_starts", "is_mixed", "items")

    def __init__(self, items: Sequence[bytes | None], before: bytes = b"") -> None:
        """`before` comes before the size of each."""
        self.items: Sequence[bytes] = items  # type: ignore[assignment]  # None has no length: the next line raises `TypeError`
        self._sizes = list(map(len, self.items))
        self._starts = {size: before + _varint(size) for size in set(self._sizes)}
        self.is_mixed = len(self._starts) > 1

    @property
    def length(self) -> int:
        """Bytes of the first item with its size."""
        return self._sizes[0] + len(self._starts[self._sizes[0]])

    def lengths(self) -> Iterator[int]:
        found = {size: size + len(start) for size, start in self._starts.items()}
        return map(found.__getitem__, self._sizes)

    def starts(self) -> Iterable[bytes]:
        """Return what comes before each item."""
        return map(self._starts.__getitem__, self._sizes) if self.is_mixed else [*self._starts.values()] * len(self._sizes)


def _varint(number: int) -> bytes:
    left = 2 * number if number >= 0 else -2 * number - 1
    found = bytearray()
    while left >= _MORE:
        found.append(left & (_MORE - 1) | _MORE)
        left >>= 7
    found.append(left)
    return bytes(found)


_varints: list[bytes] = []


def _offset_varints(count: int) -> list[bytes]:
    """Return the varints of the offsets 0, 1, 2 …, at least `count` of them."""
    while len(_varints) < count:
        _varints.append(_varint(len(_varints)))
    return _varints
