"""What the writers of a log know, and the judge who compares it with what a recovered store holds.

A workload marks its history on the simulated disk: staged, acknowledged, created, deleting, maintaining. At any cut the marks
before it say what a store must hold (acknowledged as durable), what it may hold (staged) and what may be gone (retention,
deletion). Since offsets are given in the order of staging, each offset has exactly one record that may stand there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.records import Bounds, Record
from headrace.storage.batch import Batch
from headrace.storage.partition import LogOptions
from headrace.storage.store import Store

Content: TypeAlias = dict[int, tuple[Bounds, list[Record]]]
"""log → its bounds and all its records."""


class Anomaly(AssertionError):
    """The store holds less or something else than its writers were told."""


@dataclass(slots=True)
class Given:
    """One log as its writers know it: the record that belongs to each offset, None where an earlier life lost one it might lose."""

    options: LogOptions
    records: list[Record | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """One run of an append."""

    log: int
    base: int
    count: int

    @property
    def end(self) -> int:
        return self.base + self.count


@dataclass(slots=True)
class Facts:
    """What holds at one moment of a history."""

    must: dict[int, int] = field(default_factory=dict)
    """log → the end of what was acknowledged as durable. Everything below must be there."""
    may: dict[int, int] = field(default_factory=dict)
    """log → the end of what was staged. Nothing above may be there."""
    floor: dict[int, int] = field(default_factory=dict)
    """log → the offset below which retention may have taken records."""
    unsure: list[tuple[Part, ...]] = field(default_factory=list)
    """Appends that are staged and not acknowledged as durable: whole or absent."""
    created: set[int] = field(default_factory=set)
    deleting: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)
    maintained: bool = False
    """Whether compaction may have run."""
    promised: dict[int, set[int]] = field(default_factory=dict)
    """log → the offsets that were acknowledged as durable themselves, not only by what came after them."""
    strict: bool = True
    """Whether an acknowledgement stands for everything before it as well. Once a sync has failed, it does not."""

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
"""What a mark on the disk carries: how it changes the facts."""


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
    """These never reached the disk, so their offsets are free again."""
    lost = list(appends)

    def change(facts: Facts) -> None:
        for parts in lost:
            facts.unsure.remove(parts)
        for part in (part for parts in reversed(lost) for part in reversed(parts)):
            facts.may[part.log] = part.base

    return change


def maintaining(floor: Mapping[int, int]) -> Event:
    """`floor` is filled in when the maintenance is over: what it left is what it may have wanted to leave."""

    def change(facts: Facts) -> None:
        facts.maintained = True
        facts.floor.update(floor)

    return change


_decoded: dict[tuple[bytes, int, int], list[Record]] = {}


def _records(encoded: bytes, start: int, stop: int, batch: Batch) -> list[Record]:
    """The records of a window. The same bytes come back from thousands of images and are decoded once."""
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
    """Do what the owner of a store does after opening it, who has the list of logs in one of them: say which there are and
    remove again the ones whose deletion was under way."""
    for log in sorted(store.partitions):
        if log not in facts.created:
            raise Anomaly(f"log {log} was never created")
        if log in facts.deleted:
            raise Anomaly(f"log {log} was deleted and is back")
    for log in sorted(facts.deleting - facts.deleted):
        store.open_log(log, given[log].options)
        store.delete_log(log)
    for log in sorted(facts.created - facts.deleting):
        store.open_log(log, given[log].options)


def judge(content: Content, given: Mapping[int, Given], facts: Facts) -> None:
    """Raise `Anomaly` unless a store that was cut off at this moment may hold `content`."""
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
    """A compacted log may lose records, as long as the newest one of each key says the same: the newest of all below the end,
    or the newest of those that are promised or there, when a power cut took others."""
    kept = {record.offset for record in records}
    known = [record for record in given.records[: bounds.end] if record]
    newest = view(known)
    wanted = view(record for record in known if record.offset in kept or facts.needs(log, record.offset))
    found = view(records)
    for key in newest.keys() | wanted.keys() | found.keys():
        if found.get(key) not in (newest.get(key), wanted.get(key)):
            raise Anomaly(f"log {log}: after compaction key {key!r} is {found.get(key)!r}, it was {wanted.get(key)!r}")


def view(records: Iterable[Record]) -> dict[bytes | None, bytes]:
    """The table that a keyed log stands for."""
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
