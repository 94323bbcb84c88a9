"""Fetches of a partition that readers share."""

from __future__ import annotations

import asyncio

from headrace.engine.kafka.partition import PartitionLog


async def test_a_reader_does_not_wait_for_a_fetch_that_has_ended() -> None:
    """Awaiting a task that is done returns in the same turn of the loop. A reader that it does not help would ask for it for ever."""

    async def fetch() -> int:
        return 5

    log = PartitionLog("t", "t", 0, end=10)
    ended, under_way = asyncio.create_task(fetch()), asyncio.create_task(fetch())
    log.fetches = {5: (ended, 1_000), 6: (under_way, 1_000)}
    assert (log.fetch_of(5), log.fetch_of(6)) == (ended, under_way)
    await ended
    assert log.fetch_of(5) is None
    await under_way
