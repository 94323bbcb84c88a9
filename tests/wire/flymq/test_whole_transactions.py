"""Adjacent transactions are decoded together, exactly as frame by frame, and their replies are those of each alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headrace.wire.flymq import Opcode, RequestDecoder, encode_reply, encode_request
from headrace.wire.flymq.advanced_messages import (
    PlacedBatch,
    TxnBegin,
    TxnBeginBatch,
    TxnBegun,
    TxnCommit,
    TxnEnded,
    TxnProduceBatch,
    TxnWholeBatch,
)
from headrace.wire.flymq.messages import AUTO
from headrace.wire.flymq.transactions import encode_begun, encode_staged, encode_whole

from .samples import bytewise, chunks, decoded, flat, raw


def whole(id: str, *values: bytes, topic: str = "t") -> bytes:
    return encode_request(TxnProduceBatch(id, topic, list(values))) + encode_request(TxnCommit(id))


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 64, 80, 81, 500])
def test_transactions_of_one_record_are_one_batch(count: int) -> None:
    ids, values = [f"txn-{number:04d}" for number in range(count)], [b"%04d" % number for number in range(count)]
    stream = b"".join(whole(id, value) for id, value in zip(ids, values, strict=True))
    assert RequestDecoder().feed(stream) == [TxnWholeBatch("t", ids, [1] * count, values)]


def test_transactions_of_all_sizes_are_one_batch_as_long_as_they_have_one_topic() -> None:
    stream = whole("a", b"1") + whole("bb", b"22", b"2") + whole("c", b"3") + whole("d", b"4") + whole("e", b"5", topic="u")
    assert RequestDecoder().feed(stream) == [
        TxnWholeBatch("t", ["a", "bb", "c", "d"], [1, 2, 1, 1], [b"1", b"22", b"2", b"3", b"4"]),
        TxnWholeBatch("u", ["e"], [1], [b"5"]),
    ]


@pytest.mark.parametrize("timeout_ms", [0, 5_000])
@pytest.mark.parametrize("count", [2, 63, 64, 65, 66, 127, 129, 500])
def test_begins_are_one_batch_up_to_the_first_that_differs(count: int, timeout_ms: int) -> None:
    begin, other = encode_request(TxnBegin(timeout_ms)), encode_request(TxnBegin(7_000))
    stream = begin * count + whole("a", b"v") + begin * count + other
    assert RequestDecoder().feed(stream) == [
        TxnBeginBatch(count, timeout_ms),
        TxnWholeBatch("t", ["a"], [1], [b"v"]),
        TxnBeginBatch(count, timeout_ms),
        TxnBegin(7_000),
    ]


@pytest.mark.parametrize("ids", [[], ["a"], ["a", "b", "c"], ["a", "bb", "c"], ["ä", "b"]])
def test_begins_are_answered_as_each_alone(ids: list[str]) -> None:
    assert encode_begun(ids) == b"".join([encode_reply(Opcode.TXN_BEGIN, TxnBegun(id)) for id in ids])


def test_the_commit_of_another_transaction_does_not_complete_one() -> None:
    stream = b"".join(whole(f"{number:02d}", b"v") for number in range(20))
    stream += encode_request(TxnProduceBatch("20", "t", [b"v"])) + encode_request(TxnCommit("00"))
    *_, produced, committed = RequestDecoder().feed(stream)
    assert (produced, committed) == (TxnProduceBatch("20", "t", [b"v"]), TxnCommit("00"))


def test_keys_and_partitions_are_decoded_one_by_one() -> None:
    keyed = TxnProduceBatch("a", "t", [b"1"], [b"k"])
    assert RequestDecoder().feed(encode_request(keyed) + encode_request(TxnCommit("a"))) == [keyed, TxnCommit("a")]


def test_an_id_that_is_no_text_fails_alone() -> None:
    good, bad = whole("aa", b"1"), whole("bb", b"2").replace(b"bb", b"\xff\xff")
    events = RequestDecoder().feed(good + bad + good)
    assert [type(event).__name__ for event in events] == ["TxnWholeBatch", "Malformed", "Malformed", "TxnWholeBatch"]
    many = RequestDecoder().feed(good * 16 + bad + good)
    assert flat(many[:1]) == flat([TxnWholeBatch("t", ["aa"] * 16, [1] * 16, [b"1"] * 16)])


def test_equal_begins_are_one_batch_and_others_are_not() -> None:
    plain, timed = encode_request(TxnBegin()), encode_request(TxnBegin(500))
    events = RequestDecoder().feed(plain * 3 + timed * 2 + plain + raw(Opcode.TXN_BEGIN, b"abc"))
    assert events[:3] == [TxnBeginBatch(3), TxnBeginBatch(2, 500), TxnBegin()] and len(events) == 4


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_cut_anywhere_decodes_to_the_same_requests(seed: int) -> None:
    rng = random.Random(seed)
    parts: list[bytes] = []
    for _ in range(30):
        id = rng.choice(["a", "bb", "cc", "dd"])
        values = [bytes(rng.choices(b"\x00\xaf\x01x", k=rng.choice([0, 3, 3, 9]))) for _ in range(rng.choice([1, 1, 1, 2, 20]))]
        parts.append(rng.choice([whole(id, *values), whole(id, *values), encode_request(TxnBegin()), encode_request(TxnCommit(id))]))
    stream = b"".join(parts)
    expected = decoded(bytewise(stream))
    assert decoded([stream]) == expected
    for _ in range(10):
        assert decoded(chunks(stream, rng.getrandbits(32))) == expected


@pytest.mark.parametrize(
    ("ids", "counts", "sizes"),
    [
        (["a", "b", "c"], [1, 1, 1], [5, 5, 5]),
        (["a", "b"], [1, 1], [5, 6]),
        (["a", "bb"], [1, 1], [5, 5]),
        (["bb", "a", "ccc"], [1, 1, 1], [5, 5, 5]),
        (["a", "b"], [3, 2], [1, 2, 3, 3, 3]),
    ],
)
def test_replies_are_those_of_each_transaction(ids: Sequence[str], counts: Sequence[int], sizes: list[int]) -> None:
    expected, first = b"", 0
    for id, count in zip(ids, counts, strict=True):
        own = sizes[first : first + count]
        placed = PlacedBatch("t", [2] * count, list(range(100 + first, 100 + first + count)), [77] * count, [AUTO] * count, own)
        expected += encode_staged("t", 2, 77, own) + encode_reply(Opcode.TXN_COMMIT, TxnEnded(id, True, [placed]))
        first += count
    assert encode_whole("t", ids, counts, (2, 100, 77), sizes) == expected
