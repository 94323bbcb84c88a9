"""The meters see a stream in whatever pieces the kernel hands out, and must count it the same."""

from __future__ import annotations

import random

import pytest

from headrace.bench.doors.figg import AckMeter, FiggLoad
from headrace.bench.faults import BenchFailed
from headrace.bench.load import Meter, sample_values
from headrace.bench.peers import nats, redis
from headrace.wire.figg import encode


def feed(meter: Meter, stream: bytes, cuts: list[int]) -> bytes:
    """Hand over the stream in pieces, each in a buffer with rubbish behind it, as a reused buffer has."""
    sent = b""
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        if end > begin:
            sent += meter.feed(bytearray(stream[begin:end] + b"-\0$\r\n-ERR"), end - begin)
    return sent


def pieces(length: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return sorted(dice.randrange(length) for _ in range(dice.randrange(1, 12)))


FIGG_ACKS = encode.acks([0, 4, 5, 999])
FIGG_HISTORY = encode.attached("bench", 0) + encode.data("bench", range(1, 21), sample_values(30, 20))
NATS_ACKS = b"".join(b'MSG _I.a 2 %d\r\n{"stream":"bench", "seq":%d}\r\n' % (28 + len(str(seq)), seq) for seq in range(1, 121))
REDIS_ANSWERS = b"".join(b"$15\r\n1794729371877-%d\r\n" % (index % 10) for index in range(50))


@pytest.mark.parametrize("cut", range(len(FIGG_ACKS)))
def test_figg_acks_cut_anywhere_count_to_the_last_sequence_number(cut: int) -> None:
    meter = AckMeter()
    feed(meter, FIGG_ACKS, [cut])
    assert meter.count == 1000


def test_figg_acks_byte_by_byte_never_count_an_ack_before_it_is_whole() -> None:
    meter, seen = AckMeter(), []
    for byte in FIGG_ACKS:
        meter.feed(bytearray([byte]), 1)
        seen.append(meter.count)
    assert seen == [0] * 15 + [1] * 16 + [5] * 16 + [6] * 16 + [1000]


def test_a_figg_message_that_is_no_ack_is_refused() -> None:
    with pytest.raises(BenchFailed, match="type 9"):
        AckMeter().feed(bytearray(encode.pong(7)), 16)


@pytest.mark.parametrize("seed", range(50))
def test_figg_history_in_any_pieces_counts_every_record(seed: int) -> None:
    meter = FiggLoad().consume("bench", 20, 30).meter
    feed(meter, FIGG_HISTORY, pieces(len(FIGG_HISTORY), seed))
    assert meter.count == 20


@pytest.mark.parametrize("seed", range(10))
def test_figg_history_with_a_gap_is_refused(seed: int) -> None:
    gap = encode.attached("bench", 0) + encode.data("bench", [*range(1, 20), 21], sample_values(30, 20))
    with pytest.raises(BenchFailed, match="last of 20 records carries offset 21"):
        feed(FiggLoad().consume("bench", 20, 30).meter, gap, pieces(len(gap), seed))


def test_figg_history_with_a_record_too_many_is_refused() -> None:
    with pytest.raises(BenchFailed, match="bytes more than 19 records"):
        feed(FiggLoad().consume("bench", 19, 30).meter, FIGG_HISTORY, [])


@pytest.mark.parametrize("seed", range(50))
def test_nats_acks_in_any_pieces_count_to_the_last_sequence_number(seed: int) -> None:
    meter = nats.AckMeter()
    feed(meter, NATS_ACKS, pieces(len(NATS_ACKS), seed))
    assert meter.count == 120


def test_a_publish_that_nats_refuses_ends_the_run() -> None:
    refused = b'MSG _I.a 2 60\r\n{"error":{"code":429,"description":"too many requests"}}\r\n'
    with pytest.raises(BenchFailed, match="too many requests"):
        nats.AckMeter().feed(bytearray(refused), len(refused))


def test_a_nats_pull_asks_again_for_each_batch_that_came_whole() -> None:
    meter = nats.PullMeter(b"NEXT")
    stream = b"\0" * (2 * nats.PULL_BATCH + 1)
    assert feed(meter, stream, [5, nats.PULL_BATCH]) == b"NEXTNEXT"
    assert meter.count == 2 * nats.PULL_BATCH + 1


@pytest.mark.parametrize("seed", range(50))
def test_redis_answers_in_any_pieces_are_all_counted(seed: int) -> None:
    meter = redis.ReplyMeter()
    feed(meter, REDIS_ANSWERS, pieces(len(REDIS_ANSWERS), seed))
    assert meter.count == 50


@pytest.mark.parametrize("stream", [b"-OOM no room\r\n", b"$3\r\n1-1\r\n-OOM no room\r\n"])
def test_an_error_of_redis_ends_the_run(stream: bytes) -> None:
    with pytest.raises(BenchFailed, match="redis-server: -OOM no room"):
        redis.ReplyMeter().feed(bytearray(stream), len(stream))


def test_a_page_of_redis_is_followed_by_the_one_after_its_last_identifier() -> None:
    page = b"".join(b"*2\r\n$3\r\n7-%d\r\n*2\r\n$1\r\nv\r\n$2\r\n\0x\r\n" % (index % 10) for index in range(redis.PAGE))
    assert feed(redis.PageMeter(), page, pieces(len(page), 1)) == redis.page_after(b"(7-9")
