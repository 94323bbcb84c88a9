"""Schemas on the wire: what the layouts alone do not say."""

from __future__ import annotations

import struct

import pytest

from headrace.wire.flymq import ReplyDecoder, RequestDecoder, decode_reply, encode_reply, encode_request
from headrace.wire.flymq import schema_messages as s
from headrace.wire.flymq.messages import Malformed, ReplyFrame

from .samples import raw


def s16(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def b32(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def only(frame: bytes) -> object:
    (event,) = RequestDecoder().feed(frame)
    return event


@pytest.mark.parametrize("value", [b"{}", b"x" * 70_000, b"\x00\x05order"])
@pytest.mark.parametrize("tail", [b"", b32(b"k") + struct.pack(">i", 2)])
def test_value_and_schema_are_told_apart_in_either_order(value: bytes, tail: bytes) -> None:
    key, partition = (b"k", 2) if tail else (b"", -1)
    meant = s.ProduceWithSchema("orders", "order", value, key, partition)
    assert only(raw(0x14, s16("orders") + s16("order") + b32(value) + tail)) == meant
    assert only(raw(0x14, s16("orders") + b32(value) + s16("order") + tail)) == meant


def test_where_both_orders_fit_both_meanings_are_kept() -> None:
    event = only(raw(0x14, s16("t") + s16("") + b32(b"")))
    assert isinstance(event, s.ProduceWithSchema)
    assert [event, event.other] == [s.ProduceWithSchema("t", "", b"")] * 2


def test_a_value_that_fits_neither_order_is_malformed() -> None:
    assert only(raw(0x14, s16("t") + b"\x00\x01")) == Malformed(0x14, "neither order of schema and value fits the payload")


def test_the_type_may_have_a_short_or_a_long_size() -> None:
    for narrow in (True, False):
        request = s.RegisterSchema("order", s.SchemaWord("json", narrow), b"{}")
        assert only(encode_request(request)) == request


def test_a_client_of_the_original_reads_the_schema_as_a_list_of_one() -> None:
    reply = s.SchemaReply([s.SchemaEntry("order", "json", 2)], "order-v2", b"{}", "full", 1)
    (frame,) = ReplyDecoder().feed(encode_reply(0x11, reply))
    assert isinstance(frame, ReplyFrame)
    assert decode_reply(ReplyFrame(0x12, frame.payload)) == s.SchemaEntries([s.SchemaEntry("order", "json", 2)])
