"""Large appends: written once to the segment, with a reference in the journal."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from google_crc32c import value as crc32c

from headrace.errors import BrokerError, DiskFull, StorageFailed
from headrace.records import Ack, Appended, AppendedEach, RecordBatch
from headrace.storage import maintenance
from headrace.storage.batch import REFERENCED
from headrace.storage.check import check, dump
from headrace.storage.files import DiskFiles, File
from headrace.storage.journal import journal_path, read_journal
from headrace.storage.partition import LogOptions
from headrace.storage.segment import segment_path
from headrace.storage.store import Store, StoreOptions
from tests.storage.stores import SMALL, crashed, new_log, opened, put, records, staged, until, values
from tests.storage_faults.power_cut import barest
from tests.storage_faults.simulated import Fault, SimulatedFiles

LARGE = replace(SMALL, large_bytes=500)
TAIL_BYTES_MAX = 1_000_000
OPTIONS = StoreOptions(large_bytes=1_000, checkpoint_interval_ms=3_600_000, headroom_bytes=0, tail_bytes_max=TAIL_BYTES_MAX)
BIG = [bytes([number]) * 100 for number in range(10)]


def written(files: SimulatedFiles, path: str) -> int:
    return sum(len(operation.data) for operation in files.operations if operation.kind == "write" and operation.path.startswith(path))


def with_large() -> tuple[SimulatedFiles, int]:
    """Return a log with a small append, a large one and a small one, and no checkpoint."""
    files = SimulatedFiles()
    store = opened(files, LARGE)
    log = new_log(store)
    put(store, log, b"before")
    put(store, log, *BIG)
    put(store, log, b"after")
    return files, log


ALL = [b"before", *BIG, b"after"]


def flipped(files: SimulatedFiles, path: str, at: int) -> SimulatedFiles:
    content = bytearray(files.contents()[path])
    content[at] ^= 1
    return SimulatedFiles({**files.contents(), path: bytes(content)}, files.directories())


def test_a_large_append_is_written_once() -> None:
    files = SimulatedFiles()
    store = opened(files, replace(SMALL, large_bytes=100_000))
    log = new_log(store)
    put(store, log, bytes(200_000))
    store.checkpoint()
    assert written(files, "journal/") < 1_000
    assert 200_000 < written(files, "logs/") < 201_000
    assert not store.partitions[log].tail, "it takes no memory"


@pytest.mark.parametrize("size, is_large", [(499, False), (500, True)])
def test_an_append_is_large_from_the_limit_on(size: int, is_large: bool) -> None:
    files = SimulatedFiles()
    store = opened(files, LARGE)
    log = new_log(store)
    put(store, log, bytes(size))
    (frame,) = read_journal(files, 1, None, lambda damage: None)
    assert (len(frame.references), len(frame.batches)) == ((1, 0) if is_large else (0, 1))


def test_large_and_small_appends_of_one_flush_share_a_frame() -> None:
    files = SimulatedFiles()
    store = opened(files, LARGE)
    one, other = new_log(store), new_log(store)
    staged(store, (one, RecordBatch(BIG)), (other, RecordBatch([b"small"])))
    store.flush()
    (frame,) = read_journal(files, 1, None, lambda damage: None)
    assert [reference.log for reference in frame.references] == [one]
    assert [batch.header.log for batch in frame.batches] == [other]
    again = opened(barest(files))
    assert values(again, one) == BIG and values(again, other) == [b"small"]


def test_single_records_to_many_logs_stay_before_a_large_append_of_the_same_flush() -> None:
    files = SimulatedFiles()
    store = opened(files, LARGE)
    logs = [new_log(store) for _ in range(8)]
    placed: list[AppendedEach | BrokerError] = []
    store.stage_each(logs, [b"single"] * 8, None, ack=Ack.DURABLE, now=5, done=placed.append, size_bytes=48)
    staged(store, (logs[3], RecordBatch(BIG)), (logs[5], RecordBatch([b"small"])))
    assert store.flush() and not store.flush()
    for one in (store, opened(crashed(files)), opened(barest(files))):
        assert [values(one, log) for log in logs[:3]] == [[b"single"]] * 3
        assert values(one, logs[3]) == [b"single", *BIG]
        assert values(one, logs[5]) == [b"single", b"small"]
    store.close()
    assert check(crashed(files)).clean
    assert values(opened(crashed(files)), logs[3]) == [b"single", *BIG]


def test_offsets_and_order_are_the_same_with_small_appends_around() -> None:
    files, log = with_large()
    for disk in (crashed(files), barest(files)):
        found = records(opened(disk), log)
        assert [record.offset for record in found] == list(range(12))
        assert [record.value for record in found] == ALL


def test_an_append_that_is_not_durable_goes_through_the_journal() -> None:
    files = SimulatedFiles()
    store = opened(files, LARGE)
    log = new_log(store)
    staged(store, (log, RecordBatch(BIG)), ack=Ack.WRITTEN)
    store.flush()
    assert store.partitions[log].tail


def test_a_compacted_log_goes_through_the_journal() -> None:
    store = opened(SimulatedFiles(), LARGE)
    log = new_log(store, compact=True)
    put(store, log, *BIG, keys=[b"key"] * len(BIG))
    assert store.partitions[log].tail


def test_a_large_append_that_does_not_fit_starts_a_segment() -> None:
    files = SimulatedFiles()
    store = opened(files, LARGE)
    log = new_log(store, segment_bytes=2_000)
    for _ in range(3):
        put(store, log, *BIG)
    assert [segment.base_offset for segment in store.partitions[log].segments] == [0, 10, 20]
    assert values(opened(barest(files)), log) == BIG * 3


def test_a_large_append_without_its_frame_is_cut_off() -> None:
    """The power fails between the sync of the segment and the frame."""
    files, log = with_large()
    lost = {path: content for path, content in files.contents().items() if not path.startswith("journal/")}
    disk = SimulatedFiles(lost, files.directories())
    report = check(disk)
    assert any("not finished" in note for note in report.notes), report.notes
    store = opened(disk)
    assert values(store, log) == [b"before"] and not store.report.damages
    put(store, log, b"next")
    store.close()
    assert values(opened(disk), log) == [b"before", b"next"]
    assert check(disk).notes == [] and check(disk).clean


def test_a_rejected_large_append_leaves_nothing() -> None:
    files = SimulatedFiles()
    store = opened(files, LARGE)
    log = new_log(store)
    put(store, log, b"before")
    files.inject(Fault("write_at", path="journal/*", error=errno.ENOSPC))
    (outcome,) = (staged(store, (log, RecordBatch(BIG))), store.flush())[0]
    assert isinstance(outcome, DiskFull)
    assert put(store, log, b"small").base_offset == 1
    store.close()
    assert check(files).clean and check(files).notes == []
    assert values(opened(files), log) == [b"before", b"small"]


def test_a_failed_sync_of_the_segment_writes_no_frame() -> None:
    files = SimulatedFiles()
    store = opened(files, LARGE)
    log = new_log(store)
    put(store, log, b"before")
    files.inject(Fault("sync", path="logs/*"))
    (outcome,) = (staged(store, (log, RecordBatch(BIG))), store.flush())[0]
    assert isinstance(outcome, BrokerError) and store.failure is not None
    assert values(store, log) == [b"before"]
    assert values(opened(barest(files)), log) == [b"before"]


def test_damage_to_a_referenced_batch_is_reported_and_affects_no_other() -> None:
    files, log = with_large()
    damaged = flipped(files, segment_path(log, 0), 40 + 88 + 72 + 200)
    assert not check(damaged).clean
    store = opened(damaged)
    assert [damage.path for damage in store.report.damages] == [segment_path(log, 0)]
    assert values(store, log) == [b"before", b"after"]


def test_a_truncated_segment_is_reported() -> None:
    files, log = with_large()
    path = segment_path(log, 0)
    cut = SimulatedFiles({**files.contents(), path: files.contents()[path][:300]}, files.directories())
    assert not check(cut).clean
    store = opened(cut)
    assert store.report.damages and values(store, log) == [b"before", b"after"]


def test_a_damaged_reference_loses_no_record() -> None:
    """The segment has the records. They may as well be a large append that was not finished, so the damage is reported."""
    files, log = with_large()
    store = opened(flipped(files, journal_path(1), 4096 + 45))
    assert store.report.damages and values(store, log) == ALL


@pytest.mark.parametrize("name", ["MANIFEST", "unreadable"])
def test_without_the_manifest_large_appends_before_the_checkpoint_stay(name: str) -> None:
    files, log = with_large()
    store = opened(files.killed(len(files.operations)), LARGE)
    for _ in range(5):
        store.checkpoint()
        put(store, log, *BIG)
        store.close()
        store = opened(store.files, LARGE)  # type: ignore[arg-type]  # simulated as before
    disk = store.files
    assert isinstance(disk, SimulatedFiles)
    contents = disk.contents()
    if name == "MANIFEST":
        del contents["MANIFEST"]
    else:
        contents["MANIFEST"] = b"?"
    assert values(opened(SimulatedFiles(contents, disk.directories())), log) == ALL + BIG * 5


def test_a_directory_of_format_1_becomes_one_of_format_2() -> None:
    files = SimulatedFiles()
    opened(files).close()
    text = b"headrace data directory\nformat 1\nkey none\n"
    old = SimulatedFiles({**files.contents(), "IDENTITY": text + b"crc %08x\n" % crc32c(text)}, files.directories())
    assert check(old).clean
    opened(old)
    assert b"format 2" in barest(old).contents()["IDENTITY"]


def test_dump_shows_references_and_marks_referenced_batches() -> None:
    files, log = with_large()
    lines = list(dump(files, journal_path(1)))
    assert "  reference to logs/00000000/00000000000000000000.seg at byte 128: offsets 1 to 10, 1120 bytes" in lines, lines
    assert any("referenced" in line for line in dump(files, segment_path(log, 0)))


def test_a_log_is_whole_while_maintenance_and_large_appends_alternate(tmp_path: object) -> None:
    """With threads: small appends fill the tail, large ones follow, maintenance writes to the same segments and takes checkpoints."""
    store = Store.open(DiskFiles(str(tmp_path)), StoreOptions(large_bytes=20_000, journal_bytes=256 * 1024, headroom_bytes=0))
    logs = [store.create_log(LogOptions(segment_bytes=300_000)) for _ in range(2)]
    outcomes: list[object] = []
    for number in range(150):
        value = b"%d" % number + bytes(40_000 if number % 3 == 0 else 500)
        store.stage([(log, RecordBatch([value])) for log in logs], ack=Ack.DURABLE, now=0, done=outcomes.append, size_bytes=2 * len(value))
        if number % 10 == 0:
            until(lambda number=number: len(outcomes) > number)  # type: ignore[misc]  # bound now
            store.maintenance.checkpoint()
    until(lambda: len(outcomes) == 150)
    assert not any(isinstance(outcome, BrokerError) for outcome in outcomes)
    assert any(batch.header.flags & REFERENCED for batch in store.read(logs[0], 0, bytes_max=1 << 20))
    for log in logs:
        assert [int((value or b"").rstrip(b"\0")) for value in values(store, log)] == list(range(150))
    store.close()
    report = check(DiskFiles(str(tmp_path)))
    assert report.clean and report.notes == [] and report.records == 300


class Gate:
    """Stops the sync of segments until it is opened. `failure` is raised instead of the sync."""

    def __init__(self) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        self.failure: OSError | None = None
        self.room = True
        """Whether there is room for new directories."""

    def wait(self) -> None:
        self.arrived.set()
        assert self.opened.wait(300)
        if self.failure is not None:
            raise self.failure


class GatedFiles(SimulatedFiles):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def make_dir(self, *directories: str) -> None:
        if not self._gate.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().make_dir(*directories)

    def sync_many(self, files: Sequence[File]) -> None:
        self._gate.wait()
        super().sync_many(files)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(gate: Gate) -> Iterator[Store]:
    """A store with threads, two logs, and a large append to the first whose segment is being synced."""
    store = Store.open(GatedFiles(gate), OPTIONS)
    for _ in range(2):
        store.create_log(LogOptions())
    yield store
    gate.opened.set()
    with contextlib.suppress(BrokerError):
        store.close()


def large_under_way(store: Store, gate: Gate) -> list[list[Appended] | BrokerError]:
    outcome = staged(store, (0, RecordBatch([b"x" * 100] * 20)))
    assert gate.arrived.wait(300)
    return outcome


def test_appends_to_other_logs_do_not_wait_for_a_large_one(gated: Store, gate: Gate) -> None:
    large = large_under_way(gated, gate)
    small = staged(gated, (1, RecordBatch([b"small"])))
    until(lambda: bool(small))
    assert isinstance(small[0], list) and values(gated, 1) == [b"small"]
    assert not large and gated.bounds(0).end == 0, "neither acknowledged nor readable"
    gate.opened.set()
    until(lambda: bool(large))
    assert values(gated, 0) == [b"x" * 100] * 20


def test_appends_to_the_log_of_a_large_one_follow_it(gated: Store, gate: Gate) -> None:
    large = large_under_way(gated, gate)
    after = staged(gated, (0, RecordBatch([b"after"])), (1, RecordBatch([b"with it"])))
    last = staged(gated, (1, RecordBatch([b"last"])))
    other = staged(gated, (gated.create_log(LogOptions()), RecordBatch([b"other"])))
    until(lambda: bool(other))
    assert not (large or after or last)
    gate.opened.set()
    until(lambda: bool(last))
    assert values(gated, 0) == [b"x" * 100] * 20 + [b"after"]
    assert values(gated, 1) == [b"with it", b"last"]


def test_a_failed_sync_of_a_segment_rejects_what_waits_for_it(gated: Store, gate: Gate) -> None:
    large = large_under_way(gated, gate)
    after = staged(gated, (0, RecordBatch([b"after"])))
    gate.failure = OSError(errno.EIO, "Input/output error")
    gate.opened.set()
    until(lambda: bool(large and after))
    assert isinstance(large[0], StorageFailed) and isinstance(after[0], StorageFailed)
    assert gated.bounds(0).end == 0


def test_a_large_append_without_room_leaves_its_offsets_to_the_next(gated: Store, gate: Gate) -> None:
    gate.opened.set()
    gate.room = False
    large = staged(gated, (0, RecordBatch([b"x" * 100] * 20)))
    until(lambda: bool(large))
    assert isinstance(large[0], DiskFull)
    gate.room = True
    small = staged(gated, (0, RecordBatch([b"small"])))
    until(lambda: bool(small))
    assert isinstance(small[0], list) and small[0][0].base_offset == 0


def test_closing_waits_for_a_large_append_and_for_what_follows_it(gated: Store, gate: Gate) -> None:
    large = large_under_way(gated, gate)
    after = staged(gated, (0, RecordBatch([b"after"])))
    closing = threading.Thread(target=gated.close)
    closing.start()
    gate.opened.set()
    closing.join(300)
    assert isinstance(large[0], list) and isinstance(after[0], list) and after[0][0].base_offset == 20


@pytest.mark.replaces_code
def test_a_writer_that_waits_for_maintenance_commits_the_large_append_that_maintenance_waits_for(
    gated: Store, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "_PROGRESS_SECONDS_MAX", 3_600)
    first = staged(gated, (0, RecordBatch([b"first"])))
    until(lambda: bool(first))
    large = large_under_way(gated, gate)
    spilling = threading.Thread(target=gated.maintenance.spill)
    spilling.start()
    until(lambda: gated.partitions[0] not in gated.maintenance._touched)  # now it waits for the log of the large append
    flood = [staged(gated, (1, RecordBatch([bytes(100_000)])), ack=Ack.WRITTEN) for _ in range(20)]
    until(lambda: bool(flood[TAIL_BYTES_MAX // 100_000 - 1]))  # now the writer waits for maintenance
    gate.opened.set()
    until(lambda: bool(large) and all(flood), seconds=60)
    spilling.join()
    assert gated.bounds(0).end == 21 and gated.bounds(1).end == 20
