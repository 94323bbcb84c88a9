"""Base of the sessions: serves the requests of one connection in order, and sends their replies in order.

    bytes ─ decoder ─▶ _serves ─▶ reply, owed reply, or work that has to wait ─▶ link
                  └──▶ inbox ──┘

A request is served in the call that receives it, if nothing is before it. Otherwise it waits in the inbox, and the socket is not read. The
inbox is served again whenever a reply leaves, the peer reads, or work ends. So it holds no more than what the socket had delivered.

The reply of a publish is *owed* until the record is as durable as its topic requires. Many replies may be owed, up to a window of bytes and
of replies. Replies leave in the order of the requests, all replies of one turn of the loop in one write.

Work that has to wait (for the disk, a thread, the peer) runs in the session's only task. It begins at once, and becomes a task only where
it waits: a request that is answered from memory costs neither a task nor a turn of the loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

from headrace.broker import Landing
from headrace.compiled import mypyc_attr
from headrace.errors import BrokerError, WireError
from headrace.limits import KIB, OUTPUT_HIGH_WATER_BYTES
from headrace.sessions.contract import Handed, Handover, Link, Login
from headrace.sessions.request_ids import shown

RECORD_OVERHEAD_BYTES: Final = 64
"""Cost of a record in flight in addition to its key and value, so that many empty records fill the window too."""

Message = TypeVar("Message")
Decoded = TypeVar("Decoded", covariant=True)
Work: TypeAlias = Coroutine[Any, Any, None]
Encode: TypeAlias = Callable[[], bytes]
Outcome: TypeAlias = asyncio.Future[Any] | Landing
"""Result that a reply waits for."""
_Owed: TypeAlias = tuple[Outcome | None, int, Encode]
"""A reply that waits for a publish, its size in flight, and the reply to send when it is done. None: it waits for earlier replies only."""

WORK_A_TURN: Final = 64
"""Requests with work that are served in one turn of the loop. Thousands of them would delay the other connections."""
REPLY_BYTES_A_TURN: Final = 512 * KIB
"""Bytes of large replies of one connection after which its further requests wait for the next turn."""
_WRITE_BYTES: Final = 64 * KIB
"""Replies are collected up to this size before they are passed to the connection."""


class Decoder(Protocol[Decoded]):
    """The decoder of a protocol, as its session uses it."""

    @property
    def held_bytes(self) -> int: ...

    @property
    def held(self) -> bytes: ...

    def feed(self, chunk: bytes, /) -> Iterable[Decoded]: ...


class _Begun(Coroutine[Any, Any, None]):
    """A coroutine that has run up to its first wait, for a task to continue."""

    def __init__(self, work: Work, waits_for: object) -> None:
        self._work, self._first = work, [waits_for]

    def send(self, value: Any) -> Any:
        return self._first.pop() if self._first else self._work.send(value)

    def throw(self, *error: Any) -> Any:
        self._first.clear()
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise NotImplementedError("only a task continues it")


def begin(work: Work, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None] | None:
    """Run the work up to its first wait, and return a task that continues it. None: the work is done."""
    try:
        waits_for = work.send(None)
    except StopIteration:
        return None
    return loop.create_task(_Begun(work, waits_for))


@mypyc_attr(allow_interpreted_subclasses=True)
class BaseSession(ABC, Generic[Message]):
    """State of one connection. Implements `FramedSession`."""

    _decoder: Decoder[Message]
    _has_ordered_replies: ClassVar[bool] = True
    """Otherwise replies leave in the order of completion."""
    _bad_input: ClassVar[str] = "bad frame: {}"
    """Reason to close after bytes that cannot be decoded."""
    handover: Handover | None = None
    """Passes the connection on to the coordinator. The server sets it, if another broker may be the coordinator."""

    def __init__(self, link: Link, *, in_flight_bytes_max: int, owed_max: int = 1 << 31) -> None:
        """`in_flight_bytes_max` and `owed_max` bound the owed replies: above either the socket is not read."""
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Message] = deque()
        self._is_busy = False
        """Work is under way."""
        self._requests: Sequence[int | bytes] = ()
        """Ids of the request with work under way."""
        self._task: asyncio.Task[None] | None = None
        self._work_left = WORK_A_TURN
        self._next_turn: asyncio.Handle | None = None
        self._owed: deque[_Owed] = deque()
        self._in_flight_bytes, self._in_flight_bytes_max, self._owed_max = 0, in_flight_bytes_max, owed_max
        self._ready: list[bytes] = []
        """Replies of this turn."""
        self._ready_bytes = 0
        self._is_paused = False
        self._writable: asyncio.Future[None] | None = None
        self._ending: tuple[str, bool] | None = None
        """Reason to close with (and whether it is an error) when everything is done."""
        self._is_closed = self._is_lost = False

    # Calls from the connection.

    def receive(self, data: bytes) -> None:
        if self._ending is None:
            self._take(self._decoder.feed(data))

    def drained(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._advance()

    def closing(self) -> None:
        self._end("drained", error=False)

    def lost(self) -> None:
        self._is_lost = True
        self._inbox.clear()
        if self._task is not None:
            self._task.cancel()

    @property
    def held_bytes(self) -> int:
        return self._decoder.held_bytes

    @property
    def owes_reply(self) -> bool:
        return bool(self._owed)

    @property
    def is_idle(self) -> bool:
        """Whether every request received so far is answered."""
        return not (self._inbox or self._is_busy or self._owed)

    # Order.

    @abstractmethod
    def _serves(self, message: Message) -> bool:
        """Serve the request, by `_reply`, `_owe` or `_start`. Return False if it must wait for the owed replies or for the peer to read:
        it is then offered again."""

    def _take(self, messages: Iterable[Message]) -> None:
        """Serve the messages as they are decoded."""
        self._work_left = WORK_A_TURN
        inbox = self._inbox
        try:
            for message in messages:
                if inbox or self._must_wait() or not self._serves(message):
                    inbox.append(message)
                if self._ending is not None:
                    break
        except WireError as error:
            # The frame boundaries are lost, so no reply is possible. Earlier requests are completed.
            self._end(self._bad_input.format(error))
        if inbox and not self._must_wait():
            self._advance()
        else:
            self._update()

    def _advance(self) -> None:
        """Serve the inbox as far as possible."""
        self._work_left = WORK_A_TURN
        inbox = self._inbox
        while inbox and not self._must_wait():
            message = inbox.popleft()
            if not self._serves(message):
                inbox.appendleft(message)
                break
        self._update()

    def _must_wait(self) -> bool:
        is_full = self._in_flight_bytes >= self._in_flight_bytes_max or len(self._owed) >= self._owed_max
        return self._is_busy or is_full or self._work_left <= 0 or self._is_closed

    def _update(self) -> None:
        """Send the replies, pause or resume reading, and close if everything is done."""
        if self._is_lost or self._is_closed:
            return
        if self._ready:
            self._flush()
        if self._inbox and self._work_left <= 0 and self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._take_next_turn)
        if not self._is_paused:
            if self._inbox or self._in_flight_bytes > self._in_flight_bytes_max or len(self._owed) > self._owed_max:
                self._is_paused = True
                self._link.pause_reading()
        elif not self._inbox and self._in_flight_bytes * 2 <= self._in_flight_bytes_max and len(self._owed) * 2 <= self._owed_max:
            self._is_paused = False
            self._link.resume_reading()
        if self._ending is not None and self.is_idle:
            self._close(*self._ending)

    def _take_next_turn(self) -> None:
        self._next_turn = None
        self._advance()

    # Work.

    def _start(self, work: Work, requests: Sequence[int | bytes] = ()) -> None:
        """Begin the rest of a request. Later requests wait for its end. `requests` are its ids, if the protocol has them."""
        self._work_left -= 1
        self._is_busy, self._requests = True, requests
        task = begin(self._run(work), self._loop)
        if task is not None:
            self._task = task

    async def _run(self, work: Work) -> None:
        try:
            await work
        except Exception as failure:
            self._fail(failure)
        self._is_busy = False
        if self._task is not None:
            self._task = None
            self._advance()

    def _fail(self, failure: BaseException) -> None:
        """Close after a bug, because the peer would wait for a reply that never comes."""
        context: dict[str, Any] = {"message": "a request failed", "exception": failure, "peer": self._link.peer}
        if self._is_busy and self._requests:
            context["request"] = shown(self._requests)
        self._loop.call_exception_handler(context)
        self._inbox.clear()
        self._owed.clear()  # no reply is better than a wrong one
        self._flush()
        self._ending = ("internal error: the request could not be completed", True)
        BaseSession._close(self, *self._ending)

    def _is_writable(self) -> bool:
        """Return whether the peer reads its replies. If not, `drained` is called when it does again."""
        return self._link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES

    async def _until_writable(self) -> None:
        while not self._is_writable():
            self._writable = self._loop.create_future()
            await self._writable

    async def _take_fetch_slot(self, slots: asyncio.Semaphore) -> None:
        """Wait for a slot, and until the peer reads its replies. The caller passes its reply to `_reply` before it releases the slot."""
        await slots.acquire()
        while not self._is_writable():
            slots.release()
            await self._until_writable()
            await slots.acquire()

    # Handover to the coordinator.

    def _login(self) -> Login | None:
        """Return the login of the peer. None: the connection has state that the coordinator cannot continue."""
        return None

    def _encode(self, message: Message) -> bytes:
        """Encode a received request. Raises `WireError` if that is impossible."""
        raise WireError("the protocol has no requests for the coordinator")

    async def _pass_on(self, message: Message, refuse: Callable[[], None]) -> None:
        """Let the coordinator serve this request and all after it. If that is impossible, call `refuse`. The earlier requests are
        answered."""
        login, handed = self._login(), Handed.REFUSED
        if self.handover is not None and login is not None:
            await asyncio.sleep(0)  # work becomes a task where it waits, and timeouts need a task
            handed = await self.handover(login, partial(self._unserved, message))
        if handed is Handed.HERE:
            self._inbox.appendleft(message)
        elif handed is Handed.REFUSED:
            refuse()

    def _unserved(self, message: Message) -> bytes:
        """End without a reply to the unserved requests, and return them."""
        if self._ending is not None and self._ending[1]:
            raise WireError(self._ending[0])
        try:
            frames = [self._encode(message), *map(self._encode, self._inbox), self._decoder.held]
        except BrokerError as error:  # a decompressed request may exceed a frame
            raise WireError(str(error)) from None
        self._flush()
        self._inbox.clear()
        self._is_closed, self._task = True, None  # the task calls this, and must not be cancelled
        if self._is_paused:
            self._is_paused = False
            self._link.resume_reading()
        return b"".join(frames)

    # Replies.

    def _reply(self, frames: bytes) -> None:
        """Send the reply after the owed ones."""
        if self._owed and self._has_ordered_replies:
            self._owed.append((None, 0, lambda: frames))
            return
        self._ready.append(frames)
        self._ready_bytes += len(frames)
        if self._ready_bytes > _WRITE_BYTES:
            # A page of a thousand records takes as long as many small replies.
            self._work_left -= WORK_A_TURN * self._ready_bytes // REPLY_BYTES_A_TURN
            self._flush()

    def _owe(self, outcome: Outcome, size_bytes: int, reply: Encode) -> None:
        """Send `reply()` after the earlier replies, when the outcome is there."""
        self._in_flight_bytes += size_bytes
        if self._has_ordered_replies:
            self._owed.append((outcome, size_bytes, reply))
            outcome.add_done_callback(self._settled)
            return
        is_answered: list[bool] = []

        def note() -> bytes:
            is_answered.append(True)
            return reply()

        owed: _Owed = (outcome, size_bytes, note)
        self._owed.append(owed)
        outcome.add_done_callback(partial(self._settled_early, owed, is_answered))

    def _settled(self, outcome: Outcome) -> None:
        """Reply to all completed requests, oldest first. One flush completes many: the first call answers all of them."""
        failure = asyncio.CancelledError() if outcome.cancelled() else outcome.exception()
        if self._is_lost:
            return
        if failure is not None and not isinstance(failure, BrokerError):
            self._fail(failure)
            return
        if self._answer_due():
            self._advance()

    def _settled_early(self, owed: _Owed, is_answered: list[bool], outcome: Outcome) -> None:
        """Reply to a completed request even if earlier ones are not completed."""
        self._settled(outcome)
        if not (is_answered or self._is_closed or self._is_lost):
            self._owed.remove(owed)
            self._owed.appendleft(owed)
            self._answer_due()
            self._advance()

    def _answer_due(self) -> bool:
        """Return whether there is a reply to send."""
        owed, ready = self._owed, self._ready
        is_any = False
        try:
            while owed and ((outcome := owed[0][0]) is None or outcome.done()):
                _, size_bytes, reply = owed.popleft()
                self._in_flight_bytes -= size_bytes
                ready.append(reply())
                is_any = True
        except Exception as failure:
            self._fail(failure)
        return is_any

    def _flush(self) -> None:
        if self._ready:
            frames, self._ready, self._ready_bytes = self._ready, [], 0
            if joined := frames[0] if len(frames) == 1 else b"".join(frames):
                self._link.send(joined)

    # Ending.

    def _end(self, reason: str, *, error: bool = True) -> None:
        """Accept no new requests, complete the received ones, then close the link. An error replaces the reason of a drain."""
        if self._ending is None or (error and not self._ending[1]):
            self._ending = (reason, error)
        self._update()

    def _close(self, reason: str, error: bool) -> None:
        """Close the link: everything is done."""
        self._is_closed = True
        self._link.close(reason, error=error)
