"""PRODUCE frames for many topics in turn: one message, decoded exactly as the frames one by one."""

from __future__ import annotations

import random

import pytest

from headrace.wire.flymq import RequestDecoder, encode_request
from headrace.wire.flymq.many import MANY_MIN
from headrace.wire.flymq.messages import ProduceBatch, ProduceMany

from .samples import chunks, decoded, flat, raw


def in_turn(topics: int, count: int) -> bytes:
    return b"".join(encode_request(ProduceBatch(f"t-{number % topics}", [b"%04d" % number])) for number in range(count))


@pytest.mark.parametrize("topics", [2, 9, 13])
def test_records_for_topics_in_turn_come_out_as_one_message(topics: int) -> None:
    (many,) = RequestDecoder().feed(in_turn(topics, 500))
    assert isinstance(many, ProduceMany)
    assert many.topics == [f"t-{number % topics}" for number in range(500)]
    assert many.values == [b"%04d" % number for number in range(500)]
    assert many.keys is None


def test_keys_stay_with_their_records() -> None:
    keys = [None if number % 3 else b"key %d" % number for number in range(100)]
    batches = [ProduceBatch(f"t-{number % 7}", [b"v"], [key] if key else None) for number, key in enumerate(keys)]
    (many,) = RequestDecoder().feed(b"".join(map(encode_request, batches)))
    assert isinstance(many, ProduceMany)
    assert many.keys == keys
    assert many.batches() == batches


def test_few_frames_are_one_batch_for_each_change_of_the_topic() -> None:
    events = RequestDecoder().feed(in_turn(2, MANY_MIN - 1))
    assert [type(event) for event in events] == [ProduceBatch] * (MANY_MIN - 1)


def test_a_named_partition_another_request_and_a_bad_topic_end_the_message_and_keep_their_place() -> None:
    for odd in (encode_request(ProduceBatch("t-1", [b"odd"], None, [3])), raw(0x08, b""), raw(0x01, b"\x00\x01\xff" + bytes(8))):
        stream = in_turn(5, 40) + odd + in_turn(5, 40)
        events = RequestDecoder().feed(stream)
        assert [type(event) for event in events[::2]] == [ProduceMany, ProduceMany]
        assert len(events) == 3


def test_a_long_stretch_of_one_topic_is_a_batch_again() -> None:
    events = RequestDecoder().feed(in_turn(3, 60) + encode_request(ProduceBatch("one", [b"%04d" % number for number in range(1000)])))
    assert isinstance(events[-1], ProduceBatch)
    assert len(events[-1]) > 900


@pytest.mark.parametrize("seed", range(20))
def test_random_topics_and_sizes_decode_alike_however_they_are_cut(seed: int) -> None:
    dice = random.Random(seed)
    batches = []
    for _ in range(300):
        key = dice.randbytes(dice.randint(1, 4)) if dice.random() < 0.1 else None
        batches.append(
            ProduceBatch(f"topic-{dice.randrange(4) ** 3}", [dice.randbytes(dice.choice([8, 8, 8, 30]))], [key] if key else None)
        )
    stream = b"".join(map(encode_request, batches))
    assert decoded([stream]) == flat(batches)
    assert decoded(chunks(stream, seed, longest=3000)) == flat(batches)
