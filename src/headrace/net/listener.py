"""TCP listener: several protocols on one address."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.net.accepting import Acceptor, listening_socket
from headrace.net.connection import Connection, NetLimits, written
from headrace.net.counters import NetCounters
from headrace.net.protocol import ServedProtocol
from headrace.net.tls import Tls

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
        listener._acceptor = Acceptor(listening, lambda: Connection(listener), listener.counters, limits.connections_max)
        listener._acceptor.start()
        listener._schedule_check()
        return listener

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
