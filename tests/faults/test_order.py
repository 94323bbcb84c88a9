"""Tests of the sync-order check: each way to write a manifest too early has a trace that it must reject."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.trace import read_trace
from tests.faults.order import UnsyncedSegment, check_sync_order

WRITE = 'pwritev2(9</d/logs/1/0.seg>, [{iov_base=""..., iov_len=40}], 1, 0, 0) = 40'
OTHER = 'pwritev2(10</d/logs/2/0.seg>, [{iov_base=""..., iov_len=40}], 1, 0, 0) = 40'
SYNC = "fdatasync(9</d/logs/1/0.seg>) = 0"
FAILED = "fdatasync(9</d/logs/1/0.seg>) = -1 EIO (Input/output error) (INJECTED)"
MANIFEST = 'rename("/d/MANIFEST.tmp", "/d/MANIFEST") = 0'
JOURNAL = 'pwritev2(8</d/journal/1.hrj>, [{iov_base=""..., iov_len=40}], 1, 0, 0) = 40'
REMOVED = 'unlink("/d/logs/1/0.seg") = 0'
TEMPORARY = 'pwritev2(8</d/MANIFEST.tmp>, [{iov_base=""..., iov_len=40}], 1, 0, 0) = 40'


def judge(directory: Path, *lines: str) -> int:
    trace = directory / "trace"
    trace.write_text("".join(f"7  {line}\n" for line in lines))
    return check_sync_order(read_trace(trace))


@pytest.mark.parametrize(
    "lines",
    [
        (WRITE, SYNC, MANIFEST),
        (WRITE, FAILED, SYNC, MANIFEST),
        (JOURNAL, MANIFEST),
        (WRITE, REMOVED, MANIFEST),
        (WRITE, SYNC, MANIFEST, WRITE),
    ],
)
def test_a_manifest_after_every_sync_passes(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert judge(tmp_path, *lines) == 1


@pytest.mark.parametrize(
    "lines",
    [
        (WRITE, MANIFEST),
        (WRITE, FAILED, MANIFEST),
        (WRITE, SYNC, WRITE, MANIFEST),
        (WRITE, OTHER, SYNC, MANIFEST),
        (TEMPORARY, MANIFEST),
    ],
)
def test_a_manifest_before_a_sync_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(UnsyncedSegment):
        judge(tmp_path, *lines)
