from __future__ import annotations

import asyncio

import pytest

from headrace.broker import BrokerSettings, GroupLag, SettlementPolicy
from headrace.errors import DiskFull, InvalidRequest, LimitExceeded
from tests.broker.stand import ANN, Stand


@pytest.fixture
async def stand(stand: Stand) -> Stand:
    await stand.broker.create_topic(ANN, "t", partitions=2)
    await stand.broker.create_topic(ANN, "u")
    return stand


async def test_a_group_that_committed_nothing_has_no_offset(stand: Stand) -> None:
    assert stand.broker.committed(ANN, "g", "t", 0) is None
    assert stand.broker.lag(ANN, "g") == []
    assert stand.broker.groups(ANN) == []


async def test_what_was_committed_is_there_and_survives_a_crash(stand: Stand) -> None:
    await stand.broker.commit(ANN, "g", {("t", 0): 3, ("t", 1): 0, ("u", 0): 7})
    await stand.broker.commit(ANN, "h", {("t", 0): 1})
    for _ in range(2):
        assert [stand.broker.committed(ANN, "g", *place) for place in (("t", 0), ("t", 1), ("u", 0))] == [3, 0, 7]
        assert stand.broker.groups(ANN) == ["g", "h"]
        await stand.crash()


async def test_a_commit_may_go_backwards(stand: Stand) -> None:
    await stand.broker.commit(ANN, "g", {("t", 0): 9})
    await stand.broker.commit(ANN, "g", {("t", 0): 2})
    await stand.crash()
    assert stand.broker.committed(ANN, "g", "t", 0) == 2


async def test_a_commit_the_log_refuses_did_not_happen(stand: Stand) -> None:
    await stand.broker.commit(ANN, "g", {("t", 0): 1})
    stand.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await stand.broker.commit(ANN, "g", {("t", 0): 5})
    assert stand.broker.committed(ANN, "g", "t", 0) == 1


async def test_the_last_of_many_commits_counts(stand: Stand) -> None:
    await asyncio.gather(*(stand.broker.commit(ANN, "g", {("t", 0): offset}) for offset in range(20)))
    assert stand.broker.committed(ANN, "g", "t", 0) == 19
    await stand.crash()
    assert stand.broker.committed(ANN, "g", "t", 0) == 19


@pytest.mark.parametrize("offset", [-1, 1 << 63])
async def test_an_offset_that_cannot_be_is_refused(stand: Stand, offset: int) -> None:
    with pytest.raises(InvalidRequest):
        await stand.broker.commit(ANN, "g", {("t", 0): 1, ("t", 1): offset})
    assert stand.broker.committed(ANN, "g", "t", 0) is None


async def test_lag_is_what_is_left_to_read(stand: Stand) -> None:
    await stand.put("a", "b", "c", partition=0)
    await stand.put("a", partition=1)
    await stand.broker.commit(ANN, "g", {("t", 1): 5, ("t", 0): 1})
    assert stand.broker.lag(ANN, "g") == [GroupLag("t", 0, 1, 3, 2), GroupLag("t", 1, 5, 1, 0)]


async def test_a_deleted_group_is_forgotten(stand: Stand) -> None:
    await stand.broker.commit(ANN, "g", {("t", 0): 1, ("u", 0): 2})
    await stand.broker.commit(ANN, "h", {("t", 0): 4})
    await stand.broker.delete_group(ANN, "g")
    await stand.broker.delete_group(ANN, "never was")
    await stand.crash()
    assert stand.broker.groups(ANN) == ["h"]
    assert stand.broker.committed(ANN, "g", "t", 0) is None


async def test_a_group_may_be_forgotten_in_one_topic_alone(stand: Stand) -> None:
    await stand.broker.commit(ANN, "g", {("t", 0): 1, ("t", 1): 2, ("u", 0): 3})
    await stand.broker.delete_group(ANN, "g", topic="t")
    await stand.crash()
    assert [(lag.topic, lag.committed) for lag in stand.broker.lag(ANN, "g")] == [("u", 3)]


async def test_a_group_with_consumers_is_not_deleted(stand: Stand) -> None:
    queue = stand.broker.queue(ANN, "g", "t", policy=SettlementPolicy())
    with pytest.raises(InvalidRequest):
        await stand.broker.delete_group(ANN, "g")
    await queue.close()
    await stand.broker.delete_group(ANN, "g")
    assert stand.broker.groups(ANN) == []


async def test_there_are_only_so_many_groups() -> None:
    stand = Stand(BrokerSettings(groups_max=2))
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t")
    await stand.broker.commit(ANN, "a", {("t", 0): 1})
    await stand.broker.commit(ANN, "b", {("t", 0): 1})
    with pytest.raises(LimitExceeded):
        await stand.broker.commit(ANN, "c", {("t", 0): 1})
    await stand.broker.commit(ANN, "a", {("t", 0): 2})
    await stand.broker.delete_group(ANN, "b")
    await stand.broker.commit(ANN, "c", {("t", 0): 1})
    await stand.broker.close()


@pytest.mark.parametrize("group", ["", "x" * 250, "a\x00b"])
async def test_a_bad_group_name_is_refused(stand: Stand, group: str) -> None:
    with pytest.raises(InvalidRequest):
        await stand.broker.commit(ANN, group, {("t", 0): 1})
    with pytest.raises(InvalidRequest):
        stand.broker.queue(ANN, group, "t", policy=SettlementPolicy())
