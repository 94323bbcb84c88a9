"""Every pipeline in `examples/` is run on its input and held against its expected results, twice: a second run must change nothing."""

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

from headrace.bulk.client import BulkClient, Servers
from headrace.spark.pipelines.files import load
from headrace.spark.pipelines.runner import Runner
from headrace.spark.pipelines.runs import Run
from headrace.spark.pipelines.tables.iceberg import Iceberg
from tests.spark.serving import BulkBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())


def test_there_are_at_least_four_examples_and_each_says_what_to_expect() -> None:
    assert len(NAMES) >= 4
    for name in NAMES:
        assert (EXAMPLES / name / "input.jsonl").is_file() and (EXAMPLES / name / "expected.json").is_file()


@pytest.fixture
def own_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BulkBroker]:
    """A broker of the example's own: its topics have plain names."""
    monkeypatch.setenv("HEADRACE_PIPELINES", str(tmp_path / "entries"))
    with BulkBroker(tmp_path / "broker") as broker:
        yield broker


@pytest.mark.parametrize("name", NAMES)
def test_an_example_gives_what_it_says(name: str, spark: SparkSession, own_broker: BulkBroker, tmp_path: Path) -> None:
    place = Path(shutil.copytree(EXAMPLES / name, tmp_path / name))
    expected = json.loads((place / "expected.json").read_text("utf-8"))
    with BulkClient(Servers.parse(own_broker.address)) as bulk:
        publish(bulk, place / "input.jsonl")
        for _ in range(2):
            run(spark, place, own_broker.address)
            assert found(bulk, place, expected) == expected


def publish(bulk: BulkClient, file: Path) -> None:
    by_topic: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text("utf-8").splitlines():
        entry = json.loads(line)
        by_topic[entry["topic"]].append(entry)
    for topic, entries in by_topic.items():
        values = [entry["text"] if "text" in entry else json.dumps(entry["value"]) for entry in entries]
        keys = [entry.get("key") for entry in entries]
        bulk.ensure_topic(topic)
        bulk.append(topic, [pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.string()), "value": pa.array(values, pa.string())})])


def run(spark: SparkSession, place: Path, servers: str) -> None:
    (file,) = place.glob("pipeline.*")
    pipeline = load(file, servers=servers)
    with Run(pipeline.name, pipeline.checkpoint, file=str(file), now_ms=0) as mine:
        assert Runner(spark, pipeline, mine, once=True).run().state == "finished"


def found(bulk: BulkClient, place: Path, expected: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What there is, where something is expected."""
    there: dict[str, dict[str, Any]] = {}
    for kind, wanted in expected.items():
        for name in wanted:
            if kind == "topics":
                result: object = latest(bulk, name)
            elif kind == "tables":
                result = table(place, name)
            else:
                assert kind == "dead_letters"
                result = len(values(bulk, f"{name}.dlq"))
            there.setdefault(kind, {})[name] = result
    return there


def values(bulk: BulkClient, topic: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, state in enumerate(bulk.describe([topic])[topic].partitions):
        for batch in bulk.read(topic, number, state.first, state.end, columns=["key", "value"]):
            rows += batch.to_pylist()
    return rows


def latest(bulk: BulkClient, topic: str) -> list[Any]:
    """The last record of each key, by key."""
    by_key = {row["key"]: json.loads(row["value"]) for row in values(bulk, topic)}
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
