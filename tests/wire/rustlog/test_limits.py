"""At its maximum everything works; one more gets a clear answer."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from headrace.errors import InvalidRequest, LimitExceeded
from headrace.limits import RUSTLOG_FRAME_BYTES_MAX, RUSTLOG_PRODUCE_RECORDS_MAX
from headrace.wire.rustlog import (
    Received,
    Refused,
    ReplyDecoder,
    RequestDecoder,
    encode_reply,
    encode_request,
    fetch_reply,
    produce_requests,
)
from headrace.wire.rustlog import messages as m
from headrace.wire.rustlog.messages import Dialect
from tests.wire.rustlog.vectors import BINARY, JSON, framed

ONE_RECORD_MAX = RUSTLOG_FRAME_BYTES_MAX - len(bytes.fromhex("01 0001 74 00000000 00000001 00000000"))
"""The largest record a binary Produce to topic "t" can hold."""


def test_the_frame_limit_is_the_specified_one() -> None:
    assert RUSTLOG_FRAME_BYTES_MAX == 10_485_760


@pytest.mark.parametrize("dialect", Dialect)
def test_a_frame_of_the_maximum_size_is_a_request_and_one_byte_more_is_refused(dialect: Dialect) -> None:
    small = encode_request(dialect, m.DescribeTopic("t"))[4:]
    whole = small.ljust(RUSTLOG_FRAME_BYTES_MAX)  # white space after JSON, ignored bytes after binary
    assert RequestDecoder().feed(framed(whole)) == [Received(dialect, m.DescribeTopic("t"))]
    (refused,) = RequestDecoder().feed(framed(whole + b" "))
    assert isinstance(refused, Refused) and refused.fatal


def test_the_largest_record_fits_exactly_and_a_larger_one_is_never_sent() -> None:
    frame = encode_request(BINARY, m.Produce("t", 0, [bytes(ONE_RECORD_MAX)]))
    assert len(frame) == 4 + RUSTLOG_FRAME_BYTES_MAX
    assert RequestDecoder().feed(frame) == [Received(BINARY, m.Produce("t", 0, [bytes(ONE_RECORD_MAX)]))]
    with pytest.raises(LimitExceeded, match="10485761 bytes exceeds the frame of 10485760"):
        encode_request(BINARY, m.Produce("t", 0, [bytes(ONE_RECORD_MAX + 1)]))


@pytest.mark.parametrize("dialect", Dialect)
def test_so_many_records_and_no_more_come_in_one_request(dialect: Dialect) -> None:
    most = m.Produce("t", 0, [b""] * RUSTLOG_PRODUCE_RECORDS_MAX)
    assert RequestDecoder().feed(encode_request(dialect, most)) == [Received(dialect, most)]
    (refused,) = RequestDecoder().feed(encode_request(dialect, m.Produce("t", 0, [b""] * (RUSTLOG_PRODUCE_RECORDS_MAX + 1))))
    assert isinstance(refused, Refused) and "too many records: 250001" in refused.error.message


def test_offsets_for_the_most_records_fit_a_json_reply() -> None:
    last = 2**64 - 1
    frame = encode_reply(JSON, m.ProduceReply(range(last - RUSTLOG_PRODUCE_RECORDS_MAX, last)))
    assert len(frame) < RUSTLOG_FRAME_BYTES_MAX


@pytest.mark.parametrize(
    "claim",
    [
        lambda: bytes.fromhex("00a00000 01"),
        lambda: framed(bytes.fromhex("01 0001 74 00000000 0003d090 00000000")),
        lambda: framed(bytes.fromhex("01 0001 74 00000000 00000001 ffffffff")),
        lambda: framed(b'{"Produce":{"topic":"t","partition":0,"records":[' + b"[]," * 3_000_000 + b"[]]}}"),
        lambda: framed(b"{" + b",".join(b'"k%d":0' % index for index in range(800_000)) + b"}"),
        lambda: framed(b"[" + b"{}," * 3_000_000 + b"{}]"),
    ],
    ids=["length", "count", "record size", "arrays", "members", "objects"],
)
def test_a_claim_takes_no_memory(claim: Callable[[], bytes]) -> None:
    frame, decoder = claim(), RequestDecoder()
    tracemalloc.start()
    try:
        answers = decoder.feed(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(isinstance(answer, Refused) for answer in answers)
    assert peak < 3 * len(frame) + 100_000


@pytest.mark.parametrize("topic", ["x" * 65_536, "\ud800"])
def test_a_name_the_binary_fields_cannot_hold_is_refused_and_not_cut(topic: str) -> None:
    with pytest.raises(InvalidRequest):
        encode_request(BINARY, m.DescribeTopic(topic))


@pytest.mark.parametrize("request_", [m.DescribePartition("t", 2**32), m.OffsetCommit("t", 0, "g", 2**64), m.Fetch("t", 0, -1, 0)])
def test_a_number_the_binary_fields_cannot_hold_is_refused(request_: m.Request) -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        encode_request(BINARY, request_)


def test_a_name_that_is_no_utf8_is_refused_in_json_too() -> None:
    with pytest.raises(InvalidRequest):
        encode_request(JSON, m.DescribeTopic("\ud800"))


# A Fetch reply


@pytest.mark.parametrize("dialect, each", [(JSON, 10), (BINARY, 22)])
def test_a_reply_ends_before_max_bytes_is_exceeded(dialect: Dialect, each: int) -> None:
    values = [b"0123456789"] * 5
    assert fetch_reply(dialect, range(3, 8), values, 5 * each) == m.FetchReply(range(3, 8), values, 8)
    assert fetch_reply(dialect, range(3, 8), values, 5 * each - 1) == m.FetchReply(range(3, 7), values[:4], 7)
    assert fetch_reply(dialect, range(3, 8), values, each) == m.FetchReply(range(3, 4), values[:1], 4)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("max_bytes", [0, 1, 9])
def test_a_reply_has_one_record_however_little_was_asked_for(dialect: Dialect, max_bytes: int) -> None:
    assert fetch_reply(dialect, range(2), [b"0123456789"] * 2, max_bytes) == m.FetchReply(range(1), [b"0123456789"], 1)


def test_a_binary_reply_ends_before_a_gap_and_a_json_reply_names_its_offsets() -> None:
    values = [b"a", b"b", b"c"]
    assert fetch_reply(BINARY, [4, 5, 9], values, 100) == m.FetchReply([4, 5], [b"a", b"b"], 6)
    assert fetch_reply(BINARY, [9], [b"c"], 100) == m.FetchReply([9], [b"c"], 10)
    assert fetch_reply(JSON, [4, 5, 9], values, 100) == m.FetchReply([4, 5, 9], values, 10)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("byte", [b"\x00", b"\x63", b"\xff"], ids=["one digit", "two digits", "three digits"])
def test_the_encoded_reply_fills_the_frame_and_never_overflows_it(dialect: Dialect, byte: bytes) -> None:
    values = [byte * 99_000] * 120
    reply = fetch_reply(dialect, range(120), values, 2**32)
    assert isinstance(reply, m.FetchReply)
    frame = encode_reply(dialect, reply)
    assert len(frame) - 4 <= RUSTLOG_FRAME_BYTES_MAX
    assert len(frame) - 4 > RUSTLOG_FRAME_BYTES_MAX - 4 * 99_000 - 100, "one more would have fitted"
    assert ReplyDecoder().feed(frame) == [reply]


def largest_json(offset: int) -> int:
    """Number of zero bytes in one JSON reply: each is a digit and a comma."""
    around = len('{"Fetch":{"records":[{"offset":,"payload":[]},],"next_offset":18446744073709551615}}') + len(str(offset))
    return (RUSTLOG_FRAME_BYTES_MAX - around + 1) // 2


def test_the_largest_record_of_a_json_reply_fits_and_one_byte_more_is_refused_by_offset_and_codec() -> None:
    size = largest_json(77)
    reply = fetch_reply(JSON, range(77, 79), [bytes(size)] * 2, 2**40)
    assert reply == m.FetchReply(range(77, 78), [bytes(size)], 78)
    assert isinstance(reply, m.FetchReply)
    encode_reply(JSON, reply)
    refused = fetch_reply(JSON, range(77, 79), [bytes(size + 1)] * 2, 2**40)
    text = f"fetch failed: the record at offset 77 has {size + 1} bytes and fits no json frame, use the binary codec"
    assert refused == m.ErrorReply(text, 4)


def test_the_largest_record_of_a_binary_reply_fits_and_one_byte_more_is_refused() -> None:
    size = RUSTLOG_FRAME_BYTES_MAX - 1 - 4 - 4 - 8
    reply = fetch_reply(BINARY, range(5, 6), [bytes(size)], 0)
    assert isinstance(reply, m.FetchReply)
    assert len(encode_reply(BINARY, reply)) == 4 + RUSTLOG_FRAME_BYTES_MAX
    refused = fetch_reply(BINARY, range(5, 6), [bytes(size + 1)], 0)
    assert refused == m.ErrorReply(
        f"Fetch failed: the record at offset 5 has {size + 1} bytes and fits no binary frame, read it through another protocol", 4
    )


# A Produce request


@pytest.mark.parametrize("dialect", Dialect)
def test_records_are_spread_over_as_few_frames_as_hold_them(dialect: Dialect) -> None:
    records = [bytes([index % 256]) * 1_000_000 for index in range(95, 117)]
    requests = produce_requests(dialect, "t", 3, records)
    assert [record for request in requests for record in request.records] == records
    sizes = [len(encode_request(dialect, request)) - 4 for request in requests]
    assert all(size <= RUSTLOG_FRAME_BYTES_MAX for size in sizes)
    assert all(size > RUSTLOG_FRAME_BYTES_MAX - 4_000_003 for size in sizes[:-1])
    assert {(request.topic, request.partition) for request in requests} == {("t", 3)}


def test_many_small_records_are_spread_by_count() -> None:
    requests = produce_requests(BINARY, "t", 0, [b""] * (2 * RUSTLOG_PRODUCE_RECORDS_MAX + 1))
    assert [len(request.records) for request in requests] == [RUSTLOG_PRODUCE_RECORDS_MAX, RUSTLOG_PRODUCE_RECORDS_MAX, 1]


def test_a_record_for_no_frame_is_refused_before_anything_is_sent() -> None:
    assert len(produce_requests(BINARY, "t", 0, [b"a", bytes(ONE_RECORD_MAX)])) == 2
    with pytest.raises(LimitExceeded, match=f"record 1 of {ONE_RECORD_MAX + 1} bytes takes .* room for {ONE_RECORD_MAX + 4}"):
        produce_requests(BINARY, "t", 0, [b"a", bytes(ONE_RECORD_MAX + 1)])
    assert produce_requests(BINARY, "t", 0, []) == []


@pytest.mark.parametrize("count", [1, 2, 10, 16, 17])
@pytest.mark.parametrize("size", [0, 1, 100, 1_024, 1_025])
def test_a_page_of_values_of_one_size_has_the_bytes_of_any_other(count: int, size: int) -> None:
    offsets, values = range(7, 7 + count), [bytes([number]) * size for number in range(count)]
    page = encode_reply(BINARY, m.FetchReply(offsets, values, 7 + count, size))
    assert page == encode_reply(BINARY, m.FetchReply(offsets, values, 7 + count))
    assert ReplyDecoder().feed(page) == [m.FetchReply(offsets, values, 7 + count)]


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("max_bytes", [1, 99, 100, 111, 112, 223, 224, 1_119, 1_120, 5_000])
def test_a_known_size_of_the_values_does_not_change_what_a_fetch_returns(dialect: Dialect, max_bytes: int) -> None:
    offsets, values = range(7, 27), [bytes(100)] * 20
    found = fetch_reply(dialect, offsets, values, max_bytes, value_size=100)
    assert found == fetch_reply(dialect, offsets, values, max_bytes)
    assert isinstance(found, m.FetchReply) and len(found.values) == max(1, min(20, max_bytes // (112 if dialect is BINARY else 100)))
