"""Data directories to be damaged, and the verification of the result.

Damage may affect only what it hits. Units are what checksums protect: a batch in a segment, a frame in a journal. The map from bytes to
units is built here by searching for complete ones, without using recovery.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from headrace.records import Record
from headrace.storage import journal, segment
from headrace.storage.batch import StoredBatch
from headrace.storage.check import check
from headrace.storage.store import Store
from tests.storage.crash.history import Anomaly, Content, read_store
from tests.storage.crash.shapes import DAMAGED
from tests.storage.crash.workload import Shape, Workload
from tests.storage_faults.power_cut import barest
from tests.storage_faults.simulated import SimulatedFiles

WINDOW_BYTES = 64 * 1024
"""Only the end of a file is damaged, because earlier parts are similar."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A range of a file that is valid only as a whole."""

    start: int
    stop: int
    records: frozenset[tuple[int, int]]
    """(log, offset) of its records."""


@dataclass(frozen=True, slots=True)
class Original:
    """A data directory before the damage."""

    shape: Shape
    contents: Mapping[str, bytes]
    directories: frozenset[str]
    holds: Content

    def paths(self, kind: str) -> list[str]:
        suffix = {"journal": journal.SUFFIX, "segment": segment.SUFFIX, "index": segment.INDEX_SUFFIX}.get(kind, kind)
        return [path for path in sorted(self.contents) if path.endswith(suffix)]

    def damaged(self, path: str, content: bytes) -> SimulatedFiles:
        return SimulatedFiles({**self.contents, path: content}, self.directories)


@cache
def original(name: str, *, closed: bool) -> Original:
    """Create a store with closed segments, checkpoints and a journal that continues after the last of them. `closed` closes it properly."""
    shape = next(shape for shape in DAMAGED if shape.name == name)
    workload = Workload(shape, random.Random(name))
    workload.take(["append", "atomic", "append", "checkpoint", "atomic", "append", "checkpoint", "append", "append", "atomic", "append"])
    holds = read_store(workload.store)
    if closed:
        workload.store.close()
    files = workload.files if closed else barest(workload.files)
    return Original(shape, files.contents(), frozenset(files.directories()), holds)


def used(path: str, content: bytes) -> int:
    """Return the start of the zeros that were never written."""
    return min(journal.aligned(len(content.rstrip(b"\0"))), len(content)) if path.endswith(journal.SUFFIX) else len(content)


def units(path: str, content: bytes) -> list[Unit]:
    if path.endswith(segment.SUFFIX):
        return [Unit(start, stop, _offsets([batch])) for start, stop, batch in _batches(content, segment.HEADER_BYTES, len(content))]
    if not path.endswith(journal.SUFFIX):
        return []
    found: list[Unit] = []
    for start in range(0, len(content), journal.ALIGN):
        if content.startswith(journal.MAGIC, start):
            size = int.from_bytes(content[start + 8 : start + 12], "little")
            batches = [batch for _, _, batch in _batches(content, start + journal.HEADER_BYTES, start + size)]
            found.append(Unit(start, start + size, _offsets(batches)))
    return found


def _batches(content: bytes, position: int, stop: int) -> Iterator[tuple[int, int, StoredBatch]]:
    while position < stop:
        batch = StoredBatch.parse(content, position)
        yield position, position + batch.header.size, batch
        position += batch.header.size


def _offsets(batches: list[StoredBatch]) -> frozenset[tuple[int, int]]:
    return frozenset(
        (batch.header.log, offset) for batch in batches for offset in range(batch.header.base_offset, batch.header.next_offset)
    )


def inspect(files: SimulatedFiles, before: Original, risk: frozenset[tuple[int, int]], *, silent: bool, thorough: bool) -> None:
    """Open the damaged directory. Raise `Anomaly` if it returns unknown records, loses more than `risk`, or loses records without
    reporting it (unless `silent`: a cleanly truncated end cannot be detected)."""
    untouched = files.rewound() if thorough else files
    store = Store.open(files, before.shape.store_options(), threads=False)
    found = read_store(store)
    missing = _compare(before.holds, found, risk)
    if missing and not silent and not store.report.damages:
        raise Anomaly(f"{missing} are gone, and nothing was said")
    if not thorough:
        return
    if missing and not silent and check(untouched, before.shape.store_options().key).clean:
        raise Anomaly(f"{missing} are gone, and the checker finds nothing")
    again = read_store(Store.open(barest(files), before.shape.store_options(), threads=False))
    if again != found:
        raise Anomaly("a second recovery finds something else")


def _compare(before: Content, after: Content, risk: frozenset[tuple[int, int]]) -> list[tuple[int, int]]:
    missing: list[tuple[int, int]] = []
    for log, (bounds, records) in before.items():
        now, kept = after.get(log, (bounds, []))
        if kept != records:
            missing += _lost(log, records, kept)
        ends = {bounds.end, *(offset for other, offset in risk if other == log)}
        if now.end not in ends:
            raise Anomaly(f"log {log} ended at {bounds.end} and now at {now.end}")
    if not risk.issuperset(missing):
        raise Anomaly(f"log and offset {min(set(missing) - risk)} are lost, and were not hit")
    if after.keys() - before.keys():
        raise Anomaly(f"log {min(after.keys() - before.keys())} came from nowhere")
    return missing


def _lost(log: int, records: list[Record], kept: list[Record]) -> list[tuple[int, int]]:
    wanted = {record.offset: record for record in records}
    for record in kept:
        if wanted.pop(record.offset, None) != record:
            raise Anomaly(f"log {log}: {record} was never put there")
    return [(log, offset) for offset in wanted]
