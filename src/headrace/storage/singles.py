"""Single records that one flush appends to many logs, in columns.

A flush may append one record to each of thousands of logs. Each record then is a batch of its own in the journal, and the objects that
other appends have (`Pending`, a header, the parts of a batch, an entry of the tail) would cost several times as much as the record. Here
nothing but the lists below grows with the records. All batches are encoded together, and the tail of a log gets the value only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from headrace.limits import BATCH_JOINED_BYTES_MAX
from headrace.storage.encoding import SINGLE_BYTES, encode_singles
from headrace.storage.pending import Pending, pending_value

if TYPE_CHECKING:
    from headrace.storage.partition import Partition


class Singles:
    """Records without key, in the order of the frame. Appends of other kinds to the same logs follow them there."""

    __slots__ = ("_logs", "_offsets", "_partitions", "_values", "large", "touched")

    def __init__(self) -> None:
        self._logs: list[int] = []
        self._offsets: list[int] = []
        self._partitions: list[Partition] = []
        self._values: list[bytes] = []
        self.touched: list[Partition] = []
        """Logs that had no tail before `push`."""
        self.large: list[Partition] = []
        """Logs whose tail is so large that it does not wait for more, after `push`."""

    def __len__(self) -> int:
        return len(self._values)

    @property
    def logs(self) -> Sequence[int]:
        return self._logs

    def place(
        self,
        logs: Sequence[int],
        values: Sequence[bytes],
        partitions: Mapping[int, Partition],
        pending: dict[int, Pending],
        offsets: list[int],
    ) -> list[int]:
        """Assign offsets, as `place_each` does. A record follows those that its log has in `pending`; so does one that is compressed or
        encrypted."""
        missing: list[int] = []
        for log, value in zip(logs, values, strict=True):
            partition = partitions.get(log)
            if partition is None:
                missing.append(len(offsets))
                offsets.append(0)
                continue
            offset, options = partition.next, partition.options
            if options.compress or options.encrypt or (pending and log in pending):
                pending_value(pending, log, partition, value)
            else:
                self.add(log, partition, value)
            partition.next = offset + 1
            offsets.append(offset)
        return missing

    def add(self, log: int, partition: Partition, value: bytes) -> None:
        """Add a record that gets the next offset of its log. The caller advances that."""
        self._logs.append(log)
        self._offsets.append(partition.next)
        self._partitions.append(partition)
        self._values.append(value)

    def retract(self) -> None:
        """Take the offsets back, because nothing was written. Those of `pending` were taken back before."""
        for index in range(len(self._offsets) - 1, -1, -1):
            self._partitions[index].next = self._offsets[index]

    def encode(self, now: int) -> bytes:
        """Return the batches of the frame, end to end."""
        return encode_singles(self._logs, self._offsets, self._values, now) if self._values else b""

    def push(self, now: int, locks: Sequence[Lock]) -> int:
        """Make the records readable that are safe in the journal. `locks` are those of all logs. Returns their size in the tails."""
        if not self._values:
            return 0
        size = 0
        held = locks if len(self._values) > len(locks) else list({partition.lock for partition in self._partitions})
        for lock in held:
            lock.acquire()
        try:
            for index, partition in enumerate(self._partitions):
                if partition.dropped:
                    continue
                value, singles = self._values[index], partition.singles
                if not singles and not partition.batches:
                    self.touched.append(partition)
                singles.append(value)
                singles.append(now)
                tail_bytes = partition.tail_bytes + len(value) + SINGLE_BYTES
                size += tail_bytes - partition.tail_bytes
                partition.tail_bytes = tail_bytes
                partition.end = self._offsets[index] + 1
                if tail_bytes >= BATCH_JOINED_BYTES_MAX:
                    self.large.append(partition)
        finally:
            for lock in held:
                lock.release()
        return size
