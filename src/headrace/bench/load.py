"""Load generator: raw sockets, prebuilt frames and minimal work per record.

A client that encodes, parses and allocates would measure itself. Therefore all frames are built before the clock starts, and replies are
only counted: by their bytes, by the last acknowledgement in a read, or by one marker byte. One epoll loop in this process serves all
connections; the broker is another process.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from headrace.bench.children import BenchFailed

READ_BYTES = 256 * 1024
CHUNK_BYTES = 256 * 1024
"""Bytes of one send: large enough to make the loop's cost per record negligible."""
STALL_SECONDS = 60.0
"""The benchmark fails after this time without progress."""
TICK_SECONDS = 0.25
MARK = b"\0"
"""Occurs once in each value and nowhere else in the frames of a peer that is counted by it."""
SAMPLE_BYTES = 16 * 1024 * 1024
"""Memory of sample values."""
_LETTERS = bytes(b"abcdefghijklmnopqrstuvwxyz0123456789"[byte % 36] for byte in range(256))

Tick = Callable[[int], None]
"""Called periodically with the number of records done."""


class Meter(Protocol):
    """Counts the records that one connection has received."""

    @property
    def count(self) -> int:
        """Records acknowledged or delivered so far."""

    def feed(self, received: bytearray, size: int) -> bytes:
        """Count the first `size` bytes of the buffer and return the bytes to send next (requests of a pull protocol)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Frames sent together."""

    frames: bytes
    records: int


class LoadConnection:
    """One connection with its unsent chunks and its meter."""

    __slots__ = ("_chunks", "_position", "meter", "records", "sent", "sock", "window")

    def __init__(self, sock: socket.socket, chunks: Sequence[Chunk], meter: Meter, records: int, *, window: int = 0) -> None:
        self.sock, self.meter, self.records = sock, meter, records
        self.window = window
        """Maximum unacknowledged records; 0: limited by TCP only."""
        self.sent = 0
        self._chunks = deque(chunks)
        self._position = 0
        """Position in the first chunk."""

    @property
    def done(self) -> bool:
        return self.meter.count >= self.records

    @property
    def may_send(self) -> bool:
        if not self._chunks:
            return False
        return not self.window or self._position > 0 or self.sent - self.meter.count + self._chunks[0].records <= self.window

    def send(self) -> None:
        """Send as much as the socket and the window accept."""
        while self.may_send:
            chunk = self._chunks[0]
            try:
                self._position += self.sock.send(memoryview(chunk.frames)[self._position :])
            except BlockingIOError:
                return
            if self._position < len(chunk.frames):
                return
            self.sent += chunk.records
            self._chunks.popleft()
            self._position = 0

    def receive(self, buffer: bytearray) -> None:
        try:
            size = self.sock.recv_into(buffer)
        except BlockingIOError:
            return
        if size == 0:
            raise BenchFailed(f"the peer closed the connection after {self.meter.count} of {self.records} records")
        request = self.meter.feed(buffer, size)
        if request:
            # Queued, not sent synchronously: both sides would block if the peer waits for us to read.
            self._chunks.append(Chunk(request, 0))
            self.send()
        elif self.window:
            self.send()


def run(connections: Sequence[LoadConnection], tick: Tick | None = None) -> float:
    """Serve all connections until each has its records. Return the seconds from the first byte to the last acknowledgement or delivery."""
    poll = select.epoll()
    by_fd = {connection.sock.fileno(): connection for connection in connections}
    buffer = bytearray(READ_BYTES)
    writable = select.EPOLLIN | select.EPOLLOUT
    registered: dict[int, int] = {}
    for fd, connection in by_fd.items():
        connection.sock.setblocking(False)
        registered[fd] = writable if connection.may_send else select.EPOLLIN
        poll.register(fd, registered[fd])
    unfinished = len(connections)
    began = time.perf_counter()
    due = began + TICK_SECONDS
    try:
        while unfinished:
            events = poll.poll(STALL_SECONDS)
            if not events:
                raise BenchFailed(
                    f"no reply for {STALL_SECONDS:.0f} s ({sum(connection.meter.count for connection in connections)} records done)"
                )
            for fd, event in events:
                connection = by_fd[fd]
                if event & ~select.EPOLLOUT:
                    connection.receive(buffer)
                if event & select.EPOLLOUT:
                    connection.send()
                if connection.done:
                    poll.unregister(fd)
                    unfinished -= 1
                    continue
                wanted = writable if connection.may_send else select.EPOLLIN
                if wanted != registered[fd]:
                    registered[fd] = wanted
                    poll.modify(fd, wanted)
            if tick is not None and time.perf_counter() >= due:
                due += TICK_SECONDS
                tick(sum(connection.meter.count for connection in connections))
        return time.perf_counter() - began
    finally:
        poll.close()
        for connection in connections:
            connection.sock.setblocking(True)


@contextmanager
def connected(address: tuple[str, int], count: int = 1) -> Iterator[list[socket.socket]]:
    """Open `count` TCP connections and close them at the end."""
    socks: list[socket.socket] = []
    try:
        for _ in range(count):
            try:
                sock = socket.create_connection(address, timeout=STALL_SECONDS)
            except OSError as failure:
                raise BenchFailed(f"cannot connect to {address[0]}:{address[1]}: {failure.strerror or failure}") from None
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socks.append(sock)
        yield socks
    finally:
        for sock in socks:
            sock.close()


def sample_values(size_bytes: int, count: int = 1000) -> list[bytes]:
    """Return deterministic pseudo-random values, each with exactly one `MARK`. Large values repeat after `SAMPLE_BYTES`."""
    generator = random.Random(size_bytes)
    distinct = [
        MARK + generator.randbytes(size_bytes - 1).translate(_LETTERS) for _ in range(min(count, max(1, SAMPLE_BYTES // size_bytes)))
    ]
    return [distinct[index % len(distinct)] for index in range(count)]


def chunk_records(frame_bytes: int, window: int, batch_records: int = 1) -> int:
    """Return the records of a chunk: `CHUNK_BYTES`, but at most a quarter of the window, in whole batches, at least one."""
    records = max(1, CHUNK_BYTES // frame_bytes)
    if window:
        records = min(records, window // 4)
    return max(1, records // batch_records) * batch_records
