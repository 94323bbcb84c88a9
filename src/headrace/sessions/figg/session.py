"""Session of one Figg connection: receives publishes, sends acknowledgements and deliveries.

Messages are handled in order. A PUBLISH to an unknown topic stalls the connection, which is not read until the topic is created. ACKs
follow the order of the publishes over all topics: each is sent when its record and all earlier ones are durable.

Figg has no error frame. A request that fails closes the connection with a logged reason. Earlier publishes are acknowledged first.
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
"""Cost of a record in flight in addition to its value, so that many empty records fill the window too."""


@dataclass(frozen=True, slots=True)
class FiggSettings:
    """Settings of the Figg protocol."""

    ack_each: bool = False
    """Send one ACK for every PUBLISH instead of one for the highest number."""
    acks_apart_max: int = 8
    """Up to this many publishes are acknowledged one by one."""
    strict_version: bool = True
    """Reject frames whose version is not 1. The original ignores the version."""
    frame_bytes_max: int = limits.FRAME_BYTES_DEFAULT_MAX
    in_flight_bytes_max: int = limits.IN_FLIGHT_BYTES_MAX
    idle_seconds: float = limits.IDLE_SECONDS_MAX
    """Timeout for a peer that has sent a ping before. Peers that never ping have no timeout."""


@dataclass(slots=True)
class InFlight:
    """A batch that is not durable yet."""

    future: asyncio.Future[Published]
    seqs: Sequence[int]
    size_bytes: int


class FiggSession:
    """State of one connection. Implements `Session`."""

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
        """Creates the topic that the next message needs."""
        self._rest: Iterator[ClientMessage] = iter(())
        """Decoded messages to handle after the stall."""
        self._received: deque[bytes] = deque()
        """Bytes to decode after that: the socket may have delivered more before it was paused."""
        self._ending: tuple[str, bool] | None = None
        """Reason to close with (and whether it is an error) when nothing is in flight."""
        self._is_ended = False
        """Handles no more messages: the connection failed or is lost."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._was_heard = False

    # Calls from the connection.

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

    # Messages.

    def _go_on(self) -> None:
        """Handle everything received, up to a stall."""
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
        """Create the topic that the message needs, or wait for a slow schema check, then handle the message again."""
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
                # The records before it are valid and are published before the connection ends.
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
        """Acknowledge completed publishes in order. One flush completes many batches: the first call acknowledges all of them."""
        _failure(future)  # retrieved for a lost connection too: asyncio reports an exception that is never retrieved
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
            self._in_flight.clear()  # an ACK for a later publish would cover the failed one
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

    # Ending.

    def _fail(self, failure: BrokerError) -> None:
        self._end_with_error(f"{failure.code}: {failure}")

    def _end_with_error(self, reason: str) -> None:
        """Handle no more messages, and close when the earlier publishes are acknowledged."""
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

    # Idle timeout.

    def _expect_to_hear(self) -> None:
        if self._idle_timer is None and self._settings.idle_seconds:
            self._was_heard = False
            self._idle_timer = self._loop.call_later(self._settings.idle_seconds, self._listen_for_silence)

    def _listen_for_silence(self) -> None:
        """End the session if the peer is silent. A peer that is not read, or has not read its data, is not silent."""
        self._idle_timer = None
        is_slow = self._stall is not None or self._window_is_full or self._link.unsent_bytes > 0
        if self._was_heard or is_slow:
            self._expect_to_hear()
        else:
            self._end_with_error(f"silent: {self._settings.idle_seconds:g} s without a message from a peer that sends pings")


def _failure(future: asyncio.Future[Published]) -> BrokerError | None:
    """Return the error of a failed publish."""
    if future.cancelled():
        return BrokerError("the publish was cancelled")
    failure = future.exception()
    if failure is None or isinstance(failure, BrokerError):
        return failure
    raise failure
