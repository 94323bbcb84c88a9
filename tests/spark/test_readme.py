"""The lines of the README that need Spark and the Flight endpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.flight.client import FlightClient
from tests.spark.serving import FlightBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = Path(__file__).parents[2] / "README.md"


def test_a_topic_is_a_stream_and_a_table(spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, topic: str) -> None:
    _, example = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    flight_client.create_topic(topic)
    flight_client.append(topic, [pa.RecordBatch.from_pydict({"value": pa.array([b"hello"], pa.binary())})])
    names: dict[str, Any] = {"spark": spark}
    exec(example.replace("127.0.0.1:8815", broker.address).replace('"orders"', f'"{topic}"'), names)
    assert names["orders"].isStreaming and "value" in names["orders"].columns
    assert names["table"].column("value").to_pylist() == [b"hello"]
