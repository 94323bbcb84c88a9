"""A FlyMQ client that survives its connections.

    client = await FlyMqClient.connect("127.0.0.1", 9092)
    receipt = await client.publish("orders", b"hello", key=b"user-1")
    for message in await client.fetch("orders", receipt.offset, partition=receipt.partition):
        ...
    async for message in await client.subscribe("orders", "start", group="billing", settlement="auto"):
        ...

Requests are pipelined; replies come in their order. A lost connection is sought again for ever, and what has no reply yet is then sent
once more, in order: delivery is at least once. With `resend_writes` off, a record whose connection was lost fails with
`OutcomeUnknown` instead, and is never written twice by this client.

Both dialects are spoken, the specification's unless told otherwise; the original's servers need `Dialect.SDK`. FlyMQ has no headers and
no push: headers raise `NotSupported`, and a subscription polls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeVar

from headrace.clients.backoff import Backoff, exponential
from headrace.clients.batching import batches_of, keys_of, then
from headrace.clients.errors import NotSupported, Refused
from headrace.clients.flymq.access import AccessCalls
from headrace.clients.flymq.advanced import AdvancedCalls
from headrace.clients.flymq.errors import error_of
from headrace.clients.flymq.login import Login
from headrace.clients.flymq.requests import Call, Calls, Places, Publication, Question, Speech
from headrace.clients.flymq.schemas import SchemaCalls
from headrace.clients.messages import Key, Message, MessageBatch, OnState, Receipt, Settlement, Start
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
RUN_RECORDS_MAX: Final = 2_048
"""`publish_many` sends runs of at most so many."""
_Answer = TypeVar("_Answer")
_PROBE: Final = m.Metadata("")
"""There is no ping in FlyMQ. Every server answers this one, if only with an ERROR, and the answer is short."""


@dataclass(frozen=True, slots=True)
class FlyMqOptions:
    """What a user may choose."""

    dialect: Dialect = Dialect.SPEC
    resend_writes: bool = True
    """Whether a record without a reply is sent again on a new connection; if not, it fails with `OutcomeUnknown`."""
    connect_seconds: float = 5.0
    reply_seconds: float = 30.0
    """A connection on which the oldest request waits longer than this counts as lost."""
    probe_seconds: float = 5.0
    """How often an idle connection is tried."""
    window_records_max: int = 65_536
    window_bytes_max: int = 16 * MIB
    """Records and requests without a reply; whoever asks more waits."""
    fetch_records_max: int = 10_000
    poll_seconds_min: float = 0.01
    poll_seconds_max: float = 0.5
    """A subscription at the end of its topic asks again after these, the pause doubling from one to the other."""
    user: str = ""
    """Who to log in as on every connection; empty: nobody."""
    password: str = field(default="", repr=False)
    tls: TlsOptions | None = None
    backoff: Backoff = exponential()
    on_state: OnState = lambda state, reason: None


class FlyMqClient(RequestReplyClient, AdvancedCalls, AccessCalls, SchemaCalls):
    """Use `connect`. All methods are for one event loop."""

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
        self._speech = Speech(options.dialect)

    @classmethod
    async def connect(cls, host: str = "127.0.0.1", port: int = DEFAULT_PORT, options: FlyMqOptions = FlyMqOptions()) -> FlyMqClient:
        """Raises `ConnectFailed` when the first connection cannot be had; later ones are sought until it works."""
        client = cls(host, port, options)
        await client._open()
        return client

    @property
    def unacknowledged(self) -> int:
        """Records published and not acknowledged."""
        return self._calls.records

    # Publishing.

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> Receipt:
        """Returns when the broker has acknowledged the record, with its place and time."""
        if headers:
            raise NotSupported("FlyMQ", "headers")
        (receipt,) = await (await self.send_many(topic, [value], key=key or None, partition=partition))
        return receipt

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None
    ) -> asyncio.Future[list[Receipt]]:
        """Publish without waiting for the acknowledgements: the future gives the places when all have come. Waits only for room.

        The future fails with the first refusal; records beside the refused one may have been kept.
        """
        publication = await self._send(topic, list(values), keys_of(key, values), partition)
        return then(publication.done, lambda places: _receipts(topic, places))

    async def publish_many(
        self, topic: str, values: Iterable[bytes] | AsyncIterable[bytes], *, key: Key = None, partition: int | None = None
    ) -> int:
        """Publish all values, as fast as the window allows; returns how many, when the last is acknowledged.

        The first failure is raised; what was sent after it may have been kept.
        """
        count = 0
        under_way: deque[Publication] = deque()
        async for batch in batches_of(values, RUN_RECORDS_MAX):
            under_way.append(await self._send(topic, batch, keys_of(key, batch), partition))
            count += len(batch)
            while under_way and under_way[0].done.done():
                under_way.popleft().done.result()
        for publication in under_way:
            await asyncio.shield(publication.done)
        return count

    async def flush(self) -> None:
        """Returns when everything asked so far is answered. Raises `ClientClosed` when that cannot happen any more."""
        await self._calls.emptied()
        self._check_open()

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
        offset: Start = "start",
        *,
        partition: int = 0,
        group: str | None = None,
        records_max: int | None = None,
        pattern: str | None = None,
    ) -> list[Message]:
        """Records from a place on, or from the group's committed offset if that is behind it; an empty list when there are none.

        `pattern` is a filter that runs on the server.
        """
        begin = await self._next_to_read(topic, partition, offset, group)
        batch, _ = await self.read(topic, begin, partition=partition, records_max=records_max, pattern=pattern)
        return [batch.message(index) for index in range(len(batch))]

    async def read(
        self, topic: str, offset: int, *, partition: int = 0, records_max: int | None = None, pattern: str | None = None
    ) -> tuple[MessageBatch, int]:
        """As `fetch`, as columns, with the offset to read on from: behind what the filter kept back, too."""
        if pattern is None and self._options.dialect is Dialect.SDK:
            pattern = ""  # says which layout is expected
        request = m.Fetch(topic, partition, offset, records_max or self._options.fetch_records_max, pattern)
        reply = await self._ask(request, m.Fetched)
        return MessageBatch(topic, partition, reply.offsets, list(reply.values), reply.keys), reply.next_offset

    async def consume(self, topic: str, offset: int, *, partition: int = 0) -> Message:
        """Exactly that record. Raises `OffsetOutOfRange` where there is none."""
        reply = await self._ask(m.Consume(topic, partition, offset), m.Consumed)
        return Message(topic, partition, offset, reply.value, reply.key or None)

    async def subscribe(
        self,
        topic: str,
        start: Start = "end",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
        pattern: str | None = None,
    ) -> PollingSubscription:
        """Follow a topic (or one partition of it) from its start, its end (only what is yet to come), an offset or a time.

        A group goes on from where it has committed. Its progress is committed with `Message.ack`, `Subscription.commit`, or with
        `settlement="auto"` whenever the iteration goes on behind a fetched run.
        """
        check_settlement(settlement, group)
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

    async def first_offset(self, topic: str, *, partition: int = 0) -> int:
        """The oldest there is."""
        return await self._bound(topic, partition, "earliest")

    async def end_offset(self, topic: str, *, partition: int = 0) -> int:
        """The offset the next record will get."""
        return await self._bound(topic, partition, "latest")

    async def _bound(self, topic: str, partition: int, which: str) -> int:
        mode = m.Mode(which, narrow=self._options.dialect is Dialect.SDK)
        return (await self._ask(m.Subscribe(topic, "", partition, mode), m.OffsetReply)).offset

    # Groups.

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """The group will read on at `offset`. Durable when it returns."""
        await self._ask(m.Commit(topic, group, partition, offset), m.Done)

    async def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        """Where the group will read on; None if it has never committed there."""
        return (await self._committed(topic, group)).get(partition)

    async def _committed(self, topic: str, group: str) -> dict[int, int]:
        try:
            entry = await self._ask(m.DescribeGroup(group, topic), m.GroupEntry)
        except Refused as refusal:
            if refusal.text.startswith("consumer group not found"):
                return {}
            raise
        return {at.partition: at.offset for at in entry.offsets}

    async def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        """Move the group to an offset, or to the first record at or after a time (Unix ms): the end, if there is none.

        Returns where it is now.
        """
        check_seek(offset, timestamp)
        if timestamp is None:
            assert offset is not None
            await self.commit(topic, offset, group=group, partition=partition)
            return offset
        return (await self._ask(m.SeekToTimestamp(topic, partition, timestamp, group), m.OffsetReply)).offset

    async def offset_for_time(self, topic: str, timestamp: int, *, partition: int = 0) -> int:
        """As `seek`, and nobody is moved."""
        return (await self._ask(m.SeekToTimestamp(topic, partition, timestamp), m.OffsetReply)).offset

    async def lag(self, topic: str, *, group: str, partition: int = 0) -> int:
        """How many records the group has still to read."""
        return (await self._ask(m.GetLag(topic, group, partition), m.LagReply)).lag

    async def list_groups(self) -> list[m.GroupEntry]:
        """Every group on every topic, with its offsets."""
        return (await self._ask(m.ListGroups(), m.GroupList)).groups

    async def delete_group(self, group: str, topic: str = "") -> None:
        """Forget what the group has committed on the topic; without a topic, on the first one it knows."""
        await self._ask(m.DeleteGroup(group, topic), m.Done)

    # Topics.

    async def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Does nothing if the topic is there. Raises `InvalidTopicName`."""
        await self._ask(m.CreateTopic(topic, partitions), m.Done)

    async def delete_topic(self, topic: str) -> None:
        """Does nothing if there is none."""
        await self._ask(m.DeleteTopic(topic), m.Done)

    async def topics(self) -> list[str]:
        return (await self._ask(m.ListTopics(), m.TopicList)).topics

    async def describe_topic(self, topic: str) -> dict[int, Bounds]:
        """The first and the next offset of every partition. Raises `UnknownTopic`."""
        if self._options.dialect is Dialect.SDK:
            return await self._describe_like_the_original(topic)
        reply = await self._ask(m.Metadata(topic), m.TopicMetadata)
        return {part.partition: Bounds(part.first, part.end) for part in reply.partitions}

    async def _describe_like_the_original(self, topic: str) -> dict[int, Bounds]:
        """Its servers do not answer METADATA; they name the partitions in one request and the bounds one by one."""
        reply = await self._ask(m.ClusterMetadata(topic), m.ClusterTopics)
        numbers = [part.partition for known in reply.topics if known.topic == topic for part in known.partitions]
        return {number: Bounds(await self._place(topic, number, "start"), await self._place(topic, number, "end")) for number in numbers}

    async def ping(self) -> None:
        """Returns when the server has answered: there is no ping in FlyMQ, but a question every server answers."""
        self._check_open()
        question = Question(_PROBE, encode_request(_PROBE))
        await self._enter(question)
        await asyncio.shield(question.reply)

    # Asking.

    async def _ask(self, request: m.Request, answer: type[_Answer]) -> _Answer:
        """Shielded: whoever stops waiting must not take the reply from the order of replies."""
        self._check_open()
        question = Question(request, encode_request(request))
        await self._enter(question)
        reply = await asyncio.shield(question.reply)
        if isinstance(reply, m.Failure):
            raise error_of(reply, getattr(request, "topic", ""))
        if isinstance(reply, m.Done) and not reply.success:
            raise Refused(code=0, text=reply.message)
        assert isinstance(reply, answer), "the opcode of the reply is that of the request"
        return reply

    async def _enter(self, call: Call) -> None:
        """Take a place among the calls and leave, if there is a connection. Raises `ClientClosed`."""
        await self._calls.enter(call)
        if self._stream is not None:
            self._stream.write(self._speech.say(call))

    # Receiving.

    def _receive(self, data: bytes) -> None:
        self._heard()
        if self._login is not None:
            self._login.receive(data)
            return
        try:
            for event in self._decoder.feed(data):
                self._calls.take(event)
                self._attempt = 0
        except WireError as failure:
            self._misunderstood(failure)

    # The connection.

    async def _open(self) -> None:
        options = self._options
        stream = await self._connect(options.connect_seconds, options.tls)
        if options.user:
            await self._log_in(stream)
        if self._is_closed:
            stream.close()
            return
        self._stream, self._decoder, self._speech = stream, ReplyDecoder(), Speech(options.dialect)
        for call in self._calls.unanswered():
            stream.write(self._speech.say(call))
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

    def _part(self) -> None:
        super()._part()
        self._calls.give_up_unrepeatable(writes=not self._options.resend_writes)


def _receipts(topic: str, places: Places) -> list[Receipt]:
    columns = zip(places.partitions, places.offsets, places.timestamps, strict=True)
    return [Receipt(topic, partition, offset, timestamp) for partition, offset, timestamp in columns]
