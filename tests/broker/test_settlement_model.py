"""Settlement compared with a simple model: with any consumers, clock, disk errors and crashes, nothing is lost or committed too
early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.broker import Delivery, Member, SettlementPolicy
from headrace.errors import DiskFull
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns

POLICY = SettlementPolicy(ack_timeout_ms=1_000, backoff_ms=50, backoff_max_ms=400, attempts_max=2, in_flight_max=8)
PARTITIONS = 2
QUEUES = 3

Place = tuple[int, int]
"""Partition, offset."""


class SettlementModel(RuleBasedStateMachine):
    """The model holds what was published and acked, and which deliveries are in flight, where and until when."""

    policies = (POLICY,) * QUEUES
    """Of each queue."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.harness = Harness()
        self.queues: dict[int, Member] = {}
        self.published: list[int] = [0] * PARTITIONS
        self.acked: set[Place] = set()
        self.acked_since_start: set[Place] = set()
        self.out: dict[Place, tuple[int, Delivery, int]] = {}
        self.run(self._open())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.runner.run(work)

    async def _open(self) -> None:
        await self.harness.broker.open()
        await self.harness.broker.create_topic(ANN, "t", partitions=PARTITIONS)
        await self.harness.broker.create_topic(ANN, "t.dlq")
        self._join(0)

    def _join(self, number: int) -> Member:
        if number not in self.queues:
            self.queues[number] = self.harness.broker.join(ANN, "g", "t", policy=self.policies[number], mode="shared", start="earliest")
        return self.queues[number]

    async def _buried(self) -> set[Place]:
        notes = [dict(record.headers) for record in await self.harness.records("t.dlq")]
        return {(int(note["x-headrace-source-partition"]), int(note["x-headrace-source-offset"])) for note in notes}

    @rule(partition=st.integers(0, PARTITIONS - 1), count=st.integers(1, 6))
    def publish(self, partition: int, count: int) -> None:
        async def work() -> None:
            # The records' topic never fails here: this test is about what is in the log.
            await self.harness.broker.publish(ANN, "t", RecordBatch([b"x"] * count), partition=partition)
            self.published[partition] += count

        self.run(work())

    @rule(number=st.integers(0, QUEUES - 1), count=st.integers(1, 10), bytes_max=st.sampled_from([1, 3, 1_000]))
    def take(self, number: int, count: int, bytes_max: int) -> None:
        async def work() -> None:
            queue = self._join(number)
            for delivery in await queue.take(count, bytes_max):
                place = delivery.partition, delivery.offset
                assert place not in self.acked_since_start, "delivered again after it was settled"
                assert 1 <= delivery.attempt <= POLICY.attempts_max
                if place in self.out:
                    _, before, deadline = self.out[place]
                    assert deadline <= self.harness.clock.now, "delivered twice at the same time"
                    assert delivery.id == before.id
                self.out[place] = number, delivery, self.harness.clock.now + POLICY.ack_timeout_ms
            assert queue.in_flight <= POLICY.in_flight_max

        self.run(work())

    @precondition(lambda self: self.out)
    @rule(data=st.data(), kind=st.sampled_from(["ack", "nack"]), own=st.sampled_from([True, True, False]))
    def settle(self, data: st.DataObject, kind: str, own: bool) -> None:
        place = data.draw(st.sampled_from(sorted(self.out)))
        holder, delivery, _ = self.out[place]
        number = holder if own else data.draw(st.integers(0, QUEUES - 1))
        delay_ms = data.draw(st.sampled_from([None, 0]))

        async def work() -> None:
            queue = self._join(number)
            (known,) = queue.ack([delivery.id]) if kind == "ack" else queue.nack([delivery.id], delay_ms)
            assert not known or number == holder, "only its holder settles a delivery"
            if known and kind == "ack":
                self.acked.add(place)
                self.acked_since_start.add(place)
                del self.out[place]
            elif known:
                self.out[place] = holder, delivery, self.harness.clock.now
            await turns()

        self.run(work())

    @precondition(lambda self: self.out)
    @rule(number=st.integers(0, QUEUES - 1))
    def refuse_everything(self, number: int) -> None:
        """Nack often: single nacks seldom use up the attempts of a record."""

        async def work() -> None:
            mine = {place: one for place, one in self.out.items() if one[0] == number}
            answers = self._join(number).nack([delivery.id for _, delivery, _ in mine.values()], delay_ms=0)
            for (place, (holder, delivery, _)), known in zip(mine.items(), answers, strict=True):
                if known:
                    self.out[place] = holder, delivery, self.harness.clock.now
            await turns()

        self.run(work())

    @rule(ms=st.integers(1, 1_500))
    def pass_time(self, ms: int) -> None:
        async def work() -> None:
            self.harness.clock.tick(ms)
            await turns()

        self.run(work())

    @precondition(lambda self: self.queues)
    @rule(data=st.data(), dice=st.integers(1, 3))
    def leave(self, data: st.DataObject, dice: int) -> None:
        if dice > 1:
            return  # reach states that need a long history
        number = data.draw(st.sampled_from(sorted(self.queues)))

        async def work() -> None:
            closing = self.queues.pop(number).close()
            self.out = {
                place: (holder, delivery, self.harness.clock.now if holder == number else deadline)
                for place, (holder, delivery, deadline) in self.out.items()
            }
            if not self.queues:
                await closing  # what was settled is not delivered again, although nobody is left

        self.run(work())

    @rule(topic=st.sampled_from(["t.dlq", "__offsets"]))
    def fill_the_disk(self, topic: str) -> None:
        self.harness.engine.error, self.harness.engine.topic = DiskFull("full"), topic

    @rule()
    def make_room(self) -> None:
        self.harness.engine.error = None

    @rule(clean=st.booleans(), dice=st.integers(1, 5))
    def restart(self, clean: bool, dice: int) -> None:
        if dice > 1:
            return

        async def work() -> None:
            self.harness.engine.error = None
            if clean:
                await self.harness.broker.close()
            else:
                # The old broker is gone at once: none of its timers or tasks may act.
                self.harness.clock._timers.clear()
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                await turns()
            await self.harness.crash()
            self.queues.clear()
            self._forget_deliveries()

        self.run(work())

    def _forget_deliveries(self) -> None:
        """Restart. The next consumer starts at the committed offset, so records settled above it may be delivered again."""
        self.out.clear()
        self.acked_since_start.clear()

    @invariant()
    def committed_never_passes_an_unsettled_offset(self) -> None:
        async def work() -> None:
            settled = self.acked | await self._buried()
            for partition in range(PARTITIONS):
                committed = self.harness.broker.committed(ANN, "g", "t", partition) or 0
                assert all((partition, offset) in settled for offset in range(committed))

        self.run(work())

    def teardown(self) -> None:
        async def work() -> None:
            """Finish the work with a patient consumer; then every record was acked or is a dead letter."""
            self.harness.engine.error = None
            queue = self._join(0)
            for other in set(self.queues) - {0}:
                self.queues[other].close()
            for _ in range(1_000):
                taken = await queue.take(100)
                self.acked |= {(delivery.partition, delivery.offset) for delivery in taken}
                queue.ack([delivery.id for delivery in taken])
                await turns()
                self.harness.clock.tick(1_000)
                await turns()
                committed = [self.harness.broker.committed(ANN, "g", "t", partition) for partition in range(PARTITIONS)]
                if committed == self.published:
                    break
            assert committed == self.published, "the group never gets to the end"
            everything = {(partition, offset) for partition in range(PARTITIONS) for offset in range(self.published[partition])}
            assert self.acked | await self._buried() == everything
            await self.harness.broker.close()

        self.run(work())
        self.runner.close()


SettlementModel.TestCase.settings = settings(max_examples=250, stateful_step_count=50)
TestSettlementModel = SettlementModel.TestCase


class RangeModel(SettlementModel):
    """The same with two queues that take ranges, which become single records in many ways."""

    policies = (replace(POLICY, ranges=True), POLICY, replace(POLICY, ranges=True))


RangeModel.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestRangeModel = RangeModel.TestCase
