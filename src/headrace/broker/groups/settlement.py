"""Settlement: deliveries wait for an ack or a nack and are repeated until they get an ack.

A delivery without an ack in time is repeated at once; a nacked one after a delay that doubles each time. A record without attempts left
goes to the dead letters, durably, before it counts as settled. The group's committed offset is the lowest unsettled offset: after a
restart, records settled above it may be delivered again, and none is skipped. Attempts are counted in memory, so a restart resets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.broker.authorizer import Principal
from headrace.broker.dead_letters.dead_letters import dead_letter_topic
from headrace.broker.groups.consumer import GroupConsumer, GroupContext, Taking
from headrace.broker.groups.progress import Entry, Holder, PartitionProgress, Row, SettlementPolicy
from headrace.broker.reading.waits import Wait
from headrace.engine.contract import Bounds
from headrace.errors import InvalidRequest, LimitExceeded, OffsetOutOfRange, UnknownTopic
from headrace.limits import FETCH_BYTES_MAX
from headrace.records import Headers

__all__ = ["Delivery", "Settlement", "SettlementPolicy", "SettlementQueue", "Start"]

Start: TypeAlias = Literal["earliest", "latest"] | int


@dataclass(slots=True)
class Delivery:
    """One record, delivered to a consumer that must ack it."""

    id: int
    """Id within the queue that took the record. A redelivery has the same id."""
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


class SettlementQueue:
    """One consumer's handle on a group. Several queues of one group and topic split the work."""

    def __init__(self, consumer: GroupConsumer, context: GroupContext, policy: SettlementPolicy, partitions: Sequence[int] | None) -> None:
        self._consumer = consumer
        self._context = context
        self._holder = Holder(policy)
        self._partitions = None if partitions is None else sorted(set(partitions))
        self._turn = 0
        self._closing: asyncio.Future[None] | None = None
        self._check: Callable[[Principal], None] | None = None
        self.who: Principal | None = None
        """Principal on whose behalf records are taken. A queue used by several principals sets it before each `take`."""
        consumer.join(self._holder)

    def guard(self, who: Principal, check: Callable[[Principal], None]) -> None:
        """Set the check to run before records are handed out: permissions may end while the queue is open."""
        self.who, self._check = who, check

    @property
    def in_flight(self) -> int:
        """Number of deliveries that wait for an ack."""
        return len(self._holder.in_flight)

    async def take(self, records_max: int, bytes_max: int = FETCH_BYTES_MAX, *, wait_ms: int = 0) -> list[Delivery]:
        """Take up to `records_max` records; wait up to `wait_ms` for the first. Returns at least one ready record, whatever its size.
        Raises `UnknownTopic` after the topic is deleted, `InvalidRequest` after `close`."""
        if records_max < 1 or bytes_max < 1:
            raise InvalidRequest("records_max and bytes_max must be at least 1")
        found = await self._take_now(records_max, bytes_max)
        if found or wait_ms <= 0 or self._consumer.is_draining:
            return found
        wait = Wait(self._context.later, wait_ms)
        self._consumer.waits.add(wait)
        try:
            while not (found := await self._take_now(records_max, bytes_max)):
                if not await wait.for_more():
                    break
            return found
        finally:
            wait.stop()
            self._consumer.waits.discard(wait)

    async def _take_now(self, records_max: int, bytes_max: int) -> list[Delivery]:
        if self._closing is not None:
            raise InvalidRequest("the queue is closed")
        if self._check is not None and self.who is not None:
            self._check(self.who)
        if self._consumer.error is not None:
            raise self._consumer.error
        if self._consumer.is_draining:
            return []
        self._consumer.check_overdue()
        taking = Taking(self._holder, records_max, bytes_max)
        await self._consumer.take(taking, self._rotated_partitions())
        return [Delivery.of(entry, row) for entry, row in taking.taken]

    def _rotated_partitions(self) -> list[PartitionProgress]:
        """Return this queue's partitions, starting with a different one each time, so that a busy partition does not starve the others."""
        partitions = self._consumer.partitions
        mine = list(partitions.values()) if self._partitions is None else [partitions[partition] for partition in self._partitions]
        self._turn = (self._turn + 1) % len(mine)
        return mine[self._turn :] + mine[: self._turn]

    def ack(self, ids: Sequence[int]) -> list[bool]:
        """Settle these deliveries. False: unknown id, or delivered to another queue since. A late ack counts if the record was not
        delivered again."""
        self._consumer.check_overdue()
        answers = []
        for id in ids:
            entry = self._consumer.held(self._holder, id)
            if entry is not None:
                self._consumer.settle(entry)
            answers.append(entry is not None)
        return answers

    def nack(self, ids: Sequence[int], delay_ms: int | None = None) -> list[bool]:
        """Redeliver these after `delay_ms`, or after the policy's backoff. False as for `ack`."""
        if delay_ms is not None and delay_ms < 0:
            raise InvalidRequest(f"delay_ms is {delay_ms}; it must not be negative")
        self._consumer.check_overdue()
        answers = []
        for id in ids:
            entry = self._consumer.held(self._holder, id)
            if entry is not None:
                self._consumer.nack(entry, delay_ms)
            answers.append(entry is not None)
        return answers

    def reject(self, ids: Sequence[int], reason: str = "rejected by its consumer") -> list[bool]:
        """Move these to the dead letters. False as for `ack`."""
        self._consumer.check_overdue()
        answers = []
        for id in ids:
            entry = self._consumer.held(self._holder, id)
            if entry is not None:
                self._consumer.reject(entry, reason)
            answers.append(entry is not None)
        return answers

    def close(self) -> asyncio.Future[None]:
        """Requeue what is in flight; its attempt counts. The future resolves when the group's progress is durable; awaiting it is
        optional. Idempotent."""
        if self._closing is None:
            self._closing = self._consumer.leave(self._holder)
        return self._closing


class Settlement:
    """The `GroupConsumer` of every group and topic with open queues."""

    def __init__(self, context: GroupContext, *, consumers_max: int) -> None:
        self._context = context
        self._consumers_max = consumers_max
        self._consumers: dict[tuple[str, str], GroupConsumer] = {}

    def is_open(self, group: str) -> bool:
        return any(known == group for known, _ in self._consumers)

    def open(
        self, group: str, topic: str, partitions_count: int, policy: SettlementPolicy, partitions: Sequence[int] | None, start: Start
    ) -> SettlementQueue:
        policy.check()
        if policy.dead_letters:
            dead_letter_topic(topic)
        wanted = range(partitions_count) if partitions is None else partitions
        if not wanted:
            raise InvalidRequest("a queue needs at least one partition")
        self._context.groups.commits(group, {})
        consumer = self._consumers.get((group, topic))
        places = {
            partition: self._position(group, topic, partition, start)
            for partition in wanted
            if consumer is None or partition not in consumer.partitions
        }
        if consumer is None:
            if len(self._consumers) >= self._consumers_max:
                raise LimitExceeded(f"there are {self._consumers_max} settlement groups already")
            consumer = self._consumers[group, topic] = GroupConsumer(self._context, group, topic, self._done)
        consumer.takes_all = consumer.takes_all or partitions is None
        queue = SettlementQueue(consumer, self._context, policy, partitions)
        for partition, position in places.items():
            consumer.add_partition(partition, position)
        return queue

    def _position(self, group: str, topic: str, partition: int, start: Start) -> int:
        """Return where a known group resumes, or where a new one begins."""
        bounds = self._context.engine.bounds(topic, partition)
        committed = self._context.groups.committed(group, topic, partition)
        if committed is not None:
            return min(max(committed, bounds.first), bounds.end)
        if self._context.groups.has_read(group, topic):
            # The group knows the topic, so this partition was added while the group had no queue: all its records are new.
            return bounds.first
        return _begin(start, bounds)

    def _done(self, consumer: GroupConsumer) -> None:
        if self._consumers.get((consumer.group, consumer.topic)) is consumer:
            del self._consumers[consumer.group, consumer.topic]

    def partitions_added(self, topic: str, count: int) -> None:
        """Give the new partitions, from their first record on, to queues that take from all partitions."""
        for consumer in self._consumers.values():
            if consumer.topic == topic and consumer.takes_all:
                for partition in range(count):
                    if partition not in consumer.partitions:
                        consumer.add_partition(partition, self._context.engine.bounds(topic, partition).first)

    def recheck(self) -> None:
        """Wake the waiting queues after the rules changed: each checks its permission again."""
        for consumer in self._consumers.values():
            consumer.wake()

    def topic_gone(self, gone: UnknownTopic) -> None:
        for consumer in [consumer for consumer in self._consumers.values() if consumer.topic == gone.topic]:
            consumer.fail(gone)

    async def drain(self) -> None:
        await asyncio.gather(*(consumer.drain() for consumer in list(self._consumers.values())))


def _begin(start: Start, bounds: Bounds) -> int:
    if start == "earliest":
        return bounds.first
    if start == "latest":
        return bounds.end
    if not bounds.first <= start <= bounds.end:
        raise OffsetOutOfRange(wanted=start, first=bounds.first, end=bounds.end)
    return start
