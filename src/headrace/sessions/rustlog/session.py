"""One RustLog connection: frames → broker verbs → frames.

Requests take effect in the order they were sent, and replies leave in that order, each in the dialect of its request. A Produce is
staged in the call that receives it and answered when its records are as durable as their topic promises; many may be under way, up
to a window, so that a pipelining client fills the journal's flushes. Every other request waits for the Produces before it:
whoever writes and then reads finds what it has written. Those that need the disk occupy the session's one task.

What cannot be served yet waits in the inbox, and while anything waits there the socket is not read. A peer that does not take
its replies is not served further ones.
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
"""Replies are gathered up to this much before they are handed to the connection."""


@dataclass(slots=True)
class _Staged:
    """A Produce whose reply is owed."""

    dialect: Dialect
    request: Produce
    outcome: asyncio.Future[Published]
    size_bytes: int
    started_ns: int


class RustLogSession:
    """The state of one connection. `commons` is shared by all connections of a broker.

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
        """What a fetch waits for that must not be sent yet."""
        self._unsent: list[bytes] = []
        """Replies of one turn, to be sent in one write."""
        self._unsent_bytes = 0
        self._paused = self._choked = False
        self._heard = False
        """Whether anything has come since the last look for a stall."""
        self._stall_timer: asyncio.TimerHandle | None = None
        self._ending: tuple[str, bool] | None = None
        self._is_lost = False
        context.connections += 1

    # What the connection calls.

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
        """Go on as far as possible, send what came of it, and read on if nothing is left to do."""
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
        """Serve it, or say that it has to wait for what is under way."""
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
                return False  # its reply is not due yet; it will be refused again when it is
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
        """Reply to all Produces that are done with, from the oldest on. The first call finds a whole flush of them."""
        while self._staged and self._staged[0].outcome.done():
            done = self._staged.popleft()
            self._in_flight_bytes -= done.size_bytes
            self._reply(done.dialect, self._produced(done))
        self._serve()

    def _produced(self, done: _Staged) -> Reply:
        try:
            return self._handlers.produced(done.dialect, done.request, done.outcome, done.started_ns)
        except BaseException:
            self._link.close("internal error")  # a defect: better no reply than a wrong one, and the log will tell
            raise

    # The one task.

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

    # A peer that stops in the middle of a frame.

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
        self._end(f"stalled: {self._decoder.held_bytes} bytes of a frame, and then nothing", error=True)
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
        """Whether the peer takes what it is sent. `drained` is called when one that did not does so again."""
        if self._link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES:
            return True
        if not self._choked:
            self._choked = True
            self._context.slow_consumers += 1
        return False

    def _end(self, reason: str, *, error: bool) -> None:
        """Nothing more is taken; what was received before is completed, then the link is closed."""
        if self._ending is None:
            self._ending = (reason, error)
