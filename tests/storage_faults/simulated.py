"""In-memory implementation of `Files` that records every operation and injects faults.

A test runs the log on `SimulatedFiles` and calls `mark` when an acknowledgement is sent. `tests.storage_faults.power_cut` then lists
the disks that a power cut at any moment could have left.

A file is an inode with a content; a path is a name that points to one. They become durable separately: `sync` covers the content,
`sync_dir` the names. Tests on this disk detect code that omits one of them.
"""

from __future__ import annotations

import builtins
import errno
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.storage.files import DirectoryLocked, File, NotCached

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

ROOM_BYTES: Final = 1 << 40
"""Default size of the simulated disk."""


class Operation(NamedTuple):
    """One operation of the history. `inode` is 0 if none is involved."""

    kind: str
    """create, write, truncate, allocate, sync, sync_failed, rename, remove, make_dir, remove_dir, sync_dir, sync_dir_failed, mark"""
    path: str = ""
    inode: int = 0
    position: int = 0
    """Start of a write; new size for truncate and allocate."""
    data: bytes = b""
    target: str = ""
    """New name of a rename."""
    value: object = None
    """Content of a mark."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Failure of the `nth` call (from 1) of `kind` on a path that matches `path`.

    `kind` is the name of the method called (`write_at`, `sync`, `sync_dir`, `open`, …), `create` for an `open` that creates, or `*`.
    `kept_bytes` of a failing write still reach the page cache. A `silent` fault raises nothing: a write keeps `kept_bytes` and
    reports success, a sync makes nothing durable, a read returns only `kept_bytes`.
    """

    kind: str
    nth: int = 1
    path: str = "*"
    error: int = errno.EIO
    persistent: bool = False
    """Whether every later matching call fails too, as on a dead or a full disk."""
    kept_bytes: int = 0
    silent: bool = False


class Fired(NamedTuple):
    """A call that a fault hit."""

    kind: str
    path: str
    site: str
    """module:line of the caller"""
    after: int
    """Number of operations before it."""


class _Inode:
    """File content, shared copy-on-write between inodes."""

    __slots__ = ("content", "number")

    def __init__(self, number: int, content: bytes | bytearray = b"") -> None:
        self.number = number
        self.content = content

    def own(self) -> bytearray:
        if not isinstance(self.content, bytearray):
            self.content = bytearray(self.content)
        return self.content

    def read(self, position: int, size_bytes: int) -> bytes:
        return bytes(self.content[position : position + size_bytes])


def parent(path: str) -> str:
    """Return the directory of a path; the data directory itself is the empty string."""
    return path.rpartition("/")[0]


class SimulatedFile:
    """One open file of `SimulatedFiles`."""

    __slots__ = ("_closed", "_files", "_inode", "_path", "_readonly")

    def __init__(self, files: SimulatedFiles, path: str, inode: _Inode, *, readonly: bool) -> None:
        self._files, self._path, self._inode, self._readonly = files, path, inode, readonly
        self._closed = False

    def _usable(self, *, writing: bool = False) -> None:
        if self._closed or (writing and self._readonly):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)

    def read_cached(self, position: int, size_bytes: int) -> memoryview:
        self._usable()
        if self._files.cold:
            raise NotCached
        return memoryview(self.read_at(position, size_bytes))

    def read_at(self, position: int, size_bytes: int) -> bytes:
        self._usable()
        try:
            fault = self._files.call("read_at", self._path)
        except _Failing as failing:
            raise failing.error() from None
        with self._files.mutex:
            found = self._inode.read(position, size_bytes)
        return found if fault is None else found[: fault.kept_bytes]

    def write_at(self, position: int, buffers: Sequence[SizedBuffer]) -> None:
        self._usable(writing=True)
        data = b"".join(buffers)
        try:
            fault = self._files.call("write_at", self._path)
        except _Failing as failing:
            self._files.write(self._path, self._inode, position, data[: failing.fault.kept_bytes])
            raise failing.error() from None
        self._files.write(self._path, self._inode, position, data if fault is None else data[: fault.kept_bytes])

    def write_direct(self, position: int, buffers: Sequence[SizedBuffer]) -> bool:
        """Write like `write_at`: in both ways, any part may be on the disk before the sync."""
        self.write_at(position, buffers)
        return True

    def start_sync(self, position: int, size_bytes: int) -> None:
        """Do nothing: any unsynced write may reach the disk at any time, with or without this."""
        self._usable()

    def sync(self) -> None:
        self._usable()
        try:
            fault = self._files.call("sync", self._path)
        except _Failing as failing:
            self._files.record(Operation("sync_failed", self._path, self._inode.number))
            raise failing.error() from None
        if fault is None:
            self._files.record(Operation("sync", self._path, self._inode.number))

    def truncate(self, size_bytes: int) -> None:
        self._usable(writing=True)
        if self._files.attempt("truncate", self._path):
            self._files.resize("truncate", self._path, self._inode, size_bytes)

    def allocate(self, size_bytes: int) -> None:
        self._usable(writing=True)
        if self._files.attempt("allocate", self._path):
            self._files.resize("allocate", self._path, self._inode, size_bytes)

    def size(self) -> int:
        self._usable()
        return len(self._inode.content)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._files.handles -= 1


class _Failing(Exception):
    """A fault to be raised, after the caller has applied its partial effect."""

    def __init__(self, fault: Fault, path: str) -> None:
        super().__init__(fault)
        self.fault, self._path = fault, path

    def error(self) -> OSError:
        return OSError(self.fault.error, os.strerror(self.fault.error), self._path)


class SimulatedFiles:
    """Data directory in memory. `contents` and `directories` are its durable initial state."""

    def __init__(self, contents: Mapping[str, bytes] | None = None, directories: Iterable[str] = ()) -> None:
        self.operations: list[Operation] = []
        self.calls: Counter[str] = Counter()
        """Number of calls by method, which `Fault.nth` refers to."""
        self.sites: Counter[tuple[str, str]] = Counter()
        """Number of calls by (method, module:line), while `trace_sites` is on."""
        self.trace_sites = False
        self.fired: builtins.list[Fired] = []
        """Calls that a fault hit."""
        self.cold = False
        """Whether the page cache is empty: `cached_only` reads then raise `NotCached`."""
        self.room_bytes = ROOM_BYTES
        """Free space. Growing files use it up, and then get ENOSPC."""
        self.handles = 0
        """Number of open files."""
        self.mutex = threading.Lock()
        self._faults: dict[Fault, int] = {}
        self._locked = False
        self._directories = {"", *directories}
        self._names = {path: _Inode(number, content) for number, (path, content) in enumerate((contents or {}).items(), 1)}
        self._inode_count = len(self._names)
        self.initial = {path: (inode.number, bytes(inode.content)) for path, inode in self._names.items()}
        """Initial state: path → (inode, content)."""
        self.initial_directories = frozenset(self._directories)

    # Called by tests.

    def mark(self, value: object) -> None:
        """Add a mark to the history, for example for an acknowledgement."""
        self.record(Operation("mark", value=value))

    def inject(self, *faults: Fault) -> None:
        """Inject faults. Each counts matching calls from now on."""
        self._faults.update(dict.fromkeys(faults, 0))

    def heal(self) -> None:
        self._faults.clear()

    def contents(self) -> dict[str, bytes]:
        """Return the current content of all files, durable or not."""
        return {path: bytes(inode.content) for path, inode in sorted(self._names.items())}

    def directories(self) -> set[str]:
        return set(self._directories)

    def rewound(self) -> SimulatedFiles:
        """Return another disk with the initial state of this one."""
        return SimulatedFiles({path: content for path, (_, content) in self.initial.items()}, self.initial_directories)

    def killed(self, upto: int) -> SimulatedFiles:
        """Return the disk that another process finds after this one was killed after `operations[:upto]`, with unsynced operations."""
        copy = self.rewound()
        inodes = {inode.number: inode for inode in copy._names.values()}
        for operation in self.operations[:upto]:
            copy._replay(operation, inodes)
        copy._inode_count = max(inodes, default=0)
        return copy

    def _replay(self, operation: Operation, inodes: dict[int, _Inode]) -> None:
        kind, path = operation.kind, operation.path
        if kind == "create":
            inodes[operation.inode] = self._names[path] = _Inode(operation.inode)
        elif kind == "write":
            self.write(path, inodes[operation.inode], operation.position, operation.data)
            return
        elif kind in ("truncate", "allocate"):
            self.resize(kind, path, inodes[operation.inode], operation.position)
            return
        elif kind == "rename":
            self._names[operation.target] = self._names.pop(path)
        elif kind == "remove":
            del self._names[path]
        elif kind == "make_dir":
            self._directories.add(path)
        elif kind == "remove_dir":
            self._directories.discard(path)
        self.operations.append(operation)

    # Files.

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        self._must("create" if create else "open", path)
        with self.mutex:
            inode = self._names.get(path)
            if create:
                if inode is not None:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                self._need_directory(parent(path))
                self._inode_count += 1
                inode = self._names[path] = _Inode(self._inode_count)
                self.operations.append(Operation("create", path, inode.number))
            return self._handle(path, inode, readonly=False)

    def absolute(self, path: str) -> str:
        return ""

    def open_readonly(self, path: str) -> SimulatedFile:
        self._must("open_readonly", path)
        return self._handle(path, self._names.get(path), readonly=True)

    def _handle(self, path: str, inode: _Inode | None, *, readonly: bool) -> SimulatedFile:
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.handles += 1
        return SimulatedFile(self, path, inode, readonly=readonly)

    def list(self, directory: str) -> list[str]:
        self._must("list", directory)
        with self.mutex:
            below = f"{directory}/" if directory else ""
            names = [path for path in (*self._names, *self._directories) if path != directory and path.startswith(below)]
        return sorted(path[len(below) :] for path in names if "/" not in path[len(below) :])

    def make_dir(self, *directories: str) -> None:
        missing = [directory for directory in dict.fromkeys(directories) if directory and directory not in self._directories]
        if not missing:
            return
        above = builtins.list(dict.fromkeys(map(parent, missing)))
        self.make_dir(*above)
        made: builtins.list[str] = []
        try:
            for directory in missing:
                if self.attempt("make_dir", directory):
                    with self.mutex:
                        self._directories.add(directory)
                        self.operations.append(Operation("make_dir", directory))
                    made.append(directory)
            for directory in above:
                self.sync_dir(directory)
        except OSError:
            with self.mutex:
                for directory in made:
                    self._directories.discard(directory)
                    self.operations.append(Operation("remove_dir", directory))
            raise

    def remove_dir(self, directory: str) -> None:
        if not self.attempt("remove_dir", directory) or directory not in self._directories:
            return
        if self.list(directory):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), directory)
        with self.mutex:
            self._directories.discard(directory)
            self.operations.append(Operation("remove_dir", directory))

    def rename(self, source: str, target: str) -> None:
        if not self.attempt("rename", source):
            return
        with self.mutex:
            if source not in self._names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
            self._need_directory(parent(target))
            self._give_back(self._names.get(target))
            inode = self._names[target] = self._names.pop(source)
            self.operations.append(Operation("rename", source, inode.number, target=target))

    def remove(self, path: str) -> None:
        if not self.attempt("remove", path):
            return
        with self.mutex:
            inode = self._names.pop(path, None)
            if inode is not None:
                self._give_back(inode)
                self.operations.append(Operation("remove", path, inode.number))

    def sync_dir(self, *directories: str) -> None:
        """Sync in sequence, so that the history is ordered. Raises the first failure after trying all."""
        failures: builtins.list[OSError] = []
        for directory in directories:
            try:
                self._sync_dir(directory)
            except OSError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _sync_dir(self, directory: str) -> None:
        try:
            fault = self.call("sync_dir", directory)
        except _Failing as failing:
            self.record(Operation("sync_dir_failed", directory))
            raise failing.error() from None
        with self.mutex:
            self._need_directory(directory)
            if fault is None:
                self.operations.append(Operation("sync_dir", directory))

    def sync_many(self, files: Sequence[File]) -> None:
        """Sync in sequence, so that the history is ordered. Raises the first failure after trying all."""
        failures: builtins.list[OSError] = []
        for file in files:
            try:
                file.sync()
            except OSError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def free_bytes(self) -> int:
        self._must("free_bytes", "")
        return max(self.room_bytes, 0)

    def reserve(self) -> bool:
        """Do nothing: descriptors run out only through faults."""
        return True

    def lock(self) -> None:
        if self._locked:
            raise DirectoryLocked("of this test")
        self._locked = True

    def close(self) -> None:
        self._locked = False

    # Called by open files.

    def call(self, kind: str, path: str) -> Fault | None:
        """Count the call. Raise the due fault, or return it if it is silent."""
        self.calls[kind] += 1
        if self.trace_sites:
            self.sites[kind, _caller()] += 1
        due: Fault | None = None
        for fault in self._faults:
            if fault.kind in (kind, "*") and fnmatchcase(path, fault.path):
                self._faults[fault] += 1
                if self._faults[fault] == fault.nth or (fault.persistent and self._faults[fault] > fault.nth):
                    due = fault
        if due is not None:
            self.fired.append(Fired(kind, path, _caller(), len(self.operations)))
        if due is not None and not due.silent:
            raise _Failing(due, path)
        return due

    def attempt(self, kind: str, path: str) -> bool:
        """Do the same as `call`, with the fault as an `OSError`. Returns False if a silent fault suppresses the effect."""
        try:
            return self.call(kind, path) is None
        except _Failing as failing:
            raise failing.error() from None

    def _must(self, kind: str, path: str) -> None:
        self.attempt(kind, path)

    def record(self, operation: Operation) -> None:
        with self.mutex:
            self.operations.append(operation)

    def write(self, path: str, inode: _Inode, position: int, data: bytes) -> None:
        if not data:
            return
        with self.mutex:
            grown = max(position + len(data) - len(inode.content), 0)
            short = grown > self.room_bytes
            if short:
                data = data[: len(data) - (grown - max(self.room_bytes, 0))]
                grown = max(self.room_bytes, 0)
            content = inode.own()
            if data and position > len(content):
                content.extend(bytes(position - len(content)))
            content[position : position + len(data)] = data
            self.room_bytes -= grown
            if data:
                self.operations.append(Operation("write", path, inode.number, position, data))
        if short:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def resize(self, kind: str, path: str, inode: _Inode, size_bytes: int) -> None:
        with self.mutex:
            content = inode.own()
            grown = size_bytes - len(content)
            if kind == "allocate" and grown > self.room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            if grown > 0:
                content.extend(bytes(grown))
            elif kind == "truncate":
                del content[size_bytes:]
            self.room_bytes -= grown if kind == "truncate" else max(grown, 0)
            self.operations.append(Operation(kind, path, inode.number, size_bytes))

    def _give_back(self, inode: _Inode | None) -> None:
        self.room_bytes += 0 if inode is None else len(inode.content)

    def _need_directory(self, directory: str) -> None:
        if directory not in self._directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)


def _caller() -> str:
    """Return module:line of the caller outside this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
