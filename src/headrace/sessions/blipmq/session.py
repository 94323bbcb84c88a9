"""Session of one BlipMQ connection.

    connected ──HELLO──▶ greeted ──AUTH──▶ authenticated: PUBLISH, SUBSCRIBE, POLL, ACK, PING

Requests take effect in the order in which they were sent, and replies leave in the same order. Most requests are completed in the call that
receives them. A request that must wait (to create a topic, to store a subscription, to read records) runs in the session's only task. Later
requests wait in the inbox, and the socket is not read until the inbox is empty.

A PUBLISH is staged and not waited for. Three requests wait until the earlier publishes are durable: a PING, which publishers use as a
confirmation; a SUBSCRIBE, because a new subscription starts after them; and a POLL, so that a client reads its own writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final, TypeAlias

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.publishing.publish import Published
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, InvalidRecord, UnknownTopic, WireError
from headrace.limits import (
    BLIPMQ_BAD_KEYS_MAX,
    BLIPMQ_FRAME_BYTES_MAX,
    BLIPMQ_LOGIN_FRAME_BYTES_MAX,
    BLIPMQ_REPLIES_OWED_MAX,
    OUTPUT_HIGH_WATER_BYTES,
    SUBSCRIPTIONS_PER_CONNECTION_MAX,
)
from headrace.records import Headers, RecordBatch
from headrace.sessions.blipmq import errors as errors
from headrace.sessions.blipmq.errors import NackReason
from headrace.sessions.blipmq.outbox import Outbox, Slot
from headrace.sessions.blipmq.subscriptions import QOS_0_HEADERS, Subscription, Subscriptions
from headrace.sessions.chunks import publish_in_chunks
from headrace.sessions.contract import Link
from headrace.wire.blipmq import (
    PROTOCOL_VERSION,
    AckBatch,
    Auth,
    Decoder,
    FrameType,
    Hello,
    Malformed,
    Message,
    Nack,
    Ping,
    PollBatch,
    Pong,
    PublishBatch,
    Subscribe,
    encoder,
)

log = logging.getLogger(__name__)

VerifyKey: TypeAlias = Callable[[bytes], Principal | None]
"""Returns the principal of a key, compared in constant time."""
Step: TypeAlias = Callable[[], Awaitable[None]]
"""The rest of a request that has to wait. It is not started yet, so a lost connection can drop it."""

PARTITION: Final = 0
"""Partition for publishes. BlipMQ has no partitions and guarantees order within a topic, which needs a single partition."""


class BlipMqSession:
    """State of one connection."""

    def __init__(self, link: Link, broker: Broker, subscriptions: Subscriptions, *, verify_key: VerifyKey) -> None:
        self._link = link
        self._broker = broker
        self._subscriptions = subscriptions
        self._settings = subscriptions.settings
        self._verify_key = verify_key
        self._decoder = Decoder(frame_bytes_max=BLIPMQ_LOGIN_FRAME_BYTES_MAX)
        self._outbox = Outbox(link.send)
        self._inbox: deque[Message] = deque()
        self._task: asyncio.Task[None] | None = None
        self._greeted = False
        self._who: Principal | None = None
        self._bad_keys = 0
        self._held: set[Subscription] = set()
        self._in_flight_bytes = 0
        self._paused_for_inbox = self._paused_for_publishes = False
        self._writable: asyncio.Future[None] | None = None
        self._ending: tuple[str, bool] | None = None
        self._is_lost = False
        self._login_timer: asyncio.TimerHandle | None = None
        if self._settings.login_seconds:
            self._login_timer = asyncio.get_running_loop().call_later(self._settings.login_seconds, self._came_too_late)

    # Calls from the connection.

    def receive(self, data: bytes) -> None:
        if self._ending is not None:
            return
        try:
            for message in self._decoder.feed(data):
                if not self._accept(message):
                    break
        except WireError as error:
            # The frame boundaries are lost, so no reply is possible. Earlier requests are completed.
            self._end(f"bad frame: {error}")
        self._outbox.flush()
        self._mind_pressure()
        self._close_when_done()

    def drained(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def closing(self) -> None:
        self._end("drained", error=False)
        self._close_when_done()

    def lost(self) -> None:
        self._is_lost = True
        self._end("lost", error=False)
        self._inbox.clear()
        self._stop_login_timer()
        if self._task is not None:
            self._task.cancel()
        for subscription in self._held:
            self._subscriptions.release(subscription)
        self._held.clear()

    @property
    def held_bytes(self) -> int:
        return self._decoder.held_bytes

    # Order.

    def _accept(self, message: Message) -> bool:
        """Handle the message now or after the waiting ones. Return False if the session is ending."""
        if self._task is not None:
            self._inbox.append(message)
            if not self._paused_for_inbox:
                self._paused_for_inbox = True
                self._link.pause_reading()
            return True
        step = self._handle(message)
        if step is not None:
            self._task = asyncio.get_running_loop().create_task(self._work(step))
            self._task.add_done_callback(self._worked)
        return self._ending is None

    async def _work(self, step: Step | None) -> None:
        while step is not None or self._inbox:
            if step is not None:
                await step()
            step = self._handle(self._inbox.popleft()) if self._inbox else None
        # No await from here to the end: a message that arrives now must find no task, or it would stay in the inbox.
        self._task = None
        self._outbox.flush()
        self._mind_pressure()
        if self._paused_for_inbox:
            self._paused_for_inbox = False
            self._link.resume_reading()
        self._close_when_done()

    def _worked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._task = None
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        """Close after a bug, because the peer would wait for a reply that never comes."""
        log.error("a request failed", exc_info=failure, extra={"peer": self._link.peer})
        self._inbox.clear()
        self._end("internal error")
        self._link.close("internal error: the request could not be completed")

    def _mind_pressure(self) -> None:
        """Stop reading a peer that sends faster than the disk writes. Resume at half of the limit."""
        pressure = max(self._in_flight_bytes / self._settings.in_flight_bytes_max, self._outbox.owed / BLIPMQ_REPLIES_OWED_MAX)
        if pressure > 1 and not self._paused_for_publishes:
            self._paused_for_publishes = True
            self._link.pause_reading()
        elif pressure <= 0.5 and self._paused_for_publishes:
            self._paused_for_publishes = False
            if not self._is_lost:
                self._link.resume_reading()

    def _end(self, reason: str, *, error: bool = True) -> None:
        """Accept nothing new, and close when everything is done."""
        if self._ending is None:
            self._ending = (reason, error)

    def _close_when_done(self) -> None:
        if self._ending is None or self._is_lost or self._task is not None or not self._outbox.is_settled:
            return
        reason, error = self._ending
        self._link.close(reason, error=error)

    def _nack(self, cids: Iterable[int], reason_of: NackReason) -> None:
        self._outbox.reply(encoder.nacks(cids, reason_of.code, reason_of.text))

    # Requests.

    def _handle(self, message: Message) -> Step | None:
        if self._who is None:
            self._before_login(message)
            return None
        match message:
            case PublishBatch():
                return self._publish(message, self._who)
            case PollBatch():
                return self._poll(message, self._who)
            case AckBatch():
                self._ack(message, self._who)
            case Ping(cid):
                self._outbox.reply(encoder.pong(cid))
            case Subscribe():
                return partial(self._subscribe, message, self._who)
            case Hello(cid):
                self._nack((cid,), errors.HELLO_REPEATED)
            case Auth(cid) | Malformed(FrameType.AUTH, cid):
                self._nack((cid,), errors.AUTH_REPEATED)
            case Nack() | Pong() | Malformed(FrameType.NACK):
                # Frames that only a server sends. Ignored.
                pass
            case Malformed(kind, cid):
                self._nack((cid,), errors.INVALID_PAYLOAD[kind])
        return None

    def _before_login(self, message: Message) -> None:
        match message:
            case Hello(cid) if self._greeted:
                self._nack((cid,), errors.HELLO_REPEATED)
            case Hello(cid, version) if version != PROTOCOL_VERSION:
                self._nack((cid,), errors.VERSION_MISMATCH)
            case Hello(cid):
                self._greeted = True
                self._outbox.reply(encoder.ack(cid, 0))
            case Malformed(FrameType.HELLO, cid):
                self._nack((cid,), errors.INVALID_PAYLOAD[FrameType.HELLO])
            case Auth(cid) | Malformed(FrameType.AUTH, cid) if not self._greeted:
                self._nack((cid,), errors.HELLO_MISSING)
            case Malformed(FrameType.AUTH, cid):
                self._nack((cid,), errors.INVALID_PAYLOAD[FrameType.AUTH])
            case Auth(cid, key):
                self._log_in(cid, key)
            case PublishBatch(cids=cids) | PollBatch(cids=cids) | AckBatch(cids=cids):
                self._nack(cids, errors.UNAUTHENTICATED)
            case _:
                self._nack((message.cid,), errors.UNAUTHENTICATED)

    def _log_in(self, cid: int, key: bytes) -> None:
        self._who = self._verify_key(key)
        if self._who is not None:
            self._stop_login_timer()
            self._decoder.frame_bytes_max = BLIPMQ_FRAME_BYTES_MAX
            self._outbox.reply(encoder.ack(cid, 0))
            return
        self._nack((cid,), errors.INVALID_KEY)
        self._bad_keys += 1
        if self._bad_keys >= BLIPMQ_BAD_KEYS_MAX:
            self._end(f"too many bad keys: {self._bad_keys}")

    def _came_too_late(self) -> None:
        self._login_timer = None
        self._end(f"no login in time: {self._settings.login_seconds} seconds")
        self._close_when_done()

    def _stop_login_timer(self) -> None:
        if self._login_timer is not None:
            self._login_timer.cancel()
            self._login_timer = None

    def _publish(self, batch: PublishBatch, who: Principal, *, may_create: bool = True) -> Step | None:
        if not batch.topic:
            self._nack(batch.cids, errors.EMPTY_TOPIC)
            return None
        if batch.qos > 1:
            self._nack(batch.cids, errors.INVALID_QOS)
            return None
        headers = None if batch.qos else [QOS_0_HEADERS] * len(batch.values)
        try:
            published = self._broker.publish(who, batch.topic, RecordBatch(batch.values, headers=headers), partition=PARTITION)
        except (UnknownTopic, SchemaCheckPending) as error:
            if may_create:
                return partial(self._publish_to_new_topic, batch, who)
            self._outbox.reply(_publish_nacks(batch, error))
        except InvalidRecord:
            self._publish_in_chunks(batch, who, headers)
        except BrokerError as error:
            self._outbox.reply(_publish_nacks(batch, error))
        else:
            self._stage(batch, published)
        return None

    def _publish_in_chunks(self, batch: PublishBatch, who: Principal, headers: list[Headers] | None) -> None:
        whole = RecordBatch(batch.values, headers=headers)
        outcomes = publish_in_chunks(
            lambda begin, end: self._broker.publish(who, batch.topic, whole[begin:end], partition=PARTITION), len(whole)
        )
        for begin, end, outcome in outcomes:
            chunk = PublishBatch(batch.qos, batch.topic, batch.cids[begin:end], batch.values[begin:end])
            if isinstance(outcome, BrokerError):
                self._outbox.reply(_publish_nacks(chunk, outcome))
            else:
                self._stage(chunk, outcome)

    async def _publish_to_new_topic(self, batch: PublishBatch, who: Principal) -> None:
        try:
            await self._broker.prepare(who, batch.topic, batch.values)
        except BrokerError as error:
            self._outbox.reply(_publish_nacks(batch, error))
        else:
            # If the topic is deleted again in between, the publish fails.
            self._publish(batch, who, may_create=False)

    def _stage(self, batch: PublishBatch, published: asyncio.Future[Published]) -> None:
        """Reserve the place of the batch's reply."""
        size_bytes = sum(map(len, batch.values))
        slot = self._outbox.reserve()
        self._in_flight_bytes += size_bytes
        # The reply needs only the ids, not the values.
        batch.values = []
        published.add_done_callback(lambda done: self._published(batch, size_bytes, slot, done))

    def _published(self, batch: PublishBatch, size_bytes: int, slot: Slot, done: asyncio.Future[Published]) -> None:
        self._in_flight_bytes -= size_bytes
        error = None if done.cancelled() else done.exception()
        if error is not None and not isinstance(error, BrokerError):
            return self._fail(error)
        self._outbox.fill(slot, b"" if error is None else _publish_nacks(batch, error))
        self._mind_pressure()
        self._close_when_done()

    async def _subscribe(self, message: Subscribe, who: Principal) -> None:
        if not message.topic:
            return self._nack((message.cid,), errors.EMPTY_TOPIC)
        if message.qos > 1 or (message.group and not message.qos):
            return self._nack((message.cid,), errors.INVALID_QOS)
        if len(self._held) >= SUBSCRIPTIONS_PER_CONNECTION_MAX:
            return self._nack((message.cid,), errors.TOO_MANY_SUBSCRIPTIONS)
        await self._outbox.settled()
        try:
            subscription = await self._subscriptions.subscribe(who, message, self._link.peer)
        except BrokerError as error:
            return self._nack((message.cid,), errors.reason_of(error))
        self._hold(subscription)
        self._outbox.reply(encoder.ack(message.cid, subscription.id))

    def _hold(self, subscription: Subscription) -> None:
        """Mark the subscription as used by this connection, so that it does not expire."""
        if subscription not in self._held and len(self._held) < SUBSCRIPTIONS_PER_CONNECTION_MAX:
            self._held.add(subscription)
            self._subscriptions.hold(subscription)

    def _find(self, who: Principal, id: int) -> Subscription | NackReason:
        if id == 0:
            return errors.SUBSCRIPTION_ZERO
        try:
            subscription = self._subscriptions.find(who, id)
        except BrokerError as error:
            return errors.reason_of(error)
        if subscription is None:
            return errors.UNKNOWN_SUBSCRIPTION
        self._hold(subscription)
        return subscription

    def _ack(self, batch: AckBatch, who: Principal) -> None:
        subscription = self._find(who, batch.subscription)
        if isinstance(subscription, NackReason):
            return self._nack(batch.cids, subscription)
        known = subscription.ack(batch.cids)
        if not all(known):
            self._nack([cid for cid, was_known in zip(batch.cids, known, strict=True) if not was_known], errors.UNKNOWN_SUBSCRIPTION)

    def _poll(self, batch: PollBatch, who: Principal) -> Step | None:
        subscription = self._find(who, batch.subscription)
        if isinstance(subscription, NackReason):
            self._nack_poll(batch.cids, subscription)
            return None
        return partial(self._deliver, batch, subscription)

    def _nack_poll(self, cids: list[int], reason_of: NackReason) -> None:
        if reason_of is not errors.UNKNOWN_SUBSCRIPTION or not self._settings.compat_silent_poll:
            self._nack(cids, reason_of)

    async def _deliver(self, batch: PollBatch, subscription: Subscription) -> None:
        """Answer one POLL for each message. The other POLLs get no reply."""
        await self._outbox.settled()
        answered = 0
        while answered < len(batch.cids):
            await self._until_writable()
            try:
                deliveries = await subscription.take(len(batch.cids) - answered)
            except UnknownTopic:
                # The topic is deleted, and its subscription with it.
                self._subscriptions.drop(subscription)
                self._held.discard(subscription)
                return self._nack_poll(batch.cids[answered:], errors.UNKNOWN_SUBSCRIPTION)
            except BrokerError as error:
                return self._nack(batch.cids[answered:], errors.reason_of(error))
            if not deliveries:
                return
            for delivery in deliveries:
                count = len(delivery.values)
                cids = batch.cids[answered : answered + count] if delivery.tags is None else delivery.tags
                self._outbox.reply(encoder.publishes(0 if delivery.tags is None else 1, subscription.topic, cids, delivery.values))
                answered += count
            self._outbox.flush()

    async def _until_writable(self) -> None:
        while self._link.unsent_bytes > OUTPUT_HIGH_WATER_BYTES:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable


def _publish_nacks(batch: PublishBatch, error: BrokerError) -> bytes:
    """Return a NACK for each record. A QoS 0 record is dropped without a NACK if the broker fails."""
    reason_of = errors.publish_reason_of(error)
    if batch.qos == 0 and reason_of.code == 500:
        return b""
    return encoder.nacks(batch.cids, reason_of.code, reason_of.text)
