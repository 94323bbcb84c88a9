"""Groups under random members: they join, leave and die, are slow, and the broker is killed with its disk as it is.

The model knows what was published, who holds what, and what was settled. Every record is settled at least once and none is skipped; no
record is delivered again after it was settled, nor while another member works on it in time; an ordered group keeps the order of its
partitions.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import pytest

from headrace.broker import Broker, Member, Mode, SettlementPolicy
from headrace.broker.groups.consumer import HANDOVER_MS
from headrace.engine.embedded import EmbeddedEngine
from headrace.records import RecordBatch
from headrace.storage.store import StoreOptions
from tests.broker.harness import ANN, HandClock, turns
from tests.storage_faults.simulated import SimulatedFiles

OPTIONS = StoreOptions(journal_bytes=1 << 20, headroom_bytes=0)
POLICY = SettlementPolicy(ack_timeout_ms=2_000, backoff_ms=50, backoff_max_ms=400, attempts_max=0, dead_letters=False, credit=6)
CHUNKS = replace(POLICY, ack_timeout_ms=3_600_000, chunks=True)
PARTITIONS = 3
MEMBERS_MAX = 5
STEPS = 250

Place = tuple[int, int]
"""Partition, offset."""


@dataclass(eq=False)
class Worker:
    member: Member
    takes_chunks: bool
    held: dict[Place, tuple[int, int]]
    """Place → (delivery id, time of the delivery)."""


class World:
    def __init__(self, mode: Mode, seed: int) -> None:
        self.mode: Mode = mode
        self.dice = random.Random(seed)
        self.clock = HandClock()
        self.files = SimulatedFiles()
        self.workers: list[Worker] = []
        self.published = [0] * PARTITIONS
        self.settled: set[Place] = set()
        """Settled at any time."""
        self.settled_in_this_life: set[Place] = set()
        self.floors = [0] * PARTITIONS
        """Where the group began in this life of the broker."""
        self.kills = 0

    async def open(self) -> None:
        self.engine = EmbeddedEngine(self.files, OPTIONS, clock=self.clock, maintain_interval_seconds=3_600)
        self.broker = Broker(self.engine, clock=self.clock, later=self.clock.later)
        await self.broker.open()

    async def kill(self) -> None:
        """Kill the broker and its members, and start a new one on what the disk holds."""
        self.clock.forget_timers()
        files, engine = self.files, self.engine
        self.files = SimulatedFiles(files.contents(), files.directories())
        await engine.close()
        self.workers.clear()
        self.settled_in_this_life.clear()
        self.kills += 1
        await self.open()
        self.floors = [self.broker.committed(ANN, "g", "t", partition) or 0 for partition in range(PARTITIONS)]
        for partition, floor in enumerate(self.floors):
            assert all((partition, offset) in self.settled for offset in range(floor)), "committed beyond an unsettled record"

    async def publish(self) -> None:
        partition, count = self.dice.randrange(PARTITIONS), self.dice.randint(1, 12)
        values = [b"%d.%d" % (partition, self.published[partition] + number) for number in range(count)]
        await self.broker.publish(ANN, "t", RecordBatch(values), partition=partition)
        self.published[partition] += count

    async def join(self) -> None:
        if len(self.workers) < MEMBERS_MAX:
            takes_chunks = self.dice.random() < 0.25
            policy = CHUNKS if takes_chunks else replace(POLICY, ranges=len(self.workers) % 2 == 0)
            member = self.broker.join(ANN, "g", "t", policy=policy, mode=self.mode, start="earliest")
            self.workers.append(Worker(member, takes_chunks, {}))

    async def leave(self) -> None:
        """A member leaves or dies. What it holds is lost to it."""
        if self.workers:
            worker = self.workers.pop(self.dice.randrange(len(self.workers)))
            leaving = worker.member.close()
            if self.dice.random() < 0.5:
                await leaving

    async def take(self) -> None:
        if not self.workers:
            return
        worker, count = self.dice.choice(self.workers), self.dice.randint(1, 10)
        if worker.takes_chunks:
            chunk = await worker.member.take_chunk(count, 1_000)
            values = [] if chunk is None else chunk.values
            ids = [] if chunk is None else chunk.ids
            for value in values:
                partition, offset = (value or b"").split(b".")
                self._delivered(worker, (int(partition), int(offset)), 0)
            for place in [place for place, (id, _) in worker.held.items() if id == 0]:
                del worker.held[place]
                self._settled(place)
            worker.member.ack(ids)
        else:
            for delivery in await worker.member.take(count):
                place = delivery.partition, delivery.offset
                assert delivery.value == b"%d.%d" % place
                self._delivered(worker, place, delivery.id)
        assert worker.member.in_flight <= worker.member.credit

    def _delivered(self, worker: Worker, place: Place, id: int) -> None:
        partition, offset = place
        assert place not in self.settled_in_this_life, "delivered again after it was settled"
        in_time_ms = POLICY.ack_timeout_ms if self.mode == "shared" else min(POLICY.ack_timeout_ms, HANDOVER_MS)
        for other in self.workers:
            if place in other.held and other is not worker:
                assert self.clock.now - other.held[place][1] >= in_time_ms, "two members work on it"
                del other.held[place]
        if self.mode == "ordered":
            in_hands = {held for one in self.workers for held in one.held}
            for below in range(self.floors[partition], offset):
                assert (partition, below) in self.settled_in_this_life | in_hands, "delivered before a record in front of it"
        worker.held[place] = id, self.clock.now

    def _settled(self, place: Place) -> None:
        self.settled.add(place)
        self.settled_in_this_life.add(place)

    async def settle(self) -> None:
        busy = [worker for worker in self.workers if worker.held]
        if not busy:
            return
        worker = self.dice.choice(busy)
        places = [place for place in worker.held if self.dice.random() < 0.7]
        is_nack = self.dice.random() < 0.2
        ids = [worker.held[place][0] for place in places]
        answers = worker.member.nack(ids) if is_nack else worker.member.ack(ids)
        for place, is_known in zip(places, answers, strict=True):
            del worker.held[place]
            if is_known and not is_nack:
                self._settled(place)

    async def wait(self) -> None:
        self.clock.tick(self.dice.choice((1, 20, 100, 100, HANDOVER_MS, POLICY.ack_timeout_ms)))
        await turns(5)

    async def finish(self) -> None:
        """Let one patient member settle the rest."""
        for worker in self.workers:
            worker.member.close()
        self.workers.clear()
        member = self.broker.join(ANN, "g", "t", policy=replace(POLICY, credit=1_000), mode=self.mode, start="earliest")
        worker = Worker(member, False, {})
        self.workers.append(worker)
        async with asyncio.timeout(300):
            while [self.broker.committed(ANN, "g", "t", partition) for partition in range(PARTITIONS)] != self.published:
                for delivery in await member.take(1_000):
                    self._delivered(worker, (delivery.partition, delivery.offset), delivery.id)
                member.ack([id for id, _ in worker.held.values()])
                for place in worker.held:
                    self._settled(place)
                worker.held.clear()
                self.clock.tick(100)
                await asyncio.sleep(0)
        everything = {(partition, offset) for partition in range(PARTITIONS) for offset in range(self.published[partition])}
        assert self.settled == everything
        await self.broker.close()


@pytest.mark.parametrize("mode", ["ordered", "shared"])
@pytest.mark.parametrize("seed", range(12))
async def test_every_record_is_settled_and_none_is_skipped(mode: Mode, seed: int) -> None:
    world = World(mode, seed)
    await world.open()
    await world.broker.create_topic(ANN, "t", partitions=PARTITIONS)
    steps = [world.publish, world.join, world.leave, world.take, world.settle, world.wait, world.kill]
    for _ in range(STEPS):
        (step,) = world.dice.choices(steps, weights=(10, 4, 3, 25, 20, 8, 1))
        await step()
    assert world.kills, "the seed kills the broker at least once"
    await world.finish()
