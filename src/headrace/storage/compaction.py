"""Log compaction: keeps the newest record of each key, with its offset.

Closed segments are rewritten, oldest first, into new segments. The header of a new segment names the offset up to which it replaces
older ones. The new file is complete and synced before it is renamed to the first segment it replaces. After the rename the other segments
are left-overs, which are removed at once or, after a crash, by recovery. Batches keep their span, so that offsets have gaps and batches
never overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headrace.limits import BATCH_BYTES_TARGET
from headrace.records import NEVER, Record, RecordBatch
from headrace.storage.batch import Built, StoredBatch
from headrace.storage.crypt import Keyring
from headrace.storage.encoding import build
from headrace.storage.files import Files
from headrace.storage.partition import Partition
from headrace.storage.segment import HEADER_BYTES, TEMPORARY_SUFFIX, Damaged, Segment, index_path, log_directory

_SPAN_MAX: Final = (1 << 32) - 1


def compact(files: Files, partition: Partition, now: int, keyring: Keyring | None, damaged: Damaged) -> bool:
    """Compact if more than half of the closed bytes are not compacted yet. Returns whether anything changed."""
    _close_active(partition)
    closed = partition.segments[:-1]
    total = sum(segment.size for segment in closed)
    fresh = sum(segment.size for segment in closed if segment.base_offset >= partition.compacted_to and not segment.covers_to)
    if not closed or fresh * 2 < total:
        return False
    newest = _newest(partition, keyring, damaged)
    for group in _groups(closed, partition.options.segment_bytes):
        _rewrite(files, partition, group, newest, now, keyring, damaged)
    partition.compacted_to = closed[-1].covers_to or partition.segments[-1].base_offset
    return True


def _close_active(partition: Partition) -> None:
    """Close the active segment once it is larger than the compacted ones, so that small tables stay small."""
    if not partition.segments:
        return
    *closed, active = partition.segments
    if active.size > HEADER_BYTES and active.size * 2 >= min(sum(segment.size for segment in closed), partition.options.segment_bytes):
        partition.roll()


def _newest(partition: Partition, keyring: Keyring | None, damaged: Damaged) -> dict[bytes, int]:
    """Return the newest offset of each key in all segments."""
    newest: dict[bytes, int] = {}
    for segment in partition.segments:
        for _, batch in segment.scan(HEADER_BYTES, segment.size, keyring, damaged):
            keys = batch.keys()
            if keys is not None:
                newest.update((key, offset) for key, offset in zip(keys, batch.offsets(), strict=True) if key is not None)
    return newest


def _groups(closed: list[Segment], bytes_max: int) -> list[list[Segment]]:
    """Group adjacent segments that fit into one segment."""
    groups: list[list[Segment]] = []
    size = 0
    for segment in closed:
        if not groups or size + segment.size > bytes_max:
            groups.append([])
            size = 0
        groups[-1].append(segment)
        size += segment.size
    return groups


def _rewrite(
    files: Files, partition: Partition, group: list[Segment], newest: dict[bytes, int], now: int, keyring: Keyring | None, damaged: Damaged
) -> None:
    first = group[0]
    follower = next(segment for segment in partition.segments if segment.base_offset > group[-1].base_offset)
    temporary = first.path + TEMPORARY_SUFFIX
    fresh = Segment.create(files, partition.id, first.base_offset, name=temporary, covers_to=follower.base_offset)
    batches = (batch for segment in group for _, batch in segment.scan(HEADER_BYTES, segment.size, keyring, damaged))
    for records in _gathered(_kept(batch, newest, now, partition.options.tombstone_retention_ms) for batch in batches):
        batch = [_encode(partition, records)]
        fresh.extend(batch, fresh.append(batch))
    fresh.sync()
    for segment in group:
        segment.file()  # active readers keep the old file after the rename
    files.rename(temporary, first.path)
    # This must happen before any later step can fail: a replaced segment without descriptor would open the new file under the old name.
    with partition.lock:
        at = partition.segments.index(first)
        partition.segments = [*partition.segments[:at], fresh, *partition.segments[at + len(group) :]]
        partition.generation += 1
    files.sync_dir(log_directory(partition.id))
    files.remove(index_path(partition.id, first.base_offset))
    fresh.store_index()
    for segment in group[1:]:
        files.remove(segment.path)
        files.remove(index_path(partition.id, segment.base_offset))
    files.sync_dir(log_directory(partition.id))


class _Kept(list[Record]):
    """Kept records of a batch, and the offsets that the batch covered."""

    def __init__(self, base_offset: int, next_offset: int) -> None:
        super().__init__()
        self.base_offset, self.next_offset = base_offset, next_offset


def _kept(batch: StoredBatch, newest: dict[bytes, int], now: int, tombstone_retention_ms: int) -> _Kept:
    kept = _Kept(batch.header.base_offset, batch.header.next_offset)
    for record in batch.records():
        if record.key is not None and newest.get(record.key, record.offset) > record.offset:
            continue
        if record.value is None and record.key is not None and record.timestamp < now - tombstone_retention_ms:
            continue
        if record.expiry != NEVER and record.expiry <= now:
            continue
        kept.append(record)
    return kept


def _gathered(batches: Iterator[_Kept]) -> Iterator[_Kept]:
    """Merge small batches that cover adjacent offsets. The offsets of an empty batch are added to the span of the previous one."""
    gathered: _Kept | None = None
    size = 0
    for kept in batches:
        added = sum(len(record.value or b"") + len(record.key or b"") for record in kept)
        joins = (
            gathered is not None
            and gathered.next_offset == kept.base_offset
            and size + added <= BATCH_BYTES_TARGET
            and kept.next_offset - gathered.base_offset <= _SPAN_MAX
        )
        if gathered is None or not joins:
            if gathered:
                yield gathered
            gathered, size = kept, added
        else:
            gathered.extend(kept)
            gathered.next_offset = kept.next_offset
            size += added
    if gathered:
        yield gathered


def _encode(partition: Partition, kept: _Kept) -> Built:
    record_batch = RecordBatch(
        [record.value for record in kept],
        [record.key for record in kept],
        [record.headers for record in kept] if any(record.headers for record in kept) else None,
        [record.timestamp for record in kept],
        [record.expiry for record in kept] if any(record.expiry for record in kept) else None,
    )
    span = kept.next_offset - kept.base_offset
    dense = span == len(kept)
    return build(
        partition.id,
        kept.base_offset,
        record_batch,
        now=0,
        compress=partition.options.compress,
        keyring=partition.keyring,
        deltas=None if dense else [record.offset - kept.base_offset for record in kept],
        span=span,
    )
