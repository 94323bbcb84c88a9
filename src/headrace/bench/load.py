"""The load generator: raw sockets, prebuilt frames, and next to no work per record.

A client that encodes, parses and allocates would measure itself, above all on a machine where it shares two cores with the
broker. So everything that is sent is built before the clock starts, and what comes back is only counted: by its bytes, by the
last acknowledgement in a read, or by one marker byte. All lanes of a run are served by one epoll loop in this process, which is
never the broker's.
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

from headrace.bench.faults import BenchFailed

READ_BYTES = 256 * 1024
CHUNK_BYTES = 256 * 1024
"""What one send hands to the kernel: large enough that the loop's own cost per record vanishes."""
STALL_SECONDS = 60.0
"""No progress for so long means that the peer has stopped answering."""
TICK_SECONDS = 0.25
MARK = b"\0"
"""Stands once in each value and nowhere else in what a peer sends, where records are counted by it."""

Tick = Callable[[int], None]
"""Told now and then how many records are done."""


class Meter(Protocol):
    """Counts what a connection has received. One per connection."""

    @property
    def count(self) -> int:
        """Records acknowledged or delivered so far."""

    def feed(self, received: bytearray, size: int) -> bytes:
        """Look at the first `size` bytes of the buffer; what it returns is sent back (a pull protocol asks for more)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Frames that are sent in one go."""

    frames: bytes
    records: int


class LoadConnection:
    """One connection of a run: what it has to send, and its meter."""

    __slots__ = ("_chunks", "_position", "meter", "records", "sent", "sock", "window")

    def __init__(self, sock: socket.socket, chunks: Sequence[Chunk], meter: Meter, records: int, *, window: int = 0) -> None:
        self.sock, self.meter, self.records = sock, meter, records
        self.window = window
        """Records that may be unacknowledged; 0 leaves it to TCP."""
        self.sent = 0
        self._chunks = deque(chunks)
        self._position = 0
        """In the first chunk."""

    @property
    def done(self) -> bool:
        return self.meter.count >= self.records

    @property
    def may_send(self) -> bool:
        if not self._chunks:
            return False
        return not self.window or self._position > 0 or self.sent - self.meter.count + self._chunks[0].records <= self.window

    def send(self) -> None:
        """Hand the kernel what it takes and the window allows."""
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
            raise BenchFailed(f"the connection was closed after {self.meter.count} of {self.records} records")
        answer = self.meter.feed(buffer, size)
        if answer:
            # Never waited for: a peer that waits for us to read what it sends would wait for ever.
            self._chunks.append(Chunk(answer, 0))
            self.send()
        elif self.window:
            self.send()


def run(lanes: Sequence[LoadConnection], tick: Tick | None = None) -> float:
    """Serve all lanes until each has its records; the seconds from the first byte to the last acknowledgement or delivery."""
    poll = select.epoll()
    by_fd = {lane.sock.fileno(): lane for lane in lanes}
    buffer = bytearray(READ_BYTES)
    writable = select.EPOLLIN | select.EPOLLOUT
    asked: dict[int, int] = {}
    for fd, lane in by_fd.items():
        lane.sock.setblocking(False)
        asked[fd] = writable if lane.may_send else select.EPOLLIN
        poll.register(fd, asked[fd])
    unfinished = len(lanes)
    began = time.perf_counter()
    due = began + TICK_SECONDS
    try:
        while unfinished:
            events = poll.poll(STALL_SECONDS)
            if not events:
                raise BenchFailed(f"no answer for {STALL_SECONDS:.0f} s ({sum(lane.meter.count for lane in lanes)} records done)")
            for fd, event in events:
                lane = by_fd[fd]
                if event & ~select.EPOLLOUT:
                    lane.receive(buffer)
                if event & select.EPOLLOUT:
                    lane.send()
                if lane.done:
                    poll.unregister(fd)
                    unfinished -= 1
                    continue
                wanted = writable if lane.may_send else select.EPOLLIN
                if wanted != asked[fd]:
                    asked[fd] = wanted
                    poll.modify(fd, wanted)
            if tick is not None and time.perf_counter() >= due:
                due += TICK_SECONDS
                tick(sum(lane.meter.count for lane in lanes))
        return time.perf_counter() - began
    finally:
        poll.close()
        for lane in lanes:
            lane.sock.setblocking(True)


@contextmanager
def connected(address: tuple[str, int], count: int = 1) -> Iterator[list[socket.socket]]:
    """That many TCP connections, closed at the end."""
    socks: list[socket.socket] = []
    try:
        for _ in range(count):
            try:
                sock = socket.create_connection(address, timeout=STALL_SECONDS)
            except OSError as failure:
                raise BenchFailed(f"{address[0]}:{address[1]} refuses the connection: {failure.strerror or failure}") from None
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socks.append(sock)
        yield socks
    finally:
        for sock in socks:
            sock.close()


def sample_values(size_bytes: int, count: int = 1000) -> list[bytes]:
    """Values for a run: printable, not compressible to nothing, each with exactly one `MARK`. The same ones in every run."""
    dice = random.Random(size_bytes)
    alphabet = b"abcdefghijklmnopqrstuvwxyz0123456789"
    return [MARK + bytes(dice.choices(alphabet, k=size_bytes - 1)) for _ in range(count)]


def chunk_records(frame_bytes: int, window: int, batch_records: int = 1) -> int:
    """How many records make a chunk: `CHUNK_BYTES` worth, but at least four chunks to a window so that it never runs dry.

    Always whole batches, and at least one.
    """
    records = max(1, CHUNK_BYTES // frame_bytes)
    if window:
        records = min(records, window // 4)
    return max(1, records // batch_records) * batch_records
