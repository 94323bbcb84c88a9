"""The flush of a single record writes, shows and acknowledges what any other flush does."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import DiskFull, StorageFailed, Unavailable
from headrace.records import Ack, Appended, RecordBatch
from headrace.storage import store as store_module
from headrace.storage.lone import LONE_BYTES_MAX, write_lone
from headrace.storage.staged import AnyStaged, Staged
from headrace.storage.store import Store
from tests.storage.stores import crashed, new_log, opened, put, staged, values
from tests.storage_faults.simulated import Fault, SimulatedFiles

PLAIN = RecordBatch([b"v"])


def item(log: int, batch: RecordBatch = PLAIN, ack: Ack = Ack.DURABLE, *, logs: int = 1) -> Staged:
    return Staged([(log, batch)] * logs, ack, 0, lambda result: None, batch.size_bytes * logs)


@pytest.mark.replaces_code
def test_it_leaves_the_same_bytes_on_the_disk_and_the_same_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_lone in (True, False):
        if not is_lone:
            monkeypatch.setattr(store_module, "write_lone", lambda store, staged: False)
        files = SimulatedFiles()
        store = opened(files)
        log = new_log(store)
        placed = [put(store, log, b"one", now=5), put(store, log, b"", now=6), put(store, log, b"x" * 5_000, now=7)]
        counters, tail = store.counters, [(header.encode(), parts) for header, parts in store.partitions[log].tail]
        flushes = counters.append_duration.count, counters.sync_duration.count, counters.flush_bytes.counts
        before = files.contents()
        store.checkpoint()  # moves the tails of the logs that the flush has touched
        found.append((placed, before, tail, counters.records, counters.journal_bytes, flushes, files.contents()))
    assert found[0] == found[1]


def test_only_one_durable_append_of_one_value_is_lone() -> None:
    store = opened(SimulatedFiles())
    log, other, compressed = new_log(store), new_log(store), new_log(store, compress=True)
    others: list[list[AnyStaged]] = [
        [item(log), item(other)],
        [item(log, logs=2)],
        [item(log, ack=Ack.WRITTEN)],
        [item(log, ack=Ack.NONE)],
        [item(log, RecordBatch([b"v"], [b"k"]))],
        [item(log, RecordBatch([None]))],
        [item(log, RecordBatch([b"v", b"w"]))],
        [item(log, RecordBatch([]))],
        [item(log, RecordBatch([b"v"], timestamps=[1]))],
        [item(log, RecordBatch([b"x" * (LONE_BYTES_MAX + 1)]))],
        [item(compressed)],
        [item(compressed + 1)],
    ]
    for each in others:
        assert not write_lone(store, each)
    assert store.bounds(log).end == store.partitions[log].next == 0
    assert write_lone(store, [item(log, RecordBatch([b"x" * LONE_BYTES_MAX]))])
    assert store.bounds(log).end == 1


def test_a_full_disk_is_retriable_and_costs_no_offset() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"safe")
    files.inject(Fault("write_at", path="journal/*", error=errno.ENOSPC))
    refused = staged(store, (log, PLAIN))
    store.flush()
    assert isinstance(refused[0], DiskFull) and refused[0].retriable
    assert put(store, log, b"more") == Appended(1, 1, 0)
    assert values(opened(crashed(files)), log) == [b"safe", b"more"]


@pytest.mark.parametrize("kind", ["write_at", "sync"])
def test_after_a_failed_write_or_sync_nothing_is_shown_and_nothing_more_written(kind: str) -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store)
    put(store, log, b"safe")
    files.inject(Fault(kind, path="journal/*"))
    doubtful = staged(store, (log, PLAIN))
    store.flush()
    assert isinstance(doubtful[0], StorageFailed)
    assert isinstance(staged(store, (log, PLAIN))[0], StorageFailed)
    assert values(store, log) == [b"safe"]
    assert store.counters.records == 1


def test_a_log_that_was_deleted_meanwhile_is_unavailable() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store)
    outcome = staged(store, (log, PLAIN))
    store.delete_logs([log])
    store.flush()
    assert isinstance(outcome[0], Unavailable)


def test_what_is_staged_before_the_failure_of_the_store_is_refused() -> None:
    store: Store = opened(SimulatedFiles())
    log = new_log(store)
    outcome = staged(store, (log, PLAIN))
    store.fence("a test")
    store.flush()
    assert isinstance(outcome[0], StorageFailed)
