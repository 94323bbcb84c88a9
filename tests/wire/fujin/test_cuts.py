"""Streams cut anywhere, and streams of nonsense."""

from __future__ import annotations

import random
from typing import TypeVar

import pytest

from headrace.errors import WireError
from headrace.wire.fujin import (
    ClientMessage,
    MessageBatch,
    ReaderKind,
    Reply,
    ReplyDecoder,
    Request,
    RequestDecoder,
    ServerMessage,
    WriteBatch,
    WriteForm,
    WrittenBatch,
    encode,
)
from headrace.wire.fujin.frames import Decoder
from tests.conftest import Proof

MessageT = TypeVar("MessageT")

CIDS = [number.to_bytes(4, "big") for number in range(6)]
WRITER = (
    encode.connect_writer(b"me")
    + encode.writes("a", CIDS[:3], [b"x", b"yy", b"z" * 70])
    + encode.writes("b", CIDS[:2], [b"x", b"y"], [(("k", b"v"),), ()])
    + encode.transact(Request.BEGIN, CIDS[0])
    + encode.writes("long", CIDS[:1], [b"v" * 2_000])
    + encode.transact(Request.COMMIT, CIDS[1])
    + encode.DISCONNECT
)
READER = (
    encode.connect_reader(ReaderKind.PULL, False, "name")
    + encode.fetch(CIDS[0], 10)
    + encode.settle(Request.ACK, CIDS[1], [b"a" * 20, b"", b"b"])
    + encode.settle(Request.NACK, CIDS[2], [])
    + encode.DISCONNECT
)
REPLIES = (
    encode.reader_connected()
    + encode.written(CIDS[:3])
    + encode.write_failed(CIDS[3:4], "no")
    + encode.messages(CIDS, [b"v" * number for number in range(6)])
    + encode.fetched(CIDS[0], CIDS[:2], [b"a", b""])
    + encode.settled(Reply.ACK, CIDS[1], CIDS[:2], [None, "gone"])
    + encode.answered(Reply.COMMIT, CIDS[2])
    + encode.STOP
    + encode.DISCONNECT
)


def requests(chunks: list[bytes], form: WriteForm = WriteForm.AUTO) -> tuple[list[ClientMessage], str]:
    """The messages, and the words with which the decoder gives up, if it does."""
    messages, failure = _decoded(RequestDecoder(form=form, message_bytes_max=1_000), chunks)
    return _joined_writes(messages), failure


def replies(chunks: list[bytes]) -> tuple[list[ServerMessage], str]:
    messages, failure = _decoded(ReplyDecoder(with_ids=True), chunks)
    return _joined_answers(messages), failure


def _decoded(decoder: Decoder[MessageT], chunks: list[bytes]) -> tuple[list[MessageT], str]:
    messages: list[MessageT] = []
    try:
        for chunk in chunks:
            for message in decoder.feed(chunk):
                messages.append(message)
    except WireError as failure:
        return messages, str(failure)
    return messages, ""


def _joined_writes(messages: list[ClientMessage]) -> list[ClientMessage]:
    """Join batches that were split by a cut."""
    joined: list[ClientMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if isinstance(message, WriteBatch) and isinstance(last, WriteBatch) and last.name == message.name:
            headers = [*(last.headers or [()] * len(last.values)), *(message.headers or [()] * len(message.values))]
            joined[-1] = WriteBatch(last.name, last.cids + message.cids, last.values + message.values, headers if any(headers) else None)
        else:
            joined.append(message)
    return joined


def _joined_answers(messages: list[ServerMessage]) -> list[ServerMessage]:
    joined: list[ServerMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if isinstance(message, WrittenBatch) and isinstance(last, WrittenBatch):
            joined[-1] = WrittenBatch(last.cids + message.cids)
        elif isinstance(message, MessageBatch) and isinstance(last, MessageBatch) and last.ids is not None and message.ids is not None:
            joined[-1] = MessageBatch(last.ids + message.ids, last.values + message.values)
        else:
            joined.append(message)
    return joined


@pytest.mark.parametrize("stream", [WRITER, READER], ids=["writer", "reader"])
def test_requests_cut_anywhere_decode_to_the_same_messages(stream: bytes) -> None:
    whole = requests([stream])
    assert whole[1] == ""
    for cut in range(1, len(stream)):
        assert requests([stream[:cut], stream[cut:]]) == whole
    assert requests([stream[at : at + 1] for at in range(len(stream))]) == whole


def test_replies_cut_anywhere_decode_to_the_same_messages() -> None:
    whole = replies([REPLIES])
    assert whole[1] == ""
    for cut in range(1, len(REPLIES)):
        assert replies([REPLIES[:cut], REPLIES[cut:]]) == whole
    assert replies([REPLIES[at : at + 1] for at in range(len(REPLIES))]) == whole


def test_nonsense_is_refused_or_understood_the_same_however_it_is_cut(proof: Proof) -> None:
    dice = random.Random(4848)
    seeds = (WRITER, READER, REPLIES)
    count = 10_000
    for _ in range(count):
        stream = bytearray(dice.choice(seeds))
        for _ in range(dice.randint(0, 4)):
            place = dice.randrange(len(stream))
            match dice.randrange(3):
                case 0:
                    stream[place] = dice.randrange(256)
                case 1:
                    del stream[place : place + dice.randint(1, 9)]
                case _:
                    stream[place:place] = dice.randbytes(dice.randint(1, 9))
        form = dice.choice(list(WriteForm))
        cut = dice.randint(0, len(stream))
        chunks = [bytes(stream[:cut]), bytes(stream[cut:])]
        assert requests([bytes(stream)], form) == requests(chunks, form)
        assert replies([bytes(stream)]) == replies(chunks)
    proof("mutated Fujin streams", count)


def test_many_writes_of_one_size_are_one_batch_wherever_they_are_cut_and_broken() -> None:
    cids = [number.to_bytes(4, "big") for number in range(300)]
    values = [b"%04d" % number for number in range(300)]
    frames = encode.connect_writer() + encode.writes("name", cids, values)
    whole = requests([frames])
    assert whole[0][1] == WriteBatch("name", cids, values)
    dice = random.Random(64)
    for _ in range(200):
        cut = dice.randrange(len(frames))
        assert requests([frames[:cut], frames[cut:]]) == whole
    for _ in range(500):
        broken = bytearray(frames)
        broken[dice.randrange(5, len(frames))] ^= 1 << dice.randrange(8)
        assert requests([bytes(broken)]) == requests([bytes(broken[at : at + 7]) for at in range(0, len(broken), 7)])
