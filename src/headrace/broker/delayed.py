"""Delayed messages: accepted now, published later.

A delayed message waits in the table `__delayed`, as durable as a record, and in memory. When it is due, one append writes it to its
topic and removes it from the table: after a crash it is either waiting or delivered. Messages that are due together are delivered
together, ordered by time. No message is delivered before its time by the broker's clock.

A message that cannot be written (the disk is full) stays and is retried. The messages of a deleted topic are deleted. The principal
that scheduled a message must also be allowed to publish when it is due, else the message becomes a dead letter.

An id is 128 random bits, so an id reveals nothing about other messages, topics or traffic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush, nsmallest
from itertools import groupby, repeat
from typing import Final, Protocol, TypeAlias, cast

from headrace.broker.delayed_batches import ENTRY_BYTES, Delayed, MessageBatch, Waiting
from headrace.broker.publishing.publish import Placing, Publisher
from headrace.broker.publishing.requirements import CreateDeadLetterTopic, Divert, Letters
from headrace.broker.settings import Clock, Later, Timer
from headrace.broker.tables import Staged, TableLog
from headrace.columns import headers_bytes
from headrace.engine.checks import check_batch
from headrace.engine.contract import Ack, Engine, Write, when_known
from headrace.errors import (
    BrokerError,
    InvalidRequest,
    LimitExceeded,
    NotAuthorized,
    RecordTooLarge,
    Unavailable,
    UnknownMessage,
    UnknownTopic,
)
from headrace.limits import DELAY_MS_MAX, DELAYED_RECORD_BYTES_MAX, MIB
from headrace.records import NEVER, Headers, RecordBatch

_Key: TypeAlias = tuple[str]
_STEP: Final = "delivery of delayed messages"
_RETRY_MS_MAX: Final = 1_000
"""Longest retry delay of a message that could not be written."""
_LOOK_SECONDS_MAX: Final = 1.0
"""Maximum time between two looks at the clock: it may be set forward while a timer is pending."""
_AT_ONCE_MAX: Final = 1_000
_AT_ONCE_BYTES_MAX: Final = 4 * MIB
"""Messages of one append and of one loop iteration: enough to be cheap, few enough not to block the loop."""
_ID_BYTES: Final = 16
RandomBytes: TypeAlias = Callable[[int], bytes]
"""Returns so many unpredictable bytes."""


@dataclass(frozen=True, slots=True)
class DelayedEntry:
    """A delayed message as it is listed."""

    id: str
    topic: str
    due: int
    """Unix ms."""
    size_bytes: int
    """Size of the value."""
    key: bytes | None
    """None also for principals that neither may read the topic nor own the message."""
    owner: str | None
    """None for principals that neither own the message nor may delete the topic."""


@dataclass(frozen=True, slots=True)
class StagedMessages:
    """Delayed messages that are being stored."""

    ids: list[str]
    """The ids that cancel them."""
    dues: list[int]
    """Unix ms of their delivery."""
    outcome: Staged
    """Resolves when they are durable."""


class CheckOwner(Protocol):
    """Raises `NotAuthorized` unless the owner may still publish to the topic."""

    def __call__(self, owner: str, topic: str, /) -> None: ...


class Schedule(TableLog[_Key, Delayed]):
    """All delayed messages. `count_max` and `bytes_max` bound them. `letters` and `create_dead_letter_topic` handle messages that
    may not be delivered."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        *,
        clock: Clock,
        later: Later,
        count_max: int,
        bytes_max: int,
        check_owner: CheckOwner,
        letters: Letters,
        create_dead_letter_topic: CreateDeadLetterTopic,
        random_bytes: RandomBytes | None,
    ) -> None:
        super().__init__(engine, "__delayed", _Key, Delayed, is_binary=True)  # type: ignore[arg-type]  # see `Groups`
        self._publisher = publisher
        self._random_bytes = random_bytes
        self._check_owner, self._letters, self._create_dead_letter_topic = check_owner, letters, create_dead_letter_topic
        self._clock = clock
        self._later = later
        self._count_max, self._bytes_max = count_max, bytes_max
        self._waiting: dict[str, Waiting | MessageBatch] = {}
        """By id. Messages that were stored together become objects of their own when the first of them is needed."""
        self._due: list[tuple[int, int, list[str]]] = []
        """Heap of (time, turn, ids of that time, the last one first). Ids that no longer wait are dropped when they are the first."""
        self._turn = 0
        self._count = self._bytes = 0
        """Bytes of messages that wait or are being stored."""
        self._timer: Timer | None = None
        self._timer_at = 0
        self._under_way: set[Staged] = set()
        """Deliveries being appended. The next ones do not wait for them: the appends keep the order."""
        self._is_stopped = True
        """True before `open` and after `drain`."""

    def __len__(self) -> int:
        return self._count

    async def open(self, exists: Callable[[str], bool]) -> None:
        """Load the table and deliver what is due."""
        await self.load()
        self._count, self._bytes = len(self._waiting), sum(waiting.message.size_bytes for waiting in self._all())
        await self._drop(lambda waiting: not exists(waiting.message.topic))
        self._is_stopped = False
        self._arm()

    def show(self, key: _Key, value: Delayed | None) -> None:
        (id,) = key
        if value is None:
            waiting = self._find(id)
            if waiting is not None:
                del self._waiting[id]
                self._count -= 1
                self._bytes -= waiting.message.size_bytes
            return
        waiting = self._waiting[id] = Waiting(id, value)
        self._push(waiting, value.due)
        if self._timer is None or value.due < self._timer_at:
            self._arm()

    def _add(self, batch: MessageBatch) -> None:
        """Schedule new messages. Adjacent ones of the same time share an entry of the heap."""
        ids, dues, first = batch.ids, batch.dues, 0
        self._waiting.update(zip(ids, repeat(batch), strict=False))
        for due, same in [(dues[0], len(dues))] if dues.count(dues[0]) == len(dues) else _counted(dues):
            self._turn += 1
            heappush(self._due, (due, self._turn, list(reversed(ids[first : first + same]))))
            first += same
        if self._timer is None or self._due[0][0] < self._timer_at:
            self._arm()

    def _find(self, id: str) -> Waiting | None:
        """Return a message of the schedule."""
        found = self._waiting.get(id)
        if isinstance(found, MessageBatch):
            self._divide(found)
            found = cast("Waiting", self._waiting[id])
        return found

    def _divide(self, batch: MessageBatch) -> None:
        """Make objects of all messages of a batch, so that no batch is kept for the last of its messages."""
        self._waiting.update(zip(batch.ids, batch.waiting(), strict=True))

    def _all(self) -> Iterable[Waiting]:
        """Return all messages in the order of arrival."""
        for batch in {found for found in self._waiting.values() if isinstance(found, MessageBatch)}:
            self._divide(batch)
        return cast("Iterable[Waiting]", self._waiting.values())

    # Adding

    def check(self, delay_ms: int, ttl_ms: int) -> None:
        if delay_ms > DELAY_MS_MAX:
            raise InvalidRequest(f"a delay of {delay_ms} ms is above the maximum of {DELAY_MS_MAX} ms")
        if ttl_ms < 0:
            raise InvalidRequest(f"a record cannot live for {ttl_ms} ms: ttl_ms must not be negative")

    def stage(
        self,
        topic: str,
        owner: str,
        values: Sequence[bytes | None],
        dues: list[int],
        keys: Sequence[bytes | None],
        partitions: Sequence[int | None],
        headers: Headers,
        ttl_ms: int,
    ) -> StagedMessages:
        """Store messages: all of them or, raising at once, none."""
        count, (size_bytes, largest) = len(values), _checked_sizes(values, keys, headers)
        if largest > DELAYED_RECORD_BYTES_MAX + ENTRY_BYTES:
            raise RecordTooLarge(size_bytes=largest - ENTRY_BYTES, bytes_max=DELAYED_RECORD_BYTES_MAX)
        if self._count + count > self._count_max:
            raise LimitExceeded(f"{self._count_max} delayed messages are waiting already")
        if self._bytes + size_bytes > self._bytes_max:
            raise LimitExceeded(f"delayed messages may hold at most {self._bytes_max} bytes together")
        batch = MessageBatch(self._new_ids(count), topic, owner, values, dues, keys, partitions, headers, ttl_ms)
        staged = self._publisher.append([Write(self.name, 0, batch.rows(self._encode_value))], Ack.DURABLE)
        self._count += count
        self._bytes += size_bytes

        def give_back(done: Staged) -> None:
            if done.cancelled() or done.exception() is not None:
                self._count -= count
                self._bytes -= size_bytes

        when_known(staged, give_back)
        self.follow_with(staged, lambda: self._add(batch))
        return StagedMessages(batch.ids, dues, staged)

    def _new_ids(self, count: int) -> list[str]:
        assert self._random_bytes is not None, "a broker that accepts delayed messages needs random_bytes"
        ids = self._random_bytes(_ID_BYTES * count).hex(" ", _ID_BYTES).split()
        return ids if self._waiting.keys().isdisjoint(ids) else self._new_ids(count)

    # Listing and removal

    def find(self, id: str) -> Waiting:
        """Return a waiting message. Raises `UnknownMessage`, also for a message that is being delivered."""
        waiting = self._find(id)
        if waiting is None or waiting.is_leaving:
            raise UnknownMessage(id)
        return waiting

    def waiting(self, wanted: Callable[[Waiting], bool], count_max: int | None = None) -> list[Waiting]:
        """Return the wanted messages by time: all, or the first `count_max`."""

        def turn(waiting: Waiting) -> int:
            return waiting.message.due  # messages of the same time keep their order of arrival

        found = filter(wanted, self._all())
        return sorted(found, key=turn) if count_max is None else nsmallest(count_max, found, key=turn)

    async def cancel(self, waiting: Waiting) -> None:
        """Remove a message that `find` has just returned. It is never delivered after this returns."""
        waiting.is_leaving = True
        changes: list[tuple[_Key, Delayed | None]] = [((waiting.id,), None)]
        try:
            staged = self._engine.append([self.write(changes)])
        except BrokerError:
            self._retry_later([waiting])
            raise
        self.follow(staged, changes)
        when_known(staged, partial(self._landed, [waiting]))
        await asyncio.shield(staged)

    async def topic_gone(self, topic: str) -> None:
        await self.settled()
        await self._drop(lambda waiting: waiting.message.topic == topic)

    async def _drop(self, doomed: Callable[[Waiting], bool]) -> None:
        await self.put([((waiting.id,), None) for waiting in self._all() if doomed(waiting)])

    async def drain(self) -> None:
        """Stop delivery and finish the appends in progress."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)

    # Delivering

    def _push(self, waiting: Waiting, time: int) -> None:
        """Schedule the next look at the message."""
        self._turn += 1
        heappush(self._due, (time, self._turn, [waiting.id]))

    def _first_due(self) -> int | None:
        """Return the time of the first message, whose id is then the last one of the first entry; None if there is none. Drops the ids
        of messages that no longer wait."""
        while self._due:
            time, _, ids = self._due[0]
            while ids:
                first = self._waiting.get(ids[-1])
                if first is not None and (isinstance(first, MessageBatch) or not first.is_leaving):
                    return time
                ids.pop()
            heappop(self._due)
        return None

    def _arm(self) -> None:
        """Set the timer for the first message, if it is not set."""
        if self._is_stopped:
            return
        due = self._first_due()
        if due is None:
            return
        if self._timer is not None:
            if self._timer_at <= due:
                return
            self._timer.cancel()
        self._timer_at = due
        self._timer = self._later(min(max(0, due - self._clock()) / 1000, _LOOK_SECONDS_MAX), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        due = self._take_due()
        if due:
            try:
                self._deliver(due)
            except Exception as failure:  # all of them wait again; the timer must be set in any case
                self._engine.health.failed(_STEP, repr(failure))
                self._retry_later(due)
            else:
                self._engine.health.succeeded(_STEP)
        # The rest follows in the next loop iteration: tens of thousands at once must not block the loop.
        self._arm()

    def _take_due(self) -> list[Waiting]:
        now, taken, size_bytes = self._clock(), list[Waiting](), 0
        while len(taken) < _AT_ONCE_MAX and size_bytes < _AT_ONCE_BYTES_MAX:
            due = self._first_due()
            if due is None or due > now:
                break
            waiting = self._find(self._due[0][2].pop())
            assert waiting is not None, "it is the first that is due"
            waiting.is_leaving = True
            taken.append(waiting)
            size_bytes += waiting.message.size_bytes
        return taken

    def _deliver(self, due: list[Waiting]) -> None:
        """Append records and remove their entries at once. A message that cannot be placed does not delay the others."""
        by_place: dict[tuple[str, int | None], list[Waiting]] = {}
        for waiting in due:
            by_place.setdefault((waiting.message.topic, waiting.message.partition), []).append(waiting)
        writes, leaving = list[Write](), list[Waiting]()
        for (topic, partition), group in by_place.items():
            try:
                # Entries of a topic deleted just now are removed without delivery.
                writes += self._placed(topic, partition, group) if topic in self._engine.topics() else ()
                leaving += group
            except BrokerError:
                self._retry_later(group)
        if not leaving:
            return
        changes: list[tuple[_Key, Delayed | None]] = [((waiting.id,), None) for waiting in leaving]
        try:
            # These are due: they go before large publishes that are waiting.
            staged = self._publisher.append([*writes, self.write(changes)], Ack.DURABLE, urgent=True)
        except BrokerError:
            self._retry_later(leaving)
            return
        self._under_way.add(staged)
        staged.add_done_callback(self._under_way.discard)
        self.follow(staged, changes)
        when_known(staged, partial(self._landed, leaving))

    def _landed(self, left: list[Waiting], staged: Staged) -> None:
        if staged.cancelled() or staged.exception() is not None:
            self._retry_later(left)
            return
        for waiting in left:
            self._publisher.meters.meter(waiting.message.topic, "delayed").count(1, waiting.message.size_bytes)

    def _placed(self, topic: str, partition: int | None, group: list[Waiting]) -> list[Write]:
        """Return the records whose owners may publish them, and dead letters for the others."""
        denials: dict[str, str] = {}
        for owner in {waiting.message.owner for waiting in group}:
            try:
                self._check_owner(owner, topic)
            except NotAuthorized as error:
                denials[owner] = str(error)
        allowed = [waiting.message for waiting in group if waiting.message.owner not in denials]
        denied = [waiting.message for waiting in group if waiting.message.owner in denials]
        writes = Placing(self._publisher.own_route(topic), self._records(allowed), partition, Divert.ALWAYS).writes if allowed else []
        if not denied:
            return writes
        try:
            return [*writes, *self._letters(topic, self._records(denied), [denials[message.owner] for message in denied])]
        except UnknownTopic:
            self._create_dead_letter_topic(topic)
            raise Unavailable(f"the dead-letter topic of {topic} is being created") from None

    def _records(self, messages: list[Delayed]) -> RecordBatch:
        now = self._clock()
        return RecordBatch(
            [message.value for message in messages],
            [message.key for message in messages] if any(message.key is not None for message in messages) else None,
            [message.headers for message in messages] if any(message.headers for message in messages) else None,
            expiries=[now + message.ttl_ms if message.ttl_ms else NEVER for message in messages]
            if any(message.ttl_ms for message in messages)
            else None,
        )

    def _retry_later(self, kept: list[Waiting]) -> None:
        """Schedule a retry with a growing delay."""
        for waiting in kept:
            if self._waiting.get(waiting.id) is waiting:
                waiting.is_leaving = False
                self._push(waiting, max(waiting.message.due, self._clock() + waiting.pause_ms))
                waiting.pause_ms = min(2 * waiting.pause_ms, _RETRY_MS_MAX)
        self._arm()


def _counted(dues: Sequence[int]) -> list[tuple[int, int]]:
    """Return each time, and how many adjacent messages have it."""
    return [(due, len(list(same))) for due, same in groupby(dues)]


def _checked_sizes(values: Sequence[bytes | None], keys: Sequence[bytes | None], headers: Headers) -> tuple[int, int]:
    """Return the size of all messages and of the largest. Raises as `check_batch` does. Most messages have neither headers nor a key."""
    count, has_keys = len(values), keys.count(None) < len(keys)
    same_bytes = ENTRY_BYTES + (headers_bytes(headers) if headers else 0)
    size_bytes = check_batch(RecordBatch(values, keys if has_keys else None, [headers] * count if headers else None))
    if has_keys or None in values:
        largest = max(len(value or b"") + len(key or b"") for value, key in zip(values, keys, strict=True))
    else:
        largest = max(map(len, values))  # type: ignore[arg-type]  # there is no None
    return size_bytes + same_bytes * count, largest + same_bytes
