"""Accept TCP connections, with a pause while file descriptors or memory are exhausted.

A process without free file descriptors (EMFILE, ENFILE) or memory (ENOBUFS, ENOMEM) cannot accept, but its listening socket stays
readable, so an immediate retry would spin. The acceptor pauses and retries later; peers wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

from headrace.limits import ACCEPT_PAUSE_SECONDS
from headrace.net.counters import NetCounters

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
