"""Publish a batch of PRODUCE frames, and build one reply for each record.

A batch is published as a whole unless its records name partitions. In that case adjacent records are grouped by partition, so that the
order in each partition is the order of the frames. A record that fails does not fail the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from headrace.broker import Broker, Outcome, Principal, Published, PublishedEach, PublishedOne
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, InvalidRecord, InvalidRequest, LimitExceeded, RecordTooLarge, UnknownTopic
from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX, KIB
from headrace.records import NEVER, RecordBatch
from headrace.sessions.chunks import publish_in_chunks
from headrace.sessions.flymq.errors import error_reply, publish_error_reply
from headrace.sessions.session import RECORD_OVERHEAD_BYTES as IN_FLIGHT_OVERHEAD_BYTES
from headrace.wire.flymq import Dialect, Opcode, encode_failure, encode_reply
from headrace.wire.flymq.fetching import FRONT_BYTES, RECORD_OVERHEAD_BYTES
from headrace.wire.flymq.many import encode_metadata_each
from headrace.wire.flymq.messages import AUTO, ProduceBatch, ProduceMany, RecordMetadataBatch
from headrace.wire.flymq.produce import encode_metadata_one

TTL_MS_MAX: Final = 1 << 53
"""Upper bound of a duration. Its sum with a time fits 64 bits."""
OFFSET_MAX: Final = (1 << 63) - 1
"""Largest offset. The wire format could carry twice as much."""
RECORD_BYTES_MAX: Final = FLYMQ_PAYLOAD_BYTES_MAX - FRONT_BYTES - RECORD_OVERHEAD_BYTES
"""Key and value of the largest record that a FETCH reply can carry. A PRODUCE frame could carry a few bytes more."""


@dataclass(slots=True)
class Part:
    """Records of a batch that were published together, or failed together."""

    indexes: Sequence[int]
    outcome: asyncio.Future[Published] | BrokerError


class Staged:
    """A batch in flight. Only the sizes of its records are kept, which is all the reply needs."""

    __slots__ = ("_has_ttls", "_key_sizes", "_topic", "_value_sizes", "parts", "size_bytes")

    def __init__(self, batch: ProduceBatch, parts: list[Part]) -> None:
        self._topic, self._has_ttls = batch.topic, batch.ttls is not None
        self._value_sizes = list(map(len, batch.values))
        self._key_sizes = [AUTO] * len(batch) if batch.keys is None else [len(key) if key else AUTO for key in batch.keys]
        self.parts = parts
        self.size_bytes = sum(self._value_sizes) + len(batch) * IN_FLIGHT_OVERHEAD_BYTES
        if batch.keys is not None:
            self.size_bytes += sum(map(len, filter(None, batch.keys)))

    @property
    def outcome(self) -> asyncio.Future[Any] | None:
        """Done when every part is. None: no part waits."""
        outcomes = [part.outcome for part in self.parts if not isinstance(part.outcome, BrokerError)]
        if len(outcomes) > 1:
            return asyncio.gather(*outcomes, return_exceptions=True)
        return outcomes[0] if outcomes else None

    def reply(self, dialect: Dialect) -> bytes:
        """Return one frame for each record, in order."""
        count = len(self._value_sizes)
        opcode, reply_to = (Opcode.PRODUCE_WITH_TTL, error_reply) if self._has_ttls else (Opcode.PRODUCE, publish_error_reply)
        partitions, offsets, timestamps = [0] * count, [0] * count, [0] * count
        placed: tuple[Sequence[int], Sequence[int], Sequence[int]] = partitions, offsets, timestamps
        failed: dict[int, bytes] = {}
        for part in self.parts:
            outcome = _resolved(part.outcome)
            if isinstance(outcome, BrokerError):
                failed |= dict.fromkeys(part.indexes, encode_failure(reply_to(outcome), dialect))
            elif len(self.parts) == 1:
                placed = columns(outcome)
            else:
                for index, *row in zip(part.indexes, *columns(outcome), strict=True):
                    partitions[index], offsets[index], timestamps[index] = row
        if len(failed) == count:
            return b"".join([failed[index] for index in range(count)])
        rows = RecordMetadataBatch(self._topic, *placed, self._key_sizes, self._value_sizes)
        frames = encode_reply(opcode, rows)
        if not failed:
            return frames
        size = len(frames) // count
        return b"".join([failed.get(index) or frames[index * size : (index + 1) * size] for index in range(count)])


class StagedRecord:
    """A single record in flight."""

    __slots__ = ("_key_size", "_topic", "_value_size", "outcome", "size_bytes")

    def __init__(self, batch: ProduceBatch, outcome: Outcome) -> None:
        key = batch.keys[0] if batch.keys is not None else None
        self._topic = batch.topic
        self._value_size = len(batch.values[0])
        self._key_size = len(key) if key else AUTO
        self.outcome = outcome
        self.size_bytes = self._value_size + (len(key) if key else 0) + IN_FLIGHT_OVERHEAD_BYTES

    def reply(self, dialect: Dialect) -> bytes:
        outcome = self.outcome
        if isinstance(outcome, PublishedOne) and outcome.error is None:
            return encode_metadata_one(self._topic, outcome.partition, outcome.offset, outcome.timestamp, self._key_size, self._value_size)
        published = _resolved(outcome)
        if isinstance(published, BrokerError):
            return encode_failure(publish_error_reply(published), dialect)
        return encode_metadata_one(self._topic, *published.placement(0), published.timestamp, self._key_size, self._value_size)


class StagedMany:
    """Records for many topics in flight."""

    __slots__ = ("_key_sizes", "_topics", "_value_sizes", "outcome", "size_bytes")

    def __init__(self, many: ProduceMany, value_sizes: list[int], outcome: asyncio.Future[PublishedEach]) -> None:
        self._topics, self.outcome = many.topics, outcome
        self._value_sizes = value_sizes
        self._key_sizes = None if many.keys is None else [len(key) if key else AUTO for key in many.keys]
        self.size_bytes = sum(value_sizes) + len(many) * IN_FLIGHT_OVERHEAD_BYTES
        if many.keys is not None:
            self.size_bytes += sum(map(len, filter(None, many.keys)))

    def reply(self, dialect: Dialect) -> bytes:
        """Return one frame for each record, in order."""
        error = self.outcome.exception()
        if isinstance(error, BrokerError):
            return encode_failure(publish_error_reply(error), dialect) * len(self._topics)
        published = self.outcome.result()
        failed = {index: encode_failure(publish_error_reply(failure), dialect) for index, failure in published.failed.items()}
        return encode_metadata_each(
            self._topics, published.partitions, published.offsets, published.timestamp, self._key_sizes, self._value_sizes, failed
        )


def stage_many(broker: Broker, who: Principal, many: ProduceMany) -> StagedMany | None:
    """Publish records for many topics. Return None, with nothing staged, if their topics must be handled one by one."""
    value_sizes = list(map(len, many.values))
    if sum(value_sizes) > RECORD_BYTES_MAX:
        return None
    try:
        outcome = broker.publish_each(who, many.topics, many.values, many.keys)
    except BrokerError:
        return None
    return None if outcome is None else StagedMany(many, value_sizes, outcome)


def _resolved(outcome: Outcome | BrokerError) -> Published | BrokerError:
    if isinstance(outcome, BrokerError):
        return outcome
    error = outcome.exception()
    if error is None:
        return outcome.result()
    if isinstance(error, BrokerError):
        return error
    raise error


def columns(published: Published) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return partitions, offsets and timestamps of the records."""
    count, timestamps = published.count, [published.timestamp] * published.count
    if published.placements is None:
        return [published.partition] * count, range(published.base_offset, published.base_offset + count), timestamps
    return [place for place, _ in published.placements], [offset for _, offset in published.placements], timestamps


def stage(broker: Broker, who: Principal, batch: ProduceBatch) -> Staged | StagedRecord:
    """Publish the batch. Raises `UnknownTopic` and `SchemaCheckPending`, in which case nothing was staged."""
    if len(batch.values) == 1 and batch.ttls is None and len(batch.values[0]) <= KIB:
        partition = None if batch.partitions is None or batch.partitions[0] == AUTO else batch.partitions[0]
        key = None if batch.keys is None else batch.keys[0]
        try:
            return StagedRecord(batch, broker.publish_one(who, batch.topic, batch.values[0], key, partition=partition))
        except (UnknownTopic, SchemaCheckPending):
            raise
        except BrokerError as error:
            broker.meters.refuse("flymq", error.code)
            return failed(batch, error)
    try:
        broker.check_ready(who, batch.topic, batch.values)
    except (UnknownTopic, SchemaCheckPending):
        raise
    except BrokerError as error:
        broker.meters.refuse("flymq", error.code)
        return failed(batch, error)
    everything: Sequence[int] = range(len(batch))
    parts: list[Part] = []
    if batch.ttls is not None and not (0 <= min(batch.ttls) <= max(batch.ttls) <= TTL_MS_MAX):
        everything = [index for index, ttl_ms in enumerate(batch.ttls) if 0 <= ttl_ms <= TTL_MS_MAX]
        for index in set(range(len(batch))) - set(everything):
            parts.append(Part([index], InvalidRequest(f"a record cannot live for {batch.ttls[index]} ms")))
        if not everything:
            return Staged(batch, parts)
    if batch.partitions is None:
        return Staged(batch, parts + _stage_part(broker, who, batch, everything, None))
    chosen = batch.partitions
    for automatic, indexes in groupby(everything, lambda index: chosen[index] == AUTO):
        if automatic:
            parts += _stage_part(broker, who, batch, list(indexes), None)
            continue
        by_partition: dict[int, list[int]] = {}
        for index in indexes:
            by_partition.setdefault(chosen[index], []).append(index)
        for partition, picked in by_partition.items():
            parts += _stage_part(broker, who, batch, picked, partition)
    return Staged(batch, parts)


def failed(batch: ProduceBatch, error: BrokerError) -> Staged:
    """Return a batch of which every record failed."""
    return Staged(batch, [Part(range(len(batch)), error)])


def _stage_part(broker: Broker, who: Principal, batch: ProduceBatch, indexes: Sequence[int], partition: int | None) -> list[Part]:
    records = _pick(broker, batch, indexes)
    try:
        if records.size_bytes > RECORD_BYTES_MAX:
            raise RecordTooLarge(size_bytes=records.size_bytes, bytes_max=RECORD_BYTES_MAX)
        return [Part(indexes, broker.publish(who, batch.topic, records, partition=partition))]
    except UnknownTopic:
        raise
    except LimitExceeded as exceeded:
        if len(indexes) == 1:
            return [Part(indexes, exceeded)]
        # One record, or all together, exceed a limit: publish each one on its own.
        return [part for index in indexes for part in _stage_part(broker, who, batch, [index], partition)]
    except InvalidRecord:

        def publish(begin: int, end: int) -> asyncio.Future[Published]:
            return broker.publish(who, batch.topic, _pick(broker, batch, indexes[begin:end]), partition=partition)

        return [Part(indexes[begin:end], outcome) for begin, end, outcome in publish_in_chunks(publish, len(indexes))]
    except BrokerError as error:
        return [Part(indexes, error)]


def _pick(broker: Broker, batch: ProduceBatch, indexes: Sequence[int]) -> RecordBatch:
    if len(indexes) == len(batch):
        records = RecordBatch(batch.values, batch.keys)
    else:
        keys = None if batch.keys is None else [batch.keys[index] for index in indexes]
        records = RecordBatch([batch.values[index] for index in indexes], keys if keys is not None and any(keys) else None)
    if batch.ttls is not None:
        # A time to live of zero means the topic's own.
        now, ttls = broker.now, [batch.ttls[index] for index in indexes]
        records.expiries = [now + ttl_ms if ttl_ms else NEVER for ttl_ms in ttls] if any(ttls) else None
    return records
