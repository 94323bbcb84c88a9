"""A Figg connection: publishes in, acknowledgements and deliveries out.

Messages are handled strictly in order. A PUBLISH to a topic that does not exist yet stalls the connection (it is not read meanwhile)
until the topic is there. ACKs follow the order of the publishes, over all topics: each leaves when the broker's promise holds for it
and for every one before it.

Figg has no error frame, so a request that cannot be served closes the connection with a reason for the log; what was published before
it is acknowledged first, itself never.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace import limits
from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.publishing.publish import Published
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, InvalidRecord, UnknownTopic, WireError
from headrace.records import RecordBatch
from headrace.sessions.contract import Link
from headrace.sessions.figg.attachments import PARTITION, Attachments
from headrace.sessions.turns import Turns
from headrace.wire.figg import Attach, ClientMessage, Detach, Ping, PublishBatch, encode, server_decoder

RECORD_OVERHEAD_BYTES: Final = 64
"""What a record in flight costs beside its value, so that a flood of empty ones fills the window too."""


@dataclass(frozen=True, slots=True)
class FiggSettings:
    """What an operator may choose about the Figg protocol."""

    ack_each: bool = False
    """One ACK for every PUBLISH, instead of one for the highest number where one covers many."""
    acks_apart_max: int = 8
    """Up to so many are acknowledged one by one all the same."""
    strict_version: bool = True
    """Refuse frames whose version is not 1. The original looks at no version."""
    frame_bytes_max: int = limits.FRAME_BYTES_DEFAULT_MAX
    in_flight_bytes_max: int = limits.IN_FLIGHT_BYTES_MAX
    idle_seconds: float = limits.IDLE_SECONDS_MAX
    """A peer that has sent a ping before and is silent for so long is gone. Peers that never ping may be silent for ever."""


@dataclass(slots=True)
class InFlight:
    """A run on its way to the disk."""

    future: asyncio.Future[Published]
    seqs: Sequence[int]
    size_bytes: int


class FiggSession:
    """The state of one connection: a `Session`."""

    def __init__(
        self, broker: Broker, link: Link, who: Principal, settings: FiggSettings = FiggSettings(), turns: Turns | None = None
    ) -> None:
        self._broker, self._link, self._who, self._settings = broker, link, who, settings
        self._loop = asyncio.get_running_loop()
        self._decoder = server_decoder(frame_bytes_max=settings.frame_bytes_max, strict_version=settings.strict_version)
        self._attachments = Attachments(broker, link, who, self._fail, Turns() if turns is None else turns)
        self._in_flight: deque[InFlight] = deque()
        self._in_flight_bytes = 0
        self._window_is_full = False
        self._stall: asyncio.Task[None] | None = None
        """Makes the topic that the next message needs."""
        self._rest: Iterator[ClientMessage] = iter(())
        """What of the last bytes is still to be handled after the stall."""
        self._received: deque[bytes] = deque()
        """What is still to be decoded after that: the socket may have had more when it was paused."""
        self._ending: tuple[str, bool] | None = None
        """Close for this reason (an error or not) as soon as nothing is in flight."""
        self._is_ended = False
        """Handles nothing more: the peer was refused, or is gone."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._was_heard = False

    # What the connection tells us.

    def receive(self, data: bytes) -> None:
        self._was_heard = True
        if not self._is_ended:
            self._received.append(data)
            self._go_on()

    def drained(self) -> None:
        self._attachments.feed()

    def closing(self) -> None:
        self._finish("finished", error=False)

    def lost(self) -> None:
        self._is_ended = True
        self._attachments.close()
        self._in_flight.clear()
        if self._stall is not None:
            self._stall.cancel()
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    @property
    def held_bytes(self) -> int:
        return self._decoder.held_bytes

    # Messages, in order.

    def _go_on(self) -> None:
        """Handle all that has come, up to a stall."""
        self._handle_all(self._rest)
        while self._received and not self._is_held_up():
            self._handle_all(self._decoder.feed(self._received.popleft()))

    def _handle_all(self, messages: Iterator[ClientMessage]) -> None:
        if self._is_held_up():
            return
        try:
            for message in messages:
                try:
                    self._handle(message)
                except (UnknownTopic, SchemaCheckPending):
                    self._rest = messages
                    self._stall_for(message)
                    return
                except BrokerError as failure:
                    self._fail(failure)
                if self._is_ended:
                    return
        except WireError as failure:
            self._end_with_error(str(failure))

    def _is_held_up(self) -> bool:
        return self._stall is not None or self._is_ended

    def _handle(self, message: ClientMessage) -> None:
        match message:
            case PublishBatch():
                self._publish(message)
            case Ping(timestamp):
                self._link.send(encode.pong(timestamp))
                self._expect_to_hear()
            case Attach(topic, offset):
                if self._ending is None:
                    self._attachments.attach(topic, offset)
            case Detach(topic):
                self._attachments.detach(topic)
                self._link.send(encode.detached(topic))

    def _stall_for(self, message: ClientMessage) -> None:
        """A topic is there as soon as anybody publishes or attaches to it: make it, then take the message up again. So with a schema
        check that takes longer."""
        self._link.pause_reading()
        self._stall = self._loop.create_task(self._prepare(message))

    async def _prepare(self, message: ClientMessage) -> None:
        assert isinstance(message, PublishBatch | Attach)
        try:
            if isinstance(message, PublishBatch):
                await self._broker.prepare(self._who, message.topic, message.values)
            else:
                await self._broker.ensure_topic(self._who, message.topic)
            self._handle(message)
        except BrokerError as failure:
            self._fail(failure)
        self._stall = None
        self._go_on()
        self._link.resume_reading()
        self._close_if_done()

    # Publishes and their acknowledgements.

    def _publish(self, batch: PublishBatch) -> None:
        try:
            future = self._broker.publish(self._who, batch.topic, RecordBatch(batch.values), partition=PARTITION)
        except InvalidRecord as failure:
            if failure.index:
                # Nothing is wrong with those before it: they were published before this connection came to its end.
                self._publish(PublishBatch(batch.topic, batch.seqs[: failure.index], batch.values[: failure.index]))
            raise
        size_bytes = sum(map(len, batch.values)) + RECORD_OVERHEAD_BYTES * len(batch.values)
        self._in_flight.append(InFlight(future, batch.seqs, size_bytes))
        self._in_flight_bytes += size_bytes
        if self._in_flight_bytes > self._settings.in_flight_bytes_max and not self._window_is_full:
            self._window_is_full = True
            self._link.pause_reading()
        future.add_done_callback(self._settle)

    def _settle(self, future: asyncio.Future[Published]) -> None:
        """Acknowledge what is done and has nothing undone before it. One flush settles many runs: the first call answers for all."""
        _failure(future)  # asked even of a lost connection's: an error nobody asks for is reported as forgotten
        failure: BrokerError | None = None
        done: list[Sequence[int]] = []
        while self._in_flight and self._in_flight[0].future.done():
            head = self._in_flight[0]
            failure = _failure(head.future)
            if failure is not None:
                break
            self._in_flight.popleft()
            self._in_flight_bytes -= head.size_bytes
            done.append(head.seqs)
        if done:
            self._acknowledge(done)
        if failure is not None:
            self._in_flight.clear()  # an ACK for a later one would cover the failed one too
            self._fail(failure)
        if self._window_is_full and self._in_flight_bytes <= self._settings.in_flight_bytes_max // 2:
            self._window_is_full = False
            self._link.resume_reading()
        self._close_if_done()

    def _acknowledge(self, done: list[Sequence[int]]) -> None:
        if self._settings.ack_each or sum(map(len, done)) <= self._settings.acks_apart_max:
            self._link.send(encode.acks([seq for seqs in done for seq in seqs]))
        else:
            self._link.send(encode.ack(max(map(max, done))))

    # The end.

    def _fail(self, failure: BrokerError) -> None:
        self._end_with_error(f"{failure.code}: {failure}")

    def _end_with_error(self, reason: str) -> None:
        """Handle nothing more, and close once what came before is acknowledged."""
        if not self._is_ended:
            self._is_ended = True
            self._received.clear()
            self._finish(reason, error=True)

    def _finish(self, reason: str, *, error: bool) -> None:
        if self._ending is None:
            self._link.pause_reading()
        if self._ending is None or error:
            self._ending = (reason, error)
        self._attachments.close()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._ending is not None and not self._in_flight and (self._stall is None or self._is_ended):
            reason, error = self._ending
            self._link.close(reason, error=error)

    # Silence.

    def _expect_to_hear(self) -> None:
        if self._idle_timer is None and self._settings.idle_seconds:
            self._was_heard = False
            self._idle_timer = self._loop.call_later(self._settings.idle_seconds, self._listen_for_silence)

    def _listen_for_silence(self) -> None:
        """A peer we do not read, or that has not taken its data yet, cannot be blamed for silence."""
        self._idle_timer = None
        is_slow = self._stall is not None or self._window_is_full or self._link.unsent_bytes > 0
        if self._was_heard or is_slow:
            self._expect_to_hear()
        else:
            self._end_with_error(f"silent: for {self._settings.idle_seconds:g} s after it used to ping")


def _failure(future: asyncio.Future[Published]) -> BrokerError | None:
    """Why a publish failed, if it did."""
    if future.cancelled():
        return BrokerError("the publish was abandoned")
    failure = future.exception()
    if failure is None or isinstance(failure, BrokerError):
        return failure
    raise failure
