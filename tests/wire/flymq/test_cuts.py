"""Whole, byte by byte, cut anywhere: the same messages."""

from __future__ import annotations

import pytest

from headrace.errors import WireError
from headrace.wire.flymq import Dialect, RequestDecoder, encode_received, encode_reply, encode_request
from headrace.wire.flymq.advanced_messages import TxnBegin, TxnCommit, TxnProduceBatch
from headrace.wire.flymq.framing import BINARY, GZIP, deflate
from headrace.wire.flymq.messages import Broken, Malformed, ProduceBatch, RecordMetadataBatch, Request, UnknownOpcode

from .samples import REPLIES, REQUESTS, bytewise, chunks, decoded, decoded_replies, flat, raw

RUN = ProduceBatch("orders", [b"value %d" % number for number in range(40)], None, None)
STREAM = b"".join(
    [
        *map(encode_request, REQUESTS),
        encode_request(RUN),
        raw(0x10, b"name"),
        raw(0x99, b"?"),
        raw(0x01, b"\x00\x09short"),
        raw(0x01, deflate(encode_request(ProduceBatch("orders", [b"squeezed"]))[8:]), flags=BINARY | GZIP),
        encode_request(RUN),
        raw(0x08, b"", version=2),
        raw(0x08, b""),
    ]
)
EXPECTED = [
    *flat(REQUESTS),
    *flat([RUN]),
    Malformed(0x10, "28257 bytes announced, 2 left"),
    UnknownOpcode(0x99),
    Malformed(0x01, "9 bytes announced, 5 left"),
    ("orders", None, b"squeezed", -1),
    *flat([RUN]),
    Broken("protocol version 2 is not supported", "unsupported protocol version: 2"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=repr)
def test_every_request_reads_back_as_it_was_written(request_: Request) -> None:
    assert decoded([encode_request(request_)]) == flat([request_])


def test_decoded_requests_encode_to_the_same_requests() -> None:
    packed = raw(0x01, deflate(encode_request(RUN)[8:]), flags=BINARY | GZIP)
    begins: list[Request] = [TxnBegin(), TxnBegin()]
    whole: list[Request] = [TxnProduceBatch("1", "t", [b"a", b"b"]), TxnCommit("1"), TxnProduceBatch("2", "t", [b"c"]), TxnCommit("2")]
    stream = b"".join([*map(encode_request, [*REQUESTS, *begins, *whole, RUN]), raw(0x99, b""), packed])
    again = b"".join(map(encode_received, RequestDecoder(inflated_bytes_max=1).feed(stream)))
    assert decoded([again]) == decoded([stream])


@pytest.mark.parametrize("event", [Malformed(1, "?"), Broken("?")])
def test_what_was_not_understood_cannot_be_encoded(event: Malformed | Broken) -> None:
    with pytest.raises(WireError):
        encode_received(event)


def test_a_stream_fed_whole_holds_every_message_and_ends_where_it_breaks() -> None:
    assert decoded([STREAM]) == EXPECTED


def test_a_stream_fed_byte_by_byte_decodes_alike() -> None:
    assert decoded(bytewise(STREAM)) == EXPECTED


@pytest.mark.parametrize("seed", range(50))
def test_a_stream_cut_at_random_decodes_alike(seed: int) -> None:
    assert decoded(chunks(STREAM, seed, longest=1 + seed * 7)) == EXPECTED


def test_a_frame_cut_anywhere_decodes_to_the_same_message() -> None:
    for request in REQUESTS:
        stream = encode_request(request)
        for cut in range(1, len(stream)):
            assert decoded([stream[:cut], stream[cut:]]) == flat([request])


@pytest.mark.parametrize("dialect", list(Dialect))
def test_replies_cut_anywhere_decode_alike(dialect: Dialect) -> None:
    batch = RecordMetadataBatch("orders", [0] * 50, range(50), [9] * 50, [-1] * 50, [1] * 50)
    replies = [*REPLIES, (0x01, batch), (0x01, RecordMetadataBatch("other", [1], [1], [1], [1], [1])), (0x01, batch)]
    stream = b"".join(encode_reply(opcode, reply, dialect) for opcode, reply in replies)
    whole = decoded_replies([stream])
    assert len(whole) == len(REPLIES) + 1 + 101, "two rows of the first reply, then the runs"
    assert decoded_replies(bytewise(stream)) == whole
    for seed in range(20):
        assert decoded_replies(chunks(stream, seed, longest=200)) == whole
