"""History of a workload, and the comparison with a recovered store.

A workload marks its history on the simulated disk: staged, acknowledged, created, deleting, maintaining. At any cut the marks before
it define what a store must hold (acknowledged as durable), what it may hold (staged) and what may be missing (retention, deletion).
Offsets are assigned in the order of staging, so each offset has exactly one valid record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.records import Bounds, Record
from headrace.storage.batch import StoredBatch
from headrace.storage.partition import LogOptions
from headrace.storage.store import Store

Content: TypeAlias = dict[int, tuple[Bounds, list[Record]]]
"""log → its bounds and all its records."""


class Anomaly(AssertionError):
    """The store lost acknowledged records, or holds other records than were written."""


@dataclass(slots=True)
class Given:
    """Records of one log by offset; None where a crash lost a record that it was allowed to lose."""

    options: LogOptions
    records: list[Record | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """One batch of an append."""

    log: int
    base: int
    count: int

    @property
    def end(self) -> int:
        return self.base + self.count


@dataclass(slots=True)
class Facts:
    """Facts at one point of a history."""

    must: dict[int, int] = field(default_factory=dict)
    """log → end of the records acknowledged as durable. Everything below must be present."""
    may: dict[int, int] = field(default_factory=dict)
    """log → end of the staged records. Nothing above may be present."""
    floor: dict[int, int] = field(default_factory=dict)
    """log → offset below which retention may have removed records."""
    unsure: list[tuple[Part, ...]] = field(default_factory=list)
    """Staged appends that are not acknowledged as durable: present completely or not at all."""
    created: set[int] = field(default_factory=set)
    deleting: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)
    maintained: bool = False
    """Whether compaction may have run."""
    promised: dict[int, set[int]] = field(default_factory=dict)
    """log → offsets that were acknowledged as durable themselves, not only through later ones."""
    strict: bool = True
    """Whether an acknowledgement covers everything before it. It does not after a failed sync."""

    def copy(self) -> Facts:
        return Facts(
            dict(self.must),
            dict(self.may),
            dict(self.floor),
            list(self.unsure),
            set(self.created),
            set(self.deleting),
            set(self.deleted),
            self.maintained,
            {log: set(offsets) for log, offsets in self.promised.items()},
            self.strict,
        )

    def needs(self, log: int, offset: int) -> bool:
        return offset < self.must.get(log, 0) and (self.strict or offset in self.promised.get(log, ()))


Event: TypeAlias = Callable[[Facts], None]
"""A mark on the disk, which changes the facts."""


def created(log: int) -> Event:
    return lambda facts: facts.created.add(log)


def deleting(log: int) -> Event:
    return lambda facts: facts.deleting.add(log)


def deleted(log: int) -> Event:
    return lambda facts: facts.deleted.add(log)


def staged(parts: tuple[Part, ...]) -> Event:
    def change(facts: Facts) -> None:
        facts.unsure.append(parts)
        facts.may.update({part.log: part.end for part in parts})

    return change


def durable(parts: tuple[Part, ...]) -> Event:
    def change(facts: Facts) -> None:
        facts.unsure.remove(parts)
        for part in parts:
            facts.must[part.log] = max(part.end, facts.must.get(part.log, 0))
            facts.promised.setdefault(part.log, set()).update(range(part.base, part.end))

    return change


def forgotten(appends: Sequence[tuple[Part, ...]]) -> Event:
    """Records that never reached the disk; their offsets are free again."""
    lost = list(appends)

    def change(facts: Facts) -> None:
        for parts in lost:
            facts.unsure.remove(parts)
        for part in (part for parts in reversed(lost) for part in reversed(parts)):
            facts.may[part.log] = part.base

    return change


def maintaining(floor: Mapping[int, int]) -> Event:
    """`floor` is set when maintenance is over, to what it left."""

    def change(facts: Facts) -> None:
        facts.maintained = True
        facts.floor.update(floor)

    return change


_decoded: dict[tuple[bytes, int, int], list[Record]] = {}


def _records(encoded: bytes, start: int, stop: int, batch: StoredBatch) -> list[Record]:
    """Return the records of a window. Thousands of images contain the same bytes, so the result is cached."""
    key = (encoded, start, stop)
    records = _decoded.get(key)
    if records is None:
        if len(_decoded) > 20_000:
            _decoded.clear()
        records = _decoded[key] = list(batch.records())
    return records


def read_log(store: Store, log: int) -> tuple[Bounds, list[Record]]:
    bounds = store.bounds(log)
    records: list[Record] = []
    offset = bounds.first
    while offset < bounds.end:
        batches = store.read(log, offset, bytes_max=1 << 20, records_max=1 << 20)
        if not batches:
            break
        for batch in batches:
            records += _records(batch.encoded, batch.start, batch.stop, batch)
            if batch.next_offset <= offset:
                raise Anomaly(f"log {log}: reading at {offset} leads to {batch.next_offset}")
            offset = batch.next_offset
    return bounds, records


def read_store(store: Store) -> Content:
    return {log: read_log(store, log) for log in sorted(store.partitions)}


def adopt(store: Store, given: Mapping[int, Given], facts: Facts) -> None:
    """Act as the owner of a store after opening it: open the existing logs, and repeat unfinished deletions."""
    for log in sorted(store.partitions):
        if log not in facts.created:
            raise Anomaly(f"log {log} was never created")
        if log in facts.deleted:
            raise Anomaly(f"log {log} was deleted and is back")
    for log in sorted(facts.deleting - facts.deleted):
        store.open_log(log, given[log].options)
        store.delete_logs([log])
    for log in sorted(facts.created - facts.deleting):
        store.open_log(log, given[log].options)


def judge(content: Content, given: Mapping[int, Given], facts: Facts) -> None:
    """Raise `Anomaly` unless `content` is valid after a crash at this point."""
    for log, (bounds, records) in content.items():
        _judge_log(log, bounds, records, given[log], facts)
    present = {log: {record.offset for record in records} for log, (_, records) in content.items() if _dense(given, log)}
    for parts in facts.unsure:
        _judge_whole(parts, present, facts)


def _dense(given: Mapping[int, Given], log: int) -> bool:
    return log in given and not given[log].options.compact


def _judge_log(log: int, bounds: Bounds, records: Sequence[Record], given: Given, facts: Facts) -> None:
    must, may, floor = facts.must.get(log, 0), facts.may.get(log, 0), facts.floor.get(log, 0)
    if not must <= bounds.end <= may:
        raise Anomaly(f"log {log} ends at {bounds.end}; {must} were acknowledged and {may} sent")
    if any(facts.needs(log, offset) and given.records[offset] for offset in range(floor, bounds.first)):
        raise Anomaly(f"log {log} starts at {bounds.first}, retention went no further than {floor}")
    previous = bounds.first - 1
    for record in records:
        if not previous < record.offset < bounds.end:
            raise Anomaly(f"log {log}: offset {record.offset} comes after {previous} and before the end {bounds.end}")
        previous = record.offset
        if record != given.records[record.offset]:
            raise Anomaly(f"log {log}: {record} stands where {given.records[record.offset]} was put")
    kept = {record.offset for record in records}
    if given.options.compact and facts.maintained:
        _judge_view(log, bounds, records, given, facts)
        return
    for offset in range(bounds.first, must):
        if offset not in kept and given.records[offset] is not None and facts.needs(log, offset):
            raise Anomaly(f"log {log}: offset {offset} was acknowledged and is lost")


def _judge_view(log: int, bounds: Bounds, records: Sequence[Record], given: Given, facts: Facts) -> None:
    """Check a compacted log. It may lose records if the newest one of each key stays the same: the newest of all below the end, or, after a
    power cut, the newest of those that must be or are present."""
    kept = {record.offset for record in records}
    known = [record for record in given.records[: bounds.end] if record]
    newest = view(known)
    wanted = view(record for record in known if record.offset in kept or facts.needs(log, record.offset))
    found = view(records)
    for key in newest.keys() | wanted.keys() | found.keys():
        if found.get(key) not in (newest.get(key), wanted.get(key)):
            raise Anomaly(f"log {log}: after compaction key {key!r} is {found.get(key)!r}, it was {wanted.get(key)!r}")


def view(records: Iterable[Record]) -> dict[bytes | None, bytes]:
    """Return the table that a keyed log represents."""
    table: dict[bytes | None, bytes] = {}
    for record in records:
        if record.value is None:
            table.pop(record.key, None)
        else:
            table[record.key] = record.value
    return table


def _judge_whole(parts: tuple[Part, ...], present: Mapping[int, set[int]], facts: Facts) -> None:
    states: set[bool] = set()
    for part in parts:
        if part.log in present and part.log not in facts.deleting and part.base >= facts.floor.get(part.log, 0):
            states.update(offset in present[part.log] for offset in range(part.base, part.end))
    if len(states) > 1:
        raise Anomaly(f"an append to {', '.join(f'log {part.log} at {part.base}' for part in parts)} is there in part")
