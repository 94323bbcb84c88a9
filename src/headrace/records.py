"""The vocabulary of records: columns, never single objects, wherever a run of records will do."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from headrace.columns import Buffer, Column, Headers, checked_headers, encode_headers, headers_bytes, is_natural, never_falls
from headrace.errors import InvalidRequest, LimitExceeded, RecordTooLarge
from headrace.limits import BATCH_BYTES_TARGET, BATCH_RECORDS_MAX, HEADERS_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX

__all__ = ["NEVER", "Ack", "AnyBatch", "Appended", "Bounds", "Column", "ColumnBatch", "Headers", "Record", "RecordBatch", "check_headers"]

NEVER = 0
"""An expiry of `NEVER` means that the record does not expire."""


class Ack(StrEnum):
    """What an acknowledgement promises, named by the promise."""

    DURABLE = "durable"
    """On disk: fdatasync has returned."""
    WRITTEN = "written"
    """Handed to the operating system: survives the death of the process, not of the machine."""
    NONE = "none"
    """Ordered, nothing more: may be lost any time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets a partition holds: `first` is the oldest kept, `end` the next to be given (readable ones are below it)."""

    first: int
    end: int


@dataclass(slots=True)
class Appended:
    """Where a run landed. Not frozen only because frozen ones take twice as long to make, and a flush may make thousands."""

    base_offset: int
    count: int
    timestamp: int
    """Unix ms of the first record."""


@dataclass(slots=True)
class RecordBatch:
    """Records on their way into one partition, column by column. All lists have the length of `values`.

    A value of None is a tombstone: it deletes its key when the topic is compacted.
    `keys`, `headers` and `expiries` are None when no record of the run has one.
    `timestamps` (Unix ms) is None when the broker's clock is to be used: the engine then stamps the run.
    """

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Headers] | None = None
    timestamps: Sequence[int] | None = None
    expiries: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, picked: slice) -> RecordBatch:
        return RecordBatch(
            self.values[picked],
            None if self.keys is None else self.keys[picked],
            None if self.headers is None else self.headers[picked],
            None if self.timestamps is None else self.timestamps[picked],
            None if self.expiries is None else self.expiries[picked],
        )

    @property
    def size_bytes(self) -> int:
        """Keys and values; what limits and windows are counted in."""
        return sum(map(len, filter(None, self.values))) + (0 if self.keys is None else sum(map(len, filter(None, self.keys))))


class ColumnBatch:
    """Records on their way into one partition that lie already as a batch has them, and become exactly one batch.

    Whoever has whole columns in hand (the Flight endpoint) makes one of these, and nothing from there to the disk looks at a single record.
    It is checked when it is made, so that the log can join its buffers blindly; it cannot be changed afterwards.
    At most `limits.BATCH_RECORDS_MAX` records, and at most `limits.BATCH_BYTES_TARGET` of keys, values and headers, a single record aside.
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
        """`timestamps` and `expiries` are int64 × count, as in a `Run`; each item of `headers` is a blob of `columns.encode_headers`.

        Raises `InvalidRequest`, `RecordTooLarge`, `LimitExceeded`.
        """
        count = len(values)
        for column in (keys, headers):
            if column is not None and len(column) != count:
                raise InvalidRequest(f"a column of {len(column)} entries does not fit a run of {count} records")
        self.values = values
        self.keys = keys
        self.headers = headers
        self.size_bytes = len(values.data) + (0 if keys is None else len(keys.data))
        """Keys and values; what limits and windows are counted in."""
        self._check_sizes(count)
        self.timestamps = None if timestamps is None else _times(timestamps, count)
        self.expiries = None if expiries is None else _times(expiries, count)
        self.oldest, self.newest = (0, 0) if self.timestamps is None else _extremes(self.timestamps)
        """The lowest and the highest timestamp, where there are any."""

    def _check_sizes(self, count: int) -> None:
        if count > BATCH_RECORDS_MAX:
            raise LimitExceeded(f"{count} records are more than the {BATCH_RECORDS_MAX} that one batch may have")
        # No item is larger than its whole column: only large columns are looked at one by one.
        for column, bytes_max in ((self.values, VALUE_BYTES_MAX), (self.keys, KEY_BYTES_MAX)):
            if column is not None and len(column.data) > bytes_max and (largest := column.largest) > bytes_max:
                raise RecordTooLarge(size_bytes=largest, bytes_max=bytes_max)
        size = self.size_bytes
        if self.headers is not None:
            if self.headers.validity is not None:
                raise InvalidRequest("headers are never null: a record without any has an empty entry")
            for blob in set(self.headers.items()):
                if blob:
                    check_headers(checked_headers(blob))
            size += len(self.headers.data)
        if size > BATCH_BYTES_TARGET and count > 1:
            raise LimitExceeded(f"{count} records of {size} bytes are more than the {BATCH_BYTES_TARGET} bytes that one batch may have")

    @classmethod
    def of(cls, batch: RecordBatch) -> ColumnBatch:
        """The same records as columns."""
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
        """The same records one by one, for those who have to look at each."""
        return RecordBatch(
            self.values.items(),
            None if self.keys is None else self.keys.items(),
            None if self.headers is None else [checked_headers(blob) if blob else () for blob in self.headers.items()],
            None if self.timestamps is None else self.timestamps.tolist(),
            None if self.expiries is None else self.expiries.tolist(),
        )

    def expiring(self, at: int) -> ColumnBatch:
        """The same records; those without an expiry of their own have this one."""
        times = array("q", [at]) * len(self) if self.expiries is None else array("q", [own or at for own in self.expiries])
        made = ColumnBatch.__new__(ColumnBatch)
        made.values, made.keys, made.headers, made.size_bytes = self.values, self.keys, self.headers, self.size_bytes
        made.timestamps, made.oldest, made.newest = self.timestamps, self.oldest, self.newest
        made.expiries = _times(times.tobytes(), len(self))
        return made


AnyBatch: TypeAlias = RecordBatch | ColumnBatch
"""However they lie."""


def _times(times: Buffer, count: int) -> memoryview:
    taken = bytes(times)
    if len(taken) != 8 * count:
        raise InvalidRequest(f"{len(taken)} bytes are no times of {count} records")
    if not is_natural(taken):
        raise InvalidRequest("a time is before 1970 or too far ahead")
    return memoryview(taken).cast("q")


def _extremes(times: memoryview) -> tuple[int, int]:
    """The lowest and the highest. Most writers' clocks never go back, and that is cheaper to find out than two looks at each."""
    if never_falls(times.tobytes(), 8):
        return times[0], times[-1]
    each = times.tolist()
    return min(each), max(each)


def check_headers(pairs: Headers) -> None:
    """Raises `LimitExceeded`."""
    if len(pairs) > HEADERS_MAX:
        raise LimitExceeded(f"a record of {len(pairs)} headers exceeds the limit of {HEADERS_MAX}")
    size = headers_bytes(pairs)
    if size > HEADERS_BYTES_MAX:
        raise LimitExceeded(f"headers of {size} bytes exceed the limit of {HEADERS_BYTES_MAX} bytes")


@dataclass(frozen=True, slots=True)
class Record:
    """One record on its way out, for the callers that really want one."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    expiry: int = NEVER
