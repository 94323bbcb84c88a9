"""RustLog client.

    client = await RustLogClient.connect("127.0.0.1", 9092)
    await client.create_topic("orders", partitions=2)
    receipt = await client.publish("orders", b"hello", partition=1)
    async for message in await client.subscribe("orders", "earliest", partition=1, group="billing"):
        ...

Requests are pipelined; replies arrive in the same order. The client reconnects indefinitely and sends requests without a reply again, in
order: delivery is at least once. Without `resend_writes`, a write whose connection was lost fails with `OutcomeUnknown` instead.

The client supports both dialects; the default is binary. RustLog has no keys, headers, timestamps or topic deletion, which raise
`NotSupported`, and no push: a subscription polls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar

from headrace.clients.backoff import Backoff, exponential
from headrace.clients.batching import batches_of, then
from headrace.clients.errors import NotSupported
from headrace.clients.messages import GroupMode, Key, Message, MessageBatch, OnState, Receipt, Settlement, Start
from headrace.clients.polling import PollingSubscription
from headrace.clients.request_reply import RequestReplyClient, check_seek, check_settlement, poll_pause
from headrace.clients.rustlog.requests import Call, Calls, raise_error
from headrace.clients.stream import Stream
from headrace.clients.tls import TlsOptions
from headrace.errors import OffsetOutOfRange, WireError
from headrace.limits import MIB, RUSTLOG_FRAME_BYTES_MAX
from headrace.records import Headers
from headrace.wire.rustlog import Dialect, Reply, ReplyDecoder, Request, Undecodable, encode_request, produce_requests
from headrace.wire.rustlog import messages as m

DEFAULT_PORT: Final = 9092
BATCH_RECORDS_MAX: Final = 500
"""Records per request of `publish_many`."""
_OFFSET_MAX: Final = 2**64 - 1
_Answer = TypeVar("_Answer")
_REPLIES: Final[dict[type[Request], type[Reply]]] = {
    m.Produce: m.ProduceReply,
    m.Fetch: m.FetchReply,
    m.OffsetCommit: m.OffsetCommitReply,
    m.OffsetFetch: m.OffsetFetchReply,
    m.CreateTopic: m.CreateTopicReply,
    m.ListTopics: m.ListTopicsReply,
    m.DescribeTopic: m.DescribeTopicReply,
    m.DescribePartition: m.DescribePartitionReply,
    m.MetricsFetch: m.MetricsReply,
    m.Ping: m.Pong,
}


@dataclass(frozen=True, slots=True)
class RustLogOptions:
    """Options of a RustLog connection."""

    dialect: Dialect = Dialect.BINARY
    resend_writes: bool = True
    """Whether to send writes without a reply again on a new connection. Otherwise they fail with `OutcomeUnknown`."""
    connect_seconds: float = 5.0
    reply_seconds: float = 30.0
    """Longest wait for a reply before the connection counts as lost."""
    ping_seconds: float = 5.0
    """Interval of pings on an idle connection."""
    window_calls_max: int = 256
    window_bytes_max: int = 16 * MIB
    """Bounds of requests without a reply; further requests wait."""
    fetch_bytes_max: int = 1 * MIB
    poll_seconds_min: float = 0.01
    poll_seconds_max: float = 0.5
    """Bounds of the delay between polls, which doubles while there are no new records."""
    tls: TlsOptions | None = None
    backoff: Backoff = exponential()
    on_state: OnState = lambda state, reason: None


class RustLogClient(RequestReplyClient):
    """RustLog client, created by `connect`. Belongs to one event loop."""

    protocol: ClassVar[str] = "RustLog"

    def __init__(self, host: str, port: int, options: RustLogOptions) -> None:
        self._calls = Calls(calls_max=options.window_calls_max, bytes_max=options.window_bytes_max)
        super().__init__(
            host,
            port,
            self._calls,
            idle_seconds=options.ping_seconds,
            reply_seconds=options.reply_seconds,
            backoff=options.backoff,
            on_state=options.on_state,
        )
        self._options = options
        self._decoder = ReplyDecoder()

    @classmethod
    async def connect(cls, host: str = "127.0.0.1", port: int = DEFAULT_PORT, options: RustLogOptions = RustLogOptions()) -> RustLogClient:
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
        """Publish a record and wait for the acknowledgement. The default partition is 0."""
        self._check_keyless(key)
        if headers:
            raise NotSupported("RustLog", "headers")
        (request,) = produce_requests(self._options.dialect, topic, partition or 0, [value])
        reply = await self._request(request, m.ProduceReply)
        return Receipt(topic, partition or 0, reply.offsets[0])

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None
    ) -> asyncio.Future[list[Receipt]]:
        """Publish values as one batch. Waits for room in the window; the future resolves with the acknowledgement.

        Each frame is written atomically; a large batch needs several. Raises `LimitExceeded` before sending if a record does not
        fit in a frame of the dialect.
        """
        self._check_keyless(key)
        requests = produce_requests(self._options.dialect, topic, partition or 0, list(values))
        calls = [await self._enter(request) for request in requests]
        written = self._loop.create_task(self._offsets(calls))
        return then(written, lambda offsets: [Receipt(topic, partition or 0, offset) for offset in offsets])

    async def publish_many(
        self, topic: str, values: Iterable[bytes] | AsyncIterable[bytes], *, key: Key = None, partition: int | None = None
    ) -> int:
        """Publish all values as fast as the window allows. Returns their number once the last is acknowledged.

        Raises the first failure; values sent after it may have been written.
        """
        self._check_keyless(key)
        count = 0
        under_way: deque[Call] = deque()
        async for batch in batches_of(values, BATCH_RECORDS_MAX):
            for request in produce_requests(self._options.dialect, topic, partition or 0, batch):
                under_way.append(await self._enter(request))
            count += len(batch)
            while under_way and under_way[0].reply.done():
                await self._offsets([under_way.popleft()])
        await self._offsets(under_way)
        return count

    def _check_keyless(self, key: Key) -> None:
        if key is not None:
            raise NotSupported("RustLog", "keys", "flymq:// has them")

    async def _offsets(self, calls: Iterable[Call]) -> list[int]:
        offsets: list[int] = []
        for call in calls:
            offsets += (await self._reply(call, m.ProduceReply)).offsets
        return offsets

    # Reading.

    async def fetch(
        self,
        topic: str,
        offset: Start = "earliest",
        *,
        partition: int = 0,
        group: str | None = None,
        records_max: int | None = None,
        bytes_max: int | None = None,
    ) -> list[Message]:
        """Return records from `offset`, or from the group's committed offset if that is higher. An empty list means none."""
        begin = await self._next_to_read(topic, partition, offset, group)
        batch, _ = await self.read(topic, begin, partition=partition, bytes_max=bytes_max)
        return [batch.message(index) for index in range(min(len(batch), records_max or len(batch)))]

    async def read(self, topic: str, offset: int, *, partition: int = 0, bytes_max: int | None = None) -> tuple[MessageBatch, int]:
        """Fetch columns and the next offset to read. Raises `OffsetOutOfRange` below the first offset."""
        bytes_max = min(bytes_max or self._options.fetch_bytes_max, RUSTLOG_FRAME_BYTES_MAX)
        reply = await self._request(m.Fetch(topic, partition, offset, bytes_max, ""), m.FetchReply)
        return MessageBatch(topic, partition, reply.offsets, list(reply.values)), reply.next_offset

    async def first_offset(self, topic: str, *, partition: int = 0) -> int:
        """Return the first offset. RustLog reports it only in the error for reading below it."""
        try:
            await self.read(topic, 0, partition=partition, bytes_max=1)
        except OffsetOutOfRange as error:
            return error.first
        return 0

    async def end_offset(self, topic: str, *, partition: int = 0) -> int:
        """Return the offset of the next record. The original broker does not report it: raises `NotSupported`."""
        _, end = await self.read(topic, _OFFSET_MAX, partition=partition, bytes_max=1)
        if end == _OFFSET_MAX:
            raise NotSupported("this RustLog broker", "reading the end offset of a partition")
        return end

    async def subscribe(
        self,
        topic: str,
        start: Start = "latest",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
        mode: GroupMode | None = None,
    ) -> PollingSubscription:
        """Follow a topic or one partition from `"earliest"`, `"latest"` (only new records) or an offset.

        A group resumes at its committed offset. `Message.ack` and `Subscription.commit` commit its progress; `settlement="auto"`
        commits a fetched batch when the iteration requests the next one. The JSON dialect cannot list the partitions of a topic
        and follows partition 0 by default.
        """
        check_settlement(settlement, group)
        if mode == "shared":
            raise NotSupported(self.protocol, "shared groups", "flymq:// does, on the same topics")
        if partition is None:
            partitions = [0] if self._options.dialect is Dialect.JSON else list(await self.describe_topic(topic))
        else:
            partitions = [partition]
        options = self._options

        def read(partition: int, offset: int) -> Awaitable[tuple[MessageBatch, int]]:
            return self.read(topic, offset, partition=partition)

        return PollingSubscription(
            self,
            read,
            topic,
            {number: await self._start(topic, number, start, group) for number in partitions},
            group=group,
            settlement=settlement,
            idle_seconds=lambda attempt: poll_pause(attempt, options.poll_seconds_min, options.poll_seconds_max),
        )

    async def _start(self, topic: str, partition: int, start: Start, group: str | None) -> int:
        """Return the first offset to read. 0 stands for the earliest: reading adjusts it."""
        known = None if group is None else await self.committed(topic, group=group, partition=partition)
        if known is not None:
            return known
        return 0 if start == "earliest" else await self._place(topic, partition, start)

    # Groups.

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """Commit `offset` as the next one the group reads. Raises `UnknownPartition`."""
        request = m.OffsetCommit(topic, partition, group, offset)
        reply = await self._request(request, m.OffsetCommitReply)
        if not reply.success:
            raise_error(request, m.ErrorReply("partition not found: ", 0))

    async def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        """Return the next offset the group reads; None if it has never committed in the partition."""
        return (await self._request(m.OffsetFetch(topic, partition, group), m.OffsetFetchReply)).offset

    async def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        """Move the group to an offset and return it. A timestamp raises `NotSupported`."""
        check_seek(offset, timestamp)
        if timestamp is not None:
            offset = await self.offset_for_time(topic, timestamp, partition=partition)
        assert offset is not None
        await self.commit(topic, offset, group=group, partition=partition)
        return offset

    # Topics.

    async def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Create a topic. Raises `TopicExists`, `InvalidRequest`."""
        await self._request(m.CreateTopic(topic, partitions), m.CreateTopicReply)

    async def topics(self) -> list[str]:
        return list(await self.partition_counts())

    async def partition_counts(self) -> dict[str, int]:
        """Return the partition counts of all visible topics by name."""
        return dict((await self._request(m.ListTopics(), m.ListTopicsReply)).topics)

    async def describe_topic(self, topic: str) -> dict[int, int]:
        """Return the end offset of every partition. Raises `UnknownTopic`."""
        return dict((await self._request(m.DescribeTopic(topic), m.DescribeTopicReply)).partitions)

    async def metrics(self) -> str:
        """Return the broker's metrics as Prometheus text."""
        return (await self._request(m.MetricsFetch(), m.MetricsReply)).metrics

    async def ping(self) -> None:
        """Wait for one reply from the server."""
        await self._request(m.Ping(), m.Pong)

    # Requests.

    async def _request(self, request: Request, answer: type[_Answer]) -> _Answer:
        return await self._reply(await self._enter(request), answer)

    async def _enter(self, request: Request) -> Call:
        """Queue a request and send it if connected. Raises `ClientClosed`."""
        self._check_open()
        records = len(request.records) if isinstance(request, m.Produce) else 0
        call = await self._calls.enter(request, encode_request(self._options.dialect, request), records)
        if self._stream is not None:
            _write(self._stream, call)
        return call

    async def _reply(self, call: Call, answer: type[_Answer]) -> _Answer:
        """Wait for the reply. Shielded: a cancelled caller must not disturb the order of replies."""
        reply = await asyncio.shield(call.reply)
        if isinstance(reply, m.ErrorReply):
            raise_error(call.request, reply)
        assert isinstance(reply, answer), "`_take` rejects other replies"
        return reply

    # Receiving.

    def _receive(self, data: bytes) -> None:
        self._note_received()
        try:
            for reply in self._decoder.feed(data):
                self._take(reply)
        except WireError as failure:
            self._drop_undecodable(failure)

    def _take(self, reply: Reply) -> None:
        call = self._calls.oldest()
        if call is None:
            raise Undecodable(f"{type(reply).__name__} arrived without a request")
        if not isinstance(reply, (_REPLIES[type(call.request)], m.ErrorReply)):
            raise Undecodable(f"{type(call.request).__name__} received the reply {type(reply).__name__}")
        if isinstance(reply, m.ProduceReply) and len(reply.offsets) != call.records:
            raise Undecodable(f"{call.records} records received {len(reply.offsets)} offsets")
        self._calls.answered(reply)
        self._attempt = 0

    # The connection.

    async def _open(self) -> None:
        options = self._options
        stream = await self._connect(options.connect_seconds, options.tls)
        if self._is_closed:
            stream.close()
            return
        self._stream, self._decoder = stream, ReplyDecoder()
        for call in self._calls.unanswered():
            _write(stream, call)
        self._begin_watch()
        self._opened()

    def _disconnected(self) -> None:
        super()._disconnected()
        if not self._options.resend_writes:
            self._calls.give_up_writes()


def _write(stream: Stream, call: Call) -> None:
    call.was_sent = True
    stream.write(call.frame)
