"""Our records as Kafka records, and back.

Key, value, headers, timestamp and offset are Kafka's. An attribute that Kafka lacks is a header whose name begins with `headrace-`:

    headrace-expiry   Unix ms in decimal digits; the record expires then
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords

from headrace.engine.listed import ListedBatch
from headrace.errors import CorruptData
from headrace.records import NEVER, Headers, RecordBatch

EXPIRY: Final = "headrace-expiry"
_OVERHEAD_BYTES: Final = 32
"""Bytes of a record besides key, value and headers, at most: lengths, deltas and attributes."""


def kafka_headers(headers: Headers, expiry: int) -> list[tuple[str, bytes]]:
    """Return the headers of a record, with its expiry."""
    return [*headers, (EXPIRY, b"%d" % expiry)] if expiry != NEVER else list(headers)


def sizes_of(batch: RecordBatch) -> int:
    """Return an upper bound of the encoded size of a batch."""
    size = batch.size_bytes + _OVERHEAD_BYTES * len(batch)
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


class Decoded:
    """Content of one partition of a Fetch response: the committed records, and the offset behind everything that was looked at."""

    __slots__ = ("batches", "next_offset")

    def __init__(self, content: bytes, aborted: Sequence[tuple[int, int]] | None, offset: int) -> None:
        """`aborted` lists (producer id, first offset) of aborted transactions. The first batch may begin below `offset`, because Kafka
        returns whole record batches. Raises `CorruptData`."""
        self.batches: list[ListedBatch] = []
        self.next_offset = offset
        coming = sorted(aborted or (), key=lambda transaction: transaction[1], reverse=True)
        skipped: set[int] = set()
        records = MemoryRecords(content)
        while records.has_next():
            batch = records.next_batch()
            if not batch.validate_crc():
                raise CorruptData(f"Kafka record batch at offset {batch.base_offset}: the checksum does not match")
            while coming and coming[-1][1] <= batch.base_offset:
                skipped.add(coming.pop()[0])
            if batch.is_control_batch:
                if _is_abort(batch):
                    skipped.discard(batch.producer_id)
            elif batch.next_offset > offset and not (batch.is_transactional and batch.producer_id in skipped):
                self._add(batch)
            self.next_offset = max(self.next_offset, batch.next_offset)
            if self.batches:
                self.batches[-1].extend_to(self.next_offset)

    def _add(self, batch: Any) -> None:
        found = list(batch)
        if not found:
            return
        offsets = [record.offset for record in found]
        keys = [record.key for record in found]
        theirs = [record.headers for record in found]
        headers, expiries = _own(theirs) if any(theirs) else (None, None)
        self.batches.append(
            ListedBatch.of(
                range(offsets[0], offsets[-1] + 1) if offsets[-1] - offsets[0] == len(offsets) - 1 else offsets,
                RecordBatch(
                    [record.value for record in found],
                    None if keys.count(None) == len(keys) else keys,
                    headers,
                    [record.timestamp for record in found],
                    expiries,
                ),
                next_offset=max(batch.next_offset, offsets[-1] + 1),
            )
        )


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
