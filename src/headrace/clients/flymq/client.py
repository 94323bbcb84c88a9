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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Final, TypeVar

from headrace.clients.arguments import check_count
from headrace.clients.errors import InvalidArgument, NotSupported, Refused
from headrace.clients.flymq.access import AccessCalls
from headrace.clients.flymq.advanced import AdvancedCalls
from headrace.clients.flymq.errors import error_of
from headrace.clients.flymq.group import GroupSubscription
from headrace.clients.flymq.login import Login
from headrace.clients.flymq.requests import Call, Calls, ConnectionDialect, PendingRequest, Publication
from headrace.clients.flymq.schemas import SchemaCalls
from headrace.clients.messages import GroupMode, Message, MessageBatch, Settlement, Start, check_start
from headrace.clients.options import ClientOptions, RequestReplyOptions
from headrace.clients.polling import PollingSubscription
from headrace.clients.publishing import Records
from headrace.clients.request_reply import RequestReplyClient, check_place, poll_pause
from headrace.clients.stream import Stream
from headrace.errors import WireError
from headrace.records import Bounds
from headrace.wire.flymq import Dialect, ReplyDecoder
from headrace.wire.flymq import messages as m

DEFAULT_PORT: Final = 9092
_Answer = TypeVar("_Answer")
_PROBE: Final = m.Metadata("")
"""Request used as a ping, which FlyMQ lacks. Every server sends a short reply, possibly ERROR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlyMqOptions(RequestReplyOptions):
    """Options of a FlyMQ connection."""

    dialect: Dialect = Dialect.SPEC
    fetch_records_max: int = 10_000


class FlyMqClient(AdvancedCalls, AccessCalls, SchemaCalls, RequestReplyClient[FlyMqOptions]):
    """FlyMQ client, created by `connect`. Belongs to one event loop."""

    protocol: ClassVar[str] = "FlyMQ"
    default_port: ClassVar[int] = DEFAULT_PORT
    default_options: ClassVar[ClientOptions] = FlyMqOptions()
    logins: ClassVar[frozenset[str]] = frozenset({"user", "api_key"})
    carries: ClassVar[frozenset[str]] = frozenset({"keys", "partitions"})

    def __init__(self, host: str, port: int, options: FlyMqOptions) -> None:
        self._calls = Calls(records_max=options.window_records_max, bytes_max=options.window_bytes_max)
        super().__init__(host, port, options, self._calls)
        self._login: Login | None = None
        self._decoder = ReplyDecoder()
        self._connection_dialect = ConnectionDialect(options.dialect)

    async def _submit(self, records: Records) -> Sequence[Publication]:
        partitions = None if records.partition is None else [records.partition] * len(records.values)
        publication = Publication(m.ProduceBatch(records.topic, records.values, records.keys, partitions))
        await self._enter(publication)
        return [publication]

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
        if pattern is None:
            return await super().fetch(topic, offset, partition=partition, group=group, records_max=records_max)
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
        if mode is not None and group is None:
            raise InvalidArgument("a mode needs a group")
        if group is not None and pattern is None and self._options.dialect is Dialect.SPEC:
            joined = await self._join(topic, start, partition, group, mode, settlement)
            if joined is not None:
                return joined
        if mode is not None:
            raise NotSupported(self.protocol, "choosing the mode of a group", "it needs a Headrace server and no pattern")
        return await self._poll(
            topic, start, partition, group, settlement, lambda at, offset: self.read(topic, offset, partition=at, pattern=pattern)
        )

    async def _partitions(self, topic: str) -> Sequence[int]:
        return list(await self.describe_topic(topic))

    async def _join(
        self, topic: str, start: Start, partition: int | None, group: str, mode: GroupMode | None, settlement: Settlement
    ) -> GroupSubscription | None:
        """Join a group. Return None if the server has no members."""
        check_place(topic, partition, group)
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
        return GroupSubscription(
            self,
            request,
            joined,
            settlement=settlement,
            records_max=self._options.fetch_records_max,
            idle_seconds=lambda rounds: poll_pause(rounds, self._options),
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

    async def offset_for_time(self, topic: str, timestamp: int, *, partition: int = 0) -> int:
        """Return the offset of the first record at or after a time (Unix ms); the end offset if there is none."""
        check_count("timestamp", timestamp)
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
        pending = PendingRequest(_PROBE, is_ping=True)
        await self._enter(pending)
        await asyncio.shield(pending.done)

    # Requests.

    async def _request(self, request: m.Request, answer: type[_Answer]) -> _Answer:
        """Send a request and wait for the reply, from the coordinator if the request needs it."""
        return await self._at_coordinator(lambda: self._request_once(request, answer))

    async def _request_once(self, request: m.Request, answer: type[_Answer]) -> _Answer:
        """Send a request and wait for the reply. Shielded: a cancelled caller must not disturb the order of replies."""
        pending = PendingRequest(request)
        await self._enter(pending)
        reply = await asyncio.shield(pending.done)
        if isinstance(reply, m.Failure):
            raise error_of(reply, getattr(request, "topic", ""))
        if isinstance(reply, m.Done) and not reply.success:
            raise Refused(code=0, text=reply.message)
        assert isinstance(reply, answer), "the opcode of the reply is that of the request"
        return reply

    async def _enter(self, call: Call) -> None:
        """Queue a call and send it if connected. Raises `ClientClosed`."""
        self._check_open()
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
                self._progressed()
        except WireError as failure:
            self._drop_undecodable(failure)

    # The connection.

    async def _open(self) -> None:
        options = self._options
        stream = await self._connect()
        if options.user or options.api_key:
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
        stream.write(login.frame(self._options))
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
