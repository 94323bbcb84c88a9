"""The handle of a member of a group, and the registry of all group consumers.

A delivery without an ack in time is repeated at once; a nacked one after a delay that doubles each time. A record without attempts left
goes to the dead letters, durably, before it counts as settled. The group's committed offset is the lowest unsettled offset: after a
restart of the broker, records settled above it may be delivered again, and none is skipped. Attempts are counted in memory, so a restart
resets them. A group without members keeps its unsettled records in mind for a while, so that a member that returns receives those and
nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from headrace.broker.authorizer import Principal
from headrace.broker.dead_letters.dead_letters import dead_letter_topic
from headrace.broker.groups.background import GroupContext
from headrace.broker.groups.consumer import GroupConsumer
from headrace.broker.groups.membership import Identity, Mode
from headrace.broker.groups.progress import Entry, MemberState, PartitionProgress, Row, SettlementPolicy, rows_of
from headrace.broker.groups.taking import Taking
from headrace.broker.meters import Meter
from headrace.broker.reading.waits import Wait
from headrace.broker.settings import Timer
from headrace.broker.tracing import Tracer
from headrace.engine.contract import Bounds
from headrace.errors import BrokerError, GroupHasMembers, InvalidRequest, LimitExceeded, OffsetOutOfRange, UnknownTopic
from headrace.limits import FETCH_BYTES_MAX
from headrace.records import Headers

__all__ = ["Chunk", "Delivery", "GroupConsumers", "Member", "MemberEntry", "SettlementPolicy", "Start"]

Start: TypeAlias = Literal["earliest", "latest"] | int | Mapping[int, int]
"""Where a group begins that has not read the topic: a position, an offset, or an offset for each partition."""

_REMEMBERED_SECONDS: Final = 600.0
_REMEMBERED_MAX: Final = 1_000
"""Time for which group consumers without members keep their unsettled records, and number of such consumers."""


@dataclass(slots=True)
class Delivery:
    """One record, delivered to a member that must ack it."""

    id: int
    """Id within the group consumer. A redelivery has the same id."""
    partition: int
    offset: int
    attempt: int
    """1 for the first delivery."""
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers

    @classmethod
    def of(cls, entry: Entry, row: Row) -> Delivery:
        return cls(entry.id, entry.progress.partition, row.offset, entry.attempt, row.timestamp, row.key, row.value, row.headers)


@dataclass(slots=True)
class Chunk:
    """Adjacent records, settled together."""

    ids: list[int]
    values: list[bytes | None]


@dataclass(slots=True)
class Range:
    """Adjacent records of one partition with consecutive ids, without headers."""

    first_id: int
    values: list[bytes | None]


@dataclass(frozen=True, slots=True)
class MemberEntry:
    """Description of a member."""

    topic: str
    protocol: str
    user: str
    address: str
    mode: Mode
    partitions: list[int]
    """Partitions that it takes from: those it owns in an ordered group, all in a shared one."""
    unsettled: int
    credit: int
    is_stalled: bool


class Member:
    """One consumer in a group: takes records of a topic and settles them. `close` leaves the group."""

    def __init__(self, id: int, consumer: GroupConsumer, context: GroupContext, state: MemberState) -> None:
        self.id = id
        """Number that no other member has had."""
        self._consumer = consumer
        self._context = context
        self._state = state
        self._turn = 0
        self._closing: asyncio.Future[None] | None = None
        self._check: Callable[[Principal], None] | None = None
        self._allowed: Principal | None = None
        self._allowed_rules = 0
        """The principal that was allowed to take records, under the rules with this number."""
        self.meter: Meter | None = None
        """Counts what is taken."""
        self.tracer: Tracer | None = None
        self.who: Principal | None = None
        """Principal on whose behalf records are taken. A member used by several principals sets it before each `take`."""
        consumer.join(state)

    def guard(self, who: Principal, check: Callable[[Principal], None]) -> None:
        """Set the check to run before records are handed out: permissions may end while the member is in the group. `take_range_now`
        relies on the last check until the rules change."""
        self.who, self._check, self._allowed = who, check, None

    @property
    def mode(self) -> Mode:
        return self._consumer.mode

    @property
    def in_flight(self) -> int:
        """Number of records that wait for an ack."""
        return self._state.unsettled

    @property
    def credit(self) -> int:
        """Number of records that may wait for an ack."""
        return self._state.credit.records

    @property
    def partitions(self) -> list[int]:
        """Partitions that it takes from now."""
        return self._consumer.owned(self._state)

    async def take(self, records_max: int, bytes_max: int = FETCH_BYTES_MAX, *, wait_ms: int = 0) -> list[Delivery]:
        """Take up to `records_max` records; wait up to `wait_ms` for the first. Returns at least one ready record, whatever its size.
        Raises `UnknownTopic` after the topic is deleted, `InvalidRequest` after `close`."""
        taking = await self._take(records_max, bytes_max, wait_ms)
        taken = [Delivery.of(entry, row) for entry, row in taking.taken]
        for entry, (batch,) in taking.chunks:
            assert entry.is_range, "a member with chunks uses take_chunk"
            taken += (replace(Delivery.of(entry, row), id=id) for id, row in enumerate(rows_of(batch), entry.id))
        return taken

    async def take_ranges(self, records_max: int, bytes_max: int = FETCH_BYTES_MAX) -> tuple[list[Delivery], list[Range]]:
        """As `take`, for a member whose policy has ranges: single records, then ranges."""
        taking = await self._take(records_max, bytes_max, 0)
        singles = [Delivery.of(entry, row) for entry, row in taking.taken]
        return singles, [Range(entry.id, batch.values()) for entry, (batch,) in taking.chunks]

    async def take_chunk(self, records_max: int, bytes_max: int, *, wait_ms: int = 0) -> Chunk | None:
        """As `take`, for a member whose policy has chunks: the records are settled together. None: no records."""
        taking = await self._take(records_max, bytes_max, wait_ms)
        if taking.is_empty:
            return None
        values = [row.value for _, row in taking.taken]
        for _, living in taking.chunks:
            for batch in living:
                values += batch.values()
        return Chunk([entry.id for entry in taking.entries()], values)

    async def _take(self, records_max: int, bytes_max: int, wait_ms: int) -> Taking:
        taking = await self._take_or_wait(records_max, bytes_max, wait_ms)
        if self.meter is not None:
            self.meter.delivered_records += taking.records
            self.meter.delivered_bytes += bytes_max - taking.bytes_left
        if self.tracer is not None and not taking.is_empty and self.who is not None:
            self.tracer.deliver(self._consumer.topic, self.who.protocol, taking.records, taking.headers())
        return taking

    async def _take_or_wait(self, records_max: int, bytes_max: int, wait_ms: int) -> Taking:
        if records_max < 1 or bytes_max < 1:
            raise InvalidRequest("records_max and bytes_max must be at least 1")
        consumer = self._consumer
        wakes = consumer.wakes
        found = await self._take_now(records_max, bytes_max)
        if not found.is_empty or wait_ms <= 0 or consumer.is_draining:
            return found
        wait, waits = Wait(self._context.later, wait_ms), consumer.waits
        waits[self._state] = wait
        try:
            if consumer.wakes != wakes:
                wait.wake()  # while the first look read the log
            while await wait.for_more():
                found = await self._take_now(records_max, bytes_max)
                if not found.is_empty:
                    break
            return found
        finally:
            wait.stop()
            if waits.get(self._state) is wait:
                del waits[self._state]
            self._state.seen_at = self._context.clock()

    def take_range_now(self, records_max: int, bytes_max: int = FETCH_BYTES_MAX) -> Range | None:
        """Take exactly so many records if they are in memory and form one range. None: `take_ranges` finds what there is, or raises."""
        consumer = self._consumer
        if self.who is not self._allowed or self._allowed_rules != consumer.rules or self._closing is not None:
            return None
        if consumer.error is not None or consumer.is_draining or not self._state.policy.ranges or self.tracer is not None:
            return None
        found = consumer.take_now(self._state, records_max, bytes_max, self._is_asking())
        if found is None:
            return None
        id, batch = found
        if self.meter is not None:
            self.meter.delivered_records += records_max
            self.meter.delivered_bytes += batch.size_bytes
        return Range(id, batch.values())

    def _is_asking(self) -> int:
        """Note that the member asks for records, and return the time."""
        now = self._context.clock()
        self._consumer.seen(self._state, now, has_settled=False)
        self._consumer.check_overdue(now)
        return now

    async def _take_now(self, records_max: int, bytes_max: int) -> Taking:
        consumer = self._consumer
        if self._closing is not None:
            raise InvalidRequest("the member has left the group")
        if self._check is not None and self.who is not None:
            self._check(self.who)
            self._allowed, self._allowed_rules = self.who, consumer.rules
        if consumer.error is not None:
            raise consumer.error
        if consumer.is_draining:
            return Taking(self._state, records_max, bytes_max)
        self._is_asking()
        taking = Taking(self._state, records_max, bytes_max)
        await consumer.take(taking, self._rotated_partitions())
        return taking

    def _rotated_partitions(self) -> list[PartitionProgress]:
        """Return this member's partitions, starting with a different one each time, so that a busy partition does not starve the others."""
        mine = [self._consumer.partitions[partition] for partition in self.partitions]
        if len(mine) == 1:
            return mine
        self._turn = (self._turn + 1) % max(1, len(mine))
        return mine[self._turn :] + mine[: self._turn]

    def ack(self, ids: Sequence[int]) -> list[bool]:
        """Settle these deliveries. False: unknown id, or delivered to another member since. A late ack counts if the record was not
        delivered again."""
        now = self._seen()
        before = self._state.unsettled
        answers = self._consumer.ack(self._state, ids)
        self._settled(before, now)
        return answers

    def _settled(self, before: int, now: int) -> None:
        if before > self._state.unsettled:
            self._state.settled(before - self._state.unsettled, now)

    def ids_at(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """Return the id of the delivery at each (partition, offset), or 0 if this member does not have it."""
        found = (self._consumer.held_at(self._state, partition, offset) for partition, offset in places)
        return [0 if entry is None else entry.id for entry in found]

    async def flush(self) -> None:
        """Commit the progress of the group now."""
        await self._consumer.commit()

    def ack_below(self, partition: int, offset: int) -> int:
        """Settle all deliveries of the partition below the offset. Returns their number."""
        now = self._seen()
        before = self._state.unsettled
        below = self._consumer.held_below(self._state, partition, offset)
        for entry in below:
            self._consumer.settle(entry)
        self._settled(before, now)
        return len(below)

    def nack(self, ids: Sequence[int], delay_ms: int | None = None) -> list[bool]:
        """Redeliver these after `delay_ms`, or after the policy's backoff. False as for `ack`."""
        if delay_ms is not None and delay_ms < 0:
            raise InvalidRequest(f"delay_ms is {delay_ms}; it must not be negative")
        answers = []
        for entry in self._held(ids):
            if entry is not None:
                self._consumer.nack(entry, delay_ms)
            answers.append(entry is not None)
        return answers

    def reject(self, ids: Sequence[int], reason: str = "rejected by its consumer") -> list[bool]:
        """Move these to the dead letters. False as for `ack`."""
        answers = []
        for entry in self._held(ids):
            if entry is not None:
                self._consumer.reject(entry, reason)
            answers.append(entry is not None)
        return answers

    def _held(self, ids: Sequence[int]) -> Iterator[Entry | None]:
        self._seen()
        return (self._consumer.held(self._state, id) for id in ids)

    def _seen(self) -> int:
        """Note that the member settles records, and return the time."""
        now = self._context.clock()
        if self._closing is None:
            self._consumer.check_overdue(now)
            self._consumer.seen(self._state, now, has_settled=True)
        return now

    def close(self) -> asyncio.Future[None]:
        """Leave the group and requeue what is in flight; its attempt counts. The future resolves when the group's progress is durable;
        awaiting it is optional. Idempotent."""
        if self._closing is None:
            self._closing = self._consumer.leave(self._state)
        return self._closing


class GroupConsumers:
    """The `GroupConsumer` of every group and topic with members."""

    def __init__(self, context: GroupContext, *, consumers_max: int) -> None:
        self._context = context
        self._consumers_max = consumers_max
        self._consumers: dict[str, dict[str, GroupConsumer]] = {}
        """By group and topic."""
        self._count = 0
        self._remembered: dict[GroupConsumer, Timer] = {}
        """Consumers without members, the oldest first."""
        # Ids of members go on where a restarted broker may have ended, so that none is mistaken for another.
        self._last_id = context.clock() << 20
        context.groups.changed = self._offset_changed

    def _all(self) -> list[GroupConsumer]:
        return [consumer for by_topic in self._consumers.values() for consumer in by_topic.values()]

    def _active(self, group: str, topic: str | None = None) -> list[GroupConsumer]:
        """Return the consumers of the group that have members."""
        known = self._consumers.get(group, {})
        return [consumer for name, consumer in known.items() if consumer.members and topic in (None, name)]

    def check_idle(self, group: str, topic: str | None = None) -> None:
        """Raise `GroupHasMembers` if it has any."""
        if count := sum(len(consumer.members) for consumer in self._active(group, topic)):
            raise GroupHasMembers(group, count)

    def mode(self, group: str) -> Mode | None:
        """Return the mode of a group with members."""
        return next((consumer.mode for consumer in self._active(group)), None)

    def members(self, group: str) -> list[MemberEntry]:
        return [
            MemberEntry(
                consumer.topic,
                member.identity.protocol,
                member.identity.user,
                member.identity.address,
                consumer.mode,
                consumer.owned(member),
                member.unsettled,
                member.credit.records,
                bool(member.stalled),
            )
            for consumer in self._active(group)
            for member in consumer.members
        ]

    def unsettled(self) -> list[tuple[str, str, int, int]]:
        """Return (group, topic, members, deliveries that wait for an ack) of every group consumer."""
        return [(consumer.group, consumer.topic, len(consumer.members), consumer.unsettled) for consumer in self._all()]

    def topics(self, group: str) -> list[str]:
        """Return the topics in which the group has members."""
        return [consumer.topic for consumer in self._active(group)]

    def join(
        self,
        identity: Identity,
        group: str,
        topic: str,
        partitions_count: int,
        policy: SettlementPolicy,
        *,
        mode: Mode | None,
        default_mode: Mode,
        partitions: Sequence[int] | None,
        start: Start,
    ) -> Member:
        policy.check()
        if policy.dead_letters:
            dead_letter_topic(topic)
        wanted = range(partitions_count) if partitions is None else sorted(set(partitions))
        if not wanted:
            raise InvalidRequest("a member needs at least one partition")
        self._context.groups.commits(group, {})
        active_mode = self.mode(group)
        if mode is not None and active_mode not in (None, mode):
            raise InvalidRequest(f"group {group!r} is {active_mode}; a member that asks for {mode} can join when the others have left")
        consumer = self._consumers.get(group, {}).get(topic)
        positions = {
            partition: self._position(group, topic, partition, start)
            for partition in wanted
            if consumer is None or partition not in consumer.partitions
        }
        if consumer is None:
            if self._count >= self._consumers_max:
                raise LimitExceeded(f"there are {self._consumers_max} settlement groups already")
            consumer = GroupConsumer(self._context, group, topic, idle=self._idle, over=self._over)
            self._consumers.setdefault(group, {})[topic] = consumer
            self._count += 1
        elif (timer := self._remembered.pop(consumer, None)) is not None:
            timer.cancel()
        if not consumer.members:
            consumer.mode = active_mode or mode or default_mode
        consumer.takes_all = consumer.takes_all or partitions is None
        self._last_id += 1
        member = Member(self._last_id, consumer, self._context, MemberState(identity, policy, partitions, self._context.clock()))
        for partition, position in positions.items():
            consumer.add_partition(partition, position)
        return member

    def _position(self, group: str, topic: str, partition: int, start: Start) -> int:
        """Return where a known group resumes, or where a new one begins."""
        bounds = self._context.engine.bounds(topic, partition)
        committed = self._context.groups.committed(group, topic, partition)
        if committed is not None:
            return min(max(committed, bounds.first), bounds.end)
        if self._context.groups.has_read(group, topic):
            # The group knows the topic, so this partition was added while the group had no members: all its records are new.
            return bounds.first
        return _begin(start.get(partition, bounds.first) if isinstance(start, Mapping) else start, bounds)

    def _idle(self, consumer: GroupConsumer) -> None:
        """Keep the unsettled records and the uncommitted progress of a consumer without members for a while."""
        if consumer in self._remembered:
            return
        if not consumer.is_needed:
            consumer.stop()
            return
        self._remembered[consumer] = self._context.later(_REMEMBERED_SECONDS, consumer.stop)
        if len(self._remembered) > _REMEMBERED_MAX:
            next(iter(self._remembered)).stop()

    def _over(self, consumer: GroupConsumer) -> None:
        if (timer := self._remembered.pop(consumer, None)) is not None:
            timer.cancel()
        by_topic = self._consumers.get(consumer.group, {})
        if by_topic.get(consumer.topic) is consumer:
            self._count -= 1
            del by_topic[consumer.topic]
            if not by_topic:
                del self._consumers[consumer.group]

    def _offset_changed(self, group: str, topic: str, partition: int, offset: int | None) -> None:
        consumer = self._consumers.get(group, {}).get(topic)
        if consumer is not None and offset is not None:
            consumer.moved(partition, offset)

    def partitions_added(self, topic: str, count: int) -> None:
        """Give the new partitions, from their first record on, to members that take from all partitions."""
        for consumer in self._all():
            if consumer.topic == topic and consumer.takes_all:
                for partition in range(count):
                    if partition not in consumer.partitions:
                        consumer.add_partition(partition, self._context.engine.bounds(topic, partition).first)

    def recheck(self) -> None:
        """Let each member check its permission again after the rules changed. Those that wait do it now."""
        for consumer in self._all():
            consumer.recheck()

    def expel(self, group: str, topic: str | None, error: BrokerError) -> None:
        """End the members of the group with the error, and forget its unsettled records."""
        for name, consumer in list(self._consumers.get(group, {}).items()):
            if topic in (None, name):
                consumer.fail(error)

    def topic_gone(self, gone: UnknownTopic) -> None:
        for consumer in [consumer for consumer in self._all() if consumer.topic == gone.topic]:
            consumer.fail(gone)

    async def drain(self) -> None:
        await asyncio.gather(*(consumer.drain() for consumer in self._all()))


def _begin(start: Literal["earliest", "latest"] | int, bounds: Bounds) -> int:
    if start == "earliest":
        return bounds.first
    if start == "latest":
        return bounds.end
    if not bounds.first <= start <= bounds.end:
        raise OffsetOutOfRange(wanted=start, first=bounds.first, end=bounds.end)
    return start
