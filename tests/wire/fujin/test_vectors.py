"""The bytes of the specification and of the original mean what they say, and are what we say, too."""

from __future__ import annotations

import pytest

from headrace.wire.fujin import (
    ConnectReader,
    ConnectWriter,
    Failed,
    Fetched,
    MessageBatch,
    ReaderConnected,
    ReplyDecoder,
    Request,
    RequestDecoder,
    ServerMessage,
    Settled,
    Transacted,
    WriteBatch,
    WrittenBatch,
    encode,
)
from tests.wire.fujin.samples import ONE, REPLIES, REQUESTS, WRITE, WRITE_CID, WRITER, wire


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_of_the_specification_decodes(name: str) -> None:
    frames, messages = REQUESTS[name]
    assert list(RequestDecoder().feed(frames)) == messages


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_of_the_specification_decodes(name: str) -> None:
    frames, with_ids, messages = REPLIES[name]
    assert list(ReplyDecoder(with_ids=with_ids).feed(frames)) == messages


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_is_encoded_to_the_same_bytes(name: str) -> None:
    frames, _, (message,) = REPLIES[name]
    assert _encoded(message) == frames


def _encoded(message: ServerMessage) -> bytes:
    match message:
        case ReaderConnected(error):
            return encode.reader_connected(error)
        case WrittenBatch(cids):
            return encode.written(cids)
        case Failed(reply, cid, error):
            return encode.answered(reply, cid, error)
        case Transacted(reply, cid):
            return encode.answered(reply, cid)
        case MessageBatch(ids, values):
            return encode.messages(ids, values)
        case Fetched(cid, ids, values):
            return encode.fetched(cid, ids, values)
        case Settled(reply, cid, ids, errors):
            return encode.settled(reply, cid, ids, errors)
        case _:
            return encode.STOP if type(message).__name__ == "Stop" else encode.DISCONNECT


def test_requests_are_encoded_to_the_specifications_bytes() -> None:
    assert encode.connect_writer() == WRITER
    assert encode.connect_writer(1) == wire(1, 0, 0, 0, 1)
    assert encode.connect_writer(b"me") == wire(1, 0, 0, 0, 2) + b"me"
    connect = REQUESTS["CONNECT READER"][1][0]
    assert isinstance(connect, ConnectReader)
    assert encode.connect_reader(connect.kind, connect.auto_commit, connect.name) == REQUESTS["CONNECT READER"][0]
    assert encode.writes("pub", [WRITE_CID], [b"hello"]) == WRITE
    assert encode.transact(Request.BEGIN, ONE) == wire(4, 0, 0, 0, 1)
    assert encode.fetch(ONE, 1) == wire(7, 0, 0, 0, 1, 0, 0, 0, 1)
    assert encode.settle(Request.ACK, ONE, [b"1"]) == wire(8, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 49)


def test_adjacent_writes_to_one_name_are_one_batch() -> None:
    cids = [number.to_bytes(4, "big") for number in range(300)]
    values = [b"v%d" % number for number in range(300)]
    frames = encode.connect_writer() + encode.writes("a", cids, values) + encode.writes("b", cids[:2], values[:2])
    assert list(RequestDecoder().feed(frames)) == [
        ConnectWriter(None),
        WriteBatch("a", cids, values),
        WriteBatch("b", cids[:2], values[:2]),
    ]


def test_adjacent_answers_are_one_batch_on_both_sides() -> None:
    cids = [number.to_bytes(4, "big") for number in range(300)]
    assert list(ReplyDecoder().feed(encode.written(cids))) == [WrittenBatch(cids)]
    values = [b"v%d" % number for number in range(300)]
    assert list(ReplyDecoder(with_ids=True).feed(encode.messages(cids, values))) == [MessageBatch(cids, values)]


def test_an_error_interrupts_a_batch_of_replies() -> None:
    frames = encode.written([b"aaaa"]) + encode.write_failed([b"bbbb"], "no") + encode.written([b"cccc"])
    found = list(ReplyDecoder().feed(frames))
    assert [type(message).__name__ for message in found] == ["WrittenBatch", "Failed", "WrittenBatch"]


def test_an_error_without_a_text_gets_one() -> None:
    assert encode.reader_connected("") == wire(1, 1, 0, 0, 0, 6) + b"failed"
