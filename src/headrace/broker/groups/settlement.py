"""Settlement: deliveries that wait for an ack or a nack, and come again until there is one.

A delivery that is not acked in time comes again at once; a nacked one after a pause that doubles each time. A record that used up
its attempts goes to the dead letters, durably, before it counts as settled. The group's committed offset is the lowest unsettled
one, so a restart may deliver again what was settled above it, and never skips anything. Attempts are counted in memory: a restart
counts anew.
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
    """One record on its way to a consumer that is to ack it."""

    id: int
    """Known to the queue that took it. When the record comes again, it has the same id."""
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
    """One consumer's handle on the work of a group. Several queues of one group and topic split the work between them."""

    def __init__(self, share: GroupConsumer, around: GroupContext, policy: SettlementPolicy, partitions: Sequence[int] | None) -> None:
        self._share = share
        self._around = around
        self._holder = Holder(policy)
        self._partitions = None if partitions is None else sorted(set(partitions))
        self._turn = 0
        self._closing: asyncio.Future[None] | None = None
        self._check: Callable[[Principal], None] | None = None
        self.who: Principal | None = None
        """On whose behalf records are taken. Whoever shares a queue between principals says so before each `take`."""
        share.join(self._holder)

    def guard(self, who: Principal, check: Callable[[Principal], None]) -> None:
        """Ask this before records are handed out: permissions may end while the queue is open."""
        self.who, self._check = who, check

    @property
    def in_flight(self) -> int:
        """Deliveries that wait for an ack."""
        return len(self._holder.in_flight)

    async def take(self, records_max: int, bytes_max: int = FETCH_BYTES_MAX, *, wait_ms: int = 0) -> list[Delivery]:
        """Up to so many records, at least one if any is ready however large; waits up to `wait_ms` for the first.

        Raises `UnknownTopic` when the topic is gone, `InvalidRequest` after `close`.
        """
        if records_max < 1 or bytes_max < 1:
            raise InvalidRequest("ask for at least one record and one byte")
        found = await self._take_now(records_max, bytes_max)
        if found or wait_ms <= 0 or self._share.is_draining:
            return found
        wait = Wait(self._around.later, wait_ms)
        self._share.waits.add(wait)
        try:
            while not (found := await self._take_now(records_max, bytes_max)):
                if not await wait.for_more():
                    break
            return found
        finally:
            wait.stop()
            self._share.waits.discard(wait)

    async def _take_now(self, records_max: int, bytes_max: int) -> list[Delivery]:
        if self._closing is not None:
            raise InvalidRequest("the queue is closed")
        if self._check is not None and self.who is not None:
            self._check(self.who)
        if self._share.error is not None:
            raise self._share.error
        if self._share.is_draining:
            return []
        self._share.check_overdue()
        taking = Taking(self._holder, records_max, bytes_max)
        await self._share.take(taking, self._lanes())
        return [Delivery.of(entry, row) for entry, row in taking.taken]

    def _lanes(self) -> list[PartitionProgress]:
        """This queue's lanes, each time beginning with another, so that a busy one does not starve the rest."""
        partitions = self._share.partitions
        mine = list(partitions.values()) if self._partitions is None else [partitions[partition] for partition in self._partitions]
        self._turn = (self._turn + 1) % len(mine)
        return mine[self._turn :] + mine[: self._turn]

    def ack(self, ids: Sequence[int]) -> list[bool]:
        """These are done. False: unknown, or by now delivered to another queue. An ack that comes late, but before the record was
        delivered again, counts."""
        self._share.check_overdue()
        answers = []
        for id in ids:
            entry = self._share.held(self._holder, id)
            if entry is not None:
                self._share.settle(entry)
            answers.append(entry is not None)
        return answers

    def nack(self, ids: Sequence[int], delay_ms: int | None = None) -> list[bool]:
        """These are to come again after `delay_ms`, or after the policy's backoff. False as for `ack`."""
        if delay_ms is not None and delay_ms < 0:
            raise InvalidRequest(f"a delay of {delay_ms} ms is in the past")
        self._share.check_overdue()
        answers = []
        for id in ids:
            entry = self._share.held(self._holder, id)
            if entry is not None:
                self._share.refuse(entry, delay_ms)
            answers.append(entry is not None)
        return answers

    def reject(self, ids: Sequence[int], reason: str = "rejected by its consumer") -> list[bool]:
        """These cannot be used, however often they come: to the dead letters with them. False as for `ack`."""
        self._share.check_overdue()
        answers = []
        for id in ids:
            entry = self._share.held(self._holder, id)
            if entry is not None:
                self._share.reject(entry, reason)
            answers.append(entry is not None)
        return answers

    def close(self) -> asyncio.Future[None]:
        """What is in flight goes back, and its attempt counts. The future resolves when the group's progress is durable;
        nobody has to await it. Idempotent."""
        if self._closing is None:
            self._closing = self._share.leave(self._holder)
        return self._closing


class Settlement:
    """The shares of all groups."""

    def __init__(self, around: GroupContext, *, shares_max: int) -> None:
        self._around = around
        self._shares_max = shares_max
        self._shares: dict[tuple[str, str], GroupConsumer] = {}

    def is_open(self, group: str) -> bool:
        return any(known == group for known, _ in self._shares)

    def open(
        self, group: str, topic: str, partitions_count: int, policy: SettlementPolicy, partitions: Sequence[int] | None, start: Start
    ) -> SettlementQueue:
        policy.check()
        if policy.dead_letters:
            dead_letter_topic(topic)
        wanted = range(partitions_count) if partitions is None else partitions
        if not wanted:
            raise InvalidRequest("a queue needs at least one partition")
        self._around.groups.commits(group, {})
        share = self._shares.get((group, topic))
        places = {
            partition: self._position(group, topic, partition, start)
            for partition in wanted
            if share is None or partition not in share.partitions
        }
        if share is None:
            if len(self._shares) >= self._shares_max:
                raise LimitExceeded(f"there are {self._shares_max} settlement groups already")
            share = self._shares[group, topic] = GroupConsumer(self._around, group, topic, self._done)
        share.takes_all = share.takes_all or partitions is None
        queue = SettlementQueue(share, self._around, policy, partitions)
        for partition, position in places.items():
            share.add_lane(partition, position)
        return queue

    def _position(self, group: str, topic: str, partition: int, start: Start) -> int:
        """Where a group that has been here goes on, or where a new one begins."""
        bounds = self._around.engine.bounds(topic, partition)
        committed = self._around.groups.committed(group, topic, partition)
        if committed is not None:
            return min(max(committed, bounds.first), bounds.end)
        if self._around.groups.has_read(group, topic):
            # The group knows the topic, so this partition was added while it was away: all of it is new to the group.
            return bounds.first
        return _begin(start, bounds)

    def _done(self, share: GroupConsumer) -> None:
        if self._shares.get((share.group, share.topic)) is share:
            del self._shares[share.group, share.topic]

    def partitions_added(self, topic: str, count: int) -> None:
        """Queues that take from all partitions take from the new ones too, from their first record on."""
        for share in self._shares.values():
            if share.topic == topic and share.takes_all:
                for partition in range(count):
                    if partition not in share.partitions:
                        share.add_lane(partition, self._around.engine.bounds(topic, partition).first)

    def recheck(self) -> None:
        """The rules have changed: those who wait for records look again, and are told if they may not any more."""
        for share in self._shares.values():
            share.wake()

    def topic_gone(self, gone: UnknownTopic) -> None:
        for share in [share for share in self._shares.values() if share.topic == gone.topic]:
            share.fail(gone)

    async def drain(self) -> None:
        await asyncio.gather(*(share.drain() for share in list(self._shares.values())))


def _begin(start: Start, bounds: Bounds) -> int:
    if start == "earliest":
        return bounds.first
    if start == "latest":
        return bounds.end
    if not bounds.first <= start <= bounds.end:
        raise OffsetOutOfRange(wanted=start, first=bounds.first, end=bounds.end)
    return start
