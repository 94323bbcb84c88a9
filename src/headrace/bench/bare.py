"""Servers without a broker, the ceiling of a request: `python -m headrace.bench.bare DIRECTORY [quic]`.

Prints its addresses as JSON and serves until it is stopped. Each connection, or each stream over QUIC, begins with a head:

    0      1               5             9
    +------+---------------+-------------+
    | kind | request_bytes | reply_bytes |     all integers big-endian
    | u8   | u32           | u32         |
    +------+---------------+-------------+

After each `request_bytes` the server sends `reply_bytes`. An *echo* replies at once. A *commit* replies after the bytes are on disk: one
thread writes everything that waits with one pwrite and one fdatasync.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, cast

import uvloop

from headrace.bench.children import Address, child, cpu_seconds, parse_address, wait_until
from headrace.programs import last_line
from headrace.sessions.contract import Link

_HEAD: Final = struct.Struct(">BII")
assert _HEAD.size == 9, "the drawing says 9"
_FILE_BYTES: Final = 256 * 1024 * 1024
"""Size of the preallocated file, which is written in a circle."""


class Kind(IntEnum):
    ECHO = 0
    COMMIT = 1


def head(kind: Kind, request_bytes: int, reply_bytes: int) -> bytes:
    """Return the first bytes of a connection."""
    return _HEAD.pack(kind, request_bytes, reply_bytes)


@dataclass(frozen=True, slots=True)
class Bare:
    """Running bare server."""

    tcp: Address
    quic: Address | None
    pid: int

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)


@contextmanager
def bare_server(directory: Path, *, quic: bool = False) -> Iterator[Bare]:
    """Run the server with its file in `directory`."""
    log = directory / "bare.log"
    command = [sys.executable, "-m", "headrace.bench.bare", str(directory), *(["quic"] if quic else [])]
    with child(command, log) as process:
        wait_until(lambda: log.read_bytes().endswith(b"}\n"), process, log, "the bare server")
        addresses = json.loads(last_line(log))
        yield Bare(parse_address(addresses["tcp"]), parse_address(addresses["quic"]) if quic else None, process.pid)


class GroupCommit(threading.Thread):
    """Writes and syncs staged bytes, then calls back on the event loop."""

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._loop = loop
        self._staged: queue.SimpleQueue[tuple[bytes, Callable[[], None]]] = queue.SimpleQueue()
        self._fd = os.open(directory / "bare.journal", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(self._fd, 0, _FILE_BYTES)

    def stage(self, data: bytes, done: Callable[[], None]) -> None:
        self._staged.put((data, done))

    def run(self) -> None:
        position = 0
        while True:
            staged = [self._staged.get()]
            while not self._staged.empty():
                staged.append(self._staged.get())
            data = b"".join([written for written, _ in staged])
            if position + len(data) > _FILE_BYTES:
                position = 0
            os.pwrite(self._fd, data, position)
            os.fdatasync(self._fd)
            position += len(data)
            self._loop.call_soon_threadsafe(_call_all, [done for _, done in staged])


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


class Exchanges:
    """Counts requests of one connection or stream and sends their replies."""

    def __init__(self, commit: GroupCommit, send: Callable[[bytes], None]) -> None:
        self._commit, self._send = commit, send
        self._held = b""
        self._kind, self._request_bytes, self._reply = Kind.ECHO, 0, b""

    def receive(self, data: bytes) -> None:
        data = self._held + data if self._held else data
        if not self._request_bytes:
            if len(data) < _HEAD.size:
                self._held = data
                return
            kind, self._request_bytes, reply_bytes = _HEAD.unpack_from(data)
            self._kind, self._reply = Kind(kind), bytes(reply_bytes)
            data = data[_HEAD.size :]
        size = self._request_bytes
        while len(data) >= size:
            if self._kind is Kind.ECHO:
                self._send(self._reply)
            else:
                self._commit.stage(data[:size], self._reply_now)
            data = data[size:]
        self._held = data

    def _reply_now(self) -> None:
        self._send(self._reply)


class BareProtocol(asyncio.Protocol):
    """One TCP connection."""

    def __init__(self, commit: GroupCommit) -> None:
        self._commit = commit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._exchanges = Exchanges(self._commit, cast(asyncio.Transport, transport).write)

    def data_received(self, data: bytes) -> None:
        self._exchanges.receive(data)


class BareSession:
    """One QUIC stream."""

    def __init__(self, commit: GroupCommit, link: Link) -> None:
        self._link = link
        self.receive = Exchanges(commit, link.send).receive

    def drained(self) -> None: ...

    def finished(self) -> None:
        self._link.close("finished", error=False)

    def closing(self) -> None:
        self._link.close("draining", error=False)

    def lost(self) -> None: ...


async def serve(directory: Path, *, quic: bool) -> None:
    loop = asyncio.get_running_loop()
    commit = GroupCommit(directory, loop)
    commit.start()
    server = await loop.create_server(lambda: BareProtocol(commit), "127.0.0.1", 0, backlog=1024)
    host, port = server.sockets[0].getsockname()
    addresses = {"tcp": f"{host}:{port}"}
    if quic:
        addresses["quic"] = await _serve_quic(directory, commit)
    print(json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


async def _serve_quic(directory: Path, commit: GroupCommit) -> str:
    import datetime

    from headrace.net.quic.listener import QuicLimits, QuicListener, QuicProtocol
    from headrace.server.quic import self_signed
    from headrace.wire.fujin import ALPN, encode

    tls = self_signed(directory, now=datetime.datetime.now(datetime.UTC))
    protocol = QuicProtocol("bare", ALPN, lambda link: BareSession(commit, link), encode.PING)
    return (await QuicListener.open("127.0.0.1", 0, protocol, tls, QuicLimits())).address


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(sys.argv[1]), quic="quic" in sys.argv[2:]))
