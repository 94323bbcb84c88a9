"""Flushes of single records to many logs."""

from __future__ import annotations

import pytest

from headrace.errors import BrokerError
from headrace.limits import BATCH_BYTES_TARGET
from headrace.records import Ack, AppendedEach, RecordBatch
from headrace.storage.partition import LogOptions
from headrace.storage.store import Store, StoreOptions
from tests.storage.stores import SMALL, crashed, opened, staged
from tests.storage_faults.simulated import SimulatedFiles

KEY = bytes(32)
KINDS = [LogOptions(), LogOptions(compress=True), LogOptions(encrypt=True), LogOptions(compact=True)]


def put_each(
    store: Store, logs: list[int], values: list[bytes], keys: list[bytes | None] | None = None
) -> list[AppendedEach | BrokerError]:
    outcome: list[AppendedEach | BrokerError] = []
    store.stage_each(logs, values, keys, ack=Ack.DURABLE, now=0, done=outcome.append, size_bytes=sum(map(len, values)))
    return outcome


def contents(store: Store, log: int) -> list[tuple[bytes | None, bytes | None]]:
    bounds, found = store.bounds(log), list[tuple[bytes | None, bytes | None]]()
    for batch in store.read(log, bounds.first, bytes_max=1 << 30) if bounds.end else []:
        found += zip(batch.keys() or [None] * len(batch), batch.values(), strict=True)
    return found


def test_logs_of_every_kind_keep_the_order_of_one_flush_over_a_crash() -> None:
    files, options = SimulatedFiles(), StoreOptions(journal_bytes=SMALL.journal_bytes, headroom_bytes=0, key=KEY)
    store = opened(files, options)
    logs = [store.create_log(kind) for kind in KINDS]
    batch = staged(store, (logs[0], RecordBatch([b"0"])))
    plain = put_each(store, logs * 2, [b"%d" % number for number in range(8)])
    keyed = put_each(store, logs, [b"x"] * 4, [b"k", None, b"k", None])
    last = put_each(store, logs, [b"last"] * 4)
    assert store.flush() and not store.flush()
    offsets = [one.offsets for one in (*plain, *keyed, *last) if isinstance(one, AppendedEach)]
    assert len(batch) == 1 and offsets == [[1, 0, 0, 0, 2, 1, 1, 1], [3, 2, 2, 2], [4, 3, 3, 3]]
    for again in (store, opened(crashed(files), options)):
        for index, log in enumerate(logs):
            records = [(None, b"%d" % index), (None, b"%d" % (index + 4)), (b"k" if index in (0, 2) else None, b"x"), (None, b"last")]
            assert contents(again, log) == ([(None, b"0")] if index == 0 else []) + records


def test_one_append_of_a_record_to_each_log_is_kept_over_a_crash_with_what_shares_its_flush() -> None:
    files, options = SimulatedFiles(), StoreOptions(journal_bytes=SMALL.journal_bytes, headroom_bytes=0, key=KEY)
    store = opened(files, options)
    logs = [store.create_log(kind) for kind in KINDS]
    single = [RecordBatch([b"1"]), RecordBatch([b"1"], [b"k"]), RecordBatch([None]), RecordBatch([b"1"], expiries=[5])]
    outcome = staged(store, *[(log, batch) for batch in single for log in logs])
    put_each(store, logs, [b"2"] * 4)
    assert store.flush() and not store.flush()
    assert len(outcome) == 1
    for again in (store, opened(crashed(files), options)):
        for log in logs:
            assert contents(again, log) == [(None, b"1"), (b"k", b"1"), (None, None), (None, b"1"), (None, b"2")]


@pytest.mark.parametrize("sizes", [[BATCH_BYTES_TARGET + 1], [BATCH_BYTES_TARGET // 2 + 1] * 3])
def test_records_beyond_the_size_of_a_batch_are_several_batches(sizes: list[int]) -> None:
    store = opened(SimulatedFiles(), StoreOptions(headroom_bytes=0))
    log, other = store.create_log(LogOptions()), store.create_log(LogOptions())
    values = [bytes([number]) * size for number, size in enumerate(sizes)]
    put_each(store, [log] * len(values) + [other], [*values, b"small"])
    assert store.flush()
    assert (contents(store, log), contents(store, other)) == ([(None, value) for value in values], [(None, b"small")])
    assert len(store.partitions[log].tail) == len(sizes)


def test_a_log_that_is_deleted_during_the_flush_shows_nothing() -> None:
    store = opened(SimulatedFiles())
    logs = [store.create_log(LogOptions()) for _ in range(3)]
    put_each(store, logs, [b"1", b"2", b"3"])
    store.partitions[logs[1]].drop()
    assert store.flush()
    assert [len(store.partitions[log].tail) for log in logs] == [1, 0, 1]
    assert store.counters.records == 3
