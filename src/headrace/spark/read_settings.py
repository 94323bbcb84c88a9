"""Options of a read, parsed and checked before the first request to the broker."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.flight.client import Servers
from headrace.spark.boundaries import Boundary
from headrace.spark.options import Options
from headrace.spark.retry import RetryPolicy
from headrace.spark.servers import servers_of
from headrace.spark.subscription import Subscription

ENDING = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Parsed options of a read. Spark pickles them to the tasks."""

    servers: Servers
    subscription: Subscription
    start: Boundary
    end: Boundary
    retry: RetryPolicy
    group: str
    fail_on_data_loss: bool = True
    records_max: int | None = None
    bytes_max: int | None = None
    records_min: int | None = None
    delay_ms: int = 900_000
    tasks_min: int | None = None
    task_records_max: int | None = None

    @classmethod
    def of(cls, options: Options, *, streaming: bool) -> ReadSettings:
        given = [name for name in ENDING if name in options]
        if streaming and given:
            raise ConfigError(f"option {given[0]} is for batch queries only: a stream has no end")
        records_max = options.count("maxOffsetsPerTrigger", None)
        records_min = options.count("minOffsetsPerTrigger", None)
        if records_max is not None and records_min is not None and records_min > records_max:
            raise ConfigError(f"option minOffsetsPerTrigger is {records_min}, more than maxOffsetsPerTrigger, which is {records_max}")
        servers, subscription = servers_of(options), Subscription.of(options)
        return cls(
            servers=servers,
            subscription=subscription,
            start=Boundary.start(options, streaming=streaming),
            end=Boundary.end(options),
            retry=RetryPolicy.of(options),
            group=options.text("kafka.group.id") or subscription.group(options.text("groupIdPrefix", "spark-headrace")),
            fail_on_data_loss=options.flag("failOnDataLoss", True),
            records_max=records_max,
            bytes_max=options.size_bytes("maxBytesPerTrigger"),
            records_min=records_min,
            delay_ms=options.duration_ms("maxTriggerDelay", 900_000),
            tasks_min=options.count("minPartitions", None),
            task_records_max=options.count("maxRecordsPerPartition", None),
        )
