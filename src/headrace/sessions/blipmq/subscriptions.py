"""BlipMQ subscriptions: created by SUBSCRIBE, used by POLL and ACK.

A subscription belongs to a principal, not to a connection: any connection of that principal may poll it by its id. It is removed after no
open connection has used it for a while. There are three kinds:

- QoS 1 is the only member of its own group. It is stored in a table, so it survives a restart with its id and its unacknowledged messages.
- QoS 1 with a group is a member of that group. It leaves the group with the last connection that uses it: the group keeps its progress.
- QoS 0 is a position in the log, in memory. A POLL consumes what it returns.

After a restart the clients may have lost their ids. So a QoS 1 SUBSCRIBE takes over the backlog of a restored subscription of the same
principal and topic that has not been polled since the restart. The old id is then unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.groups.members import Delivery, Member, Range, SettlementPolicy
from headrace.broker.groups.subscriptions import SubscriptionBook, SubscriptionRow
from headrace.broker.settings import Clock, Later, Timer
from headrace.errors import BrokerError, LimitExceeded, NotCoordinator, OffsetOutOfRange, UnknownTopic
from headrace.limits import BLIPMQ_SUBSCRIPTIONS_MAX, IN_FLIGHT_MAX, KIB, OUTPUT_HIGH_WATER_BYTES
from headrace.records import Headers
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.wire.blipmq import Subscribe, encoder

log = logging.getLogger(__name__)

QOS_0_HEADERS: Final[Headers] = (("x-headrace-qos", b"0"),)
"""Marks a record that was published with QoS 0. As in BlipMQ, every subscription delivers it with QoS 0."""

_READ_BYTES: Final = 32 * KIB
"""Bytes that a QoS 0 subscription reads at a time and buffers for the next POLL."""

_LIVE_ID_BITS: Final = 16


@dataclass(slots=True)
class Deliveries:
    """Messages of one subscription with the same QoS. `tags` is None for QoS 0."""

    tags: Sequence[int] | None
    values: list[bytes]


class Subscription(Protocol):
    """A subscription as its session sees it."""

    id: int
    owner: Principal
    topic: str

    async def take(self, count: int) -> list[Deliveries]:
        """Return up to `count` messages without waiting. Raises `UnknownTopic` if the topic is deleted."""

    def take_now(self, count: int) -> Deliveries | None:
        """Return so many messages that are in memory, without those that fit no frame. None: `take` finds what there is. Raises
        `NotAuthorized`."""

    def ack(self, tags: Sequence[int]) -> list[bool]:
        """Acknowledge these deliveries. Returns False for each unknown one."""

    def close(self) -> asyncio.Future[None] | None: ...


class LiveSubscription:
    """QoS 0: a position in every partition of the topic, starting at the end."""

    def __init__(self, id: int, owner: Principal, topic: str, broker: Broker) -> None:
        self.id, self.owner, self.topic = id, owner, topic
        self._broker = broker
        self._value_bytes_max = encoder.value_bytes_max(topic)
        self._values: deque[bytes] = deque()
        self._taking = asyncio.Lock()
        partitions = broker.topic(owner, topic).partitions
        self._positions = [broker.bounds(owner, topic, partition).end for partition in range(partitions)]
        self._turn = 0

    async def take(self, count: int) -> list[Deliveries]:
        # Two connections may poll at once. Without the lock both would read from the same position.
        async with self._taking:
            while len(self._values) < count and await self._read():
                pass
            # The values were authorized when they were read ahead. Check again.
            self._broker.check_reads(self.owner, self.topic)
            values = [self._values.popleft() for _ in range(min(count, len(self._values)))]
        return [Deliveries(None, values)] if values else []

    def take_now(self, count: int) -> Deliveries | None:
        if self._taking.locked() or len(self._values) < count:
            return None
        self._broker.check_reads(self.owner, self.topic)
        return Deliveries(None, [self._values.popleft() for _ in range(count)])

    def ack(self, tags: Sequence[int]) -> list[bool]:
        return [False] * len(tags)

    def close(self) -> None:
        self._values.clear()

    async def _read(self) -> bool:
        """Read from the next partition that has records. Return False if none has."""
        # Partitions that were added after the SUBSCRIBE are read from their beginning.
        missing = self._broker.topic(self.owner, self.topic).partitions - len(self._positions)
        self._positions += [0] * missing
        count = len(self._positions)
        for step in range(count):
            partition = (self._turn + step) % count
            position, end = self._positions[partition], self._broker.bounds(self.owner, self.topic, partition).end
            if position == end:
                continue
            try:
                fetched = await self._broker.fetch(self.owner, self.topic, partition, position, bytes_max=_READ_BYTES)
            except OffsetOutOfRange as error:
                # Retention removed the records, or the topic was recreated. QoS 0 allows a gap.
                self._positions[partition] = error.first
                return True
            self._turn = partition + 1
            self._positions[partition] = fetched.next_offset
            for batch in fetched.batches:
                self._values += [value or b"" for value in batch.values() if value is None or len(value) <= self._value_bytes_max]
            return True
        return False


class DurableSubscription:
    """QoS 1: a member of a group. The delivery tag is the group's id of the delivery, and stays the same on redelivery."""

    def __init__(self, id: int, owner: Principal, topic: str, member: Member) -> None:
        self.id, self.owner, self.topic = id, owner, topic
        self._member = member
        self._value_bytes_max = encoder.value_bytes_max(topic)

    async def take(self, count: int) -> list[Deliveries]:
        self._member.who = self.owner
        singles, ranges = await self._member.take_ranges(count, OUTPUT_HIGH_WATER_BYTES)
        found = self._sorted_out(singles) if singles else []
        for taken in ranges:
            deliveries = self._deliveries(taken)
            if deliveries.values:
                found.append(deliveries)
        return found

    def take_now(self, count: int) -> Deliveries | None:
        self._member.who = self.owner
        taken = self._member.take_range_now(count, OUTPUT_HIGH_WATER_BYTES)
        return None if taken is None else self._deliveries(taken)

    def _deliveries(self, taken: Range) -> Deliveries:
        values = [value or b"" for value in taken.values] if None in taken.values else cast("list[bytes]", taken.values)
        tags: Sequence[int] = range(taken.first_id, taken.first_id + len(values))
        if max(map(len, values)) > self._value_bytes_max:
            # See `_sorted_out`.
            fitting = [(tag, value) for tag, value in zip(tags, values, strict=True) if len(value) <= self._value_bytes_max]
            tags, values = [tag for tag, _ in fitting], [value for _, value in fitting]
        return Deliveries(tags, values)

    def _sorted_out(self, taken: list[Delivery]) -> list[Deliveries]:
        found: list[Deliveries] = []
        for delivery in taken:
            value = delivery.value or b""
            if len(value) > self._value_bytes_max:
                # A record of another protocol that fits no frame. It is never acknowledged, so it becomes a dead letter.
                continue
            at_most_once = QOS_0_HEADERS[0] in delivery.headers
            if not found or at_most_once is not (found[-1].tags is None):
                found.append(Deliveries(None if at_most_once else [], []))
            found[-1].values.append(value)
            if (tags := found[-1].tags) is not None:
                assert isinstance(tags, list)
                tags.append(delivery.id)
        self._member.ack([delivery.id for delivery in taken if QOS_0_HEADERS[0] in delivery.headers])
        return found

    def ack(self, tags: Sequence[int]) -> list[bool]:
        return self._member.ack(tags)

    def close(self) -> asyncio.Future[None]:
        return self._member.close()


@dataclass(slots=True)
class _Use:
    """Use of a subscription: the number of open connections and the time of the last use. `is_restored` until its first use."""

    subscription: Subscription | None
    """None: restored and not opened yet."""
    row: SubscriptionRow | None
    """None: not stored."""
    owner: str
    used_at: int
    holders: int = 0
    is_restored: bool = False
    is_shared: bool = False
    """Whether it is a member of a group that others may join."""


class Subscriptions:
    """All subscriptions of a broker. Opened after the broker and closed before it."""

    def __init__(
        self,
        broker: Broker,
        book: SubscriptionBook,
        *,
        clock: Clock,
        settings: BlipMqSettings = BlipMqSettings(),
        later: Later | None = None,
    ) -> None:
        self.settings = settings
        self._broker = broker
        self._clock, self._later = clock, later
        self._book = book
        self._uses: dict[int, _Use] = {}
        self._first_live_id = self._next_live_id = 0
        self._timer: Timer | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._policy = SettlementPolicy(
            ack_timeout_ms=settings.retry_backoff_ms,
            ack_timeout_doubles=True,
            attempts_max=settings.max_retries,
            ranges=True,
        )
        # Without a group there is no other member that could take the messages.
        self._policy_alone = replace(self._policy, credit=IN_FLIGHT_MAX)

    def __len__(self) -> int:
        return len(self._uses)

    async def open(self) -> None:
        """Restore the QoS 1 subscriptions. If this broker is not the coordinator, call `restore` when it has become it."""
        self._first_live_id = self._next_live_id = self._clock() << _LIVE_ID_BITS
        if self._broker.is_coordinator:
            await self.restore()
        self._set_timer()

    async def restore(self) -> None:
        now = self._clock()
        for id, row in (await self._book.load()).items():
            self._uses[id] = _Use(None, row, row.owner, now, is_restored=True)

    async def close(self) -> None:
        """Stop. The queues stay open: the broker commits their progress when it closes, without counting deliveries in flight as failed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._uses.clear()

    # Calls from sessions.

    async def subscribe(self, who: Principal, message: Subscribe, address: str = "") -> Subscription:
        """Return a new subscription or, for QoS 1 without a group, one that takes over a restored backlog.

        The work is completed even if the connection is lost: half a takeover would hide a backlog.
        """
        if message.group:
            return await self._join(who, message, address)
        task = asyncio.get_running_loop().create_task(self._subscribe(who, message.topic, message.qos))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def _join(self, who: Principal, message: Subscribe, address: str) -> Subscription:
        self._check_room()
        self._broker.check_coordinator()
        await self._broker.ensure_topic(who, message.topic)
        id = await self._book.new_id()
        member = self._broker.join(
            who,
            message.group,
            message.topic,
            policy=self._policy,
            mode=message.mode or None,
            default_mode="shared",
            start="earliest" if message.earliest else "latest",
            address=address,
        )
        subscription = DurableSubscription(id, who, message.topic, member)
        self._uses[id] = _Use(subscription, None, who.name, self._clock(), is_shared=True)
        return subscription

    def _check_room(self) -> None:
        if len(self._uses) >= BLIPMQ_SUBSCRIPTIONS_MAX:
            raise LimitExceeded(f"{BLIPMQ_SUBSCRIPTIONS_MAX} subscriptions are open: the limit is reached")

    async def _subscribe(self, who: Principal, topic: str, qos: int) -> Subscription:
        self._check_room()
        if qos:
            self._broker.check_coordinator()
        await self._broker.ensure_topic(who, topic)
        if qos == 0:
            id = await self._live_id()
            live = LiveSubscription(id, who, topic, self._broker)
            self._uses[id] = _Use(live, None, who.name, self._clock())
            return live
        id = await self._book.new_id()
        row = await self._take_over(who, topic, id)
        if row is not None:
            use = self._uses[id] = _Use(None, row, who.name, self._clock())
            return self._opened(id, who, use)
        row = SubscriptionRow(topic, who.name, f"blipmq-{id}")
        await self._book.put({id: row})
        use = self._uses[id] = _Use(None, row, who.name, self._clock())
        try:
            await self._broker.commit(who, row.group, self._ends(who, topic))
            return self._opened(id, who, use)
        except BrokerError:
            self._forget(id)
            raise

    async def _live_id(self) -> int:
        """Return a new number for a subscription in memory. A broker that is not the coordinator reserves none in the table: its numbers
        begin with the time of its start, far above those of the table."""
        if self._broker.is_coordinator:
            return await self._book.new_id()
        self._next_live_id += 1
        return self._next_live_id

    def find(self, who: Principal, id: int) -> Subscription | None:
        """Return the subscription with this id if it belongs to the principal."""
        use = self._uses.get(id)
        if use is None or use.owner != who.name:
            return None
        use.is_restored = False
        if not use.holders:  # the time counts from the last connection on
            use.used_at = self._clock()
        try:
            subscription = self._opened(id, who, use)
            # Another key of the same owner may have fewer rights, and the key that created it may be revoked.
            subscription.owner = who
            return subscription
        except UnknownTopic:
            self._forget(id)
            return None

    def has(self, id: int) -> bool:
        """Return whether this broker has a subscription with this id, of any principal."""
        return id in self._uses

    def elsewhere(self, id: int) -> NotCoordinator | None:
        """Return the error for a subscription that may be one of the coordinator, which is another broker."""
        if id in self._uses or not 0 < id <= self._first_live_id or self._broker.is_coordinator:
            return None
        try:
            self._broker.check_coordinator()
        except NotCoordinator as error:
            return error
        return None

    def hold(self, subscription: Subscription) -> None:
        """Count one more open connection that uses it."""
        use = self._uses.get(subscription.id)
        if use is not None:
            use.holders += 1

    def release(self, subscription: Subscription) -> None:
        """Count one connection less."""
        use = self._uses.get(subscription.id)
        if use is not None:
            use.holders -= 1
            use.used_at = self._clock()
            if use.is_shared and not use.holders:
                self._forget(subscription.id)

    def drop(self, subscription: Subscription) -> None:
        """Remove a subscription whose topic is deleted."""
        self._forget(subscription.id)

    def _opened(self, id: int, who: Principal, use: _Use) -> Subscription:
        if use.subscription is None:
            assert use.row is not None
            member = self._broker.join(who, use.row.group, use.row.topic, policy=self._policy_alone, mode="shared")
            use.subscription = DurableSubscription(id, who, use.row.topic, member)
        return use.subscription

    async def _take_over(self, who: Principal, topic: str, id: int) -> SubscriptionRow | None:
        """Assign a new id to the oldest restored, unused subscription to this topic. Return None if there is none."""
        wanted = [
            (old, use.row)
            for old, use in self._uses.items()
            if use.is_restored and use.row is not None and (use.row.owner, use.row.topic) == (who.name, topic)
        ]
        if not wanted:
            return None
        old, row = min(wanted, key=lambda found: found[0])
        # Removed before the await, so that two SUBSCRIBEs never take over the same backlog.
        use = self._uses.pop(old)
        try:
            await self._book.put({id: row, old: None})
        except BrokerError:
            self._uses[old] = use
            raise
        return row

    def _ends(self, who: Principal, topic: str) -> dict[tuple[str, int], int]:
        partitions = self._broker.topic(who, topic).partitions
        return {(topic, partition): self._broker.bounds(who, topic, partition).end for partition in range(partitions)}

    def _forget(self, id: int) -> None:
        use = self._uses.pop(id, None)
        if use is None:
            return
        closed = None if use.subscription is None else use.subscription.close()
        if use.row is not None:
            task = asyncio.get_running_loop().create_task(self._erase(id, use.row, closed))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it

    async def _erase(self, id: int, row: SubscriptionRow, closed: asyncio.Future[None] | None) -> None:
        """Delete a subscription from the disk. If that fails (full disk), it is restored at the next start and expires again."""
        try:
            if closed is not None:
                await closed
            await self._book.put({id: None})
            await self._broker.delete_group(Principal(row.owner, "blipmq"), row.group)
        except BrokerError as error:
            log.warning("subscription not deleted", extra={"subscription": id, "reason": str(error)})

    def _set_timer(self) -> None:
        if self.settings.subscription_idle_ms:
            later = self._later or asyncio.get_running_loop().call_later
            self._timer = later(self.settings.subscription_idle_ms / 4 / 1_000, self._sweep)

    def _sweep(self) -> None:
        """Remove subscriptions that are idle for too long."""
        before = self._clock() - self.settings.subscription_idle_ms
        for id in [id for id, use in self._uses.items() if not use.holders and use.used_at <= before]:
            self._forget(id)
        self._set_timer()
