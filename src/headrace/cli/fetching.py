"""Records of `headrace fetch`: all partitions of all topics, in the order of their timestamps."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from headrace.cli import terminal
from headrace.cli.printed import PrintedRecord, compact, fields, printed, table_head
from headrace.cli.reading import Last, Output
from headrace.cli.servers import Server
from headrace.cli.topic_names import chosen_topics, suggesting
from headrace.clients.api import Client
from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.messages import Message, Start

_PAGE_RECORDS: Final = 500
"""Records of one partition that are read ahead while partitions are merged."""
_DETAILS_MAX: Final = 10_000
"""Offsets of one call of record.details."""


async def fetch_records(
    server: Server, name: str, start: Start | Last, count: int, group: str | None, partition: int | None, output: Output
) -> int:
    client = await server.connect()
    try:
        async with suggesting(client):
            sources = await _sources(client, await chosen_topics(client, name), start, group, partition)
            if isinstance(start, Last):
                count = min(count, start.count)
            if output.name == "table" and output.template is None:
                terminal.write(table_head())
            elements: list[object] = []
            async for records in _records(client, sources, count, output.needs_details):
                if output.name == "json" and output.template is None:
                    elements += map(fields, records)
                else:
                    write(records, output)
            if output.name == "json" and output.template is None:
                terminal.write(f"{compact(elements)}\n".encode())
    finally:
        client.abandon()
    return 0


def write(records: Sequence[PrintedRecord], output: Output) -> None:
    """Print records with the chosen template or format."""
    if output.template is not None:
        terminal.write(b"".join(map(output.template.render, records)))
    else:
        terminal.write(printed(records, output.name))


class _Source:
    """One partition, read in pages."""

    def __init__(self, client: Client, topic: str, partition: int, start: Start, group: str | None) -> None:
        self._client, self._topic, self._partition, self._place, self._group = client, topic, partition, start, group
        self.ahead: deque[PrintedRecord] = deque()
        self._is_over = False

    async def page(self, records_max: int, *, with_details: bool) -> list[PrintedRecord]:
        """Return the next records; none at the end. The size of a reply is bounded, so there may be more."""
        if self._is_over:
            return []
        messages = await self._client.fetch(self._topic, self._place, partition=self._partition, group=self._group, records_max=records_max)
        self._is_over = not messages
        for message in messages:
            if message.settler is not None:
                await message.ack()  # the server keeps the position, and would return unacknowledged messages again
            elif message.offset is not None:
                self._place = message.offset + 1
        return await detailed(self._client, messages) if with_details else [PrintedRecord.of(message) for message in messages]

    @property
    def next_time(self) -> int:
        return self.ahead[0].timestamp or 0


async def _sources(client: Client, topics: Sequence[str], start: Start | Last, group: str | None, partition: int | None) -> list[_Source]:
    if isinstance(start, Last):
        assert isinstance(client, FlyMqClient), "checked with the options"
        last = await last_positions(client, topics, start.count, partition)
        return [_Source(client, topic, number, offset, group) for (topic, number), offset in last.items()]
    return [_Source(client, topic, number, start, group) for topic in topics for number in await partitions_of(client, topic, partition)]


async def partitions_of(client: Client, topic: str, partition: int | None) -> list[int]:
    """Return the partitions to read. A protocol that cannot list them has one."""
    describe = getattr(client, "describe_topic", None)
    if partition is not None or describe is None:
        return [partition or 0]
    return list(await describe(topic))


async def _records(client: Client, sources: list[_Source], count: int, with_details: bool) -> AsyncIterator[list[PrintedRecord]]:
    """Yield at most `count` records of all sources: by timestamp through FlyMQ, otherwise one source after the other."""
    if len(sources) > 1 and isinstance(client, FlyMqClient):
        async for record in _merged(sources, count):
            yield [record]
        return
    for source in sources:
        while count and (records := await source.page(count, with_details=with_details)):
            yield records[:count]
            count -= min(count, len(records))


async def _merged(sources: list[_Source], count: int) -> AsyncIterator[PrintedRecord]:
    left = list(sources)
    while count and left:
        for source in left:
            if not source.ahead:
                source.ahead.extend(await source.page(min(count, _PAGE_RECORDS), with_details=True))
        left = [source for source in left if source.ahead]
        if left:
            count -= 1
            yield min(left, key=lambda source: source.next_time).ahead.popleft()


# Timestamps and headers, which FlyMQ's FETCH does not carry.


async def detailed(client: Client, messages: Sequence[Message]) -> list[PrintedRecord]:
    """Return records of one partition with their timestamps and headers."""
    if not isinstance(client, FlyMqClient) or not messages or messages[0].offset is None or messages[-1].offset is None:
        return [PrintedRecord.of(message) for message in messages]
    first, topic, partition = messages[0].offset, messages[0].topic, messages[0].partition or 0
    found = {row["offset"]: row for row in await details(client, topic, partition, first, messages[-1].offset + 1)}
    return [_with_details(message, found.get(message.offset)) for message in messages]


async def details(client: FlyMqClient, topic: str, partition: int, offset: int, end: int) -> list[dict[str, Any]]:
    """Return the details of the records from `offset` to `end` that still exist."""
    rows: list[dict[str, Any]] = []
    while offset < end:
        count = min(end - offset, _DETAILS_MAX)
        page = await client.call("record.details", topic=topic, partition=partition, offset=offset, count=count)
        rows += page
        # A reply may end early because its headers are large. An empty one has nothing left in its range.
        offset = page[-1]["offset"] + 1 if page else offset + count
    return rows


def _with_details(message: Message, row: dict[str, Any] | None) -> PrintedRecord:
    if row is None:  # retention has removed it meanwhile
        return PrintedRecord.of(message)
    headers = tuple((name, base64.b64decode(value)) for name, value in row["headers"])
    value = None if row["is_tombstone"] else message.value
    return PrintedRecord(message.topic, message.partition, message.offset, value, message.key, headers, row["timestamp"])


async def last_positions(client: FlyMqClient, topics: Sequence[str], count: int, partition: int | None) -> dict[tuple[str, int], int]:
    """Return the offset in each partition from which on there are the last `count` records of all partitions together."""
    places: dict[tuple[str, int], int] = {}
    newest: list[tuple[int, str, int, int]] = []
    for topic in topics:
        for number, bounds in (await client.describe_topic(topic)).items():
            if partition in (None, number):
                places[topic, number] = bounds.end
                for row in await details(client, topic, number, max(bounds.first, bounds.end - count), bounds.end):
                    newest.append((row["timestamp"], topic, number, row["offset"]))
    for _, topic, number, offset in sorted(newest)[-count:]:
        places[topic, number] = min(places[topic, number], offset)
    return places
