"""Text output of one segment or journal file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from headrace.errors import CorruptData
from headrace.records import NEVER, Record
from headrace.storage import batch as batch_format
from headrace.storage.batch import StoredBatch
from headrace.storage.crypt import Keyring
from headrace.storage.files import Files
from headrace.storage.journal import SUFFIX as JOURNAL_SUFFIX
from headrace.storage.journal import Damage, journal_number, read_journal
from headrace.storage.segment import HEADER_BYTES, Segment, parse_segment_header, segment_base

_FLAG_NAMES = {
    batch_format.VALUE_NULLS: "tombstones",
    batch_format.KEYS: "keys",
    batch_format.HEADERS: "headers",
    batch_format.TIMESTAMPS: "timestamps",
    batch_format.EXPIRIES: "expiries",
    batch_format.OFFSETS: "gaps",
    batch_format.COMPRESSED: "zstd",
    batch_format.ENCRYPTED: "aes-256-gcm",
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
            for batch in frame.batches:
                yield from _batch_lines(batch, None, records)
    elif (base := segment_base(name)) is not None and directory.isdigit():
        yield from _segment_lines(files, int(directory), base, path, keyring, damages, records)
    else:
        raise CorruptData(f"{path}: neither a segment (logs/LOG/OFFSET.seg) nor a journal file (journal/NUMBER.hrj)")
    for damage in damages:
        yield f"DAMAGE {damage}"


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
