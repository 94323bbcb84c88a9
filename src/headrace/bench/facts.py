"""Description of the machine and software of a measurement. Every report includes it.

Disk probes: the sync times of the machine itself, the lower bound of a durable acknowledgement.

Progress bar on a terminal; silent elsewhere.

The measuring loop redraws the bar. No thread does, because it would take CPU time from the measurement.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace import __version__
from headrace.bench.load import Tick
from headrace.bench.report import percentile
from headrace.compiled import is_compiled


class Steps:
    """Progress bar of a command with one line per measurement."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    @contextmanager
    def step(self, name: str, total: int) -> Iterator[Tick]:
        """Show one measurement of `total` records (or bytes, or rounds)."""
        task = self._bar.add_task(name, total=total)
        self._bar.refresh()

        def tick(done: int) -> None:
            self._bar.update(task, completed=done, refresh=True)

        yield tick
        self._bar.remove_task(task)


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


SYNC_PROBES = 200
SYNC_PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Facts:
    """Machine and software at the start of a benchmark."""

    date: str
    headrace: str
    python: str
    is_compiled: bool
    """Whether the hot modules are compiled with mypyc."""
    uvloop: str | None
    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    directory: str
    filesystem: str
    fdatasync_p50_ms: float
    """One 4 KiB write into a preallocated file plus fdatasync: the lower bound of a durable acknowledgement."""
    fdatasync_p99_ms: float
    load_average: float
    """Of the minute before the benchmark."""

    @property
    def keeps_files(self) -> bool:
        """False for a directory in memory, where durable figures are meaningless."""
        return self.filesystem not in ("tmpfs", "ramfs")


def gather(directory: Path) -> Facts:
    """Collect the facts. `directory` is the workspace of the benchmark."""
    times = sorted(sync_times(directory, SYNC_PROBE_BYTES, SYNC_PROBES))
    return Facts(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        headrace=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        is_compiled=is_compiled(),
        uvloop=_installed("uvloop"),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=f"{platform.system()} {platform.release()}",
        directory=str(directory),
        filesystem=filesystem_of(directory),
        fdatasync_p50_ms=round(percentile(times, 50) * 1e3, 4),
        fdatasync_p99_ms=round(percentile(times, 99) * 1e3, 4),
        load_average=round(os.getloadavg()[0], 2),
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or sys.platform


def filesystem_of(directory: Path, mount_table: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the filesystem that holds `directory`, found by its device number in the mount table.

    Inside a chroot the table may lack the mount that holds it: then the type is "unknown".
    """
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with mount_table.open(encoding="utf-8") as lines:
            for line in lines:
                mount, _, source = line.partition(" - ")
                if mount.split()[2] == wanted:
                    return source.split()[0]
    except OSError:
        pass
    return "unknown"
