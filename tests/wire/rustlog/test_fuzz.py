"""The decoder returns a result for any input, and decodes what the encoder encodes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.limits import RUSTLOG_FRAME_BYTES_MAX
from headrace.wire.rustlog import Received, Refused, ReplyDecoder, RequestDecoder, encode_reply, encode_request, fetch_reply, sniff
from headrace.wire.rustlog import messages as m
from headrace.wire.rustlog.codec import Incoming
from headrace.wire.rustlog.messages import Dialect, Undecodable
from headrace.wire.sniff import Sniff
from tests.wire.rustlog.vectors import BINARY, JSON, REPLY_FRAMES, REQUEST_FRAMES, framed

SEEDS = [frame for _, frame, _ in REQUEST_FRAMES]
REPLY_SEEDS = [frame for _, frame, _ in REPLY_FRAMES]


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A few good frames with bytes flipped, cut out, doubled and put in; the length word right or wrong."""
    stream = bytearray(b"".join(rng.choices(seeds, k=rng.randrange(1, 4))))
    for _ in range(rng.randrange(5)):
        at = rng.randrange(len(stream)) if stream else 0
        kind = rng.randrange(5)
        if kind == 0 and stream:
            stream[at] = rng.randrange(256)
        elif kind == 1:
            del stream[at : at + rng.randrange(9)]
        elif kind == 2:
            stream[at:at] = stream[at : at + rng.randrange(40)]
        elif kind == 3:
            stream[at:at] = rng.choice(
                [b"\xff" * 4, b"\0" * 4, b"[", b"]", b"{", b"}", b'"', b"\\", b"1e9", b"-", b"true", b"null", b"\xc3"]
            )
        elif len(stream) > 4:
            stream[0:4] = (len(stream) - 4).to_bytes(4, "big")
    return bytes(stream)


def check(answers: list[Incoming]) -> None:
    """Check each result: a request has valid fields, an error can be sent."""
    for answer in answers:
        match answer:
            case Received(dialect, request):
                assert RequestDecoder().feed(encode_request(dialect, request)) == [answer]
            case Refused(dialect, error):
                assert error.message and ReplyDecoder().feed(encode_reply(dialect, error))


@pytest.mark.parametrize("seed", range(10))
def test_one_thousand_broken_streams_a_seed_are_answered_alike_whole_and_in_chunks(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1_000):
        stream = mutated(rng, SEEDS) if rng.random() < 0.9 else rng.randbytes(rng.randrange(64))
        whole = RequestDecoder().feed(stream)
        check(whole)
        chunks, decoder, at = list[Incoming](), RequestDecoder(), 0
        while at < len(stream):
            step = rng.randrange(1, 20)
            chunks += decoder.feed(stream[at : at + step])
            at += step
        assert chunks == whole


@pytest.mark.parametrize("seed", range(10))
def test_one_thousand_broken_replies_a_seed_decode_or_raise_one_error(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1_000):
        stream = mutated(rng, REPLY_SEEDS) if rng.random() < 0.9 else rng.randbytes(rng.randrange(64))
        try:
            replies = ReplyDecoder().feed(stream)
        except Undecodable:
            continue
        for reply in replies:
            assert not isinstance(reply, m.FetchReply) or len(reply.offsets) == len(reply.values)


@pytest.mark.parametrize("seed", range(10))
def test_the_sniffer_never_changes_its_mind(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1_000):
        stream = mutated(rng, SEEDS)[:64]
        answers = [sniff(stream[:cut]) for cut in range(len(stream) + 1)]
        decided = [answer for answer in answers if answer is not Sniff.MORE]
        assert len(set(decided)) <= 1
        assert not decided or answers[-len(decided) :] == decided


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
RECORDS = st.lists(st.binary(max_size=40), max_size=20) | st.lists(st.binary(min_size=7, max_size=7), max_size=20)
REQUESTS = st.one_of(
    st.builds(m.Produce, NAMES, U32, RECORDS),
    st.builds(m.Fetch, NAMES, U32, U64, U32, NAMES),
    st.builds(m.OffsetCommit, NAMES, U32, NAMES, U64),
    st.builds(m.OffsetFetch, NAMES, U32, NAMES),
    st.builds(m.CreateTopic, NAMES, U32),
    st.builds(m.DescribeTopic, NAMES),
    st.builds(m.DescribePartition, NAMES, U32),
    st.sampled_from([m.ListTopics(), m.MetricsFetch(), m.Ping()]),
)


def _fetched(values: list[bytes], start: int) -> m.FetchReply:
    end = start + len(values)
    return m.FetchReply(range(start, end), values, end)


STARTS = st.integers(0, 2**63)
REPLIES = st.one_of(
    st.builds(lambda start, count: m.ProduceReply(range(start, start + count)), STARTS, st.integers(0, 50)),
    st.builds(_fetched, RECORDS, STARTS),
    st.builds(m.OffsetCommitReply, st.booleans()),
    st.builds(m.OffsetFetchReply, st.none() | U64),
    st.builds(m.CreateTopicReply, st.booleans()),
    st.builds(m.ListTopicsReply, st.lists(st.tuples(NAMES, U32), max_size=5)),
    st.builds(m.DescribeTopicReply, NAMES, U32, st.lists(st.tuples(U32, U64), max_size=5)),
    st.builds(m.DescribePartitionReply, NAMES, U32, U64),
    st.builds(m.MetricsReply, st.text(st.characters(exclude_categories=["Cs"]))),
    st.just(m.Pong()),
)


@settings(max_examples=300)
@given(st.sampled_from(Dialect), REQUESTS)
def test_a_request_that_is_written_is_read_as_it_was(dialect: Dialect, request: m.Request) -> None:
    assert RequestDecoder().feed(encode_request(dialect, request)) == [Received(dialect, request)]


@settings(max_examples=300)
@given(st.sampled_from(Dialect), REPLIES)
def test_a_reply_that_is_written_is_read_as_it_was(dialect: Dialect, reply: m.Reply) -> None:
    assert ReplyDecoder().feed(encode_reply(dialect, reply)) == [reply]


@settings(max_examples=100)
@given(NAMES.filter(lambda text: "\n" not in text), U32 | st.just(0))
def test_an_error_keeps_its_text_in_both_dialects_and_its_code_in_one(message: str, code: int) -> None:
    code %= 65_536
    assert ReplyDecoder().feed(encode_reply(BINARY, m.ErrorReply(message, code))) == [m.ErrorReply(message, code)]
    assert ReplyDecoder().feed(encode_reply(JSON, m.ErrorReply(message, code))) == [m.ErrorReply(message)]


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_a_payload_of_any_bytes_is_answered(payload: bytes) -> None:
    check(RequestDecoder().feed(framed(payload)))


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=30), STARTS, st.integers(0, 2_000), st.sampled_from(Dialect))
def test_the_sizes_are_counted_as_they_are_encoded(values: list[bytes], start: int, max_bytes: int, dialect: Dialect) -> None:
    reply = fetch_reply(dialect, range(start, start + len(values)), values, max_bytes)
    assert isinstance(reply, m.FetchReply)
    count = len(reply.values)
    each = [len(value) + (12 if dialect is BINARY else 0) for value in values]
    assert count >= 1 and reply.values == values[:count] and reply.next_offset == start + count
    assert sum(each[:count]) <= max_bytes or count == 1
    assert count == len(values) or sum(each[: count + 1]) > max_bytes
    assert len(encode_reply(dialect, reply)) <= 4 + RUSTLOG_FRAME_BYTES_MAX
