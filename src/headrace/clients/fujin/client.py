"""Fujin client.

    client = await FujinClient.connect("127.0.0.1", 4848)
    await client.publish("demo", b"hello")
    async for message in await client.subscribe("demo"):
        await message.ack()

The client reconnects indefinitely and sends unanswered writes again: delivery is at least once. Readers reconnect, and their group
continues with unacknowledged messages.

Fujin has names instead of topics. The server's connectors map a name to a topic, a group and a start position. Without a connector, a
name is the topic of that name.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from headrace.clients.backoff import Backoff, exponential
from headrace.clients.batching import batches_of, then
from headrace.clients.errors import NotSupported, OutcomeUnknown, Refused
from headrace.clients.fujin.connection import Connection, open_connection, trust
from headrace.clients.fujin.streams import ReaderStream, WriterStream
from headrace.clients.fujin.subscription import Delivery, Subscription
from headrace.clients.fujin.transaction import Transaction
from headrace.clients.fujin.window import WriteWindow, Written
from headrace.clients.messages import GroupMode, Key, Message, OnState, Receipt, Settlement, Start
from headrace.clients.reconnecting import ReconnectingClient
from headrace.clients.tls import TlsOptions
from headrace.errors import InvalidRequest
from headrace.limits import MIB
from headrace.records import Headers
from headrace.wire.fujin import Fetched, ReaderKind, Request, WriteForm, encode

DEFAULT_PORT: Final = 4848
BATCH_RECORDS_MAX: Final = 2_048
"""Records per batch of `publish_many`."""
FETCH_RECORDS: Final = 1_000


@dataclass(frozen=True, slots=True)
class FujinOptions:
    """Options of a Fujin connection."""

    connect_seconds: float = 5.0
    idle_seconds: float = 30.0
    """The connection counts as lost if nothing arrives for this time; the server pings more often."""
    writer_id: bytes | int | None = None
    """Id of the transactional writer. A newer writer with the same id aborts transactions of the older one."""
    write_form: WriteForm = WriteForm.AUTO
    """Form of writes, with or without headers, as configured on the server's listener."""
    window_records_max: int = 65_536
    window_bytes_max: int = 8 * MIB
    """Bounds of unanswered writes; further writers wait."""
    queue_bytes_max: int = 8 * MIB
    """Received, undelivered bytes per subscription above which the server gets no more credit."""
    tls: TlsOptions | None = None
    """TLS options. None: trust the system's CAs, and any certificate on loopback."""
    fingerprint: str | None = None
    """SHA-256 of the server's certificate, which then needs no CA."""
    backoff: Backoff = exponential()
    on_state: OnState = lambda state, reason: None


class FujinClient(ReconnectingClient):
    """Fujin client, created by `connect`. Belongs to one event loop."""

    protocol: ClassVar[str] = "Fujin"
    instead: ClassVar[Mapping[str, str]] = {"create_topic": "writing creates the topic, if the broker allows it"}

    def __init__(self, host: str, port: int, options: FujinOptions) -> None:
        self._tls = trust(host, options.tls, options.fingerprint)
        self._window = WriteWindow(records_max=options.window_records_max, bytes_max=options.window_bytes_max)
        super().__init__(host, port, self._window, backoff=options.backoff, on_state=options.on_state)
        self._options = options
        self._connection: Connection | None = None
        self._writer: WriterStream | None = None
        self._readers: dict[Subscription, ReaderStream | None] = {}
        self._pullers: dict[str, ReaderStream] = {}
        self._connected = asyncio.Event()
        self._following: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(cls, host: str = "127.0.0.1", port: int = DEFAULT_PORT, options: FujinOptions = FujinOptions()) -> FujinClient:
        """Connect. Raises `ConnectFailed` if the first connection fails; later the client reconnects indefinitely."""
        client = cls(host, port, options)
        await client._open()
        return client

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def unacknowledged(self) -> int:
        """Number of unanswered writes."""
        return len(self._window)

    # Publishing.

    async def send(self, topic: str, value: bytes, *, headers: Headers = ()) -> asyncio.Future[None]:
        """Write a record. Waits for room in the window; the future resolves with the reply.

        The future fails with `Refused`, or with `OutcomeUnknown` or `NotSent` if the client is closed first.
        """
        return (await self._write(topic, [value], headers)).done

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None
    ) -> asyncio.Future[list[Receipt]]:
        """Write values as one batch. The future resolves when all are durable."""
        _check_place(key, partition)
        count = len(values)
        return then((await self._write(topic, values)).done, lambda _: [Receipt(topic)] * count)

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> Receipt:
        """Write a record and wait until it is durable. Fujin does not report its partition and offset."""
        _check_place(key, partition)
        await (await self.send(topic, value, headers=headers))
        return Receipt(topic)

    async def publish_many(
        self, topic: str, values: Iterable[bytes] | AsyncIterable[bytes], *, key: Key = None, partition: int | None = None
    ) -> int:
        """Write all values as fast as the window allows. Returns their number once the last is durable.

        Raises the first error and sends no further values; other values in flight may have been written.
        """
        _check_place(key, partition)
        count = 0
        outstanding: deque[asyncio.Future[None]] = deque()
        async for batch in batches_of(values, BATCH_RECORDS_MAX):
            outstanding.append((await self._write(topic, batch)).done)
            count += len(batch)
            while outstanding and outstanding[0].done():
                outstanding.popleft().result()
        for done in outstanding:
            await done
        return count

    def transaction(self) -> Transaction:
        """Return a transaction: `async with client.transaction() as tx: await tx.publish(…)`."""
        self._check_open()
        return Transaction(self._open_writer, self._options.write_form)

    async def _open_writer(self) -> WriterStream:
        connection = await self._wait_connected()
        return WriterStream(connection, self._options.writer_id, answered=lambda cids, failure: None, over=lambda reason: None)

    async def _write(self, topic: str, values: Sequence[bytes], headers: Headers = ()) -> Written:
        self._check_open()
        # Reject before the window: a record that cannot be encoded would be resent indefinitely.
        for value in values:
            if not value:
                raise InvalidRequest("Fujin has no empty values")
            if len(value) > 0xFFFF or headers:
                encode.writes(topic, [b"\0\0\0\0"], [value], [headers], form=self._options.write_form)
        batch = await self._window.enter(topic, values, headers)
        if self._writer is not None:
            self._send(self._writer, batch)
        return batch

    def _send(self, writer: WriterStream, batch: Written) -> None:
        batch.was_sent = True
        headers = [batch.headers] * len(batch.values) if batch.headers else None
        writer.send(encode.writes(batch.name, list(batch.values), list(batch.values.values()), headers, form=self._options.write_form))

    def _answered(self, cids: Sequence[bytes], failure: Exception | None) -> None:
        if self._window.answer(cids, failure):
            self._attempt = 0

    # Reading.

    async def subscribe(
        self,
        topic: str,
        start: Start | None = None,
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
        mode: GroupMode | None = None,
        auto_commit: bool = False,
    ) -> Subscription:
        """Follow a name together with the other readers of its group. Waits for the server's confirmation. Raises `Refused`.

        The server's connector chooses where a new group begins; the default is the earliest record. With `auto_commit` the server
        settles a message on sending it.
        """
        _check_place(None, partition)
        if start not in (None, "earliest"):
            raise NotSupported(self.protocol, "choosing where to begin", "set start=latest in a connector of the server")
        if group not in (None, topic):
            raise NotSupported(self.protocol, "choosing a group", "set the group in a connector of the server")
        if mode is not None:
            raise NotSupported(self.protocol, "choosing the mode of a group", "set the mode in a connector of the server")
        self._check_open()
        options = self._options
        subscription = Subscription(self, topic, auto_commit=auto_commit, settlement=settlement, queue_bytes_max=options.queue_bytes_max)
        self._readers[subscription] = None
        try:
            while True:
                try:
                    await self._follow(await self._wait_connected(), subscription)
                    return subscription
                except OutcomeUnknown:
                    continue
        except BaseException:
            self._readers.pop(subscription, None)
            raise

    async def _follow(self, connection: Connection, subscription: Subscription) -> None:
        stream = self._readers.get(subscription)
        if stream is None or not stream.is_open:
            stream = self._readers[subscription] = ReaderStream(
                connection,
                ReaderKind.PUSH,
                subscription.topic,
                auto_commit=subscription.auto_commit,
                arrived=subscription.arrived,
                credit_of=subscription.credit,
                over=self._interrupted,
            )
        await asyncio.shield(stream.connected)
        self._attempt = 0

    async def fetch(
        self, topic: str, offset: Start = "earliest", *, partition: int = 0, group: str | None = None, records_max: int | None = None
    ) -> list[Message]:
        """Return the next messages of the name's group. The list is empty if none arrive within the server's short wait.

        The server delivers unacknowledged messages again.
        """
        if offset != "earliest" or partition or group not in (None, topic):
            raise NotSupported(self.protocol, "fetching from an offset", "fetch without one returns the next messages of the name's group")
        self._check_open()
        connection = await self._wait_connected()
        stream = self._pullers.get(topic)
        if stream is None or not stream.is_open:
            stream = self._pullers[topic] = ReaderStream(
                connection,
                ReaderKind.PULL,
                topic,
                auto_commit=False,
                arrived=lambda batch: None,
                credit_of=lambda size_bytes: size_bytes,
                over=self._interrupted,
            )
        await asyncio.shield(stream.connected)
        answer = await stream.request(lambda cid: encode.fetch(cid, records_max or FETCH_RECORDS))
        assert isinstance(answer, Fetched) and answer.ids is not None
        settler = _Puller(self, topic)
        return [Delivery(topic, None, None, value, settler=settler, id=id) for id, value in zip(answer.ids, answer.values, strict=True)]

    async def ping(self) -> None:
        """Wait for one reply: connect a writer and disconnect it. Raises `OutcomeUnknown`."""
        stream = await self._open_writer()
        stream.leave()
        await stream.gone
        if not stream.is_answered:
            raise OutcomeUnknown(0)  # a server may reject a client after the client has completed the handshake

    # `Settling`, for subscriptions.

    async def settle(self, owner: object, request: Request, ids: Sequence[bytes]) -> list[bool]:
        """Settle messages. Without a connection none are settled and the server delivers them again."""
        self._check_open()
        stream = self._stream_of(owner)
        return [False] * len(ids) if stream is None else await stream.settle(request, ids)

    def settle_without_reply(self, owner: object, request: Request, ids: Sequence[bytes]) -> None:
        stream = self._stream_of(owner)
        if stream is not None:
            stream.settle_without_reply(request, ids)

    def used(self, owner: object, size_bytes: int) -> None:
        stream = self._stream_of(owner)
        if stream is not None:
            stream.taken(size_bytes)

    async def left(self, owner: object) -> None:
        stream = self._stream_of(owner)
        if isinstance(owner, Subscription):
            self._readers.pop(owner, None)
        if stream is not None:
            stream.leave()
            await stream.gone

    def _stream_of(self, owner: object) -> ReaderStream | None:
        if isinstance(owner, Subscription):
            return self._readers.get(owner)
        return self._pullers.get(owner.topic) if isinstance(owner, _Puller) else None

    # The connection.

    async def _wait_connected(self) -> Connection:
        while self._connection is None:
            self._check_open()
            await self._connected.wait()
        return self._connection

    async def _open(self) -> None:
        options = self._options
        connection = await open_connection(
            self._host, self._port, self._tls, self._lost, timeout_seconds=options.connect_seconds, idle_seconds=options.idle_seconds
        )
        if self._is_closed:
            connection.close()
            return
        self._connection = connection
        self._writer = WriterStream(connection, None, answered=self._answered, over=self._interrupted)
        for batch in self._window.unanswered():
            self._send(self._writer, batch)
        for subscription, stream in self._readers.items():
            if stream is not None:
                self._spawn(self._follow_again(connection, subscription))
        self._connected.set()
        self._opened()

    async def _follow_again(self, connection: Connection, subscription: Subscription) -> None:
        try:
            await self._follow(connection, subscription)
        except OutcomeUnknown:
            pass  # lost again: the next connection retries
        except Refused as error:
            self._readers.pop(subscription, None)
            subscription.stop(error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    def _interrupted(self, reason: str) -> None:
        """Drop the connection when the server ends a stream, to reconnect with new streams."""
        if self._connection is not None:
            self._connection.drop(reason)

    def _disconnected(self) -> None:
        self._connection = self._writer = None
        self._connected.clear()
        self._pullers.clear()
        for subscription in self._readers:
            subscription.interrupted()

    # The end.

    async def _finish(self) -> None:
        for subscription in list(self._readers):
            await subscription.close()
        await super()._finish()
        await self._disconnect_streams()

    async def _disconnect_streams(self) -> None:
        streams = [stream for stream in (self._writer, *self._pullers.values()) if stream is not None and stream.is_open]
        for stream in streams:
            stream.leave()
        for stream in streams:
            await stream.gone

    def _release(self) -> None:
        for task in self._following:
            task.cancel()
        for subscription in self._readers:
            subscription.stop()
        if self._connection is not None:
            self._connection.close()
            self._connection = self._writer = None
        self._connected.set()  # tasks that wait for a connection find the client closed


class _Puller:
    """Settles the messages of `fetch`."""

    def __init__(self, client: FujinClient, topic: str) -> None:
        self.topic = topic
        self._client = client

    async def ack(self, message: Message) -> bool:
        return await self._settle(Request.ACK, message)

    async def nack(self, message: Message) -> bool:
        return await self._settle(Request.NACK, message)

    async def _settle(self, request: Request, message: Message) -> bool:
        assert isinstance(message, Delivery), "this client delivered it"
        return (await self._client.settle(self, request, [message.id]))[0]


def _check_place(key: Key, partition: int | None) -> None:
    if key is not None:
        raise NotSupported("Fujin", "keys", "flymq:// and rustlog:// do, on the same topics")
    if partition is not None:
        raise NotSupported("Fujin", "partitions", "flymq:// and rustlog:// do, on the same topics")
