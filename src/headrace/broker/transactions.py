"""Transactions: batches for several partitions and a group's offsets, committed as one append.

An open transaction is staged in memory only; it gets its offsets at the commit. A crash or an abort therefore leaves nothing in the log
that readers would have to skip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Final, Protocol

from headrace.broker.authorizer import Principal
from headrace.broker.groups.offsets import Groups
from headrace.broker.publishing.publish import Placing, Publisher
from headrace.broker.publishing.published import Published
from headrace.broker.settings import Clock, Later, Timer
from headrace.broker.tables import Staged
from headrace.broker.topics import check_name
from headrace.engine.catalog import check_batch, headers_bytes
from headrace.engine.contract import Appended, Commits, Write, when_known
from headrace.errors import AppendUnknown, BrokerError, InvalidRequest, InvalidTransaction, LimitExceeded, Unavailable
from headrace.limits import TRANSACTION_BYTES_MAX
from headrace.records import AnyBatch, ColumnBatch


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


def weight(batch: AnyBatch, size_bytes: int | None = None) -> int:
    """Return the size of a batch that counts against `limits.TRANSACTION_BYTES_MAX`. `size_bytes`: of its keys and values, if known."""
    if batch.headers is None:
        headers = 0
    else:
        headers = len(batch.headers.data) if isinstance(batch, ColumnBatch) else sum(map(headers_bytes, batch.headers))
    return (batch.size_bytes if size_bytes is None else size_bytes) + headers + _RECORD_BYTES * len(batch)


class CheckCommit(Protocol):
    """Raises unless the principal may commit these offsets and their topics exist."""

    def __call__(self, who: Principal, group: str, offsets: Mapping[tuple[str, int], int]) -> None: ...


class Transaction:
    """Staged in memory and invisible until it is committed."""

    def __init__(self, transactions: Transactions, who: Principal, id: str) -> None:
        self.id = id
        self.size_bytes = 0
        self.timer: Timer | None = None
        self._transactions = transactions
        self._who = who
        self._state = _State.OPEN
        self._is_overdue = False
        self._placings: list[Placing] = []
        self._commits: Commits = []
        self._checks: dict[tuple[str, str], Callable[[], None]] = {}
        """Permissions to check again at the commit: they may end while the transaction is open."""

    @property
    def is_open(self) -> bool:
        return self._state is _State.OPEN

    @property
    def has_ended(self) -> bool:
        return self._state not in (_State.OPEN, _State.COMMITTING)

    @property
    def placings(self) -> Sequence[Placing]:
        """One for each `publish`, in order; empty after the end."""
        return self._placings

    def publish(self, topic: str, batch: AnyBatch, partition: int | None = None) -> Placing:
        """Stage a batch and return its partitions. Raises as `Broker.publish` does at once, and `InvalidTransaction`, also for a
        transaction that grows too large."""
        self._check_open()
        route = self._transactions.publisher.known_route(self._who, topic)
        size_bytes = check_batch(batch)
        placing = Placing(route, batch, partition)
        self._transactions.reserve(self, weight(batch, size_bytes))
        self._placings.append(placing)
        if ("topic", topic) not in self._checks:
            self._checks["topic", topic] = partial(self._transactions.publisher.check_may, self._who, topic)
        return placing

    def commit_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Stage a group's offsets. They become durable with the records."""
        self._check_open()
        self._transactions.check_commit(self._who, group, offsets)
        self._commits += self._transactions.groups.commits(group, offsets)
        self._checks["group", group] = partial(self._transactions.check_commit, self._who, group, {})

    async def commit(self) -> list[Published]:
        """Commit atomically. Returns one `Published` for each `publish`, in order. After a retriable error (`DiskFull`) the transaction
        stays open and may be committed again."""
        return await self.stage_commit()

    def stage_commit(self) -> asyncio.Future[list[Published]]:
        """Stage the commit now: what is published or committed after this call follows it in the log. Raises at once what is known
        at once. Cancelling the future does not revoke the commit."""
        self._check_open()
        self._transactions.publisher.check_open()
        for check in self._checks.values():
            check()
        for placing in self._placings:
            placing.check_again(self._transactions.publisher.own_route(placing.topic))
        placings, answer = self._placings, asyncio.get_running_loop().create_future()
        staged = self._transactions.append(placings, self._commits)
        self._state = _State.COMMITTING
        self._transactions.committing(self)
        if staged is None:
            self._end(_State.COMMITTED)
            answer.set_result([])
        else:
            staged.add_done_callback(partial(self._answer_unknown, answer))
            when_known(staged, partial(self._landed, placings, answer, self._transactions.publisher.meters.ticks()))
        return answer

    def _answer_unknown(self, answer: asyncio.Future[list[Published]], staged: Staged) -> None:
        """Tell the caller that the outcome is unknown. The transaction counts as committing until it is known: a second commit could
        write everything twice."""
        error = staged.exception()
        if isinstance(error, AppendUnknown) and error.outcome is not None and not answer.done():
            answer.set_exception(error)

    def _landed(self, placings: Sequence[Placing], answer: asyncio.Future[list[Published]], began: float, staged: Staged) -> None:
        error = staged.exception()
        if error is None:
            self._end(_State.COMMITTED)
            meters = self._transactions.publisher.meters
            for placing in placings:
                meters.meter(placing.topic, self._who.protocol).published(placing.topic, placing.writes, meters.ticks() - began)
        else:
            # A caller that was cancelled does not commit again.
            is_open = isinstance(error, BrokerError) and error.retriable and not isinstance(error, AppendUnknown) and not answer.done()
            self._end(_State.OPEN if is_open else _State.ABORTED)
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(list(_published(placings, staged.result())))

    def abort(self) -> None:
        """Discard everything. Idempotent; no effect on a transaction that has ended or is being committed."""
        if self.is_open:
            self._end(_State.ABORTED)

    def time_out(self) -> None:
        self._is_overdue = True
        if self.is_open:
            self._end(_State.TIMED_OUT)

    def _end(self, state: _State) -> None:
        """End it, or (OPEN) keep it open after a commit that may be retried, if there is time left."""
        if state is _State.OPEN and self._is_overdue:
            state = _State.TIMED_OUT
        self._state = state
        if state is _State.OPEN:
            self._transactions.reopened(self)
        else:
            self._placings, self._commits = [], []
            self._transactions.ended(self)

    def _check_open(self) -> None:
        if not self.is_open:
            raise InvalidTransaction(f"transaction {self.id!r} {_WORDS[self._state]}")


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
        self._open_max = open_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._open: set[Transaction] = set()
        self._by_id: dict[str, Transaction] = {}

    def begin(self, who: Principal, id: str | None, timeout_ms: int) -> Transaction:
        self.publisher.check_open()
        if timeout_ms <= 0:
            raise InvalidRequest(f"transaction timeout is {timeout_ms} ms; it must be at least 1 ms")
        if id is None:
            # The start time is part of the id: a transaction must not be mistaken for one before a restart.
            self._begun += 1
            id = f"txn-{self._clock():x}-{self._begun:x}"
        else:
            check_name("transaction", id)
        if id in self._by_id:
            raise InvalidTransaction(f"transaction {id!r} is open already")
        if len(self._open) >= self._open_max:
            raise LimitExceeded(f"{self._open_max} transactions are open already")
        transaction = Transaction(self, who, id)
        transaction.timer = self._later(timeout_ms / 1000, transaction.time_out)
        self._open.add(transaction)
        self._by_id[id] = transaction
        return transaction

    def reserve(self, transaction: Transaction, size_bytes: int) -> None:
        if transaction.size_bytes + size_bytes > TRANSACTION_BYTES_MAX:
            raise InvalidTransaction(f"a transaction may hold at most {TRANSACTION_BYTES_MAX} bytes")
        if self._bytes + size_bytes > self._bytes_max:
            raise Unavailable(f"all open transactions together may hold at most {self._bytes_max} bytes")
        transaction.size_bytes += size_bytes
        self._bytes += size_bytes

    def append(self, placings: Sequence[Placing], commits: Commits) -> Staged | None:
        """Append everything atomically; None if there is nothing to write."""
        writes: list[Write] = [write for placing in placings for write in placing.writes]
        if commits:
            writes.append(self.groups.write(commits))
        if not writes:
            return None
        staged = self.publisher.append(writes)
        if commits:
            self.groups.follow(staged, commits)
        return staged

    def committing(self, transaction: Transaction) -> None:
        """Do not count it as open. The caller that waits for the commit bounds the number of these."""
        self._open.discard(transaction)

    def reopened(self, transaction: Transaction) -> None:
        self._open.add(transaction)

    def ended(self, transaction: Transaction) -> None:
        if transaction.timer is not None:
            transaction.timer.cancel()
        self._bytes -= transaction.size_bytes
        self._open.discard(transaction)
        self._by_id.pop(transaction.id, None)

    def drain(self) -> None:
        """Abort the open transactions; their commits then fail."""
        for transaction in list(self._open):
            transaction.abort()


def _published(placings: Sequence[Placing], appended: Sequence[Appended]) -> Iterator[Published]:
    start = 0
    for placing in placings:
        stop = start + len(placing.writes)
        yield placing.landed(appended[start:stop])
        start = stop
