from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import LimitExceeded, RecordTooLarge, WireError
from headrace.limits import BLIPMQ_FRAME_BYTES_MAX, BLIPMQ_LOGIN_FRAME_BYTES_MAX
from headrace.wire.blipmq import (
    AckBatch,
    Auth,
    Decoder,
    FrameType,
    Hello,
    Malformed,
    Message,
    Nack,
    Ping,
    PollBatch,
    Pong,
    PublishBatch,
    Subscribe,
    encoder,
)
from headrace.wire.blipmq.frames import GROUP_MODES
from tests.wire.blipmq.golden import GOLDEN
from tests.wire.blipmq.reference import END, cuts, decode, one_by_one, singles, well_formed


def frame(kind: int, cid: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBQ", 9 + len(payload), kind, cid) + payload


@pytest.mark.parametrize("name", GOLDEN)
def test_reference_bytes_decode_to_their_message_and_back(name: str) -> None:
    raw, message = GOLDEN[name]
    assert decode([raw]) == [message]
    assert encoder.encode(message) == raw


@pytest.mark.parametrize("name", GOLDEN)
def test_a_frame_cut_anywhere_decodes_to_the_same_message(name: str) -> None:
    raw, message = GOLDEN[name]
    for cut in range(1, len(raw)):
        decoder = Decoder()
        assert list(decoder.feed(raw[:cut])) == []
        assert decoder.held_bytes == cut
        assert list(decoder.feed(raw[cut:])) == [message]
        assert decoder.held_bytes == 0


def test_all_reference_frames_in_one_stream_decode_alike_whole_and_byte_by_byte() -> None:
    stream = b"".join(raw for raw, _ in GOLDEN.values())
    expected = [message for _, message in GOLDEN.values()]
    assert decode([stream]) == expected
    assert decode([stream[at : at + 1] for at in range(len(stream))]) == expected


def test_adjacent_publishes_of_one_qos_and_topic_are_one_batch() -> None:
    batches = [PublishBatch(1, "demo", [1, 2], [b"a", b""]), PublishBatch(0, "demo", [3], [b"c"]), PublishBatch(0, "demo2", [4], [b"d"])]
    assert decode([b"".join(map(encoder.encode, batches))]) == batches


def test_a_topic_that_continues_in_the_value_does_not_join_the_batch() -> None:
    stream = encoder.publishes(1, "de", [1], [b"mo"]) + encoder.publishes(1, "demo", [2], [b""]) + encoder.publishes(1, "de", [3], [b"mo"])
    assert [message.topic for message in decode([stream]) if isinstance(message, PublishBatch)] == ["de", "demo", "de"]


def test_adjacent_polls_and_acks_of_one_subscription_are_one_batch_each() -> None:
    stream = encoder.polls(7, [1, 2, 3]) + encoder.polls(8, [4]) + encoder.acks(8, [5, 6]) + encoder.acks(7, [6])
    assert decode([stream]) == [PollBatch(7, [1, 2, 3]), PollBatch(8, [4]), AckBatch(8, [5, 6]), AckBatch(7, [6])]


@pytest.mark.parametrize("count", [1, 8, 63, 64, 71, 72, 73, 135, 136, 137, 1000])
@pytest.mark.parametrize("odd", [-1, 0, 7, 8, 9, 40, 71, 72])
def test_long_batches_keep_every_id_and_value_wherever_a_frame_differs(count: int, odd: int) -> None:
    values = [b"%06d" % index for index in range(count)]
    if 0 <= odd < count:
        values[odd] += bytes(256)  # the low byte of the length stays the same
    assert decode([encoder.publishes(1, "demo", range(count), values)]) == [PublishBatch(1, "demo", list(range(count)), values)]


def test_equal_sizes_with_another_topic_or_qos_inside_a_block_are_told_apart() -> None:
    for at in (0, 8, 9, 40, 70, 71):
        for qos, topic in ((1, "demp"), (0, "demo")):
            parts = [encoder.publishes(1, "demo", [index], [b"v"]) for index in range(100)]
            parts[at] = encoder.publishes(qos, topic, [at], [b"w"])
            assert list(singles(decode([b"".join(parts)]))) == [
                PublishBatch(qos, topic, [i], [b"w"]) if i == at else PublishBatch(1, "demo", [i], [b"v"]) for i in range(100)
            ]


MALFORMED = [
    (FrameType.HELLO, b"", "no version"),
    (FrameType.HELLO, b"\0", "half a version"),
    (FrameType.HELLO, b"\0\1\0", "a byte too many"),
    (FrameType.AUTH, b"", "no key length"),
    (FrameType.AUTH, b"\0", "half a key length"),
    (FrameType.AUTH, b"\0\3ab", "a key cut short"),
    (FrameType.AUTH, b"\0\1ab", "a key too long"),
    (FrameType.AUTH, b"\0\1\xff", "a key that is not UTF-8"),
    (FrameType.PUBLISH, b"", "nothing"),
    (FrameType.PUBLISH, b"\1\0", "half a topic length"),
    (FrameType.PUBLISH, b"\1\0\5demo", "a topic beyond the end"),
    (FrameType.PUBLISH, b"\1\xff\xffdemo", "a topic far beyond the end"),
    (FrameType.PUBLISH, b"\1\0\2\xc3\x28hi", "a topic that is not UTF-8"),
    (FrameType.PUBLISH, b"\1\0\3\xed\xa0\x80hi", "a topic with a lone surrogate"),
    (FrameType.SUBSCRIBE, b"", "nothing"),
    (FrameType.SUBSCRIBE, b"\0", "half a topic length"),
    (FrameType.SUBSCRIBE, b"\0\4demo", "no QoS"),
    (FrameType.SUBSCRIBE, b"\0\5demo\1", "a topic that swallows the QoS"),
    (FrameType.SUBSCRIBE, b"\0\2\xc3\x28\1", "a topic that is not UTF-8"),
    (FrameType.ACK, b"", "nothing"),
    (FrameType.ACK, bytes(7), "seven bytes"),
    (FrameType.ACK, bytes(9), "nine bytes"),
    (FrameType.POLL, b"", "nothing"),
    (FrameType.POLL, bytes(7), "seven bytes"),
    (FrameType.POLL, bytes(9), "nine bytes"),
    (FrameType.NACK, b"\1\x91\0", "half a head"),
    (FrameType.NACK, b"\1\x91\0\3no", "a text cut short"),
    (FrameType.NACK, b"\1\x91\0\1no", "a text too long"),
    (FrameType.NACK, b"\1\x91\0\1\xff", "a text that is not UTF-8"),
]


@pytest.mark.parametrize(("kind", "payload", "why"), MALFORMED, ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "")
def test_a_payload_that_cannot_be_taken_apart_is_a_message_in_its_place(kind: FrameType, payload: bytes, why: str) -> None:
    del why
    stream = encoder.ping(1) + frame(kind, 2, payload) + encoder.ping(3)
    assert decode([stream]) == [Ping(1), Malformed(kind, 2), Ping(3)]


@pytest.mark.parametrize("kind", [FrameType.PUBLISH, FrameType.POLL, FrameType.ACK])
def test_a_malformed_frame_inside_a_batch_keeps_its_place(kind: FrameType) -> None:
    good = {FrameType.PUBLISH: b"\1\0\1ab", FrameType.POLL: bytes(7) + b"\1", FrameType.ACK: bytes(7) + b"\1"}[kind]
    found = decode([b"".join(frame(kind, cid, b"\1\0" if cid == 70 else good) for cid in range(140))])
    assert [type(message) for message in found][1] is Malformed
    assert found[1] == Malformed(kind, 70)
    assert len(found) == 3


def test_what_the_original_tolerates_is_tolerated() -> None:
    assert decode([frame(FrameType.PING, 1, b"payload")]) == [Ping(1)]
    assert decode([frame(FrameType.PONG, 1, b"payload")]) == [Pong(1)]
    for more in (b"and more", b"\0", b"\0\0\0", b"\0\1g", b"\0\1g\3", b"\0\1g\x08", b"\0\1\xff\1", b"\0\1g\1\0"):
        assert decode([frame(FrameType.SUBSCRIBE, 1, b"\0\4demo\1" + more)]) == [Subscribe(1, "demo", 1)]


def test_values_the_session_must_judge_are_delivered_as_they_are() -> None:
    assert decode([frame(FrameType.PUBLISH, 1, b"\7\0\0")]) == [PublishBatch(7, "", [1], [b""])]
    assert decode([frame(FrameType.SUBSCRIBE, 1, b"\0\0\7")]) == [Subscribe(1, "", 7)]
    assert decode([frame(FrameType.HELLO, 1, b"\0\2")]) == [Hello(1, 2)]
    assert decode([frame(FrameType.AUTH, 1, b"\0\0")]) == [Auth(1, b"")]
    assert decode([encoder.polls(0, [1]) + encoder.acks(0, [2])]) == [PollBatch(0, [1]), AckBatch(0, [2])]


@pytest.mark.parametrize("length", [0, 1, 8, BLIPMQ_FRAME_BYTES_MAX + 1, 0xFFFFFFFF])
def test_a_length_out_of_bounds_ends_the_stream_after_the_good_messages_and_at_its_fourth_byte(length: int) -> None:
    decoder = Decoder()
    stream = decoder.feed(encoder.polls(1, [1, 2]) + struct.pack(">I", length))
    assert next(stream) == PollBatch(1, [1, 2])
    with pytest.raises(WireError, match=f"frame length {length} is outside"):
        next(stream)
    with pytest.raises(WireError, match=f"frame length {length} is outside"):
        list(decoder.feed(encoder.ping(3)))
    assert decoder.held_bytes == 0


@pytest.mark.parametrize("kind", [0x00, 0x0A, 0x7B, 0xFF])
def test_an_unknown_type_ends_the_stream_once_its_frame_is_whole(kind: int) -> None:
    raw = frame(kind, 1, b"payload")
    decoder = Decoder()
    assert list(decoder.feed(raw[:-1])) == []
    with pytest.raises(WireError, match=f"unknown frame type 0x{kind:02x}"):
        list(decoder.feed(raw[-1:]))


def test_a_bad_length_inside_a_batch_ends_the_batch_first() -> None:
    stream = encoder.publishes(1, "demo", range(200), [b"v"] * 200) + struct.pack(">IBQ", 5, 3, 1) + b"\1\0\4demo"
    decoder, found = Decoder(), list[Message]()
    with pytest.raises(WireError, match="frame length 5"):
        for message in decoder.feed(stream):
            found.append(message)
    assert found == [PublishBatch(1, "demo", list(range(200)), [b"v"] * 200)]


def test_the_largest_frame_passes_and_one_byte_more_does_not() -> None:
    size = encoder.value_bytes_max("demo")
    raw = encoder.publishes(1, "demo", [1], [bytes(size)])
    assert len(raw) == 4 + BLIPMQ_FRAME_BYTES_MAX
    assert decode(raw[at : at + 65_536] for at in range(0, len(raw), 65_536)) == [PublishBatch(1, "demo", [1], [bytes(size)])]
    with pytest.raises(RecordTooLarge) as caught:
        encoder.publishes(1, "demo", [1], [bytes(size + 1)])
    assert (caught.value.size_bytes, caught.value.bytes_max) == (size + 1, size)
    with pytest.raises(WireError):
        list(Decoder().feed(struct.pack(">I", BLIPMQ_FRAME_BYTES_MAX + 1)))


def test_the_limit_before_login_admits_the_longest_key_and_nothing_longer() -> None:
    decoder = Decoder(frame_bytes_max=BLIPMQ_LOGIN_FRAME_BYTES_MAX)
    assert list(decoder.feed(encoder.auth(1, b"k" * 65_535))) == [Auth(1, b"k" * 65_535)]
    with pytest.raises(WireError):
        list(decoder.feed(struct.pack(">I", BLIPMQ_LOGIN_FRAME_BYTES_MAX + 1)))


def test_the_limit_can_be_raised_between_two_messages_of_one_read() -> None:
    decoder = Decoder(frame_bytes_max=100)
    stream = decoder.feed(encoder.auth(1, b"key") + encoder.publishes(1, "demo", [2], [bytes(1000)]))
    assert next(stream) == Auth(1, b"key")
    decoder.frame_bytes_max = 2000
    assert next(stream) == PublishBatch(1, "demo", [2], [bytes(1000)])


def test_a_batch_does_not_carry_a_frame_past_the_limit() -> None:
    decoder = Decoder(frame_bytes_max=100)
    stream = decoder.feed(encoder.publishes(1, "demo", [1, 2], [bytes(10), bytes(101)]))
    assert next(stream) == PublishBatch(1, "demo", [1], [bytes(10)])
    with pytest.raises(WireError, match="frame length 117"):
        next(stream)


def test_the_longest_topic_passes_and_one_byte_more_does_not() -> None:
    topic = "t" * 65_535
    assert decode([encoder.publishes(1, topic, [1], [b"v"])]) == [PublishBatch(1, topic, [1], [b"v"])]
    assert decode([encoder.subscribe(1, topic, 1)]) == [Subscribe(1, topic, 1)]
    for message in (PublishBatch(1, topic + "t", [1], [b"v"]), Subscribe(1, topic + "t", 1), Auth(1, b"k" * 65_536)):
        with pytest.raises(LimitExceeded, match="65536 bytes exceeds the limit of 65535"):
            encoder.encode(message)


def test_a_long_reason_is_cut_at_a_character() -> None:
    (message,) = decode([encoder.nack(1, 500, "é" * 600)])
    assert message == Nack(1, 500, "é" * 512)


def test_a_key_does_not_show_in_a_debug_line() -> None:
    assert "secret" not in repr(Auth(1, b"secret"))


def test_seeded_streams_decode_alike_whole_and_in_chunks_and_frame_by_frame() -> None:
    for number in range(1_000):
        seed = random.Random(number)
        stream = well_formed(seed)
        expected = one_by_one(stream)
        assert END not in expected
        assert list(singles(decode([stream]))) == expected, f"seed {number}"
        assert list(singles(decode(cuts(stream, seed)))) == expected, f"seed {number}"


def test_ten_thousand_damaged_streams_decode_alike_and_raise_nothing_but_wire_errors() -> None:
    for number in range(10_000):
        seed = random.Random(number)
        stream = bytearray(well_formed(seed)[: seed.choice((40, 400, 20_000))])
        for _ in range(seed.randint(1, 4)):
            match seed.randint(0, 3):
                case 0:
                    stream[seed.randrange(len(stream))] = seed.randrange(256)
                case 1:
                    at = seed.randrange(len(stream))
                    stream[at:at] = seed.randbytes(seed.randint(1, 20))
                case 2:
                    at = seed.randrange(len(stream))
                    del stream[at : at + seed.randint(1, 20)]
                    stream += b"\0"
                case _:
                    stream[0:0] = seed.randbytes(seed.randint(0, 2))
        raw = bytes(stream)
        expected = one_by_one(raw)
        for chunks in ([raw], cuts(raw, seed)):
            assert list(singles(decode(chunks))) == expected, f"seed {number}"


u64 = st.integers(0, (1 << 64) - 1)
u16 = st.integers(0, 0xFFFF)
u8 = st.integers(0, 0xFF)
topics = st.text(max_size=20)
cid_lists = st.lists(u64, min_size=1, max_size=80)
messages = st.one_of(
    st.builds(Hello, u64, u16),
    st.builds(Auth, u64, st.text(max_size=40).map(str.encode)),
    st.builds(Subscribe, u64, topics, u8),
    st.builds(Subscribe, u64, topics, u8, topics.filter(bool), st.sampled_from(GROUP_MODES), st.booleans()),
    st.builds(AckBatch, u64, cid_lists),
    st.builds(PollBatch, u64, cid_lists),
    st.builds(Nack, u64, u16, st.text(max_size=100)),
    st.builds(Ping, u64),
    st.builds(Pong, u64),
    st.builds(
        lambda qos, topic, pairs: PublishBatch(qos, topic, [cid for cid, _ in pairs], [value for _, value in pairs]),
        u8,
        topics,
        st.lists(st.tuples(u64, st.binary(max_size=50)), min_size=1, max_size=80),
    ),
)


@given(st.lists(messages, max_size=8), st.lists(st.integers(0, 5000), max_size=6))
@settings(max_examples=200)
def test_what_is_encoded_comes_back_however_it_is_cut(sent: list[Message], at: list[int]) -> None:
    stream = b"".join(map(encoder.encode, sent))
    at = sorted(min(cut, len(stream)) for cut in at)
    chunks = [stream[begin:end] for begin, end in zip([0, *at], [*at, len(stream)], strict=True)]
    assert list(singles(decode(chunks))) == list(singles(sent))


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_decode_or_end_the_stream_whole_and_byte_by_byte_alike(raw: bytes) -> None:
    assert list(singles(decode([raw]))) == list(singles(decode([raw[at : at + 1] for at in range(len(raw))])))


subscription_frames = st.lists(
    st.tuples(st.sampled_from([FrameType.POLL, FrameType.ACK]), st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=40
)


@given(subscription_frames, st.sampled_from([b"", frame(FrameType.PING, 9), frame(FrameType.POLL, 9, b"short"), b"\0\0"]))
def test_polls_and_acks_decode_alike_whatever_comes_with_them(frames: list[tuple[FrameType, int, int]], other: bytes) -> None:
    raw = b"".join(frame(kind, cid, struct.pack(">Q", subscription)) for kind, cid, subscription in frames)
    expected: list[Message] = []
    for kind, cid, subscription in frames:
        batch = PollBatch(subscription, [cid]) if kind is FrameType.POLL else AckBatch(subscription, [cid])
        last = expected[-1] if expected else None
        if isinstance(last, PollBatch | AckBatch) and type(last) is type(batch) and last.subscription == subscription:
            last.cids.append(cid)
        else:
            expected.append(batch)
    decoder = Decoder()
    assert list(decoder.feed(raw + other))[: len(expected)] == expected
    assert decoder.held_bytes == (2 if other == b"\0\0" else 0)


def test_a_single_delivery_has_the_bytes_of_many() -> None:
    assert encoder.publish(1, "demo", 7, b"value") == encoder.publishes(1, "demo", [7], [b"value"])
    largest = bytes(encoder.value_bytes_max("demo"))
    assert encoder.publish(1, "demo", 7, largest) == encoder.publishes(1, "demo", [7], [largest])
    with pytest.raises(RecordTooLarge) as caught:
        encoder.publish(1, "demo", 7, largest + b"+")
    assert (caught.value.size_bytes, caught.value.bytes_max) == (len(largest) + 1, len(largest))
