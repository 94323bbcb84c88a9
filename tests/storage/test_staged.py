"""The queue of the writer: which appends pass a large one, and which wait for it."""

from __future__ import annotations

import pytest

from headrace.limits import MIB
from headrace.records import Ack, RecordBatch
from headrace.storage.staged import (
    BULK_BYTES_MIN,
    FLUSH_BYTES_MAX,
    LARGE_BYTES_MAX,
    SHORT_FLUSH_BYTES_MAX,
    SHORT_FLUSHES,
    SMALL_BYTES_MAX,
    AnyStaged,
    Staged,
    StagedEach,
    Waiting,
)

LARGE = 4 * MIB


def append(size_bytes: int, *logs: int, ack: Ack = Ack.DURABLE) -> Staged:
    return Staged([(log, RecordBatch([b""])) for log in logs], ack, 0, lambda result: None, size_bytes)


def singles(*logs: int) -> StagedEach:
    return StagedEach(logs, [b""] * len(logs), None, Ack.DURABLE, 0, lambda result: None, len(logs))


def waiting(*items: AnyStaged) -> Waiting:
    queue = Waiting(LARGE)
    for item in items:
        queue.add(item, urgent=False)
    return queue


def test_bulk_appends_are_a_large_one_from_its_limit_on() -> None:
    bulk = [append(MIB, 1) for _ in range(4)]
    assert waiting(*bulk[:3]).take_large() == []
    assert waiting(*bulk).take_large() == bulk


def test_too_few_bulk_appends_stay_in_order() -> None:
    items = [append(BULK_BYTES_MIN, 1), append(1, 1), append(BULK_BYTES_MIN, 1)]
    queue = waiting(*items)
    assert queue.take_large() == []
    assert queue.take() == items


def test_a_large_append_ends_at_its_limit() -> None:
    queue = waiting(*(append(MIB, 1) for _ in range(20)))
    assert len(queue.take_large()) == LARGE_BYTES_MAX // MIB
    assert queue.size_bytes == 20 * MIB - LARGE_BYTES_MAX


def test_one_append_may_be_larger_than_the_limit() -> None:
    whole = append(100 * MIB, 1, 2)
    assert waiting(whole).take_large() == [whole]


@pytest.mark.parametrize("other", [append(100, 1), append(100, 1, 2), append(MIB, 2, ack=Ack.WRITTEN), singles(2)])
def test_only_large_durable_appends_are_bulk(other: AnyStaged) -> None:
    queue = waiting(*(append(MIB, 2) for _ in range(4)), other)
    assert other not in queue.take_large()


def test_small_appends_to_other_logs_pass_a_large_one() -> None:
    bulk = [append(MIB, 1) for _ in range(4)]
    small: list[AnyStaged] = [append(10, 2), singles(3, 4)]
    queue = waiting(bulk[0], small[0], *bulk[1:], small[1])
    assert queue.take_large() == bulk
    assert queue.take() == small


def test_appends_to_the_log_of_a_large_one_wait_for_it_and_keep_their_order() -> None:
    queue = waiting(*(append(MIB, 1) for _ in range(4)))
    assert queue.take_large()
    held: list[AnyStaged] = [append(10, 1), singles(2, 1), append(10, 2), append(10, 2, 3), append(10, 3)]
    passing = append(10, 4)
    for item in [*held, passing]:
        queue.add(item, urgent=False)
    assert queue.take() == [passing], "what follows a held append to the same log is held too"
    assert queue, "held appends wait for the writer"
    assert queue.take() == []
    queue.release()
    assert queue.take() == held


def test_bulk_appends_to_any_log_wait_for_the_large_one_before_them() -> None:
    queue = waiting(*(append(MIB, 1) for _ in range(4)))
    queue.take_large()
    following = [append(MIB, 2) for _ in range(4)]
    for item in following:
        queue.add(item, urgent=False)
    assert queue.take() == [] and queue.take_large() == []
    queue.release()
    assert queue.take_large() == following


def test_a_bulk_append_does_not_overtake_a_small_one_to_its_log() -> None:
    before, after = [append(MIB, 1) for _ in range(4)], append(MIB, 1, 2)
    small = append(10, 2)
    queue = waiting(*before, small, after)
    assert queue.take_large() == before
    assert queue.take() == [small]


def test_small_appends_between_bulk_ones_to_the_same_log_are_part_of_the_large_one() -> None:
    items = [append(MIB, 1), append(MIB, 1), append(10, 1), append(MIB, 1), append(MIB, 1)]
    assert waiting(*items).take_large() == items
    queue = waiting(*items)
    queue.take_large()
    queue.release()
    for item in (items[2], items[0]):
        queue.add(item, urgent=False)
    assert queue.take_large() == [items[2], items[0]]


def test_small_appends_alone_are_not_large() -> None:
    queue = waiting(*(append(MIB, 1) for _ in range(4)))
    queue.take_large()
    queue.release()
    small = append(10, 1)
    queue.add(small, urgent=False)
    assert queue.take_large() == [] and queue.take() == [small]


def test_the_rest_of_a_stream_is_large_too() -> None:
    queue = waiting(*(append(MIB, 1) for _ in range(4)))
    queue.take_large()
    queue.release()
    rest, other = append(MIB, 1), append(MIB, 2)
    queue.add(rest, urgent=False)
    assert queue.take_large() == [rest]
    queue.release()
    queue.add(other, urgent=False)
    assert queue.take_large() == [] and queue.take() == [other]


def test_urgent_appends_come_first_unless_their_log_is_written() -> None:
    queue = waiting(*(append(MIB, 1) for _ in range(4)), append(10, 2))
    queue.take_large()
    urgent, held = append(10, 3), append(10, 1)
    queue.add(held, urgent=True)
    queue.add(urgent, urgent=True)
    assert queue.take() == [urgent]
    assert len(queue.take()) == 1
    queue.release()
    assert queue.take() == [held]


def test_a_flush_ends_at_its_limit_and_takes_at_least_one() -> None:
    items = [append(FLUSH_BYTES_MAX + 1, 1, ack=Ack.WRITTEN), append(1, 1)]
    queue = waiting(*items)
    assert queue.take() == items[:1] and queue.size_bytes == 1
    assert queue.take() == items[1:] and queue.size_bytes == 0
    assert not queue


def test_small_appends_are_flushed_before_larger_ones_to_other_logs() -> None:
    larger = [append(SMALL_BYTES_MAX + 1, 1), append(SMALL_BYTES_MAX + 1, 1)]
    small: list[AnyStaged] = [append(SMALL_BYTES_MAX, 2), singles(3, 4)]
    queue = waiting(larger[0], small[0], larger[1], small[1])
    assert queue.take() == small
    assert queue.take() == larger
    assert not queue and queue.size_bytes == 0


def test_every_second_flush_takes_what_was_staged_first() -> None:
    larger = append(SMALL_BYTES_MAX + 1, 1)
    queue = waiting(larger, append(10, 2))
    queue.take()
    later = append(10, 3)
    queue.add(later, urgent=False)
    assert queue.take() == [larger, later]


def test_flushes_are_short_while_small_appends_pass_larger_ones() -> None:
    larger = [append(SMALL_BYTES_MAX + 1, 1) for _ in range(6)]
    queue = waiting(*larger, append(10, 2))
    queue.take()
    assert [queue.take(), queue.take(), queue.take()] == [larger[:2], larger[2:4], larger[4:]]
    larger = [append(SHORT_FLUSH_BYTES_MAX + 1, 1) for _ in range(2)]
    for item in larger:
        queue.add(item, urgent=False)
    assert [queue.take(), queue.take()] == [larger[:1], larger[1:]], "a short flush takes at least one append"


def test_flushes_have_full_size_again_when_no_small_append_passes() -> None:
    queue = waiting(append(SHORT_FLUSH_BYTES_MAX, 1), append(10, 2))
    queue.take()
    larger = [append(SHORT_FLUSH_BYTES_MAX, 1) for _ in range(SHORT_FLUSHES + FLUSH_BYTES_MAX // SHORT_FLUSH_BYTES_MAX - 1)]
    for item in larger:
        queue.add(item, urgent=False)
    assert [len(queue.take()) for _ in range(SHORT_FLUSHES)] == [1] * SHORT_FLUSHES
    assert len(queue.take()) == FLUSH_BYTES_MAX // SHORT_FLUSH_BYTES_MAX


def test_flushes_without_larger_appends_are_not_short() -> None:
    small = [append(SMALL_BYTES_MAX, log) for log in range(2 * FLUSH_BYTES_MAX // SMALL_BYTES_MAX)]
    queue = waiting(*small)
    assert [len(queue.take()), len(queue.take())] == [FLUSH_BYTES_MAX // SMALL_BYTES_MAX] * 2


def test_a_small_append_does_not_pass_one_to_its_log() -> None:
    larger, after, both, other = append(SMALL_BYTES_MAX + 1, 1), append(10, 1), append(10, 1, 2), append(10, 2)
    queue = waiting(larger, after, both, other, append(10, 3))
    assert [item.logs() for item in queue.take()] == [[3]]
    assert queue.take() == [larger, after, both, other]


def test_appends_to_one_log_share_a_flush_whatever_their_sizes() -> None:
    items = [append(10, 1), append(SMALL_BYTES_MAX + 1, 1), append(10, 1)]
    queue = waiting(*items)
    assert queue.take() == items


def test_a_bulk_append_never_counts_as_small() -> None:
    queue = Waiting(1_000)
    bulk = [append(1_000, log) for log in (1, 2)]
    for item in (bulk[0], append(10, 3), bulk[1]):
        queue.add(item, urgent=False)
    assert [item.logs() for item in queue.take()] == [[3]]
    assert queue.take_large() == bulk


def test_small_appends_pass_only_some_larger_ones() -> None:
    larger = [append(SMALL_BYTES_MAX + 1, 1, ack=Ack.WRITTEN) for _ in range(100)]
    queue = waiting(*larger, append(10, 2))
    taken = queue.take()
    assert taken and taken == larger[: len(taken)]
