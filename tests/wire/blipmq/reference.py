"""A simple reference decoder: one frame at a time, no batches, no blocks. Also generates streams for both decoders."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator

from headrace.errors import WireError
from headrace.wire.blipmq import AckBatch, Decoder, Message, PollBatch, PublishBatch, encoder

END = "closed"


def singles(messages: Iterable[Message | str]) -> Iterator[Message | str]:
    """Split every batch, so that two decodings can be compared."""
    for message in messages:
        match message:
            case PublishBatch(qos, topic, cids, values):
                yield from (PublishBatch(qos, topic, [cid], [value]) for cid, value in zip(cids, values, strict=True))
            case AckBatch(subscription, cids):
                yield from (AckBatch(subscription, [cid]) for cid in cids)
            case PollBatch(subscription, cids):
                yield from (PollBatch(subscription, [cid]) for cid in cids)
            case _:
                yield message


def decode(chunks: Iterable[bytes]) -> list[Message | str]:
    """Return what the decoder returns for these chunks; `END` where it closes."""
    decoder, found = Decoder(), list[Message | str]()
    try:
        for chunk in chunks:
            found.extend(decoder.feed(chunk))
    except WireError:
        found.append(END)
    return found


def one_by_one(stream: bytes) -> list[Message | str]:
    """The stream cut into frames by the length words alone, and each frame fed to a decoder of its own."""
    found, position = list[Message | str](), 0
    while len(stream) - position >= 4:
        (length,) = struct.unpack_from(">I", stream, position)
        if not 9 <= length <= 16 * 1024 * 1024:
            return [*found, END]
        if len(stream) - position < 4 + length:
            break
        found += decode([stream[position : position + 4 + length]])
        if found[-1] == END:
            break
        position += 4 + length
    return found


def cuts(stream: bytes, seed: random.Random) -> list[bytes]:
    """Split the stream into chunks of random sizes, including empty ones."""
    at = sorted(seed.randint(0, len(stream)) for _ in range(seed.randint(0, 12)))
    return [stream[begin:end] for begin, end in zip([0, *at], [*at, len(stream)], strict=True)]


def well_formed(seed: random.Random) -> bytes:
    """Return a stream of batches of every kind, many long enough for the block path, some with a frame that differs."""
    parts = list[bytes]()
    for _ in range(seed.randint(1, 6)):
        count, cid = seed.choice((1, 2, 7, 63, 64, 65, 90, 200)), seed.choice((0, 1, 1 << 40, (1 << 64) - 300))
        cids = [cid + index for index in range(count)]
        match seed.randint(0, 7):
            case 0 | 1:
                size, qos, topic = seed.choice((0, 1, 5, 100)), seed.choice((0, 1, 9)), seed.choice(("a", "b", "", "été"))
                parts.append(encoder.publishes(qos, topic, cids, [seed.randbytes(size) for _ in cids]))
            case 2:
                parts.append(encoder.publishes(1, "a", cids, [seed.randbytes(seed.choice((3, 259))) for _ in cids]))
            case 3:
                parts.append(encoder.polls(seed.choice((0, 1, 2)), cids))
            case 4:
                parts.append(encoder.acks(seed.choice((0, 1, 2)), cids))
            case 5:
                parts.append(encoder.hello(cid) + encoder.auth(cid, b"key") + encoder.subscribe(cid, "a", 1))
            case 6:
                parts.append(b"".join(encoder.ping(cid) + encoder.pong(cid) for cid in cids[:3]))
            case _:
                parts.append(encoder.nacks(cids[:3], 404, "unknown subscription or delivery tag"))
    return b"".join(parts)
