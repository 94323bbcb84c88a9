"""The engine contract: a partitioned log, whoever keeps it, in thirteen verbs.

The broker talks to this and to nothing below it. One behaviour suite (`tests/engine/`) runs over every engine.

All verbs are called on the event loop. `append` is the only way anything is ever written, and it is atomic: the writes of
one call become visible together or not at all, on however many partitions. Idempotent producers, transactions and
committed offsets are all made of it (their tables are topics too).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from headrace.log.batch import Batch
from headrace.log.health import Health, HealthReport, HealthState, Problem
from headrace.records import Ack, AnyRun, Appended, Bounds

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
    """What happens to old records."""

    DELETE = "delete"
    """Whole segments go when they are past retention."""
    COMPACT = "compact"
    """The newest record of each key stays; tombstones go after `tombstone_retention_ms`."""


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """Per-topic settings. Zero means: no limit."""

    ack: Ack = Ack.DURABLE
    cleanup: Cleanup = Cleanup.DELETE
    retention_ms: int = 0
    retention_bytes: int = 0
    """Per partition."""
    segment_bytes: int = 128 * 1024 * 1024
    tombstone_retention_ms: int = 24 * 3600 * 1000
    ttl_ms: int = 0
    """A record without an expiry of its own expires so long after it was written. Segments all of whose records have are dropped."""
    dead_letter_expired: bool = False
    """Whether expired records are kept among the dead letters. Their segments stay an hour longer, so that there is time to move them."""
    compress: bool = False
    encrypt: bool | None = None
    """None: encrypt exactly when the data directory has a key."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it is now. A new object replaces it when something changes."""

    name: str
    partitions: int
    config: TopicConfig = field(default_factory=TopicConfig)
    internal: bool = False


@dataclass(slots=True)
class Write:
    """One run for one partition. A callable run is built when the offsets of the writes before it in the same call are
    known; it gets them as a list, one `Appended` per earlier write."""

    topic: str
    partition: int
    run: AnyRun | Callable[[Sequence[Appended]], AnyRun]


class Engine(Protocol):
    """Thirteen verbs, and the health of what works behind them."""

    health: Health
    """Outcomes of the background threads and tasks, those of the broker included."""

    async def open(self) -> None:
        """Recover and be ready. Raises `StorageFailed`, `CorruptData` or `DirectoryLocked`."""

    async def close(self) -> None:
        """Flush, checkpoint, stop. Idempotent."""

    async def create_topic(self, name: str, partitions: int, config: TopicConfig, *, internal: bool = False) -> Topic:
        """Durable when it returns. Raises `TopicExists`, `LimitExceeded`."""

    async def alter_topic(self, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        """Add partitions (never remove), or replace the configuration. Durable when it returns."""

    async def delete_topic(self, name: str) -> None:
        """The name is free and the records unreadable when it returns; the space comes back soon after."""

    def topics(self) -> Mapping[str, Topic]:
        """A live read-only view."""

    def append(self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False) -> asyncio.Future[list[Appended]]:
        """Stage now, in call order; resolve when the promise of `ack` holds (None: the strongest `ack` of the topics touched).
        An urgent one goes before what only waits to be written, if the engine can do that: for what has its own time, and no order
        to keep with what others append.

        Raises at once: `UnknownTopic`, `UnknownPartition`, `RecordTooLarge`, `LimitExceeded`.
        Through the future: `DiskFull` and `Unavailable` (retriable, nothing was written), `StorageFailed` (the outcome is unknown: the
        records may be there when it is opened again).
        """

    async def read(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch]:
        """Records from `offset` on, at least one if there is any below `end`, however large. Stops before `end` only at a bound or damage.

        The first batch starts at `offset` or, where compaction or damage left a gap, at the next offset there is.
        At `end` the list is empty. Raises `OffsetOutOfRange` below `first` and above `end`.
        """

    def bounds(self, topic: str, partition: int) -> Bounds: ...

    def size_bytes(self, topic: str, partition: int) -> int:
        """What the records of a partition take where they are kept, about; readers plan by it."""

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        """The first offset whose record is at or after `timestamp` (Unix ms); `end` if there is none."""

    def watch(self, topic: str, partition: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` on the loop whenever `end` has moved or the topic is gone. Returns the function that stops it."""

    async def maintain(self) -> None:
        """Retention and compaction, once over everything that is due."""
