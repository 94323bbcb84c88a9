"""Store: one frame per flush, no acknowledgement before it is safe, no loss when the disk fails."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from headrace.errors import BrokerError, DiskFull, LimitExceeded, StorageFailed, Unavailable
from headrace.limits import BATCH_RECORDS_MAX
from headrace.records import Ack, Appended, AppendedEach, RecordBatch
from headrace.storage.check import check
from headrace.storage.crypt import WrongKey
from headrace.storage.files import DirectoryLocked, DiskFiles
from headrace.storage.journal import read_journal
from headrace.storage.partition import LogOptions
from headrace.storage.staged import FLUSH_BYTES_MAX
from headrace.storage.store import Store, StoreOptions
from tests.storage.stores import SMALL, crashed, new_log, opened, put, records, staged, values
from tests.storage_faults.simulated import Fault, SimulatedFiles


def test_everything_staged_together_is_one_frame_and_one_batch_a_log() -> None:
    files = SimulatedFiles()
    store = opened(files)
    first, second = new_log(store), new_log(store)
    outcomes = [staged(store, (log, RecordBatch([b"%d" % number]))) for number, log in enumerate([first, second] * 5)]
    assert store.flush()
    (frame,) = read_journal(files, 1, None, lambda damage: None)
    assert [(batch.header.log, batch.header.count) for batch in frame.batches] == [(first, 5), (second, 5)]
    assert [outcome[0] for outcome in outcomes[:2]] == [[Appended(0, 1, 0)], [Appended(0, 1, 0)]]
    assert values(store, second) == [b"1", b"3", b"5", b"7", b"9"]


def test_a_flush_is_bounded_and_what_is_urgent_is_in_the_next_one() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store)
    chunk = bytes(1 << 20)

    def stage(value: bytes, *, urgent: bool = False) -> None:
        store.stage([(log, RecordBatch([value]))], ack=Ack.DURABLE, now=0, done=lambda result: None, size_bytes=len(value), urgent=urgent)

    for _ in range(20):
        stage(chunk)
    assert store.flush()
    ahead = store.bounds(log).end
    assert ahead == FLUSH_BYTES_MAX // len(chunk)
    for value in (b"now", b"and this"):
        stage(value, urgent=True)
    assert store.flush()
    assert values(store, log)[ahead:] == [b"now", b"and this"], "before what waits, in their own order and by themselves"
    while store.flush():
        pass
    assert store.bounds(log).end == 22


def test_nothing_is_acknowledged_or_shown_before_the_sync() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    seen: list[int] = []
    store.stage([(log, RecordBatch([b"x"]))], ack=Ack.DURABLE, now=0, done=lambda result: seen.append(files.calls["sync"]), size_bytes=1)
    before = files.calls["sync"]
    assert store.bounds(log).end == 0
    store.flush()
    assert seen == [before + 1]
    assert store.bounds(log).end == 1


def test_written_is_acknowledged_without_a_sync_and_none_before_the_write() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    syncs = files.calls["sync"]
    assert staged(store, (log, RecordBatch([b"x"])), ack=Ack.WRITTEN) == []
    writes: list[int] = []
    store.stage([(log, RecordBatch([b"y"]))], ack=Ack.NONE, now=0, done=lambda result: writes.append(files.calls["write_at"]), size_bytes=1)
    before = files.calls["write_at"]
    store.flush()
    assert writes == [before]
    assert files.calls["sync"] == syncs
    assert values(store, log) == [b"x", b"y"]


def test_a_late_run_sees_where_the_earlier_ones_landed() -> None:
    store = opened(SimulatedFiles())
    log, table = new_log(store), new_log(store)
    put(store, log, b"a", b"b")
    outcome: list[list[Appended] | BrokerError] = []
    store.stage(
        [(log, RecordBatch([b"c"])), (table, lambda placed: RecordBatch([b"%d" % placed[0].base_offset]))],
        ack=Ack.DURABLE,
        now=0,
        done=outcome.append,
        size_bytes=1,
    )
    store.flush()
    assert values(store, table) == [b"2"]


def test_a_late_run_that_is_refused_leaves_no_trace() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store)

    def refuse(placed: object) -> RecordBatch:
        raise LimitExceeded("no")

    outcome: list[list[Appended] | BrokerError] = []
    store.stage([(log, RecordBatch([b"c"])), (log, refuse)], ack=Ack.DURABLE, now=0, done=outcome.append, size_bytes=1)
    other = staged(store, (log, RecordBatch([b"d"])))
    store.flush()
    assert isinstance(outcome[0], LimitExceeded)
    assert other == [[Appended(0, 1, 0)]]


def test_a_large_run_is_cut_into_batches_that_a_small_fetch_can_bear() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store)
    put(store, log, *[b"x" * 100_000] * 40)
    batches = store.read(log, 0, bytes_max=1 << 30)
    assert len(batches) == 4
    assert sum(map(len, batches)) == 40


def test_no_batch_holds_more_records_than_a_reader_takes() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store)
    put(store, log, *[b""] * (BATCH_RECORDS_MAX + 1))
    assert [len(batch) for batch in store.read(log, 0, bytes_max=1)] == [BATCH_RECORDS_MAX, 1]


@pytest.mark.parametrize("place", ["tail", "segment", "reopened"])
def test_reads_are_bounded_by_bytes_and_records_and_give_at_least_one(place: str) -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, joined_bytes_max=0)
    expected = [b"%04d" % number * 10 for number in range(500)]
    for start in range(0, 500, 50):
        put(store, log, *expected[start : start + 50])
    if place != "tail":
        store.checkpoint()
    if place == "reopened":
        store = opened(crashed(files))
    assert values(store, log) == expected
    assert values(store, log, bytes_max=1) == expected
    assert values(store, log, 123, bytes_max=90) == expected[123:]
    assert [len(batch) for batch in store.read(log, 30, bytes_max=1 << 20, records_max=45)] == [20, 25]


@pytest.mark.parametrize("later", ["tail", "next segment"])
@pytest.mark.parametrize("begin", [0, 1], ids=["whole", "rest of a batch read before"])
def test_a_read_ends_at_its_bounds_and_not_where_a_segment_ends(later: str, begin: int) -> None:
    store = opened(SimulatedFiles())
    log = new_log(store, segment_bytes=1)
    put(store, log, b"a", b"b")
    store.checkpoint()
    put(store, log, b"c", b"d")
    if later == "next segment":
        store.checkpoint()
        assert len(store.partitions[log].segments) == 2
    if begin:
        store.read(log, 0, bytes_max=1 << 20, records_max=begin)
    found = store.read(log, begin, bytes_max=1 << 20, records_max=3)
    assert [value for batch in found for value in batch.values()] == [b"a", b"b", b"c", b"d"][begin : begin + 3]
    assert sum(map(len, store.read(log, begin, bytes_max=3))) == 3, "bytes are counted over all of them"


@pytest.mark.parametrize("later", ["tail", "next segment"])
def test_only_the_first_record_of_a_read_may_be_larger_than_its_bound(later: str) -> None:
    store = opened(SimulatedFiles())
    log = new_log(store, segment_bytes=1)
    put(store, log, b"a")
    store.checkpoint()
    put(store, log, b"b" * 100)
    if later == "next segment":
        store.checkpoint()
    assert [batch.values() for batch in store.read(log, 0, bytes_max=50)] == [[b"a"]]
    assert [batch.values() for batch in store.read(log, 1, bytes_max=50)] == [[b"b" * 100]]


def test_times_are_found_in_segments_and_tail() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, segment_bytes=4096)
    for number in range(100):
        put(store, log, b"x" * 100, now=1000 + number * 10)
        if number == 70:
            store.checkpoint()
    partition = store.partitions[log]
    assert len(partition.segments) > 1
    assert [partition.offset_for_time(at) for at in (0, 1000, 1001, 1500, 1990, 1991)] == [0, 0, 1, 50, 99, 100]


def test_a_failed_sync_ends_writing_and_is_never_tried_again() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"safe")
    files.inject(Fault("sync", path="journal/*"))
    outcome = staged(store, (log, RecordBatch([b"lost?"])))
    store.flush()
    assert isinstance(outcome[0], StorageFailed)
    syncs = files.calls["sync"]
    assert isinstance(staged(store, (log, RecordBatch([b"more"])))[0], StorageFailed)
    store.checkpoint()
    store.close()
    assert files.calls["sync"] == syncs
    assert values(store, log) == [b"safe"]
    again = opened(crashed(files))
    assert values(again, log)[:1] == [b"safe"]


def test_a_failed_write_ends_writing_and_reads_go_on() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"safe")
    files.inject(Fault("write_at", path="journal/*"))
    outcome = staged(store, (log, RecordBatch([b"x"])))
    store.flush()
    assert isinstance(outcome[0], StorageFailed)
    assert values(store, log) == [b"safe"]


@pytest.mark.replaces_code
def test_a_defect_behind_a_flush_ends_writing_instead_of_passing_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(DiskFiles(tmp_path), SMALL, threads=False)
    log = new_log(store)

    def broken() -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(store.maintenance, "after_flush", broken)
    store.start()
    try:
        staged(store, (log, RecordBatch([b"kept"])))
        deadline = time.monotonic() + 300
        while store.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        (refused,) = staged(store, (log, RecordBatch([b"refused"])))
        assert isinstance(refused, StorageFailed)
        assert "a defect" in str(refused)
    finally:
        store.close()


def test_no_room_for_a_new_journal_file_is_retriable_and_costs_no_offset() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"safe")
    files.inject(Fault("allocate", error=errno.ENOSPC, persistent=True))
    refused = staged(store, (log, RecordBatch([b"x" * 70_000])))
    store.flush()
    assert isinstance(refused[0], DiskFull) and refused[0].retriable
    assert values(store, log) == [b"safe"]
    files.heal()
    assert put(store, log, b"y").base_offset == 1


def test_no_room_for_a_segment_keeps_the_records_readable_and_refuses_more_until_there_is() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"safe")
    files.inject(Fault("write_at", path="logs/*", error=errno.ENOSPC, persistent=True))
    store.checkpoint()
    assert values(store, log) == [b"safe"]
    assert isinstance(staged(store, (log, RecordBatch([b"x"])))[0], DiskFull)
    urgent: list[list[Appended] | BrokerError] = []
    store.stage([(log, RecordBatch([b"commit"]))], ack=Ack.DURABLE, now=0, done=urgent.append, size_bytes=1, reserve=True)
    store.flush()
    assert urgent == [[Appended(1, 1, 0)]]
    files.heal()
    store.checkpoint()
    assert put(store, log, b"y").base_offset == 2
    assert values(opened(crashed(files)), log) == [b"safe", b"commit", b"y"]


def test_below_the_headroom_only_the_reserve_is_written() -> None:
    files = SimulatedFiles()
    store = opened(files, StoreOptions(journal_bytes=64 * 1024, headroom_bytes=1 << 30))
    log = new_log(store)
    put(store, log, b"safe")
    files.room_bytes = 1 << 29
    store.maintenance.tick()
    assert isinstance(staged(store, (log, RecordBatch([b"x"])))[0], DiskFull)
    files.room_bytes = 1 << 31
    store.maintenance.tick()
    put(store, log, b"y")


def test_a_deleted_log_gives_its_space_back_and_stays_deleted() -> None:
    files = SimulatedFiles()
    store = opened(files)
    kept, gone = new_log(store), new_log(store)
    put(store, kept, b"k")
    put(store, gone, b"g")
    store.checkpoint()
    put(store, gone, b"h")
    store.delete_logs([gone])
    assert files.list(f"logs/{gone:08d}") == []
    store.checkpoint()
    again = opened(crashed(files))
    assert gone not in again.partitions
    assert again.create_log(LogOptions()) > gone
    assert values(again, kept) == [b"k"]


def test_a_closed_store_has_nothing_to_replay() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"a", b"b")
    store.close()
    store.close()
    again = opened(files)
    assert again.report.frames == 0
    assert values(again, log) == [b"a", b"b"]
    assert isinstance(staged(store, (log, RecordBatch([b"late"])))[0], Unavailable)


def test_journal_files_do_not_pile_up() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    for number in range(200):
        put(store, log, b"x" * 3000)
        if number % 10 == 0:
            store.checkpoint()
    assert len(files.list("journal")) <= 4


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [(b"a" * 32, b"b" * 32, "another key"), (b"a" * 32, None, "no encryption key"), (None, b"a" * 32, "not encrypted")],
)
def test_a_wrong_key_refuses_to_start(first: bytes | None, second: bytes | None, reason: str) -> None:
    files = SimulatedFiles()
    opened(files, StoreOptions(key=first, journal_bytes=64 * 1024)).close()
    with pytest.raises(WrongKey, match=reason):
        opened(files, StoreOptions(key=second, journal_bytes=64 * 1024))


def test_encryption_and_compression_cover_every_file() -> None:
    files = SimulatedFiles()
    options = StoreOptions(key=b"k" * 32, journal_bytes=64 * 1024, headroom_bytes=0)
    store = opened(files, options)
    log = new_log(store, encrypt=True, compress=True)
    put(store, log, b"CANARY" * 100, keys=[b"CANARY"])
    store.checkpoint()
    put(store, log, b"CANARY" * 100)
    assert not any(b"CANARY" in content for content in files.contents().values())
    assert sum(map(len, files.contents().values())) < 70_000
    again = opened(crashed(files), options)
    assert values(again, log) == [b"CANARY" * 100] * 2
    assert check(crashed(files), b"k" * 32).clean


def test_two_processes_never_open_one_directory(tmp_path: Path) -> None:
    store = Store.open(DiskFiles(tmp_path), SMALL, threads=False)
    with pytest.raises(DirectoryLocked):
        Store.open(DiskFiles(tmp_path), SMALL, threads=False)
    store.close()
    Store.open(DiskFiles(tmp_path), SMALL, threads=False).close()


def test_threads_and_a_real_disk_keep_what_they_took(tmp_path: Path) -> None:
    store = Store.open(DiskFiles(tmp_path), StoreOptions(journal_bytes=1 << 20, tail_bytes_max=1 << 20, headroom_bytes=0))
    log = new_log(store, segment_bytes=1 << 20)
    results: list[list[Appended] | BrokerError] = []
    for number in range(400):
        store.stage([(log, RecordBatch([b"%06d" % number * 1000]))], ack=Ack.DURABLE, now=number, done=results.append, size_bytes=6000)
    store.close()
    assert [result[0].base_offset for result in results if isinstance(result, list)] == list(range(400))
    assert check(DiskFiles(tmp_path)).clean
    again = Store.open(DiskFiles(tmp_path), SMALL, threads=False)
    assert [record.value for record in records(again, log)] == [b"%06d" % number * 1000 for number in range(400)]
    again.close()


def test_a_log_deleted_before_the_flush_fails_only_its_own_single_records() -> None:
    store = opened(SimulatedFiles())
    kept, gone = new_log(store), new_log(store)
    outcome: list[AppendedEach | BrokerError] = []
    store.stage_each(
        [kept, gone] * 3, [b"%d" % number for number in range(6)], None, ack=Ack.DURABLE, now=7, done=outcome.append, size_bytes=6
    )
    store.delete_logs([gone])
    assert store.flush()
    (appended,) = outcome
    assert isinstance(appended, AppendedEach)
    assert (appended.offsets[::2], appended.timestamp, sorted(appended.failed)) == ([0, 1, 2], 7, [1, 3, 5])
    assert values(store, kept) == [b"0", b"2", b"4"]


def test_single_records_of_one_log_are_one_batch_of_the_frame() -> None:
    files = SimulatedFiles()
    store = opened(files)
    first, second = new_log(store), new_log(store)
    for _ in range(3):
        store.stage_each([first, second] * 5, [b"x"] * 10, None, ack=Ack.DURABLE, now=0, done=lambda result: None, size_bytes=10)
    assert store.flush()
    (frame,) = read_journal(files, 1, None, lambda damage: None)
    assert [(batch.header.log, batch.header.count) for batch in frame.batches] == [(first, 15), (second, 15)]
