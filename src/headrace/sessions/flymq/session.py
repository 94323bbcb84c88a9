"""Session of one FlyMQ connection.

Requests take effect in the order in which they were sent, and replies leave in the same order. A PRODUCE is staged in the call that
receives it and answered when the record is as durable as its topic requires. Many may be in flight, up to a window of bytes; above it the
peer is not read. The requests of a transaction work the same way. Every other request waits for the records before it, so a client reads
its own writes. Such requests run one after the other in the session's only task. Later requests wait in the inbox, and the socket is not
read. A peer that does not read its replies gets no further ones.

The dialect is the listener's until a request shows that the client is one of the original. From that request on it is the original's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

from headrace.broker import Broker, Principal
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, InvalidRequest, UnknownTopic, WireError
from headrace.limits import (
    FLYMQ_INFLATIONS_MAX,
    FLYMQ_LOGIN_INFLATED_BYTES_MAX,
    FLYMQ_LOOP_INFLATED_BYTES_MAX,
    IN_FLIGHT_BYTES_MAX,
    OUTPUT_HIGH_WATER_BYTES,
)
from headrace.sessions.contract import WatchedLink
from headrace.sessions.flymq.access import ACCESS_REQUESTS, FlyMqAccess
from headrace.sessions.flymq.cluster import Node
from headrace.sessions.flymq.errors import error_reply, not_understood
from headrace.sessions.flymq.handlers import Handlers
from headrace.sessions.flymq.staging import failed, stage
from headrace.sessions.flymq.transactions import Owed
from headrace.sessions.slots import Slots
from headrace.sessions.turns import Turns
from headrace.wire.flymq import Dialect, RequestDecoder, encode_failure, encode_reply, opcode_of, speaks_sdk
from headrace.wire.flymq.advanced_messages import TxnBegin, TxnCommit, TxnProduceBatch
from headrace.wire.flymq.framing import inflate
from headrace.wire.flymq.messages import (
    Broken,
    Failure,
    Fetch,
    Malformed,
    Packed,
    ProduceBatch,
    Reply,
    Request,
    RequestEvent,
    UnknownOpcode,
)


class _Pause(Enum):
    """The decoder stopped because it has decompressed enough. It continues when the earlier requests are done."""

    UNPACKING = "unpacking"


Step: TypeAlias = RequestEvent | _Pause

_STEPS_A_TURN: Final = 64
"""Requests served in one turn of the loop."""
_INFLATIONS: Final = Slots(FLYMQ_INFLATIONS_MAX)
_IN_TRANSACTION: Final = (TxnProduceBatch, TxnBegin, TxnCommit)
"""Requests that are staged like PRODUCE."""


@dataclass(frozen=True, slots=True)
class FlyMqSettings:
    """Settings of a listener for its FlyMQ connections."""

    dialect: Dialect = Dialect.SPEC
    node: Node = Node()
    in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX


_DEFAULTS = FlyMqSettings()


class FlyMqSession:
    """State of one connection."""

    def __init__(
        self,
        link: WatchedLink,
        broker: Broker,
        who: Principal,
        settings: FlyMqSettings = _DEFAULTS,
        access: FlyMqAccess | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Without `access` there are no users and no logins."""
        self._turns = Turns() if turns is None else turns
        self._link = link
        self._broker = broker
        self._who = who
        self._handlers = Handlers(broker, who, settings.node, self._is_over, link.peer)
        self._access = access
        self._dialect = settings.dialect
        self._decoder = RequestDecoder(self._inflated_bytes_max)
        self._inbox: deque[Step] = deque()
        self._task: asyncio.Task[None] | None = None
        self._staged: deque[Owed] = deque()
        """Requests that are not answered yet, in order."""
        self._in_flight_bytes, self._in_flight_bytes_max = 0, settings.in_flight_bytes_max
        self._paused_for_inbox = self._paused_for_window = False
        self._is_answering = False
        self._settled: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._ending: tuple[str, bool] | None = None
        self._is_lost = False

    @property
    def _inflated_bytes_max(self) -> int:
        needs_login = self._access is not None and self._access.needs_login
        return FLYMQ_LOGIN_INFLATED_BYTES_MAX if needs_login else FLYMQ_LOOP_INFLATED_BYTES_MAX

    # Calls from the connection.

    def receive(self, data: bytes) -> None:
        if self._ending is None:
            self._accept(self._decoder.feed(data))

    def drained(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def closing(self) -> None:
        self._end("drained", error=False)

    def lost(self) -> None:
        self._is_lost = True
        self._handlers.abandon()
        self._inbox.clear()
        if self._task is not None:
            self._task.cancel()

    @property
    def held_bytes(self) -> int:
        return self._decoder.held_bytes

    def _is_over(self) -> bool:
        """Return whether the broker drains or the peer has left. A connection that is not read does not notice that the peer has left."""
        return self._ending is not None or self._link.has_peer_left

    # Order.

    def _accept(self, events: list[RequestEvent]) -> None:
        for index, event in enumerate(events):
            if self._task is None and index < _STEPS_A_TURN and self._stage(event):
                continue
            self._later(event)
        if self._decoder.more:
            self._later(_Pause.UNPACKING)

    def _later(self, step: Step) -> None:
        self._inbox.append(step)
        if not self._paused_for_inbox:
            self._paused_for_inbox = True
            self._link.pause_reading()
        if self._task is None:
            self._start()

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work())
        self._task.add_done_callback(self._worked)

    async def _work(self) -> None:
        turns = 0
        while self._inbox:
            step = self._inbox.popleft()
            turns += 1
            if turns % _STEPS_A_TURN == 0:
                # Many requests complete at once. Thousands of them in one turn would delay the other connections.
                await asyncio.sleep(0)
            if isinstance(step, Packed):
                self._inbox.appendleft(await self._unpack(step))
                continue
            if isinstance(step, ProduceBatch):
                if not self._publish(step):
                    await self._publish_to_new_topic(step)
                continue
            if isinstance(step, _IN_TRANSACTION):
                await self._until_writable()
                if not self._stage(step):
                    assert isinstance(step, TxnProduceBatch)
                    self._owe(await self._handlers.transactions.produce_to_new_topic(step, self._dialect))
                continue
            await self._until_settled()
            await self._until_writable()
            if step is _Pause.UNPACKING:
                events: list[RequestEvent] = self._decoder.feed(b"")
                more = [_Pause.UNPACKING] if self._decoder.more else []
                self._inbox.extendleft(reversed([*events, *more]))
            else:
                await self._serve(step)

    async def _unpack(self, packed: Packed) -> RequestEvent:
        """Decompress on a thread. This peer is not read meanwhile."""
        if self._access is not None and self._access.needs_login:
            return Malformed(packed.opcode, f"compressed payload exceeds {FLYMQ_LOGIN_INFLATED_BYTES_MAX} bytes before login")
        try:
            async with _INFLATIONS:
                plain = await asyncio.to_thread(inflate, packed.payload)
        except WireError as error:
            return Malformed(packed.opcode, str(error))
        return self._decoder.unpacked(packed.opcode, plain)

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            # A bug. Close, because the peer would wait for a reply that never comes.
            self._inbox.clear()
            self._link.close("internal error: the request could not be completed")
            raise error
        if self._inbox:
            # A request arrived between the end of the task and this call.
            self._start()
            return
        if self._paused_for_inbox:
            self._paused_for_inbox = False
            self._link.resume_reading()
        self._close_when_done()

    def _end(self, reason: str, *, error: bool = True) -> None:
        """Accept nothing new, and close when everything is done."""
        if self._ending is None:
            self._ending = (reason, error)
        self._close_when_done()

    def _close_when_done(self) -> None:
        if self._ending is None or self._is_lost or self._task is not None or self._staged:
            return
        reason, error = self._ending
        self._link.close(reason, error=error)

    async def _until_settled(self) -> None:
        if self._staged:
            self._settled = asyncio.get_running_loop().create_future()
            await self._settled

    async def _until_writable(self) -> None:
        while self._link.unsent_bytes > OUTPUT_HIGH_WATER_BYTES:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    # Records.

    def _stage(self, event: RequestEvent) -> bool:
        """Handle requests that need no waiting. Return False for any other."""
        if isinstance(event, ProduceBatch):
            return self._publish(event)
        if not isinstance(event, _IN_TRANSACTION) or self._link.unsent_bytes > OUTPUT_HIGH_WATER_BYTES:
            return False
        staged = self._handlers.transactions.stage(event, self._dialect)
        if staged is None:
            return False
        self._owe(staged)
        return True

    def _publish(self, batch: ProduceBatch) -> bool:
        """Stage the batch. Return False if the topic does not exist yet or its schema check takes longer."""
        try:
            self._owe(stage(self._broker, self._who, batch))
        except (UnknownTopic, SchemaCheckPending):
            return False
        return True

    async def _publish_to_new_topic(self, batch: ProduceBatch) -> None:
        try:
            await self._broker.prepare(self._who, batch.topic, batch.values)
        except BrokerError as error:
            self._owe(failed(batch, error))
            return
        if not self._publish(batch):
            # The topic was deleted again in between.
            self._owe(failed(batch, UnknownTopic(batch.topic)))

    def _owe(self, staged: Owed) -> None:
        """Queue the reply, and stop reading a peer that publishes faster than the disk writes."""
        self._staged.append(staged)
        self._in_flight_bytes += staged.weight_bytes
        if self._in_flight_bytes > self._in_flight_bytes_max and not self._paused_for_window:
            self._paused_for_window = True
            self._link.pause_reading()
        for future in staged.futures():
            future.add_done_callback(self._published)
        if staged.is_resolved:
            self._answer_soon()

    def _answer_soon(self) -> None:
        """Schedule one send for all replies of this turn: a flush completes many at a time, and each send costs a system call."""
        if not self._is_answering:
            self._is_answering = True
            asyncio.get_running_loop().call_soon(self._answer_resolved)

    def _published(self, future: asyncio.Future[Any]) -> None:
        # Retrieved here too, because the reply of a lost connection is never built.
        error = future.exception()
        if error is None or isinstance(error, BrokerError):
            self._answer_soon()
            return
        self._link.close("internal error: the record could not be stored")
        raise error

    def _answer_resolved(self) -> None:
        """Send the replies that are complete, in order."""
        self._is_answering = False
        frames: list[bytes] = []
        while self._staged and self._staged[0].is_resolved:
            staged = self._staged.popleft()
            self._in_flight_bytes -= staged.weight_bytes
            if not self._is_lost:
                frames.append(staged.reply(self._dialect))
        if self._is_lost:
            return
        if frames:
            self._link.send(b"".join(frames))
        if self._paused_for_window and self._in_flight_bytes <= self._in_flight_bytes_max // 2:
            self._paused_for_window = False
            self._link.resume_reading()
        if not self._staged:
            if self._settled is not None and not self._settled.done():
                self._settled.set_result(None)
            self._close_when_done()

    # Other requests.

    async def _serve(self, event: RequestEvent) -> None:
        match event:
            case Packed():
                raise AssertionError("unpacked before it is served")
            case Broken():
                self._decoder_broke(event)
            case Malformed() | UnknownOpcode():
                self._link.send(encode_failure(not_understood(event), self._dialect))
            case _:
                if speaks_sdk(event):
                    self._dialect = Dialect.SDK
                if isinstance(event, Fetch) and not event.pattern:
                    await self._fetch(event)
                else:
                    self._link.send(await self._reply(event))

    async def _fetch(self, request: Fetch) -> None:
        while True:
            await self._until_writable()
            async with self._turns.fetching(self._link) as may_fetch:
                if may_fetch:
                    self._link.send(await self._reply(request))
                    return

    async def _reply(self, request: Request) -> bytes:
        try:
            return encode_reply(opcode_of(request), await self._answer(request), self._dialect)
        except BrokerError as error:
            return encode_failure(error_reply(error), self._dialect)

    async def _answer(self, request: Request) -> Reply:
        if not isinstance(request, ACCESS_REQUESTS):
            return await self._handlers.answer(request)
        if self._access is None:
            raise InvalidRequest("user management is not available on this broker")
        reply = await self._access.answer(request)
        if self._access.who != self._who:
            self._who = self._handlers.who = self._access.who
            self._decoder.inflated_bytes_max = self._inflated_bytes_max
            self._handlers.abandon()
            if self._access.speaks_sdk:
                self._dialect = Dialect.SDK
        return reply

    def _decoder_broke(self, event: Broken) -> None:
        if event.answer is not None:
            self._link.send(encode_failure(Failure(event.answer), self._dialect))
        self._inbox.clear()
        self._end(f"bad frame: {event.reason}")
