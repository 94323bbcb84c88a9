"""Connection cache: one connection per process. Spark's Python workers run many tasks, and a login costs more than a small batch.

A forked worker inherits the memory of its parent but not the threads of a connection, so the cache key includes the process id.
Connections are not closed: they end with the process, and Spark ends idle workers after a minute.

With several servers the tasks of a job are spread over them: task n begins with server n, and moves on if that one is away. The driver
begins with the first.
"""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import replace

from pyspark import TaskContext

from headrace.flight.client import FlightClient, Servers
from headrace.heap import keep_large_chunks

_lock = threading.Lock()
_clients: dict[tuple[int, Servers], FlightClient] = {}


def connect(servers: Servers) -> FlightClient:
    """Return the connection of this process to these servers. It is thread-safe."""
    servers = _in_turn(servers)
    with _lock:
        found = _clients.get((os.getpid(), servers))
        if found is None:
            if TaskContext.get() is not None:
                # Spark collects garbage after each task, and would visit all objects of the modules, which stay anyway.
                gc.freeze()
                # Each record batch takes as much memory as the one before it. Heaps of threads that exist would stay, so this comes first.
                keep_large_chunks()
            found = _clients[os.getpid(), servers] = FlightClient(servers)
        return found


def _in_turn(servers: Servers) -> Servers:
    """Return the servers with the one of this task first."""
    task, count = TaskContext.get(), len(servers.addresses)
    if task is None or count == 1:
        return servers
    turn = task.partitionId() % count
    return replace(servers, addresses=servers.addresses[turn:] + servers.addresses[:turn])
