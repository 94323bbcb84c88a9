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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar

from headrace.clients.errors import NotSupported
from headrace.clients.messages import MessageBatch
from headrace.clients.options import ClientOptions, RequestReplyOptions
from headrace.clients.publishing import Records
from headrace.clients.request_reply import RequestReplyClient
from headrace.clients.rustlog.requests import Call, Calls, error_of
from headrace.clients.stream import Stream
from headrace.errors import OffsetOutOfRange, UnknownPartition, WireError
from headrace.limits import MIB, RUSTLOG_FRAME_BYTES_MAX
from headrace.wire.rustlog import Dialect, Reply, ReplyDecoder, Request, Undecodable, encode_request, produce_requests
from headrace.wire.rustlog import messages as m

DEFAULT_PORT: Final = 9092
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RustLogOptions(RequestReplyOptions):
    """Options of a RustLog connection. `window_records_max` counts requests."""

    dialect: Dialect = Dialect.BINARY
    window_records_max: int = 256
    fetch_bytes_max: int = 1 * MIB


class RustLogClient(RequestReplyClient[RustLogOptions]):
    """RustLog client, created by `connect`. Belongs to one event loop."""

    protocol: ClassVar[str] = "RustLog"
    default_port: ClassVar[int] = DEFAULT_PORT
    default_options: ClassVar[ClientOptions] = RustLogOptions()
    carries: ClassVar[frozenset[str]] = frozenset({"partitions"})
    batch_records_max: ClassVar[int] = 500

    def __init__(self, host: str, port: int, options: RustLogOptions) -> None:
        self._calls = Calls(records_max=options.window_records_max, bytes_max=options.window_bytes_max)
        super().__init__(host, port, options, self._calls)
        self._decoder = ReplyDecoder()

    async def _submit(self, records: Records) -> Sequence[Call]:
        """Send the records to their partition, 0 by default.

        Each frame is written atomically; a large batch needs several. Raises `LimitExceeded` before sending if a record does not
        fit in a frame of the dialect.
        """
        return await self._enter(*produce_requests(self._options.dialect, records.topic, records.partition or 0, records.values))

    # Reading.

    async def read(
        self, topic: str, offset: int, *, partition: int = 0, records_max: int | None = None, bytes_max: int | None = None
    ) -> tuple[MessageBatch, int]:
        """Fetch columns and the next offset to read; the server bounds them by bytes. Raises `OffsetOutOfRange` below the first offset."""
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

    async def _partitions(self, topic: str) -> Sequence[int]:
        """Return the partitions of a topic. The JSON dialect cannot list them: a subscription follows partition 0 by default."""
        return [0] if self._options.dialect is Dialect.JSON else list(await self.describe_topic(topic))

    # Groups.

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """Commit `offset` as the next one the group reads. Raises `UnknownPartition`."""
        reply = await self._request(m.OffsetCommit(topic, partition, group, offset), m.OffsetCommitReply)
        if not reply.success:
            raise UnknownPartition(topic, partition)

    async def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        """Return the next offset the group reads; None if it has never committed in the partition."""
        return (await self._request(m.OffsetFetch(topic, partition, group), m.OffsetFetchReply)).offset

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
        """Send a request and wait for the reply, from the coordinator if the request needs it."""
        return await self._at_coordinator(lambda: self._request_once(request, answer))

    async def _request_once(self, request: Request, answer: type[_Answer]) -> _Answer:
        """Send a request and wait for the reply. Shielded: a cancelled caller must not disturb the order of replies."""
        (call,) = await self._enter(request)
        reply = await asyncio.shield(call.done)
        if isinstance(reply, m.ErrorReply):
            raise error_of(request, reply)
        assert isinstance(reply, answer), "`_take` rejects other replies"
        return reply

    async def _enter(self, *requests: Request) -> list[Call]:
        """Queue requests and send them if connected. Raises `ClientClosed`."""
        self._check_open()
        calls = [Call(request, encode_request(self._options.dialect, request)) for request in requests]
        await self._calls.enter(*calls)
        if self._stream is not None:
            for call in calls:
                _write(self._stream, call)
        return calls

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
        if isinstance(reply, m.ProduceReply) and len(reply.offsets) != call.count:
            raise Undecodable(f"{call.count} records received {len(reply.offsets)} offsets")
        self._calls.answered(reply)
        self._progressed()

    # The connection.

    async def _open(self) -> None:
        stream = await self._connect()
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
