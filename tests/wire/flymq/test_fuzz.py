"""Random inputs. The decoder never raises, gives the same result for any cuts, and decodes what the encoder encodes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import WireError
from headrace.wire.flymq import Dialect, ReplyDecoder, RequestDecoder, decode_reply, encode_reply, encode_request
from headrace.wire.flymq.framing import decode_failure
from headrace.wire.flymq.messages import (
    Broken,
    Commit,
    Fetch,
    Fetched,
    ProduceBatch,
    RecordMetadataBatch,
    Reply,
    ReplyFrame,
    Request,
)
from headrace.wire.flymq.table import SPOKEN

from .samples import DIALECTS, REPLIES, REQUESTS, bytewise, chunks, decoded, decoded_replies, flat, flat_replies, raw

INPUTS = 10_000

topics = st.text(max_size=20)
partitions = st.integers(-(2**31), 2**31 - 1)
offsets = st.integers(0, 2**64 - 1)


def mutated(dice: random.Random, stream: bytes) -> bytes:
    """A good stream with a few things wrong."""
    damaged = bytearray(stream)
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(damaged) + 1)
        match dice.randrange(4):
            case 0:
                damaged[place : place + 1] = dice.randbytes(1)
            case 1:
                damaged[place:place] = dice.randbytes(dice.randint(1, 6))
            case 2:
                del damaged[place : place + dice.randint(1, 6)]
            case _:
                damaged[place : place + 4] = dice.choice([b"\xff\xff\xff\xff", bytes(4), b"\x02\x00\x00\x01"])
    return bytes(damaged)


def test_ten_thousand_damaged_request_streams_decode_alike_however_they_are_cut(proof: Callable[[str, int], None]) -> None:
    dice = random.Random(20_240_130)
    encoded = [encode_request(request) for request in REQUESTS] + [encode_request(ProduceBatch("t", [b"12345"] * 30))]
    outcomes: set[str] = set()
    for number in range(INPUTS):
        if number % 10 == 0:
            stream = dice.randbytes(dice.randint(0, 60))
        elif number % 10 == 1:
            stream = raw(dice.choice(sorted(SPOKEN)), dice.randbytes(dice.randint(0, 60)), flags=dice.choice([0, 1, 1, 1, 2, 3, 4]))
        else:
            stream = mutated(dice, b"".join(dice.choices(encoded, k=dice.randint(1, 4))))
        whole = decoded([stream])
        assert decoded(chunks(stream, number, longest=30)) == whole
        if number % 20 == 0:
            assert decoded(bytewise(stream)) == whole
        outcomes.update(type(event).__name__ for event in whole)
    assert {"tuple", "Malformed", "Broken", "UnknownOpcode", "Fetch", "ListGroups"} <= outcomes
    proof("damaged FlyMQ streams", INPUTS)


def test_ten_thousand_damaged_replies_raise_nothing_but_wire_errors(proof: Callable[[str, int], None]) -> None:
    dice = random.Random(20_240_131)
    encoded = [encode_reply(opcode, reply, dialect) for opcode, reply in REPLIES for dialect in DIALECTS]
    faults = 0
    for number in range(INPUTS):
        stream = mutated(dice, b"".join(dice.choices(encoded, k=dice.randint(1, 3))))
        events = ReplyDecoder().feed(stream)
        assert decoded_replies(chunks(stream, number, longest=30)) == flat_replies(events)
        for event in events:
            if isinstance(event, ReplyFrame) and event.opcode in SPOKEN:
                try:
                    decode_reply(event, dice.choice(DIALECTS))
                except WireError:
                    faults += 1
            elif isinstance(event, Broken):
                faults += 1
    assert faults > INPUTS // 10
    proof("damaged FlyMQ replies", INPUTS)


@given(st.binary(max_size=200))
def test_any_bytes_at_all_leave_the_decoders_standing(stream: bytes) -> None:
    assert decoded([stream]) == decoded(bytewise(stream))
    assert decoded([b"\xaf\x01\x01\x01" + stream]) == decoded(bytewise(b"\xaf\x01\x01\x01" + stream))
    assert decode_failure(stream).message is not None


@given(
    topics,
    st.lists(
        st.tuples(st.binary(max_size=30), st.none() | st.binary(min_size=1, max_size=5), st.just(-1) | partitions), min_size=1, max_size=60
    ),
)
def test_any_batch_reads_back_as_it_was_written(topic: str, rows: list[tuple[bytes, bytes | None, int]]) -> None:
    values, keys, chosen = (list(column) for column in zip(*rows, strict=True))
    batch = ProduceBatch(topic, values, keys, chosen)
    assert flat(RequestDecoder().feed(encode_request(batch))) == flat([batch])


@given(topics, topics, partitions, offsets, st.none() | topics)
def test_any_fetch_and_commit_read_back_as_they_were_written(
    topic: str, group: str, partition: int, offset: int, pattern: str | None
) -> None:
    requests: list[Request] = [Commit(topic, group, partition, offset), Fetch(topic, partition, offset, 5, pattern)]
    assert RequestDecoder().feed(b"".join(map(encode_request, requests))) == requests


@given(
    st.lists(st.tuples(offsets, st.binary(max_size=30), st.none() | st.binary(min_size=1, max_size=5)), max_size=60),
    offsets,
    st.sampled_from(DIALECTS),
)
def test_any_fetched_records_read_back_as_they_were_written(
    rows: list[tuple[int, bytes, bytes | None]], next_offset: int, dialect: Dialect
) -> None:
    keys = [key for _, _, key in rows]
    fetched = Fetched([row[0] for row in rows], [row[1] for row in rows], next_offset, keys if any(keys) else None)
    assert replied(0x07, fetched, dialect) == fetched


@given(topics, st.lists(st.tuples(partitions, offsets, st.integers(-(2**63), 2**63 - 1), partitions, partitions), min_size=1, max_size=40))
def test_any_metadata_reads_back_as_it_was_written(topic: str, rows: list[tuple[int, int, int, int, int]]) -> None:
    batch = RecordMetadataBatch(topic, *(list(column) for column in zip(*rows, strict=True)))
    assert ReplyDecoder().feed(encode_reply(0x01, batch)) == [batch]


@given(topics, partitions, st.integers(0, 2**63 - 400), st.integers(1, 300), st.integers(-(2**63), 2**63 - 1), partitions, partitions)
def test_metadata_in_columns_has_the_bytes_of_single_rows(
    topic: str, partition: int, first: int, count: int, timestamp: int, key_size: int, value_size: int
) -> None:
    def batch(offsets: Sequence[int]) -> RecordMetadataBatch:
        size = len(offsets)
        return RecordMetadataBatch(topic, [partition] * size, offsets, [timestamp] * size, [key_size] * size, [value_size] * size)

    dense = range(first, first + count)
    with_gaps = [offset + index % 3 for index, offset in enumerate(dense)]
    for offsets in (dense, list(dense), with_gaps):
        assert encode_reply(0x01, batch(offsets)) == b"".join(encode_reply(0x01, batch([offset])) for offset in offsets)


def replied(opcode: int, reply: Reply, dialect: Dialect) -> Reply:
    (event,) = ReplyDecoder().feed(encode_reply(opcode, reply, dialect))
    assert isinstance(event, ReplyFrame)
    return decode_reply(event, dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("index", range(1, len(REPLIES)))
def test_every_reply_reads_back_in_both_dialects(index: int, dialect: Dialect) -> None:
    opcode, reply = REPLIES[index]
    assert replied(opcode, reply, dialect) == reply
