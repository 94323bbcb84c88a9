"""Recovery of a store after a crash. docs/storage.md describes the same steps.

1. Identity. Reject another format, a wrong key, a missing key.
2. Manifest. Read the state of the last checkpoint; without it, read everything.
3. Journal. Read the files that the manifest still needs, in order, frame by frame. A torn end is the end. Damage between intact frames is
   reported and skipped. A reference to a segment takes the place of the checkpoint of its log.
4. Segments. List those of each log, remove what a finished compaction or retention left over, and read headers.
5. Ends. Read on from the checkpoint. From the first batch that the journal has, the journal takes precedence and is written again. Where
   neither has the next batch, the gap is reported and later batches are kept. Batches of large appends without a reference are cut off.
6. Tails. Batches of the journal that continue the log become its tail in memory, and go to segments with the next checkpoint. So do batches
   at the end of the segment, which may be joined from several of the journal. A gap between them is reported, and later batches are kept.
7. Numbers. The next journal file, log and frame get numbers above all used ones.

Recovery syncs journal files and directories after reading them. It writes only a missing identity, the header of a segment that was being
created, and batches of the journal that a closed segment lacks. It truncates invalid bytes at the end of a segment and removes left-overs.
A second recovery finds the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headrace.errors import CorruptData
from headrace.storage import journal as journal_format
from headrace.storage.batch import REFERENCED, Built, StoredBatch
from headrace.storage.crypt import Keyring, WrongKey
from headrace.storage.files import Files
from headrace.storage.identity import FORMAT, Identity, read_identity, write_identity
from headrace.storage.journal import (
    Damage,
    Frame,
    JournalStart,
    Reference,
    file_size,
    headers_crc,
    journal_number,
    journal_path,
    read_journal,
    sync_file,
)
from headrace.storage.manifest import PATH as MANIFEST_PATH
from headrace.storage.manifest import Checkpointed, Manifest, read_manifest
from headrace.storage.partition import LogOptions, Partition, StoreContext
from headrace.storage.segment import (
    HEADER_BYTES,
    INDEX_SUFFIX,
    LOGS,
    TEMPORARY_SUFFIX,
    Segment,
    encode_segment_header,
    index_path,
    log_directory,
    parse_segment_header,
    remove_logs,
    segment_base,
    segment_path,
)


@dataclass(slots=True)
class RecoveryReport:
    """Findings of a recovery."""

    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    frames: int = 0
    next_log: int = 0
    deleted: dict[int, int] = field(default_factory=dict)
    """Deleted logs of the manifest."""
    unjournaled: list[Built] = field(default_factory=list)
    """Batches of tails that only a segment has, after the journal lost them."""

    def damaged(self, damage: Damage) -> None:
        if damage not in self.damages:
            self.damages.append(damage)


def recover(context: StoreContext, report: RecoveryReport) -> tuple[dict[int, Partition], JournalStart]:
    files, keyring = context.files, context.keyring
    _check_identity(files, keyring, report)
    _sync_names(files)
    manifest, unreadable = read_manifest(files)
    if unreadable:
        size = file_size(files, MANIFEST_PATH)
        report.damaged(Damage(MANIFEST_PATH, 0, size, "unreadable; every segment and journal file is read instead"))
    known = manifest or Manifest()
    replayed, references, start = _read_journals(files, keyring, known, report)
    has_all = references.is_complete and not (unreadable or report.damages)
    remove_logs(files, sorted(known.deleted))  # a crash may have interrupted their removal
    partitions: dict[int, Partition] = {}
    for log in sorted(logs_on_disk(files) | known.logs.keys() | replayed.keys() | references.found.keys()):
        if log in known.deleted:
            continue
        partition = partitions[log] = Partition(context, log, LogOptions())
        batches = sorted(replayed.get(log, []), key=lambda batch: batch.header.base_offset)
        state = references.advance(files, log, known.logs.get(log))
        _open_segments(files, partition, state, report)
        _verify(partition, references.after(log, known.logs.get(log)), keyring, report)
        behind = _find_end(partition, state, batches, keyring, report, has_all)
        _build_tail(partition, [*batches, *behind], report)
        report.unjournaled += _unjournaled(partition.tail, batches)
    report.next_log = max([known.next_log, *(log + 1 for log in partitions)])
    report.deleted = dict(known.deleted)
    return partitions, start


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
        if identity.format != FORMAT:  # before anything that an earlier release cannot read
            write_identity(files, Identity(fingerprint))
        return
    if identity.key is None:
        raise WrongKey("the data directory is not encrypted, but an encryption key is configured")
    if fingerprint is None:
        raise WrongKey("the data directory is encrypted, but no encryption key is configured")
    raise WrongKey("the data directory is encrypted with another key")


def _sync_names(files: Files) -> None:
    """Sync names that a killed process left in the page cache only. Decisions based on them, such as which journal files are free, must
    survive a power cut."""
    files.sync_dir("")
    if files.list(LOGS):
        files.sync_dir(LOGS)


# Step 3.


def _read_journals(
    files: Files, keyring: Keyring | None, manifest: Manifest, report: RecoveryReport
) -> tuple[dict[int, list[StoredBatch]], References, JournalStart]:
    """Return the batches of all frames by log, the references, and the start of the new journal."""
    numbers = journal_numbers(files)
    replayed: dict[int, list[StoredBatch]] = {}
    references = References(manifest, numbers)
    frame_next = manifest.frame
    for number in numbers:
        if number < manifest.journal:
            continue
        for frame in read_journal(files, number, keyring, report.damaged):
            report.frames += 1
            frame_next = max(frame_next, frame.number + 1)
            references.add(frame)
            for batch in frame.batches:
                replayed.setdefault(batch.header.log, []).append(batch)
        # A killed process may have left frames in the page cache only. They must not be lost if later frames survive.
        sync_file(files, journal_path(number))
    journal_next = max([manifest.journal, 1, *(number + 1 for number in numbers)])
    return replayed, references, JournalStart(journal_next, frame_next, [number for number in numbers if number < manifest.journal])


def journal_numbers(files: Files) -> list[int]:
    return sorted(number for name in files.list(journal_format.DIRECTORY) if (number := journal_number(name)) is not None)


class References:
    """References of all frames, by log. A segment was synced up to the end of the last one, which replaces the log's checkpoint."""

    def __init__(self, manifest: Manifest, numbers: list[int]) -> None:
        self.found: dict[int, list[Reference]] = {}
        self.is_complete = bool(manifest.journal) or numbers == list(range(1, len(numbers) + 1))
        """False if there is no manifest and earlier journal files are gone: references may be missing, and logs may not start at 0."""

    def add(self, frame: Frame) -> None:
        for reference in frame.references:
            self.found.setdefault(reference.log, []).append(reference)

    def after(self, log: int, known: Checkpointed | None) -> list[Reference]:
        """Return the references that the checkpoint does not cover."""
        return [reference for reference in self.found.get(log, ()) if known is None or reference.end_offset > known.end]

    def advance(self, files: Files, log: int, known: Checkpointed | None) -> Checkpointed | None:
        """Return the later one of the checkpoint and the last reference."""
        for reference in self.after(log, known)[-1:]:
            first = known.first if known else 0 if self.is_complete else min(_bases(files, log), default=0)
            return Checkpointed(first, reference.end_offset, reference.segment_base, reference.stop)
        return known


def mismatch(segment: Segment, reference: Reference, keyring: Keyring | None) -> str:
    """Return why the segment does not hold what the frame refers to; empty if it does."""
    scan = segment.scan(reference.position, min(reference.stop, segment.size), keyring, lambda damage: None)
    headers = [batch.header for _, batch in scan]
    if sum(header.size for header in headers) == reference.size and headers_crc(headers) == reference.crc:
        return ""
    return f"offsets {reference.base_offset} to {reference.end_offset - 1} do not match the journal frame that refers to them"


def _verify(partition: Partition, references: list[Reference], keyring: Keyring | None, report: RecoveryReport) -> None:
    """Report damage to batches that the journal refers to. Reads skip it, as they do in a checkpointed part."""
    segments = {segment.base_offset: segment for segment in partition.segments}
    for reference in references:
        segment = segments.get(reference.segment_base)
        if segment is not None and not segment.covers_to and (why := mismatch(segment, reference, keyring)):
            report.damaged(Damage(segment.path, reference.position, reference.size, why))


# Steps 4 and 5.


def logs_on_disk(files: Files) -> set[int]:
    return {int(name) for name in files.list(LOGS) if len(name) == 8 and name.isascii() and name.isdigit()}


def _bases(files: Files, log: int) -> list[int]:
    """Return the base offsets of the segments of a log."""
    return sorted(base for name in files.list(log_directory(log)) if (base := segment_base(name)) is not None)


def _open_segments(files: Files, partition: Partition, known: Checkpointed | None, report: RecoveryReport) -> None:
    """Set the partition's segments and first offset."""
    log = partition.id
    names = files.list(log_directory(log))
    for name in names:
        if name.endswith(TEMPORARY_SUFFIX):
            files.remove(f"{log_directory(log)}/{name}")
    bases = _bases(files, log)
    if known and known.segment_size:  # its creation failed, and the active segment continued
        for base in [base for base in bases if known.segment_base < base < known.end]:
            files.remove(segment_path(log, base))
            files.sync_dir(log_directory(log))
            bases.remove(base)
    partition.segments = _without_left_overs(files, [_open_segment(files, log, base, known, report) for base in bases], known)
    kept = {segment.base_offset for segment in partition.segments}
    if kept and (known is None or not known.segment_size or max(kept) > known.segment_base):
        files.sync_dir(log_directory(log))
    for name in names:
        stem = name.removesuffix(INDEX_SUFFIX)
        if stem != name and stem.isdigit() and int(stem) not in kept:
            files.remove(f"{log_directory(log)}/{name}")
    partition.first = max(min(kept, default=0), known.first if known else 0)
    if known and known.segment_size and not kept:
        report.damaged(Damage(log_directory(log), 0, 0, f"all segments are gone; offsets {known.first} to {known.end - 1} are missing"))
        partition.first = known.end
    elif known and known.segment_size and partition.first > known.first:
        what = f"the first segment is gone; offsets {known.first} to {partition.first - 1} are missing"
        report.damaged(Damage(segment_path(log, known.first), 0, 0, what))


def _open_segment(files: Files, log: int, base: int, known: Checkpointed | None, report: RecoveryReport) -> Segment:
    path = segment_path(log, base)
    file = files.open_readonly(path)
    try:
        size, head = file.size(), file.read_at(0, HEADER_BYTES)
    finally:
        file.close()
    covers_to = 0
    checkpointed = known is not None and base <= known.segment_base and known.segment_size > 0
    try:
        covers_to = parse_segment_header(head, log=log, base_offset=base, where=path)
    except CorruptData as damage:
        # Its batches contain their log and offsets, so they are still valid.
        if checkpointed or (known is None and size > HEADER_BYTES):
            report.damaged(Damage(path, 0, HEADER_BYTES, str(damage)))
    if not checkpointed and not covers_to:
        files.open(path).write_at(0, [encode_segment_header(log, base)])  # it was being created, or may not be durable
    return Segment(files, log, base, size=max(size, HEADER_BYTES), covers_to=covers_to)


def _without_left_overs(files: Files, segments: list[Segment], known: Checkpointed | None) -> list[Segment]:
    """Remove segments that compaction has replaced and those that the manifest excludes (retention)."""
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


def _find_end(
    partition: Partition,
    known: Checkpointed | None,
    batches: list[StoredBatch],
    keyring: Keyring | None,
    report: RecoveryReport,
    has_all: bool,
) -> list[StoredBatch]:
    """Read segments beyond the checkpoint. Returns intact batches after the position where the journal takes over.

    `has_all`: the journal has all references that the checkpoint does not cover, so other batches of large appends do not count.
    """
    partition.end = partition.next = max(partition.first, known.end if known else 0)
    behind: list[StoredBatch] = []
    for number, segment in enumerate(partition.segments):
        if known and segment.base_offset < known.segment_base:
            continue
        follower = partition.segments[number + 1] if number + 1 < len(partition.segments) else None
        end, left = _find_segment_end(segment, known, batches, keyring, report, has_all)
        if follower is not None and end < follower.base_offset:
            end = _fill(segment, end, follower.base_offset, [*batches, *left], report)
        if follower is not None:
            segment.cut_off()
        else:
            behind = left
        partition.end = partition.next = max(partition.end, end)
    return behind


def _find_segment_end(
    segment: Segment,
    known: Checkpointed | None,
    batches: list[StoredBatch],
    keyring: Keyring | None,
    report: RecoveryReport,
    has_all: bool,
) -> tuple[int, list[StoredBatch]]:
    """Return (the offset after the batches that stay in the segment, the intact batches after it)."""
    position, end = HEADER_BYTES, segment.base_offset
    if known and known.segment_base == segment.base_offset and known.segment_size:
        position, end = known.segment_size, known.end
    if segment.covers_to:
        return max(end, segment.covers_to), []
    if segment.size < position:
        report.damaged(Damage(segment.path, segment.size, position - segment.size, f"truncated; offsets below {end} may be missing"))
        return end, []
    journaled = {batch.header.base_offset for batch in batches}
    behind: list[StoredBatch] = []
    whole = position
    for at, batch in segment.scan(position, segment.size, keyring, lambda damage: None):
        if has_all and batch.header.flags & REFERENCED:
            continue  # a large append that was not finished, or was rejected
        expected = at == whole and batch.header.base_offset == end
        # Batches in the journal are written again: a sync of these pages may have failed in the killed process, and would not fail again.
        if behind or end in journaled or (not expected and batch.header.base_offset < end):
            behind.append(batch)
            continue
        if not expected:
            report.damaged(Damage(segment.path, whole, at - whole, f"offsets {end} to {batch.header.base_offset - 1} are missing"))
        whole, end = at + batch.header.size, batch.header.next_offset
    if whole < segment.size and not behind:
        segment.file().truncate(whole)
    segment.size = whole
    segment.dirty = True
    return end, behind


def _fill(segment: Segment, end: int, stop: int, batches: list[StoredBatch], report: RecoveryReport) -> int:
    """Append missing batches to a closed segment, so that it reaches the next one."""
    for batch in _chained([batch for batch in batches if batch.header.next_offset <= stop], end):
        if batch.header.base_offset == end:
            missing = [batch.built]
            segment.extend(missing, segment.append(missing))
            end = batch.header.next_offset
    if end < stop:
        report.damaged(Damage(segment.path, segment.size, 0, f"offsets {end} to {stop - 1} are missing"))
    return stop


# Step 6.


def _build_tail(partition: Partition, batches: list[StoredBatch], report: RecoveryReport) -> None:
    """Add batches that continue the log to its tail, each record once, in order of offsets."""
    for batch in _chained(batches, partition.end):
        header = batch.header
        if header.base_offset > partition.end:
            hole = f"offsets {partition.end} to {header.base_offset - 1} of log {partition.id} are missing"
            report.damaged(Damage(segment_path(partition.id, partition.end), 0, 0, hole))
            if not partition.segments and not partition.has_tail:
                partition.first = header.base_offset
        partition.next = header.next_offset
        partition.push([batch.built])


def _chained(batches: list[StoredBatch], end: int) -> Iterator[StoredBatch]:
    """Yield batches that hold each offset from `end` on once, in order. Where none continues the log, a gap is left to the next batch.

    Journal and segment hold the same records in batches of different sizes if the segment's batch was joined from small ones, and either
    may lack some. A joined batch starts and ends where batches of the journal do, so the sequence that leads furthest loses no record.
    """
    reached: dict[int, StoredBatch | None] = {end: None}
    furthest = end
    for batch in sorted(batches, key=lambda batch: batch.header.base_offset):
        base, following = batch.header.base_offset, batch.header.next_offset
        if base > furthest:
            yield from _path(reached, furthest)
            reached, furthest = {base: None}, base
        if base in reached and following not in reached:
            reached[following] = batch
            furthest = max(furthest, following)
    yield from _path(reached, furthest)


def _path(reached: Mapping[int, StoredBatch | None], end: int) -> list[StoredBatch]:
    """Return the batches that lead to `end`. `reached` has for each offset the batch that ends there."""
    path: list[StoredBatch] = []
    while (batch := reached[end]) is not None:
        path.append(batch)
        end = batch.header.base_offset
    return path[::-1]


def _unjournaled(tail: list[Built], batches: list[StoredBatch]) -> list[Built]:
    """Return the batches of a tail whose records the journal does not have."""
    journaled = {batch.header.base_offset: batch.header.next_offset for batch in batches}
    found: list[Built] = []
    for built in tail:
        offset = built[0].base_offset
        while offset < built[0].next_offset and offset in journaled:
            offset = journaled[offset]
        if offset < built[0].next_offset:
            found.append(built)
    return found
