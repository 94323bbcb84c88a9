"""BlipMQ client.

    client = await BlipMqClient.connect("127.0.0.1", 5555, api_key=b"…")
    await client.publish("demo", b"hello")
    async for delivery in await client.subscribe("demo", settlement="auto"):
        ...

BlipMQ does not answer a PUBLISH. The server answers a PING after it has handled all earlier frames and made their records durable. So one
PING confirms any number of publishes, and one PING after a number of POLLs marks the end of their deliveries.

The client reconnects indefinitely and sends unconfirmed QoS 1 records again, in order: delivery is at least once. Subscriptions resume:
they belong to the API key, not to the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from headrace.clients.blipmq.subscription import Subscription
from headrace.clients.errors import ConnectFailed, InvalidArgument, LoginRefused, NotSent, NotSupported, OutcomeUnknown, Refused
from headrace.clients.messages import GroupMode, Key, Receipt, Settlement, Start, check_start
from headrace.clients.options import ClientOptions
from headrace.clients.publishing import Records, batches_of
from headrace.clients.reconnecting import StreamClient
from headrace.clients.stream import Stream
from headrace.clients.unsupported import READERS
from headrace.clients.window import NumberedBatch, NumberedWindow
from headrace.errors import NotCoordinator, RecordTooLarge, WireError
from headrace.records import Headers
from headrace.wire.blipmq import AckBatch, Decoder, Malformed, Message, Nack, Pong, PublishBatch, encoder

DEFAULT_PORT: Final = 5555
PARTITION: Final = 0
"""Partition of all records published over BlipMQ."""
_FIRST_PUBLISH: Final = 1 << 62
_FIRST_REQUEST: Final = 1 << 63
"""Correlation ids are far above delivery tags, which count from 1, so that the NACK of an ACK is never taken for that of a request."""
_KINDS: Final = {401: "not_authorized", 404: "unknown_topic"}
"""Kinds of error by the code of a NACK."""
_HANDSHAKE: Final = (_FIRST_REQUEST, _FIRST_REQUEST + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlipMqOptions(ClientOptions):
    """Options of a BlipMQ connection, which needs an `api_key`."""

    ping_seconds: float = 5.0
    pings_unanswered_max: int = 4
    """The connection counts as lost after this many `ping_seconds` without a byte while a reply is due."""
    batch_max: int = 128
    """Most messages per poll of a subscription."""


@dataclass(slots=True)
class _Fence:
    """A PING and the meaning of its PONG."""

    cid: int
    done: asyncio.Future[None]
    confirms: int | None = None
    """Sequence number of the last publish before the PING."""
    polls: Subscription | None = None
    """Subscription whose POLLs precede the PING. It receives the deliveries while this is the oldest fence."""


class BlipMqClient(StreamClient[BlipMqOptions]):
    """BlipMQ client, created by `connect`. Belongs to one event loop."""

    protocol: ClassVar[str] = "BlipMQ"
    default_port: ClassVar[int] = DEFAULT_PORT
    default_options: ClassVar[ClientOptions] = BlipMqOptions()
    logins: ClassVar[frozenset[str]] = frozenset({"api_key"})
    only_partition: ClassVar[int | None] = PARTITION
    batch_records_max: ClassVar[int] = 1_024
    instead: ClassVar[Mapping[str, str]] = {
        "fetch": "subscribe and acknowledge the messages; flymq:// and rustlog:// read from an offset",
        "create_topic": "publishing creates the topic, if the broker allows it",
    }

    def __init__(self, host: str, port: int, options: BlipMqOptions) -> None:
        self._unconfirmed = NumberedWindow(records_max=options.window_records_max, bytes_max=options.window_bytes_max)
        super().__init__(host, port, options, self._unconfirmed)
        self._decoder = Decoder()
        self._handshake: asyncio.Future[None] | None = None
        self._next_cid = _FIRST_REQUEST
        self._fences: deque[_Fence] = deque()
        self._sent_seq = -1
        self._is_confirming = False
        self._loose_bytes = 0
        """Bytes sent with QoS 0 since the last PONG."""
        self._subscriptions: list[Subscription] = []
        self._subscribing: dict[int, tuple[Subscription, asyncio.Future[None]]] = {}
        self._connected = asyncio.Event()
        self._silences = 0
        self.refused_acks = 0
        """Number of late ACKs: the message had been delivered again or dead-lettered."""

    # Publishing.

    async def publish(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout: float | None = None,
        qos: int = 1,
    ) -> Receipt:
        """Publish a record. QoS 1 waits until it is durable. QoS 0 returns after sending and raises `NotSent` without a connection.

        BlipMQ does not report the offset.
        """
        if qos:
            return await super().publish(topic, value, key=key, partition=partition, headers=headers, timeout=timeout)
        self._check(topic, key, partition, headers)
        await self._send_loose(topic, [value])
        return Receipt(topic, PARTITION)

    async def publish_many(
        self,
        topic: str,
        values: Iterable[bytes] | AsyncIterable[bytes],
        *,
        key: Key = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout: float | None = None,
        qos: int = 1,
    ) -> int:
        """Publish all values as fast as the window allows. Returns their number once the last is durable; with QoS 0, once it is sent."""
        if qos:
            return await super().publish_many(topic, values, key=key, partition=partition, headers=headers, timeout=timeout)
        self._check(topic, key, partition, headers)
        count = 0
        async for batch in batches_of(values, self.batch_records_max):
            await self._send_loose(topic, batch)
            count += len(batch)
        return count

    async def flush(self) -> None:
        """Wait until every record published so far is durable or rejected. Raises `ClientClosed`."""
        await self._unconfirmed.emptied()
        if not self._is_closed:
            await self._connected.wait()
            try:
                await self._fence()
            except OutcomeUnknown:
                pass  # only QoS 0 records were in flight, which may be lost
        self._check_open()

    async def _submit(self, records: Records) -> Sequence[NumberedBatch]:
        _check_size(records.topic, records.values)
        batch = NumberedBatch(records.topic, records.values, PARTITION)
        await self._unconfirmed.enter(batch)
        if self._stream is not None:
            self._write_batch(self._stream, batch)
            self._confirm(self._stream)
        return [batch]

    def _write_batch(self, stream: Stream, batch: NumberedBatch) -> None:
        batch.was_sent = True
        self._sent_seq = max(self._sent_seq, batch.last_seq)
        cids = range(_FIRST_PUBLISH + batch.first_seq, _FIRST_PUBLISH + batch.last_seq + 1)
        stream.write(encoder.publishes(1, batch.topic, cids, batch.values))

    def _confirm(self, stream: Stream) -> None:
        """Send a PING unless one is in flight; its PONG triggers the next."""
        if not self._is_confirming:
            self._is_confirming = True
            self._ping(stream).confirms = self._sent_seq

    async def _send_loose(self, topic: str, values: list[bytes]) -> None:
        """Send with QoS 0, without keeping the records. An occasional PING bounds the bytes in flight."""
        self._check_open()
        _check_size(topic, values)
        if self._loose_bytes > self._options.window_bytes_max:
            try:
                await self._fence()
            except OutcomeUnknown:
                pass
        stream = self._stream
        if stream is None:
            raise NotSent(len(values))
        self._loose_bytes += sum(map(len, values))
        stream.write(encoder.publishes(0, topic, [self._cid() for _ in values], values))

    # Subscribing.

    async def subscribe(
        self,
        topic: str,
        start: Start = "latest",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
        mode: GroupMode | None = None,
        qos: int = 1,
    ) -> Subscription:
        """Follow records published from now on. Waits for the server's confirmation. Raises `Refused`.

        With a group, which only Headrace supports, the members share the records. A group resumes where it was, or begins at `start`.
        """
        self._check(topic, None, partition, ())
        check_start(start)
        if start != "latest" and (group is None or start != "earliest"):
            raise NotSupported(self.protocol, "reading what was published before", READERS)
        if group is None and mode is not None:
            raise InvalidArgument("a mode needs a group")
        subscription = Subscription(self, topic, qos, settlement=settlement, batch_max=self._options.batch_max)
        subscription.group, subscription.mode, subscription.earliest = group or "", mode or "", start == "earliest"
        self._subscriptions.append(subscription)
        try:
            await self._at_coordinator(lambda: self._subscribed(subscription))
        except BaseException:
            self._subscriptions.remove(subscription)
            raise
        return subscription

    async def _subscribed(self, subscription: Subscription) -> None:
        """Request the subscription, on every new connection until a reply arrives."""
        while subscription.id is None:
            self._check_open()
            await self._connected.wait()
            if self._stream is None:
                continue
            cid, answer = self._cid(), self._loop.create_future()
            self._subscribing[cid] = (subscription, answer)
            self._stream.write(
                encoder.subscribe(
                    cid, subscription.topic, subscription.qos, subscription.group, subscription.mode, earliest=subscription.earliest
                )
            )
            try:
                await answer
            except OutcomeUnknown:
                continue
            finally:
                self._subscribing.pop(cid, None)

    async def ping(self) -> None:
        """Wait until the server has handled all earlier frames. Raises `OutcomeUnknown` if the connection is lost."""
        self._check_open()
        await self._connected.wait()
        self._check_open()
        await self._fence()

    async def poll(self, subscription: Subscription, count: int) -> None:
        """Request up to `count` messages for a subscription. Returns when all available ones have arrived or the connection is lost."""
        self._check_open()
        if subscription.id is None:
            await self._at_coordinator(lambda: self._subscribed(subscription))
        await self._connected.wait()
        if self._stream is None or subscription.id is None:
            return
        self._stream.write(encoder.polls(subscription.id, [self._cid() for _ in range(count)]))
        fence = self._ping(self._stream)
        fence.polls = subscription
        try:
            await fence.done
        except OutcomeUnknown:
            pass  # the server delivers lost messages again

    def acknowledge(self, subscription: Subscription, tags: list[int]) -> None:
        """Acknowledge deliveries of a subscription. Sends nothing without a connection: the server delivers them again."""
        if self._stream is not None and subscription.id is not None:
            self._stream.write(encoder.acks(subscription.id, tags))

    # Receiving.

    def _receive(self, data: bytes) -> None:
        self._silences = 0
        try:
            for message in self._decoder.feed(data):
                self._handle(message)
        except WireError as failure:
            reason = f"the server sent undecodable bytes: {failure}"
            if self._stream is not None:
                self._stream.drop(reason)
            else:
                self._fail_handshake(reason)

    def _handle(self, message: Message) -> None:
        match message:
            case PublishBatch(qos, _, cids, values):
                if self._fences and self._fences[0].polls is not None:
                    self._fences[0].polls.arrived(qos, cids, values)
            case Pong(cid):
                self._passed(cid)
            case AckBatch(subscription, cids):
                for cid in cids:
                    self._accepted(cid, subscription)
            case Nack(cid, code, text):
                kind = NotCoordinator.code if NotCoordinator.TEXT in text else _KINDS.get(code, "")
                self._refused(cid, Refused(code=code, text=text, kind=kind))
            case Malformed():
                pass
            case _:
                raise WireError(f"a server does not send {type(message).__name__}")

    def _passed(self, cid: int) -> None:
        """Complete the oldest fence."""
        if not self._fences or self._fences[0].cid != cid:
            raise WireError("PONG without a PING")
        fence = self._fences.popleft()
        self._loose_bytes = 0
        self._progressed()
        if fence.confirms is not None:
            self._is_confirming = False
            self._unconfirmed.acknowledge(fence.confirms)
            if self._stream is not None and self._sent_seq > fence.confirms:
                self._confirm(self._stream)
        if not fence.done.done():
            fence.done.set_result(None)

    def _accepted(self, cid: int, subscription_id: int) -> None:
        if cid in _HANDSHAKE:
            if cid == _HANDSHAKE[-1] and self._handshake is not None and not self._handshake.done():
                self._handshake.set_result(None)
        elif cid in self._subscribing:
            subscription, answer = self._subscribing.pop(cid)
            subscription.began(subscription_id)
            if not answer.done():
                answer.set_result(None)

    def _refused(self, cid: int, error: Refused) -> None:
        if cid in _HANDSHAKE:
            if self._handshake is not None and not self._handshake.done():
                self._handshake.set_exception(LoginRefused(host=self._host, port=self._port, reason=error.text, was_accepted=True))
        elif cid in self._subscribing:
            _, answer = self._subscribing.pop(cid)
            if not answer.done():
                answer.set_exception(error)
        elif _FIRST_PUBLISH <= cid < _FIRST_REQUEST:
            self._refused_publish(cid - _FIRST_PUBLISH, error)
        elif cid < _FIRST_PUBLISH:
            self.refused_acks += 1
        elif self._fences and (subscription := self._fences[0].polls) is not None and error.code == 404:
            subscription.forgotten()

    def _refused_publish(self, seq: int, error: Refused) -> None:
        """Note the error. The PONG after the batch completes it."""
        for batch in self._unconfirmed.unanswered():
            if batch.first_seq <= seq <= batch.last_seq:
                batch.refuse_seq(seq, error)
                return

    # Fences.

    def _cid(self) -> int:
        self._next_cid += 1
        return self._next_cid - 1

    def _ping(self, stream: Stream) -> _Fence:
        fence = _Fence(self._cid(), self._loop.create_future())
        fence.done.add_done_callback(_retrieve)
        self._fences.append(fence)
        stream.write(encoder.ping(fence.cid))
        return fence

    async def _fence(self) -> None:
        """Wait until the server has handled all earlier frames. Raises `OutcomeUnknown` if the connection is lost."""
        if self._stream is not None:
            await self._ping(self._stream).done

    # The connection.

    async def _open(self) -> None:
        options = self._options
        key = options.api_key.encode() if isinstance(options.api_key, str) else options.api_key
        self._decoder, self._handshake, self._next_cid = Decoder(), self._loop.create_future(), _FIRST_REQUEST
        self._handshake.add_done_callback(_retrieve)
        stream = await self._connect()
        hello, auth = self._cid(), self._cid()
        assert (hello, auth) == _HANDSHAKE
        stream.write(encoder.hello(hello) + encoder.auth(auth, key))
        try:
            async with asyncio.timeout(options.connect_seconds):
                await self._handshake
        except TimeoutError:
            stream.close()
            raise ConnectFailed(host=self._host, port=self._port, reason=f"no login within {options.connect_seconds:g} s") from None
        except BaseException:
            stream.close()
            raise
        if self._is_closed:
            stream.close()
            return
        self._stream = stream
        self._silences = 0
        self._schedule(options.ping_seconds, self._keep_alive)
        self._connected.set()
        self._send_again(stream)
        self._opened()

    def _send_again(self, stream: Stream) -> None:
        """Resend unconfirmed records in order."""
        for batch in self._unconfirmed.unanswered():
            self._write_batch(stream, batch)
        if len(self._unconfirmed):
            self._confirm(stream)

    def _lost(self, reason: str) -> None:
        if self._stream is None:
            self._fail_handshake(reason)
        else:
            super()._lost(reason)

    def _disconnected(self) -> None:
        super()._disconnected()
        self._connected.clear()
        self._is_confirming = False
        self._loose_bytes = 0
        self._fail_answers()

    def _fail_handshake(self, reason: str) -> None:
        if self._handshake is not None and not self._handshake.done():
            self._handshake.set_exception(ConnectFailed(host=self._host, port=self._port, reason=reason, was_accepted=True))

    def _fail_answers(self) -> None:
        fences, self._fences = self._fences, deque()
        answers = [fence.done for fence in fences] + [answer for _, answer in self._subscribing.values()]
        self._subscribing.clear()
        for answer in answers:
            if not answer.done():
                answer.set_exception(OutcomeUnknown(0))
                answer.exception()

    def _keep_alive(self) -> None:
        """Drop the connection if a reply is due and no byte has arrived. If none is due, send a PING."""
        stream = self._stream
        assert stream is not None, "the timer stops with its connection"
        if self._fences:
            self._silences += 1
            if self._silences >= self._options.pings_unanswered_max:
                stream.drop(f"no reply for {self._silences * self._options.ping_seconds:g} s")
                return
        else:
            self._ping(stream)
        self._schedule(self._options.ping_seconds, self._keep_alive)

    # The end.

    async def _finish(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        await super()._finish()

    def _release(self) -> None:
        for subscription in self._subscriptions:
            subscription.stop()
        super()._release()
        self._connected.set()  # tasks that wait for a connection find the client closed
        self._fail_answers()


def _retrieve(done: asyncio.Future[None]) -> None:
    """Mark the exception as retrieved: asyncio logs one that is not."""
    if not done.cancelled():
        done.exception()


def _check_size(topic: str, values: list[bytes]) -> None:
    bytes_max, largest = encoder.value_bytes_max(topic), max(map(len, values))
    if largest > bytes_max:
        raise RecordTooLarge(size_bytes=largest, bytes_max=bytes_max)
