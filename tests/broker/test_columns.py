"""Runs of columns through the broker: placed, stamped, checked and staged like any other run."""

from __future__ import annotations

import pytest

from headrace.broker import NOWHERE, OnInvalid, ProducerStamp, Published, SchemaType, TopicConfig
from headrace.broker.publishing.partitioner import partition_of
from headrace.broker.transactions import weight
from headrace.errors import InvalidRecord, InvalidTransaction, UnknownPartition
from headrace.limits import TRANSACTION_BYTES_MAX
from headrace.records import ColumnBatch, RecordBatch
from tests.broker.stand import ANN, Stand

INT = b'{"type":"integer"}'


def columns(*values: bytes | None, keys: list[bytes | None] | None = None) -> ColumnBatch:
    return ColumnBatch.of(RecordBatch(values, keys))


async def requiring(stand: Stand, on_invalid: OnInvalid) -> None:
    await stand.broker.create_topic(ANN, "t")
    await stand.broker.schemas.register(ANN, "number", SchemaType.JSON, INT)
    await stand.broker.schemas.require(ANN, "t", "number", on_invalid=on_invalid)


async def test_columns_go_to_the_partition_that_is_named(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t", partitions=3)
    published = await stand.broker.publish(ANN, "t", columns(b"a", b"b", keys=[b"x", b"y"]), partition=2)
    assert published == Published(2, 0, 2, stand.clock.now)
    assert await stand.values("t", 2) == ["a", "b"]
    with pytest.raises(UnknownPartition):
        stand.broker.publish(ANN, "t", columns(b"a"), partition=3)


async def test_columns_without_a_partition_are_placed_as_any_run(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t", partitions=4)
    places = [(await stand.broker.publish(ANN, "t", columns(b"a", b"b"))).partition for _ in range(4)]
    assert sorted(places) == [0, 1, 2, 3]
    keys: list[bytes | None] = [b"%d" % number for number in range(20)]
    published = await stand.broker.publish(ANN, "t", columns(*keys, keys=keys))
    assert [published.placement(index)[0] for index in range(20)] == [partition_of(key or b"", 4) for key in keys]


async def test_columns_get_the_topics_time_to_live(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t", config=TopicConfig(ttl_ms=1_000))
    now = stand.clock.now
    await stand.broker.publish(ANN, "t", columns(b"a", b"b"), partition=0)
    await stand.broker.publish(ANN, "t", ColumnBatch.of(RecordBatch([b"own", b"none"], expiries=[now + 9_000, 0])), partition=0)
    assert [record.expiry - now for record in await stand.records()] == [1_000, 1_000, 9_000, 1_000]
    stand.clock.tick(1_000)
    fetched = await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=1 << 20)
    assert [value for batch in fetched.batches for value in batch.values()] == [b"own"]
    stand.clock.tick(9_000)
    fetched = await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=1 << 20)
    assert (fetched.batches, fetched.next_offset) == ([], 4)


async def test_columns_that_break_a_topics_rule_are_refused_whole(stand: Stand) -> None:
    await requiring(stand, OnInvalid.REJECT)
    with pytest.raises(InvalidRecord) as refused:
        stand.broker.publish(ANN, "t", columns(b"1", b"x", b"3"), partition=0)
    assert refused.value.index == 1
    await stand.broker.publish(ANN, "t", columns(b"1", b"2"), partition=0)
    assert await stand.values() == ["1", "2"]


async def test_columns_lose_to_the_dead_letters_only_what_does_not_fit(stand: Stand) -> None:
    await requiring(stand, OnInvalid.DEAD_LETTER)
    published = await stand.broker.publish(ANN, "t", columns(b"1", b"x", b"3"), partition=0)
    assert published.placements == [(0, 0), NOWHERE, (0, 1)]
    assert await stand.values() == ["1", "3"]
    assert [entry.value for entry in await stand.broker.dead_letters(ANN, "t", records_max=9)] == [b"x"]


async def test_a_resend_of_columns_is_answered_with_their_first_place(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t")
    first = await stand.broker.publish(ANN, "t", columns(b"a", b"b"), partition=0, producer=ProducerStamp("p", 0))
    again = await stand.broker.publish(ANN, "t", columns(b"a", b"b", b"c"), partition=0, producer=ProducerStamp("p", 0))
    assert (first.base_offset, again.base_offset, again.count) == (0, 0, 3)
    assert await stand.values() == ["a", "b", "c"]


async def test_a_transaction_takes_both_kinds_of_run(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t", partitions=2)
    transaction = stand.broker.begin(ANN)
    transaction.publish("t", columns(b"a", b"b"), 0)
    transaction.publish("t", RecordBatch([b"c"]), 0)
    transaction.publish("t", columns(b"d"), 1)
    assert await stand.values() == []
    published = await transaction.commit()
    assert [(one.partition, one.base_offset, one.count) for one in published] == [(0, 0, 2), (0, 2, 1), (1, 0, 1)]
    assert (await stand.values(), await stand.values("t", 1)) == (["a", "b", "c"], ["d"])


async def test_a_rule_made_while_a_transaction_is_open_is_for_its_columns_too(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t")
    transaction = stand.broker.begin(ANN)
    transaction.publish("t", columns(b"x"), 0)
    await stand.broker.schemas.register(ANN, "number", SchemaType.JSON, INT)
    await stand.broker.schemas.require(ANN, "t", "number", on_invalid=OnInvalid.REJECT)
    with pytest.raises(InvalidRecord):
        await transaction.commit()


def test_columns_weigh_about_what_their_records_do() -> None:
    plain = RecordBatch([b"abc", None], [b"k", b"l"])
    assert weight(ColumnBatch.of(plain)) == weight(plain)
    with_headers = RecordBatch([b"abc"], headers=[(("name", b"value"),)])
    assert weight(with_headers) < weight(ColumnBatch.of(with_headers)) <= weight(with_headers) + 16


async def test_columns_fill_a_transaction(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t")
    transaction = stand.broker.begin(ANN)
    columns = ColumnBatch.of(RecordBatch([bytes(32 << 20)]))
    fitting = TRANSACTION_BYTES_MAX // weight(columns)
    for _ in range(fitting):
        transaction.publish("t", columns, 0)
    with pytest.raises(InvalidTransaction):
        transaction.publish("t", columns, 0)
