"""Description of the machine and software of a measurement. Every report includes it."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headrace import __version__
from headrace.bench.disk import sync_times
from headrace.bench.report import percentile

SYNC_PROBES = 200
SYNC_PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Facts:
    """Machine and software at the start of a benchmark."""

    date: str
    headrace: str
    python: str
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
