"""Adjacent COMMIT, PRODUCE_DELAYED and PRODUCE_WITH_TTL frames: one message, decoded exactly as the frames one by one."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from headrace.wire.flymq import Opcode, ReplyDecoder, RequestDecoder, decode_reply, encode_reply, encode_request
from headrace.wire.flymq.advanced_messages import DelayedBatch, ProduceDelayed, ProduceWithTtl, Scheduled
from headrace.wire.flymq.messages import Commit, CommitBatch, ProduceBatch, ReplyFrame, Request
from headrace.wire.flymq.timed import encode_scheduled

from .samples import chunks, decoded, raw

MAKERS: list[tuple[Callable[[int], Request], type]] = [
    (lambda number: ProduceDelayed("orders", b"value %d" % number, 60_000), DelayedBatch),
    (lambda number: Commit("orders", "group", number % 3, number), CommitBatch),
    (lambda number: ProduceDelayed("orders", b"value %d" % number, number - 5), DelayedBatch),
    (lambda number: ProduceWithTtl("orders", b"value %d" % number, number - 5), ProduceBatch),
]


@pytest.mark.parametrize(("make", "kind"), MAKERS)
@pytest.mark.parametrize("count", [4, 15, 16, 17, 80, 81, 500])
def test_adjacent_frames_come_out_as_one_batch(make: Callable[[int], Request], kind: type, count: int) -> None:
    requests = [make(number) for number in range(count)]
    stream = b"".join(map(encode_request, requests))
    (batch,) = RequestDecoder().feed(stream)
    assert type(batch) is kind
    assert decoded([stream]) == requests


@pytest.mark.parametrize(("make", "kind"), MAKERS)
def test_few_frames_come_out_one_by_one(make: Callable[[int], Request], kind: type) -> None:
    requests = [make(number) for number in range(3)]
    assert RequestDecoder().feed(b"".join(map(encode_request, requests))) == requests


@pytest.mark.parametrize("seed", range(30))
def test_random_mixtures_decode_alike_however_they_are_cut(seed: int) -> None:
    dice = random.Random(seed)
    requests: list[Request] = []
    for _ in range(20):
        topic, odd = dice.choice(["a", "b"]), dice.random() < 0.2
        for _ in range(dice.randint(1, 30)):
            value, time = dice.randbytes(dice.randint(0, 20)), dice.randint(-10, 1 << 40)
            key, partition = (dice.randbytes(2), dice.randint(-1, 3)) if odd and dice.random() < 0.3 else (b"", -1)
            is_delayed = not odd or dice.random() < 0.5
            kind: type[ProduceDelayed | ProduceWithTtl] = ProduceDelayed if is_delayed else ProduceWithTtl
            requests.append(kind(topic, value, time, key, partition))
        for _ in range(dice.randint(0, 30)):
            transaction = "txn-1" if odd and dice.random() < 0.3 else ""
            requests.append(
                Commit(topic, dice.choice(["g", "h"]) if odd else "g", dice.randint(-1, 5), dice.randint(0, 1 << 60), transaction)
            )
    stream = b"".join(map(encode_request, requests))
    singly = [event for request in requests for event in decoded([encode_request(request)])]
    assert decoded([stream]) == singly
    assert decoded(chunks(stream, seed, longest=2000)) == singly


def test_frames_that_lie_about_their_lengths_end_the_batch() -> None:
    good = [encode_request(ProduceWithTtl("t", b"value", 7))] * 5
    for bad in (raw(Opcode.PRODUCE_WITH_TTL, b"\x00\x01t\xff\xff\xff\xff" + bytes(8)), raw(Opcode.COMMIT, b"\x00\x01t\xff\xff")):
        events = RequestDecoder().feed(b"".join([*good, bad, *good]))
        assert [type(event).__name__ for event in events] == ["ProduceBatch", "Malformed", "ProduceBatch"]


def test_a_frame_without_key_and_partition_is_part_of_the_batch() -> None:
    short = raw(Opcode.PRODUCE_WITH_TTL, b"\x00\x01t\x00\x00\x00\x05value" + (7).to_bytes(8, "big"))
    (batch,) = RequestDecoder().feed(short * 6)
    assert batch == ProduceBatch("t", [b"value"] * 6, ttls=[7] * 6)


@pytest.mark.parametrize("step", [0, 1])
def test_the_replies_to_delayed_messages_are_those_of_one_message_each(step: int) -> None:
    rows = [Scheduled("t", number % 2 * step, 0, 99, -1, 7 + number * step, f"{number:032x}", 1000 + number * step) for number in range(5)]
    frames = encode_scheduled(
        "t",
        [row.partition for row in rows],
        99,
        [row.key_size for row in rows],
        [row.value_size for row in rows],
        [row.message for row in rows],
        [row.deliver_at for row in rows],
    )
    assert frames == b"".join(encode_reply(Opcode.PRODUCE_DELAYED, row) for row in rows)
    replies = ReplyDecoder().feed(frames)
    assert [decode_reply(reply) for reply in replies if isinstance(reply, ReplyFrame)] == rows


def with_tail(topic: str, partition: int, time: int = 7) -> bytes:
    """A frame with an empty key and a partition: the size does not depend on the arguments."""
    payload = len(topic).to_bytes(2, "big") + topic.encode() + struct.pack(">I5sqIi", 5, b"12345", time, 0, partition)
    return raw(Opcode.PRODUCE_DELAYED, payload)


@pytest.mark.parametrize("odd", [with_tail("ordert", -1), with_tail("orders", 3), with_tail("orders", -1, 8)])
@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 40, 79, 80, 99])
def test_another_frame_of_the_same_size_comes_out_as_it_is(odd: bytes, at: int) -> None:
    frames = [with_tail("orders", -1)] * 100
    frames[at] = odd
    singly = [event for frame in frames for event in decoded([frame])]
    assert decoded([b"".join(frames)]) == singly and len(set(singly)) == 2
