"""The next start completes a deletion that a crash interrupted, and affects no newer topic."""

from __future__ import annotations

import asyncio

import pytest

from headrace.engine.contract import TopicConfig, Write
from headrace.engine.embedded import EmbeddedEngine
from headrace.records import RecordBatch
from headrace.storage.store import StoreOptions
from tests.storage_faults.power_cut import barest
from tests.storage_faults.simulated import SimulatedFiles

OPTIONS = StoreOptions(journal_bytes=64 * 1024, headroom_bytes=0)


async def test_a_deletion_finished_after_a_crash_spares_the_topic_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    may_remove, removed, remove = asyncio.Event(), asyncio.Event(), EmbeddedEngine._remove

    async def later(engine: EmbeddedEngine, first: int, logs: list[int]) -> None:
        await may_remove.wait()
        await remove(engine, first, logs)
        removed.set()

    monkeypatch.setattr(EmbeddedEngine, "_remove", later)
    files = SimulatedFiles()
    engine = EmbeddedEngine(files, OPTIONS, clock=lambda: 1)
    await engine.open()
    await engine.create_topic("old", 1, TopicConfig())
    await engine.delete_topic("old")
    left = barest(files)
    await engine.close()

    engine = EmbeddedEngine(left, OPTIONS, clock=lambda: 1)
    await engine.open()
    await engine.create_topic("new", 1, TopicConfig())
    await engine.append([Write("new", 0, RecordBatch([b"kept"]))])
    may_remove.set()
    await asyncio.wait_for(removed.wait(), 300)
    [batch] = await engine.read("new", 0, 0, bytes_max=100)
    assert batch.values() == [b"kept"]
    await engine.close()
