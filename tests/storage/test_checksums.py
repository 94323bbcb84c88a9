"""The checksum of two chunks."""

from __future__ import annotations

import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.checksums import joined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_checksum_of_two_chunks_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert joined(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@pytest.mark.parametrize("size_bytes", [1, 255, 256, 4095, 65_536, 1_048_575, 1_048_576, 5_000_001])
def test_chunks_of_any_size_join(size_bytes: int) -> None:
    first, second = b"headrace", bytes(range(256)) * (size_bytes // 256) + bytes(range(size_bytes % 256))
    assert joined(crc32c(first), crc32c(second), size_bytes) == crc32c(first + second)


def test_chunks_are_joined_one_after_another() -> None:
    whole, crc = b"", 0
    for number in range(100):
        chunk = bytes([number]) * number * 7
        whole, crc = whole + chunk, joined(crc, crc32c(chunk), len(chunk))
    assert crc == crc32c(whole)
