"""`headrace pub` and `headrace sub`: records from and to a terminal, a file or a pipe.

Data goes to stdout, talk to stderr. An interrupt ends both in order: `pub` still waits for the acknowledgements of what it has sent.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from typing import BinaryIO, Final, Literal

import click

from headrace.clients.errors import ConnectFailed
from headrace.clients.figg import FiggClient, FiggOptions
from headrace.clients.messages import ConnectionState, MessageRun
from headrace.server.units import parse_duration

DEFAULT_SERVER: Final = "127.0.0.1:8119"
INTERRUPTED: Final = 130
_READ_BYTES: Final = 256 * 1024
_OUTPUTS: Final = ("raw", "json", "jsonl", "hex")

Start = Literal["start", "end"] | int


def _parse_server(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\s]+)):(\d{1,5})", text.strip())
    if match is None or not 0 < int(match[3]) < 65_536:
        raise click.BadParameter(f"{text!r} is not HOST:PORT")
    return match[1] or match[2], int(match[3])


def _parse_start(context: click.Context, parameter: click.Parameter, text: str) -> Start:
    """Figg can be asked for an offset, not for a time; a time is recognised, so that the refusal can say why."""
    if text in ("start", "end"):
        return "start" if text == "start" else "end"
    if re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
        return int(text)
    if _is_time(text):
        raise click.BadParameter(f"{text!r} is a time, and the figg door cannot look up times; give start, end or an offset")
    raise click.BadParameter(f"{text!r} is none of start, end, an offset or a time")


def _is_time(text: str) -> bool:
    for parse in (datetime.fromisoformat, parse_duration):
        try:
            parse(text)
        except ValueError:
            continue
        return True
    return False


_server = click.option(
    "--server",
    metavar="HOST:PORT",
    default=DEFAULT_SERVER,
    show_default=True,
    envvar="HEADRACE_SERVER",
    show_envvar=True,
    callback=_parse_server,
    help="The broker to talk to.",
)
_door = click.option("--door", type=click.Choice(["figg"]), default="figg", show_default=True, help="The protocol to speak.")
_quiet = click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")


@click.command()
@click.argument("topic")
@click.argument("messages", metavar="[MESSAGE]...", nargs=-1)
@click.option("-f", "--file", type=click.File("rb"), help="Publish the lines of this file; - is standard input, as without any message.")
@click.option("--whole", is_flag=True, help="Publish the file or standard input as one record, not line by line.")
@click.option("--count", type=click.IntRange(min=1), default=1, show_default=True, help="Publish each MESSAGE so many times.")
@_server
@_door
@_quiet
def pub(
    topic: str, messages: Sequence[str], file: BinaryIO | None, whole: bool, count: int, server: tuple[str, int], door: str, quiet: bool
) -> int:
    """Publish records to a topic.

    Each MESSAGE is one record. Without any, each line of standard input is one.
    """
    if messages and (file is not None or whole):
        raise click.UsageError("give either messages or --file, not both")
    if count > 1 and not messages:
        raise click.UsageError("--count repeats messages given as arguments; there is none")
    source: Callable[[], AsyncIterator[list[bytes]]]
    if messages:
        values = [message.encode("utf-8", "surrogateescape") for message in messages]
        source = lambda: _repeated(values, count)  # noqa: E731
    else:
        stream = sys.stdin.buffer if file is None else file
        source = lambda: _read(stream, whole)  # noqa: E731
    return _run(_publish(topic, source, server, quiet))


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "start",
    metavar="start|end|OFFSET|TIME",
    default="end",
    show_default=True,
    callback=_parse_start,
    help="Where to begin. The end: only what is yet to come.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), help="Stop after so many records.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(_OUTPUTS),
    default="raw",
    show_default=True,
    help="raw: the value and a line end. json, jsonl: an object a line. hex: the value in hexadecimal.",
)
@_server
@_door
@_quiet
def sub(topic: str, start: Start, count: int | None, output: str, server: tuple[str, int], door: str, quiet: bool) -> int:
    """Read records of a topic, then follow it."""
    return _run(_follow(topic, start, count, output, server, quiet))


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

    return asyncio.run(interruptible())


async def _connect(server: tuple[str, int], quiet: bool) -> FiggClient:
    def tell(state: ConnectionState, reason: str) -> None:
        if state is ConnectionState.DISCONNECTED and not quiet:
            click.echo(f"{reason}; connecting again", err=True)

    try:
        return await FiggClient.connect(*server, FiggOptions(on_state=tell))
    except ConnectFailed as failure:
        hint = "; is the broker running there? (headrace serve; --server names another)" if "refused" in failure.reason else ""
        raise click.ClickException(f"{failure}{hint}") from None


# Publishing.


async def _publish(topic: str, source: Callable[[], AsyncIterator[list[bytes]]], server: tuple[str, int], quiet: bool) -> int:
    client = await _connect(server, quiet)
    began = time.perf_counter()
    count = 0
    try:
        async with client:
            try:
                async for values in source():
                    await client.send_many(topic, values)
                    count += len(values)
                await client.flush()
            except asyncio.CancelledError:
                await asyncio.shield(client.close())  # raises if an acknowledgement is missing
                _report(topic, count, began, quiet)
                raise
    finally:
        client.abandon()
    _report(topic, count, began, quiet)
    return 0


def _report(topic: str, count: int, began: float, quiet: bool) -> None:
    if not quiet:
        seconds = time.perf_counter() - began
        took = f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
        click.echo(f"{topic}: {count} {'record' if count == 1 else 'records'} acknowledged in {took}", err=True)


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


# Reading.


async def _follow(topic: str, start: Start, count: int | None, output: str, server: tuple[str, int], quiet: bool) -> int:
    reader_left = asyncio.ensure_future(_reader_left(sys.stdout.fileno()))
    printing = asyncio.ensure_future(_print(topic, start, count, output, server, quiet))
    try:
        await asyncio.wait([printing, reader_left], return_when=asyncio.FIRST_COMPLETED)
        if printing.done():
            printing.result()
            return 0
        raise BrokenPipeError
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


async def _print(topic: str, start: Start, count: int | None, output: str, server: tuple[str, int], quiet: bool) -> None:
    client = await _connect(server, quiet)
    left = count
    try:
        subscription = await client.subscribe(topic, start)
        first = await subscription.started
        if isinstance(start, int) and first != start and not quiet:
            click.echo(f"{topic}: offset {start} is not there; starting at {first}", err=True)
        async for run in subscription.runs():
            taken = len(run) if left is None else min(left, len(run))
            sys.stdout.buffer.write(_printed(run, taken, output))
            sys.stdout.buffer.flush()
            if left is not None:
                left -= taken
                if left == 0:
                    break
    finally:
        client.abandon()


def _printed(run: MessageRun, count: int, output: str) -> bytes:
    if output == "raw":
        return b"\n".join(run.values[:count]) + b"\n"
    if output == "hex":
        return "".join(f"{value.hex()}\n" for value in run.values[:count]).encode()
    return "".join(f"{_as_json(run, index)}\n" for index in range(count)).encode()


def _as_json(run: MessageRun, index: int) -> str:
    """The value as JSON if it is JSON, as text if it is text, else in base64 and marked so."""
    fields: dict[str, object] = {"topic": run.topic, "partition": run.partition, "offset": run.offsets[index], "key": None}
    value = run.values[index]
    try:
        fields["value"] = _as_plain(value.decode())
    except UnicodeDecodeError:
        fields |= {"value": base64.b64encode(value).decode(), "encoding": "base64"}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def _as_plain(text: str) -> object:
    """What the text says as JSON; itself if that is nothing, or nothing that could be printed again."""
    try:
        plain = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(plain, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a surrogate pair, a nesting without end
        return text
    return plain


def _refuse_constant(name: str) -> None:
    """NaN and Infinity are no JSON, though Python's parser takes them."""
    raise ValueError(name)
