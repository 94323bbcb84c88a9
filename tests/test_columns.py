"""Columns from untrusted callers: invalid ones are rejected before they reach the log."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.columns import Column, checked_headers, common_size, encode_headers, equal_rows, equal_size, is_ascending, is_non_negative
from headrace.errors import InvalidRequest
from headrace.records import Headers


def u32(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


optional_items = st.lists(st.none() | st.binary(max_size=20), min_size=1, max_size=40)
halves = st.sampled_from([0, 1, 2, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]) | st.integers(0, 0xFFFFFFFF)
wholes = st.sampled_from([-(1 << 63), -1, 0, 1, (1 << 63) - 1]) | st.integers(-(1 << 63), (1 << 63) - 1)


@given(optional_items)
def test_items_come_back_as_they_were(items: list[bytes | None]) -> None:
    column = Column.of(items)
    assert column.items() == items
    assert len(column) == len(items)
    assert column.largest == max(len(item or b"") for item in items)
    assert (column.validity is None) == (None not in items)


@given(st.lists(halves, min_size=1, max_size=30) | st.lists(halves, min_size=1, max_size=30).map(sorted))
def test_order_is_judged_as_one_by_one(numbers: list[int]) -> None:
    expected = numbers == sorted(numbers) and max(numbers) < 1 << 31
    assert is_ascending(array("I", numbers).tobytes(), 4) == expected


@given(st.lists(wholes, min_size=1, max_size=30) | st.lists(wholes, min_size=1, max_size=30).map(sorted))
def test_times_are_judged_as_one_by_one(numbers: list[int]) -> None:
    packed_numbers = array("q", numbers).tobytes()
    assert is_non_negative(packed_numbers) == (min(numbers) >= 0)
    assert is_ascending(packed_numbers, 8) == (numbers == sorted(numbers) and numbers[0] >= 0)


@pytest.mark.parametrize(
    ("offsets", "content", "reason"),
    [
        (b"", b"", "multiple of 4 bytes"),
        (u32(0), b"", "multiple of 4 bytes"),
        (u32(0, 1)[:-1], b"a", "multiple of 4 bytes"),
        (u32(1, 2), b"ab", "ascending values from 0"),
        (u32(0, 2, 1), b"ab", "ascending values"),
        (u32(0, 0xFFFFFFFF), b"ab", "ascending values"),
        (u32(0, 0x80000000, 1), b"ab", "ascending values"),
        (u32(0, 1, 3), b"ab", "expected 3 bytes, got 2"),
    ],
)
def test_invalid_offsets_are_rejected(offsets: bytes, content: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        Column(offsets, content)


def test_longer_buffers_are_cut_to_what_the_offsets_say() -> None:
    column = Column(memoryview(u32(0, 1, 2)), memoryview(b"abXXXX"), bytearray(b"\xfe\xff"))
    assert (column.data, column.validity, column.items()) == (b"ab", b"\x02", [None, b"b"])


def test_bits_that_say_nothing_is_null_are_left_out() -> None:
    assert Column(u32(*range(10)), bytes(9), b"\xff\x01").validity is None
    assert Column(u32(*range(9)), bytes(8), b"\xff").validity is None


def test_too_few_bits_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected at least 2 bytes for 9 items, got 1"):
        Column(u32(*range(10)), bytes(9), b"\xff")


def test_a_column_does_not_change_with_the_buffers_it_was_made_of() -> None:
    offsets, content, bits = bytearray(u32(0, 1, 2)), bytearray(b"ab"), bytearray(b"\x01")
    column = Column(offsets, content, bits)
    offsets[4], content[0], bits[0] = 9, 0, 0
    assert column.items() == [b"a", None]


@given(st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), min_size=1, max_size=3).map(tuple), st.data())
def test_headers_that_were_cut_or_lengthened_are_refused(pairs: Headers, chance: st.DataObject) -> None:
    blob = encode_headers(pairs)
    assert checked_headers(blob) == pairs
    for bad in (blob[: chance.draw(st.integers(0, len(blob) - 1))], blob + b"\0"):
        with pytest.raises(InvalidRequest, match="invalid record headers"):
            checked_headers(bad)


def test_a_header_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="invalid record headers: .*codec"):
        checked_headers(b"\x01\0\x01\0\xff\0\0\0\0")


@given(st.integers(0, 300), st.integers(0, 1 << 62), st.binary(max_size=5), st.binary(max_size=5), st.booleans())
def test_rows_of_one_size_are_what_joining_their_parts_gives(count: int, first: int, head: bytes, tail: bytes, dense: bool) -> None:
    values = [bytes([index % 256]) * 7 for index in range(count)]
    numbers = range(first, first + count) if dense else [first + index * index for index in range(count)]
    wanted = b"".join(head + number.to_bytes(8, "big") + value + tail for number, value in zip(numbers, values, strict=True))
    assert equal_rows(values, 7, head + bytes(8), tail, numbers=numbers, numbers_at=len(head)) == wanted


@pytest.mark.parametrize("first", [0, 1, 200, 255, 256, 65_500, (1 << 32) - 5])
def test_numbers_of_rows_carry_into_the_next_byte(first: int) -> None:
    numbers = range(first, first + 600)
    rows = equal_rows([b"v"] * 600, 1, bytes(4), bytes(8), numbers=numbers, numbers_at=5)
    assert rows == b"".join(bytes(4) + b"v" + number.to_bytes(8, "big") for number in numbers)


def test_only_many_values_of_one_size_have_an_equal_size() -> None:
    assert equal_size([b"abc"] * 16) == 3
    assert equal_size([b""] * 16) == 0
    assert equal_size([b"abc"] * 15) is None
    for odd in (0, 8, 15):
        assert equal_size([b"abc" if index != odd else b"ab" for index in range(16)]) is None


@given(st.lists(st.sampled_from([0, 1, 5, 300, 0x7FFF]), min_size=1, max_size=30) | st.integers(1, 30).map(lambda count: [7] * count))
def test_a_common_size_is_that_of_every_item(sizes: list[int]) -> None:
    offsets = u32(*(sum(sizes[:count]) for count in range(len(sizes) + 1)))
    assert common_size(offsets) == (sizes[0] if set(sizes) == {sizes[0]} else 0)
