"""Stages: records that stay invisible until their writer publishes all of them atomically.

    stage ─▶ stage ─▶ … seal          one task of the writer, with its own handle
    stage ─▶ seal                     another task
    publish(writer, version, handles)    the records of all topics and the writer's row: one append

Publishing a version again only drops the handles. This makes a writer exactly-once that, after a crash, does not know whether it has
published. Staging checks records and assigns partitions; publishing assigns offsets, timestamps and the topic's time to live. Within a
partition, records are ordered by (`order`, position of the handle in the publication, order of staging).

A handle names one attempt of one task and is used once. A handle that was published, dropped or has expired cannot be used again.

What a principal needs for a call depends on the writer's row and its stages, so the stages ask `Permissions` while they work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from headrace.broker.authorizer import Principal
from headrace.broker.publishing.publish import Placing, Publisher, Route
from headrace.broker.settings import BrokerSettings, Clock, Later, Timer
from headrace.broker.topics import check_name
from headrace.broker.transactions import weight
from headrace.broker.writers.memory import StageMemory
from headrace.broker.writers.progress import Writer, WriterEntry, WriterTable, check_version
from headrace.broker.writers.publications import Publications
from headrace.broker.writers.spill import Spill
from headrace.broker.writers.stage import Stage, StageEntry, StageSize, State
from headrace.engine.checks import check_batch
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, InvalidRequest, LimitExceeded, NoSuchEntry, UnknownStage
from headrace.limits import STAGE_STRAGGLER_MS, STAGES_REMEMBERED_MAX, TRANSACTION_BYTES_MAX, WRITER_TOPICS_REMEMBERED
from headrace.records import AnyBatch

__all__ = ["Publication", "StageEntry", "StageSize", "Stages"]

T = TypeVar("T")
_STEP: Final = "publications of exactly-once writers"
_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Publication:
    """Result of a publication."""

    writer: str
    version: int
    already: bool
    """The version was published before; this call published nothing."""
    records: int
    """Records published by this call."""


class _Untimed(Route):
    """A route that leaves the time to live to the publication."""

    __slots__ = ("_own",)

    def __init__(self, own: Route) -> None:
        self.topic, self.rule, self.partitions, self.turn = own.topic, own.rule, own.partitions, own.turn
        self.placement = own.placement
        self._own = own

    def next_turn(self) -> int:
        return self._own.next_turn()

    def stamped(self, batch: AnyBatch) -> AnyBatch:
        return batch


class Permissions(Protocol):
    """Decides for a writer and the topics of its last publication or its stages."""

    def check_publishes(self, who: Principal, writer: str) -> None: ...

    def check_deletes(self, who: Principal, writer: str) -> None: ...

    def check_sees(self, who: Principal, writer: str, topics: Iterable[str]) -> None: ...

    def check_topics(self, who: Principal, writer: str, topics: Iterable[str]) -> None: ...

    def acts(self, who: Principal, writer: str) -> bool: ...

    def sees(self, who: Principal, writer: str, topics: Iterable[str]) -> bool: ...


class Stages:
    """All stages and their writers."""

    def __init__(
        self, engine: Engine, may: Permissions, publisher: Publisher, *, clock: Clock, later: Later, settings: BrokerSettings
    ) -> None:
        self._may = may
        self._health = engine.health
        self._publisher = publisher
        self._clock = clock
        self._later = later
        self._count_max = settings.stages_max
        self._idle_ms = settings.stage_idle_ms
        self._stages: dict[str, Stage] = {}
        self._writers = writers = WriterTable(engine, clock=clock, writers_max=settings.writers_max, idle_ms=settings.writer_idle_ms)
        self._spill = spill = Spill(engine, publisher, settings.spill_sizes)
        self._memory = StageMemory(spill, self._stages, settings.stages_memory_bytes, settings.publication_bytes)
        self._publications = Publications(engine, publisher, writers, spill, clock=clock, whole_bytes=settings.publication_bytes)
        self._gone: dict[str, None] = {}
        """Handles of removed stages, which cannot be used again, oldest first."""
        self._forbidden: dict[tuple[str, str], None] = {}
        """Handles that a principal dropped before a stage existed, oldest first. Separate from `_gone`: any principal can drop any
        handle, which must not push removed handles out."""
        self._tasks: set[asyncio.Task[Publication | None]] = set()
        self._timer: Timer | None = None
        self._retries: dict[str, Timer] = {}
        """Timers of publications to retry after a full disk, by writer."""
        self._is_stopped = False

    @property
    def size_bytes(self) -> int:
        """Bytes staged and not yet published, in memory and on disk."""
        return sum(stage.size_bytes for stage in self._stages.values())

    async def open(self) -> None:
        """Load the writers and resume interrupted publications in the background."""
        await self._writers.load()
        for writer in await self._publications.open():
            self._resume(writer)

    async def drain(self) -> None:
        """Drop all stages: their writers stage again. Finish publications in progress; those of several appends continue after the
        next start."""
        self._is_stopped = self._publications.is_stopped = True
        for timer in [*self._retries.values(), *([self._timer] if self._timer is not None else ())]:
            timer.cancel()
        await self._memory.drain()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for stage in list(self._stages.values()):
            self._drop(stage)
        await self._spill.drain()

    async def expire(self) -> None:
        """Forget writers that have been idle for too long."""
        await self._writers.expire()

    # Staging

    def stage(
        self, who: Principal, handle: str, topic: str, batch: AnyBatch, *, writer: str, epoch: str, order: int, partition: int | None
    ) -> asyncio.Future[None]:
        """Stage a batch. The future resolves when there is room. After any error nothing of the batch is staged."""
        self._may.check_publishes(who, writer)
        route = self._publisher.route(who, topic)
        size_bytes = check_batch(batch)
        if size_bytes > TRANSACTION_BYTES_MAX or weight(batch) > TRANSACTION_BYTES_MAX:
            raise LimitExceeded(f"the batch has {size_bytes} bytes; at most {TRANSACTION_BYTES_MAX} can be staged at once")
        placing = Placing(_Untimed(route), batch, partition)
        stage = self._open(who, handle, writer, epoch, order)
        if stage.state is not State.OPEN:
            raise InvalidRequest(f"stage {handle!r} is sealed")
        return self._memory.arrive(stage, topic, route.rule, placing.writes, len(batch), size_bytes)

    async def seal(self, who: Principal, handle: str, writer: str, epoch: str, order: int) -> StageSize:
        """Close a stage. Idempotent. With `writer`, create a missing stage: a task may have had nothing to stage."""
        if writer and handle not in self._stages:
            self._may.check_publishes(who, writer)
            self._publisher.check_open()
            stage = self._open(who, handle, writer, epoch, order)
        else:
            stage = self._find(who, handle)
            self._may.check_topics(who, stage.writer.name, stage.by_topic)
            stage.writer.check_epoch(stage.epoch)
        if stage.arriving:
            raise InvalidRequest(f"stage {handle!r} is still being written")
        if stage.state is State.OPEN:
            stage.state = State.SEALED
        stage.writer.used_at = self._clock()
        if stage.writer.fence is not None:
            await asyncio.shield(stage.writer.fence)
        return stage.size

    def _open(self, who: Principal, handle: str, name: str, epoch: str, order: int) -> Stage:
        stage = self._stages.get(handle)
        if stage is not None:
            self._find(who, handle)
            if stage.writer.name != name or stage.epoch != epoch or stage.order != order:
                raise InvalidRequest(f"stage {handle!r} belongs to another writer, epoch or order")
            stage.writer.check_epoch(epoch)
            stage.writer.used_at = self._clock()
            return stage
        check_name("stage", handle)
        if epoch:
            check_name("epoch", epoch)
        if handle in self._gone or (who.name, handle) in self._forbidden:
            raise UnknownStage(handle)
        if len(self._stages) >= self._count_max:
            raise LimitExceeded(f"{self._count_max} stages wait to be published already")
        self._check_acts(who, name, epoch)
        writer = self._writers.enter(name)
        self._enter_epoch(writer, epoch)
        stage = self._stages[handle] = Stage(handle, writer, epoch, order, self._clock(), writer.publications)
        writer.handles.add(handle)
        self._arm()
        return stage

    def _enter_epoch(self, writer: Writer, epoch: str) -> None:
        """Enter an epoch and drop the stages of superseded ones, which are never published. Raises `StaleEpoch`."""
        if not writer.enter(epoch):
            return
        self._writers.fence(writer)
        for stage in [self._stages[handle] for handle in writer.handles]:
            if stage.epoch and stage.epoch != epoch and stage.state is not State.PUBLISHING:
                self._drop(stage)

    # Publishing

    async def publish(self, who: Principal, name: str, version: int, handles: Sequence[str], epoch: str, remember_ms: int) -> Publication:
        """Publish once: check and publication are one step under the writer's lock. Continues if the caller is cancelled."""
        self._may.check_publishes(who, name)
        self._publisher.check_open()
        check_version(version)
        if remember_ms < 0:
            raise InvalidRequest(f"remember_ms is {remember_ms}; it must not be negative")
        if epoch:
            check_name("epoch", epoch)
        self._check_acts(who, name, epoch)
        if (known := self._writers.find(name)) is not None:
            known.check_owner(who.name, epoch)
        writer = self._writers.enter(name)
        self._enter_epoch(writer, epoch)
        writer.remember_ms = remember_ms
        task = asyncio.get_running_loop().create_task(self._publish(who, writer, version, list(dict.fromkeys(handles)), epoch))
        self._follow(writer, task)
        return await asyncio.shield(task)

    def _follow(self, writer: Writer, task: asyncio.Task[Publication | None]) -> None:
        writer.busy += 1
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, writer))

    def _ended(self, writer: Writer, task: asyncio.Task[Publication | None]) -> None:
        self._tasks.discard(task)
        writer.busy -= 1
        self._writers.leave(writer)
        if not task.cancelled():
            failure = task.exception()  # the caller may have given up
            if failure is None:
                self._health.succeeded(_STEP)
            elif not isinstance(failure, BrokerError):
                self._health.failed(_STEP, repr(failure))
        if writer.rolling is not None:
            self._retry_later(writer, task)

    async def _publish(self, who: Principal, writer: Writer, version: int, handles: list[str], epoch: str) -> Publication:
        async with self._writers.locked(writer):
            writer.check_epoch(epoch)  # another epoch may have started while this task waited, and the rules may have changed
            await self._publications.roll(writer)
            writer.check_owner(who.name, epoch)
            self._may.check_topics(who, writer.name, writer.topics)
            if writer.version is not None and version <= writer.version:
                doomed = [self._stages[handle] for handle in handles if handle in writer.handles]
                self._may.check_topics(who, writer.name, _topics_of(doomed))
                for stage in doomed:
                    self._drop(stage)
                return Publication(writer.name, version, True, 0)
            writer.check_skip(version)
            stages = self._sealed(writer, handles)
            self._may.check_topics(who, writer.name, _topics_of(stages))
            await self._write(who, writer, version, stages)
            for stage in stages:
                for topic, count in stage.by_topic.items():
                    self._publisher.meters.meter(topic, who.protocol).count(count, stage.size_bytes * count // stage.records)
            return Publication(writer.name, version, False, sum(stage.records for stage in stages))

    async def _write(self, who: Principal, writer: Writer, version: int, stages: Sequence[Stage]) -> None:
        for stage in stages:
            stage.state = State.PUBLISHING
        before = writer.owner, writer.topics
        writer.owner = writer.owner or (who.name if writer.epoch else "")
        writer.topics = tuple(_topics_of(stages)[:WRITER_TOPICS_REMEMBERED]) or writer.topics
        try:
            for stage in stages:
                if stage.spilling is not None:
                    await asyncio.shield(stage.spilling)
            is_done = await self._publications.publish(writer, version, stages)
        except BrokerError:
            writer.owner, writer.topics = before
            for stage in stages:
                stage.state = State.SEALED
            self._memory.consider()
            self._arm()
            raise
        for stage in stages:
            self._drop(stage)
        writer.publications += 1
        self._drop_stragglers(writer)
        if not is_done:
            await self._publications.roll(writer)

    def _drop_stragglers(self, writer: Writer) -> None:
        """Drop stages begun before the previous publication and long ago: they belong to failed attempts, because a writer stages
        for one version after another."""
        before = self._clock() - STAGE_STRAGGLER_MS
        for stage in [self._stages[handle] for handle in writer.handles]:
            if stage.generation < writer.publications - 1 and stage.made_at <= before and stage.state is not State.PUBLISHING:
                self._drop(stage)

    def _sealed(self, writer: Writer, handles: Iterable[str]) -> list[Stage]:
        """Return the stages in publication order. Raises `UnknownStage`, `InvalidRequest`."""
        stages: list[Stage] = []
        for handle in handles:
            stage = self._stages.get(handle)
            if stage is None or stage.writer is not writer:
                raise UnknownStage(handle)
            if stage.state is not State.SEALED:
                raise InvalidRequest(f"stage {handle!r} is not sealed")
            stages.append(stage)
        return sorted(stages, key=lambda stage: stage.order)

    def _resume(self, writer: Writer) -> None:
        """Resume a publication that has begun."""
        self._retries.pop(writer.name, None)
        if not self._is_stopped:
            self._follow(writer, asyncio.get_running_loop().create_task(self._roll(writer)))

    async def _roll(self, writer: Writer) -> None:
        async with self._writers.locked(writer):
            await self._publications.roll(writer)

    def _retry_later(self, writer: Writer, task: asyncio.Task[Publication | None]) -> None:
        """Retry after a retriable error such as a full disk. Other errors need an operator."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BrokerError) and error.retriable and not self._is_stopped and writer.name not in self._retries:
            self._retries[writer.name] = self._later(_RETRY_SECONDS, partial(self._resume, writer))

    # Removal

    async def drop(self, who: Principal, handles: Iterable[str]) -> int:
        """Drop stages and return how many existed. A stage being published is kept. An unknown handle becomes unusable for this
        principal, because its task may only be slow. A stage of a writer that the principal may not act for counts as unknown."""
        wanted = list(dict.fromkeys(handles))
        known = [stage for handle in wanted if (stage := self._stages.get(handle)) is not None and self._may.acts(who, stage.writer.name)]
        for stage in known:
            self._may.check_topics(who, stage.writer.name, stage.by_topic)
        own = {stage.handle for stage in known}
        strangers = [handle for handle in wanted if handle not in own]
        for handle in strangers:
            check_name("stage", handle)
        for handle in strangers:
            _remember(self._forbidden, (who.name, handle))
        doomed = [stage for stage in known if stage.state is not State.PUBLISHING]
        for stage in doomed:
            self._drop(stage)
        return len(doomed)

    async def forget_writer(self, who: Principal, name: str) -> None:
        """Forget the writer's last version, its stages and a publication in progress. Raises `NoSuchEntry`. Needs DELETE on the writer and,
        as publishing does, PUBLISH on the topics of its last publication and of its stages."""
        self._may.check_deletes(who, name)
        writer = self._writers.find(name)
        if writer is None:
            raise NoSuchEntry("writer", name)
        stages = [self._stages[handle] for handle in writer.handles]
        self._may.check_topics(who, writer.name, [*writer.topics, *_topics_of(stages)])
        for stage in stages:
            if stage.state is not State.PUBLISHING:
                self._drop(stage)
        async with self._writers.locked(writer):
            self._may.check_topics(who, writer.name, writer.topics)  # the rules may have changed during the wait
            await self._publications.forget(writer)
            writer.forget_epochs()

    def _drop(self, stage: Stage) -> None:
        if self._stages.get(stage.handle) is not stage:
            return
        del self._stages[stage.handle]
        stage.state = State.GONE
        stage.writer.handles.discard(stage.handle)
        _remember(self._gone, stage.handle)
        self._memory.leave(stage)
        self._writers.leave(stage.writer)

    def _arm(self) -> None:
        """Set the timer for the writer that has been idle longest, if it is not set."""
        if self._timer is not None or self._is_stopped:
            return
        first = min((stage.writer.used_at for stage in self._stages.values() if stage.state is not State.PUBLISHING), default=None)
        if first is not None:
            self._timer = self._later(max(0, first + self._idle_ms - self._clock()) / 1000, self._on_timer)

    def _on_timer(self) -> None:
        """Drop the stages of writers that have been idle for too long."""
        self._timer = None
        before = self._clock() - self._idle_ms
        for stage in list(self._stages.values()):
            if stage.writer.used_at <= before and stage.state is not State.PUBLISHING:
                self._drop(stage)
        self._arm()

    # Listing

    def last_version(self, who: Principal, name: str) -> int | None:
        writer = self._writers.find(name)
        self._may.check_sees(who, name, () if writer is None else writer.topics)
        return None if writer is None else writer.version

    def writers(self, who: Principal) -> list[WriterEntry]:
        return [entry for entry in self._writers.entries() if self._may.sees(who, entry.writer, self._writers.writers[entry.writer].topics)]

    def stages(self, who: Principal) -> list[StageEntry]:
        now = self._clock()
        return [stage.entry(now) for _, stage in sorted(self._stages.items()) if self._may.sees(who, stage.writer.name, stage.by_topic)]

    # Internals

    def _check_acts(self, who: Principal, name: str, epoch: str) -> None:
        """Check the topics of the writer's last publication. Raises `NotAuthorized`."""
        writer = self._writers.find(name)
        if writer is None:
            return
        self._may.check_topics(who, name, writer.topics)
        if epoch and epoch != writer.epoch:  # this supersedes the current epoch and drops its stages
            self._may.check_topics(who, name, _topics_of(self._stages[handle] for handle in writer.handles))

    def _find(self, who: Principal, handle: str) -> Stage:
        """Return the stage. Raises `UnknownStage`, also for a writer that this principal may not act for."""
        stage = self._stages.get(handle)
        if stage is None or not self._may.acts(who, stage.writer.name):
            raise UnknownStage(handle)
        return stage


def _topics_of(stages: Iterable[Stage]) -> list[str]:
    return list(dict.fromkeys(topic for stage in stages for topic in stage.by_topic))


def _remember(latest: dict[T, None], one: T) -> None:
    latest[one] = None
    if len(latest) > STAGES_REMEMBERED_MAX:
        del latest[next(iter(latest))]
