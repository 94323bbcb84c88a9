"""ERROR frames (0xFF).

    specification    false bool, message s16
    original         code u32, message s16

A client of the original at the specification's version decodes the whole payload as UTF-8, and a length whose low byte is 0x80 or more is
not UTF-8: messages are cut to 127 bytes. Its other releases read the code. A received frame may have either form or be the bare text that
the original's server sends. The lengths tell them apart, because codes are below 256.
"""

from __future__ import annotations

import struct
from typing import Final

from headrace.wire.flymq.framing import frame
from headrace.wire.flymq.messages import Failure
from headrace.wire.flymq.opcodes import Dialect, Opcode

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
    head = _SDK.pack(failure.code, len(message)) if dialect is Dialect.SDK else _SPEC.pack(0, len(message))
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
