"""Cache of opened batches: a batch in memory is verified and decompressed once, and never outlives its records."""

from __future__ import annotations

import sys
import threading

import pytest

from headrace.records import RecordBatch
from headrace.storage import zstd
from headrace.storage.batch import StoredBatch
from headrace.storage.encoding import encode
from headrace.storage.opened import OpenedBatches, opened_bytes
from headrace.storage.partition import LogOptions
from headrace.storage.store import Store
from tests.storage.stores import SMALL, new_log, opened, put, values
from tests.storage_faults.simulated import SimulatedFiles

LARGE = [b"%05d" % number * 20 for number in range(500)]


def stored(base: int, count: int = 10, *, log: int = 1, compress: bool = False) -> StoredBatch:
    return StoredBatch.parse(encode(log, base, RecordBatch([bytes(100)] * count), now=0, compress=compress))


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Base offsets of all batches that are parsed."""
    parse, seen = StoredBatch.parse, list[int]()

    def counted(*arguments: object, **named: object) -> StoredBatch:
        batch = parse(*arguments, **named)  # type: ignore[arg-type]  # passed on as they are
        seen.append(batch.header.base_offset)
        return batch

    monkeypatch.setattr(StoredBatch, "parse", counted)
    return seen


def read(store: Store, log: int, offset: int, count: int = 10) -> list[bytes | None]:
    return [value for batch in store.read(log, offset, bytes_max=1 << 20, records_max=count) for value in batch.values()]


def test_a_batch_is_found_by_each_of_its_offsets_and_by_no_other() -> None:
    cache = OpenedBatches()
    first, second = stored(10), stored(30)
    cache.put(1, 0, first)
    cache.put(1, 0, second)
    found = [cache.find(1, 0, offset) for offset in (9, 10, 19, 20, 29, 30, 39, 40)]
    assert found == [None, first, first, None, None, second, second, None]
    assert cache.find(2, 0, 10) is None
    assert cache.find(1, 1, 10) is None, "compaction has changed the log since"


def test_memory_is_bounded_and_the_batch_that_nobody_reads_leaves_first() -> None:
    size = opened_bytes(stored(0))
    cache = OpenedBatches(3 * size)
    for base in (0, 10, 20):
        cache.put(1, 0, stored(base))
    assert (len(cache), cache.size_bytes) == (3, 3 * size)
    assert cache.find(1, 0, 0) is not None
    cache.put(1, 0, stored(30))
    assert (len(cache), cache.size_bytes) == (3, 3 * size)
    assert [cache.find(1, 0, base) is not None for base in (0, 10, 20, 30)] == [True, False, True, True]


@pytest.mark.parametrize(("room", "kept"), [(0, True), (-1, False)])
def test_a_batch_larger_than_the_whole_cache_is_not_kept(room: int, kept: bool) -> None:
    batch = stored(0)
    cache = OpenedBatches(opened_bytes(batch) + room)
    cache.put(1, 0, batch)
    assert (cache.find(1, 0, 0) is batch) is kept
    assert cache.size_bytes == (opened_bytes(batch) if kept else 0)


def test_a_compressed_batch_counts_with_both_of_its_forms() -> None:
    batch = stored(0, compress=True)
    assert opened_bytes(batch) > batch.header.size + 1000, "its 10 values have 100 bytes each"


def test_a_batch_takes_the_place_of_those_that_hold_its_offsets() -> None:
    cache = OpenedBatches()
    for base in (5, 10, 11, 12, 20):
        cache.put(1, 0, stored(base, 6 if base == 5 else 1))
    joined = stored(8, 12)
    cache.put(1, 0, joined)
    assert [cache.find(1, 0, offset) is joined for offset in (7, 8, 12, 19, 20)] == [False, True, True, True, False]
    assert len(cache) == 2
    cache.forget(1)
    assert (len(cache), cache.size_bytes) == (0, 0)


@pytest.mark.parametrize("compress", [False, True])
def test_readers_of_one_batch_verify_and_decompress_it_once(compress: bool, parses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    decompressed: list[int] = []
    decompress = zstd.decompress

    def counted(body: bytes | memoryview, *, size: int) -> bytes:
        decompressed.append(size)
        return decompress(body, size=size)

    monkeypatch.setattr(zstd, "decompress", counted)
    store = opened(SimulatedFiles())
    log = new_log(store, compress=compress)
    put(store, log, *LARGE)
    store.checkpoint()
    for offset in (0, 10, 250, 0, 490, 77, 10):
        assert read(store, log, offset) == LARGE[offset : offset + 10]
    assert parses == [0]
    assert len(decompressed) == compress


def test_a_batch_stays_opened_when_it_moves_from_the_tail_to_a_segment(parses: list[int]) -> None:
    store = opened(SimulatedFiles())
    log = new_log(store)
    put(store, log, *LARGE)
    assert read(store, log, 20) == LARGE[20:30]
    store.checkpoint()
    assert read(store, log, 20) == LARGE[20:30]
    assert parses == []


def test_a_scan_does_not_displace_what_is_read_again_and_again() -> None:
    cache = OpenedBatches()
    store = opened(SimulatedFiles())
    log = new_log(store)
    for _ in range(4):
        put(store, log, *LARGE)
    store.checkpoint()
    store.partitions[log]._opened = cache
    store.read(log, 0, bytes_max=8 << 20)
    assert len(cache) == 0
    store.read(log, 0, bytes_max=1 << 20)
    assert len(cache) == 4


def test_what_compaction_removes_is_not_delivered_from_memory() -> None:
    store = opened(SimulatedFiles(), SMALL)
    log = store.create_log(LogOptions(segment_bytes=10_000, compact=True))
    keys: list[bytes | None] = [b"key %d" % (number % 7) for number in range(len(LARGE))]
    for _ in range(3):
        put(store, log, *LARGE, keys=keys)
    store.checkpoint()
    assert len(read(store, log, 0)) == 10
    store.maintain(0)
    assert len(values(store, log)) == 7
    assert len(read(store, log, 0, 500)) == 7


def test_a_deleted_log_frees_its_memory() -> None:
    store = opened(SimulatedFiles())
    log = new_log(store)
    put(store, log, *LARGE)
    read(store, log, 0)
    cache = store.partitions[log]._opened
    assert len(cache) == 1
    store.delete_logs([log])
    assert len(cache) == 0


def test_a_search_beside_threads_that_change_the_cache_finds_the_right_batch_or_none() -> None:
    batches = [stored(base) for base in range(0, 200, 10)]
    cache = OpenedBatches(5 * opened_bytes(batches[0]))
    faults: list[object] = []
    is_over = threading.Event()

    def change() -> None:
        try:
            while not is_over.is_set():
                for batch in batches:
                    cache.put(1, 0, batch)
                cache.forget(1)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=change) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # between any two steps
    for thread in threads:
        thread.start()
    found = 0
    try:
        for turn in range(20_000):
            offset = turn * 7 % 220
            batch = cache.find(1, 0, offset)
            if batch is not None:
                found += 1
                assert batch.header.base_offset <= offset < batch.header.next_offset
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not faults
    cache.put(1, 0, batches[0])
    assert cache.find(1, 0, 5) is batches[0]
