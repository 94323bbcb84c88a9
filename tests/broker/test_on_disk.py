"""The broker on the disk engine: behaviour that the memory engine cannot show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from headrace.broker import NOWHERE, Broker, OnInvalid, ProducerStamp, Published, SchemaType, SettlementPolicy
from headrace.engine.contract import Ack, Batch
from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import UnknownTopic
from headrace.records import RecordBatch
from headrace.storage.files import DiskFiles
from headrace.storage.store import StoreOptions
from tests.broker.harness import ANN

Open: TypeAlias = Callable[[], AbstractAsyncContextManager[Broker]]

DEADLINE_SECONDS = 300


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def open_broker() -> AsyncIterator[Broker]:
        clock = lambda: 1_700_000_000_000  # noqa: E731  # these tests need only a fixed clock
        engine = EmbeddedEngine(DiskFiles(tmp_path), StoreOptions(journal_bytes=1 << 20, headroom_bytes=0), clock=clock)
        broker = Broker(engine, clock=clock)
        await broker.open()
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield broker
        await broker.close()

    return open_broker


async def _values(broker: Broker, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    fetched = await broker.fetch(ANN, topic, partition, 0, bytes_max=1 << 20)
    return [value for batch in fetched.batches for value in batch.values()]


async def test_offsets_producers_and_transactions_survive_a_restart(opened: Open) -> None:
    record_batch = RecordBatch([b"a", b"b", b"c"], [b"x", b"y", b"z"])
    async with opened() as broker:
        await broker.create_topic(ANN, "t", partitions=3)
        original = await broker.publish(ANN, "t", record_batch, producer=ProducerStamp("p", 0))
        transaction = broker.begin(ANN)
        transaction.publish("t", RecordBatch([b"tx"]), 0)
        transaction.commit_offsets("g", {("t", 0): 1})
        (committed,) = await transaction.commit()
    async with opened() as broker:
        assert await broker.publish(ANN, "t", record_batch, producer=ProducerStamp("p", 0)) == original
        assert broker.committed(ANN, "g", "t", 0) == 1
        assert (await _values(broker))[committed.base_offset] == b"tx"
        assert sum([len(await _values(broker, "t", partition)) for partition in range(3)]) == 4


async def test_pipelined_batches_of_one_producer_land_in_order_and_once(opened: Open) -> None:
    async with opened() as broker:
        await broker.create_topic(ANN, "t")
        answers: list[asyncio.Future[Published]] = []
        for number in range(200):
            answers.append(broker.publish(ANN, "t", RecordBatch([b"%d" % number]), producer=ProducerStamp("p", number)))
            if number % 3 == 0:
                answers.append(broker.publish(ANN, "t", RecordBatch([b"%d" % number]), producer=ProducerStamp("p", number)))
        await asyncio.gather(*answers)
        assert await _values(broker) == [b"%d" % number for number in range(200)]


async def test_history_passes_into_live_records_without_a_seam(opened: Open) -> None:
    async with opened() as broker:
        await broker.create_topic(ANN, "t")
        for number in range(0, 500, 10):
            await broker.publish(ANN, "t", RecordBatch([b"%d" % (number + index) for index in range(10)]))
        seen: list[bytes | None] = []
        complete = asyncio.Event()

        def deliver(batches: list[Batch]) -> None:
            for batch in batches:
                seen.extend(batch.values())
            cursor.grant(100)
            if len(seen) >= 1_000:
                complete.set()

        cursor = broker.cursor(ANN, "t", 0, 0, deliver, credit_bytes=100)
        for number in range(500, 1_000, 5):
            await broker.publish(ANN, "t", RecordBatch([b"%d" % (number + index) for index in range(5)]))
        await complete.wait()
        assert seen == [b"%d" % number for number in range(1_000)]


async def test_a_long_poll_and_a_cursor_hear_of_a_deletion(opened: Open) -> None:
    async with opened() as broker:
        await broker.create_topic(ANN, "t")
        await broker.commit(ANN, "g", {("t", 0): 0})
        errors: list[Exception] = []
        broker.cursor(ANN, "t", 0, 0, lambda _: None, credit_bytes=0, failed=errors.append)
        fetching = asyncio.ensure_future(broker.fetch(ANN, "t", 0, 0, bytes_max=10, wait_ms=60_000))
        await asyncio.sleep(0)
        await broker.delete_topic(ANN, "t")
        with pytest.raises(UnknownTopic):
            await fetching
        assert [type(error) for error in errors] == [UnknownTopic]
        assert broker.groups(ANN) == []


async def test_settlement_continues_after_a_restart(opened: Open) -> None:
    policy = SettlementPolicy(attempts_max=1)
    async with opened() as broker:
        await broker.create_topic(ANN, "t")
        await broker.publish(ANN, "t", RecordBatch([b"%d" % number for number in range(10)]))
        queue = broker.join(ANN, "g", "t", policy=policy, start="earliest")
        taken = await queue.take(5, wait_ms=1_000)
        queue.ack([delivery.id for delivery in taken[:2]])
        queue.nack([taken[2].id])
        await queue.close()
    async with opened() as broker:
        assert await _values(broker, "t.dlq") == [b"2", b"3", b"4"], "the last two were in flight when their only consumer left"
        queue = broker.join(ANN, "g", "t", policy=policy)
        assert [delivery.offset for delivery in await queue.take(10)] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("ack", list(Ack))
async def test_every_ack_is_answered(opened: Open, ack: Ack) -> None:
    async with opened() as broker:
        await broker.create_topic(ANN, "t")
        published = await broker.publish(ANN, "t", RecordBatch([b"a"]), ack=ack)
        assert (published.base_offset, published.count) == (0, 1)


async def test_schemas_and_what_topics_require_survive_a_restart(opened: Open) -> None:
    async with opened() as broker:
        await broker.create_topic(ANN, "t")
        await broker.schemas.register(ANN, "n", SchemaType.JSON, b'{"type":"integer"}')
        await broker.schemas.require(ANN, "t", "n", on_invalid=OnInvalid.DEAD_LETTER)
        kept = broker.schemas.versions(ANN)
    async with opened() as broker:
        assert broker.schemas.versions(ANN) == kept
        published = await broker.publish(ANN, "t", RecordBatch([b"x", b"1"]))
        assert published.placements == [NOWHERE, (0, 0)]
    async with opened() as broker:
        assert await _values(broker) == [b"1"] and await _values(broker, "t.dlq") == [b"x"]
