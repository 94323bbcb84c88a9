"""File access of the log.

All disk access of `storage/` goes through `Files` and `File`; no other module calls `os` or `open`. Paths are relative to the data
directory, with `/` between parts. The tests have an in-memory implementation (`tests/storage_faults/`) that records every operation,
injects faults and enumerates the images that a power cut may leave.

The log relies on these rules, and the in-memory implementation follows them:

- `write_at` and `write_direct` promise nothing after a power cut; `sync` makes a file's earlier writes, truncations and size durable.
- A created, renamed or removed name is durable only after `sync_dir` of its directory.
- `allocate` reserves space, so that later writes inside it cannot fail for lack of space. The reserved bytes read as zeros.
- An `OSError` with `ENOSPC` or `EDQUOT` means "disk full". `EMFILE`, `ENFILE`, `EAGAIN` or `ENOMEM` means that descriptors, threads or
  memory have run out. Both are retriable, unless the `sync` of a file raised them: the content of that file is then unknown. Any other
  `OSError` on a write, and any on a `sync`, fences the log.
- A failed `make_dir` leaves no directory behind: an existing directory has a durable name.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from headrace.errors import HeadraceError
from headrace.limits import KIB, LOG_DESCRIPTORS_RESERVED
from headrace.storage import direct

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
EXHAUSTED_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Descriptors, threads or memory have run out. The disk is unchanged, so the same step may succeed later."""
_NO_DESCRIPTOR_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_NO_DIRECTORY_LOCK_ERRNOS: Final = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of `flock` on a directory if the file system (NFS) locks only files that are open for writing."""
_SYNC_THREADS: Final = 8
_FILLED_BYTES: Final = 512 * KIB
"""Zeros that are written after a small write to a reserved file."""
_FILLED_AFTER_BYTES_MAX: Final = 64 * KIB
"""A larger write is worth a sync of its own."""
_ZEROS: Final = bytes(_FILLED_BYTES)
_SYNC_FILE_RANGE_WRITE: Final = 2
_T = TypeVar("_T")


def _found_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return Linux' sync_file_range; None where the C library does not have it."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    found: Callable[[int, int, int, int], int] = function
    return found


_sync_file_range: Final = _found_sync_file_range()


def is_exhausted(failure: BaseException) -> bool:
    """Return whether a step failed because descriptors, threads or memory ran out, and may be retried."""
    return isinstance(failure, MemoryError) or (isinstance(failure, OSError) and failure.errno in EXHAUSTED_ERRNOS)


class NotCached(Exception):
    """The bytes are not in the page cache and must be read off the event loop."""


class File(Protocol):
    """One open file."""

    def read_at(self, position: int, size_bytes: int) -> bytes:
        """Read up to `size_bytes` bytes; fewer only at the end of the file."""

    def read_cached(self, position: int, size_bytes: int) -> memoryview:
        """Read from the page cache, or raise `NotCached`. The result is valid until this thread's next call for any file."""

    def write_at(self, position: int, buffers: Sequence[SizedBuffer]) -> None:
        """Write all buffers from `position` on, and continue after short writes."""

    def write_direct(self, position: int, buffers: Sequence[SizedBuffer]) -> bool:
        """Write all buffers from `position` on past the page cache. Returns False, with nothing written, where that is not possible. As
        after `write_at`, only `sync` makes them durable."""

    def start_sync(self, position: int, size_bytes: int) -> None:
        """Let the disk begin with these bytes, so that a later `sync` takes less time. Guarantees nothing and reports no failure."""

    def sync(self) -> None:
        """Call fdatasync. Must not be called again on a file after a failure."""

    def truncate(self, size_bytes: int) -> None: ...

    def allocate(self, size_bytes: int) -> None:
        """Reserve space for the first `size_bytes` bytes and make the file that long."""

    def size(self) -> int: ...

    def close(self) -> None: ...


class Files(Protocol):
    """One data directory."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing. `create` creates a new file and fails if it exists."""

    def open_readonly(self, path: str) -> File: ...

    def absolute(self, path: str) -> str:
        """Return the path for other processes of this machine; empty if they cannot open it."""

    def list(self, directory: str) -> list[str]:
        """Return the sorted names in the directory; none if it is absent."""

    def make_dir(self, *directories: str) -> None:
        """Create the directories and their parents if absent, and make their names durable, with one sync for all of a parent."""

    def remove_dir(self, directory: str) -> None:
        """Remove an empty directory if it exists."""

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""

    def sync_dir(self, *directories: str) -> None:
        """Make the names in the directories durable, as `sync_many` does."""

    def sync_many(self, files: Sequence[File]) -> None:
        """Sync all files, in parallel where that is faster. Raises the first failure after trying all."""

    def free_bytes(self) -> int: ...

    def reserve(self) -> bool:
        """Hold spare descriptors that the opens of the log use when the process has no other. Returns False if not enough are left."""

    def lock(self) -> None:
        """Lock the data directory for this process. Raises `DirectoryLocked`."""

    def close(self) -> None:
        """Release the lock and the spare descriptors."""


class DirectoryLocked(HeadraceError):
    """Another process has locked the data directory."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"in use by process {holder}" if holder else "in use by another process")
        self.holder = holder


_buffers = threading.local()
_BUFFER_BYTES_KEPT: Final = 8 * 1024 * 1024
"""Size of the largest reads of the protocols and of the Flight endpoint, with batch headers."""


def _buffer(size_bytes: int) -> bytearray:
    """Return this thread's read buffer, of at least this size."""
    kept: bytearray | None = getattr(_buffers, "kept", None)
    if kept is not None and len(kept) >= size_bytes:
        return kept
    fresh = bytearray(max(size_bytes, 256 * 1024))
    if len(fresh) <= _BUFFER_BYTES_KEPT:
        _buffers.kept = fresh
    return fresh


class DiskFile:
    """File on disk. All calls release the GIL during system calls."""

    __slots__ = ("_direct_writes", "_fd", "_reserved_bytes", "_written_bytes")
    _IOV_MAX: Final = 1024

    def __init__(self, fd: int, *, direct_writes: bool = True) -> None:
        self._fd = fd
        self._direct_writes = direct_writes
        self._reserved_bytes = self._written_bytes = 0
        """Of a file that `allocate` has reserved: its size, and how much of it from the front was written."""

    def read_at(self, position: int, size_bytes: int) -> bytes:
        data = os.pread(self._fd, size_bytes, position)
        while 0 < len(data) < size_bytes:
            more = os.pread(self._fd, size_bytes - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    def read_cached(self, position: int, size_bytes: int) -> memoryview:
        # Reusing a buffer avoids the page faults of a new one, which cost more than the copy.
        view = memoryview(_buffer(size_bytes))[:size_bytes]
        try:
            got = os.preadv(self._fd, [view], position, os.RWF_NOWAIT)
        except BlockingIOError:
            raise NotCached from None
        except OSError as failure:
            if failure.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # a filesystem without RWF_NOWAIT
                raise NotCached from None
            raise
        if got < size_bytes and position + got < self.size():
            raise NotCached
        return view[:got]

    def write_at(self, position: int, buffers: Sequence[SizedBuffer]) -> None:
        if len(buffers) == 1:
            written = os.pwritev(self._fd, buffers, position)  # as below: the fault tests know this call
            if written == len(buffers[0]):
                if self._written_bytes < self._reserved_bytes:
                    self._fill(position + written, written)
                return
            position, buffers = position + written, [memoryview(buffers[0])[written:]]
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while views:
            written = os.pwritev(self._fd, views[: self._IOV_MAX], position)
            position += written
            while written and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]
        self._written_bytes = max(self._written_bytes, position)

    def _fill(self, end: int, size_bytes: int) -> None:
        """Write zeros after a small write that ends at `end`, unless something is written there.

        The file system records which blocks of a reserved file were written. A sync after the first write to a block waits for that
        record too, which takes longer than the block. One sync now pays for many small writes.
        """
        if end <= self._written_bytes:
            return
        fill_bytes = max(0, min(_FILLED_BYTES, self._reserved_bytes - end)) if size_bytes < _FILLED_AFTER_BYTES_MAX else 0
        self._written_bytes = end + fill_bytes
        if fill_bytes:
            with contextlib.suppress(OSError):  # the write itself has succeeded
                os.pwrite(self._fd, memoryview(_ZEROS)[:fill_bytes], end)

    def write_direct(self, position: int, buffers: Sequence[SizedBuffer]) -> bool:
        return self._direct_writes and direct.write(self._fd, position, buffers, self.write_at)

    def start_sync(self, position: int, size_bytes: int) -> None:
        # This flag alone neither waits nor fetches the error of a write: the sync reports it.
        if _sync_file_range is not None:
            _sync_file_range(self._fd, position, size_bytes, _SYNC_FILE_RANGE_WRITE)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._fd, size_bytes)
        self._reserved_bytes = 0

    def allocate(self, size_bytes: int) -> None:
        is_empty = self.size() == 0
        os.posix_fallocate(self._fd, 0, size_bytes)
        if is_empty:
            self._reserved_bytes, self._written_bytes = size_bytes, 0

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # Readers on other threads may still use a file that its segment has released. The last reference closes it.
        self.close()


def _all_done(syncs: Sequence[Callable[[], None]]) -> None:
    """Call all in several threads. Raises the first failure after trying all."""
    waiting, failures = deque(syncs), deque[Exception]()
    done = threading.Semaphore(0)

    def work() -> None:
        while waiting:
            try:
                sync = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                sync()
            except OSError as failure:  # failed syncs are reported first
                failures.appendleft(failure)
            except Exception as defect:
                failures.append(defect)
            finally:
                done.release()

    with contextlib.suppress(RuntimeError):  # out of threads: the existing ones do the work
        for _ in range(min(_SYNC_THREADS, len(syncs) // 2) - 1):
            # `Thread.start` waits forever for a thread that lacks the memory to begin. This waits for syncs, not for threads.
            _thread.start_new_thread(work, ())
    work()
    for _ in syncs:
        done.acquire()
    if failures:
        raise failures[0]


class DiskFiles:
    """Files below one directory on disk. Files have mode 0600, directories 0700. Symbolic links are not followed.

    Peers can use up the descriptors of the process. `reserve` therefore keeps spare descriptors open; an open that finds no descriptor
    closes spare ones until it succeeds. Without `direct_writes`, `write_direct` writes nothing.
    """

    def __init__(self, root: Path | str, *, direct_writes: bool = True) -> None:
        self.root = Path(root)
        self._direct_writes = direct_writes
        self._lock_fds: list[int] = []
        self._spare_fds: list[int] = []
        self._sparing = threading.Lock()

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path)

    def _open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return self._given_descriptors(lambda: os.open(path, flags | os.O_CLOEXEC, mode))

    def _given_descriptors(self, call: Callable[[], _T]) -> _T:
        """Make a call that needs a descriptor. Closes spare descriptors if there is no other."""
        while True:
            try:
                return call()
            except OSError as failure:
                if failure.errno not in _NO_DESCRIPTOR_ERRNOS or not self._spend():
                    raise

    def _spend(self) -> bool:
        """Close a spare descriptor. Another thread may take it first, so the caller retries in a loop."""
        with self._sparing:
            if not self._spare_fds:
                return False
            os.close(self._spare_fds.pop())
            return True

    def reserve(self) -> bool:
        with self._sparing, contextlib.suppress(OSError):
            while self._lock_fds and len(self._spare_fds) < LOG_DESCRIPTORS_RESERVED:
                # An open, not a dup, because it also counts against the system-wide limit of open files.
                self._spare_fds.append(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return len(self._spare_fds) >= LOG_DESCRIPTORS_RESERVED

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        return DiskFile(self._open(self._path(path), flags), direct_writes=self._direct_writes)

    def open_readonly(self, path: str) -> DiskFile:
        return DiskFile(self._open(self._path(path), os.O_RDONLY | os.O_NOFOLLOW))

    def absolute(self, path: str) -> str:
        return os.path.abspath(self._path(path))

    def list(self, directory: str) -> list[str]:
        try:
            return sorted(self._given_descriptors(lambda: os.listdir(self._path(directory))))
        except FileNotFoundError:
            return []

    def make_dir(self, *directories: str) -> None:
        self._make_dir([os.path.abspath(self._path(directory)) for directory in directories])

    def _make_dir(self, paths: Sequence[str]) -> None:
        missing = [path for path in dict.fromkeys(paths) if not os.path.exists(path)]
        if not missing:
            return
        above = list(dict.fromkeys(map(os.path.dirname, missing)))
        self._make_dir(above)
        made: list[str] = []
        try:
            for path in missing:
                with contextlib.suppress(FileExistsError):  # another thread may make it too
                    os.mkdir(path, 0o700)
                    made.append(path)
            for path in above:
                self._sync_dir(path)
        except OSError:
            # A later call would take the directories for durable.
            for path in made:
                os.rmdir(path)
            raise

    def remove_dir(self, directory: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self._path(directory))

    def rename(self, source: str, target: str) -> None:
        os.rename(self._path(source), self._path(target))

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path(path))

    def sync_dir(self, *directories: str) -> None:
        _all_done([partial(self._sync_dir, self._path(directory)) for directory in directories])

    def _sync_dir(self, path: str) -> None:
        fd = self._open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_many(self, files: Sequence[File]) -> None:
        _all_done([file.sync for file in files])

    def free_bytes(self) -> int:
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def lock(self) -> None:
        """Lock the directory itself, which nothing can remove while it is in use, and the file LOCK, which names the holder."""
        self.make_dir("")
        try:
            self._lock_fds.append(self._open(str(self.root), os.O_RDONLY | os.O_DIRECTORY))
            try:
                fcntl.flock(self._lock_fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DirectoryLocked(self._holder()) from None
            except OSError as failure:
                if failure.errno not in _NO_DIRECTORY_LOCK_ERRNOS:
                    raise
            self._lock_fds.append(self._open(self._path("LOCK"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
            try:
                fcntl.flock(self._lock_fds[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DirectoryLocked(self._holder()) from None
        except BaseException:
            self.close()
            raise
        with contextlib.suppress(OSError):  # the lock works without the process id on a full disk
            os.ftruncate(self._lock_fds[1], 0)
            os.pwrite(self._lock_fds[1], f"{os.getpid()}\n".encode(), 0)
        self.reserve()

    def _holder(self) -> str:
        try:
            return Path(self._path("LOCK")).read_text("ascii", "replace")[:32].strip()
        except OSError:
            return ""

    def close(self) -> None:
        with self._sparing:
            fds, self._lock_fds, self._spare_fds = [*self._spare_fds, *self._lock_fds], [], []
        for fd in fds:
            os.close(fd)
