"""The broker: every operation of a session. Each method checks the permission, then calls the module that implements it.

`publish`, the operations of writers (`WriterOperations`) and groups (`GroupOperations`) and `schemas` leave the check to their module;
`authorizer.py` lists all call sites.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from headrace.broker.authorizer import ANONYMOUS, Action, AuditHook, Authorize, Authorizer, Principal, allow_all
from headrace.broker.dead_letters.dead_letters import SUFFIX, DeadLetterEntry, DeadLetters, Replayed
from headrace.broker.dead_letters.expiry import Sweep
from headrace.broker.dead_letters.moves import Moves
from headrace.broker.delayed import Delayed, DelayedEntry, RandomBytes, Schedule, Waiting
from headrace.broker.groups.consumer import GroupContext
from headrace.broker.groups.members import GroupConsumers
from headrace.broker.groups.offsets import Groups
from headrace.broker.groups.operations import GroupOperations
from headrace.broker.health import Status, supervise
from headrace.broker.names import check_name
from headrace.broker.publishing.producers import Producers
from headrace.broker.publishing.publish import ProducerStamp, Published, Publisher
from headrace.broker.publishing.requirements import Rule
from headrace.broker.reading.cursor import Cursor, Cursors
from headrace.broker.reading.fetch import Fetched, Fetcher
from headrace.broker.reading.waits import Ends, Watermarks
from headrace.broker.schema_checks import settled
from headrace.broker.schemas.operations import Schemas
from headrace.broker.schemas.registry import SchemaRegistry
from headrace.broker.settings import BrokerSettings
from headrace.broker.timers import Clock, Later, Timer
from headrace.broker.topics import Topics
from headrace.broker.transactions import Transaction, Transactions
from headrace.broker.writers.operations import WriterOperations
from headrace.broker.writers.stages import Stages
from headrace.engine.contract import Ack, Batch, Bounds, Engine, HealthReport, Topic, TopicConfig
from headrace.errors import BrokerError, InvalidRequest, NotAuthorized, UnknownMessage, UnknownTopic
from headrace.limits import DEAD_LETTERS_MOVED_MAX, DEAD_LETTERS_REPLAYED_MAX, FETCH_BYTES_MAX
from headrace.records import AnyBatch, Headers, RecordBatch

_DEFAULTS = BrokerSettings()
_BROKER = "headrace"
"""Name of the broker as a resource."""


class Broker(WriterOperations, GroupOperations):
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
    ) -> None:
        """`clock` returns Unix ms. `later` sets timers (None: `call_later` of the running loop). `random_bytes` creates the ids of
        delayed messages, which cannot be published without it."""
        later = _loop_later if later is None else later
        self._engine = engine
        self._settings = settings
        self._later = later
        self._authorizer = authorizer = Authorizer(authorize, audit_hook)
        self._topics = Topics(engine, settings, changed=self._topic_changed, gone=self._topic_gone)
        self._publisher = publisher = Publisher(engine, authorizer, self._topics.find, clock, self._schema_rule)
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
        self.schemas = Schemas(self._schemas, authorizer, self._topics, self._dead_letters)
        self._sweep = Sweep(engine, publisher, self._dead_letters, clock=clock, later=later, every_ms=settings.sweep_every_ms)
        self._schedule = Schedule(
            engine,
            publisher,
            clock=clock,
            later=later,
            count_max=settings.delayed_max,
            bytes_max=settings.delayed_bytes_max,
            check_owner=lambda owner, topic: authorizer.check(Principal(owner), Action.PUBLISH, "topic", topic),
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
        self._stages = Stages(engine, authorizer, publisher, clock=clock, later=later, settings=settings)
        self._expiry: asyncio.Task[None] | None = None
        self._expiry_timer: Timer | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the engine and load the tables."""
        await self._engine.open()
        await self._schemas.open()
        await self._groups.open(self._exists)
        await self._producers.load(self._exists)
        await self._dead_letters.open()
        await self._sweep.open()
        await self._schedule.open(self._exists)
        await self._stages.open()
        self._opened_at = self._clock()
        self._schedule_expiry()

    async def close(self) -> None:
        """Drain: reject new publishes, end long polls, wait for staged appends, commit settlement progress, close the engine.
        Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
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
        if self._expiry is not None:
            await asyncio.wait([self._expiry])
        await self._consumers.drain()
        await self._schemas.checks.close()
        await staged
        await self._engine.close()

    async def maintain(self) -> None:
        """Run retention, compaction and the expiry of idle producers now. They also run periodically."""
        await self._producers.expire()
        await self._stages.expire()
        await self._sweep.now()
        await self._engine.maintain()

    def access_changed(self) -> None:
        """Clear cached permissions after the rules changed, and end the cursors of principals that may no longer read."""
        self._authorizer.forget()
        self._publisher.forget()
        self._cursors.recheck()
        self._consumers.recheck()

    @property
    def now(self) -> int:
        """Unix ms by the broker's clock, which expiries are compared with."""
        return self._clock()

    @property
    def topic_defaults(self) -> TopicConfig:
        """Configuration of a topic that is created without one."""
        return self._topics.defaults

    # Topics

    def topics(self, who: Principal) -> list[Topic]:
        """Return the topics that this principal may see, by name. Internal topics are hidden."""
        return [topic for topic in self._topics.visible() if self._authorizer.allows_topic(who, topic.name)]

    def topic(self, who: Principal, name: str) -> Topic:
        """Return a topic. Raises `UnknownTopic`."""
        self._check_sees(who, name)
        return self._topics.find(name)

    async def create_topic(self, who: Principal, name: str, *, partitions: int = 1, config: TopicConfig | None = None) -> Topic:
        """Create a topic. Raises `InvalidTopicName`, `TopicExists`, `LimitExceeded`."""
        self._authorizer.check(who, Action.CREATE, "topic", name)
        self._publisher.check_open()
        return await self._topics.create(name, partitions, config)

    async def ensure_topic(self, who: Principal, name: str) -> Topic:
        """Return the topic. Create it with the defaults if it is missing and `settings.auto_create` allows it, else raise `UnknownTopic`. A
        principal that may neither see nor create the topic gets the same error whether it exists or not."""
        is_there = name in self._engine.topics()
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
        self._authorizer.check(who, Action.ALTER, "topic", name)
        return await self._topics.alter(name, partitions, config)

    async def delete_topic(self, who: Principal, name: str) -> None:
        """Delete a topic with its records, committed offsets and producer state. Waiting readers fail with `UnknownTopic`."""
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
        return self._producers.publish(self._publisher.route(who, topic), batch, partition, producer, ack)

    # Read

    async def fetch(
        self,
        who: Principal,
        topic: str,
        partition: int,
        offset: int,
        *,
        bytes_max: int,
        records_max: int = 1 << 31,
        wait_ms: int = 0,
        bytes_min: int = 1,
        with_expired: bool = False,
    ) -> Fetched:
        """Read from `offset` on. At the end of the partition, wait up to `wait_ms` for `bytes_min` bytes, then return what is there. Raises
        `OffsetOutOfRange` below the first offset and above the end. Expired records are left out, unless `with_expired` is set by a caller
        that does not wait and filters whole columns."""
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._topics.find_partition(topic, partition)
        fetched = await self._fetcher.fetch(
            topic,
            partition,
            offset,
            bytes_max=bytes_max,
            records_max=records_max,
            wait_ms=wait_ms,
            bytes_min=bytes_min,
            with_expired=with_expired,
        )
        if wait_ms:
            self._authorizer.check(who, Action.READ, "topic", topic)  # the permission may have ended during the wait
        return fetched

    def check_reads(self, who: Principal, topic: str) -> None:
        """Check that records held back by a protocol may still be delivered. Raises `NotAuthorized`."""
        self._authorizer.check(who, Action.READ, "topic", topic)

    def bounds(self, who: Principal, topic: str, partition: int) -> Bounds:
        """Return the first offset and the end offset, which is the next to be assigned."""
        self._check_sees(who, topic)
        self._topics.find_partition(topic, partition)
        return self._engine.bounds(topic, partition)

    async def offset_for_time(self, who: Principal, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset whose record is at or after the time; the end offset if there is none."""
        self._check_sees(who, topic)
        self._topics.find_partition(topic, partition)
        return await self._engine.offset_for_time(topic, partition, timestamp_ms)

    def size_bytes(self, who: Principal, topic: str, partition: int) -> int:
        """Return the approximate disk space of the partition."""
        self._check_sees(who, topic)
        self._topics.find_partition(topic, partition)
        return self._engine.size_bytes(topic, partition)

    async def wait_for_growth(self, who: Principal, ends: Ends, wait_ms: int) -> bool:
        """Wait until a partition grows beyond its known end (topic → partition → end), or a partition exists that is not in `ends`. Returns
        False when the time is over first. Raises `UnknownTopic`, also while waiting."""
        for topic in ends:
            self._check_sees(who, topic)
        return await self._watermarks.moved(ends, wait_ms)

    def cursor(
        self,
        who: Principal,
        topic: str,
        partition: int,
        offset: int,
        deliver: Callable[[list[Batch]], None],
        *,
        credit_bytes: int,
        failed: Callable[[BrokerError], None] | None = None,
    ) -> Cursor:
        """Push records from `offset` on: history, then live, without gap or duplicate. `deliver` is called on the loop while there is
        credit. Each delivery uses credit for its key and value bytes and may overdraw by one batch. `failed` is called once when the cursor
        cannot continue (the topic is deleted). If retention deletes records before they are read, the cursor continues at the first offset.
        Raises `OffsetOutOfRange`."""
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._publisher.check_open()
        self._topics.find_partition(topic, partition)
        check = partial(self._authorizer.check, who, Action.READ, "topic", topic)
        return self._cursors.start(topic, partition, offset, deliver, credit_bytes=credit_bytes, failed=failed, check=check)

    # Transactions

    def begin(self, who: Principal, *, id: str | None = None, timeout_ms: int = 60_000) -> Transaction:
        """Open a transaction. Raises `LimitExceeded`, and `InvalidTransaction` while one of the same id is open."""
        self._authorizer.check(who, Action.PUBLISH, "transaction", id or "")
        return self._transactions.begin(who, id, timeout_ms)

    # Dead letters

    async def dead_letters(
        self, who: Principal, topic: str, *, records_max: int, bytes_max: int = FETCH_BYTES_MAX, after: str = "", replayed: bool = False
    ) -> list[DeadLetterEntry]:
        """Return the dead letters of a topic from the oldest on, or after the id `after`; replayed ones only if requested. Empty
        without a dead-letter topic."""
        self._authorizer.check(who, Action.READ, "topic", topic + SUFFIX)
        return await self._dead_letters.entries(topic, records_max, bytes_max, after, replayed)

    def dead_letter_counts(self, who: Principal) -> dict[str, int]:
        """Return the number of waiting dead letters by topic, for topics that this principal may see."""
        names = [topic.name.removesuffix(SUFFIX) for topic in self.topics(who) if topic.name.endswith(SUFFIX)]
        return {name: self._dead_letters.count(name) for name in names if name}

    async def move_to_dead_letters(self, who: Principal, topic: str, partition: int, offset: int, *, error: str = "") -> None:
        """Copy a record to the dead letters. Raises `UnknownMessage` if it no longer exists."""
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._authorizer.check(who, Action.PUBLISH, "topic", topic + SUFFIX)
        self._topics.find_partition(topic, partition)
        await self._dead_letters.move(topic, partition, offset, "moved", error)

    async def move_many_to_dead_letters(
        self, who: Principal, topic: str, entries: Sequence[tuple[int, int, str]], *, reason: str = "pipeline"
    ) -> int:
        """Copy records, each (partition, offset, error), to the dead letters. Returns how many are new for this reason, so a
        repeated call is harmless. Records that no longer exist are skipped."""
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._authorizer.check(who, Action.PUBLISH, "topic", topic + SUFFIX)
        check_name("reason", reason)
        if len(entries) > DEAD_LETTERS_MOVED_MAX:
            raise InvalidRequest(f"a move takes at most {DEAD_LETTERS_MOVED_MAX} records")
        self._topics.find(topic)
        wanted: dict[int, dict[int, str]] = {}
        for partition, offset, error in entries:
            wanted.setdefault(partition, {})[offset] = error
        for partition in wanted:
            self._topics.find_partition(topic, partition)
        return await self._moves.move(topic, wanted, reason)

    async def replay(self, who: Principal, topic: str, ids: Sequence[str]) -> Replayed:
        """Publish dead letters again with their keys and headers, and mark them, in one append. Raises `UnknownMessage` if one does not
        exist or was replayed; then none is published."""
        self._authorizer.check(who, Action.READ, "topic", topic + SUFFIX)
        if not 0 < len(set(ids)) <= DEAD_LETTERS_REPLAYED_MAX:
            raise InvalidRequest(f"a replay takes 1 to {DEAD_LETTERS_REPLAYED_MAX} dead letters")
        return await self._dead_letters.replay(self._publisher.route(who, topic), ids)

    async def purge_dead_letters(self, who: Principal, topic: str) -> int:
        """Delete all dead letters of a topic and return how many were waiting. Does nothing if there are none."""
        self._authorizer.check(who, Action.DELETE, "topic", topic + SUFFIX)
        return await self._dead_letters.purge(topic)

    # Delayed messages

    async def publish_delayed(
        self,
        who: Principal,
        topic: str,
        value: bytes | None,
        *,
        delay_ms: int,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        ttl_ms: int = 0,
    ) -> tuple[str, int]:
        """Publish after a delay (negative: none). Durable when it returns (id, Unix ms of delivery). Raises as `publish` does, and
        `LimitExceeded` when too many messages wait."""
        route = self._publisher.route(who, topic)
        self._schedule.check(delay_ms, ttl_ms)
        await settled(lambda: route.check(RecordBatch([value])))
        if partition is not None:
            self._topics.find_partition(topic, partition)
        due = self._clock() + max(0, delay_ms)
        return await self._schedule.add(Delayed(route.topic, due, who.name, value, key, headers, partition, ttl_ms)), due

    def delayed(self, who: Principal, topic: str | None = None, *, count_max: int | None = None) -> list[DelayedEntry]:
        """Return the waiting messages of one topic or (None) of all, by time: all, or the next `count_max`. Messages of other owners
        are included for topics that this principal may read or delete."""
        seen: dict[str, bool] = {}

        def is_seen(one: Waiting) -> bool:
            name = one.message.topic
            if name not in seen:
                seen[name] = topic in (None, name) and any(
                    self._authorizer.allows(who, action, "topic", name) for action in (Action.READ, Action.DELETE)
                )
            return seen[name] or (topic in (None, name) and who.name != ANONYMOUS and self._owns(who, one.message))

        return [self._delayed_entry(who, one) for one in self._schedule.waiting(is_seen, count_max)]

    def _delayed_entry(self, who: Principal, one: Waiting) -> DelayedEntry:
        message = one.message
        is_own = self._owns(who, message)
        key = message.key if is_own or self._authorizer.allows(who, Action.READ, "topic", message.topic) else None
        owner = message.owner if is_own or self._authorizer.allows(who, Action.DELETE, "topic", message.topic) else None
        return DelayedEntry(one.id, message.topic, message.due, len(message.value or b""), key, owner)

    async def cancel_delayed(self, who: Principal, id: str, *, topic: str | None = None) -> None:
        """Cancel a message; it is not delivered after this returns. Allowed for its owner and for principals that may delete its topic.
        Raises `UnknownMessage` if it is not waiting, is in another topic, or may not be cancelled by this principal. The error is the same,
        so that guessing reveals nothing."""
        waiting = self._schedule.find(id)
        message = waiting.message
        if topic not in (None, message.topic):
            raise UnknownMessage(id)
        if not self._owns(who, message):
            try:
                self._authorizer.check(who, Action.DELETE, "topic", message.topic)
            except NotAuthorized:
                raise UnknownMessage(id) from None
        await self._schedule.cancel(waiting)

    def _owns(self, who: Principal, message: Delayed) -> bool:
        """Return whether the principal owns the message. An API key of the owner whose scopes exclude the topic does not."""
        return who.name == message.owner and self._authorizer.allows(who, Action.PUBLISH, "topic", message.topic)

    def may_describe(self, who: Principal) -> bool:
        """Return whether the principal may see the facts of the broker itself: `status`, listeners, connections, disk."""
        return self._authorizer.allows(who, Action.DESCRIBE, "broker", _BROKER)

    def status(self, who: Principal) -> Status:
        """Return counts over all visible topics, and the health."""
        self._authorizer.check(who, Action.DESCRIBE, "broker", _BROKER)
        topics = self._topics.visible()
        bounds = [self._engine.bounds(topic.name, partition) for topic in topics for partition in range(topic.partitions)]
        return Status(
            uptime_ms=self.uptime_ms,
            topics=len(topics),
            records=sum(held.end - held.first for held in bounds),
            written=sum(held.end for held in bounds),
            health=self.health,
        )

    @property
    def uptime_ms(self) -> int:
        return max(0, self._clock() - self._opened_at)

    @property
    def health(self) -> HealthReport:
        """Health of the background threads and tasks. Needs no permission: readiness checks use it."""
        return self._engine.health.report()

    # Internals

    def _check_sees(self, who: Principal, topic: str) -> None:
        if not self._authorizer.allows_topic(who, topic):
            self._authorizer.check(who, Action.DESCRIBE, "topic", topic)

    def _exists(self, topic: str) -> bool:
        return topic in self._engine.topics()

    def _topic_changed(self, name: str) -> None:
        self._publisher.forget(name)
        self._watermarks.topic_changed(name)
        self._sweep.consider()
        self._consumers.partitions_added(name, self._engine.topics()[name].partitions)

    async def _topic_gone(self, name: str) -> None:
        """End the readers first, without an await, so that none can mistake a new topic of the same name for the deleted one."""
        gone = UnknownTopic(name)
        self._publisher.forget(name)
        self._fetcher.topic_gone(gone)
        self._watermarks.topic_gone(gone)
        self._cursors.topic_gone(gone)
        self._consumers.topic_gone(gone)
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

    def _schedule_expiry(self) -> None:
        if self._closing is None:
            self._expiry_timer = self._later(self._settings.expire_every_ms / 1000, self._start_expiry)

    def _start_expiry(self) -> None:
        self._expiry = asyncio.get_running_loop().create_task(self._expire())
        supervise(self._engine.health, "expiry of idle producers and stages", self._expiry)

    async def _expire(self) -> None:
        try:
            await self._producers.expire()
            await self._stages.expire()
        except BrokerError:
            pass  # a write that meets a full or failed disk reports it; the next round retries
        finally:
            self._schedule_expiry()


def _loop_later(seconds: float, callback: Callable[[], object]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, callback)
