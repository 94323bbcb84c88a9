"""The status of a broker shows the health of its threads and tasks."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker import Broker, Principal
from headrace.broker.health import supervise
from headrace.broker.settings import BrokerSettings
from headrace.broker.topics import LISTED_A_TURN
from headrace.engine.contract import Batch, Health, HealthReport, HealthState
from headrace.engine.embedded import EmbeddedEngine
from headrace.engine.memory import MemoryEngine
from headrace.errors import BrokerError, DiskFull
from headrace.limits import MIB
from headrace.records import RecordBatch
from tests.storage_faults.simulated import SimulatedFiles

ANN = Principal("ann")


async def test_a_broker_that_works_is_healthy() -> None:
    broker = Broker(MemoryEngine(clock=lambda: 1), clock=lambda: 1)
    await broker.open()
    assert (await broker.status(ANN)).health == broker.health == HealthReport(HealthState.OK)
    await broker.close()


async def test_the_status_counts_a_slice_of_the_partitions_in_each_turn() -> None:
    broker = Broker(MemoryEngine(clock=lambda: 1), clock=lambda: 1)
    await broker.open()
    await broker.create_topic(ANN, "t", partitions=2 * LISTED_A_TURN + 1)
    await broker.publish(ANN, "t", RecordBatch([b"a", b"b"]), partition=2 * LISTED_A_TURN)
    counting, turns = broker.status(ANN), 1
    with pytest.raises(StopIteration) as end:
        while True:
            counting.send(None)
            turns += 1
    status = end.value.value
    assert (status.topics, status.records, status.written) == (1, 2, 2)
    assert turns == 3
    await broker.close()


async def test_the_failure_of_a_background_task_is_reported() -> None:
    health, reports = Health(), list[HealthState]()
    health.changed = lambda report: reports.append(report.state)

    async def work(failure: Exception | None) -> None:
        if failure is not None:
            raise failure

    for failure in (None, ValueError("a defect"), ValueError("a defect"), None):
        task = asyncio.create_task(work(failure))
        supervise(health, "the work", task)
        await asyncio.wait([task])
        await asyncio.sleep(0)  # the loop iteration of the callbacks
    assert reports == [HealthState.DEGRADED, HealthState.OK], "each change is reported once"
    cancelled = asyncio.create_task(asyncio.sleep(1000))
    supervise(health, "the work", cancelled)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert health.report().state is HealthState.OK


async def test_expiry_that_fails_is_shown_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MemoryEngine(clock=lambda: 1)
    broker = Broker(engine, clock=lambda: 1, settings=BrokerSettings(expire_every_ms=1))
    failing = [ValueError("a defect")] * 3

    async def expire() -> None:
        if failing:
            raise failing.pop()

    monkeypatch.setattr(broker._producers, "expire", expire)
    failed, recovered = asyncio.Event(), asyncio.Event()
    engine.health.changed = lambda report: failed.set() if report.problems else recovered.set()
    await broker.open()
    async with asyncio.timeout(300):
        await failed.wait()
        assert "a defect" in (await broker.status(ANN)).health.problems[0].reason
        await recovered.wait()
    assert not failing
    await broker.close()


async def test_a_subscriber_gets_an_error_when_its_delivery_fails() -> None:
    engine = MemoryEngine(clock=lambda: 1)
    broker = Broker(engine, clock=lambda: 1)
    await broker.open()
    await broker.create_topic(ANN, "t")
    shown: asyncio.Future[HealthReport] = asyncio.get_running_loop().create_future()
    engine.health.changed = shown.set_result
    failed: asyncio.Future[BrokerError] = asyncio.get_running_loop().create_future()

    def deliver(batches: list[Batch]) -> None:
        raise ValueError("a defect")

    broker.cursor(ANN, "t", 0, 0, deliver, credit_bytes=1000, failed=failed.set_result)
    await broker.publish(ANN, "t", RecordBatch([b"x"]))
    async with asyncio.timeout(300):
        assert "a defect" in str(await failed)
        assert [problem.step for problem in (await shown).problems] == ["delivery to subscribers"]
    await broker.close()


async def test_a_broker_starts_with_little_space_and_says_so() -> None:
    files = SimulatedFiles()
    broker = Broker(EmbeddedEngine(files, clock=lambda: 1), clock=lambda: 1)
    await broker.open()
    for topic in ("kept", "gone"):
        await broker.create_topic(ANN, topic)
        await broker.publish(ANN, topic, RecordBatch([b"x"]))
    disk = SimulatedFiles(files.contents(), files.directories())
    await broker.close()
    disk.room_bytes = 20 * MIB
    broker = Broker(EmbeddedEngine(disk, clock=lambda: 1), clock=lambda: 1)
    await broker.open()
    assert [problem.step for problem in (await broker.status(ANN)).health.problems] == ["disk space"]
    with pytest.raises(DiskFull):
        await broker.publish(ANN, "kept", RecordBatch([b"x"]))
    await broker.delete_topic(ANN, "gone")
    assert [topic.name for topic in broker.topics(ANN)] == ["kept"]
    await broker.close()
