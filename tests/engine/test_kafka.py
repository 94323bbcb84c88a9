"""The Kafka engine beside other clients of the same cluster, and what Kafka alone can do to it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.structs import OffsetAndMetadata

from headrace.broker import Broker, Principal
from headrace.broker.publishing.partitioner import hashes
from headrace.engine.contract import Ack, Bounds, HealthState, Placement, TopicConfig, Write, known
from headrace.engine.kafka.cluster import Cluster as Connection
from headrace.engine.kafka.election import Election
from headrace.engine.kafka.engine import KafkaEngine
from headrace.engine.kafka.producer import Producer
from headrace.engine.kafka.settings import KafkaSettings
from headrace.errors import AppendUnknown, BrokerError, InvalidRequest, InvalidTopicName, NotCoordinator, Unavailable, UnknownTopic
from headrace.kafka_server import Cluster
from headrace.records import RecordBatch

ANN = Principal("ann")
SECONDS = 60
_PREFIXES = itertools.count()


def clock() -> int:
    return 1_700_000_000_000


class Place:
    """A part of the cluster that no other test uses."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.prefix = f"k{next(_PREFIXES)}-"
        self.opened: list[KafkaEngine] = []

    def engine(self, *, is_elected: bool = False, deadline_ms: int = 60_000, refresh_ms: int = 100) -> KafkaEngine:
        settings = KafkaSettings(
            self.bootstrap, prefix=self.prefix, deadline_ms=deadline_ms, refresh_ms=refresh_ms, is_elected=is_elected, replication=1
        )
        engine = KafkaEngine(settings, clock=clock)
        self.opened.append(engine)
        return engine


@pytest.fixture
async def place(kafka: Cluster) -> AsyncIterator[Place]:
    place = Place(kafka.bootstrap)
    yield place
    for engine in place.opened:
        await engine.close()


@pytest.fixture
async def engine(place: Place) -> KafkaEngine:
    engine = place.engine()
    await engine.open()
    return engine


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  # it changes when Kafka answers
            await asyncio.sleep(0.02)


async def read(place: Place, topic: str, count: int) -> list[tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]]:
    """Read with a Kafka consumer."""
    consumer = AIOKafkaConsumer(place.prefix + topic, bootstrap_servers=place.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        async with asyncio.timeout(SECONDS):
            records = [await consumer.getone() for _ in range(count)]
    finally:
        await consumer.stop()
    return [(record.key, record.value, list(record.headers)) for record in records]


async def values(engine: KafkaEngine, topic: str) -> list[bytes | None]:
    """Read everything with the engine."""
    found, position, end = list[bytes | None](), 0, engine.bounds(topic, 0).end
    while position < end:
        batches = await engine.read(topic, 0, position, bytes_max=1_000)
        found += [value for batch in batches for value in batch.values()]
        position = batches[-1].next_offset if batches else end
    return found


async def test_a_kafka_consumer_reads_what_the_engine_wrote(place: Place, engine: KafkaEngine) -> None:
    await engine.create_topic("t", 1, TopicConfig())
    batch = RecordBatch([b"a", None], [b"k", b"k"], [(("h", b"1"),), ()], None, [0, 1_800_000_000_000])
    await engine.append([Write("t", 0, batch)])
    assert await read(place, "t", 2) == [(b"k", b"a", [("h", b"1")]), (b"k", None, [("headrace-expiry", b"1800000000000")])]


async def test_the_engine_reads_follows_and_counts_what_a_kafka_producer_wrote(place: Place, engine: KafkaEngine) -> None:
    await engine.create_topic("t", 1, TopicConfig())
    woken = asyncio.Event()
    stop = engine.watch("t", 0, woken.set)
    producer = AIOKafkaProducer(bootstrap_servers=place.bootstrap)
    await producer.start()
    await producer.send_and_wait(place.prefix + "t", b"v", key=b"k", headers=[("h", b"1")], timestamp_ms=5)
    await producer.stop()
    async with asyncio.timeout(SECONDS):
        await woken.wait()
    stop()
    assert engine.bounds("t", 0) == Bounds(0, 1)
    (batch,) = await engine.read("t", 0, 0, bytes_max=100)
    (record,) = batch.records()
    assert (record.key, record.value, record.headers, record.timestamp) == (b"k", b"v", (("h", b"1"),), 5)


async def test_an_aborted_transaction_of_another_client_is_never_read(place: Place, engine: KafkaEngine) -> None:
    await engine.create_topic("t", 1, TopicConfig())
    producer = AIOKafkaProducer(bootstrap_servers=place.bootstrap, transactional_id=place.prefix + "other")
    await producer.start()
    for value, is_kept in ((b"no", False), (b"yes", True)):
        await producer.begin_transaction()
        await producer.send_and_wait(place.prefix + "t", value)
        await (producer.commit_transaction() if is_kept else producer.abort_transaction())
    await producer.stop()
    await engine.append([Write("t", 0, RecordBatch([b"ours"]))])
    assert await values(engine, "t") == [b"yes", b"ours"]


async def test_topics_that_others_create_alter_and_delete_are_followed(place: Place, engine: KafkaEngine) -> None:
    changes: list[str] = []
    engine.topic_changed = changes.append
    other = place.engine()
    await other.open()
    await other.create_topic("t", 1, TopicConfig(retention_ms=5_000, ttl_ms=7))
    await until(lambda: "t" in engine.topics() and engine.topics()["t"].config == TopicConfig(retention_ms=5_000, ttl_ms=7))
    await other.alter_topic("t", partitions=3)
    await until(lambda: engine.topics()["t"].partitions == 3)
    await other.delete_topic("t")
    await until(lambda: "t" not in engine.topics())
    assert set(changes) == {"t"}


async def test_keys_are_placed_as_java_clients_place_them() -> None:
    keys = [b"", *(bytes(range(length)) for length in range(1, 30)), *(b"key-%d" % number for number in range(100))]
    theirs = [DefaultPartitioner()(key, list(range(12)), []) for key in keys]
    assert [value % 12 for value in hashes(keys, Placement.MURMUR2)] == theirs


async def test_a_name_or_setting_that_kafka_does_not_have_is_refused_with_the_reason(engine: KafkaEngine) -> None:
    with pytest.raises(InvalidTopicName, match="not possible in Kafka"):
        await engine.create_topic("größe", 1, TopicConfig())
    with pytest.raises(InvalidRequest, match="does not encrypt"):
        await engine.create_topic("t", 1, TopicConfig(encrypt=True))
    with pytest.raises(InvalidRequest, match="segment_bytes"):
        await engine.create_topic("t", 1, TopicConfig(segment_bytes=1))


async def test_a_kafka_consumer_of_the_group_continues_where_a_group_of_ours_stopped_and_back(place: Place) -> None:
    engine = place.engine()
    broker = Broker(engine, clock=clock)
    await broker.open()
    await broker.create_topic(ANN, "t")
    await broker.publish(ANN, "t", RecordBatch([b"a", b"b", b"c"]))
    await broker.commit(ANN, "g", {("t", 0): 1})
    transaction = broker.begin(ANN)
    transaction.publish("t", RecordBatch([b"d"]))
    transaction.commit_offsets("g", {("t", 0): 2})
    await transaction.commit()
    partition = TopicPartition(place.prefix + "t", 0)
    consumer = AIOKafkaConsumer(bootstrap_servers=place.bootstrap, group_id=place.prefix + "g", enable_auto_commit=False)
    consumer.assign([partition])
    await consumer.start()
    async with asyncio.timeout(SECONDS):
        assert (await consumer.getone()).value == b"c"
    await consumer.commit({partition: OffsetAndMetadata(3, "")})
    await consumer.stop()
    await until(lambda: broker.committed(ANN, "g", "t", 0) == 3)
    await broker.delete_group(ANN, "g")
    assert broker.groups(ANN) == []
    await broker.close()


async def test_several_groups_commit_in_one_transaction(place: Place) -> None:
    """Kafka keeps the offsets of each group in another partition, which the transaction has to include."""
    broker = Broker(place.engine(), clock=clock)
    await broker.open()
    await broker.create_topic(ANN, "t")
    groups = [f"g{number}" for number in range(4)]
    for offset in (1, 2):
        await broker.publish(ANN, "t", RecordBatch([b"a"]))
        transaction = broker.begin(ANN)
        for group in groups:
            transaction.commit_offsets(group, {("t", 0): offset})
        await transaction.commit()
    await broker.close()
    again = Broker(place.engine(), clock=clock)
    await again.open()
    assert [again.committed(ANN, group, "t", 0) for group in groups] == [2, 2, 2, 2]
    await again.close()


async def test_what_was_committed_is_there_for_the_next_broker(place: Place) -> None:
    for expected in (None, 1):
        broker = Broker(place.engine(), clock=clock)
        await broker.open()
        if expected is None:
            await broker.create_topic(ANN, "t")
            await broker.publish(ANN, "t", RecordBatch([b"a"]))
        assert broker.committed(ANN, "g", "t", 0) == expected
        await broker.commit(ANN, "g", {("t", 0): 1})
        await broker.close()


async def test_a_second_owner_takes_the_tables_and_kafka_refuses_the_first(place: Place, engine: KafkaEngine) -> None:
    await engine.create_topic("__table", 1, TopicConfig(), internal=True)
    await engine.append([Write("__table", 0, RecordBatch([b"first"]))])
    is_lost = asyncio.Event()
    engine.ownership.lost = is_lost.set
    second = place.engine()
    await second.open()
    assert second.epoch > engine.epoch
    with pytest.raises(BrokerError) as caught:
        await engine.append([Write("__table", 0, RecordBatch([b"late"]))])
    assert caught.value.retriable
    assert is_lost.is_set()
    assert engine.health.report().state is HealthState.FAILED
    await second.append([Write("__table", 0, RecordBatch([b"second"]))])
    assert await values(second, "__table") == [b"first", b"second"]


async def test_kafka_refuses_an_owned_append_of_a_former_owner_to_a_single_partition(place: Place, engine: KafkaEngine) -> None:
    await engine.create_topic("t", 1, TopicConfig())
    await engine.append([Write("t", 0, RecordBatch([b"first"]))], owned=True)
    second = place.engine()
    await second.open()
    with pytest.raises(BrokerError) as caught:
        await engine.append([Write("t", 0, RecordBatch([b"late"]))], owned=True)
    assert caught.value.retriable
    await second.append([Write("t", 0, RecordBatch([b"second"]))], owned=True)
    assert await values(second, "t") == [b"first", b"second"]


async def test_an_address_that_is_advertised_while_the_broker_joins_becomes_known(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = place.engine(is_elected=True)
    await owner.open()
    introduction = Election.introduction

    def late(election: Election) -> bytes:
        found = introduction(election)
        election.advertise("second:9092", {})
        return found

    monkeypatch.setattr(Election, "introduction", late)
    owner.ownership.advertise("first:9092", {})
    await until(lambda: owner.ownership.coordinator == "second:9092")


async def test_an_engine_that_is_not_the_owner_writes_topics_and_no_tables_until_it_takes_over(place: Place) -> None:
    owner, other = place.engine(is_elected=True), place.engine(is_elected=True)
    gained = asyncio.Event()
    other.ownership.gained = gained.set
    await owner.open()
    owner.ownership.advertise("owner:9092", {"flymq": "tls://inside:9092", "flight": "inside:8815"})
    await other.open()
    assert (owner.ownership.is_owner, other.ownership.is_owner) == (True, False)
    await until(lambda: other.ownership.coordinator == "owner:9092")
    assert other.ownership.listeners == {"flymq": "tls://inside:9092", "flight": "inside:8815"}
    await owner.create_topic("__table", 1, TopicConfig(), internal=True)
    await other.create_topic("t", 2, TopicConfig(ttl_ms=5_000))
    await until(lambda: owner.topics().get("t") == other.topics()["t"])
    await until(lambda: "__table" in other.topics())
    await owner.append([Write("t", 0, RecordBatch([b"a"]))])
    await other.append([Write("t", 0, RecordBatch([b"b"]))])
    await other.append([Write("t", 0, RecordBatch([b"c"])), Write("t", 1, RecordBatch([b"d"]))])
    with pytest.raises(NotCoordinator, match="owner:9092"):
        other.append([Write("t", 0, RecordBatch([b"never"])), Write("__table", 0, RecordBatch([b"never"]))])
    await owner.append([Write("__table", 0, RecordBatch([b"row"]))])
    await owner.close()
    async with asyncio.timeout(SECONDS):
        await gained.wait()
    assert other.ownership.is_owner
    await other.append([Write("__table", 0, RecordBatch([b"row of the next"]))])
    assert await values(other, "__table") == [b"row", b"row of the next"]
    assert await values(other, "t") == [b"a", b"b", b"c"]


async def test_kafka_ends_a_forgotten_transaction_of_a_broker_that_is_not_the_owner_soon(place: Place) -> None:
    owner, other = place.engine(is_elected=True), place.engine(is_elected=True)
    await owner.open()
    await other.open()
    await owner.create_topic("__table", 1, TopicConfig(), internal=True)
    await owner.append([Write("__table", 0, RecordBatch([b"row"]))])
    await other.create_topic("t", 2, TopicConfig())
    await other.append([Write("t", 0, RecordBatch([b"a"])), Write("t", 1, RecordBatch([b"b"]))])
    found = {}
    for name, engine in (("owner", owner), ("other", other)):
        assert engine._writer._transactional is not None
        found[name] = engine._writer._transactional.transaction_ms
    assert found == {"owner": 60_000, "other": 10_000}


async def test_a_broker_that_is_not_the_owner_survives_the_abort_of_its_transaction(place: Place) -> None:
    owner, other = place.engine(is_elected=True), place.engine(is_elected=True)
    is_lost = asyncio.Event()
    other.ownership.lost = is_lost.set
    await owner.open()
    await other.open()
    await other.create_topic("t", 2, TopicConfig())
    both = [Write("t", 0, RecordBatch([b"a"])), Write("t", 1, RecordBatch([b"b"]))]
    await other.append(both)
    # As Kafka does when a transaction is too old: the epoch of the transactional id rises.
    connection = Connection(KafkaSettings(place.bootstrap))
    await (await Producer.start(connection, other._writer._transactional_id, SECONDS)).discard()
    with pytest.raises(BrokerError) as caught:
        await other.append(both)
    assert caught.value.retriable
    await other.append(both)
    assert not is_lost.is_set()
    assert await values(other, "t") == [b"a", b"a"]


async def test_a_reader_that_polls_sees_the_records_of_others_before_the_next_refresh(place: Place, engine: KafkaEngine) -> None:
    await engine.create_topic("t", 1, TopicConfig())
    reader = place.engine(is_elected=True, refresh_ms=600_000)
    await reader.open()
    assert await reader.read("t", 0, 0, bytes_max=1_000) == []
    await engine.append([Write("t", 0, RecordBatch([b"a"]))])
    await until(lambda: reader.bounds("t", 0).end == 1)
    assert await values(reader, "t") == [b"a"]


async def test_a_close_ends_reads_and_the_refresh_that_wait_for_kafka(
    place: Place, engine: KafkaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.create_topic("t", 1, TopicConfig(ttl_ms=1_000))  # a setting that the refresh reads from a table
    await engine.append([Write("t", 0, RecordBatch([b"a"]))])
    asked = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(engine._cluster, "fetch", never)
    engine._own_position = 0
    engine._find("__topics", 0).forget()  # the refresh reads it from Kafka
    reader = asyncio.create_task(engine.read("t", 0, 0, bytes_max=1_000))
    refresh = asyncio.create_task(engine._refresh_forever())
    engine._refreshing, unused = refresh, engine._refreshing
    assert unused is not None
    unused.cancel()
    async with asyncio.timeout(SECONDS):
        await asked.wait()
        await until(lambda: engine._find("__topics", 0).fetches != {})
        await engine.close()
        assert refresh.cancelled()
        with pytest.raises(Unavailable, match="closing"):
            await reader


async def test_an_elected_broker_that_cannot_open_yet_tries_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, attempts = place.engine(is_elected=True), itertools.count()
    refresh = engine._refresh

    async def fails_first() -> None:
        if next(attempts) == 0:
            raise Unavailable("a node was killed")
        await refresh()

    monkeypatch.setattr(engine, "_refresh", fails_first)
    async with asyncio.timeout(SECONDS):
        await engine.open()
        await engine.create_topic("t", 1, TopicConfig())
    assert next(attempts) >= 2


async def test_kafka_away_fails_appends_after_the_deadline_and_what_was_sent_arrives_once(kafka: Cluster, place: Place) -> None:
    engine = place.engine(deadline_ms=1_500)
    await engine.open()
    await engine.create_topic("t", 1, TopicConfig())
    stop = engine.watch("t", 0, lambda: None)
    await engine.append([Write("t", 0, RecordBatch([b"before"]))])
    (node,) = kafka.nodes
    node.pause()
    try:
        sent = engine.append([Write("t", 0, RecordBatch([b"sent"]))])
        await asyncio.sleep(0.1)  # the producer takes it; what follows waits behind it
        queued = engine.append([Write("t", 0, RecordBatch([b"queued"]))])
        with pytest.raises(AppendUnknown):
            await sent
        with pytest.raises(Unavailable, match="nothing was written"):
            await queued
        await until(lambda: engine.health.report().state is HealthState.DEGRADED)
        (batch,) = await engine.read("t", 0, 0, bytes_max=1_000)
        assert batch.values() == [b"before"], "what is cached is served"
    finally:
        node.resume()
    async with asyncio.timeout(SECONDS):
        assert (await known(sent))[0].base_offset == 1
    await resumed(lambda: engine.append([Write("t", 0, RecordBatch([b"after"]))]))
    await until(lambda: engine.health.report().state is HealthState.OK)
    stop()
    found = await values(engine, "t")
    assert found[:2] == [b"before", b"sent"]
    assert set(found[2:]) == {b"after"}


async def resumed(call: Callable[[], Awaitable[object]]) -> None:
    """Repeat a call until it succeeds."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await call()
            except BrokerError:
                await asyncio.sleep(0.05)
            else:
                return


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_commit_without_an_answer_turns_out_as_kafka_has_it(
    engine: KafkaEngine, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    await engine.create_topic("t", 2, TopicConfig())
    before, commit = engine.epoch, Producer.commit

    async def failing(producer: Producer) -> None:
        monkeypatch.setattr(Producer, "commit", commit)
        if is_written:
            await commit(producer)
        raise KafkaError("the connection is lost")

    monkeypatch.setattr(Producer, "commit", failing)
    staged = engine.append([Write("t", 0, RecordBatch([b"a"])), Write("t", 1, RecordBatch([b"b"]))])
    with pytest.raises(AppendUnknown):
        await staged
    if is_written:
        assert [appended.base_offset for appended in await known(staged)] == [0, 0]
    else:
        with pytest.raises(Unavailable):
            await known(staged)
    assert engine.epoch > before, "a late request of the old epoch must not meet the next transaction"
    await engine.append([Write("t", 0, RecordBatch([b"c"])), Write("t", 1, RecordBatch([b"d"]))])
    assert await values(engine, "t") == ([b"a", b"c"] if is_written else [b"c"])


async def test_appends_to_a_topic_that_others_delete_fail_and_the_rest_goes_on(place: Place, engine: KafkaEngine) -> None:
    await engine.create_topic("t", 1, TopicConfig())
    await engine.create_topic("u", 1, TopicConfig())
    await engine.append([Write("t", 0, RecordBatch([b"a"])), Write("u", 0, RecordBatch([b"b"]))])
    other = Connection(KafkaSettings(place.bootstrap))
    await other.open()
    await other.delete_topic(place.prefix + "t")
    await other.close()
    plain = engine.append([Write("t", 0, RecordBatch([b"c"]))])
    both = engine.append([Write("t", 0, RecordBatch([b"d"])), Write("u", 0, RecordBatch([b"e"]))])
    rest = engine.append([Write("u", 0, RecordBatch([b"f"]))])
    async with asyncio.timeout(SECONDS):
        for doomed in (plain, both):
            with pytest.raises(UnknownTopic):
                await doomed
        await rest
    assert await values(engine, "u") == [b"b", b"f"]


async def test_requests_are_counted_by_kind(place: Place) -> None:
    engine = place.engine()
    await engine.open()
    await engine.create_topic("t", 1, TopicConfig())
    await engine.append([Write("t", 0, RecordBatch([b"a"]))])
    assert engine.counters.requests["produce"] == 1
    assert engine.counters.requests["list_offsets"] > 0


@pytest.mark.parametrize(("ack", "required"), [(Ack.DURABLE, -1), (Ack.WRITTEN, 1), (Ack.NONE, 0)])
async def test_a_topic_is_written_with_the_acknowledgement_it_asks_for(
    place: Place, engine: KafkaEngine, monkeypatch: pytest.MonkeyPatch, ack: Ack, required: int
) -> None:
    produced = list[int]()
    send = AIOKafkaClient.send

    async def recorded(client: AIOKafkaClient, node: int, request: object, **options: object) -> object:
        if isinstance(request, ProduceRequest):
            produced.append(request.required_acks)
        return await send(client, node, request, **options)

    await engine.create_topic("t", 2, TopicConfig(ack=ack))
    monkeypatch.setattr(AIOKafkaClient, "send", recorded)
    weak = place.engine()  # it reads the setting from Kafka
    await weak.open()
    await weak.append([Write("t", 0, RecordBatch([b"%d" % number])) for number in range(3)])
    await asyncio.gather(*(weak.append([Write("t", 0, RecordBatch([b"%d" % number]))]) for number in range(3, 10)))
    assert set(produced) == {required}
    assert [value for _, value, _ in await read(place, "t", 10)] == [b"%d" % number for number in range(10)]
    produced.clear()
    await weak.append([Write("t", 0, RecordBatch([b"a"])), Write("t", 1, RecordBatch([b"b"]))])
    assert set(produced) == {-1}, "a transaction"


async def test_what_is_sent_without_an_acknowledgement_reaches_readers_that_wait(place: Place, engine: KafkaEngine) -> None:
    await engine.create_topic("t", 1, TopicConfig(ack=Ack.NONE))
    woken = asyncio.Event()
    stop = engine.watch("t", 0, woken.set)
    [receipt] = await engine.append([Write("t", 0, RecordBatch([b"a", b"b"]))])
    assert (receipt.base_offset, receipt.count) == (0, 2)
    await until(lambda: engine.bounds("t", 0) == Bounds(0, 2))
    stop()
    assert woken.is_set() and await values(engine, "t") == [b"a", b"b"]
