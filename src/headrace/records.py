"""Record types. Records travel in batches, column by column; `Record` is the only per-record object."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias

from headrace.columns import Buffer, Column, Headers, checked_headers, encode_headers, headers_bytes, is_ascending, is_non_negative
from headrace.errors import BrokerError, InvalidRequest, LimitExceeded, RecordTooLarge
from headrace.limits import BATCH_BYTES_TARGET, BATCH_RECORDS_MAX, HEADERS_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX
from headrace.record_batch import Appended, RecordBatch

__all__ = [
    "NEVER",
    "Ack",
    "AnyBatch",
    "Appended",
    "AppendedEach",
    "Batch",
    "Bounds",
    "Column",
    "ColumnBatch",
    "Headers",
    "Record",
    "RecordBatch",
    "check_headers",
]

NEVER = 0
"""An expiry of `NEVER` means that the record does not expire."""


class Ack(StrEnum):
    """Guarantee that an acknowledgement gives."""

    DURABLE = "durable"
    """The records survive what the engine promises: with the embedded engine a power failure (`fdatasync` has returned), with Kafka the
    loss of a replica (all in-sync replicas have them)."""
    WRITTEN = "written"
    """The records survive a crash of the process, not of the machine that has them."""
    NONE = "none"
    """Ordered only. The records may be lost at any time."""

    __hash__ = str.__hash__
    """That of `Enum` is a function in Python, and each flush looks its appends up by level."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Offsets that a partition holds: `first` is the oldest one, `end` the next one to be assigned. Offsets below `end` are readable."""

    first: int
    end: int


@dataclass(slots=True)
class AppendedEach:
    """Positions of independent records, each appended to a partition of its own choice."""

    offsets: list[int]
    timestamp: int
    failed: dict[int, BrokerError] = field(default_factory=dict)
    """Records that were not appended, by index. Their offset is meaningless."""


class ColumnBatch:
    """Records to append to one partition, in the column layout of a stored batch. Each becomes exactly one stored batch.

    The Flight endpoint receives whole columns and creates these. No code between it and the disk handles a single record.
    The constructor checks the buffers, so that the log can join them unchecked. An instance is immutable.
    It has at most `limits.BATCH_RECORDS_MAX` records and, unless it has only one, at most `limits.BATCH_BYTES_TARGET` bytes of keys, values
    and headers.
    """

    __slots__ = ("expiries", "headers", "keys", "newest", "oldest", "size_bytes", "timestamps", "values")

    def __init__(
        self,
        values: Column,
        keys: Column | None = None,
        headers: Column | None = None,
        timestamps: Buffer | None = None,
        expiries: Buffer | None = None,
    ) -> None:
        """`timestamps` and `expiries` are int64 × count, as in `RecordBatch`. Each item of `headers` is a blob of `columns.encode_headers`.

        Raises `InvalidRequest`, `RecordTooLarge`, `LimitExceeded`.
        """
        count = len(values)
        for column in (keys, headers):
            if column is not None and len(column) != count:
                raise InvalidRequest(f"column length: expected {count} entries, got {len(column)}")
        self.values = values
        self.keys = keys
        self.headers = headers
        self.size_bytes = len(values.content) + (0 if keys is None else len(keys.content))
        """Size of keys and values, the unit of limits and windows."""
        self._check_sizes(count)
        self.timestamps = None if timestamps is None else _times(timestamps, count)
        self.expiries = None if expiries is None else _times(expiries, count)
        self.oldest, self.newest = (0, 0) if self.timestamps is None else _extremes(self.timestamps)
        """Lowest and highest timestamp; 0 if the batch has no timestamps."""

    def _check_sizes(self, count: int) -> None:
        if count > BATCH_RECORDS_MAX:
            raise LimitExceeded(f"batch of {count} records exceeds the limit of {BATCH_RECORDS_MAX} records")
        # An item is never larger than its column, so only large columns need a check of each item.
        for column, bytes_max in ((self.values, VALUE_BYTES_MAX), (self.keys, KEY_BYTES_MAX)):
            if column is not None and len(column.content) > bytes_max and (largest := column.largest) > bytes_max:
                raise RecordTooLarge(size_bytes=largest, bytes_max=bytes_max)
        size = self.size_bytes
        if self.headers is not None:
            if self.headers.validity is not None:
                raise InvalidRequest("the headers column has nulls: expected an empty entry for a record without headers")
            for blob in set(self.headers.items()):
                if blob:
                    check_headers(checked_headers(blob))
            size += len(self.headers.content)
        if size > BATCH_BYTES_TARGET and count > 1:
            raise LimitExceeded(f"batch of {count} records and {size} bytes exceeds the limit of {BATCH_BYTES_TARGET} bytes")

    @classmethod
    def of(cls, batch: RecordBatch) -> ColumnBatch:
        """Convert a record batch to columns."""
        return cls(
            Column.of(batch.values),
            None if batch.keys is None else Column.of(batch.keys),
            None if batch.headers is None else Column.of([encode_headers(pairs) if pairs else b"" for pairs in batch.headers]),
            None if batch.timestamps is None else array("q", batch.timestamps).tobytes(),
            None if batch.expiries is None else array("q", batch.expiries).tobytes(),
        )

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, picked: slice) -> RecordBatch:
        return self.record_batch()[picked]

    def record_batch(self) -> RecordBatch:
        """Convert to lists with one entry per record."""
        return RecordBatch(
            self.values.items(),
            None if self.keys is None else self.keys.items(),
            None if self.headers is None else [checked_headers(blob) if blob else () for blob in self.headers.items()],
            None if self.timestamps is None else self.timestamps.tolist(),
            None if self.expiries is None else self.expiries.tolist(),
        )

    def expiring(self, at: int) -> ColumnBatch:
        """Return a copy in which each record without an expiry expires at `at`."""
        times = array("q", [at]) * len(self) if self.expiries is None else array("q", [own or at for own in self.expiries])
        made = ColumnBatch.__new__(ColumnBatch)
        made.values, made.keys, made.headers, made.size_bytes = self.values, self.keys, self.headers, self.size_bytes
        made.timestamps, made.oldest, made.newest = self.timestamps, self.oldest, self.newest
        made.expiries = _times(times.tobytes(), len(self))
        return made


AnyBatch: TypeAlias = RecordBatch | ColumnBatch
"""Either layout."""


def _times(times: Buffer, count: int) -> memoryview:
    taken = bytes(times)
    if len(taken) != 8 * count:
        raise InvalidRequest(f"timestamps or expiries: expected {count} × 8 bytes, got {len(taken)}")
    if not is_non_negative(taken):
        raise InvalidRequest("a timestamp or expiry is before 1970 or above 2^63 - 1 (Unix ms)")
    return memoryview(taken).cast("q")


def _extremes(times: memoryview) -> tuple[int, int]:
    """Return the lowest and the highest. Most timestamps arrive in ascending order, and testing for that is cheaper than min and max."""
    if is_ascending(times.tobytes(), 8):
        return times[0], times[-1]
    each = times.tolist()
    return min(each), max(each)


def check_headers(pairs: Headers) -> None:
    """Raise `LimitExceeded` for too many or too large headers."""
    if len(pairs) > HEADERS_MAX:
        raise LimitExceeded(f"a record of {len(pairs)} headers exceeds the limit of {HEADERS_MAX} headers")
    size = headers_bytes(pairs)
    if size > HEADERS_BYTES_MAX:
        raise LimitExceeded(f"headers of {size} bytes exceed the limit of {HEADERS_BYTES_MAX} bytes")


@dataclass(frozen=True, slots=True)
class Record:
    """One record, for callers that need single records."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    expiry: int = NEVER


class Batch(Protocol):
    """Records that an engine returns: a window on consecutive records of one partition. Any engine may implement it.

    Methods without "whole" return only the records of the window. Buffers cover the whole batch, of which the window is
    [start, stop); they have the layout of `headrace.columns`, so that Arrow can wrap them without a copy.
    """

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def __len__(self) -> int: ...

    @property
    def base_offset(self) -> int:
        """First offset of the whole batch."""

    @property
    def first_offset(self) -> int: ...

    @property
    def next_offset(self) -> int:
        """Offset after the window, including offsets that compaction removed at the end of the batch."""

    @property
    def min_timestamp(self) -> int:
        """Lowest timestamp of the whole batch."""

    @property
    def expires(self) -> bool:
        """Whether any record of the whole batch has an expiry. Cheap."""

    @property
    def has_headers(self) -> bool:
        """Whether any record of the whole batch may have headers. Cheap."""

    @property
    def size_bytes(self) -> int:
        """Size of keys and values."""

    @property
    def size_estimate_bytes(self) -> int:
        """Approximate size, at least that of keys and values. Cheap if the window is the whole batch."""

    def window(self, start: int, stop: int) -> Batch:
        """Return the records `start` to `stop` of this window."""

    def fitting(self, bytes_max: int) -> int:
        """Return how many records from the front have keys and values of at most `bytes_max` bytes together."""

    def offsets(self) -> Sequence[int]: ...

    def values(self) -> list[bytes | None]: ...

    def keys(self) -> list[bytes | None] | None:
        """Return the keys; None when no record of the whole batch has one."""

    def headers(self) -> list[Headers] | None:
        """Return the headers; None when no record of the whole batch has any."""

    def timestamps(self) -> Sequence[int]: ...

    def expiries(self) -> list[int] | None:
        """Return the expiries; None when no record of the whole batch expires."""

    def value_sizes(self) -> list[int]:
        """Return the size of each value without decoding any."""

    @property
    def value_size(self) -> int | None:
        """Size of each value, if it is known that all have the same and none is missing. Cheap."""

    def records(self) -> Iterator[Record]:
        """Iterate over single records. Slow: for tools and tests."""

    def record_batch(self) -> RecordBatch:
        """Return a batch to append elsewhere, with its timestamps."""

    def column_batch(self, *, with_times: bool = True) -> ColumnBatch:
        """Return the same as columns, with or without timestamps. Single records are not decoded if the window is the whole batch."""

    def value_buffers(self) -> tuple[memoryview, memoryview, memoryview | None]:
        """Return (offsets u32 × (count + 1), data, validity bits or None) of the whole batch."""

    def key_buffers(self) -> tuple[memoryview, memoryview, memoryview | None] | None:
        """Return the same as `value_buffers` for keys; None when no record has a key."""

    def timestamp_buffer(self) -> memoryview | None:
        """Return i64 × count of the whole batch; None when every record has `min_timestamp`."""

    def expiry_buffer(self) -> memoryview | None:
        """Return i64 × count of the whole batch, `NEVER` for a record that does not expire; None when none expires."""

    def delta_buffer(self) -> memoryview | None:
        """Return u32 × count of the whole batch: offsets relative to `base_offset`; None when they are dense."""
