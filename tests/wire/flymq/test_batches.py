"""Batches of PRODUCE: the fast path decodes exactly what the slow path decodes."""

from __future__ import annotations

import random

import pytest

from headrace.errors import InvalidRequest, WireError
from headrace.wire.flymq import Opcode, ReplyDecoder, RequestDecoder, encode_reply, encode_request
from headrace.wire.flymq.framing import HEADER
from headrace.wire.flymq.messages import AUTO, Malformed, ProduceBatch, RecordMetadataBatch, RequestEvent
from headrace.wire.flymq.produce import read_produce
from headrace.wire.flymq.reader import Reader

from .samples import chunks, decoded, flat, raw


def slowly(stream: bytes) -> list[object]:
    """Each frame on its own, without any of the short cuts."""
    events: list[RequestEvent] = []
    position = 0
    while position < len(stream):
        length = HEADER.unpack_from(stream, position)[4]
        try:
            events.append(read_produce(Reader(stream, position + 8, position + 8 + length))[0])
        except WireError as error:
            events.append(Malformed(Opcode.PRODUCE, str(error)))
        position += 8 + length
    return flat(events)


def test_adjacent_records_for_one_topic_come_out_as_one_batch() -> None:
    batch = ProduceBatch("orders", [b"%03d" % number for number in range(1000)])
    assert RequestDecoder().feed(encode_request(batch)) == [batch]


def test_another_topic_begins_another_batch() -> None:
    batches = [ProduceBatch("a", [b"1", b"2"]), ProduceBatch("b", [b"3"]), ProduceBatch("a", [b"4"])]
    assert RequestDecoder().feed(b"".join(map(encode_request, batches))) == batches


def test_a_topic_that_begins_like_another_is_another() -> None:
    batches = [ProduceBatch("orders", [b"1"]), ProduceBatch("orders-eu", [b"2"]), ProduceBatch("orders", [b"3"])]
    assert RequestDecoder().feed(b"".join(map(encode_request, batches))) == batches


def test_a_request_between_records_ends_the_batch_and_keeps_its_place() -> None:
    batch = ProduceBatch("a", [b"1"] * 40)
    events = RequestDecoder().feed(encode_request(batch) + raw(0x08, b"") + encode_request(batch))
    assert [type(event).__name__ for event in events] == ["ProduceBatch", "ListTopics", "ProduceBatch"]
    assert events[0] == events[2] == batch


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 500])
@pytest.mark.parametrize("partition", [AUTO, 0, 7])
def test_batches_of_any_length_keep_every_record(count: int, partition: int) -> None:
    values = [b"%05d" % number for number in range(count)]
    batch = ProduceBatch("t", values, None, None if partition == AUTO else [partition] * count)
    assert RequestDecoder().feed(encode_request(batch)) == [batch]


@pytest.mark.parametrize("odd", [0, 1, 14, 15, 16, 17, 30, 50, 79, 80, 99])
@pytest.mark.parametrize("kind", ["longer", "empty", "keyed", "partition", "no partition", "bytes behind", "lying"])
def test_one_odd_frame_among_equal_ones_is_read_for_what_it_is(odd: int, kind: str) -> None:
    frames = [encode_request(ProduceBatch("t", [b"%05d" % number])) for number in range(100)]
    payload = frames[odd][8:]
    frames[odd] = {
        "longer": encode_request(ProduceBatch("t", [b"longer than that"])),
        "empty": encode_request(ProduceBatch("t", [b""])),
        "keyed": encode_request(ProduceBatch("t", [b"00000"], [b"key"])),
        "partition": encode_request(ProduceBatch("t", [b"00000"], None, [3])),
        "no partition": raw(0x01, payload[:-4]),
        "bytes behind": raw(0x01, payload + b"!"),
        "lying": raw(0x01, payload[:10] + b"\x7f" + payload[11:]),
    }[kind]
    stream = b"".join(frames)
    assert decoded([stream]) == slowly(stream)


def test_values_that_look_like_frames_are_values() -> None:
    inner = encode_request(ProduceBatch("t", [bytes(20)]))
    separator = inner[-4:] + inner[:-24]
    for hidden in (inner, inner[4:], inner * 3, separator + bytes(30), bytes(7) + separator):
        values = [hidden] * 50
        batch = ProduceBatch("t", values)
        assert RequestDecoder().feed(encode_request(batch)) == [batch]


def test_a_value_holding_the_separator_of_its_own_stretch_is_not_cut() -> None:
    size = 100
    plain = encode_request(ProduceBatch("t", [bytes(size)]))
    separator = plain[-4:] + plain[: len(plain) - size - 4]
    values = [(b"%02d" % number + separator).ljust(size, b".") for number in range(64)]
    values[1] = bytes(size)
    assert RequestDecoder().feed(encode_request(ProduceBatch("t", values))) == [ProduceBatch("t", values)]


@pytest.mark.parametrize("seed", range(60))
def test_random_mixtures_are_read_as_the_slow_way_reads_them(seed: int) -> None:
    dice = random.Random(seed)
    stream = b""
    for _ in range(dice.randint(1, 6)):
        count, size, key_size = dice.randint(1, 120), dice.randint(0, 40), dice.choice([0, 0, 5])
        same = dice.random() < 0.6
        values = [dice.randbytes(size if same else dice.randint(0, 40)) for _ in range(count)]
        keys: list[bytes | None] | None = [dice.randbytes(key_size if same else dice.randint(0, 6)) or None for _ in range(count)]
        partitions = dice.choice([None, [dice.randint(-1, 2)] * count, [dice.randint(-1, 9) for _ in range(count)]])
        part = encode_request(ProduceBatch(dice.choice(["a", "b"]), values, dice.choice([None, keys]), partitions))
        if dice.random() < 0.3:
            place = dice.randrange(len(part))
            lied = part[:place] + dice.randbytes(1) + part[place + 1 :]
            part = lied if frames_hold(lied) else part
        stream += part
    assert decoded([stream]) == slowly(stream)
    assert decoded(chunks(stream, seed, longest=3000)) == slowly(stream)


def frames_hold(stream: bytes) -> bool:
    """Is the damage inside payloads only?"""
    position = 0
    while position < len(stream):
        if len(stream) - position < 8 or not stream.startswith(b"\xaf\x01\x01\x01", position):
            return False
        length = HEADER.unpack_from(stream, position)[4]
        reader = Reader(stream, position + 8, min(position + 8 + length, len(stream)))
        try:
            read_produce(reader)
        except WireError:
            return False
        position += 8 + length
    return position == len(stream)


@pytest.mark.parametrize("flags", [0x00, 0x01, 0x10, 0xF1])
def test_flags_without_compression_bits_are_accepted_whatever_they_are(flags: int) -> None:
    frame = encode_request(ProduceBatch("t", [b"value"]))
    frame = frame[:3] + bytes([flags]) + frame[4:]
    assert decoded([frame * 40]) == [("t", None, b"value", -1)] * 40


def test_batches_take_over_each_others_columns_when_they_join() -> None:
    batch = ProduceBatch("t", [b"1"])
    batch.extend(ProduceBatch("t", [b"2"], [b"k"]))
    batch.extend(ProduceBatch("t", [b"3"], None, [4]))
    batch.extend(ProduceBatch("t", [b"5"]))
    assert batch == ProduceBatch("t", [b"1", b"2", b"3", b"5"], [None, b"k", None, None], [AUTO, AUTO, 4, AUTO])


@pytest.mark.parametrize("topic_bytes", [0, 1, 249, 65_535])
def test_topics_of_any_length_are_read(topic_bytes: int) -> None:
    batch = ProduceBatch("t" * topic_bytes, [b"1", b"2"], [b"k", None])
    assert RequestDecoder().feed(encode_request(batch)) == [batch]


def test_an_empty_batch_and_a_topic_too_long_are_refused_before_they_reach_the_wire() -> None:
    with pytest.raises(InvalidRequest):
        encode_request(ProduceBatch("t", []))
    with pytest.raises(InvalidRequest):
        encode_request(ProduceBatch("t" * 65_536, [b""]))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 80, 81, 1000])
def test_replies_to_a_batch_come_back_as_one_batch(count: int) -> None:
    batch = RecordMetadataBatch("t", [2] * count, list(range(count)), [7] * count, [-1] * count, list(range(count)))
    assert ReplyDecoder().feed(encode_reply(Opcode.PRODUCE, batch)) == [batch]


def test_a_reply_with_bytes_behind_its_fields_waits_for_the_caller() -> None:
    payload = encode_reply(Opcode.PRODUCE, RecordMetadataBatch("t", [0], [0], [0], [0], [0]))[8:]
    (event,) = ReplyDecoder().feed(raw(0x01, payload + b"!"))
    assert not isinstance(event, RecordMetadataBatch)
