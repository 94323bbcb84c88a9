"""TCP listener: several protocols on one address.

Accept TCP connections, with a pause while file descriptors or memory are exhausted.

A process without free file descriptors (EMFILE, ENFILE) or memory (ENOBUFS, ENOMEM) cannot accept, but its listening socket stays
readable, so an immediate retry would spin. The acceptor pauses and retries later; peers wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final, cast

from headrace.limits import ACCEPT_PAUSE_SECONDS
from headrace.net.connection import Connection, NetLimits, written
from headrace.net.counters import NetCounters
from headrace.net.protocol import ServedProtocol
from headrace.net.tls import Tls

_log = logging.getLogger(__name__)
_BACKLOG: Final = 1_024
_ACCEPTS_PER_CALL: Final = 64
"""Connections accepted before the event loop serves other sockets."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a bound and listening socket; `host` is numeric. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4])
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


class Acceptor:
    """Creates a protocol with `factory` for each connection to a listening socket, which it owns from `start` to `close`.

    `connections_max` includes connections that are being opened and is checked before anything is allocated for a connection.
    """

    def __init__(
        self, listening: socket.socket, factory: Callable[[], asyncio.Protocol], counters: NetCounters, connections_max: int
    ) -> None:
        self._socket, self._factory, self._counters, self._connections_max = listening, factory, counters, connections_max
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self.pending = 0
        """Accepted connections that are not yet in the counters."""
        self._resume_timer: asyncio.TimerHandle | None = None
        self._is_exhausted = False
        self._is_closed = False

    def start(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_CALL):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as failure:
                # accept(2) also returns errors of the peer's connection, which must not spin either.
                self._pause(failure)
                return
            if self._is_exhausted:
                self._is_exhausted = False
                _log.info("accepting connections resumed")
            if self._counters.open + self.pending >= self._connections_max:
                self._reject(accepted)
                continue
            accepted.setblocking(False)
            self.pending += 1
            task = self._loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _reject(self, accepted: socket.socket) -> None:
        accepted.close()
        reason = f"too many connections: {self._connections_max} are open"
        self._counters.accepted += 1
        self._counters.count_end(reason, error=True)
        left_out = self._counters.end_lines.left_out("too many connections", self._loop.time())
        if left_out is not None:
            _log.warning("connection refused", extra={"reason": reason} | ({"left_out": left_out} if left_out else {}))

    async def _open(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._factory, accepted)
        except asyncio.CancelledError:
            accepted.close()
            raise
        except OSError as failure:
            self.pending -= 1
            accepted.close()
            _log.debug("connection not opened", extra={"reason": str(failure)})

    def _pause(self, failure: OSError) -> None:
        if failure.errno in _EXHAUSTED:
            self._counters.accept_pauses += 1
            if not self._is_exhausted:
                self._is_exhausted = True
                _log.warning("accepting connections paused", extra={"reason": str(failure), "retry_seconds": ACCEPT_PAUSE_SECONDS})
        self._loop.remove_reader(self._socket.fileno())
        self._resume_timer = self._loop.call_later(ACCEPT_PAUSE_SECONDS, self.start)


__all__ = ["Listener", "NetLimits"]


class Listener:
    """Accepts connections from `open` to `drain` or `close`."""

    def __init__(self, protocols: Sequence[ServedProtocol], limits: NetLimits, counters: NetCounters, tls: Tls | None) -> None:
        assert protocols, "a listener needs a protocol"
        self.protocols, self.limits, self.counters, self.tls = tuple(protocols), limits, counters, tls
        self._acceptor: Acceptor
        self._bound: tuple[str, int]
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._check_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        protocols: Sequence[ServedProtocol],
        limits: NetLimits = NetLimits(),
        counters: NetCounters | None = None,
        tls: Tls | None = None,
    ) -> Listener:
        """Bind and accept. Port 0 selects a free port, which `address` reports. Raises `OSError` if the address is unavailable."""
        listener = cls(protocols, limits, NetCounters() if counters is None else counters, tls)
        listening = listening_socket(host, port)
        listener._bound = listening.getsockname()[:2]
        listener._acceptor = Acceptor(listening, listener._connect, listener.counters, limits.connections_max)
        listener._acceptor.start()
        listener._schedule_check()
        return listener

    def _connect(self) -> asyncio.Protocol:
        return cast(asyncio.Protocol, Connection(self))

    @property
    def host(self) -> str:
        return self._bound[0]

    @property
    def port(self) -> int:
        return self._bound[1]

    @property
    def address(self) -> str:
        """The bound address as `host:port`, with an IPv6 host in brackets."""
        return written(self._bound)

    async def drain(self, deadline_seconds: float) -> int:
        """Stop accepting, let every session finish its requests, and close. Return how many were aborted at the deadline."""
        self._acceptor.close()
        for connection in list(self._connections):
            connection.drain()
        try:
            await asyncio.wait_for(self._empty.wait(), deadline_seconds)
        except TimeoutError:
            pass
        late = len(self._connections)
        self.close()
        return late

    def close(self) -> None:
        """Stop accepting and abort every connection. Idempotent."""
        self._acceptor.close()
        if self._check_timer is not None:
            self._check_timer.cancel()
        for connection in list(self._connections):
            connection.abort("listener closed")

    def _schedule_check(self) -> None:
        if self.limits.frame_check_seconds:
            loop = asyncio.get_running_loop()
            self._check_timer = loop.call_later(self.limits.frame_check_seconds, self._check_frames)

    def _check_frames(self) -> None:
        # One timer for all connections: a timer for each would be moved with every chunk of every frame.
        for connection in list(self._connections):
            connection.check_frame(self.limits.frame_check_seconds)
        self._schedule_check()

    # Called by a connection.

    def made(self) -> None:
        self._acceptor.pending -= 1

    def entered(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._empty.clear()

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()
