"""Engine contract: the interface of a partitioned log.

The broker uses this interface and no module below it. One behaviour suite (`tests/engine/`) runs over every engine. What not every engine
can promise is a field of `Capabilities`.

`topics`, `bounds` and `size_bytes` are snapshots: others may change a remote log at any time. A snapshot never goes back, and it is never
behind an append of this engine that has resolved.

All methods are called on the event loop. `append` is atomic: the writes of one call become visible
together or not at all, on any number of partitions. Idempotent producers, transactions and committed offsets use it, because their tables
are topics too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias, TypeVar

from headrace.errors import AppendUnknown
from headrace.located import Located
from headrace.records import Ack, AnyBatch, Appended, AppendedEach, Batch, Bounds, RecordBatch
from headrace.storage.health import Health, HealthReport, HealthState, Problem

__all__ = [
    "Ack",
    "Appended",
    "AppendedEach",
    "Batch",
    "Bounds",
    "Capabilities",
    "Cleanup",
    "Commits",
    "Engine",
    "Health",
    "HealthReport",
    "HealthState",
    "Located",
    "OffsetKey",
    "OffsetStore",
    "OffsetsWrite",
    "Ownership",
    "Placement",
    "Problem",
    "Topic",
    "TopicConfig",
    "Write",
    "known",
    "when_known",
]

T = TypeVar("T")


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


class Placement(StrEnum):
    """Hash that maps a key to a partition. All writers of a log must agree on it."""

    FNV1A = "fnv1a"
    MURMUR2 = "murmur2"
    """As Kafka's Java clients do."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Promises that not every engine can make. Code that needs one asks for it."""

    dense_offsets: bool = True
    """Each append gets the offsets after those of the append before. Otherwise offsets rise, with gaps."""
    forced_compaction: bool = True
    """`maintain` applies retention and compaction before it returns. Otherwise the log does so at a time of its own."""
    sync_per_append: bool = True
    """`Ack.DURABLE` waits for a sync of the disk. Otherwise it waits for replicas."""
    cheap_atomic_append: bool = True
    """An append to several partitions costs about as much as one to a single partition."""
    keeps_batches: bool = True
    """A column batch is read back as one batch. Otherwise batches are joined and divided as the log likes."""
    any_topic_name: bool = True
    """Every name that the broker accepts is possible. Otherwise `create_topic` raises `InvalidTopicName` for some."""
    reads_in_memory: bool = True
    """`read_now` finds recent records. Otherwise it may return None for any."""
    placement: Placement = Placement.FNV1A


OffsetKey: TypeAlias = tuple[str, str, int]
"""Group, topic, partition."""
Commits: TypeAlias = list[tuple[OffsetKey, tuple[int, int] | None]]
"""Committed offsets, each with the Unix ms of the commit; None deletes."""


class OffsetsWrite(Write):
    """Committed offsets as part of an append to an engine that keeps them itself. It must be the last write."""

    __slots__ = ("commits",)

    def __init__(self, commits: Commits) -> None:
        super().__init__("", 0, RecordBatch([]))
        self.commits = commits


class OffsetStore(Protocol):
    """Committed offsets of groups that the log keeps itself, where other clients of the log see them."""

    changed: Callable[[Commits], None]
    """Called on the loop with offsets that other clients have committed or deleted. The broker sets it."""

    async def load(self) -> Commits:
        """Return all committed offsets."""

    def write(self, commits: Commits) -> OffsetsWrite:
        """Return the commits as the last write of an append."""


@dataclass(slots=True)
class Ownership:
    """Whether this process owns the tables of the log. Several processes may share a log; one of them, the coordinator, owns the tables."""

    is_owner: bool = True
    """Without it the engine reads tables and refuses to write to them with `NotCoordinator`. It may become True while the engine is open,
    and then stays True until `lost`."""
    coordinator: str = ""
    """Address of the owner, as it was given to its engine; empty if unknown."""
    listeners: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the owner by protocol, for other processes."""
    moved: Callable[[], None] = lambda: None
    """Called on the loop when the addresses of the owner have changed. The server sets it."""
    gained: Callable[[], None] = lambda: None
    """Called on the loop when this process becomes the owner after `open`. The broker sets it."""
    lost: Callable[[], None] = lambda: None
    """Called on the loop when another process has become the owner. The log refuses further writes to the tables. The server sets it."""
    advertise: Callable[[str, Mapping[str, str]], None] = lambda address, listeners: None
    """Takes the addresses of this process, for the others. The engine sets it."""


class Engine(Protocol):
    """Partitioned log, and the health of its background work."""

    health: Health
    """Outcomes of background threads and tasks, including those of the broker."""

    topic_changed: Callable[[str], None]
    """Called on the loop with the name of a topic that was created, altered or deleted by others. The broker sets it."""

    ownership: Ownership

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def offset_store(self) -> OffsetStore | None:
        """Where the log keeps the committed offsets of groups; None: the broker keeps them in a table."""

    @property
    def epoch(self) -> int:
        """Number of this ownership of the tables. It rises with each owner of a shared log; 0 if no other process can open the log."""

    async def open(self) -> None:
        """Recover and start. Raises `StorageFailed`, `CorruptData`, `DirectoryLocked` or `Unavailable`."""

    async def close(self) -> None:
        """Finish what was staged and stop. Idempotent."""

    async def create_topic(self, name: str, partitions: int, config: TopicConfig, *, internal: bool = False) -> Topic:
        """Create a topic. Durable when it returns. Raises `TopicExists`, `LimitExceeded`."""

    async def alter_topic(self, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        """Add partitions (never remove), or replace the configuration. Durable when it returns."""

    async def delete_topic(self, name: str) -> None:
        """Delete a topic. Its name is free and its records are unreadable when this returns; its space is freed soon after."""

    def topics(self) -> Mapping[str, Topic]:
        """Return a live read-only view."""

    async def look_for_topic(self, name: str) -> bool:
        """Return whether the topic exists, and is in `topics` from now on, also if another process has just created it. Raises
        `Unavailable`."""

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        """Stage; resolve when the guarantee of `ack` holds (None: the strongest `ack` of the topics). A partition gets its appends in call
        order; a large append may be written after later ones to other partitions.

        An urgent append is written before those that wait, if the engine supports that. It is for appends that are due at a certain time
        and need no order relative to others.

        An owned append is part of the state of the owner: if another process has become the owner, it is refused, also one that was staged
        before. Appends to internal topics always are.

        Raises at once: `UnknownTopic`, `UnknownPartition`, `RecordTooLarge`, `LimitExceeded`, `NotCoordinator`.
        Through the future: `DiskFull` and `Unavailable` (retriable, nothing was written), `StorageFailed` (the log accepts no writes until
        it is opened again, and the records may be present then), `AppendUnknown` (the log has not answered in time; `when_known` waits
        for its answer). A caller that keeps state about an append changes it when the outcome is known, not before.
        """

    def append_then(self, write: Write, done: Callable[[list[Appended] | BaseException], None]) -> None:
        """Append a record batch to a topic of users as `append` does, and call `done` on the event loop with the result or the error that
        the future would have. It may be called before this returns, and more than once, of which the first call counts.

        Raises as `append` does. An engine without a cheaper way uses `engine.each.append_by_future`.
        """

    def append_each(
        self, places: Sequence[tuple[str, int]], values: Sequence[bytes], keys: Sequence[bytes | None] | None = None
    ) -> asyncio.Future[AppendedEach]:
        """Append independent records, each to its (topic, partition), in call order within a partition. A record that fails does not fail
        the others. Resolves when the strongest `ack` of the topics holds for all.

        Raises and fails as `append` does. An engine without a cheaper way uses `engine.each.append_by_partition`.
        """

    async def read(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch]:
        """Read records from `offset` on, at least one if there is any below `end`. A read may return less than the limits allow; the
        next one continues at the `next_offset` of the last batch.

        The first batch starts at `offset` or, after a gap from compaction or damage, at the next existing offset.
        At `end` the list is empty. Raises `OffsetOutOfRange` below `first` and above `end`.
        """

    def read_now(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> Sequence[Batch] | None:
        """Return what `read` would return, if there are records and they are in memory. Otherwise return None: `read` waits or raises."""

    @property
    def local_file(self) -> str:
        """Path of a file that exactly those processes of this machine can open that can read the files of the log; empty if it has none."""

    async def locate(self, topic: str, partition: int, offset: int, stop: int) -> Located:
        """Return where batches with records in [offset, stop) lie in files. Others have to be read."""

    def bounds(self, topic: str, partition: int) -> Bounds: ...

    def size_bytes(self, topic: str, partition: int) -> int:
        """Return the approximate stored size of a partition, which readers use for planning."""

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        """Return the first offset whose record is at or after `timestamp` (Unix ms); `end` if there is none."""

    def watch(self, topic: str, partition: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` on the loop whenever `end` has moved or the topic was deleted. Returns a function that stops it."""

    async def maintain(self) -> None:
        """Apply retention and compaction once."""


def when_known(staged: asyncio.Future[T], then: Callable[[asyncio.Future[T]], object]) -> None:
    """Call `then` with a future that has the outcome of an append, once it is known: `staged`, or what its `AppendUnknown` resolves to."""

    def done(future: asyncio.Future[T]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, AppendUnknown) and error.outcome is not None:
            error.outcome.add_done_callback(then)
        else:
            then(future)

    staged.add_done_callback(done)


def known(staged: asyncio.Future[T]) -> asyncio.Future[T]:
    """Return a future that resolves as `staged` does, but not before the outcome is known. Cancelling it does not affect `staged`."""
    answer: asyncio.Future[T] = staged.get_loop().create_future()
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may only wait for it

    def resolve(future: asyncio.Future[T]) -> None:
        if answer.done():
            return
        if future.cancelled():
            answer.cancel()
        elif (error := future.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(future.result())

    when_known(staged, resolve)
    return answer
