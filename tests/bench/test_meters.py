"""Meters count a stream the same however it is cut into reads."""

from __future__ import annotations

import random

import pytest

from headrace.bench.children import BenchFailed
from headrace.bench.load import Meter, sample_values
from headrace.bench.peers import nats, redis
from headrace.bench.protocols import PROTOCOLS
from headrace.bench.protocols.blipmq import POLLS, BlipMqLoad
from headrace.bench.protocols.figg import FiggLoad
from headrace.bench.protocols.flymq import FlyMqLoad
from headrace.bench.protocols.meters import PAGE_RECORDS_MAX
from headrace.bench.protocols.rustlog import BATCH_RECORDS
from headrace.wire.blipmq import AckBatch, Decoder, Message, PollBatch
from headrace.wire.blipmq import encoder as blipmq
from headrace.wire.figg import encode
from headrace.wire.flymq import Dialect as FlyMqDialect
from headrace.wire.flymq import Opcode, RequestDecoder, encode_failure, encode_reply
from headrace.wire.flymq.messages import AUTO, Failure, Fetch, Fetched, RecordMetadataBatch
from headrace.wire.rustlog import Dialect, Received
from headrace.wire.rustlog import RequestDecoder as RustLogDecoder
from headrace.wire.rustlog import encode_reply as rustlog_reply
from headrace.wire.rustlog import errors as refusals
from headrace.wire.rustlog import messages as rustlog


def feed(meter: Meter, stream: bytes, cuts: list[int]) -> bytes:
    """Feed the stream in chunks, each followed by stale bytes, as in a reused buffer."""
    sent = b""
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        if end > begin:
            sent += meter.feed(bytearray(stream[begin:end] + b"-\0$\r\n-ERR"), end - begin)
    return sent


def cuts_of(length: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return sorted(dice.randrange(length) for _ in range(dice.randrange(1, 12)))


FIGG_ACKS = encode.acks([0, 4, 5, 999])
FIGG_HISTORY = encode.attached("bench", 0) + encode.data("bench", range(1, 21), sample_values(30, 20))
NATS_ACKS = b"".join(b'MSG _I.a 2 %d\r\n{"stream":"bench", "seq":%d}\r\n' % (28 + len(str(seq)), seq) for seq in range(1, 121))
REDIS_REPLIES = b"".join(b"$15\r\n1794729371877-%d\r\n" % (index % 10) for index in range(50))


@pytest.mark.parametrize("cut", range(len(FIGG_ACKS)))
def test_figg_acks_cut_anywhere_count_to_the_last_sequence_number(cut: int) -> None:
    meter = FiggLoad().acks("bench")
    feed(meter, FIGG_ACKS, [cut])
    assert meter.count == 1000


def test_figg_acks_byte_by_byte_never_count_an_ack_before_it_is_whole() -> None:
    meter, seen = FiggLoad().acks("bench"), []
    for byte in FIGG_ACKS:
        meter.feed(bytearray([byte]), 1)
        seen.append(meter.count)
    assert seen == [0] * 15 + [1] * 16 + [5] * 16 + [6] * 16 + [1000]


def test_a_figg_message_that_is_no_ack_is_an_error() -> None:
    with pytest.raises(BenchFailed, match="type 9"):
        FiggLoad().acks("bench").feed(bytearray(encode.pong(7)), 16)


@pytest.mark.parametrize("seed", range(50))
def test_figg_history_in_any_chunks_counts_every_record(seed: int) -> None:
    meter = FiggLoad().consume("bench", 20, 30, 0).meter
    feed(meter, FIGG_HISTORY, cuts_of(len(FIGG_HISTORY), seed))
    assert meter.count == 20


@pytest.mark.parametrize("seed", range(10))
def test_figg_history_with_a_gap_is_an_error(seed: int) -> None:
    gap = encode.attached("bench", 0) + encode.data("bench", [*range(1, 20), 21], sample_values(30, 20))
    with pytest.raises(BenchFailed, match="expected offset 20, got 21"):
        feed(FiggLoad().consume("bench", 20, 30, 0).meter, gap, cuts_of(len(gap), seed))


def test_figg_history_with_a_record_too_many_is_an_error() -> None:
    with pytest.raises(BenchFailed, match="bytes more than 19 records"):
        feed(FiggLoad().consume("bench", 19, 30, 0).meter, FIGG_HISTORY, [])


def test_blipmq_pongs_count_to_the_records_before_the_last_ping() -> None:
    pongs = blipmq.pong(7) + blipmq.pong(2_000) + blipmq.pong(2_345)
    for cut in range(len(pongs)):
        meter = BlipMqLoad().acks("bench")
        feed(meter, pongs, [cut])
        assert meter.count == 2_345


def test_a_blipmq_error_ends_the_benchmark_with_its_text() -> None:
    refused = blipmq.nack(5, 413, "")
    with pytest.raises(BenchFailed, match=r"blipmq: (error|unexpected frame)"):
        feed(BlipMqLoad().acks("bench"), refused, [])


def deliveries(tags: range) -> bytes:
    return blipmq.publishes(1, "bench", tags, [b"v" * 30] * len(tags))


@pytest.mark.parametrize("seed", range(20))
def test_blipmq_deliveries_are_acknowledged_and_polled_until_complete(seed: int) -> None:
    records = 4 * POLLS + 123
    plan = BlipMqLoad().consume("bench", records, 30, 9)
    stream = deliveries(range(1, records + 1))
    sent = plan.request + feed(plan.meter, stream, cuts_of(len(stream), seed))
    assert plan.meter.count == records
    acked = [cid for message in blipmq_messages(sent) if isinstance(message, AckBatch) for cid in message.cids]
    polled = sum(len(message.cids) for message in blipmq_messages(sent) if isinstance(message, PollBatch))
    assert acked == list(range(1, records + 1))
    assert records <= polled < records + POLLS


def test_a_redelivery_ends_the_benchmark() -> None:
    again = deliveries(range(1, 9)) + deliveries(range(8, 10))
    with pytest.raises(BenchFailed, match="delivery 10 has tag 9"):
        feed(BlipMqLoad().consume("bench", 10, 30, 9).meter, again, [])


def blipmq_messages(sent: bytes) -> list[Message]:
    return list(Decoder().feed(sent))


FLYMQ_REPLIES = encode_reply(Opcode.PRODUCE, RecordMetadataBatch("bench", [0] * 9, list(range(9)), [5] * 9, [AUTO] * 9, [30] * 9))


@pytest.mark.parametrize("seed", range(20))
def test_flymq_replies_in_any_chunks_are_all_counted(seed: int) -> None:
    meter = FlyMqLoad().acks("bench")
    feed(meter, FLYMQ_REPLIES, cuts_of(len(FLYMQ_REPLIES), seed))
    assert meter.count == 9


def test_a_flymq_error_ends_the_benchmark() -> None:
    refused = encode_failure(Failure("no room for this record on the disk, says the broker"), FlyMqDialect.SPEC)
    with pytest.raises(BenchFailed, match="no room"):
        feed(FlyMqLoad().acks("bench"), refused, [])


class FlyMqPages:
    """Answers FETCHes; each page holds at most `most` records."""

    refusal = encode_failure(Failure("the topic has burnt down"), FlyMqDialect.SPEC)

    def __init__(self, most: int) -> None:
        self._decoder, self._most = RequestDecoder(), most

    def answer(self, requests: bytes) -> bytes:
        replies = []
        for request in self._decoder.feed(requests):
            assert isinstance(request, Fetch)
            end = request.offset + min(request.records_max, self._most)
            values = [b"v" * 30] * (end - request.offset)
            replies.append(encode_reply(Opcode.FETCH, Fetched(list(range(request.offset, end)), values, end)))
        return b"".join(replies)


class RustLogPages:
    """Answers Fetches in either dialect, as many records as `max_bytes` allows."""

    refusal = rustlog_reply(Dialect.BINARY, refusals.internal("the topic has burnt down", retriable=False))

    def __init__(self, most: int) -> None:
        self._decoder, self._most = RustLogDecoder(), most

    def answer(self, requests: bytes) -> bytes:
        replies = []
        for asked in self._decoder.feed(requests):
            assert isinstance(asked, Received) and isinstance(asked.request, rustlog.Fetch)
            begin, overhead = asked.request.offset, 12 if asked.dialect is Dialect.BINARY else 0
            offsets = range(begin, begin + min(asked.request.max_bytes // (30 + overhead), self._most))
            replies.append(rustlog_reply(asked.dialect, rustlog.FetchReply(offsets, [b"v" * 30] * len(offsets), offsets.stop)))
        return b"".join(replies)


PAGES: dict[str, type[FlyMqPages | RustLogPages]] = {"flymq": FlyMqPages, "rustlog": RustLogPages, "rustlog-json": RustLogPages}


@pytest.mark.parametrize("protocol", PAGES)
@pytest.mark.parametrize("most", [PAGE_RECORDS_MAX, 3_777])
def test_pages_are_requested_until_every_record_arrived_once(protocol: str, most: int) -> None:
    records, server, seed = 3 * PAGE_RECORDS_MAX + 17, PAGES[protocol](most), 0
    plan = PROTOCOLS[protocol].consume("bench", records, 30, 0)
    requests = plan.request
    while requests:
        seed += 1
        stream = server.answer(requests)
        requests = feed(plan.meter, stream, cuts_of(len(stream), seed))
    assert plan.meter.count == records


@pytest.mark.parametrize("protocol", PAGES)
def test_a_failed_fetch_ends_the_benchmark_with_the_text_of_the_broker(protocol: str) -> None:
    with pytest.raises(BenchFailed, match="the topic has burnt down"):
        feed(PROTOCOLS[protocol].consume("bench", 10, 30, 0).meter, PAGES[protocol].refusal, [])


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("seed", range(10))
def test_rustlog_batches_in_any_chunks_are_all_counted(dialect: Dialect, seed: int) -> None:
    meter = PROTOCOLS["rustlog"].acks("bench")
    sizes = [BATCH_RECORDS, BATCH_RECORDS, 17]
    stream = b"".join([rustlog_reply(dialect, rustlog.ProduceReply(range(3, 3 + size))) for size in sizes])
    feed(meter, stream, cuts_of(len(stream), seed))
    assert meter.count == sum(sizes)


def test_a_rustlog_batch_of_large_values_fits_its_frame() -> None:
    frames = PROTOCOLS["rustlog"].publish("bench", sample_values(1024 * 1024, 9), 0)
    received = list(RustLogDecoder().feed(frames))
    assert sum(len(one.request.records) for one in received if isinstance(one, Received) and isinstance(one.request, rustlog.Produce)) == 9


@pytest.mark.parametrize("seed", range(50))
def test_nats_acks_in_any_chunks_count_to_the_last_sequence_number(seed: int) -> None:
    meter = nats.AckMeter()
    feed(meter, NATS_ACKS, cuts_of(len(NATS_ACKS), seed))
    assert meter.count == 120


def test_a_nats_error_ends_the_benchmark() -> None:
    refused = b'MSG _I.a 2 60\r\n{"error":{"code":429,"description":"too many requests"}}\r\n'
    with pytest.raises(BenchFailed, match="too many requests"):
        nats.AckMeter().feed(bytearray(refused), len(refused))


def test_a_nats_pull_requests_the_next_batch_after_each_whole_one() -> None:
    meter = nats.PullMeter(b"NEXT")
    stream = b"\0" * (2 * nats.PULL_BATCH + 1)
    assert feed(meter, stream, [5, nats.PULL_BATCH]) == b"NEXTNEXT"
    assert meter.count == 2 * nats.PULL_BATCH + 1


@pytest.mark.parametrize("seed", range(50))
def test_redis_replies_in_any_chunks_are_all_counted(seed: int) -> None:
    meter = redis.ReplyMeter()
    feed(meter, REDIS_REPLIES, cuts_of(len(REDIS_REPLIES), seed))
    assert meter.count == 50


@pytest.mark.parametrize("stream", [b"-OOM no room\r\n", b"$3\r\n1-1\r\n-OOM no room\r\n"])
def test_a_redis_error_ends_the_benchmark(stream: bytes) -> None:
    with pytest.raises(BenchFailed, match="redis-server: -OOM no room"):
        redis.ReplyMeter().feed(bytearray(stream), len(stream))


def test_a_page_of_redis_is_followed_by_the_one_after_its_last_identifier() -> None:
    page = b"".join(b"*2\r\n$3\r\n7-%d\r\n*2\r\n$1\r\nv\r\n$2\r\n\0x\r\n" % (index % 10) for index in range(redis.PAGE))
    assert feed(redis.PageMeter(), page, cuts_of(len(page), 1)) == redis.page_after(b"(7-9")
