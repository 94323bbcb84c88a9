"""A table as the end of a streaming query: what `foreachBatch` calls for each micro-batch."""

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
    """The table of a sink; each kind imports its own library. Raises `MissingExtra` if that is not installed."""
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
    """Write a batch to a table once, however often it comes."""

    table: Table
    mode: str
    keys: tuple[str, ...] = ()

    def write(self, frame: DataFrame, batch: int) -> None:
        # Both names are the query's for its whole life, over restarts; the checkpoint keeps them.
        app = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert app, "foreachBatch runs inside a query"
        last = self.table.last(app)
        if last is not None and last >= batch:
            # The rows are there. The plan must run all the same: it is what moves the state of aggregations and joins forward.
            frame.write.format("noop").mode("overwrite").save()
            return
        schema = self.table.schema(arrow_schema(frame))
        if self.mode == "update":
            self.table.merge(app, batch, latest(frame.toArrow().cast(schema), self.keys), self.keys)
            return
        parts = write_parts(frame, self.table.parts_directory(app), f"part-{batch:08}", schema)
        if parts or self.mode == "complete":
            self.table.commit(app, batch, parts, schema, overwrite=self.mode == "complete")


def latest(rows: pa.Table, keys: tuple[str, ...]) -> pa.Table:
    """Of rows with the same keys the last, which is the newest where the rows come in the order of their topic.

    A table would take both, or neither: Delta adds each of them if the key is new, and fails if it is not.
    """
    ranked = rows.select(list(keys))
    while any(pa.types.is_struct(field.type) for field in ranked.schema):
        ranked = ranked.flatten()  # a window is a struct, and Arrow groups by what is in it only
    names = [f"{index}" for index in range(ranked.num_columns)]
    ranked = ranked.rename_columns(names).append_column("", pa.array(range(rows.num_rows), pa.int64()))
    last = ranked.group_by(names, use_threads=False).aggregate([("", "max")]).column("_max")
    return rows if len(last) == rows.num_rows else rows.take(last.combine_chunks().sort())


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """The columns as Arrow sees them, times in UTC."""
    return to_arrow_schema(frame.schema, timezone="UTC")
