"""One connection to a broker per process: Spark's Python workers serve many tasks, and logging in costs more than a small batch.

A worker that forks takes the memory of its parent with it, but not the threads that a connection lives by; so a connection belongs to
the process that made it. Nobody closes it: it ends with its process, and Spark ends idle workers after a minute.
"""

from __future__ import annotations

import os
import threading

from headrace.flight.client import FlightClient, Servers

_lock = threading.Lock()
_clients: dict[tuple[int, Servers], FlightClient] = {}


def connect(servers: Servers) -> FlightClient:
    """The connection of this process to these servers; it may be used by several threads."""
    with _lock:
        found = _clients.get((os.getpid(), servers))
        if found is None:
            found = _clients[os.getpid(), servers] = FlightClient(servers)
        return found
