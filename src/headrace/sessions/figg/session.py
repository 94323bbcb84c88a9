"""Session of one Figg connection: receives publishes, sends acknowledgements and deliveries.

Messages are handled in order; later ones wait until the topic of a PUBLISH or ATTACH is created. ACKs follow the order of the publishes
over all topics: each is sent when its record and all earlier ones are durable. Other replies do not wait for ACKs.

Figg has no error frame. A request that fails closes the connection with a logged reason. Earlier publishes are acknowledged first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from headrace import limits
from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.publishing.published import Outcome
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, InvalidRecord, UnknownTopic
from headrace.records import RecordBatch
from headrace.sessions.contract import Link
from headrace.sessions.figg.attachments import PARTITION, Attachments
from headrace.sessions.session import RECORD_OVERHEAD_BYTES, BaseSession
from headrace.sessions.turns import Turns
from headrace.wire.figg import Attach, ClientMessage, Detach, Ping, PublishBatch, encode, server_decoder


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


class FiggSession(BaseSession[ClientMessage]):
    """State of one connection."""

    _bad_input = "{}"

    def __init__(
        self, broker: Broker, link: Link, who: Principal, settings: FiggSettings = FiggSettings(), turns: Turns | None = None
    ) -> None:
        super().__init__(link, in_flight_bytes_max=settings.in_flight_bytes_max)
        self._broker, self._who, self._settings = broker, who, settings
        self._decoder = server_decoder(frame_bytes_max=settings.frame_bytes_max, strict_version=settings.strict_version)
        self._attachments = Attachments(broker, link, who, self._refuse, Turns() if turns is None else turns)
        self._acked: list[Sequence[int]] = []
        """Numbers of durable publishes, to acknowledge in this turn."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._was_heard = False

    # Calls from the connection.

    def receive(self, data: bytes) -> None:
        self._was_heard = True
        super().receive(data)

    def drained(self) -> None:
        super().drained()
        self._attachments.feed()

    def closing(self) -> None:
        self._end("finished", error=False)

    def lost(self) -> None:
        super().lost()
        self._attachments.close()
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    # Messages.

    def _serves(self, message: ClientMessage) -> bool:
        try:
            self._handle(message)
        except (UnknownTopic, SchemaCheckPending):
            self._start(self._prepare(message))
        except BrokerError as failure:
            self._refuse(failure)
        return True

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

    async def _prepare(self, message: ClientMessage) -> None:
        """Create the topic that the message needs, or wait for a slow schema check, then handle the message again."""
        assert isinstance(message, PublishBatch | Attach)
        try:
            if isinstance(message, PublishBatch):
                await self._broker.prepare(self._who, message.topic, message.values)
            else:
                await self._broker.ensure_topic(self._who, message.topic)
            self._handle(message)
        except BrokerError as failure:
            self._refuse(failure)

    # Publishes and their acknowledgements.

    def _publish(self, batch: PublishBatch) -> None:
        try:
            if len(batch.values) == 1:
                future: Outcome = self._broker.publish_one(self._who, batch.topic, batch.values[0], partition=PARTITION)
            else:
                future = self._broker.publish(self._who, batch.topic, RecordBatch(batch.values), partition=PARTITION)
        except InvalidRecord as failure:
            if failure.index:
                # The records before it are valid and are published before the connection ends.
                self._publish(PublishBatch(batch.topic, batch.seqs[: failure.index], batch.values[: failure.index]))
            raise
        size_bytes = sum(map(len, batch.values)) + RECORD_OVERHEAD_BYTES * len(batch.values)
        self._owe(future, size_bytes, partial(self._published, batch.seqs, future))

    def _published(self, seqs: Sequence[int], future: Outcome) -> bytes:
        failure = future.exception()
        if isinstance(failure, BrokerError):
            self._owed.clear()  # an ACK for a later publish would cover the failed one
            self._refuse(failure, is_counted=True)
        else:
            self._acked.append(seqs)
        return b""

    def _flush(self) -> None:
        if self._acked:
            acked, self._acked = self._acked, []
            if self._settings.ack_each or sum(map(len, acked)) <= self._settings.acks_apart_max:
                self._ready.append(encode.acks([seq for seqs in acked for seq in seqs]))
            else:
                self._ready.append(encode.ack(max(map(max, acked))))
        super()._flush()

    # Ending.

    def _refuse(self, failure: BrokerError, *, is_counted: bool = False) -> None:
        """Handle no more messages, and close when the earlier publishes are acknowledged."""
        if not is_counted:
            self._broker.meters.refuse("figg", failure.code)
        self._inbox.clear()
        self._end(f"{failure.code}: {failure}")

    def _end(self, reason: str, *, error: bool = True) -> None:
        if self._ending is None:
            self._link.pause_reading()
        self._attachments.close()
        super()._end(reason, error=error)

    # Idle timeout.

    def _expect_to_hear(self) -> None:
        if self._idle_timer is None and self._settings.idle_seconds:
            self._was_heard = False
            self._idle_timer = self._loop.call_later(self._settings.idle_seconds, self._listen_for_silence)

    def _listen_for_silence(self) -> None:
        """End the session if the peer is silent. A peer that is not read, or has not read its data, is not silent."""
        self._idle_timer = None
        is_slow = self._is_busy or self._is_paused or self._link.unsent_bytes > 0
        if self._was_heard or is_slow:
            self._expect_to_hear()
        else:
            self._end(f"silent: {self._settings.idle_seconds:g} s without a message from a peer that sends pings")
