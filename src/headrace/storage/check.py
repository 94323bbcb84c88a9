"""Read-only verification of a data directory, and text output of one segment or journal file.

A problem breaks a guarantee: a bad checksum, a gap, an overlap, a wrong file name. A note is something that any crash may leave and that
recovery repairs: a torn end, a journal without a checkpoint, a missing index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from headrace.errors import CorruptData
from headrace.records import NEVER, Record
from headrace.storage import batch as batch_format
from headrace.storage.batch import StoredBatch
from headrace.storage.crypt import Keyring, WrongKey
from headrace.storage.files import Files
from headrace.storage.identity import PATH as IDENTITY_PATH
from headrace.storage.identity import read_identity
from headrace.storage.journal import SUFFIX as JOURNAL_SUFFIX
from headrace.storage.journal import Damage, Reference, file_size, journal_number, journal_path, read_journal
from headrace.storage.manifest import PATH as MANIFEST_PATH
from headrace.storage.manifest import Checkpointed, Manifest, read_manifest
from headrace.storage.recovery import References, journal_numbers, logs_on_disk, mismatch
from headrace.storage.segment import (
    HEADER_BYTES,
    TEMPORARY_SUFFIX,
    Segment,
    SparseIndex,
    index_path,
    log_directory,
    parse_segment_header,
    segment_base,
    segment_path,
)


@dataclass(slots=True)
class CheckReport:
    """Result of a verification."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    logs: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    frames: int = 0

    @property
    def clean(self) -> bool:
        return not self.problems


@dataclass(slots=True)
class _Log:
    """Verified state of one log."""

    end: int
    beyond: list[StoredBatch]
    """Batches of segments and journal after the checkpoint."""


def check(files: Files, key: bytes | None = None) -> CheckReport:
    """Verify the data directory. The caller holds its lock."""
    report = CheckReport()
    keyring = None if key is None else Keyring(key)
    _check_identity(files, keyring, report)
    manifest, unreadable = read_manifest(files)
    if unreadable:
        report.problems.append(f"{MANIFEST_PATH}: unreadable")
    known = manifest or Manifest()
    references = _references(files, known, keyring)
    logs: dict[int, _Log] = {}
    for log in sorted(logs_on_disk(files) | known.logs.keys() | references.found.keys()):
        if log in known.deleted:
            report.notes.append(f"{log_directory(log)}: remains of a deleted log; the next start removes it")
            continue
        logs[log] = _check_segments(files, log, references.advance(files, log, known.logs.get(log)), keyring, report)
        _check_references(files, references.after(log, known.logs.get(log)), keyring, report)
    report.logs = len(logs)
    _check_journal(files, known, logs, keyring, report)
    for log, state in sorted(logs.items()):
        _check_continuation(log, state, report)
    return report


def _references(files: Files, known: Manifest, keyring: Keyring | None) -> References:
    """Read all references before the segments: they say up to where a segment was synced."""
    numbers = journal_numbers(files)
    references = References(known, numbers)
    for number in numbers:
        if number >= known.journal:
            for frame in read_journal(files, number, keyring, lambda damage: None):
                references.add(frame)
    return references


def _check_references(files: Files, references: list[Reference], keyring: Keyring | None, report: CheckReport) -> None:
    for reference in references:
        path = segment_path(reference.log, reference.segment_base)
        try:
            size = file_size(files, path)
        except FileNotFoundError:
            report.problems.append(f"{path}: missing; a journal frame refers to it")
            continue
        if why := mismatch(Segment(files, reference.log, reference.segment_base, size=size), reference, keyring):
            report.problems.append(f"{path} at byte {reference.position}: {why}")


def _check_identity(files: Files, keyring: Keyring | None, report: CheckReport) -> None:
    identity, unreadable = read_identity(files)
    if unreadable:
        report.problems.append(f"{IDENTITY_PATH}: unreadable")
    elif identity is None:
        report.problems.append(f"{IDENTITY_PATH}: missing; this is not a data directory, or it was never opened")
    elif identity.key != (None if keyring is None else keyring.fingerprint()):
        raise WrongKey("the data directory is encrypted with another key" if identity.key else "the data directory is not encrypted")


def _check_segments(files: Files, log: int, known: Checkpointed | None, keyring: Keyring | None, report: CheckReport) -> _Log:
    names = files.list(log_directory(log))
    report.notes += [f"{log_directory(log)}/{name}: left by an interrupted compaction" for name in names if name.endswith(TEMPORARY_SUFFIX)]
    bases = sorted(base for name in names if (base := segment_base(name)) is not None)
    end = known.first if known else (bases[0] if bases else 0)
    if known and bases and bases[0] > known.first:
        report.problems.append(f"{log_directory(log)}: starts at offset {bases[0]}, expected {known.first} from the checkpoint")
    covered = 0
    beyond: list[StoredBatch] = []
    for number, base in enumerate(bases):
        last = number == len(bases) - 1
        if base < covered or (known and not last and bases[number + 1] <= known.first):
            report.notes.append(f"{segment_path(log, base)}: replaced by compaction or past retention; the next start removes it")
            continue
        sure = known is not None and base <= known.segment_base
        if base != end and number and sure:
            report.problems.append(f"{segment_path(log, base)}: starts at offset {base}, expected {end}, the end of the previous segment")
        end, covered = _check_segment(files, log, base, known, keyring, report, end if number and not sure else base, beyond)
    if known and end < known.end:
        report.problems.append(f"{log_directory(log)}: ends at offset {end}, expected {known.end} from the checkpoint")
    return _Log(end, beyond)


def _sure_bytes(base: int, size: int, known: Checkpointed | None) -> int:
    """Return how many bytes of a segment the checkpoint covers. The rest may be torn, and the journal has it too."""
    if known is None or base > known.segment_base:
        return 0
    return known.segment_size if base == known.segment_base else size


def _check_segment(
    files: Files,
    log: int,
    base: int,
    known: Checkpointed | None,
    keyring: Keyring | None,
    report: CheckReport,
    end: int,
    beyond: list[StoredBatch],
) -> tuple[int, int]:
    """Return (the offset after the part that the checkpoint covers, the offset up to which the segment replaces others).

    Batches after that part are added to `beyond`.
    """
    path = segment_path(log, base)
    file = files.open_readonly(path)
    try:
        size, head = file.size(), file.read_at(0, HEADER_BYTES)
    finally:
        file.close()
    sure = _sure_bytes(base, size, known)
    covers_to = 0
    try:
        covers_to = parse_segment_header(head, log=log, base_offset=base, where=path)
    except CorruptData as failure:
        (report.problems if sure else report.notes).append(str(failure))
    report.segments += 1
    if covers_to:
        sure = size  # compaction syncs a segment before it renames it
    segment = Segment(files, log, base, size=max(size, HEADER_BYTES), covers_to=covers_to)
    if size < sure:
        report.problems.append(f"{path}: has {size} bytes, expected {sure} from the checkpoint")
    index = SparseIndex(base)
    damages: list[Damage] = []
    unfinished = False
    for position, batch in segment.scan(HEADER_BYTES, segment.size, keyring, damages.append):
        _read_all(batch, f"{path} at byte {position}", report)
        index.add(batch.header, position)
        if position >= sure:
            if not batch.header.flags & batch_format.REFERENCED:
                beyond.append(batch)
            elif not unfinished:
                unfinished = True
                report.notes.append(f"{path} at byte {position}: a large append that was not finished; the next start removes it")
            continue
        if batch.header.base_offset < end or (batch.header.base_offset > end and not covers_to):
            what = "overlaps the previous one" if batch.header.base_offset < end else "follows a gap"
            report.problems.append(f"{path} at byte {position}: the batch at offset {batch.header.base_offset} {what} (expected {end})")
        end = max(end, batch.header.next_offset)
    for damage in damages:
        (report.problems if damage.position < sure else report.notes).append(str(damage))
    _check_index(files, segment, index, report)
    return max(end, covers_to), covers_to


def _read_all(batch: StoredBatch, where: str, report: CheckReport) -> None:
    """Decode every column: a valid checksum over invalid columns is a defect of ours, and a problem too."""
    report.batches += 1
    report.records += len(batch)
    try:
        stamps = batch.timestamps()
        batch.record_batch()
        if min(stamps) < batch.header.min_timestamp or max(stamps) > batch.header.max_timestamp:
            report.problems.append(f"{where}: timestamps are outside the range in the header")
    except (CorruptData, WrongKey) as damage:
        report.problems.append(f"{where}: {damage}")


def _check_index(files: Files, segment: Segment, index: SparseIndex, report: CheckReport) -> None:
    path = index_path(segment.log, segment.base_offset)
    try:
        file = files.open_readonly(path)
    except FileNotFoundError:
        return
    try:
        content = file.read_at(0, file.size())
    finally:
        file.close()
    if content != index.encode(log=segment.log, base_offset=segment.base_offset, segment_size=segment.size):
        report.notes.append(f"{path}: does not match its segment; rebuilt on the next use")


def _check_journal(files: Files, known: Manifest, logs: dict[int, _Log], keyring: Keyring | None, report: CheckReport) -> None:
    numbers = journal_numbers(files)
    number_expected: int | None = None
    for number in numbers:
        if number < known.journal:
            continue
        holes: list[Damage] = []
        for frame in read_journal(files, number, keyring, holes.append):
            report.frames += 1
            # Batches of frames before the checkpoint are in synced segments, so such a frame may be missing if it was never synced.
            missing = report.problems if frame.number > known.frame else report.notes
            if holes:
                missing += map(str, holes)
                holes.clear()
            elif number_expected not in (None, frame.number):
                missing.append(f"{journal_path(number)} at byte {frame.position}: frame {frame.number} follows {number_expected}")
            number_expected = frame.number + 1
            for batch in frame.batches:
                _read_all(batch, f"{journal_path(number)} at byte {frame.position}", report)
                state = logs.get(batch.header.log)
                if state is None and batch.header.log not in known.deleted:
                    state = logs[batch.header.log] = _Log(0, [])
                if state is not None:
                    state.beyond.append(batch)


def _check_continuation(log: int, state: _Log, report: CheckReport) -> None:
    """Check that segments and journal together hold the log without a gap."""
    end = state.end
    for batch in sorted(state.beyond, key=lambda batch: batch.header.base_offset):
        if batch.header.base_offset > end:
            report.problems.append(f"log {log}: offsets {end} to {batch.header.base_offset - 1} are missing in segments and journal")
        end = max(end, batch.header.next_offset)


_FLAG_NAMES = {
    batch_format.VALUE_NULLS: "tombstones",
    batch_format.KEYS: "keys",
    batch_format.HEADERS: "headers",
    batch_format.TIMESTAMPS: "timestamps",
    batch_format.EXPIRIES: "expiries",
    batch_format.OFFSETS: "gaps",
    batch_format.COMPRESSED: "zstd",
    batch_format.ENCRYPTED: "aes-256-gcm",
    batch_format.REFERENCED: "referenced",
}
_VALUE_SHOWN_BYTES = 64


def dump(files: Files, path: str, key: bytes | None = None, *, records: bool = False) -> Iterator[str]:
    """Yield one line per batch and, if `records` is set, per record. Raises `CorruptData` for any other file."""
    keyring = None if key is None else Keyring(key)
    *_, directory, name = ("", *path.split("/"))
    damages: list[Damage] = []
    if name.endswith(JOURNAL_SUFFIX) and (number := journal_number(name)) is not None:
        yield f"journal {number}"
        for frame in read_journal(files, number, keyring, damages.append):
            yield f"frame {frame.number} at byte {frame.position}: {frame.size} bytes, {len(frame.batches)} batches"
            yield from map(_reference_line, frame.references)
            for batch in frame.batches:
                yield from _batch_lines(batch, None, records)
    elif (base := segment_base(name)) is not None and directory.isdigit():
        yield from _segment_lines(files, int(directory), base, path, keyring, damages, records)
    else:
        raise CorruptData(f"{path}: neither a segment (logs/LOG/OFFSET.seg) nor a journal file (journal/NUMBER.hrj)")
    for damage in damages:
        yield f"DAMAGE {damage}"


def _reference_line(reference: Reference) -> str:
    return (
        f"  reference to {segment_path(reference.log, reference.segment_base)} at byte {reference.position}: "
        f"offsets {reference.base_offset} to {reference.end_offset - 1}, {reference.size} bytes"
    )


def _segment_lines(
    files: Files, log: int, base: int, path: str, keyring: Keyring | None, damages: list[Damage], records: bool
) -> Iterator[str]:
    file = files.open_readonly(path)
    size = file.size()
    try:
        covers_to = parse_segment_header(file.read_at(0, HEADER_BYTES), log=log, base_offset=base, where=path)
        yield f"segment of log {log} from offset {base}, {size} bytes" + (f", compacted up to offset {covers_to}" if covers_to else "")
    except CorruptData as damage:
        yield f"DAMAGE {damage}"
    finally:
        file.close()
    for position, batch in Segment(files, log, base, size=size).scan(HEADER_BYTES, size, keyring, damages.append):
        yield from _batch_lines(batch, position, records)


def _batch_lines(batch: StoredBatch, position: int | None, records: bool) -> Iterator[str]:
    header = batch.header
    flags = ", ".join(name for flag, name in _FLAG_NAMES.items() if header.flags & flag) or "plain"
    place = "" if position is None else f" at byte {position}"
    yield (
        f"  batch{place}: log {header.log}, offsets {header.base_offset} to {header.next_offset - 1}, {header.count} records, "
        f"{header.size} bytes, {_time(header.min_timestamp)} to {_time(header.max_timestamp)}, {flags}"
    )
    if records:
        yield from map(_record_line, batch.records())


def _record_line(record: Record) -> str:
    parts = [f"    {record.offset}  {_time(record.timestamp)}"]
    if record.key is not None:
        parts.append(f"key={_shown(record.key)}")
    parts.append("tombstone" if record.value is None else f"value={_shown(record.value)}")
    parts += [f"{name}={_shown(value)}" for name, value in record.headers]
    if record.expiry != NEVER:
        parts.append(f"expires={_time(record.expiry)}")
    return "  ".join(parts)


def _shown(content: bytes) -> str:
    return repr(content[:_VALUE_SHOWN_BYTES])[1:] + (f"… ({len(content)} bytes)" if len(content) > _VALUE_SHOWN_BYTES else "")


def _time(timestamp: int) -> str:
    """Format as ISO 8601, or as a number if out of range."""
    try:
        return datetime.fromtimestamp(timestamp / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return str(timestamp)
