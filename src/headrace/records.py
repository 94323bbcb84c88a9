"""The vocabulary of records: columns, never single objects, wherever a run of records will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Headers: TypeAlias = tuple[tuple[str, bytes], ...]
"""Ordered; a name may repeat."""

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


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a run landed."""

    base_offset: int
    count: int
    timestamp: int
    """Unix ms of the first record."""


@dataclass(slots=True)
class Run:
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

    def __getitem__(self, picked: slice) -> Run:
        return Run(
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


@dataclass(frozen=True, slots=True)
class Record:
    """One record on its way out, for the callers that really want one."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    expiry: int = NEVER
