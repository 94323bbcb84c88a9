"""A column batch and a record batch of the same records are encoded to the same bytes."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptData
from headrace.limits import BATCH_BYTES_TARGET, BATCH_RECORDS_MAX
from headrace.records import Column, ColumnBatch, RecordBatch
from headrace.storage import batch as batch_format
from headrace.storage.batch import REFERENCED, StoredBatch
from headrace.storage.encoding import build, build_large, encode
from tests.storage.test_batch import FULL, batches, keyring


@given(batches(), st.booleans(), st.booleans(), st.sampled_from(["own", "one", "none"]))
def test_both_kinds_of_run_make_the_same_batch(record_batch: RecordBatch, compress: bool, encrypt: bool, times: str) -> None:
    if times != "own":
        record_batch = replace(record_batch, timestamps=None if times == "none" else [77] * len(record_batch))
    made = [
        build(7, 1000, one, now=5, compress=compress, keyring=keyring() if encrypt else None)  # each with the first nonce of its keyring
        for one in (record_batch, ColumnBatch.of(record_batch))
    ]
    (header, parts), (header_of_columns, parts_of_columns) = made
    assert b"".join(parts) == b"".join(parts_of_columns)
    assert header == header_of_columns == StoredBatch.parse(b"".join(parts), keyring=keyring()).header


@given(batches(), st.booleans(), st.booleans())
def test_a_large_append_differs_only_in_its_mark(record_batch: RecordBatch, compress: bool, encrypt: bool) -> None:
    stored = [
        StoredBatch.parse(
            b"".join(build_large(7, 1000, one, now=5, compress=compress, keyring=keyring() if encrypt else None)[1]), keyring=keyring()
        )
        for one in (record_batch, ColumnBatch.of(record_batch))
    ]
    assert stored[0].encoded == stored[1].encoded
    assert stored[0].header.flags & REFERENCED
    plain = StoredBatch.parse(encode(7, 1000, record_batch, now=5, compress=compress))
    assert stored[0].record_batch() == plain.record_batch()


def test_a_checked_column_must_be_the_whole_of_its_data() -> None:
    with pytest.raises(AssertionError, match="the whole of the data"):
        Column(array("I", [0, 3]).tobytes(), b"four", is_checked=True)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("encrypt", [False, True])
def test_a_checksum_that_is_known_makes_the_same_batch(in_place: bool, compress: bool, encrypt: bool) -> None:
    content = bytes(range(251)) * 800
    ends = array("I", range(0, len(content) + 1, 251)).tobytes()
    built = [
        (build_large if in_place else build)(
            7,
            1000,
            ColumnBatch(Column(ends, content, is_checked=True, checksum=checksum), Column.of([b"key"] * 800)),
            now=5,
            compress=compress,
            keyring=keyring() if encrypt else None,
        )
        for checksum in (None, crc32c(content))
    ]
    assert built[0][0] == built[1][0]
    assert b"".join(built[0][1]) == b"".join(built[1][1])


def test_a_checksum_that_is_known_is_not_computed_again() -> None:
    content = bytes(100_000)
    column = Column(array("I", [0, len(content)]).tobytes(), content, is_checked=True, checksum=crc32c(content) ^ 1)
    with pytest.raises(CorruptData):
        StoredBatch.parse(b"".join(build_large(7, 1000, ColumnBatch(column), now=5)[1]))


def test_only_a_checked_column_has_a_checksum() -> None:
    with pytest.raises(AssertionError, match="never changes"):
        Column(array("I", [0, 4]).tobytes(), b"four", checksum=1)


@given(batches(), st.booleans())
def test_a_batch_gives_back_the_columns_it_was_made_of(record_batch: RecordBatch, compress: bool) -> None:
    encoded = encode(7, 1000, ColumnBatch.of(record_batch), now=5, compress=compress)
    batch = StoredBatch.parse(encoded)
    assert batch.column_batch().record_batch() == batch.record_batch()
    assert encode(7, 1000, batch.column_batch(), now=99, compress=compress) == encoded
    for start in range(len(batch)):
        part = batch.window(start, len(batch))
        assert part.column_batch().record_batch() == part.record_batch()
        assert part.column_batch(with_times=False).record_batch() == replace(part.record_batch(), timestamps=None)


@pytest.mark.parametrize(
    "without", [(), ("keys",), ("headers",), ("timestamps",), ("expiries",), ("keys", "headers", "timestamps", "expiries")]
)
def test_buffers_cover_the_whole_batch_whatever_the_window(without: tuple[str, ...]) -> None:
    record_batch = replace(FULL, **dict.fromkeys(without))  # type: ignore[arg-type]  # columns that may be None
    batch = StoredBatch.parse(encode(1, 10, record_batch, now=6)).window(1, 3)
    keys, headers, timestamps, expiries = batch.key_buffers(), batch.header_buffers(), batch.timestamp_buffer(), batch.expiry_buffer()
    assert (keys is None, headers is None) == ("keys" in without, "headers" in without)
    assert (None if timestamps is None else timestamps.tolist()) == record_batch.timestamps
    assert (None if expiries is None else expiries.tolist()) == record_batch.expiries
    assert batch.expires == (record_batch.expiries is not None)
    assert batch.delta_buffer() is None
    assert Column(*batch.value_buffers()).items() == record_batch.values
    if headers is not None:
        ends = headers[0].cast("I").tolist()
        assert len(ends) == len(record_batch) + 1 and ends[-1] == len(headers[1])
    if timestamps is None:
        assert batch.header.min_timestamp == 6


def test_gaps_are_shown_as_distances_from_the_first_offset() -> None:
    deltas = StoredBatch.parse(encode(1, 100, RecordBatch([b"a", b"b"]), now=0, deltas=[3, 8], span=10)).delta_buffer()
    assert deltas is not None and deltas.tolist() == [3, 8]


def test_buffers_are_no_copies() -> None:
    batch = StoredBatch.parse(encode(1, 10, FULL, now=6))
    first, second = batch.value_buffers(), batch.window(1, 3).value_buffers()
    assert first[0].obj is second[0].obj is first[1].obj


@pytest.mark.parametrize("size", [100, 300_000])
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("key", [None, b"key"])
@pytest.mark.parametrize("as_columns", [False, True])
def test_a_batch_that_was_just_built_reads_as_it_will_from_disk(size: int, compress: bool, key: bytes | None, as_columns: bool) -> None:
    plain = RecordBatch([bytes(size), b"%d" % size, b""], None if key is None else [key] * 3)
    built = build(7, 1000, ColumnBatch.of(plain) if as_columns else plain, now=5, compress=compress)
    assert sum(map(len, built[1])) == built[0].size
    batch, parsed = StoredBatch.of_built(built, None), StoredBatch.parse(b"".join(built[1]))
    assert list(batch.records()) == list(parsed.records())
    assert batch.encoded == parsed.encoded == b"".join(batch.built[1])


def test_the_largest_run_of_columns_is_a_batch_that_readers_take() -> None:
    empty = ColumnBatch(Column(bytes(4 * (BATCH_RECORDS_MAX + 1)), b""))
    assert StoredBatch.parse(encode(1, 0, empty, now=0)).header.count == BATCH_RECORDS_MAX
    full = ColumnBatch.of(RecordBatch([bytes(BATCH_BYTES_TARGET // 2)] * 2))
    assert StoredBatch.parse(encode(1, 0, full, now=0)).size_bytes == BATCH_BYTES_TARGET


def test_flags_say_only_what_is_there() -> None:
    constant = ColumnBatch.of(RecordBatch([b"a", b"b"], [b"k", b"k"], None, [5, 5], [0, 0]))
    batch = StoredBatch.parse(encode(1, 0, constant, now=9))
    assert batch.header.flags == batch_format.KEYS
    assert (batch.header.min_timestamp, batch.header.max_timestamp) == (5, 5)
