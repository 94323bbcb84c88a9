"""Topics as Arrow tables, for pandas, Polars, DuckDB and pyarrow.

    import headrace.arrow

    table = headrace.arrow.read("orders").read_all()

A read ends at the end of the topic at the time of the call, also while others write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from headrace.errors import InvalidRequest, UnknownPartition
from headrace.extras import needs

with needs("headrace.arrow", "numpy", "pyarrow"):
    import pyarrow as pa

    from headrace.flight.client import ALL, READ_SCHEMA, Appended, FlightClient, PartitionState, Servers

__all__ = ["Servers", "read", "write"]

Place = int | str | Mapping[int, int]
"""An offset in every partition, an offset for each partition, or the word "earliest" or "latest"."""


def read(
    topic: str,
    *,
    servers: str | Servers = "127.0.0.1:8815",
    partitions: Sequence[int] | None = None,
    start: Place = "earliest",
    stop: Place = "latest",
    columns: Sequence[str] = ALL,
    rows_max: int = 65_536,
) -> pa.RecordBatchReader:
    """Return the rows of a topic, partition by partition, fetched lazily.

    A start or stop outside a partition is moved to its first or end offset, without an error. Raises `UnknownTopic`,
    `UnknownPartition`, and `Unavailable` if no broker answers.
    """
    client = FlightClient(servers if isinstance(servers, Servers) else Servers.parse(servers))
    try:
        for name in columns:
            if name not in READ_SCHEMA.names:
                raise InvalidRequest(f"unknown column {name!r}; expected {', '.join(READ_SCHEMA.names)}")
        held = client.describe([topic])[topic].partitions
        chosen = range(len(held)) if partitions is None else partitions
        ranges: list[tuple[int, int, int]] = []
        for partition in chosen:
            if not 0 <= partition < len(held):
                raise UnknownPartition(topic, partition)
            begin, end = _offset(start, partition, held[partition]), _offset(stop, partition, held[partition])
            if begin < end:
                ranges.append((partition, begin, end))
    except BaseException:
        client.close()
        raise
    schema = pa.schema([READ_SCHEMA.field(name) for name in columns])
    return pa.RecordBatchReader.from_batches(schema, _rows(client, topic, ranges, columns, rows_max))


def _offset(place: Place, partition: int, held: PartitionState) -> int:
    if place == "earliest":
        return held.first
    if place == "latest":
        return held.end
    if isinstance(place, Mapping):
        place = place.get(partition, held.first)
    if not isinstance(place, int):
        raise InvalidRequest(f"{place!r} is not an offset; expected a number, 'earliest' or 'latest'")
    return min(max(place, held.first), held.end)


def _rows(
    client: FlightClient, topic: str, ranges: list[tuple[int, int, int]], columns: Sequence[str], rows_max: int
) -> Iterator[pa.RecordBatch]:
    with client:
        for partition, begin, end in ranges:
            yield from client.read(topic, partition, begin, end, columns=columns, rows_max=rows_max)


def write(
    topic: str,
    rows: pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch],
    *,
    servers: str | Servers = "127.0.0.1:8815",
    partition: int | None = None,
) -> Appended:
    """Append rows with the column `value` and optionally `key`, `headers`, `partition`, `timestamp`. The topic is created if the broker
    allows that. When this returns, the rows are as durable as the topic guarantees. Raises the errors of `FlightClient.append`."""
    if isinstance(rows, pa.Table):
        rows = rows.to_batches()
    elif isinstance(rows, pa.RecordBatch):
        rows = [rows]
    with FlightClient(servers if isinstance(servers, Servers) else Servers.parse(servers)) as client:
        client.ensure_topic(topic)
        return client.append(topic, rows, partition=partition)
