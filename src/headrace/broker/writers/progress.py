"""Progress of exactly-once writers, in the table `__sinks`: the last version each has published, and its epoch.

A writer numbers its publications. The row with the last version is part of the same append as the records of that version, so both
exist or neither. A writer that is not sure publishes the version again and learns that it was already published.

A writer may be restarted while its predecessor still runs. Each start has an epoch, and the first use of a new epoch supersedes the
earlier ones. The row records this; `docs/storage.md` lists what is unknown after a restart.

A writer's name alone grants nothing. The row also holds the topics of the last publication and the principal that published first in
the current epoch. A principal that acts for the writer must be allowed to publish to those topics, and only that principal raises the
version within the epoch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from headrace.broker.health import supervise
from headrace.broker.settings import Clock
from headrace.broker.tables import TableLog
from headrace.broker.topics import check_name
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, InvalidRequest, LimitExceeded, NotAuthorized, StaleEpoch
from headrace.limits import WRITER_EPOCHS_REMEMBERED, WRITER_VERSION_FIRST_MAX, WRITER_VERSION_SKIP_MAX

Key: TypeAlias = tuple[str]


class Rolling(msgspec.Struct, frozen=True, array_like=True):
    """A publication of several appends and its progress. Its plan is in the table `__sink_plans`."""

    version: int
    records: int
    rows: int
    """Rows of its plan."""
    done: int = 0
    """Number of chunks already published."""


class WriterRow(msgspec.Struct, frozen=True, array_like=True):
    """Stored in this order of fields: add new fields at the end, with a default."""

    version: int | None
    """The last version that is published completely."""
    at: int
    """Unix ms of the last change."""
    epoch: str = ""
    """The current epoch."""
    superseded: tuple[str, ...] = ()
    """Superseded epochs, oldest first."""
    rolling: Rolling | None = None
    remember_ms: int = 0
    """Idle time after which the writer is forgotten, if it set one."""
    owner: str = ""
    """Principal that published first in the current epoch; empty without one, or without epochs."""
    topics: tuple[str, ...] = ()
    """Topics of the last publication with records, at most `WRITER_TOPICS_REMEMBERED`."""


@dataclass(slots=True, eq=False)
class Writer:
    """A writer: its stored row and its work in progress."""

    name: str
    stored: WriterRow | None = None
    epoch: str = ""
    owner: str = ""
    """Principal that published first in this epoch."""
    topics: tuple[str, ...] = ()
    """Topics of the last publication."""
    superseded: deque[str] = field(default_factory=lambda: deque(maxlen=WRITER_EPOCHS_REMEMBERED))
    used_at: int = 0
    handles: set[str] = field(default_factory=set)
    """Handles of its stages."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Serializes the rows: each holds the complete state, so an older row must not follow a newer one."""
    busy: int = 0
    """Number of tasks that hold or wait for the lock. While there are any, the object stays in the table."""
    fence: asyncio.Task[None] | None = None
    """Task that stores a new epoch."""
    remember_ms: int = 0
    """Idle time after which the writer is forgotten; 0: the default."""
    publications: int = 0
    """Number of publications since the broker loaded the writer."""

    @property
    def version(self) -> int | None:
        return None if self.stored is None else self.stored.version

    @property
    def rolling(self) -> Rolling | None:
        return None if self.stored is None else self.stored.rolling

    def check_epoch(self, epoch: str) -> None:
        """Raise `StaleEpoch` for a superseded epoch."""
        if epoch in self.superseded:
            raise StaleEpoch(writer=self.name, epoch=epoch, current=self.epoch)

    def enter(self, epoch: str) -> bool:
        """Note the use of an epoch and return whether it superseded another. An empty epoch supersedes nothing."""
        self.check_epoch(epoch)
        if not epoch or epoch == self.epoch:
            return False
        before, self.epoch, self.owner = self.epoch, epoch, ""
        if before:
            self.superseded.append(before)
        return bool(before)

    def check_owner(self, name: str, epoch: str) -> None:
        """Check that the principal published first in this epoch; another one must start a new epoch. Raises `NotAuthorized`,
        `StaleEpoch`."""
        if not self.epoch or not self.owner or self.owner == name or epoch not in ("", self.epoch):
            return
        if not epoch:
            raise StaleEpoch(writer=self.name, epoch=epoch, current=self.epoch)
        raise NotAuthorized(principal=name, action="publish", resource=f"epoch {epoch[:80]!r} of writer {self.name!r}")

    def check_skip(self, version: int) -> None:
        """Reject a version far ahead: it would make all versions up to it count as published. Raises `InvalidRequest`."""
        last = self.version
        most = WRITER_VERSION_FIRST_MAX if last is None else last + max(WRITER_VERSION_SKIP_MAX, last)
        if version > most:
            after = "is too high for a first version" if last is None else f"skips too far ahead of {last}, the last one"
            raise InvalidRequest(
                f"version {version} of writer {self.name[:80]!r} {after}: at most {most} is accepted now; forget the writer to start over"
            )

    def forget_epochs(self) -> None:
        self.epoch = self.owner = ""
        self.topics = ()
        self.superseded.clear()

    def row(self, version: int | None, now: int, rolling: Rolling | None = None) -> WriterRow:
        return WriterRow(version, now, self.epoch, tuple(self.superseded), rolling, self.remember_ms, self.owner, self.topics)


@dataclass(frozen=True, slots=True)
class WriterEntry:
    """A writer as it is listed."""

    writer: str
    version: int | None
    """The last published version; None if there is none."""
    at: int
    """Unix ms of its last change."""
    epoch: str
    is_publishing: bool
    """Whether a publication of several appends is in progress."""


class WriterTable(TableLog[Key, WriterRow]):
    """All writers with a publication or a stage. `writers_max` bounds them; `idle_ms` is how long one is remembered."""

    def __init__(self, engine: Engine, *, clock: Clock, writers_max: int, idle_ms: int) -> None:
        super().__init__(engine, "__sinks", Key, WriterRow)  # type: ignore[arg-type]  # a subscripted tuple is a type to msgspec
        self._clock = clock
        self._writers_max = writers_max
        self._idle_ms = idle_ms
        self.writers: dict[str, Writer] = {}

    async def load(self) -> None:
        await super().load()
        for writer in self.writers.values():
            assert writer.stored is not None, "load creates writers from rows only"
            writer.epoch = writer.stored.epoch
            writer.superseded.extend(writer.stored.superseded)
            writer.owner, writer.topics = writer.stored.owner, writer.stored.topics

    def show(self, key: Key, value: WriterRow | None) -> None:
        (name,) = key
        writer = self.writers.get(name)
        if value is None:
            if writer is not None:
                writer.stored = None
                self.leave(writer)
            return
        if writer is None:
            writer = self.writers[name] = Writer(name)
        writer.stored = value
        writer.remember_ms = value.remember_ms
        writer.used_at = max(writer.used_at, value.at)

    def find(self, name: str) -> Writer | None:
        return self.writers.get(name)

    def enter(self, name: str) -> Writer:
        """Return the writer of that name; create it if needed. A caller that gives it no work calls `leave`. Raises
        `InvalidRequest`, `LimitExceeded`."""
        writer = self.writers.get(name)
        if writer is None:
            check_name("writer", name)
            if len(self.writers) >= self._writers_max:
                raise LimitExceeded(f"{self._writers_max} exactly-once writers are remembered already")
            writer = self.writers[name] = Writer(name)
        writer.used_at = self._clock()
        return writer

    def leave(self, writer: Writer) -> None:
        """Remove a writer that has no row and no stage."""
        if writer.stored is None and not writer.handles and not writer.busy and self.writers.get(writer.name) is writer:
            del self.writers[writer.name]

    def entries(self) -> list[WriterEntry]:
        """Return the writers with a row, by name."""
        rows = [(writer, writer.stored) for _, writer in sorted(self.writers.items()) if writer.stored is not None]
        return [WriterEntry(writer.name, row.version, row.at, row.epoch, row.rolling is not None) for writer, row in rows]

    @asynccontextmanager
    async def locked(self, writer: Writer) -> AsyncIterator[None]:
        """Hold the writer's lock. Rows are written only inside."""
        writer.busy += 1
        try:
            async with writer.lock:
                yield
        finally:
            writer.busy -= 1
            self.leave(writer)

    async def expire(self) -> None:
        """Forget writers that have been idle for too long."""
        now = self._clock()
        for writer in list(self.writers.values()):
            is_over = writer.used_at < now - (writer.remember_ms or self._idle_ms)
            if is_over and writer.stored is not None and writer.rolling is None and not writer.handles and not writer.busy:
                async with self.locked(writer):
                    await self.put([((writer.name,), None)])
                    writer.forget_epochs()

    def fence(self, writer: Writer) -> None:
        """Store in the background that an epoch superseded another. `Writer.fence` is done when it is durable."""
        writer.busy += 1
        writer.fence = asyncio.get_running_loop().create_task(self._fence(writer))
        supervise(self._engine.health, "storing superseded epochs", writer.fence)

    async def _fence(self, writer: Writer) -> None:
        try:
            async with self.locked(writer):
                await self.put([((writer.name,), writer.row(writer.version, self._clock(), writer.rolling))])
        except BrokerError:
            pass  # the epoch is in memory, and in the row of the next publication
        finally:
            writer.busy -= 1
            self.leave(writer)


def check_version(version: int) -> None:
    if not 0 <= version < 1 << 63:
        raise InvalidRequest(f"version is {version}; it must not be negative")
