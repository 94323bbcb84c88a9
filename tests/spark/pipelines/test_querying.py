"""SQL queries over topics."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from headrace.errors import UnknownTopic
from headrace.flight.client import FlightClient
from headrace.spark.pipelines.querying import QueryError, ReadOptions, answer, quoted, relations, run_query
from tests.spark.serving import FlightBroker
from tests.spark.values.conftest import SchemaAdmin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def rows_of(frame: DataFrame, limit: int) -> pa.Table:
    return answer(frame, limit).rows


@pytest.fixture
def reading(broker: FlightBroker) -> ReadOptions:
    return ReadOptions({"servers": broker.address})


@pytest.fixture
def orders(flight_client: FlightClient, fresh_topic: Callable[..., str]) -> str:
    name = fresh_topic(".by-minute", partitions=2)
    texts = [json.dumps({"id": id, "who": "abc"[id % 3], "timestamp": id}).encode() for id in range(9)]
    keys = [f"k{id}".encode() for id in range(9)]
    flight_client.append(name, [pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.binary()), "value": pa.array(texts, pa.binary())})])
    return name


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("select * from a.b where x = 'a.b'", "select * from `a.b` where x = 'a.b'"),
        ("select * from `a.b` -- a.b\n join a.b", "select * from `a.b` -- a.b\n join `a.b`"),
        ("select a.bc, x.a.b from a.b, c", "select a.bc, x.a.b from `a.b`, c"),
    ],
)
def test_a_name_with_dots_is_quoted_where_it_stands_alone(query: str, text: str) -> None:
    assert quoted(query, ["a.b"]) == text


def test_the_tables_of_a_query_are_found_wherever_they_stand(spark: SparkSession) -> None:
    query = """with mine as (select * from first) select *, (select max(x) from `sec-ond`) from mine
    join other.third on true where x in (select y from fourth) and exists (select 1 from mine)"""
    assert sorted(relations(spark, query)) == ["first", "fourth", "other.third", "sec-ond"]
    with pytest.raises(QueryError, match=r"Syntax error at or near 'selec'.*\(line 1, pos 0\)"):
        relations(spark, "selec 1")


@pytest.mark.parametrize(
    "query",
    [
        "delete from a where key = 'x'",
        "update a set key = 'x'",
        "insert into a values (1)",
        "insert overwrite a select 1",
        "truncate table a",
        "merge into a using b on a.key = b.key when matched then delete",
    ],
)
def test_a_query_that_would_change_a_topic_is_rejected(spark: SparkSession, query: str) -> None:
    with pytest.raises(QueryError, match="queries cannot change a topic"):
        relations(spark, query)


def test_a_topic_without_a_schema_has_text_in_it(
    spark: SparkSession, flight_client: FlightClient, orders: str, reading: ReadOptions
) -> None:
    frame = run_query(spark, flight_client, f"select * from `{orders}` where key = 'k4'", reading)
    [row] = rows_of(frame, 10).to_pylist()
    assert list(row) == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]
    assert json.loads(row["value"]) == {"id": 4, "who": "b", "timestamp": 4}


def test_columns_of_json_are_guessed_or_given(spark: SparkSession, flight_client: FlightClient, orders: str, reading: ReadOptions) -> None:
    query = f"select who, count(*) as n, sum(id) as total from `{orders}` group by who order by who"
    guessed = ReadOptions(reading.options, "json")
    expected = [{"who": "a", "n": 3, "total": 9}, {"who": "b", "n": 3, "total": 12}, {"who": "c", "n": 3, "total": 15}]
    assert rows_of(run_query(spark, flight_client, query, guessed), 10).to_pylist() == expected
    given = ReadOptions(reading.options, "json", "id long, who string")
    assert rows_of(run_query(spark, flight_client, query, given), 10).to_pylist() == expected
    # A field with the name of a record column is available as a field of the value.
    frame = run_query(
        spark, flight_client, f"select max(value.timestamp) as m, max(timestamp) > '2020-01-01' as y from `{orders}`", guessed
    )
    assert rows_of(frame, 10).to_pylist() == [{"m": 8, "y": True}]


def test_values_that_a_query_could_not_read_are_counted(
    spark: SparkSession, flight_client: FlightClient, fresh_topic: Callable[..., str], orders: str, reading: ReadOptions
) -> None:
    topic = fresh_topic("-x")
    values = [b'{"id": 1, "n": 1}', b'{"id": 2, "n": 1.5}', b"broken"]
    flight_client.append(topic, [pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})])
    typed = ReadOptions(reading.options, "json", "id long, n long")
    found = answer(run_query(spark, flight_client, f"select sum(a.n) as n from `{topic}` a join `{orders}` b using (id)", typed), 10)
    assert (found.rows.to_pylist(), found.unread) == ([{"n": 1}], {topic: 2})
    assert answer(run_query(spark, flight_client, f"select count(*) as n from `{orders}`", typed), 10).unread == {}
    assert answer(run_query(spark, flight_client, "select 1 as n", typed), 10).unread == {}


def test_a_topic_that_requires_a_schema_has_its_columns_by_default(
    spark: SparkSession, flight_client: FlightClient, broker: FlightBroker, orders: str, reading: ReadOptions
) -> None:
    schema_admin = SchemaAdmin(broker, flight_client)
    schema_admin.register(orders, "json", {"type": "object", "properties": {"id": {"type": "integer"}, "who": {"type": "string"}}})
    schema_admin.require(orders, orders)
    frame = run_query(spark, flight_client, f"select who, max(id) as top from `{orders}` group by 1 order by 1 limit 1", reading)
    assert rows_of(frame, 10).to_pylist() == [{"who": "a", "top": 6}]


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("select nothing from `{topic}`", r"`nothing` cannot be resolved.*pos 7"),
        ("select * frm `{topic}`", r"Syntax error at or near.*line 1, pos \d+"),
    ],
)
def test_a_fault_has_its_place_in_the_text(
    query: str, fault: str, spark: SparkSession, flight_client: FlightClient, orders: str, reading: ReadOptions
) -> None:
    with pytest.raises(QueryError, match=fault):
        run_query(spark, flight_client, query.format(topic=orders), reading)


def test_a_topic_that_is_not_there_is_not_found(spark: SparkSession, flight_client: FlightClient, reading: ReadOptions) -> None:
    with pytest.raises(UnknownTopic, match="there is no topic 'ordesr'"):
        run_query(spark, flight_client, "select * from ordesr", reading)


def test_a_fault_of_the_rows_is_one_line(spark: SparkSession, flight_client: FlightClient, orders: str, reading: ReadOptions) -> None:
    frame = run_query(spark, flight_client, f"select raise_error('not this ' || key) as x from `{orders}` where key = 'k1'", reading)
    with pytest.raises(QueryError, match="^.*not this k1"):
        rows_of(frame, 1)
