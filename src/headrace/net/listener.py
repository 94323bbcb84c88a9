"""A TCP listener: several doors on one address, one limit for all its connections, and an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.net.accepting import Acceptor, listening_socket
from headrace.net.connection import Connection, NetLimits, written
from headrace.net.counters import NetCounters
from headrace.net.door import Door
from headrace.net.tls import Tls

__all__ = ["Listener", "NetLimits"]


class Listener:
    """Accepts connections from `open` to `drain` or `close`."""

    def __init__(self, doors: Sequence[Door], limits: NetLimits, counters: NetCounters, tls: Tls | None) -> None:
        assert doors, "a listener needs a door"
        self.doors, self.limits, self.counters, self.tls = tuple(doors), limits, counters, tls
        self._acceptor: Acceptor
        self._bound: tuple[str, int]
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._look_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        doors: Sequence[Door],
        limits: NetLimits = NetLimits(),
        counters: NetCounters | None = None,
        tls: Tls | None = None,
    ) -> Listener:
        """Bind and accept. Port 0 takes a free one: see `address`. Raises `OSError` when the address cannot be had."""
        listener = cls(doors, limits, NetCounters() if counters is None else counters, tls)
        listening = listening_socket(host, port)
        listener._bound = listening.getsockname()[:2]
        listener._acceptor = Acceptor(listening, lambda: Connection(listener), listener.counters, limits.connections_max)
        listener._acceptor.start()
        listener._look_again()
        return listener

    @property
    def host(self) -> str:
        return self._bound[0]

    @property
    def port(self) -> int:
        return self._bound[1]

    @property
    def address(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        return written(self._bound)

    async def drain(self, deadline_seconds: float) -> int:
        """Accept nobody, let every session finish what it has, and close. Returns how many had to be cut off at the deadline."""
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
        """Accept nobody and cut every connection off. Idempotent."""
        self._acceptor.close()
        if self._look_timer is not None:
            self._look_timer.cancel()
        for connection in list(self._connections):
            connection.abort("listener closed")

    def _look_again(self) -> None:
        if self.limits.frame_check_seconds:
            loop = asyncio.get_running_loop()
            self._look_timer = loop.call_later(self.limits.frame_check_seconds, self._look_at_frames)

    def _look_at_frames(self) -> None:
        # One timer for all connections: a timer for each would be moved with every piece of every frame.
        for connection in list(self._connections):
            connection.look_at_frame(self.limits.frame_check_seconds)
        self._look_again()

    # What a connection tells us.

    def made(self) -> None:
        self._acceptor.pending -= 1

    def entered(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._empty.clear()

    def left(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()
