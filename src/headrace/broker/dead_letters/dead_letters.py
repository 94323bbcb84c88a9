"""Dead letters: records that no consumer could process, stored in a separate topic with their origin and the reason.

The dead letters of a topic T are the records of the topic `T.dlq`. Any protocol can read them; retention and access rules apply as for
any topic. Headers after the record's own describe the dead letter:

    x-headrace-reason             refused, timed out, consumer left, expired, rejected, moved, unreadable, or the mover's reason
    x-headrace-source-topic       T
    x-headrace-source-partition   its partition and offset in T, unless it was never written
    x-headrace-source-offset
    x-headrace-attempts           number of deliveries
    x-headrace-first-failure      Unix ms
    x-headrace-last-failure
    x-headrace-error              the error text, if there is one

A replayed dead letter stays in the topic and is marked (see `marks.py`). The mark and the replayed record are one append, so a crash
leaves both or neither.

Marks of replayed dead letters: the table `__dead_letters`.

| key | value |
|---|---|
| topic, partition, offset | Unix ms of its replay |
| topic, partition, −1 | the floor: every dead letter below this offset has been replayed |

Replays mostly happen in offset order. The floor then rises and the single marks below it are deleted, so the table stays small.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from headrace.broker.groups.progress import Row, rows_of
from headrace.broker.publishing.publish import Placing, Publisher, Route
from headrace.broker.publishing.published import Published
from headrace.broker.publishing.requirements import Divert
from headrace.broker.reading.batches import unexpired
from headrace.broker.settings import Clock
from headrace.broker.tables import TableLog
from headrace.broker.topics import Topics, check_topic_name
from headrace.columns import headers_bytes
from headrace.engine.contract import Ack, Bounds, Cleanup, Engine, Write, known
from headrace.errors import OffsetOutOfRange, UnknownMessage, UnknownTopic
from headrace.limits import DEAD_LETTER_ERROR_BYTES_MAX, HEADERS_BYTES_MAX, HEADERS_MAX, MIB
from headrace.records import Headers, RecordBatch

_Key: TypeAlias = tuple[str, int, int]
_MarkChanges: TypeAlias = list[tuple[_Key, int | None]]
_FLOOR: Final = -1
_LONG_AGO: Final = 0
"""Replay time reported when only the floor is known."""


@dataclass(slots=True)
class _Done:
    """Replayed dead letters of one partition."""

    floor: int = 0
    times: dict[int, int] = field(default_factory=dict)


class Marks(TableLog[_Key, int]):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "__dead_letters", _Key, int)  # type: ignore[arg-type]  # a subscripted tuple is a type to msgspec
        self._done: dict[tuple[str, int], _Done] = {}

    def show(self, key: _Key, value: int | None) -> None:
        topic, partition, offset = key
        done = self._done.setdefault((topic, partition), _Done())
        if offset == _FLOOR:
            done.floor = value or 0
        elif value is None:
            done.times.pop(offset, None)
        else:
            done.times[offset] = value
        if not done.floor and not done.times:
            del self._done[topic, partition]

    async def open(self) -> None:
        """Load the table. Remove rows left by a crash during a deletion."""
        await self.load()
        gone = {topic for topic, _ in self._done if topic not in self._engine.topics()}
        await self.put([change for topic in gone for change in self._tombstones(topic)])

    def floor(self, topic: str, partition: int) -> int:
        """Return the offset below which everything has been replayed."""
        return self._at(topic, partition).floor

    def mark(self, topic: str, partition: int, offset: int) -> int | None:
        """Return the Unix ms of the replay, or None."""
        done = self._at(topic, partition)
        return done.times.get(offset, _LONG_AGO if offset < done.floor else None)

    def waiting(self, topic: str, partition: int, bounds: Bounds) -> int:
        done = self._at(topic, partition)
        first = max(bounds.first, min(done.floor, bounds.end))
        return bounds.end - first - sum(first <= offset < bounds.end for offset in done.times)

    def marking(self, topic: str, places: Iterable[tuple[int, int]], now: int) -> _MarkChanges:
        """Return the changes that mark these (partition, offset) as replayed."""
        by_partition: dict[int, list[int]] = {}
        for partition, offset in places:
            by_partition.setdefault(partition, []).append(offset)
        return [change for partition, offsets in by_partition.items() for change in self._raised(topic, partition, offsets, now)]

    def _raised(self, topic: str, partition: int, offsets: list[int], now: int) -> _MarkChanges:
        done = self._at(topic, partition)
        first = self._engine.bounds(topic, partition).first
        floor, marked = max(done.floor, first), {*done.times, *offsets}
        while floor in marked:
            floor += 1
        changes: _MarkChanges = [((topic, partition, offset), now) for offset in offsets if offset >= floor]
        if floor > done.floor:
            changes.append(((topic, partition, _FLOOR), floor))
            changes += (((topic, partition, offset), None) for offset in done.times if offset < floor)
        return changes

    async def topic_gone(self, topic: str) -> None:
        await self.settled()
        await self.put(self._tombstones(topic))

    def _tombstones(self, topic: str) -> _MarkChanges:
        return [
            ((topic, partition, offset), None)
            for (known, partition), done in self._done.items()
            if known == topic
            for offset in (_FLOOR, *done.times)
        ]

    def _at(self, topic: str, partition: int) -> _Done:
        return self._done.get((topic, partition)) or _Done()


SUFFIX: Final = ".dlq"
_PREFIX: Final = "x-headrace-"
_NOTES: Final = frozenset(
    _PREFIX + name
    for name in (
        "reason",
        "source-topic",
        "source-partition",
        "source-offset",
        "attempts",
        "first-failure",
        "last-failure",
        "error",
    )
)
_READ_BYTES: Final = 1 * MIB
_PURGES_MET_MAX: Final = 3
"""Attempts of an append whose dead-letter topic is purged at the same time."""
_NOWHERE: Final = -1
_ID: Final = re.compile(r"(?:0|[1-9][0-9]{0,9})-(?:0|[1-9][0-9]{0,18})", re.ASCII)
"""PARTITION-OFFSET, each without leading zeros."""


class DeadLetter(NamedTuple):
    """A record and its failure."""

    row: Row
    partition: int
    """`_NOWHERE` with a row that was never written."""
    attempts: int
    reason: str
    first_failure: int
    last_failure: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """A dead letter as it is read back."""

    id: str
    """PARTITION-OFFSET, in the dead-letter topic."""
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    """The record's own headers."""
    reason: str = ""
    error: str = ""
    source_topic: str = ""
    source_partition: int | None = None
    source_offset: int | None = None
    attempts: int = 0
    first_failure: int = 0
    last_failure: int = 0
    replayed_at: int | None = None
    """Unix ms of the replay, or None."""


class _Place(NamedTuple):
    """Position of a dead letter. Positions and ids correspond one to one: `0-00` is not another spelling of `0-0`, it is unknown."""

    partition: int
    offset: int

    @classmethod
    def of(cls, id: str) -> _Place:
        """Parse an id. Raises `UnknownMessage`."""
        if _ID.fullmatch(id) is None:
            raise UnknownMessage(id)
        partition, offset = map(int, id.split("-"))
        return cls(partition, offset)

    @property
    def id(self) -> str:
        return f"{self.partition}-{self.offset}"


def dead_letter_topic(topic: str) -> str:
    """Return the name of the dead-letter topic. Raises `InvalidTopicName` if the suffix makes the name too long."""
    name = topic + SUFFIX
    check_topic_name(name)
    return name


@dataclass(slots=True)
class Replayed:
    """Result of a replay: the new position of each record, by the id of its dead letter."""

    topic: str
    placements: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Id → (partition, offset)."""


class DeadLetters:
    """The dead letters of all topics."""

    def __init__(self, engine: Engine, publisher: Publisher, topics: Topics, clock: Clock) -> None:
        self._engine = engine
        self._publisher = publisher
        self._topics = topics
        self._clock = clock
        self._marks = Marks(engine)
        self._replaying: set[tuple[str, _Place]] = set()
        """Dead letters that a replay in progress has claimed, by topic and position."""

    async def open(self) -> None:
        await self._marks.open()

    async def topic_gone(self, name: str) -> None:
        if name.endswith(SUFFIX):
            await self._marks.topic_gone(name)

    # Writing

    async def append(self, topic: str, letters: Sequence[DeadLetter]) -> None:
        """Append dead letters. Durable when it returns."""
        for purges_left in reversed(range(_PURGES_MET_MAX)):
            await self.ensure(topic)
            try:
                await asyncio.shield(self._publisher.append(self.writes(topic, letters), Ack.DURABLE))
            except UnknownTopic:
                if not purges_left:
                    raise
            else:
                return

    async def ensure(self, topic: str) -> None:
        """Create the dead-letter topic if it is missing. It gets no default retention: dead letters wait for inspection."""
        defaults = self._topics.defaults
        config = replace(defaults, ack=Ack.DURABLE, cleanup=Cleanup.DELETE, ttl_ms=0, dead_letter_expired=False)
        await self._topics.ensure(dead_letter_topic(topic), partitions=1, config=config)

    def writes(self, topic: str, letters: Sequence[DeadLetter]) -> list[Write]:
        record_batch = RecordBatch(
            [letter.row.value for letter in letters],
            [letter.row.key for letter in letters],
            [_headers(topic, letter) for letter in letters],
        )
        return Placing(self._publisher.own_route(dead_letter_topic(topic)), record_batch, None).writes

    async def reject(self, topic: str, record_batch: RecordBatch, errors: Sequence[str]) -> None:
        """Store records that were rejected before they were written, each with its error text. Durable when it returns."""
        await self.append(topic, self._rejected(record_batch, errors))

    def rejected(self, topic: str, record_batch: RecordBatch, errors: Sequence[str]) -> list[Write]:
        """Return the writes that store rejected records, for a larger append. Raises `UnknownTopic` without a dead-letter topic."""
        return self.writes(topic, self._rejected(record_batch, errors))

    def _rejected(self, record_batch: RecordBatch, errors: Sequence[str]) -> list[DeadLetter]:
        now = self._clock()
        keys, headers = record_batch.keys or [None] * len(record_batch), record_batch.headers or [()] * len(record_batch)
        rows = [Row(_NOWHERE, now, *columns, 0) for columns in zip(keys, record_batch.values, headers, strict=True)]
        return [DeadLetter(row, _NOWHERE, 0, "rejected", now, now, error) for row, error in zip(rows, errors, strict=True)]

    async def move(self, topic: str, partition: int, offset: int, reason: str, error: str) -> None:
        """Copy a record to the dead letters. The source topic keeps the original."""
        now = self._clock()
        row = await self._row(topic, partition, offset)
        if row is None:
            raise UnknownMessage(_Place(partition, offset).id)
        await self.append(topic, [DeadLetter(row, partition, 0, reason, now, now, error)])

    # Reading

    def exists(self, topic: str) -> bool:
        return topic + SUFFIX in self._engine.topics()

    def count(self, topic: str) -> int:
        """Return the number of dead letters that are not replayed. It may include expired ones."""
        if not self.exists(topic):
            return 0
        name = topic + SUFFIX
        partitions = range(self._engine.topics()[name].partitions)
        return sum(self._marks.waiting(name, partition, self._engine.bounds(name, partition)) for partition in partitions)

    async def entries(self, topic: str, records_max: int, bytes_max: int, after: str, replayed: bool) -> list[DeadLetterEntry]:
        found: list[DeadLetterEntry] = []
        async for entry in self._walk(topic, _Place.of(after) if after else None, replayed):
            bytes_max -= len(entry.value or b"") + len(entry.key or b"")
            if found and bytes_max < 0:
                break
            found.append(entry)
            if len(found) >= records_max:
                break
        return found

    async def _walk(self, topic: str, after: _Place | None, replayed: bool) -> AsyncIterator[DeadLetterEntry]:
        name = topic + SUFFIX
        known = self._engine.topics().get(name)
        for partition in range(after.partition if after else 0, known.partitions if known else 0):
            bounds = self._engine.bounds(name, partition)
            position = bounds.first if replayed else max(bounds.first, min(self._marks.floor(name, partition), bounds.end))
            if after is not None and partition == after.partition:
                position = max(position, after.offset + 1)
            while position < bounds.end:
                try:
                    batches = await self._engine.read(name, partition, position, bytes_max=_READ_BYTES)
                except OffsetOutOfRange as error:
                    position = max(position + 1, error.first)
                    continue
                for batch in unexpired(batches, self._clock()):
                    for row in rows_of(batch):
                        mark = self._marks.mark(name, partition, row.offset)
                        if replayed or mark is None:
                            yield entry_of(topic, partition, row, mark)
                position = batches[-1].next_offset if batches else bounds.end

    async def replay(self, route: Route, ids: Sequence[str]) -> Replayed:
        """Publish the records again, each to its original partition, and mark their entries, in one append."""
        async with self._claimed(route.topic, ids) as rows:
            return await self._replay(route, rows)

    async def discard(self, topic: str, ids: Sequence[str]) -> None:
        """Mark entries as replayed without publishing their records. Durable when it returns."""
        async with self._claimed(topic, ids) as rows:
            for place, row in rows.items():
                if row is None:
                    raise UnknownMessage(place.id)
            await asyncio.shield(self._marks.put(self._marks.marking(topic + SUFFIX, rows, self._clock())))

    @asynccontextmanager
    async def _claimed(self, topic: str, ids: Sequence[str]) -> AsyncIterator[dict[_Place, Row | None]]:
        """Yield the rows of dead letters that no other call may mark meanwhile. Raises `UnknownMessage` for one that is marked."""
        places = list(dict.fromkeys(_Place.of(id) for id in ids))
        claims = {(topic, place) for place in places}
        for place in places:
            if (topic, place) in self._replaying or self._marks.mark(topic + SUFFIX, place.partition, place.offset) is not None:
                raise UnknownMessage(place.id)
        self._replaying |= claims
        try:
            yield {place: await self._row(topic + SUFFIX, place.partition, place.offset) for place in places}
        finally:
            self._replaying -= claims

    async def _replay(self, route: Route, rows: Mapping[_Place, Row | None]) -> Replayed:
        placings: list[Placing] = []
        for place, row in rows.items():
            if row is None:
                raise UnknownMessage(place.id)
            entry = entry_of(route.topic, place.partition, row, None)
            source = entry.source_partition
            partition = source if source is not None and source < route.partitions else None
            placings.append(Placing(route, RecordBatch([entry.value], [entry.key], [entry.headers]), partition, Divert.NEVER))
        marks = self._marks.marking(route.topic + SUFFIX, rows, self._clock())
        writes = [write for placing in placings for write in placing.writes]
        staged = self._publisher.append([*writes, self._marks.write(marks)], Ack.DURABLE)
        self._marks.follow(staged, marks)
        appended = await known(staged)  # until then the letters are claimed
        landed: list[Published] = [placing.landed([answer]) for placing, answer in zip(placings, appended, strict=False)]
        return Replayed(route.topic, {place.id: published.placement(0) for place, published in zip(rows, landed, strict=True)})

    async def _row(self, topic: str, partition: int, offset: int) -> Row | None:
        known = self._engine.topics().get(topic)
        if known is None or not 0 <= partition < known.partitions:
            return None
        bounds = self._engine.bounds(topic, partition)
        if not bounds.first <= offset < bounds.end:
            return None
        try:
            batches = await self._engine.read(topic, partition, offset, bytes_max=1, records_max=1)
        except OffsetOutOfRange:
            return None
        rows = [row for batch in batches for row in rows_of(batch) if row.offset == offset]
        return rows[0] if rows else None

    async def purge(self, topic: str) -> int:
        """Delete all dead letters of the topic and return how many were waiting. The next dead letter creates the topic again."""
        count = self.count(topic)
        if self.exists(topic):
            await self._topics.delete(dead_letter_topic(topic))
        return count


def _headers(topic: str, letter: DeadLetter) -> Headers:
    """Return the record's own headers, then ours. If there are too many, the last of its own are dropped."""
    notes: list[tuple[str, bytes]] = [("reason", letter.reason.encode()), ("source-topic", topic.encode())]
    if letter.partition != _NOWHERE:
        notes += [("source-partition", b"%d" % letter.partition), ("source-offset", b"%d" % letter.row.offset)]
    notes += [("attempts", b"%d" % letter.attempts)]
    notes += [("first-failure", b"%d" % letter.first_failure), ("last-failure", b"%d" % letter.last_failure)]
    if letter.error:
        notes.append(("error", letter.error.encode()[:DEAD_LETTER_ERROR_BYTES_MAX].decode(errors="ignore").encode()))
    named = tuple((_PREFIX + name, text) for name, text in notes)
    own = letter.row.headers[: HEADERS_MAX - len(named)]
    while own and headers_bytes(own + named) > HEADERS_BYTES_MAX:
        own = own[:-1]
    return own + named


def entry_of(topic: str, partition: int, row: Row, mark: int | None) -> DeadLetterEntry:
    """Parse a dead letter. Our headers are the last ones; a record that a user published to the topic directly has none."""
    stop = len(row.headers)
    while stop and row.headers[stop - 1][0] in _NOTES:
        stop -= 1
    notes = {name.removeprefix(_PREFIX): text.decode(errors="replace") for name, text in row.headers[stop:]}
    return DeadLetterEntry(
        id=_Place(partition, row.offset).id,
        timestamp=row.timestamp,
        key=row.key,
        value=row.value,
        headers=row.headers[:stop],
        reason=notes.get("reason", "published"),
        error=notes.get("error", ""),
        source_topic=topic,
        source_partition=_number(notes.get("source-partition")),
        source_offset=_number(notes.get("source-offset")),
        attempts=_number(notes.get("attempts")) or 0,
        first_failure=_number(notes.get("first-failure")) or 0,
        last_failure=_number(notes.get("last-failure")) or 0,
        replayed_at=mark,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 19 else None
