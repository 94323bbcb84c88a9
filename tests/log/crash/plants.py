"""Classic mistakes of a log, each planted into the code under test by a monkeypatch. None of them is in the shipped code."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import CorruptData, DiskFull
from headrace.log import batch, compaction, identity, journal, keeper, manifest, recovery, segment
from headrace.log.batch import Batch
from headrace.log.crypt import Keyring
from headrace.log.files import Files
from headrace.log.journal import Frame, Journal, SyncFailed
from headrace.log.keeper import Keeper
from headrace.log.manifest import Checkpointed, Manifest
from headrace.log.partition import Partition
from headrace.log.segment import Segment, SparseIndex
from headrace.log.simulated import SimulatedFiles
from headrace.log.store import Store

Plant = Callable[[pytest.MonkeyPatch], None]


def ack_before_sync(patch: pytest.MonkeyPatch) -> None:
    """The sync comes with the next append, when the acknowledgement has left long ago."""
    sync, append = Journal.sync, Journal.append

    def late(self: Journal, batches: list[bytes]) -> None:
        sync(self)
        append(self, batches)

    patch.setattr(Journal, "append", late)
    patch.setattr(Journal, "sync", lambda self: None)


class _Agreeable(int):
    """A checksum that is equal to all others."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def checksums_not_compared(patch: pytest.MonkeyPatch) -> None:
    for module in (batch, journal, segment, manifest, identity):
        for name in ("crc32c", "crc32c_extend"):
            real = getattr(module, name, None)
            if real is not None:
                patch.setattr(module, name, lambda *arguments, real=real: _Agreeable(real(*arguments)))


def journal_name_not_synced(patch: pytest.MonkeyPatch) -> None:
    sync_dir = SimulatedFiles.sync_dir
    patch.setattr(SimulatedFiles, "sync_dir", lambda self, directory: None if directory == "journal" else sync_dir(self, directory))


def segment_name_not_synced(patch: pytest.MonkeyPatch) -> None:
    sync_dir = SimulatedFiles.sync_dir
    patch.setattr(SimulatedFiles, "sync_dir", lambda self, directory: None if directory.startswith("logs/") else sync_dir(self, directory))


def torn_frame_kept(patch: pytest.MonkeyPatch) -> None:
    """Of a torn frame, recovery keeps the batches that are whole."""
    strict, header = journal._frame_at, struct.Struct("<4sIIHHQQII")

    def lenient(content: bytes, position: int, number: int, number_min: int, path: str, keyring: Keyring | None) -> Frame | None:
        frame = strict(content, position, number, number_min, path, keyring)
        if frame is not None or not content.startswith(journal.MAGIC, position):
            return frame
        _, _, size, _, _, found, frame_number, count, _ = header.unpack_from(content.ljust(position + header.size, b"\0"), position)
        if found != number or frame_number < number_min:
            return None
        batches: list[Batch] = []
        at = position + journal.HEADER_BYTES
        try:
            for _ in range(count):
                batches.append(Batch.parse(content, at, keyring=keyring))
                at += batches[-1].header.size
        except CorruptData:
            pass
        return Frame(number, frame_number, position, batches, size) if batches else None

    patch.setattr(journal, "_frame_at", lenient)


def frame_in_pieces(patch: pytest.MonkeyPatch) -> None:
    """Each batch of a flush gets a frame of its own."""
    append = Journal.append

    def pieces(self: Journal, batches: list[bytes]) -> None:
        for one in batches:
            append(self, [one])

    patch.setattr(Journal, "append", pieces)


def old_frames_believed(patch: pytest.MonkeyPatch) -> None:
    """The frames that a journal file held in an earlier life count as well, under whatever number they find."""
    strict, number_at = journal._frame_at, struct.Struct("<Q")

    def blind(content: bytes, position: int, number: int, number_min: int, path: str, keyring: Keyring | None) -> Frame | None:
        found = number_at.unpack_from(content, position + 16)[0] if len(content) - position >= journal.HEADER_BYTES else number
        return strict(content, position, found, 0, path, keyring)

    patch.setattr(journal, "_frame_at", blind)


def recovery_ends_early(patch: pytest.MonkeyPatch) -> None:
    """Recovery misses the last batch of what it replays."""
    build = recovery._build_tail

    def early(partition: Partition, batches: list[Batch], report: recovery.RecoveryReport) -> None:
        build(partition, sorted(batches, key=lambda one: one.header.base_offset)[:-1], report)

    patch.setattr(recovery, "_build_tail", early)


def offset_given_again(patch: pytest.MonkeyPatch) -> None:
    """After recovery the next record gets the offset of the last one."""
    build = recovery._build_tail

    def low(partition: Partition, batches: list[Batch], report: recovery.RecoveryReport) -> None:
        build(partition, batches, report)
        partition.next = max(partition.first, partition.next - 1)

    patch.setattr(recovery, "_build_tail", low)


def index_believed(patch: pytest.MonkeyPatch) -> None:
    """Neither the checksum of an index nor the batch that it points to is looked at."""

    def decode(cls: type[SparseIndex], content: bytes, *, log: int, base_offset: int, segment_size: int) -> SparseIndex | None:
        header = struct.Struct("<4sIHHIQQQqQ")
        if len(content) < header.size + 24:
            return None
        index = cls(base_offset)
        entries = content[header.size :]
        entries = entries[: len(entries) // 24 * 24]
        third = len(entries) // 3
        index.offsets.frombytes(entries[:third])
        index.positions.frombytes(entries[third : 2 * third])
        index.times.frombytes(entries[2 * third :])
        _, _, _, _, _, _, _, index.end_offset, index.max_timestamp, _ = header.unpack_from(content)
        return index

    def position(self: Partition, found: Segment, offset: int) -> int:
        return found.load_index(self._keyring, self._damaged).position_for_offset(offset)[0]

    patch.setattr(SparseIndex, "decode", classmethod(decode))
    patch.setattr(Partition, "_indexed_position", position)


def compacted_segment_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Compaction renames a file whose content is not on disk yet."""
    sync = Segment.sync
    patch.setattr(Segment, "sync", lambda self: None if self.covers_to else sync(self))


def manifest_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The manifest is renamed before its content is on disk."""

    def write(files: Files, fresh: Manifest) -> None:
        files.remove("MANIFEST.tmp")
        file = files.open("MANIFEST.tmp", create=True)
        file.write_at(0, [fresh.encode()])
        file.close()
        files.rename("MANIFEST.tmp", "MANIFEST")
        files.sync_dir("")

    patch.setattr(keeper, "write_manifest", write)


def journal_freed_before_segments_are_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keeper, "_sync", lambda self, dirty: None)


def page_cache_believed(patch: pytest.MonkeyPatch) -> None:
    """Recovery takes what it sees in segments for durable: it neither writes it again from the journal nor has it synced."""
    find, start = recovery._find_segment_end, Keeper.__init__

    def believing(one: Segment, known: Checkpointed | None, batches: list[Batch], *rest: Any) -> tuple[int, list[Batch]]:
        return find(one, known, [], *rest)

    def forgetful(self: Keeper, store: Store) -> None:
        start(self, store)
        self._unsynced.clear()
        for partition in store.partitions.values():
            for one in partition.segments:
                one.dirty = False

    patch.setattr(recovery, "_find_segment_end", believing)
    patch.setattr(Keeper, "__init__", forgetful)


def retention_takes_the_active_segment(patch: pytest.MonkeyPatch) -> None:
    remove = Keeper._remove_segments

    def all_of_it(self: Keeper, segments: list[Segment]) -> None:
        remove(self, [*segments, *self._store.partitions[segments[0].log].segments])

    patch.setattr(Keeper, "_remove_segments", all_of_it)


def retention_takes_too_much(patch: pytest.MonkeyPatch) -> None:
    """All closed segments go, old or not."""
    patch.setattr(Keeper, "_expired", lambda self, partition, now: partition.segments[:-1])


def compaction_keeps_the_oldest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compaction, "_newest", lambda partition, *rest: dict.fromkeys((b"key %d" % number for number in range(5)), 0))


def deleted_logs_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The manifest does not say which log numbers were given."""
    encode = Manifest.encode
    patch.setattr(Manifest, "encode", lambda self: encode(Manifest(self.journal, self.frame, 0, self.logs)))


def sync_tried_again(patch: pytest.MonkeyPatch) -> None:
    """The disk says no, then yes, and is believed."""
    sync = Journal.sync

    def stubborn(self: Journal) -> None:
        try:
            sync(self)
        except SyncFailed:
            self._failed = ""
            sync(self)

    patch.setattr(Journal, "sync", stubborn)


def offsets_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    """An append that found no room has used up its offsets."""
    append = Journal.append

    def leaking(self: Journal, batches: list[bytes]) -> None:
        try:
            append(self, batches)
        except OSError as failure:
            raise SyncFailed(str(failure)) from failure

    patch.setattr(Journal, "append", leaking)
    patch.setattr(Store, "fence", lambda self, why: DiskFull(why))


def recovery_trusts_unsynced_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_sync_names", lambda files: None)


def nonces_begin_again(patch: pytest.MonkeyPatch) -> None:
    """Every life seals with the same numbers."""
    start = Keyring.start_epoch
    patch.setattr(Keyring, "start_epoch", lambda self, epoch: start(self, 1))


def checkpoint_claims_the_tail(patch: pytest.MonkeyPatch) -> None:
    """The manifest says that the end of the log is in synced segments, when part of it is in memory."""

    def eager(partition: Partition) -> Checkpointed:
        active = partition.segments[-1] if partition.segments else None
        return Checkpointed(partition.first, partition.next, active.base_offset if active else 0, active.size if active else 0)

    spill: Any = Partition.spill
    patch.setattr(Partition, "spill", lambda self: spill(self) if len(self.tail) % 2 else None)
    patch.setattr(keeper, "_checkpointed", eager)
