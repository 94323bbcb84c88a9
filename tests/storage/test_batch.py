"""Batches: encoding and decoding are inverse, and every change of the bytes is detected."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptData
from headrace.limits import BATCH_BYTES_MAX
from headrace.records import Headers, RecordBatch
from headrace.storage.batch import HEADER_BYTES, StoredBatch, parse_header
from headrace.storage.crypt import Keyring, WrongKey
from headrace.storage.encoding import SingleBuilder, build_plain, encode

Item = TypeVar("Item")
KEY = bytes(range(32))


def keyring(key: bytes = KEY) -> Keyring:
    ring = Keyring(key)
    ring.start_epoch(1)
    return ring


FULL = RecordBatch(
    [b"a", None, b"", b"long" * 100],
    [b"k", None, b"", b"q"],
    [(), (("a", b"1"), ("a", b"2")), (("ü", b""),), ()],
    [5, 3, 9, 4],
    [0, 0, 99, 0],
)

optional_bytes = st.one_of(st.none(), st.binary(max_size=40))
headers: st.SearchStrategy[Headers] = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=3).map(tuple)


@st.composite
def batches(draw: st.DrawFn) -> RecordBatch:
    count = draw(st.integers(1, 20))

    def column(item: st.SearchStrategy[Item]) -> st.SearchStrategy[list[Item]]:
        return st.lists(item, min_size=count, max_size=count)

    times = st.integers(0, 1 << 50)
    return RecordBatch(
        draw(column(optional_bytes)),
        draw(st.one_of(st.none(), column(optional_bytes))),
        draw(st.one_of(st.none(), column(headers))),
        draw(column(times)),
        draw(st.one_of(st.none(), column(times))),
    )


@given(batches(), st.booleans(), st.booleans())
def test_a_run_comes_back_as_it_was(record_batch: RecordBatch, compress: bool, encrypt: bool) -> None:
    ring = keyring() if encrypt else None
    batch = StoredBatch.parse(encode(7, 1000, record_batch, now=0, compress=compress, keyring=ring), keyring=ring)
    assert list(batch.values()) == list(record_batch.values)
    assert (batch.keys() or [None] * len(record_batch)) == list(record_batch.keys or [None] * len(record_batch))
    assert (batch.headers() or [()] * len(record_batch)) == list(record_batch.headers or [()] * len(record_batch))
    assert list(batch.timestamps()) == list(record_batch.timestamps or ())
    assert (batch.expiries() or [0] * len(record_batch)) == list(record_batch.expiries or [0] * len(record_batch))
    assert list(batch.offsets()) == list(range(1000, 1000 + len(record_batch)))


@pytest.mark.parametrize("bit", range(0, len(encode(1, 0, FULL, now=0)) * 8, 7))
def test_a_flipped_bit_is_found(bit: int) -> None:
    content = bytearray(encode(1, 0, FULL, now=0))
    content[bit >> 3] ^= 1 << (bit & 7)
    with pytest.raises(CorruptData):
        StoredBatch.parse(bytes(content))


@pytest.mark.parametrize("cut", range(len(encode(1, 0, FULL, now=0))))
def test_a_cut_batch_is_found(cut: int) -> None:
    with pytest.raises(CorruptData):
        StoredBatch.parse(encode(1, 0, FULL, now=0)[:cut])


def test_an_invalid_size_is_rejected_before_anything_is_read() -> None:
    content = bytearray(encode(1, 0, FULL, now=0))
    content[8:12] = (BATCH_BYTES_MAX + 8).to_bytes(4, "little")
    with pytest.raises(CorruptData, match="invalid batch size"):
        parse_header(bytes(content), 0, "here")


def test_zeros_are_no_batch() -> None:
    with pytest.raises(CorruptData):
        StoredBatch.parse(bytes(4096))


def test_a_run_without_timestamps_is_stamped_and_a_constant_time_takes_no_room() -> None:
    batch = StoredBatch.parse(encode(1, 0, RecordBatch([b"x"] * 100), now=77))
    assert list(batch.timestamps()) == [77] * 100
    assert batch.header.size < HEADER_BYTES + 100 + 4 * 101 + 16


def test_windows_keep_offsets_and_columns_together() -> None:
    batch = StoredBatch.parse(encode(1, 10, FULL, now=0))
    part = batch.from_offset(12)
    assert [(record.offset, record.value, record.key) for record in part.records()] == [(12, b"", b""), (13, b"long" * 100, b"q")]
    assert batch.window(1, 3).next_offset == 13
    assert part.next_offset == 14
    assert batch.window(1, 3).window(1, 2).first_offset == 12


@pytest.mark.parametrize(("bytes_max", "records"), [(0, 0), (1, 0), (2, 3), (402, 3), (403, 4), (10_000, 4)])
def test_fitting_counts_keys_and_values(bytes_max: int, records: int) -> None:
    batch = StoredBatch.parse(encode(1, 10, FULL, now=0))
    assert batch.fitting(bytes_max) == records


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("odd", [None, 0, -1])
def test_values_of_one_size_and_almost_one_size_come_back_alike(count: int, odd: int | None) -> None:
    values = [b"%07d" % number for number in range(count)]
    if odd is not None:
        values[odd] += b"!"
    batch = StoredBatch.parse(encode(1, 0, RecordBatch(values), now=0))
    assert batch.values() == values
    assert batch.window(count // 3, count).values() == values[count // 3 :]
    assert batch.window(count, count).values() == []


def test_gaps_of_compaction_stay_in_their_place() -> None:
    batch = StoredBatch.parse(encode(1, 100, RecordBatch([b"a", b"b"]), now=0, deltas=[3, 8], span=10))
    assert list(batch.offsets()) == [103, 108]
    assert (batch.first_offset, batch.next_offset) == (103, 110)
    assert list(batch.from_offset(104).values()) == [b"b"]
    assert len(batch.from_offset(109)) == 0


def test_arrow_buffers_are_the_columns_themselves() -> None:
    offsets, content, validity = StoredBatch.parse(encode(1, 0, RecordBatch([b"ab", None, b"c"]), now=0)).value_buffers()
    assert offsets.cast("I").tolist() == [0, 2, 2, 3]
    assert bytes(content) == b"abc"
    assert validity is not None and validity[0] == 0b101


def test_encrypted_bytes_show_nothing_and_need_the_key() -> None:
    sealed = encode(1, 0, RecordBatch([b"CANARY" * 10]), now=0, keyring=keyring())
    assert b"CANARY" not in sealed
    with pytest.raises(WrongKey):
        StoredBatch.parse(sealed, keyring=keyring(bytes(32))).values()
    with pytest.raises(CorruptData, match="no key"):
        StoredBatch.parse(sealed).values()


def test_no_nonce_is_used_twice() -> None:
    ring = keyring()
    assert len({ring.next_nonce() for _ in range(1000)}) == 1000


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(WrongKey, match="32 bytes"):
        Keyring(b"short")


@pytest.mark.parametrize("odd", [None, b"", b"long" * 50])
@pytest.mark.parametrize(
    ("records_max", "bytes_max"), [(1, 1), (1, 1_000), (3, 1_000), (3, 60), (10, 59), (10, 60), (10, 61), (5_000, 219)]
)
def test_a_part_holds_as_many_records_as_its_limits_allow(odd: bytes | None, records_max: int, bytes_max: int) -> None:
    """`odd` is the value of the last record: with it, the values have no common size."""
    values = [b"%020d" % number for number in range(99)] + [b"%020d" % 99 if odd is None else odd]
    batch = StoredBatch.parse(encode(1, 1_000, RecordBatch(values), now=0))
    batch.open()
    for start in (0, 1, 50, 88):
        part = batch.part(1_000 + start, bytes_max, records_max)
        assert part is not None
        count = min(max(bytes_max // 20, 1), records_max)
        assert (part.first_offset, part.values()) == (1_000 + start, values[start : start + count])
        assert (part.size_bytes, part.value_size) == (20 * count, 20 if odd is None else None)


def test_a_part_that_no_limit_ends_is_left_to_a_read_of_more_batches() -> None:
    batch = StoredBatch.parse(encode(1, 0, RecordBatch([bytes(20)] * 10), now=0))
    batch.open()
    assert batch.part(5, 100, 6) is None
    assert batch.part(5, 99, 6) is not None and batch.part(5, 100, 5) is not None
    assert batch.part(10, 100, 1) is None and batch.part(-1, 100, 1) is None and batch.part(0, 100, 0) is None


def test_tombstones_among_values_of_one_size_are_none() -> None:
    values = [None if number == 3 else b"" for number in range(10)]
    full = [None if number == 3 else bytes(8) for number in range(10)]
    for each in (values, full):
        batch = StoredBatch.parse(encode(1, 0, RecordBatch(each), now=0))
        batch.open()
        part = batch.part(2, 1_000, 3)
        assert part is not None and part.values() == each[2:5] and part.value_size is None


@pytest.mark.parametrize("sizes", [range(40), [100, 100, 7, 100, 0, 0, 65_400, 65_424, 65_425, 65_440, 70_000, 3]])
def test_batches_of_one_value_are_the_same_bytes_whatever_was_built_before(sizes: list[int]) -> None:
    builder = SingleBuilder(1_700_000_000_000)
    for number, size in enumerate(sizes):
        log, offset, value = number * 1_000_003, number << 40, bytes(range(256)) * 300
        found, expected = builder.build(log, offset, value[:size]), build_plain(log, offset, [value[:size]], 1_700_000_000_000)
        assert (found[0], b"".join(found[1])) == (expected[0], b"".join(expected[1]))
        batch = StoredBatch.parse(b"".join(found[1]))
        assert (batch.header, list(batch.values())) == (found[0], [value[:size]])
