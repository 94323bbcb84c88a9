"""Delta tables through `deltalake`: the log of the table holds `txn(query, batch)` beside the files of the batch.

`deltalake` does not itself refuse a version it has seen. So the version is looked up and the commit made on the same handle: another
commit of the same query that came in between is then a conflict, and not a double.
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
    """One table, in one directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def schema(self, rows: pa.Schema) -> pa.Schema:
        return widened(rows, {}, "Delta")

    def last(self, app: str) -> int | None:
        return self._open().transaction_version(app) if self._exists() else None

    def parts_directory(self, app: str) -> str:
        # Files that no commit names are invisible; `vacuum` of any Delta tool clears them away.
        return self.path

    def commit(self, app: str, version: int, parts: list[Part], schema: pa.Schema, *, overwrite: bool) -> None:
        table = self._ready(schema)
        if _is_done(table, app, version):
            return
        sync_directory(self.path)
        actions: list[AddAction | RemoveAction] = [
            AddAction(part.name, part.size_bytes, {}, self._modified_ms(part), True, json.dumps({"numRecords": part.rows}))
            for part in parts
        ]
        table.create_write_transaction(
            actions, "overwrite" if overwrite else "append", table.schema(), commit_properties=_mark(app, version)
        )

    def merge(self, app: str, version: int, rows: pa.Table, keys: tuple[str, ...]) -> None:
        table = self._ready(rows.schema)
        if _is_done(table, app, version):
            return
        same = " AND ".join(f'(kept."{key}" IS NOT DISTINCT FROM new."{key}")' for key in keys)
        merger = table.merge(rows, same, source_alias="new", target_alias="kept", commit_properties=_mark(app, version))
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    def _exists(self) -> bool:
        return DeltaTable.is_deltatable(self.path)

    def _open(self) -> DeltaTable:
        return DeltaTable(self.path)

    def _ready(self, schema: pa.Schema) -> DeltaTable:
        """The table as it is now, made if it is not there, with columns added that it does not have."""
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


def _is_done(table: DeltaTable, app: str, version: int) -> bool:
    last = table.transaction_version(app)
    return last is not None and last >= version


def _mark(app: str, version: int) -> CommitProperties:
    # No blind retries: a commit that lost a race has to look at the version again, and the restart of the query does.
    return CommitProperties(app_transactions=[Transaction(app, version)], max_commit_retries=0)
