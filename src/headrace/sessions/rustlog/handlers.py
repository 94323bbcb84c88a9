"""Handlers of RustLog requests: one method for each request, from the request to its reply in either dialect.

Differences between the dialects that affect more than the error text are commented here. The error texts are in `wire.rustlog.errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from typing import Final, cast

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.groups.offsets import GroupLag
from headrace.broker.publishing.published import Outcome, PublishedOne
from headrace.broker.schema_checks import settled
from headrace.errors import (
    BrokerError,
    InvalidTopicName,
    NotAuthorized,
    NotCoordinator,
    OffsetOutOfRange,
    RecordTooLarge,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from headrace.limits import PARTITIONS_PER_TOPIC_MAX, TURN_BYTES_MIN
from headrace.records import Batch, RecordBatch
from headrace.sessions.rustlog.context import RustLogContext
from headrace.wire.rustlog import FETCH_BYTES_MAX, Dialect, fetch_reply
from headrace.wire.rustlog import errors as errors
from headrace.wire.rustlog import messages as m

_NOW_BYTES_MAX: Final = min(TURN_BYTES_MIN, *FETCH_BYTES_MAX.values())
"""Size of a Fetch that is answered at once. A larger reply waits for its turn."""
NO_SUCH_PLACE = (UnknownTopic, UnknownPartition, InvalidTopicName)
"""Errors for a partition that does not exist. An invalid topic name counts as an unknown topic."""


class RustLogHandlers:
    """Requests of one principal."""

    def __init__(self, broker: Broker, who: Principal, context: RustLogContext) -> None:
        self._broker = broker
        self._who = who
        self._context = context
        self._reply_bytes_max = context.settings.reply_bytes_max

    def answer(self, dialect: Dialect, request: m.Request) -> m.Reply | Awaitable[m.Reply]:
        """Return the reply, or an awaitable where the disk is needed. `fetch` answers a Fetch. Both raise `NotCoordinator`."""
        match request:
            case m.OffsetCommit():
                return self._commit(dialect, request)
            case m.CreateTopic():
                return self._create_topic(request)
            case m.ListTopics():
                return self._list_topics()
            case m.Produce() if request.records:
                return self._produce_to_new_topic(dialect, request)
            case m.Ping():
                return m.Pong()
        try:
            return self._at_once(request)
        except UnknownTopic:
            return self._answer_again(dialect, request)
        except BrokerError as error:
            return self._failed(dialect, request, error)

    async def _answer_again(self, dialect: Dialect, request: m.Request) -> m.Reply:
        """Answer a request for a topic that another broker may have just created."""

        async def answer() -> m.Reply:
            return self._at_once(request)

        try:
            return await self._broker.with_new_topics(answer)
        except BrokerError as error:
            return self._failed(dialect, request, error)

    def _at_once(self, request: m.Request) -> m.Reply:
        match request:
            case m.Produce(topic, partition):
                end = self._broker.bounds(self._who, topic, partition).end
                return m.ProduceReply(range(end, end))
            case m.OffsetFetch(topic, partition, group):
                return m.OffsetFetchReply(self._committed(group, topic, partition))
            case m.DescribeTopic(name):
                count = self._broker.topic(self._who, name).partitions
                return m.DescribeTopicReply(name, count, [(partition, self._end(name, partition)) for partition in range(count)])
            case m.DescribePartition(name, partition):
                return m.DescribePartitionReply(name, partition, self._end(name, partition))
            case m.MetricsFetch():
                return m.MetricsReply(self._context.metrics(self._lags()))
            case _:
                raise AssertionError(f"{request} is answered elsewhere")

    # Produce

    def stage(self, request: m.Produce) -> Outcome:
        """Stage the records, all or none, in the order of the calls. Raises the errors of `Broker.publish`."""
        if len(request.records) == 1:
            return self._broker.publish_one(self._who, request.topic, request.records[0], partition=request.partition)
        return self._broker.publish(self._who, request.topic, RecordBatch(request.records), partition=request.partition)

    def produced(self, dialect: Dialect, request: m.Produce, staged: Outcome, started_ns: int) -> m.Reply:
        """Return the reply to a staged Produce that is done."""
        error = staged.exception()
        if isinstance(error, BrokerError):
            return _error_reply(dialect, request, error)
        base = staged.offset if isinstance(staged, PublishedOne) else staged.result().base_offset
        count, context = len(request.records), self._context
        context.messages_produced += count
        context.bytes_in += sum(map(len, request.records))
        context.produce_latency.record(context.ticks_ns() - started_ns)
        return m.ProduceReply(range(base, base + count))

    def refused(self, dialect: Dialect, request: m.Request, error: BrokerError) -> m.Reply:
        """Count the error and return its reply."""
        self._broker.meters.refuse("rustlog", error.code)
        return _error_reply(dialect, request, error)

    def _failed(self, dialect: Dialect, request: m.Request, error: BrokerError) -> m.Reply:
        if isinstance(error, NotCoordinator):
            raise error
        return self.refused(dialect, request, error)

    async def _produce_to_new_topic(self, dialect: Dialect, request: m.Produce) -> m.Reply:
        started_ns = self._context.ticks_ns()
        try:
            await self._prepare(request)
            staged = self._broker.publish(self._who, request.topic, RecordBatch(request.records), partition=request.partition)
            await asyncio.wait((staged,))
        except BrokerError as error:
            return self._failed(dialect, request, error)
        return self.produced(dialect, request, staged, started_ns)

    async def _prepare(self, request: m.Produce) -> None:
        if self._context.settings.auto_create:
            await self._broker.prepare(self._who, request.topic, request.records)
        else:
            check = partial(self._broker.check_ready, self._who, request.topic, request.records)
            await self._broker.with_new_topics(lambda: settled(check))

    # Fetch

    async def fetch(self, dialect: Dialect, request: m.Fetch) -> m.Reply:
        started_ns = self._context.ticks_ns()
        try:
            reply = await self._broker.with_new_topics(lambda: self._read(dialect, request))
        except BrokerError as error:
            return self._failed(dialect, request, error)
        return self._fetched(reply, started_ns)

    def fetch_now(self, dialect: Dialect, request: m.Fetch) -> m.Reply | None:
        """Return the reply if it can be built from memory. None: `fetch` finds the records or the error."""
        if request.group_id or not 0 < request.max_bytes <= _NOW_BYTES_MAX:
            return None
        started_ns = self._context.ticks_ns()
        try:
            batches = self._broker.read_now(self._who, request.topic, request.partition, request.offset, bytes_max=request.max_bytes)
        except NotAuthorized:
            return None  # the error depends on what the principal may see
        if batches is None:
            return None
        size, reply_bytes_max = batches[0].value_size if len(batches) == 1 else None, self._reply_bytes_max
        if size is None:
            offsets, values = _columns(batches)
        else:
            offsets, values = batches[0].offsets(), cast(list[bytes], batches[0].values())
        return self._fetched(fetch_reply(dialect, offsets, values, request.max_bytes, reply_bytes_max, size), started_ns)

    def _fetched(self, reply: m.Reply, started_ns: int) -> m.Reply:
        """Count the records of a reply."""
        if isinstance(reply, m.FetchReply):
            self._context.messages_fetched += len(reply.values)
            self._context.bytes_out += reply.value_bytes
            self._context.fetch_latency.record(self._context.ticks_ns() - started_ns)
        return reply

    async def _read(self, dialect: Dialect, request: m.Fetch) -> m.Reply:
        topic, partition, start = request.topic, request.partition, request.offset
        committed = self._committed(request.group_id, topic, partition) if request.group_id else None
        if committed is not None:
            start = max(start, committed)
        try:
            bounds = self._broker.bounds(self._who, topic, partition)
        except NO_SUCH_PLACE:
            if dialect is Dialect.BINARY and request.group_id and committed is None:
                return m.FetchReply(range(0), [], 0)  # the original checks the commit before the partition
            raise
        if start > bounds.end:
            self._broker.check_reads(self._who, topic)  # a topic may be visible to a principal that may not read it
            return m.FetchReply(range(bounds.end, bounds.end), [], bounds.end)
        reply_bytes_max = self._reply_bytes_max
        bytes_max = max(1, min(request.max_bytes, FETCH_BYTES_MAX[dialect], reply_bytes_max))
        fetched = await self._broker.fetch(self._who, topic, partition, start, bytes_max=bytes_max)
        if not fetched.batches:
            return m.FetchReply(range(fetched.next_offset, fetched.next_offset), [], fetched.next_offset)
        if sum(batch.size_bytes for batch in fetched.batches) >= TURN_BYTES_MIN:
            await self._context.turns.wait()
        return fetch_reply(dialect, *_columns(fetched.batches), request.max_bytes, reply_bytes_max)

    # Groups

    def _committed(self, group: str, topic: str, partition: int) -> int | None:
        try:
            found = self._broker.committed(self._who, group, topic, partition)
        except NO_SUCH_PLACE:
            found = None
        return self._context.unattached.find(group, topic, partition) if found is None else found

    async def _commit(self, dialect: Dialect, request: m.OffsetCommit) -> m.Reply:
        group, topic, partition = request.group_id, request.topic, request.partition
        try:
            await self._broker.commit(self._who, group, {(topic, partition): request.offset})
        except NO_SUCH_PLACE:
            if dialect is Dialect.JSON:
                return m.OffsetCommitReply(False)
            return self._keep_unattached(dialect, request)
        except BrokerError as error:
            return self._failed(dialect, request, error)
        self._context.unattached.forget(group, topic, partition)
        return m.OffsetCommitReply(True)

    def _keep_unattached(self, dialect: Dialect, request: m.OffsetCommit) -> m.Reply:
        try:
            self._context.unattached.keep(request.group_id, request.topic, request.partition, request.offset)
        except BrokerError as error:
            return self._failed(dialect, request, error)
        return m.OffsetCommitReply(True)

    # Topics

    async def _create_topic(self, request: m.CreateTopic) -> m.Reply:
        if not 1 <= request.partition_count <= PARTITIONS_PER_TOPIC_MAX:
            return errors.invalid_partition_count(request.partition_count)
        try:
            await self._broker.create_topic(self._who, request.topic, partitions=request.partition_count)
        except TopicExists:
            return errors.topic_exists(request.topic)
        except InvalidTopicName as invalid:
            return errors.invalid_topic_name(str(invalid))
        except NotAuthorized as denied:
            return errors.not_authorized(str(denied))
        except BrokerError as error:
            return errors.topic_creation_failed(str(error), retriable=error.retriable)
        return m.CreateTopicReply(True)

    async def _list_topics(self) -> m.Reply:
        slices = await self._broker.listed(self._who, lambda topics: [(topic.name, topic.partitions) for topic in topics])
        return m.ListTopicsReply([row for rows in slices for row in rows])

    def _end(self, topic: str, partition: int) -> int:
        return self._broker.bounds(self._who, topic, partition).end

    def _lags(self) -> Iterator[tuple[str, GroupLag]]:
        for group in self._broker.groups(self._who):
            for lag in self._broker.lag(self._who, group):
                yield group, lag


def _columns(batches: Sequence[Batch]) -> tuple[Sequence[int], list[bytes]]:
    """Return the offsets and values of all batches. A tombstone becomes an empty record, because the protocol cannot express it."""
    offsets: Sequence[int] = batches[0].offsets()
    values = _without_tombstones(batches[0].values())
    for batch in batches[1:]:
        more = batch.offsets()
        if isinstance(offsets, range) and isinstance(more, range) and more.start == offsets.stop:
            offsets = range(offsets.start, more.stop)
        else:
            offsets = [*offsets, *more]
        values += _without_tombstones(batch.values())
    return offsets, values


def _without_tombstones(values: list[bytes | None]) -> list[bytes]:
    return cast(list[bytes], values) if all(values) else [value or b"" for value in values]


def _error_reply(dialect: Dialect, request: m.Request, error: BrokerError) -> m.Reply:
    """Return the error reply of the dialect. `request` is none of those with errors of their own."""
    if isinstance(error, NotAuthorized):
        return errors.not_authorized(str(error))
    match request:
        case m.Produce(topic, partition) | m.Fetch(topic, partition) if isinstance(error, NO_SUCH_PLACE):
            return errors.no_partition(dialect, topic, partition)
        case m.Produce():
            reason = f"record too large: {error.size_bytes} bytes" if isinstance(error, RecordTooLarge) else str(error)
            return errors.write_failed(dialect, reason, retriable=error.retriable)
        case m.Fetch() if isinstance(error, OffsetOutOfRange):
            return errors.offset_out_of_range(dialect, error.wanted, error.first)
        case m.Fetch():
            return errors.fetch_failed(dialect, str(error), retriable=error.retriable)
        case m.OffsetCommit():
            return errors.commit_failed(dialect, str(error), retriable=error.retriable)
        case m.DescribeTopic(topic) if isinstance(error, NO_SUCH_PLACE):
            return errors.no_topic_to_describe(topic)
        case m.DescribePartition(topic, partition) if isinstance(error, NO_SUCH_PLACE):
            return errors.no_partition_to_describe(topic, partition)
        case _:
            return errors.internal(str(error), retriable=error.retriable)
