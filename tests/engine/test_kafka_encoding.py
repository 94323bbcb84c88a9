"""Record batches that are built a column at a time have the bytes of those that Kafka's client library builds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from aiokafka.producer.message_accumulator import BatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.kafka import encoding
from headrace.engine.kafka.codec import add_to
from headrace.engine.kafka.encoding import EncodedBatch, encode_plain
from headrace.records import RecordBatch

NOW = 1_700_000_000_000
PRODUCER = (71, 3, 2_000_000_000)

Appends = Sequence[tuple[RecordBatch, int]]


def built_by_library(appends: Appends, *, is_transactional: bool) -> bytes:
    builder = BatchBuilder(1 << 26, 0, is_transactional=is_transactional)
    for batch, timestamp in appends:
        assert add_to(builder.append, batch, [timestamp] * len(batch))
    builder._set_producer_state(*PRODUCER)
    return bytes(builder._build())


def encoded(appends: Appends, *, is_transactional: bool = False) -> bytes:
    batch = encode_plain(appends, is_transactional=is_transactional)
    assert isinstance(batch, EncodedBatch)
    assert batch.record_count() == sum(len(one) for one, _ in appends)
    assert batch.closed()
    batch._set_producer_state(*PRODUCER)
    size = batch.size()
    content = batch._build()
    assert batch.size() == size == len(content)
    assert batch._build() is content, "a batch that is sent again has the same sequence number"
    return content


def check(appends: Appends, *, is_transactional: bool = False) -> None:
    assert encoded(appends, is_transactional=is_transactional) == built_by_library(appends, is_transactional=is_transactional)


@st.composite
def _batches(draw: st.DrawFn) -> RecordBatch:
    count = draw(st.integers(32, 100))
    size = st.just(draw(st.integers(0, 300))) if draw(st.booleans()) else st.integers(0, 300)
    values = [bytes(draw(size)) for _ in range(count)]
    if draw(st.booleans()):
        return RecordBatch(values)
    key = st.just(draw(st.integers(0, 70))) if draw(st.booleans()) else st.integers(0, 70)
    return RecordBatch(values, [b"k" * draw(key) for _ in range(count)])


@given(st.lists(st.tuples(_batches(), st.integers(NOW, NOW + 100_000)), min_size=1, max_size=3), st.booleans())
def test_any_plain_records_are_encoded_as_by_the_library(appends: Appends, is_transactional: bool) -> None:
    check(appends, is_transactional=is_transactional)


@pytest.mark.parametrize("count", [63, 64, 65, 8191, 8192, 8193, 1 << 17])
def test_the_varints_of_offsets_grow_where_they_have_to(count: int) -> None:
    check([(RecordBatch([b"value"] * count), NOW)])
    check([(RecordBatch([b"a"] * (count // 2)), NOW), (RecordBatch([b"bc"] * (count - count // 2)), NOW + 1)])


def test_a_clock_that_was_set_back_gives_negative_deltas() -> None:
    check([(RecordBatch([b"a"] * 40), NOW), (RecordBatch([b"b"] * 40), NOW - 5000)])


def test_values_of_a_megabyte_are_encoded() -> None:
    check([(RecordBatch([bytes(1 << 20), *[b""] * 40]), NOW)])


def test_the_checksum_is_the_same_without_the_extension_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "CHECKSUMS_IN_C", False)
    check([(RecordBatch([b"value"] * 50), NOW)])


VALUES = [b"value"] * 50


@pytest.mark.parametrize(
    "batch",
    [
        RecordBatch([*VALUES, None]),
        RecordBatch(VALUES, [None, *[b"k"] * 49]),
        RecordBatch(VALUES, headers=[(("name", b"x"),)] * 50),
        RecordBatch(VALUES, expiries=[NOW] * 50),
        RecordBatch(VALUES, timestamps=[NOW] * 50),
    ],
    ids=["tombstone", "missing key", "headers", "expiries", "timestamps"],
)
def test_other_batches_are_left_to_the_library(batch: RecordBatch) -> None:
    assert encode_plain([(batch, NOW)], is_transactional=False) is None
    assert encode_plain([(RecordBatch(VALUES), NOW), (batch, NOW)], is_transactional=False) is None


@pytest.mark.parametrize("count", [1, 31, (1 << 17) + 1])
def test_few_and_very_many_records_are_left_to_the_library(count: int) -> None:
    assert encode_plain([(RecordBatch([b""] * count), NOW)], is_transactional=False) is None
