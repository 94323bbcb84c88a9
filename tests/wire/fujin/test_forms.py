"""Headers that nothing announces, and ids that are numbers or texts."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRequest
from headrace.records import Headers
from headrace.wire.fujin import ClientMessage, ConnectWriter, Refused, Reply, RequestDecoder, WriteBatch, WriteForm, encode
from tests.wire.fujin.samples import WRITER, wire

CID = b"\x00\x00\x00\x07"
HEADERS: Headers = (("trace", b"abc"), ("empty", b""))
HEAD = wire(3) + CID + wire(0, 0, 0, 1) + b"t"


def after_connect(frames: bytes, form: WriteForm = WriteForm.AUTO) -> list[ClientMessage]:
    decoder = RequestDecoder(form=form)
    found = list(decoder.feed(WRITER + frames))
    assert found.pop(0) == ConnectWriter(None)
    return found


@pytest.mark.parametrize("form", [WriteForm.AUTO, WriteForm.ALWAYS])
def test_headers_are_read_where_they_are(form: WriteForm) -> None:
    frames = encode.writes("t", [CID, CID], [b"one", b"two"], [HEADERS, ()], form=form)
    assert after_connect(frames, form) == [WriteBatch("t", [CID, CID], [b"one", b"two"], [HEADERS, ()])]


@pytest.mark.parametrize("form", list(WriteForm))
def test_a_write_without_headers_is_read_in_every_form(form: WriteForm) -> None:
    frames = encode.writes("t", [CID, CID], [b"one", b"two"], form=form)
    assert after_connect(frames, form) == [WriteBatch("t", [CID, CID], [b"one", b"two"])]


def test_the_specifications_table_without_headers_is_read_in_auto() -> None:
    # count 0, then the length and the value: what a client sends that was written from the table
    assert after_connect(HEAD + wire(0, 0, 0, 0, 0, 2) + b"hi") == [WriteBatch("t", [CID], [b"hi"])]


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 131_071, 131_073, 196_608])
def test_a_length_that_cannot_be_headers_is_a_length(size: int) -> None:
    value = b"x" * size
    assert after_connect(encode.writes("t", [CID], [value])) == [WriteBatch("t", [CID], [value])]


@pytest.mark.parametrize("size", [131_072, 262_144, 393_216])
def test_a_length_that_could_be_headers_is_not_written_in_auto(size: int) -> None:
    with pytest.raises(InvalidRequest, match="is ambiguous with headers"):
        encode.writes("t", [CID], [b"x" * size])
    value = b"x" * size
    for form in (WriteForm.NEVER, WriteForm.ALWAYS):
        assert after_connect(encode.writes("t", [CID], [value], form=form), form) == [WriteBatch("t", [CID], [value])]


def test_headers_cannot_be_written_where_none_are_read() -> None:
    with pytest.raises(InvalidRequest):
        encode.writes("t", [CID], [b"x"], [HEADERS], form=WriteForm.NEVER)


def test_a_zero_that_nothing_follows_is_an_empty_value_after_a_while() -> None:
    decoder = RequestDecoder()
    assert list(decoder.feed(WRITER + HEAD + wire(0, 0, 0, 0))) == [ConnectWriter(None)]
    assert decoder.is_in_doubt
    assert list(decoder.settle_doubt()) == [Refused(Reply.WRITE, CID, "write size arg not provided", is_fatal=True)]
    assert not decoder.is_in_doubt


def test_a_zero_that_something_follows_is_a_count() -> None:
    decoder = RequestDecoder()
    list(decoder.feed(WRITER + HEAD + wire(0, 0, 0, 0)))
    assert list(decoder.feed(wire(0))) == []
    assert not decoder.is_in_doubt
    assert list(decoder.feed(wire(2) + b"hi")) == [WriteBatch("t", [CID], [b"hi"])]


@pytest.mark.parametrize("form", [WriteForm.NEVER])
def test_an_empty_value_is_refused_at_once_where_there_are_no_headers(form: WriteForm) -> None:
    assert after_connect(HEAD + wire(0, 0, 0, 0), form) == [Refused(Reply.WRITE, CID, "write size arg not provided", is_fatal=True)]


@pytest.mark.parametrize(
    "tail",
    [
        wire(0, 1, 0, 0, 0, 0),  # an odd count
        wire(0, 130, 0, 0, 0, 0),  # 65 headers
        wire(0, 2, 0, 0, 32, 1),  # 8,193 bytes of them
        wire(0, 2, 0, 0, 0, 1, 255, 0, 0, 0, 0, 0, 0, 0, 1, 120),  # a name that is not UTF-8
    ],
)
def test_headers_that_cannot_be_kept_end_the_stream(tail: bytes) -> None:
    assert after_connect(HEAD + tail, WriteForm.ALWAYS) == [Refused(Reply.WRITE, CID, "invalid headers", is_fatal=True)]


@pytest.mark.parametrize("next_byte", [3, 4, 5, 6, 10])
def test_an_id_followed_by_a_request_is_a_number(next_byte: int) -> None:
    decoder = RequestDecoder()
    found = list(decoder.feed(wire(1, 0, 0, 0, 42, next_byte)))
    assert found[0] == ConnectWriter(42)


def test_an_id_followed_by_the_end_is_a_number() -> None:
    decoder = RequestDecoder()
    assert list(decoder.feed(wire(1, 0, 0, 0, 42))) == []
    assert list(decoder.finish()) == [ConnectWriter(42)]
