"""Every pipeline in `examples/` runs twice on its input and must give the expected results; the second execution changes nothing."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from headrace.flight.client import FlightClient, Servers
from headrace.spark.pipelines.executions import Execution
from headrace.spark.pipelines.files import load
from headrace.spark.pipelines.runner import Runner
from headrace.spark.pipelines.tables.iceberg import Iceberg
from tests.spark.serving import FlightBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())


def test_there_are_at_least_four_examples_and_each_says_what_to_expect() -> None:
    assert len(NAMES) >= 4
    for name in NAMES:
        assert (EXAMPLES / name / "input.jsonl").is_file() and (EXAMPLES / name / "expected.json").is_file()


@pytest.fixture
def own_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlightBroker]:
    """Start a separate broker, because the examples use fixed topic names."""
    monkeypatch.setenv("HEADRACE_PIPELINES", str(tmp_path / "entries"))
    with FlightBroker(tmp_path / "broker") as broker:
        yield broker


@pytest.mark.parametrize("name", NAMES)
def test_an_example_gives_what_it_says(name: str, spark: SparkSession, own_broker: FlightBroker, tmp_path: Path) -> None:
    place = Path(shutil.copytree(EXAMPLES / name, tmp_path / name))
    expected = json.loads((place / "expected.json").read_text("utf-8"))
    with FlightClient(Servers.parse(own_broker.address)) as flight_client:
        publish(flight_client, place / "input.jsonl")
        for _ in range(2):
            run(spark, place, own_broker.address)
            assert found(flight_client, place, expected) == expected


def publish(flight_client: FlightClient, file: Path) -> None:
    by_topic: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text("utf-8").splitlines():
        entry = json.loads(line)
        by_topic[entry["topic"]].append(entry)
    for topic, entries in by_topic.items():
        values = [entry["text"] if "text" in entry else json.dumps(entry["value"]) for entry in entries]
        keys = [entry.get("key") for entry in entries]
        flight_client.ensure_topic(topic)
        flight_client.append(
            topic, [pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.string()), "value": pa.array(values, pa.string())})]
        )


def run(spark: SparkSession, place: Path, servers: str) -> None:
    (file,) = place.glob("pipeline.*")
    pipeline = load(file, servers=servers)
    with Execution(pipeline.name, pipeline.checkpoint, file=str(file), now_ms=0) as mine:
        assert Runner(spark, pipeline, mine, once=True).run().state == "finished"


def found(flight_client: FlightClient, place: Path, expected: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the actual results for the expected keys."""
    there: dict[str, dict[str, Any]] = {}
    for kind, wanted in expected.items():
        for name in wanted:
            if kind == "topics":
                result: object = latest(flight_client, name)
            elif kind == "tables":
                result = table(place, name)
            else:
                assert kind == "dead_letters"
                result = len(values(flight_client, f"{name}.dlq"))
            there.setdefault(kind, {})[name] = result
    return there


def values(flight_client: FlightClient, topic: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, state in enumerate(flight_client.describe([topic])[topic].partitions):
        for batch in flight_client.read(topic, number, state.first, state.end, columns=["key", "value"]):
            rows += batch.to_pylist()
    return rows


def latest(flight_client: FlightClient, topic: str) -> list[Any]:
    """Return the last record of each key, by key."""
    by_key = {row["key"]: json.loads(row["value"]) for row in values(flight_client, topic)}
    return [by_key[key] for key in sorted(by_key)]


def table(place: Path, name: str) -> list[Any]:
    kind, _, path = name.partition(":")
    match kind:
        case "delta":
            arrow = DeltaTable(str(place / path)).to_pyarrow_table()
        case "iceberg":
            arrow = Iceberg(str(place / path), f"headrace.{path}").catalog().load_table(f"headrace.{path}").scan().to_arrow()
        case _:
            arrow = pq.read_table(place / path)
    rows: list[Any] = arrow.to_pylist()
    return sorted(rows, key=lambda row: str(next(iter(row.values()))))
