"""One call that takes records for a member."""

from __future__ import annotations

from headrace.broker.groups.progress import Entry, MemberState, Row
from headrace.broker.tracing import RECORDS_READ_MAX, headers_of
from headrace.engine.contract import Batch
from headrace.records import Headers


class Taking:
    """Deliveries of one call so far, and its remaining capacity."""

    __slots__ = ("bytes_left", "chunks", "member", "records_left", "taken")

    def __init__(self, member: MemberState, records_max: int, bytes_max: int) -> None:
        self.member = member
        self.records_left = min(records_max, member.room)
        self.bytes_left = bytes_max
        self.taken: list[tuple[Entry, Row]] = []
        self.chunks: list[tuple[Entry, list[Batch]]] = []
        """Instead of single records: each chunk with its unexpired records."""

    @property
    def is_full(self) -> bool:
        return self.records_left <= 0 or self.bytes_left <= 0

    @property
    def is_empty(self) -> bool:
        return not self.taken and not self.chunks

    @property
    def records(self) -> int:
        return len(self.taken) + sum(len(batch) for _, living in self.chunks for batch in living)

    def headers(self) -> list[Headers]:
        """Return the headers of the first records, for traces."""
        if self.taken:
            return [row.headers for _, row in self.taken[:RECORDS_READ_MAX] if row.headers]
        return headers_of(batch for _, living in self.chunks for batch in living)

    def fits(self, row: Row) -> bool:
        """Return whether the record fits. The first one always does, whatever its size."""
        return self.is_empty or row.size_bytes <= self.bytes_left

    def fitting(self, batch: Batch, *, is_first: bool | None = None) -> int:
        """Return how many records of the batch fit; at least one if nothing is taken yet, or if `is_first`."""
        if is_first is None:
            is_first = self.is_empty
        return min(max(batch.fitting(self.bytes_left), 1 if is_first else 0), len(batch), self.records_left)

    def add(self, entry: Entry, row: Row) -> None:
        self.taken.append((entry, row))
        self.records_left -= 1
        self.bytes_left -= row.size_bytes

    def count(self, batch: Batch) -> None:
        """Count the records of a chunk or a range, which are in `chunks`."""
        self.records_left -= len(batch)
        self.bytes_left -= batch.size_bytes

    def entries(self) -> list[Entry]:
        return [entry for entry, _ in self.taken] + [entry for entry, _ in self.chunks]
