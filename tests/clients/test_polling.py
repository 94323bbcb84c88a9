"""Polling subscription over a source with injected failures, delays and trimmed records."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from headrace.clients.errors import NothingToSettle
from headrace.clients.messages import Gap, MessageBatch, Settlement
from headrace.clients.polling import PollingSubscription
from headrace.errors import OffsetOutOfRange, Unavailable


class Shelf:
    """Partitions of numbered values, and the received commits."""

    protocol: ClassVar[str] = "Shelf"

    def __init__(self, *counts: int, first: int = 0) -> None:
        self.counts, self.first = counts, first
        self.commits: list[tuple[int, int]] = []
        self.failure: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def read(self, partition: int, offset: int) -> tuple[MessageBatch, int]:
        await asyncio.sleep(0)
        if offset < self.first:
            raise OffsetOutOfRange(
                wanted=offset, first=0, end=self.counts[partition]
            )  # like a server that does not report the first offset
        offsets = range(offset, min(offset + 3, self.counts[partition]))
        return MessageBatch("t", partition, offsets, [b"%d" % at for at in offsets]), offsets.stop if offsets else offset

    async def first_offset(self, topic: str, *, partition: int = 0) -> int:
        return self.first

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        self.commits.append((partition, offset))

    def follow(self, group: str | None = "g", settlement: Settlement = "explicit") -> PollingSubscription:
        positions = dict.fromkeys(range(len(self.counts)), 0)
        return PollingSubscription(self, self.read, "t", positions, group=group, settlement=settlement, idle_seconds=lambda attempt: 0.001)


async def test_a_commit_that_failed_can_be_tried_again() -> None:
    shelf = Shelf(3)
    subscription = shelf.follow()
    message = await anext(subscription)
    shelf.failure = Unavailable("draining")
    for settle in (message.ack, subscription.commit):
        with pytest.raises(Unavailable):
            await settle()
    shelf.failure = None
    assert await message.ack()
    await subscription.commit()
    assert shelf.commits == [(0, 1)], "once is enough"


async def test_an_earlier_message_acknowledged_meanwhile_does_not_move_the_group_back() -> None:
    shelf = Shelf(3)
    subscription = shelf.follow()
    messages = [await anext(subscription) for _ in range(3)]
    shelf.may_answer.clear()
    later = asyncio.create_task(messages[2].ack())
    await asyncio.sleep(0)
    assert await messages[0].ack(), "covered by the later one"
    shelf.may_answer.set()
    assert await later
    assert shelf.commits == [(0, 3)]


async def test_who_stops_waiting_for_a_commit_has_not_lost_it() -> None:
    shelf = Shelf(6)
    subscription = shelf.follow(settlement="auto")
    assert [(await anext(subscription)).offset for _ in range(3)] == [0, 1, 2]
    shelf.may_answer.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(subscription), 0.01)
    shelf.may_answer.set()
    assert (await anext(subscription)).offset == 3
    assert shelf.commits == [(0, 3)]
    await subscription.close()
    assert shelf.commits == [(0, 3), (0, 4)]


async def test_partitions_take_turns_and_each_keeps_its_account() -> None:
    shelf = Shelf(4, 2)
    subscription = shelf.follow()
    given = [await anext(subscription) for _ in range(6)]
    assert [(message.partition, message.offset) for message in given] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3)]
    await subscription.commit()
    assert sorted(shelf.commits) == [(0, 4), (1, 2)]
    assert subscription.positions == {0: 4, 1: 2}


async def test_a_seek_forgets_what_was_given_out_of_that_partition() -> None:
    shelf = Shelf(4)
    subscription = shelf.follow()
    await anext(subscription)
    subscription.seek(3)
    await subscription.commit()
    assert shelf.commits == []
    assert (await anext(subscription)).offset == 3
    subscription.seek(0)
    message = await anext(subscription)
    assert await message.ack()
    assert shelf.commits == [(0, 1)], "back is where the user wanted to go"


async def test_a_reader_overtaken_by_retention_asks_where_the_log_begins() -> None:
    shelf = Shelf(5, first=2)
    subscription = shelf.follow(group=None)
    message = await anext(subscription)
    assert message.offset == 2
    assert subscription.gaps == [Gap(0, 2, partition=0)]
    with pytest.raises(NothingToSettle):
        await message.ack()


async def test_closing_ends_the_iteration_also_while_it_waits() -> None:
    subscription = Shelf(0).follow()
    waiting = asyncio.create_task(anext(subscription, None))
    await asyncio.sleep(0)
    await subscription.close()
    async with asyncio.timeout(300):
        assert await waiting is None
