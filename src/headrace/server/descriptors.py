"""Division of the process's file descriptors between storage and connections.

Storage needs a descriptor for each open segment: without one it cannot store records. A quarter of all descriptors, but at least
`FILES_RESERVED_MIN`, is reserved for it. Connections get the rest.

    RLIMIT_NOFILE = reserve + connections of listeners + connections of the Flight endpoint
"""

from __future__ import annotations

import logging
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from headrace.limits import FILES_RESERVED_MIN

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DescriptorLimits:
    """Division of the `open_files` that the operating system allows."""

    open_files: int
    reserve: int
    connections: int
    flight_connections: int


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit: 1,024, the limit of a login shell, is too low for a broker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            _log.warning("limit of open files not raised", extra={"open_files": soft})


def open_files_max() -> int:
    """Return the current limit; a million if unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if soft == resource.RLIM_INFINITY else soft


def divide(open_files: int, *, connections: int, flight_connections: int) -> DescriptorLimits:
    """Divide `open_files`, with `connections` and `flight_connections` as upper bounds. 0 `flight_connections`: no Flight endpoint."""
    reserve = max(FILES_RESERVED_MIN, open_files // 4)
    left = max(2, open_files - reserve)
    # The Flight endpoint gets at most a quarter: gRPC accepts every connection, so the endpoint can only disconnect excess peers.
    flight = min(flight_connections, max(1, left // 4))
    return DescriptorLimits(open_files, reserve, max(1, min(connections, left - flight)), flight)


def report(limits: DescriptorLimits, *, connections: int, flight_connections: int) -> None:
    """Log the derived limits, as a warning if one is lower than configured."""
    is_less = limits.connections < connections or limits.flight_connections < flight_connections
    _log.log(
        logging.WARNING if is_less else logging.INFO,
        "connection limits lowered to fit the limit of open files" if is_less else "connection limits",
        extra={
            "open_files": limits.open_files,
            "reserved_for_storage": limits.reserve,
            "connections": limits.connections,
            "flight_connections": limits.flight_connections,
        },
    )


def process_facts() -> dict[str, int]:
    """Return the memory and the open files of this process; empty where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        open_files = len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    except (OSError, ValueError, IndexError):
        return {}
    return {"memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "open_files": open_files, "open_files_max": open_files_max()}
