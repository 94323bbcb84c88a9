"""Whole, byte by byte or cut anywhere: the same messages."""

from __future__ import annotations

import itertools
import random

import pytest

from headrace.wire.rustlog import ReplyDecoder, RequestDecoder
from headrace.wire.rustlog.codec import Incoming
from tests.wire.rustlog.vectors import REPLY_FRAMES, REQUEST_FRAMES, framed

REQUESTS = b"".join(frame for _, frame, _ in REQUEST_FRAMES) + framed("{}") + framed(b"\x07") + framed(b"\x80")
REPLIES = b"".join(frame for _, frame, _ in REPLY_FRAMES)


def fed(stream: bytes, cuts: list[int]) -> list[Incoming]:
    decoder = RequestDecoder()
    edges = [0, *cuts, len(stream)]
    return [one for start, stop in itertools.pairwise(edges) for one in decoder.feed(stream[start:stop])]


def test_requests_arriving_byte_by_byte_are_the_same_requests() -> None:
    whole = RequestDecoder().feed(REQUESTS)
    assert len(whole) == len(REQUEST_FRAMES) + 3
    assert fed(REQUESTS, list(range(1, len(REQUESTS)))) == whole


@pytest.mark.parametrize("seed", range(50))
def test_requests_cut_at_random_are_the_same_requests(seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(REQUESTS)), rng.randrange(1, 40)))
    assert fed(REQUESTS, cuts) == RequestDecoder().feed(REQUESTS)


def test_requests_cut_in_two_anywhere_are_the_same_requests() -> None:
    whole = RequestDecoder().feed(REQUESTS)
    for cut in range(1, len(REQUESTS)):
        assert fed(REQUESTS, [cut]) == whole


def test_replies_arriving_byte_by_byte_or_cut_in_two_are_the_same_replies() -> None:
    whole = ReplyDecoder().feed(REPLIES)
    assert len(whole) == len(REPLY_FRAMES)
    decoder = ReplyDecoder()
    assert [reply for at in range(len(REPLIES)) for reply in decoder.feed(REPLIES[at : at + 1])] == whole
    for cut in range(1, len(REPLIES)):
        halves = ReplyDecoder()
        assert halves.feed(REPLIES[:cut]) + halves.feed(REPLIES[cut:]) == whole


def test_a_frame_is_out_as_soon_as_its_last_byte_is_in() -> None:
    for _, frame, _ in REQUEST_FRAMES:
        decoder = RequestDecoder()
        assert decoder.feed(frame[:-1]) == []
        assert len(decoder.feed(frame[-1:])) == 1


def test_feeding_nothing_changes_nothing() -> None:
    decoder = RequestDecoder()
    assert decoder.feed(b"") == []
    assert decoder.feed(REQUESTS[:5]) == [] and decoder.feed(b"") == []
    assert decoder.feed(REQUESTS[5:]) == RequestDecoder().feed(REQUESTS)
