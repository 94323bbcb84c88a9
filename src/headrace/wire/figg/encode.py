"""Encoder of Figg messages: columns in, one block of bytes out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from headrace.columns import equal_rows, equal_size
from headrace.wire.figg.frames import FROM_OFFSET, HEADER, NUMBER, RUN_FIELDS_BYTES, SIZE, VERSION, Kind

_FIXED = struct.Struct(">HHIQ")
_ACK_HEAD: Final = HEADER.pack(Kind.ACK, VERSION, NUMBER.size)


def attach(topic: str, offset: int | None = None) -> bytes:
    field = _topic_field(topic)
    flags = 0 if offset is None else FROM_OFFSET
    payload = b"".join((flags.to_bytes(2, "big"), field, NUMBER.pack(offset or 0)))
    return HEADER.pack(Kind.ATTACH, VERSION, len(payload)) + payload


def attached(topic: str, offset: int) -> bytes:
    payload = _topic_field(topic) + NUMBER.pack(offset)
    return HEADER.pack(Kind.ATTACHED, VERSION, len(payload)) + payload


def detach(topic: str) -> bytes:
    field = _topic_field(topic)
    return HEADER.pack(Kind.DETACH, VERSION, len(field)) + field


def detached(topic: str) -> bytes:
    field = _topic_field(topic)
    return HEADER.pack(Kind.DETACHED, VERSION, len(field)) + field


def publish(topic: str, seqs: Sequence[int], values: Sequence[bytes]) -> bytes:
    """Return one PUBLISH for each value."""
    return _batch(Kind.PUBLISH, topic, seqs, values)


def data(topic: str, offsets: Sequence[int], values: Sequence[bytes]) -> bytes:
    """Return one DATA for each value."""
    return _batch(Kind.DATA, topic, offsets, values)


def ack(seq: int) -> bytes:
    return _FIXED.pack(Kind.ACK, VERSION, NUMBER.size, seq)


def acks(seqs: Sequence[int]) -> bytes:
    """Return one ACK for each number."""
    return b"".join([_ACK_HEAD + number for number in map(NUMBER.pack, seqs)])


def ping(timestamp: int) -> bytes:
    return _FIXED.pack(Kind.PING, VERSION, NUMBER.size, timestamp)


def pong(timestamp: int) -> bytes:
    return _FIXED.pack(Kind.PONG, VERSION, NUMBER.size, timestamp)


def _topic_field(topic: str) -> bytes:
    name = topic.encode()
    return SIZE.pack(len(name)) + name


def _batch(kind: Kind, topic: str, numbers: Sequence[int], values: Sequence[bytes]) -> bytes:
    """If all values have one size, all frames share their head, and no Python code runs for each frame."""
    assert len(numbers) == len(values), "columns of one batch have one length"
    field = _topic_field(topic)
    rest = RUN_FIELDS_BYTES - SIZE.size + len(field)
    if (size := equal_size(values)) is not None:
        head = HEADER.pack(kind, VERSION, rest + size) + field
        return bytes(equal_rows(values, size, head + bytes(NUMBER.size) + SIZE.pack(size), numbers=numbers, numbers_at=len(head)))
    frames: list[bytes] = []
    append, pack = frames.append, _head(len(field)).pack
    for number, value in zip(numbers, values, strict=True):
        size = len(value)
        append(pack(kind, VERSION, rest + size, field, number, size))
        append(value)
    return b"".join(frames)


@lru_cache(maxsize=256)
def _head(field_bytes: int) -> struct.Struct:
    return struct.Struct(f">HHI{field_bytes}sQI")
