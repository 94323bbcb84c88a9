"""Pauses of a member of a group that receives nothing."""

from __future__ import annotations

import asyncio

import pytest

from headrace.clients.flymq import group
from headrace.clients.flymq.group import GroupSubscription
from headrace.wire.flymq import messages as m


class FakeCalls:
    """Answers a member: nothing for ten requests, one record, then nothing."""

    def __init__(self) -> None:
        self.asked = 0

    async def take_from_group(self, member: int, records_max: int) -> list[m.TakenRecord]:
        self.asked += 1
        return [m.TakenRecord(0, 0, 1, 0, b"", b"x")] if self.asked == 11 else []

    async def join_group(self, request: m.GroupJoin) -> m.GroupJoined:
        raise AssertionError("it is a member already")

    async def settle_in_group(self, member: int, kind: int, places: list[m.PartitionOffset]) -> list[bool]:
        return [True] * len(places)

    async def leave_group(self, member: int) -> None: ...


async def pauses(monkeypatch: pytest.MonkeyPatch, mode: str) -> list[float]:
    """Return the pauses before and after the record."""
    noted: list[float] = []

    async def pause(seconds: float, closed: asyncio.Event) -> None:
        noted.append(seconds)
        if len(noted) == 20:
            closed.set()

    monkeypatch.setattr(group, "pause", pause)
    subscription = GroupSubscription(
        FakeCalls(),
        m.GroupJoin("t", "g", mode),
        m.GroupJoined(1, mode),
        settlement="explicit",
        records_max=10,
        idle_seconds=lambda rounds: min(0.01 * 2.0**rounds, 0.5),
    )
    assert [message.value async for message in subscription] == [b"x"]
    return noted


async def test_a_member_of_an_ordered_group_asks_soon_after_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = await pauses(monkeypatch, "ordered")
    assert (noted[9], noted[10]) == (0.5, 0.01)


async def test_a_member_of_a_shared_group_asks_no_sooner_than_the_others_after_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = await pauses(monkeypatch, "shared")
    assert all(0.05 <= seconds <= 0.15 for seconds in noted[5:])
    assert len(set(noted[5:])) > 1, "members that ask at the same times do not take turns"
