"""Ack deadlines that differ from delivery to delivery."""

from __future__ import annotations

from headrace.broker.groups.membership import Identity
from headrace.broker.groups.progress import Entry, MemberState, PartitionProgress, SettlementPolicy


def _member(policy: SettlementPolicy) -> MemberState:
    return MemberState(Identity("internal", "ann", ""), policy, None, 0)


def _deliver(progress: PartitionProgress, offset: int, holder: MemberState, now: int) -> Entry:
    return progress.deliver_new(offset + 1, offset, None, holder, now)


def test_the_time_for_an_ack_may_double_with_each_delivery() -> None:
    doubling, constant = SettlementPolicy(ack_timeout_ms=100, ack_timeout_doubles=True), SettlementPolicy(ack_timeout_ms=100)
    assert [doubling.ack_timeout(attempt) for attempt in (1, 2, 3)] == [100, 200, 400]
    assert [constant.ack_timeout(attempt) for attempt in (1, 2, 3)] == [100, 100, 100]


def test_the_first_overdue_is_the_one_with_the_earliest_deadline_whatever_the_order_of_delivery() -> None:
    holder, progress = _member(SettlementPolicy(ack_timeout_ms=100, ack_timeout_doubles=True)), PartitionProgress(0, 0, None)
    first = _deliver(progress, 0, holder, 0)
    progress.wait(first, 100)
    progress.deliver(first, holder, 100)
    second = _deliver(progress, 1, holder, 150)
    assert (first.time, second.time) == (300, 250)
    assert holder.first_overdue() is second
    progress.settle(second)
    assert holder.first_overdue() is first
    progress.settle(first)
    assert holder.first_overdue() is None


def test_one_record_that_stays_in_flight_does_not_pile_up_the_deadlines_of_those_behind_it() -> None:
    holder, progress = _member(SettlementPolicy()), PartitionProgress(0, 0, None)
    stuck = _deliver(progress, 0, holder, 0)
    for number in range(1, 1_000):
        progress.settle(_deliver(progress, number, holder, number))
    assert holder.first_overdue() is stuck
    assert len(holder._deadlines) < 100
