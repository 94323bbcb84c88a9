"""The writer and the maintenance thread sync one journal: neither may assume that the other's sync covered a later frame."""

from __future__ import annotations

import threading

import pytest

from headrace.records import RecordBatch
from headrace.storage.encoding import build
from headrace.storage.journal import Journal, JournalStart, SyncFailed, read_journal
from tests.storage_faults.power_cut import barest
from tests.storage_faults.simulated import Fault, SimulatedFile, SimulatedFiles

BATCH = build(1, 0, RecordBatch([b"value"]), now=0)


def started(files: SimulatedFiles) -> Journal:
    journal = Journal(files, 64 * 1024, JournalStart(journal=1, frame=0, spares=[]))
    journal.start()
    journal.append([BATCH])
    return journal


def durable_frames(files: SimulatedFiles) -> list[int]:
    return [frame.number for frame in read_journal(barest(files), 1, None, lambda damage: None)]


def test_a_frame_written_while_another_thread_syncs_is_synced_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave, sync = threading.Event(), threading.Event(), SimulatedFile.sync

    def slow(file: SimulatedFile) -> None:
        sync(file)
        if threading.current_thread() is maintenance:
            entered.set()
            assert leave.wait(60)

    monkeypatch.setattr(SimulatedFile, "sync", slow)
    files = SimulatedFiles()
    journal = started(files)
    maintenance = threading.Thread(target=journal.sync)
    maintenance.start()
    assert entered.wait(60)
    journal.append([BATCH])
    leave.set()
    maintenance.join()
    journal.sync()
    assert durable_frames(files) == [0, 1]


def test_a_sync_that_failed_for_one_thread_is_not_tried_again_by_the_other() -> None:
    files = SimulatedFiles()
    journal = started(files)
    files.inject(Fault("sync"))
    for _ in range(2):
        with pytest.raises(SyncFailed):
            journal.sync()
    assert files.calls["sync"] == 1
    assert durable_frames(files) == []
