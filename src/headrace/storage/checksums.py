"""The CRC-32C of two chunks together, from those of the chunks.

A checksum is a polynomial over GF(2), modulo that of CRC-32C. Appending n bytes multiplies it by x^(8n), and adds the checksum of the
bytes. So the checksum of a column that was computed when it was received serves for the batch that it becomes part of, and no byte is
read again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0x82F63B78
"""Of CRC-32C. The highest power is the lowest bit, as in the checksums."""
_ONE: Final = 0x80000000


def joined(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of a chunk with the checksum `first`, followed by one of `second_bytes` bytes with the checksum `second`."""
    return _product(_power(second_bytes), first) ^ second


@lru_cache(maxsize=256)
def _power(size_bytes: int) -> int:
    """Return x^(8 × size_bytes). Most batches of a topic have the same size."""
    power, square = _ONE, _ONE >> 8
    while size_bytes:
        if size_bytes & 1:
            power = _product(square, power)
        square = _product(square, square)
        size_bytes >>= 1
    return power


def _product(one: int, other: int) -> int:
    result, bit = 0, _ONE
    while bit:
        if one & bit:
            result ^= other
        other = other >> 1 ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return result
