"""A Figg client that survives its connections.

    client = await FiggClient.connect("127.0.0.1", 8119)
    await client.publish("demo", b"hello")
    async for message in await client.subscribe("demo", "start"):
        ...

A lost connection is sought again for ever. What was published and not acknowledged is then sent once more, in order, under its old
numbers: delivery is at least once. Subscriptions resume behind the last message they received.
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
from headrace.clients.messages import Key, OnState, Receipt, Settlement, Start
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
RUN_RECORDS_MAX: Final = 1_024
"""`publish_many` sends runs of at most so many."""


@dataclass(frozen=True, slots=True)
class FiggOptions:
    """What a user may choose."""

    connect_seconds: float = 5.0
    ping_seconds: float = 2.0
    pings_unanswered_max: int = 2
    """With so many pings out, the connection counts as lost."""
    window_records_max: int = 65_536
    window_bytes_max: int = 8 * MIB
    """Published and not acknowledged; whoever publishes more waits."""
    queue_bytes_max: int = 8 * MIB
    """Received and not taken by the user, for each subscription, before the connection is no longer read."""
    detach_seconds: float = 5.0
    """How long an unsubscribe waits for its answer: some servers give none."""
    tls: TlsOptions | None = None
    backoff: Backoff = exponential()
    on_state: OnState = lambda state, reason: None
    clock: Callable[[], int] = time.time_ns
    """What pings carry; nobody but the client reads it."""


@dataclass(slots=True)
class _Topic:
    """What one connection knows of one topic: the answers that are due, in order, and who gets the data."""

    due: deque[Subscription | asyncio.Future[None]]
    """A subscription waits for its ATTACHED, a future for the DETACHED."""
    receiver: Subscription | None = None


class FiggClient(StreamClient):
    """Use `connect`. All methods are for one event loop."""

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
        """Topics whose subscription has enough for now."""
        self._decoder = client_decoder()
        self._topics: dict[str, _Topic] = {}
        self._owes_progress = False
        """Connected with records to send again, and none of them acknowledged yet."""
        self._pings_out = 0
        self._heard = asyncio.Event()

    @classmethod
    async def connect(cls, host: str = "127.0.0.1", port: int = DEFAULT_PORT, options: FiggOptions = FiggOptions()) -> FiggClient:
        """Raises `ConnectFailed` when the first connection cannot be had; later ones are sought until it works."""
        client = cls(host, port, options)
        await client._open()
        return client

    @property
    def unacknowledged(self) -> int:
        """Records published and not acknowledged."""
        return len(self._window)

    # Publishing.

    async def send(self, topic: str, value: bytes) -> asyncio.Future[None]:
        """Publish without waiting for the acknowledgement: the future is done when it comes. Waits only for room in the window.

        The future fails with `OutcomeUnknown` or `NotSent` when the client is closed first.
        """
        return (await self._publish(topic, [value])).done

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None
    ) -> asyncio.Future[list[Receipt]]:
        """As `send`, for a run of values that leave together: the future is done when the last is acknowledged."""
        _check_place(key, partition)
        count = len(values)
        return then((await self._publish(topic, list(values))).done, lambda _: [Receipt(topic, PARTITION)] * count)

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> Receipt:
        """Returns when the broker has acknowledged the record. Figg does not tell its offset."""
        _check_place(key, partition, headers)
        await (await self.send(topic, value))
        return Receipt(topic, PARTITION)

    async def publish_many(
        self, topic: str, values: Iterable[bytes] | AsyncIterable[bytes], *, key: Key = None, partition: int | None = None
    ) -> int:
        """Publish all values, as fast as the window allows; returns how many, when the last is acknowledged."""
        _check_place(key, partition)
        count = 0
        last: asyncio.Future[None] | None = None
        async for batch in batches_of(values, RUN_RECORDS_MAX):
            last = (await self._publish(topic, batch)).done
            count += len(batch)
        if last is not None:
            await last
        return count

    async def flush(self) -> None:
        """Returns when everything published so far is acknowledged. Raises `ClientClosed` when that cannot happen any more."""
        await self._window.emptied()
        self._check_open()

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
        start: Start = "end",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
    ) -> Subscription:
        """Follow a topic from its start, its end (only what is yet to come) or a record offset. Returns when the server has agreed.

        The server may start elsewhere than asked, at the oldest record or at the end: see `Subscription.started`.
        """
        _check_place(None, partition)
        if group is not None or settlement == "auto":
            raise NotSupported(self.protocol, "groups", READERS)
        if not isinstance(start, str | int):
            raise self._lacks("offset_for_time", "looking up times", "flymq:// does, on the same topics")
        self._check_open()
        _check_topic(topic)
        if topic in self._subscriptions:
            raise AlreadySubscribed(topic)
        offset = {"start": 0, "end": None}[start] if isinstance(start, str) else start
        subscription = Subscription(
            topic,
            offset,
            queue_bytes_max=self._options.queue_bytes_max,
            full=lambda is_full: self._mind_queue(topic, is_full),
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
        """Stop following a topic; returns when the server has confirmed it."""
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
        """The future is done when the server has confirmed it."""
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

    def _mind_queue(self, topic: str, is_full: bool) -> None:
        """One full subscription stops the reading for all: what lies behind its data on the wire cannot be had without it."""
        before = bool(self._full)
        self._full = self._full | {topic} if is_full else self._full - {topic}
        if self._stream is not None and before != bool(self._full):
            if is_full:
                self._stream.pause_reading()
            else:
                self._stream.resume_reading()

    # Receiving.

    async def ping(self) -> None:
        """Returns when the server has sent something after this was asked; it owes at least a PONG."""
        self._check_open()
        self._heard.clear()
        if self._stream is not None:
            self._stream.write(encode.ping(self._options.clock() & ((1 << 64) - 1)))
        await self._heard.wait()
        self._check_open()

    def _receive(self, data: bytes) -> None:
        self._pings_out = 0
        self._heard.set()
        try:
            for message in self._decoder.feed(data):
                self._handle(message)
        except WireError as failure:
            self._misunderstood(failure)

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
        """Answers come in the order of the requests; a server that does not answer DETACH is forgiven here."""
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
            known.due.appendleft(due)  # a DETACHED that nobody asked for
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
        self._pings_out = 0
        self._ping()
        self._take_up(stream)
        self._opened()

    def _take_up(self, stream: Stream) -> None:
        """Say on a new connection what the last one left open: attachments, detachments, then publishes, in order."""
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
        """The first ping goes out at once: a server that shares its port learns by it which protocol this is."""
        stream = self._stream
        assert stream is not None, "pings stop with their connection"
        if self._pings_out >= self._options.pings_unanswered_max and not stream.is_paused:
            stream.drop(f"{self._pings_out} pings unanswered")
            return
        stream.write(encode.ping(self._options.clock() & ((1 << 64) - 1)))
        self._pings_out += 1
        self._look_again(self._options.ping_seconds, self._ping)

    def _release(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.stop()
        for detached in self._detaching.values():
            _resolve(detached)
        self._heard.set()
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
