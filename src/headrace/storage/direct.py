"""Writes that bypass the page cache.

    position      block                          block        end
    +-------------+------------------------------+------------+
    | page cache  | directly to the disk         | page cache |
    +-------------+------------------------------+------------+

The kernel takes whole blocks from aligned memory only, so the bytes are copied to a buffer first. That costs less than the pages: the
kernel has to find, fill, map and write back each page, and a virtual machine may have to get it from its host. A reader that follows
gets the bytes from the disk once, into the page cache.

The kernel keeps both ways coherent: a direct write removes its pages from the cache. No page belongs to both.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from headrace.limits import KIB, MIB

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

BLOCK_BYTES: Final = max(4 * KIB, mmap.PAGESIZE)
"""Alignment of position, size and memory. Disks need at most 4 KiB; no page may be written in both ways."""
DIRECT_BYTES_MIN: Final = 64 * KIB
"""A smaller write goes through the page cache."""
_BUFFER_BYTES: Final = 4 * MIB
"""With half of it, the disk waits more often for the next copy: an append of 520 MB through Flight takes 4 % longer."""
_HUGE_PAGE_BYTES: Final = 2 * MIB
_COPIED_BYTES: Final = 256 * KIB
"""Bytes copied at once. Another thread may take the interpreter between two copies."""
_UNSUPPORTED_ERRNOS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)

WriteAt = Callable[[int, "Sequence[SizedBuffer]"], None]

_buffers = threading.local()


def _buffer() -> memoryview:
    """Return this thread's aligned buffer."""
    kept: memoryview | None = getattr(_buffers, "kept", None)
    if kept is None:
        kept = _buffers.kept = _huge_pages(_BUFFER_BYTES)
    return kept


def _huge_pages(size_bytes: int) -> memoryview:
    """Return memory in huge pages, where the kernel has them. A disk request has a limited number of segments, so with small pages it is
    small too."""
    mapped = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # small pages do as well
        mapped.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE_PAGE_BYTES
    return memoryview(mapped)[start : start + size_bytes]


class Source:
    """Bytes of several buffers, taken from the front."""

    def __init__(self, buffers: Iterable[SizedBuffer]) -> None:
        self._views = deque(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))

    def take(self, size_bytes: int) -> list[memoryview]:
        """Return the next bytes, without a copy."""
        taken: list[memoryview] = []
        while size_bytes and self._views:
            view = self._views.popleft()
            if len(view) > size_bytes:
                self._views.appendleft(view[size_bytes:])
                view = view[:size_bytes]
            taken.append(view)
            size_bytes -= len(view)
        return taken

    def copy(self, target: memoryview) -> None:
        """Copy the next bytes, as many as the target has."""
        position = 0
        for view in self.take(len(target)):
            for start in range(0, len(view), _COPIED_BYTES):
                part = view[start : start + _COPIED_BYTES]
                target[position : position + len(part)] = part
                position += len(part)


def write(fd: int, position: int, buffers: Sequence[SizedBuffer], write_at: WriteAt) -> bool:
    """Write all buffers from `position` on; `write_at` writes the parts of blocks. Returns False, with nothing written, if the file cannot
    be written directly or the bytes are too few. Raises `OSError`."""
    size_bytes = sum(map(len, buffers))
    head_bytes = -position % BLOCK_BYTES
    direct_bytes = (size_bytes - head_bytes) // BLOCK_BYTES * BLOCK_BYTES
    if direct_bytes < DIRECT_BYTES_MIN or (direct_fd := _opened(fd)) is None:
        return False
    try:
        source = Source(buffers)
        if head_bytes:
            write_at(position, source.take(head_bytes))
        start, end = position + head_bytes, position + head_bytes + direct_bytes
        is_direct = True
        while start < end:
            view = _buffer()[: min(_BUFFER_BYTES, end - start)]
            source.copy(view)
            written = _written(direct_fd, start, view) if is_direct else 0
            if written < len(view):  # the kernel refuses direct writes, or the disk is full: `write_at` raises the error
                write_at(start + written, [view[written:]])
                is_direct = False
            start += len(view)
        if end < position + size_bytes:
            write_at(end, source.take(position + size_bytes - end))
        return True
    finally:
        os.close(direct_fd)


def _opened(fd: int) -> int | None:
    """Open the same file for direct writes; None where that is not possible now."""
    if not _O_DIRECT:
        return None
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC | _O_DIRECT)
    except OSError:
        return None


def _written(fd: int, position: int, view: memoryview) -> int:
    """Return how many bytes were written; 0 if the kernel refuses direct writes."""
    try:
        return os.pwritev(fd, [view], position)
    except OSError as failure:
        if failure.errno in _UNSUPPORTED_ERRNOS:
            return 0
        raise
