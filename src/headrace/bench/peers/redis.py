"""Redis Streams with an append-only file, driven over raw sockets: XADD pipelined, XRANGE page by page.

`appendfsync everysec` acknowledges before the record is on disk and may lose about one second of records. `always` syncs before it replies,
so it is comparable with a durable acknowledgement.
"""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.bench.children import Address, BenchFailed, PeerMissing, child, wait_until
from headrace.bench.load import MARK, Chunk, LoadConnection, Tick, chunk_records, connected, run

KEY = b"bench"
PAGE = 5_000
"""Records of one XRANGE."""
_ID = re.compile(rb"\$\d+\r\n(\d+-\d+)\r\n")


def server_binary() -> str:
    found = shutil.which("redis-server")
    if found is None:
        raise PeerMissing("redis-server is missing: apt-get install redis-server")
    return found


@contextmanager
def server(directory: Path, appendfsync: str) -> Iterator[Address]:
    """Run a Redis server with an append-only file, without snapshots, otherwise with default settings."""
    binary = server_binary()
    log = directory / "redis.log"
    port = _free_port()
    settings = {"bind": "127.0.0.1", "port": str(port), "dir": str(directory), "appendonly": "yes", "appendfsync": appendfsync, "save": ""}
    arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with child([binary, *arguments], log) as process:
        wait_until(lambda: _responds(port), process, log, "redis-server")
        yield "127.0.0.1", port


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _responds(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _raise_errors(received: bytearray, size: int) -> None:
    """Raise `BenchFailed` for an error: a line that begins with a hyphen and a capital letter."""
    at = 0 if received[0] == ord("-") and received[1:2].isupper() else received.find(b"\r\n-", 0, size)
    if at >= 0:
        line = bytes(received[at : at + 200]).strip().split(b"\r\n")[0]
        raise BenchFailed(f"redis-server: {line.decode('utf-8', 'replace')}")


class ReplyMeter:
    """Counts XADD's replies, one bulk string each, by its `$`: an identifier has only digits and a hyphen."""

    def __init__(self) -> None:
        self.count = 0

    def feed(self, received: bytearray, size: int) -> bytes:
        _raise_errors(received, size)
        self.count += received.count(b"$", 0, size)
        return b""


class PageMeter:
    """Counts records by their mark and requests the next page when one is complete."""

    def __init__(self) -> None:
        self.count = 0
        self._tail = b""

    def feed(self, received: bytearray, size: int) -> bytes:
        _raise_errors(received, size)
        pages = self.count // PAGE
        self.count += received.count(MARK, 0, size)
        self._tail = (self._tail + received[max(0, size - 4096) : size])[-4096:]
        if self.count // PAGE == pages:
            return b""
        last = _ID.findall(self._tail)[-1]
        return page_after(b"(" + last)


def page_after(start: bytes) -> bytes:
    return _command(b"XRANGE", KEY, start, b"+", b"COUNT", str(PAGE).encode())


def publish(address: Address, values: Sequence[bytes], records: int, tick: Tick | None = None) -> float:
    """Return the seconds to add `records` records to a new stream until the last reply."""
    frames = [_command(b"XADD", KEY, b"*", b"v", value) for value in values]
    size = chunk_records(len(frames[0]), 0)
    chunks = [
        Chunk(b"".join(frames[index % len(frames)] for index in range(first, min(first + size, records))), min(size, records - first))
        for first in range(0, records, size)
    ]
    with connected(address) as (sock,):
        return run([LoadConnection(sock, chunks, ReplyMeter(), records)], tick)


def consume(address: Address, records: int, tick: Tick | None = None) -> float:
    """Return the seconds to read the whole stream."""
    with connected(address) as (sock,):
        return run([LoadConnection(sock, [Chunk(page_after(b"-"), 0)], PageMeter(), records)], tick)
