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
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from headrace.clients.errors import NotSent, NotSupported, OutcomeUnknown, Refused
from headrace.clients.fujin.connection import Connection, open_connection, trust
from headrace.clients.fujin.streams import ReaderStream, WriterStream
from headrace.clients.fujin.subscription import Delivery, Subscription
from headrace.clients.fujin.transaction import Transaction
from headrace.clients.fujin.window import WriteWindow, Written
from headrace.clients.messages import GroupMode, Message, Settlement, Start, check_start
from headrace.clients.options import ClientOptions
from headrace.clients.publishing import Records
from headrace.clients.reconnecting import ReconnectingClient
from headrace.errors import HeadraceError, InvalidRequest
from headrace.limits import MIB
from headrace.wire.fujin import Fetched, ReaderKind, Request, WriteForm, encode

DEFAULT_PORT: Final = 4848
FETCH_RECORDS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FujinOptions(ClientOptions):
    """Options of a Fujin connection. Without `tls`, the client trusts the system's CAs, and any certificate on loopback."""

    idle_seconds: float = 30.0
    """The connection counts as lost if nothing arrives for this time; the server pings more often."""
    writer_id: bytes | int | None = None
    """Id of the transactional writer. A newer writer with the same id aborts transactions of the older one."""
    write_form: WriteForm = WriteForm.AUTO
    """Form of writes, with or without headers, as configured on the server's listener."""
    queue_bytes_max: int = 8 * MIB
    """Received, undelivered bytes per subscription above which the server gets no more credit."""
    fingerprint: str | None = None
    """SHA-256 of the server's certificate, which then needs no CA."""


class FujinClient(ReconnectingClient[FujinOptions]):
    """Fujin client, created by `connect`. Belongs to one event loop."""

    protocol: ClassVar[str] = "Fujin"
    default_port: ClassVar[int] = DEFAULT_PORT
    default_options: ClassVar[ClientOptions] = FujinOptions()
    carries: ClassVar[frozenset[str]] = frozenset({"headers"})
    instead: ClassVar[Mapping[str, str]] = {"create_topic": "writing creates the topic, if the broker allows it"}

    def __init__(self, host: str, port: int, options: FujinOptions) -> None:
        self._writes = WriteWindow(records_max=options.window_records_max, bytes_max=options.window_bytes_max)
        super().__init__(host, port, options, self._writes)
        self._connection: Connection | None = None
        self._writer: WriterStream | None = None
        self._readers: dict[Subscription, ReaderStream | None] = {}
        self._pullers: dict[str, ReaderStream] = {}
        self._connected = asyncio.Event()
        self._following: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    # Publishing.

    def transaction(self) -> Transaction:
        """Return a transaction: `async with client.transaction() as tx: await tx.publish(…)`."""
        self._check_open()
        return Transaction(lambda: self._at_coordinator(self._begin), self._options.write_form)

    async def _begin(self) -> WriterStream:
        """Open a stream with a transaction. Raises `NotSent` if the connection is lost."""
        stream = await self._open_writer()
        try:
            await stream.request(lambda cid: encode.transact(Request.BEGIN, cid))
        except OutcomeUnknown:
            raise NotSent(0) from None
        except BaseException:
            stream.leave()
            raise
        return stream

    async def _open_writer(self) -> WriterStream:
        connection = await self._wait_connected()
        return WriterStream(connection, self._options.writer_id, answered=lambda cids, failure: None, over=lambda reason: None)

    async def _submit(self, records: Records) -> Sequence[Written]:
        # Reject before the window: a record that cannot be encoded would be resent indefinitely.
        for value in records.values:
            if not value:
                raise InvalidRequest("Fujin has no empty values")
            if len(value) > 0xFFFF or records.headers:
                encode.writes(records.topic, [b"\0\0\0\0"], [value], [records.headers], form=self._options.write_form)
        batch = Written(records.topic, records.values, records.headers)
        await self._writes.enter(batch)
        if self._writer is not None:
            self._send(self._writer, batch)
        return [batch]

    def _send(self, writer: WriterStream, batch: Written) -> None:
        batch.was_sent = True
        headers = [batch.headers] * len(batch.values) if batch.headers else None
        writer.send(encode.writes(batch.name, list(batch.values), list(batch.values.values()), headers, form=self._options.write_form))

    def _answered(self, cids: Sequence[bytes], failure: HeadraceError | None) -> None:
        if self._writes.answer(cids, failure):
            self._progressed()

    @property
    def _is_waiting(self) -> bool:
        return bool(self._readers) or super()._is_waiting

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
        self._check(topic, None, partition, ())
        if start is not None:
            check_start(start)
        if start not in (None, "earliest"):
            raise NotSupported(self.protocol, "choosing where to begin", "set start=latest in a connector of the server")
        if group not in (None, topic):
            raise NotSupported(self.protocol, "choosing a group", "set the group in a connector of the server")
        if mode is not None:
            raise NotSupported(self.protocol, "choosing the mode of a group", "set the mode in a connector of the server")
        options = self._options
        subscription = Subscription(self, topic, auto_commit=auto_commit, settlement=settlement, queue_bytes_max=options.queue_bytes_max)
        self._readers[subscription] = None
        try:
            while True:
                try:
                    await self._at_coordinator(lambda: self._follow_connected(subscription))
                    return subscription
                except OutcomeUnknown:
                    continue
        except BaseException:
            self._readers.pop(subscription, None)
            raise

    async def _follow_connected(self, subscription: Subscription) -> None:
        await self._follow(await self._wait_connected(), subscription)

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
        self._progressed()

    async def fetch(
        self, topic: str, offset: Start = "earliest", *, partition: int = 0, group: str | None = None, records_max: int | None = None
    ) -> list[Message]:
        """Return the next messages of the name's group. The list is empty if none arrive within the server's short wait.

        The server delivers unacknowledged messages again.
        """
        if offset != "earliest" or partition or group not in (None, topic):
            raise NotSupported(self.protocol, "fetching from an offset", "fetch without one returns the next messages of the name's group")
        return await self._at_coordinator(lambda: self._fetch(topic, records_max))

    async def _fetch(self, topic: str, records_max: int | None) -> list[Message]:
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
        return [Delivery.of(topic, id, value, settler) for id, value in zip(answer.ids, answer.values, strict=True)]

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
        # Per connection: only an address on loopback may be trusted without a certificate.
        tls = trust(self._host, options.tls, options.fingerprint)
        connection = await open_connection(
            self._host, self._port, tls, self._lost, timeout_seconds=options.connect_seconds, idle_seconds=options.idle_seconds
        )
        if self._is_closed:
            connection.close()
            return
        self._connection = connection
        self._writer = WriterStream(connection, None, answered=self._answered, over=self._interrupted)
        for batch in self._writes.unanswered():
            self._send(self._writer, batch)
        for subscription, stream in self._readers.items():
            if stream is not None:
                self._spawn(self._follow_again(subscription))
        self._connected.set()
        self._opened()

    async def _follow_again(self, subscription: Subscription) -> None:
        try:
            await self._at_coordinator(lambda: self._follow_connected(subscription))
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
        self._drop(reason)

    def _drop(self, reason: str) -> None:
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
            subscription.stop(self._failure)
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
