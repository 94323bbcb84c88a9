"""Window of requests and records without a reply, in order.

The entries of a window are sent again, in order, on a new connection.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown, RecordRefused
from headrace.clients.messages import Receipt
from headrace.errors import HeadraceError


class Entry:
    """A request, and the future of its reply."""

    __slots__ = ("done", "size_bytes", "was_sent")
    is_ping = False
    """Whether `Window.emptied` does not wait for it."""

    def __init__(self, size_bytes: int) -> None:
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.size_bytes = size_bytes
        self.was_sent = False

    @property
    def records(self) -> int:
        """Number of records without a reply."""
        return 0

    @property
    def weight(self) -> int:
        """Share of the entry in the window, in records."""
        return max(self.records, 1)

    def resolve(self, reply: object) -> None:
        if not self.done.done():
            self.done.set_result(reply)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # retrieved: `close` reports it even if the future is never awaited


class Batch(Entry, ABC):
    """Records that are sent together. `done` resolves when all are acknowledged, and fails with `RecordRefused`."""

    __slots__ = ("_failure", "_failures", "_index", "count")

    def __init__(self, count: int, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.count = count
        self._index = self._failures = 0
        self._failure: HeadraceError | None = None

    @abstractmethod
    def receipts(self) -> list[Receipt]:
        """Return the receipts of an acknowledged batch."""

    def refuse(self, index: int, failure: HeadraceError, count: int = 1) -> None:
        """Note that the broker refused `count` records; the one at `index` first."""
        if self._failure is None or index < self._index:
            self._index, self._failure = index, failure
        self._failures += count

    def settle(self) -> None:
        """Complete the batch: every record has its reply."""
        if self._failure is None:
            self.resolve(None)
        else:
            self.fail(RecordRefused(index=self._index, kept=self.count - self._failures, failure=self._failure))


_Entry = TypeVar("_Entry", bound=Entry)


class Window(Generic[_Entry]):
    """Window bounded by weight (records, or requests without records) and bytes. What finds no room waits in FIFO order."""

    def __init__(self, *, records_max: int, bytes_max: int) -> None:
        self._weight_max, self._bytes_max = records_max, bytes_max
        self._entries: deque[_Entry] = deque()
        self._weight = self._bytes = 0
        self._entry_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed_by: Exception | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def records(self) -> int:
        """Number of unacknowledged records, sent or queued."""
        return sum(entry.records for entry in self._entries)

    @property
    def has_requests(self) -> bool:
        """Whether something other than a ping is without a reply."""
        return any(not entry.is_ping for entry in self._entries)

    def has_room(self, records: int, size_bytes: int) -> bool:
        """Return whether these records enter without waiting, even if their frames are twice as large."""
        fits = self._weight + records <= self._weight_max and self._bytes + 2 * size_bytes <= self._bytes_max
        return fits and not self._entry_lock.locked()

    async def enter(self, *entries: _Entry) -> None:
        """Wait for room, then queue. Entries above the bounds enter when the window is empty. Raises `ClientClosed`."""
        weight, size_bytes = sum(entry.weight for entry in entries), sum(entry.size_bytes for entry in entries)
        async with self._entry_lock:
            while self._entries and (self._weight + weight > self._weight_max or self._bytes + size_bytes > self._bytes_max):
                if self._closed_by is not None:
                    break
                self._changed.clear()
                await self._changed.wait()
            if self._closed_by is not None:
                raise self._closed_by
            for entry in entries:
                self._admit(entry)

    def _admit(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._weight += entry.weight
        self._bytes += entry.size_bytes

    def _shrink(self, weight: int, size_bytes: int) -> None:
        self._weight -= weight
        self._bytes -= size_bytes
        self._changed.set()

    def unanswered(self) -> Iterator[_Entry]:
        """Iterate over the entries in order."""
        return iter(self._entries)

    def withdraw(self, entries: Iterable[_Entry]) -> bool:
        """Remove the entries that were never sent. Returns whether that is all of them."""
        entries = list(entries)
        unsent = [entry for entry in entries if not entry.was_sent and entry in self._entries]
        self.drop(lambda entry: entry in unsent, lambda entry: NotSent(entry.records))
        return len(unsent) == len(entries)

    def drop(self, is_dropped: Callable[[_Entry], bool], reason: Callable[[_Entry], Exception]) -> None:
        """Fail and remove entries."""
        kept: deque[_Entry] = deque()
        for entry in self._entries:
            if is_dropped(entry):
                self._forget(entry)
                entry.fail(reason(entry))
            else:
                kept.append(entry)
        self._entries = kept
        self._weight = sum(entry.weight for entry in kept)
        self._bytes = sum(entry.size_bytes for entry in kept)
        self._changed.set()

    def _forget(self, entry: _Entry) -> None:
        """Release what a subclass keeps for the entry."""

    async def emptied(self) -> None:
        """Wait until only pings are without a reply, or the window is closed."""
        while self._closed_by is None and self.has_requests:
            self._changed.clear()
            await self._changed.wait()

    def close(self, error: Exception | None = None) -> tuple[int, int]:
        """Fail the remaining entries, with `error` if given. Returns the number of records sent without a reply, and never sent."""
        self._closed_by = error or ClientClosed("the client is closed")
        unknown = sum(entry.records for entry in self._entries if entry.was_sent)
        unsent = sum(entry.records for entry in self._entries if not entry.was_sent)
        self.drop(lambda entry: True, lambda entry: error or _left_open(entry))
        return unknown, unsent


def _left_open(entry: Entry) -> Exception:
    if not entry.records:
        return ClientClosed("the client was closed")
    return OutcomeUnknown(entry.records) if entry.was_sent else NotSent(entry.records)


class NumberedBatch(Batch):
    """Values numbered from `first_seq`, without those that are acknowledged."""

    __slots__ = ("_begin", "first_seq", "partition", "topic", "values")

    def __init__(self, topic: str, values: list[bytes], partition: int) -> None:
        super().__init__(len(values), sum(map(len, values)))
        self.topic, self.values, self.partition = topic, values, partition
        self.first_seq = self._begin = 0

    def number(self, seq: int) -> None:
        self.first_seq = self._begin = seq

    @property
    def records(self) -> int:
        return len(self.values)

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.values) - 1

    def receipts(self) -> list[Receipt]:
        return [Receipt(self.topic, self.partition)] * self.count

    def refuse_seq(self, seq: int, failure: HeadraceError) -> None:
        self.refuse(seq - self._begin, failure)


class NumberedWindow(Window[NumberedBatch]):
    """Window over one sequence of numbers. An acknowledgement covers its number and all lower ones."""

    def __init__(self, *, records_max: int, bytes_max: int) -> None:
        super().__init__(records_max=records_max, bytes_max=bytes_max)
        self._next_seq = 0

    def _admit(self, entry: NumberedBatch) -> None:
        """Number the values after the wait for room: the numbers follow the order of entry."""
        entry.number(self._next_seq)
        self._next_seq += entry.count
        super()._admit(entry)

    def acknowledge(self, seq: int) -> int:
        """Remove all records up to `seq` and return their number. Ignores records that were never sent."""
        count = 0
        while self._entries and self._entries[0].was_sent and self._entries[0].first_seq <= seq:
            head = self._entries[0]
            covered = min(seq - head.first_seq + 1, len(head.values))
            count += covered
            if covered == len(head.values):
                self._entries.popleft()
                self._shrink(covered, head.size_bytes)
                head.settle()
            else:
                self._trim(head, covered)
        self._changed.set()
        return count

    def _trim(self, batch: NumberedBatch, count: int) -> None:
        """Drop the acknowledged values of a partly acknowledged batch, so that only the rest is sent again."""
        size_bytes = sum(map(len, batch.values[:count]))
        batch.values, batch.first_seq = batch.values[count:], batch.first_seq + count
        batch.size_bytes -= size_bytes
        self._shrink(count, size_bytes)
