"""Session of one RustLog connection.

Requests take effect in the order in which they were sent. Replies leave in the same order, each in the dialect of its request. A Produce is
staged in the call that receives it and answered when its records are as durable as the topic requires. Many Produces may be in flight, up
to a window, so that a pipelining client fills the flushes of the journal. Every other request waits for the Produces before it, so a client
reads its own writes. Requests that need the disk run in the session's only task.

Requests that cannot be served yet wait in the inbox. While the inbox is not empty, the socket is not read. A peer that does not read its
replies gets no further ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Final

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.publishing.publish import Published
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, UnknownTopic
from headrace.limits import KIB, OUTPUT_HIGH_WATER_BYTES, RUSTLOG_REQUESTS_IN_FLIGHT_MAX
from headrace.sessions.contract import Link
from headrace.sessions.rustlog.context import RustLogContext, RustLogSettings
from headrace.sessions.rustlog.handlers import RustLogHandlers
from headrace.wire.rustlog import Deferred, Dialect, Incoming, Refused, RequestDecoder, decode_in_steps, encode_reply
from headrace.wire.rustlog.messages import Fetch, Produce, Reply

__all__ = ["RustLogContext", "RustLogSession", "RustLogSettings"]

_WRITE_BYTES: Final = 64 * KIB
"""Replies are collected up to this size before they are passed to the connection."""


@dataclass(slots=True)
class _Staged:
    """A Produce that is not answered yet."""

    dialect: Dialect
    request: Produce
    outcome: asyncio.Future[Published]
    size_bytes: int
    started_ns: int


class RustLogSession:
    """State of one connection. `context` is shared by all connections of a broker.

    `has_rights` tells whether `who` has any right. A peer without one may only send small frames.
    """

    def __init__(
        self, link: Link, broker: Broker, who: Principal, context: RustLogContext, has_rights: Callable[[], bool] = lambda: True
    ) -> None:
        self._link = link
        self._context = context
        self._handlers = RustLogHandlers(broker, who, context)
        self._decoder = RequestDecoder(has_rights, defers_large=True)
        self._inbox: deque[Incoming] = deque()
        self._staged: deque[_Staged] = deque()
        self._in_flight_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        """Future of a fetch that waits until the peer reads its replies."""
        self._unsent: list[bytes] = []
        """Replies of this turn, sent in one write."""
        self._unsent_bytes = 0
        self._paused = self._choked = False
        self._heard = False
        """Whether bytes have arrived since the last stall check."""
        self._stall_timer: asyncio.TimerHandle | None = None
        self._ending: tuple[str, bool] | None = None
        self._is_lost = False
        context.connections += 1

    # Calls from the connection.

    def receive(self, data: bytes) -> None:
        if self._ending is None:
            self._inbox.extend(self._decoder.feed(data))
            self._heard = True
            if self._decoder.held_bytes and self._stall_timer is None:
                self._watch_stall()
            self._serve()

    def drained(self) -> None:
        self._choked = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._serve()

    def closing(self) -> None:
        self._end("drained", error=False)
        self._serve()

    def lost(self) -> None:
        self._is_lost = True
        self._context.connections -= 1
        self._inbox.clear()
        self._stop_watching()
        if self._task is not None:
            self._task.cancel()

    @property
    def held_bytes(self) -> int:
        return self._decoder.held_bytes

    # Order.

    def _serve(self) -> None:
        """Serve the inbox as far as possible, send the replies, and pause or resume reading."""
        while self._inbox and self._task is None and self._is_taking_replies() and self._took(self._inbox[0]):
            self._inbox.popleft()
        self._flush()
        if self._is_lost:
            return
        if self._paused is not bool(self._inbox):
            self._paused = not self._paused
            if self._paused:
                self._link.pause_reading()
            else:
                self._link.resume_reading()
        if self._ending is not None and not (self._inbox or self._staged or self._task):
            reason, error = self._ending
            self._link.close(reason, error=error)

    def _took(self, incoming: Incoming) -> bool:
        """Serve the request. Return False if it must wait for requests in flight."""
        if isinstance(incoming, Deferred):
            self._begin(self._decode(incoming))
            return False
        if isinstance(incoming, Refused):
            if self._staged:
                return False
            self._reply(incoming.dialect, incoming.error)
            if incoming.fatal:
                self._end(f"bad frame: {incoming.error.message}", error=True)
            return True
        if isinstance(incoming.request, Produce) and incoming.request.records:
            return self._took_produce(incoming.dialect, incoming.request)
        if self._staged:
            return False
        if isinstance(incoming.request, Fetch):
            self._begin(self._fetch(incoming.dialect, incoming.request))
            return True
        answer = self._handlers.answer(incoming.dialect, incoming.request)
        if isinstance(answer, Awaitable):
            self._begin(self._work(incoming.dialect, answer))
        else:
            self._reply(incoming.dialect, answer)
        return True

    def _took_produce(self, dialect: Dialect, request: Produce) -> bool:
        window_bytes = self._context.settings.in_flight_bytes_max
        if self._in_flight_bytes >= window_bytes or len(self._staged) >= RUSTLOG_REQUESTS_IN_FLIGHT_MAX:
            return False
        started_ns = self._context.ticks_ns()
        try:
            outcome = self._handlers.stage(request)
        except BrokerError as error:
            if self._staged:
                return False  # its reply is not due yet; it fails again when it is
            is_new = isinstance(error, UnknownTopic) and self._context.settings.auto_create
            if is_new or isinstance(error, SchemaCheckPending):
                answer = self._handlers.answer(dialect, request)
                assert isinstance(answer, Awaitable)
                self._begin(self._work(dialect, answer))
            else:
                self._reply(dialect, self._handlers.not_produced(dialect, request, error))
            return True
        size_bytes = sum(map(len, request.records))
        self._in_flight_bytes += size_bytes
        self._staged.append(_Staged(dialect, request, outcome, size_bytes, started_ns))
        outcome.add_done_callback(self._settled)
        return True

    def _settled(self, outcome: asyncio.Future[Published]) -> None:
        """Reply to all completed Produces, oldest first. One flush completes many of them."""
        while self._staged and self._staged[0].outcome.done():
            done = self._staged.popleft()
            self._in_flight_bytes -= done.size_bytes
            self._reply(done.dialect, self._produced(done))
        self._serve()

    def _produced(self, done: _Staged) -> Reply:
        try:
            return self._handlers.produced(done.dialect, done.request, done.outcome, done.started_ns)
        except BaseException:
            self._link.close("internal error")  # a bug: no reply is better than a wrong one
            raise

    # The task.

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._worked)

    async def _decode(self, deferred: Deferred) -> None:
        """Replace the head of the inbox by its request, one step in each turn of the event loop."""
        steps = decode_in_steps(deferred)
        while True:
            try:
                next(steps)
            except StopIteration as decoded:
                self._inbox[0] = decoded.value
                return
            await self._context.turns.wait()

    async def _work(self, dialect: Dialect, answer: Awaitable[Reply]) -> None:
        self._reply(dialect, await answer)

    async def _fetch(self, dialect: Dialect, request: Fetch) -> None:
        while True:
            while not self._is_taking_replies():
                self._writable = asyncio.get_running_loop().create_future()
                await self._writable
            async with self._context.turns.fetching(self._link) as may_fetch:
                if may_fetch:
                    self._reply(dialect, await self._handlers.fetch(dialect, request))
                    self._flush()
                    return

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            return
        defect = task.exception()
        if defect is not None:
            self._link.close("internal error")
            task.get_loop().call_exception_handler({"message": "a RustLog request failed", "exception": defect})
            return
        self._serve()

    # Stalls.

    def _watch_stall(self) -> None:
        self._heard = False
        if self._context.settings.stall_seconds:
            loop = asyncio.get_running_loop()
            self._stall_timer = loop.call_later(self._context.settings.stall_seconds, self._look_for_stall)

    def _look_for_stall(self) -> None:
        self._stall_timer = None
        if self._ending is not None or not self._decoder.held_bytes:
            return
        if self._heard or self._paused:
            self._watch_stall()
            return
        self._end(f"stalled: {self._decoder.held_bytes} bytes of an incomplete frame", error=True)
        self._serve()

    def _stop_watching(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # Output.

    def _reply(self, dialect: Dialect, reply: Reply) -> None:
        frame = encode_reply(dialect, reply)
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        if self._unsent_bytes > _WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._unsent:
            frames, self._unsent, self._unsent_bytes = self._unsent, [], 0
            self._link.send(frames[0] if len(frames) == 1 else b"".join(frames))

    def _is_taking_replies(self) -> bool:
        """Return whether the peer reads its replies. If not, `drained` is called when it does again."""
        if self._link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES:
            return True
        if not self._choked:
            self._choked = True
            self._context.slow_consumers += 1
        return False

    def _end(self, reason: str, *, error: bool) -> None:
        """Accept no new requests, complete the received ones, then close the link."""
        if self._ending is None:
            self._ending = (reason, error)
