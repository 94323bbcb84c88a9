"""Recovery: from whatever a crash left on the disk to a store that keeps every promise it made. The steps are those of docs/storage.md.

1. Identity. Refuse another format, a wrong key, a missing key.
2. Manifest. What the last checkpoint made sure of; without one, everything is read.
3. Segments. Of each log list them, drop what a finished compaction or retention left over, and look at headers.
4. Ends. In the last segment, read on from the checkpoint: whole batches that continue the log stay; the first thing that does not ends it.
5. Journal. Read the files the manifest still needs, in order, frame by frame. A torn end is the end. Damage between intact frames is
   reported and stepped over.
6. Tails. Batches of the journal (and intact ones found behind the end of step 4) that continue the log become its tail in memory, and go to
   segments with the next checkpoint. A gap between them is reported; what follows it is kept.
7. Number the next journal file, log and frame above all that were ever seen.

Nothing is written but a missing identity, the header of a segment that was being created, the cut of a torn segment end and the removal
of left-overs: a second recovery finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace.errors import CorruptData
from headrace.log import journal as journal_format
from headrace.log.batch import Batch
from headrace.log.crypt import Keyring, WrongKey
from headrace.log.files import Files
from headrace.log.identity import Identity, read_identity, write_identity
from headrace.log.journal import Damage, JournalStart, file_size, journal_number, read_journal
from headrace.log.manifest import PATH as MANIFEST_PATH
from headrace.log.manifest import Checkpointed, Manifest, read_manifest
from headrace.log.partition import LogOptions, Partition
from headrace.log.segment import (
    HEADER_BYTES,
    INDEX_SUFFIX,
    TEMPORARY_SUFFIX,
    Segment,
    encode_segment_header,
    index_path,
    log_directory,
    parse_segment_header,
    segment_base,
    segment_path,
)

LOGS: Final = "logs"


@dataclass(slots=True)
class RecoveryReport:
    """What was found, for people and for tests."""

    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    frames: int = 0
    batches_replayed: int = 0
    next_log: int = 0

    def damaged(self, damage: Damage) -> None:
        if damage not in self.damages:
            self.damages.append(damage)


def recover(files: Files, keyring: Keyring | None, report: RecoveryReport) -> tuple[dict[int, Partition], JournalStart]:
    _check_identity(files, keyring, report)
    manifest, unreadable = read_manifest(files)
    if unreadable:
        report.damaged(
            Damage(MANIFEST_PATH, 0, file_size(files, MANIFEST_PATH), "unreadable; every segment and journal file is read instead")
        )
    known = manifest or Manifest()
    partitions: dict[int, Partition] = {}
    salvaged: dict[int, list[Batch]] = {}
    for log in sorted(logs_on_disk(files) | known.logs.keys()):
        if log < known.next_log and log not in known.logs:
            _remove_deleted(files, log)
            continue
        partitions[log] = Partition(files, log, LogOptions(), keyring, report.damaged)
        salvaged[log] = _open_segments(files, partitions[log], known.logs.get(log), keyring, report)
    found = _replay(files, keyring, known, partitions, salvaged, report)
    for log, partition in partitions.items():
        _build_tail(partition, salvaged.get(log, []), report)
    report.next_log = max([known.next_log, *(log + 1 for log in partitions)])
    return partitions, found


# Step 1.


def _check_identity(files: Files, keyring: Keyring | None, report: RecoveryReport) -> None:
    identity, unreadable = read_identity(files)
    fingerprint = None if keyring is None else keyring.fingerprint()
    if identity is None:
        if unreadable:
            report.damaged(Damage("IDENTITY", 0, 0, "unreadable; written again"))
        write_identity(files, Identity(fingerprint))
        return
    if identity.key == fingerprint:
        return
    if identity.key is None:
        raise WrongKey("the data directory is not encrypted, but an encryption key is configured")
    if fingerprint is None:
        raise WrongKey("the data directory is encrypted, but no encryption key is configured")
    raise WrongKey("the data directory is encrypted with another key")


# Steps 3 and 4.


def logs_on_disk(files: Files) -> set[int]:
    return {int(name) for name in files.list(LOGS) if len(name) == 8 and name.isascii() and name.isdigit()}


def _remove_deleted(files: Files, log: int) -> None:
    """The manifest says that this log was deleted: finish what a crash interrupted."""
    for name in files.list(log_directory(log)):
        files.remove(f"{log_directory(log)}/{name}")
    files.remove_dir(log_directory(log))


def _open_segments(
    files: Files, partition: Partition, known: Checkpointed | None, keyring: Keyring | None, report: RecoveryReport
) -> list[Batch]:
    """Fill in the partition's segments, `first` and the end of what they hold. Returns intact batches found behind that end."""
    log = partition.id
    names = files.list(log_directory(log))
    for name in names:
        if name.endswith(TEMPORARY_SUFFIX):
            files.remove(f"{log_directory(log)}/{name}")
    bases = sorted(base for name in names if (base := segment_base(name)) is not None)
    segments = [_open_segment(files, log, base, report) for base in bases]
    partition.segments = kept = _without_left_overs(files, segments, known)
    for name in names:
        stem = name.removesuffix(INDEX_SUFFIX)
        if stem != name and stem.isdigit() and int(stem) not in {segment.base_offset for segment in kept}:
            files.remove(f"{log_directory(log)}/{name}")
    floor = known.end if known else 0
    partition.first = kept[0].base_offset if kept else floor
    if known:
        partition.first = max(partition.first, known.first)
    if not kept:
        partition.end = partition.next = max(partition.first, floor)
        return []
    return _find_end(partition, known, keyring, report)


def _open_segment(files: Files, log: int, base: int, report: RecoveryReport) -> Segment:
    path = segment_path(log, base)
    file = files.open_readonly(path)
    try:
        size, head = file.size(), file.read_at(0, HEADER_BYTES)
    finally:
        file.close()
    covers_to = 0
    try:
        covers_to = parse_segment_header(head, log=log, base_offset=base, where=path)
    except CorruptData as damage:
        # Its batches name their log and offsets themselves, so they are still good. Without any, the file was being created.
        if size > HEADER_BYTES:
            report.damaged(Damage(path, 0, HEADER_BYTES, str(damage)))
        else:
            files.open(path).write_at(0, [encode_segment_header(log, base)])
    return Segment(files, log, base, size=max(size, HEADER_BYTES), covers_to=covers_to)


def _without_left_overs(files: Files, segments: list[Segment], known: Checkpointed | None) -> list[Segment]:
    """Remove what compaction has replaced and what the manifest says retention has removed."""
    kept: list[Segment] = []
    covered = known.first if known else 0
    for number, segment in enumerate(segments):
        follower = segments[number + 1].base_offset if number + 1 < len(segments) else None
        replaced = bool(kept) and segment.base_offset < kept[-1].covers_to
        retired = follower is not None and follower <= covered
        if replaced or retired:
            files.remove(segment.path)
            files.remove(index_path(segment.log, segment.base_offset))
        else:
            kept.append(segment)
    return kept


def _find_end(partition: Partition, known: Checkpointed | None, keyring: Keyring | None, report: RecoveryReport) -> list[Batch]:
    active = partition.segments[-1]
    position, end = HEADER_BYTES, active.base_offset
    if known and known.segment_base == active.base_offset and known.segment_size:
        position, end = known.segment_size, known.end
    elif known:
        end = max(end, known.end) if active.covers_to else end
    end = max(end, active.covers_to)
    if active.size < position:
        report.damaged(Damage(active.path, active.size, position - active.size, f"cut short; offsets below {end} may be missing"))
        partition.end = partition.next = end
        return []
    behind: list[Batch] = []
    whole = position
    checked_to = known.end if known else 0
    for at, batch in active.scan(position, active.size, keyring, lambda damage: None):
        continues = batch.header.base_offset == end or (batch.header.base_offset > end and batch.header.base_offset < checked_to)
        if at == whole and not behind and continues:
            whole, end = at + batch.header.size, batch.header.next_offset
        else:
            behind.append(batch)
    if whole < active.size:
        active.file().truncate(whole)
    active.size = whole
    active.dirty = True
    partition.end = partition.next = max(end, checked_to)
    return behind


# Steps 5 to 7.


def _replay(
    files: Files,
    keyring: Keyring | None,
    manifest: Manifest,
    partitions: dict[int, Partition],
    salvaged: dict[int, list[Batch]],
    report: RecoveryReport,
) -> JournalStart:
    numbers = sorted(number for name in files.list(journal_format.DIRECTORY) if (number := journal_number(name)) is not None)
    frame_next = manifest.frame
    for number in numbers:
        if number < manifest.journal:
            continue
        for frame in read_journal(files, number, keyring, report.damaged):
            report.frames += 1
            frame_next = max(frame_next, frame.number + 1)
            for batch in frame.batches:
                log = batch.header.log
                if log not in partitions:
                    if log < manifest.next_log:
                        continue  # deleted before the last checkpoint
                    partitions[log] = Partition(files, log, LogOptions(), keyring, report.damaged)
                salvaged.setdefault(log, []).append(batch)
    journal_next = max([manifest.journal, *(number + 1 for number in numbers)], default=0)
    return JournalStart(max(journal_next, 1), frame_next, [number for number in numbers if number < manifest.journal])


def _build_tail(partition: Partition, batches: list[Batch], report: RecoveryReport) -> None:
    """Put what continues the log into its tail, each batch once, in order of offsets."""
    for batch in sorted(batches, key=lambda batch: batch.header.base_offset):
        header = batch.header
        if header.base_offset < partition.end:
            continue
        if header.base_offset > partition.end:
            hole = f"offsets {partition.end} to {header.base_offset - 1} of log {partition.id} are missing"
            report.damaged(Damage(segment_path(partition.id, partition.end), 0, 0, hole))
        partition.next = header.next_offset
        partition.push([(header, batch.encoded)])
        report.batches_replayed += 1
