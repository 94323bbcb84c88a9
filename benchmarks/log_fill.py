"""Fill a log and wait to be killed: `python -m benchmarks.log_fill DIRECTORY BYTES PARTITIONS VALUE_BYTES BATCH_RECORDS`.

The log is filled and checkpointed first. Then nine tenths of a journal file are appended with checkpoints postponed, so that recovery
has the largest possible journal to read.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from benchmarks.log_measurements import TOPIC, append, batch_pool, on_loop, open_engine
from headrace.engine.contract import TopicConfig
from headrace.storage.store import StoreOptions

JOURNAL_FRACTION = 0.9
"""Of a journal file. A full one would start the next file and a checkpoint."""
_AN_HOUR_MS = 3_600_000


async def fill(directory: Path, size_bytes: int, partitions: int, value_bytes: int, batch_records: int) -> None:
    batches = batch_pool(value_bytes, batch_records)
    options = StoreOptions(checkpoint_interval_ms=_AN_HOUR_MS)
    journal_bytes = min(round(options.journal_bytes * JOURNAL_FRACTION), size_bytes // 2)
    engine = open_engine(directory)
    await engine.open()
    await engine.create_topic(TOPIC, partitions, TopicConfig())
    done = await append(engine, batches, (size_bytes - journal_bytes) // value_bytes, partitions=partitions)
    await engine.close()
    engine = open_engine(directory, options)
    await engine.open()
    done += await append(engine, batches, journal_bytes // value_bytes, partitions=partitions)
    print(json.dumps({"records": done, "journal_bytes": journal_bytes}), flush=True)
    signal.pause()


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    on_loop(fill(Path(path), *map(int, numbers)))
