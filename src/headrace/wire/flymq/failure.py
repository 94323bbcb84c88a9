"""ERROR frames (0xFF).

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
