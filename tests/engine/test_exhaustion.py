"""Resource exhaustion in the embedded engine: work is retried, the health reports it, and no restart is needed."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable

import pytest

from headrace.engine.contract import HealthState, TopicConfig, Write
from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import CorruptData, DiskFull
from headrace.limits import MIB
from headrace.records import RecordBatch
from headrace.storage import maintenance
from headrace.storage.store import StoreOptions
from tests.storage_faults.simulated import Fault, SimulatedFiles

SMALL = StoreOptions(journal_bytes=64 * 1024, headroom_bytes=0)


async def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (what is waited for happens on other threads)
            await asyncio.sleep(0.01)


async def opened(files: SimulatedFiles, options: StoreOptions = SMALL, interval_seconds: float = 30) -> EmbeddedEngine:
    engine = EmbeddedEngine(files, options, clock=lambda: 1, maintain_interval_seconds=interval_seconds)
    await engine.open()
    return engine


async def test_maintenance_that_fails_is_reported_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*arguments: object) -> None:
        raise CorruptData("a table cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(maintenance, "compact", unreadable)
        engine = await opened(SimulatedFiles(), interval_seconds=0.01)
        await until(lambda: any(problem.failures > 1 for problem in engine.health.report().problems))
        (problem,) = engine.health.report().problems
        assert problem.step == "retention and compaction" and "a table cannot be read" in problem.reason
    await until(lambda: engine.health.report().state is HealthState.OK)
    await engine.close()


async def test_the_space_of_a_deleted_topic_comes_back_after_a_failure() -> None:
    files = SimulatedFiles()
    engine = await opened(files)
    await engine.create_topic("gone", 1, TopicConfig())
    await engine.append([Write("gone", 0, RecordBatch([b"x"]))])
    await engine.maintain()
    (log,) = (name for name in files.list("logs") if name != f"{0:08d}")
    files.inject(Fault("remove_dir", error=errno.ENOMEM), Fault("remove_dir", nth=2, error=errno.ENOMEM))
    await engine.delete_topic("gone")
    await until(lambda: len(files.fired) == 2 and files.list(f"logs/{log}") == [] and log not in files.list("logs"))
    await until(lambda: engine.health.report().state is HealthState.OK)
    await engine.close()


async def test_reads_maintenance_and_the_end_need_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    files = SimulatedFiles()
    engine = await opened(files)
    await engine.create_topic("t", 1, TopicConfig())
    await engine.append([Write("t", 0, RecordBatch([b"x"]))])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    await engine.maintain()
    files.cold = True
    reads = await asyncio.gather(*(engine.read("t", 0, 0, bytes_max=100) for _ in range(20)))
    assert all(len(batches[0]) == 1 for batches in reads)
    await engine.delete_topic("t")
    await engine.close()


async def test_an_engine_that_gets_no_thread_lets_go_of_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    files, start = SimulatedFiles(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "headrace-maintenance":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await opened(files)
    engine = await opened(files)
    await engine.close()


@pytest.mark.parametrize("free_bytes", [20 * MIB, 300_000])
async def test_a_start_with_little_space_serves_reads_and_deletes(free_bytes: int) -> None:
    files = SimulatedFiles()
    engine = await opened(files, StoreOptions(headroom_bytes=0))
    for topic in ("kept", "gone"):
        await engine.create_topic(topic, 1, TopicConfig())
        await engine.append([Write(topic, 0, RecordBatch([topic.encode() * 1000]))])
    disk = SimulatedFiles(files.contents(), files.directories())
    await engine.close()
    disk.room_bytes = free_bytes
    engine = await opened(disk, StoreOptions())
    assert engine.health.report().state is HealthState.DEGRADED
    assert [len(batch) for batch in await engine.read("kept", 0, 0, bytes_max=100)] == [1]
    with pytest.raises(DiskFull) as refused:
        await engine.append([Write("kept", 0, RecordBatch([b"new"]))])
    assert refused.value.retriable
    await engine.delete_topic("gone")
    assert "gone" not in engine.topics()
    disk.room_bytes = 1 << 40
    await until(lambda: engine.health.report().state is HealthState.OK)
    await engine.append([Write("kept", 0, RecordBatch([b"new"]))])
    await engine.close()
    engine = await opened(disk, StoreOptions())
    assert set(engine.topics()) == {"kept"}
    assert engine.bounds("kept", 0).end == 2
    await engine.close()
