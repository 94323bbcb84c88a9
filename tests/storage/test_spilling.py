"""Tails move to segments in an order that keeps the writer running, and new logs start together."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from headrace.limits import MIB
from headrace.storage import maintenance
from headrace.storage.partition import Partition
from headrace.storage.store import Store, StoreOptions
from tests.storage.stores import crashed, new_log, opened, put, values
from tests.storage_faults.simulated import Fault, SimulatedFile, SimulatedFiles

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

LARGE = b"x" * 300_000
"""More than small batches are joined to."""
OPTIONS = StoreOptions(headroom_bytes=0)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the direct writes."""
    sizes: list[int] = []
    real = SimulatedFile.write_direct

    def noted(file: SimulatedFile, position: int, buffers: Sequence[SizedBuffer]) -> bool:
        sizes.append(sum(map(len, buffers)))
        return real(file, position, buffers)

    monkeypatch.setattr(SimulatedFile, "write_direct", noted)
    return sizes


def segments(store: Store, log: int) -> int:
    return len(store.partitions[log].segments)


def test_new_logs_start_with_one_sync_of_the_directory_above() -> None:
    files = SimulatedFiles()
    store = opened(files)
    logs = [new_log(store) for _ in range(20)]
    for log in logs:
        put(store, log, b"first")
    before = len(files.operations)
    store.maintenance.spill()
    synced = [operation.path for operation in files.operations[before:] if operation.kind == "sync_dir"]
    assert synced.count("logs") == 1
    assert [segments(store, log) for log in logs] == [1] * 20
    for log in logs:
        put(store, log, b"second")
    store.checkpoint()
    again = opened(crashed(files))
    assert [values(again, log) for log in logs] == [[b"first", b"second"]] * 20


@pytest.mark.parametrize("kind", ["make_dir", "create", "sync_dir"])
def test_logs_that_cannot_start_now_keep_their_tails_and_start_later(kind: str) -> None:
    files = SimulatedFiles()
    store = opened(files)
    logs = [new_log(store) for _ in range(5)]
    for log in logs:
        put(store, log, b"first")
    files.inject(Fault(kind, nth=3, error=errno.ENOSPC))
    store.maintenance.spill()
    assert store.full and [segments(store, log) for log in logs] == [0] * 5
    assert [values(store, log) for log in logs] == [[b"first"]] * 5
    assert store.maintenance.attempt() == 0
    assert [segments(store, log) for log in logs] == [1] * 5
    assert [values(opened(crashed(files)), log) for log in logs] == [[b"first"]] * 5


@pytest.mark.replaces_code
def test_small_tails_wait_for_the_checkpoint_until_they_take_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "SPILL_BYTES", 10_000)
    store = opened(SimulatedFiles(), StoreOptions(headroom_bytes=0, tail_bytes_max=800_000))
    small = [new_log(store) for _ in range(30)]
    large = new_log(store)
    for log in small:
        put(store, log, b"x" * 1000)
    put(store, large, LARGE)
    store.maintenance.tick(urgent=True)
    assert segments(store, large) == 1 and not any(segments(store, log) for log in small)
    for log in small:
        put(store, log, b"x" * 14_000)
    store.maintenance.tick(urgent=True)
    assert all(segments(store, log) for log in small)


@pytest.mark.replaces_code
def test_a_tail_that_grows_while_many_small_ones_are_written_does_not_wait_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "SPILL_BYTES", 200_000)
    store = opened(SimulatedFiles(), OPTIONS)
    busy, *small = (new_log(store) for _ in range(10))
    for log in small:
        put(store, log, b"x")
    order: list[int] = []
    spill = Partition.spill

    def spilled(self: Partition) -> None:
        if not order:
            put(store, busy, LARGE)
        order.append(self.id)
        spill(self)

    monkeypatch.setattr(Partition, "spill", spilled)
    store.checkpoint()
    assert order[:2] == [small[0], busy] and sorted(order[2:]) == small[1:]


@pytest.mark.replaces_code
def test_the_writer_wakes_maintenance_again_when_tails_have_grown_beyond_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "SPILL_BYTES", 10_000)
    store = opened(SimulatedFiles(), OPTIONS)
    logs = [new_log(store) for _ in range(20)]
    maintenance_of = store.maintenance
    for log in logs:
        put(store, log, b"x" * 1000)
    maintenance_of.after_flush()
    assert maintenance_of._wake.is_set()
    maintenance_of.tick(urgent=True)
    maintenance_of._wake.clear()
    put(store, logs[0], b"x")
    maintenance_of.after_flush()
    assert not maintenance_of._wake.is_set(), "nothing new is worth a look at all tails"
    for log in logs:
        put(store, log, b"x" * 1000)
    maintenance_of.after_flush()
    assert maintenance_of._wake.is_set()


def test_a_large_tail_bypasses_the_page_cache_until_a_reader_follows(direct: list[int]) -> None:
    files = SimulatedFiles()
    store = opened(files, OPTIONS)
    log = new_log(store)
    for _ in range(4):
        put(store, log, LARGE)
    store.maintenance.spill()
    assert len(direct) == 1 and direct[0] > 4 * len(LARGE)
    for _ in range(4):
        put(store, log, LARGE)
    assert values(store, log, 4, bytes_max=2 * MIB) == [LARGE] * 4
    store.maintenance.spill()
    assert len(direct) == 1
    assert values(opened(crashed(files)), log, bytes_max=4 * MIB) == [LARGE] * 8


def test_a_small_tail_goes_through_the_page_cache(direct: list[int]) -> None:
    files = SimulatedFiles()
    store = opened(files, OPTIONS)
    log = new_log(store)
    put(store, log, b"small")
    put(store, log, LARGE)
    store.maintenance.spill()
    assert direct == []
    assert values(opened(crashed(files)), log) == [b"small", LARGE]
