"""Process that appends large and small records to two logs and prints the number of each acknowledged append: to be killed.

`python -m tests.crash.large_writer DIRECTORY`
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from headrace.errors import BrokerError
from headrace.records import Ack, Appended, RecordBatch
from headrace.storage.files import DiskFiles
from headrace.storage.partition import LogOptions
from headrace.storage.store import Store, StoreOptions

LOGS = (0, 1)
OPTIONS = StoreOptions(large_bytes=100_000, journal_bytes=1 << 20, checkpoint_interval_ms=500, headroom_bytes=0)
LOG_OPTIONS = LogOptions(segment_bytes=1 << 20)


def value(number: int) -> bytes:
    """Return the value of an append: large two times out of three."""
    return b"%d" % number + bytes(300 if number % 3 == 0 else 100_000 + number * 7_919 % 200_000)


def opened(directory: Path) -> Store:
    store = Store.open(DiskFiles(directory), OPTIONS, threads=False)
    for log in LOGS:
        store.open_log(log, LOG_OPTIONS)
    return store


def main() -> None:
    store = opened(Path(sys.argv[1]))
    store.start()
    number = store.bounds(LOGS[0]).end

    room = threading.Semaphore(8)

    def acknowledged(outcome: list[Appended] | BrokerError) -> None:
        assert isinstance(outcome, list), outcome
        print(outcome[0].base_offset, flush=True)
        room.release()

    while room.acquire():
        # Both parts of an append are large, or one is: then it shares a frame with the reference to the other.
        batches = [(LOGS[0], RecordBatch([value(number)])), (LOGS[1], RecordBatch([value(number + 1)]))]
        store.stage(batches, ack=Ack.DURABLE, now=0, done=acknowledged, size_bytes=1 << 20)
        number += 1


if __name__ == "__main__":
    main()
