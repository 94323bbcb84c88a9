"""`headrace pub`, `sub` and `fetch`: records from and to a terminal, a file or a pipe, through any protocol.

Data goes to stdout, talk to stderr. A pipe or a file gets the bytes as they are, a terminal nothing that it would act on (`terminal.py`).
An interrupt ends all in order: `pub` still waits for the acknowledgements of what it has sent, and `sub` commits what it has printed.
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
"""How long the end may wait for the broker to take a commit."""
_READ_BYTES: Final = 256 * 1024

Source = Callable[[], AsyncIterator[list[bytes]]]


def _parse_start(context: click.Context, parameter: click.Parameter, text: str | None) -> Start | None:
    if text is None:
        return None
    if text in ("start", "end"):
        return "start" if text == "start" else "end"
    if re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
        return int(text)
    at = _parse_time(text)
    if at is None:
        raise click.BadParameter(f"{text!r} is none of start, end, an offset or a time")
    return at


def _parse_time(text: str) -> datetime | None:
    """A date with or without a time, in the zone of this machine unless it names one; or how long ago."""
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
        raise click.UsageError(f"the {server.protocol} protocol cannot look up times; give start, end or an offset")


_partition = click.option("--partition", type=click.IntRange(min=0), help="The partition, where the protocol has partitions.")
_group = click.option("--group", help="Go on where this group has committed, and commit what is printed.")
_output = click.option("-o", "--output", type=click.Choice(OUTPUTS), default="raw", show_default=True, help=OUTPUTS_TEXT)


@click.command()
@click.argument("topic")
@click.argument("messages", metavar="[MESSAGE]...", nargs=-1)
@click.option("-f", "--file", type=click.File("rb"), help="Publish the lines of this file; - is standard input, as without any message.")
@click.option("--whole", is_flag=True, help="Publish the file or standard input as one record, not line by line.")
@click.option("--count", type=click.IntRange(min=1), default=1, show_default=True, help="Publish each MESSAGE so many times.")
@click.option("--key", help="The key of every record, where the protocol has keys.")
@_partition
@click.option("-o", "--output", type=click.Choice(["json", "jsonl"]), help="Print where each record is, as an object a line.")
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

    Each MESSAGE is one record. Without any, each line of standard input is one.
    """
    if messages and (file is not None or whole):
        raise click.UsageError("give either messages or --file, not both")
    if count > 1 and not messages:
        raise click.UsageError("--count repeats messages given as arguments; there is none")
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
    metavar="start|end|OFFSET|TIME",
    callback=_parse_start,
    help="Where to begin. The end, the default of most protocols: only what is yet to come. A time: 2026-11-15T07:49, or 5m ago.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), help="Stop after so many records.")
@_group
@_partition
@_output
@server_options
def sub(topic: str, start: Start | None, count: int | None, group: str | None, partition: int | None, output: str, server: Server) -> int:
    """Read records of a topic, then follow it."""
    _check_start(server, start)
    return _run(_follow(server, topic, start, count, group, partition, output))


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "start",
    metavar="start|OFFSET|TIME",
    default="start",
    show_default=True,
    callback=_parse_start,
    help="Where to begin. A time: 2026-11-15T07:49, or 5m ago.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), default=100, show_default=True, help="Print at most so many records.")
@click.option("--group", help="Begin where this group has committed, if that is behind --from. It stays there.")
@click.option("--partition", type=click.IntRange(min=0), default=0, show_default=True, help="The partition to read.")
@click.option(
    "-o", "--output", type=click.Choice(OUTPUTS), default="raw", show_default=True, help=f"{OUTPUTS_TEXT} json: one array of objects."
)
@server_options
def fetch(topic: str, start: Start, count: int, group: str | None, partition: int, output: str, server: Server) -> int:
    """Print records that a topic holds, and end."""
    if not supports(server.protocol, "fetch"):
        raise click.UsageError(
            f"the {server.protocol} protocol cannot fetch; --protocol flymq and rustlog can, and headrace sub reads through it"
        )
    _check_start(server, start)
    return _run(_fetch(server, topic, start, count, group, partition, output))


def _bytes(text: str) -> bytes:
    """An argument as it was typed, even if it is no text."""
    return text.encode("utf-8", "surrogateescape")


def _run(work: Coroutine[None, None, int]) -> int:
    """Run to the end or to the first interrupt, which cancels; a second one ends the process at once."""

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
    """One call of `pub`: what it has sent, and what it knows of it."""

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
        """Take note of the receipts there are, or wait for all; the first refusal is raised."""
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
    """Records of a file or pipe, as they come. A thread reads: a terminal or a pipe may keep it waiting for ever."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[list[bytes] | OSError | None] = asyncio.Queue(maxsize=4)

    def put(piece: list[bytes] | OSError | None) -> None:
        asyncio.run_coroutine_threadsafe(pieces.put(piece), loop).result()

    def read() -> None:
        try:
            for lines in [[stream.read()]] if whole else _lines(stream):
                put(lines)
            put(None)
        except OSError as failure:
            put(failure)
        except RuntimeError:
            return  # the loop is closed: nobody wants the rest

    threading.Thread(target=read, daemon=True, name="input").start()
    while (piece := await pieces.get()) is not None:
        if isinstance(piece, OSError):
            raise piece
        yield piece


def _lines(stream: BinaryIO) -> Iterator[list[bytes]]:
    """Lines without their ends, as many at a time as there are; the last one may lack its end."""
    rest = b""
    while piece := os.read(stream.fileno(), _READ_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
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
    """What was printed is dealt with."""
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            await asyncio.shield(subscription.close())
    except TimeoutError:
        raise click.ClickException(f"no commit within {SETTLE_SECONDS:g} s; what was printed last may come again") from None


async def _until_reader_left(work: Coroutine[None, None, None]) -> None:
    """Raises `BrokenPipeError` when nobody reads the output any more: what was printed last may be unread, and is not settled."""
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
    """Returns when nobody reads the pipe any more (`headrace sub … | head -1`): with nothing to write, a write would not tell."""
    loop = asyncio.get_running_loop()
    left = asyncio.Event()
    if stat.S_ISFIFO(os.fstat(output).st_mode):
        loop.add_reader(output, left.set)
    try:
        await left.wait()
    finally:
        loop.remove_reader(output)


async def _print(subscription: Subscription, start: Start | None, count: int | None, output: str, quiet: bool) -> None:
    told = 0
    left = count

    def tell_gaps() -> None:
        nonlocal told
        for gap in subscription.gaps[told:]:
            told += 1
            if not quiet and not (start == "start" and gap.expected == 0):
                click.echo(f"{subscription.topic}: offset {gap.expected} is not there; starting at {gap.actual}", err=True)

    if output == "table":
        terminal.write(TABLE_HEAD.encode())
    tell_gaps()
    async for batch in subscription.batches() if count is None else _singly(subscription):
        tell_gaps()
        terminal.write(printed(batch, len(batch), output))
        if left is not None:
            left -= 1
            if left == 0:
                break


async def _singly(subscription: Subscription) -> AsyncIterator[MessageBatch]:
    """Runs of one: what is not printed must not count as given out."""
    async for message in subscription:
        yield _run_of([message])


def _run_of(messages: Sequence[Message]) -> MessageBatch:
    first = messages[0]
    offsets = [message.offset for message in messages if message.offset is not None]
    return MessageBatch(
        first.topic, first.partition, offsets, [message.value for message in messages], [message.key for message in messages]
    )


# Fetching.


async def _fetch(server: Server, topic: str, start: Start, count: int, group: str | None, partition: int, output: str) -> int:
    client = await server.connect()
    try:
        if output == "table":
            terminal.write(TABLE_HEAD.encode())
        elements: list[object] = []
        async for batch in _pieces(client, topic, start, count, group, partition):
            if output == "json":
                elements += [fields(batch, index) for index in range(len(batch))]
            else:
                terminal.write(printed(batch, len(batch), output))
        if output == "json":
            terminal.write(f"{compact(elements)}\n".encode())
    finally:
        client.abandon()
    return 0


async def _pieces(client: Client, topic: str, start: Start, count: int, group: str | None, partition: int) -> AsyncIterator[MessageBatch]:
    """One reply holds only so much; ask on until there is enough or no more."""
    place, left = start, count
    while left and (messages := await client.fetch(topic, place, partition=partition, group=group, records_max=left)):
        yield _run_of(messages)
        left -= len(messages)
        if (last := messages[-1].offset) is not None:
            place = last + 1
        for message in messages:
            if message.settler is not None:
                await message.ack()  # there are no offsets here: what is next is what was not acknowledged
