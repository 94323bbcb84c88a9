"""Iceberg tables through `pyiceberg`, with a catalog in a SQLite file inside the directory.

The last batch of a query is a property of the table, set in the same commit that adds the files; each snapshot names its batch too.
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
_APP, _BATCH, _LAST = "headrace.query", "headrace.batch", "headrace.last."
SNAPSHOTS_MAX, SNAPSHOTS_KEPT = 60, 30
"""When a table has more than the first, those beyond the second are forgotten."""

_PROPERTIES: Final = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "commit.manifest-merge.enabled": "true",
}
"""A stream commits often: old descriptions of the table are not kept for ever, and lists of files are merged."""
# A key that is new has nothing to delete; that is no news to anybody.
warnings.filterwarnings("ignore", "Delete operation did not match any records", UserWarning)
_SMALL: Final = {pa.int8(): pa.int32(), pa.int16(): pa.int32()}


class Iceberg:
    """One table of the catalog of a directory; `name` is `namespace.table`."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        self._catalog: SqlCatalog | None = None

    def schema(self, rows: pa.Schema) -> pa.Schema:
        return widened(rows, _SMALL, "Iceberg")

    def last(self, app: str) -> int | None:
        table = self._load()
        return None if table is None else _last(table, app)

    def parts_directory(self, app: str) -> str:
        return os.path.join(self.path, *self.name.split("."), "data")

    def commit(self, app: str, version: int, parts: list[Part], schema: pa.Schema, *, overwrite: bool) -> None:
        table = self._ready(schema)
        if _is_done(table, app, version):
            return
        directory = self.parts_directory(app)
        sync_directory(directory)
        mark = {_APP: app, _BATCH: str(version)}
        with table.transaction() as change:
            if overwrite and table.current_snapshot() is not None:
                change.delete(AlwaysTrue(), snapshot_properties=mark)
            if parts:
                # Names hold a random number: there is nothing to look for among the files that are there.
                change.add_files([os.path.join(directory, part.name) for part in parts], mark, check_duplicate_files=False)
            change.set_properties({_LAST + app: str(version)})
        _forget_old(table)

    def merge(self, app: str, version: int, rows: pa.Table, keys: tuple[str, ...]) -> None:
        table = self._ready(rows.schema)
        if _is_done(table, app, version):
            return
        mark = {_APP: app, _BATCH: str(version)}
        with_null = reduce(pc.or_, (pc.is_null(rows.column(key)) for key in keys))
        with table.transaction() as change:
            change.upsert(rows.filter(pc.invert(with_null)), join_cols=list(keys), snapshot_properties=mark)
            # `upsert` knows no null in a key, and a group of rows without one is as good as any other.
            if (rest := rows.filter(with_null)).num_rows:
                change.delete(reduce(Or, (_same_key(row) for row in rest.select(list(keys)).to_pylist())), snapshot_properties=mark)
                change.append(rest, snapshot_properties=mark)
            change.set_properties({_LAST + app: str(version)})
        _forget_old(table)

    def catalog(self) -> SqlCatalog:
        """The catalog of the directory, made if it is not there."""
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
    """Drop the oldest snapshots, not what is in the table. Each commit handles all of them again: with thousands it would take seconds."""
    snapshots = table.snapshots()
    if len(snapshots) > SNAPSHOTS_MAX:
        oldest = sorted(snapshots, key=lambda each: each.sequence_number or 0)[: len(snapshots) - SNAPSHOTS_KEPT]
        table.maintenance.expire_snapshots().by_ids([each.snapshot_id for each in oldest]).commit()


def _last(table: IcebergTable, app: str) -> int | None:
    found = table.properties.get(_LAST + app)
    return None if found is None else int(found)


def _is_done(table: IcebergTable, app: str, version: int) -> bool:
    last = _last(table, app)
    return last is not None and last >= version
