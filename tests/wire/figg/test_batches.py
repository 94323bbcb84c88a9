"""Adjacent frames become columns, in both gears of the decoder."""

from __future__ import annotations

import random

import pytest

from headrace.wire.figg import DataBatch, Ping, PublishBatch, client_decoder, encode, server_decoder
from headrace.wire.figg.decode import BLOCK, EACH
from tests.wire.figg.streams import cut, flat_messages


@pytest.mark.parametrize("count", [1, 2, EACH - 1, EACH, EACH + 1, EACH + BLOCK - 1, EACH + BLOCK, EACH + BLOCK + 1, 1_000, 5_000])
@pytest.mark.parametrize("size", [0, 1, 100, 5_000])
def test_adjacent_publishes_of_one_topic_are_one_batch(count: int, size: int) -> None:
    values = [random.Random(index).randbytes(size) for index in range(count)]
    stream = encode.publish("orders", range(7, 7 + count), values)
    (batch,) = server_decoder().feed(stream)
    assert isinstance(batch, PublishBatch)
    assert (batch.topic, list(batch.seqs), batch.values) == ("orders", list(range(7, 7 + count)), values)
    assert (batch.first_seq, batch.last_seq) == (7, 6 + count)


def test_adjacent_data_of_one_topic_are_one_batch() -> None:
    values = [b"%08d" % index for index in range(500)]
    assert list(client_decoder().feed(encode.data("t", range(1, 501), values))) == [DataBatch("t", list(range(1, 501)), values)]


def test_sequence_numbers_need_no_order() -> None:
    seqs = [5, 3, 3, 1 << 63, 0] * 40
    (batch,) = server_decoder().feed(encode.publish("t", seqs, [b"v"] * 200))
    assert isinstance(batch, PublishBatch)
    assert list(batch.seqs) == seqs


def test_a_batch_ends_where_the_topic_or_the_type_changes() -> None:
    stream = (
        encode.publish("aa", [0, 1], [b"x", b"y"]) + encode.publish("ab", [2], [b"z"]) + encode.ping(1) + encode.publish("ab", [3], [b"w"])
    )
    assert list(server_decoder().feed(stream)) == [
        PublishBatch("aa", [0, 1], [b"x", b"y"]),
        PublishBatch("ab", [2], [b"z"]),
        Ping(1),
        PublishBatch("ab", [3], [b"w"]),
    ]


@pytest.mark.parametrize("odd", [EACH, EACH + 1, EACH + BLOCK - 1, EACH + BLOCK, EACH + BLOCK + 17, 299])
def test_one_frame_that_differs_ends_a_stretch_of_alike_ones_exactly_there(odd: int) -> None:
    """Frames of one size but another topic, and frames of another size, at every position inside a block."""
    values = [b"%099d" % index for index in range(300)]
    other_topic = [encode.publish("orders" if index != odd else "ORDERS", [index], [value]) for index, value in enumerate(values)]
    assert [entry[1:3] for entry in flat_messages(server_decoder(), [b"".join(other_topic)])] == [
        ("orders" if index != odd else "ORDERS", index) for index in range(300)
    ]
    values[odd] = b"another size"
    (batch,) = server_decoder().feed(encode.publish("orders", range(300), values))
    assert isinstance(batch, PublishBatch)
    assert batch.values == values


def test_values_that_look_like_frames_are_values() -> None:
    inner = encode.publish("orders", range(3), [b"x" * 10] * 3)
    values = [inner] * 200
    assert list(server_decoder().feed(encode.publish("orders", range(200), values))) == [PublishBatch("orders", list(range(200)), values)]


def test_a_cut_stream_of_mixed_sizes_yields_the_same_frames() -> None:
    chance = random.Random(11)
    values = [chance.randbytes(chance.choice([0, 5, 100, 100, 100, 3_000])) for _ in range(2_000)]
    stream = encode.publish("orders", range(2_000), values)
    wanted = [("PublishBatch", "orders", index, value) for index, value in enumerate(values)]
    for size in (1_000, 4_096, 65_536, len(stream)):
        assert flat_messages(server_decoder(), cut(stream, size)) == wanted


@pytest.mark.parametrize("sizes", [[100] * 15, [100] * 16, [5_000] * 300, [0, 1, 2, 300] * 10])
def test_both_ways_to_encode_a_batch_give_what_single_frames_give(sizes: list[int]) -> None:
    values = [bytes(size) for size in sizes]
    one_by_one = b"".join(encode.data("t", [index], [value]) for index, value in enumerate(values))
    assert encode.data("t", range(len(values)), values) == one_by_one


def test_an_empty_batch_is_no_bytes() -> None:
    assert encode.publish("t", [], []) == b"" == encode.acks([])
