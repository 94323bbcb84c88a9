"""Tasks of a job are spread over several servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.flight.client import FlightClient, Servers
from headrace.spark import connection
from tests.spark.serving import FlightBroker

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession

THREE = Servers(("a:1", "b:2", "c:3"))


class Task:
    def __init__(self, number: int) -> None:
        self._number = number

    def partitionId(self) -> int:
        return self._number


def begins_with(monkeypatch: pytest.MonkeyPatch, task: Task | None) -> str:
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: task)
    return connection._in_turn(THREE).addresses[0]


def test_task_n_begins_with_server_n_and_the_driver_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [begins_with(monkeypatch, Task(number)) for number in range(4)] == ["a:1", "b:2", "c:3", "a:1"]
    assert begins_with(monkeypatch, None) == "a:1"


def test_every_task_keeps_all_servers_to_move_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: Task(1))
    assert connection._in_turn(THREE).addresses == ("b:2", "c:3", "a:1")


def test_rows_are_read_and_written_through_every_server(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second name is another address of the same broker: half of the tasks use it."""
    port = broker.address.rpartition(":")[2]
    servers = f"127.0.0.1:{port},localhost:{port}"
    topic = fresh_topic(partitions=4)
    rows = spark.range(0, 100, 1, 4).selectExpr("cast(id as string) as value", "cast(id % 4 as int) as partition")
    rows.write.format("headrace").option("servers", servers).option("topic", topic).mode("append").save()
    assert sum(place.end for place in flight_client.describe([topic])[topic].partitions) == 100
    read = spark.read.format("headrace").option("servers", servers).option("subscribe", topic).load()
    assert {int(row.value) for row in read.select("value").collect()} == set(range(100))
    used = spark.sparkContext.range(0, 4, 1, 4).map(lambda _: connection._in_turn(Servers.parse(servers)).addresses[0]).collect()
    assert set(used) == {f"127.0.0.1:{port}", f"localhost:{port}"}
