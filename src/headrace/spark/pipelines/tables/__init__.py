"""Tables that take a micro-batch exactly once.

    tasks:   rows ──▶ Parquet files, which nobody sees yet
    driver:  their names ──▶ one commit of the table, which also says (query, batch)

A batch that comes again after a crash finds its own mark in the table and changes nothing. Rows never pass through the driver, except
those of a merge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.spark.pipelines.tables.parts import Part


class TableFault(HeadraceError):
    """A table that cannot take the rows: other columns, another kind of table at that place."""


class Table(Protocol):
    """What the three kinds of table have in common. `app` is the id of a query, `version` that of its batch."""

    def schema(self, rows: pa.Schema) -> pa.Schema:
        """The columns as this kind of table can hold them; raises `TableFault` for a type it does not know."""

    def last(self, app: str) -> int | None:
        """The last batch of this query that the table holds."""

    def parts_directory(self, app: str) -> str:
        """Where tasks may put files; what an unfinished batch left there is cleared away where that is ours to do."""

    def commit(self, app: str, version: int, parts: list[Part], schema: pa.Schema, *, overwrite: bool) -> None:
        """Add the files, or replace everything by them, in one step."""

    def merge(self, app: str, version: int, rows: pa.Table, keys: tuple[str, ...]) -> None:
        """Replace rows that have the same keys, add the others, in one step."""
