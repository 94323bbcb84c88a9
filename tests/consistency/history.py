"""History of client operations, and the checker for it. It shares no code with the broker.

Each operation has one of three outcomes: `ok` (the broker confirmed it), `fail` (it certainly did not happen), `unknown` (the
connection was lost before the reply). Values are unique, so the model needs only sets and positions:

| anomaly | a history in which |
|---|---|
| lost | a confirmed value is in no partition at the last read |
| unexpected | a value is read that no client sent |
| aborted | a value is read whose unit certainly failed |
| duplicate | a value is at two offsets, or in two partitions |
| torn | some values of a unit are read and others are not |
| reordered | two values of one producer are in one partition in another order than they were sent |
| changed | an offset once read holds another value, or none, in a later read |
| gap | a read skips an offset |
| undelivered | a confirmed value of a work queue was never delivered |
| resurrected | a value is delivered after its settlement was confirmed, without a restart in between |
| regressed | a group's position is behind a confirmed commit, or at an offset that no client committed |
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["ok", "fail", "unknown"]
Place: TypeAlias = tuple[str, int]
"""(topic, partition)."""


@dataclass(slots=True)
class Unit:
    """Values that become visible together or not at all: a plain record, a transaction, a version of an exactly-once writer."""

    producer: str
    number: int
    """Ascends with each unit of the producer."""
    values: tuple[tuple[str, str], ...]
    """(topic, value)."""
    outcome: Outcome = "unknown"


@dataclass(frozen=True, slots=True)
class Read:
    """Full read of a partition: `values[i]` was at offset `offsets[i]`."""

    place: Place
    offsets: tuple[int, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A work queue delivered a value to a consumer."""

    topic: str
    value: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """The broker confirmed the settlement of a value."""

    topic: str
    value: str


@dataclass(slots=True)
class Commit:
    """A group tried to commit an offset."""

    group: str
    offset: int
    outcome: Outcome = "unknown"


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a group after a restart, when every earlier commit had been answered or lost."""

    group: str
    offset: int | None


@dataclass(frozen=True, slots=True)
class Restart:
    """The broker was restarted. A work queue resumes at the oldest unsettled record, so later settled ones may be delivered again."""


Event: TypeAlias = Unit | Read | Delivery | Settlement | Commit | Position | Restart


@dataclass
class History:
    """Events in the order in which clients recorded them: a request before it is sent, a result after it is received."""

    events: list[Event] = field(default_factory=list)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: Event) -> None:
        with self._mutex:
            self.events.append(event)

    def counts(self) -> Counter[str]:
        return Counter(type(event).__name__ for event in self.events)


def anomalies(history: History) -> list[str]:
    """Return every anomaly as `class: description`; an empty list for a valid history."""
    events = list(history.events)
    units = [event for event in events if isinstance(event, Unit)]
    last = {event.place: event for event in events if isinstance(event, Read)}
    return [
        *_changed(events),
        *_contents(units, last),
        *_order(units, last),
        *_queues(units, events),
        *_positions(events),
    ]


def _contents(units: Sequence[Unit], last: dict[Place, Read]) -> Iterator[str]:
    found: Counter[tuple[str, str]] = Counter((place[0], value) for place, read in last.items() for value in read.values)
    topics = {place[0] for place in last}
    owner = {sent: unit for unit in units for sent in unit.values}
    for sent, count in found.items():
        if sent not in owner:
            yield f"unexpected: {sent[1]} is in {sent[0]}, and no client sent it there"
        elif owner[sent].outcome == "fail":
            yield f"aborted: {sent[1]} is in {sent[0]}, and its unit had failed"
        if count > 1:
            yield f"duplicate: {sent[1]} is in {sent[0]} {count} times"
    for unit in units:
        wanted = [sent for sent in unit.values if sent[0] in topics]
        missing = [sent for sent in wanted if not found[sent]]
        if missing and unit.outcome == "ok":
            yield f"lost: {unit.producer} {unit.number} was confirmed, and {missing[0][1]} is not in {missing[0][0]}"
        elif missing and len(missing) < len(wanted):
            yield f"torn: {unit.producer} {unit.number} has {len(wanted) - len(missing)} of its {len(wanted)} values"


def _order(units: Sequence[Unit], last: dict[Place, Read]) -> Iterator[str]:
    rank = {sent: (unit.producer, unit.number, index) for unit in units for index, sent in enumerate(unit.values)}
    for (topic, partition), read in last.items():
        by_producer: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for value in read.values:
            if (topic, value) in rank:
                producer, number, index = rank[topic, value]
                by_producer[producer].append((number, index))
        for producer, numbers in by_producer.items():
            for earlier, later in pairwise(numbers):
                if earlier > later:
                    yield f"reordered: {topic}/{partition} has {later} of {producer} behind {earlier}"


def _changed(events: Sequence[Event]) -> Iterator[str]:
    known: dict[Place, Read] = {}
    for event in events:
        if not isinstance(event, Read):
            continue
        for index, offset in enumerate(event.offsets):
            if offset != index:
                yield f"gap: {event.place} has offset {offset} where {index} was due"
                break
        before = known.get(event.place)
        if before is not None and event.values[: len(before.values)] != before.values:
            yield f"changed: {event.place} does not hold any more what a reader saw there"
        known[event.place] = event


def _queues(units: Sequence[Unit], events: Sequence[Event]) -> Iterator[str]:
    settled: set[tuple[str, str]] = set()
    delivered: set[tuple[str, str]] = set()
    queues: set[str] = set()
    for event in events:
        if isinstance(event, Settlement):
            settled.add((event.topic, event.value))
            queues.add(event.topic)
        elif isinstance(event, Restart):
            settled.clear()
        elif isinstance(event, Delivery):
            delivered.add((event.topic, event.value))
            queues.add(event.topic)
            if (event.topic, event.value) in settled:
                yield f"resurrected: {event.value} of {event.topic} was delivered after its settlement was confirmed"
    for unit in units:
        for sent in unit.values:
            if sent[0] in queues and unit.outcome == "ok" and sent not in delivered:
                yield f"undelivered: {sent[1]} of {sent[0]} was confirmed and never delivered"


def _positions(events: Sequence[Event]) -> Iterator[str]:
    least: dict[str, int] = {}
    tried: dict[str, set[int]] = defaultdict(set)
    for event in events:
        if isinstance(event, Commit):
            tried[event.group].add(event.offset)
            if event.outcome == "ok":
                least[event.group] = max(least.get(event.group, 0), event.offset)
        elif isinstance(event, Position):
            offset = event.offset
            if offset is None and event.group in least:
                yield f"regressed: {event.group} has no position, and {least[event.group]} was confirmed"
            elif offset is not None and offset < least.get(event.group, 0):
                yield f"regressed: {event.group} is at {offset}, and {least[event.group]} was confirmed"
            elif offset is not None and offset not in tried[event.group]:
                yield f"regressed: {event.group} is at {offset}, which no client committed"
            if offset is not None:
                least[event.group] = max(least.get(event.group, 0), offset)  # values stay as they were first read
