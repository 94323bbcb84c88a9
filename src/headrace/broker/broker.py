"""The broker: every operation of a session. Each method checks the permission, then calls the module that implements it.

    broker.py                       topics, publish, transactions
    operations/reading.py           read
    operations/groups.py            groups and their members
    operations/messages.py          dead letters, delayed messages
    operations/positions.py         bounds of partitions, and where records lie in files
    operations/writers.py           exactly-once writers
    operations/schemas.py           `broker.schemas`

These seven modules decide every permission, and no module below them asks the authorizer. A check that must run later, because a
permission may end while a call waits or because it depends on state, is handed down as a function.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from headrace.broker.authorizer import Action, AuditHook, Authorize, Authorizer, Principal, allow_all
from headrace.broker.dead_letters.dead_letters import DeadLetters
from headrace.broker.dead_letters.expiry import Sweep
from headrace.broker.dead_letters.moves import Moves
from headrace.broker.delayed import RandomBytes, Schedule
from headrace.broker.expiry import Expiry
from headrace.broker.groups.background import GroupContext
from headrace.broker.groups.members import GroupConsumers
from headrace.broker.groups.offsets import Groups
from headrace.broker.health import Status, supervise
from headrace.broker.measuring import MeasuringOperations
from headrace.broker.meters import Meter, Meters
from headrace.broker.operations.groups import GroupOperations
from headrace.broker.operations.messages import DeadLetterOperations, DelayedOperations
from headrace.broker.operations.positions import PositionOperations
from headrace.broker.operations.reading import ReadOperations
from headrace.broker.operations.schemas import Schemas
from headrace.broker.operations.writers import WriterOperations, WriterPermissions
from headrace.broker.publishing.producers import Producers
from headrace.broker.publishing.publish import ProducerStamp, Publisher
from headrace.broker.publishing.published import Outcome, Published, PublishedEach
from headrace.broker.publishing.requirements import Rule
from headrace.broker.reading.cursor import Cursors
from headrace.broker.reading.fetch import Fetcher
from headrace.broker.reading.waits import Watermarks
from headrace.broker.schema_checks import settled
from headrace.broker.schemas.registry import SchemaRegistry
from headrace.broker.settings import BrokerSettings, Clock, Later, loop_later
from headrace.broker.topics import LISTED_A_TURN, Topics
from headrace.broker.tracing import Tracer
from headrace.broker.transactions import Transaction, Transactions
from headrace.broker.writers.stages import Stages
from headrace.engine.contract import Ack, Engine, HealthReport, Placement, Topic, TopicConfig
from headrace.errors import BrokerError, UnknownTopic
from headrace.records import AnyBatch

_DEFAULTS = BrokerSettings()
_BROKER = "headrace"
"""Name of the broker as a resource."""
_Shown = TypeVar("_Shown")
_Served = TypeVar("_Served")


class Broker(
    ReadOperations,
    PositionOperations,
    DeadLetterOperations,
    DelayedOperations,
    GroupOperations,
    MeasuringOperations,
    WriterOperations,
):
    """Owns its engine: `open` opens it, `close` closes it. Call all methods on the event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock,
        settings: BrokerSettings = _DEFAULTS,
        authorize: Authorize = allow_all,
        audit_hook: AuditHook | None = None,
        later: Later | None = None,
        random_bytes: RandomBytes | None = None,
        ticks: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`clock` returns Unix ms, `ticks` seconds of a monotonic clock for durations. `later` sets timers (None: `call_later` of the
        running loop). `random_bytes` creates the ids of delayed messages, which cannot be published without it."""
        later = loop_later if later is None else later
        self._engine = engine
        self._settings = settings
        self._later = later
        self._listing = asyncio.Lock()
        self._authorizer = authorizer = Authorizer(authorize, audit_hook)
        self.meters = Meters(ticks)
        self._topics = Topics(engine, settings, changed=self._topic_changed, gone=self._topic_gone)
        self._publisher = publisher = Publisher(engine, self._check_publish, self._topics.find, clock, self._schema_rule, self.meters)
        self._producers = Producers(engine, publisher, clock=clock, scopes_max=settings.producers_max, idle_ms=settings.producer_idle_ms)
        self._fetcher = Fetcher(engine, clock=clock, later=later, waiting_max=settings.waiting_fetches_max)
        self._watermarks = Watermarks(engine, later=later, waiting_max=settings.waiting_fetches_max)
        self._cursors = Cursors(engine, clock)
        self._groups = groups = Groups(engine, clock=clock, groups_max=settings.groups_max)
        self._clock = clock
        self._opened_at = clock()
        self._dead_letters = DeadLetters(engine, publisher, self._topics, clock)
        self._moves = Moves(engine, publisher, self._dead_letters, clock)
        self._schemas = SchemaRegistry(
            engine,
            clock=clock,
            changed=publisher.forget,
            letters=self._dead_letters.rejected,
            create_dead_letter_topic=self._create_dead_letter_topic,
        )
        self._creating_dead_letters: set[asyncio.Task[None]] = set()
        self.schemas = Schemas(self._schemas, authorizer, self._topics, self._dead_letters, self.check_coordinator)
        self._sweep = Sweep(engine, publisher, self._dead_letters, clock=clock, later=later, every_ms=settings.sweep_every_ms)
        self._schedule = Schedule(
            engine,
            publisher,
            clock=clock,
            later=later,
            count_max=settings.delayed_max,
            bytes_max=settings.delayed_bytes_max,
            check_owner=lambda owner, topic: self._check_publish(Principal(owner), topic),
            letters=self._dead_letters.rejected,
            create_dead_letter_topic=self._create_dead_letter_topic,
            random_bytes=random_bytes,
        )
        context = GroupContext(engine, groups, self._dead_letters, clock, later, settings.settlement_commit_ms)
        self._consumers = GroupConsumers(context, consumers_max=settings.groups_max)
        self._transactions = Transactions(
            publisher,
            groups,
            self._check_commit,
            clock=clock,
            later=later,
            open_max=settings.transactions_open_max,
            bytes_max=settings.transactions_bytes_max,
        )
        self._stages = Stages(engine, WriterPermissions(authorizer, engine), publisher, clock=clock, later=later, settings=settings)
        self._readable = {}
        self._is_coordinator = False
        self._following = self._schemas.follower()
        engine.topic_changed = self._topic_changed_elsewhere
        self._expiry = Expiry(engine.health, self._producers, self._stages, later, settings.expire_every_ms)
        self._closing: asyncio.Task[None] | None = None

    @property
    def tracer(self) -> Tracer | None:
        """Receives publishes and deliveries, if traces are configured. Set it before the first session."""
        return self._publisher.tracer

    @tracer.setter
    def tracer(self, tracer: Tracer | None) -> None:
        self._publisher.tracer = tracer

    async def open(self) -> None:
        """Open the engine and load the tables. If another process owns them, follow those that publishing and listing need; `take_over`
        loads the rest later."""
        await self._engine.open()
        self._opened_at = self._clock()
        if self._engine.ownership.is_owner:
            await self.take_over()
            return
        await self._schemas.open()
        await self._groups.load()
        self._following.start()

    async def take_over(self) -> None:
        """Serve as the coordinator, once the engine owns the tables."""
        await self._following.stop()
        await self._schemas.open()
        await self._groups.open(self._exists)
        await self._producers.load(self._exists)
        await self._dead_letters.open()
        await self._sweep.open()
        await self._schedule.open(self._exists)
        await self._stages.open()
        self._is_coordinator = True
        self._sweep.consider()
        self._expiry.start()

    async def close(self) -> None:
        """Drain: reject new publishes, end long polls, wait for staged appends, commit settlement progress, close the engine.
        Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._expiry.stop()
        await self._following.stop()
        staged = asyncio.get_running_loop().create_task(self._publisher.drain())
        self._fetcher.drain()
        self._watermarks.drain()
        self._cursors.drain()
        self._transactions.drain()
        await self._stages.drain()
        if self._creating_dead_letters:
            await asyncio.wait(self._creating_dead_letters)
        await self._schedule.drain()
        await self._sweep.drain()
        await self._expiry.finished()
        await self._consumers.drain()
        await self._schemas.checks.close()
        await staged
        await self._engine.close()

    async def maintain(self) -> None:
        """Run retention, compaction and the expiry of idle producers now. They also run periodically."""
        if self._is_coordinator:
            await self._expiry.now()
            await self._sweep.now()
        await self._engine.maintain()

    def access_changed(self) -> None:
        """Clear cached permissions after the rules changed, and end the cursors of principals that may no longer read."""
        self._authorizer.forget()
        self._readable.clear()
        self._publisher.forget()
        self._cursors.recheck()
        self._consumers.recheck()

    @property
    def now(self) -> int:
        """Unix ms by the broker's clock, which expiries are compared with."""
        return self._clock()

    @property
    def placement(self) -> Placement:
        """Hash that maps keys to partitions."""
        return self._engine.capabilities.placement

    @property
    def topic_defaults(self) -> TopicConfig:
        """Configuration of a topic that is created without one."""
        return self._topics.defaults

    # Topics

    def topics(self, who: Principal) -> list[Topic]:
        """Return the topics that this principal may see, by name. Internal topics are hidden."""
        return [topic for topic in self._topics.visible() if self._authorizer.allows_topic(who, topic.name)]

    async def listed(self, who: Principal, show: Callable[[list[Topic]], _Shown]) -> list[_Shown]:
        """Return the results of `show` for the topics that this principal may see, by name: a slice of them in each turn of the loop.

        Listings are served one at a time. The topics of a slice exist while it is shown.
        """
        shown: list[_Shown] = []
        async with self._listing:
            for number, names in enumerate(self._topics.slices()):
                if number:
                    await asyncio.sleep(0)
                existing = self._engine.topics()
                topics = [existing[name] for name in names if name in existing and self._authorizer.allows_topic(who, name)]
                if topics:
                    shown.append(show(topics))
        return shown

    def topic(self, who: Principal, name: str) -> Topic:
        """Return a topic. Raises `UnknownTopic`."""
        self._check_sees(who, name)
        return self._topics.find(name)

    async def with_new_topics(self, request: Callable[[], Awaitable[_Served]]) -> _Served:
        """Await the request. If this broker does not know a topic of it, look whether another broker has just created the topic, and await
        the request again."""
        try:
            return await request()
        except UnknownTopic as unknown:
            if not await self._engine.look_for_topic(unknown.topic):
                raise
            return await request()

    async def create_topic(self, who: Principal, name: str, *, partitions: int = 1, config: TopicConfig | None = None) -> Topic:
        """Create a topic. Raises `InvalidTopicName`, `TopicExists`, `LimitExceeded`."""
        self._authorizer.check(who, Action.CREATE, "topic", name)
        self._publisher.check_open()
        return await self._topics.create(name, partitions, config)

    async def ensure_topic(self, who: Principal, name: str) -> Topic:
        """Return the topic. Create it with the defaults if it is missing and `settings.auto_create` allows it, else raise `UnknownTopic`. A
        principal that may neither see nor create the topic gets the same error whether it exists or not."""
        is_there = name in self._engine.topics() or (not self._settings.auto_create and await self._engine.look_for_topic(name))
        if is_there or not (self._settings.auto_create and self._authorizer.allows(who, Action.CREATE, "topic", name)):
            self._check_sees(who, name)
        if is_there:
            return self._topics.find(name)
        if not self._settings.auto_create:
            raise UnknownTopic(name)
        self._authorizer.check(who, Action.CREATE, "topic", name)
        self._publisher.check_open()
        return await self._topics.ensure(name)

    async def prepare(self, who: Principal, name: str, values: Sequence[bytes | None]) -> None:
        """Do the asynchronous work that must precede `publish`: create a missing topic as `ensure_topic` does, and check values that
        are too large to check on the loop."""
        await self.ensure_topic(who, name)
        await settled(lambda: self.check_ready(who, name, values))

    def check_ready(self, who: Principal, topic: str, values: Sequence[bytes | None]) -> None:
        """Raise what `publish` would raise at once, and `SchemaCheckPending` if the values must be checked first."""
        rule = self._publisher.known_route(who, topic).rule
        if rule is not None:
            rule.check_ready(values)

    async def alter_topic(self, who: Principal, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        """Add partitions (never remove) or replace the configuration."""
        self.check_coordinator()
        self._authorizer.check(who, Action.ALTER, "topic", name)
        return await self._topics.alter(name, partitions, config)

    async def delete_topic(self, who: Principal, name: str) -> None:
        """Delete a topic with its records, committed offsets and producer state. Waiting readers fail with `UnknownTopic`."""
        self.check_coordinator()
        self._authorizer.check(who, Action.DELETE, "topic", name)
        await self._topics.delete(name)

    # Publish

    def publish(
        self,
        who: Principal,
        topic: str,
        batch: AnyBatch,
        *,
        partition: int | None = None,
        producer: ProducerStamp | None = None,
        ack: Ack | None = None,
    ) -> asyncio.Future[Published]:
        """Stage now; call order is log order within a partition. The future resolves when the guarantee of `ack` holds. With `partition`
        None, a record with a key goes to the partition given by FNV-1a of the key, and records without a key rotate, one batch at a time.
        Raises at once `UnknownTopic`, `UnknownPartition`, `RecordTooLarge`, `OutOfSequence`, `NotAuthorized`, `Unavailable`,
        `SchemaCheckPending`. The future fails with `DiskFull` or `StorageFailed`."""
        if producer is None:
            return self._publisher.publish(who, topic, batch, partition, ack)
        self.check_coordinator()
        began = self.meters.ticks()
        answer = self._producers.publish(self._publisher.route(who, topic), batch, partition, producer, ack)
        answer.add_done_callback(partial(self._count_published, self.meters.meter(topic, who.protocol), batch, began))
        return answer

    def _count_published(self, meter: Meter, batch: AnyBatch, began: float, answer: asyncio.Future[Published]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            meter.count(len(batch), batch.size_bytes)
            meter.took(self.meters.ticks() - began)

    def publish_one(self, who: Principal, topic: str, value: bytes, key: bytes | None = None, *, partition: int | None = None) -> Outcome:
        """Publish a single record as `publish` does. Records of the same turn of the loop share an append, so this is cheaper."""
        return self._publisher.publish_one(who, topic, value, key, partition)

    def publish_each(
        self, who: Principal, topics: Sequence[str], values: Sequence[bytes], keys: Sequence[bytes | None] | None = None
    ) -> asyncio.Future[PublishedEach] | None:
        """Publish single records, each to its topic. A record that fails later does not fail the others. Returns None, with nothing
        staged, if a topic has a schema or an expiry: the caller then uses `publish`. Raises at once as `publish` does, for any of them."""
        return self._publisher.publish_each(who, topics, values, keys)

    # Transactions

    def begin(self, who: Principal, *, id: str | None = None, timeout_ms: int = 60_000) -> Transaction:
        """Open a transaction. Raises `LimitExceeded`, and `InvalidTransaction` while one of the same id is open."""
        self.check_coordinator()
        self._authorizer.check(who, Action.PUBLISH, "transaction", id or "")
        return self._transactions.begin_all(who, 1, timeout_ms)[0] if id is None else self._transactions.begin(who, id, timeout_ms)

    def begin_all(self, who: Principal, count: int, *, timeout_ms: int = 60_000) -> list[Transaction]:
        """Open so many transactions or, if the limit does not allow all, fewer. Raises as `begin` does if it does not allow one."""
        self.check_coordinator()
        self._authorizer.check(who, Action.PUBLISH, "transaction", "")
        return self._transactions.begin_all(who, count, timeout_ms)

    # Status and internals

    def may_describe(self, who: Principal) -> bool:
        """Return whether the principal may see the facts of the broker itself: `status`, listeners, connections, disk."""
        return self._authorizer.allows(who, Action.DESCRIBE, "broker", _BROKER)

    async def status(self, who: Principal) -> Status:
        """Return counts over all visible topics, a slice of their partitions in each turn of the loop, and the health."""
        self._authorizer.check(who, Action.DESCRIBE, "broker", _BROKER)
        topics = self._topics.visible()
        places = [(topic.name, partition) for topic in topics for partition in range(topic.partitions)]
        records = written = 0
        for begin in range(0, len(places), LISTED_A_TURN):
            if begin:
                await asyncio.sleep(0)
            existing = self._engine.topics()
            for name, partition in places[begin : begin + LISTED_A_TURN]:
                if name in existing and partition < existing[name].partitions:
                    bounds = self._engine.bounds(name, partition)
                    records += bounds.end - bounds.first
                    written += bounds.end
        return Status(uptime_ms=self.uptime_ms, topics=len(topics), records=records, written=written, health=self.health)

    def traffic(self, who: Principal) -> dict[str, Meter]:
        """Return the traffic by protocol over the topics that this principal may see. Deleted topics count for those who may describe
        the broker."""
        return self.meters.by_protocol(partial(self._authorizer.allows_topic, who), with_gone=self.may_describe(who))

    def delayed_count(self, who: Principal) -> int:
        """Return the number of delayed messages: all of them for principals that may describe the broker, else those of `delayed`. 0 if
        this broker is not the coordinator."""
        if not self._is_coordinator:
            return 0
        return len(self._schedule) if self.may_describe(who) else len(self.delayed(who))

    @property
    def uptime_ms(self) -> int:
        return max(0, self._clock() - self._opened_at)

    @property
    def health(self) -> HealthReport:
        """Health of the background threads and tasks. Needs no permission: readiness checks use it."""
        return self._engine.health.report()

    def _check_sees(self, who: Principal, topic: str) -> None:
        if not self._authorizer.allows_topic(who, topic):
            self._authorizer.check(who, Action.DESCRIBE, "topic", topic)

    def _check_publish(self, who: Principal, topic: str) -> None:
        self._authorizer.check(who, Action.PUBLISH, "topic", topic)

    def _exists(self, topic: str) -> bool:
        return topic in self._engine.topics()

    def _topic_changed(self, name: str) -> None:
        self._readable.clear()
        self._publisher.forget(name)
        self._watermarks.topic_changed(name)
        if self._is_coordinator:
            self._sweep.consider(name)
        self._consumers.partitions_added(name, self._engine.topics()[name].partitions)

    def _topic_changed_elsewhere(self, name: str) -> None:
        """Follow a change that did not come through this broker."""
        topic = self._engine.topics().get(name)
        if topic is None:
            purging = asyncio.get_running_loop().create_task(self._topics.purge(name))
            supervise(self._engine.health, "removal of a deleted topic's data", purging)
        elif not topic.internal:
            self._topic_changed(name)

    async def _topic_gone(self, name: str) -> None:
        """End the readers first, without an await, so that none can mistake a new topic of the same name for the deleted one."""
        gone = UnknownTopic(name)
        self.meters.topic_gone(name)
        self._readable.clear()
        self._publisher.forget(name)
        self._fetcher.topic_gone(gone)
        self._watermarks.topic_gone(gone)
        self._cursors.topic_gone(gone)
        self._consumers.topic_gone(gone)
        if not self._is_coordinator:
            return  # the coordinator sees the deletion too and removes the rows
        await self._groups.topic_gone(name)
        await self._producers.topic_gone(name)
        await self._dead_letters.topic_gone(name)
        self._moves.topic_gone(name)
        await self._schemas.release(name)
        await self._sweep.topic_gone(name)
        await self._schedule.topic_gone(name)

    def _schema_rule(self, topic: str) -> Rule | None:
        return self._schemas.rule(topic)

    def _create_dead_letter_topic(self, topic: str) -> None:
        making = asyncio.get_running_loop().create_task(self._ensure_dead_letters(topic))
        self._creating_dead_letters.add(making)
        making.add_done_callback(self._creating_dead_letters.discard)
        supervise(self._engine.health, "creation of dead letter topics", making)

    async def _ensure_dead_letters(self, topic: str) -> None:
        with contextlib.suppress(BrokerError):  # the write that meets a full disk reports it
            await self._dead_letters.ensure(topic)
