"""Retention and compaction remove what they should and nothing else, also across a crash."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headrace.errors import OffsetOutOfRange
from headrace.records import Ack, RecordBatch
from headrace.storage.check import check
from headrace.storage.files import File
from headrace.storage.segment import Segment
from headrace.storage.store import Store, StoreOptions
from tests.storage.stores import crashed, new_log, opened, put, records, staged, values
from tests.storage_faults.power_cut import barest
from tests.storage_faults.simulated import SimulatedFiles


def filled(files: SimulatedFiles, count: int = 60, **options: object) -> tuple[Store, int]:
    store = opened(files)
    log = new_log(store, segment_bytes=2048, **options)
    for number in range(count):
        put(store, log, b"%04d" % number * 25, now=number * 1000)
    store.checkpoint()
    return store, log


def test_retention_by_age_removes_whole_segments_and_their_files() -> None:
    files = SimulatedFiles()
    store, log = filled(files, retention_ms=10_000)
    before = len(files.list(f"logs/{log:08d}"))
    store.maintain(60_000)
    first = store.bounds(log).first
    assert 0 < first <= 50
    assert len(files.list(f"logs/{log:08d}")) < before
    assert records(store, log)[0].offset == first
    assert opened(crashed(files)).bounds(log) == store.bounds(log)


def test_retention_during_a_read_is_an_error_and_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    store, log = filled(SimulatedFiles(), retention_ms=10_000)
    file = Segment.file

    def overtaken(segment: Segment) -> File:
        monkeypatch.undo()
        store.maintain(60_000)
        return file(segment)

    monkeypatch.setattr(Segment, "file", overtaken)
    with pytest.raises(OffsetOutOfRange) as caught:
        store.partitions[log].read(0, 1 << 20, 1_000)
    assert (caught.value.wanted, caught.value.first) == (0, store.bounds(log).first)


def test_when_everything_is_too_old_the_next_offset_survives_even_without_a_manifest() -> None:
    files = SimulatedFiles()
    store, log = filled(files, retention_ms=10_000)
    store.maintain(1_000_000)
    assert store.bounds(log).first == store.bounds(log).end == 60
    store.close()
    files.remove("MANIFEST")
    again = opened(files)
    assert put(again, log, b"next").base_offset == 60


def test_retention_by_bytes_keeps_the_newest() -> None:
    store, log = filled(SimulatedFiles(), retention_bytes=4096)
    store.maintain(0)
    assert store.partitions[log].size_bytes <= 4096 + 2048
    assert records(store, log)[-1].offset == 59


def keyed(store: Store, log: int, rounds: int, keys: int = 5) -> None:
    for number in range(rounds):
        for key in range(keys):
            put(store, log, b"%d/%d" % (key, number) + b"." * 80, keys=[b"k%d" % key], now=number)


def test_compaction_keeps_the_newest_of_each_key_in_its_place() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, segment_bytes=2048, compact=True)
    keyed(store, log, 40)
    size = store.partitions[log].size_bytes
    for _ in range(3):
        store.maintain(1000)
    kept = records(store, log)
    newest = {record.key: record for record in kept}
    assert {key: record.offset for key, record in newest.items()} == {b"k%d" % key: 195 + key for key in range(5)}
    assert len(kept) < 50
    assert store.partitions[log].size_bytes < size / 3
    assert [record.offset for record in kept] == sorted(record.offset for record in kept)
    assert check(crashed(files)).clean
    again = opened(crashed(files))
    assert records(again, log) == kept
    assert put(again, log, b"next").base_offset == 200


def test_tombstones_delete_their_key_and_go_when_their_time_is_over() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store, segment_bytes=1024, compact=True, tombstone_retention_ms=5_000)
    put(store, log, b"v" * 500, keys=[b"gone"], now=0)
    put(store, log, None, keys=[b"gone"], now=1_000)
    keyed(store, log, 10)
    store.maintain(2_000)
    assert [record.value for record in records(store, log) if record.key == b"gone"] == [None]
    keyed(store, log, 10)
    store.maintain(10_000)
    keyed(store, log, 10)
    store.maintain(10_000)
    assert [record for record in records(store, log) if record.key == b"gone"] == []


def test_records_without_a_key_are_never_superseded() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store, segment_bytes=1024, compact=True)
    put(store, log, b"keyless")
    keyed(store, log, 20)
    store.maintain(0)
    assert values(store, log)[0] == b"keyless"


def test_a_reader_in_the_middle_of_a_gap_goes_on_behind_it() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store, segment_bytes=2048, compact=True)
    put(store, log, b"old", keys=[b"written once"])
    keyed(store, log, 40)
    store.maintain(0)
    store.maintain(0)
    found = records(store, log)
    gap = next(left.offset + 1 for left, right in pairwise(found) if right.offset > left.offset + 1)
    assert records(store, log, gap)[0].offset > gap


def test_compaction_gives_up_no_record_for_one_that_a_power_cut_may_take() -> None:
    files = SimulatedFiles()
    store = opened(files)
    log = new_log(store, segment_bytes=2000, compact=True)
    put(store, log, b"first", keys=[b"a"])
    put(store, log, b"large" * 400, keys=[b"b"])
    store.checkpoint()
    staged(store, (log, RecordBatch([b"newer"], [b"a"])), ack=Ack.WRITTEN)
    store.flush()
    store.maintain(0)
    assert b"first" not in values(store, log), "compaction has run"
    assert {b"first", b"newer"} & set(values(opened(barest(files)), log)), "the key is lost"


def test_the_headroom_is_watched_under_load_too() -> None:
    """A writer that wakes maintenance continuously leaves it no idle interval."""
    files = SimulatedFiles()
    store = Store.open(files, StoreOptions(journal_bytes=64 * 1024, headroom_bytes=1_000_000), threads=False)
    files.room_bytes = 2_000_000
    store.maintenance.tick(urgent=True)
    assert not store.full
    files.room_bytes = 10_000
    store.maintenance.tick(urgent=True)
    assert store.full


def test_a_reader_inside_a_batch_does_not_see_what_compaction_removed() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store, compact=True, segment_bytes=200)
    put(store, log, bytes(10), bytes(30), bytes(10), keys=[b"a", b"k", b"b"])
    store.checkpoint()
    store.read(log, 0, bytes_max=11, records_max=1)
    for _ in range(30):
        put(store, log, bytes(30), keys=[b"k"])
    store.checkpoint()
    store.maintain(10)
    assert [record.offset for record in records(store, log, 1)][:2] == [2, 32]
    store.close()
