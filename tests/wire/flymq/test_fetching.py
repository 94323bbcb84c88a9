"""FETCH replies, in bytes."""

from __future__ import annotations

import pytest

from headrace.errors import WireError
from headrace.wire.flymq import Dialect, Opcode, decode_reply, encode_reply
from headrace.wire.flymq.fetching import FRONT_BYTES, RECORD_OVERHEAD_BYTES
from headrace.wire.flymq.messages import Fetched, ReplyFrame

FETCHED = Fetched([5, 7], [b"vv", b"w"], 9, [b"k", None])
SPEC = bytes.fromhex("00000002  00000001 6B 00000002 7676 0000000000000005  00000000 00000001 77 0000000000000007  0000000000000009")
SDK = bytes.fromhex("00000002 0000000000000009  0000000000000005 00000001 6B 00000002 7676  0000000000000007 00000000 00000001 77")


def test_the_specification_puts_the_offset_behind_its_record() -> None:
    assert encode_reply(Opcode.FETCH, FETCHED, Dialect.SPEC)[8:] == SPEC
    assert decode_reply(ReplyFrame(Opcode.FETCH, SPEC), Dialect.SPEC) == FETCHED


def test_the_original_puts_the_offset_before_its_record() -> None:
    assert encode_reply(Opcode.FETCH, FETCHED, Dialect.SDK)[8:] == SDK
    assert decode_reply(ReplyFrame(Opcode.FETCH, SDK), Dialect.SDK) == FETCHED


@pytest.mark.parametrize("dialect", list(Dialect))
def test_fetch_binary_has_the_layout_of_the_original_in_both_dialects(dialect: Dialect) -> None:
    assert encode_reply(Opcode.FETCH_BINARY, FETCHED, dialect)[8:] == SDK
    assert decode_reply(ReplyFrame(Opcode.FETCH_BINARY, SDK), dialect) == FETCHED


def test_without_records_the_two_layouts_coincide() -> None:
    empty = Fetched([], [], 12)
    assert encode_reply(Opcode.FETCH, empty, Dialect.SPEC) == encode_reply(Opcode.FETCH, empty, Dialect.SDK)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 80, 200])
def test_a_reply_is_as_long_as_its_parts(dialect: Dialect, count: int) -> None:
    fetched = Fetched(list(range(count)), [b"value"] * count, count)
    payload = encode_reply(Opcode.FETCH, fetched, dialect)[8:]
    assert len(payload) == FRONT_BYTES + count * (RECORD_OVERHEAD_BYTES + 5)
    assert decode_reply(ReplyFrame(Opcode.FETCH, payload), dialect) == fetched


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("odd", [0, 1, 15, 16, 17, 63])
def test_one_odd_record_among_equal_ones_is_read_for_what_it_is(dialect: Dialect, odd: int) -> None:
    for key, value in ((b"k", b"value"), (None, b"longer"), (None, b""), (b"k", b"")):
        values, keys = [b"value"] * 64, [None] * 64
        rows: list[bytes | None] = [*keys[:odd], key, *keys[odd + 1 :]]
        values[odd] = value
        fetched = Fetched(list(range(64)), values, 64, rows if key else None)
        payload = encode_reply(Opcode.FETCH, fetched, dialect)[8:]
        assert decode_reply(ReplyFrame(Opcode.FETCH, payload), dialect) == fetched


@pytest.mark.parametrize(("payload", "dialect"), [(SPEC, Dialect.SPEC), (SDK, Dialect.SDK)])
def test_a_reply_cut_anywhere_is_refused(payload: bytes, dialect: Dialect) -> None:
    for cut in range(len(payload)):
        with pytest.raises(WireError):
            decode_reply(ReplyFrame(Opcode.FETCH, payload[:cut]), dialect)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("count", [1, 2, 10, 16, 17])
@pytest.mark.parametrize("size", [1, 100, 1_024, 1_025])
def test_a_known_size_of_the_values_does_not_change_the_reply(dialect: Dialect, count: int, size: int) -> None:
    offsets, values = range(70_000, 70_000 + count), [bytes([number]) * size for number in range(count)]
    reply = encode_reply(Opcode.FETCH, Fetched(offsets, values, 70_500, None, size), dialect)
    assert reply == encode_reply(Opcode.FETCH, Fetched(offsets, values, 70_500), dialect)
    assert decode_reply(ReplyFrame(Opcode.FETCH, reply[8:]), dialect) == Fetched(list(offsets), values, 70_500)
