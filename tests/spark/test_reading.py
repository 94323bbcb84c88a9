"""The read of a task, without Spark: exact schemas, and resumption after interruptions."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from headrace.errors import OffsetOutOfRange, Unavailable, UnknownTopic
from headrace.flight.client import FlightClient, Servers
from headrace.spark import retry
from headrace.spark.columns import raw_schema
from headrace.spark.options import Options
from headrace.spark.ranges import DataLost, Range
from headrace.spark.read_settings import ReadSettings
from headrace.spark.reading import RangeReader
from tests.spark.fakes import FakeClient, range_reader, state, use
from tests.spark.rows import publish
from tests.spark.serving import FlightBroker


def reader(columns: tuple[str, ...] = ("value",), /, **options: str) -> RangeReader:
    return range_reader(False, columns, subscribe="t", **options)


def values(batches: list[pa.RecordBatch]) -> list[bytes]:
    return [value for batch in batches for value in batch.column("value").to_pylist()]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    made = FakeClient({"t": state("t", (5, 9))})
    use(made, monkeypatch)
    monkeypatch.setattr(retry, "exponential", lambda **_: lambda failures: 0.001)
    return made


def test_batches_have_exactly_the_columns_of_the_schema(client: FakeClient) -> None:
    for columns in (("value",), ("offset", "value"), ("value", "offset")):
        client.answers = [range(3)]
        (batch,) = reader(columns).read(Range("t", 0, 0, 3))
        assert batch.schema.equals(to_arrow_schema(reader(columns).schema, timezone="UTC"))


def test_the_partition_that_stands_for_nothing_reads_nothing(client: FakeClient) -> None:
    assert list(reader().read(InputPartition(None))) == []
    assert client.reads == []


def test_a_read_resumes_after_the_last_row_when_the_broker_comes_back(client: FakeClient) -> None:
    client.answers = [[0, 1, 4], Unavailable("away"), Unavailable("away"), [5, 6], Unavailable("away"), [7]]
    assert values(list(reader().read(Range("t", 0, 0, 8)))) == [b"0", b"1", b"4", b"5", b"6", b"7"]
    assert [start for start, _, _ in client.reads] == [0, 5, 5, 7]


def test_a_broker_that_stays_away_ends_the_task(client: FakeClient) -> None:
    client.answers = [Unavailable("away")] * 1000
    with pytest.raises(Unavailable):
        list(reader(**{"kafkaConsumer.pollTimeoutMs": "20"}).read(Range("t", 0, 0, 8)))


def test_retention_that_overtakes_a_task_fails_it_with_the_numbers(client: FakeClient) -> None:
    client.answers = [[0, 1], OffsetOutOfRange(wanted=2, first=5, end=9)]
    client.answers.insert(1, Unavailable("away"))
    with pytest.raises(DataLost, match=r"topic t, partition 0: offsets 2 to 4 are gone, the log begins at 5 \(retention 7d\)"):
        list(reader().read(Range("t", 0, 0, 8)))


def test_retention_that_overtakes_a_task_is_stepped_over_if_that_is_wanted(client: FakeClient, caplog: pytest.LogCaptureFixture) -> None:
    client.answers = [OffsetOutOfRange(wanted=0, first=5, end=9), [5, 6, 7]]
    with caplog.at_level(logging.WARNING, "headrace.spark"):
        assert values(list(reader(failOnDataLoss="false").read(Range("t", 0, 0, 8)))) == [b"5", b"6", b"7"]
    assert "offsets 0 to 4 are gone" in caplog.text


def test_a_topic_that_goes_away_under_a_task_is_data_lost(client: FakeClient) -> None:
    client.answers = [[0, 1], Unavailable("away"), UnknownTopic("t")]
    with pytest.raises(DataLost, match="topic t, partition 0: offsets 2 to 7 cannot be read, topic 't' not found"):
        list(reader().read(Range("t", 0, 0, 8)))
    client.answers = [[0, 1], Unavailable("away"), UnknownTopic("t")]
    assert values(list(reader(failOnDataLoss="false").read(Range("t", 0, 0, 8)))) == [b"0", b"1"]


def test_a_reader_can_be_pickled_and_hides_the_password(client: FakeClient) -> None:
    made = reader(user="ann", password="swordfish")
    client.answers = [range(2)]
    assert values(list(pickle.loads(pickle.dumps(made)).read(Range("t", 0, 0, 2)))) == [b"0", b"1"]
    assert "swordfish" not in repr(made)


def test_a_task_outlives_the_death_of_the_broker_in_the_middle_of_a_read(tmp_path: Path) -> None:
    rows, size = 400, 100_000
    with FlightBroker(tmp_path / "first") as broker:
        address = broker.address
        with FlightClient(Servers.parse(address)) as flight_client:
            flight_client.create_topic("t")
            for start in range(0, rows, 50):
                publish(flight_client, "t", [b"%d" % number * size for number in range(start, start + 50)])
        given = Options({"servers": address, "subscribe": "t"})
        schema = type(raw_schema(headers=False))([raw_schema(headers=False)["offset"], raw_schema(headers=False)["value"]])
        task = RangeReader(ReadSettings.of(given, streaming=False), ("offset", "value"), schema).read(Range("t", 0, 0, rows))
        seen = next(task).column("offset").to_pylist()
        broker.process.kill()
        broker.process.wait(30)
        with FlightBroker(tmp_path / "second", data=broker.data, listen_flight=address):
            for batch in task:
                seen += batch.column("offset").to_pylist()
    assert seen == list(range(rows)), "every row once, in order"
