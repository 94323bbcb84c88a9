"""Flush of a single record without a key, which is most flushes while one publisher waits for each of its replies.

The steps are those of any other flush (`Store.flush`): place, build, one journal frame, fdatasync, tail, acknowledgement. Without the lists
and collections that several appends need they take half the time, and the publisher waits for all of them. It does not wait for the
counters, which come after the acknowledgement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.errors import BrokerError
from headrace.limits import BATCH_JOINED_BYTES_MAX, KIB
from headrace.records import Ack, Appended, RecordBatch
from headrace.storage.batching import plain_values
from headrace.storage.encoding import build_plain
from headrace.storage.journal import SyncFailed
from headrace.storage.staged import AnyStaged, Staged

if TYPE_CHECKING:
    from headrace.storage.store import Store

LONE_BYTES_MAX: Final = 16 * KIB
"""Size of the append. The steps that are left out cost little beside the bytes of a larger one."""
_DURABLE: Final = Ack.DURABLE


def write_lone(store: Store, staged: list[AnyStaged]) -> bool:
    """Flush what is staged, if it is one durable append of one value, neither compressed nor encrypted. Returns False, with nothing done,
    if it is not."""
    item = staged[0]
    if len(staged) > 1 or not isinstance(item, Staged) or len(item.appends) != 1 or item.ack is not _DURABLE:
        return False
    options = store.options
    if item.size_bytes > LONE_BYTES_MAX or item.size_bytes >= options.large_bytes or store.failure is not None:
        return False
    log, batch = item.appends[0]
    partition = store.partitions.get(log)
    if partition is None or not isinstance(batch, RecordBatch) or len(batch.values) != 1:
        return False
    values = plain_values(batch, small=True)
    if values is None or partition.options.compress or partition.options.encrypt:
        return False
    base, journal, ticks = partition.next, store.journal, options.ticks
    error: BrokerError | None = None
    try:
        built = [build_plain(log, base, values, item.now)]
        partition.next = base + 1
        journal.append(built)
        began = ticks()
        journal.sync()
    except SyncFailed as unsynced:
        error = store.fence(f"syncing the log failed: {unsynced}")
    except (OSError, MemoryError) as failure:
        partition.next = base
        error = store.unwritten(failure)
    if error is not None:
        store.deliver([(item.done, error)], [])
        return True
    synced = ticks()
    size, maintenance = partition.push(built), store.maintenance
    maintenance.touch([partition], [partition] if partition.tail_bytes >= BATCH_JOINED_BYTES_MAX else [], size)
    store.deliver([(item.done, [Appended(base, 1, item.now)])], [log])
    counters = store.counters
    counters.records += 1
    counters.journal_bytes += size
    counters.flush_bytes.observe(size)
    counters.sync_duration.observe(synced - began)
    return True
