"""Progress of a group in one partition: records read ahead, in flight, waiting for redelivery, and settled.

`PartitionProgress` is pure bookkeeping: it reads no log and no clock. It stores nothing about settled records: everything below the
lowest unsettled offset is settled, and everything unsettled is listed. A record that stays unsettled for long therefore costs only its
own memory. Record bodies are kept until the first delivery; a redelivery reads them again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from headrace.engine.contract import Batch
from headrace.errors import InvalidRequest
from headrace.limits import IN_FLIGHT_MAX
from headrace.records import NEVER, Headers


@dataclass(frozen=True, slots=True)
class SettlementPolicy:
    """Time-outs, backoff and limits of a queue."""

    ack_timeout_ms: int = 30_000
    ack_timeout_doubles: bool = False
    """Whether the ack time-out doubles with each delivery of a record."""
    backoff_ms: int = 1_000
    """Delay of a nacked record the first time; it doubles with each attempt."""
    backoff_max_ms: int = 60_000
    attempts_max: int = 5
    """Maximum deliveries of one record. Zero: no limit."""
    in_flight_max: int = IN_FLIGHT_MAX
    dead_letters: bool = True
    """False: a record without attempts left is dropped."""

    def check(self) -> None:
        """Raises `InvalidRequest`."""
        if self.ack_timeout_ms < 1 or self.in_flight_max < 1:
            raise InvalidRequest("ack_timeout_ms and in_flight_max must be at least 1")
        if min(self.backoff_ms, self.backoff_max_ms, self.attempts_max) < 0:
            raise InvalidRequest("backoff_ms, backoff_max_ms and attempts_max must not be negative")

    def ack_timeout(self, attempt: int) -> int:
        """Return the ack time-out of the n-th delivery of a record, in ms."""
        return self.ack_timeout_ms << min(attempt - 1, 32) if self.ack_timeout_doubles else self.ack_timeout_ms

    def backoff(self, attempt: int) -> int:
        """Return the delay in ms after the n-th delivery of a record was nacked."""
        # The exponent is bounded so that a high attempt count does not build a huge number; the cap is reached long before.
        return min(self.backoff_ms << min(attempt - 1, 32), self.backoff_max_ms)

    def is_exhausted(self, attempt: int) -> bool:
        return 0 < self.attempts_max <= attempt


class Row(NamedTuple):
    """A record as it is read for delivery."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    expiry: int

    @property
    def size_bytes(self) -> int:
        return len(self.key or b"") + len(self.value or b"")

    def is_expired(self, now: int) -> bool:
        return self.expiry != NEVER and self.expiry <= now


def rows_of(batch: Batch) -> Iterable[Row]:
    count = len(batch)
    keys, headers, expiries = batch.keys(), batch.headers(), batch.expiries()
    return map(
        Row,
        batch.offsets(),
        batch.timestamps(),
        [None] * count if keys is None else keys,
        batch.values(),
        [()] * count if headers is None else headers,
        [NEVER] * count if expiries is None else expiries,
    )


class State(Enum):
    IN_FLIGHT = auto()
    WAITING = auto()
    """To be delivered again at `Entry.time`."""
    DEAD = auto()
    """Being moved to the dead letters."""
    SETTLED = auto()


@dataclass(slots=True, eq=False)
class Entry:
    """A record that was delivered and is not settled."""

    id: int
    progress: PartitionProgress
    offset: int
    attempt: int
    state: State
    time: int
    """IN_FLIGHT: when the ack is overdue. WAITING: when it is delivered again."""
    holder: Holder | None
    """The holder that received it last; only this holder may ack it."""
    reason: str = ""
    """Reason of the state DEAD."""
    first_failure: int = 0
    last_failure: int = 0
    """Unix ms of the first and the last delivery that was nacked or timed out."""

    def failed(self, now: int) -> None:
        self.first_failure = self.first_failure or now
        self.last_failure = now


@dataclass(slots=True, eq=False)
class Holder:
    """Deliveries that one queue has in flight."""

    policy: SettlementPolicy
    in_flight: dict[int, Entry] = field(default_factory=dict)
    _deadlines: list[tuple[int, int, Entry]] = field(default_factory=list)

    @property
    def in_flight_max(self) -> int:
        return min(self.policy.in_flight_max, IN_FLIGHT_MAX)

    def add(self, entry: Entry) -> None:
        self.in_flight[entry.id] = entry
        heappush(self._deadlines, (entry.time, entry.id, entry))
        if len(self._deadlines) > 2 * len(self.in_flight) + 64:
            # Without this, one record that stays in flight would keep the deadlines of all records settled after it.
            self._deadlines = [(entry.time, entry.id, entry) for entry in self.in_flight.values()]
            heapify(self._deadlines)

    def first_overdue(self) -> Entry | None:
        """Return the delivery whose ack is due first. Drops entries that are no longer in flight."""
        while self._deadlines:
            time, id, entry = self._deadlines[0]
            if self.in_flight.get(id) is entry and entry.time == time:
                return entry
            heappop(self._deadlines)
        return None


class PartitionProgress:
    """Bookkeeping of one partition."""

    def __init__(self, partition: int, position: int, committed: int | None) -> None:
        self.partition = partition
        self.position = position
        """The next offset to read from the log."""
        self.committed = committed
        """The offset in the group's table, or None."""
        self.buffered: deque[Row] = deque()
        """Records that are read and not delivered yet."""
        self.unsettled: OrderedDict[int, Entry] = OrderedDict()
        """By offset, which is also the order of first delivery."""
        self._waiting: list[tuple[int, int, Entry]] = []

    @property
    def floor(self) -> int:
        """The lowest unsettled offset: the offset that the group may commit."""
        if self.unsettled:
            return next(iter(self.unsettled))
        return self.buffered[0].offset if self.buffered else self.position

    def add_buffered(self, batches: list[Batch], position: int) -> None:
        """Add the result of a read. `position` is the next offset to read."""
        for batch in batches:
            self.buffered.extend(rows_of(batch))
        self.position = position

    def deliver_new(self, id: int, row: Row, holder: Holder, now: int) -> Entry:
        """Record the first delivery of `row`, which `buffered.popleft` returned."""
        assert not self.unsettled or next(reversed(self.unsettled)) < row.offset, "first deliveries are in offset order"
        entry = Entry(id, self, row.offset, 0, State.WAITING, now, None)
        self.unsettled[row.offset] = entry
        self.deliver(entry, holder, now)
        return entry

    def deliver(self, entry: Entry, holder: Holder, now: int) -> None:
        assert entry.state is State.WAITING
        entry.attempt += 1
        entry.state, entry.holder, entry.time = State.IN_FLIGHT, holder, now + holder.policy.ack_timeout(entry.attempt)
        holder.add(entry)

    def wait(self, entry: Entry, until: int) -> None:
        """Schedule a redelivery at `until` or soon after."""
        self._release(entry)
        entry.state, entry.time = State.WAITING, until
        self.requeue(entry)

    def mark_dead(self, entry: Entry, reason: str) -> None:
        """Mark the entry for the dead letters. It stays unsettled until it is stored there."""
        self._release(entry)
        entry.state, entry.reason = State.DEAD, reason

    def settle(self, entry: Entry) -> None:
        self._release(entry)
        entry.state = State.SETTLED
        del self.unsettled[entry.offset]

    def _release(self, entry: Entry) -> None:
        if entry.state is State.IN_FLIGHT and entry.holder is not None:
            del entry.holder.in_flight[entry.id]

    def next_due(self) -> int | None:
        """Return when the first waiting record is due. Drops entries that no longer wait."""
        while self._waiting:
            time, _, entry = self._waiting[0]
            if entry.state is State.WAITING and entry.time == time:
                return time
            heappop(self._waiting)
        return None

    def pop_due(self, now: int, count: int) -> list[Entry]:
        """Return up to `count` records that are due. Those not delivered must be passed to `requeue`."""
        due: list[Entry] = []
        while len(due) < count and (time := self.next_due()) is not None and time <= now:
            due.append(heappop(self._waiting)[2])
        return due

    def requeue(self, entry: Entry) -> None:
        heappush(self._waiting, (entry.time, entry.offset, entry))
