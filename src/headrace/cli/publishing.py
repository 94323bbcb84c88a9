"""`headrace pub`: publish records through any protocol.

Through FlyMQ, records go in the order of the input, one batch after the other, so that a refused record ends the command with nothing
after it written. Other protocols do not tell which record of a batch was refused, and batches are pipelined.

On an interrupt, `pub` waits for outstanding acknowledgements.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import click

from headrace.cli import terminal
from headrace.cli.input import InputRecord, InvalidLine, Parse, input_lines, jsonl_record, keyed, paced, plain, repeated
from headrace.cli.interrupts import run
from headrace.cli.printed import receipts
from headrace.cli.servers import Server, server_options
from headrace.cli.template import unescaped
from headrace.cli.topic_names import is_new, nearest_topic, suggesting
from headrace.clients.api import Client
from headrace.clients.errors import Refused
from headrace.clients.messages import Receipt
from headrace.errors import HeadraceError, InvalidRecord, LimitExceeded
from headrace.records import Headers

if TYPE_CHECKING:
    from headrace.clients.flymq.client import FlyMqClient

_CALL_BYTES_MAX: Final = 1 << 20
_CALL_RECORDS_MAX: Final = 5_000
"""Bounds of one call of record.publish. A larger record goes alone."""


def _parse_headers(context: click.Context, parameter: click.Parameter, pairs: Sequence[str]) -> Headers:
    found = [pair.partition("=") for pair in pairs]
    for name, equals, _ in found:
        if not equals or not name:
            raise click.BadParameter(f"{name!r} is not NAME=VALUE")
    return tuple((name, _bytes(value)) for name, _, value in found)


def _parse_separator(context: click.Context, parameter: click.Parameter, text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        separator = unescaped(text)
    except ValueError as failure:
        raise click.BadParameter(str(failure)) from None
    if not separator:
        raise click.BadParameter("expected at least one character")
    return separator


def _bytes(text: str) -> bytes:
    """Return the bytes of an argument, even if it is not valid UTF-8."""
    return text.encode("utf-8", "surrogateescape")


@click.command()
@click.argument("topic")
@click.argument("messages", metavar="[MESSAGE]...", nargs=-1)
@click.option("-f", "--file", type=click.File("rb"), help="Publish the lines of this file; - is standard input, the default.")
@click.option("--whole", is_flag=True, help="Publish the file or standard input as one record instead of one per line.")
@click.option(
    "--jsonl",
    is_flag=True,
    help="Each line is a JSON object with value, key and headers, such as headrace fetch -o jsonl prints. A value that is not a string is "
    "published as JSON, null as a tombstone.",
)
@click.option(
    "-K",
    "--key-separator",
    metavar="SEP",
    callback=_parse_separator,
    help=r"The key of a record is its text before the first SEP, as kcat -K; \t is a tab. Without SEP, a record has no key.",
)
@click.option("--key", help="Key of every record, if the protocol has keys.")
@click.option(
    "--header", "headers", metavar="NAME=VALUE", multiple=True, callback=_parse_headers, help="Header of every record; repeatable."
)
@click.option("--count", type=click.IntRange(min=1), default=1, show_default=True, help="Number of times to publish each MESSAGE.")
@click.option("--rate", metavar="N", type=click.FloatRange(min=0, min_open=True), help="Publish at most N records per second.")
@click.option("--partition", type=click.IntRange(min=0), help="Partition, if the protocol has partitions.")
@click.option("-o", "--output", type=click.Choice(["json", "jsonl"]), help="Print the receipts, one JSON object per line.")
@server_options
def pub(
    topic: str,
    messages: Sequence[str],
    file: BinaryIO | None,
    whole: bool,
    jsonl: bool,
    key_separator: bytes | None,
    key: str | None,
    headers: Headers,
    count: int,
    rate: float | None,
    partition: int | None,
    output: str | None,
    server: Server,
) -> int:
    """Publish records to a topic.

    Each MESSAGE is one record. Without a MESSAGE, each line of standard input is one record. A record that the broker refuses ends the
    command with the number of its line.
    """
    if messages and (file is not None or whole or jsonl):
        raise click.UsageError("give either messages, or --file, --whole and --jsonl, not both")
    if count > 1 and not messages:
        raise click.UsageError("--count requires a MESSAGE argument")
    if jsonl and (whole or key_separator or key is not None):
        raise click.UsageError("--jsonl: each line has its own key; --whole, --key and --key-separator do not apply")
    if key_separator and key is not None:
        raise click.UsageError("give either --key or --key-separator, not both")
    parse: Parse = jsonl_record if jsonl else keyed(key_separator) if key_separator else plain(None if key is None else _bytes(key))
    if messages:
        source = repeated([parse(_bytes(message)) for message in messages], count)
    else:
        source = input_lines(sys.stdin.buffer if file is None else file, whole, parse)
    if headers:
        source = _with_headers(source, headers)
    if rate is not None:
        source = paced(source, rate, clock=time.monotonic, sleep=asyncio.sleep)
    name = "message" if messages else "line"
    return run(_Publishing(topic, partition, output, name).run(server, source))


async def _with_headers(source: AsyncIterator[list[InputRecord]], headers: Headers) -> AsyncIterator[list[InputRecord]]:
    async for records in source:
        yield [record._replace(headers=(*headers, *record.headers)) for record in records]


@dataclass(slots=True)
class _Sent:
    """A batch under way and the number of its first record in the input."""

    first: int
    count: int
    made: Awaitable[list[Receipt]]


class _Publishing:
    """State of one `pub` command."""

    def __init__(self, topic: str, partition: int | None, output: str | None, name: str) -> None:
        self._topic, self._partition, self._output = topic, partition, output
        self._name = name
        """Unit of the input: line or message."""
        self._count = self._taken = 0
        self._last: Receipt | None = None
        self._began = 0.0
        self._under_way: deque[_Sent] = deque()
        self._current: asyncio.Future[None] | None = None
        """The batch that goes through FlyMQ. An interrupt does not cancel it, so that its acknowledgement is counted."""

    async def run(self, server: Server, source: AsyncIterator[list[InputRecord]]) -> int:
        client = await server.connect()
        self._began = time.perf_counter()
        try:
            try:
                await self._mention_new_topic(client, server)
                async with suggesting(client):
                    await self._publish(client, server, source)
            except asyncio.CancelledError:
                await asyncio.shield(client.close())  # raises if an acknowledgement is missing
                if self._current is not None:
                    await self._current
                await self._acknowledged(all_of_them=True)
                self._report(server)
                raise
            await client.close()
        finally:
            client.abandon()
        self._report(server)
        return 0

    async def _mention_new_topic(self, client: Client, server: Server) -> None:
        """Tell when the topic does not exist and another has nearly its name: publishing creates it."""
        if not server.quiet and await is_new(client, self._topic) and (nearest := await nearest_topic(client, self._topic)):
            click.echo(f"{self._topic}: a new topic; did you mean {nearest}?", err=True)

    async def _publish(self, client: Client, server: Server, source: AsyncIterator[list[InputRecord]]) -> None:
        try:
            async for records in source:
                if server.protocol == "flymq":
                    for chunk in _chunks(records):
                        self._current = asyncio.ensure_future(self._publish_exactly(cast("FlyMqClient", client), chunk))
                        self._current.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
                        await asyncio.shield(self._current)
                else:
                    await self._send(client, records)
        except InvalidLine:
            await self._acknowledged(all_of_them=True)
            raise
        await self._acknowledged(all_of_them=True)

    async def _publish_exactly(self, client: FlyMqClient, records: list[InputRecord]) -> None:
        """Publish through FlyMQ. Raises `click.ClickException` that names the refused record."""
        first, self._taken = self._taken + 1, self._taken + len(records)
        try:
            one = records[0] if len(records) == 1 else None
            if one is not None and not one.headers and one.value is not None:
                # A frame of PRODUCE carries larger records than base64 in JSON.
                made = await (await client.send_many(self._topic, [one.value], key=one.key, partition=self._partition))
                refused = ""
            else:
                reply = await client.call(
                    "record.publish", topic=self._topic, records=[_plain(record) for record in records], partition=self._partition
                )
                made, refused = [Receipt(self._topic, *placed) for placed in reply["placed"]], reply["refused"]
        except HeadraceError as failure:
            raise self._refused(failure, first) from failure
        self._made(made)
        if refused:
            from headrace.clients.flymq.errors import error_of
            from headrace.wire.flymq.messages import Failure

            error = error_of(Failure(refused), self._topic)
            raise self._refused(error, first + len(made)) from error

    async def _send(self, client: Client, records: list[InputRecord]) -> None:
        """Publish through another protocol without waiting for the acknowledgement."""
        if any(record.value is None for record in records):
            raise click.UsageError("this protocol cannot publish a record without a value; use --protocol flymq")
        first, self._taken = self._taken + 1, self._taken + len(records)
        if any(record.headers for record in records):
            for record in records:
                made = client.publish(
                    self._topic, cast(bytes, record.value), key=record.key, partition=self._partition, headers=record.headers
                )
                self._made([await made])
            return
        keys = [record.key for record in records]
        # The client calls `key` once for each value, in order.
        key: Any = (lambda value, keys=iter(keys): next(keys)) if any(keys) else None
        values = [cast(bytes, record.value) for record in records]
        future = await client.send_many(self._topic, values, key=key, partition=self._partition)
        self._under_way.append(_Sent(first, len(records), future))
        await self._acknowledged()

    async def _acknowledged(self, *, all_of_them: bool = False) -> None:
        """Count available receipts, or wait for all. Raises the first error."""
        while self._under_way and (all_of_them or cast("asyncio.Future[object]", self._under_way[0].made).done()):
            sent = self._under_way[0]
            try:
                made = await sent.made
            except HeadraceError as failure:
                raise self._refused(failure, sent.first, sent.count) from failure
            self._under_way.popleft()
            self._made(made)

    def _made(self, made: list[Receipt]) -> None:
        self._count += len(made)
        self._last = made[-1] if made else self._last
        if self._output is not None:
            terminal.write(receipts(made))

    def _refused(self, failure: HeadraceError, first: int, count: int = 1) -> Exception:
        """Return the error with the place of the record and the number of records published."""
        inner = getattr(failure, "failure", None)
        if isinstance(inner, HeadraceError):  # the client knows which record of the batch was refused
            first, count, failure = first + getattr(failure, "index", 0), 1, inner
        is_about_record = isinstance(failure, InvalidRecord | LimitExceeded | Refused)
        if not is_about_record and not self._count:
            return failure
        text = getattr(failure, "text", "") or str(failure)
        place = f"{self._name} {first}" if count == 1 else f"{self._name}s {first} to {first + count - 1}"
        before = f"; {_records(self._count)} published before" if self._count else ""
        return click.ClickException(f"{place + ': ' if is_about_record else ''}{text}{before}")

    def _report(self, server: Server) -> None:
        if server.quiet:
            return
        seconds = time.perf_counter() - self._began
        took = f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
        place = self._topic
        if self._count == 1 and self._last is not None and self._last.offset is not None:
            place = f"{self._topic}[{self._last.partition}]@{self._last.offset}"
        click.echo(f"{place}: {_records(self._count)} acknowledged in {took}", err=True)


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


def _chunks(records: list[InputRecord]) -> Iterator[list[InputRecord]]:
    """Split the records into parts that fit one call."""
    chunk: list[InputRecord] = []
    size_bytes = 0
    for record in records:
        weight = len(record.value or b"") + len(record.key or b"")
        if chunk and (len(chunk) == _CALL_RECORDS_MAX or size_bytes + weight > _CALL_BYTES_MAX):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(record)
        size_bytes += weight
    if chunk:
        yield chunk


def _plain(record: InputRecord) -> dict[str, object]:
    found: dict[str, object] = {"value": None if record.value is None else _base64(record.value)}
    if record.key is not None:
        found["key"] = _base64(record.key)
    if record.headers:
        found["headers"] = [[name, _base64(value)] for name, value in record.headers]
    return found


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
