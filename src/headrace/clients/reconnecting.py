"""What all clients share: a life longer than that of their connections.

    connect ─► _open ─► … ─► _lost ─► _reconnect ─► _open ─► … ─► close or abandon

A lost connection is sought again for ever, with pauses that grow until a connection proves useful. What is outstanding then is the
business of the protocol's client: it says it again in `_open`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from headrace.clients.backoff import Backoff
from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown
from headrace.clients.messages import ConnectionState, OnState
from headrace.clients.stream import Stream, open_stream
from headrace.clients.tls import TlsOptions
from headrace.clients.unsupported import PartialClient
from headrace.errors import HeadraceError


class Outstanding(Protocol):
    """What has been asked and not been answered."""

    async def emptied(self) -> None:
        """Wait until nothing is outstanding, or it was closed."""

    def close(self) -> tuple[int, int]:
        """Fail what is left. Returns how many records were sent without an answer, and how many were never sent."""


class ReconnectingClient(PartialClient, ABC):
    """For one event loop."""

    def __init__(self, host: str, port: int, outstanding: Outstanding, *, backoff: Backoff, on_state: OnState) -> None:
        self._host, self._port = host, port
        self._loop = asyncio.get_running_loop()
        self._outstanding = outstanding
        self._backoff, self._on_state = backoff, on_state
        self._attempt = 0
        """Connections sought since one was last useful: the client sets it to 0 when an answer comes."""
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
        """Connect, and say again what the last connection left open. Raises `ConnectFailed`, or how a login was refused."""

    @abstractmethod
    def _part(self) -> None:
        """The connection is lost: forget what belonged to it."""

    @abstractmethod
    def _release(self) -> None:
        """The client is closed: end its subscriptions, then its connection, and wake whoever waits for either."""

    async def _finish(self) -> None:
        """What is worth waiting for before the client is closed."""
        await self._outstanding.emptied()

    def _opened(self) -> None:
        self._on_state(ConnectionState.CONNECTED, f"{self._host}:{self._port}")

    def _lost(self, reason: str) -> None:
        self._part()
        self._on_state(ConnectionState.DISCONNECTED, reason)
        if not self._is_closed and (self._reconnecting is None or self._reconnecting.done()):
            self._reconnecting = self._loop.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        """Attempts are counted until a connection proves useful, so a server that hangs up on every resend is not pressed."""
        while not self.is_connected and not self._is_closed:
            attempt, self._attempt = self._attempt, self._attempt + 1
            await asyncio.sleep(self._backoff(attempt))
            try:
                await self._open()
            except HeadraceError:
                continue  # not reachable yet, or not willing: both may pass

    async def close(self, timeout: float = 10.0) -> None:
        """Wait for what is outstanding, then close.

        Raises `OutcomeUnknown` if some answers did not come in time, and `NotSent` if records never left.
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
        """Close at once. Returns how many records were sent without an answer, and how many were never sent; their futures fail."""
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
    """A client over one TCP connection, with one timer that looks after it."""

    _stream: Stream | None = None
    """The connection in use; None while there is none."""
    _timer: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    @abstractmethod
    def _receive(self, data: bytes) -> None: ...

    async def _connect(self, seconds: float, tls: TlsOptions | None) -> Stream:
        """Raises `ConnectFailed`."""
        return await open_stream(self._host, self._port, self._receive, self._lost, timeout_seconds=seconds, tls=tls)

    def _look_again(self, seconds: float, look: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(seconds, look)

    def _part(self) -> None:
        self._stream = None
        self._stop_looking()

    def _release(self) -> None:
        self._stop_looking()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _misunderstood(self, failure: Exception) -> None:
        assert self._stream is not None, "bytes come from a stream"
        self._stream.drop(f"the server cannot be understood: {failure}")
