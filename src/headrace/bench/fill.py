"""`python -m headrace.bench.fill DIRECTORY BYTES PARTITIONS VALUE_BYTES RUN_RECORDS`: fill a log, say so, and wait to be killed.

The journal is left as full as it gets: the log is filled and checkpointed first, then as much as a journal file holds is appended
with checkpoints put off, so that recovery has the most to do that it can ever have.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from headrace.bench.logs import TOPIC, append, on_loop, open_engine, run_pool
from headrace.engine.contract import TopicConfig
from headrace.storage.store import StoreOptions

JOURNAL_SHARE = 0.9
"""Of a journal file; a full one would make the log begin the next and checkpoint."""
_AN_HOUR_MS = 3_600_000


async def fill(directory: Path, size_bytes: int, partitions: int, value_bytes: int, run_records: int) -> None:
    runs = run_pool(value_bytes, run_records)
    options = StoreOptions(checkpoint_interval_ms=_AN_HOUR_MS)
    journal_bytes = min(round(options.journal_bytes * JOURNAL_SHARE), size_bytes // 2)
    engine = open_engine(directory)
    await engine.open()
    await engine.create_topic(TOPIC, partitions, TopicConfig())
    done = await append(engine, runs, (size_bytes - journal_bytes) // value_bytes, partitions=partitions)
    await engine.close()
    engine = open_engine(directory, options)
    await engine.open()
    done += await append(engine, runs, journal_bytes // value_bytes, partitions=partitions)
    print(json.dumps({"records": done, "journal_bytes": journal_bytes}), flush=True)
    signal.pause()


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    on_loop(fill(Path(path), *map(int, numbers)))
