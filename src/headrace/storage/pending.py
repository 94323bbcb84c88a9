"""The appends of one flush, by log.

A flush may append one record to each of thousands of logs. The loops over these logs are here, so that they can be compiled: everything
that they do for a log costs as much as the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from headrace.records import AnyBatch, RecordBatch
from headrace.storage.batch import Built
from headrace.storage.batching import fits_one
from headrace.storage.encoding import build_plain

if TYPE_CHECKING:
    from headrace.storage.partition import Partition


_NO_BATCHES: Final[list[AnyBatch]] = []
"""Batches of logs that get values only. `Pending.add` replaces it."""


class Pending:
    """Record batches that one flush appends to one log."""

    __slots__ = ("base_offset", "batches", "is_large", "partition", "values")

    def __init__(self, partition: Partition, base_offset: int, batches: list[AnyBatch], values: list[bytes] | None = None) -> None:
        self.partition = partition
        self.base_offset = base_offset
        self.batches = batches
        self.is_large = False
        """Whether the batches go to the segment first, and the journal only refers to them."""
        self.values = values
        """Single records without keys, while there is nothing else: `batches` is then empty."""

    def add(self, batch: AnyBatch) -> None:
        if self.values is not None:
            self.batches, self.values = [RecordBatch(self.values), batch], None
        else:
            self.batches.append(batch)


def place_each(
    logs: Sequence[int],
    values: Sequence[bytes],
    keys: Sequence[bytes | None] | None,
    partitions: Mapping[int, Partition],
    pending: dict[int, Pending],
    offsets: list[int],
) -> list[int]:
    """Assign offsets to independent records. Adjacent ones of one log share a batch. Returns the indexes of records whose log does not
    exist; their offset is 0."""
    missing: list[int] = []
    for log, value in zip(logs, values, strict=True):
        ahead = pending.get(log)
        if ahead is None:
            partition = partitions.get(log)
            if partition is None:
                missing.append(len(offsets))
                offsets.append(0)
                continue
            offset = partition.next
            if keys is None:
                pending[log] = Pending(partition, offset, _NO_BATCHES, [value])
            else:
                pending[log] = Pending(partition, offset, [RecordBatch([value], [keys[len(offsets)]])])
        else:
            partition = ahead.partition
            offset = partition.next
            if keys is None and ahead.values is not None:
                ahead.values.append(value)
            else:
                ahead.add(RecordBatch([value], None if keys is None else [keys[len(offsets)]]))
        partition.next = offset + 1
        offsets.append(offset)
    return missing


def build_each(pending: Iterable[Pending], now: int, small: bool, partitions: list[Partition], built: list[Built]) -> list[Pending]:
    """Build the batch of each log that gets only values which fit one, neither compressed nor encrypted. Adds the logs and their batches
    to the two lists, and returns the other logs. `small`: the whole flush fits one batch."""
    others: list[Pending] = []
    for ahead in pending:
        values, partition = ahead.values, ahead.partition
        if values is None or partition.options.compress or partition.options.encrypt:
            others.append(ahead)
            continue
        if len(values) > 1 and not fits_one(values, small=small):
            others.append(ahead)
            continue
        assert ahead.base_offset + len(values) == partition.next, "every record has its assigned offset"
        partitions.append(partition)
        built.append(build_plain(partition.id, ahead.base_offset, values, now))
    return others


def push_each(partitions: Sequence[Partition], built: Sequence[Built]) -> int:
    """Make the batch of each log readable, as `Partition.push` does. Returns their size in bytes."""
    size = 0
    for partition, one in zip(partitions, built, strict=True):
        header_size = one[0].size
        lock = partition.lock
        lock.acquire()
        try:
            if not partition.dropped:
                partition.tail.append(one)
                partition.tail_bytes += header_size
                partition.end = partition.next
                size += header_size
        finally:
            lock.release()
    return size


def count_records(pending: Iterable[Pending]) -> int:
    """Return the number of records that the flush has placed."""
    records = 0
    for ahead in pending:
        records += ahead.partition.next - ahead.base_offset
    return records
