"""Appends as record batches: which of them share a batch, which wait for positions of others, and where each landed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from headrace.engine.checks import check_batch
from headrace.engine.contract import Ack, Appended, Commits
from headrace.engine.kafka.codec import encoded_bytes_max
from headrace.engine.kafka.partition import PartitionLog
from headrace.engine.listed import ListedBatch
from headrace.errors import BrokerError
from headrace.records import AnyBatch, ColumnBatch, RecordBatch

LateBatch: TypeAlias = Callable[[Sequence[Appended]], AnyBatch]


@dataclass(slots=True, eq=False)
class Append:
    """One call of `Engine.append`."""

    writes: list[tuple[PartitionLog, RecordBatch | LateBatch]]
    future: asyncio.Future[list[Appended]]
    now: int
    sizes: list[int]
    """Upper bound of the encoded size of each batch; 0 for one that depends on positions."""
    is_transaction: bool
    ack: Ack = Ack.DURABLE
    """Below durable only outside of transactions."""
    commits: Commits = field(default_factory=list)
    is_sent: bool = False
    is_doubtful: bool = False
    timer: asyncio.TimerHandle | None = None
    appended: list[Appended | None] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def logs(self) -> list[PartitionLog]:
        return list(dict.fromkeys(log for log, _ in self.writes))

    def results(self) -> list[Appended]:
        """Return a position for each write; commits have none of their own."""
        found = [one for one in self.appended if one is not None]
        return [*found, Appended(0, len(self.commits), self.now)] if self.commits else found

    def resolve(self, outcome: list[Appended] | BrokerError) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():  # the caller was cancelled; the append is valid
            return
        if isinstance(outcome, BrokerError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(slots=True)
class Part:
    """Records of one write in one record batch."""

    append: Append
    index: int
    batch: RecordBatch
    size_bytes: int
    """Upper bound of the encoded size."""
    timestamps: Sequence[int]

    @classmethod
    def of(cls, append: Append, index: int, batch: RecordBatch) -> Part:
        """Return all records of a write."""
        size_bytes = append.sizes[index] or encoded_bytes_max(batch, batch.size_bytes)
        timestamps = [append.now] * len(batch) if batch.timestamps is None else batch.timestamps
        return cls(append, index, batch, size_bytes, timestamps)

    def rows(self, start: int, stop: int, size_bytes: int) -> Part:
        """Return some of the records, with the bound of their size."""
        return Part(self.append, self.index, self.batch[start:stop], size_bytes, self.timestamps[start:stop])


class Invalid(Exception):
    """One append of a transaction is invalid."""

    def __init__(self, append: Append, error: BrokerError) -> None:
        super().__init__(str(error))
        self.append, self.error = append, error


def built(append: Append, index: int, build: LateBatch) -> RecordBatch:
    """Build a batch from the positions of the earlier writes of its append. Raises `Invalid`."""
    try:
        batch = build([found for found in append.appended[:index] if found is not None])
        check_batch(batch)
    except BrokerError as error:
        raise Invalid(append, error) from None
    return batch.record_batch() if isinstance(batch, ColumnBatch) else batch


def phases(appends: list[Append]) -> list[list[tuple[Append, int]]]:
    """Return the writes in phases. Within a partition the phases rise with the order of the appends."""
    found: list[list[tuple[Append, int]]] = []
    latest: dict[PartitionLog, int] = {}
    for append in appends:
        before = -1
        for index, (log, batch) in enumerate(append.writes):
            phase = latest.get(log, 0)
            if not isinstance(batch, RecordBatch):
                phase = max(phase, before + 1)
            latest[log] = phase
            before = max(before, phase)
            while len(found) <= phase:
                found.append([])
            found[phase].append((append, index))
    return found


def grouped(parts: list[Part], target_bytes: int, bytes_max: int) -> Iterable[list[Part]]:
    """Divide the parts into record batches: several small parts in one, a part above the limit in several."""
    group: list[Part] = []
    group_bytes = 0
    for part in parts:
        if group and group_bytes + part.size_bytes > target_bytes:
            yield group
            group, group_bytes = [], 0
        if part.size_bytes > bytes_max and len(part.batch) > 1:
            yield from ([chunk] for chunk in _chunks(part, target_bytes))
            continue
        group.append(part)
        group_bytes += part.size_bytes
    if group:
        yield group


def _chunks(part: Part, target_bytes: int) -> Iterable[Part]:
    start, size_bytes = 0, 0
    for index in range(len(part.batch)):
        one = part.batch[index : index + 1]
        own = encoded_bytes_max(one, one.size_bytes)
        if index > start and size_bytes + own > target_bytes:
            yield part.rows(start, index, size_bytes)
            start, size_bytes = index, 0
        size_bytes += own
    yield part.rows(start, len(part.batch), size_bytes)


def note(part: Part, offset: int) -> None:
    """Note where a part landed. A write in several record batches may have gaps."""
    count, before = len(part.batch), part.append.appended[part.index]
    if before is None:
        part.append.appended[part.index] = Appended(offset, count, part.timestamps[0])
        return
    offsets: Sequence[int] | None = None
    if before.offsets is not None or before.last_offset + 1 != offset:
        offsets = [*(before.offset(index) for index in range(before.count)), *range(offset, offset + count)]
    part.append.appended[part.index] = Appended(before.base_offset, before.count + count, before.timestamp, offsets)


def listed(part: Part) -> ListedBatch:
    """Return the records where they landed, as readers get them."""
    appended = part.append.appended[part.index]
    assert appended is not None
    batch, first = part.batch, appended.base_offset
    expiries = batch.expiries if batch.expiries is not None and any(batch.expiries) else None
    records = replace(batch, timestamps=part.timestamps, expiries=expiries)
    return ListedBatch.of(range(first, first + len(batch)), records, next_offset=first + len(batch))
