"""Cache of opened batches: verified, decrypted and decompressed, so that reads of the same records do this once.

A log is read at few places by many readers, a few records at a time. The cache is bounded in bytes, over all logs. The batch that was not
read for the longest time leaves first.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Final

from headrace.limits import KIB, OPENED_BATCHES_BYTES_MAX
from headrace.storage.batch import COMPRESSED, ENCRYPTED, StoredBatch

ENTRY_BYTES: Final = 1 * KIB
"""Memory of an entry besides the bytes of its batch."""


def opened_bytes(batch: StoredBatch) -> int:
    """Return the memory that an opened batch takes."""
    header = batch.header
    return ENTRY_BYTES + header.size + (header.raw_size if header.flags & (COMPRESSED | ENCRYPTED) else 0)


class OpenedBatches:
    """Opened batches of all logs, by log and offset. All threads that read use it.

    An entry is valid for one `Partition.generation`: compaction may have removed records of the batch since, and retention all of them.
    A batch that is moved from the tail to a segment stays valid.
    """

    def __init__(self, bytes_max: int = OPENED_BATCHES_BYTES_MAX) -> None:
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._batches: OrderedDict[tuple[int, int], tuple[int, StoredBatch]] = OrderedDict()
        """(log, base offset) → generation and batch, the one that was read last at the end."""
        self._bases: dict[int, list[int]] = {}
        """log → base offsets of its batches, ascending. The batches of a log do not overlap."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._batches)

    def find(self, log: int, generation: int, offset: int) -> StoredBatch | None:
        """Return the batch that covers `offset`."""
        bases = self._bases.get(log)
        if bases is None:
            return None
        # Without the lock: another thread may change the entries between two of these lines. A batch never changes, and whether it
        # covers the offset is checked at the end. What is removed meanwhile is not found.
        try:
            key = (log, bases[bisect_right(bases, offset) - 1])
            valid, batch = self._batches[key]
            self._batches.move_to_end(key)
        except (IndexError, KeyError):
            return None
        header = batch.header
        return batch if valid == generation and header.base_offset <= offset < header.next_offset else None

    def part(self, log: int, generation: int, offset: int, bytes_max: int, records_max: int) -> StoredBatch | None:
        """Return the records from `offset` on, up to a limit that lies within one batch; None if there is no such batch."""
        batch = self.find(log, generation, offset)
        return None if batch is None else batch.part(offset, bytes_max, records_max)

    def put(self, log: int, generation: int, batch: StoredBatch) -> None:
        """Keep a batch in place of those that hold the same offsets. One that is larger than the whole cache is not kept."""
        size = opened_bytes(batch)
        if size > self._bytes_max:
            return
        with self._lock:
            self._remove(log, batch.header.base_offset, batch.header.next_offset)
            bases = self._bases.setdefault(log, [])
            bases.insert(bisect_left(bases, batch.header.base_offset), batch.header.base_offset)
            self._batches[log, batch.header.base_offset] = generation, batch
            self.size_bytes += size
            while self.size_bytes > self._bytes_max:
                # One call: an iterator fails if `find` moves an entry before its first step.
                (oldest, base), (_, left) = self._batches.popitem(last=False)
                self.size_bytes -= opened_bytes(left)
                at = bisect_left(self._bases[oldest], base)
                self._drop_bases(oldest, at, at + 1)

    def forget(self, log: int) -> None:
        """Drop all batches of a deleted log."""
        with self._lock:
            if bases := self._bases.get(log):
                self._remove(log, bases[0], bases[-1] + 1)

    def _remove(self, log: int, first: int, stop: int) -> None:
        """Drop the batches of `log` that start in [first, stop), and the one that reaches into it. Requires the lock."""
        bases = self._bases.get(log)
        if not bases:
            return
        begin, end = bisect_left(bases, first), bisect_left(bases, stop)
        if begin and self._batches[log, bases[begin - 1]][1].header.next_offset > first:
            begin -= 1
        for base in bases[begin:end]:
            self.size_bytes -= opened_bytes(self._batches.pop((log, base))[1])
        self._drop_bases(log, begin, end)

    def _drop_bases(self, log: int, begin: int, end: int) -> None:
        bases = self._bases[log]
        del bases[begin:end]
        if not bases:
            del self._bases[log]
