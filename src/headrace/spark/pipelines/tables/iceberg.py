"""Iceberg tables through `pyiceberg`, with a catalog in an SQLite file in the directory.

The last batch of a query is a property of the table, set in the commit that adds the files. Each snapshot also names its batch.
"""

from __future__ import annotations

import os
import warnings
from functools import reduce
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, IsNull, Or, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.table import Table as IcebergTable

from headrace.spark.pipelines.tables.columns import added_columns, widened
from headrace.spark.pipelines.tables.parts import Part, sync_directory

CATALOG_FILE: Final = "catalog.db"
_QUERY, _BATCH, _LAST = "headrace.query", "headrace.batch", "headrace.last."
SNAPSHOTS_MAX, SNAPSHOTS_KEPT = 60, 30
"""Above `SNAPSHOTS_MAX` snapshots, all but the last `SNAPSHOTS_KEPT` are expired."""

_PROPERTIES: Final = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "commit.manifest-merge.enabled": "true",
}
"""A stream commits often: delete old metadata files and merge manifests."""
# The upsert of a new key deletes nothing.
warnings.filterwarnings("ignore", "Delete operation did not match any records", UserWarning)
_SMALL: Final = {pa.int8(): pa.int32(), pa.int16(): pa.int32()}


class Iceberg:
    """An Iceberg table in the catalog of a directory; `name` is `namespace.table`."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        self._catalog: SqlCatalog | None = None

    def schema(self, rows: pa.Schema) -> pa.Schema:
        return widened(rows, _SMALL, "Iceberg")

    def last(self, query_id: str) -> int | None:
        table = self._load()
        return None if table is None else _last(table, query_id)

    def parts_directory(self, query_id: str) -> str:
        return os.path.join(self.path, *self.name.split("."), "data")

    def commit(self, query_id: str, version: int, parts: list[Part], schema: pa.Schema, *, overwrite: bool) -> None:
        table = self._ready(schema)
        if _is_done(table, query_id, version):
            return
        directory = self.parts_directory(query_id)
        sync_directory(directory)
        mark = {_QUERY: query_id, _BATCH: str(version)}
        with table.transaction() as change:
            if overwrite and table.current_snapshot() is not None:
                change.delete(AlwaysTrue(), snapshot_properties=mark)
            if parts:
                # File names are random, so there are no duplicates.
                change.add_files([os.path.join(directory, part.name) for part in parts], mark, check_duplicate_files=False)
            change.set_properties({_LAST + query_id: str(version)})
        _forget_old(table)

    def merge(self, query_id: str, version: int, rows: pa.Table, keys: tuple[str, ...]) -> None:
        table = self._ready(rows.schema)
        if _is_done(table, query_id, version):
            return
        mark = {_QUERY: query_id, _BATCH: str(version)}
        with_null = reduce(pc.or_, (pc.is_null(rows.column(key)) for key in keys))
        with table.transaction() as change:
            change.upsert(rows.filter(pc.invert(with_null)), join_cols=list(keys), snapshot_properties=mark)
            # `upsert` does not support null in a key.
            if (rest := rows.filter(with_null)).num_rows:
                change.delete(reduce(Or, (_same_key(row) for row in rest.select(list(keys)).to_pylist())), snapshot_properties=mark)
                change.append(rest, snapshot_properties=mark)
            change.set_properties({_LAST + query_id: str(version)})
        _forget_old(table)

    def catalog(self) -> SqlCatalog:
        """Open or create the catalog of the directory."""
        if self._catalog is None:
            os.makedirs(self.path, exist_ok=True)
            place = os.path.abspath(self.path)
            self._catalog = SqlCatalog("headrace", uri=f"sqlite:///{place}/{CATALOG_FILE}", warehouse=f"file://{place}")
        return self._catalog

    def _load(self) -> IcebergTable | None:
        if not os.path.exists(os.path.join(self.path, CATALOG_FILE)):
            return None
        try:
            return self.catalog().load_table(self.name)
        except NoSuchTableError:
            return None

    def _ready(self, schema: pa.Schema) -> IcebergTable:
        table = self._load()
        if table is None:
            self.catalog().create_namespace_if_not_exists(self.name.partition(".")[0])
            place = f"file://{os.path.dirname(self.parts_directory(''))}"
            return self.catalog().create_table(self.name, schema, location=place, properties=_PROPERTIES)
        if added_columns(table.schema().as_arrow(), schema, f"the Iceberg table {self.name} in {self.path}"):
            with table.update_schema() as change:
                change.union_by_name(schema)
            table.refresh()
        return table


def _same_key(row: dict[str, Any]) -> BooleanExpression:
    parts: list[BooleanExpression] = [
        IsNull(term=Reference(key)) if value is None else EqualTo(term=Reference(key), value=literal(value)) for key, value in row.items()
    ]
    return reduce(And, parts)


def _forget_old(table: IcebergTable) -> None:
    """Expire the oldest snapshots; the rows stay. Each commit rewrites the list of snapshots, which takes seconds with thousands."""
    snapshots = table.snapshots()
    if len(snapshots) > SNAPSHOTS_MAX:
        oldest = sorted(snapshots, key=lambda each: each.sequence_number or 0)[: len(snapshots) - SNAPSHOTS_KEPT]
        table.maintenance.expire_snapshots().by_ids([each.snapshot_id for each in oldest]).commit()


def _last(table: IcebergTable, query_id: str) -> int | None:
    found = table.properties.get(_LAST + query_id)
    return None if found is None else int(found)


def _is_done(table: IcebergTable, query_id: str, version: int) -> bool:
    last = _last(table, query_id)
    return last is not None and last >= version
