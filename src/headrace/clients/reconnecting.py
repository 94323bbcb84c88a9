"""Base of all clients: reconnect when the connection is lost.

    connect ─► _open ─► … ─► _lost ─► _reconnect ─► _open ─► … ─► close or abandon

Clients reconnect indefinitely. The delays grow until a connection receives a reply. The client of each protocol sends outstanding
requests again in `_open`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown
from headrace.clients.messages import ConnectionState, OnState
from headrace.clients.stream import Stream, open_stream
from headrace.clients.tls import TlsOptions
from headrace.clients.unsupported import BaseClient
from headrace.errors import HeadraceError
from headrace.retry import Backoff


class Outstanding(Protocol):
    """Requests without a reply."""

    async def emptied(self) -> None:
        """Wait until nothing is outstanding or the object is closed."""

    def close(self) -> tuple[int, int]:
        """Fail the remaining requests. Returns the number of records sent without a reply, and of records never sent."""


class ReconnectingClient(BaseClient, ABC):
    """Client that reconnects. Belongs to one event loop."""

    def __init__(self, host: str, port: int, outstanding: Outstanding, *, backoff: Backoff, on_state: OnState) -> None:
        self._host, self._port = host, port
        self._loop = asyncio.get_running_loop()
        self._outstanding = outstanding
        self._backoff, self._on_state = backoff, on_state
        self._attempt = 0
        """Number of attempts since the last reply. The client of the protocol resets it to 0."""
        self._reconnecting: asyncio.Task[None] | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if failure is None:
            await self.close()
        else:
            self.abandon()

    @property
    @abstractmethod
    def is_connected(self) -> bool: ...

    @abstractmethod
    async def _open(self) -> None:
        """Connect and send outstanding requests again. Raises `ConnectFailed` or the error of the login."""

    @abstractmethod
    def _disconnected(self) -> None:
        """Clear the state of the lost connection."""

    @abstractmethod
    def _release(self) -> None:
        """End subscriptions and connection of a closed client, and wake tasks that wait for either."""

    async def _finish(self) -> None:
        """Wait for outstanding replies before closing."""
        await self._outstanding.emptied()

    def _opened(self) -> None:
        self._on_state(ConnectionState.CONNECTED, f"{self._host}:{self._port}")

    def _lost(self, reason: str) -> None:
        self._disconnected()
        self._on_state(ConnectionState.DISCONNECTED, reason)
        if not self._is_closed and (self._reconnecting is None or self._reconnecting.done()):
            self._reconnecting = self._loop.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        """Reconnect with backoff. Only a reply resets the delay, so a server that hangs up on every resend is not overloaded."""
        while not self.is_connected and not self._is_closed:
            attempt, self._attempt = self._attempt, self._attempt + 1
            await asyncio.sleep(self._backoff(attempt))
            try:
                await self._open()
            except HeadraceError:
                continue  # unreachable or login rejected: both may be temporary

    async def flush(self) -> None:
        """Wait until every request sent so far has a reply. Raises `ClientClosed`."""
        await self._outstanding.emptied()
        self._check_open()

    async def close(self, timeout: float = 10.0) -> None:
        """Wait for outstanding requests, then close.

        Raises `OutcomeUnknown` if replies are missing after `timeout`, and `NotSent` if records were never sent.
        """
        if self._is_closed:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._finish()
        except TimeoutError:
            pass
        unknown, unsent = self.abandon()
        if unknown:
            raise OutcomeUnknown(unknown)
        if unsent:
            raise NotSent(unsent)

    def abandon(self) -> tuple[int, int]:
        """Close immediately and fail all futures. Returns the number of records sent without a reply, and of records never sent."""
        if self._is_closed:
            return 0, 0
        self._is_closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        self._release()
        left = self._outstanding.close()
        self._on_state(ConnectionState.CLOSED, "closed by its user")
        return left

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosed("the client is closed")


class StreamClient(ReconnectingClient):
    """Client over one TCP connection with one timer."""

    _stream: Stream | None = None
    """Current connection; None while disconnected."""
    _timer: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    @abstractmethod
    def _receive(self, data: bytes) -> None: ...

    async def _connect(self, seconds: float, tls: TlsOptions | None) -> Stream:
        """Open a stream. Raises `ConnectFailed`."""
        return await open_stream(self._host, self._port, self._receive, self._lost, timeout_seconds=seconds, tls=tls)

    def _schedule(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(seconds, callback)

    def _disconnected(self) -> None:
        self._stream = None
        self._cancel_timer()

    def _release(self) -> None:
        self._cancel_timer()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop_undecodable(self, failure: Exception) -> None:
        assert self._stream is not None, "bytes come from a stream"
        self._stream.drop(f"the server sent undecodable bytes: {failure}")
