"""Records of a topic for the pages: a page of them in either direction, and a search.

A page is chosen by timestamps and offsets first; then the values are fetched, newest first, up to `PAGE_BYTES_MAX`. Thus a topic with large
values costs no more than one with small ones.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import HeadraceError, InvalidRequest
from headrace.records import Bounds, Headers
from headrace.schemas import SchemaType
from headrace.schemas.shapes import reader_of

PAGE_RECORDS_MAX: Final = 500
PAGE_BYTES_MAX: Final = 16 << 20
_CHUNK_OFFSETS: Final = 10
"""Offsets of one fetch of values: a reply is bounded, and the next fetch takes the rest."""
_SCAN_OFFSETS: Final = 500
_OTHER_VERSIONS_MAX: Final = 5
_POSITIONS: Final = re.compile(r"\d{1,6}:\d{1,19}(?:,\d{1,6}:\d{1,19})*")

Positions = dict[int, int]
"""Partition → offset."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record. Without its value if the page has loaded enough already."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    headers: Headers = ()
    key: bytes | None = None
    value: bytes | None = None
    is_tombstone: bool = False
    is_loaded: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """Records in the order of the page, and the positions from which the next page continues."""

    records: list[Record]
    next: Positions
    is_last: bool


def parse_positions(text: str) -> Positions:
    """Parse `0:120,1:88`. Raises `InvalidRequest`."""
    if not text:
        return {}
    if _POSITIONS.fullmatch(text) is None:
        raise InvalidRequest(f"positions {text[:80]!r}: expected PARTITION:OFFSET, separated by commas")
    return {int(partition): int(offset) for partition, offset in (pair.split(":") for pair in text.split(","))}


def format_positions(positions: Mapping[int, int]) -> str:
    return ",".join(f"{partition}:{offset}" for partition, offset in sorted(positions.items()))


async def read_page(
    client: FlyMqClient, topic: str, bounds: Mapping[int, Bounds], at: Positions, limit: int, *, newest_first: bool
) -> Page:
    """Return up to `limit` records before (`newest_first`) or from the positions."""
    windows: dict[int, tuple[int, int]] = {}
    for number, held in bounds.items():
        place = min(max(at.get(number, held.end if newest_first else held.first), held.first), held.end)
        windows[number] = (max(held.first, place - limit), place) if newest_first else (place, min(held.end, place + limit))
    found = await asyncio.gather(*(_details(client, topic, number, *window) for number, window in windows.items()))
    rows = dict(zip(windows, found, strict=True))
    known = [record for records in rows.values() for record in records]
    known.sort(key=lambda record: (record.timestamp, record.partition, record.offset), reverse=newest_first)
    chosen = known[:limit]
    after: Positions = {}
    for number, (low, high) in windows.items():
        taken = [record.offset for record in chosen if record.partition == number]
        if taken:
            after[number] = min(taken) if newest_first else max(taken) + 1
        elif rows[number]:
            after[number] = high if newest_first else low  # its records are further away than those of other partitions
        else:
            after[number] = low if newest_first else high
    ends = {number: held.first if newest_first else held.end for number, held in bounds.items()}
    return Page(await _with_values(client, topic, chosen), after, after == ends)


async def _details(client: FlyMqClient, topic: str, partition: int, start: int, stop: int) -> list[Record]:
    records: list[Record] = []
    while start < stop:
        rows = await client.call("record.details", topic=topic, partition=partition, offset=start, count=stop - start)
        records += [_record(topic, partition, row) for row in rows]
        if not rows:
            break
        start = rows[-1]["offset"] + 1
    return records


def _record(topic: str, partition: int, row: Mapping[str, Any]) -> Record:
    headers = tuple((name, base64.b64decode(value)) for name, value in row["headers"])
    return Record(topic, partition, row["offset"], row["timestamp"], headers, is_tombstone=row["is_tombstone"], is_loaded=False)


async def _with_values(client: FlyMqClient, topic: str, records: list[Record]) -> list[Record]:
    """Fetch the values of records, in their order, up to `PAGE_BYTES_MAX`."""
    contents: dict[tuple[int, int], tuple[bytes | None, bytes]] = {}
    total = 0
    for record in records:
        if (record.partition, record.offset) in contents:
            continue
        if total >= PAGE_BYTES_MAX:
            break
        wanted = sorted(
            other.offset for other in records if other.partition == record.partition and abs(other.offset - record.offset) < _CHUNK_OFFSETS
        )
        # One fetch takes the neighbours too: those before it if the order is descending, those after it otherwise.
        ahead = [offset for offset in wanted if (record.partition, offset) not in contents]
        for offset in dict.fromkeys((ahead[0], record.offset)):
            if (record.partition, record.offset) in contents:
                break
            batch, _ = await client.read(topic, offset, partition=record.partition, records_max=_CHUNK_OFFSETS)
            for index, at in enumerate(batch.offsets):
                contents[record.partition, at] = (None if batch.keys is None else batch.keys[index], batch.values[index])
                total += len(batch.values[index])
    loaded = []
    for record in records:
        content = contents.get((record.partition, record.offset))
        if content is not None:
            record = replace(record, key=content[0], value=None if record.is_tombstone else content[1], is_loaded=True)
        loaded.append(record)
    return loaded


async def read_one(client: FlyMqClient, topic: str, partition: int, offset: int) -> Record | None:
    """Return one record; None if it does not exist."""
    rows = await client.call("record.details", topic=topic, partition=partition, offset=offset, count=1)
    if not rows:
        return None
    (record,) = await _with_values(client, topic, [_record(topic, partition, rows[0])])
    return record


async def start_positions(client: FlyMqClient, topic: str, bounds: Mapping[int, Bounds], start: str, value: str) -> Positions:
    """Return the positions of a start that a person chose: earliest, latest, offset or time. Raises `InvalidRequest`."""
    if start == "offset":
        if not value.isascii() or not value.isdigit():
            raise InvalidRequest(f"offset {value[:40]!r}: expected a number")
        return {number: min(max(int(value), held.first), held.end) for number, held in bounds.items()}
    if start == "time":
        at = parse_time(value)
        found = await asyncio.gather(*(client.offset_for_time(topic, at, partition=number) for number in bounds))
        return dict(zip(bounds, found, strict=True))
    return {number: held.first if start == "earliest" else held.end for number, held in bounds.items()}


def parse_time(text: str) -> int:
    """Parse a date and time, in UTC unless it says otherwise, as Unix ms. Raises `InvalidRequest`."""
    from datetime import UTC, datetime

    try:
        found = datetime.fromisoformat(text.strip())
        return max(0, int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000))
    except (ValueError, OverflowError):
        raise InvalidRequest(f"time {text[:40]!r}: expected a date and time such as 2026-11-15T07:49 (UTC)") from None


# Search.


@dataclass(frozen=True, slots=True)
class Wanted:
    """Text to search, without regard to case."""

    text: str
    places: frozenset[str] = frozenset(("key", "value", "headers"))

    def matches(self, record: Record) -> bool:
        needle = self.text.encode("utf-8", "surrogateescape").lower()
        if "key" in self.places and record.key is not None and needle in record.key.lower():
            return True
        if "value" in self.places and record.value is not None and needle in record.value.lower():
            return True
        return "headers" in self.places and any(
            needle in name.encode().lower() or needle in value.lower() for name, value in record.headers
        )


@dataclass(slots=True)
class Progress:
    """State of a search. `at` are the positions from which it continues."""

    at: Positions
    scanned: int = 0
    left: int = 0
    matches: list[Record] = field(default_factory=list)
    """Matches of the last step, which are of one partition."""

    def keep(self, count: int, *, newest_first: bool) -> None:
        """Drop matches of the last step beyond `count`. A search that continues at `at` finds them again."""
        if count < len(self.matches):
            self.matches = self.matches[:count]
            last = self.matches[-1]
            self.at[last.partition] = last.offset if newest_first else last.offset + 1

    @property
    def is_over(self) -> bool:
        return self.left == 0


async def search(
    client: FlyMqClient, topic: str, bounds: Mapping[int, Bounds], at: Positions, wanted: Wanted, *, newest_first: bool
) -> AsyncIterator[Progress]:
    """Scan records from the positions on, in either direction, and yield after each step. The caller ends it by closing the iterator."""
    places = {
        number: min(max(at.get(number, held.end if newest_first else held.first), held.first), held.end) for number, held in bounds.items()
    }
    progress = Progress(places)
    ends = {number: held.first if newest_first else held.end for number, held in bounds.items()}
    while True:
        progress.left = sum(abs(places[number] - ends[number]) for number in places)
        if progress.is_over:
            yield progress
            return
        for number in [number for number in places if places[number] != ends[number]]:
            place = places[number]
            low, high = (
                (max(ends[number], place - _SCAN_OFFSETS), place) if newest_first else (place, min(ends[number], place + _SCAN_OFFSETS))
            )
            records = await read_range(client, topic, number, low, high)
            places[number] = low if newest_first else high
            progress.scanned += len(records)
            progress.left = sum(abs(places[one] - ends[one]) for one in places)
            progress.matches = [record for record in (reversed(records) if newest_first else records) if wanted.matches(record)]
            yield progress


async def read_range(client: FlyMqClient, topic: str, partition: int, start: int, stop: int) -> list[Record]:
    """Return all records of a range with their values."""
    details = {record.offset: record for record in await _details(client, topic, partition, start, stop)}
    records: list[Record] = []
    while start < stop and details:
        batch, start = await client.read(topic, start, partition=partition, records_max=stop - start)
        for index, offset in enumerate(batch.offsets):
            known = details.get(offset)
            if known is not None and offset < stop:
                key = None if batch.keys is None else batch.keys[index]
                value = None if known.is_tombstone else batch.values[index]
                records.append(replace(known, key=key, value=value, is_loaded=True))
        if not batch.offsets:
            break
    return records


# Schemas.


class ValueDecoder:
    """Decodes values with the Avro or Protobuf schema that a topic requires."""

    def __init__(self, name: str, type: SchemaType, definition: bytes, others: list[bytes]) -> None:
        self.name, self.type = name, type
        self._reader = reader_of(type, definition, others)

    def __call__(self, value: bytes) -> Any:
        (plain,), faults = self._reader.read([value])
        if faults:
            raise ValueError(f"does not match the schema {self.name}: {faults[0]}")
        return plain


async def decoder_of(client: FlyMqClient, topic: str) -> ValueDecoder | None:
    """Return the decoder of a topic; None if it requires no Avro or Protobuf schema, or the user may not see it."""
    try:
        required = await client.call("schema.requirement", topic=topic)
        if required is None:
            return None
        wanted = await client.schema(required["schema"], required["version"] or 0)
        if wanted.type.lower() not in (SchemaType.AVRO, SchemaType.PROTOBUF):
            return None
        versions = [one.version for one in await client.schemas(required["schema"]) if one.version != wanted.version]
        newest = sorted(versions, reverse=True)[:_OTHER_VERSIONS_MAX]
        others = [(await client.schema(required["schema"], version)).definition for version in newest]
        return ValueDecoder(required["schema"], SchemaType(wanted.type.lower()), wanted.definition, others)
    except HeadraceError:
        return None
