"""Session of one BlipMQ connection.

    connected ──HELLO──▶ greeted ──AUTH──▶ authenticated: PUBLISH, SUBSCRIBE, POLL, ACK, PING

A PUBLISH is staged and not waited for. Its place in the order of the replies is taken even if it gets no reply. Three requests wait until
the earlier publishes are durable: a PING, which publishers use as a confirmation; a SUBSCRIBE, because a new subscription starts after
them; and a POLL, so that a client reads its own writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.publishing.published import Outcome
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, InvalidRecord, NotCoordinator, UnknownTopic, WireError
from headrace.limits import (
    BLIPMQ_BAD_KEYS_MAX,
    BLIPMQ_FRAME_BYTES_MAX,
    BLIPMQ_LOGIN_FRAME_BYTES_MAX,
    BLIPMQ_REPLIES_OWED_MAX,
    SUBSCRIPTIONS_PER_CONNECTION_MAX,
)
from headrace.records import Headers, RecordBatch
from headrace.sessions.blipmq import errors as errors
from headrace.sessions.blipmq.errors import NackReason
from headrace.sessions.blipmq.subscriptions import QOS_0_HEADERS, Deliveries, Subscription, Subscriptions
from headrace.sessions.chunks import publish_in_chunks
from headrace.sessions.contract import Link, Login
from headrace.sessions.request_ids import log_refused
from headrace.sessions.session import BaseSession
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
    answer_bytes,
    encoder,
)

VerifyKey: TypeAlias = Callable[[bytes], Principal | None]
"""Returns the principal of a key, compared in constant time."""

PARTITION: Final = 0
"""Partition for publishes. BlipMQ has no partitions and guarantees order within a topic, which needs a single partition."""


class BlipMqSession(BaseSession[Message]):
    """State of one connection."""

    def __init__(self, link: Link, broker: Broker, subscriptions: Subscriptions, *, verify_key: VerifyKey) -> None:
        self._settings = subscriptions.settings
        super().__init__(link, in_flight_bytes_max=self._settings.in_flight_bytes_max, owed_max=BLIPMQ_REPLIES_OWED_MAX)
        self._broker = broker
        self._subscriptions = subscriptions
        self._verify_key = verify_key
        self._decoder = self._frames = Decoder(frame_bytes_max=BLIPMQ_LOGIN_FRAME_BYTES_MAX)
        self._greeted = False
        self._who: Principal | None = None
        self._key: bytes | None = None
        """The key of the login, while the connection may be handed over."""
        self._bad_keys = 0
        self._held: set[Subscription] = set()
        self._login_timer: asyncio.TimerHandle | None = None
        if self._settings.login_seconds:
            self._login_timer = self._loop.call_later(self._settings.login_seconds, self._came_too_late)

    def lost(self) -> None:
        super().lost()
        self._stop_login_timer()
        for subscription in self._held:
            self._subscriptions.release(subscription)
        self._held.clear()

    def _nack(self, cids: Sequence[int], reason_of: NackReason) -> None:
        log_refused("blipmq", self._link.peer, reason_of.text, cids)
        self._reply(encoder.nacks(cids, reason_of.code, reason_of.text))

    @property
    def owes_reply(self) -> bool:
        # A publish is answered only if it fails. A PING behind it is answered as soon as it is durable.
        return bool(self._owed) and self._owed[-1][0] is None

    # Requests.

    def _serves(self, message: Message) -> bool:
        who = self._who
        if who is None:
            self._before_login(message)
            return True
        if isinstance(message, (AckBatch, PollBatch)) and self._subscriptions.has(message.subscription):
            if isinstance(message, AckBatch):
                self._ack(message, who)
            elif self._owed:
                return False
            else:
                self._poll(message, who)
            return True
        match message:
            case PublishBatch():
                self._publish(message, who)
            case AckBatch() | PollBatch() if (error := self._subscriptions.elsewhere(message.subscription)) is not None:
                if self._owed:
                    return False
                self._start(self._pass_on(message, partial(self._refuse, message.cids, error)), message.cids)
            case AckBatch():
                self._ack(message, who)
            case Ping(cid):
                self._reply(encoder.pong(cid))
            case PollBatch() | Subscribe() if self._owed:
                return False
            case PollBatch():
                self._poll(message, who)
            case Subscribe():
                self._start(self._subscribe(message, who), (message.cid,))
            case Hello(cid):
                self._nack((cid,), errors.HELLO_REPEATED)
            case Auth(cid) | Malformed(FrameType.AUTH, cid):
                self._nack((cid,), errors.AUTH_REPEATED)
            case Nack() | Pong() | Malformed(FrameType.NACK):
                # Frames that only a server sends. Ignored.
                pass
            case Malformed(kind, cid):
                self._nack((cid,), errors.INVALID_PAYLOAD[kind])
        return True

    def _before_login(self, message: Message) -> None:
        match message:
            case Hello(cid) if self._greeted:
                self._nack((cid,), errors.HELLO_REPEATED)
            case Hello(cid, version) if version != PROTOCOL_VERSION:
                self._nack((cid,), errors.VERSION_MISMATCH)
            case Hello(cid):
                self._greeted = True
                self._reply(encoder.ack(cid, 0))
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
            self._frames.frame_bytes_max = BLIPMQ_FRAME_BYTES_MAX
            self._key = None if self._broker.is_coordinator else key
            self._reply(encoder.ack(cid, 0))
            return
        self._nack((cid,), errors.INVALID_KEY)
        self._bad_keys += 1
        if self._bad_keys >= BLIPMQ_BAD_KEYS_MAX:
            self._end(f"too many bad keys: {self._bad_keys}")

    def _came_too_late(self) -> None:
        self._login_timer = None
        self._end(f"no login in time: {self._settings.login_seconds} seconds")

    def _stop_login_timer(self) -> None:
        if self._login_timer is not None:
            self._login_timer.cancel()
            self._login_timer = None

    def _publish(self, batch: PublishBatch, who: Principal, *, may_create: bool = True) -> None:
        if not batch.topic:
            return self._nack(batch.cids, errors.EMPTY_TOPIC)
        if batch.qos > 1:
            return self._nack(batch.cids, errors.INVALID_QOS)
        headers = None if batch.qos else [QOS_0_HEADERS] * len(batch.values)
        try:
            if batch.qos and len(batch.values) == 1:
                published: Outcome = self._broker.publish_one(who, batch.topic, batch.values[0], partition=PARTITION)
            else:
                published = self._broker.publish(who, batch.topic, RecordBatch(batch.values, headers=headers), partition=PARTITION)
        except (UnknownTopic, SchemaCheckPending) as absent:
            if may_create:
                self._start(self._publish_to_new_topic(batch, who), batch.cids)
            else:
                self._reply(self._publish_nacks(batch, absent))
        except InvalidRecord:
            self._publish_in_chunks(batch, who, headers)
        except BrokerError as error:
            self._reply(self._publish_nacks(batch, error))
        else:
            self._stage(batch, published)

    def _publish_in_chunks(self, batch: PublishBatch, who: Principal, headers: list[Headers] | None) -> None:
        whole = RecordBatch(batch.values, headers=headers)
        outcomes = publish_in_chunks(
            lambda begin, end: self._broker.publish(who, batch.topic, whole[begin:end], partition=PARTITION), len(whole)
        )
        for begin, end, outcome in outcomes:
            chunk = PublishBatch(batch.qos, batch.topic, batch.cids[begin:end], batch.values[begin:end])
            if isinstance(outcome, BrokerError):
                self._reply(self._publish_nacks(chunk, outcome))
            else:
                self._stage(chunk, outcome)

    def _publish_nacks(self, batch: PublishBatch, error: BrokerError) -> bytes:
        self._broker.meters.refuse("blipmq", error.code)
        return self._publish_nacks_of(batch, error)

    def _reason(self, error: BrokerError) -> NackReason:
        self._broker.meters.refuse("blipmq", error.code)
        return errors.reason_of(error)

    async def _publish_to_new_topic(self, batch: PublishBatch, who: Principal) -> None:
        try:
            await self._broker.prepare(who, batch.topic, batch.values)
        except BrokerError as error:
            self._reply(self._publish_nacks(batch, error))
        else:
            # If the topic is deleted again in between, the publish fails.
            self._publish(batch, who, may_create=False)

    def _stage(self, batch: PublishBatch, published: Outcome) -> None:
        """Reserve the place of the batch's reply."""
        size_bytes = sum(map(len, batch.values))
        batch.values = []  # the reply needs only the ids
        self._owe(published, size_bytes, partial(self._publish_reply, batch, published))

    def _publish_reply(self, batch: PublishBatch, published: Outcome) -> bytes:
        error = published.exception()
        return self._publish_nacks_of(batch, error) if isinstance(error, BrokerError) else b""

    def _publish_nacks_of(self, batch: PublishBatch, error: BrokerError) -> bytes:
        """Return a NACK for each record. A QoS 0 record is dropped without a NACK if the broker fails."""
        reason_of = errors.publish_reason_of(error)
        log_refused("blipmq", self._link.peer, reason_of.text, batch.cids)
        if batch.qos == 0 and reason_of.code == 500:
            return b""
        return encoder.nacks(batch.cids, reason_of.code, reason_of.text)

    async def _subscribe(self, message: Subscribe, who: Principal) -> None:
        if not message.topic:
            return self._nack((message.cid,), errors.EMPTY_TOPIC)
        if message.qos > 1 or (message.group and not message.qos):
            return self._nack((message.cid,), errors.INVALID_QOS)
        if len(self._held) >= SUBSCRIPTIONS_PER_CONNECTION_MAX:
            return self._nack((message.cid,), errors.TOO_MANY_SUBSCRIPTIONS)
        try:
            subscription = await self._subscriptions.subscribe(who, message, self._link.peer)
        except NotCoordinator as elsewhere:
            return await self._pass_on(message, partial(self._refuse, (message.cid,), elsewhere))
        except BrokerError as error:
            return self._nack((message.cid,), self._reason(error))
        self._hold(subscription)
        self._reply(encoder.ack(message.cid, subscription.id))

    # Handover to the coordinator.

    def _refuse(self, cids: Sequence[int], error: BrokerError) -> None:
        self._nack(cids, self._reason(error))

    def _login(self) -> Login | None:
        if self._held or self._key is None:
            return None  # the coordinator does not know the subscriptions in memory of this broker
        return Login((encoder.hello(0), encoder.auth(0, self._key)), answer_bytes)

    def _encode(self, message: Message) -> bytes:
        if isinstance(message, Malformed):
            raise WireError("the frame was not understood, so it cannot be encoded")
        return encoder.encode(message)

    # Subscriptions.

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
            return self._reason(error)
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

    def _poll(self, batch: PollBatch, who: Principal) -> None:
        subscription = self._find(who, batch.subscription)
        if isinstance(subscription, NackReason):
            return self._nack_poll(batch.cids, subscription)
        cids = batch.cids
        try:
            delivery = subscription.take_now(len(cids)) if self._is_writable() else None
        except BrokerError:
            delivery = None  # `_deliver` answers with the error
        if delivery is not None:
            self._work_left -= 1
            self._reply_delivery(subscription, cids, delivery)
            if len(delivery.values) == len(cids):
                return
            batch = PollBatch(batch.subscription, cids[len(delivery.values) :])
        self._start(self._deliver(batch, subscription), batch.cids)

    def _nack_poll(self, cids: list[int], reason_of: NackReason) -> None:
        if reason_of is not errors.UNKNOWN_SUBSCRIPTION or not self._settings.compat_silent_poll:
            self._nack(cids, reason_of)

    async def _deliver(self, batch: PollBatch, subscription: Subscription) -> None:
        """Answer one POLL for each message. The other POLLs get no reply."""
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
                return self._nack(batch.cids[answered:], self._reason(error))
            if not deliveries:
                return
            for delivery in deliveries:
                self._reply_delivery(subscription, batch.cids[answered:], delivery)
                answered += len(delivery.values)
            self._flush()

    def _reply_delivery(self, subscription: Subscription, cids: Sequence[int], delivery: Deliveries) -> None:
        """Answer the first of these POLLs with the messages."""
        if delivery.tags is not None and len(delivery.values) == 1:
            self._reply(encoder.publish(1, subscription.topic, delivery.tags[0], delivery.values[0]))
        elif delivery.tags is not None:
            self._reply(encoder.publishes(1, subscription.topic, delivery.tags, delivery.values))
        else:
            self._reply(encoder.publishes(0, subscription.topic, cids[: len(delivery.values)], delivery.values))
