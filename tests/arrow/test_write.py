"""`headrace.arrow.write`: the kinds of rows it takes, and nothing is created for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas
import polars
import pyarrow as pa
import pytest

import headrace.arrow
from headrace.errors import InvalidRequest
from headrace.flight.client import FlightClient
from tests.flight.harness import Harness, rows

TABLE = pa.table({"key": ["k1", "k2"], "value": ["a", "b"]})
FRAME = pandas.DataFrame({"key": ["k1", "k2"], "value": ["a", "b"]})

KINDS: dict[str, Callable[[], Any]] = {
    "Table": lambda: TABLE,
    "RecordBatch": lambda: TABLE.to_batches()[0],
    "RecordBatchReader": TABLE.to_reader,
    "generator": lambda: (batch for batch in TABLE.to_batches(max_chunksize=1)),
    "list": lambda: TABLE.to_batches(),
    "pandas": lambda: FRAME,
    "pandas, filtered": lambda: pandas.concat([FRAME, FRAME]).iloc[[0, 3]],
    "pandas, key as index": lambda: FRAME.set_index("key"),
    "pandas, bytes": lambda: FRAME.assign(value=[b"a", b"b"]),
    "pandas, categories": lambda: FRAME.astype({"key": "category"}),
    "polars": lambda: polars.DataFrame({"key": ["k1", "k2"], "value": ["a", "b"]}),
    "polars, binary": lambda: polars.DataFrame({"key": ["k1", "k2"], "value": [b"a", b"b"]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_frames_tables_and_batches_are_written(harness: Harness, flight_client: FlightClient, topic: str, kind: str) -> None:
    assert headrace.arrow.write(topic, KINDS[kind](), servers=harness.servers).records == 2
    assert [(row["key"], row["value"]) for row in rows(flight_client, topic)] == [(b"k1", b"a"), (b"k2", b"b")]


@pytest.mark.parametrize("empty", [TABLE.slice(0, 0), FRAME.iloc[:0], [], polars.DataFrame({"value": []}, schema={"value": polars.String})])
def test_without_rows_the_topic_is_created_and_nothing_is_written(harness: Harness, flight_client: FlightClient, empty: Any) -> None:
    assert headrace.arrow.write("empty", empty, servers=harness.servers).records == 0
    assert flight_client.describe(["empty"])["empty"].partitions[0].end == 0


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ("value", "^rows: expected a pandas or Polars DataFrame, a pyarrow Table, .* got str$"),
        (b"value", "got bytes$"),
        ({"value": ["a"]}, "got dict$"),
        (None, "got NoneType$"),
        (7, "got int$"),
        ([{"value": "a"}], "got an iterable of dict$"),
        (["a"], "got an iterable of str$"),
        (pandas.DataFrame({"id": [1]}), "unknown column 'id'; expected key, value, headers, partition, timestamp, topic"),
        (pandas.DataFrame({"id": []}), "unknown column 'id'"),
        (pandas.DataFrame({"value": [1.5]}), "column 'value' is double; expected binary or string"),
        (pandas.DataFrame({"value": ["a", 1]}), "DataFrame cannot be converted to Arrow: .*value"),
        (polars.DataFrame({"key": ["a"]}), "the column 'value' is missing"),
        (TABLE.append_column("offset", [[1, 2]]), "unknown column 'offset'"),
    ],
    ids=lambda given: type(given).__name__ if not isinstance(given, str) else None,
)
def test_anything_else_is_named_before_a_topic_is_created(harness: Harness, flight_client: FlightClient, given: Any, because: str) -> None:
    with pytest.raises(InvalidRequest, match=because):
        headrace.arrow.write("never-created", given, servers=harness.servers)
    with pytest.raises(InvalidRequest, match="partition: expected a number from 0 on, got -1"):
        headrace.arrow.write("never-created", TABLE, servers=harness.servers, partition=-1)
    assert "never-created" not in flight_client.topics()


def test_record_batches_of_different_schemas_are_an_error(harness: Harness, topic: str) -> None:
    batches = [pa.record_batch({"value": ["a"]}), pa.record_batch({"value": [b"a"]})]
    with pytest.raises(InvalidRequest, match="same schema; expected value: string, got value: binary"):
        headrace.arrow.write(topic, batches, servers=harness.servers)
