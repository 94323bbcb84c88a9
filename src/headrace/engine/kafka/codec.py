"""Our records as Kafka records, and back.

Key, value, headers, timestamp and offset are Kafka's. An attribute that Kafka lacks is a header whose name begins with `headrace-`:

    headrace-expiry   Unix ms in decimal digits; the record expires then
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords
from google_crc32c import value as crc32c

from headrace.engine.kafka.equal_sizes import EqualRecords, equal_records
from headrace.engine.listed import ListedBatch
from headrace.errors import CorruptData
from headrace.limits import KIB
from headrace.records import NEVER, Headers, RecordBatch
from headrace.storage.batch import CHECKSUMS_IN_C

EXPIRY: Final = "headrace-expiry"
MAGIC: Final = 2
"""Version of the format of record batches that all Kafka versions since 0.11 write:

    0            8        12       16      17    21           61
    +------------+--------+--------+-------+-----+-----------+---------+
    | base offset| length | epoch  | magic | crc | 40 bytes  | records |     `length` counts what follows it, `crc` covers what follows it
    +------------+--------+--------+-------+-----+-----------+---------+

The 40 bytes are attributes i16, last offset i32, first and highest timestamp i64, producer i64, its epoch i16, its sequence i32 and the
number of records i32.
"""
_HEAD: Final = struct.Struct(">qiibIhiqqqhii")
assert _HEAD.size == 61, "the drawing says 61"
_MAGIC_AT, _LENGTH_START, LENGTH_END, _CHECKED_START = 16, 8, 12, 21
_RECORDS_START: Final = _HEAD.size - _CHECKED_START
"""In the bytes that the checksum covers."""
_COMPRESSION, _LOG_APPEND_TIME, TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20
"""Attributes. With `_LOG_APPEND_TIME` the timestamps are those of the Kafka node, not of the records."""
_TURN_BYTES: Final = 512 * KIB
_OVERHEAD_BYTES: Final = 32
"""Bytes of a record besides key, value and headers, at most: lengths, deltas and attributes."""


def kafka_headers(headers: Headers, expiry: int) -> list[tuple[str, bytes]]:
    """Return the headers of a record, with its expiry."""
    return [*headers, (EXPIRY, b"%d" % expiry)] if expiry != NEVER else list(headers)


def encoded_bytes_max(batch: RecordBatch, size_bytes: int) -> int:
    """Return an upper bound of the encoded size of a batch, with `size_bytes` of keys and values."""
    size = size_bytes + _OVERHEAD_BYTES * len(batch)
    if batch.headers is not None:
        size += sum(len(name) * 3 + len(value) + 10 for pairs in batch.headers for name, value in pairs)
    return size + (0 if batch.expiries is None else 40 * len(batch))


def add_to(append: Callable[..., object], batch: RecordBatch, timestamps: Sequence[int]) -> bool:
    """Add the records to a batch builder by its `append`. Return False if the builder is full."""
    count = len(batch)
    keys: Iterable[bytes | None] = [None] * count if batch.keys is None else batch.keys
    if batch.headers is None and batch.expiries is None:
        return all(
            append(timestamp=time, key=key, value=value) is not None
            for time, key, value in zip(timestamps, keys, batch.values, strict=True)
        )
    headers: Iterable[Headers] = [()] * count if batch.headers is None else batch.headers
    expiries: Iterable[int] = [NEVER] * count if batch.expiries is None else batch.expiries
    return all(
        append(timestamp=time, key=key, value=value, headers=kafka_headers(pairs, expiry)) is not None
        for time, key, value, pairs, expiry in zip(timestamps, keys, batch.values, headers, expiries, strict=True)
    )


class _Encoded:
    """One record batch of a Fetch response, with a copy of its bytes: the response is larger, and need not stay."""

    __slots__ = ("attributes", "base_offset", "checked", "count", "first_timestamp", "front", "next_offset", "producer_id")

    def __init__(self, content: bytes | memoryview) -> None:
        """Raises `CorruptData`."""
        if len(content) <= _MAGIC_AT or (content[_MAGIC_AT] == MAGIC and len(content) < _HEAD.size):
            raise CorruptData(f"Kafka record batch: expected at least {_HEAD.size} bytes, got {len(content)}")
        self.front, self.checked = bytes(content[:_CHECKED_START]), bytes(content[_CHECKED_START:])
        if content[_MAGIC_AT] == MAGIC:
            head = _HEAD.unpack_from(content)
            self.base_offset, crc, self.attributes, last_delta, self.first_timestamp = head[0], *head[4:8]
            self.producer_id, self.count = head[9], head[12]
            self.next_offset = self.base_offset + last_delta + 1
            # The library's checksum takes five times as long.
            is_intact = crc32c(self.checked) == crc if CHECKSUMS_IN_C else MemoryRecords(bytes(content)).next_batch().validate_crc()
        else:
            batch = self.parsed()
            self.base_offset, self.next_offset, self.count, self.attributes = batch.base_offset, batch.next_offset, 0, _COMPRESSION
            self.producer_id, self.first_timestamp = -1, 0
            is_intact = batch.validate_crc()
        if not is_intact:
            raise CorruptData(f"Kafka record batch at offset {self.base_offset}: the checksum does not match")

    @property
    def is_compressed(self) -> bool:
        """Whether the records are not in the batch as they are."""
        return bool(self.attributes & _COMPRESSION)

    @property
    def is_dense(self) -> bool:
        return bool(self.count == self.next_offset - self.base_offset)

    def parsed(self) -> Any:
        """Return the batch of the client library. Its records can be iterated once. `checked` is the whole batch from now on."""
        if self.front:
            self.checked, self.front = self.front + self.checked, b""
        return MemoryRecords(self.checked).next_batch()

    def timestamps(self, equal: EqualRecords | None = None) -> list[int]:
        times = None if equal is None or self.attributes & _LOG_APPEND_TIME else equal.timestamps(self.first_timestamp)
        return [record.timestamp for record in self.parsed()] if times is None else times


class Decoded:
    """Content of one partition of a Fetch response: the committed records, and the offset behind everything that was looked at."""

    __slots__ = ("batches", "next_offset")

    def __init__(self, content: bytes | memoryview, aborted: Sequence[tuple[int, int]] | None, offset: int) -> None:
        """`aborted` lists (producer id, first offset) of aborted transactions. The first batch may begin below `offset`, because Kafka
        returns whole record batches. Raises `CorruptData`."""
        self.batches: list[ListedBatch] = []
        self.next_offset = offset
        for _ in self._decode(content, aborted, offset):
            pass

    @classmethod
    async def in_turns(cls, content: bytes | memoryview, aborted: Sequence[tuple[int, int]] | None, offset: int) -> Decoded:
        """Decode a large content, some of it in each turn of the event loop."""
        found, size_bytes = cls(b"", None, offset), 0
        for step_bytes in found._decode(content, aborted, offset):
            size_bytes += step_bytes
            if size_bytes >= _TURN_BYTES:
                await asyncio.sleep(0)
                size_bytes = 0
        return found

    def _decode(self, content: bytes | memoryview, aborted: Sequence[tuple[int, int]] | None, offset: int) -> Iterator[int]:
        """Decode one record batch at a time. Yields its size."""
        coming = sorted(aborted or (), key=lambda transaction: transaction[1], reverse=True)
        skipped: set[int] = set()
        for start, end in _places(content):
            batch = _Encoded(content[start:end])
            while coming and coming[-1][1] <= batch.base_offset:
                skipped.add(coming.pop()[0])
            if batch.attributes & _CONTROL:
                if _is_abort(batch.parsed()):
                    skipped.discard(batch.producer_id)
            elif batch.next_offset > offset and not (batch.attributes & TRANSACTIONAL and batch.producer_id in skipped):
                self._add(batch)
            self.next_offset = max(self.next_offset, batch.next_offset)
            if self.batches:
                self.batches[-1].extend_to(self.next_offset)
            yield end - start

    def _add(self, batch: _Encoded) -> None:
        if batch.is_dense and not batch.is_compressed and (found := equal_records(batch.checked, _RECORDS_START, batch.count)) is not None:
            self._add_equal(batch, found)
        else:
            self._add_parsed(batch)

    def _add_equal(self, batch: _Encoded, found: EqualRecords) -> None:
        size = found.record_bytes
        self.batches.append(
            ListedBatch.of(
                range(batch.base_offset, batch.next_offset),
                RecordBatch(found.values, found.keys),
                next_offset=batch.next_offset,
                timestamps=partial(batch.timestamps, found),
                ends=range(0, size * batch.count + 1, size),
            )
        )

    def _add_parsed(self, batch: _Encoded) -> None:
        # No object is kept for a record where neither keys nor headers are in use, which the first record suggests.
        values = _plain_values(batch)
        keys: list[bytes | None] | None = None
        headers: list[Headers] | None = None
        expiries: list[int] | None = None
        if values is None:
            found = list(batch.parsed())
            values = [record.value for record in found]
            keys = [record.key for record in found]
            keys = None if keys.count(None) == len(keys) else keys
            theirs = [record.headers for record in found]
            headers, expiries = _own(theirs) if any(theirs) else (None, None)
        if not values:
            return
        is_dense = batch.next_offset - batch.base_offset == len(values)
        offsets = range(batch.base_offset, batch.next_offset) if is_dense else [record.offset for record in batch.parsed()]
        next_offset = max(batch.next_offset, offsets[-1] + 1)
        self.batches.append(
            ListedBatch.of(
                offsets, RecordBatch(values, keys, headers, None, expiries), next_offset=next_offset, timestamps=batch.timestamps
            )
        )


def _plain_values(batch: _Encoded) -> list[bytes | None] | None:
    """Return the values of a record batch if it has all its records, and none has a key or headers; else None."""
    if not batch.is_dense or batch.is_compressed:
        return None
    for first in batch.parsed():
        if first.key is not None or first.headers:
            return None
        break
    values = [record.value for record in batch.parsed() if record.key is None and not record.headers]
    return values if len(values) == batch.count else None


def _places(content: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield start and end of the record batches of a Fetch response. The last one may be cut, and is left out then."""
    start = 0
    while start + LENGTH_END <= len(content):
        end = start + LENGTH_END + int.from_bytes(content[start + _LENGTH_START : start + LENGTH_END], "big")
        if end > len(content):
            return
        yield start, end
        start = end


def _is_abort(batch: Any) -> bool:
    return bool(ControlRecord.parse(next(iter(batch)).key) == ABORT_MARKER)


def _own(found: Sequence[Sequence[tuple[str, bytes | None]]]) -> tuple[list[Headers] | None, list[int] | None]:
    """Divide the headers of records into those of users and the expiries."""
    headers: list[Headers] = []
    expiries: list[int] = []
    for pairs in found:
        expiry, others = NEVER, []
        for name, value in pairs:
            if name == EXPIRY and value is not None and value.isdigit() and len(value) < 19:
                expiry = int(value)
            else:
                others.append((name, value or b""))
        headers.append(tuple(others))
        expiries.append(expiry)
    return headers if any(headers) else None, expiries if any(expiries) else None
