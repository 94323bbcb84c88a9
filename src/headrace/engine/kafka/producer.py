"""A Kafka producer: idempotent, with acks=all, and transactional if it has a transactional id.

It repeats a batch with the same sequence number until Kafka answers, so nothing is written twice and the order holds. A producer for a
weaker ack level is not idempotent: with acks=1 it repeats a batch until the deadline, with acks=0 Kafka answers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka_errors
from aiokafka.client import CoordinationType
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from headrace.engine.contract import Ack
from headrace.engine.kafka.cluster import Cluster
from headrace.engine.kafka.codec import add_to
from headrace.engine.kafka.encoding import encode_plain
from headrace.engine.kafka.names import RECORD_BYTES_MAX
from headrace.errors import Unavailable
from headrace.limits import MIB
from headrace.records import RecordBatch

_STOP_SECONDS: Final = 1.0
_ACKS: Final = {Ack.DURABLE: "all", Ack.WRITTEN: 1, Ack.NONE: 0}


class Producer:
    """Use `start` to create one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._group_coordinators: dict[str, int] = {}
        """Numbers of Kafka nodes."""
        self.is_doubtful = False
        """Whether a request had no answer. After that, a transactional producer must be replaced: Kafka may still receive the request, and
        it could end a later transaction of the same epoch."""
        send = inner.client.send

        async def watched(node: int, request: object, **options: object) -> object:
            try:
                return await send(node, request, **options)
            except kafka_errors.KafkaError:
                self.is_doubtful = True
                raise

        inner.client.send = watched

    @classmethod
    async def start(
        cls, cluster: Cluster, transactional_id: str | None, seconds: float, ack: Ack = Ack.DURABLE, *, transaction_ms: int = 60_000
    ) -> Producer:
        """Start a producer. A transactional one gets a new epoch: Kafka aborts what the one before it left open, and refuses its writes.
        It also aborts a transaction that is open for `transaction_ms`. Raises `Unavailable`."""
        inner = AIOKafkaProducer(
            acks=_ACKS[ack],
            enable_idempotence=ack is Ack.DURABLE,
            transactional_id=transactional_id,
            transaction_timeout_ms=transaction_ms,
            max_batch_size=RECORD_BYTES_MAX,
            max_request_size=RECORD_BYTES_MAX + MIB,
            metadata_max_age_ms=30_000,
            retry_backoff_ms=50,
            **cluster.arguments,
        )
        producer = cls(inner)
        try:
            async with asyncio.timeout(seconds):
                await inner.start()
        except (kafka_errors.KafkaError, OSError, TimeoutError) as failure:
            await producer.discard()
            raise Unavailable(f"Kafka: cannot start a producer: {str(failure) or type(failure).__name__}") from None
        producer.is_doubtful = False
        return producer

    @property
    def epoch(self) -> int:
        """Epoch of a transactional id, counted over its producer ids: it rises with each producer."""
        manager = self._inner._txn_manager
        return int((manager.producer_id << 16) + manager.producer_epoch + 1)

    @property
    def transaction_ms(self) -> int:
        """Time after which Kafka aborts an open transaction."""
        return int(self._inner._txn_manager.transaction_timeout_ms)

    @property
    def is_broken(self) -> bool:
        """Whether the producer has failed for good."""
        return bool(self._inner._sender.sender_task.done())

    def knows(self, topic: str, partition: int) -> bool:
        """Return whether the producer knows the partition, which may be new. If not, it asks for it."""
        client = self._inner.client
        if partition in (client.cluster.partitions_for_topic(topic) or ()):
            return True
        client.add_topic(topic)
        client.force_metadata_update()
        return False

    def encode(self, batches: Sequence[tuple[RecordBatch, Sequence[int]]]) -> Any:
        """Return a record batch for `send`: the records of some batches, with their timestamps."""
        is_transactional = self._inner._txn_manager is not None and self._inner._txn_manager.transactional_id is not None
        encoded = encode_plain([(batch, timestamps[0]) for batch, timestamps in batches], is_transactional=is_transactional)
        if encoded is not None:
            return encoded
        builder = self._inner.create_batch()
        for batch, timestamps in batches:
            is_added = add_to(builder.append, batch, timestamps)
            assert is_added, "the limit of the builder is above that of any record"
        return builder

    async def send(self, batch: Any, topic: str, partition: int) -> Any:
        """Write a record batch and return its position; None with acks=0."""
        metadata = await (await self._inner.send_batch(batch, topic, partition=partition))
        if metadata is None:
            # Without answers only the socket limits how much waits in memory for a slow node.
            for connection in list(self._inner.client._conns.values()):
                if connection.connected():
                    await connection._writer.drain()
        return metadata

    def forget(self, topic: str, partition: int) -> None:
        """Fail the batches of a partition that does not exist any more: the library would repeat them for ever."""
        for batch in self._inner._message_accumulator._batches.pop(TopicPartition(topic, partition), ()):
            batch.failure(kafka_errors.UnknownTopicOrPartitionError(topic))
            if batch._drain_waiter.done():
                batch._drain_waiter.exception()

    async def begin(self) -> None:
        await self._inner.begin_transaction()

    async def commit_offsets(self, group: str, places: Mapping[tuple[str, int], tuple[int, str]]) -> None:
        """Commit the offsets of a group as part of the transaction.

        The library adds only the first group to a transaction, and sends the offsets of all groups to the coordinator of the first. Kafka
        refuses those of the others, which would fail the whole transaction.
        """
        offsets = {TopicPartition(*place): OffsetAndMetadata(*committed) for place, committed in places.items()}
        self._inner._txn_manager._txn_consumer_group = None
        coordinators = self._inner._sender._coordinators
        coordinators.pop(CoordinationType.GROUP, None)
        if group in self._group_coordinators:
            coordinators[CoordinationType.GROUP] = self._group_coordinators[group]
        await self._inner.send_offsets_to_transaction(offsets, group)
        self._group_coordinators[group] = coordinators[CoordinationType.GROUP]

    async def commit(self) -> None:
        await self._inner.commit_transaction()

    async def abort(self) -> None:
        await self._inner.abort_transaction()

    async def discard(self) -> None:
        """Stop without waiting for batches."""
        inner = self._inner
        inner._closed = True
        accumulator = inner._message_accumulator
        for batch in [*accumulator._pending_batches, *(batch for batches in accumulator._batches.values() for batch in batches)]:
            for future in (batch.future, batch._drain_waiter):
                if future.done() and not future.cancelled():
                    future.exception()  # the library does not look at it
        with contextlib.suppress(kafka_errors.KafkaError, OSError):
            await inner.client.close()
        task = inner._sender.sender_task
        if task is not None:
            task.cancel()
            await asyncio.wait([task], timeout=_STOP_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()
