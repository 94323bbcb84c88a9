"""Every example means what it says, and we write it the same way."""

from __future__ import annotations

import re

import pytest

from headrace.wire.rustlog import Received, Refused, ReplyDecoder, RequestDecoder, encode_reply, encode_request
from headrace.wire.rustlog import messages as m
from headrace.wire.rustlog.messages import Dialect, Undecodable
from tests.wire.rustlog.vectors import JSON, REPLY_FRAMES, REQUEST_FRAMES, SPEC_COMMENTED, SPEC_REPLIES, SPEC_REQUESTS, framed


@pytest.mark.parametrize("text, request_", SPEC_REQUESTS)
def test_a_request_printed_in_the_specification_is_understood(text: str, request_: m.Request) -> None:
    assert RequestDecoder().feed(framed(text)) == [Received(JSON, request_)]


@pytest.mark.parametrize("text, reply", SPEC_REPLIES)
def test_a_reply_printed_in_the_specification_is_understood(text: str, reply: m.Reply) -> None:
    assert ReplyDecoder().feed(framed(text)) == [reply]


@pytest.mark.parametrize("text, reply", SPEC_REPLIES)
def test_a_reply_of_the_specification_is_written_without_its_white_space(text: str, reply: m.Reply) -> None:
    quoted = re.split(r'("[^"]*")', text)
    compact = "".join(part if part.startswith('"') else re.sub(r"\s", "", part) for part in quoted)
    assert encode_reply(JSON, reply) == framed(compact)


@pytest.mark.parametrize("text, message", SPEC_COMMENTED)
def test_an_example_with_comments_is_no_json_and_is_refused_until_they_are_gone(text: str, message: m.Request | m.Reply) -> None:
    (refused,) = RequestDecoder().feed(framed(text))
    assert isinstance(refused, Refused)
    assert refused.error.message.startswith("failed to parse request: ")
    bare = framed(re.sub(r" *//.*", "", text))
    if isinstance(message, m.FetchReply):
        with pytest.raises(Undecodable):
            ReplyDecoder().feed(framed(text))
        assert ReplyDecoder().feed(bare) == [message]
    else:
        assert RequestDecoder().feed(bare) == [Received(JSON, message)]  # type: ignore[arg-type]  # of the replies only Fetch is commented


@pytest.mark.parametrize("dialect, frame, request_", REQUEST_FRAMES)
def test_a_request_frame_is_read_and_written_to_the_byte(dialect: Dialect, frame: bytes, request_: m.Request) -> None:
    assert RequestDecoder().feed(frame) == [Received(dialect, request_)]
    assert encode_request(dialect, request_) == frame


@pytest.mark.parametrize("dialect, frame, reply", REPLY_FRAMES)
def test_a_reply_frame_is_read_and_written_to_the_byte(dialect: Dialect, frame: bytes, reply: m.Reply) -> None:
    assert ReplyDecoder().feed(frame) == [reply]
    assert encode_reply(dialect, reply) == frame


@pytest.mark.parametrize("name, request_", [("Ping", m.Ping()), ("ListTopics", m.ListTopics()), ("MetricsFetch", m.MetricsFetch())])
@pytest.mark.parametrize(
    "form", ['"{}"', '{{"{}":null}}', '{{"{}":{{}}}}', '{{"{}":{{"later":[1]}}}}', ' \t\r\n"{}"\n', '\t{{"{}" : null }}\r\n']
)
def test_a_request_without_fields_has_several_spellings(form: str, name: str, request_: m.Request) -> None:
    assert RequestDecoder().feed(framed(form.format(name))) == [Received(JSON, request_)]


@pytest.mark.parametrize("group", ["", ',"group_id":null', ',"group_id":""'])
def test_no_group_is_written_as_null_as_nothing_or_as_an_empty_name(group: str) -> None:
    text = '{"Fetch":{"max_bytes":5,"offset":18446744073709551615,"partition":4294967295,"topic":"t"' + group + "}}"
    assert RequestDecoder().feed(framed(text)) == [Received(JSON, m.Fetch("t", 4294967295, 18446744073709551615, 5))]


def test_fields_may_come_in_any_order_and_unknown_ones_are_ignored() -> None:
    text = '{"Produce":{"trace":{"id":[1,2,{}]},"records":[[1]],"topic":"t","acks":"all","partition":0}}'
    assert RequestDecoder().feed(framed(text)) == [Received(JSON, m.Produce("t", 0, [b"\x01"]))]


def test_an_escaped_name_is_the_same_name() -> None:
    text = r'{"Pr\u006fduce":{"t\u006fpic":"\u00fc\ud83d\ude00","partition":0,"records":[]}}'
    assert RequestDecoder().feed(framed(text)) == [Received(JSON, m.Produce("ü😀", 0, []))]


def test_a_binary_request_may_be_followed_by_ignored_bytes() -> None:
    frame = framed(bytes.fromhex("05 0001 74 00000002") + b"later")
    assert RequestDecoder().feed(frame) == [Received(Dialect.BINARY, m.CreateTopic("t", 2))]


def test_binary_replies_have_no_offsets_so_they_are_counted_back_from_the_next_one() -> None:
    frame = encode_reply(Dialect.BINARY, m.FetchReply([7, 8], [b"a", b"bc"], 9))
    assert ReplyDecoder().feed(frame) == [m.FetchReply(range(7, 9), [b"a", b"bc"], 9)]


@pytest.mark.parametrize("reply", [m.FetchReply([7, 9], [b"a", b"b"], 10), m.FetchReply([7, 8], [b"a", b"b"], 12), m.ProduceReply([1, 3])])
def test_a_gap_is_never_written_in_binary(reply: m.Reply) -> None:
    with pytest.raises(AssertionError, match="gap"):
        encode_reply(Dialect.BINARY, reply)
