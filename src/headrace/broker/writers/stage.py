"""One stage: the records that one task of an exactly-once writer staged under one handle, in memory and on disk."""

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
    """Staged records on disk, all for one partition. Stored in this order of fields: add new fields at the end, with a default."""

    log: int
    """Number of the stage log that holds them."""
    offset: int
    count: int
    topic: str
    partition: int
    memory_bytes: int
    """Memory that they need when they are read back."""
    is_timed: bool
    """True: they keep their own timestamps. False: they get that of the publication."""
    expires: bool
    """Some records have their own expiry and may have expired before they are published."""


@dataclass(frozen=True, slots=True)
class StageSize:
    """Size of a stage."""

    records: int
    size_bytes: int
    """Bytes of keys and values."""


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
    """State of a stage."""

    OPEN = auto()
    SEALED = auto()
    PUBLISHING = auto()
    GONE = auto()


@dataclass(slots=True)
class Held:
    """A write in memory and its size there."""

    write: Write
    memory_bytes: int

    @classmethod
    def of(cls, write: Write) -> Held:
        return cls(write, weight(batch_of(write)))


@dataclass(slots=True, eq=False)
class Stage:
    """Records in order: first `chunks`, which are on disk, then `held`."""

    handle: str
    writer: Writer
    epoch: str
    order: int
    made_at: int
    generation: int
    """Number of publications of the writer when the stage was created."""
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
    """Set while records are being spilled."""
    by_topic: dict[str, int] = field(default_factory=dict)
    rules: dict[str, Rule | None] = field(default_factory=dict)
    """The rule against which the records of each topic were checked."""

    @property
    def size(self) -> StageSize:
        return StageSize(self.records, self.size_bytes)

    @property
    def weight(self) -> int:
        """Memory that the stage would need without spilling."""
        return self.memory_bytes + self.disk_bytes

    def entry(self, now: int) -> StageEntry:
        age_ms, is_sealed = max(0, now - self.made_at), self.state is not State.OPEN
        return StageEntry(self.handle, self.writer.name, self.records, self.size_bytes, dict(self.by_topic), age_ms, is_sealed)


def batch_of(write: Write) -> AnyBatch:
    """Return the batch of a staged write, which is never built lazily."""
    assert not callable(write.batch), "a staged write holds its batch"
    return write.batch
