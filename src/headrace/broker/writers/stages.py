"""Stages: records on their way into the log that nobody sees until their writer publishes all of them at once.

    stage ─▶ stage ─▶ … seal          a task of the writer, under a handle of its own
    stage ─▶ seal                     another one
    publish(writer, version, handles)    their records in all topics, and the row that says so: one append

Publishing a version again does nothing but drop the handles: that is what makes a writer exactly-once which, after any crash, only
knows that it may have published. Records are checked, and get their partitions, when they are staged; offsets, timestamps and the
topic's time to live when they are published. Within a partition they are in the order of (`order`, place of the handle among those
published, order of staging).

A handle names one attempt of one task and is used once: what was published, dropped or has expired stays dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from headrace.broker.authorizer import Action, Authorizer, Principal
from headrace.broker.names import check_name
from headrace.broker.publishing.publish import Placing, Publisher, Route
from headrace.broker.settings import BrokerSettings
from headrace.broker.timers import Clock, Later, Timer
from headrace.broker.transactions import weight
from headrace.broker.writers.memory import StageMemory
from headrace.broker.writers.progress import Writer, WriterEntry, WriterTable, check_version
from headrace.broker.writers.publications import Publications
from headrace.broker.writers.spill import Spill
from headrace.broker.writers.stage import Stage, StageEntry, StageSize, State
from headrace.engine.admission import check_batch
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, InvalidRequest, LimitExceeded, NoSuchEntry, NotAuthorized, UnknownStage
from headrace.limits import SINK_TOPICS_REMEMBERED, STAGE_STRAGGLER_MS, STAGES_REMEMBERED_MAX, TRANSACTION_BYTES_MAX
from headrace.records import AnyBatch

__all__ = ["Publication", "StageEntry", "StageSize", "Stages"]

T = TypeVar("T")
_KIND: Final = "transaction"
"""What a writer is to the rules."""
_STEP: Final = "publications of exactly-once writers"
_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Publication:
    """The answer to a writer."""

    writer: str
    version: int
    already: bool
    """It was published before; this time nothing was."""
    records: int
    """Published by this call."""


class _Untimed(Route):
    """A route that leaves the time to live to the publication."""

    __slots__ = ("_own",)

    def __init__(self, own: Route) -> None:
        self.topic, self.rule, self.partitions, self.turn = own.topic, own.rule, own.partitions, own.turn
        self._own = own

    def next_turn(self) -> int:
        return self._own.next_turn()

    def stamped(self, batch: AnyBatch) -> AnyBatch:
        return batch


class Stages:
    """All stages, and the writers they belong to."""

    def __init__(
        self, engine: Engine, authorizer: Authorizer, publisher: Publisher, *, clock: Clock, later: Later, settings: BrokerSettings
    ) -> None:
        self._engine = engine
        self._authorizer = authorizer
        self._health = engine.health
        self._publisher = publisher
        self._clock = clock
        self._later = later
        self._count_max = settings.stages_max
        self._idle_ms = settings.stage_idle_ms
        self._stages: dict[str, Stage] = {}
        self._writers = writers = WriterTable(engine, clock=clock, writers_max=settings.writers_max, idle_ms=settings.writer_idle_ms)
        self._spill = spill = Spill(engine, publisher, settings.spill_sizes)
        self._memory = StageMemory(spill, self._stages, settings.stages_memory_bytes)
        self._publications = Publications(engine, publisher, writers, spill, clock=clock, whole_bytes=settings.publication_bytes)
        self._gone: dict[str, None] = {}
        """Handles of stages there were, which nobody may use again, oldest first."""
        self._forbidden: dict[tuple[str, str], None] = {}
        """Handles that a principal has dropped before there was a stage, oldest first. Anybody may drop whatever they like: that must not
        make those above be forgotten."""
        self._tasks: set[asyncio.Task[Publication | None]] = set()
        self._timer: Timer | None = None
        self._retries: dict[str, Timer] = {}
        """Publications that met a full disk on their way, by app."""
        self._is_stopped = False

    async def open(self) -> None:
        """Load; publications that a crash has stopped go on in the background."""
        await self._writers.load()
        for writer in await self._publications.open():
            self._resume(writer)

    async def drain(self) -> None:
        """What is staged goes with the broker: its writers stage it again. What is being published is finished, or (if it takes several
        appends) goes on after the next start."""
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
        """Forget the writers that were silent for too long."""
        await self._writers.expire()

    # Staging

    def stage(
        self, who: Principal, handle: str, topic: str, batch: AnyBatch, *, writer: str, epoch: str, order: int, partition: int | None
    ) -> asyncio.Future[None]:
        """Resolves when there was room for it. Whatever it raises or fails with, nothing of the run is staged."""
        self._authorizer.check(who, Action.PUBLISH, _KIND, writer)
        route = self._publisher.route(who, topic)
        size_bytes = check_batch(batch)
        if size_bytes > TRANSACTION_BYTES_MAX or weight(batch) > TRANSACTION_BYTES_MAX:
            raise LimitExceeded(f"a run of {size_bytes} bytes is more than the {TRANSACTION_BYTES_MAX} that can be staged at once")
        placing = Placing(_Untimed(route), batch, partition)
        stage = self._open(who, handle, writer, epoch, order)
        if stage.state is not State.OPEN:
            raise InvalidRequest(f"stage {handle!r} is sealed")
        return self._memory.arrive(stage, topic, route.rule, placing.writes, len(batch), size_bytes)

    async def seal(self, who: Principal, handle: str, writer: str, epoch: str, order: int) -> StageSize:
        """Idempotent. With `app` a stage that is not there is made: a task may have had nothing to stage."""
        if writer and handle not in self._stages:
            self._authorizer.check(who, Action.PUBLISH, _KIND, writer)
            self._publisher.check_open()
            stage = self._open(who, handle, writer, epoch, order)
        else:
            stage = self._find(who, handle)
            self._check_topics(who, stage.writer, stage.by_topic)
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
                raise InvalidRequest(f"stage {handle!r} belongs to another writer, run or place in the order")
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
        """The stages of a run that has been superseded will never be published. Raises `StaleEpoch`."""
        if not writer.enter(epoch):
            return
        self._writers.fence(writer)
        for stage in [self._stages[handle] for handle in writer.handles]:
            if stage.epoch and stage.epoch != epoch and stage.state is not State.PUBLISHING:
                self._drop(stage)

    # Publishing

    async def publish(self, who: Principal, name: str, version: int, handles: Sequence[str], epoch: str, remember_ms: int) -> Publication:
        """The check and the publication are one step, whoever else asks at the same time; it goes on if its caller gives up."""
        self._authorizer.check(who, Action.PUBLISH, _KIND, name)
        self._publisher.check_open()
        check_version(version)
        if remember_ms < 0:
            raise InvalidRequest(f"a writer cannot be remembered for {remember_ms} ms")
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
            writer.check_epoch(epoch)  # another run may have come while this one waited, and the rules may have changed
            await self._publications.roll(writer)
            writer.check_owner(who.name, epoch)
            self._check_topics(who, writer, writer.topics)
            if writer.version is not None and version <= writer.version:
                doomed = [self._stages[handle] for handle in handles if handle in writer.handles]
                self._check_topics(who, writer, _topics_of(doomed))
                for stage in doomed:
                    self._drop(stage)
                return Publication(writer.name, version, True, 0)
            writer.check_skip(version)
            stages = self._sealed(writer, handles)
            self._check_topics(who, writer, _topics_of(stages))
            await self._write(who, writer, version, stages)
            return Publication(writer.name, version, False, sum(stage.records for stage in stages))

    async def _write(self, who: Principal, writer: Writer, version: int, stages: Sequence[Stage]) -> None:
        for stage in stages:
            stage.state = State.PUBLISHING
        before = writer.owner, writer.topics
        writer.owner = writer.owner or (who.name if writer.epoch else "")
        writer.topics = tuple(_topics_of(stages)[:SINK_TOPICS_REMEMBERED]) or writer.topics
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
        """What was begun long ago, before the publication before this one, belonged to attempts that lost: a writer stages for one
        version after another."""
        before = self._clock() - STAGE_STRAGGLER_MS
        for stage in [self._stages[handle] for handle in writer.handles]:
            if stage.generation < writer.publications - 1 and stage.made_at <= before and stage.state is not State.PUBLISHING:
                self._drop(stage)

    def _sealed(self, writer: Writer, handles: Iterable[str]) -> list[Stage]:
        """In the order of publication. Raises `UnknownStage`, `InvalidRequest`."""
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
        """With a publication that was begun."""
        self._retries.pop(writer.name, None)
        if not self._is_stopped:
            self._follow(writer, asyncio.get_running_loop().create_task(self._roll(writer)))

    async def _roll(self, writer: Writer) -> None:
        async with self._writers.locked(writer):
            await self._publications.roll(writer)

    def _retry_later(self, writer: Writer, task: asyncio.Task[Publication | None]) -> None:
        """After a full disk, and the like; what will not get better by waiting waits for somebody to look at it."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BrokerError) and error.retriable and not self._is_stopped and writer.name not in self._retries:
            self._retries[writer.name] = self._later(_RETRY_SECONDS, partial(self._resume, writer))

    # Going away

    async def drop(self, who: Principal, handles: Iterable[str]) -> int:
        """How many there were. One that is being published is not dropped; one that is not there cannot be made by this principal any
        more: the task it belongs to may only be slow. Another writer's is as unknown as none."""
        wanted = list(dict.fromkeys(handles))
        known = [stage for handle in wanted if (stage := self._stages.get(handle)) is not None and self._may_act(who, stage.writer.name)]
        for stage in known:
            self._check_topics(who, stage.writer, stage.by_topic)
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
        """Its last version and its stages, and what is left of a publication under way. Raises `NoSuchEntry`."""
        self._authorizer.check(who, Action.DELETE, _KIND, name)
        writer = self._writers.find(name)
        if writer is None:
            raise NoSuchEntry("writer", name)
        for stage in [self._stages[handle] for handle in writer.handles]:
            if stage.state is not State.PUBLISHING:
                self._drop(stage)
        async with self._writers.locked(writer):
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
        """Set the timer for the writer that was silent for the longest time, if it is not set already."""
        if self._timer is not None or self._is_stopped:
            return
        first = min((stage.writer.used_at for stage in self._stages.values() if stage.state is not State.PUBLISHING), default=None)
        if first is not None:
            self._timer = self._later(max(0, first + self._idle_ms - self._clock()) / 1000, self._on_timer)

    def _on_timer(self) -> None:
        """Writers that have gone away without a word."""
        self._timer = None
        before = self._clock() - self._idle_ms
        for stage in list(self._stages.values()):
            if stage.writer.used_at <= before and stage.state is not State.PUBLISHING:
                self._drop(stage)
        self._arm()

    # Looking

    def last_version(self, who: Principal, name: str) -> int | None:
        writer = self._writers.find(name)
        if not self._may_see(who, name, () if writer is None else writer.topics):
            raise NotAuthorized(principal=who.name, action=Action.DESCRIBE.value, resource=f"{_KIND} {name!r}")
        return None if writer is None else writer.version

    def writers(self, who: Principal) -> list[WriterEntry]:
        return [entry for entry in self._writers.entries() if self._may_see(who, entry.writer, self._writers.writers[entry.writer].topics)]

    def stages(self, who: Principal) -> list[StageEntry]:
        now = self._clock()
        return [stage.entry(now) for _, stage in sorted(self._stages.items()) if self._may_see(who, stage.writer.name, stage.by_topic)]

    # Who may

    def _may_see(self, who: Principal, name: str, topics: Iterable[str]) -> bool:
        """A writer, and where it writes to."""
        may = any(self._authorizer.allows(who, action, _KIND, name) for action in (Action.DESCRIBE, Action.PUBLISH))
        return may and all(self._authorizer.allows_topic(who, topic) for topic in self._present(topics))

    def _may_act(self, who: Principal, name: str) -> bool:
        """Asked where the answer is not told, so that a denial is on record all the same."""
        try:
            self._authorizer.check(who, Action.PUBLISH, _KIND, name)
        except NotAuthorized:
            return False
        return True

    def _check_acts(self, who: Principal, name: str, epoch: str) -> None:
        """The name of a writer is not enough to act for it: its versions and its stages are those of whoever may publish where it does.
        Raises `NotAuthorized`."""
        writer = self._writers.find(name)
        if writer is None:
            return
        self._check_topics(who, writer, writer.topics)
        if epoch and epoch != writer.epoch:  # it is about to supersede another, whose stages go
            self._check_topics(who, writer, _topics_of(self._stages[handle] for handle in writer.handles))

    def _check_topics(self, who: Principal, writer: Writer, topics: Iterable[str]) -> None:
        """Raises `NotAuthorized`, which names the topic to those only who may know of it."""
        for topic in self._present(topics):
            try:
                self._publisher.check_may(who, topic)
            except NotAuthorized:
                if self._authorizer.allows_topic(who, topic):
                    raise
                raise NotAuthorized(principal=who.name, action=Action.PUBLISH.value, resource=f"{_KIND} {writer.name!r}") from None

    def _present(self, topics: Iterable[str]) -> list[str]:
        """Where a topic is gone, nothing of its writer is left to be guarded."""
        known = self._engine.topics()
        return [topic for topic in topics if topic in known]

    def _find(self, who: Principal, handle: str) -> Stage:
        """Raises `UnknownStage`, also for one of a writer that this principal may not act for."""
        stage = self._stages.get(handle)
        if stage is None or not self._may_act(who, stage.writer.name):
            raise UnknownStage(handle)
        return stage


def _topics_of(stages: Iterable[Stage]) -> list[str]:
    return list(dict.fromkeys(topic for stage in stages for topic in stage.by_topic))


def _remember(latest: dict[T, None], one: T) -> None:
    latest[one] = None
    if len(latest) > STAGES_REMEMBERED_MAX:
        del latest[next(iter(latest))]
