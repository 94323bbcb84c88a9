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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from headrace.clients.errors import AlreadySubscribed, NotSupported
from headrace.clients.figg.subscription import PARTITION, Subscription
from headrace.clients.messages import GroupMode, Settlement, Start, check_start
from headrace.clients.options import ClientOptions
from headrace.clients.publishing import Records
from headrace.clients.reconnecting import StreamClient
from headrace.clients.stream import Stream
from headrace.clients.unsupported import READERS
from headrace.clients.window import NumberedBatch, NumberedWindow
from headrace.errors import InvalidTopicName, RecordTooLarge, WireError
from headrace.limits import FIGG_TOPIC_BYTES_MAX, MIB, VALUE_BYTES_MAX
from headrace.wire.figg import AckBatch, Attached, DataBatch, Detached, Pong, ServerMessage, client_decoder, encode

DEFAULT_PORT: Final = 8119


@dataclass(frozen=True, slots=True, kw_only=True)
class FiggOptions(ClientOptions):
    """Options of a Figg connection."""

    ping_seconds: float = 2.0
    pings_unanswered_max: int = 2
    """Number of unanswered pings after which the connection counts as lost."""
    queue_bytes_max: int = 8 * MIB
    """Received, undelivered bytes per subscription above which the client stops reading the connection."""
    detach_seconds: float = 5.0
    """Longest wait for the reply to an unsubscribe: some servers send none."""
    clock: Callable[[], int] = time.time_ns
    """Clock for the payload of pings, which only the client reads."""


@dataclass(slots=True)
class _Topic:
    """State of a topic on one connection: expected replies in order, and the receiver of data."""

    due: deque[Subscription | asyncio.Future[None]]
    """A subscription awaits ATTACHED, a future awaits DETACHED."""
    receiver: Subscription | None = None


class FiggClient(StreamClient[FiggOptions]):
    """Figg client, created by `connect`. Belongs to one event loop."""

    protocol: ClassVar[str] = "Figg"
    default_port: ClassVar[int] = DEFAULT_PORT
    default_options: ClassVar[ClientOptions] = FiggOptions()
    only_partition: ClassVar[int | None] = PARTITION
    batch_records_max: ClassVar[int] = 1_024
    instead: ClassVar[Mapping[str, str]] = {
        "fetch": "subscribe from the offset",
        "create_topic": "publishing creates the topic, if the broker allows it",
    }

    def __init__(self, host: str, port: int, options: FiggOptions) -> None:
        self._unacknowledged = NumberedWindow(records_max=options.window_records_max, bytes_max=options.window_bytes_max)
        super().__init__(host, port, options, self._unacknowledged)
        self._subscriptions: dict[str, Subscription] = {}
        self._detaching: dict[str, asyncio.Future[None]] = {}
        self._full: set[str] = set()
        """Topics whose subscription queue is full."""
        self._decoder = client_decoder()
        self._topics: dict[str, _Topic] = {}
        self._pings_unanswered = 0
        self._received = asyncio.Event()

    async def _submit(self, records: Records) -> Sequence[NumberedBatch]:
        _check_topic(records.topic)
        largest = max(map(len, records.values))
        if largest > VALUE_BYTES_MAX:
            raise RecordTooLarge(size_bytes=largest, bytes_max=VALUE_BYTES_MAX)
        batch = NumberedBatch(records.topic, records.values, PARTITION)
        await self._unacknowledged.enter(batch)
        if self._stream is not None:
            self._write_batch(self._stream, batch)
        return [batch]

    def _write_batch(self, stream: Stream, batch: NumberedBatch) -> None:
        batch.was_sent = True
        stream.write(encode.publish(batch.topic, range(batch.first_seq, batch.last_seq + 1), batch.values))

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
        self._check(topic, None, partition, ())
        check_start(start)
        if group is not None or settlement == "auto" or mode is not None:
            raise NotSupported(self.protocol, "groups", READERS)
        if not isinstance(start, str | int):
            raise self._unsupported("offset_for_time", "looking up times", "flymq:// does, on the same topics")
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
            if subscription.started.cancelled():
                self._check_open()
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

    @property
    def _is_waiting(self) -> bool:
        """Whether a record or a subscription waits. Even a confirmed subscription may be refused: Figg checks the right to read later."""
        return bool(self._subscriptions) or super()._is_waiting

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
        try:
            for message in self._decoder.feed(data):
                self._received.set()
                self._handle(message)
        except WireError as failure:
            self._drop_undecodable(failure)

    def _handle(self, message: ServerMessage) -> None:
        match message:
            case AckBatch(seqs):
                if self._unacknowledged.acknowledge(max(seqs)):
                    self._progressed()
            case DataBatch(topic):
                receiver = self._on_wire(topic).receiver
                if receiver is not None:
                    receiver.arrived(message)
                    self._progressed()
            case Attached(topic, offset):
                self._answered_attach(self._on_wire(topic), offset)
            case Detached(topic):
                self._answered_detach(self._on_wire(topic))
            case Pong():
                pass

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
        stream = await self._connect()
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
        for batch in self._unacknowledged.unanswered():
            self._write_batch(stream, batch)
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
            subscription.stop(self._failure)
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
