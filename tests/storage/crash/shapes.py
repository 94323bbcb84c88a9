"""Workloads of the crash tests, each with another focus."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.storage.partition import LogOptions
from tests.storage.crash.workload import Shape

_SMALL: Final = LogOptions(segment_bytes=3000, joined_bytes_max=2_400)
_TABLE: Final = LogOptions(segment_bytes=800, tombstone_retention_ms=4_000)
_SINGLES: Final = {"singles": 5, "append": 1, "spill": 3, "checkpoint": 1}
_EACH: Final = {"each": 6, "append": 2, "atomic": 1, "spill": 1, "checkpoint": 1}
_WRITES: Final = {"append": 6, "atomic": 3, "append_written": 1, "checkpoint": 1}

SHAPES: Final = (
    Shape("several logs", {"append": 6, "atomic": 3, "append_written": 2, "append_unacked": 1, "checkpoint": 1}),
    Shape("an idle keeper", {"append": 3, "atomic": 1}, logs=2),
    Shape("a busy keeper", {"append": 4, "atomic": 2, "checkpoint": 6}, options=_SMALL),
    Shape("journal rolls", {"append": 6, "atomic": 3, "append_written": 2, "checkpoint": 1}, journal_bytes=16 * 1024),
    Shape("journal recycling", {"append": 6, "append_written": 1, "checkpoint": 4}, journal_bytes=8 * 1024),
    Shape(
        "segment rolls",
        {"append": 6, "atomic": 2, "checkpoint": 4, "reopen": 1},
        options=LogOptions(segment_bytes=600, joined_bytes_max=400),
    ),
    Shape("large frames", {"append": 3, "atomic": 2, "checkpoint": 1}, logs=2, journal_bytes=8 * 1024, sizes=(1, 6000, 20_000)),
    Shape("large appends", {**_WRITES, "spill": 1, "checkpoint": 2}, logs=2, steps=8, large_bytes=600),
    Shape("single records to several logs", {**_EACH, "atomic": 6, "append_written": 1}, counts=(1,), options=_SMALL),
    Shape(
        "large appends after single records",
        {"each": 6, "append": 8, "spill": 1, "checkpoint": 1},
        logs=2,
        steps=12,
        sizes=(1, 300),
        options=_SMALL,
        large_bytes=600,
    ),
    Shape("large appends only", {"append": 4, "atomic": 3, "checkpoint": 1}, logs=2, steps=8, options=_SMALL, large_bytes=1),
    Shape("large appends and dying processes", {**_SINGLES, **_WRITES, "die": 3}, logs=2, steps=8, options=_SMALL, large_bytes=600),
    Shape(
        "large appends, segment rolls and retention",
        {"append": 5, "atomic": 2, "checkpoint": 2, "maintain": 2, "reopen": 1},
        logs=2,
        options=LogOptions(segment_bytes=1000, retention_bytes=3_000, joined_bytes_max=400),
        large_bytes=200,
    ),
    Shape("large appends and deletion", {**_WRITES, "delete": 3, "die": 1}, logs=2, steps=8, options=_SMALL, large_bytes=200),
    Shape(
        "large appends, compressed and encrypted",
        {**_WRITES, "die": 1},
        logs=2,
        steps=8,
        options=replace(_SMALL, compress=True),
        encrypted=True,
        large_bytes=600,
    ),
    Shape("large appends to tables", {**_WRITES, "checkpoint": 3, "maintain": 3}, steps=8, options=_TABLE, compacted=2, large_bytes=100),
    Shape("written only", {"append_written": 6, "append_unacked": 3, "checkpoint": 2}, journal_bytes=16 * 1024),
    Shape(
        "retention by age",
        {**_WRITES, "checkpoint": 3, "maintain": 3},
        options=LogOptions(segment_bytes=1000, retention_ms=5_000),
        steps=20,
    ),
    Shape("retention by bytes", {**_WRITES, "checkpoint": 3, "maintain": 3}, options=LogOptions(segment_bytes=1000, retention_bytes=3_000)),
    Shape("compaction", {**_WRITES, "checkpoint": 3, "maintain": 3}, options=_TABLE, compacted=2),
    Shape(
        "tombstones",
        {"append": 5, "checkpoint": 1, "maintain": 3},
        logs=1,
        options=LogOptions(segment_bytes=3000, tombstone_retention_ms=1),
        compacted=1,
        sizes=(20, 100),
        tombstones=0.5,
    ),
    Shape("single records", _SINGLES, logs=2, steps=8, counts=(1,), sizes=(0, 20, 100)),
    Shape("single records and dying processes", {**_SINGLES, "die": 2}, logs=1, steps=12, options=_SMALL, counts=(1,), sizes=(20, 100)),
    Shape("single records of a table", {**_SINGLES, "maintain": 2}, logs=2, steps=8, options=_TABLE, compacted=1, counts=(1,), sizes=(20,)),
    Shape(
        "single records, compressed and encrypted",
        {**_SINGLES, "die": 1},
        logs=1,
        steps=8,
        options=replace(_SMALL, compress=True),
        encrypted=True,
        counts=(1, 2),
        sizes=(20, 100),
    ),
    Shape("independent records", {**_EACH, "append_written": 1, "reopen": 1}, steps=8, options=_SMALL, sizes=(0, 20, 100)),
    Shape("independent records and dying processes", {**_EACH, "die": 2}, steps=8, journal_bytes=8 * 1024, sizes=(20, 700)),
    Shape(
        "independent records, compressed and encrypted",
        {**_EACH, "die": 1},
        steps=8,
        options=replace(_SMALL, compress=True),
        encrypted=True,
        sizes=(20, 100),
    ),
    Shape("deletion", {**_WRITES, "delete": 3, "checkpoint": 2, "reopen": 1}, options=_SMALL),
    Shape("clean restarts", {"append": 5, "atomic": 2, "reopen": 3, "checkpoint": 1}, options=_SMALL, journal_bytes=16 * 1024),
    Shape("dying processes", {"append": 4, "append_written": 3, "atomic": 1, "die": 3, "checkpoint": 2}, options=_SMALL),
    Shape("compressed", _WRITES, options=replace(_SMALL, compress=True)),
    Shape("encrypted", {**_WRITES, "reopen": 1}, encrypted=True),
    Shape(
        "compressed and encrypted", {**_WRITES, "checkpoint": 3}, options=replace(_SMALL, segment_bytes=2000, compress=True), encrypted=True
    ),
)

SHORT: Final = Shape(
    "short",
    dict.fromkeys(("append", "append_written", "atomic", "checkpoint", "maintain", "delete", "reopen", "die"), 1),
    logs=2,
    options=LogOptions(segment_bytes=150, retention_bytes=200, tombstone_retention_ms=1),
    compacted=1,
    journal_bytes=8 * 1024,
    sizes=(1, 100),
)

DAMAGED: Final = (
    Shape("plain", {}, logs=2, options=LogOptions(segment_bytes=700), journal_bytes=64 * 1024, sizes=(20, 100, 300)),
    Shape("compressed", {}, logs=2, options=LogOptions(segment_bytes=700, compress=True), journal_bytes=64 * 1024, sizes=(20, 100, 300)),
    Shape("encrypted", {}, logs=2, options=LogOptions(segment_bytes=700), journal_bytes=64 * 1024, encrypted=True, sizes=(20, 100, 300)),
)
"""Workloads whose files are truncated and flipped: small enough to cover every byte."""
