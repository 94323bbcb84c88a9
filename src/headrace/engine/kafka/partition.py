"""State of one partition: its bounds as last seen, the appends that wait, the watchers, and a cache of the newest records.

The bounds are a snapshot. `end` never moves back, and it is never below the records that this engine has appended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from headrace.engine.listed import ListedBatch, fitted
from headrace.limits import MIB

if TYPE_CHECKING:
    from headrace.engine.kafka.writer import Append

_TAIL_BYTES_MAX: Final = 2 * MIB
_SEEN_RECORDS_MAX: Final = 1_000_000
_RECORD_BYTES: Final = 12
"""Bytes of a Kafka record besides key, value and headers."""


class PartitionLog:
    """One partition of one topic."""

    def __init__(self, topic: str, kafka_topic: str, number: int, *, first: int = 0, end: int = 0) -> None:
        self.topic, self.kafka_topic, self.number = topic, kafka_topic, number
        self.first, self.end = first, end
        self.batch_bytes_max = 1 * MIB
        """`max.message.bytes` of the topic."""
        self.is_gone = False
        self.queue: deque[Append] = deque()
        """Appends that are not finished, in call order."""
        self.is_sending = False
        self.watchers: dict[object, Callable[[], None]] = {}
        self._seen_records = self._seen_bytes = 0.0
        self._tail: list[ListedBatch] = []
        self._tail_first = 0
        self._recent: tuple[int, list[ListedBatch]] = (0, [])

    @property
    def place(self) -> tuple[str, int]:
        """Kafka topic and partition."""
        return self.kafka_topic, self.number

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

    def note_size(self, batches: Iterable[ListedBatch]) -> None:
        """Count records for the estimate. Old ones lose weight."""
        for batch in batches:
            self._seen_records += len(batch)
            self._seen_bytes += batch.size_estimate_bytes + _RECORD_BYTES * len(batch)
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
        """Keep the answer of a fetch for a reader that takes it in small parts."""
        self._recent = first, batches

    def forget(self) -> None:
        self._tail.clear()
        self._recent = (0, [])

    @property
    def cached_bytes(self) -> int:
        return sum(batch.size_estimate_bytes for batch in (*self._tail, *self._recent[1]))

    def cached(self, offset: int, bytes_max: int, records_max: int) -> list[ListedBatch]:
        """Return records from `offset` on if they are in memory, else nothing."""
        for first, batches in ((self._tail_first, self._tail), self._recent):
            if batches and first <= offset < batches[-1].next_offset:
                index = bisect_right(batches, offset, key=lambda batch: batch.next_offset)
                return fitted(batches[index:], offset, bytes_max, records_max)
        return []
