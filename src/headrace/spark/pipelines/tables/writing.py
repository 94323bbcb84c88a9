"""Table sink of a streaming query, called by `foreachBatch` for each micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from headrace.extras import needs
from headrace.spark.pipelines.model import Sink
from headrace.spark.pipelines.tables import Table
from headrace.spark.pipelines.tables.parts import write_parts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def open_table(sink: Sink, path: str) -> Table:
    """Return the table of a sink. Raises `MissingExtra` if the library of its kind is not installed."""
    with needs(f"sinks.{sink.name}: kind = {sink.kind!r}"):
        return _open_table(sink, path)


def _open_table(sink: Sink, path: str) -> Table:
    if sink.kind == "delta":
        from headrace.spark.pipelines.tables.delta import Delta

        return Delta(path)
    if sink.kind == "iceberg":
        from headrace.spark.pipelines.tables.iceberg import Iceberg

        return Iceberg(path, sink.table or f"headrace.{sink.name.replace('.', '_')}")
    from headrace.spark.pipelines.tables.parquet import Parquet

    return Parquet(path)


@dataclass(frozen=True, slots=True)
class TableWriter:
    """Exactly-once writer of batches to a table."""

    table: Table
    mode: str
    keys: tuple[str, ...] = ()

    def write(self, frame: DataFrame, batch: int) -> None:
        # The checkpoint keeps the query id and the batch number over restarts.
        query_id = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query_id, "foreachBatch runs inside a query"
        last = self.table.last(query_id)
        if last is not None and last >= batch:
            # The rows are committed. The plan must still run, because it updates the state of aggregations and joins.
            frame.write.format("noop").mode("overwrite").save()
            return
        schema = self.table.schema(arrow_schema(frame))
        if self.mode == "update":
            self.table.merge(query_id, batch, latest(frame.toArrow().cast(schema), self.keys), self.keys)
            return
        parts = write_parts(frame, self.table.parts_directory(query_id), f"part-{batch:08}", schema)
        if parts or self.mode == "complete":
            self.table.commit(query_id, batch, parts, schema, overwrite=self.mode == "complete")


def latest(rows: pa.Table, keys: tuple[str, ...]) -> pa.Table:
    """Keep the last of the rows with the same keys. Delta would add all of them for a new key, and fail for an existing one."""
    ranked = rows.select(list(keys))
    while any(pa.types.is_struct(field.type) for field in ranked.schema):
        ranked = ranked.flatten()  # Arrow cannot group by a struct, such as a window
    names = [f"{index}" for index in range(ranked.num_columns)]
    ranked = ranked.rename_columns(names).append_column("", pa.array(range(rows.num_rows), pa.int64()))
    last = ranked.group_by(names, use_threads=False).aggregate([("", "max")]).column("_max")
    return rows if len(last) == rows.num_rows else rows.take(last.combine_chunks().sort())


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """Return the Arrow schema of the frame, with times in UTC."""
    return to_arrow_schema(frame.schema, timezone="UTC")
