"""Figg is known by its first bytes."""

from __future__ import annotations

import pytest

from headrace.wire.figg import encode, sniff
from headrace.wire.sniff import Sniff
from tests.wire.figg import streams

OPENERS = [
    streams.ATTACH_FOO_LATEST,
    streams.ATTACH_FOO_FROM_7,
    streams.PUBLISH_FOO_0_BAR,
    streams.DETACH_FOO,
    streams.PING_12345,
    encode.publish("", [0], [b""]),
    encode.detach(""),
]
OTHERS = [
    b"GET / HTTP/1.1\r\n",
    b"\xaf\x01\x01\x00",
    b"\x16\x03\x01\x02\x00\x01",
    b"\x00\x00\x00\x12\x01\x01\x00\x00\x00\x00\x00\x00\x00",
    b'\x00\x05\x00\x01{"topic": "a"}',
    b"\x00\x05\x00\x02\x00\x00\x00\x16",
    streams.ACK_0,
    b"\x00\x08\x00\x01\x00\x00\x00\x09",
    b"\x00\x05\x00\x01\x00\x00\x00\x16\x00\x00\x00\x63",
]


@pytest.mark.parametrize("opener", OPENERS)
def test_every_first_message_is_known_and_its_beginnings_ask_for_more(opener: bytes) -> None:
    answers = [sniff(opener[:size]) for size in range(1, len(opener) + 1)]
    assert answers[-1] is Sniff.YES
    assert Sniff.NO not in answers
    assert answers == sorted(answers, key=[Sniff.MORE, Sniff.YES].index), "a yes is never taken back"


@pytest.mark.parametrize("other", OTHERS)
def test_other_first_bytes_are_turned_away(other: bytes) -> None:
    assert sniff(other) is Sniff.NO
