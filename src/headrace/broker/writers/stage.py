"""One stage: what one task of an exactly-once writer has staged under one handle, in memory and on disk."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from headrace.broker.publishing.requirements import Rule
from headrace.broker.transactions import weight
from headrace.broker.writers.progress import Writer
from headrace.engine.contract import Write
from headrace.records import AnyBatch


class SpilledBatch(msgspec.Struct, frozen=True, array_like=True):
    """Staged records on disk, all for one partition. Stored in this order of fields: new ones go to the end and have a default."""

    log: int
    """The number of the stage log that holds them."""
    offset: int
    count: int
    topic: str
    partition: int
    memory_bytes: int
    """What they take when they are read back."""
    is_timed: bool
    """They have timestamps of their own; others get that of their publication."""
    expires: bool
    """Some have an expiry of their own, and may be gone by the time they are published."""


@dataclass(frozen=True, slots=True)
class StageSize:
    """What a stage holds."""

    records: int
    size_bytes: int
    """Keys and values."""


@dataclass(frozen=True, slots=True)
class StageEntry:
    """A stage as it is listed."""

    handle: str
    writer: str
    records: int
    size_bytes: int
    by_topic: dict[str, int]
    """Records by topic."""
    age_ms: int
    is_sealed: bool


class State(Enum):
    """Of a stage."""

    OPEN = auto()
    SEALED = auto()
    PUBLISHING = auto()
    GONE = auto()


@dataclass(slots=True)
class Held:
    """A write in memory, and what it takes there."""

    write: Write
    memory_bytes: int

    @classmethod
    def of(cls, write: Write) -> Held:
        return cls(write, weight(batch_of(write)))


@dataclass(slots=True, eq=False)
class Stage:
    """Its records in order: first those of `chunks`, which are on disk, then those of `held`."""

    handle: str
    writer: Writer
    epoch: str
    order: int
    made_at: int
    generation: int
    """How many publications its writer had made before."""
    state: State = State.OPEN
    records: int = 0
    size_bytes: int = 0
    chunks: list[SpilledBatch] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    memory_bytes: int = 0
    disk_bytes: int = 0
    arriving: int = 0
    """Calls that wait for room."""
    spilling: asyncio.Future[None] | None = None
    """Some of it is on its way to the disk."""
    by_topic: dict[str, int] = field(default_factory=dict)
    rules: dict[str, Rule | None] = field(default_factory=dict)
    """What the records of each topic were checked against."""

    @property
    def size(self) -> StageSize:
        return StageSize(self.records, self.size_bytes)

    @property
    def weight(self) -> int:
        """What it would take if all of it were in memory."""
        return self.memory_bytes + self.disk_bytes

    def entry(self, now: int) -> StageEntry:
        age_ms, is_sealed = max(0, now - self.made_at), self.state is not State.OPEN
        return StageEntry(self.handle, self.writer.name, self.records, self.size_bytes, dict(self.by_topic), age_ms, is_sealed)


def batch_of(write: Write) -> AnyBatch:
    """Nothing staged is left to be built later."""
    assert not callable(write.batch), "what is staged is there"
    return write.batch
