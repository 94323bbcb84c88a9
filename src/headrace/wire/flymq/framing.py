"""FlyMQ frames.

    0       1         2        3       4        8
    +-------+---------+--------+-------+--------+---------+
    | magic | version | opcode | flags | length | payload |     all integers big-endian
    | AF    | 01      | u8     | u8    | u32    | length  |
    +-------+---------+--------+-------+--------+---------+

`length` counts the payload alone. Requests and replies have the same format. A reply carries the opcode of its request, except for an
error, which is 0xFF. Of the flags only bits 1 to 3 are used: they name a compression of the whole payload. Only gzip is supported.
Bit 0 ("binary") is set by every known client and required of none.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from headrace.errors import LimitExceeded, WireError
from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire.sniff import Sniff

MAGIC: Final = 0xAF
VERSION: Final = 0x01
BINARY: Final = 0x01
GZIP: Final = 0x02
COMPRESSION_MASK: Final = 0x0E

HEADER = struct.Struct(">BBBBI")
HEADER_BYTES: Final = HEADER.size
assert HEADER_BYTES == 8, "the drawing says 8"

_GZIP_WINDOW: Final = 31
"""zlib's `wbits` for a gzip wrapper with the largest window."""


def sniff(first: bytes) -> Sniff:
    """Detect a FlyMQ peer by the magic alone, so that a wrong version still gets its ERROR frame."""
    if not first:
        return Sniff.MORE
    return Sniff.YES if first[0] == MAGIC else Sniff.NO


def frame(opcode: int, payload: bytes, flags: int = BINARY) -> bytes:
    """Return one frame. Raises `LimitExceeded` for a payload that every peer would reject."""
    if len(payload) > FLYMQ_PAYLOAD_BYTES_MAX:
        raise LimitExceeded(f"a message of {len(payload)} bytes exceeds the {FLYMQ_PAYLOAD_BYTES_MAX} of a frame")
    return HEADER.pack(MAGIC, VERSION, opcode, flags, len(payload)) + payload


class InflatedTooLarge(WireError):
    """The decompressed payload exceeds its limit."""


def inflate(payload: bytes, bytes_max: int = FLYMQ_PAYLOAD_BYTES_MAX) -> bytes:
    """Decompress gzip without holding more than `bytes_max` + 1 bytes of output.

    Raises `InflatedTooLarge`, `WireError`. The payload is one gzip member: many concatenated members would make a small frame expensive.
    """
    stream = zlib.decompressobj(_GZIP_WINDOW)
    try:
        plain = stream.decompress(payload, bytes_max + 1)
    except zlib.error as error:
        raise WireError("compressed payload is not gzip") from error
    if len(plain) > bytes_max:
        raise InflatedTooLarge(f"compressed payload exceeds {bytes_max} bytes")
    if not stream.eof:
        raise WireError("compressed payload is cut short")
    if stream.unused_data:
        raise WireError("compressed payload has bytes after its end")
    return plain


def deflate(payload: bytes) -> bytes:
    """Compress the payload as one gzip member without a timestamp, so that equal input gives equal bytes."""
    stream = zlib.compressobj(wbits=_GZIP_WINDOW)
    return stream.compress(payload) + stream.flush()
