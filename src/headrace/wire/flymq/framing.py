"""FlyMQ frames.

    0       1         2        3       4        8
    +-------+---------+--------+-------+--------+---------+
    | magic | version | opcode | flags | length | payload |     all integers big-endian
    | AF    | 01      | u8     | u8    | u32    | length  |
    +-------+---------+--------+-------+--------+---------+

`length` counts the payload alone. Requests and replies have the same format. A reply carries the opcode of its request, except for an
error, which is 0xFF. Of the flags only bits 1 to 3 are used: they name a compression of the whole payload. Only gzip is supported.
Bit 0 ("binary") is set by every known client and required of none.

ERROR frames (0xFF).

    specification    false bool, message s16
    sdk              code u32, message s16
    go               message

The original's server sends bare text, and its Go client prints the whole payload: the other two forms have control characters in front
there. Its Python client at the specification's version decodes the whole payload as UTF-8, and a length whose low byte is 0x80 or more is
not UTF-8: messages are cut to 127 bytes. Its later Python and Java clients read the code. A received frame may have any form. The lengths
tell them apart, because codes are below 256.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from headrace.errors import LimitExceeded, WireError
from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire.flymq.messages import Failure
from headrace.wire.flymq.opcodes import Dialect, Opcode
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


def answer_bytes(received: bytes) -> int:
    """Return the size of the first frame in these bytes, 0 if it is incomplete. Raises `WireError` if it refuses a login."""
    if len(received) < HEADER_BYTES:
        return 0
    _, _, opcode, _, length = HEADER.unpack_from(received)
    if len(received) < HEADER_BYTES + length:
        return 0
    if opcode == Opcode.AUTH_RESPONSE and not received[HEADER_BYTES : HEADER_BYTES + 1] == b"\x01":
        raise WireError("the login was refused")
    return HEADER_BYTES + int(length)


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


MESSAGE_BYTES_MAX: Final = 127

_SPEC, _SDK = struct.Struct(">BH"), struct.Struct(">IH")


def clip(message: str) -> bytes:
    """Return the message in at most 127 bytes, cut between characters."""
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= MESSAGE_BYTES_MAX:
        return encoded
    return encoded[: MESSAGE_BYTES_MAX - 3].decode("utf-8", "ignore").encode() + b"..."


def encode_failure(failure: Failure, dialect: Dialect) -> bytes:
    """Return the ERROR frame."""
    message = clip(failure.message)
    match dialect:
        case Dialect.SPEC:
            head = _SPEC.pack(0, len(message))
        case Dialect.SDK:
            head = _SDK.pack(failure.code, len(message))
        case Dialect.GO:
            head = b""
    return frame(Opcode.ERROR, head + message)


def decode_failure(payload: bytes) -> Failure:
    """Decode any form of an ERROR. Never raises."""
    size = len(payload)
    if size >= _SPEC.size:
        success, length = _SPEC.unpack_from(payload)
        if success == 0 and length == size - _SPEC.size:
            return Failure(payload[_SPEC.size :].decode("utf-8", "replace"))
    if size >= _SDK.size:
        code, length = _SDK.unpack_from(payload)
        if length == size - _SDK.size:
            return Failure(payload[_SDK.size :].decode("utf-8", "replace"), code)
    return Failure(payload.decode("utf-8", "replace"))
