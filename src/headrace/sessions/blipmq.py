"""One BlipMQ connection: frames → broker verbs → frames.

    connected ──HELLO──▶ greeted ──AUTH──▶ authenticated: PUBLISH, SUBSCRIBE, POLL, ACK, PING

Requests take effect in the order they were sent, and replies leave in that order. Most requests are done with in the call that
receives them. Those that cannot be (a topic to be created, a subscription to be made durable, records to be read) occupy the
session's one task; what arrives meanwhile waits in the inbox, and the socket is not read until the inbox is empty.

A PUBLISH is staged and never waited for. Three requests wait for the publishes before them to be durable: a PING, which is
what publishers use as a confirmation; a SUBSCRIBE, because what was published before it is not for the new subscription; and a
POLL, so that whoever publishes and polls finds what it has published.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final, TypeAlias

from headrace.broker.access import Principal
from headrace.broker.broker import Broker
from headrace.broker.publish import Published
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
from headrace.records import Headers, Run
from headrace.sessions import blipmq_refusals as refusals
from headrace.sessions.blipmq_outbox import Outbox, Slot
from headrace.sessions.blipmq_refusals import Refusal
from headrace.sessions.blipmq_subscriptions import QOS_0_HEADERS, Subscription, Subscriptions
from headrace.sessions.contract import Link
from headrace.sessions.pieces import pieces
from headrace.wire.blipmq import (
    PROTOCOL_VERSION,
    AckRun,
    Auth,
    Decoder,
    FrameType,
    Hello,
    Malformed,
    Message,
    Nack,
    Ping,
    PollRun,
    Pong,
    PublishRun,
    Subscribe,
    encoder,
)

log = logging.getLogger(__name__)

VerifyKey: TypeAlias = Callable[[bytes], Principal | None]
"""Whose key this is, compared in constant time."""
Step: TypeAlias = Callable[[], Awaitable[None]]
"""The rest of a request that could not be finished at once; not begun, so that a lost connection can drop it."""

PARTITION: Final = 0
"""Where publishes go. BlipMQ knows no partitions and promises order within a topic, and only one partition can keep that."""


class BlipMqSession:
    """The state of one connection."""

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

    # What the connection calls.

    def receive(self, data: bytes) -> None:
        if self._ending is not None:
            return
        try:
            for message in self._decoder.feed(data):
                if not self._accept(message):
                    break
        except WireError as error:
            # Framing is lost, so there is nothing to answer to; what came before it is still completed.
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
        """Handle it now or in its turn; False if it was the last one this peer may say."""
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
        # From here to the end nothing may wait: what arrives after it must find no task, or it would lie in the inbox for ever.
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
        """A fault of ours, not of the peer, who must not be left waiting for an answer that never comes."""
        log.error("a request failed", exc_info=failure, extra={"peer": self._link.peer})
        self._inbox.clear()
        self._end("internal error")
        self._link.close("internal error: the request could not be completed")

    def _mind_pressure(self) -> None:
        """Do not read a peer that asks faster than the disk writes; read it again when half of that is done."""
        pressure = max(self._in_flight_bytes / self._settings.in_flight_bytes_max, self._outbox.owed / BLIPMQ_REPLIES_OWED_MAX)
        if pressure > 1 and not self._paused_for_publishes:
            self._paused_for_publishes = True
            self._link.pause_reading()
        elif pressure <= 0.5 and self._paused_for_publishes:
            self._paused_for_publishes = False
            if not self._is_lost:
                self._link.resume_reading()

    def _end(self, reason: str, *, error: bool = True) -> None:
        """Take nothing new; close once everything taken is done."""
        if self._ending is None:
            self._ending = (reason, error)

    def _close_when_done(self) -> None:
        if self._ending is None or self._is_lost or self._task is not None or not self._outbox.is_settled:
            return
        reason, error = self._ending
        self._link.close(reason, error=error)

    def _refuse(self, cids: Iterable[int], refusal: Refusal) -> None:
        self._outbox.reply(encoder.nacks(cids, refusal.code, refusal.text))

    # Requests.

    def _handle(self, message: Message) -> Step | None:
        if self._who is None:
            self._before_login(message)
            return None
        match message:
            case PublishRun():
                return self._publish(message, self._who)
            case PollRun():
                return self._poll(message, self._who)
            case AckRun():
                self._ack(message, self._who)
            case Ping(cid):
                self._outbox.reply(encoder.pong(cid))
            case Subscribe():
                return partial(self._subscribe, message, self._who)
            case Hello(cid):
                self._refuse((cid,), refusals.HELLO_REPEATED)
            case Auth(cid) | Malformed(FrameType.AUTH, cid):
                self._refuse((cid,), refusals.AUTH_REPEATED)
            case Nack() | Pong() | Malformed(FrameType.NACK):
                # The server's own words, sent back. Nothing to say to them.
                pass
            case Malformed(kind, cid):
                self._refuse((cid,), refusals.INVALID_PAYLOAD[kind])
        return None

    def _before_login(self, message: Message) -> None:
        match message:
            case Hello(cid) if self._greeted:
                self._refuse((cid,), refusals.HELLO_REPEATED)
            case Hello(cid, version) if version != PROTOCOL_VERSION:
                self._refuse((cid,), refusals.VERSION_MISMATCH)
            case Hello(cid):
                self._greeted = True
                self._outbox.reply(encoder.ack(cid, 0))
            case Malformed(FrameType.HELLO, cid):
                self._refuse((cid,), refusals.INVALID_PAYLOAD[FrameType.HELLO])
            case Auth(cid) | Malformed(FrameType.AUTH, cid) if not self._greeted:
                self._refuse((cid,), refusals.HELLO_MISSING)
            case Malformed(FrameType.AUTH, cid):
                self._refuse((cid,), refusals.INVALID_PAYLOAD[FrameType.AUTH])
            case Auth(cid, key):
                self._log_in(cid, key)
            case PublishRun(cids=cids) | PollRun(cids=cids) | AckRun(cids=cids):
                self._refuse(cids, refusals.UNAUTHENTICATED)
            case _:
                self._refuse((message.cid,), refusals.UNAUTHENTICATED)

    def _log_in(self, cid: int, key: bytes) -> None:
        self._who = self._verify_key(key)
        if self._who is not None:
            self._stop_login_timer()
            self._decoder.frame_bytes_max = BLIPMQ_FRAME_BYTES_MAX
            self._outbox.reply(encoder.ack(cid, 0))
            return
        self._refuse((cid,), refusals.INVALID_KEY)
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

    def _publish(self, run: PublishRun, who: Principal, *, may_create: bool = True) -> Step | None:
        if not run.topic:
            self._refuse(run.cids, refusals.EMPTY_TOPIC)
            return None
        if run.qos > 1:
            self._refuse(run.cids, refusals.INVALID_QOS)
            return None
        headers = None if run.qos else [QOS_0_HEADERS] * len(run.values)
        try:
            published = self._broker.publish(who, run.topic, Run(run.values, headers=headers), partition=PARTITION)
        except (UnknownTopic, SchemaCheckPending) as error:
            if may_create:
                return partial(self._publish_to_new_topic, run, who)
            self._outbox.reply(_refused_publish(run, error))
        except InvalidRecord:
            self._publish_in_pieces(run, who, headers)
        except BrokerError as error:
            self._outbox.reply(_refused_publish(run, error))
        else:
            self._stage(run, published)
        return None

    def _publish_in_pieces(self, run: PublishRun, who: Principal, headers: list[Headers] | None) -> None:
        whole = Run(run.values, headers=headers)
        outcomes = pieces(lambda begin, end: self._broker.publish(who, run.topic, whole[begin:end], partition=PARTITION), len(whole))
        for begin, end, outcome in outcomes:
            piece = PublishRun(run.qos, run.topic, run.cids[begin:end], run.values[begin:end])
            if isinstance(outcome, BrokerError):
                self._outbox.reply(_refused_publish(piece, outcome))
            else:
                self._stage(piece, outcome)

    async def _publish_to_new_topic(self, run: PublishRun, who: Principal) -> None:
        try:
            await self._broker.prepare(who, run.topic, run.values)
        except BrokerError as error:
            self._outbox.reply(_refused_publish(run, error))
        else:
            # The topic may be deleted again by now; that is refused, not chased.
            self._publish(run, who, may_create=False)

    def _stage(self, run: PublishRun, published: asyncio.Future[Published]) -> None:
        """Keep the place of the run's reply."""
        size_bytes = sum(map(len, run.values))
        slot = self._outbox.reserve()
        self._in_flight_bytes += size_bytes
        # The values are not kept for the answer: only their ids are.
        run.values = []
        published.add_done_callback(lambda done: self._published(run, size_bytes, slot, done))

    def _published(self, run: PublishRun, size_bytes: int, slot: Slot, done: asyncio.Future[Published]) -> None:
        self._in_flight_bytes -= size_bytes
        error = None if done.cancelled() else done.exception()
        if error is not None and not isinstance(error, BrokerError):
            return self._fail(error)
        self._outbox.fill(slot, b"" if error is None else _refused_publish(run, error))
        self._mind_pressure()
        self._close_when_done()

    async def _subscribe(self, message: Subscribe, who: Principal) -> None:
        if not message.topic:
            return self._refuse((message.cid,), refusals.EMPTY_TOPIC)
        if message.qos > 1:
            return self._refuse((message.cid,), refusals.INVALID_QOS)
        if len(self._held) >= SUBSCRIPTIONS_PER_CONNECTION_MAX:
            return self._refuse((message.cid,), refusals.TOO_MANY_SUBSCRIPTIONS)
        await self._outbox.settled()
        try:
            subscription = await self._subscriptions.subscribe(who, message.topic, message.qos)
        except BrokerError as error:
            return self._refuse((message.cid,), refusals.refusal(error))
        self._hold(subscription)
        self._outbox.reply(encoder.ack(message.cid, subscription.id))

    def _hold(self, subscription: Subscription) -> None:
        """A subscription does not go idle while a connection that uses it is open."""
        if subscription not in self._held and len(self._held) < SUBSCRIPTIONS_PER_CONNECTION_MAX:
            self._held.add(subscription)
            self._subscriptions.hold(subscription)

    def _find(self, who: Principal, id: int) -> Subscription | Refusal:
        if id == 0:
            return refusals.SUBSCRIPTION_ZERO
        try:
            subscription = self._subscriptions.find(who, id)
        except BrokerError as error:
            return refusals.refusal(error)
        if subscription is None:
            return refusals.UNKNOWN_SUBSCRIPTION
        self._hold(subscription)
        return subscription

    def _ack(self, run: AckRun, who: Principal) -> None:
        subscription = self._find(who, run.subscription)
        if isinstance(subscription, Refusal):
            return self._refuse(run.cids, subscription)
        known = subscription.ack(run.cids)
        if not all(known):
            self._refuse([cid for cid, was_known in zip(run.cids, known, strict=True) if not was_known], refusals.UNKNOWN_SUBSCRIPTION)

    def _poll(self, run: PollRun, who: Principal) -> Step | None:
        subscription = self._find(who, run.subscription)
        if isinstance(subscription, Refusal):
            self._refuse_poll(run.cids, subscription)
            return None
        return partial(self._deliver, run, subscription)

    def _refuse_poll(self, cids: list[int], refusal: Refusal) -> None:
        if refusal is not refusals.UNKNOWN_SUBSCRIPTION or not self._settings.compat_silent_poll:
            self._refuse(cids, refusal)

    async def _deliver(self, run: PollRun, subscription: Subscription) -> None:
        """Answer as many of the POLLs as there are messages; the others are not answered at all."""
        await self._outbox.settled()
        answered = 0
        while answered < len(run.cids):
            await self._until_writable()
            try:
                deliveries = await subscription.take(len(run.cids) - answered)
            except UnknownTopic:
                # The topic is gone, and the subscription with it.
                self._subscriptions.drop(subscription)
                self._held.discard(subscription)
                return self._refuse_poll(run.cids[answered:], refusals.UNKNOWN_SUBSCRIPTION)
            except BrokerError as error:
                return self._refuse(run.cids[answered:], refusals.refusal(error))
            if not deliveries:
                return
            for delivery in deliveries:
                count = len(delivery.values)
                cids = run.cids[answered : answered + count] if delivery.tags is None else delivery.tags
                self._outbox.reply(encoder.publishes(0 if delivery.tags is None else 1, subscription.topic, cids, delivery.values))
                answered += count
            self._outbox.flush()

    async def _until_writable(self) -> None:
        while self._link.unsent_bytes > OUTPUT_HIGH_WATER_BYTES:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable


def _refused_publish(run: PublishRun, error: BrokerError) -> bytes:
    """A NACK for each record; but at most once means that a broker in trouble may drop a QoS 0 record without a word."""
    refusal = refusals.publish_refusal(error)
    if run.qos == 0 and refusal.code == 500:
        return b""
    return encoder.nacks(run.cids, refusal.code, refusal.text)
