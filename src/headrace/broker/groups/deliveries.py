"""The unsettled deliveries of a group and topic, by id.

A delivery is an entry of one record, of a chunk, or of a range. The records of a range have adjacent ids, and each can be settled by its
own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from headrace.broker.groups.progress import AdjacentBatches, Entry, MemberState, PartitionProgress
from headrace.engine.contract import Batch


class Deliveries:
    """The entries with their ids, and the bound of their number."""

    __slots__ = ("_next_id", "_ranges", "by_id", "count_max")

    def __init__(self) -> None:
        self.by_id: dict[int, Entry] = {}
        """The entries by their first id."""
        self.count_max = 0
        """Sum of what the policies of the members allow."""
        self._ranges: list[int] = []
        """Ids of the entries that are ranges, in order."""
        self._next_id = 1

    @property
    def count(self) -> int:
        return len(self.by_id)

    @property
    def room(self) -> int:
        """Number of entries that may still be added; negative after a member has left."""
        return self.count_max - len(self.by_id)

    def add(self, progress: PartitionProgress, offset: int, chunk: Batch | AdjacentBatches | None, member: MemberState, now: int) -> Entry:
        """Deliver one record or a chunk."""
        entry = progress.deliver_new(self._new_id(), offset, chunk, member, now)
        self.by_id[entry.id] = entry
        return entry

    def add_range(self, progress: PartitionProgress, batch: Batch, member: MemberState, now: int) -> Entry:
        """Deliver the records of a batch, each with an id of its own."""
        entry = progress.deliver_new(self._new_id(len(batch)), batch.first_offset, batch, member, now, is_range=True)
        self.by_id[entry.id] = entry
        insort(self._ranges, entry.id)
        return entry

    def _new_id(self, count: int = 1) -> int:
        """Return the first of so many unused ids."""
        self._next_id += count
        return self._next_id - count

    def find(self, id: int) -> Entry | None:
        """Return the entry with this id, or the range that has it."""
        entry = self.by_id.get(id)
        if entry is not None and not entry.is_range:
            return entry
        at = bisect_right(self._ranges, id) - 1
        if at < 0:
            return None
        entry = self.by_id[self._ranges[at]]
        return entry if entry.first_id <= id < entry.first_id + entry.count else None

    def remove(self, entry: Entry) -> None:
        del self.by_id[entry.id]
        if entry.is_range:
            del self._ranges[bisect_left(self._ranges, entry.id)]

    def split(self, entry: Entry) -> list[Entry]:
        """Return the entries of the single records. Those of a range keep their ids."""
        if entry.chunk is None:
            return [entry]
        first = entry.first_id if entry.is_range else self._new_id(entry.count)
        self.remove(entry)
        parts = entry.progress.split(entry, range(first, first + entry.count))
        self.by_id.update((part.id, part) for part in parts)
        return parts

    def single(self, entry: Entry, id: int) -> Entry:
        """Return the entry of the record with this id. A range that has it becomes single records."""
        if not entry.is_range:
            return entry
        self.split(entry)
        return self.by_id[id]

    def release(self, member: MemberState) -> None:
        """Take the deliveries from a member that has left."""
        for entry in self.by_id.values():
            if entry.holder is member:
                entry.holder = None


def consecutive(ids: Sequence[int], at: int, count_max: int) -> int:
    """Return how many ids from index `at` on count up by one, at most `count_max`."""
    first, count = ids[at], min(count_max, len(ids) - at)
    if list(ids[at : at + count]) == list(range(first, first + count)):
        return count
    return next(step for step in range(1, count) if ids[at + step] != first + step)
