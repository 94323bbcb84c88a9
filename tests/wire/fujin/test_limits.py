"""Every limit at its value and one above; nothing is allocated for a value above it."""

from __future__ import annotations

import pytest

from headrace.errors import WireError
from headrace.limits import FUJIN_ERROR_BYTES_MAX, FUJIN_ID_BYTES_MAX, FUJIN_IDS_MAX, FUJIN_NAME_BYTES_MAX
from headrace.wire.fujin import (
    ConnectReader,
    ConnectWriter,
    Disconnect,
    MessageBatch,
    ReaderConnected,
    ReaderKind,
    Refused,
    Reply,
    ReplyDecoder,
    Request,
    RequestDecoder,
    Settle,
    WriteBatch,
    WriteForm,
    encode,
)
from tests.wire.fujin.samples import ONE, READER, WRITER, wire


def test_the_largest_value_is_taken_and_one_more_byte_is_skipped_and_refused() -> None:
    decoder = RequestDecoder(message_bytes_max=1_000)
    frames = WRITER + encode.writes("t", [b"aaaa", b"bbbb", b"cccc"], [b"x" * 1_000, b"x" * 1_001, b"y"])
    assert list(decoder.feed(frames)) == [
        ConnectWriter(None),
        WriteBatch("t", [b"aaaa"], [b"x" * 1_000]),
        Refused(Reply.WRITE, b"bbbb", "message too large: 1001 bytes, at most 1000"),
        WriteBatch("t", [b"cccc"], [b"y"]),
    ]


def test_a_value_that_is_skipped_is_not_kept() -> None:
    decoder = RequestDecoder(form=WriteForm.NEVER)
    list(decoder.feed(WRITER + wire(3) + ONE + wire(0, 0, 0, 1) + b"t" + wire(255, 255, 255, 255)))
    for _ in range(50):
        assert list(decoder.feed(b"x" * 100_000)) == []
        assert decoder.held_bytes == 0


@pytest.mark.parametrize(("size", "is_good"), [(FUJIN_NAME_BYTES_MAX, True), (FUJIN_NAME_BYTES_MAX + 1, False)])
def test_a_name_has_a_limit(size: int, is_good: bool) -> None:
    name = "n" * size
    writes = list(RequestDecoder().feed(WRITER + encode.writes(name, [ONE], [b"v"])))[1:]
    reads = list(RequestDecoder().feed(encode.connect_reader(ReaderKind.PUSH, True, name)))
    if is_good:
        assert writes == [WriteBatch(name, [ONE], [b"v"])]
        assert reads == [ConnectReader(ReaderKind.PUSH, True, name)]
    else:
        assert writes == [Refused(Reply.WRITE, ONE, "topic name too long", is_fatal=True)]
        assert reads == [Refused(Reply.READER, b"", "topic name too long", is_fatal=True)]


def test_a_writer_id_has_a_limit() -> None:
    good = b"i" * FUJIN_NAME_BYTES_MAX
    assert list(RequestDecoder().feed(encode.connect_writer(good) + b"\x0a")) == [ConnectWriter(good), Disconnect()]
    with pytest.raises(WireError, match="writer id too long"):
        list(RequestDecoder().feed(encode.connect_writer(good + b"i")))


def test_a_message_id_has_a_limit() -> None:
    good = b"i" * FUJIN_ID_BYTES_MAX
    assert list(RequestDecoder().feed(READER + encode.settle(Request.ACK, ONE, [good])))[1:] == [Settle(Request.ACK, ONE, [good])]
    refused = list(RequestDecoder().feed(READER + encode.settle(Request.ACK, ONE, [good + b"i"])))[1:]
    assert refused == [Refused(Reply.ACK, ONE, "message id too long", is_fatal=True)]


def test_the_ids_of_one_request_have_a_limit() -> None:
    ids = [b"i"] * FUJIN_IDS_MAX
    assert list(RequestDecoder().feed(READER + encode.settle(Request.NACK, ONE, ids)))[1:] == [Settle(Request.NACK, ONE, ids)]
    refused = list(RequestDecoder().feed(READER + encode.settle(Request.NACK, ONE, [*ids, b"i"])))[1:]
    assert refused == [Refused(Reply.NACK, ONE, "too many message ids", is_fatal=True)]


def test_a_client_takes_no_value_above_its_limit() -> None:
    assert list(ReplyDecoder(value_bytes_max=5).feed(encode.messages(None, [b"12345"]))) == [MessageBatch(None, [b"12345"])]
    with pytest.raises(WireError, match="message too large"):
        list(ReplyDecoder(value_bytes_max=5).feed(encode.messages(None, [b"123456"])))


def test_a_long_error_is_cut_between_characters() -> None:
    (message,) = ReplyDecoder().feed(encode.reader_connected("ä" * FUJIN_ERROR_BYTES_MAX))
    assert message == ReaderConnected("ä" * (FUJIN_ERROR_BYTES_MAX // 2))


@pytest.mark.parametrize(
    ("frames", "refused"),
    [
        (wire(2, 3), Refused(Reply.READER, b"", "invalid reader type", is_fatal=True)),
        (wire(2, 0), Refused(Reply.READER, b"", "invalid reader type", is_fatal=True)),
        (wire(2, 1, 2), Refused(Reply.READER, b"", "connect reader is auto commit arg invalid", is_fatal=True)),
        (wire(2, 1, 1, 0, 0, 0, 0), Refused(Reply.READER, b"", "reader name size arg not provided", is_fatal=True)),
    ],
)
def test_a_bad_reader_is_told_what_is_wrong(frames: bytes, refused: Refused) -> None:
    assert list(RequestDecoder().feed(frames)) == [refused]


def test_a_write_without_a_name_ends_the_stream() -> None:
    frames = WRITER + wire(3, 0, 0, 0, 1, 0, 0, 0, 0)
    assert list(RequestDecoder().feed(frames))[1:] == [Refused(Reply.WRITE, ONE, "writer topic len arg not provided", is_fatal=True)]


@pytest.mark.parametrize("first", [b"\x00", b"\x03", b"\x0a", b"\x63"])
def test_a_stream_begins_with_connect(first: bytes) -> None:
    with pytest.raises(WireError, match="unknown request"):
        list(RequestDecoder().feed(first))


@pytest.mark.parametrize("frames", [WRITER + b"\x07", WRITER + b"\x01", READER + b"\x03", READER + b"\x02"])
def test_a_role_knows_only_its_requests(frames: bytes) -> None:
    decoder = RequestDecoder()
    with pytest.raises(WireError, match="unknown request"):
        list(decoder.feed(frames))
    with pytest.raises(WireError):
        list(decoder.feed(b"\x0a"))
