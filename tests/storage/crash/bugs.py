"""Typical mistakes of log implementations, each planted into the shipped code for the time of a test.

A plant takes pytest's `MonkeyPatch` and changes the code to contain the mistake.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import pytest
from google_crc32c import value as crc32c

from headrace.errors import CorruptData, DiskFull
from headrace.storage import compaction, joining, journal, maintenance, recovery, segment, store
from headrace.storage.batch import EXPIRIES, KEYS, TIMESTAMPS, Built, BuiltInPlace, StoredBatch
from headrace.storage.crypt import Keyring
from headrace.storage.encoding import build, seal_columns
from headrace.storage.journal import Frame, Journal, Reference, SyncFailed
from headrace.storage.large import LargeAppends
from headrace.storage.maintenance import SPARE_JOURNALS, Maintenance
from headrace.storage.manifest import Checkpointed
from headrace.storage.partition import Partition
from headrace.storage.pending import Pending
from headrace.storage.segment import Segment, SparseIndex
from headrace.storage.singles import Singles
from headrace.storage.staged import Placed
from headrace.storage.store import Store
from tests.storage_faults.simulated import SimulatedFile, SimulatedFiles

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]

PLANTS: Final[dict[str, Plant]] = {}
"""Plants by the name of the mistake."""


def plant(name: str) -> Callable[[Plant], Plant]:
    def enter(bug: Plant) -> Plant:
        PLANTS[name] = bug
        return bug

    return enter


def _without(patch: pytest.MonkeyPatch, owner: object, step: str, below: type, call: str) -> None:
    """Make `call` do nothing inside `owner.step`, as if that line were missing."""
    whole, effect, depth = getattr(owner, step), getattr(below, call), 0

    def careless(*arguments: Any, **named: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return whole(*arguments, **named)
        finally:
            depth -= 1

    def absent(*arguments: Any) -> None:
        if not depth:
            effect(*arguments)

    # A class method is already bound when it is looked up.
    patch.setattr(owner, step, staticmethod(careless) if hasattr(whole, "__self__") else careless)
    patch.setattr(below, call, absent)


# Appending.


@plant("an append is acknowledged before the sync")
def _(patch: pytest.MonkeyPatch) -> None:
    commit = Store._commit

    def hasty(self: Store, placed: Placed) -> None:
        self.deliver(placed.waiting, list(placed.pending))
        placed.waiting = [(lambda outcome: None, [])]
        commit(self, placed)

    patch.setattr(Store, "_commit", hasty)


@plant("the sync of the journal does nothing")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "sync", lambda self: None)


@plant("readers see a batch before the sync")
def _(patch: pytest.MonkeyPatch) -> None:
    build, push = Store._build, Partition.push

    def eager(self: Store, pending: Pending, now: int, small: bool) -> list[Built]:
        shown.append(build(self, pending, now, small))
        push(pending.partition, shown[-1])
        return shown[-1]

    def once(self: Partition, batches: list[Built]) -> int:
        known = any(batches is early for early in shown)
        return sum(header.size for header, _ in batches) if known else push(self, batches)

    shown: list[list[Built]] = []
    patch.setattr(Store, "_build", eager)
    patch.setattr(Partition, "push", once)


@plant("each batch of an append gets a frame of its own")
def _(patch: pytest.MonkeyPatch) -> None:
    append = Journal.append

    def split(self: Journal, batches: list[Built], references: Sequence[Reference] = (), encoded: tuple[int, bytes] = (0, b"")) -> None:
        if encoded[0]:
            append(self, [], (), encoded)
        for batch in batches:
            append(self, [batch])
        for reference in references:
            append(self, [], [reference])

    patch.setattr(Journal, "append", split)


@plant("single records to many logs get no frame")
def _(patch: pytest.MonkeyPatch) -> None:
    append = Journal.append

    def unwritten(self: Journal, batches: list[Built], references: Sequence[Reference] = (), encoded: tuple[int, bytes] = (0, b"")) -> None:
        append(self, batches, references)

    patch.setattr(Journal, "append", unwritten)


@plant("single records that found no room keep their offsets")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Singles, "retract", lambda self: None)


@plant("the tail of single records is not moved to the segment")
def _(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Partition) -> None:
        self.singles = []

    patch.setattr(Partition, "settle", forgetful)


@plant("a failed sync is tried again")
def _(patch: pytest.MonkeyPatch) -> None:
    sync = Journal.sync

    def hopeful(self: Journal) -> None:
        try:
            sync(self)
        except SyncFailed:
            self._failed = ""
            sync(self)

    patch.setattr(Journal, "sync", hopeful)


@plant("an append that found no room keeps its offsets")
def _(patch: pytest.MonkeyPatch) -> None:
    append = Journal.append

    def leaking(self: Journal, *rest: Any) -> None:
        try:
            append(self, *rest)
        except OSError as failure:
            raise SyncFailed(str(failure)) from failure

    patch.setattr(Journal, "append", leaking)
    patch.setattr(Store, "fence", lambda self, why: DiskFull(why))


# Large appends.


@plant("a large append is not synced before the frame that refers to it")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LargeAppends, "sync", lambda self: None)


@plant("a frame refers beyond the synced end of a segment")
def _(patch: pytest.MonkeyPatch) -> None:
    write = Partition.write_large

    def early(self: Partition, batches: list[Built]) -> Reference:
        if len(self.segments) and self.segments[-1].dirty:
            self.segments[-1].sync()
        return write(self, batches)

    patch.setattr(Partition, "write_large", early)
    patch.setattr(LargeAppends, "sync", lambda self: None)


@plant("a checkpoint frees the journal and does not cover the large appends that it referred to")
def _(patch: pytest.MonkeyPatch) -> None:
    checkpointed, reveal = maintenance._checkpointed, Partition.reveal

    def noted(self: Partition, batches: list[Built]) -> None:
        before[self.id] = Checkpointed(self.first, batches[0][0].base_offset, self.segments[-1].base_offset, self.segments[-1].size)
        reveal(self, batches)

    before: dict[int, Checkpointed] = {}
    patch.setattr(Partition, "reveal", noted)
    patch.setattr(maintenance, "_checkpointed", lambda partition: before.get(partition.id) or checkpointed(partition))


@plant("readers see a large append before its frame is synced")
def _(patch: pytest.MonkeyPatch) -> None:
    write = LargeAppends.write

    def eager(self: LargeAppends, partition: Partition, batches: list[Built]) -> None:
        write(self, partition, batches)
        partition.reveal(batches)

    patch.setattr(LargeAppends, "write", eager)
    patch.setattr(LargeAppends, "reveal", lambda self: 0)


@plant("recovery does not look at references")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery.References, "add", lambda self, frame: None)


@plant("recovery keeps large appends that no frame refers to")
def _(patch: pytest.MonkeyPatch) -> None:
    find = recovery._find_end

    def generous(
        partition: Partition, known: Any, batches: list[StoredBatch], keyring: Any, report: Any, has_all: bool
    ) -> list[StoredBatch]:
        return find(partition, known, batches, keyring, report, False)

    patch.setattr(recovery, "_find_end", generous)


@plant("recovery takes the first reference of a log for the last")
def _(patch: pytest.MonkeyPatch) -> None:
    after = recovery.References.after
    patch.setattr(recovery.References, "after", lambda self, log, known: after(self, log, known)[:1])


# Journal files.


@plant("the name of a new journal file is not synced")
def _(patch: pytest.MonkeyPatch) -> None:
    _without(patch, Journal, "_open", SimulatedFiles, "sync_dir")


@plant("a full journal file is left without a last sync")
def _(patch: pytest.MonkeyPatch) -> None:
    append = Journal.append

    def forgetful(self: Journal, *rest: Any) -> None:
        self._synced = self._written
        append(self, *rest)

    patch.setattr(Journal, "append", forgetful)


@plant("journal files are freed before the checkpoint")
def _(patch: pytest.MonkeyPatch) -> None:
    checkpoint = Maintenance._checkpoint

    def thrifty(self: Maintenance, closing: bool) -> None:
        self._store.journal.recycle(self._store.journal.current, SPARE_JOURNALS)
        checkpoint(self, closing)

    patch.setattr(Maintenance, "_checkpoint", thrifty)


@plant("the journal file in use is freed by a checkpoint")
def _(patch: pytest.MonkeyPatch) -> None:
    recycle = Journal.recycle
    patch.setattr(Journal, "recycle", lambda self, below, keep: recycle(self, below + 1, keep))


# Segments and checkpoints.


@plant("the name of a new segment is not synced")
def _(patch: pytest.MonkeyPatch) -> None:
    _without(patch, Segment, "create", SimulatedFiles, "sync_dir")


@plant("a checkpoint vouches for segments it has not synced")
def _(patch: pytest.MonkeyPatch) -> None:
    _without(patch, Maintenance, "_sync", SimulatedFile, "sync")


@plant("a checkpoint forgets what it has to sync before the sync returned")
def _(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Maintenance, dirty: list[Segment]) -> None:
        files = []
        for one in dirty:
            one.dirty = False
            files.append(one.file())
        self._store.files.sync_many(files)

    patch.setattr(Maintenance, "_sync", hasty)


@plant("a journal file that could not be made stands in the way of the next one")
def _(patch: pytest.MonkeyPatch) -> None:
    remove = SimulatedFiles.remove

    def clumsy(self: SimulatedFiles, path: str) -> None:
        if not path.startswith("journal/") or path == journal.journal_path(1):
            remove(self, path)

    patch.setattr(SimulatedFiles, "remove", clumsy)


@plant("a full segment is closed without a sync")
def _(patch: pytest.MonkeyPatch) -> None:
    _without(patch, Partition, "_roll", SimulatedFile, "sync")


@plant("the manifest gets its name before its content is synced")
def _(patch: pytest.MonkeyPatch) -> None:
    _without(patch, maintenance, "write_manifest", SimulatedFile, "sync")


# Joining of small batches.


@plant("joined records all get the time of the first")
def _(patch: pytest.MonkeyPatch) -> None:
    def without_times(log: int, base: int, count: int, columns: list[Any], flags: int, *rest: Any, **named: Any) -> BuiltInPlace:
        if flags & TIMESTAMPS and not flags & EXPIRIES:
            columns, flags = columns[:-1], flags & ~TIMESTAMPS
        return seal_columns(log, base, count, columns, flags, *rest, **named)

    patch.setattr("headrace.storage.joining.seal_columns", without_times)


@plant("joined records lose their keys if the first has none")
def _(patch: pytest.MonkeyPatch) -> None:
    whole = joining._join

    def careless(group: list[Built], *rest: Any) -> Built:
        keyless = [built for built in group if not built[0].flags & KEYS]
        return whole(group if len(keyless) in (0, len(group)) or group[0][0].flags & KEYS else _without_keys(group), *rest)

    patch.setattr(joining, "_join", careless)


def _without_keys(group: list[Built]) -> list[Built]:
    made = []
    for built in group:
        batch = StoredBatch.of_built(built, None)
        made.append(build(built[0].log, built[0].base_offset, replace(batch.record_batch(), keys=None), now=0))
    return made


@plant("recovery takes a joined batch and also those it was joined from")
def _(patch: pytest.MonkeyPatch) -> None:
    def greedy(batches: list[StoredBatch], end: int) -> Iterator[StoredBatch]:
        for batch in sorted(batches, key=lambda batch: batch.header.base_offset):
            if batch.header.next_offset > end:
                yield batch
                end = batch.header.next_offset

    patch.setattr(recovery, "_chained", greedy)


@plant("recovery gives up a joined batch for the few of its records that the journal has")
def _(patch: pytest.MonkeyPatch) -> None:
    def short_sighted(batches: list[StoredBatch], end: int) -> Iterator[StoredBatch]:
        for batch in sorted(batches, key=lambda batch: batch.header.base_offset):
            if batch.header.base_offset >= end:
                yield batch
                end = batch.header.next_offset

    patch.setattr(recovery, "_chained", short_sighted)


@plant("what only a segment has is written over before it is safe elsewhere")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "_journal_again", lambda journal, report: None)


@plant("the rest of what a rewritten segment had before stays at its end")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segment, "cut_off", lambda self: None)


# Retention, compaction, deletion.


@plant("retention removes the active segment as well")
def _(patch: pytest.MonkeyPatch) -> None:
    remove = Maintenance._remove_segments

    def greedy(self: Maintenance, segments: list[Segment]) -> None:
        remove(self, [*segments, self._store.partitions[segments[0].log].segments[-1]])

    patch.setattr(Maintenance, "_remove_segments", greedy)


@plant("retention goes by the oldest record of a segment")
def _(patch: pytest.MonkeyPatch) -> None:
    def impatient(self: Maintenance, old: Segment, partition: Partition, now: int) -> bool:
        batches = old.scan(segment.HEADER_BYTES, old.size, self._store.keyring, lambda damage: None)
        return any(batch.header.min_timestamp < now - partition.options.retention_ms for _, batch in batches)

    patch.setattr(Maintenance, "_is_over", impatient)


@plant("compaction renames before the sync")
def _(patch: pytest.MonkeyPatch) -> None:
    _without(patch, compaction, "_rewrite", SimulatedFile, "sync")


@plant("compaction gives up a record for one that is not durable")
def _(patch: pytest.MonkeyPatch) -> None:
    _without(patch, Maintenance, "_maintain", Journal, "sync")


@plant("compaction keeps the oldest record of a key")
def _(patch: pytest.MonkeyPatch) -> None:
    def backwards(batch: StoredBatch, newest: dict[bytes, int], now: int, tombstone_retention_ms: int) -> compaction._Kept:
        kept = compaction._Kept(batch.header.base_offset, batch.header.next_offset)
        for record in batch.records():
            if record.key is None or seen.setdefault(record.key, record.offset) == record.offset:
                kept.append(record)
        return kept

    seen: dict[bytes, int] = {}
    patch.setattr(compaction, "_kept", backwards)


@plant("the number of a deleted log is given again")
def _(patch: pytest.MonkeyPatch) -> None:
    recover = recovery.recover

    def amnesiac(commons: Any, report: recovery.RecoveryReport) -> Any:
        found = recover(commons, report)
        report.next_log = max(found[0], default=-1) + 1
        return found

    patch.setattr(store, "recover", amnesiac)


# Recovery.


@plant("recovery keeps what is whole of a torn frame")
def _(patch: pytest.MonkeyPatch) -> None:
    intact = journal._frame_at

    def salvaging(content: bytes, position: int, number: int, number_min: int, path: str, keyring: Any) -> Frame | None:
        frame = intact(content, position, number, number_min, path, keyring)
        if frame is not None or content[position + 16 : position + 24] != struct.pack("<Q", number):
            return frame
        batches: list[StoredBatch] = []
        at = position + journal.HEADER_BYTES
        try:
            while True:
                batches.append(StoredBatch.parse(content, at, keyring=keyring))
                at += batches[-1].header.size
        except CorruptData:
            pass
        return Frame(number, number_min, position, batches, at - position) if batches else None

    patch.setattr(journal, "_frame_at", salvaging)


@plant("the checksum of a frame is not looked at")
def _(patch: pytest.MonkeyPatch) -> None:
    intact = journal._frame_at

    def trusting(content: bytes, position: int, *rest: Any) -> Frame | None:
        size = int.from_bytes(content[position + 8 : position + 12], "little")
        body = content[position + 8 : position + max(size, 8)]
        sealed = content[: position + 4] + struct.pack("<I", crc32c(body)) + content[position + 8 :]
        return intact(sealed if content.startswith(journal.MAGIC, position) else content, position, *rest)

    patch.setattr(journal, "_frame_at", trusting)


@plant("frames of a journal file's earlier life are taken for new ones")
def _(patch: pytest.MonkeyPatch) -> None:
    intact = journal._frame_at

    def blind(content: bytes, position: int, number: int, *rest: Any) -> Frame | None:
        return intact(content, position, int.from_bytes(content[position + 16 : position + 24], "little"), *rest)

    patch.setattr(journal, "_frame_at", blind)


@plant("the checksum of a batch is not looked at")
def _(patch: pytest.MonkeyPatch) -> None:
    parse = StoredBatch.parse
    patch.setattr(StoredBatch, "parse", lambda *arguments, **named: parse(*arguments, **{**named, "verify": False}))


@plant("what follows a hole in a segment is given up")
def _(patch: pytest.MonkeyPatch) -> None:
    scan = Segment.scan

    def resigned(self: Segment, position: int, stop: int, *rest: Any) -> Iterator[tuple[int, StoredBatch]]:
        for at, batch in scan(self, position, stop, *rest):
            if at != position:
                return
            yield at, batch
            position = at + batch.header.size

    patch.setattr(Segment, "scan", resigned)


@plant("recovery does not ask the manifest where a log ended")
def _(patch: pytest.MonkeyPatch) -> None:
    find = recovery._find_end
    patch.setattr(recovery, "_find_end", lambda partition, known, *rest: find(partition, None, *rest))


@plant("an index is believed whatever its checksum and its segment say")
def _(patch: pytest.MonkeyPatch) -> None:
    decode = SparseIndex.decode

    def gullible(content: bytes, **about: int) -> SparseIndex | None:
        return decode(content[:4] + struct.pack("<I", crc32c(content[8:])) + content[8:], **about)

    def unverified(self: Partition, source: Segment, offset: int, cached_only: bool) -> int:
        return source.load_index(self._keyring, self._damaged).position_for_offset(offset)[0]

    patch.setattr(SparseIndex, "decode", gullible)
    patch.setattr(Partition, "_indexed_position", unverified)


@plant("recovery does not sync the frames that a dead process left")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "sync_file", lambda files, path: None)


@plant("recovery takes up what compaction has replaced")
def _(patch: pytest.MonkeyPatch) -> None:
    clean = recovery._without_left_overs

    def trusting(files: Any, segments: list[Segment], known: Any) -> list[Segment]:
        covers = [one.covers_to for one in segments]
        for one in segments:
            one.covers_to = 0
        kept = clean(files, segments, known)
        for one, covers_to in zip(segments, covers, strict=True):
            one.covers_to = covers_to
        return kept

    patch.setattr(recovery, "_without_left_overs", trusting)


@plant("recovery misses the last batch of the journal")
def _(patch: pytest.MonkeyPatch) -> None:
    build = recovery._build_tail

    def impatient(partition: Partition, batches: list[StoredBatch], report: recovery.RecoveryReport) -> None:
        build(partition, sorted(batches, key=lambda batch: batch.header.base_offset)[:-1], report)

    patch.setattr(recovery, "_build_tail", impatient)


@plant("recovery gives the last offset again")
def _(patch: pytest.MonkeyPatch) -> None:
    build = recovery._build_tail

    def low(partition: Partition, batches: list[StoredBatch], report: recovery.RecoveryReport) -> None:
        build(partition, batches, report)
        partition.next = max(partition.first, partition.next - 1)

    patch.setattr(recovery, "_build_tail", low)


@plant("recovery takes what the page cache shows of a segment for durable")
def _(patch: pytest.MonkeyPatch) -> None:
    find, start = recovery._find_segment_end, Maintenance.__init__

    def believing(one: Segment, known: Any, batches: list[StoredBatch], *rest: Any) -> tuple[int, list[StoredBatch]]:
        return find(one, known, [], *rest)

    def forgetful(self: Maintenance, owner: Store) -> None:
        start(self, owner)
        self._unsynced.clear()
        for partition in owner.partitions.values():
            for one in partition.segments:
                one.dirty = False

    patch.setattr(recovery, "_find_segment_end", believing)
    patch.setattr(Maintenance, "__init__", forgetful)


@plant("recovery builds upon names that are not synced")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_sync_names", lambda files: None)


@plant("every life seals with the same nonces")
def _(patch: pytest.MonkeyPatch) -> None:
    start = Keyring.start_epoch
    patch.setattr(Keyring, "start_epoch", lambda self, epoch: start(self, 1))
