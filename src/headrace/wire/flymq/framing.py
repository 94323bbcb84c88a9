"""FlyMQ frames.

    0       1         2        3       4        8
    +-------+---------+--------+-------+--------+---------+
    | magic | version | opcode | flags | length | payload |     all integers big-endian
    | AF    | 01      | u8     | u8    | u32    | length  |
    +-------+---------+--------+-------+--------+---------+

`length` counts the payload alone. Requests and replies look alike; a reply carries the opcode of its request, except for a failure,
which is 0xFF. Of the flags only bits 1 to 3 matter: they name a compression of the whole payload, and gzip is the only one spoken.
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
"""What zlib wants to hear for "gzip wrapper, largest window"."""


def sniff(first: bytes) -> Sniff:
    """Is this a FlyMQ peer? The magic alone decides, so that a wrong version still gets its ERROR frame."""
    if not first:
        return Sniff.MORE
    return Sniff.YES if first[0] == MAGIC else Sniff.NO


def frame(opcode: int, payload: bytes, flags: int = BINARY) -> bytes:
    """One frame. Raises `LimitExceeded` for a payload that every peer would refuse."""
    if len(payload) > FLYMQ_PAYLOAD_BYTES_MAX:
        raise LimitExceeded(f"a message of {len(payload)} bytes exceeds the {FLYMQ_PAYLOAD_BYTES_MAX} of a frame")
    return HEADER.pack(MAGIC, VERSION, opcode, flags, len(payload)) + payload


class InflatedTooLarge(WireError):
    """The payload grows beyond what it may."""


def inflate(payload: bytes, bytes_max: int = FLYMQ_PAYLOAD_BYTES_MAX) -> bytes:
    """Undo gzip without ever holding more than `bytes_max` + 1 bytes of output.

    Raises `InflatedTooLarge`, `WireError`.
    One gzip member is the whole payload: concatenated members would let a small frame ask for endless restarts.
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
    """The payload as one gzip member, without a time stamp, so that equal input gives equal bytes."""
    stream = zlib.compressobj(wbits=_GZIP_WINDOW)
    return stream.compress(payload) + stream.flush()
