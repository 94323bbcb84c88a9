"""What the machine itself can do, measured in the same run: no broker can be faster than its disk and its memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

_COPY_BYTES = 64 * 1024 * 1024


def sync_times(directory: Path, size_bytes: int, count: int, *, filled: bool = False) -> list[float]:
    """Seconds of `count` appends of `size_bytes`, each one pwrite and one fdatasync into a preallocated file.

    `filled` writes zeros over the whole file first. A file that is only reserved pays at each sync for turning reserved
    extents into written ones; one that is overwritten does not, and shows how fast the disk itself is.
    """
    path = directory / f"sync-{os.getpid()}.probe"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        payload = os.urandom(size_bytes)
        os.posix_fallocate(fd, 0, size_bytes * count)
        if filled:
            _write_zeros(fd, size_bytes * count)
        os.fsync(fd)
        times = []
        for index in range(count):
            began = time.perf_counter()
            os.pwrite(fd, payload, index * size_bytes)
            os.fdatasync(fd)
            times.append(time.perf_counter() - began)
        return times
    finally:
        os.close(fd)
        path.unlink()


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
