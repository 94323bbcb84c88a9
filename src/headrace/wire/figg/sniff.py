"""Detection of Figg. The protocol has no handshake: the first bytes of a connection are a normal message."""

from __future__ import annotations

from typing import Final

from headrace.limits import FIGG_TOPIC_BYTES_MAX, FRAME_BYTES_DEFAULT_MAX
from headrace.wire.figg.frames import HEADER, HEADER_BYTES, PAYLOAD_BYTES, SIZE, VERSION, Kind
from headrace.wire.sniff import Sniff

_OPENERS: Final = (Kind.ATTACH, Kind.DETACH, Kind.PUBLISH, Kind.PING)
_WORDS: Final = tuple(kind.to_bytes(2, "big") + VERSION.to_bytes(2, "big") for kind in _OPENERS)


def sniff(first: bytes) -> Sniff:
    """Check type, version, payload size and topic size. At most 12 bytes are needed."""
    if not any(word.startswith(first[: len(word)]) for word in _WORDS):
        return Sniff.NO
    if len(first) < HEADER_BYTES:
        return Sniff.MORE
    kind, _, payload_bytes = HEADER.unpack_from(first)
    low, high = PAYLOAD_BYTES[kind]
    if not low <= payload_bytes <= min(high, FRAME_BYTES_DEFAULT_MAX):
        return Sniff.NO
    if kind == Kind.PING:
        return Sniff.YES
    at = HEADER_BYTES + (2 if kind == Kind.ATTACH else 0)
    if len(first) < at + SIZE.size:
        return Sniff.MORE
    (topic_bytes,) = SIZE.unpack_from(first, at)
    return Sniff.YES if topic_bytes <= min(FIGG_TOPIC_BYTES_MAX, payload_bytes - low) else Sniff.NO
