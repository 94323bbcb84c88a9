"""`headrace pub`, `sub` and `fetch`: publish and read records through any protocol.

Data goes to stdout, messages to stderr. A pipe or file receives raw bytes; a terminal receives no control characters (`terminal.py`).
On an interrupt, `pub` waits for outstanding acknowledgements, and `sub` commits printed records.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import BinaryIO, Final

import click

from headrace.cli import terminal
from headrace.cli.printed import OUTPUTS, OUTPUTS_TEXT, TABLE_HEAD, compact, fields, printed, receipts
from headrace.cli.servers import Server, server_options
from headrace.clients.api import Client, Subscription
from headrace.clients.connect import SCHEMES, supports
from headrace.clients.errors import NotSupported
from headrace.clients.messages import Message, MessageBatch, Receipt, Settlement, Start
from headrace.server.units import parse_duration

INTERRUPTED: Final = 130
SETTLE_SECONDS: Final = 5.0
"""Longest wait for the final commit."""
_READ_BYTES: Final = 256 * 1024

Source = Callable[[], AsyncIterator[list[bytes]]]


def _parse_start(context: click.Context, parameter: click.Parameter, text: str | None) -> Start | None:
    if text is None:
        return None
    if text in ("earliest", "latest"):
        return "earliest" if text == "earliest" else "latest"
    if re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
        return int(text)
    at = _parse_time(text)
    if at is None:
        raise click.BadParameter(f"{text!r} is invalid; expected earliest, latest, an offset or a time")
    return at


def _parse_time(text: str) -> datetime | None:
    """Parse a date with optional time (local zone by default), or a duration before now."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        pass
    try:
        return datetime.now(UTC) - timedelta(milliseconds=parse_duration(text))
    except (ValueError, OverflowError):
        return None


def _check_start(server: Server, start: Start | None) -> None:
    if isinstance(start, datetime) and not supports(server.protocol, "offset_for_time"):
        raise click.UsageError(f"the {server.protocol} protocol does not support times; use earliest, latest or an offset")


_partition = click.option("--partition", type=click.IntRange(min=0), help="Partition, if the protocol has partitions.")
_group = click.option("--group", help="Resume at the committed offset of this group and commit printed records.")
_output = click.option("-o", "--output", type=click.Choice(OUTPUTS), default="raw", show_default=True, help=OUTPUTS_TEXT)


@click.command()
@click.argument("topic")
@click.argument("messages", metavar="[MESSAGE]...", nargs=-1)
@click.option("-f", "--file", type=click.File("rb"), help="Publish the lines of this file; - is standard input, the default.")
@click.option("--whole", is_flag=True, help="Publish the file or standard input as one record instead of one per line.")
@click.option("--count", type=click.IntRange(min=1), default=1, show_default=True, help="Number of times to publish each MESSAGE.")
@click.option("--key", help="Key of every record, if the protocol has keys.")
@_partition
@click.option("-o", "--output", type=click.Choice(["json", "jsonl"]), help="Print the receipts, one JSON object per line.")
@server_options
def pub(
    topic: str,
    messages: Sequence[str],
    file: BinaryIO | None,
    whole: bool,
    count: int,
    key: str | None,
    partition: int | None,
    output: str | None,
    server: Server,
) -> int:
    """Publish records to a topic.

    Each MESSAGE is one record. Without a MESSAGE, each line of standard input is one record.
    """
    if messages and (file is not None or whole):
        raise click.UsageError("give either messages or --file, not both")
    if count > 1 and not messages:
        raise click.UsageError("--count requires a MESSAGE argument")
    source: Source
    if messages:
        values = [_bytes(message) for message in messages]
        source = lambda: _repeated(values, count)  # noqa: E731
    else:
        stream = sys.stdin.buffer if file is None else file
        source = lambda: _read(stream, whole)  # noqa: E731
    publishing = _Publishing(topic, None if key is None else _bytes(key), partition, output)
    return _run(publishing.run(server, source))


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "start",
    metavar="earliest|latest|OFFSET|TIME",
    callback=_parse_start,
    help="Start position. latest (the default of most protocols): only new records. TIME: 2026-11-15T07:49, or 5m for 5 minutes ago.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), help="Stop after this number of records.")
@_group
@_partition
@_output
@server_options
def sub(topic: str, start: Start | None, count: int | None, group: str | None, partition: int | None, output: str, server: Server) -> int:
    """Print records of a topic and follow it."""
    _check_start(server, start)
    return _run(_follow(server, topic, start, count, group, partition, output))


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "start",
    metavar="earliest|OFFSET|TIME",
    default="earliest",
    show_default=True,
    callback=_parse_start,
    help="Start position. TIME: 2026-11-15T07:49, or 5m for 5 minutes ago.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), default=100, show_default=True, help="Print at most this number of records.")
@click.option("--group", help="Begin at the committed offset of this group if it is higher than --from. Does not commit.")
@click.option("--partition", type=click.IntRange(min=0), default=0, show_default=True, help="Partition to read.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(OUTPUTS),
    default="raw",
    show_default=True,
    help=OUTPUTS_TEXT.replace("json, jsonl:", "json: one array of objects. jsonl:"),
)
@server_options
def fetch(topic: str, start: Start, count: int, group: str | None, partition: int, output: str, server: Server) -> int:
    """Print records of a topic and exit."""
    if not supports(server.protocol, "fetch"):
        raise click.UsageError(f"the {server.protocol} protocol does not support fetch; use --protocol flymq or rustlog, or headrace sub")
    _check_start(server, start)
    return _run(_fetch(server, topic, start, count, group, partition, output))


def _bytes(text: str) -> bytes:
    """Return the bytes of an argument, even if it is not valid UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _run(work: Coroutine[None, None, int]) -> int:
    """Run `work`. The first interrupt cancels it; the second ends the process immediately."""

    async def interruptible() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def interrupt() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            task.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            return await task
        except asyncio.CancelledError:
            return INTERRUPTED

    try:
        return asyncio.run(interruptible())
    except NotSupported as failure:
        raise click.UsageError(str(failure)) from None


# Publishing.


class _Publishing:
    """State of one `pub` command."""

    def __init__(self, topic: str, key: bytes | None, partition: int | None, output: str | None) -> None:
        self._topic, self._key, self._partition, self._output = topic, key, partition, output
        self._count = 0
        self._last: Receipt | None = None
        self._began = 0.0
        self._under_way: deque[asyncio.Future[list[Receipt]]] = deque()

    async def run(self, server: Server, source: Source) -> int:
        client = await server.connect()
        self._began = time.perf_counter()
        try:
            try:
                await self._publish(client, source)
            except asyncio.CancelledError:
                await asyncio.shield(client.close())  # raises if an acknowledgement is missing
                await self._acknowledged(all_of_them=True)
                self._report(server)
                raise
            await client.close()
        finally:
            client.abandon()
        self._report(server)
        return 0

    async def _publish(self, client: Client, source: Source) -> None:
        async for values in source():
            self._under_way.append(await client.send_many(self._topic, values, key=self._key, partition=self._partition))
            await self._acknowledged()
        await self._acknowledged(all_of_them=True)

    async def _acknowledged(self, *, all_of_them: bool = False) -> None:
        """Count available receipts, or wait for all. Raises the first error."""
        while self._under_way and (all_of_them or self._under_way[0].done()):
            made = await self._under_way[0]
            self._under_way.popleft()
            self._count += len(made)
            self._last = made[-1]
            if self._output is not None:
                terminal.write(receipts(made))

    def _report(self, server: Server) -> None:
        if server.quiet:
            return
        seconds = time.perf_counter() - self._began
        took = f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
        place = self._topic
        if self._count == 1 and self._last is not None and self._last.offset is not None:
            place = f"{self._topic}[{self._last.partition}]@{self._last.offset}"
        click.echo(f"{place}: {self._count} {'record' if self._count == 1 else 'records'} acknowledged in {took}", err=True)


async def _repeated(values: list[bytes], count: int) -> AsyncIterator[list[bytes]]:
    for _ in range(count):
        yield values


async def _read(stream: BinaryIO, whole: bool) -> AsyncIterator[list[bytes]]:
    """Yield records of a file or pipe. A thread reads: reading a terminal or pipe may block indefinitely."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[list[bytes] | OSError | None] = asyncio.Queue(maxsize=4)

    def put(chunk: list[bytes] | OSError | None) -> None:
        asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()

    def read() -> None:
        try:
            for lines in [[stream.read()]] if whole else _lines(stream):
                put(lines)
            put(None)
        except OSError as failure:
            put(failure)
        except RuntimeError:
            return  # the loop is closed: the rest is not needed

    threading.Thread(target=read, daemon=True, name="input").start()
    while (chunk := await chunks.get()) is not None:
        if isinstance(chunk, OSError):
            raise chunk
        yield chunk


def _lines(stream: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the available lines without line ends. The last line may lack one."""
    rest = b""
    while chunk := os.read(stream.fileno(), _READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


# Following.


async def _follow(
    server: Server, topic: str, start: Start | None, count: int | None, group: str | None, partition: int | None, output: str
) -> int:
    client = await server.connect()
    try:
        settlement: Settlement = "auto" if group is not None or SCHEMES[server.protocol].settles else "explicit"
        begin = () if start is None else (start,)
        subscription = await client.subscribe(topic, *begin, partition=partition, group=group, settlement=settlement)
        try:
            await _until_reader_left(_print(subscription, start, count, output, server.quiet))
        except asyncio.CancelledError:
            if settlement == "auto":
                await _settle(subscription)
            raise
        if settlement == "auto":
            await _settle(subscription)
    finally:
        client.abandon()
    return 0


async def _settle(subscription: Subscription) -> None:
    """Settle the printed records."""
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            await asyncio.shield(subscription.close())
    except TimeoutError:
        raise click.ClickException(f"no commit within {SETTLE_SECONDS:g} s; the last printed records may be delivered again") from None


async def _until_reader_left(work: Coroutine[None, None, None]) -> None:
    """Run `work`. Raises `BrokenPipeError` when the output is closed: the last records may be unread and are not settled."""
    reader_left = asyncio.ensure_future(_reader_left(sys.stdout.fileno()))
    printing = asyncio.ensure_future(work)
    try:
        await asyncio.wait([printing, reader_left], return_when=asyncio.FIRST_COMPLETED)
        if not printing.done():
            raise BrokenPipeError
        printing.result()
    finally:
        for task in (printing, reader_left):
            task.cancel()
        await asyncio.gather(printing, reader_left, return_exceptions=True)


async def _reader_left(output: int) -> None:
    """Wait until the reader closes the pipe (`headrace sub … | head -1`): without new records, no write would fail."""
    loop = asyncio.get_running_loop()
    left = asyncio.Event()
    if stat.S_ISFIFO(os.fstat(output).st_mode):
        loop.add_reader(output, left.set)
    try:
        await left.wait()
    finally:
        loop.remove_reader(output)


async def _print(subscription: Subscription, start: Start | None, count: int | None, output: str, quiet: bool) -> None:
    reported = 0
    left = count

    def report_gaps() -> None:
        nonlocal reported
        for gap in subscription.gaps[reported:]:
            reported += 1
            if not quiet and not (start == "earliest" and gap.expected == 0):
                click.echo(f"{subscription.topic}: offset {gap.expected} does not exist; starting at {gap.actual}", err=True)

    if output == "table":
        terminal.write(TABLE_HEAD.encode())
    report_gaps()
    async for batch in subscription.batches() if count is None else _singly(subscription):
        report_gaps()
        terminal.write(printed(batch, len(batch), output))
        if left is not None:
            left -= 1
            if left == 0:
                break


async def _singly(subscription: Subscription) -> AsyncIterator[MessageBatch]:
    """Yield batches of one record: records that are not printed must not be settled."""
    async for message in subscription:
        yield _batch_of([message])


def _batch_of(messages: Sequence[Message]) -> MessageBatch:
    first = messages[0]
    offsets = [message.offset for message in messages if message.offset is not None]
    is_one = all(message.partition == first.partition for message in messages)
    return MessageBatch(
        first.topic,
        first.partition if is_one else None,
        offsets,
        [message.value for message in messages],
        [message.key for message in messages],
    )


# Fetching.


async def _fetch(server: Server, topic: str, start: Start, count: int, group: str | None, partition: int, output: str) -> int:
    client = await server.connect()
    try:
        if output == "table":
            terminal.write(TABLE_HEAD.encode())
        elements: list[object] = []
        async for batch in _batches(client, topic, start, count, group, partition):
            if output == "json":
                elements += [fields(batch, index) for index in range(len(batch))]
            else:
                terminal.write(printed(batch, len(batch), output))
        if output == "json":
            terminal.write(f"{compact(elements)}\n".encode())
    finally:
        client.abandon()
    return 0


async def _batches(client: Client, topic: str, start: Start, count: int, group: str | None, partition: int) -> AsyncIterator[MessageBatch]:
    """Fetch repeatedly until there are `count` records or no more: the size of a reply is bounded."""
    place, left = start, count
    while left and (messages := await client.fetch(topic, place, partition=partition, group=group, records_max=left)):
        yield _batch_of(messages)
        left -= len(messages)
        last = messages[-1]
        if last.offset is not None and last.settler is None:
            place = last.offset + 1
        for message in messages:
            if message.settler is not None:
                await message.ack()  # unacknowledged messages would be fetched again
