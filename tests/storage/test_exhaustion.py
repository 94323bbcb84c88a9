"""Lack of descriptors, memory and disk space: nothing is lost, the store is not fenced, and no restart is needed."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import DiskFull, StorageFailed, Unavailable
from headrace.limits import MIB
from headrace.records import Ack, Appended, RecordBatch
from headrace.storage import encoding, journal
from headrace.storage.files import EXHAUSTED_ERRNOS
from headrace.storage.health import FAILURES_MAX, HealthState
from headrace.storage.maintenance import STEP
from headrace.storage.store import Store, StoreOptions
from tests.storage.stores import SMALL, crashed, new_log, opened, put, staged, until, values
from tests.storage_faults.power_cut import barest
from tests.storage_faults.simulated import Fault, SimulatedFiles

LARGE = b"x" * 40_000
"""Two of these do not fit into one journal file of `SMALL`."""


@pytest.mark.parametrize("error", sorted(EXHAUSTED_ERRNOS))
@pytest.mark.parametrize("kind", ["create", "allocate", "sync_dir", "write_at"])
def test_an_append_without_resources_is_refused_for_now(kind: str, error: int) -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, LARGE)
    files.inject(Fault(kind, path="journal*", error=error, persistent=True))
    for _ in range(3):
        refused = staged(store, (log, RecordBatch([LARGE])))
        store.flush()
        assert isinstance(refused[0], Unavailable) and refused[0].retriable
    files.heal()
    assert put(store, log, b"after").base_offset == 1
    assert values(opened(barest(files)), log) == [LARGE, b"after"]


@pytest.mark.parametrize("keys", [[b"key"], None])
def test_an_append_that_finds_no_memory_is_refused_for_now(keys: list[bytes | None] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(SimulatedFiles())
    log = new_log(store)

    def exhausted(*arguments: object, **named: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "crc32c", exhausted)
        refused = staged(store, (log, RecordBatch([b"x"], keys)))
        store.flush()
    assert isinstance(refused[0], Unavailable)
    assert put(store, log, b"after").base_offset == 0


@pytest.mark.parametrize("error", sorted(EXHAUSTED_ERRNOS))
@pytest.mark.parametrize("kind", ["open", "create", "open_readonly", "list", "sync_dir", "make_dir", "write_at", "rename", "remove"])
def test_the_keeper_waits_out_the_want_of_resources(kind: str, error: int) -> None:
    files = SimulatedFiles()
    store = opened(files)
    logs = [new_log(store, segment_bytes=1000, retention_bytes=3000), new_log(store, segment_bytes=1000, compact=True)]
    for number in range(12):
        for log in logs:
            put(store, log, b"%02d" % number * 200, keys=[b"key"])
    files.inject(Fault(kind, path="[!j]*", error=error, persistent=True), Fault(kind, path="", error=error, persistent=True))
    for _ in range(FAILURES_MAX + 1):
        store.maintenance.attempt()
        store.checkpoint()
        store.maintain(0)
    assert store.failure is None
    assert store.health.report().state in (HealthState.DEGRADED, HealthState.OK)
    files.heal()
    assert store.maintenance.attempt() == 0
    store.checkpoint()
    store.maintain(0)
    assert store.health.report().state is HealthState.OK
    kept = [values(store, log) for log in logs]
    assert kept[0][-1] == kept[1][-1] == b"11" * 200
    store.close()
    again = opened(barest(files))
    assert [values(again, log) for log in logs] == kept


def test_segments_that_retention_took_go_when_there_are_resources_again() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, segment_bytes=1000, retention_bytes=2000)
    for number in range(10):
        put(store, log, b"%d" % number * 800)
    store.checkpoint()
    before = len(files.list(f"logs/{log:08d}"))
    files.inject(Fault("create", path="MANIFEST*", error=errno.EMFILE))
    store.maintain(0)
    assert len(files.list(f"logs/{log:08d}")) == before
    store.maintain(0)
    assert len(files.list(f"logs/{log:08d}")) < before


def test_a_deleted_log_goes_when_there_are_resources_again() -> None:
    files = SimulatedFiles()
    store = opened(files)
    kept, gone = new_log(store), new_log(store)
    for log in (kept, gone):
        put(store, log, b"x")
    store.checkpoint()
    files.inject(Fault("list", path="logs*", error=errno.EMFILE))
    assert not store.delete_logs([gone])
    assert not store.delete_logs([gone]), "nothing has happened since"
    for _ in range(12):
        store.maintenance.attempt()
    assert store.delete_logs([gone])
    assert files.list(f"logs/{gone:08d}") == []


def test_a_read_without_descriptors_is_refused_for_now_and_is_no_damage() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"x")
    store.close()
    store = opened(files)
    store.open_log(log, store.partitions[log].options)
    files.inject(Fault("open", path="logs/*", error=errno.EMFILE, persistent=True))
    with pytest.raises(Unavailable):
        values(store, log)
    with pytest.raises(Unavailable):
        store.partitions[log].offset_for_time(0)
    files.heal()
    assert values(store, log) == [b"x"]


def test_a_failed_look_at_the_free_space_is_tried_again_and_then_ends_writing() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    files.inject(Fault("free_bytes", error=errno.EIO, persistent=True))
    for failures in range(1, FAILURES_MAX):
        assert store.maintenance.attempt() == failures
        put(store, log, b"x")
    (problem,) = store.health.report().problems
    assert problem.step == STEP and "Input/output error" in problem.reason and problem.failures == FAILURES_MAX - 1
    store.maintenance.attempt()
    assert store.failure is not None and "Input/output error" in str(store.failure)
    assert store.health.report().state is HealthState.FAILED


def test_one_failed_look_at_the_free_space_leaves_no_mark() -> None:
    files = SimulatedFiles()
    store = opened(files)
    files.inject(Fault("free_bytes", error=errno.EIO))
    assert store.maintenance.attempt() == 1
    assert store.maintenance.attempt() == 0
    assert store.health.report().state is HealthState.OK


@pytest.mark.replaces_code
def test_what_nobody_expected_of_the_keeper_is_tried_again_and_then_ends_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(SimulatedFiles())

    def defect(**named: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(store.maintenance, "tick", defect)
    assert [store.maintenance.attempt() for _ in range(FAILURES_MAX)] == list(range(1, FAILURES_MAX + 1))
    assert "a defect" in str(store.failure)


def test_the_thread_of_the_keeper_outlives_a_failure() -> None:
    files = SimulatedFiles()
    store = Store.open(files, SMALL)
    files.inject(Fault("free_bytes", error=errno.EIO))
    until(lambda: store.health.failures(STEP) > 0)
    until(lambda: store.health.report().state is HealthState.OK)
    assert files.fired
    store.close()


def test_who_waits_for_a_writer_that_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(SimulatedFiles(), SMALL, threads=False)
    log = new_log(store)

    def defect(*arguments: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(journal, "crc32c", defect)
    outcomes = [staged(store, (log, RecordBatch([bytes(5 * MIB)]))) for _ in range(6)]
    store.start()
    until(lambda: all(outcomes))
    assert all(isinstance(outcome[0], StorageFailed) for outcome in outcomes)
    assert store.health.report().state is HealthState.FAILED
    store.close()


def test_appends_are_refused_when_the_keeper_cannot_keep_up_for_want_of_resources() -> None:
    files = SimulatedFiles()
    store = opened(files, StoreOptions(journal_bytes=64 * 1024, headroom_bytes=0, tail_bytes_max=50_000))
    log = new_log(store)
    put(store, log, LARGE)
    files.inject(Fault("make_dir", error=errno.EMFILE, persistent=True))
    store.maintenance.attempt()
    put(store, log, LARGE)
    assert isinstance(staged(store, (log, RecordBatch([b"x"])))[0], Unavailable)
    files.heal()
    store.maintenance.attempt()
    put(store, log, b"after")


def test_a_checkpoint_that_ended_before_its_sync_syncs_the_same_segments_next_time() -> None:
    files = SimulatedFiles()
    store = opened(files)
    first, second = new_log(store), new_log(store)
    for log in (first, second):
        put(store, log, b"old")
    store.close()
    store = opened(files)
    put(store, first, b"acknowledged")
    files.inject(Fault("open", path=f"logs/{second:08d}/*", error=errno.EMFILE))
    store.checkpoint()
    assert files.fired, "the second segment could not be opened for its sync"
    store.close()
    assert values(opened(barest(files)), first) == [b"old", b"acknowledged"]


# Disk space.


@pytest.mark.parametrize("reused", [False, True], ids=["new file", "used again"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_the_name_of_a_new_journal_file_is_retriable(error: int, reused: bool) -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    if reused:
        put(store, log, LARGE)
        put(store, log, LARGE)
        store.checkpoint()
    put(store, log, LARGE)
    end = store.bounds(log).end
    files.inject(Fault("sync_dir", path="journal", error=error), Fault("sync_dir", nth=2, path="journal", error=error))
    for _ in range(2):
        refused = staged(store, (log, RecordBatch([LARGE])))
        store.flush()
        assert isinstance(refused[0], DiskFull)
    assert put(store, log, LARGE).base_offset == end
    assert store.failure is None
    assert len(values(opened(barest(files)), log)) == end + 1


def filled(free_bytes: int) -> tuple[SimulatedFiles, int]:
    """Return the disk of a broker that was killed after a few records, with this much free space."""
    files = SimulatedFiles()
    store = opened(files, StoreOptions())
    log = new_log(store)
    put(store, log, b"old" * 1000)
    disk = crashed(files)
    disk.room_bytes = free_bytes
    return disk, log


@pytest.mark.parametrize("free_bytes", [20 * MIB, 200_000, 10_000, 0])
def test_a_store_starts_on_a_full_disk_and_writes_again_when_there_is_room(free_bytes: int) -> None:
    disk, log = filled(free_bytes)
    store = opened(disk, StoreOptions())
    assert values(store, log) == [b"old" * 1000]
    assert isinstance(staged(store, (log, RecordBatch([b"new"])))[0], DiskFull)
    assert [problem.step for problem in store.health.report().problems] == ["disk space"]
    outcome: list[object] = []
    store.stage([(log, RecordBatch([b"delete"]))], ack=Ack.DURABLE, now=0, done=outcome.append, size_bytes=1, reserve=True)
    store.flush()
    if free_bytes:
        assert outcome == [[Appended(1, 1, 0)]], "what may use the reserve is written to a small journal file"
    else:
        assert isinstance(outcome[0], DiskFull)
    disk.room_bytes = 1 << 40
    store.maintenance.attempt()
    put(store, log, b"new")
    assert values(opened(barest(disk), StoreOptions()), log)[-1] == b"new"


def test_a_small_journal_file_is_followed_by_one_of_the_usual_size() -> None:
    disk, log = filled(3 * MIB)
    store = opened(disk, StoreOptions(headroom_bytes=0))
    disk.room_bytes = 1 << 40
    for _ in range(5):
        put(store, log, bytes(300_000))
    sizes = [len(content) for path, content in disk.contents().items() if path.startswith("journal/")]
    assert sizes == [64 * MIB, 1 * MIB, 64 * MIB]
    store.checkpoint()
    store.close()
    assert len(values(opened(disk, StoreOptions()), log)) == 6


def test_journal_files_of_another_size_are_not_used_again() -> None:
    files = SimulatedFiles()
    opened(files, StoreOptions(journal_bytes=8192, headroom_bytes=0)).close()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"x" * 20_000)
    store.checkpoint()
    assert {len(content) for path, content in files.contents().items() if path.startswith("journal/")} == {64 * 1024}


# Error messages of rejected appends.


def test_an_append_that_failed_with_the_disk_says_that_its_outcome_is_unknown() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    files.inject(Fault("sync", path="journal/*"))
    doubtful = staged(store, (log, RecordBatch([b"doubtful"])))
    store.flush()
    assert isinstance(doubtful[0], StorageFailed)
    assert "outcome of this write is unknown" in str(doubtful[0]) and "may be present" in str(doubtful[0])
    assert values(store, log) == []
    later = staged(store, (log, RecordBatch([b"later"])))
    assert isinstance(later[0], StorageFailed) and "was not written" in str(later[0])
    assert values(opened(crashed(files)), log) == [b"doubtful"]


def test_a_long_want_of_descriptors_does_not_count_against_what_comes_after_it() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"x")
    files.inject(Fault("make_dir", error=errno.EMFILE, persistent=True))
    for _ in range(FAILURES_MAX + 5):
        store.maintenance.attempt()
    files.inject(Fault("free_bytes", error=errno.EIO))
    store.maintenance.attempt()
    assert store.failure is None
    files.heal()
    assert store.maintenance.attempt() == 0
