"""Closed loop: each connection sends a request, waits for its reply, then sends the next.

One epoll loop in this process serves all connections. Requests are encoded before the clock starts, and of a reply only the first bytes
are decoded, to learn its size and whether it is an error. `Exchanged.own_cpu_seconds` shows the cost of this process.
"""

from __future__ import annotations

import gc
import select
import socket
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from headrace.bench.children import BenchFailed
from headrace.bench.load import READ_BYTES, STALL_SECONDS


@dataclass(frozen=True, slots=True)
class Framing:
    """Size of a reply, found in its first bytes."""

    head_bytes: int
    reply_bytes: Callable[[bytes], int]
    """Return the size of the whole reply. Raises `BenchFailed` for an error."""


def fixed(size_bytes: int) -> Framing:
    """Return the framing of replies of one size that are not checked."""
    return Framing(1, lambda _head: size_bytes)


class ReplyFrames:
    """Finds the end of each reply of one connection."""

    __slots__ = ("_framing", "_head", "_left", "reply_bytes")

    def __init__(self, framing: Framing) -> None:
        self.reply_bytes = 0
        """Size of the last reply."""
        self._framing = framing
        self._head = b""
        self._left = 0
        """Bytes of the reply that have not arrived, once its head is known."""

    def feed(self, received: bytes | bytearray, size: int) -> bool:
        """Take the first `size` bytes of the buffer. Return whether they complete the reply."""
        missing = self._framing.head_bytes - len(self._head)
        if missing > 0:
            before = len(self._head)
            self._head += received[: min(missing, size)]
            if size < missing:
                return False
            self.reply_bytes = self._framing.reply_bytes(self._head)
            self._left = self.reply_bytes - before
        self._left -= size
        if self._left > 0:
            return False
        if self._left < 0:
            raise BenchFailed(f"received {-self._left} bytes more than one reply")
        self._head = b""
        return True


@dataclass(slots=True)
class Exchanged:
    """Replies of one measurement."""

    seconds: float = 0.0
    latencies: array[float] = field(default_factory=lambda: array("d"))
    """Seconds, in the order of the replies."""
    uncounted: int = 0
    """Replies that arrived after the end. Their CPU time is in the sums below."""
    own_cpu_seconds: float = 0.0
    """CPU time of the load generator."""
    peer_cpu_seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def requests(self) -> int:
        return len(self.latencies) + self.uncounted


class Requester:
    """One connection with at most one request under way."""

    __slots__ = ("_frames", "_requests", "request_bytes", "sent_at", "sock")

    def __init__(self, sock: socket.socket, requests: Iterator[bytes], framing: Framing) -> None:
        self.sock, self._requests, self._frames = sock, requests, ReplyFrames(framing)
        self.sent_at = 0.0
        self.request_bytes = 0
        """Size of the last request."""

    @property
    def reply_bytes(self) -> int:
        """Size of the last reply."""
        return self._frames.reply_bytes

    def send_next(self) -> bool:
        """Send the next request. Return False if there is none."""
        request = next(self._requests, None)
        if request is None:
            return False
        self.request_bytes = len(request)
        self.sent_at = time.perf_counter()
        self.sock.sendall(request)
        return True

    def receive(self, buffer: bytearray) -> bool:
        """Receive once. Return whether the reply is complete."""
        size = self.sock.recv_into(buffer)
        if size == 0:
            raise BenchFailed("the peer closed the connection")
        return self._frames.feed(buffer, size)


def exchange(requesters: Sequence[Requester], seconds: float, peer_cpu: Callable[[], float]) -> Exchanged:
    """Send requests on all connections for `seconds`, or until one of them has no more requests.

    Replies that arrive later are received but not counted. At least as many replies are counted as there are connections: where a reply
    takes longer than `seconds`, the first one alone would stand for all. With 0 seconds, each connection sends one request.
    """
    poll, buffer, by_fd = select.epoll(), bytearray(READ_BYTES), {requester.sock.fileno(): requester for requester in requesters}
    for requester in requesters:
        requester.sock.settimeout(None)
        poll.register(requester.sock, select.EPOLLIN)
    result, clock = Exchanged(), time.perf_counter
    latencies, replies_min = result.latencies, len(requesters) if seconds else 0
    with measured_cpu(result, peer_cpu), closing(poll):
        began = clock()
        end = began + seconds
        waiting = sum(requester.send_next() for requester in requesters)
        while waiting:
            events = poll.poll(STALL_SECONDS)
            if not events:
                raise BenchFailed(f"no reply for {STALL_SECONDS:.0f} s ({len(latencies)} requests done)")
            for fd, _ in events:
                requester = by_fd[fd]
                if not requester.receive(buffer):
                    continue
                now = clock()
                if not result.seconds:
                    latencies.append(now - requester.sent_at)
                    if (now < end or len(latencies) < replies_min) and requester.send_next():
                        continue
                    result.seconds = now - began
                else:
                    result.uncounted += 1
                waiting -= 1
    return result


@contextmanager
def measured_cpu(result: Exchanged, peer_cpu: Callable[[], float]) -> Iterator[None]:
    """Add the CPU time of both sides to the result. The garbage collector is off."""
    gc.collect()
    gc.disable()
    own, peer = time.process_time(), peer_cpu()
    try:
        yield
        result.own_cpu_seconds = time.process_time() - own
        result.peer_cpu_seconds = peer_cpu() - peer
    finally:
        gc.enable()
