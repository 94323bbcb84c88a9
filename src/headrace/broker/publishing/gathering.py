"""Single records, which are gathered during a turn of the event loop and appended together.

Most clients send one record and wait for its reply. An append for each of them costs more than the record: futures and callbacks in every
layer, and a flush of the log that starts while the next records are still in the sockets. Here the records that a turn publishes to one
partition become one batch, which is appended when the loop has read all ready sockets. The same holds for small transactions: those that
are committed in one turn become one append. The record of a publisher that has the broker for itself is appended at once.

A batch holds records of one protocol, so that they share a meter. The order of the calls is the order in the log: whatever else is
appended in the same turn is appended after `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias

from headrace.broker.meters import Meter, Meters
from headrace.broker.publishing.published import Landing, PublishedOne
from headrace.engine.contract import Appended, Write
from headrace.errors import BrokerError
from headrace.limits import KIB
from headrace.records import RecordBatch

RECORD_BYTES_MAX: Final = KIB
"""Key and value of a record that is gathered. A larger one is worth an append of its own."""
_RECORDS_MAX: Final = 1_024
"""Records of one batch."""
LONE_AFTER: Final = 8
"""Single records in a row, each with nothing in flight, after which the next one is that of a lone publisher."""
_COMMIT_BYTES_MAX: Final = 256 * KIB
"""Size of the transactions of one append."""

Staged: TypeAlias = asyncio.Future[list[Appended]]
Place: TypeAlias = tuple[str, int]
"""Topic and partition."""


class _Batch:
    """Records for one partition that wait for the end of the turn."""

    __slots__ = ("_gathering", "began", "is_landed", "is_staged", "keys", "meter", "outcomes", "protocol", "values", "write")

    def __init__(self, gathering: Gathering, meter: Meter, protocol: str, began: float) -> None:
        self._gathering = gathering
        self.meter, self.protocol, self.began = meter, protocol, began
        self.values: list[bytes] = []
        self.keys: list[bytes | None] | None = None
        self.outcomes: list[PublishedOne] = []
        self.write: Write | None = None
        self.is_staged = self.is_landed = False

    def landed(self, result: list[Appended] | BaseException) -> None:
        """Take the outcome of the append."""
        if not self.is_landed:
            self.is_landed = True
            self._gathering.land(self, result)


class Commit(Protocol):
    """A transaction that waits for the end of the turn."""

    @property
    def answer(self) -> Landing: ...

    @property
    def writes(self) -> Sequence[Write]: ...

    def landed(self, staged: Staged, first: int) -> None:
        """Take the outcome of an append whose results for this transaction begin at index `first`."""

    def fail(self, error: BrokerError) -> None:
        """Take the error of an append that was not staged."""


class Append(Protocol):
    """An append to the log. `owned`: refused if another process is the owner by then."""

    def __call__(self, writes: Sequence[Write], *, owned: bool) -> Staged: ...


AppendThen: TypeAlias = Callable[[Write, Callable[["list[Appended] | BaseException"], None]], None]
"""`Engine.append_then`."""


class Gathering:
    """The records of this turn. `append` and `append_then` append and count it as in flight, `landed` counts it as done."""

    def __init__(self, append: Append, append_then: AppendThen, landed: Callable[[], None], meters: Meters) -> None:
        self._append, self._append_then = append, append_then
        self._count_landed = landed
        self._meters = meters
        self._batches: dict[Place, _Batch] = {}
        self._commits: list[Commit] = []
        self._commit_bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight = 0
        """Batches that are staged."""
        self._lone_before = 0
        """Latest batches in a row that were a single record, with nothing in flight."""

    def _send_soon(self) -> None:
        """Call `send` when the loop has read all ready sockets."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # a system call
        self._loop.call_soon(self.send)

    def add_commit(self, commit: Commit, size_bytes: int) -> None:
        """Append a transaction with the others of this turn. It has at least one write."""
        if self._batches or self._commit_bytes + size_bytes > _COMMIT_BYTES_MAX:
            self.send()
        if not self._commits:
            self._send_soon()
        self._commits.append(commit)
        self._commit_bytes += size_bytes

    def add(self, place: Place, value: bytes, key: bytes | None, meter: Meter, protocol: str) -> PublishedOne:
        if self._lone_before >= LONE_AFTER and not (self._in_flight or self._batches or self._commits):
            # A lone publisher sends the next record after the reply to the last one. No other record follows in this turn.
            batch = _Batch(self, meter, protocol, self._meters.ticks())
            batch.values.append(value)
            if key is not None:
                batch.keys = [key]
            outcome = PublishedOne(place[1])
            batch.outcomes.append(outcome)
            self._stage(place, batch)
            return outcome
        return self._gather(place, value, key, meter, protocol)

    def _gather(self, place: Place, value: bytes, key: bytes | None, meter: Meter, protocol: str) -> PublishedOne:
        batch = self._batches.get(place)
        if batch is None or batch.meter is not meter or len(batch.values) >= _RECORDS_MAX:
            batch = self._start(place, meter, protocol)
        if key is not None and batch.keys is None:
            batch.keys = [None] * len(batch.values)
        if batch.keys is not None:
            batch.keys.append(key)
        batch.values.append(value)
        outcome = PublishedOne(place[1])
        batch.outcomes.append(outcome)
        return outcome

    def _start(self, place: Place, meter: Meter, protocol: str) -> _Batch:
        if place in self._batches or self._commits:
            self.send()
        if not self._batches:
            self._send_soon()
        batch = self._batches[place] = _Batch(self, meter, protocol, self._meters.ticks())
        return batch

    def send(self) -> None:
        """Append what was gathered so far."""
        if self._commits:
            commits, self._commits, self._commit_bytes = self._commits, [], 0
            self._append_commits(commits)
            return  # there are either commits or single records
        batches, self._batches = self._batches, {}
        is_single = not self._in_flight and [len(batch.values) for batch in batches.values()] == [1]
        self._lone_before = self._lone_before + 1 if is_single else 0
        for place, batch in batches.items():
            self._stage(place, batch)

    def _stage(self, place: Place, batch: _Batch) -> None:
        batch.write = write = Write(place[0], place[1], RecordBatch(batch.values, batch.keys))
        try:
            self._append_then(write, batch.landed)
        except BrokerError as error:
            # The topic was deleted in this turn. A session may be the caller, so it is not called back from here.
            asyncio.get_running_loop().call_soon(self._fail, batch, error)
        else:
            batch.is_staged = True
            self._in_flight += 1

    def _append_commits(self, commits: list[Commit]) -> None:
        try:
            staged = self._append([write for commit in commits for write in commit.writes], owned=True)
        except BrokerError as error:
            # The topic of one was deleted in this turn.
            if len(commits) > 1:
                for commit in commits:
                    self._append_commits([commit])
            else:
                asyncio.get_running_loop().call_soon(self._fail_commit, commits[0], error)
        else:
            staged.add_done_callback(partial(self._landed_commits, commits))

    def _landed_commits(self, commits: list[Commit], staged: Staged) -> None:
        self._count_landed()
        first = 0
        for commit in commits:
            count = len(commit.writes)
            commit.landed(staged, first)
            first += count
        self._call_back([commit.answer for commit in commits])

    def _fail_commit(self, commit: Commit, error: BrokerError) -> None:
        commit.fail(error)
        self._call_back([commit.answer])

    def land(self, batch: _Batch, result: list[Appended] | BaseException) -> None:
        """Pass the outcome of an append to the publishers of its records."""
        if not batch.is_staged:
            # The engine has refused it at once, and a session may be the caller.
            batch.is_staged = True
            asyncio.get_running_loop().call_soon(self.land, batch, result)
            return
        self._count_landed()
        self._in_flight -= 1
        if isinstance(result, BaseException):
            self._fail(batch, result)
            return
        appended = result[0]
        offsets, timestamp = appended.offsets, appended.timestamp
        if offsets is None:
            offsets = range(appended.base_offset, appended.base_offset + appended.count)
        for outcome, offset in zip(batch.outcomes, offsets, strict=True):
            outcome.land(offset, timestamp)
        self._call_back(batch.outcomes)
        # After the replies, which do not wait for it.
        assert batch.write is not None
        batch.meter.published_singly(len(batch.values), batch.write.size_bytes, self._meters.ticks() - batch.began)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        for outcome in batch.outcomes:
            if isinstance(error, BrokerError):
                self._meters.refuse(batch.protocol, error.code)
            outcome.fail(error)
        self._call_back(batch.outcomes)

    def _call_back(self, outcomes: Iterable[Landing]) -> None:
        for outcome in outcomes:
            try:
                outcome.call_back()
            except Exception as failure:
                # A defect in one session must not cost the others their replies.
                asyncio.get_running_loop().call_exception_handler({"message": "a reply failed", "exception": failure})
