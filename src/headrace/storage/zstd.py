"""Zstandard with a cap: the output is never larger than the size the caller already checked."""

from __future__ import annotations

import sys
from typing import Final

from headrace.errors import CorruptData

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdDecompressor, ZstdError
    from compression.zstd import compress as _compress
else:
    from backports.zstd import ZstdDecompressor, ZstdError
    from backports.zstd import compress as _compress

_LEVEL: Final = 1


def compress(data: bytes) -> bytes:
    return _compress(data, _LEVEL)


def decompress(data: bytes | memoryview, *, size: int) -> bytes:
    """Exactly `size` bytes, or `CorruptData`; what lies behind the end of the frame is ignored (padding)."""
    decompressor = ZstdDecompressor()
    try:
        plain = decompressor.decompress(data, max_length=size)
    except ZstdError as failure:
        raise CorruptData(f"compressed data does not open: {failure}") from None
    if len(plain) != size or not (decompressor.eof or size == 0):
        raise CorruptData(f"compressed data opens to something other than the {size} bytes it should")
    return plain
