"""Figg client.

    client = await FiggClient.connect("127.0.0.1", 8119)
    await client.publish("demo", b"hello")
    async for message in await client.subscribe("demo", "earliest"):
        ...

The client reconnects indefinitely and sends unacknowledged records again, in order and with their sequence numbers: delivery is at least
once. Subscriptions resume after the last message received.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from headrace.clients.backoff import Backoff, exponential
from headrace.clients.batching import batches_of, then
from headrace.clients.errors import AlreadySubscribed, ClientClosed, NotSupported
from headrace.clients.figg.subscription import PARTITION, Subscription
from headrace.clients.messages import GroupMode, Key, OnState, Receipt, Settlement, Start, check_start
from headrace.clients.reconnecting import StreamClient
from headrace.clients.stream import Stream
from headrace.clients.tls import TlsOptions
from headrace.clients.unsupported import READERS
from headrace.clients.window import Unacknowledged, Window
from headrace.errors import InvalidTopicName, RecordTooLarge, WireError
from headrace.limits import FIGG_TOPIC_BYTES_MAX, MIB, VALUE_BYTES_MAX
from headrace.records import Headers
from headrace.wire.figg import AckBatch, Attached, DataBatch, Detached, Pong, ServerMessage, client_decoder, encode

DEFAULT_PORT: Final = 8119
BATCH_RECORDS_MAX: Final = 1_024
"""Records per batch of `publish_many`."""


@dataclass(frozen=True, slots=True)
class FiggOptions:
    """Options of a Figg connection."""

    connect_seconds: float = 5.0
    ping_seconds: float = 2.0
    pings_unanswered_max: int = 2
    """Number of unanswered pings after which the connection counts as lost."""
    window_records_max: int = 65_536
    window_bytes_max: int = 8 * MIB
    """Bounds of unacknowledged records; further publishers wait."""
    queue_bytes_max: int = 8 * MIB
    """Received, undelivered bytes per subscription above which the client stops reading the connection."""
    detach_seconds: float = 5.0
    """Longest wait for the reply to an unsubscribe: some servers send none."""
    tls: TlsOptions | None = None
    backoff: Backoff = exponential()
    on_state: OnState = lambda state, reason: None
    clock: Callable[[], int] = time.time_ns
    """Clock for the payload of pings, which only the client reads."""


@dataclass(slots=True)
class _Topic:
    """State of a topic on one connection: expected replies in order, and the receiver of data."""

    due: deque[Subscription | asyncio.Future[None]]
    """A subscription awaits ATTACHED, a future awaits DETACHED."""
    receiver: Subscription | None = None


class FiggClient(StreamClient):
    """Figg client, created by `connect`. Belongs to one event loop."""

    protocol: ClassVar[str] = "Figg"
    instead: ClassVar[Mapping[str, str]] = {
        "fetch": "subscribe from the offset",
        "create_topic": "publishing creates the topic, if the broker allows it",
    }

    def __init__(self, host: str, port: int, options: FiggOptions) -> None:
        self._window = Window(records_max=options.window_records_max, bytes_max=options.window_bytes_max)
        super().__init__(host, port, self._window, backoff=options.backoff, on_state=options.on_state)
        self._options = options
        self._subscriptions: dict[str, Subscription] = {}
        self._detaching: dict[str, asyncio.Future[None]] = {}
        self._full: set[str] = set()
        """Topics whose subscription queue is full."""
        self._decoder = client_decoder()
        self._topics: dict[str, _Topic] = {}
        self._owes_progress = False
        """Whether resent records await their first acknowledgement on this connection."""
        self._pings_unanswered = 0
        self._received = asyncio.Event()

    @classmethod
    async def connect(cls, host: str = "127.0.0.1", port: int = DEFAULT_PORT, options: FiggOptions = FiggOptions()) -> FiggClient:
        """Connect. Raises `ConnectFailed` if the first connection fails; later the client reconnects indefinitely."""
        client = cls(host, port, options)
        await client._open()
        return client

    @property
    def unacknowledged(self) -> int:
        """Number of records published and not acknowledged."""
        return len(self._window)

    # Publishing.

    async def send(self, topic: str, value: bytes) -> asyncio.Future[None]:
        """Publish a record. Waits for room in the window; the future resolves with the acknowledgement.

        The future fails with `OutcomeUnknown` or `NotSent` if the client is closed first.
        """
        return (await self._publish(topic, [value])).done

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None
    ) -> asyncio.Future[list[Receipt]]:
        """Publish values as one batch. The future resolves when the last is acknowledged."""
        _check_place(key, partition)
        count = len(values)
        return then((await self._publish(topic, list(values))).done, lambda _: [Receipt(topic, PARTITION)] * count)

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> Receipt:
        """Publish a record and wait for the acknowledgement. Figg does not report its offset."""
        _check_place(key, partition, headers)
        await (await self.send(topic, value))
        return Receipt(topic, PARTITION)

    async def publish_many(
        self, topic: str, values: Iterable[bytes] | AsyncIterable[bytes], *, key: Key = None, partition: int | None = None
    ) -> int:
        """Publish all values as fast as the window allows. Returns their number once the last is acknowledged."""
        _check_place(key, partition)
        count = 0
        last: asyncio.Future[None] | None = None
        async for batch in batches_of(values, BATCH_RECORDS_MAX):
            last = (await self._publish(topic, batch)).done
            count += len(batch)
        if last is not None:
            await last
        return count

    async def _publish(self, topic: str, values: list[bytes]) -> Unacknowledged:
        self._check_open()
        _check_topic(topic)
        largest = max(map(len, values))
        if largest > VALUE_BYTES_MAX:
            raise RecordTooLarge(size_bytes=largest, bytes_max=VALUE_BYTES_MAX)
        entry = await self._window.enter(topic, values)
        if self._stream is not None:
            self._write_entry(self._stream, entry)
        return entry

    def _write_entry(self, stream: Stream, entry: Unacknowledged) -> None:
        entry.was_sent = True
        stream.write(encode.publish(entry.topic, range(entry.first_seq, entry.last_seq + 1), entry.values))

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
    ) -> Subscription:
        """Follow a topic from `"earliest"`, `"latest"` (only new records) or an offset. Waits for the server's confirmation.

        The server may start at another offset, the first or the end offset: see `Subscription.started`.
        """
        _check_place(None, partition)
        if group is not None or settlement == "auto" or mode is not None:
            raise NotSupported(self.protocol, "groups", READERS)
        if not isinstance(start, str | int):
            raise self._unsupported("offset_for_time", "looking up times", "flymq:// does, on the same topics")
        self._check_open()
        check_start(start)
        _check_topic(topic)
        if topic in self._subscriptions:
            raise AlreadySubscribed(topic)
        offset = {"earliest": 0, "latest": None}[start] if isinstance(start, str) else start
        subscription = Subscription(
            topic,
            offset,
            queue_bytes_max=self._options.queue_bytes_max,
            full=lambda is_full: self._queue_changed(topic, is_full),
            end=lambda: self.unsubscribe(topic),
        )
        self._subscriptions[topic] = subscription
        if self._stream is not None:
            self._attach(self._stream, subscription)
        try:
            await asyncio.shield(subscription.started)
        except asyncio.CancelledError:
            if self._is_closed and subscription.started.cancelled():
                raise ClientClosed("the client was closed") from None
            self._give_up(subscription)
            raise
        return subscription

    async def unsubscribe(self, topic: str) -> None:
        """Stop following a topic and wait for the server's confirmation."""
        subscription = self._subscriptions.get(topic)
        if subscription is None:
            return
        detached = self._detaching[topic] = self._give_up(subscription)
        try:
            async with asyncio.timeout(self._options.detach_seconds):
                await asyncio.shield(detached)
        except TimeoutError:
            pass
        finally:
            if self._detaching.get(topic) is detached:
                del self._detaching[topic]

    def _give_up(self, subscription: Subscription) -> asyncio.Future[None]:
        """Detach a subscription. The future resolves with the server's confirmation."""
        del self._subscriptions[subscription.topic]
        subscription.stop()
        detached: asyncio.Future[None] = self._loop.create_future()
        if self._stream is not None:
            self._detach(self._stream, subscription.topic, detached)
        return detached

    def _attach(self, stream: Stream, subscription: Subscription) -> None:
        self._on_wire(subscription.topic).due.append(subscription)
        stream.write(encode.attach(subscription.topic, subscription.resume_offset))

    def _detach(self, stream: Stream, topic: str, detached: asyncio.Future[None]) -> None:
        self._on_wire(topic).due.append(detached)
        stream.write(encode.detach(topic))

    def _on_wire(self, topic: str) -> _Topic:
        return self._topics.setdefault(topic, _Topic(deque()))

    def _queue_changed(self, topic: str, is_full: bool) -> None:
        """Pause or resume reading. One full subscription pauses all: they share the byte stream."""
        before = bool(self._full)
        self._full = self._full | {topic} if is_full else self._full - {topic}
        if self._stream is not None and before != bool(self._full):
            if is_full:
                self._stream.pause_reading()
            else:
                self._stream.resume_reading()

    # Receiving.

    async def ping(self) -> None:
        """Send a PING and wait until the server sends anything; it must send at least a PONG."""
        self._check_open()
        self._received.clear()
        if self._stream is not None:
            self._stream.write(encode.ping(self._options.clock() & ((1 << 64) - 1)))
        await self._received.wait()
        self._check_open()

    def _receive(self, data: bytes) -> None:
        self._pings_unanswered = 0
        self._received.set()
        try:
            for message in self._decoder.feed(data):
                self._handle(message)
        except WireError as failure:
            self._drop_undecodable(failure)

    def _handle(self, message: ServerMessage) -> None:
        match message:
            case AckBatch(seqs):
                if self._window.acknowledge(max(seqs)):
                    self._attempt, self._owes_progress = 0, False
            case DataBatch(topic):
                receiver = self._on_wire(topic).receiver
                if receiver is not None:
                    receiver.arrived(message)
            case Attached(topic, offset):
                self._answered_attach(self._on_wire(topic), offset)
            case Detached(topic):
                self._answered_detach(self._on_wire(topic))
            case Pong():
                pass
        if not self._owes_progress:
            self._attempt = 0

    def _answered_attach(self, known: _Topic, offset: int) -> None:
        """Match ATTACHED to the oldest subscription. Skips DETACH requests, which some servers do not answer."""
        while known.due:
            due = known.due.popleft()
            if isinstance(due, Subscription):
                known.receiver = due
                due.attached(offset)
                return
            _resolve(due)

    def _answered_detach(self, known: _Topic) -> None:
        known.receiver = None
        due = known.due.popleft() if known.due else None
        if isinstance(due, Subscription):
            known.due.appendleft(due)  # unsolicited DETACHED
        elif due is not None:
            _resolve(due)

    # The connection.

    async def _open(self) -> None:
        options = self._options
        stream = await self._connect(options.connect_seconds, options.tls)
        if self._is_closed:
            stream.close()
            return
        self._stream, self._decoder, self._topics = stream, client_decoder(), {}
        self._pings_unanswered = 0
        self._ping()
        self._resume(stream)
        self._opened()

    def _resume(self, stream: Stream) -> None:
        """Repeat open requests on a new connection: attach, detach, then publish, in order."""
        for subscription in self._subscriptions.values():
            self._attach(stream, subscription)
        for topic, detached in self._detaching.items():
            if topic not in self._subscriptions:
                self._detach(stream, topic, detached)
        self._owes_progress = False
        for entry in self._window.unacknowledged():
            self._owes_progress = True
            self._write_entry(stream, entry)
        if self._full:
            stream.pause_reading()

    def _ping(self) -> None:
        """Ping periodically, first on connecting: a server with a shared port detects the protocol by it."""
        stream = self._stream
        assert stream is not None, "pings stop with their connection"
        if self._pings_unanswered >= self._options.pings_unanswered_max and not stream.is_paused:
            stream.drop(f"{self._pings_unanswered} pings unanswered")
            return
        stream.write(encode.ping(self._options.clock() & ((1 << 64) - 1)))
        self._pings_unanswered += 1
        self._schedule(self._options.ping_seconds, self._ping)

    def _release(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.stop()
        for detached in self._detaching.values():
            _resolve(detached)
        self._received.set()
        super()._release()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _check_topic(topic: str) -> None:
    if len(topic.encode()) > FIGG_TOPIC_BYTES_MAX:
        raise InvalidTopicName(f"a topic name of {len(topic.encode())} bytes exceeds the {FIGG_TOPIC_BYTES_MAX} that Figg can carry")


def _check_place(key: Key, partition: int | None, headers: Headers = ()) -> None:
    for what, is_wanted in (("keys", key is not None), ("headers", bool(headers)), ("partitions", bool(partition))):
        if is_wanted:
            raise NotSupported("Figg", what, "flymq:// has keys and partitions" if what != "headers" else "")
