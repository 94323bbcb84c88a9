"""Base of all clients: reconnect when the connection is lost.

    connect ─► _open ─► … ─► _lost ─► _reconnect ─► _open ─► … ─► close or abandon
                              │
                              └─► refused too often ─► `RefusedRepeatedly`

A client reconnects indefinitely while the server cannot be reached. The delays grow until the server serves a request, or a connection
lasts. A server that ends one connection after the other while requests wait refuses them without being able to say so: Figg has no error
frame, and a port may belong to another protocol. After `refused_connections_max` such connections the client gives up.

With several addresses every lost or failed connection moves on to the next one. The delay grows after each round over all of them.

The client of each protocol sends outstanding requests again in `_open`.

Of several brokers on one log, one is the coordinator. A broker that is not refuses some requests with `not_coordinator`; a client with
several addresses then moves on and repeats the request there (`_at_coordinator`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, cast

from headrace.clients.arguments import check_count, check_text
from headrace.clients.errors import ClientClosed, ConnectFailed, NotSent, NotSupported, OutcomeUnknown, RefusedRepeatedly
from headrace.clients.messages import ConnectionState
from headrace.clients.options import ClientOptions
from headrace.clients.publishing import Publisher
from headrace.clients.stream import Stream, open_stream
from headrace.clients.window import Window
from headrace.errors import HeadraceError

STEADY_SECONDS: Final = 5.0
"""A connection that lasts this long was not refused, even if no request was due on it."""
COORDINATOR_SECONDS: Final = 30.0
"""Time in which a client with several addresses looks for the coordinator. Another broker takes over within 10 s."""
_FINISH_SECONDS: Final = 5.0
"""Longest wait for outstanding replies before the client moves on to another broker."""
_Options = TypeVar("_Options", bound=ClientOptions)
_Answer = TypeVar("_Answer")


class ReconnectingClient(Publisher, ABC, Generic[_Options]):
    """Client that reconnects. Belongs to one event loop."""

    default_port: ClassVar[int]
    default_options: ClassVar[ClientOptions]
    logins: ClassVar[frozenset[str]] = frozenset()
    """The kinds of login that the protocol has: user, api_key."""

    def __init__(self, host: str, port: int, options: _Options, window: Window[Any]) -> None:
        self._host, self._port, self._options, self._window = host, port, options, window
        self._others: tuple[tuple[str, int], ...] = ()
        """Further addresses, in the order in which they are tried next."""
        self._publish_seconds = options.publish_seconds
        self._loop = asyncio.get_running_loop()
        self._on_state = options.on_state
        self._failures = 0
        """Connections lost or not opened since the last progress."""
        self._refused_connections = 0
        """Those of them that the server ended while a request waited."""
        self._opened_at = 0.0
        self._reconnecting: asyncio.Task[None] | None = None
        self._is_closed = False
        self._failure: RefusedRepeatedly | None = None
        """Why the client gave up."""
        self._has_lost_records = False
        """Whether records were left at that moment."""

    @classmethod
    async def connect(
        cls,
        host: str = "127.0.0.1",
        port: int | None = None,
        options: _Options | None = None,
        others: Sequence[tuple[str, int]] = (),
    ) -> Self:
        """Connect to `host`; `others` are addresses for later connections.

        Raises `ConnectFailed` if the first connection fails, and `NotSupported` for a login that the protocol lacks.
        """
        check_text("host", host)
        check_count("port", port)
        chosen = cast(_Options, cls.default_options) if options is None else options
        check_login(cls, chosen)
        client = cls(host, cls.default_port if port is None else port, chosen)  # type: ignore[call-arg]  # a subclass makes its own window
        client._others = tuple(others)
        await client._open()
        return client

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
        """Connect and send outstanding requests again. Raises `ConnectFailed`."""

    @abstractmethod
    def _disconnected(self) -> None:
        """Clear the state of the lost connection."""

    @abstractmethod
    def _release(self) -> None:
        """End subscriptions and connection of a closed client, and wake tasks that wait for either."""

    @property
    def _is_waiting(self) -> bool:
        """Whether a request waits for the server."""
        return self._window.has_requests

    async def _finish(self) -> None:
        """Wait for outstanding replies before closing."""
        await self._window.emptied()

    def _opened(self) -> None:
        self._opened_at = self._loop.time()
        self._on_state(ConnectionState.CONNECTED, f"{self._host}:{self._port}")

    def _progressed(self) -> None:
        """Note that the server has served a request: the next reconnect is immediate."""
        self._failures = self._refused_connections = 0

    def _lost(self, reason: str) -> None:
        if self._loop.time() - self._opened_at >= STEADY_SECONDS:
            self._progressed()
        is_waiting = self._is_waiting
        self._disconnected()
        self._on_state(ConnectionState.DISCONNECTED, reason)
        if is_waiting and self._count_refused(reason):
            return
        self._move_on()
        if not self._is_closed and (self._reconnecting is None or self._reconnecting.done()):
            self._reconnecting = self._loop.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        """Reconnect with backoff. Only progress resets the delay, so a server that hangs up on every resend is not overloaded."""
        while not self.is_connected and not self._is_closed:
            failures, self._failures = self._failures, self._failures + 1
            await asyncio.sleep(self._options.backoff(failures // (1 + len(self._others))))
            try:
                await self._open()
            except ConnectFailed as failure:
                is_refused = failure.was_accepted and (self._is_waiting or failure.kind == "not_authorized")
                if is_refused and self._count_refused(failure.reason):
                    return
                self._move_on()

    def _move_on(self) -> None:
        """Make the next connection go to the next address."""
        if self._others:
            current = (self._host, self._port)
            (self._host, self._port), *rest = self._others
            self._others = (*rest, current)

    async def _at_coordinator(self, request: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Make a request. If the broker refuses it because another one is the coordinator, repeat it there: at the address that the broker
        names, if the client knows it, else at the next one."""
        deadline, attempts = self._loop.time() + COORDINATOR_SECONDS, 0
        while True:
            place = self._host, self._port
            try:
                return await request()
            except HeadraceError as error:
                if not self._others or not is_not_coordinator(error) or self._loop.time() >= deadline:
                    raise
                named = getattr(error, "address", "")
            attempts += 1
            if attempts > len(self._others):
                await asyncio.sleep(self._options.backoff(attempts - len(self._others)))  # an election may be under way
            try:
                async with asyncio.timeout(_FINISH_SECONDS):
                    await self._window.emptied()
            except TimeoutError:
                pass
            if place == (self._host, self._port):  # otherwise another request has moved the client
                self._others = tuple(sorted(self._others, key=lambda other: f"{other[0]}:{other[1]}" != named))
                self._progressed()
                self._drop("the broker is not the coordinator")

    @abstractmethod
    def _drop(self, reason: str) -> None:
        """End the connection as if it were lost, if there is one."""

    def _count_refused(self, reason: str) -> bool:
        """Count a connection that the server ended while a request waited. Returns whether the client gives up."""
        self._refused_connections += 1
        count_max = self._options.refused_connections_max * (1 + len(self._others))
        if self._is_closed or not 0 < count_max <= self._refused_connections:
            return self._is_closed
        self._failure = RefusedRepeatedly(host=self._host, port=self._port, count=self._refused_connections, reason=reason)
        self._has_lost_records = any(self._end(str(self._failure)))
        return True

    def _end(self, reason: str) -> tuple[int, int]:
        self._is_closed = True
        self._release()
        left = self._window.close(self._failure)
        self._on_state(ConnectionState.CLOSED, reason)
        return left

    async def flush(self) -> None:
        """Wait until every request sent so far has a reply. Raises `ClientClosed`."""
        await self._window.emptied()
        self._check_open()

    async def close(self, timeout: float = 10.0) -> None:
        """Wait for outstanding requests, then close.

        Raises `OutcomeUnknown` if replies are missing after `timeout`, and `NotSent` if records were never sent.
        """
        if self._is_closed:
            # An error with a traceback has been raised: the user knows it.
            if self._failure is not None and self._has_lost_records and self._failure.__traceback__ is None:
                raise self._failure
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
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        return self._end("closed by its user")

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._failure or ClientClosed("the client is closed")


def is_not_coordinator(error: HeadraceError) -> bool:
    """Return whether a broker refused a request because another one is the coordinator."""
    return "not_coordinator" in (getattr(error, "code", ""), getattr(error, "kind", ""))


def check_login(kind: type[ReconnectingClient[Any]], options: ClientOptions) -> None:
    """Raise `NotSupported` for a login that the protocol cannot carry."""
    for login, is_wanted, what, others in (
        ("user", options.user, "users with passwords", "flymq:// does"),
        ("api_key", options.api_key, "API keys", "flymq:// and blipmq:// do"),
    ):
        if is_wanted and login not in kind.logins:
            raise NotSupported(kind.protocol, what, f"{others}; in every protocol a TLS certificate identifies the client")


class StreamClient(ReconnectingClient[_Options]):
    """Client over one TCP connection with one timer."""

    _stream: Stream | None = None
    """Current connection; None while disconnected."""
    _timer: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    @abstractmethod
    def _receive(self, data: bytes) -> None: ...

    async def _connect(self) -> Stream:
        """Open a stream. Raises `ConnectFailed`."""
        options = self._options
        return await open_stream(
            self._host, self._port, self._receive, self._lost, timeout_seconds=options.connect_seconds, tls=options.tls
        )

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

    def _drop(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.drop(reason)

    def _drop_undecodable(self, failure: Exception) -> None:
        assert self._stream is not None, "bytes come from a stream"
        self._stream.drop(f"the server sent undecodable bytes: {failure}")
