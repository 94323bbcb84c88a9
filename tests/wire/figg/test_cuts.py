"""Whole, byte by byte, at random places: the same messages."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.wire.figg import Attach, client_decoder, encode, server_decoder
from tests.wire.figg import streams
from tests.wire.figg.streams import cut, flat_messages

UNKNOWN = bytes.fromhex("00ff 0001 00000005 6162636465")
TO_SERVER = b"".join(
    [
        streams.ATTACH_FOO_FROM_7,
        encode.publish("foo", range(200), [b"%03d" % index for index in range(200)]),
        UNKNOWN,
        streams.ACK_0,
        encode.publish("bar", [9], [b"x" * 2_000]),
        streams.PING_12345,
        streams.DETACH_FOO,
    ]
)
TO_CLIENT = b"".join(
    [
        streams.ATTACHED_FOO_0,
        encode.data("foo", range(1, 201), [b"%03d" % index for index in range(200)]),
        UNKNOWN,
        encode.acks([1, 2, 3]),
        streams.PONG_12345,
        streams.DETACHED_FOO,
    ]
)


@pytest.mark.parametrize("at", range(1, len(streams.ATTACH_FOO_FROM_7)))
def test_a_frame_cut_anywhere_decodes_to_the_same_message(at: int) -> None:
    decoder = server_decoder()
    assert list(decoder.feed(streams.ATTACH_FOO_FROM_7[:at])) == []
    assert list(decoder.feed(streams.ATTACH_FOO_FROM_7[at:])) == [Attach("foo", 7)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 64, 1_000])
def test_equal_chunks_decode_to_what_the_whole_does(size: int) -> None:
    assert flat_messages(server_decoder(), cut(TO_SERVER, size)) == flat_messages(server_decoder(), [TO_SERVER])
    assert flat_messages(client_decoder(), cut(TO_CLIENT, size)) == flat_messages(client_decoder(), [TO_CLIENT])
    assert len(flat_messages(server_decoder(), [TO_SERVER])) == 204
    assert len(flat_messages(client_decoder(), [TO_CLIENT])) == 206


@given(st.lists(st.integers(0, len(TO_SERVER)), max_size=40))
@settings(max_examples=200)
def test_random_chunks_decode_to_what_the_whole_does(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(TO_SERVER)]
    chunks = [TO_SERVER[begin:end] for begin, end in pairwise(edges)]
    assert flat_messages(server_decoder(), chunks) == flat_messages(server_decoder(), [TO_SERVER])


def test_a_large_value_in_many_small_chunks_is_held_once() -> None:
    """Pieces are gathered in one growing buffer: no list of them, no copy of everything for each."""
    value = random.Random(3).randbytes(2 << 20)
    decoder = server_decoder()
    chunks = cut(encode.publish("foo", [1], [value]), 100)
    for chunk in chunks[:-1]:
        assert list(decoder.feed(chunk)) == []
    assert decoder.held_bytes == 100 * (len(chunks) - 1)
    assert flat_messages(decoder, chunks[-1:]) == [("PublishBatch", "foo", 1, value)]
    assert decoder.held_bytes == 0
