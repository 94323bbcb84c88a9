"""Sizes and durations: parsing, errors, and lossless formatting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1 KiB", 1024),
        ("64 MiB", 64 << 20),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("1.5 GiB", 3 << 29),
        ("2 TiB", 2 << 40),
        ("10 kB", 10_000),
        ("10 MB", 10_000_000),
        ("1_000 B", 1_000),
        ("  8 KiB ", 8192),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("0", 0), ("5ms", 5), ("5 ms", 5), ("1.5s", 1_500), ("2m", 120_000), ("3h", 10_800_000), ("7d", 604_800_000), ("1w", 604_800_000)],
)
def test_a_duration_is_read_with_its_unit(text: str, duration_ms: int) -> None:
    assert parse_duration(text) == duration_ms


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1 MiB", "1 XiB", "1 MiB MiB", "1..5 MiB", "0.3 B", "1e3", "0x10", "٣ MiB", "5ms", "_1", "9" * 41, "1 \0MiB"]
)
def test_what_is_no_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "ms", "-5ms", "5", "5 fortnights", "0.5ms", "5 MiB", "1h30m", "inf", "nan"])
def test_what_is_no_duration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


def test_a_number_without_a_unit_is_no_duration_and_says_so() -> None:
    with pytest.raises(ValueError, match="the unit is missing"):
        parse_duration("250")


@given(st.integers(0, 1 << 50))
def test_a_size_written_back_is_the_same_size(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(0, 10**13))
def test_a_duration_written_back_is_the_same_duration(duration_ms: int) -> None:
    assert parse_duration(format_duration(duration_ms)) == duration_ms
