"""Reads of large batches: each is read alone, once, and a large read ends where a batch ends."""

from __future__ import annotations

import pytest

from headrace.limits import MIB
from headrace.storage.store import Store
from tests.storage.stores import crashed, new_log, opened, put, values
from tests.storage_faults.simulated import SimulatedFile, SimulatedFiles

VALUES = [b"%05d" % number * 20_000 for number in range(40)]
"""Forty values of 100 kB make four batches of ten."""


def filled(files: SimulatedFiles) -> tuple[Store, int]:
    store = opened(files)
    log = new_log(store)
    put(store, log, *VALUES)
    store.checkpoint()
    return store, log


def test_a_large_read_cuts_no_batch_but_the_first() -> None:
    store, log = filled(SimulatedFiles())
    for _ in range(2):  # the first read does not know yet that the batches are large
        counts = [[len(batch) for batch in store.read(log, offset, bytes_max=5 * MIB // 2)] for offset in (0, 3, 10, 35)]
    assert counts == [[10, 10], [7, 10], [10, 10], [5]]
    assert [len(batch) for batch in store.read(log, 0, bytes_max=MIB // 2)] == [5], "a small read gets what fits"
    for bytes_max in (1, MIB // 2, 5 * MIB // 2, 9 * MIB):
        assert values(store, log, bytes_max=bytes_max) == VALUES
        assert values(store, log, 17, bytes_max=bytes_max) == VALUES[17:]


def test_a_scan_of_large_batches_reads_each_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, log = filled(SimulatedFiles())
    assert values(store, log, bytes_max=5 * MIB // 2) == VALUES
    (segment,) = store.partitions[log].segments
    read_at, sizes = SimulatedFile.read_at, list[int]()

    def counted(file: SimulatedFile, position: int, size_bytes: int) -> bytes:
        sizes.append(size_bytes)
        return read_at(file, position, size_bytes)

    monkeypatch.setattr(SimulatedFile, "read_at", counted)
    assert values(store, log, bytes_max=5 * MIB // 2) == VALUES
    assert sum(sizes) < segment.size + 1_000, "headers may be read twice"


@pytest.mark.parametrize("at", [0, 30, 72, 500_000], ids=["magic", "header", "first byte", "body"])
@pytest.mark.parametrize("bytes_max", [1, 3 * MIB])
def test_a_damaged_large_batch_is_skipped_and_never_returned(at: int, bytes_max: int) -> None:
    files = SimulatedFiles()
    store, log = filled(files)
    (segment,) = store.partitions[log].segments
    batch = store.read(log, 10, bytes_max=9 * MIB)[0]
    content = files.contents()
    place = content[segment.path].index(batch.encoded[:72]) + at
    content[segment.path] = content[segment.path][:place] + bytes([content[segment.path][place] ^ 1]) + content[segment.path][place + 1 :]
    damaged = opened(SimulatedFiles(content, files.directories()))
    for _ in range(2):
        assert values(damaged, log, bytes_max=bytes_max) == VALUES[:10] + VALUES[20:]
    assert values(opened(crashed(files)), log, bytes_max=bytes_max) == VALUES
