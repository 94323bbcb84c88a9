"""Input of `headrace pub`: lines, messages with keys, JSON objects, and their pace."""

from __future__ import annotations

import asyncio
import base64
import binascii
import difflib
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import wait
from typing import BinaryIO, Final, NamedTuple, TypeAlias

import click

from headrace.cli.printed import compact
from headrace.records import Headers

_READ_BYTES: Final = 256 * 1024
_CHECK_SECONDS: Final = 0.5
"""Interval at which a waiting reader checks whether the command has ended."""
_SLICE_SECONDS: Final = 0.05
"""Records of this time are sent at once under --rate."""
_FIELDS: Final = ("value", "encoding", "key", "key_encoding", "headers")
_IGNORED: Final = ("topic", "partition", "offset", "timestamp")
"""Fields that `headrace fetch` prints and that the broker chooses."""


class InputRecord(NamedTuple):
    """A record to publish. A value of None is a tombstone."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()


class InvalidLine(click.ClickException):
    """A line is not a record. The lines before it are."""


Parse: TypeAlias = Callable[[bytes], InputRecord]
"""Returns the record of a line. Raises `ValueError`."""


def plain(key: bytes | None) -> Parse:
    """Return a parser that takes the whole line as the value."""
    return lambda line: InputRecord(line, key)


def keyed(separator: bytes) -> Parse:
    """Return a parser that takes the text before the first separator as the key."""

    def parse(line: bytes) -> InputRecord:
        key, found, value = line.partition(separator)
        return InputRecord(value, key) if found else InputRecord(line)

    return parse


def jsonl_record(line: bytes) -> InputRecord:
    """Parse an object with value, key and headers. Raises `ValueError`."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as failure:
        raise ValueError(f"not JSON: {failure}") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    for name in found:
        if name not in _FIELDS and name not in _IGNORED:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            raise ValueError(f"unknown field {name!r}; {f'did you mean {near[0]}?' if near else 'expected value, key, headers'}")
    if "value" not in found:
        raise ValueError("the field value is missing; null is a tombstone")
    value, key = found["value"], found.get("key")
    content = value if value is None or isinstance(value, str) else compact(value)
    if key is not None and not isinstance(key, str):
        raise ValueError("key: expected a string")
    return InputRecord(
        _content(content, found.get("encoding"), "value"), _content(key, found.get("key_encoding"), "key"), _headers(found.get("headers"))
    )


def _content(text: str | None, encoding: object, field: str) -> bytes | None:
    if text is None:
        return None
    if encoding == "base64":
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as failure:
            raise ValueError(f"{field}: not base64: {failure}") from None
    if encoding is not None:
        raise ValueError(f"{field}: unknown encoding {encoding!r}; expected base64")
    return text.encode("utf-8", "surrogatepass")


def _headers(found: object) -> Headers:
    """Parse an object of names and values, or a list of [name, value]. A value is text or {"base64": …}."""
    pairs = list(found.items()) if isinstance(found, dict) else [] if found is None else found
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise ValueError("headers: expected an object, or a list of [name, value]")
    headers: list[tuple[str, bytes]] = []
    for name, value in pairs:
        text, encoding = (value.get("base64"), "base64") if isinstance(value, dict) else (value, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(f"headers: the value of {name!r} is not a string")
        headers.append((name, _content(text, encoding, f"header {name}") or b""))
    return tuple(headers)


async def repeated(records: list[InputRecord], count: int) -> AsyncIterator[list[InputRecord]]:
    for _ in range(count):
        yield records


async def paced(
    source: AsyncIterator[list[InputRecord]], rate: float, *, clock: Callable[[], float], sleep: Callable[[float], Awaitable[object]]
) -> AsyncIterator[list[InputRecord]]:
    """Yield at most `rate` records per second. A pause of the source is not made up for."""
    size = max(1, int(rate * _SLICE_SECONDS))
    free_at = clock()
    async for records in source:
        for begin in range(0, len(records), size):
            part = records[begin : begin + size]
            if (wait := free_at - clock()) > 0:
                await sleep(wait)
            yield part
            free_at = max(free_at, clock()) + len(part) / rate


async def input_lines(stream: BinaryIO, whole: bool, parse: Parse) -> AsyncIterator[list[InputRecord]]:
    """Yield records of a file or pipe. A thread reads: reading a terminal or pipe may block indefinitely."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[list[bytes] | OSError | None] = asyncio.Queue(maxsize=4)

    def put(chunk: list[bytes] | OSError | None) -> None:
        work = chunks.put(chunk)
        try:
            future = asyncio.run_coroutine_threadsafe(work, loop)
            while not future.done():
                wait([future], _CHECK_SECONDS)
                if loop.is_closed() and not future.done():
                    raise RuntimeError("the loop is closed")
        finally:
            work.close()  # it never began if the loop is closed

    def read() -> None:
        try:
            for lines in [[stream.read()]] if whole else _lines(stream):
                put(lines)
            put(None)
        except OSError as failure:
            put(failure)
        except (RuntimeError, ValueError):
            return  # the loop or the file is closed: the command has ended

    threading.Thread(target=read, daemon=True, name="input").start()
    count = 0
    while (chunk := await chunks.get()) is not None:
        if isinstance(chunk, OSError):
            raise chunk
        records, fault = _parsed(chunk, parse)
        if records:
            yield records
        count += len(records)
        if fault is not None:
            raise InvalidLine(f"line {count + 1}: {fault}" + (f"; {count} published before" if count else ""))


def _parsed(lines: list[bytes], parse: Parse) -> tuple[list[InputRecord], ValueError | None]:
    """Return the records before the first invalid line, and its error."""
    records: list[InputRecord] = []
    for line in lines:
        try:
            records.append(parse(line))
        except ValueError as failure:
            return records, failure
    return records, None


def _lines(stream: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the available lines without line ends. The last line may lack one."""
    rest = b""
    while chunk := os.read(stream.fileno(), _READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]
