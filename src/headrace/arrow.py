"""Topics as Arrow tables, for whoever speaks Arrow: pandas, Polars, DuckDB, pyarrow itself.

    import headrace.arrow

    table = headrace.arrow.read("orders").read_all()

What is read ends where the topic ended at the call: a reader comes to its end, however fast others write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from headrace.errors import InvalidRequest, UnknownPartition
from headrace.extras import needs

with needs("headrace.arrow", "numpy", "pyarrow"):
    import pyarrow as pa

    from headrace.bulk.client import ALL, READ_SCHEMA, Appended, BulkClient, PartitionState, Servers

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
    """The rows of a topic, partition by partition. They come while they are read, not before.

    A start or stop beyond what a partition holds means its own first or last record: this is for looking, not for counting losses.
    Raises `UnknownTopic`, `UnknownPartition`, and `Unavailable` if no broker answers.
    """
    client = BulkClient(servers if isinstance(servers, Servers) else Servers.parse(servers))
    try:
        for name in columns:
            if name not in READ_SCHEMA.names:
                raise InvalidRequest(f"no column {name!r}; there are {', '.join(READ_SCHEMA.names)}")
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
        raise InvalidRequest(f"{place!r} is no offset; expected a number, 'earliest' or 'latest'")
    return min(max(place, held.first), held.end)


def _rows(
    client: BulkClient, topic: str, ranges: list[tuple[int, int, int]], columns: Sequence[str], rows_max: int
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
    """Append rows: a column `value`, and where wanted `key`, `headers`, `partition`, `timestamp`. Durable when it returns, if the topic
    promises that. The topic is created if the broker allows it. Raises what `BulkClient.append` raises."""
    if isinstance(rows, pa.Table):
        rows = rows.to_batches()
    elif isinstance(rows, pa.RecordBatch):
        rows = [rows]
    with BulkClient(servers if isinstance(servers, Servers) else Servers.parse(servers)) as client:
        client.ensure_topic(topic)
        return client.append(topic, rows, partition=partition)
