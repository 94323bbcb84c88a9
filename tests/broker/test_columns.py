"""Column batches through the broker: placed, stamped, checked and staged like any other batch."""

from __future__ import annotations

import pytest

from headrace.broker import NOWHERE, OnInvalid, ProducerStamp, Published, SchemaType, TopicConfig
from headrace.broker.publishing.partitioner import partition_of
from headrace.broker.transactions import weight
from headrace.errors import InvalidRecord, InvalidTransaction, UnknownPartition
from headrace.limits import TRANSACTION_BYTES_MAX
from headrace.records import ColumnBatch, RecordBatch
from tests.broker.harness import ANN, Harness

INT = b'{"type":"integer"}'


def columns(*values: bytes | None, keys: list[bytes | None] | None = None) -> ColumnBatch:
    return ColumnBatch.of(RecordBatch(values, keys))


async def requiring(harness: Harness, on_invalid: OnInvalid) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.schemas.register(ANN, "number", SchemaType.JSON, INT)
    await harness.broker.schemas.require(ANN, "t", "number", on_invalid=on_invalid)


async def test_columns_go_to_the_partition_that_is_named(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=3)
    published = await harness.broker.publish(ANN, "t", columns(b"a", b"b", keys=[b"x", b"y"]), partition=2)
    assert published == Published(2, 0, 2, harness.clock.now)
    assert await harness.values("t", 2) == ["a", "b"]
    with pytest.raises(UnknownPartition):
        harness.broker.publish(ANN, "t", columns(b"a"), partition=3)


async def test_columns_without_a_partition_are_placed_as_any_batch(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=4)
    places = [(await harness.broker.publish(ANN, "t", columns(b"a", b"b"))).partition for _ in range(4)]
    assert sorted(places) == [0, 1, 2, 3]
    keys: list[bytes | None] = [b"%d" % number for number in range(20)]
    published = await harness.broker.publish(ANN, "t", columns(*keys, keys=keys))
    assert [published.placement(index)[0] for index in range(20)] == [partition_of(key or b"", 4) for key in keys]


async def test_columns_get_the_topics_time_to_live(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", config=TopicConfig(ttl_ms=1_000))
    now = harness.clock.now
    await harness.broker.publish(ANN, "t", columns(b"a", b"b"), partition=0)
    await harness.broker.publish(ANN, "t", ColumnBatch.of(RecordBatch([b"own", b"none"], expiries=[now + 9_000, 0])), partition=0)
    assert [record.expiry - now for record in await harness.records()] == [1_000, 1_000, 9_000, 1_000]
    harness.clock.tick(1_000)
    fetched = await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=1 << 20)
    assert [value for batch in fetched.batches for value in batch.values()] == [b"own"]
    harness.clock.tick(9_000)
    fetched = await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=1 << 20)
    assert (fetched.batches, fetched.next_offset) == ([], 4)


async def test_columns_that_break_a_topics_rule_are_refused_whole(harness: Harness) -> None:
    await requiring(harness, OnInvalid.REJECT)
    with pytest.raises(InvalidRecord) as refused:
        harness.broker.publish(ANN, "t", columns(b"1", b"x", b"3"), partition=0)
    assert refused.value.index == 1
    await harness.broker.publish(ANN, "t", columns(b"1", b"2"), partition=0)
    assert await harness.values() == ["1", "2"]


async def test_columns_lose_to_the_dead_letters_only_what_does_not_fit(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER)
    published = await harness.broker.publish(ANN, "t", columns(b"1", b"x", b"3"), partition=0)
    assert published.placements == [(0, 0), NOWHERE, (0, 1)]
    assert await harness.values() == ["1", "3"]
    assert [entry.value for entry in await harness.broker.dead_letters(ANN, "t", records_max=9)] == [b"x"]


async def test_a_resend_of_columns_is_answered_with_their_first_place(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    first = await harness.broker.publish(ANN, "t", columns(b"a", b"b"), partition=0, producer=ProducerStamp("p", 0))
    again = await harness.broker.publish(ANN, "t", columns(b"a", b"b", b"c"), partition=0, producer=ProducerStamp("p", 0))
    assert (first.base_offset, again.base_offset, again.count) == (0, 0, 3)
    assert await harness.values() == ["a", "b", "c"]


async def test_a_transaction_takes_both_kinds_of_batch(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=2)
    transaction = harness.broker.begin(ANN)
    transaction.publish("t", columns(b"a", b"b"), 0)
    transaction.publish("t", RecordBatch([b"c"]), 0)
    transaction.publish("t", columns(b"d"), 1)
    assert await harness.values() == []
    published = await transaction.commit()
    assert [(one.partition, one.base_offset, one.count) for one in published] == [(0, 0, 2), (0, 2, 1), (1, 0, 1)]
    assert (await harness.values(), await harness.values("t", 1)) == (["a", "b", "c"], ["d"])


async def test_a_rule_made_while_a_transaction_is_open_is_for_its_columns_too(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    transaction = harness.broker.begin(ANN)
    transaction.publish("t", columns(b"x"), 0)
    await harness.broker.schemas.register(ANN, "number", SchemaType.JSON, INT)
    await harness.broker.schemas.require(ANN, "t", "number", on_invalid=OnInvalid.REJECT)
    with pytest.raises(InvalidRecord):
        await transaction.commit()


def test_columns_weigh_about_what_their_records_do() -> None:
    plain = RecordBatch([b"abc", None], [b"k", b"l"])
    assert weight(ColumnBatch.of(plain)) == weight(plain)
    with_headers = RecordBatch([b"abc"], headers=[(("name", b"value"),)])
    assert weight(with_headers) < weight(ColumnBatch.of(with_headers)) <= weight(with_headers) + 16


async def test_columns_fill_a_transaction(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    transaction = harness.broker.begin(ANN)
    columns = ColumnBatch.of(RecordBatch([bytes(32 << 20)]))
    fitting = TRANSACTION_BYTES_MAX // weight(columns)
    for _ in range(fitting):
        transaction.publish("t", columns, 0)
    with pytest.raises(InvalidTransaction):
        transaction.publish("t", columns, 0)
