"""Many writers at once with little memory, failing tasks, superseded epochs and a disk that is full at times. Each writer's records
are compared with a list of what must be in the log."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.broker import BrokerSettings
from headrace.broker.settings import SpillSizes
from headrace.errors import DiskFull, StaleEpoch, UnknownStage
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness

SETTINGS = BrokerSettings(
    stages_memory_bytes=3_000,
    publication_bytes=1_500,
    spill_sizes=SpillSizes(write_bytes=500, chunk_bytes=200, log_bytes=2_000, step_bytes=600),
)
WRITERS, VERSIONS = 5, 6


class Writer:
    """Publishes its versions one by one and retries each until it is published. It trusts only `already` or success."""

    def __init__(self, name: str, harness: Harness, dice: random.Random) -> None:
        self.name, self.harness, self.dice = name, harness, dice
        self.attempts = 0
        self.expected: list[list[str]] = []

    async def work(self) -> None:
        for version in range(VERSIONS):
            rows = [f"{self.name}/{version}/{number}".ljust(60, ".") for number in range(self.dice.randrange(0, 60))]
            self.expected.append(rows)
            while not await self._try(version, rows):
                self.harness.clock.tick(100)

    async def _try(self, version: int, rows: list[str]) -> bool:
        """Run the writer once, with its own epoch."""
        self.attempts += 1
        epoch, tasks = f"{self.name}-{self.attempts}", self.dice.randrange(1, 4)
        handles = [f"{epoch}/{version}/{task}" for task in range(tasks)]
        cuts = [len(rows) * task // tasks for task in range(tasks + 1)]
        try:
            await asyncio.gather(
                *(self._task(handle, task, rows[cuts[task] : cuts[task + 1]], epoch) for task, handle in enumerate(handles))
            )
            if self.dice.random() < 0.2:
                # It dies here, after another of its tasks had begun; or it was abandoned and still works.
                zombie = asyncio.ensure_future(self.harness.broker.publish_staged(ANN, self.name, version, handles, epoch=epoch))
                await asyncio.sleep(0)
                if self.dice.random() < 0.5:
                    zombie.cancel()
                await asyncio.gather(zombie, return_exceptions=True)
                return False
            await self.harness.broker.publish_staged(ANN, self.name, version, handles[:: self.dice.choice((1, -1))], epoch=epoch)
        except (DiskFull, StaleEpoch, UnknownStage):
            if self.dice.random() < 0.5:
                await self.harness.broker.drop_staged(ANN, handles)
            return False
        return True

    async def _task(self, handle: str, order: int, rows: list[str], epoch: str) -> None:
        position = 0
        while position < len(rows):
            count = self.dice.randrange(1, 5)
            batch = RecordBatch([row.encode() for row in rows[position : position + count]])
            await self.harness.broker.stage(ANN, handle, "t", batch, writer=self.name, epoch=epoch, order=order, partition=0)
            position += count
        await self.harness.broker.seal(ANN, handle, writer=self.name, epoch=epoch, order=order)


async def _trouble(harness: Harness, dice: random.Random) -> None:
    while True:
        for _ in range(dice.randrange(20, 200)):
            await asyncio.sleep(0)
            assert harness.broker._stages._memory.size_bytes <= SETTINGS.stages_memory_bytes
        harness.engine.error = DiskFull("full") if dice.random() < 0.3 else None
        harness.clock.tick(dice.randrange(2_000))


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_goes_wrong_every_version_is_there_once_and_in_order(seed: int) -> None:
    dice = random.Random(seed)
    harness = Harness(SETTINGS)
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    writers = [Writer(f"w{number}", harness, random.Random(seed * 100 + number)) for number in range(WRITERS)]
    trouble = asyncio.ensure_future(_trouble(harness, dice))
    await asyncio.wait_for(asyncio.gather(*(writer.work() for writer in writers)), 300)
    trouble.cancel()
    harness.engine.error = None
    values = await harness.values("t")
    for writer in writers:
        own = [value for value in values if value.startswith(f"{writer.name}/")]
        assert own == [row for rows in writer.expected for row in rows], f"seed {seed}, {writer.name}"
        assert harness.broker.last_version(ANN, writer.name) == VERSIONS - 1
    await harness.broker.drop_staged(ANN, [entry.handle for entry in harness.broker.stages(ANN)])
    for _ in range(100):
        await asyncio.sleep(0)
    assert [name for name in harness.engine.topics() if name.startswith("__stage")] == []
    assert harness.broker._stages._memory.size_bytes == 0
    await harness.broker.close()
