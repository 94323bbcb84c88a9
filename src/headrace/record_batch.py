"""Batches of records in lists, and the position of an appended batch. Every publish creates one of each, so they are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.columns import Headers


@dataclass(slots=True, init=False)
class Appended:
    """Position of an appended batch. Not frozen: a frozen instance takes twice as long to create, and a flush may create thousands."""

    base_offset: int
    count: int
    timestamp: int
    """Unix ms of the first record."""
    offsets: Sequence[int] | None = None
    """The offset of each record if they are not adjacent, else None. An engine with dense offsets never sets it."""

    # Written out, because mypyc does not compile a generated constructor.
    def __init__(self, base_offset: int, count: int, timestamp: int, offsets: Sequence[int] | None = None) -> None:
        self.base_offset, self.count, self.timestamp, self.offsets = base_offset, count, timestamp, offsets

    @property
    def last_offset(self) -> int:
        """Offset of the last record."""
        return self.base_offset + self.count - 1 if self.offsets is None else self.offsets[-1]

    def offset(self, index: int) -> int:
        """Return the offset of the record with this index in the batch."""
        return self.base_offset + index if self.offsets is None else self.offsets[index]


@dataclass(slots=True, init=False)
class RecordBatch:
    """Records to append to one partition, column by column. All lists have the length of `values`.

    A value of None is a tombstone: it deletes its key when the topic is compacted.
    `keys`, `headers` and `expiries` are None when no record of the batch has one.
    `timestamps` (Unix ms) is None when the engine is to stamp the batch with the broker's clock.
    """

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Headers] | None = None
    timestamps: Sequence[int] | None = None
    expiries: Sequence[int] | None = None

    # As in `Appended`.
    def __init__(
        self,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Headers] | None = None,
        timestamps: Sequence[int] | None = None,
        expiries: Sequence[int] | None = None,
    ) -> None:
        self.values, self.keys, self.headers = values, keys, headers
        self.timestamps, self.expiries = timestamps, expiries

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
        """Size of keys and values, the unit of limits and windows."""
        return sum(map(len, filter(None, self.values))) + (0 if self.keys is None else sum(map(len, filter(None, self.keys))))
