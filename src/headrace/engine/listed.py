"""Batches made of lists: an implementation of `records.Batch` for engines that do not store our batch format.

The lists are those of the records, or sequences whose slices are lists; columns for Arrow are made when they are asked for. All windows of
a batch share its lists.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

from headrace.columns import Column, Headers
from headrace.records import NEVER, ColumnBatch, Record, RecordBatch

Timestamps: TypeAlias = Sequence[int] | Callable[[], Sequence[int]]
"""A callable is called when the timestamps are first read."""


class _Lists:
    """The records of a whole batch."""

    __slots__ = ("_ends", "_key_column", "_timestamps", "_value_column", "expiries", "headers", "keys", "next_offset", "offsets", "values")

    def __init__(
        self, offsets: Sequence[int], records: RecordBatch, timestamps: Timestamps, next_offset: int, ends: Sequence[int] | None
    ) -> None:
        self.offsets, self.values, self.keys, self.headers = offsets, records.values, records.keys, records.headers
        self.expiries, self.next_offset = records.expiries, next_offset
        self._timestamps = timestamps
        self._ends = ends
        self._value_column: Column | None = None
        self._key_column: Column | None = None

    @property
    def timestamps(self) -> Sequence[int]:
        if callable(self._timestamps):
            self._timestamps = self._timestamps()
        return self._timestamps

    @property
    def ends(self) -> Sequence[int]:
        """Bytes of keys and values before each record, and those of the whole batch."""
        if self._ends is None:
            sizes: Iterator[int] = map(len, (value or b"" for value in self.values) if None in self.values else self.values)  # type: ignore[arg-type]
            if self.keys is not None:
                sizes = (size + (len(key) if key else 0) for size, key in zip(sizes, self.keys, strict=True))
            self._ends = list(accumulate(sizes, initial=0))
        return self._ends

    @property
    def value_column(self) -> Column:
        if self._value_column is None:
            self._value_column = Column.of(self.values[:])
        return self._value_column

    @property
    def key_column(self) -> Column | None:
        if self._key_column is None and self.keys is not None:
            self._key_column = Column.of(self.keys[:])
        return self._key_column


class ListedBatch:
    """A window on records in lists. Implements `headrace.records.Batch`."""

    __slots__ = ("_lists", "start", "stop")

    def __init__(self, lists: _Lists, start: int, stop: int) -> None:
        self._lists, self.start, self.stop = lists, start, stop

    @classmethod
    def of(
        cls,
        offsets: Sequence[int],
        records: RecordBatch,
        *,
        next_offset: int,
        timestamps: Callable[[], Sequence[int]] | None = None,
        ends: Sequence[int] | None = None,
    ) -> ListedBatch:
        """Return a batch of at least one record, with timestamps of its own or of the callable. `next_offset` may lie behind offsets that
        hold no record. `ends` are the bytes of keys and values before each record and of the whole batch, if they are known."""
        assert len(records) and next_offset > offsets[-1]
        times: Timestamps | None = timestamps or records.timestamps
        assert times is not None
        return cls(_Lists(offsets, records, times, next_offset, ends), 0, len(records))

    def extend_to(self, next_offset: int) -> None:
        """Record that no record follows the whole batch below `next_offset`."""
        self._lists.next_offset = max(self._lists.next_offset, next_offset)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def base_offset(self) -> int:
        return self._lists.offsets[0]

    @property
    def first_offset(self) -> int:
        return self._lists.offsets[self.start] if self.start < len(self._lists.offsets) else self._lists.next_offset

    @property
    def next_offset(self) -> int:
        return self._lists.next_offset if self.stop == len(self._lists.offsets) else self._lists.offsets[self.stop]

    @property
    def min_timestamp(self) -> int:
        return min(self._lists.timestamps)

    @property
    def expires(self) -> bool:
        return self._lists.expiries is not None

    @property
    def has_headers(self) -> bool:
        return self._lists.headers is not None

    @property
    def size_bytes(self) -> int:
        ends = self._lists.ends
        return ends[self.stop] - ends[self.start]

    @property
    def size_estimate_bytes(self) -> int:
        return self.size_bytes

    def window(self, start: int, stop: int) -> ListedBatch:
        assert 0 <= start <= stop <= len(self)
        return ListedBatch(self._lists, self.start + start, self.start + stop)

    def from_offset(self, offset: int) -> ListedBatch:
        """Return this window without the records below `offset`; may be empty."""
        return ListedBatch(self._lists, bisect_left(self._lists.offsets, offset, self.start, self.stop), self.stop)

    def fitting(self, bytes_max: int) -> int:
        ends = self._lists.ends
        return bisect_right(ends, ends[self.start] + bytes_max, self.start, self.stop + 1) - 1 - self.start

    def offsets(self) -> Sequence[int]:
        return self._lists.offsets[self.start : self.stop]

    def values(self) -> list[bytes | None]:
        found = self._lists.values[self.start : self.stop]
        return found if isinstance(found, list) else list(found)

    def keys(self) -> list[bytes | None] | None:
        return None if self._lists.keys is None else list(self._lists.keys[self.start : self.stop])

    def headers(self) -> list[Headers] | None:
        return None if self._lists.headers is None else list(self._lists.headers[self.start : self.stop])

    def timestamps(self) -> Sequence[int]:
        return self._lists.timestamps[self.start : self.stop]

    def expiries(self) -> list[int] | None:
        return None if self._lists.expiries is None else list(self._lists.expiries[self.start : self.stop])

    def value_sizes(self) -> list[int]:
        return [len(value) if value else 0 for value in self._lists.values[self.start : self.stop]]

    @property
    def value_size(self) -> int | None:
        return None

    def records(self) -> Iterator[Record]:
        count = len(self)
        yield from map(
            Record,
            self.offsets(),
            self.timestamps(),
            self.keys() or [None] * count,
            self.values(),
            self.headers() or [()] * count,
            self.expiries() or [NEVER] * count,
        )

    def record_batch(self) -> RecordBatch:
        return RecordBatch(self.values(), self.keys(), self.headers(), self.timestamps(), self.expiries())

    def column_batch(self, *, with_times: bool = True) -> ColumnBatch:
        batch = self.record_batch()
        return ColumnBatch.of(batch if with_times else replace(batch, timestamps=None))

    def value_buffers(self) -> tuple[memoryview, memoryview, memoryview | None]:
        return _buffers(self._lists.value_column)

    def key_buffers(self) -> tuple[memoryview, memoryview, memoryview | None] | None:
        column = self._lists.key_column
        return None if column is None else _buffers(column)

    def timestamp_buffer(self) -> memoryview | None:
        return memoryview(array("q", self._lists.timestamps))

    def expiry_buffer(self) -> memoryview | None:
        return None if self._lists.expiries is None else memoryview(array("q", self._lists.expiries))

    def delta_buffer(self) -> memoryview | None:
        offsets = self._lists.offsets
        if offsets[-1] - offsets[0] == len(offsets) - 1:
            return None
        return memoryview(array("I", [offset - offsets[0] for offset in offsets]))


def _buffers(column: Column) -> tuple[memoryview, memoryview, memoryview | None]:
    return memoryview(column.offsets), memoryview(column.data), None if column.validity is None else memoryview(column.validity)


def fitted(batches: Sequence[ListedBatch], offset: int, bytes_max: int, records_max: int) -> list[ListedBatch]:
    """Return the records from `offset` on within both limits, at least one if there is any."""
    found: list[ListedBatch] = []
    for batch in batches:
        rest = batch.from_offset(offset)
        if not len(rest):
            continue
        count = min(rest.fitting(max(bytes_max, 0)), records_max)
        if not found:
            count = max(count, 1)
        if count:
            found.append(rest.window(0, count))
        if count < len(rest):
            break
        bytes_max -= rest.size_bytes
        records_max -= count
    return found
