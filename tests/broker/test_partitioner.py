from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.publishing.partitioner import assign, fnv1a, hashes, partition_of, pick
from headrace.records import RecordBatch


@pytest.mark.parametrize(
    ("key", "expected"),
    [(b"", 0x811C9DC5), (b"a", 0xE40C292C), (b"b", 0xE70C2DE5), (b"foobar", 0xBF9CF968), (b"\xff\x00\x00\x01", 0xC48FB86D)],
)
def test_the_hash_is_fnv_1a_with_32_bits(key: bytes, expected: int) -> None:
    assert fnv1a(key) == expected


@given(st.lists(st.binary(max_size=40), max_size=80))
def test_a_batch_is_hashed_as_its_keys_are_one_by_one(keys: list[bytes]) -> None:
    assert hashes(keys) == [fnv1a(key) for key in keys]


@given(st.integers(0, 40), st.integers(1, 200), st.randoms(use_true_random=False))
def test_slots_do_not_overflow_into_each_other(length: int, count: int, random: object) -> None:
    keys = [bytes((index * 37 + position * 101) % 256 for position in range(length)) for index in range(count)]
    assert hashes(keys) == [fnv1a(key) for key in keys]


@given(st.lists(st.none() | st.binary(max_size=6), min_size=1, max_size=60), st.integers(2, 9), st.data())
def test_each_record_goes_to_exactly_one_partition_in_order(keys: list[bytes | None], partitions: int, data: st.DataObject) -> None:
    turn = data.draw(st.integers(0, partitions - 1))
    assigned = assign(RecordBatch([b"v"] * len(keys), keys), partitions, turn)
    assert sorted(index for indexes in assigned.values() for index in indexes) == list(range(len(keys)))
    for place, indexes in assigned.items():
        assert indexes == sorted(indexes)
        for index in indexes:
            key = keys[index]
            assert place == (turn if key is None else partition_of(key, partitions))


def test_picked_records_keep_all_their_columns() -> None:
    batch = RecordBatch([b"a", None, b"c"], [b"x", b"y", None], [(("h", b"1"),), (), ()], [1, 2, 3], [0, 9, 0])
    assert pick(batch, [0, 2]) == RecordBatch([b"a", b"c"], [b"x", None], [(("h", b"1"),), ()], [1, 3], [0, 0])
    assert pick(batch, [0, 1, 2]) is batch
