"""State of one partition: its bounds as last seen, the appends that wait, the watchers, and a cache of the newest records.

The bounds are a snapshot. `end` never moves back, and it is never below the records that this engine has appended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from headrace.engine.listed import ListedBatch, fitted
from headrace.limits import MIB

if TYPE_CHECKING:
    import asyncio

    from headrace.engine.kafka.parts import Append

_TAIL_BYTES_MAX: Final = 2 * MIB
_WINDOWS_MAX: Final = 4
_SEEN_RECORDS_MAX: Final = 1_000_000


class _Window:
    """Adjacent records that were fetched for a reader."""

    __slots__ = ("batches", "first", "latest", "size_bytes")

    def __init__(self, first: int) -> None:
        self.first = self.latest = first
        """The offset from which on no record is missing, and that of the latest fetch."""
        self.batches: list[ListedBatch] = []
        self.size_bytes = 0

    @property
    def end(self) -> int:
        return self.batches[-1].next_offset if self.batches else self.first

    def extend(self, batches: list[ListedBatch]) -> None:
        """Add the records of a fetch at the end. Those of the fetch before the last one leave."""
        count = bisect_right(self.batches, self.latest, key=lambda batch: batch.next_offset)
        self.size_bytes += sum(batch.size_bytes for batch in batches) - sum(batch.size_bytes for batch in self.batches[:count])
        if count:
            self.first = self.latest
        self.latest = self.end
        self.batches = self.batches[count:] + batches


class PartitionLog:
    """One partition of one topic."""

    def __init__(self, topic: str, kafka_topic: str, number: int, *, first: int = 0, end: int = 0) -> None:
        self.topic, self.kafka_topic, self.number = topic, kafka_topic, number
        self.first, self.end = first, end
        self.batch_bytes_max = 1 * MIB
        """`max.message.bytes` of the topic."""
        self.is_gone = False
        self.is_deleting = False
        """Whether appends are refused, because the topic is about to be deleted."""
        self.queue: deque[Append] = deque()
        """Appends that are not finished, in call order."""
        self.is_sending = False
        self.watchers: dict[object, Callable[[], None]] = {}
        self._seen_records = self._seen_bytes = 0.0
        self._tail: list[ListedBatch] = []
        self._tail_first = 0
        self._windows: list[_Window] = []
        """One for each reader of history, the latest used last."""
        self.fetches: dict[int, tuple[asyncio.Task[int], int]] = {}
        """Fetches under way and the bytes they ask for, by offset."""

    @property
    def place(self) -> tuple[str, int]:
        """Kafka topic and partition."""
        return self.kafka_topic, self.number

    @property
    def is_committing(self) -> bool:
        """Whether a transaction of ours is under way here. Its records become visible on all partitions together, when it has ended."""
        return bool(self.queue) and self.queue[0].is_transaction and self.queue[0].is_sent

    def advance(self, end: int) -> bool:
        """Move the end forward. Returns whether it moved."""
        if end <= self.end:
            return False
        self.end = end
        return True

    def wake(self) -> None:
        for watcher in list(self.watchers.values()):
            watcher()

    # Size

    @property
    def size_estimate_bytes(self) -> int:
        """Size of the partition, if all its records are like those that were written and read here."""
        return round((self.end - self.first) * self._seen_bytes / max(1, self._seen_records))

    def note_size(self, records: int, size_bytes: int) -> None:
        """Count records and their bytes in Kafka for the estimate. Old ones lose weight."""
        self._seen_records += records
        self._seen_bytes += size_bytes
        if self._seen_records > _SEEN_RECORDS_MAX:
            self._seen_records /= 2
            self._seen_bytes /= 2

    # Cache

    def remember(self, first: int, batches: list[ListedBatch]) -> None:
        """Keep records for the readers at the end. No record lies between `first` and the first of them."""
        if not self._tail or self._tail[-1].next_offset != first:
            self._tail.clear()
            self._tail_first = first
        self._tail += batches
        if sum(batch.size_estimate_bytes for batch in self._tail) > _TAIL_BYTES_MAX:
            self._tail = self._tail[-(len(self._tail) // 2) :] if len(self._tail) > 1 else self._tail
            self._tail_first = self._tail[0].base_offset

    def remember_fetched(self, first: int, batches: list[ListedBatch]) -> None:
        """Keep the answer of a fetch for a reader that takes it in small parts. No record lies between `first` and the first of them."""
        window = next((window for window in self._windows if window.end == first), None) or _Window(first)
        if window in self._windows:
            self._windows.remove(window)
        window.extend(batches)
        self._windows = [*self._windows[1 - _WINDOWS_MAX :], window]

    def ahead_of(self, offset: int) -> int | None:
        """Return the offset that a reader at `offset` will need soon and that is not fetched yet; None if there is none."""
        for window in self._windows:
            # Behind the middle of what was fetched last: a reader that takes a few records from the middle of the log is not one.
            if window.latest + window.end <= 2 * offset <= 2 * window.end:
                return window.end if window.end < self.end and window.end not in self.fetches else None
        return None

    def fetch_of(self, offset: int) -> asyncio.Task[int] | None:
        """Return the fetch under way whose answer begins at `offset`, or is likely to reach it."""
        for first, (fetch, bytes_max) in self.fetches.items():
            if fetch.done():  # it is removed in the next turn of the loop, and a reader that awaits it does not let that turn begin
                continue
            if first == offset or first < offset < first + bytes_max * self._seen_records / max(1, self._seen_bytes):
                return fetch
        return None

    def forget(self) -> None:
        self._tail.clear()
        self._windows.clear()

    @property
    def cached_bytes(self) -> int:
        return sum(batch.size_estimate_bytes for batch in self._tail) + sum(window.size_bytes for window in self._windows)

    def cached(self, offset: int, bytes_max: int, records_max: int) -> list[ListedBatch]:
        """Return records from `offset` on if they are in memory, else nothing."""
        for first, batches in ((self._tail_first, self._tail), *((window.first, window.batches) for window in self._windows)):
            if batches and first <= offset < batches[-1].next_offset:
                index = bisect_right(batches, offset, key=lambda batch: batch.next_offset)
                return fitted(batches[index:], offset, bytes_max, records_max)
        return []
