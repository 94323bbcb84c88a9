"""Connection cache: one connection per process. Spark's Python workers run many tasks, and a login costs more than a small batch.

A forked worker inherits the memory of its parent but not the threads of a connection, so the cache key includes the process id.
Connections are not closed: they end with the process, and Spark ends idle workers after a minute.
"""

from __future__ import annotations

import os
import threading

from headrace.flight.client import FlightClient, Servers

_lock = threading.Lock()
_clients: dict[tuple[int, Servers], FlightClient] = {}


def connect(servers: Servers) -> FlightClient:
    """Return the connection of this process to these servers. It is thread-safe."""
    with _lock:
        found = _clients.get((os.getpid(), servers))
        if found is None:
            found = _clients[os.getpid(), servers] = FlightClient(servers)
        return found
