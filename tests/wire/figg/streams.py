"""Golden vectors, and decoding in a form that does not depend on how the bytes were cut."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from headrace.errors import WireError
from headrace.wire.figg import AckBatch, ClientMessage, DataBatch, Decoder, PublishBatch, ServerMessage

Flat: TypeAlias = tuple[object, ...]

ATTACH_FOO_LATEST = bytes.fromhex("0001 0001 00000011 0000 00000003 666f6f 0000000000000000")
ATTACH_FOO_FROM_7 = bytes.fromhex("0001 0001 00000011 8000 00000003 666f6f 0000000000000007")
ATTACHED_FOO_0 = bytes.fromhex("0002 0001 0000000f 00000003 666f6f 0000000000000000")
DETACH_FOO = bytes.fromhex("0003 0001 00000007 00000003 666f6f")
DETACHED_FOO = bytes.fromhex("0004 0001 00000007 00000003 666f6f")
PUBLISH_FOO_0_BAR = bytes.fromhex("0005 0001 00000016 00000003 666f6f 0000000000000000 00000003 626172")
ACK_0 = bytes.fromhex("0006 0001 00000008 0000000000000000")
DATA_FOO_7_BAR = bytes.fromhex("0007 0001 00000016 00000003 666f6f 0000000000000007 00000003 626172")
PING_12345 = bytes.fromhex("0008 0001 00000008 0000000000003039")
PONG_12345 = bytes.fromhex("0009 0001 00000008 0000000000003039")


def flat(message: ClientMessage | ServerMessage) -> Iterator[Flat]:
    """Return the frames of a message one by one. The size of a batch depends on the cuts, its frames do not."""
    match message:
        case PublishBatch(topic, numbers, values) | DataBatch(topic, numbers, values):
            yield from ((type(message).__name__, topic, number, value) for number, value in zip(numbers, values, strict=True))
        case AckBatch(seqs):
            yield from (("ACK", seq) for seq in seqs)
        case _:
            yield (message,)


def flat_messages(decoder: Decoder[ClientMessage] | Decoder[ServerMessage], chunks: Iterable[bytes]) -> list[Flat]:
    """Return everything that the chunks decode to. An error is the last entry."""
    found: list[Flat] = []
    try:
        for chunk in chunks:
            for message in decoder.feed(chunk):
                found.extend((_comparable(entry)) for entry in flat(message))
    except WireError as failure:
        found.append(("refused", str(failure)))
    return found


def _comparable(entry: Flat) -> Flat:
    return tuple(repr(part) if not isinstance(part, bytes | int | str) else part for part in entry)


def cut(stream: bytes, size: int) -> list[bytes]:
    return [stream[at : at + size] for at in range(0, len(stream), size)]


def mutate(stream: bytes, chance: random.Random) -> bytes:
    """A stream with a few bytes changed, lost, doubled or moved."""
    mutated = bytearray(stream)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(mutated))
        match chance.randrange(4):
            case 0:
                mutated[at] = chance.randrange(256)
            case 1:
                del mutated[at : at + chance.randrange(1, 9)]
            case 2:
                mutated[at:at] = mutated[at : at + chance.randrange(1, 30)]
            case _:
                mutated[at : at + 4] = chance.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1", b"\x7f\xff\xff\xff"])
        if not mutated:
            mutated += b"\0"
    return bytes(mutated)
