"""Tables with exactly-once writes of micro-batches.

    tasks:   rows ──▶ Parquet files, not visible yet
    driver:  their names ──▶ one commit of the table, which also holds (query, batch)

A batch that is repeated after a crash finds its number in the table and changes nothing. Rows do not pass through the driver, except in a
merge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.spark.pipelines.tables.parts import Part


class TableError(HeadraceError):
    """The table cannot store the rows: wrong columns, or another kind of table in the directory."""


class Table(Protocol):
    """Interface of the three kinds of table. `query_id` is the id of a query, `version` that of its batch."""

    def schema(self, rows: pa.Schema) -> pa.Schema:
        """Return the columns in the types of this kind of table. Raises `TableError` for an unsupported type."""

    def last(self, query_id: str) -> int | None:
        """Return the last committed batch of this query."""

    def parts_directory(self, query_id: str) -> str:
        """Return the directory for files of tasks, after removing the files of an unfinished batch if the table allows it."""

    def commit(self, query_id: str, version: int, parts: list[Part], schema: pa.Schema, *, overwrite: bool) -> None:
        """Add the files, or replace all rows by them, atomically."""

    def merge(self, query_id: str, version: int, rows: pa.Table, keys: tuple[str, ...]) -> None:
        """Replace rows with the same keys and add the others, atomically."""
