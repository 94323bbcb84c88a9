"""The numpy functions on columns give the same results as the broker's functions on single records."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.publishing.partitioner import fnv1a as fnv1a_of_one
from headrace.columns import encode_headers
from headrace.errors import InvalidRequest, LimitExceeded
from headrace.flight.arrays import Binary, as_binary, fnv1a, header_blobs
from headrace.flight.reading import headers_array
from headrace.flight.request import HEADERS
from headrace.limits import HEADERS_BYTES_MAX, HEADERS_MAX

ITEMS = st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=200)
PAIRS = st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=12)), max_size=4).map(tuple)


def column(items: list[bytes | None], before: int = 0) -> pa.Array:
    """Return the array with `before` other items before it in the same buffers."""
    return pa.array([b"other"] * before + items, pa.binary()).slice(before)


def contents(binary: Binary) -> list[bytes | None]:
    ends = binary.ends.tolist()
    found: list[bytes | None] = [binary.content[begin:end].tobytes() for begin, end in itertools.pairwise(ends)]
    return found if binary.valid is None else [item if valid else None for item, valid in zip(found, binary.valid, strict=True)]


@given(ITEMS, st.integers(0, 9))
def test_a_column_is_what_it_holds_wherever_it_begins(items: list[bytes | None], before: int) -> None:
    assert contents(Binary(column(items, before))) == items


def test_the_bytes_behind_a_null_are_not_taken_along() -> None:
    ends, content, valid = np.array([0, 3, 9, 12], np.int32), b"abcSECRETxyz", bytes([0b101])
    array = pa.Array.from_buffers(pa.binary(), 3, [pa.py_buffer(valid), pa.py_buffer(ends), pa.py_buffer(content)])
    binary = Binary(array)
    assert contents(binary) == [b"abc", None, b"xyz"]
    assert b"SECRET" not in binary.content.tobytes()


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=70), max_size=300), st.integers(0, 5))
def test_keys_hash_as_the_partitioner_hashes_them(keys: list[bytes], before: int) -> None:
    assert fnv1a(Binary(column(list(keys), before))).tolist() == [fnv1a_of_one(key) for key in keys]


def test_one_long_key_among_many_short_ones_hashes_the_same() -> None:
    keys = [b"%d" % number for number in range(500)] + [b"long" * 2_000, b"", b"\xff" * 64]
    assert fnv1a(Binary(column(list(keys)))).tolist() == [fnv1a_of_one(key) for key in keys]


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["ä", None, ""], pa.string()),
        pa.array(["ä", None, ""], pa.large_string()),
        pa.array([b"\xc3\xa4", None, b""], pa.large_binary()),
        pa.array(["ä", None, ""], pa.string_view()),
        pa.array([b"\xc3\xa4", None, b""], pa.binary_view()),
        pa.array(["ä", None, ""], pa.string()).dictionary_encode(),
    ],
)
def test_texts_and_bytes_of_any_layout_become_binary(array: pa.Array) -> None:
    assert as_binary(array, "value").to_pylist() == [b"\xc3\xa4", None, b""]


@pytest.mark.parametrize("array", [pa.array([1]), pa.array([1.5]), pa.array([[b"x"]]), pa.array([1]).dictionary_encode()])
def test_anything_else_is_rejected_with_the_name_of_the_column(array: pa.Array) -> None:
    with pytest.raises(InvalidRequest, match="column 'key' is "):
        as_binary(array, "key")


@given(st.lists(PAIRS, max_size=30), st.integers(0, 3))
def test_headers_are_packed_as_the_log_keeps_them_and_come_back(rows: list[tuple[tuple[str, bytes], ...]], before: int) -> None:
    array = headers_array([(("other", b"x"),)] * before + rows).slice(before)
    assert array.type == HEADERS
    assert array.to_pylist() == [[{"key": name, "value": value} for name, value in row] or None for row in rows]
    blobs = header_blobs(array)
    if blobs is None:
        assert not any(rows)
    else:
        assert contents(blobs) == [encode_headers(row) if row else b"" for row in rows]


def headers_of(*rows: list[tuple[str | None, bytes | None]] | None) -> pa.Array:
    return pa.array([None if row is None else [{"key": name, "value": value} for name, value in row] for row in rows], HEADERS)


def test_a_header_without_a_value_has_an_empty_one() -> None:
    blobs = header_blobs(headers_of([("a", None)], None, []))
    assert blobs is not None and contents(blobs) == [encode_headers((("a", b""),)), b"", b""]


def test_a_header_without_a_name_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="without a name"):
        header_blobs(headers_of([(None, b"x")]))


@pytest.mark.parametrize(("count", "fits"), [(HEADERS_MAX, True), (HEADERS_MAX + 1, False)])
def test_a_record_has_at_most_so_many_headers(count: int, fits: bool) -> None:
    array = headers_of(None, [("a", b"")] * count)
    if fits:
        assert header_blobs(array) is not None
    else:
        with pytest.raises(LimitExceeded, match=f"of {count} headers"):
            header_blobs(array)


@pytest.mark.parametrize(("size", "fits"), [(HEADERS_BYTES_MAX - 1, True), (HEADERS_BYTES_MAX, False)])
def test_the_headers_of_a_record_have_at_most_so_many_bytes(size: int, fits: bool) -> None:
    array = headers_of([("a", bytes(size))], [])
    if fits:
        assert header_blobs(array) is not None
    else:
        with pytest.raises(LimitExceeded, match=f"headers of {size + 1} bytes"):
            header_blobs(array)
