"""Sliding window of published, unacknowledged records over one sequence of numbers.

An acknowledgement covers its number and all lower ones. The entries are sent again, in order, on a new connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown


@dataclass(slots=True)
class Unacknowledged:
    """Values numbered from `first_seq`. `done` resolves when the last one is acknowledged."""

    topic: str
    first_seq: int
    values: list[bytes]
    size_bytes: int
    done: asyncio.Future[None]
    was_sent: bool = False

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.values) - 1


class Window:
    """Window bounded by records and bytes. Publishers wait for room in FIFO order."""

    def __init__(self, *, records_max: int, bytes_max: int) -> None:
        self._records_max, self._bytes_max = records_max, bytes_max
        self._entries: deque[Unacknowledged] = deque()
        self._next_seq = 0
        self._records = self._bytes = 0
        self._entry_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of unacknowledged records."""
        return self._records

    async def enter(self, topic: str, values: list[bytes]) -> Unacknowledged:
        """Wait for room, then number the values: the numbers follow the order of entry.

        A batch larger than the window enters when the window is empty. Raises `ClientClosed`.
        """
        size_bytes = sum(map(len, values))
        async with self._entry_lock:
            while not self._has_room(len(values), size_bytes) and not self._is_closed:
                self._changed.clear()
                await self._changed.wait()
            if self._is_closed:
                raise ClientClosed("the client is closed")
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = Unacknowledged(topic, self._next_seq, values, size_bytes, done)
            self._next_seq += len(values)
            self._records += len(values)
            self._bytes += size_bytes
            self._entries.append(entry)
            return entry

    def acknowledge(self, seq: int) -> int:
        """Remove all records up to `seq` and return their number. Ignores records that were never sent."""
        before = self._records
        while self._entries and self._entries[0].was_sent and self._entries[0].first_seq <= seq:
            head = self._entries[0]
            if head.last_seq > seq:
                self._trim(head, seq - head.first_seq + 1)
                break
            self._entries.popleft()
            self._forget(len(head.values), head.size_bytes)
            if not head.done.done():
                head.done.set_result(None)
        self._changed.set()
        return before - self._records

    def unacknowledged(self) -> Iterator[Unacknowledged]:
        """Iterate over the entries in order."""
        return iter(self._entries)

    async def emptied(self) -> None:
        """Wait until every record is acknowledged or the window is closed."""
        while self._entries and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> tuple[int, int]:
        """Fail the remaining entries. Returns the number of records sent without a reply, and of records never sent."""
        self._is_closed = True
        self._changed.set()
        unknown = unsent = 0
        for entry in self._entries:
            count = len(entry.values)
            unknown, unsent = (unknown + count, unsent) if entry.was_sent else (unknown, unsent + count)
            if not entry.done.done():
                entry.done.set_exception(OutcomeUnknown(count) if entry.was_sent else NotSent(count))
                entry.done.exception()  # retrieved: `close` reports it even if the future is never awaited
        self._entries.clear()
        self._records = self._bytes = 0
        return unknown, unsent

    def _has_room(self, count: int, size_bytes: int) -> bool:
        return not self._entries or (self._records + count <= self._records_max and self._bytes + size_bytes <= self._bytes_max)

    def _trim(self, entry: Unacknowledged, count: int) -> None:
        """Drop the acknowledged values of a partly acknowledged entry, so that only the rest is sent again."""
        size_bytes = sum(map(len, entry.values[:count]))
        entry.values = entry.values[count:]
        entry.first_seq += count
        entry.size_bytes -= size_bytes
        self._forget(count, size_bytes)

    def _forget(self, count: int, size_bytes: int) -> None:
        self._records -= count
        self._bytes -= size_bytes
