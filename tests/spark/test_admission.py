"""Division of a limit among partitions, and delay of small batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.spark.admission import TriggerDelay, apportion, records_within

AVAILABLE = st.dictionaries(st.tuples(st.just("t"), st.integers(0, 50)), st.integers(0, 10**9), min_size=1, max_size=20)


@given(AVAILABLE, st.integers(1, 10**9))
def test_a_limit_is_met_exactly_and_no_partition_gives_more_than_it_has(available: dict[tuple[str, int], int], limit: int) -> None:
    taken = apportion(available, limit)
    assert sum(taken.values()) == min(limit, sum(available.values()))
    assert all(0 <= taken[place] <= available[place] for place in available)


@given(AVAILABLE, st.integers(1, 10**9))
def test_parts_are_in_proportion_to_within_one_record(available: dict[tuple[str, int], int], limit: int) -> None:
    total = sum(available.values())
    for place, count in apportion(available, limit).items():
        assert total <= limit or abs(count - limit * available[place] / total) <= 1


def test_a_small_limit_serves_every_partition_in_turn() -> None:
    left = {("t", index): 3 for index in range(3)}
    for _ in range(9):
        for place, count in apportion(left, 1).items():
            left[place] -= count
        assert max(left.values()) - min(left.values()) <= 1
    assert sum(left.values()) == 0


def test_a_size_becomes_a_number_of_records_by_their_average() -> None:
    available = {("t", 0): 100, ("t", 1): 100}
    sizes = {("t", 0): 10.0, ("t", 1): 30.0}
    assert records_within(available, sizes, 4_000) == 200
    assert records_within(available, sizes, 2_000) == 100
    assert records_within(available, sizes, 1) == 1


def test_a_batch_waits_for_enough_records_or_for_the_delay() -> None:
    patience = TriggerDelay(100, 1_000)
    assert patience.enough(1, now_ms=0), "the first batch is not held back"
    assert not patience.enough(99, now_ms=999)
    assert patience.enough(100, now_ms=999), "enough"
    assert not patience.enough(99, now_ms=1_998)
    assert patience.enough(1, now_ms=1_999), "late enough"
    assert not patience.enough(0, now_ms=99_999)


def test_without_a_minimum_nothing_waits() -> None:
    patience = TriggerDelay(None, 1_000)
    assert patience.enough(1, now_ms=0) and patience.enough(1, now_ms=1)
