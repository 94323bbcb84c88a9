"""Transactions: batches for several partitions and a group's offsets, committed as one append.

An open transaction is staged in memory only; it gets its offsets at the commit. A crash or an abort therefore leaves nothing in the log
that readers would have to skip.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Final, Protocol

from headrace.broker.authorizer import Principal
from headrace.broker.groups.offsets import Groups
from headrace.broker.meters import Meters
from headrace.broker.publishing.publish import Placing, Publisher, Route
from headrace.broker.publishing.published import Published, PublishedTogether
from headrace.broker.settings import Clock, Later
from headrace.broker.tables import Staged
from headrace.broker.topics import check_name
from headrace.columns import headers_bytes
from headrace.engine.checks import check_batch
from headrace.engine.contract import Appended, Commits, Write
from headrace.errors import AppendUnknown, BrokerError, InvalidRequest, InvalidTransaction, LimitExceeded, Unavailable
from headrace.limits import MIB, TRANSACTION_BYTES_MAX
from headrace.records import AnyBatch, ColumnBatch, RecordBatch


class _State(Enum):
    OPEN = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    ABORTED = auto()
    TIMED_OUT = auto()


_WORDS = {
    _State.COMMITTING: "is being committed",
    _State.COMMITTED: "has been committed",
    _State.ABORTED: "has been aborted",
    _State.TIMED_OUT: "took too long and was aborted",
}


_RECORD_BYTES: Final = 16
"""Size of a record in a transaction beyond its content: many empty records use memory too."""
_NUMBER_MAX: Final = (1 << 32) - 1
"""Largest number in the id of a transaction."""
_WHOLE_BYTES_MAX: Final = MIB
"""Size of transactions that are published and committed together."""


def weight(batch: AnyBatch, size_bytes: int | None = None) -> int:
    """Return the size of a batch that counts against `limits.TRANSACTION_BYTES_MAX`. `size_bytes`: of its keys and values, if known."""
    if batch.headers is None:
        headers = 0
    else:
        headers = len(batch.headers.content) if isinstance(batch, ColumnBatch) else sum(map(headers_bytes, batch.headers))
    return (batch.size_bytes if size_bytes is None else size_bytes) + headers + _RECORD_BYTES * len(batch)


class CheckCommit(Protocol):
    """Raises unless the principal may commit these offsets and their topics exist."""

    def __call__(self, who: Principal, group: str, offsets: Mapping[tuple[str, int], int]) -> None: ...


class Transaction:
    """Staged in memory and invisible until it is committed."""

    __slots__ = (
        "_commits",
        "_groups",
        "_is_abandoned",
        "_is_overdue",
        "_placings",
        "_state",
        "_who",
        "deadline",
        "id",
        "size_bytes",
        "transactions",
    )

    def __init__(self, transactions: Transactions, who: Principal, id: str, deadline: Deadline) -> None:
        self.id = id
        self.size_bytes = 0
        self.deadline = deadline
        self.transactions = transactions
        self._who = who
        self._state = _State.OPEN
        self._is_overdue = self._is_abandoned = False
        # Most transactions get all their records with the commit and need none of these.
        self._placings: list[Placing] | None = None
        self._commits: Commits | None = None
        self._groups: set[str] | None = None

    @property
    def is_open(self) -> bool:
        return self._state is _State.OPEN

    @property
    def has_ended(self) -> bool:
        return self._state not in (_State.OPEN, _State.COMMITTING)

    @property
    def placings(self) -> Sequence[Placing]:
        """One for each `publish`, in order; empty after the end."""
        return self._placings or []

    def publish(self, topic: str, batch: AnyBatch, partition: int | None = None) -> Placing:
        """Stage a batch and return its partitions. Raises as `Broker.publish` does at once, and `InvalidTransaction`, also for a
        transaction that grows too large."""
        self._check_open()
        route = self.transactions.publisher.known_route(self._who, topic)
        size_bytes = check_batch(batch)
        placing = Placing(route, batch, partition)
        self.transactions.reserve(self, weight(batch, size_bytes))
        if self._placings is None:
            self._placings = []
        self._placings.append(placing)
        return placing

    def commit_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Stage a group's offsets. They become durable with the records."""
        self._check_open()
        self.transactions.check_commit(self._who, group, offsets)
        commits = self.transactions.groups.commits(group, offsets)
        self._commits = commits if self._commits is None else self._commits + commits
        self._groups = {group, *(self._groups or ())}

    async def commit(self) -> list[Published]:
        """Commit atomically. Returns one `Published` for each `publish`, in order. After a retriable error (`DiskFull`) the transaction
        stays open and may be committed again."""
        answer = self.stage_commit()
        if not answer.done():
            landed = asyncio.Event()
            answer.add_done_callback(lambda _: landed.set())
            try:
                await landed.wait()
            except asyncio.CancelledError:
                self.abort()
                raise
        return answer.result()

    def stage_commit(self) -> PublishedTogether:
        """Stage the commit now: what is published or committed after this call follows it in the log. Raises at once what is known
        at once."""
        self._check_open()
        transactions, publisher, who = self.transactions, self.transactions.publisher, self._who
        publisher.check_open()
        # Permissions may end, and rules may change, while the transaction is open.
        for placing in self.placings:
            placing.check_again(publisher.known_route(who, placing.topic))
        for group in self._groups or ():
            transactions.check_commit(who, group, {})
        commit = _Commit(self, self.placings, publisher.meters)
        if not commit.writes and not self._commits:
            self._end(_State.COMMITTED)
            commit.answer.land(list(_published(commit.placings, [])))
            return commit.answer
        transactions.append(commit, self._commits or [], self.size_bytes)
        transactions.committing(self)
        return commit.answer

    def stage_whole(
        self, others: Sequence[Transaction], topic: str, values: Sequence[bytes], counts: Sequence[int]
    ) -> PublishedTogether | None:
        """Publish to this transaction and to others of its principal, and commit them, as `publish` and `stage_commit` do for each.

        `counts` are the records of each. The result is the position of all records. Return None, with nothing staged, if they must be
        handled one by one.
        """
        return self.transactions.stage_whole(self._who, [self, *others], topic, values, counts)

    @property
    def is_empty(self) -> bool:
        """Whether it is open and nothing is staged yet."""
        return self._state is _State.OPEN and not self._placings and not self._commits

    def take(self, state: _State) -> None:
        """Take the next state of the commit, whose other consequences `Transactions` takes for many at once."""
        self._state = state
        if state is _State.COMMITTED:
            self._placings = self._commits = None

    def count(self, placings: Sequence[Placing], seconds: float) -> None:
        """Count the records that were committed."""
        meters = self.transactions.publisher.meters
        for placing in placings:
            meters.meter(placing.topic, self._who.protocol).published(placing.topic, placing.writes, seconds)

    def failed(self, error: BaseException) -> None:
        """Take the failure of the commit."""
        # A caller that was cancelled does not commit again.
        is_open = isinstance(error, BrokerError) and error.retriable and not isinstance(error, AppendUnknown) and not self._is_abandoned
        self._end(_State.OPEN if is_open else _State.ABORTED)

    def abort(self) -> None:
        """Discard everything. Idempotent; no effect on a transaction that has ended. A commit under way is not revoked, but if it fails it
        cannot be repeated."""
        if self.is_open:
            self._end(_State.ABORTED)
        self._is_abandoned = True

    def time_out(self) -> None:
        self._is_overdue = True
        if self.is_open:
            self._end(_State.TIMED_OUT)

    def _end(self, state: _State) -> None:
        """End it, or (OPEN) keep it open after a commit that may be retried, if there is time left."""
        was_open = self.is_open
        if state is _State.OPEN and self._is_overdue:
            state = _State.TIMED_OUT
        self._state = state
        if state is _State.OPEN:
            self.transactions.reopened()
        else:
            self._placings = self._commits = None
            self.transactions.ended([self], were_open=was_open)

    def _check_open(self) -> None:
        if not self.is_open:
            raise InvalidTransaction(f"transaction {self.id!r} {_WORDS[self._state]}")


class _UnderWay(ABC):
    """Commit under way. `landed` and `fail` are those of `gathering.Commit`."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer = PublishedTogether()

    def landed(self, staged: Staged, first: int) -> None:
        error = staged.exception()
        if isinstance(error, AppendUnknown) and error.outcome is not None:
            # The transaction counts as committing until the outcome is known: a second commit could write everything twice.
            self.answer.fail(error)
            error.outcome.add_done_callback(partial(self._known, first))
        else:
            self._known(first, staged)

    def _known(self, first: int, staged: Staged) -> None:
        error = staged.exception()
        if error is None:
            self._succeeded(first, staged)
        else:
            self.fail(error)

    @abstractmethod
    def _succeeded(self, first: int, staged: Staged) -> None: ...

    @abstractmethod
    def fail(self, error: BaseException) -> None: ...


class _Commit(_UnderWay):
    """Commit of one transaction."""

    __slots__ = ("_began", "_meters", "_transaction", "placings", "writes")

    def __init__(self, transaction: Transaction, placings: Sequence[Placing], meters: Meters) -> None:
        super().__init__()
        self._transaction, self._meters, self._began = transaction, meters, meters.ticks()
        self.placings = placings
        self.writes: Sequence[Write] = [write for placing in placings for write in placing.writes]

    def _succeeded(self, first: int, staged: Staged) -> None:
        self._transaction.transactions.committed([self._transaction])
        self._transaction.count(self.placings, self._meters.ticks() - self._began)
        if not self.answer.done():
            appended = staged.result()
            self.answer.land(list(_published(self.placings, appended[first:] if first else appended)))

    def fail(self, error: BaseException) -> None:
        self._transaction.failed(error)
        if not self.answer.done():
            self.answer.fail(error)


class _Whole(_UnderWay):
    """Commit of transactions that get all their records together with the commit. They are one write."""

    __slots__ = ("_began", "_counts", "_meters", "_protocol", "_route", "_transactions", "_values", "partition", "writes")

    def __init__(
        self,
        transactions: Sequence[Transaction],
        route: Route,
        values: Sequence[bytes],
        counts: Sequence[int],
        meters: Meters,
        protocol: str,
    ) -> None:
        super().__init__()
        self._transactions, self._route, self._values, self._counts = transactions, route, values, counts
        self._meters, self._protocol, self._began = meters, protocol, meters.ticks()
        self.partition = 0 if route.partitions == 1 else route.next_turn()
        self.writes: Sequence[Write] = [Write(route.topic, self.partition, RecordBatch(values))]

    def _succeeded(self, first: int, staged: Staged) -> None:
        self._transactions[0].transactions.committed(self._transactions)
        (write,), meter = self.writes, self._meters.meter(self._route.topic, self._protocol)
        meter.published_batches_together(len(self._transactions), write.records, write.size_bytes, self._meters.ticks() - self._began)
        if not self.answer.done():
            appended, partition = staged.result()[first], self.partition
            places = None if appended.offsets is None else [(partition, offset) for offset in appended.offsets]
            self.answer.land([Published(partition, appended.base_offset, appended.count, appended.timestamp, places)])

    def fail(self, error: BaseException) -> None:
        """Take the failure. A transaction that stays open has its records then."""
        first = 0
        for transaction, count in zip(self._transactions, self._counts, strict=True):
            transaction.failed(error)
            if transaction.is_open:
                try:
                    transaction.publish(self._route.topic, RecordBatch(self._values[first : first + count]), self.partition)
                except BrokerError:  # the topic or the permission is gone, or open transactions may not hold so much
                    transaction.abort()
            first += count
        if not self.answer.done():
            self.answer.fail(error)


class Deadline:
    """Timer of transactions that were begun in the same millisecond with the same timeout."""

    __slots__ = ("_left", "_timer", "_transactions", "began", "timeout_ms")

    def __init__(self, began: int, timeout_ms: int, later: Later) -> None:
        self.began, self.timeout_ms = began, timeout_ms
        self._transactions: list[Transaction] = []
        """All of them. A list and a number cost less than a set of those that have not ended."""
        self._left = 0
        """Number of those that have not ended."""
        self._timer = later(timeout_ms / 1000, self._expire)

    @property
    def is_over(self) -> bool:
        """Whether all have ended, and there is no timer."""
        return not self._left

    def add(self, transactions: Sequence[Transaction]) -> None:
        self._transactions += transactions
        self._left += len(transactions)

    def ended(self, count: int) -> None:
        """Note that so many of them have ended."""
        self._left -= count
        if not self._left:
            self._timer.cancel()
            self._transactions.clear()

    def _expire(self) -> None:
        transactions, self._transactions = self._transactions, []
        for transaction in transactions:
            transaction.time_out()


class Transactions:
    """The open transactions and their total size."""

    def __init__(
        self,
        publisher: Publisher,
        groups: Groups,
        check_commit: CheckCommit,
        *,
        clock: Clock,
        later: Later,
        open_max: int,
        bytes_max: int,
    ) -> None:
        self.publisher = publisher
        self.groups = groups
        self.check_commit = check_commit
        self._clock = clock
        self._later = later
        self._begun = 0
        self._deadline: Deadline | None = None
        self._open_max = open_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._open = 0
        """Number of open transactions."""
        self._by_id: dict[str, Transaction] = {}
        """Those that are open or being committed."""

    def begin(self, who: Principal, id: str, timeout_ms: int) -> Transaction:
        check_name("transaction", id)
        if id in self._by_id:
            raise InvalidTransaction(f"transaction {id!r} is open already")
        (transaction,) = self._begin(who, [id], timeout_ms, self._clock())
        return transaction

    def begin_all(self, who: Principal, count: int, timeout_ms: int) -> list[Transaction]:
        """Begin so many transactions with new ids or, if there is no room for all, fewer, but at least one."""
        count, now = max(min(count, self._open_max - self._open), 1), self._clock()
        while True:
            first = self._begun + 1 if self._begun + count <= _NUMBER_MAX else 0
            self._begun = first + count - 1
            ids = _ids(now, first, count)
            if self._by_id.keys().isdisjoint(ids):
                return self._begin(who, ids, timeout_ms, now)

    def _begin(self, who: Principal, ids: Sequence[str], timeout_ms: int, now: int) -> list[Transaction]:
        self.publisher.check_open()
        if timeout_ms <= 0:
            raise InvalidRequest(f"transaction timeout is {timeout_ms} ms; it must be at least 1 ms")
        if self._open + len(ids) > self._open_max:
            raise LimitExceeded(f"{self._open_max} transactions are open already")
        deadline = self._deadline
        if deadline is None or deadline.began != now or deadline.timeout_ms != timeout_ms or deadline.is_over:
            deadline = self._deadline = Deadline(now, timeout_ms, self._later)
        begun = [Transaction(self, who, id, deadline) for id in ids]
        deadline.add(begun)
        self._open += len(begun)
        self._by_id.update(zip(ids, begun, strict=True))
        return begun

    def reserve(self, transaction: Transaction, size_bytes: int) -> None:
        if transaction.size_bytes + size_bytes > TRANSACTION_BYTES_MAX:
            raise InvalidTransaction(f"a transaction may hold at most {TRANSACTION_BYTES_MAX} bytes")
        if self._bytes + size_bytes > self._bytes_max:
            raise Unavailable(f"all open transactions together may hold at most {self._bytes_max} bytes")
        transaction.size_bytes += size_bytes
        self._bytes += size_bytes

    def append(self, commit: _Commit, offsets: Commits, size_bytes: int) -> None:
        """Append everything atomically. Transactions of one turn of the loop share an append, unless they have offsets: those may use
        space that is reserved for the tables of the broker."""
        if not offsets:
            self.publisher.gathering.add_commit(commit, size_bytes)
            return
        staged = self.publisher.append([*commit.writes, self.groups.write(offsets)])
        self.groups.follow(staged, offsets)
        staged.add_done_callback(partial(_landed, commit))

    def stage_whole(
        self, who: Principal, transactions: Sequence[Transaction], topic: str, values: Sequence[bytes], counts: Sequence[int]
    ) -> PublishedTogether | None:
        """Stage as `Transaction.stage_whole` does."""
        size_bytes = sum(map(len, values))
        if size_bytes > _WHOLE_BYTES_MAX:
            return None
        try:
            self.publisher.check_open()
            route = self.publisher.known_route(who, topic)
        except BrokerError:
            return None
        if not route.is_plain or not self._takes_empty(transactions):
            return None
        whole = _Whole(transactions, route, values, counts, self.publisher.meters, who.protocol)
        self.publisher.gathering.add_commit(whole, size_bytes)
        return whole.answer

    def _takes_empty(self, transactions: Sequence[Transaction]) -> bool:
        """Take the begin of commits of transactions to which nothing is staged yet. Return False, with nothing changed, if one is not empty
        or occurs twice."""
        for index, transaction in enumerate(transactions):
            if not transaction.is_empty:
                for taken in transactions[:index]:
                    taken.take(_State.OPEN)
                return False
            transaction.take(_State.COMMITTING)
        self._open -= len(transactions)
        return True

    def committing(self, transaction: Transaction) -> None:
        """Take the begin of a commit. It does not count as open: the caller that waits for it bounds the number of commits."""
        transaction.take(_State.COMMITTING)
        self._open -= 1

    def committed(self, transactions: Sequence[Transaction]) -> None:
        """Take the success of commits."""
        for transaction in transactions:
            transaction.take(_State.COMMITTED)
        self.ended(transactions, were_open=False)

    def reopened(self) -> None:
        """Take the failure of a commit that may be retried."""
        self._open += 1

    def ended(self, transactions: Sequence[Transaction], *, were_open: bool) -> None:
        """Take the end of at least one transaction. `were_open`: they were not being committed."""
        if were_open:
            self._open -= len(transactions)
        first, deadline, by_id = 0, transactions[0].deadline, self._by_id
        for index, transaction in enumerate(transactions):
            self._bytes -= transaction.size_bytes
            del by_id[transaction.id]
            if transaction.deadline is not deadline:
                deadline.ended(index - first)
                first, deadline = index, transaction.deadline
        deadline.ended(len(transactions) - first)

    def drain(self) -> None:
        """Abort the open transactions; their commits then fail."""
        for transaction in list(self._by_id.values()):
            if transaction.is_open:
                transaction.abort()


def _ids(now: int, first: int, count: int) -> list[str]:
    """Return so many ids. The start time is part of them: a transaction must not be mistaken for one before a restart. All numbers have
    the same size, so that one call formats all of them."""
    numbers = array("I", range(first, first + count))
    numbers.byteswap()
    front = f"txn-{now:x}-"
    return (front + numbers.tobytes().hex(" ", numbers.itemsize).replace(" ", " " + front)).split(" ")


def _landed(commit: _Commit, staged: Staged) -> None:
    commit.landed(staged, 0)
    commit.answer.call_back()


def _published(placings: Sequence[Placing], appended: Sequence[Appended]) -> Iterator[Published]:
    start = 0
    for placing in placings:
        stop = start + len(placing.writes)
        yield placing.landed(appended[start:stop])
        start = stop
