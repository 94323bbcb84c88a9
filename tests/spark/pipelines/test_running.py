"""Pipelines in the shared session with the shared broker."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headrace.errors import Unavailable
from headrace.flight.client import FlightClient
from headrace.spark.pipelines import Pipeline
from headrace.spark.pipelines.archive import archive_pipeline
from headrace.spark.pipelines.checking import describe
from headrace.spark.pipelines.executions import AlreadyRunning, Execution, find, status_in
from headrace.spark.pipelines.model import Sink
from headrace.spark.pipelines.plan import PlanError, check_topics
from headrace.spark.pipelines.progress import QueryState
from headrace.spark.pipelines.rejection import each, reject
from headrace.spark.pipelines.runner import PipelineFailed
from headrace.spark.pipelines.tables.parquet import Parquet
from tests.spark.pipelines.conftest import Runs
from tests.spark.pipelines.test_tables import rows_of
from tests.spark.serving import FlightBroker
from tests.spark.values.conftest import SchemaAdmin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def publish(flight_client: FlightClient, topic: str, *values: object) -> None:
    texts = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    flight_client.append(topic, [pa.RecordBatch.from_pydict({"value": pa.array(texts, pa.binary())})])


def values(flight_client: FlightClient, topic: str) -> list[bytes]:
    found: list[bytes] = []
    for partition, state in enumerate(flight_client.describe([topic])[topic].partitions):
        for batch in flight_client.read(topic, partition, state.first, state.end, columns=["value"]):
            found += batch.column("value").to_pylist()
    return found


def records(flight_client: FlightClient, topic: str) -> list[Any]:
    return [json.loads(value) for value in values(flight_client, topic)]


def dead_letters(flight_client: FlightClient, topic: str) -> list[bytes]:
    return values(flight_client, f"{topic}.dlq") if f"{topic}.dlq" in flight_client.topics() else []


def orders(*ids: int) -> list[dict[str, object]]:
    return [{"id": id, "amount": id * 1.5, "at": f"2026-11-15T10:{id % 60:02}:00Z"} for id in ids]


COLUMNS = "id long, amount double, at timestamp"


def test_rows_go_from_topic_through_sql_to_topic_once(
    flight_client: FlightClient, fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs
) -> None:
    source, target = fresh_topic(partitions=2), fresh_topic("-out")
    pipeline.source("orders", topic=source, format="json", schema=COLUMNS)
    pipeline.step("large", sql="select id, amount from orders where amount > 3")
    pipeline.sink("out", "large", kind="topic", topic=target, key="id")
    publish(flight_client, source, *orders(1, 2, 3, 4))
    outcome = run(pipeline)
    assert (outcome.state, outcome.queries[0].rows_total) == ("finished", 4)
    publish(flight_client, source, *orders(5, 1))
    run(pipeline)
    run(pipeline)
    assert sorted(row["id"] for row in records(flight_client, target)) == [3, 4, 5]
    [batch] = flight_client.read(target, 0, 0, 3, columns=["key", "value"])
    assert batch.to_pylist()[0].keys() == {"key", "value"}
    assert {int(row["key"]) for row in batch.to_pylist()} == {3, 4, 5}


@pytest.mark.parametrize("kind", ["delta", "iceberg", "parquet"])
def test_a_table_holds_each_row_once_though_its_batch_comes_again(
    kind: str, flight_client: FlightClient, fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs, tmp_path: Path
) -> None:
    source = fresh_topic(partitions=2)
    pipeline.source("orders", topic=source, format="json", schema=COLUMNS)
    more = {"table": "headrace.totals"} if kind == "iceberg" else {}
    pipeline.sink("rows", "orders", kind=kind, path="rows", **more)
    publish(flight_client, source, *orders(1, 2, 3))
    run(pipeline)
    publish(flight_client, source, *orders(4))
    run(pipeline)
    commits = tmp_path / "state" / "rows" / "commits"
    last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
    assert last == 1
    (commits / str(last)).unlink()  # the process died between the commit of the table and that of Spark
    (commits / f".{last}.crc").unlink(missing_ok=True)
    run(pipeline)
    assert [row["id"] for row in rows_of(kind, tmp_path / "rows")] == [1, 2, 3, 4]


def test_a_complete_result_replaces_the_table(
    flight_client: FlightClient, fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs, tmp_path: Path
) -> None:
    source = fresh_topic()
    pipeline.source("orders", topic=source, format="json", schema=COLUMNS)
    pipeline.step("counts", sql="select id % 2 = 0 as even, count(*) as n from orders group by 1")
    pipeline.sink("counts", "counts", kind="delta", path="counts", mode="complete")
    publish(flight_client, source, *orders(1, 2, 3))
    run(pipeline)
    publish(flight_client, source, *orders(4, 5))
    run(pipeline)
    rows = DeltaTable(tmp_path / "counts").to_pyarrow_table().to_pylist()
    assert {row["even"]: row["n"] for row in rows} == {True: 2, False: 3}


def test_functions_take_what_their_parameters_name_and_travel_to_the_tasks(
    flight_client: FlightClient, fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs, tmp_path: Path
) -> None:
    source, people, target = fresh_topic(), fresh_topic("-people"), fresh_topic("-out")
    (tmp_path / "my_numbers.py").write_text("def doubled(value):\n    return value * 2\n")
    (tmp_path / "my_steps.py").write_text(
        "from pyspark.sql import functions as F\n\nfrom my_numbers import doubled\n\n\n"
        "def joined(orders, people, spark):\n"
        "    twice = F.udf(doubled, 'double')\n"
        "    return orders.join(people, orders.id == people.who).select(people.name, twice('amount').alias('amount'))\n"
    )
    pipeline.source("orders", topic=source, format="json", schema=COLUMNS)
    pipeline.source("people", topic=people, format="json", schema="who long, name string", read="table")
    pipeline.step("joined", python="my_steps:joined")
    pipeline.sink("out", "joined", kind="topic", topic=target)
    publish(flight_client, people, {"who": 1, "name": "anna"}, {"who": 2, "name": "ben"})
    publish(flight_client, source, *orders(1, 2, 3))
    run(pipeline)
    assert sorted((row["name"], row["amount"]) for row in records(flight_client, target)) == [("anna", 3.0), ("ben", 6.0)]


def test_rows_that_a_function_rejects_are_dead_letters_with_their_reason(
    flight_client: FlightClient, broker: FlightBroker, fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs
) -> None:
    source, target = fresh_topic(), fresh_topic("-out")
    pipeline.source("orders", topic=source, format="json", schema=COLUMNS)

    def parsed(row: dict[str, Any]) -> dict[str, Any] | None:
        if row["id"] == 4:
            return None
        if row["id"] == 6:
            return {"id": "six"}
        return {"id": row["id"], "inverse": 1 / (row["id"] - 3)}

    @pipeline.step
    def checked(orders: DataFrame) -> DataFrame:
        return each(reject(orders, "case when id = 1 then 'the first is refused' end"), parsed, "id long, inverse double")

    pipeline.sink("out", "checked", kind="topic", topic=target)
    publish(flight_client, source, *orders(1, 2, 3, 4, 5, 6))
    run(pipeline)
    assert sorted((row["id"], row["inverse"]) for row in records(flight_client, target)) == [(2, -1.0), (5, 0.5)]
    reasons = {json.loads(letter.value)["id"]: letter.reason for letter in SchemaAdmin(broker, flight_client).dead_letters(source)}
    assert "six" in reasons.pop(6)
    assert reasons == {1: "pipeline: the first is refused", 3: "pipeline: ZeroDivisionError: division by zero"}


def test_the_columns_come_from_the_schema_that_the_topic_requires(
    flight_client: FlightClient, broker: FlightBroker, fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs
) -> None:
    source, target = fresh_topic(), fresh_topic("-out")
    schema_admin = SchemaAdmin(broker, flight_client)
    fields = {"id": {"type": "integer"}, "topic": {"type": "string"}}
    schema_admin.register(source, "json", {"type": "object", "properties": fields, "required": ["id"]})
    schema_admin.require(source, source)
    # A field with the name of a record column keeps its name, and the record column is renamed.
    pipeline.source("orders", topic=source, format="json", expect={"the id is positive": "id > 0"})
    pipeline.step("named", sql="select id, topic as of_value, record_topic = topic as same from orders")
    pipeline.sink("out", "named", kind="topic", topic=target)
    publish(flight_client, source, {"id": 1, "topic": "mine"}, {"id": -1, "topic": "mine"})
    run(pipeline)
    assert records(flight_client, target) == [{"id": 1, "of_value": "mine", "same": False}]
    assert [letter.reason for letter in schema_admin.dead_letters(source)] == ["pipeline: not met: the id is positive"]


def test_columns_that_are_those_of_a_record_are_written_as_they_are(
    flight_client: FlightClient, fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs
) -> None:
    source, one, other = fresh_topic(), fresh_topic("-one"), fresh_topic("-other")
    pipeline.source("lines", topic=source, format="string")
    pipeline.step("routed", sql=f"select if(value like 'a%', '{one}', '{other}') as topic, upper(value) as value, '7' as key from lines")
    pipeline.sink("out", "routed", kind="topic")
    publish(flight_client, source, b"anna", b"ben")
    run(pipeline)
    assert (values(flight_client, one), values(flight_client, other)) == ([b"ANNA"], [b"BEN"])


def test_a_batch_that_always_fails_ends_the_pipeline_with_its_name_and_its_records(
    flight_client: FlightClient, fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs, tmp_path: Path
) -> None:
    source = fresh_topic()
    pipeline.source("orders", topic=source, format="json", schema=COLUMNS)
    pipeline.step("bad", sql="select id, if(id = 7, raise_error('seven is right out'), 1) as x from orders")
    pipeline.sink("out", "bad", kind="parquet", path="rows")
    publish(flight_client, source, *orders(1))
    run(pipeline)
    publish(flight_client, source, *orders(7))
    with pytest.raises(PipelineFailed) as caught:
        run(pipeline)
    text = str(caught.value)
    assert "seven is right out" in text
    assert f"batch 1 holds {source}[0] 1–1; it failed 3 times in the same way. No record is lost" in text
    status = status_in(tmp_path / "state" / ".headrace")
    assert status is not None
    assert (status["state"], status["queries"][0]["failures"]) == ("failed", 3)
    assert [row["id"] for row in rows_of("parquet", tmp_path / "rows")] == [1]
    pipeline.steps.clear()
    pipeline.step("bad", sql="select id, 1 as x from orders")
    run(pipeline)
    assert [row["id"] for row in rows_of("parquet", tmp_path / "rows")] == [1, 7]


def test_a_failure_that_passes_is_survived(
    flight_client: FlightClient,
    fresh_topic: Callable[..., str],
    pipeline: Pipeline,
    run: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = fresh_topic()
    pipeline.source("orders", topic=source, format="json", schema=COLUMNS)
    pipeline.sink("out", "orders", kind="parquet", path="rows")
    publish(flight_client, source, *orders(1, 2))
    commit, failures = Parquet.commit, iter([OSError("the disk stutters"), OSError("the disk stutters")])

    def stuttering(self: Parquet, *arguments: Any, **more: Any) -> None:
        commit(self, *arguments, **more)
        for failure in failures:
            raise failure

    monkeypatch.setattr(Parquet, "commit", stuttering)
    seen: list[QueryState] = []
    outcome = run(pipeline, on_progress=seen.extend)
    assert (outcome.state, outcome.queries[0].failures) == ("finished", 1)
    assert "OSError: the disk stutters" in {state.error for state in seen}
    assert [row["id"] for row in rows_of("parquet", tmp_path / "rows")] == [1, 2]


def test_an_execution_is_seen_and_stopped_from_outside(
    flight_client: FlightClient, fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs, tmp_path: Path
) -> None:
    from headrace.spark.pipelines.executions import ask_to_stop, executions

    source, target = fresh_topic(), fresh_topic("-out")
    pipeline.source("lines", topic=source, format="string")
    pipeline.sink("out", "lines", kind="topic", topic=target, value="value")
    publish(flight_client, source, b"one")
    outside: list[str] = []

    def watch() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            known = executions()
            if known and known[0]["queries"] and known[0]["queries"][0]["rows_total"] == 1:
                outside.append(known[0]["state"])
                with pytest.raises(AlreadyRunning, match="pipeline p runs already"):
                    Execution("p", str(tmp_path / "state"), file="", now_ms=0).__enter__()
                ask_to_stop(find("p"))
                return
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = run(pipeline, once=False)
    watcher.join()
    assert outside == ["running"]
    assert outcome.state == "stopped"
    assert find(str(tmp_path / "state"))["state"] == "stopped"
    assert values(flight_client, target) == [b"one"]


def test_a_check_shows_offsets_columns_and_sinks_and_runs_nothing(
    flight_client: FlightClient, fresh_topic: Callable[..., str], pipeline: Pipeline, spark: SparkSession, topic: str, tmp_path: Path
) -> None:
    source = fresh_topic(partitions=2)
    publish(flight_client, source, *orders(1))
    pipeline.source("orders", topic=source, format="json", schema=COLUMNS)
    pipeline.step("large", sql="select id, amount as price from orders")
    pipeline.sink("out", "large", kind="topic", topic=f"{topic}-never-made")
    found = describe(spark, pipeline)
    assert sum(at["end"] for at in found.sources[0]["topics"][0]["partitions"]) == 1
    assert found.steps == [{"name": "large", "columns": [{"name": "id", "type": "bigint"}, {"name": "price", "type": "double"}]}]
    tree = found.tree()
    assert f"topic {source}" in tree
    assert "id bigint, price double" in tree
    assert f"out: large → topic {topic}-never-made (append)" in tree
    assert f"{topic}-never-made" not in flight_client.topics()
    assert not (tmp_path / "state" / "out").exists()


@pytest.mark.parametrize(
    ("sql", "sink", "fault"),
    [
        ("select foo from orders", {}, r"steps\.s: A column.*`foo` cannot be resolved.*line 1,? pos 7"),
        ("selec 1", {}, r"steps\.s: Syntax error at or near 'selec'.*line 1, pos 0"),
        ("select * from orderss", {}, r"steps\.s: The table or view `orderss` cannot be found.*pos 14"),
        ("select count(*) as n from orders", {}, r"sinks\.out\.mode: .*[Aa]ppend"),
        ("select id from orders", {"key": "nokey"}, r"sinks\.out: A column.*`nokey` cannot be resolved"),
    ],
)
def test_a_check_names_the_step_and_the_place_in_its_text(
    sql: str, sink: dict[str, str], fault: str, fresh_topic: Callable[..., str], pipeline: Pipeline, spark: SparkSession
) -> None:
    pipeline.source("orders", topic=fresh_topic(), format="json", schema=COLUMNS)
    pipeline.step("s", sql=sql)
    pipeline.sink("out", "s", kind="topic", topic="out", **sink)
    with pytest.raises(PlanError, match=fault):
        describe(spark, pipeline)


@pytest.mark.parametrize(
    ("kind", "key", "fault"),
    [
        ("delta", "idd", "orders has no column 'idd'; did you mean id?"),
        ("iceberg", "place", "place is struct<city:string>, which cannot be a merge key of iceberg"),
        ("delta", "tags", "tags is array<string>, which cannot be a merge key of delta"),
    ],
)
def test_a_check_finds_a_column_that_nothing_can_be_merged_by(
    kind: str, key: str, fault: str, fresh_topic: Callable[..., str], pipeline: Pipeline, spark: SparkSession
) -> None:
    pipeline.source("orders", topic=fresh_topic(), format="json", schema="id long, place struct<city: string>, tags array<string>")
    pipeline.sink("out", "orders", kind=kind, path="t", mode="update", merge=[key])
    with pytest.raises(PlanError) as caught:
        describe(spark, pipeline)
    assert str(caught.value) == f"sinks.out.merge: {fault}"


@pytest.mark.parametrize("kind", ["delta", "iceberg", "parquet"])
def test_a_check_finds_a_type_that_a_table_does_not_have(
    kind: str, fresh_topic: Callable[..., str], pipeline: Pipeline, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline.source("orders", topic=fresh_topic(), format="json", schema=COLUMNS)
    pipeline.step("s", sql="select id, null as nothing from orders")
    pipeline.sink("out", "s", kind=kind, path="t")
    with pytest.raises(PlanError, match=rf"sinks\.out: column nothing: {kind.capitalize()} has no type for null; cast it in the step"):
        describe(spark, pipeline)
    assert not (tmp_path / "t").exists()


def test_what_a_function_raises_is_reported_with_its_step_and_line(
    fresh_topic: Callable[..., str], pipeline: Pipeline, spark: SparkSession
) -> None:
    pipeline.source("orders", topic=fresh_topic(), format="json", schema=COLUMNS)

    @pipeline.step
    def priced(orders: DataFrame) -> DataFrame:
        raise ConnectionRefusedError("no rates today")

    pipeline.sink("out", "priced", kind="console")
    with pytest.raises(PlanError, match=r"steps\.priced: ConnectionRefusedError: no rates today \(test_running\.py:\d+\)"):
        describe(spark, pipeline)


def test_a_field_that_differs_from_a_column_of_the_record_in_case_alone_has_its_name(
    fresh_topic: Callable[..., str], pipeline: Pipeline, spark: SparkSession
) -> None:
    pipeline.source("orders", topic=fresh_topic(), format="json", schema="Timestamp long, Key string")
    pipeline.step("s", sql="select timestamp, key, record_timestamp, record_key from orders")
    pipeline.sink("out", "s", kind="console")
    [step] = describe(spark, pipeline).steps
    assert [column["type"] for column in step["columns"]] == ["bigint", "string", "timestamp", "string"]


def test_a_broker_that_does_not_answer_is_reported_with_its_address() -> None:
    pipeline = Pipeline("p", servers="127.0.0.1:1")
    pipeline.source("orders", pattern="orders.*")
    with pytest.raises(Unavailable, match=r"no broker answers at 127\.0\.0\.1:1: is its Flight endpoint open there"):
        check_topics(pipeline)


def test_a_topic_that_is_not_there_is_reported_before_spark_starts(pipeline: Pipeline, fresh_topic: Callable[..., str]) -> None:
    there = fresh_topic()
    pipeline.source("orders", topic=there[:-1] + "x")
    with pytest.raises(PlanError) as caught:
        check_topics(pipeline)
    assert caught.value.kind == "unknown_topic"
    assert str(caught.value) == f"sources.orders: there is no topic {there[:-1] + 'x'!r}; did you mean {there}?"


def test_a_source_without_a_schema_is_reported_before_spark_starts(pipeline: Pipeline, fresh_topic: Callable[..., str]) -> None:
    topic = fresh_topic()
    pipeline.source("orders", topic=topic, format="json")
    with pytest.raises(PlanError, match=f"sources.orders: topic '{topic}' has no required schema: set schema = "):
        check_topics(pipeline)


def test_an_archive_keeps_all_of_a_record(
    flight_client: FlightClient, broker: FlightBroker, fresh_topic: Callable[..., str], run: Runs, tmp_path: Path
) -> None:
    source = fresh_topic(partitions=2)
    publish(flight_client, source, b"\x00\xff", b"two")
    made = archive_pipeline(source, "delta", str(tmp_path / "lake"), servers=broker.address)
    run(made)
    rows = DeltaTable(tmp_path / "lake").to_pyarrow_table().to_pylist()
    assert sorted(row["value"] for row in rows) == [b"\x00\xff", b"two"]
    assert rows[0].keys() == {"key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"}


def test_a_directory_keeps_the_archives_of_several_topics_apart(
    flight_client: FlightClient, broker: FlightBroker, fresh_topic: Callable[..., str], run: Runs, tmp_path: Path
) -> None:
    topics = [fresh_topic("-a"), fresh_topic("-b")]
    for topic in (*topics, topics[0]):
        publish(flight_client, topic, topic.encode())
        run(archive_pipeline(topic, "delta", str(tmp_path / "lake"), servers=broker.address))
    rows = DeltaTable(tmp_path / "lake").to_pyarrow_table().to_pylist()
    assert sorted((row["topic"], row["offset"]) for row in rows) == sorted([(topics[0], 0), (topics[0], 1), (topics[1], 0)])


def test_a_sink_names_its_own_kind_of_table(tmp_path: Path) -> None:
    from headrace.spark.pipelines.tables.writing import open_table

    assert isinstance(open_table(Sink("s", "x", "parquet"), str(tmp_path)), Parquet)


def test_a_console_shows_the_first_rows_and_the_state_of_all_is_kept(
    flight_client: FlightClient, capsys: pytest.CaptureFixture[str], fresh_topic: Callable[..., str], pipeline: Pipeline, run: Runs
) -> None:
    source = fresh_topic()
    pipeline.source("orders", topic=source, format="json", schema=COLUMNS)

    @pipeline.step
    def once(orders: DataFrame) -> DataFrame:
        return orders.dropDuplicates(["id"]).select("id")

    pipeline.sink("out", "once", kind="console", rows=2)
    publish(flight_client, source, *orders(*range(200)))
    [query] = run(pipeline).queries
    assert query.state_rows == 200
    publish(flight_client, source, *orders(*range(201)))
    run(pipeline)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "out: batch 0"
    assert (len(shown), shown[3:]) == (6, ["  …", "out: batch 1", "  id=200"])
