"""What the machine itself can do, measured in the same run: no broker can be faster than its disk and its memory."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

_COPY_BYTES = 64 * 1024 * 1024


class SyncProbe:
    """A preallocated file into which one write after the other is synced.

    `filled` writes zeros over the whole file first. A file that is only reserved pays at each sync for turning reserved
    extents into written ones; one that is overwritten does not, and shows how fast the disk itself is.
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
        """Seconds of one pwrite and its fdatasync."""
        began = time.perf_counter()
        os.pwrite(self._fd, self._payload, self._position)
        os.fdatasync(self._fd)
        self._position += len(self._payload)
        return time.perf_counter() - began

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink()


def sync_times(directory: Path, size_bytes: int, count: int, *, filled: bool = False) -> list[float]:
    """Seconds of `count` appends of `size_bytes`, one after the other."""
    with closing(SyncProbe(directory, size_bytes, count, filled=filled)) as probe:
        return [probe.once() for _ in range(count)]


def _write_zeros(fd: int, size_bytes: int) -> None:
    zeros = bytes(1024 * 1024)
    position = 0
    while position < size_bytes:
        position += os.pwrite(fd, zeros[: size_bytes - position], position)


def copy_rate() -> float:
    """Bytes a second that one core copies from memory to memory."""
    source, target = memoryview(bytes(_COPY_BYTES)), memoryview(bytearray(_COPY_BYTES))
    target[:] = source
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began)
    return _COPY_BYTES / min(times)
