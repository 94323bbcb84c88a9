"""Job that the supervisor kills: it copies one topic to another.

    python -m tests.spark.crash.driver SETTINGS.json

A failed query (the broker was unavailable for too long, or restarted without the stages) is restarted, as a pipeline would. When the file
`finish` appears, the job copies the remaining records and exits with 0.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headrace.spark import session
from tests.spark.crash.traps import TrappedSource
from tests.spark.serving import session_settings

POLL_SECONDS = 0.1


def copy(spark: SparkSession, settings: dict[str, Any], *, to_the_end: bool) -> StreamingQuery:
    rows = (
        spark.readStream.format("headrace")
        .option("kafka.bootstrap.servers", settings["servers"])
        .option("subscribe", settings["source"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", settings["rows_finishing"] if to_the_end else settings["rows"])
        .load()
    )
    writer = (
        rows.select("key", "value", "partition")
        .writeStream.format("trapped")
        .option("kafka.bootstrap.servers", settings["servers"])
        .option("topic", settings["target"])
        .option("checkpointLocation", settings["checkpoint"])
    )
    return (writer.trigger(availableNow=True) if to_the_end else writer.trigger(processingTime="0 seconds")).start()


def watch(query: StreamingQuery, finish: Path | None) -> bool:
    """Return whether the query has ended without an error."""
    while query.isActive:
        if finish is not None and finish.exists():
            query.stop()
        time.sleep(POLL_SECONDS)
    failure = query.exception()
    if failure is not None:
        print(f"{time.time():.3f} query failed: {str(failure).strip().splitlines()[-1]}", flush=True)
    return failure is None


def main() -> int:
    settings = json.loads(Path(sys.argv[1]).read_text())
    directory, finish = Path(settings["directory"]), Path(settings["finish"])
    spark = session("crash", settings["master"], **{**session_settings(directory), **settings["conf"]})
    spark.dataSource.register(TrappedSource)
    print(f"{time.time():.3f} session", flush=True)
    while not watch(copy(spark, settings, to_the_end=False), finish):
        pass
    while not watch(copy(spark, settings, to_the_end=True), None):
        pass
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
