"""Engine contract: the interface of a partitioned log in thirteen methods.

The broker uses this interface and no module below it. One behaviour suite (`tests/engine/`) runs over every engine.

All methods are called on the event loop. `append` is the only way to write, and it is atomic: the writes of one call become visible
together or not at all, on any number of partitions. Idempotent producers, transactions and committed offsets use it, because their tables
are topics too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from headrace.records import Ack, AnyBatch, Appended, Batch, Bounds
from headrace.storage.health import Health, HealthReport, HealthState, Problem

__all__ = [
    "Ack",
    "Appended",
    "Batch",
    "Bounds",
    "Cleanup",
    "Engine",
    "Health",
    "HealthReport",
    "HealthState",
    "Problem",
    "Topic",
    "TopicConfig",
    "Write",
]


class Cleanup(StrEnum):
    """Policy for old records."""

    DELETE = "delete"
    """Segments past retention are deleted."""
    COMPACT = "compact"
    """The newest record of each key is kept; tombstones are removed after `tombstone_retention_ms`."""


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """Settings of a topic. Zero means no limit."""

    ack: Ack = Ack.DURABLE
    cleanup: Cleanup = Cleanup.DELETE
    retention_ms: int = 0
    retention_bytes: int = 0
    """Per partition."""
    segment_bytes: int = 128 * 1024 * 1024
    tombstone_retention_ms: int = 24 * 3600 * 1000
    ttl_ms: int = 0
    """Lifetime of a record without its own expiry. A segment is deleted when all its records have expired."""
    dead_letter_expired: bool = False
    """Whether expired records become dead letters. Their segments are kept for another hour, so that there is time to move them."""
    compress: bool = False
    encrypt: bool | None = None
    """None: encrypt if the data directory has a key."""


@dataclass(frozen=True, slots=True)
class Topic:
    """Immutable description of a topic. A change creates a new object."""

    name: str
    partitions: int
    config: TopicConfig = field(default_factory=TopicConfig)
    internal: bool = False


@dataclass(slots=True)
class Write:
    """One batch for one partition. A callable gets the `Appended` of each earlier write of the same call and returns the batch."""

    topic: str
    partition: int
    batch: AnyBatch | Callable[[Sequence[Appended]], AnyBatch]
    size_bytes: int = field(default=0, compare=False)
    """Size of keys and values, which `append` computes and sets; 0 for a callable."""

    @property
    def records(self) -> int:
        """Number of records; 0 for a callable."""
        return 0 if callable(self.batch) else len(self.batch)


class Engine(Protocol):
    """Partitioned log, and the health of its background work."""

    health: Health
    """Outcomes of background threads and tasks, including those of the broker."""

    async def open(self) -> None:
        """Recover and start. Raises `StorageFailed`, `CorruptData` or `DirectoryLocked`."""

    async def close(self) -> None:
        """Flush, take a checkpoint and stop. Idempotent."""

    async def create_topic(self, name: str, partitions: int, config: TopicConfig, *, internal: bool = False) -> Topic:
        """Create a topic. Durable when it returns. Raises `TopicExists`, `LimitExceeded`."""

    async def alter_topic(self, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        """Add partitions (never remove), or replace the configuration. Durable when it returns."""

    async def delete_topic(self, name: str) -> None:
        """Delete a topic. Its name is free and its records are unreadable when this returns; its space is freed soon after."""

    def topics(self) -> Mapping[str, Topic]:
        """Return a live read-only view."""

    def append(self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False) -> asyncio.Future[list[Appended]]:
        """Stage in call order; resolve when the guarantee of `ack` holds (None: the strongest `ack` of the topics).

        An urgent append is written before those that wait, if the engine supports that. It is for appends that are due at a certain time
        and need no order relative to others.

        Raises at once: `UnknownTopic`, `UnknownPartition`, `RecordTooLarge`, `LimitExceeded`.
        Through the future: `DiskFull` and `Unavailable` (retriable, nothing was written), `StorageFailed` (the outcome is unknown: the
        records may be present when the log is opened again).
        """

    async def read(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch]:
        """Read records from `offset` on, at least one if there is any below `end`. Stops before `end` only at a limit or damage, or when it
        has `READ_BATCHES_MAX` batches or more.

        The first batch starts at `offset` or, after a gap from compaction or damage, at the next existing offset.
        At `end` the list is empty. Raises `OffsetOutOfRange` below `first` and above `end`.
        """

    def bounds(self, topic: str, partition: int) -> Bounds: ...

    def size_bytes(self, topic: str, partition: int) -> int:
        """Return the approximate stored size of a partition, which readers use for planning."""

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        """Return the first offset whose record is at or after `timestamp` (Unix ms); `end` if there is none."""

    def watch(self, topic: str, partition: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` on the loop whenever `end` has moved or the topic was deleted. Returns a function that stops it."""

    async def maintain(self) -> None:
        """Apply retention and compaction once."""
