"""Kafka engine: topics are Kafka topics, records are Kafka records.

Topics, bounds and sizes are snapshots of what the cluster said last, refreshed every `refresh_ms`. They are never behind what this engine
has appended. Partitions that somebody watches are followed with long polls, so their ends move at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec
from aiokafka import errors as kafka_errors

from headrace.engine.checks import check_batch
from headrace.engine.contract import (
    Ack,
    Appended,
    AppendedEach,
    Batch,
    Bounds,
    Capabilities,
    Cleanup,
    Health,
    Located,
    OffsetStore,
    Ownership,
    Placement,
    Topic,
    TopicConfig,
    Write,
)
from headrace.engine.each import append_by_future, append_by_partition
from headrace.engine.kafka.cluster import Cluster, KafkaCounters, broker_error
from headrace.engine.kafka.codec import encoded_bytes_max
from headrace.engine.kafka.election import Election
from headrace.engine.kafka.fetching import Fetches
from headrace.engine.kafka.following import Followers
from headrace.engine.kafka.names import CONFIG_NAMES, INTERNAL, Names, from_kafka_config, to_kafka_config, weakness
from headrace.engine.kafka.offsets import KafkaOffsets, split
from headrace.engine.kafka.partition import PartitionLog
from headrace.engine.kafka.parts import Append, LateBatch
from headrace.engine.kafka.settings import KafkaSettings
from headrace.engine.kafka.writer import Writer
from headrace.engine.partition_limits import check_partitions
from headrace.errors import (
    BrokerError,
    InvalidRequest,
    InvalidTopicName,
    NotCoordinator,
    OffsetOutOfRange,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from headrace.limits import MIB
from headrace.records import ColumnBatch, RecordBatch

_log = logging.getLogger(__name__)
_PAUSE_SECONDS: Final = 0.2
_CACHE_BYTES_MAX: Final = 128 * MIB
_SETTINGS_TOPIC: Final = "__topics"
_SETTINGS_TURNS: Final = 10
_ELECTION_TOPIC: Final = "__coordinator"
_SHARED_TOPICS: Final = frozenset((_SETTINGS_TOPIC, "__audit"))
"""Internal topics to which every broker appends: no record of them depends on another."""
_CONNECTION: Final = "connection to Kafka"


class _OwnSettings(msgspec.Struct, omit_defaults=True):
    """Settings of a topic that Kafka does not keep."""

    ack: Ack = Ack.DURABLE
    ttl_ms: int = 0
    dead_letter_expired: bool = False


def _own_of(config: TopicConfig) -> _OwnSettings:
    return _OwnSettings(config.ack, config.ttl_ms, config.dead_letter_expired)


class KafkaEngine:
    """Implements `Engine` on a Kafka cluster. `clock` returns Unix ms and stamps batches without timestamps."""

    capabilities = Capabilities(
        dense_offsets=False,
        forced_compaction=False,
        sync_per_append=False,
        cheap_atomic_append=False,
        keeps_batches=False,
        any_topic_name=False,
        placement=Placement.MURMUR2,
        reads_in_memory=False,
    )
    local_file = ""

    def __init__(self, settings: KafkaSettings, *, clock: Callable[[], int]) -> None:
        self._settings = settings
        self._clock = clock
        self.health = Health()
        self._names = Names(settings.prefix)
        self._cluster = Cluster(settings)
        self._offsets = KafkaOffsets(self._cluster, self._names, settings.coordinator_id)
        self._writer = Writer(
            self._cluster,
            self._offsets,
            deadline_ms=settings.deadline_ms,
            health=self.health,
            advanced=self._moved,
            fenced=self._lose,
        )
        self._topics: dict[str, Topic] = {}
        self._logs: dict[str, list[PartitionLog]] = {}
        self._own: dict[str, _OwnSettings] = {}
        self._own_position = 0
        self._turn = 0
        self._missing: set[str] = set()
        """Topics that the last refresh did not find."""
        self._followers = Followers(self._cluster, self._moved)
        self._fetches = Fetches(self._cluster, lambda log: self._refresh_bounds([log]))
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_lock = asyncio.Lock()
        self._is_open = False
        self.topic_changed: Callable[[str], None] = lambda name: None
        self.ownership = Ownership(is_owner=False, advertise=self._advertise)
        self._election: Election | None = None
        self._taking_over: asyncio.Task[None] | None = None

    @property
    def offset_store(self) -> OffsetStore:
        return self._offsets

    @property
    def epoch(self) -> int:
        return self._writer.epoch

    @property
    def counters(self) -> KafkaCounters:
        return self._cluster.counters

    async def open(self) -> None:
        """Connect, take part in the election, and read the topics. Raises `Unavailable` if no connection succeeds. Later an elected engine
        tries again: a broker starts while nodes fail."""
        await self._cluster.open()
        try:
            while not await self._begin():
                await self._end()
                await asyncio.sleep(_PAUSE_SECONDS)
        except BaseException:
            await self.close()
            raise
        self._refreshing = asyncio.get_running_loop().create_task(self._refresh_forever())

    async def _begin(self) -> bool:
        try:
            election = await self._elect() if self._settings.is_elected else None
            coordinator_id = self._settings.coordinator_id
            await self._writer.open(coordinator_id if election is None else f"{coordinator_id}-{election.member_id}")
            self._is_open = True
            if election is None or election.is_owner:
                await self._own_tables()
            else:
                await self._refresh()
        except Unavailable as failure:
            if not self._settings.is_elected:
                raise
            _log.warning("Kafka does not answer; trying again", extra={"reason": str(failure)})
            return False
        return True

    async def _end(self) -> None:
        self._is_open = False
        if self._taking_over is not None:
            self._taking_over.cancel()
            await asyncio.wait([self._taking_over])
            self._taking_over = None
        await self._writer.close()
        if self._election is not None:  # after the last write: the next owner reads the tables at once
            await self._election.leave()
            self._election = None
        self.ownership.is_owner = False

    async def _elect(self) -> Election:
        topic = self._names.to_kafka(_ELECTION_TOPIC)
        with contextlib.suppress(TopicExists):
            await self._cluster.create_topic(topic, 1, {})
        election = self._election = Election(self._cluster.arguments, topic, self._settings.coordinator_id, self._decided)
        await election.join()
        return election

    def _decided(self, is_owner: bool) -> None:
        """Follow the outcome of an election."""
        assert self._election is not None
        found = self._election.owner_address, self._election.owner_listeners
        if found != (self.ownership.coordinator, self.ownership.listeners):
            self.ownership.coordinator, self.ownership.listeners = found
            self.ownership.moved()
        if self.ownership.is_owner:
            if not is_owner:
                self._lose()
        elif is_owner and self._is_open and self._taking_over is None:
            self._taking_over = asyncio.get_running_loop().create_task(self._take_over())

    async def _own_tables(self) -> None:
        """Fence the owner before, and read what it wrote last."""
        await self._writer.own(self._settings.coordinator_id)
        await self._refresh()
        self.ownership.is_owner = True

    async def _take_over(self) -> None:
        try:
            await self._own_tables()
        except (BrokerError, kafka_errors.KafkaError, OSError) as failure:
            _log.warning("cannot take over the tables", extra={"reason": str(failure) or type(failure).__name__})
            self._lose()
            return
        finally:
            self._taking_over = None
        if self._election is not None and self._election.is_owner:
            self.ownership.gained()
        else:
            self._lose()

    def _advertise(self, address: str, listeners: Mapping[str, str]) -> None:
        if self._election is not None:
            self._election.advertise(address, listeners)

    async def close(self) -> None:
        self._is_open = False
        tasks = [task for task in (self._refreshing, self._taking_over) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._refreshing = self._taking_over = None
        await self._followers.close()
        await self._fetches.close()
        await self._end()
        await self._cluster.close()
        self._topics.clear()
        self._logs.clear()

    # Topics

    async def create_topic(self, name: str, partitions: int, config: TopicConfig, *, internal: bool = False) -> Topic:
        kafka_name, kafka_config = self._names.to_kafka(name), to_kafka_config(config)
        if _own_of(config) != _OwnSettings():
            await self._refresh()  # the settings of a topic that another broker has just created must stay
        if name in self._topics:
            raise TopicExists(name)
        check_partitions(self._topics, name, partitions, internal=internal)
        await self._put_own(name, config)  # first, so that others see the topic with them
        is_new = True
        try:
            await self._cluster.create_topic(kafka_name, partitions, kafka_config)
        except TopicExists:
            is_new = False
        if not is_new:  # another broker has created it a moment ago
            await self._refresh()
        async with self._refresh_lock:
            if name not in self._topics:
                await self._add({name: partitions}, must_exist=True)
        if not is_new and not internal:
            raise TopicExists(name)
        return self._topics[name]

    async def alter_topic(self, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        old = self._topics.get(name)
        if old is None:
            raise UnknownTopic(name)
        count = old.partitions if partitions is None else partitions
        check_partitions(self._topics, name, count, internal=old.internal)
        if config is not None:
            await self._cluster.alter_config(self._names.to_kafka(name), to_kafka_config(config))
            await self._put_own(name, config)
        if count > old.partitions:
            await self._cluster.add_partitions(self._names.to_kafka(name), count)
        async with self._refresh_lock:
            await self._add({name: count}, must_exist=True)
        return self._topics[name]

    async def delete_topic(self, name: str) -> None:
        if name not in self._topics:
            raise UnknownTopic(name)
        logs = self._logs[name]
        for log in logs:
            log.is_deleting = True
        try:
            await self._writer.finish(logs)
            await self._cluster.delete_topic(self._names.to_kafka(name))
        finally:
            for log in logs:
                log.is_deleting = False
        async with self._refresh_lock:
            self._drop(name)
        if self._own.pop(name, None) is not None:
            await self._write_own(name, None)

    def topics(self) -> Mapping[str, Topic]:
        return MappingProxyType(self._topics)

    async def look_for_topic(self, name: str) -> bool:
        try:
            kafka_name = self._names.to_kafka(name)
        except InvalidTopicName:
            return False
        # In a task, which the timeouts of the library need.
        return name in self._topics or await asyncio.get_running_loop().create_task(self._look_for(name, kafka_name))

    async def _look_for(self, name: str, kafka_name: str) -> bool:
        async with self._refresh_lock:
            if name not in self._topics:
                try:
                    counts = await self._cluster.partition_counts()
                    if counts.get(kafka_name):
                        served = self._served(counts)
                        altered = await self._read_own(served[_SETTINGS_TOPIC]) if _SETTINGS_TOPIC in served else set()
                        await self._learn({other: served[other] for other in altered | {name} if other in served})
                except (kafka_errors.KafkaError, OSError) as failure:
                    raise broker_error(failure) from failure
        return name in self._topics

    def _find(self, topic: str, partition: int) -> PartitionLog:
        logs = self._logs.get(topic)
        if logs is None:
            raise UnknownTopic(topic)
        if not 0 <= partition < len(logs):
            raise UnknownPartition(topic, partition)
        return logs[partition]

    def _find_open(self, topic: str, partition: int) -> PartitionLog:
        """Find a partition that takes appends."""
        log = self._find(topic, partition)
        if log.is_deleting:
            raise UnknownTopic(topic)
        return log

    # Refresh

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.refresh_ms / 1000)
            try:
                await self._refresh()
            except (BrokerError, kafka_errors.KafkaError, OSError) as failure:
                self.health.failed(_CONNECTION, str(failure) or type(failure).__name__)
            else:
                self.health.succeeded(_CONNECTION)

    async def _refresh(self) -> None:
        """Read topics, settings and bounds from the cluster."""
        async with self._refresh_lock:
            served = self._served(await self._cluster.partition_counts())
            # The node that was asked may not have heard of a new topic or partition yet: a topic is gone when it is missing twice in a row.
            missing, self._missing = self._missing, self._logs.keys() - served.keys()
            for name in missing & self._missing:
                self._drop(name)
                self.topic_changed(name)
            altered = await self._read_own(served[_SETTINGS_TOPIC]) if _SETTINGS_TOPIC in served else set()
            altered |= await self._altered_elsewhere()
            await self._learn({name: count for name, count in served.items() if len(self._logs.get(name, ())) < count or name in altered})
            logs = [log for name, logs in self._logs.items() if name in served for log in logs]
            await self._refresh_bounds(logs, is_patient=False)
        if sum(log.cached_bytes for logs in self._logs.values() for log in logs) > _CACHE_BYTES_MAX:
            for logs in self._logs.values():
                for log in logs:
                    log.forget()
        self._followers.follow()
        await self._offsets.refresh()

    def _served(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return our names of the cluster's topics, and their partitions."""
        served = {ours: count for name, count in counts.items() if count and (ours := self._names.from_kafka(name)) is not None}
        served.pop(_ELECTION_TOPIC, None)
        return served

    async def _learn(self, changed: Mapping[str, int]) -> None:
        """Add what others have created or altered."""
        if changed:
            await self._add(changed)
        for name in changed:
            self.topic_changed(name)

    async def _altered_elsewhere(self) -> set[str]:
        """Return the topics whose settings others have changed in Kafka, at every `_SETTINGS_TURNS`th call."""
        self._turn += 1
        if self._turn % _SETTINGS_TURNS:
            return set()
        kafka_names = {self._names.to_kafka(name): name for name in self._topics}
        found = await self._cluster.configs(list(kafka_names), CONFIG_NAMES)
        served = {kafka_names[kafka]: new for kafka, new in found.items()}
        return {name for name, new in served.items() if name in self._topics and self._config(name, new) != self._topics[name].config}

    def _config(self, name: str, found: Mapping[str, str]) -> TopicConfig:
        own = self._own.get(name, _OwnSettings())
        return replace(from_kafka_config(found), ack=own.ack, ttl_ms=own.ttl_ms, dead_letter_expired=own.dead_letter_expired)

    async def _add(self, counts: Mapping[str, int], *, must_exist: bool = False) -> None:
        """Add topics and partitions that the cluster has, with their settings and bounds."""
        kafka_names = {name: self._names.to_kafka(name) for name in counts}
        configs = await self._cluster.configs(list(kafka_names.values()), CONFIG_NAMES, must_exist=must_exist)
        for name, count in counts.items():
            found = configs.get(kafka_names[name])
            if found is None:
                continue
            before = self._logs.get(name, [])
            logs = before + [PartitionLog(name, kafka_names[name], number) for number in range(len(before), count)]
            await self._refresh_bounds(logs[len(before) :])
            for log in logs:
                log.batch_bytes_max = int(found.get("max.message.bytes") or MIB)
            config = self._config(name, found)
            self._warn(name, kafka_names[name], found)
            self._logs[name] = logs
            if name != _SETTINGS_TOPIC:  # the engine's own
                self._topics[name] = Topic(name, count, config, name.startswith(INTERNAL))

    def _warn(self, name: str, kafka_name: str, found: Mapping[str, str]) -> None:
        """Log a warning for a topic whose acknowledged records Kafka may lose. Raises `InvalidRequest` for a table: it must not."""
        fault = weakness(found, self._cluster.replicas(kafka_name))
        if fault is None or name in self._logs:
            return
        if name.startswith(INTERNAL) and "unclean" in fault:
            raise InvalidRequest(f"Kafka topic {kafka_name}: {fault}")
        _log.warning("Kafka may lose acknowledged records of a topic", extra={"topic": kafka_name, "reason": fault})

    def _drop(self, name: str) -> None:
        self._topics.pop(name, None)
        for log in self._logs.pop(name, ()):
            log.is_gone = True
            self._followers.forget(log)
            self._writer.topic_gone(log)
            log.wake()

    async def _refresh_bounds(self, logs: Sequence[PartitionLog], *, is_patient: bool = True) -> None:
        by_place = {log.place: log for log in logs}
        moved = []
        for place, (first, end) in (await self._cluster.bounds(list(by_place), is_patient=is_patient)).items():
            log = by_place[place]
            log.first = max(log.first, first)
            if not log.is_committing and log.advance(end):
                moved.append(log)
        self._moved(moved)

    def _moved(self, logs: Iterable[PartitionLog]) -> None:
        for log in logs:
            log.wake()

    def _lose(self) -> None:
        """Stop writing to the tables: another broker owns them."""
        self._writer.stop_transactions()
        self.health.ended("another broker owns the tables")
        self.ownership.lost()

    # Settings that Kafka does not keep

    async def _put_own(self, name: str, config: TopicConfig) -> None:
        own = _own_of(config)
        if own != self._own.get(name, _OwnSettings()):
            self._own[name] = own
            await self._write_own(name, own)

    async def _write_own(self, name: str, own: _OwnSettings | None) -> None:
        if _SETTINGS_TOPIC not in self._logs:
            kafka_name, config = self._names.to_kafka(_SETTINGS_TOPIC), to_kafka_config(TopicConfig(cleanup=Cleanup.COMPACT))
            with contextlib.suppress(TopicExists):
                await self._cluster.create_topic(kafka_name, 1, config)
            async with self._refresh_lock:
                await self._add({_SETTINGS_TOPIC: 1})
        value = None if own is None else msgspec.json.encode(own)
        await self.append([Write(_SETTINGS_TOPIC, 0, RecordBatch([value], [name.encode()]))])

    async def _read_own(self, partitions: int) -> set[str]:
        """Read what is new in the table of settings. Returns the topics whose settings have changed."""
        altered: set[str] = set()
        if _SETTINGS_TOPIC not in self._logs:
            await self._add({_SETTINGS_TOPIC: partitions})
        log = self._find(_SETTINGS_TOPIC, 0)
        await self._refresh_bounds([log])
        position = max(self._own_position, log.first)
        while position < log.end:
            batches = await self.read(_SETTINGS_TOPIC, 0, position, bytes_max=MIB)
            for batch in batches:
                for record in batch.records():
                    name = (record.key or b"").decode()
                    before = self._own.pop(name, None)
                    if record.value is not None:
                        self._own[name] = msgspec.json.decode(record.value, type=_OwnSettings)
                    if self._own.get(name) != before:
                        altered.add(name)
            position = batches[-1].next_offset if batches else log.end
        self._own_position = position
        return altered

    # Writing

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        if not self._is_open:
            raise Unavailable("the engine is not open")
        found: list[tuple[PartitionLog, RecordBatch | LateBatch]] = []
        sizes: list[int] = []
        commits = split(writes)
        for write in writes[:-1] if commits else writes:
            log, batch = self._find_open(write.topic, write.partition), write.batch
            size_bytes = 0
            if isinstance(batch, (RecordBatch, ColumnBatch)):
                size_bytes = write.size_bytes = check_batch(batch)
                if isinstance(batch, ColumnBatch):
                    batch = batch.record_batch()
                size_bytes = encoded_bytes_max(batch, size_bytes)
            found.append((log, batch))
            sizes.append(size_bytes)
        future: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()
        if not found and not commits:
            future.set_result([])
            return future
        owned = owned or bool(commits) or any(log.topic.startswith(INTERNAL) and log.topic not in _SHARED_TOPICS for log, _ in found)
        if owned and not self.ownership.is_owner:
            raise NotCoordinator(self.ownership.coordinator)
        is_plain = (
            not owned
            and all(log is found[0][0] and isinstance(batch, RecordBatch) for log, batch in found)
            and sum(sizes) <= found[0][0].batch_bytes_max
        )
        level = Ack.DURABLE
        if is_plain and ack is not Ack.DURABLE and (topic := self._topics.get(found[0][0].topic)) is not None:
            level = topic.config.ack  # a topic has one level, because producers do not wait for each other
        self._writer.stage(Append(found, future, self._clock(), sizes, not is_plain, level, commits))
        return future

    # Reading

    def append_then(self, write: Write, done: Callable[[list[Appended] | BaseException], None]) -> None:
        append_by_future(self.append, write, done)

    def append_each(
        self, places: Sequence[tuple[str, int]], values: Sequence[bytes], keys: Sequence[bytes | None] | None = None
    ) -> asyncio.Future[AppendedEach]:
        for topic, partition in set(places):
            self._find_open(topic, partition)  # all of them, before the first append
        return append_by_partition(self.append, places, values, keys)

    def read_now(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch] | None:
        logs = self._logs.get(topic, ())
        if not 0 <= partition < len(logs) or not logs[partition].first <= offset < logs[partition].end:
            return None
        return [*self._fetches.cached(logs[partition], offset, bytes_max, records_max)] or None

    async def read(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch]:
        log = self._find(topic, partition)
        if offset > log.end:
            await self._refresh_bounds([log])  # others may have written since
        if not log.first <= offset <= log.end:
            raise OffsetOutOfRange(wanted=offset, first=log.first, end=log.end)
        if offset == log.end and not log.watchers:
            self._followers.linger(log)
        position, end = offset, log.end
        while position < end:
            found = self._fetches.cached(log, position, bytes_max, records_max)
            if found:
                return [*found, *await self._fetches.coming(log, found, bytes_max, records_max)]
            position = await self._fetches.fetched(log, position, bytes_max)
        return []

    async def locate(self, topic: str, partition: int, offset: int, stop: int) -> Located:
        return Located(stop)

    def bounds(self, topic: str, partition: int) -> Bounds:
        log = self._find(topic, partition)
        return Bounds(log.first, log.end)

    def size_bytes(self, topic: str, partition: int) -> int:
        return self._find(topic, partition).size_estimate_bytes

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        log = self._find(topic, partition)
        found = await self._cluster.offset_for_time(*log.place, timestamp)
        return log.end if found is None else max(log.first, min(found, log.end))

    def watch(self, topic: str, partition: int, wake: Callable[[], None]) -> Callable[[], None]:
        return self._followers.watch(self._find(topic, partition), wake)

    async def maintain(self) -> None:
        """Kafka applies retention and compaction by itself."""
        await self._refresh()
