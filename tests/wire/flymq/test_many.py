"""PRODUCE frames for many topics in turn: one message, decoded exactly as the frames one by one."""

from __future__ import annotations

import random

import pytest

from headrace.wire.flymq import RequestDecoder, encode_request
from headrace.wire.flymq.many import _KNOWN_MAX, _TOPICS, MANY_MIN, encode_metadata_each
from headrace.wire.flymq.messages import AUTO, ProduceBatch, ProduceMany
from headrace.wire.flymq.produce import encode_metadata_one

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


@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 198, 199])
@pytest.mark.parametrize("place", ["opcode", "size of the key", "partition"])
def test_one_other_frame_among_many_of_the_same_sizes_is_decoded_as_it_is(at: int, place: str) -> None:
    frames = [bytearray(encode_request(ProduceBatch(f"t-{number % 7}", [b"%04d" % number]))) for number in range(200)]
    position = {"opcode": 2, "size of the key": 8 + 2 + 3 + 3, "partition": len(frames[at]) - 1}[place]
    frames[at][position] ^= 1
    one_by_one = [event for frame in frames for event in RequestDecoder().feed(bytes(frame))]
    assert flat(RequestDecoder().feed(b"".join(frames))) == flat(one_by_one)


def test_names_too_long_for_a_topic_and_more_names_than_are_kept_come_out_as_they_are() -> None:
    for names in (["x" * 300, "y" * 300], [f"topic-{number:05d}" for number in range(_KNOWN_MAX + 100)]):
        stream = b"".join(encode_request(ProduceBatch(name, [b"v"])) for name in names * (1 if len(names) > 2 else 20))
        events = RequestDecoder().feed(stream)
        found = [topic for event in events if isinstance(event, ProduceMany) for topic in event.topics]
        assert found == names * (1 if len(names) > 2 else 20)
    assert len(_TOPICS) <= _KNOWN_MAX and max(map(len, _TOPICS)) <= 256


@pytest.mark.parametrize("count", [1, 15, 16, 100])
@pytest.mark.parametrize("names", [("one", "two"), ("one", "three"), ("ä", "one")], ids=["one size", "two sizes", "not ASCII"])
@pytest.mark.parametrize("other", ["", "keys", "partitions", "sizes", "failed"])
def test_replies_to_records_for_many_topics_are_those_of_each(count: int, names: tuple[str, str], other: str) -> None:
    topics = [names[index % 2] for index in range(count)]
    partitions = [index % 3 if other == "partitions" else 2 for index in range(count)]
    offsets = [index * 1_000_003 for index in range(count)]
    keys = [index % 4 for index in range(count)] if other == "keys" else None
    sizes = [index % 5 if other == "sizes" else 100 for index in range(count)]
    failed = {0: b"first", count - 1: b"last"} if other == "failed" else {}
    rows = zip(topics, partitions, offsets, keys or [AUTO] * count, sizes, strict=True)
    expected = [encode_metadata_one(topic, partition, offset, 77, key, size) for topic, partition, offset, key, size in rows]
    for index, frame in failed.items():
        expected[index] = frame
    assert encode_metadata_each(topics, partitions, offsets, 77, keys, sizes, failed) == b"".join(expected)
