"""Values of adjacent frames of the same sizes: all of them at once, or none if anything else is between two of them."""

from __future__ import annotations

import pytest

from headrace.wire.flymq.blocks import equal_values


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 66, 128, 129, 500])
@pytest.mark.parametrize("between", [b"", b"|", b"end of a frame, front of the next"])
def test_the_values_come_out_in_order(count: int, between: bytes) -> None:
    values = [b"%05d" % number for number in range(count)]
    stream = b"before" + between.join(values) + b"after"
    assert equal_values(stream, 6, 5, between, count) == values


@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 98])
def test_other_bytes_between_two_values_leave_none(at: int) -> None:
    stream = bytearray(b"--".join([b"value"] * 100))
    stream[7 * at + 6 : 7 * at + 7] = b"+"
    assert equal_values(bytes(stream), 0, 5, b"--", 100) == []


def test_values_that_contain_what_is_between_them_are_values() -> None:
    assert equal_values(b"----" + b"--" + b"a--b", 0, 4, b"--", 2) == [b"----", b"a--b"]


def test_a_buffer_that_ends_before_the_last_value_leaves_none() -> None:
    stream = b"--".join([b"value"] * 100)
    assert len(equal_values(stream, 0, 5, b"--", 100)) == 100
    assert (
        equal_values(stream[:-1], 0, 5, b"--", 100) == equal_values(stream, 0, 5, b"--", 101) == equal_values(stream, 0, 5, b"--", 0) == []
    )
