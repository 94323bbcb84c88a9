"""Power cuts and kills with transactions, delayed messages and replays in flight: nothing is lost, duplicated, early or partial.

A broker works on a simulated disk, whose history is then cut at many places. A new broker opens each image that the disk may have left.
It must show everything that was acknowledged before the cut, complete, and deliver the waiting messages exactly once.

HEADRACE_CRASH_CUTS=1000 cuts more often.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import pytest

from headrace.broker import Broker
from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import UnknownMessage
from headrace.records import Record, RecordBatch
from headrace.storage.store import StoreOptions
from tests.broker.harness import ANN, HandClock
from tests.conftest import Proof
from tests.storage_faults.power_cut import PowerCuts
from tests.storage_faults.simulated import SimulatedFiles

pytestmark = pytest.mark.crash_images

CUTS = int(os.environ.get("HEADRACE_CRASH_CUTS", "30"))
IMAGES_A_CUT = 4
OPTIONS = StoreOptions(journal_bytes=1 << 20, headroom_bytes=0)


@dataclass
class Acknowledged:
    """Answers and requests of a client before the cut."""

    delayed: dict[str, int] = field(default_factory=dict)
    """Value → due time, of acknowledged messages."""
    requested: set[str] = field(default_factory=set)
    cancelling: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    transactions: int = 0
    letters: int = 0
    replays: set[str] = field(default_factory=set)


class Life:
    """A broker on a disk with a manual clock."""

    def __init__(self, files: SimulatedFiles, now: int) -> None:
        self.files = files
        self.clock = HandClock(now)
        self.engine = EmbeddedEngine(files, OPTIONS, clock=self.clock, maintain_interval_seconds=3_600)
        self.broker = Broker(self.engine, clock=self.clock, later=self.clock.later, random_bytes=os.urandom)

    async def tick(self, ms: int) -> None:
        """Advance the clock until nothing is due."""
        self.clock.tick(ms)
        while under_way := self.broker._schedule._under_way:
            await asyncio.wait(under_way)
            await asyncio.sleep(0)
            self.clock.tick(0)

    async def records(self, topic: str) -> list[Record]:
        known = self.engine.topics().get(topic)
        found: list[Record] = []
        for partition in range(known.partitions if known else 0):
            bounds = self.engine.bounds(topic, partition)
            position = bounds.first
            while position < bounds.end:
                batches = await self.engine.read(topic, partition, position, bytes_max=1 << 20)
                found += (record for batch in batches for record in batch.records())
                position = batches[-1].next_offset
        return found

    async def values(self, topic: str) -> list[str]:
        return [(record.value or b"").decode() for record in await self.records(topic)]


async def _work(life: Life, seed: int) -> None:
    """Run a mix of operations. Requests and answers are marked in the disk's history."""
    dice, broker, mark = random.Random(seed), life.broker, life.files.mark
    await broker.open()
    for topic in ("later", "a", "b"):
        await broker.create_topic(ANN, topic, partitions=2)
    mark("ready")
    ids: dict[str, str] = {}
    for step in range(12):
        value = f"d{step}"
        mark(("requested", value))
        ids[value], due = await broker.publish_delayed(ANN, "later", value.encode(), delay_ms=dice.randint(0, 400), partition=step % 2)
        mark(("delayed", value, due))
        transaction = broker.begin(ANN)
        transaction.publish("a", RecordBatch([b"x%d" % step]), 0)
        transaction.publish("b", RecordBatch([b"x%d" % step, b"y%d" % step]), 1)
        transaction.commit_offsets("g", {("a", 0): step + 1})
        published = await transaction.commit()
        mark(("transaction", step + 1))
        if step % 3 == 1:
            await broker.move_to_dead_letters(ANN, "a", 0, published[0].base_offset)
            mark(("letter",))
        if step % 3 == 2:
            id = f"0-{step // 3}"
            await broker.replay(ANN, "a", [id])
            mark(("replayed", id))
        if dice.random() < 0.3:
            chosen = dice.choice(sorted(ids))
            mark(("cancelling", chosen))
            try:
                await broker.cancel_delayed(ANN, ids[chosen])
                mark(("cancelled", chosen))
            except UnknownMessage:
                mark(("kept", chosen))
        await life.tick(dice.randint(0, 120))
    await broker.close()


def _acknowledged(files: SimulatedFiles, upto: int) -> Acknowledged | None:
    """Return None if the cut came before the first request."""
    marks = [operation.value for operation in files.operations[:upto] if operation.kind == "mark"]
    if "ready" not in marks:
        return None
    acknowledged = Acknowledged()
    for mark in marks:
        match mark:
            case ("requested", str(value)):
                acknowledged.requested.add(value)
            case ("delayed", str(value), int(due)):
                acknowledged.delayed[value] = due
            case ("transaction", int(count)):
                acknowledged.transactions = count
            case ("letter",):
                acknowledged.letters += 1
            case ("replayed", str(id)):
                acknowledged.replays.add(id)
            case ("cancelling", str(value)):
                acknowledged.cancelling.add(value)
            case ("cancelled", str(value)):
                acknowledged.cancelled.add(value)
            case ("kept", str(value)):
                acknowledged.cancelling.discard(value)
    return acknowledged


async def _verify(image: SimulatedFiles, acknowledged: Acknowledged, now: int) -> None:
    life = Life(image, now)
    await life.broker.open()
    try:
        await _verify_transactions(life, acknowledged)
        await _verify_dead_letters(life, acknowledged)
        await life.tick(5_000)
        delivered = await life.records("later")
        counts = Counter((record.value or b"").decode() for record in delivered)
        assert max(counts.values(), default=0) <= 1, f"twice: {counts}"
        assert set(counts) <= acknowledged.requested - acknowledged.cancelled, f"never published: {counts}"
        assert set(counts) >= set(acknowledged.delayed) - acknowledged.cancelling - acknowledged.cancelled, (
            f"lost: {set(acknowledged.delayed) - set(counts)}"
        )
        early = [record for record in delivered if record.timestamp < acknowledged.delayed.get((record.value or b"").decode(), 0)]
        assert early == []
        assert life.broker.delayed(ANN) == []
    finally:
        await life.broker.close()


async def _verify_transactions(life: Life, acknowledged: Acknowledged) -> None:
    own = [value for value in await life.values("a") if value.startswith("x")]
    both = await life.values("b")
    count = len(set(own))
    assert count >= acknowledged.transactions, "an acknowledged transaction is lost"
    assert both == [f"{letter}{step}" for step in range(count) for letter in "xy"], "a transaction is incomplete"
    assert (life.broker.committed(ANN, "g", "a", 0) or 0) == count, "its offset is not"


async def _verify_dead_letters(life: Life, acknowledged: Acknowledged) -> None:
    """Check that a replayed dead letter is marked and published a second time, never one without the other."""
    entries = await life.broker.dead_letters(ANN, "a", records_max=100, replayed=True)
    assert len(entries) >= acknowledged.letters
    replayed = {entry.id: (entry.value or b"").decode() for entry in entries if entry.replayed_at is not None}
    assert set(replayed) >= acknowledged.replays
    twice = {value for value, count in Counter(await life.values("a")).items() if count == 2}
    assert set(replayed.values()) == twice


def _images(files: SimulatedFiles, dice: random.Random) -> Iterator[tuple[str, SimulatedFiles, Acknowledged]]:
    cuts = PowerCuts(files)
    for upto in sorted(dice.sample(range(len(files.operations) + 1), min(CUTS, len(files.operations)))):
        acknowledged = _acknowledged(files, upto)
        if acknowledged is not None:
            yield f"killed at {upto}", files.killed(upto), acknowledged
            for label, image in islice(cuts.images(upto, dice), IMAGES_A_CUT):
                yield label, image, acknowledged


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_a_cut_leaves_nothing_is_lost_twice_early_or_by_half(seed: int, proof: Proof) -> None:
    files = SimulatedFiles()
    life = Life(files, 1_700_000_000_000)
    await _work(life, seed)
    images = 0
    for label, image, acknowledged in _images(files, random.Random(seed)):
        try:
            await _verify(image, acknowledged, life.clock.now)
        except AssertionError as failure:
            raise AssertionError(f"seed {seed}, {label}: {failure}") from failure
        images += 1
    assert images > CUTS
    proof("broker crash images recovered", images)
