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
from headrace.storage.encoding import SingleBuilder, build_plain

if TYPE_CHECKING:
    from headrace.storage.partition import Partition


_NO_BATCHES: Final[list[AnyBatch]] = []
"""Batches of logs that get values only. `Pending.add` replaces it."""


class Pending:
    """Record batches that one flush appends to one log."""

    __slots__ = ("base_offset", "batches", "is_large", "partition", "value", "values")

    def __init__(self, partition: Partition, base_offset: int, batches: list[AnyBatch], value: bytes | None = None) -> None:
        self.partition = partition
        self.base_offset = base_offset
        self.batches = batches
        self.is_large = False
        """Whether the batches go to the segment first, and the journal only refers to them."""
        self.value = value
        """A single record without key, while there is nothing else."""
        self.values: list[bytes] | None = None
        """Several of them, while there is nothing else. `batches` is empty if there are single records."""

    def add_value(self, value: bytes) -> None:
        """Add a record without key."""
        if self.value is not None:
            self.values, self.value = [self.value, value], None
        elif self.values is not None:
            self.values.append(value)
        else:
            self.batches.append(RecordBatch([value]))

    def add(self, batch: AnyBatch) -> None:
        values = self.values if self.value is None else [self.value]
        if values is not None:
            self.batches, self.values, self.value = [RecordBatch(values), batch], None, None
        else:
            self.batches.append(batch)


def single_value(batch: AnyBatch, bytes_max: int) -> bytes | None:
    """Return the value of a batch that holds one value of up to `bytes_max` bytes and nothing else."""
    if isinstance(batch, RecordBatch) and len(batch.values) == 1 and batch.keys is None and batch.headers is None:
        value = batch.values[0]
        if value is not None and len(value) <= bytes_max and batch.timestamps is None and batch.expiries is None:
            return value
    return None


def pending_value(pending: dict[int, Pending], log: int, partition: Partition, value: bytes) -> None:
    """Add a record without key, whose offset is the partition's next one."""
    ahead = pending.get(log)
    if ahead is None:
        pending[log] = Pending(partition, partition.next, _NO_BATCHES, value)
    else:
        ahead.add_value(value)


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
                pending[log] = Pending(partition, offset, _NO_BATCHES, value)
            else:
                pending[log] = Pending(partition, offset, [RecordBatch([value], [keys[len(offsets)]])])
        else:
            partition = ahead.partition
            offset = partition.next
            if keys is None:
                ahead.add_value(value)
            else:
                ahead.add(RecordBatch([value], [keys[len(offsets)]]))
        partition.next = offset + 1
        offsets.append(offset)
    return missing


def build_each(pending: Iterable[Pending], now: int, small: bool, partitions: list[Partition], built: list[Built]) -> list[Pending]:
    """Build the batch of each log that gets only values which fit one, neither compressed nor encrypted. Adds the logs and their batches
    to the two lists, and returns the other logs. `small`: the whole flush fits one batch."""
    others: list[Pending] = []
    single = SingleBuilder(now)
    for ahead in pending:
        value, values, partition = ahead.value, ahead.values, ahead.partition
        options = partition.options
        if (value is None and values is None) or options.compress or options.encrypt:
            others.append(ahead)
            continue
        if value is not None:
            assert ahead.base_offset + 1 == partition.next, "the record has its assigned offset"
            built.append(single.build(partition.id, ahead.base_offset, value))
        else:
            assert values is not None
            if not fits_one(values, small=small):
                others.append(ahead)
                continue
            assert ahead.base_offset + len(values) == partition.next, "every record has its assigned offset"
            built.append(build_plain(partition.id, ahead.base_offset, values, now))
        partitions.append(partition)
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
                if partition.singles:
                    partition.settle()
                partition.batches.append(one)
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
