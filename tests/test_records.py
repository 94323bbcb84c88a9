"""Column batches: the same records as a record batch, and nothing that a stored batch could not hold."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from headrace import limits
from headrace.columns import Column, encode_headers
from headrace.errors import InvalidRequest, LimitExceeded, RecordTooLarge
from headrace.records import ColumnBatch, RecordBatch

FULL = RecordBatch(
    [b"a", None, b"", b"long" * 100],
    [b"k", None, b"", b"q"],
    [(), (("a", b"1"), ("a", b"2")), (("ü", b""),), ()],
    [5, 3, 9, 4],
    [0, 0, 99, 0],
)


def times(*numbers: int) -> bytes:
    return array("q", numbers).tobytes()


def test_a_run_and_its_columns_are_the_same_records() -> None:
    columns = ColumnBatch.of(FULL)
    assert columns.record_batch() == FULL
    assert (len(columns), columns.size_bytes) == (len(FULL), FULL.size_bytes)
    assert columns[1:3] == FULL[1:3]
    assert (columns.oldest, columns.newest) == (3, 9)


def test_columns_that_are_not_there_stay_away() -> None:
    columns = ColumnBatch.of(RecordBatch([b"x"]))
    assert columns.record_batch() == RecordBatch([b"x"])
    assert (columns.keys, columns.headers, columns.timestamps, columns.expiries) == (None, None, None, None)


def test_an_expiry_is_given_to_those_without_one() -> None:
    assert ColumnBatch.of(FULL).expiring(7).record_batch() == RecordBatch(
        FULL.values, FULL.keys, FULL.headers, FULL.timestamps, [7, 7, 99, 7]
    )
    assert ColumnBatch.of(RecordBatch([b"x", b"y"])).expiring(7).record_batch() == RecordBatch([b"x", b"y"], expiries=[7, 7])


@pytest.mark.parametrize(
    "others",
    [
        (Column.of([b"a"] * 3),),
        (None, Column.of([b""] * 3)),
        (None, None, times(1)),
        (None, None, None, times(1, 2, 3)),
    ],
)
def test_columns_of_different_lengths_are_refused(others: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest, match="expected 2 (entries|× 8 bytes)"):
        ColumnBatch(Column.of([b"a"] * 2), *others)


@pytest.mark.parametrize("others", [(times(1, -1),), (None, times(-1, 1))])
def test_a_time_before_1970_is_refused(others: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest, match="1970"):
        ColumnBatch(Column.of([b"a", b"b"]), None, None, *others)


def test_headers_are_never_null() -> None:
    with pytest.raises(InvalidRequest, match="headers column has nulls"):
        ColumnBatch(Column.of([b"a", b"b"]), headers=Column.of([None, encode_headers((("a", b""),))]))


def test_headers_are_held_to_their_limits() -> None:
    def made(*pairs: tuple[str, bytes]) -> ColumnBatch:
        return ColumnBatch(Column.of([b"a"]), headers=Column.of([encode_headers(pairs)]))

    assert len(made(*[("n", b"")] * limits.HEADERS_MAX)) == 1
    with pytest.raises(LimitExceeded, match="65 headers"):
        made(*[("n", b"")] * (limits.HEADERS_MAX + 1))
    assert len(made(("n", bytes(limits.HEADERS_BYTES_MAX - 1)))) == 1
    with pytest.raises(LimitExceeded, match="headers of 8193 bytes"):
        made(("n", bytes(limits.HEADERS_BYTES_MAX)))


def test_a_single_record_may_be_as_large_as_any_and_no_larger() -> None:
    value, key = bytes(limits.VALUE_BYTES_MAX), bytes(limits.KEY_BYTES_MAX)
    assert ColumnBatch.of(RecordBatch([value], [key])).size_bytes == len(value) + len(key)
    with pytest.raises(RecordTooLarge):
        ColumnBatch.of(RecordBatch([value + b"!"]))
    with pytest.raises(RecordTooLarge):
        ColumnBatch.of(RecordBatch([b"small", b"small"], [b"", key + b"!"]))


def test_several_records_are_at_most_one_batch() -> None:
    half = bytes(limits.BATCH_BYTES_TARGET // 2)
    assert len(ColumnBatch.of(RecordBatch([half, half]))) == 2
    with pytest.raises(LimitExceeded, match="2 records and 1048577 bytes"):
        ColumnBatch.of(RecordBatch([half, half + b"!"]))
    with pytest.raises(LimitExceeded, match="2 records"):
        ColumnBatch.of(RecordBatch([half, half], [b"k", None]))
    with pytest.raises(LimitExceeded, match="2 records"):
        ColumnBatch.of(RecordBatch([half, half], None, [(("a", b""),), ()]))


def test_no_run_has_more_records_than_a_batch() -> None:
    def empty(count: int) -> ColumnBatch:
        return ColumnBatch(Column(bytes(4 * (count + 1)), b""))

    assert len(empty(limits.BATCH_RECORDS_MAX)) == limits.BATCH_RECORDS_MAX
    with pytest.raises(LimitExceeded, match="1048577 records"):
        empty(limits.BATCH_RECORDS_MAX + 1)
