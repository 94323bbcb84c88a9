from __future__ import annotations

import asyncio

import pytest

from headrace.broker import BrokerSettings, GroupLag, SettlementPolicy
from headrace.errors import DiskFull, InvalidRequest, LimitExceeded
from tests.broker.harness import ANN, Harness


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t", partitions=2)
    await harness.broker.create_topic(ANN, "u")
    return harness


async def test_a_group_that_committed_nothing_has_no_offset(harness: Harness) -> None:
    assert harness.broker.committed(ANN, "g", "t", 0) is None
    assert harness.broker.lag(ANN, "g") == []
    assert harness.broker.groups(ANN) == []


async def test_what_was_committed_is_there_and_survives_a_crash(harness: Harness) -> None:
    await harness.broker.commit(ANN, "g", {("t", 0): 3, ("t", 1): 0, ("u", 0): 7})
    await harness.broker.commit(ANN, "h", {("t", 0): 1})
    for _ in range(2):
        assert [harness.broker.committed(ANN, "g", *place) for place in (("t", 0), ("t", 1), ("u", 0))] == [3, 0, 7]
        assert harness.broker.groups(ANN) == ["g", "h"]
        await harness.crash()


async def test_a_commit_may_go_backwards(harness: Harness) -> None:
    await harness.broker.commit(ANN, "g", {("t", 0): 9})
    await harness.broker.commit(ANN, "g", {("t", 0): 2})
    await harness.crash()
    assert harness.broker.committed(ANN, "g", "t", 0) == 2


async def test_a_commit_the_log_refuses_did_not_happen(harness: Harness) -> None:
    await harness.broker.commit(ANN, "g", {("t", 0): 1})
    harness.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await harness.broker.commit(ANN, "g", {("t", 0): 5})
    assert harness.broker.committed(ANN, "g", "t", 0) == 1


async def test_the_last_of_many_commits_counts(harness: Harness) -> None:
    await asyncio.gather(*(harness.broker.commit(ANN, "g", {("t", 0): offset}) for offset in range(20)))
    assert harness.broker.committed(ANN, "g", "t", 0) == 19
    await harness.crash()
    assert harness.broker.committed(ANN, "g", "t", 0) == 19


@pytest.mark.parametrize("offset", [-1, 1 << 63])
async def test_an_offset_that_cannot_be_is_refused(harness: Harness, offset: int) -> None:
    with pytest.raises(InvalidRequest):
        await harness.broker.commit(ANN, "g", {("t", 0): 1, ("t", 1): offset})
    assert harness.broker.committed(ANN, "g", "t", 0) is None


async def test_lag_is_what_is_left_to_read(harness: Harness) -> None:
    await harness.put("a", "b", "c", partition=0)
    await harness.put("a", partition=1)
    await harness.broker.commit(ANN, "g", {("t", 1): 5, ("t", 0): 1})
    now = harness.clock.now
    assert harness.broker.lag(ANN, "g") == [GroupLag("t", 0, 1, 3, 2, now), GroupLag("t", 1, 5, 1, 0, now)]


async def test_lag_counts_from_the_first_offset_where_nothing_is_committed(harness: Harness) -> None:
    await harness.put("a", "b", "c", partition=1)
    await harness.broker.commit(ANN, "g", {("t", 0): 0})
    assert [(lag.partition, lag.committed, lag.lag) for lag in harness.broker.lag(ANN, "g")] == [(0, 0, 0), (1, None, 3)]


async def test_a_deleted_group_is_forgotten(harness: Harness) -> None:
    await harness.broker.commit(ANN, "g", {("t", 0): 1, ("u", 0): 2})
    await harness.broker.commit(ANN, "h", {("t", 0): 4})
    await harness.broker.delete_group(ANN, "g")
    await harness.broker.delete_group(ANN, "never was")
    await harness.crash()
    assert harness.broker.groups(ANN) == ["h"]
    assert harness.broker.committed(ANN, "g", "t", 0) is None


async def test_a_group_may_be_forgotten_in_one_topic_alone(harness: Harness) -> None:
    await harness.broker.commit(ANN, "g", {("t", 0): 1, ("t", 1): 2, ("u", 0): 3})
    await harness.broker.delete_group(ANN, "g", topic="t")
    await harness.crash()
    assert [(lag.topic, lag.committed) for lag in harness.broker.lag(ANN, "g")] == [("u", 3)]


async def test_a_group_with_consumers_is_not_deleted(harness: Harness) -> None:
    queue = harness.broker.join(ANN, "g", "t", policy=SettlementPolicy())
    with pytest.raises(InvalidRequest):
        await harness.broker.delete_group(ANN, "g")
    await queue.close()
    await harness.broker.delete_group(ANN, "g")
    assert harness.broker.groups(ANN) == []


async def test_there_are_only_so_many_groups() -> None:
    harness = Harness(BrokerSettings(groups_max=2))
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.commit(ANN, "a", {("t", 0): 1})
    await harness.broker.commit(ANN, "b", {("t", 0): 1})
    with pytest.raises(LimitExceeded):
        await harness.broker.commit(ANN, "c", {("t", 0): 1})
    await harness.broker.commit(ANN, "a", {("t", 0): 2})
    await harness.broker.delete_group(ANN, "b")
    await harness.broker.commit(ANN, "c", {("t", 0): 1})
    await harness.broker.close()


@pytest.mark.parametrize("group", ["", "x" * 250, "a\x00b"])
async def test_a_bad_group_name_is_refused(harness: Harness, group: str) -> None:
    with pytest.raises(InvalidRequest):
        await harness.broker.commit(ANN, group, {("t", 0): 1})
    with pytest.raises(InvalidRequest):
        harness.broker.join(ANN, group, "t", policy=SettlementPolicy())
