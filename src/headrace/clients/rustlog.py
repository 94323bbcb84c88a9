"""A RustLog client that survives its connections.

    client = await RustLogClient.connect("127.0.0.1", 9092)
    await client.create_topic("orders", partitions=2)
    receipt = await client.publish("orders", b"hello", partition=1)
    async for message in await client.subscribe("orders", "start", partition=1, group="billing"):
        ...

Requests are pipelined; replies come in their order. A lost connection is sought again for ever, and what has no reply yet is then sent
once more, in order: delivery is at least once. With `resend_writes` off, a write whose connection was lost fails with
`OutcomeUnknown` instead, and is never written twice by this client.

Both dialects are spoken, binary unless told otherwise. RustLog has no keys, headers, timestamps, no way to delete a topic and no
push: what it cannot do raises `NotSupported`, and a subscription polls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar

from headrace.clients.asking import AskingClient, check_seek, check_settlement, poll_pause
from headrace.clients.backoff import Backoff, exponential
from headrace.clients.errors import NotSupported
from headrace.clients.messages import Key, Message, MessageRun, OnState, Receipt, Settlement, Start
from headrace.clients.polling import PollingSubscription
from headrace.clients.runs import runs_of, then
from headrace.clients.rustlog_calls import Call, Calls
from headrace.clients.rustlog_refusals import raise_refusal
from headrace.clients.stream import Stream
from headrace.clients.tls import TlsOptions
from headrace.errors import OffsetOutOfRange, WireError
from headrace.limits import MIB, RUSTLOG_FRAME_BYTES_MAX
from headrace.records import Headers
from headrace.wire.rustlog import Dialect, Reply, ReplyDecoder, Request, Undecodable, encode_request, produce_requests
from headrace.wire.rustlog import messages as m

DEFAULT_PORT: Final = 9092
RUN_RECORDS_MAX: Final = 500
"""`publish_many` sends requests of at most so many."""
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
    """What a user may choose."""

    dialect: Dialect = Dialect.BINARY
    resend_writes: bool = True
    """Whether a write without a reply is sent again on a new connection; if not, it fails with `OutcomeUnknown`."""
    connect_seconds: float = 5.0
    reply_seconds: float = 30.0
    """A connection on which the oldest request waits longer than this counts as lost."""
    ping_seconds: float = 5.0
    """How often an idle connection is tried."""
    window_calls_max: int = 256
    window_bytes_max: int = 16 * MIB
    """Requests without a reply; whoever asks more waits."""
    fetch_bytes_max: int = 1 * MIB
    poll_seconds_min: float = 0.01
    poll_seconds_max: float = 0.5
    """A subscription at the end of its partition asks again after these, the pause doubling from one to the other."""
    tls: TlsOptions | None = None
    backoff: Backoff = exponential()
    on_state: OnState = lambda state, reason: None


class RustLogClient(AskingClient):
    """Use `connect`. All methods are for one event loop."""

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
        """Returns when the broker has acknowledged the record, with its place. Partition 0, unless another is chosen."""
        self._check_keyless(key)
        if headers:
            raise NotSupported("RustLog", "headers")
        (request,) = produce_requests(self._options.dialect, topic, partition or 0, [value])
        reply = await self._ask(request, m.ProduceReply)
        return Receipt(topic, partition or 0, reply.offsets[0])

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None
    ) -> asyncio.Future[list[Receipt]]:
        """Publish without waiting for the acknowledgement: the future gives the places when it comes. Waits only for room.

        What one frame holds is written all or not at all; more than that goes in several requests. Raises `LimitExceeded`
        for a record that fits no frame of this dialect, before any is sent.
        """
        self._check_keyless(key)
        requests = produce_requests(self._options.dialect, topic, partition or 0, list(values))
        calls = [await self._enter(request) for request in requests]
        written = self._loop.create_task(self._offsets(calls))
        return then(written, lambda offsets: [Receipt(topic, partition or 0, offset) for offset in offsets])

    async def publish_many(
        self, topic: str, values: Iterable[bytes] | AsyncIterable[bytes], *, key: Key = None, partition: int | None = None
    ) -> int:
        """Publish all values, as fast as the window allows; returns how many, when the last is acknowledged.

        The first failure is raised; what was sent after it may have been written.
        """
        self._check_keyless(key)
        count = 0
        under_way: deque[Call] = deque()
        async for run in runs_of(values, RUN_RECORDS_MAX):
            for request in produce_requests(self._options.dialect, topic, partition or 0, run):
                under_way.append(await self._enter(request))
            count += len(run)
            while under_way and under_way[0].reply.done():
                await self._offsets([under_way.popleft()])
        await self._offsets(under_way)
        return count

    async def flush(self) -> None:
        """Returns when everything asked so far is answered. Raises `ClientClosed` when that cannot happen any more."""
        await self._calls.emptied()
        self._check_open()

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
        offset: Start = "start",
        *,
        partition: int = 0,
        group: str | None = None,
        records_max: int | None = None,
        bytes_max: int | None = None,
    ) -> list[Message]:
        """Records from a place on, or from the group's committed offset if that is behind it; an empty list when there are none."""
        begin = await self._next_to_read(topic, partition, offset, group)
        run, _ = await self.read(topic, begin, partition=partition, bytes_max=bytes_max)
        return [run.message(index) for index in range(min(len(run), records_max or len(run)))]

    async def read(self, topic: str, offset: int, *, partition: int = 0, bytes_max: int | None = None) -> tuple[MessageRun, int]:
        """As `fetch`, as columns, with the offset to read on from. Raises `OffsetOutOfRange` below the first offset there is."""
        bytes_max = min(bytes_max or self._options.fetch_bytes_max, RUSTLOG_FRAME_BYTES_MAX)
        reply = await self._ask(m.Fetch(topic, partition, offset, bytes_max, ""), m.FetchReply)
        return MessageRun(topic, partition, reply.offsets, list(reply.values)), reply.next_offset

    async def first_offset(self, topic: str, *, partition: int = 0) -> int:
        """The oldest there is. Nothing in RustLog tells it but the refusal to read below it."""
        try:
            await self.read(topic, 0, partition=partition, bytes_max=1)
        except OffsetOutOfRange as error:
            return error.first
        return 0

    async def end_offset(self, topic: str, *, partition: int = 0) -> int:
        """The offset the next record will get. The original broker cannot tell: `NotSupported`."""
        _, end = await self.read(topic, _OFFSET_MAX, partition=partition, bytes_max=1)
        if end == _OFFSET_MAX:
            raise NotSupported("this RustLog broker", "asking for the end of a partition")
        return end

    async def subscribe(
        self,
        topic: str,
        start: Start = "end",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
    ) -> PollingSubscription:
        """Follow a topic (or one partition of it) from its start, its end (only what is yet to come) or an offset.

        A group goes on from where it has committed. Its progress is committed with `Message.ack`, `Subscription.commit`, or with
        `settlement="auto"` whenever the iteration goes on behind a fetched run. In the JSON dialect, which cannot ask for the
        partitions of a topic, partition 0 is followed unless another is named.
        """
        check_settlement(settlement, group)
        if partition is None:
            partitions = [0] if self._options.dialect is Dialect.JSON else list(await self.describe_topic(topic))
        else:
            partitions = [partition]
        options = self._options

        def read(partition: int, offset: int) -> Awaitable[tuple[MessageRun, int]]:
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
        """Reading finds out by itself where the start is."""
        known = None if group is None else await self.committed(topic, group=group, partition=partition)
        if known is not None:
            return known
        return 0 if start == "start" else await self._place(topic, partition, start)

    # Groups.

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """The group will read on at `offset`. Raises `UnknownPartition` where the broker keeps no offset for that place."""
        request = m.OffsetCommit(topic, partition, group, offset)
        reply = await self._ask(request, m.OffsetCommitReply)
        if not reply.success:
            raise_refusal(request, m.ErrorReply("partition not found: ", 0))

    async def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        """Where the group will read on; None if it has never committed there."""
        return (await self._ask(m.OffsetFetch(topic, partition, group), m.OffsetFetchReply)).offset

    async def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        """Move the group to an offset, which is returned. Times raise `NotSupported`."""
        check_seek(offset, timestamp)
        if timestamp is not None:
            offset = await self.offset_for_time(topic, timestamp, partition=partition)
        assert offset is not None
        await self.commit(topic, offset, group=group, partition=partition)
        return offset

    # Topics.

    async def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Raises `TopicExists`, `InvalidRequest`."""
        await self._ask(m.CreateTopic(topic, partitions), m.CreateTopicReply)

    async def topics(self) -> list[str]:
        return list(await self.partition_counts())

    async def partition_counts(self) -> dict[str, int]:
        """The partition count of every topic this client may see, by name."""
        return dict((await self._ask(m.ListTopics(), m.ListTopicsReply)).topics)

    async def describe_topic(self, topic: str) -> dict[int, int]:
        """The end of every partition. Raises `UnknownTopic`."""
        return dict((await self._ask(m.DescribeTopic(topic), m.DescribeTopicReply)).partitions)

    async def metrics(self) -> str:
        """The broker's figures as Prometheus text."""
        return (await self._ask(m.MetricsFetch(), m.MetricsReply)).metrics

    async def ping(self) -> None:
        """Returns when the server has answered."""
        await self._ask(m.Ping(), m.Pong)

    # Asking.

    async def _ask(self, request: Request, answer: type[_Answer]) -> _Answer:
        return await self._reply(await self._enter(request), answer)

    async def _enter(self, request: Request) -> Call:
        """Take a place among the requests and leave, if there is a connection. Raises `ClientClosed`."""
        self._check_open()
        records = len(request.records) if isinstance(request, m.Produce) else 0
        call = await self._calls.enter(request, encode_request(self._options.dialect, request), records)
        if self._stream is not None:
            _write(self._stream, call)
        return call

    async def _reply(self, call: Call, answer: type[_Answer]) -> _Answer:
        """Shielded: whoever stops waiting must not take the reply from the order of replies."""
        reply = await asyncio.shield(call.reply)
        if isinstance(reply, m.ErrorReply):
            raise_refusal(call.request, reply)
        assert isinstance(reply, answer), "a reply of another kind is not taken in"
        return reply

    # Receiving.

    def _receive(self, data: bytes) -> None:
        self._heard()
        try:
            for reply in self._decoder.feed(data):
                self._take(reply)
        except WireError as failure:
            self._misunderstood(failure)

    def _take(self, reply: Reply) -> None:
        call = self._calls.oldest()
        if call is None:
            raise Undecodable(f"{type(reply).__name__} came unasked")
        if not isinstance(reply, (_REPLIES[type(call.request)], m.ErrorReply)):
            raise Undecodable(f"{type(call.request).__name__} was answered with {type(reply).__name__}")
        if isinstance(reply, m.ProduceReply) and len(reply.offsets) != call.records:
            raise Undecodable(f"{call.records} records were answered with {len(reply.offsets)} offsets")
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

    def _part(self) -> None:
        super()._part()
        if not self._options.resend_writes:
            self._calls.give_up_writes()


def _write(stream: Stream, call: Call) -> None:
    call.was_sent = True
    stream.write(call.frame)
