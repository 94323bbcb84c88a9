"""Store without threads for tests, and helper functions."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.errors import BrokerError
from headrace.records import Ack, AnyBatch, Appended, Record, RecordBatch
from headrace.storage.partition import LogOptions
from headrace.storage.store import Store, StoreOptions
from tests.storage_faults.simulated import SimulatedFiles

SMALL = StoreOptions(journal_bytes=64 * 1024, headroom_bytes=0)


def opened(files: SimulatedFiles, options: StoreOptions = SMALL) -> Store:
    return Store.open(files, options, threads=False)


def crashed(files: SimulatedFiles) -> SimulatedFiles:
    """Return the same disk after the process was killed: all written data is visible."""
    return SimulatedFiles(files.contents(), files.directories())


def staged(store: Store, *appends: tuple[int, AnyBatch], ack: Ack = Ack.DURABLE, now: int = 0) -> list[list[Appended] | BrokerError]:
    """Stage without flushing. The outcome is added to the returned list."""
    outcome: list[list[Appended] | BrokerError] = []
    store.stage(appends, ack=ack, now=now, done=outcome.append, size_bytes=sum(record_batch.size_bytes for _, record_batch in appends))
    return outcome


def put(store: Store, log: int, *values: bytes | None, keys: list[bytes | None] | None = None, now: int = 0) -> Appended:
    outcome = staged(store, (log, RecordBatch(values, keys)), now=now)
    store.flush()
    (result,) = outcome
    assert isinstance(result, list), result
    return result[0]


def records(store: Store, log: int, offset: int | None = None, bytes_max: int = 1 << 20) -> list[Record]:
    bounds = store.bounds(log)
    position = bounds.first if offset is None else offset
    found: list[Record] = []
    while position < bounds.end:
        batches = store.read(log, position, bytes_max=bytes_max)
        if not batches:
            break
        found += [record for batch in batches for record in batch.records()]
        position = batches[-1].next_offset
    return found


def values(store: Store, log: int, offset: int | None = None, bytes_max: int = 1 << 20) -> list[bytes | None]:
    return [record.value for record in records(store, log, offset, bytes_max)]


def new_log(store: Store, **options: object) -> int:
    return store.create_log(LogOptions(**options))  # type: ignore[arg-type]  # named by the tests


def until(condition: Callable[[], bool], seconds: float = 300) -> None:
    """Poll until other threads are done; fail after the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
