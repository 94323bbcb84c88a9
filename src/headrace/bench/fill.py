"""`python -m headrace.bench.fill DIRECTORY BYTES PARTITIONS VALUE_BYTES RUN_RECORDS`: fill a log, say so, and wait to be killed.

The journal is left as full as it gets: no checkpoint runs after the last journal file was begun, so that recovery has the most to
do that it can ever have.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from headrace.bench.logs import TOPIC, append, on_loop, open_engine, run_pool
from headrace.engine.contract import TopicConfig


async def fill(directory: Path, size_bytes: int, partitions: int, value_bytes: int, run_records: int) -> None:
    engine = open_engine(directory)
    await engine.open()
    await engine.create_topic(TOPIC, partitions, TopicConfig())
    runs = run_pool(value_bytes, run_records)
    done = await append(engine, runs, size_bytes // value_bytes, partitions=partitions)
    print(json.dumps({"records": done}), flush=True)
    signal.pause()


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    on_loop(fill(Path(path), *map(int, numbers)))
