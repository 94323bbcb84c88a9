"""Planted bugs: the crash tests accept the shipped code and detect typical mistakes of logs.

Each mistake of `bugs.PLANTS` is tried by a short test that must detect it; the same test must accept the unchanged code.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final, TypeAlias

import pytest

from headrace.errors import BrokerError, DiskFull
from headrace.limits import LARGE_APPEND_BYTES
from headrace.records import Ack, RecordBatch
from headrace.storage.check import check
from headrace.storage.journal import journal_path
from headrace.storage.partition import LogOptions
from tests.conftest import Proof
from tests.storage.crash.damage import inspect, original, units
from tests.storage.crash.history import Anomaly
from tests.storage.crash.lone_bugs import PLANTS
from tests.storage.crash.survival import compact_again, survive, verify_segments
from tests.storage.crash.test_mutations import hit
from tests.storage.crash.trouble import endure
from tests.storage.crash.workload import Shape
from tests.storage.stores import SMALL, new_log, opened, put, staged, values
from tests.storage_faults.power_cut import PowerCuts, barest
from tests.storage_faults.simulated import Fault, SimulatedFiles

pytestmark = pytest.mark.crash_images

Trial: TypeAlias = Callable[[], None]
"""Raise `Anomaly` when the code breaks a guarantee."""


@dataclass(frozen=True)
class PowerCut:
    """Take these steps, cut the power everywhere, recover every image."""

    name: str
    steps: str
    options: LogOptions = LogOptions(segment_bytes=300)
    compacted: int = 0
    encrypted: bool = False
    counts: Sequence[int] = (1, 1, 2, 3, 8)
    large_bytes: int = LARGE_APPEND_BYTES

    @property
    def shape(self) -> Shape:
        weights = Counter(self.steps.split())  # for the images on which the workload continues
        small = Shape(self.name, weights, logs=2, options=self.options, journal_bytes=8 * 1024, sizes=(1, 60, 200))
        return replace(small, compacted=self.compacted, encrypted=self.encrypted, counts=self.counts, large_bytes=self.large_bytes)

    def __call__(self) -> None:
        survive(self.shape, 1, steps=self.steps.split())


@dataclass(frozen=True)
class Failing(PowerCut):
    """Let one disk call fail, then another one; see `endure`."""

    fault: Fault = Fault("sync", path="journal/*")
    count: int = 5

    def __call__(self) -> None:
        for nth in range(1, self.count + 1):
            endure(self.shape, self.steps.split(), replace(self.fault, nth=nth))


@dataclass(frozen=True)
class Flipped:
    """Flip some bits of each file of a kind; see `test_mutations`."""

    kind: str
    every: int

    def __call__(self) -> None:
        before = original("plain", closed=True)
        for path in before.paths(self.kind):
            content = before.contents[path]
            for index in range(0, 8 * len(content), self.every):
                changed = bytearray(content)
                changed[index // 8] ^= 1 << index % 8
                risk = hit(units(path, content), index // 8, index // 8 + 1)
                try:
                    inspect(before.damaged(path, bytes(changed)), before, risk, silent=False, thorough=False)
                except BrokerError as failure:
                    raise Anomaly(f"{path}, bit {index} flipped: {failure}") from failure


def a_reader_sees_only_what_stays(keys: list[bytes | None] | None = None) -> None:
    """Records that a flush could not sync must not be visible."""
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"safe")
    files.inject(Fault("sync"))
    outcome = staged(store, (log, RecordBatch([b"doubtful"], keys)))
    store.flush()
    assert isinstance(outcome[0], BrokerError)
    seen, kept = store.bounds(log).end, opened(barest(files)).bounds(log).end
    if seen > kept:
        raise Anomaly(f"readers were shown {seen} records, the disk has {kept}")


def a_lone_record_that_is_acknowledged_stays() -> None:
    """The sync fails, and then the power."""
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"safe")
    files.inject(Fault("sync"))
    outcome = staged(store, (log, RecordBatch([b"doubtful"])))
    store.flush()
    if isinstance(outcome[0], list) and opened(barest(files)).bounds(log).end < 2:
        raise Anomaly("an acknowledged record is lost")


def a_reader_sees_only_what_stays_of_large_appends() -> None:
    """The segment is synced, and the frame that refers to it is not."""
    files = SimulatedFiles()
    store = opened(files, replace(SMALL, large_bytes=1))
    log = new_log(store)
    put(store, log, b"safe")
    files.inject(Fault("sync", path="journal/*"))
    outcome = staged(store, (log, RecordBatch([b"doubtful"])))
    store.flush()
    assert isinstance(outcome[0], BrokerError)
    seen, kept = store.bounds(log).end, opened(barest(files)).bounds(log).end
    if seen > kept:
        raise Anomaly(f"readers were shown {seen} records, the disk has {kept}")


def a_torn_frame_of_a_used_file_is_the_end() -> None:
    """The first frame of a reused file is torn: the frames after it are old, and no damage."""
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    for _ in range(4):
        put(store, log, b"old" * 100)
    store.close()
    store = opened(files)
    put(store, log, b"torn" * 100)
    path = journal_path(store.journal.current)
    disk = barest(files)
    content = disk.contents()[path]
    assert content[4096:8192].strip(b"\0"), "the file has an earlier life"
    torn = content[:200] + bytes(4096 - 200) + content[4096:]
    report = opened(SimulatedFiles({**disk.contents(), path: torn}, disk.directories())).report
    if report.damages:
        raise Anomaly(f"a torn end was taken for damage: {report.damages[0]}")


def the_number_of_a_log_is_given_once() -> None:
    """Remains of a deleted log must not become the first records of another one."""
    files = SimulatedFiles()
    store = opened(files)
    kept, gone = new_log(store), new_log(store)
    put(store, kept, b"here")
    put(store, gone, b"there")
    store.delete_logs([gone])
    store.checkpoint()
    if (number := new_log(opened(barest(files)))) <= gone:
        raise Anomaly(f"number {number} was given again")


def a_key_survives_compaction_and_a_power_cut() -> None:
    """The newer of two records was only written: if a power cut loses it, the older one must be present."""
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, segment_bytes=2000, compact=True)
    put(store, log, b"older", keys=[b"key"])
    put(store, log, bytes(2000), keys=[b"another key"])
    store.checkpoint()
    staged(store, (log, RecordBatch([b"newer"], [b"key"])), ack=Ack.WRITTEN)
    store.flush()
    store.maintain(0)
    found = values(opened(barest(files)), log)
    if b"older" not in found and b"newer" not in found:
        raise Anomaly("a key was acknowledged and is lost")


def a_checkpoint_that_was_cut_short_is_made_up_for() -> None:
    """A checkpoint has no descriptor for the second of two segments to sync: the next one must sync the first again."""
    for nth in range(1, 4):
        files = SimulatedFiles()
        store = opened(files)
        logs = [new_log(store) for _ in range(4)]
        for log in logs:
            put(store, log, b"old")
        store.close()
        store = opened(files)
        for log in logs[:2]:
            put(store, log, b"acknowledged")
        files.inject(Fault("open", nth, path="logs/*", error=errno.EMFILE))
        store.checkpoint()
        files.heal()
        store.close()
        again = opened(barest(files))
        if [values(again, log) for log in logs[:2]] != [[b"old", b"acknowledged"]] * 2:
            raise Anomaly("an acknowledged record is lost")


def a_journal_roll_that_found_no_room_is_tried_again() -> None:
    """Each call that creates the next journal file fails once for lack of space: the next append succeeds."""
    for kind in ("create", "allocate", "sync_dir"):
        files = SimulatedFiles()
        store = opened(files)
        log = new_log(store)
        put(store, log, bytes(40_000))
        files.inject(Fault(kind, path="journal*", error=errno.ENOSPC, persistent=True))
        outcome = staged(store, (log, RecordBatch([bytes(40_000)])))
        store.flush()
        files.heal()
        again = staged(store, (log, RecordBatch([bytes(40_000)])))
        store.flush()
        if not isinstance(outcome[0], DiskFull) or isinstance(again[0], BrokerError):
            raise Anomaly(f"{kind} failed once, then: {again[0]}")


def what_compaction_has_replaced_is_gone() -> None:
    """Small segments are merged into the first of them; a process that is killed meanwhile leaves the others behind."""
    files = SimulatedFiles()
    store = opened(files)
    options = LogOptions(segment_bytes=600, compact=True)
    log = store.create_log(options)
    began = 0
    for turn in range(4):
        for key in range(4):
            put(store, log, b"%d" % turn * 150, keys=[b"key %d" % key])
        store.checkpoint()
        began = len(files.operations)
        store.maintain(0)
    removed = [operation.path for operation in files.operations[began:] if operation.kind == "remove"]
    assert any(path.endswith(".seg") for path in removed), "the last compaction merges"
    for cut in range(began, len(files.operations) + 1):
        found = opened(files.killed(cut))
        found.open_log(log, options)
        verify_segments(found)
        compact_again(found, 0)


def _fifteen_singles() -> tuple[SimulatedFiles, int]:
    """Fifteen records, each in its own frame. The first ten are joined in a segment, without a checkpoint."""
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    for number in range(15):
        put(store, log, b"%d" % number)
        if number == 9:
            store.maintenance.spill()
    return files, log


def _with_a_damaged_frame(files: SimulatedFiles, number: int) -> SimulatedFiles:
    path = journal_path(1)
    content = bytearray(files.contents()[path])
    content[number * 4096 + 60] ^= 1
    return SimulatedFiles({**files.contents(), path: bytes(content)}, files.directories())


def a_joined_batch_stands_in_for_each_of_its_frames() -> None:
    """The journal has lost one frame: the segment has its record, among others that the journal has, too."""
    files, log = _fifteen_singles()
    for lost in range(10):
        found = values(opened(_with_a_damaged_frame(files, lost)), log)
        if found != [b"%d" % number for number in range(15)]:
            raise Anomaly(f"without frame {lost} the log has {found}")


def a_record_that_only_a_segment_has_survives_its_rewriting() -> None:
    """After that, maintenance writes the records to the same place of the segment in a larger batch, and the power is cut."""
    files, log = _fifteen_singles()
    again = _with_a_damaged_frame(files, 4)
    store = opened(again)
    began = len(again.operations)
    for _ in range(40):
        put(store, log, bytes(20))
    store.maintenance.spill()
    for cut in range(began, len(again.operations) + 1):
        for label, image in PowerCuts(again).images(cut, random.Random(cut)):
            if values(opened(image), log)[:15] != [b"%d" % number for number in range(15)]:
                raise Anomaly(f"{label}: a record is lost that was there after the first crash")


def a_rewritten_segment_ends_with_its_last_batch() -> None:
    """Single batches in a segment are written again as one, which is smaller."""
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    for number in range(10):
        put(store, log, b"%d" % number)
        store.maintenance.spill()
    again = SimulatedFiles(files.contents(), files.directories())
    store = opened(again)
    store.maintenance.spill()
    store.partitions[log].roll()
    put(store, log, b"10")
    store.close()
    if not (report := check(again)).clean or report.notes:
        raise Anomaly(f"the checker says: {[*report.problems, *report.notes][0]}")


EACH: Final = PowerCut("independent records", "each flush each flush spill each flush checkpoint each flush each flush")
WRITES: Final = PowerCut("writes", "append flush atomic flush append atomic flush checkpoint append flush atomic flush")
CHECKPOINTS: Final = PowerCut(
    "checkpoints", "append flush atomic flush checkpoint append flush append flush checkpoint append flush checkpoint"
)
LARGE: Final = PowerCut("large appends", "append flush atomic flush checkpoint atomic flush append flush atomic flush", large_bytes=150)
ROLLS: Final = PowerCut("journal rolls", "append flush append_written flush append_written flush append_written flush append flush")
FREED: Final = PowerCut("many journal files", "append flush " * 9 + "checkpoint append flush checkpoint")
FREED_LARGE: Final = PowerCut(
    "many journal files, large appends", "append flush " * 6 + "checkpoint append flush checkpoint", large_bytes=1
)
REUSED: Final = PowerCut("a journal file used again", "append flush checkpoint append flush append flush append flush")
AGES: Final = PowerCut(
    "retention by age", "append flush append flush checkpoint append flush maintain", LogOptions(segment_bytes=300, retention_ms=2000)
)
MIXED: Final = PowerCut("old and new in one segment", "append flush " * 6 + "maintain", LogOptions(segment_bytes=3000, retention_ms=4000))
TABLES: Final = PowerCut(
    "tables",
    "append flush append flush checkpoint append flush maintain append flush",
    LogOptions(segment_bytes=300, tombstone_retention_ms=1),
    compacted=2,
)
DELETIONS: Final = PowerCut("deletion", "append flush checkpoint append flush delete append flush delete append flush")
DEATHS: Final = PowerCut("deaths", "append flush append_written flush die append flush append_written flush die append flush")
FAILING: Final = Failing("failing syncs", "append flush append flush atomic flush append flush")
FULL: Final = Failing(
    "a full disk", "append flush append flush atomic flush", fault=Fault("write_at", path="journal/*", error=errno.ENOSPC)
)
EACH_FULL: Final = Failing(
    "a full disk, independent records", "each flush each flush each flush", fault=Fault("write_at", path="journal/*", error=errno.ENOSPC)
)
SEGMENTS_FAILING: Final = Failing(
    "failing syncs of segments",
    "append flush append flush checkpoint append flush checkpoint reopen append flush checkpoint append flush checkpoint",
    fault=Fault("sync", path="logs/*"),
)
NAMES_FAILING: Final = Failing(
    "failing syncs of names",
    "append flush append flush checkpoint append flush reopen append flush checkpoint append flush checkpoint",
    fault=Fault("sync_dir"),
    count=12,
)
SINGLES: Final = PowerCut("singles", "singles singles spill singles checkpoint", LogOptions(joined_bytes_max=2_400), counts=(1,))
SEALED: Final = PowerCut("sealed", "append flush checkpoint " * 12, encrypted=True)
SEGMENT_BITS: Final = Flipped("segment", 37)

CAUGHT_BY: Final[dict[str, Trial]] = {
    "an append is acknowledged before the sync": WRITES,
    "the sync of the journal does nothing": WRITES,
    "a lone append is acknowledged before the sync": a_lone_record_that_is_acknowledged_stays,
    "readers see a batch before the sync": partial(a_reader_sees_only_what_stays, [b"key"]),
    "readers see a lone append before the sync": a_reader_sees_only_what_stays,
    "each batch of an append gets a frame of its own": WRITES,
    "single records to many logs get no frame": EACH,
    "single records that found no room keep their offsets": EACH_FULL,
    "the tail of single records is not moved to the segment": EACH,
    "a failed sync is tried again": FAILING,
    "a large append is not synced before the frame that refers to it": LARGE,
    "a frame refers beyond the synced end of a segment": LARGE,
    "a checkpoint frees the journal and does not cover the large appends that it referred to": FREED_LARGE,
    "readers see a large append before its frame is synced": a_reader_sees_only_what_stays_of_large_appends,
    "recovery does not look at references": LARGE,
    "recovery keeps large appends that no frame refers to": LARGE,
    "recovery takes the first reference of a log for the last": LARGE,
    "the name of a new journal file is not synced": WRITES,
    "a full journal file is left without a last sync": ROLLS,
    "journal files are freed before the checkpoint": FREED,
    "the journal file in use is freed by a checkpoint": REUSED,
    "the name of a new segment is not synced": CHECKPOINTS,
    "a checkpoint vouches for segments it has not synced": CHECKPOINTS,
    "a checkpoint forgets what it has to sync before the sync returned": a_checkpoint_that_was_cut_short_is_made_up_for,
    "a journal file that could not be made stands in the way of the next one": a_journal_roll_that_found_no_room_is_tried_again,
    "a full segment is closed without a sync": FREED,
    "the manifest gets its name before its content is synced": DELETIONS,
    "joined records all get the time of the first": SINGLES,
    "joined records lose their keys if the first has none": SINGLES,
    "recovery takes a joined batch and also those it was joined from": SINGLES,
    "recovery gives up a joined batch for the few of its records that the journal has": a_joined_batch_stands_in_for_each_of_its_frames,
    "what only a segment has is written over before it is safe elsewhere": a_record_that_only_a_segment_has_survives_its_rewriting,
    "the rest of what a rewritten segment had before stays at its end": a_rewritten_segment_ends_with_its_last_batch,
    "retention removes the active segment as well": AGES,
    "retention goes by the oldest record of a segment": MIXED,
    "compaction renames before the sync": TABLES,
    "compaction gives up a record for one that is not durable": a_key_survives_compaction_and_a_power_cut,
    "compaction keeps the oldest record of a key": TABLES,
    "the number of a deleted log is given again": the_number_of_a_log_is_given_once,
    "recovery keeps what is whole of a torn frame": WRITES,
    "the checksum of a frame is not looked at": WRITES,
    "frames of a journal file's earlier life are taken for new ones": a_torn_frame_of_a_used_file_is_the_end,
    "the checksum of a batch is not looked at": SEGMENT_BITS,
    "what follows a hole in a segment is given up": SEGMENT_BITS,
    "recovery does not ask the manifest where a log ended": SEGMENT_BITS,
    "an index is believed whatever its checksum and its segment say": Flipped("index", 1),
    "recovery does not sync the frames that a dead process left": DEATHS,
    "recovery takes up what compaction has replaced": what_compaction_has_replaced_is_gone,
    "recovery misses the last batch of the journal": WRITES,
    "recovery gives the last offset again": WRITES,
    "recovery takes what the page cache shows of a segment for durable": SEGMENTS_FAILING,
    "recovery builds upon names that are not synced": NAMES_FAILING,
    "every life seals with the same nonces": SEALED,
    "an append that found no room keeps its offsets": FULL,
}


@cache
def contented(trial: Trial) -> None:
    """Check that the unchanged code passes, once for all bugs of a trial."""
    trial()


def test_every_planted_bug_has_a_trial() -> None:
    assert PLANTS.keys() == CAUGHT_BY.keys()


@pytest.mark.replaces_code
@pytest.mark.parametrize("bug", PLANTS)
def test_the_harness_catches(bug: str, monkeypatch: pytest.MonkeyPatch, proof: Proof) -> None:
    trial = CAUGHT_BY[bug]
    contented(trial)
    PLANTS[bug](monkeypatch)
    with pytest.raises(Anomaly):
        trial()
    proof("planted bugs caught", 1)
