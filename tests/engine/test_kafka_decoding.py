"""Fetch responses of Kafka as columns, beside the records that the client library finds in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.kafka import codec
from headrace.engine.kafka.codec import Decoded
from headrace.engine.kafka.equal_sizes import EqualColumn, equal_records
from headrace.errors import CorruptData

TIME = 1_700_000_000_000
_HEADER_BYTES, _CHECKED_START = 61, 21
_LOG_APPEND_TIME = 8

Row = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes], ...]]
"""Relative offset, timestamp, key, value, headers."""


def encoded(rows: Sequence[Row], *, base: int = 0, compression: int = 0, attributes: int = 0) -> bytes:
    builder = DefaultRecordBatchBuilder(2, compression, False, -1, -1, -1, 1 << 30)
    for offset, time, key, value, headers in rows:
        builder.append(offset, time, key, value, list(headers))
    whole = bytearray(builder.build())
    whole[:8] = base.to_bytes(8, "big")
    if attributes:
        from google_crc32c import value as crc32c

        whole[22] |= attributes
        whole[17:21] = crc32c(bytes(whole[_CHECKED_START:])).to_bytes(4, "big")
    return bytes(whole)


def plain(count: int, size: int = 100, key: bytes | None = None) -> list[Row]:
    chance = random.Random(count)
    return [(index, TIME, key, chance.randbytes(size), ()) for index in range(count)]


def is_equal(content: bytes) -> bool:
    count = int.from_bytes(content[_HEADER_BYTES - 4 : _HEADER_BYTES], "big")
    return equal_records(content[_CHECKED_START:], _HEADER_BYTES - _CHECKED_START, count) is not None


def found_by_library(content: bytes) -> list[tuple[Any, ...]]:
    records, found = MemoryRecords(content), []
    while records.has_next():
        batch = records.next_batch()
        assert batch is not None
        found += [(each.offset, each.timestamp, each.key, each.value, tuple(each.headers)) for each in batch]
    return found


def found_by_us(content: bytes) -> list[tuple[Any, ...]]:
    batches = Decoded(content, None, 0).batches
    return [(each.offset, each.timestamp, each.key, each.value, each.headers) for batch in batches for each in batch.records()]


@pytest.mark.parametrize("count", [1, 15, 16, 63, 64, 65, 127, 128, 129, 8_191, 8_192, 8_193, 20_000, (1 << 17) + 1])
def test_records_of_one_size_are_found_whatever_the_width_of_their_offsets(count: int) -> None:
    content = encoded(plain(count, 3))
    assert is_equal(content) == (16 <= count <= 1 << 17)
    assert found_by_us(content) == found_by_library(content)


@pytest.mark.parametrize("size", [1, 50, 63, 64, 127, 128, 8_000, 20_000])
@pytest.mark.parametrize("key", [None, b"k", b"key" * 50])
def test_keys_and_values_of_one_size_are_found_whatever_the_width_of_their_lengths(size: int, key: bytes | None) -> None:
    content = encoded(plain(100, size, key))
    assert is_equal(content)
    assert found_by_us(content) == found_by_library(content)


ODD: list[Row] = [
    (0, TIME, None, b"v" * 99, ()),
    (0, TIME, None, b"v" * 101, ()),
    (0, TIME, None, b"v" * 200, ()),
    (0, TIME, None, b"", ()),
    (0, TIME, None, None, ()),
    (0, TIME, b"", b"v" * 100, ()),
    (0, TIME, b"k", b"v" * 99, ()),
    (0, TIME, b"k" * 100, None, ()),
    (0, TIME, None, b"v" * 97, (("a", b""),)),
    (0, TIME, None, b"v" * 96, (("a", b"b"),)),
    (0, TIME + 1, None, b"v" * 100, ()),
    (0, TIME + 64, None, b"v" * 99, ()),
    (0, TIME - 1, None, b"v" * 100, ()),
    (0, TIME + 9_000, None, b"v" * 100, ()),
]


@pytest.mark.parametrize("place", [0, 1, 20, 63, 64, 70, 99])
@pytest.mark.parametrize("odd", ODD)
def test_one_odd_record_among_equal_ones_is_read_for_what_it_is(place: int, odd: Row) -> None:
    rows = plain(100)
    rows[place] = (place, *odd[1:])
    content = encoded(rows)
    assert found_by_us(content) == found_by_library(content)


def test_an_odd_length_is_not_taken_for_an_equal_record() -> None:
    for odd in ODD[:10]:
        rows = plain(100)
        rows[50] = (50, *odd[1:])
        assert not is_equal(encoded(rows))


@pytest.mark.parametrize("step", [1, 2, 7, 40, 1_000])
def test_timestamps_that_rise_within_a_batch_are_kept(step: int) -> None:
    content = encoded([(offset, TIME + step * offset, key, value, headers) for offset, _, key, value, headers in plain(3_000)])
    assert is_equal(content)
    assert found_by_us(content) == found_by_library(content)


def test_timestamps_of_the_kafka_node_replace_those_of_the_records() -> None:
    rows = [(offset, TIME + offset, key, value, headers) for offset, _, key, value, headers in plain(100)]
    content = encoded(rows, attributes=_LOG_APPEND_TIME)
    assert found_by_us(content) == found_by_library(content)
    assert {record[1] for record in found_by_us(content)} == {TIME + 99}


def test_offsets_with_gaps_are_kept() -> None:
    rows = plain(200)
    kept = rows[:100] + rows[101:]
    content = encoded(kept, base=1_000)
    assert not is_equal(content)
    assert [record[0] for record in found_by_us(content)] == [1_000 + row[0] for row in kept]


def test_compressed_batches_of_equal_records_are_read() -> None:
    content = encoded(plain(100), compression=1)
    assert found_by_us(content) == found_by_library(content)


def test_the_last_batch_of_a_response_may_be_cut_anywhere() -> None:
    first, second = encoded(plain(100)), encoded(plain(50), base=100)
    for cut in (1, 11, 12, 60, 61, len(second) - 1):
        assert found_by_us(first + second[:cut]) == found_by_library(first)
    assert found_by_us(first + second) == found_by_library(first + second)


@pytest.mark.parametrize("place", [21, 61, 62, 300, -1])
def test_a_damaged_byte_is_found_before_anything_is_decoded(place: int) -> None:
    content = bytearray(encoded(plain(100)))
    content[place] ^= 1
    with pytest.raises(CorruptData, match="checksum"):
        Decoded(bytes(content), None, 0)


def test_the_checksum_of_the_library_serves_where_there_is_no_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "CHECKSUMS_IN_C", False)
    content = bytearray(encoded(plain(100)))
    assert found_by_us(bytes(content)) == found_by_library(bytes(content))
    content[-1] ^= 1
    with pytest.raises(CorruptData, match="checksum"):
        Decoded(bytes(content), None, 0)


@pytest.mark.parametrize("length", [0, 4, 5, 48])
def test_a_batch_without_a_whole_head_is_damaged(length: int) -> None:
    with pytest.raises(CorruptData, match="expected at least 61 bytes"):
        Decoded(bytes(8) + length.to_bytes(4, "big") + bytes(4) + b"\2" + bytes(100), None, 0)


@given(st.data())
def test_any_batch_is_decoded_as_the_library_decodes_it(chance: st.DataObject) -> None:
    sizes, times = chance.draw(st.sampled_from([[3], [3], [1, 3], [0, 3]])), chance.draw(st.sampled_from([[0], [0, 5], [0, 70, 9_000]]))
    keys: list[bytes | None] = chance.draw(st.sampled_from([[None], [b"kk"], [None, b"kk"], [b"", b"k"]]))
    headers: list[tuple[tuple[str, bytes], ...]] = chance.draw(st.sampled_from([[()], [()], [(), (("h", b"x"),)]]))
    count, stretch = chance.draw(st.integers(1, 300)), chance.draw(st.sampled_from([1, 20, 100]))
    seed = random.Random(chance.draw(st.integers(0, 1 << 16)))
    rows: list[Row] = []
    for index in range(count):
        if index % stretch == 0:
            key, size, time, pairs = seed.choice(keys), seed.choice(sizes), seed.choice(times), seed.choice(headers)
        rows.append((index, TIME + time, key, seed.randbytes(size), pairs))
    content = encoded(rows, base=7)
    assert found_by_us(content) == found_by_library(content)


@given(st.integers(0, 300), st.integers(0, 300))
def test_a_part_of_a_column_is_that_part_of_its_items(start: int, stop: int) -> None:
    rows = plain(300, 5)
    (batch,) = Decoded(encoded(rows), None, 0).batches
    column = batch._lists.values
    assert isinstance(column, EqualColumn)
    values = [row[3] for row in rows]
    assert column[start:stop] == values[start:stop]
    assert list(column) == values
    assert column[-1] == values[-1]
    if start <= stop:
        window = batch.window(start, stop)
        assert window.values() == values[start:stop]
        assert window.size_bytes == 5 * (stop - start)


def test_columns_for_arrow_have_the_values_and_keys() -> None:
    rows = plain(300, 5, b"key")
    (batch,) = Decoded(encoded(rows), None, 0).batches
    offsets, values, validity = batch.value_buffers()
    assert offsets.cast("I").tolist() == list(range(0, 1_501, 5))
    assert bytes(values) == b"".join(row[3] or b"" for row in rows)
    assert validity is None
    keys = batch.key_buffers()
    assert keys is not None
    assert bytes(keys[1]) == b"key" * 300
