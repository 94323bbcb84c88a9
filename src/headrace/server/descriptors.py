"""Share the file descriptors of the process between the log and the connections.

The log needs a descriptor for each open segment, and must get one when it needs one: a log that cannot open a file cannot keep records.
Connections get what is left when a quarter of all, but at least `FILES_RESERVED_MIN`, has been set aside.

    RLIMIT_NOFILE = reserve + connections of listeners + connections of the Flight endpoint
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

from headrace.limits import FILES_RESERVED_MIN

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """Who may have how many of the `open_files` that the operating system allows."""

    open_files: int
    reserve: int
    connections: int
    flight_connections: int


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: that of a login shell (1,024) is far below what a broker uses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            _log.warning("the limit of open files stays at %d", soft)


def open_files_max() -> int:
    """Return the limit in force; "unlimited" is taken for a million."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if soft == resource.RLIM_INFINITY else soft


def share(open_files: int, *, connections: int, flight_connections: int) -> DescriptorShares:
    """Divide `open_files`; nobody gets more connections than wanted. `flight_connections` of 0: there is no Flight endpoint."""
    reserve = max(FILES_RESERVED_MIN, open_files // 4)
    left = max(2, open_files - reserve)
    # The Flight endpoint never gets more than a quarter: it can only disconnect peers that are too many, not refuse them.
    flight = min(flight_connections, max(1, left // 4))
    return DescriptorShares(open_files, reserve, max(1, min(connections, left - flight)), flight)


def report(shares: DescriptorShares, *, connections: int, flight_connections: int) -> None:
    """Log what was derived, as a warning where it is less than what was configured."""
    is_less = shares.connections < connections or shares.flight_connections < flight_connections
    _log.log(
        logging.WARNING if is_less else logging.INFO,
        "connection limits lowered to fit the limit of open files" if is_less else "connection limits",
        extra={
            "open_files": shares.open_files,
            "reserved_for_log": shares.reserve,
            "connections": shares.connections,
            "flight_connections": shares.flight_connections,
        },
    )
