"""A first frame is recognised from its head, and never taken from another protocol."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.wire import blipmq, figg, flymq
from headrace.wire.rustlog import encode_request, sniff
from headrace.wire.rustlog import messages as m
from headrace.wire.rustlog.messages import Dialect
from headrace.wire.sniff import Sniff
from tests.wire.rustlog.vectors import BINARY, REQUEST_FRAMES, framed


@pytest.mark.parametrize("frame", [frame for _, frame, _ in REQUEST_FRAMES])
def test_every_request_is_recognised_and_no_cut_of_it_is_denied(frame: bytes) -> None:
    answers = [sniff(frame[:cut]) for cut in range(len(frame) + 1)]
    assert answers[-1] is Sniff.YES
    first = answers.index(Sniff.YES)
    assert set(answers[:first]) <= {Sniff.MORE} and set(answers[first:]) == {Sniff.YES}


@pytest.mark.parametrize("dialect", Dialect)
def test_a_large_request_is_recognised_by_its_head(dialect: Dialect) -> None:
    frame = encode_request(dialect, m.Produce("orders", 0, [bytes(1_000)] * 500))
    assert sniff(frame[:32]) is Sniff.YES


@pytest.mark.parametrize("text", [' {"Ping":{}}', '\t\r\n {"', '"Ping"'])
def test_white_space_before_json_is_looked_through(text: str) -> None:
    assert sniff(framed(text)) is Sniff.YES


OTHERS = {
    # BlipMQ: length, type, correlation id, payload
    "blipmq hello": "0000000b 01 0000000000000001 0001",
    "blipmq auth": "00000012 02 0000000000000002 0007 6465762d6b6579",
    "blipmq auth, as long as a Fetch": "00000015 02 0000000000000002 000a 30313233343536373839",
    "blipmq subscribe": "00000010 04 0000000000000003 0004 64656d6f 01",
    "blipmq publish": "00000012 03 0000000000000004 01 0004 64656d6f 6869",
    "blipmq ack": "00000011 05 0000000000000003 000000000000002a",
    "blipmq ping": "00000009 07 0000000000000038",
    "blipmq poll": "00000011 09 0000000000000005 000000000000002a",
    # Figg: type, version, length, payload
    "figg attach": "0001 0001 00000011 0000 00000003 666f6f 0000000000000000",
    "figg publish": "0005 0001 00000016 00000003 666f6f 0000000000000000 00000003 626172",
    "figg ping": "0008 0001 00000008 0000000000003039",
    # FlyMQ: magic
    "flymq": "af 01 01 00 00000000",
    "http": "474554202f20485454502f312e310d0a",
    "tls": "16 03 01 00c8 01 0000c4 0303",
    # ours, but broken
    "empty frame": "00000000",
    "too long": "00a00001 7b",
    "something after the last field": "00000009 05 0001 74 00000002 00",
    "ping with a body": "00000002 ff 00",
    "no topic": "00000007 05 0000 00000002",
    "topic longer than the frame": "00000008 05 0074 74 00000002",
    "more records than bytes": "0000000f 01 0001 74 00000000 00000002 000000",
    "one record that does not end with the frame": "00000012 01 0001 74 00000000 00000001 00000001 6162",
    "only white space": "00000003 202020",
    "an array": "00000002 5b5d",
    "reply error": "00000008 fe 000a 0003 6e6f21",
}


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_not_an_exact_request_is_denied_and_stays_denied(text: str) -> None:
    frame = bytes.fromhex(text)
    answers = [sniff(frame[:cut]) for cut in range(len(frame) + 1)]
    assert answers[-1] is Sniff.NO
    first = answers.index(Sniff.NO)
    assert set(answers[:first]) <= {Sniff.MORE} and set(answers[first:]) == {Sniff.NO}


LONG = "n" * 249
FIRST_REQUESTS = [
    m.Produce("orders", 0, [b"a" * 100] * 500),
    m.Produce("o" * 64, 0, [b"a"]),
    m.Produce(LONG, 0, [b"a"]),
    m.Produce(LONG, 0, []),
    m.Fetch(LONG, 0, 0, 1_024, LONG),
    m.Fetch("o" * 64, 0, 0, 1_024, "g" * 64),
    m.OffsetCommit("t", 0, LONG, 3),
    m.OffsetFetch(LONG, 0, "g"),
    m.CreateTopic(LONG, 3),
]


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("request_", FIRST_REQUESTS)
def test_an_answer_never_needs_more_than_a_hundred_bytes(dialect: Dialect, request_: m.Request) -> None:
    assert sniff(encode_request(dialect, request_)[:100]) is Sniff.YES


@pytest.mark.parametrize("request_", [m.CreateTopic("n" * 250, 1), m.Produce("n" * 250, 0, []), m.Fetch("t", 0, 0, 1, "n" * 250)])
def test_a_name_no_topic_or_group_can_have_is_denied(request_: m.Request) -> None:
    assert sniff(encode_request(BINARY, request_)) is Sniff.NO


def test_white_space_is_not_looked_through_for_ever() -> None:
    assert sniff(framed(b" " * 63 + b"{}")) is Sniff.YES
    assert sniff(framed(b" " * 64 + b"{}")) is Sniff.NO


def test_a_request_followed_by_others_is_still_recognised() -> None:
    assert sniff(encode_request(BINARY, m.Ping()) + b"\xaf\xaf\xaf") is Sniff.YES


@pytest.mark.parametrize("other", [blipmq.sniff, figg.sniff, flymq.sniff], ids=["blipmq", "figg", "flymq"])
@pytest.mark.parametrize("frame", [frame for _, frame, _ in REQUEST_FRAMES])
def test_no_neighbour_claims_a_request(other: Callable[[bytes], Sniff], frame: bytes) -> None:
    assert Sniff.YES not in {other(frame[:cut]) for cut in range(1, len(frame) + 1)}
