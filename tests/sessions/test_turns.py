"""Expensive steps run one in each turn of the loop, in order, and other work is done in between."""

from __future__ import annotations

import asyncio
import itertools

from headrace.sessions.turns import Turns


async def test_between_two_steps_the_loop_serves_others() -> None:
    turns, log = Turns(), list[str]()
    for number in range(5):
        turns.take(lambda number=number: log.append(f"step {number}"))  # type: ignore[misc]
    for _ in range(7):
        await asyncio.sleep(0)
        log.append("other")
    steps = [entry for entry in log if entry != "other"]
    assert steps == [f"step {number}" for number in range(5)]
    assert not any(first != "other" and second != "other" for first, second in itertools.pairwise(log)), log


async def test_those_who_wait_go_on_in_the_order_they_came() -> None:
    turns, log = Turns(), list[int]()

    async def step(number: int) -> None:
        await turns.wait()
        log.append(number)

    async with asyncio.timeout(300):
        await asyncio.gather(*(step(number) for number in range(50)))
    assert log == list(range(50))


async def test_a_cancelled_step_costs_no_turn_and_delays_no_other() -> None:
    turns, log = Turns(), list[str]()
    turns.take(lambda: log.append("given up")).cancel()
    task = asyncio.create_task(turns.wait())
    await asyncio.sleep(0)
    task.cancel()
    turns.take(lambda: log.append("taken"))
    async with asyncio.timeout(300):
        await turns.wait()
    assert log == ["taken"]


async def test_the_first_step_and_the_end_of_all_steps_are_reported() -> None:
    reports: asyncio.Queue[bool] = asyncio.Queue()
    turns = Turns(reports.put_nowait)
    async with asyncio.timeout(300):
        for _ in range(2):
            for _ in range(3):
                await turns.wait()
            assert await reports.get() is True
            assert reports.empty(), "reported once, not for each step"
            assert await reports.get() is False
