"""Flushes of single records to many logs, and the tails that they leave."""

from __future__ import annotations

import errno
from itertools import pairwise

import pytest

from headrace.errors import BrokerError, DiskFull
from headrace.limits import BATCH_JOINED_BYTES_MAX
from headrace.records import Ack, Appended, AppendedEach, RecordBatch
from headrace.storage.batch import StoredBatch
from headrace.storage.check import check
from headrace.storage.encoding import build_plain, encode_singles
from headrace.storage.joining import join, join_singles
from headrace.storage.journal import read_journal
from headrace.storage.partition import LogOptions
from headrace.storage.store import Store, StoreOptions
from tests.storage.stores import crashed, new_log, opened, put, records, staged, values
from tests.storage_faults.simulated import Fault, SimulatedFiles

NOW = 1_700_000_000_000
ROOMY = StoreOptions(journal_bytes=1 << 20, headroom_bytes=0)


def put_each(store: Store, logs: list[int], contents: list[bytes], now: int = NOW) -> AppendedEach | BrokerError:
    outcome: list[AppendedEach | BrokerError] = []
    store.stage_each(logs, contents, None, ack=Ack.DURABLE, now=now, done=outcome.append, size_bytes=sum(map(len, contents)))
    assert store.flush()
    (found,) = outcome
    return found


def base_offsets(outcome: list[list[Appended] | BrokerError]) -> list[int]:
    (placed,) = outcome
    assert isinstance(placed, list)
    return [one.base_offset for one in placed]


@pytest.mark.parametrize("count", [1, 15, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("sizes", [(100,), (0,), (7,), (8,), (100, 101), (65_450,)])
def test_the_batches_of_a_flush_are_those_that_are_built_one_by_one(count: int, sizes: tuple[int, ...]) -> None:
    contents = [bytes([number % 251]) * sizes[number % len(sizes)] for number in range(count)]
    logs, offsets = [number * 1_000_003 % (1 << 32) for number in range(count)], [number << number % 57 for number in range(count)]
    expected = [build_plain(log, offset, [value], NOW) for log, offset, value in zip(logs, offsets, contents, strict=True)]
    assert encode_singles(logs, offsets, contents, NOW) == b"".join(part for _, parts in expected for part in parts)


@pytest.mark.parametrize("bytes_max", [0, 400, 4_000, 1 << 18])
@pytest.mark.parametrize("sizes", [(20,), (0,), (20, 33), (20, 600), (40_000, 3)])
def test_single_records_become_the_batches_that_joining_their_batches_gives(bytes_max: int, sizes: tuple[int, ...]) -> None:
    for count in (1, 2, 9, 30):
        contents = [bytes([number]) * sizes[number % len(sizes)] for number in range(count)]
        times = [NOW + number // 3 for number in range(count)]
        rows = zip(range(7, 7 + count), contents, times, strict=True)
        one_by_one = [build_plain(5, offset, [value], time) for offset, value, time in rows]
        found = join_singles(5, 7, contents, times, bytes_max)
        joined = join(one_by_one, bytes_max, compress=False, keyring=None)
        assert [
            (record.offset, record.timestamp, record.value) for built in found for record in StoredBatch.of_built(built, None).records()
        ] == [(record.offset, record.timestamp, record.value) for built in joined for record in StoredBatch.of_built(built, None).records()]
        assert len(found) >= len(joined)
        assert all(one[0].next_offset == following[0].base_offset for one, following in pairwise(found))
        if bytes_max == 1 << 18 and max(sizes) < 1_000:
            assert [(header.crc, header.size) for header, _ in found] == [(header.crc, header.size) for header, _ in joined]


def test_a_frame_has_a_batch_for_each_record_to_many_logs() -> None:
    files = SimulatedFiles()
    store = opened(files, ROOMY)
    logs = [new_log(store) for _ in range(20)]
    put_each(store, logs * 2, [b"%d" % number for number in range(40)])
    (frame,) = read_journal(files, 1, None, lambda damage: None)
    assert [(batch.header.log, batch.header.base_offset) for batch in frame.batches] == [(log, turn) for turn in range(2) for log in logs]


def test_records_to_many_logs_are_readable_from_every_offset_in_memory_on_disk_and_after_a_crash() -> None:
    files = SimulatedFiles()
    store = opened(files, ROOMY)
    logs = [new_log(store) for _ in range(20)]
    expected: dict[int, list[bytes]] = {log: [] for log in logs}
    for turn in range(12):
        if turn == 5:
            put(store, logs[3], b"in a batch", b"of two")
            expected[logs[3]] += [b"in a batch", b"of two"]
        if turn == 8:
            store.maintenance.spill()
        if turn == 10:
            assert values(store, logs[4], 1) == expected[logs[4]][1:]  # the tail becomes batches in between
        contents = [b"%d of %d" % (turn, log) for log in logs]
        found = put_each(store, logs, contents, NOW + turn)
        assert isinstance(found, AppendedEach)
        assert found.offsets == [len(expected[log]) for log in logs]
        for log, value in zip(logs, contents, strict=True):
            expected[log].append(value)
    again = opened(crashed(files), ROOMY)
    for one in (store, again):
        for log in logs:
            for offset in range(len(expected[log])):
                assert values(one, log, offset) == expected[log][offset:], (log, offset)
                assert values(one, log, offset, 1) == expected[log][offset:], (log, offset)
        assert [record.timestamp for record in records(one, logs[0])] == [NOW + turn for turn in range(12)]
        assert one.partitions[logs[0]].offset_for_time(NOW + 9) == 9
        assert one.partitions[logs[0]].offset_for_time(NOW + 12) == 12
    store.close()
    assert check(crashed(files)).clean
    assert values(opened(crashed(files), ROOMY), logs[3]) == expected[logs[3]]


def test_appends_of_every_kind_to_the_same_logs_keep_their_order_in_a_flush_with_records_to_many_logs() -> None:
    files, options = SimulatedFiles(), StoreOptions(journal_bytes=1 << 20, headroom_bytes=0, key=bytes(32))
    store = opened(files, options)
    kinds = [LogOptions(), LogOptions(compress=True), LogOptions(encrypt=True), LogOptions(compact=True), LogOptions(joined_bytes_max=0)]
    logs = [store.create_log(kind) for kind in kinds]
    outcome: list[AppendedEach | BrokerError] = []

    def each(text: bytes) -> None:
        store.stage_each(logs, [text] * 5, None, ack=Ack.DURABLE, now=NOW, done=outcome.append, size_bytes=5)

    first = staged(store, (logs[0], RecordBatch([b"a", b"b"])), (logs[2], RecordBatch([b"a", b"b"])))
    each(b"c")
    second = staged(store, (logs[1], RecordBatch([b"d"], [b"key"])), (logs[0], RecordBatch([b"d"])))
    each(b"e")
    assert store.flush() and not store.flush()
    assert (
        first and second and [found.offsets for found in outcome if isinstance(found, AppendedEach)] == [[2, 0, 2, 0, 0], [4, 2, 3, 1, 1]]
    )
    whole = [[b"a", b"b", b"c", b"d", b"e"], [b"c", b"d", b"e"], [b"a", b"b", b"c", b"e"], [b"c", b"e"], [b"c", b"e"]]
    for one in (store, opened(crashed(files), options)):
        assert [values(one, log) for log in logs] == whole


def test_an_atomic_append_of_single_records_to_many_logs_needs_no_object_for_each() -> None:
    files = SimulatedFiles()
    store = opened(files, ROOMY)
    logs = [new_log(store) for _ in range(20)]
    put(store, logs[2], b"earlier")
    found = staged(store, *[(log, RecordBatch([b"%d" % log])) for log in logs])
    assert store.flush()
    assert base_offsets(found) == [0, 0, 1, *[0] * 17]
    assert len(store.partitions[logs[0]].singles) == 2 and not store.partitions[logs[0]].batches
    *_, frame = read_journal(files, 1, None, lambda damage: None)
    assert [batch.header.log for batch in frame.batches] == logs
    for one in (store, opened(crashed(files), ROOMY)):
        assert [values(one, log)[-1] for log in logs] == [b"%d" % log for log in logs]
        assert values(one, logs[2]) == [b"earlier", b"%d" % logs[2]]


@pytest.mark.parametrize("is_full", [False, True])
def test_an_atomic_append_of_all_kinds_to_many_logs_keeps_its_order(is_full: bool) -> None:
    files, options = SimulatedFiles(), StoreOptions(journal_bytes=1 << 20, headroom_bytes=0, key=bytes(32))
    store = opened(files, options)
    kinds = [LogOptions(), LogOptions(compress=True), LogOptions(encrypt=True), LogOptions(compact=True), LogOptions()]
    logs = [store.create_log(kinds[number % 5]) for number in range(40)]
    first = [(log, RecordBatch([b"a"])) for log in logs]
    again = [(log, RecordBatch([b"b"], [b"key"] if log % 3 else None)) for log in logs] + [(logs[0], RecordBatch([b"c", b"d"]))]
    if is_full:
        files.inject(Fault("write_at", path="journal/*", error=errno.ENOSPC))
        staged(store, *first, *again)
        store.flush()
        store.full = False
    whole = staged(store, *first, *again)
    alone = staged(store, (logs[0], RecordBatch([b"e"])))
    assert store.flush() and not store.flush()
    assert base_offsets(whole) == [0] * 40 + [1] * 40 + [2]
    assert base_offsets(alone) == [4]
    for one in (store, opened(crashed(files), options)):
        assert values(one, logs[0]) == [b"a", b"b", b"c", b"d", b"e"]
        assert [values(one, log) for log in logs[1:]] == [[b"a", b"b"]] * 39
        assert [record.key for record in records(one, logs[1])] == [None, b"key" if logs[1] % 3 else None]


def test_an_atomic_append_of_many_records_to_few_logs_is_one_batch_for_each_log() -> None:
    files = SimulatedFiles()
    store = opened(files, ROOMY)
    logs = [new_log(store) for _ in range(4)]
    staged(store, *[(log, RecordBatch([b"x"])) for _ in range(10) for log in logs])
    assert store.flush()
    (frame,) = read_journal(files, 1, None, lambda damage: None)
    assert [batch.header.count for batch in frame.batches] == [10] * 4


def test_a_full_disk_takes_the_offsets_of_records_to_many_logs_back() -> None:
    files = SimulatedFiles()
    store = opened(files, ROOMY)
    logs = [new_log(store) for _ in range(20)]
    put_each(store, logs, [b"before"] * 20)
    files.inject(Fault("write_at", path="journal/*", error=errno.ENOSPC))
    assert isinstance(put_each(store, logs * 2, [b"lost"] * 40), DiskFull)
    store.full = False
    found = put_each(store, logs * 2, [b"after"] * 40)
    assert isinstance(found, AppendedEach) and found.offsets == [1] * 20 + [2] * 20
    for one in (store, opened(crashed(files), ROOMY)):
        assert [values(one, log) for log in logs] == [[b"before", b"after", b"after"]] * 20


def test_a_log_that_is_dropped_during_the_flush_shows_nothing_of_records_to_many_logs() -> None:
    store = opened(SimulatedFiles(), ROOMY)
    logs = [new_log(store) for _ in range(20)]
    store.stage_each(logs, [b"x"] * 20, None, ack=Ack.DURABLE, now=NOW, done=lambda outcome: None, size_bytes=20)
    store.partitions[logs[7]].drop()
    assert store.flush()
    assert [len(store.partitions[log].tail) for log in logs] == [1] * 7 + [0] + [1] * 12
    assert store.counters.records == 20


def test_tails_of_single_records_leave_memory_as_other_tails_do() -> None:
    store = opened(SimulatedFiles(), ROOMY)
    logs = [new_log(store) for _ in range(20)]
    half = bytes(BATCH_JOINED_BYTES_MAX // 16)
    for _ in range(16):
        put_each(store, logs[:2], [half, b"x"])
    store.maintenance.tick(urgent=True)
    assert [store.partitions[log].has_tail for log in logs[:2]] == [False, True], "a large tail does not wait for the checkpoint"
    put_each(store, logs, [b"y"] * 20)
    store.checkpoint()
    assert not any(store.partitions[log].has_tail or store.partitions[log].tail_bytes for log in logs)
    assert store.maintenance._tail_bytes == 0
    assert values(store, logs[1]) == [b"x"] * 16 + [b"y"]
    put_each(store, logs, [b"z"] * 20)
    store.maintenance.spill()
    assert not any(store.partitions[log].has_tail for log in logs), "a tail that was empty counts as one again"
