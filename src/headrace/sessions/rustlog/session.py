"""Session of one RustLog connection.

Replies leave in the order of the requests, each in the dialect of its request. A Produce is staged in the call that receives it and
answered when its records are as durable as the topic requires. Many Produces may be in flight, so that a pipelining client fills the
flushes of the journal. Every other request waits for the Produces before it, so a client reads its own writes. A peer that does not read
its replies gets no further ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.publishing.published import Outcome
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, NotCoordinator, UnknownTopic, WireError
from headrace.limits import OUTPUT_HIGH_WATER_BYTES, RUSTLOG_REQUESTS_IN_FLIGHT_MAX
from headrace.sessions.contract import Link, Login
from headrace.sessions.rustlog.context import RustLogContext, RustLogSettings
from headrace.sessions.rustlog.handlers import RustLogHandlers
from headrace.sessions.session import BaseSession
from headrace.wire.rustlog import (
    Deferred,
    Dialect,
    Incoming,
    Received,
    Refused,
    RequestDecoder,
    decode_in_steps,
    encode_reply,
    encode_request,
    frame,
)
from headrace.wire.rustlog.messages import Fetch, Produce, Reply

__all__ = ["RustLogContext", "RustLogSession", "RustLogSettings"]


class RustLogSession(BaseSession[Incoming]):
    """State of one connection. `context` is shared by all connections of a broker.

    `has_rights` tells whether `who` has any right. A peer without one may only send small frames.
    """

    def __init__(
        self, link: Link, broker: Broker, who: Principal, context: RustLogContext, has_rights: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(link, in_flight_bytes_max=context.settings.in_flight_bytes_max, owed_max=RUSTLOG_REQUESTS_IN_FLIGHT_MAX)
        self._context = context
        self._handlers = RustLogHandlers(broker, who, context)
        self._decoder = RequestDecoder(has_rights, defers_large=True)
        self._choked = False
        self._heard = False
        """Whether bytes have arrived since the last stall check."""
        self._stall_timer: asyncio.TimerHandle | None = None
        context.connections += 1

    # Calls from the connection.

    def receive(self, data: bytes) -> None:
        super().receive(data)
        self._heard = True
        if self._decoder.held_bytes and self._stall_timer is None and self._ending is None:
            self._watch_stall()

    def drained(self) -> None:
        self._choked = False
        super().drained()

    def lost(self) -> None:
        super().lost()
        self._context.connections -= 1
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    # Requests.

    def _serves(self, message: Incoming) -> bool:
        if not self._is_writable():
            return False
        if isinstance(message, Deferred):
            self._start(self._decode(message))
            return True
        if isinstance(message, Refused):
            if self._owed:
                return False
            self._reply(encode_reply(message.dialect, message.error))
            if message.fatal:
                self._end(f"bad frame: {message.error.message}")
            return True
        dialect, request = message.dialect, message.request
        if isinstance(request, Produce) and request.records:
            return self._produces(message, request)
        if self._owed:
            return False
        if isinstance(request, Fetch):
            reply = self._handlers.fetch_now(dialect, request)
            if reply is not None:
                self._work_left -= 1
                self._reply(encode_reply(dialect, reply))
                return True
            self._start(self._fetch(message, request))
            return True
        try:
            answer = self._handlers.answer(dialect, request)
        except NotCoordinator as error:
            self._start(self._pass_on(message, partial(self._refuse, message, error)))
            return True
        if isinstance(answer, Awaitable):
            self._start(self._answer(message, answer))
        else:
            self._reply(encode_reply(dialect, answer))
        return True

    def _produces(self, received: Received, request: Produce) -> bool:
        dialect, started_ns = received.dialect, self._context.ticks_ns()
        try:
            outcome = self._handlers.stage(request)
        except BrokerError as error:
            if isinstance(error, UnknownTopic | SchemaCheckPending):
                if self._owed:
                    return False
                answer = self._handlers.answer(dialect, request)
                assert isinstance(answer, Awaitable)
                self._start(self._answer(received, answer))
            else:
                self._refuse(received, error)
            return True
        size_bytes = sum(map(len, request.records))
        self._owe(outcome, size_bytes, partial(self._produced, dialect, request, outcome, started_ns))
        return True

    def _produced(self, dialect: Dialect, request: Produce, outcome: Outcome, started_ns: int) -> bytes:
        return encode_reply(dialect, self._handlers.produced(dialect, request, outcome, started_ns))

    async def _decode(self, deferred: Deferred) -> None:
        """Decode the request, one step in each turn of the event loop. The peer is not read meanwhile."""
        steps = decode_in_steps(deferred)
        self._link.pause_reading()
        try:
            while True:
                try:
                    next(steps)
                except StopIteration as decoded:
                    self._inbox.appendleft(decoded.value)
                    return
                await self._context.turns.wait()
        finally:
            self._link.resume_reading()

    async def _answer(self, received: Received, answer: Awaitable[Reply]) -> None:
        try:
            self._reply(encode_reply(received.dialect, await answer))
        except NotCoordinator as error:
            await self._pass_on(received, partial(self._refuse, received, error))

    async def _fetch(self, received: Received, request: Fetch) -> None:
        slots = self._context.turns.fetches
        await self._take_fetch_slot(slots)
        try:
            self._reply(encode_reply(received.dialect, await self._handlers.fetch(received.dialect, request)))
            return
        except NotCoordinator as error:
            failure = error
        finally:
            slots.release()
        await self._pass_on(received, partial(self._refuse, received, failure))

    def _refuse(self, received: Received, error: BrokerError) -> None:
        self._reply(encode_reply(received.dialect, self._handlers.refused(received.dialect, received.request, error)))

    # Handover to the coordinator.

    def _login(self) -> Login:
        return Login()

    def _encode(self, message: Incoming) -> bytes:
        match message:
            case Received(dialect, request):
                return encode_request(dialect, request)
            case Deferred(payload=payload):
                return frame(payload)
            case Refused():
                raise WireError("the frame was not understood, so it cannot be encoded")

    def _is_writable(self) -> bool:
        if self._link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES:
            return True
        if not self._choked:
            self._choked = True
            self._context.slow_consumers += 1
        return False

    # Stalls.

    def _watch_stall(self) -> None:
        self._heard = False
        if self._context.settings.stall_seconds:
            self._stall_timer = self._loop.call_later(self._context.settings.stall_seconds, self._look_for_stall)

    def _look_for_stall(self) -> None:
        self._stall_timer = None
        if self._ending is not None or not self._decoder.held_bytes:
            return
        if self._heard or self._is_paused:
            self._watch_stall()
        else:
            self._end(f"stalled: {self._decoder.held_bytes} bytes of an incomplete frame")
