"""A BlipMQ client that survives its connections.

    client = await BlipMqClient.connect("127.0.0.1", 5555, api_key=b"…")
    await client.publish("demo", b"hello")
    async for delivery in await client.subscribe("demo", settlement="auto"):
        ...

BlipMQ does not answer a PUBLISH. It does answer a PING, and everything that was sent before a PING has been dealt with when its PONG
comes; the server holds the PONG back until all of it is durable. So one PING confirms any number of publishes, and one PING
behind a number of POLLs tells that no more deliveries will come for them.

A lost connection is sought again for ever. What was published with QoS 1 and not confirmed is then sent once more, in order: delivery is
at least once. Subscriptions go on where they were: they belong to the API key, not to the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from headrace.clients.backoff import Backoff, exponential
from headrace.clients.batching import batches_of, then
from headrace.clients.blipmq.subscription import Subscription
from headrace.clients.errors import ConnectFailed, NotSent, NotSupported, OutcomeUnknown, Refused
from headrace.clients.messages import Key, OnState, Receipt, Settlement, Start
from headrace.clients.reconnecting import StreamClient
from headrace.clients.stream import Stream
from headrace.clients.tls import TlsOptions
from headrace.clients.unsupported import READERS
from headrace.clients.window import Unacknowledged, Window
from headrace.errors import RecordTooLarge, WireError
from headrace.limits import MIB
from headrace.records import Headers
from headrace.wire.blipmq import AckBatch, Decoder, Malformed, Message, Nack, Pong, PublishBatch, encoder

DEFAULT_PORT: Final = 5555
RUN_RECORDS_MAX: Final = 1_024
"""`publish_many` sends runs of at most so many."""
PARTITION: Final = 0
"""Where the server puts what is published over BlipMQ."""
_FIRST_PUBLISH: Final = 1 << 62
_FIRST_REQUEST: Final = 1 << 63
"""Correlation ids are far from delivery tags, which count up from 1: a NACK of an ACK is then never mistaken for that of a request."""
_KINDS: Final = {401: "not_authorized"}
"""What kind of refusal a NACK's code is, where it says more than that there is one."""
_HANDSHAKE: Final = (_FIRST_REQUEST, _FIRST_REQUEST + 1)


@dataclass(frozen=True, slots=True)
class BlipMqOptions:
    """What a user may choose."""

    connect_seconds: float = 5.0
    ping_seconds: float = 5.0
    pings_unanswered_max: int = 4
    """After so many times `ping_seconds` without a byte, while an answer is due, the connection counts as lost."""
    window_records_max: int = 65_536
    window_bytes_max: int = 8 * MIB
    """Published and not confirmed; whoever publishes more waits."""
    batch_max: int = 128
    """Messages asked for at once, for a subscription whose user keeps up."""
    tls: TlsOptions | None = None
    backoff: Backoff = exponential()
    on_state: OnState = lambda state, reason: None


@dataclass(slots=True)
class _Fence:
    """A PING, and what its PONG will mean."""

    cid: int
    done: asyncio.Future[None]
    confirms: int | None = None
    """The last publish before it."""
    polls: Subscription | None = None
    """Whose POLLs are before it; deliveries that come while this is the oldest fence are theirs."""


class BlipMqClient(StreamClient):
    """Use `connect`. All methods are for one event loop."""

    protocol: ClassVar[str] = "BlipMQ"
    instead: ClassVar[Mapping[str, str]] = {
        "fetch": "subscribe, and acknowledge what comes; flymq:// and rustlog:// read from an offset",
        "create_topic": "publishing creates the topic, if the broker allows it",
    }

    def __init__(self, host: str, port: int, api_key: bytes, options: BlipMqOptions) -> None:
        self._window = Window(records_max=options.window_records_max, bytes_max=options.window_bytes_max)
        super().__init__(host, port, self._window, backoff=options.backoff, on_state=options.on_state)
        self._api_key, self._options = api_key, options
        self._decoder = Decoder()
        self._handshake: asyncio.Future[None] | None = None
        self._next_cid = _FIRST_REQUEST
        self._fences: deque[_Fence] = deque()
        self._sent_seq = -1
        self._is_confirming = False
        self._loose_bytes = 0
        """Sent with QoS 0 since the last PONG."""
        self._subscriptions: list[Subscription] = []
        self._subscribing: dict[int, tuple[Subscription, asyncio.Future[None]]] = {}
        self._connected = asyncio.Event()
        self._silences = 0
        self.refused_acks = 0
        """ACKs that came too late: the message had been delivered again or given up."""

    @classmethod
    async def connect(
        cls, host: str = "127.0.0.1", port: int = DEFAULT_PORT, *, api_key: bytes | str, options: BlipMqOptions = BlipMqOptions()
    ) -> BlipMqClient:
        """Raises `ConnectFailed` or `Refused` when the first connection cannot be had; later ones are sought until it works."""
        client = cls(host, port, api_key.encode() if isinstance(api_key, str) else api_key, options)
        await client._open()
        return client

    @property
    def unacknowledged(self) -> int:
        """Records published with QoS 1 and not confirmed."""
        return len(self._window)

    # Publishing.

    async def send(self, topic: str, value: bytes) -> asyncio.Future[None]:
        """Publish without waiting for the confirmation: the future is done when it comes. Waits only for room in the window.

        The future fails with `Refused`, or with `OutcomeUnknown` or `NotSent` when the client is closed first.
        """
        return (await self._publish(topic, [value])).done

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None
    ) -> asyncio.Future[list[Receipt]]:
        """As `send`, for a run of values that leave together: the future is done when all of them are durable."""
        _check_place(key, partition)
        count = len(values)
        return then((await self._publish(topic, list(values))).done, lambda _: [Receipt(topic, PARTITION)] * count)

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = (), qos: int = 1
    ) -> Receipt:
        """QoS 1 returns when the record is durable. QoS 0 returns when it is on its way, and raises `NotSent` without a connection.

        BlipMQ does not tell the offset.
        """
        _check_place(key, partition, headers)
        if qos:
            await (await self.send(topic, value))
        else:
            await self._send_loose(topic, [value])
        return Receipt(topic, PARTITION)

    async def publish_many(
        self, topic: str, values: Iterable[bytes] | AsyncIterable[bytes], *, key: Key = None, partition: int | None = None, qos: int = 1
    ) -> int:
        """Publish all values, as fast as the window allows; returns how many, when the last is durable.

        Raises the first refusal, after which no further values are sent; those before it may have been kept.
        """
        _check_place(key, partition)
        count = 0
        outstanding: deque[asyncio.Future[None]] = deque()
        async for batch in batches_of(values, RUN_RECORDS_MAX):
            if qos:
                outstanding.append((await self._publish(topic, batch)).done)
            else:
                await self._send_loose(topic, batch)
            count += len(batch)
            while outstanding and outstanding[0].done():
                outstanding.popleft().result()
        for done in outstanding:
            await done
        return count

    async def flush(self) -> None:
        """Returns when everything published so far is durable or refused. Raises `ClientClosed` when that cannot happen any more."""
        await self._window.emptied()
        if not self._is_closed:
            await self._connected.wait()
            try:
                await self._fence()
            except OutcomeUnknown:
                pass  # only QoS 0 was on its way, and it may be lost
        self._check_open()

    async def _publish(self, topic: str, values: list[bytes]) -> Unacknowledged:
        self._check_open()
        _check_size(topic, values)
        entry = await self._window.enter(topic, values)
        if self._stream is not None:
            self._write_entry(self._stream, entry)
            self._confirm(self._stream)
        return entry

    def _write_entry(self, stream: Stream, entry: Unacknowledged) -> None:
        entry.was_sent = True
        self._sent_seq = max(self._sent_seq, entry.last_seq)
        cids = range(_FIRST_PUBLISH + entry.first_seq, _FIRST_PUBLISH + entry.last_seq + 1)
        stream.write(encoder.publishes(1, entry.topic, cids, entry.values))

    def _confirm(self, stream: Stream) -> None:
        """One confirmation is under way at a time: while it is, publishes gather for the next."""
        if not self._is_confirming:
            self._is_confirming = True
            self._ping(stream).confirms = self._sent_seq

    async def _send_loose(self, topic: str, values: list[bytes]) -> None:
        """QoS 0: not kept, not sent again. A PING now and then keeps what is on its way within the window."""
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
        start: Start = "end",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
        qos: int = 1,
    ) -> Subscription:
        """Follow what is published from now on. Returns when the server has agreed; raises `Refused` if it has not."""
        if start != "end":
            raise NotSupported(self.protocol, "reading what was published before", READERS)
        if group is not None:
            raise NotSupported(self.protocol, "groups", READERS)
        _check_place(None, partition)
        self._check_open()
        subscription = Subscription(self, topic, qos, settlement=settlement, batch_max=self._options.batch_max)
        self._subscriptions.append(subscription)
        try:
            await self._subscribed(subscription)
        except BaseException:
            self._subscriptions.remove(subscription)
            raise
        return subscription

    async def _subscribed(self, subscription: Subscription) -> None:
        """Ask for the subscription until a connection lives long enough to hear the answer."""
        while subscription.id is None:
            self._check_open()
            await self._connected.wait()
            if self._stream is None:
                continue
            cid, answer = self._cid(), self._loop.create_future()
            self._subscribing[cid] = (subscription, answer)
            self._stream.write(encoder.subscribe(cid, subscription.topic, subscription.qos))
            try:
                await answer
            except OutcomeUnknown:
                continue
            finally:
                self._subscribing.pop(cid, None)

    async def ping(self) -> None:
        """Returns when the server has dealt with everything that was sent before. Raises `OutcomeUnknown` if it cannot tell any more."""
        self._check_open()
        await self._connected.wait()
        self._check_open()
        await self._fence()

    async def poll(self, subscription: Subscription, count: int) -> None:
        """For subscriptions: ask for so many messages. Done when all there were have arrived, or the connection is lost."""
        self._check_open()
        if subscription.id is None:
            await self._subscribed(subscription)
        await self._connected.wait()
        if self._stream is None or subscription.id is None:
            return
        self._stream.write(encoder.polls(subscription.id, [self._cid() for _ in range(count)]))
        fence = self._ping(self._stream)
        fence.polls = subscription
        try:
            await fence.done
        except OutcomeUnknown:
            pass  # what was delivered and did not arrive comes again

    def acknowledge(self, subscription: Subscription, tags: list[int]) -> None:
        """For subscriptions. Without a connection nothing is sent: the deliveries come again."""
        if self._stream is not None and subscription.id is not None:
            self._stream.write(encoder.acks(subscription.id, tags))

    # Receiving.

    def _receive(self, data: bytes) -> None:
        self._silences = 0
        try:
            for message in self._decoder.feed(data):
                self._handle(message)
        except WireError as failure:
            reason = f"the server cannot be understood: {failure}"
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
                self._refused(cid, Refused(code=code, text=text, kind=_KINDS.get(code, "")))
            case Malformed():
                pass
            case _:
                raise WireError(f"a server does not send {type(message).__name__}")

    def _passed(self, cid: int) -> None:
        """Fences are passed in their order."""
        if not self._fences or self._fences[0].cid != cid:
            raise WireError("a PONG nobody waits for")
        fence = self._fences.popleft()
        self._loose_bytes = self._attempt = 0
        if fence.confirms is not None:
            self._is_confirming = False
            self._window.acknowledge(fence.confirms)
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

    def _refused(self, cid: int, refusal: Refused) -> None:
        if cid in _HANDSHAKE:
            if self._handshake is not None and not self._handshake.done():
                self._handshake.set_exception(refusal)
        elif cid in self._subscribing:
            _, answer = self._subscribing.pop(cid)
            if not answer.done():
                answer.set_exception(refusal)
        elif _FIRST_PUBLISH <= cid < _FIRST_REQUEST:
            self._refused_publish(cid - _FIRST_PUBLISH, refusal)
        elif cid < _FIRST_PUBLISH:
            self.refused_acks += 1
        elif self._fences and (subscription := self._fences[0].polls) is not None and refusal.code == 404:
            subscription.forgotten()

    def _refused_publish(self, seq: int, refusal: Refused) -> None:
        for entry in self._window.unacknowledged():
            if entry.first_seq <= seq <= entry.last_seq and not entry.done.done():
                entry.done.set_exception(refusal)
                entry.done.exception()  # whoever does not await the future does not care
                return

    # Fences.

    def _cid(self) -> int:
        self._next_cid += 1
        return self._next_cid - 1

    def _ping(self, stream: Stream) -> _Fence:
        fence = _Fence(self._cid(), self._loop.create_future())
        fence.done.add_done_callback(_look_at)
        self._fences.append(fence)
        stream.write(encoder.ping(fence.cid))
        return fence

    async def _fence(self) -> None:
        """Done when everything sent before it has been dealt with. Raises `OutcomeUnknown` if the connection is lost before."""
        if self._stream is not None:
            await self._ping(self._stream).done

    # The connection.

    async def _open(self) -> None:
        options = self._options
        self._decoder, self._handshake, self._next_cid = Decoder(), self._loop.create_future(), _FIRST_REQUEST
        self._handshake.add_done_callback(_look_at)
        stream = await self._connect(options.connect_seconds, options.tls)
        hello, auth = self._cid(), self._cid()
        assert (hello, auth) == _HANDSHAKE
        stream.write(encoder.hello(hello) + encoder.auth(auth, self._api_key))
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
        self._look_again(options.ping_seconds, self._keep_alive)
        self._connected.set()
        self._send_again(stream)
        self._opened()

    def _send_again(self, stream: Stream) -> None:
        """What was published and is neither confirmed nor refused, in order."""
        for entry in self._window.unacknowledged():
            if not entry.done.done():
                self._write_entry(stream, entry)
        if len(self._window):
            self._confirm(stream)

    def _lost(self, reason: str) -> None:
        if self._stream is None:
            self._fail_handshake(reason)
        else:
            super()._lost(reason)

    def _part(self) -> None:
        super()._part()
        self._connected.clear()
        self._is_confirming = False
        self._loose_bytes = 0
        self._fail_answers()

    def _fail_handshake(self, reason: str) -> None:
        if self._handshake is not None and not self._handshake.done():
            self._handshake.set_exception(ConnectFailed(host=self._host, port=self._port, reason=reason))

    def _fail_answers(self) -> None:
        fences, self._fences = self._fences, deque()
        answers = [fence.done for fence in fences] + [answer for _, answer in self._subscribing.values()]
        self._subscribing.clear()
        for answer in answers:
            if not answer.done():
                answer.set_exception(OutcomeUnknown(0))
                answer.exception()

    def _keep_alive(self) -> None:
        """A connection is lost when an answer is due and not a byte comes; with no answer due, one is asked for."""
        stream = self._stream
        assert stream is not None, "keeping alive stops with its connection"
        if self._fences:
            self._silences += 1
            if self._silences >= self._options.pings_unanswered_max:
                stream.drop(f"no answer for {self._silences * self._options.ping_seconds:g} s")
                return
        else:
            self._ping(stream)
        self._look_again(self._options.ping_seconds, self._keep_alive)

    # The end.

    async def _finish(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        await super()._finish()

    def _release(self) -> None:
        for subscription in self._subscriptions:
            subscription.stop()
        super()._release()
        self._connected.set()  # whoever waits for a connection finds the client closed
        self._fail_answers()


def _look_at(done: asyncio.Future[None]) -> None:
    """A failure nobody waits for is no failure."""
    if not done.cancelled():
        done.exception()


def _check_size(topic: str, values: list[bytes]) -> None:
    bytes_max, largest = encoder.value_bytes_max(topic), max(map(len, values))
    if largest > bytes_max:
        raise RecordTooLarge(size_bytes=largest, bytes_max=bytes_max)


def _check_place(key: Key, partition: int | None, headers: Headers = ()) -> None:
    for what, is_wanted in (("keys", key is not None), ("headers", bool(headers)), ("partitions", partition is not None)):
        if is_wanted:
            raise NotSupported("BlipMQ", what, "flymq:// has keys and partitions" if what != "headers" else "")
