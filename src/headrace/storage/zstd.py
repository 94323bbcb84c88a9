"""Zstandard compression with a limit on the decompressed size."""

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
    """Return exactly `size` bytes, or raise `CorruptData`. Bytes after the frame (padding) are ignored."""
    decompressor = ZstdDecompressor()
    try:
        plain = decompressor.decompress(data, max_length=size)
    except ZstdError as failure:
        raise CorruptData(f"cannot decompress: {failure}") from None
    if len(plain) != size or not (decompressor.eof or size == 0):
        raise CorruptData(f"decompressed size is not the expected {size} bytes")
    return plain
