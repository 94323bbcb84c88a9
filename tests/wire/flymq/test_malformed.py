"""Malformed input and its errors."""

from __future__ import annotations

import tracemalloc

import pytest

from headrace.errors import InvalidRequest, LimitExceeded, RecordTooLarge, WireError
from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire.flymq import Dialect, ReplyDecoder, RequestDecoder, decode_reply, encode_reply, encode_request, sniff, speaks_sdk
from headrace.wire.flymq.framing import BINARY, GZIP, deflate, frame, inflate
from headrace.wire.flymq.messages import (
    Broken,
    ClusterMetadata,
    Consume,
    Fetch,
    GetOffset,
    ListTopics,
    Malformed,
    Mode,
    ProduceBatch,
    ReplyFrame,
    RequestEvent,
    ResetOffset,
    SeekToTimestamp,
    Subscribe,
    TopicList,
)
from headrace.wire.sniff import Sniff

from .samples import decoded, raw

TOPIC = b"\x00\x01t"
GROUP = b"\x00\x01g"


@pytest.mark.parametrize(
    ("opcode", "payload", "reason"),
    [
        (0x01, b"", "2 bytes expected, 0 left"),
        (0x01, b"\x00", "2 bytes expected, 1 left"),
        (0x01, b"\x00\x05t", "5 bytes announced, 1 left"),
        (0x01, TOPIC + b"\xff\xff\xff\xff", "4294967295 bytes announced, 0 left"),
        (0x01, TOPIC + bytes(4) + b"\x00\x00\x00\x02v", "2 bytes announced, 1 left"),
        (0x01, TOPIC + bytes(8) + b"\xff\xff", "4 bytes expected, 2 left"),
        (0x01, b"\x00\x01\xff" + bytes(8), "text is not UTF-8"),
        (0x02, TOPIC + bytes(11), "8 bytes expected, 7 left"),
        (0x03, TOPIC, "4 bytes expected, 0 left"),
        (0x04, b"\x00\x02\xc3\x28", "text is not UTF-8"),
        (0x05, TOPIC + GROUP + bytes(4), "1 bytes expected, 0 left"),
        (0x05, TOPIC + GROUP + bytes(4) + b"\x08late", "8 bytes announced, 4 left"),
        (0x05, TOPIC + GROUP + bytes(4) + b"\x00\x08late", "8 bytes announced, 4 left"),
        (0x06, TOPIC + GROUP + bytes(4), "8 bytes expected, 0 left"),
        (0x07, TOPIC + bytes(15), "4 bytes expected, 3 left"),
        (0x07, TOPIC + bytes(16) + b"\x01", "2 bytes expected, 1 left"),
        (0x09, b"", "2 bytes expected, 0 left"),
        (0x53, b"\x00", "2 bytes expected, 1 left"),
        (0x60, TOPIC + GROUP, "4 bytes expected, 0 left"),
        (0x61, TOPIC + GROUP + bytes(4) + b"\x06offset\x00", "8 bytes expected, 1 left"),
        (0x63, b"", "2 bytes expected, 0 left"),
        (0x66, TOPIC + bytes(11), "8 bytes expected, 5 left"),
    ],
)
def test_a_payload_that_cannot_be_read_is_reported_and_the_stream_goes_on(opcode: int, payload: bytes, reason: str) -> None:
    stream = raw(opcode, payload) + raw(0x08, b"")
    assert RequestDecoder().feed(stream) == [Malformed(opcode, reason), ListTopics()]


@pytest.mark.parametrize("first", [0x00, 0x7B, 0xAE, 0xFF])
def test_a_wrong_magic_byte_breaks_the_stream_at_once_and_without_an_answer(first: int) -> None:
    decoder = RequestDecoder()
    (event,) = decoder.feed(bytes([first]))
    assert event == Broken(f"magic byte {first:#04x} is wrong: expected 0xaf", None)
    assert decoder.feed(raw(0x08, b"")) == []


def test_a_wrong_version_breaks_the_stream_with_an_answer() -> None:
    decoder = RequestDecoder()
    assert decoder.feed(b"\xaf") == []
    (event,) = decoder.feed(b"\x02")
    assert event == Broken("protocol version 2 is not supported", "unsupported protocol version: 2")


def test_what_came_before_the_break_is_still_reported() -> None:
    events = RequestDecoder().feed(encode_request(ProduceBatch("t", [b"1"] * 20)) + b"GET / HTTP/1.1")
    assert [type(event).__name__ for event in events] == ["ProduceBatch", "Broken"]


def test_four_bytes_of_ff_are_swallowed_only_behind_a_record_without_partition() -> None:
    unexpected = b"\xff\xff\xff\xff"
    whole = encode_request(ProduceBatch("t", [b"1"]))
    short = raw(0x01, whole[8:-4])
    assert decoded([short + unexpected + raw(0x08, b"")]) == [("t", None, b"1", -1), ListTopics()]
    for stream in (
        whole + unexpected,
        short + unexpected * 2,
        short + raw(0x08, b"") + unexpected,
        short + b"\xff\xff\xff\x00",
        unexpected,
    ):
        assert isinstance(decoded([stream])[-1], Broken)


@pytest.mark.parametrize(("length", "fits"), [(FLYMQ_PAYLOAD_BYTES_MAX, True), (FLYMQ_PAYLOAD_BYTES_MAX + 1, False), (2**32 - 1, False)])
def test_a_payload_beyond_32_mib_is_refused_from_its_header(length: int, fits: bool) -> None:
    events = RequestDecoder().feed(raw(0x01, b"", length=length))
    text = f"message too large: {length} bytes, at most {FLYMQ_PAYLOAD_BYTES_MAX}"
    assert events == ([] if fits else [Broken(text, text)])


def test_a_payload_of_exactly_32_mib_is_read() -> None:
    value = bytes(FLYMQ_PAYLOAD_BYTES_MAX - 3 - 12)
    frame_bytes = encode_request(ProduceBatch("t", [value]))
    assert len(frame_bytes) == 8 + FLYMQ_PAYLOAD_BYTES_MAX
    decoder = RequestDecoder()
    events: list[RequestEvent] = []
    for at in range(0, len(frame_bytes), 1 << 20):
        events += decoder.feed(frame_bytes[at : at + (1 << 20)])
    assert events == [ProduceBatch("t", [value])]
    with pytest.raises(RecordTooLarge, match=f"record of {len(value) + 1} bytes exceeds the limit of {len(value)} bytes"):
        encode_request(ProduceBatch("t", [value + b"!"]))


def test_an_oversized_frame_behind_good_ones_in_one_large_chunk_is_refused() -> None:
    good = encode_request(ProduceBatch("t", [bytes(1000)]))
    lie = good[:4] + (FLYMQ_PAYLOAD_BYTES_MAX + 1).to_bytes(4) + good[8:]
    events = RequestDecoder().feed(good * 20 + lie + bytes(FLYMQ_PAYLOAD_BYTES_MAX + 1))
    assert [type(event).__name__ for event in events] == ["ProduceBatch", "Broken"]


def test_an_announced_length_takes_no_memory() -> None:
    decoder = RequestDecoder()
    tracemalloc.start()
    try:
        decoder.feed(raw(0x01, TOPIC, length=FLYMQ_PAYLOAD_BYTES_MAX))
        decode_reply_lie()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def decode_reply_lie() -> None:
    for dialect in Dialect:
        with pytest.raises(WireError):
            decode_reply(ReplyFrame(0x07, b"\xff\xff\xff\xff" + bytes(8)), dialect)
    with pytest.raises(WireError):
        decode_reply(ReplyFrame(0x62, b"\xff\xff\xff\xff"))


# Compression.


def squeezed(payload: bytes, *, opcode: int = 0x01, flags: int = BINARY | GZIP) -> bytes:
    return raw(opcode, deflate(payload), flags=flags)


def test_a_gzip_payload_is_read_like_a_plain_one() -> None:
    payload = encode_request(ProduceBatch("t", [b"value"], [b"k"], [2]))[8:]
    assert RequestDecoder().feed(squeezed(payload)) == [ProduceBatch("t", [b"value"], [b"k"], [2])]
    assert RequestDecoder().feed(squeezed(b"", opcode=0x08, flags=GZIP)) == [ListTopics()]


def test_plain_and_gzip_records_for_one_topic_share_a_batch() -> None:
    plain = encode_request(ProduceBatch("t", [b"value"]))
    assert RequestDecoder().feed(plain + squeezed(plain[8:]) + plain) == [ProduceBatch("t", [b"value"] * 3)]


@pytest.mark.parametrize("flags", [0x04, 0x06, 0x08, 0x0A, 0x0C, 0x0E])
def test_any_other_compression_is_refused_by_its_number(flags: int) -> None:
    assert RequestDecoder().feed(raw(0x08, b"", flags=flags)) == [Malformed(0x08, f"compression {flags:#04x} is not supported")]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "compressed payload is cut short"),
        (b"plain", "compressed payload is not gzip"),
        (deflate(b"x" * 100)[:-1], "compressed payload is cut short"),
        (deflate(b"x" * 100) + b"!", "compressed payload has bytes after its end"),
        (deflate(b"x") * 2, "compressed payload has bytes after its end"),
        (deflate(b"x" * 100)[:-8] + bytes(8), "compressed payload is not gzip"),
    ],
)
def test_a_payload_that_is_not_one_gzip_member_is_reported(payload: bytes, reason: str) -> None:
    stream = raw(0x01, payload, flags=BINARY | GZIP) + raw(0x08, b"")
    assert RequestDecoder().feed(stream) == [Malformed(0x01, reason), ListTopics()]


@pytest.mark.parametrize(("size", "fits"), [(1 << 16, True), ((1 << 16) + 1, False)])
def test_unpacking_stops_at_its_limit(size: int, fits: bool) -> None:
    packed = deflate(bytes(size))
    if fits:
        assert inflate(packed, 1 << 16) == bytes(size)
    else:
        with pytest.raises(WireError, match="exceeds 65536 bytes"):
            inflate(packed, 1 << 16)


def test_a_gzip_bomb_costs_no_more_than_the_limit() -> None:
    bomb = deflate(bytes(8 * FLYMQ_PAYLOAD_BYTES_MAX))
    decoder = RequestDecoder()
    tracemalloc.start()
    try:
        events = decoder.feed(raw(0x01, bomb, flags=GZIP))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert events == [Malformed(0x01, f"compressed payload exceeds {FLYMQ_PAYLOAD_BYTES_MAX} bytes")]
    assert peak < 3 * FLYMQ_PAYLOAD_BYTES_MAX


def test_one_chunk_of_the_stream_unpacks_one_limit_at_most_and_the_rest_on_demand() -> None:
    head = TOPIC + bytes(4)
    value = bytes(FLYMQ_PAYLOAD_BYTES_MAX - len(head) - 8)
    packed = squeezed(head + len(value).to_bytes(4) + value + b"\xff\xff\xff\xff")
    decoder = RequestDecoder()
    answers = [(decoder.feed(chunk), decoder.more) for chunk in (packed * 3 + raw(0x08, b""), b"", b"")]
    assert [more for _, more in answers] == [True, True, False]
    batch = ProduceBatch("t", [value])
    assert [events for events, _ in answers] == [[batch], [batch], [batch, ListTopics()]]


# Lenient forms.


@pytest.mark.parametrize(
    ("tail", "mode"),
    [
        (b"\x00\x06latest", Mode("latest")),
        (b"\x06latest", Mode("latest", narrow=True)),
        (b"\x00\x00", Mode("")),
        (b"\x00", Mode("", narrow=True)),
    ],
)
def test_the_width_of_a_mode_is_told_by_its_first_byte(tail: bytes, mode: Mode) -> None:
    head = TOPIC + GROUP + bytes(4)
    for opcode, message in ((0x05, Subscribe("t", "g", 0, mode)), (0x61, ResetOffset("t", "g", 0, mode))):
        (event,) = RequestDecoder().feed(raw(opcode, head + tail))
        assert event == message
        assert speaks_sdk(event) is mode.narrow


def test_only_a_fetch_with_a_filter_and_the_opcode_0x53_give_the_original_away() -> None:
    assert speaks_sdk(Fetch("t", 0, 0, 1, "")) and not speaks_sdk(Fetch("t", 0, 0, 1))
    assert speaks_sdk(ClusterMetadata())
    assert not any(speaks_sdk(event) for event in (Consume("t", 0, 0), GetOffset("t", "g", 0), ProduceBatch("t", [b""])))


def test_a_group_may_be_named_without_a_topic() -> None:
    for opcode in (0x63, 0x65):
        (alone,) = RequestDecoder().feed(raw(opcode, GROUP))
        (empty,) = RequestDecoder().feed(raw(opcode, b"\x00\x00" + GROUP))
        assert alone == empty


def test_a_seek_may_leave_the_group_out() -> None:
    expected = SeekToTimestamp("t", 3, 77)
    tail = b"\x00\x00\x00\x03" + (77).to_bytes(8)
    assert RequestDecoder().feed(raw(0x66, TOPIC + tail)) == [expected]
    assert RequestDecoder().feed(raw(0x66, TOPIC + b"\x00\x00" + tail)) == [expected]


@pytest.mark.parametrize("opcode", [0x02, 0x03, 0x04, 0x06, 0x08, 0x09, 0x0A, 0x60, 0x62, 0x64])
def test_bytes_behind_the_last_field_are_ignored(opcode: int) -> None:
    payload = TOPIC + (GROUP if opcode in (0x06, 0x60, 0x64) else b"") + bytes(12)
    (plain,) = RequestDecoder().feed(raw(opcode, payload))
    (more,) = RequestDecoder().feed(raw(opcode, payload + b"future"))
    assert plain == more


def test_the_first_byte_alone_says_flymq() -> None:
    assert sniff(b"") is Sniff.MORE
    assert sniff(b"\xaf") is Sniff.YES
    assert sniff(b"\xaf\x02") is Sniff.YES
    assert all(sniff(bytes([first])) is Sniff.NO for first in range(256) if first != 0xAF)


def test_a_mode_too_long_for_both_widths_never_reaches_the_wire() -> None:
    with pytest.raises(InvalidRequest):
        encode_request(Subscribe("t", "g", 0, Mode("m" * 256)))
    with pytest.raises(InvalidRequest):
        encode_request(Consume("t", 0, -1))


def test_a_reply_that_no_peer_would_take_is_refused_where_it_is_made() -> None:
    assert len(frame(0x02, bytes(FLYMQ_PAYLOAD_BYTES_MAX))) == 8 + FLYMQ_PAYLOAD_BYTES_MAX
    with pytest.raises(LimitExceeded, match="a message of 33554433 bytes exceeds the 33554432 of a frame"):
        frame(0x02, bytes(FLYMQ_PAYLOAD_BYTES_MAX + 1))
    with pytest.raises(LimitExceeded):
        encode_reply(0x08, TopicList(["t" * 65_534] * 512))


def test_a_client_is_told_of_a_broken_server_too() -> None:
    assert ReplyDecoder().feed(b"HTTP") == [Broken("magic byte 0x48 is wrong: expected 0xaf", None)]
    assert frame(0x08, b"") == raw(0x08, b"")
