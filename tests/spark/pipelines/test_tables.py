"""Tables commit a repeated batch once, and other readers see exactly the committed rows."""

from __future__ import annotations

import datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from headrace.spark.pipelines.model import Sink
from headrace.spark.pipelines.tables import Table, TableError, iceberg
from headrace.spark.pipelines.tables.iceberg import Iceberg
from headrace.spark.pipelines.tables.parquet import Parquet
from headrace.spark.pipelines.tables.parts import Part, PartWriter
from headrace.spark.pipelines.tables.writing import latest, open_table

KINDS = ("delta", "iceberg", "parquet")


def table_at(kind: str, path: Path) -> Table:
    return open_table(Sink("totals", "step", kind), str(path))


def rows_of(kind: str, path: Path) -> list[dict[str, object]]:
    """Read the table with an independent reader."""
    if kind == "delta":
        rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    elif kind == "iceberg":
        rows = Iceberg(str(path), "headrace.totals").catalog().load_table("headrace.totals").scan().to_arrow().to_pylist()
    else:
        found = duckdb.sql(f"select * from read_parquet('{path}/*.parquet', union_by_name=true)")
        assert found is not None
        rows = found.to_arrow_table().to_pylist()
    return sorted(rows, key=lambda row: str(row["id"]))


def batch_of(*ids: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int64()), "name": pa.array([f"n{id}" for id in ids])})


def staged(table: Table, batch: pa.RecordBatch, query_id: str = "query", version: int = 0) -> tuple[list[Part], pa.Schema]:
    """Write the files that tasks would write."""
    schema = table.schema(batch.schema)
    directory = table.parts_directory(query_id)
    Path(directory).mkdir(parents=True, exist_ok=True)
    [report] = PartWriter(directory, f"part-{version}", schema.serialize().to_pybytes())([batch])
    return [Part(**row) for row in report.to_pylist()], schema


def put(table: Table, version: int, batch: pa.RecordBatch, *, query_id: str = "query", overwrite: bool = False) -> None:
    parts, schema = staged(table, batch, query_id, version)
    table.commit(query_id, version, parts, schema, overwrite=overwrite)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_comes_again_is_there_once(kind: str, tmp_path: Path) -> None:
    table = table_at(kind, tmp_path)
    assert table.last("query") is None
    put(table, 0, batch_of(1, 2))
    put(table, 1, batch_of(3))
    put(table_at(kind, tmp_path), 1, batch_of(3))  # another process after a crash
    put(table, 0, batch_of(1, 2))
    assert [row["id"] for row in rows_of(kind, tmp_path)] == [1, 2, 3]
    assert table_at(kind, tmp_path).last("query") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_two_queries_into_one_table_do_not_hide_each_others_batches(kind: str, tmp_path: Path) -> None:
    table = table_at(kind, tmp_path)
    put(table, 5, batch_of(1), query_id="first")
    put(table, 0, batch_of(2), query_id="second")
    put(table, 6, batch_of(3), query_id="first")
    assert [row["id"] for row in rows_of(kind, tmp_path)] == [1, 2, 3]
    assert (table.last("first"), table.last("second")) == (6, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_were_written_but_not_committed_are_invisible(kind: str, tmp_path: Path) -> None:
    table = table_at(kind, tmp_path)
    put(table, 0, batch_of(1))
    staged(table, batch_of(7), version=1)
    assert [row["id"] for row in rows_of(kind, tmp_path)] == [1]
    put(table, 1, batch_of(2))
    assert [row["id"] for row in rows_of(kind, tmp_path)] == [1, 2]


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_complete_result_replaces_the_one_before(kind: str, tmp_path: Path) -> None:
    table = table_at(kind, tmp_path)
    for version, ids in enumerate([(1, 2), (3,), (4, 5)]):
        put(table, version, batch_of(*ids), overwrite=True)
    put(table, 1, batch_of(3), overwrite=True)
    assert [row["id"] for row in rows_of(kind, tmp_path)] == [4, 5]


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_changed_row_replaces_the_one_with_its_key(kind: str, tmp_path: Path) -> None:
    table = table_at(kind, tmp_path)

    def totals(version: int, **counts: int) -> None:
        rows = pa.table({"id": pa.array(list(counts)), "count": pa.array(list(counts.values()), pa.int64())})
        table.merge("query", version, rows, ("id",))

    totals(0, a=1, b=1)
    totals(1, b=2, c=1)
    totals(2, a=5)
    totals(1, b=2, c=1)
    assert {row["id"]: row["count"] for row in rows_of(kind, tmp_path)} == {"a": 5, "b": 2, "c": 1}
    assert table.last("query") == 2


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_null_in_the_key_of_a_merge_finds_its_row(kind: str, tmp_path: Path) -> None:
    table = table_at(kind, tmp_path)
    for version, count in enumerate([1, 2]):
        rows = pa.table({"id": pa.array([None, "a"], pa.string()), "count": pa.array([count, count], pa.int64())})
        table.merge("query", version, rows, ("id",))
    assert rows_of(kind, tmp_path) == [{"id": None, "count": 2}, {"id": "a", "count": 2}]


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_null_in_one_of_two_keys_finds_its_row_and_no_other(kind: str, tmp_path: Path) -> None:
    table = table_at(kind, tmp_path)
    for version, counts in enumerate([(1, 1, 1), (2, 3, 4)]):
        at = [datetime.datetime(2026, 1, day, tzinfo=datetime.UTC) for day in (1, 1, 2)]
        table.merge("query", version, pa.table({"id": at, "city": [None, "x", None], "count": counts}), ("id", "city"))
    found = sorted((f"{row['id']:%d}", row["city"] or "", row["count"]) for row in rows_of(kind, tmp_path))
    assert found == [("01", "", 2), ("01", "x", 3), ("02", "", 4)]


def test_a_window_may_be_the_key_of_a_merge(tmp_path: Path) -> None:
    table = table_at("delta", tmp_path)
    for version in range(2):
        table.merge("query", version, pa.table({"id": [{"start": 1, "end": 2}, {"start": 2, "end": 3}], "count": [version, 5]}), ("id",))
    assert [row["count"] for row in rows_of("delta", tmp_path)] == [1, 5]


def test_of_rows_with_one_key_the_last_is_merged() -> None:
    rows = pa.table({"id": ["a", None, "a", "b", None], "day": [1, 1, 1, 1, 1], "count": [1, 2, 3, 4, 5]})
    assert latest(rows, ("id", "day")).select(["id", "count"]).to_pylist() == [
        {"id": "a", "count": 3},
        {"id": "b", "count": 4},
        {"id": None, "count": 5},
    ]
    assert latest(rows, ("count",)) is rows
    window = [{"start": 1, "end": 2}, {"start": 1, "end": 2}, {"start": 1, "end": 3}]
    assert latest(pa.table({"window": window, "count": [1, 2, 3]}), ("window",)).column("count").to_pylist() == [2, 3]
    assert latest(rows.slice(0, 0), ("id",)).num_rows == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_that_is_new_is_added(kind: str, tmp_path: Path) -> None:
    table = table_at(kind, tmp_path)
    put(table, 0, batch_of(1))
    put(table, 1, batch_of(2).append_column("price", pa.array([1.5])))
    assert rows_of(kind, tmp_path) == [{"id": 1, "name": "n1", "price": None}, {"id": 2, "name": "n2", "price": 1.5}]


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_another_type_is_rejected_with_both_types(kind: str, tmp_path: Path) -> None:
    table = table_at(kind, tmp_path)
    put(table, 0, batch_of(1))
    other = pa.RecordBatch.from_pydict({"id": ["one"], "name": ["n1"]})
    with pytest.raises(TableError, match="column id of the .* is int64, but the rows have string"):
        put(table, 1, other)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_spark_survives(kind: str, tmp_path: Path) -> None:
    when = datetime.datetime(2026, 11, 15, 10, 0, tzinfo=datetime.UTC)
    row: dict[str, object] = {
        "id": 1, "tiny": 1, "small": 2, "price": 1.5, "flag": True, "day": when.date(), "at": when, "raw": b"\x00\xff",
        "items": [{"sku": "a", "count": 2}], "tags": [("k", "v")], "nothing": None,
    }  # fmt: skip
    schema = pa.schema(
        [
            ("id", pa.int64()), ("tiny", pa.int8()), ("small", pa.int16()), ("price", pa.float64()), ("flag", pa.bool_()),
            ("day", pa.date32()), ("at", pa.timestamp("us", "Europe/Paris")), ("raw", pa.binary()),
            ("items", pa.list_(pa.field("element", pa.struct([("sku", pa.string()), ("count", pa.int32())])))),
            ("tags", pa.map_(pa.string(), pa.string())), ("nothing", pa.string()),
        ]
    )  # fmt: skip
    put(table_at(kind, tmp_path), 0, pa.RecordBatch.from_pylist([row], schema=schema))
    [found] = rows_of(kind, tmp_path)
    assert found["at"] == when
    assert {**found, "at": when, "tags": dict(found["tags"])} == {**row, "tags": {"k": "v"}}  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_without_a_name_in_tables_is_rejected_with_the_column(kind: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="column gap: .* has no type for duration"):
        table_at(kind, tmp_path).schema(pa.schema([("gap", pa.duration("us"))]))


def test_files_of_a_parquet_commit_that_were_not_moved_are_moved_later(tmp_path: Path) -> None:
    table = Parquet(str(tmp_path))
    parts, schema = staged(table, batch_of(1, 2))
    moves: list[str] = []
    table._move = lambda query_id, names: moves.extend(names)  # type: ignore[method-assign]  # the process dies before the first move
    table.commit("query", 0, parts, schema, overwrite=False)
    assert len(moves) == 1
    assert list(tmp_path.glob("*.parquet")) == []
    later = Parquet(str(tmp_path))
    assert later.last("query") == 0
    assert [row["id"] for row in rows_of("parquet", tmp_path)] == [1, 2]
    put(later, 0, batch_of(1, 2))
    assert [row["id"] for row in rows_of("parquet", tmp_path)] == [1, 2]


def test_a_file_that_has_grown_is_closed_and_another_begun(tmp_path: Path) -> None:
    batches = [batch_of(*range(start, start + 1000)) for start in (0, 1000, 2000)]
    writer = PartWriter(str(tmp_path), "part", batches[0].schema.serialize().to_pybytes(), file_bytes_target=1)
    [report] = writer(iter(batches))
    assert report.column("rows").to_pylist() == [1000, 1000, 1000]
    assert sum(pq.read_metadata(tmp_path / name).num_rows for name in report.column("name").to_pylist()) == 3000


def test_a_task_without_rows_writes_no_file(tmp_path: Path) -> None:
    [report] = PartWriter(str(tmp_path), "part", batch_of(1).schema.serialize().to_pybytes())([batch_of()])
    assert report.num_rows == 0
    assert list(tmp_path.iterdir()) == []


def test_an_iceberg_table_forgets_old_snapshots_and_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg, "SNAPSHOTS_MAX", 5)
    monkeypatch.setattr(iceberg, "SNAPSHOTS_KEPT", 2)
    table = table_at("iceberg", tmp_path)
    for version in range(9):
        put(table, version, batch_of(version))
    assert [row["id"] for row in rows_of("iceberg", tmp_path)] == list(range(9))
    held = Iceberg(str(tmp_path), "headrace.totals").catalog().load_table("headrace.totals").snapshots()
    assert 2 <= len(held) <= 5
    put(table, 3, batch_of(3))
    assert len(rows_of("iceberg", tmp_path)) == 9
