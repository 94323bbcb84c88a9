"""What is remembered of exactly-once writers, in the table `__sinks`: the last version each has published, and by which of its runs.

A writer (an app) numbers what it publishes. The row with its last version is written in the same append as the records of that version,
so a version is either published and known to be, or neither: whoever is not sure publishes it again, and is told that it was there.

A writer may be started anew while its predecessor still runs somewhere. Each start has a run id, and the first use of a new one
supersedes those before it. That is written down as well; what cannot be known after a restart is listed in `docs/storage.md`.

The name of a writer is only a name. So the row also says to which topics it published last, and who published first in the current run:
whoever acts for the writer may publish to those topics, and only that principal raises the version within the run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from headrace.broker.background import supervise
from headrace.broker.names import check_name
from headrace.broker.tables import TableLog
from headrace.broker.timers import Clock
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, InvalidRequest, LimitExceeded, NotAuthorized, StaleEpoch
from headrace.limits import SINK_EPOCHS_REMEMBERED, SINK_VERSION_FIRST_MAX, SINK_VERSION_SKIP_MAX

Key: TypeAlias = tuple[str]


class Rolling(msgspec.Struct, frozen=True, array_like=True):
    """A publication that takes more than one append, and how far it is. Its plan is in the table `__sink_plans`."""

    version: int
    records: int
    rows: int
    """Of its plan."""
    done: int = 0
    """Pieces of the plan that are published."""


class WriterRow(msgspec.Struct, frozen=True, array_like=True):
    """A row. Stored in this order of fields: new ones go to the end and have a default."""

    version: int | None
    """The last one that is published whole."""
    at: int
    """Unix ms of the last change."""
    epoch: str = ""
    """The run that counts."""
    superseded: tuple[str, ...] = ()
    """Those before it, oldest first."""
    rolling: Rolling | None = None
    remember_ms: int = 0
    """For how long the writer may come back, if it has said so."""
    owner: str = ""
    """The principal who published first in the run that counts; empty where nobody has, or there are no runs."""
    topics: tuple[str, ...] = ()
    """Where the last publication that had records went, `SINK_TOPICS_REMEMBERED` of them at most."""


@dataclass(slots=True, eq=False)
class Writer:
    """A writer: its row, and what is under way."""

    name: str
    stored: WriterRow | None = None
    epoch: str = ""
    owner: str = ""
    """Who published first in this run."""
    topics: tuple[str, ...] = ()
    """Where it published last."""
    superseded: deque[str] = field(default_factory=lambda: deque(maxlen=SINK_EPOCHS_REMEMBERED))
    used_at: int = 0
    handles: set[str] = field(default_factory=set)
    """Its stages."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Rows are written one after another: each says all that is known, so one that overtakes another would take it back."""
    busy: int = 0
    """Who waits for the lock or has it: as long as there is anybody, this is the app of its name."""
    fence: asyncio.Task[None] | None = None
    """The writing down of a new run."""
    remember_ms: int = 0
    """For how long it may come back; 0: as long as any writer."""
    publications: int = 0
    """How many there were since the broker has known it."""

    @property
    def version(self) -> int | None:
        return None if self.stored is None else self.stored.version

    @property
    def rolling(self) -> Rolling | None:
        return None if self.stored is None else self.stored.rolling

    def check_epoch(self, epoch: str) -> None:
        """Raises `StaleEpoch`."""
        if epoch in self.superseded:
            raise StaleEpoch(writer=self.name, epoch=epoch, current=self.epoch)

    def enter(self, epoch: str) -> bool:
        """A run has been heard of. Returns whether it has superseded another; no run id at all supersedes nobody."""
        self.check_epoch(epoch)
        if not epoch or epoch == self.epoch:
            return False
        before, self.epoch, self.owner = self.epoch, epoch, ""
        if before:
            self.superseded.append(before)
        return bool(before)

    def check_owner(self, name: str, epoch: str) -> None:
        """A run belongs to whom published first in it; whoever takes over starts a run of their own. Raises `NotAuthorized`, `StaleEpoch`."""
        if not self.epoch or not self.owner or self.owner == name or epoch not in ("", self.epoch):
            return
        if not epoch:
            raise StaleEpoch(writer=self.name, epoch=epoch, current=self.epoch)
        raise NotAuthorized(principal=name, action="publish", resource=f"run {epoch[:80]!r} of transaction {self.name!r}")

    def check_skip(self, version: int) -> None:
        """A version far ahead would have all those up to it answered as published. Raises `InvalidRequest`."""
        last = self.version
        most = SINK_VERSION_FIRST_MAX if last is None else last + max(SINK_VERSION_SKIP_MAX, last)
        if version > most:
            after = "is no first version" if last is None else f"skips far ahead of {last}, the last one"
            raise InvalidRequest(
                f"version {version} of writer {self.name[:80]!r} {after}: at most {most} is accepted now; forget the writer to start anew"
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
    """The last one published; None if there is none yet."""
    at: int
    """Unix ms of its last change."""
    epoch: str
    is_publishing: bool
    """Whether a publication that takes more than one append is under way."""


class WriterTable(TableLog[Key, WriterRow]):
    """All writers that have published, or are about to. `apps_max` bounds them; `idle_ms` is how long one is remembered."""

    def __init__(self, engine: Engine, *, clock: Clock, writers_max: int, idle_ms: int) -> None:
        super().__init__(engine, "__sinks", Key, WriterRow)  # type: ignore[arg-type]  # a subscripted tuple is a type to msgspec
        self._clock = clock
        self._writers_max = writers_max
        self._idle_ms = idle_ms
        self.writers: dict[str, Writer] = {}

    async def load(self) -> None:
        await super().load()
        for writer in self.writers.values():
            assert writer.stored is not None, "only rows make apps while the table is read"
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
        """The app of that name, new if need be. Whoever gives it nothing to do calls `leave`. Raises `InvalidRequest`, `LimitExceeded`."""
        writer = self.writers.get(name)
        if writer is None:
            check_name("writer", name)
            if len(self.writers) >= self._writers_max:
                raise LimitExceeded(f"{self._writers_max} exactly-once writers are remembered already")
            writer = self.writers[name] = Writer(name)
        writer.used_at = self._clock()
        return writer

    def leave(self, writer: Writer) -> None:
        """Forget one of which nothing is written down and nothing is staged."""
        if writer.stored is None and not writer.handles and not writer.busy and self.writers.get(writer.name) is writer:
            del self.writers[writer.name]

    def entries(self) -> list[WriterEntry]:
        """Those with a row, by name."""
        rows = [(writer, writer.stored) for _, writer in sorted(self.writers.items()) if writer.stored is not None]
        return [WriterEntry(writer.name, row.version, row.at, row.epoch, row.rolling is not None) for writer, row in rows]

    @asynccontextmanager
    async def locked(self, writer: Writer) -> AsyncIterator[None]:
        """Whoever writes its row does it in here."""
        writer.busy += 1
        try:
            async with writer.lock:
                yield
        finally:
            writer.busy -= 1
            self.leave(writer)

    async def expire(self) -> None:
        """Forget those that were silent for too long."""
        now = self._clock()
        for writer in list(self.writers.values()):
            is_over = writer.used_at < now - (writer.remember_ms or self._idle_ms)
            if is_over and writer.stored is not None and writer.rolling is None and not writer.handles and not writer.busy:
                async with self.locked(writer):
                    await self.put([((writer.name,), None)])
                    writer.forget_epochs()

    def fence(self, writer: Writer) -> None:
        """Write down that a run has superseded another. `Writer.fence` is done when it is durable."""
        writer.busy += 1
        writer.fence = asyncio.get_running_loop().create_task(self._fence(writer))
        supervise(self._engine.health, "notes of superseded writers", writer.fence)

    async def _fence(self, writer: Writer) -> None:
        try:
            async with self.locked(writer):
                await self.put([((writer.name,), writer.row(writer.version, self._clock(), writer.rolling))])
        except BrokerError:
            pass  # it is in memory, and in the row of the next publication
        finally:
            writer.busy -= 1
            self.leave(writer)


def check_version(version: int) -> None:
    if not 0 <= version < 1 << 63:
        raise InvalidRequest(f"a version is a number from 0 on, not {version}")
