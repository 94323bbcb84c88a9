"""Messages of a topic: pages in either direction, search, live tail, one message, export."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from headrace.clients.flymq.client import FlyMqClient
from headrace.console.reading import (
    PAGE_RECORDS_MAX,
    Page,
    Positions,
    Record,
    Wanted,
    decoder_of,
    format_positions,
    parse_positions,
    parse_time,
    read_one,
    read_page,
    read_range,
    search,
    start_positions,
)
from headrace.console.text import FORMATS, Decode, Shown, moment, show_value, text_of
from headrace.console.visits import Visit, event_of
from headrace.errors import UnknownMessage, UnknownPartition
from headrace.records import Bounds

LIMIT: Final = 50
_LIST_BYTES_MAX: Final = 4 << 10
"""Bytes of a value in a list; the page of the message shows more."""
_SCAN_SECONDS_MAX: Final = 4.0
"""Duration of a search in a page without a stream. The page offers to continue."""
_SCAN_RECORDS_MAX: Final = 1_000_000
_EXPORT_RECORDS_MAX: Final = 100_000
_EXPORT_STEP: Final = 500
_TAIL_SECONDS: Final = 0.25
_TAIL_RECORDS_MAX: Final = 100
"""Records per partition that one step of a live tail shows. A faster topic is not shown completely."""
_STARTS: Final = ("latest", "earliest", "offset", "time")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of a cell that a spreadsheet would execute."""


@dataclass(frozen=True, slots=True)
class Row:
    """A record for the templates."""

    record: Record
    shown: Shown | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The fields of the form above the messages."""

    topic: str
    partition: int | None
    start: str
    value: str
    limit: int
    format: str
    text: str
    places: frozenset[str]
    at: Positions

    @classmethod
    def of(cls, visit: Visit) -> Choice:
        start = visit.given("start", "latest")
        places = frozenset(place for place in ("key", "value", "headers") if visit.given(f"in_{place}"))
        partition = visit.given("partition")
        return cls(
            visit.given("topic"),
            int(partition) if partition.isascii() and partition.isdigit() else None,
            start if start in _STARTS else "latest",
            visit.given("at_value").strip(),
            visit.number("limit", LIMIT, 1, PAGE_RECORDS_MAX),
            visit.given("format") if visit.given("format") in FORMATS else "auto",
            visit.given("q"),
            places or frozenset(("key", "value", "headers")),
            parse_positions(visit.given("at")),
        )

    @property
    def is_newest_first(self) -> bool:
        return self.start == "latest"

    def query(self, **more: object) -> dict[str, object]:
        """Return the query of this choice, for links."""
        found: dict[str, object] = {
            "topic": self.topic,
            "partition": self.partition,
            "start": "" if self.start == "latest" else self.start,
            "at_value": self.value,
            "limit": "" if self.limit == LIMIT else self.limit,
            "format": "" if self.format == "auto" else self.format,
            "q": self.text,
            "at": format_positions(self.at),
        }
        if self.text and len(self.places) < 3:
            found |= {f"in_{place}": 1 for place in sorted(self.places)}
        return {**found, **more}

    def words(self) -> list[object]:
        """Return the arguments of `headrace fetch` for this choice."""
        words: list[object] = ["fetch", self.topic]
        if self.start == "latest":
            words += ["--from", f"-{self.limit}"]
        else:
            start = moment(parse_time(self.value)) if self.start == "time" else self.value if self.start == "offset" else ""
            words += ["--from", start or "earliest", "-n", self.limit]
        return [*words, *(["--partition", self.partition] if self.partition is not None else []), "-o", "json"]


async def _bounds(client: FlyMqClient, choice: Choice) -> dict[int, Bounds]:
    """Return the bounds of the chosen partitions. Raises `UnknownTopic`, `UnknownPartition`."""
    found = await client.describe_topic(choice.topic)
    if choice.partition is None:
        return found
    if choice.partition not in found:
        raise UnknownPartition(choice.topic, choice.partition)
    return {choice.partition: found[choice.partition]}


async def _start(client: FlyMqClient, choice: Choice, bounds: dict[int, Bounds]) -> Positions:
    return choice.at or await start_positions(client, choice.topic, bounds, choice.start, choice.value)


def _row(record: Record, format: str, decode: Decode | None) -> Row:
    if not record.is_loaded:
        return Row(record, None)
    return Row(record, show_value(record.value, format, decode, bytes_max=_LIST_BYTES_MAX))


async def messages(visit: Visit) -> Response:
    choice = Choice.of(visit)
    client = visit.client
    everything = await visit.ask(client.describe_topic(choice.topic))
    bounds = await visit.ask(_bounds(client, choice))
    is_live = visit.given("live") == "1"
    is_streamed = visit.given("stream") == "1"
    rows: list[Row] = []
    page = Page([], {}, True)
    scanned: dict[str, Any] | None = None
    if not is_live and not (choice.text and is_streamed):
        decode = await visit.ask(decoder_of(client, choice.topic))
        at = await visit.ask(_start(client, choice, bounds))
        if choice.text:
            page, scanned = await _searched(client, choice, bounds, at)
        else:
            page = await visit.ask(read_page(client, choice.topic, bounds, at, choice.limit, newest_first=choice.is_newest_first))
        rows = [_row(record, choice.format, decode) for record in page.records]
    return visit.show(
        "messages.html",
        choice=choice,
        rows=rows,
        page=page,
        next_query=choice.query(at=format_positions(page.next)),
        scanned=scanned,
        is_live=is_live,
        is_streamed=is_streamed,
        partitions=sorted(everything),
        bounds=bounds,
        formats=FORMATS,
        starts=_STARTS,
        places=("key", "value", "headers"),
        command=visit.command(*choice.words()),
    )


async def _searched(client: FlyMqClient, choice: Choice, bounds: dict[int, Bounds], at: Positions) -> tuple[Page, dict[str, Any]]:
    """Search for a few seconds."""
    deadline = time.monotonic() + _SCAN_SECONDS_MAX
    found: list[Record] = []
    wanted = Wanted(choice.text, choice.places)
    steps = search(client, choice.topic, bounds, at, wanted, newest_first=choice.is_newest_first)
    async for progress in steps:
        progress.keep(choice.limit - len(found), newest_first=choice.is_newest_first)
        found += progress.matches
        if len(found) >= choice.limit or time.monotonic() > deadline or progress.scanned >= _SCAN_RECORDS_MAX:
            break
    await steps.aclose()  # type: ignore[attr-defined]  # it is a generator
    return Page(found, dict(progress.at), progress.is_over), {"scanned": progress.scanned, "left": progress.left, "found": len(found)}


async def search_stream(visit: Visit) -> Response:
    """Stream the matches of a search until there are enough, or the browser leaves."""
    choice = Choice.of(visit)

    async def events(client: FlyMqClient) -> AsyncIterator[str]:
        decode = await decoder_of(client, choice.topic)
        bounds = await _bounds(client, choice)
        at = await _start(client, choice, bounds)
        found, shown_at = 0, 0.0
        wanted = Wanted(choice.text, choice.places)
        async for progress in search(client, choice.topic, bounds, at, wanted, newest_first=choice.is_newest_first):
            progress.keep(choice.limit - found, newest_first=choice.is_newest_first)
            for record in progress.matches:
                found += 1
                yield event_of("row", visit.part("_record.html", row=_row(record, choice.format, decode), choice=choice))
            is_enough = found >= choice.limit or progress.scanned >= _SCAN_RECORDS_MAX
            if is_enough or progress.is_over or time.monotonic() - shown_at > 0.2:
                shown_at = time.monotonic()
                counts = {"scanned": progress.scanned, "left": progress.left, "found": found}
                yield event_of("progress", json.dumps(counts))
            is_over = progress.is_over and not is_enough
            if is_enough or is_over:
                query = choice.query(at=format_positions(progress.at), stream=1)
                more = visit.part("_more.html", query=query, is_last=is_over)
                yield event_of("done", more)
                return

    return visit.stream(events)


async def tail_stream(visit: Visit) -> Response:
    """Stream new records."""
    choice = Choice.of(visit)

    async def events(client: FlyMqClient) -> AsyncIterator[str]:
        decode = await decoder_of(client, choice.topic)
        bounds = await _bounds(client, choice)
        # A browser that reconnects names the last positions that it has seen.
        seen = parse_positions(visit.request.headers.get("last-event-id", ""))
        at = {number: min(max(seen.get(number, held.end), held.first), held.end) for number, held in bounds.items()}
        await client.call("record.details", topic=choice.topic, partition=next(iter(bounds)), offset=0, count=1)  # checks the right to read
        yield event_of("begin", "")
        while True:
            bounds = await asyncio.wait_for(_bounds(client, choice), 10)
            skipped = 0
            for number, held in bounds.items():
                start = at.get(number, held.first)
                if held.end <= start:
                    at[number] = min(start, held.end)
                    continue
                low = max(start, held.end - _TAIL_RECORDS_MAX)
                skipped += low - start
                for record in await read_range(client, choice.topic, number, low, held.end):
                    if choice.text and not Wanted(choice.text, choice.places).matches(record):
                        continue
                    html = visit.part("_record.html", row=_row(record, choice.format, decode), choice=choice)
                    at[number] = record.offset + 1
                    yield f"id: {format_positions(at)}\n{event_of('row', html)}"
                at[number] = held.end
            if skipped:
                yield event_of("skipped", str(skipped))
            await asyncio.sleep(_TAIL_SECONDS)

    return visit.stream(events)


async def _one(visit: Visit) -> Record:
    topic, partition, offset = visit.given("topic"), visit.number("partition", 0), visit.number("offset", 0)
    found = await visit.ask(read_one(visit.client, topic, partition, offset))
    if found is None:
        raise UnknownMessage(f"{topic}, partition {partition}, offset {offset}")
    return found


async def message(visit: Visit) -> Response:
    record = await _one(visit)
    format = visit.given("format") if visit.given("format") in FORMATS else "auto"
    decode = await visit.ask(decoder_of(visit.client, record.topic))
    words = ("fetch", record.topic, "--partition", record.partition, "--from", record.offset, "-n", 1, "-o", "json")
    return visit.show(
        "message.html",
        record=record,
        shown=show_value(record.value, format, decode),
        key_shown=None if record.key is None else show_value(record.key, "auto", bytes_max=_LIST_BYTES_MAX),
        format=format,
        formats=FORMATS,
        command=visit.command(*words),
    )


async def download(visit: Visit) -> Response:
    """Return the bytes of a value or key as a file. The browser must not interpret them."""
    record = await _one(visit)
    what = "key" if visit.given("what") == "key" else "value"
    content = (record.key if what == "key" else record.value) or b""
    name = f"{what}-{record.partition}-{record.offset}.bin"
    return Response(content, media_type="application/octet-stream", headers={"content-disposition": f'attachment; filename="{name}"'})


async def export(visit: Visit) -> Response:
    """Return the chosen records as JSON lines or CSV, at most `_EXPORT_RECORDS_MAX`."""
    choice = Choice.of(visit)
    is_csv = visit.given("as") == "csv"
    client = visit.client
    bounds = await visit.ask(_bounds(client, choice))
    at = await visit.ask(_start(client, choice, bounds))
    limit = visit.number("limit", LIMIT, 1, _EXPORT_RECORDS_MAX)
    if not choice.text:
        first: Page | None = await visit.ask(_export_page(client, choice, bounds, at, limit))
    else:
        first = None

    async def content() -> AsyncIterator[str]:
        if is_csv:
            yield _csv_line(["topic", "partition", "offset", "timestamp", "key", "headers", "value"])
        left = limit
        async for records in _exported(client, choice, bounds, at, limit, first):
            for record in records[:left]:
                yield _csv_record(record) if is_csv else _json_record(record)
            left -= len(records)
            if left <= 0:
                return

    name = "records.csv" if is_csv else "records.jsonl"
    type = "text/csv" if is_csv else "application/x-ndjson"
    return StreamingResponse(content(), media_type=type, headers={"content-disposition": f'attachment; filename="{name}"'})


async def _export_page(client: FlyMqClient, choice: Choice, bounds: dict[int, Bounds], at: Positions, limit: int) -> Page:
    return await read_page(client, choice.topic, bounds, at, min(limit, _EXPORT_STEP), newest_first=choice.is_newest_first)


async def _exported(
    client: FlyMqClient, choice: Choice, bounds: dict[int, Bounds], at: Positions, limit: int, first: Page | None
) -> AsyncIterator[list[Record]]:
    if first is None:
        wanted = Wanted(choice.text, choice.places)
        async for progress in search(client, choice.topic, bounds, at, wanted, newest_first=choice.is_newest_first):
            yield progress.matches
        return
    page = first
    while page.records:
        yield page.records
        if page.is_last:
            return
        page = await _export_page(client, choice, bounds, page.next, limit)


def fields_of(record: Record) -> dict[str, object]:
    """Return the fields of a record as `headrace fetch -o json` prints them; a value is always text or base64."""
    import base64

    def plain(content: bytes | None, name: str, mark: str) -> dict[str, object]:
        if content is None:
            return {name: None}
        try:
            return {name: content.decode()}
        except UnicodeDecodeError:
            return {name: base64.b64encode(content).decode(), mark: "base64"}

    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        **plain(record.key, "key", "key_encoding"),
        "headers": [[name, text_of(value)] for name, value in record.headers],
        **plain(record.value, "value", "encoding"),
    }


def _json_record(record: Record) -> str:
    return json.dumps(fields_of(record), ensure_ascii=False, separators=(",", ":")) + "\n"


def _csv_record(record: Record) -> str:
    headers = json.dumps([[name, text_of(value)] for name, value in record.headers], ensure_ascii=False) if record.headers else ""
    key, value = ("" if content is None else text_of(content) for content in (record.key, record.value))
    return _csv_line([record.topic, record.partition, record.offset, record.timestamp, key, headers, value])


def _csv_line(cells: list[object]) -> str:
    """Return a line. Text that a spreadsheet would take for a formula gets an apostrophe in front."""
    safe = [f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in cells]
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(safe)
    return text.getvalue()
