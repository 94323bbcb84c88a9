"""Progress of a group in one partition: records read ahead, in flight, waiting for redelivery, and settled.

`PartitionProgress` is pure bookkeeping: it reads no log and no clock. It stores nothing about settled records: everything below the
lowest unsettled offset is settled, and everything unsettled is listed. A record that stays unsettled for long therefore costs only its
own memory. Record bodies are kept until the first delivery; a redelivery reads them again.

One entry may cover adjacent records. A *chunk* has one id and is settled as a whole. The records of a *range* have consecutive ids and are
settled one by one or, if their acks come in order, many at once. Whatever else happens to a range makes single records of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from headrace.broker.groups.membership import CREDIT_RECORDS, Credit, Identity
from headrace.engine.contract import Batch
from headrace.errors import InvalidRequest
from headrace.limits import IN_FLIGHT_MAX
from headrace.records import NEVER, Headers


@dataclass(frozen=True, slots=True)
class SettlementPolicy:
    """Time-outs, backoff and limits of a member."""

    ack_timeout_ms: int = 30_000
    ack_timeout_doubles: bool = False
    """Whether the ack time-out doubles with each delivery of a record."""
    backoff_ms: int = 1_000
    """Delay of a nacked record the first time; it doubles with each attempt."""
    backoff_max_ms: int = 60_000
    attempts_max: int = 5
    """Maximum deliveries of one record. Zero: no limit."""
    credit: int = CREDIT_RECORDS
    """Unsettled records that a new member may hold. The credit adapts to the speed of the member, up to `in_flight_max`."""
    in_flight_max: int = IN_FLIGHT_MAX
    dead_letters: bool = True
    """False: a record without attempts left is dropped."""
    chunks: bool = False
    """Whether the member takes chunks of columns, which it settles as a whole."""
    ranges: bool = False
    """Whether the member takes columns of records with consecutive ids (`Member.take_ranges`)."""

    def check(self) -> None:
        """Raises `InvalidRequest`."""
        if min(self.ack_timeout_ms, self.credit, self.in_flight_max) < 1:
            raise InvalidRequest("ack_timeout_ms, credit and in_flight_max must be at least 1")
        if min(self.backoff_ms, self.backoff_max_ms, self.attempts_max) < 0:
            raise InvalidRequest("backoff_ms, backoff_max_ms and attempts_max must not be negative")

    @property
    def unsettled_max(self) -> int:
        """Most records that a member holds, whatever its speed. A chunk costs no memory for each record."""
        return self.in_flight_max if self.chunks else min(self.in_flight_max, IN_FLIGHT_MAX)

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


@dataclass(frozen=True, slots=True)
class AdjacentBatches:
    """Batches of one chunk, in order."""

    batches: list[Batch]

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    @property
    def first_offset(self) -> int:
        return self.batches[0].first_offset

    @property
    def next_offset(self) -> int:
        return self.batches[-1].next_offset

    def offsets(self) -> list[int]:
        return [offset for batch in self.batches for offset in batch.offsets()]


class State(Enum):
    IN_FLIGHT = auto()
    WAITING = auto()
    """To be delivered again at `Entry.time`."""
    DEAD = auto()
    """Being moved to the dead letters."""
    SETTLED = auto()


class Entry:
    """A record, or a chunk of adjacent records, that was delivered and is not settled."""

    __slots__ = (
        "attempt",
        "chunk",
        "first_failure",
        "holder",
        "id",
        "is_range",
        "last_failure",
        "offset",
        "progress",
        "reason",
        "skipped",
        "state",
        "time",
    )

    def __init__(
        self,
        id: int,
        progress: PartitionProgress,
        offset: int,
        attempt: int,
        state: State,
        time: int,
        holder: MemberState | None,
        chunk: Batch | AdjacentBatches | None = None,
        is_range: bool = False,
    ) -> None:
        self.id, self.progress, self.offset, self.attempt, self.state = id, progress, offset, attempt, state
        self.time = time
        """IN_FLIGHT: when the ack is overdue. WAITING: when it is delivered again."""
        self.holder = holder
        """The member that received it last; only this member may ack it."""
        self.chunk = chunk
        """The unsettled records of a chunk or a range. None: a single record."""
        self.is_range = is_range
        self.skipped = 0
        """Number of records at the front of a range that are settled."""
        self.reason = ""
        """Reason of the state DEAD."""
        self.first_failure = self.last_failure = 0
        """Unix ms of the first and the last delivery that was nacked or timed out."""

    @property
    def count(self) -> int:
        return 1 if self.chunk is None else len(self.chunk)

    @property
    def next_offset(self) -> int:
        return self.offset + 1 if self.chunk is None else self.chunk.next_offset

    @property
    def floor(self) -> int:
        """The first unsettled offset."""
        return self.offset if self.chunk is None else self.chunk.first_offset

    @property
    def first_id(self) -> int:
        """The id of the first unsettled record."""
        return self.id + self.skipped

    def failed(self, now: int) -> None:
        self.first_failure = self.first_failure or now
        self.last_failure = now


class MemberState:
    """One member of a group consumer: what it holds, and how much it may hold."""

    def __init__(self, identity: Identity, policy: SettlementPolicy, partitions: Iterable[int] | None, now: int) -> None:
        self.identity, self.policy = identity, policy
        self.partitions = None if partitions is None else frozenset(partitions)
        """Partitions that it accepts. None: all."""
        self.credit = Credit(policy.credit, policy.unsettled_max, now)
        self.in_flight: dict[int, Entry] = {}
        self.unsettled = 0
        """Number of records in flight."""
        self.full_since: int | None = None
        """When its credit was used up or it last settled something since."""
        self.seen_at = now
        """When it last took or settled records."""
        self.is_alone = True
        """Whether the group has no other member."""
        self.stalled: Literal["", "acks", "silence"] = ""
        """Why its partitions belong to others meanwhile: an overdue ack, or it asks for no records."""
        self._deadlines: list[tuple[int, int, Entry]] = []
        self._turn = 0
        """Makes entries of one time comparable: a range and its first record have the same id."""

    def accepts(self, partition: int) -> bool:
        return self.partitions is None or partition in self.partitions

    @property
    def room(self) -> int:
        """Number of records that it may still take. Its connection bounds the chunks of a member that has to share them with no other."""
        records_max = self.policy.unsettled_max if self.is_alone and self.policy.chunks else self.credit.records
        return records_max - self.unsettled

    def add(self, entry: Entry, now: int) -> None:
        self.in_flight[entry.id] = entry
        self.unsettled += entry.count
        if self.room <= 0:
            self.credit.used_up()
            self.full_since = now if self.full_since is None else self.full_since
        self._turn += 1
        heappush(self._deadlines, (entry.time, self._turn, entry))
        if len(self._deadlines) > 2 * len(self.in_flight) + 64:
            # Without this, one record that stays in flight would keep the deadlines of all records settled after it.
            self._deadlines = [(entry.time, turn, entry) for turn, entry in enumerate(self.in_flight.values(), -len(self.in_flight))]
            heapify(self._deadlines)

    def remove(self, entry: Entry) -> None:
        del self.in_flight[entry.id]
        self.unsettled -= entry.count

    def settled(self, count: int, now: int) -> None:
        """Count records that it has settled at once."""
        self.credit.settled(count, self.unsettled + count, now)
        self.full_since = now if self.room <= 0 else None

    def first_overdue(self) -> Entry | None:
        """Return the delivery whose ack is due first. Drops entries that are no longer in flight."""
        while self._deadlines:
            time, _, entry = self._deadlines[0]
            if self.in_flight.get(entry.id) is entry and entry.time == time:
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
        self.committing: int | None = None
        """The offset that is being written to the table."""
        self.owner: MemberState | None = None
        """The only member that takes from it, in an ordered group."""
        self.handover_until: int | None = None
        """Until when the owner waits for its predecessor to settle what it holds."""
        self.buffered: deque[Batch] = deque()
        """Records that are read and not delivered yet."""
        self.unsettled: OrderedDict[int, Entry] = OrderedDict()
        """By offset, in order."""
        self._waiting: list[tuple[int, int, Entry]] = []

    @property
    def floor(self) -> int:
        """The lowest unsettled offset: the offset that the group may commit."""
        if self.unsettled:
            return next(iter(self.unsettled.values())).floor
        return self.buffered[0].first_offset if self.buffered else self.position

    def add_buffered(self, batches: list[Batch], position: int) -> None:
        """Add the result of a read. `position` is the next offset to read."""
        self.buffered.extend(batch for batch in batches if len(batch))
        self.position = position

    def pop_buffered(self, count: int) -> Batch:
        """Return the first `count` records of the first buffered batch."""
        batch = self.buffered[0]
        self.drop_buffered(count)
        return batch if count == len(batch) else batch.window(0, count)

    def drop_buffered(self, count: int) -> None:
        """Remove the first `count` records of the first buffered batch."""
        batch = self.buffered[0]
        if count == len(batch):
            self.buffered.popleft()
        else:
            self.buffered[0] = batch.window(count, len(batch))

    def skip_to(self, offset: int) -> None:
        """Drop buffered records below the offset, and read on from there if it is ahead."""
        while self.buffered and self.buffered[0].first_offset < offset:
            batch = self.buffered.popleft()
            if (below := bisect_left(batch.offsets(), offset)) < len(batch):
                self.buffered.appendleft(batch.window(below, len(batch)))
                break
        self.position = max(self.position, offset)

    def rewind(self, offset: int) -> None:
        assert not self.unsettled
        self.buffered.clear()
        self.position = offset

    def deliver_new(
        self, id: int, offset: int, chunk: Batch | AdjacentBatches | None, holder: MemberState, now: int, *, is_range: bool = False
    ) -> Entry:
        """Record the first delivery of records that `pop_buffered` returned."""
        assert not self.unsettled or next(reversed(self.unsettled)) < offset, "first deliveries are in offset order"
        entry = Entry(id, self, offset, 0, State.WAITING, now, None, chunk, is_range)
        self.unsettled[offset] = entry
        self.deliver(entry, holder, now)
        return entry

    def deliver(self, entry: Entry, holder: MemberState, now: int) -> None:
        assert entry.state is State.WAITING
        entry.attempt += 1
        entry.state, entry.holder, entry.time = State.IN_FLIGHT, holder, now + holder.policy.ack_timeout(entry.attempt)
        holder.add(entry, now)

    def wait(self, entry: Entry, until: int) -> None:
        """Schedule a redelivery at `until` or soon after."""
        assert entry.chunk is None, "split before"
        self._release(entry)
        entry.state, entry.time = State.WAITING, until
        self.requeue(entry)

    def split(self, entry: Entry, ids: Iterable[int]) -> list[Entry]:
        """Replace a chunk or a range by entries of its records, in flight with the same member."""
        assert entry.chunk is not None and entry.holder is not None
        self._release(entry)
        del self.unsettled[entry.offset]
        entry.state = State.SETTLED
        parts = [
            Entry(id, self, offset, entry.attempt, State.IN_FLIGHT, entry.time, entry.holder)
            for id, offset in zip(ids, entry.chunk.offsets(), strict=False)
        ]
        for part in parts:
            self.unsettled[part.offset] = part
            entry.holder.add(part, entry.time)
        self.unsettled = OrderedDict(sorted(self.unsettled.items()))
        return parts

    def settle_front(self, entry: Entry, count: int) -> None:
        """Settle the first records of a range, but not all."""
        assert entry.chunk is not None and entry.holder is not None
        assert not isinstance(entry.chunk, AdjacentBatches), "a range is one batch"
        entry.chunk = entry.chunk.window(count, len(entry.chunk))
        entry.skipped += count
        entry.holder.unsettled -= count

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
            entry.holder.remove(entry)

    def held_by_others(self, member: MemberState | None) -> list[Entry]:
        """Return what members other than this one have in flight."""
        return [entry for entry in self.unsettled.values() if entry.state is State.IN_FLIGHT and entry.holder is not member]

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

    def pop_due_in_order(self, now: int, count: int) -> list[Entry]:
        """As `pop_due`, in the order of the offsets: the first record that is not due holds back those after it."""
        if self.next_due() is None:
            return []
        due: list[Entry] = []
        for entry in self.unsettled.values():
            if entry.state is State.WAITING:
                if entry.time > now or len(due) == count:
                    break
                due.append(entry)
        taken = set(map(id, due))
        self._waiting = [waiting for waiting in self._waiting if id(waiting[2]) not in taken]
        heapify(self._waiting)
        return due

    def requeue(self, entry: Entry) -> None:
        heappush(self._waiting, (entry.time, entry.offset, entry))
