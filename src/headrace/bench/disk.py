"""Disk probes: the sync times of the machine itself, the lower bound of a durable acknowledgement."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path


class SyncProbe:
    """Preallocated file for synced writes.

    `filled` writes zeros over the whole file first. In a file that is only reserved, each sync also converts reserved extents into
    written ones.
    """

    def __init__(self, directory: Path, size_bytes: int, count: int, *, filled: bool = False) -> None:
        self._path = directory / f"sync-{os.getpid()}.probe"
        self._payload = os.urandom(size_bytes)
        self._position = 0
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(self._fd, 0, size_bytes * count)
        if filled:
            _write_zeros(self._fd, size_bytes * count)
        os.fsync(self._fd)

    def once(self) -> float:
        """Return the seconds of one pwrite and its fdatasync."""
        began = time.perf_counter()
        os.pwrite(self._fd, self._payload, self._position)
        os.fdatasync(self._fd)
        self._position += len(self._payload)
        return time.perf_counter() - began

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink()


def sync_times(directory: Path, size_bytes: int, count: int, *, filled: bool = False) -> list[float]:
    """Return the seconds of each of `count` appends of `size_bytes`."""
    with closing(SyncProbe(directory, size_bytes, count, filled=filled)) as probe:
        return [probe.once() for _ in range(count)]


def _write_zeros(fd: int, size_bytes: int) -> None:
    zeros = bytes(1024 * 1024)
    position = 0
    while position < size_bytes:
        position += os.pwrite(fd, zeros[: size_bytes - position], position)
