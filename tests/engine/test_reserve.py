"""Writes that are accepted when the disk is nearly full."""

from __future__ import annotations

import pytest

from headrace.engine.contract import Ack, TopicConfig, Write
from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import DiskFull
from headrace.records import RecordBatch
from headrace.storage.store import StoreOptions
from tests.storage_faults.simulated import SimulatedFiles


async def test_the_last_space_of_a_disk_is_for_tables() -> None:
    files = SimulatedFiles()
    engine = EmbeddedEngine(files, StoreOptions(journal_bytes=64 * 1024, headroom_bytes=1 << 30), clock=lambda: 1)
    await engine.open()
    await engine.create_topic("users", 1, TopicConfig())
    await engine.create_topic("__table", 1, TopicConfig(), internal=True)
    await engine.create_topic("__waiting", 1, TopicConfig(ack=Ack.WRITTEN), internal=True)
    files.room_bytes = 1 << 29
    engine.store.maintenance.tick()
    for topic in ("users", "__waiting"):
        with pytest.raises(DiskFull):
            await engine.append([Write(topic, 0, RecordBatch([b"x"])), Write("__table", 0, RecordBatch([b"x"]))], ack=Ack.DURABLE)
    await engine.append([Write("__table", 0, RecordBatch([b"x"]))])
    assert [engine.bounds(topic, 0).end for topic in ("users", "__table", "__waiting")] == [0, 1, 0]
    await engine.close()
