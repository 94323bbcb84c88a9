"""Delta tables through `deltalake`: the table's log holds `txn(query, batch)` with the files of the batch.

`deltalake` accepts a version that it has seen. So the version is read and the commit made on the same table handle: a concurrent commit of
the same query is then a conflict instead of a duplicate.
"""

from __future__ import annotations

import json
import os

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.transaction import AddAction, RemoveAction

from headrace.spark.pipelines.tables.columns import added_columns, widened
from headrace.spark.pipelines.tables.parts import Part, sync_directory


class Delta:
    """A Delta table in one directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def schema(self, rows: pa.Schema) -> pa.Schema:
        return widened(rows, {}, "Delta")

    def last(self, query_id: str) -> int | None:
        return self._open().transaction_version(query_id) if self._exists() else None

    def parts_directory(self, query_id: str) -> str:
        # Files without a commit are invisible; `vacuum` of any Delta tool removes them.
        return self.path

    def commit(self, query_id: str, version: int, parts: list[Part], schema: pa.Schema, *, overwrite: bool) -> None:
        table = self._ready(schema)
        if _is_done(table, query_id, version):
            return
        sync_directory(self.path)
        actions: list[AddAction | RemoveAction] = [
            AddAction(part.name, part.size_bytes, {}, self._modified_ms(part), True, json.dumps({"numRecords": part.rows}))
            for part in parts
        ]
        table.create_write_transaction(
            actions, "overwrite" if overwrite else "append", table.schema(), commit_properties=_mark(query_id, version)
        )

    def merge(self, query_id: str, version: int, rows: pa.Table, keys: tuple[str, ...]) -> None:
        table = self._ready(rows.schema)
        if _is_done(table, query_id, version):
            return
        same = " AND ".join(f'(kept."{key}" IS NOT DISTINCT FROM new."{key}")' for key in keys)
        merger = table.merge(rows, same, source_alias="new", target_alias="kept", commit_properties=_mark(query_id, version))
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    def _exists(self) -> bool:
        return DeltaTable.is_deltatable(self.path)

    def _open(self) -> DeltaTable:
        return DeltaTable(self.path)

    def _ready(self, schema: pa.Schema) -> DeltaTable:
        """Open or create the table, and add missing columns."""
        if not self._exists():
            os.makedirs(self.path, exist_ok=True)
            return DeltaTable.create(self.path, Schema.from_arrow(schema), mode="ignore")
        table = self._open()
        held = pa.schema(table.schema().to_arrow())
        if new := added_columns(held, schema, f"the Delta table {self.path}"):
            table.alter.add_columns([Field.from_arrow(field.with_nullable(True)) for field in new])
            table = self._open()
        return table

    def _modified_ms(self, part: Part) -> int:
        return int(os.path.getmtime(os.path.join(self.path, part.name)) * 1000)


def _is_done(table: DeltaTable, query_id: str, version: int) -> bool:
    last = table.transaction_version(query_id)
    return last is not None and last >= version


def _mark(query_id: str, version: int) -> CommitProperties:
    # No automatic retries: after a conflict the version must be read again, which the restart of the query does.
    return CommitProperties(app_transactions=[Transaction(query_id, version)], max_commit_retries=0)
