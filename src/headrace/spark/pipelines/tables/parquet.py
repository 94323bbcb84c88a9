"""Directory of Parquet files that any reader can read as a table: `*.parquet` is the data.

    DIR/part-….parquet                      committed
    DIR/_headrace/QUERY.json                the last batch of a query and the names of its files
    DIR/_headrace/QUERY/part-….parquet      written, not committed

Replacing QUERY.json is the commit. The files it names are then moved up, one by one; after a crash the next start moves the rest. A reader
never sees a row twice or an uncommitted row, but may see only a part of the last batch during the move.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.spark.pipelines.tables.columns import added_columns, widened
from headrace.spark.pipelines.tables.parts import Part, sync_directory


@dataclass(frozen=True, slots=True)
class Mark:
    """The last batch of a query that was committed."""

    batch: int
    files: list[str]


class Parquet:
    """A directory of Parquet files."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._marks = self.path / "_headrace"

    def schema(self, rows: pa.Schema) -> pa.Schema:
        """Return the schema, checked against the newest file, because readers treat all files as one table."""
        schema = widened(rows, {}, "Parquet")
        files = sorted(self.path.glob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
        if files:
            added_columns(pq.read_schema(files[-1]), schema, f"the Parquet files in {self.path}")
        return schema

    def last(self, query_id: str) -> int | None:
        mark = self._mark(query_id)
        if mark is None:
            return None
        self._move(query_id, mark.files)
        return mark.batch

    def parts_directory(self, query_id: str) -> str:
        directory = self._marks / query_id
        directory.mkdir(parents=True, exist_ok=True)
        mark = self._mark(query_id)
        if mark is not None:
            self._move(query_id, mark.files)
        for left in directory.iterdir():
            left.unlink()
        return str(directory)

    def commit(self, query_id: str, version: int, parts: list[Part], schema: pa.Schema, *, overwrite: bool) -> None:
        assert not overwrite, "the model allows append only"
        mark = self._mark(query_id)
        if mark is not None and mark.batch >= version:
            return
        sync_directory(str(self._marks / query_id))
        names = [part.name for part in parts]
        temporary = self._marks / f".{query_id}.json"
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump({"batch": version, "files": names}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self._marks / f"{query_id}.json")
        sync_directory(str(self._marks))
        self._move(query_id, names)

    def merge(self, query_id: str, version: int, rows: pa.Table, keys: tuple[str, ...]) -> None:
        raise AssertionError("the model allows append only")

    def _mark(self, query_id: str) -> Mark | None:
        try:
            found = json.loads((self._marks / f"{query_id}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Mark(found["batch"], found["files"])

    def _move(self, query_id: str, names: list[str]) -> None:
        waiting = [name for name in names if (self._marks / query_id / name).exists()]
        for name in waiting:
            (self._marks / query_id / name).rename(self.path / name)
        if waiting:
            sync_directory(str(self.path))
