"""FlyMQ client.

    client = await FlyMqClient.connect("127.0.0.1", 9092)
    receipt = await client.publish("orders", b"hello", key=b"user-1")
    for message in await client.fetch("orders", receipt.offset, partition=receipt.partition):
        ...
    async for message in await client.subscribe("orders", "earliest", group="billing", settlement="auto"):
        ...

Requests are pipelined; replies arrive in the same order. The client reconnects indefinitely and sends requests without a reply again, in
order: delivery is at least once. Without `resend_writes`, a record whose connection was lost fails with `OutcomeUnknown` instead.

The client supports both dialects; the default is that of the specification, and the original's servers need `Dialect.SDK`. FlyMQ has no
headers, which raise `NotSupported`, and no push: a subscription polls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar, Final, TypeVar

from headrace.clients.backoff import Backoff, exponential
from headrace.clients.batching import batches_of, keys_of, then
from headrace.clients.errors import NotSupported, Refused
from headrace.clients.flymq.access import AccessCalls
from headrace.clients.flymq.advanced import AdvancedCalls
from headrace.clients.flymq.errors import error_of
from headrace.clients.flymq.group import GroupSubscription
from headrace.clients.flymq.login import Login
from headrace.clients.flymq.requests import Call, Calls, ConnectionDialect, PendingRequest, Places, Publication
from headrace.clients.flymq.schemas import SchemaCalls
from headrace.clients.messages import GroupMode, Key, Message, MessageBatch, OnState, Receipt, Settlement, Start, check_start
from headrace.clients.polling import PollingSubscription
from headrace.clients.request_reply import RequestReplyClient, check_seek, check_settlement, poll_pause
from headrace.clients.stream import Stream
from headrace.clients.tls import TlsOptions
from headrace.errors import WireError
from headrace.limits import MIB
from headrace.records import Bounds, Headers
from headrace.wire.flymq import Dialect, ReplyDecoder, encode_request
from headrace.wire.flymq import messages as m

DEFAULT_PORT: Final = 9092
BATCH_RECORDS_MAX: Final = 2_048
"""Records per batch of `publish_many`."""
_Answer = TypeVar("_Answer")
_PROBE: Final = m.Metadata("")
"""Request used as a ping, which FlyMQ lacks. Every server sends a short reply, possibly ERROR."""


@dataclass(frozen=True, slots=True)
class FlyMqOptions:
    """Options of a FlyMQ connection."""

    dialect: Dialect = Dialect.SPEC
    resend_writes: bool = True
    """Whether to send records without a reply again on a new connection. Otherwise they fail with `OutcomeUnknown`."""
    connect_seconds: float = 5.0
    reply_seconds: float = 30.0
    """Longest wait for a reply before the connection counts as lost."""
    probe_seconds: float = 5.0
    """Interval of probes on an idle connection."""
    window_records_max: int = 65_536
    window_bytes_max: int = 16 * MIB
    """Bounds of records and requests without a reply; further requests wait."""
    fetch_records_max: int = 10_000
    poll_seconds_min: float = 0.01
    poll_seconds_max: float = 0.5
    """Bounds of the delay between polls, which doubles while there are no new records."""
    user: str = ""
    """User to log in as on every connection; empty: no login."""
    password: str = field(default="", repr=False)
    tls: TlsOptions | None = None
    backoff: Backoff = exponential()
    on_state: OnState = lambda state, reason: None


class FlyMqClient(RequestReplyClient, AdvancedCalls, AccessCalls, SchemaCalls):
    """FlyMQ client, created by `connect`. Belongs to one event loop."""

    protocol: ClassVar[str] = "FlyMQ"

    def __init__(self, host: str, port: int, options: FlyMqOptions) -> None:
        self._calls = Calls(records_max=options.window_records_max, bytes_max=options.window_bytes_max)
        super().__init__(
            host,
            port,
            self._calls,
            idle_seconds=options.probe_seconds,
            reply_seconds=options.reply_seconds,
            backoff=options.backoff,
            on_state=options.on_state,
        )
        self._options = options
        self._login: Login | None = None
        self._decoder = ReplyDecoder()
        self._connection_dialect = ConnectionDialect(options.dialect)

    @classmethod
    async def connect(cls, host: str = "127.0.0.1", port: int = DEFAULT_PORT, options: FlyMqOptions = FlyMqOptions()) -> FlyMqClient:
        """Connect. Raises `ConnectFailed` if the first connection fails; later the client reconnects indefinitely."""
        client = cls(host, port, options)
        await client._open()
        return client

    @property
    def unacknowledged(self) -> int:
        """Number of records published and not acknowledged."""
        return self._calls.records

    # Publishing.

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> Receipt:
        """Publish a record and wait for the acknowledgement, which has partition, offset and timestamp."""
        if headers:
            raise NotSupported("FlyMQ", "headers")
        (receipt,) = await (await self.send_many(topic, [value], key=key or None, partition=partition))
        return receipt

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None
    ) -> asyncio.Future[list[Receipt]]:
        """Publish values as one batch. Waits for room in the window; the future resolves when all are acknowledged.

        The future fails with the first error; other records may have been written.
        """
        publication = await self._send(topic, list(values), keys_of(key, values), partition)
        return then(publication.done, lambda places: _receipts(topic, places))

    async def publish_many(
        self, topic: str, values: Iterable[bytes] | AsyncIterable[bytes], *, key: Key = None, partition: int | None = None
    ) -> int:
        """Publish all values as fast as the window allows. Returns their number once the last is acknowledged.

        Raises the first failure; values sent after it may have been written.
        """
        count = 0
        under_way: deque[Publication] = deque()
        async for batch in batches_of(values, BATCH_RECORDS_MAX):
            under_way.append(await self._send(topic, batch, keys_of(key, batch), partition))
            count += len(batch)
            while under_way and under_way[0].done.done():
                under_way.popleft().done.result()
        for publication in under_way:
            await asyncio.shield(publication.done)
        return count

    async def _send(self, topic: str, values: list[bytes], keys: list[bytes | None] | None, partition: int | None) -> Publication:
        self._check_open()
        partitions = None if partition is None else [partition] * len(values)
        publication = Publication(m.ProduceBatch(topic, values, keys, partitions))
        await self._enter(publication)
        return publication

    # Reading.

    async def fetch(
        self,
        topic: str,
        offset: Start = "earliest",
        *,
        partition: int = 0,
        group: str | None = None,
        records_max: int | None = None,
        pattern: str | None = None,
    ) -> list[Message]:
        """Return records from `offset`, or from the group's committed offset if that is higher. An empty list means none.

        The server applies the filter `pattern`.
        """
        begin = await self._next_to_read(topic, partition, offset, group)
        batch, _ = await self.read(topic, begin, partition=partition, records_max=records_max, pattern=pattern)
        return [batch.message(index) for index in range(len(batch))]

    async def read(
        self, topic: str, offset: int, *, partition: int = 0, records_max: int | None = None, pattern: str | None = None
    ) -> tuple[MessageBatch, int]:
        """Fetch columns and the next offset to read, which is past filtered records."""
        if pattern is None and self._options.dialect is Dialect.SDK:
            pattern = ""  # selects the layout of the reply
        request = m.Fetch(topic, partition, offset, records_max or self._options.fetch_records_max, pattern)
        reply = await self._request(request, m.Fetched)
        return MessageBatch(topic, partition, reply.offsets, list(reply.values), reply.keys), reply.next_offset

    async def consume(self, topic: str, offset: int, *, partition: int = 0) -> Message:
        """Return the record at an offset. Raises `OffsetOutOfRange`."""
        reply = await self._request(m.Consume(topic, partition, offset), m.Consumed)
        return Message(topic, partition, offset, reply.value, reply.key or None)

    async def subscribe(
        self,
        topic: str,
        start: Start = "latest",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
        mode: GroupMode | None = None,
        pattern: str | None = None,
    ) -> PollingSubscription | GroupSubscription:
        """Follow a topic or one partition from `"earliest"`, `"latest"` (only new records), an offset or a time.

        A group resumes at its committed offset, and its members share the records. `Message.ack` and `Subscription.commit` settle them;
        `settlement="auto"` settles a batch when the iteration requests the next one. Servers of the original and filters have no members:
        every subscription of a group receives all records then.
        """
        check_settlement(settlement, group)
        if mode is not None and group is None:
            raise ValueError("a mode needs a group")
        if group is not None and pattern is None and self._options.dialect is Dialect.SPEC:
            joined = await self._join(topic, start, partition, group, mode, settlement)
            if joined is not None:
                return joined
        if mode is not None:
            raise NotSupported(self.protocol, "choosing the mode of a group", "it needs a Headrace server and no pattern")
        partitions = list(await self.describe_topic(topic)) if partition is None else [partition]
        known = {} if group is None else await self._committed(topic, group)
        options = self._options

        def read(partition: int, offset: int) -> Awaitable[tuple[MessageBatch, int]]:
            return self.read(topic, offset, partition=partition, pattern=pattern)

        return PollingSubscription(
            self,
            read,
            topic,
            {number: known[number] if number in known else await self._place(topic, number, start) for number in partitions},
            group=group,
            settlement=settlement,
            idle_seconds=lambda attempt: poll_pause(attempt, options.poll_seconds_min, options.poll_seconds_max),
        )

    async def _join(
        self, topic: str, start: Start, partition: int | None, group: str, mode: GroupMode | None, settlement: Settlement
    ) -> GroupSubscription | None:
        """Join a group. Return None if the server has no members."""
        check_start(start)
        kind, target = (start, 0) if isinstance(start, str) else ("offset", start) if isinstance(start, int) else ("timestamp", 0)
        if isinstance(start, datetime):
            target = int(start.timestamp() * 1000)
        request = m.GroupJoin(topic, group, mode or "", -1 if partition is None else partition, kind, target)
        try:
            joined = await self.join_group(request)
        except Refused as error:
            if error.text.startswith("unknown opcode"):
                return None
            raise
        options = self._options
        return GroupSubscription(
            self,
            request,
            joined,
            settlement=settlement,
            records_max=options.fetch_records_max,
            idle_seconds=lambda attempt: poll_pause(attempt, options.poll_seconds_min, options.poll_seconds_max),
        )

    # `MemberCalls`, for subscriptions.

    async def join_group(self, request: m.GroupJoin) -> m.GroupJoined:
        return await self._request(request, m.GroupJoined)

    async def take_from_group(self, member: int, records_max: int) -> list[m.TakenRecord]:
        return (await self._request(m.GroupTake(member, records_max), m.GroupTaken)).records

    async def settle_in_group(self, member: int, kind: int, places: list[m.PartitionOffset]) -> list[bool]:
        return (await self._request(m.GroupSettle(member, kind, places), m.GroupSettled)).known

    async def leave_group(self, member: int) -> None:
        await self._request(m.GroupLeave(member), m.Done)

    async def first_offset(self, topic: str, *, partition: int = 0) -> int:
        """Return the offset of the oldest record."""
        return await self._bound(topic, partition, "earliest")

    async def end_offset(self, topic: str, *, partition: int = 0) -> int:
        """Return the offset of the next record."""
        return await self._bound(topic, partition, "latest")

    async def _bound(self, topic: str, partition: int, which: str) -> int:
        mode = m.Mode(which, narrow=self._options.dialect is Dialect.SDK)
        return (await self._request(m.Subscribe(topic, "", partition, mode), m.OffsetReply)).offset

    # Groups.

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """Commit `offset` as the next one the group reads. Durable on return."""
        await self._request(m.Commit(topic, group, partition, offset), m.Done)

    async def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        """Return the next offset the group reads; None if it has never committed in the partition."""
        return (await self._committed(topic, group)).get(partition)

    async def _committed(self, topic: str, group: str) -> dict[int, int]:
        try:
            entry = await self._request(m.DescribeGroup(group, topic), m.GroupEntry)
        except Refused as error:
            if error.text.startswith("consumer group not found"):
                return {}
            raise
        return {at.partition: at.offset for at in entry.offsets}

    async def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        """Move the group to an offset, or to the first record at or after a time (Unix ms), or the end offset if there is none.

        Returns the new offset.
        """
        check_seek(offset, timestamp)
        if timestamp is None:
            assert offset is not None
            await self.commit(topic, offset, group=group, partition=partition)
            return offset
        return (await self._request(m.SeekToTimestamp(topic, partition, timestamp, group), m.OffsetReply)).offset

    async def offset_for_time(self, topic: str, timestamp: int, *, partition: int = 0) -> int:
        """Return the offset of the first record at or after a time (Unix ms); the end offset if there is none."""
        return (await self._request(m.SeekToTimestamp(topic, partition, timestamp), m.OffsetReply)).offset

    async def lag(self, topic: str, *, group: str, partition: int = 0) -> int:
        """Return the number of records the group has not read."""
        return (await self._request(m.GetLag(topic, group, partition), m.LagReply)).lag

    async def list_groups(self) -> list[m.GroupEntry]:
        """Return every group of every topic with its offsets."""
        return (await self._request(m.ListGroups(), m.GroupList)).groups

    async def delete_group(self, group: str, topic: str = "") -> None:
        """Delete the group's offsets in the topic; without a topic, in the first one of the group."""
        await self._request(m.DeleteGroup(group, topic), m.Done)

    # Topics.

    async def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Create a topic unless it exists. Raises `InvalidTopicName`."""
        await self._request(m.CreateTopic(topic, partitions), m.Done)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic if it exists."""
        await self._request(m.DeleteTopic(topic), m.Done)

    async def topics(self) -> list[str]:
        return (await self._request(m.ListTopics(), m.TopicList)).topics

    async def describe_topic(self, topic: str) -> dict[int, Bounds]:
        """Return the first and end offset of every partition. Raises `UnknownTopic`."""
        if self._options.dialect is Dialect.SDK:
            return await self._describe_with_sdk_dialect(topic)
        reply = await self._request(m.Metadata(topic), m.TopicMetadata)
        return {part.partition: Bounds(part.first, part.end) for part in reply.partitions}

    async def _describe_with_sdk_dialect(self, topic: str) -> dict[int, Bounds]:
        """Describe a topic of the original's server, which does not answer METADATA, with one request per bound."""
        reply = await self._request(m.ClusterMetadata(topic), m.ClusterTopics)
        numbers = [part.partition for known in reply.topics if known.topic == topic for part in known.partitions]
        return {
            number: Bounds(await self._place(topic, number, "earliest"), await self._place(topic, number, "latest")) for number in numbers
        }

    async def ping(self) -> None:
        """Wait for one reply from the server, to a request that every server answers: FlyMQ has no ping."""
        self._check_open()
        pending = PendingRequest(_PROBE, encode_request(_PROBE))
        await self._enter(pending)
        await asyncio.shield(pending.reply)

    # Requests.

    async def _request(self, request: m.Request, answer: type[_Answer]) -> _Answer:
        """Send a request and wait for the reply. Shielded: a cancelled caller must not disturb the order of replies."""
        self._check_open()
        pending = PendingRequest(request, encode_request(request))
        await self._enter(pending)
        reply = await asyncio.shield(pending.reply)
        if isinstance(reply, m.Failure):
            raise error_of(reply, getattr(request, "topic", ""))
        if isinstance(reply, m.Done) and not reply.success:
            raise Refused(code=0, text=reply.message)
        assert isinstance(reply, answer), "the opcode of the reply is that of the request"
        return reply

    async def _enter(self, call: Call) -> None:
        """Queue a call and send it if connected. Raises `ClientClosed`."""
        await self._calls.enter(call)
        if self._stream is not None:
            self._stream.write(self._connection_dialect.encode(call))

    # Receiving.

    def _receive(self, data: bytes) -> None:
        self._note_received()
        if self._login is not None:
            self._login.receive(data)
            return
        try:
            for event in self._decoder.feed(data):
                self._calls.take(event)
                self._attempt = 0
        except WireError as failure:
            self._drop_undecodable(failure)

    # The connection.

    async def _open(self) -> None:
        options = self._options
        stream = await self._connect(options.connect_seconds, options.tls)
        if options.user:
            await self._log_in(stream)
        if self._is_closed:
            stream.close()
            return
        self._stream, self._decoder, self._connection_dialect = stream, ReplyDecoder(), ConnectionDialect(options.dialect)
        for call in self._calls.unanswered():
            stream.write(self._connection_dialect.encode(call))
        self._begin_watch()
        self._opened()

    async def _log_in(self, stream: Stream) -> None:
        login = self._login = Login(self._host, self._port, self._options.dialect)
        stream.write(login.frame(self._options.user, self._options.password))
        try:
            await login.done(self._options.connect_seconds)
        except BaseException:
            stream.close()
            raise
        finally:
            self._login = None

    def _lost(self, reason: str) -> None:
        if self._login is not None:
            self._login.lost(reason)
        else:
            super()._lost(reason)

    def _disconnected(self) -> None:
        super()._disconnected()
        self._calls.give_up_unrepeatable(writes=not self._options.resend_writes)


def _receipts(topic: str, places: Places) -> list[Receipt]:
    columns = zip(places.partitions, places.offsets, places.timestamps, strict=True)
    return [Receipt(topic, partition, offset, timestamp) for partition, offset, timestamp in columns]
