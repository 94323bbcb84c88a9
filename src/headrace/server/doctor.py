"""Examination of a configuration and of this machine before a broker runs here, or while it does."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError
from headrace.extras import LIBRARIES
from headrace.server.addresses import require_caution
from headrace.server.config import Config, is_default
from headrace.server.config_check import check_file
from headrace.server.config_sources import resolve
from headrace.server.descriptors import divide, open_files_max
from headrace.storage.batch import CHECKSUMS_IN_C
from headrace.storage.files import DirectoryLocked, DiskFiles

JAVA_MIN: Final = 17
SYNCS: Final = 20
SLOW_SYNC_MS: Final = 20.0
"""Median time of a disk sync above which a disk is slow for durable acknowledgements."""
_TIME_PLAUSIBLE: Final = 1_735_689_600
"""2025-01-01: a clock before it is wrong."""
_TIME_ERROR: Final = 5
"""Result of `adjtimex` for a clock that nothing synchronizes."""


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    ACTION = "action"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check, and what to do."""

    check: str
    level: Level
    text: str
    advice: str = ""


def examine(
    file: Path | None, flags: Mapping[str, tuple[str, object]], environment: Mapping[str, str], *, java: str = "absent"
) -> Iterator[Finding]:
    """Yield the findings of all checks. Checks that need a valid configuration use the defaults if it is invalid.

    `java` is the version of Java: a number, "unknown" or "absent".
    """
    config = Config()
    mistakes = check_file(file)[0] if file is not None else []
    for mistake in mistakes:
        yield Finding("configuration", Level.ACTION, f"{file}:{mistake.line}: {mistake.text}", "correct the file")
    if not mistakes:
        try:
            config = resolve(file=file, environment=environment, flags=flags).config
            require_caution(config)
            yield Finding("configuration", Level.OK, "valid")
        except ConfigError as failure:
            yield Finding("configuration", Level.ACTION, str(failure), "correct the configuration; headrace config explain KEY helps")
    holder = _holder(config.storage.path)
    yield from _data(config, holder)
    yield from _ports(config, is_running=holder is not None)
    yield from _clock()
    yield _open_files(config)
    yield from _libraries(java)


def _data(config: Config, holder: str | None) -> Iterator[Finding]:
    """Check the data directory: permission, free space and the time of a sync."""
    path = config.storage.path.absolute()
    place = path
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield Finding("data directory", Level.ACTION, f"{place} is not writable for this user", "chown it, or choose another with --data")
        return
    if holder is not None:
        yield Finding("data directory", Level.NOTE, f"{path} is in use by a running broker" + (f", process {holder}" if holder else ""))
    else:
        yield Finding("data directory", Level.OK, str(path) if place == path else f"{path}, to be created")
    free, headroom = shutil.disk_usage(place).free, config.storage.headroom
    gib = f"{free / 2**30:.1f} GiB free"
    if free < headroom:
        yield Finding("disk space", Level.ACTION, f"{gib}, less than storage.headroom", "free some space: publishes fail with 'disk full'")
    else:
        level = Level.NOTE if free < 2 * headroom + config.storage.journal_size else Level.OK
        yield Finding("disk space", level, gib)
    yield _sync(place)


def _sync(directory: Path) -> Finding:
    try:
        times = _sync_times(directory)
    except OSError as failure:
        return Finding(
            "disk sync", Level.ACTION, f"{directory}: {failure.strerror or failure}", "use a disk that can be written and synced"
        )
    median, worst = statistics.median(times), max(times)
    text = f"median {median:.1f} ms, slowest {worst:.1f} ms of {len(times)}"
    if median > SLOW_SYNC_MS:
        return Finding("disk sync", Level.NOTE, text, "a faster disk shortens every acknowledgement; many clients share one sync")
    return Finding("disk sync", Level.OK, text)


def _sync_times(directory: Path) -> list[float]:
    """Return the milliseconds of several writes of 4 KiB with `fdatasync`, which is what an acknowledgement waits for."""
    times: list[float] = []
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".headrace-doctor-") as file:
        for _ in range(SYNCS):
            os.write(file.fileno(), bytes(4096))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - began) * 1000)
    return times


def _holder(path: Path) -> str | None:
    """Return the process that has locked the data directory; empty if unknown, None if it is not locked."""
    if not (path / "LOCK").exists():
        return None
    files = DiskFiles(path)
    try:
        files.lock()
    except DirectoryLocked as failure:
        return failure.holder
    except OSError:
        return None
    files.close()
    return None


def _ports(config: Config, *, is_running: bool) -> Iterator[Finding]:
    for key, kind, binds in (
        ("listen.tcp", socket.SOCK_STREAM, config.listen.tcp),
        ("listen.quic", socket.SOCK_DGRAM, config.listen.quic),
        ("listen.flight", socket.SOCK_STREAM, config.listen.flight),
        ("listen.http", socket.SOCK_STREAM, config.listen.http),
    ):
        for bind in binds:
            failure = _bind_error(bind.address.host, bind.address.port, kind)
            name = f"port {bind.address}"
            if failure is None:
                yield Finding(name, Level.OK, "free")
            elif failure.errno == errno.EADDRINUSE and is_running:
                yield Finding(name, Level.NOTE, "in use, as expected while a broker runs on this data directory")
            else:
                is_optional = is_default(config, key) and key != "listen.tcp"
                level = Level.NOTE if is_optional else Level.ACTION
                text = "in use by another process" if failure.errno == errno.EADDRINUSE else str(failure.strerror or failure)
                yield Finding(name, level, text, f"stop that process, or choose another address in {key}")


def _bind_error(host: str, port: int, kind: socket.SocketKind) -> OSError | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as probe:
            if kind is socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as failure:
        return failure
    return None


def _clock(now: Callable[[], float] = time.time) -> Iterator[Finding]:
    if now() < _TIME_PLAUSIBLE:
        yield Finding("clock", Level.ACTION, time.strftime("it is %Y-%m-%d", time.gmtime(now())), "set the clock and synchronize it (NTP)")
    elif _adjtimex() == _TIME_ERROR:
        yield Finding("clock", Level.NOTE, "nothing synchronizes the clock of this machine", "run an NTP client such as chrony")
    else:
        yield Finding("clock", Level.OK, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now())))


def _adjtimex() -> int:
    """Return the state of the kernel's clock; 0 (synchronized) where it cannot be read."""
    try:
        libc = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6")
        return int(libc.adjtimex(ctypes.create_string_buffer(512)))  # all zero: read only; struct timex has 208 bytes
    except (OSError, AttributeError):
        return 0


def _open_files(config: Config) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = open_files_max() if hard == resource.RLIM_INFINITY else hard
    wanted, flight = config.limits.connections, config.limits.flight_connections if config.listen.flight else 0
    found = divide(files, connections=wanted, flight_connections=flight)
    text = f"RLIMIT_NOFILE {files:,} allows {found.connections:,} of {wanted:,} connections"
    if found.connections >= wanted:
        return Finding("open files", Level.OK, text)
    advice = "raise the hard limit (LimitNOFILE= of systemd, ulimit -Hn), or lower limits.connections"
    return Finding("open files", Level.NOTE if found.connections >= 1000 else Level.ACTION, text, advice)


def _libraries(java: str) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", Level.OK, version)
    if not CHECKSUMS_IN_C:
        yield Finding("checksums", Level.ACTION, "computed in Python at about 1 MB/s", "install a wheel of google-crc32c for this Python")
    absent: dict[str, list[str]] = {}
    for name, library in LIBRARIES.items():
        if not _is_installed(name):
            absent.setdefault(library.extra, []).append(library.title)
    for extra in dict.fromkeys(library.extra for library in LIBRARIES.values()):
        if extra in absent:
            text = f"not installed ({', '.join(dict.fromkeys(absent[extra]))})"
            yield Finding(f"extra {extra}", Level.NOTE, text, f"pip install 'headrace[{extra}]' if it is needed")
        else:
            yield Finding(f"extra {extra}", Level.OK, "installed")
    yield _java(java, is_needed="spark" not in absent)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _java(found: str, *, is_needed: bool) -> Finding:
    level = Level.ACTION if is_needed else Level.NOTE
    if found.isdecimal() and int(found) >= JAVA_MIN:
        return Finding("Java", Level.OK, found)
    text = "not installed" if found == "absent" else f"version {found}"
    return Finding("Java", level, text, f"Spark needs Java {JAVA_MIN} or newer: install it, or set JAVA_HOME")
