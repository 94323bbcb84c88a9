"""docs/spark.md, section "Write": its examples run, and the tests that it names exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headrace.flight.client import FlightClient
from headrace.limits import (
    MIB,
    PUBLICATION_BYTES_MAX,
    STAGE_IDLE_MS_MAX,
    STAGED_MEMORY_BYTES_MAX,
    STAGES_MAX,
    TRANSACTION_BYTES_MAX,
    WRITER_IDLE_MS,
)
from headrace.spark.publishing import KEPT_BYTES_MAX
from headrace.spark.sink_columns import COLUMNS, HEADERS_TYPE
from tests.spark.rows import publish
from tests.spark.serving import FlightBroker
from tests.spark.sink.reading import values

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("\n## Write\n") : PAGE.index("\n## Spark Connect\n")]


def test_every_test_that_is_named_as_evidence_exists() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "spark").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", SECTION))
    assert len(named) > 5
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_the_page_names_every_column() -> None:
    table = SECTION[SECTION.index("| column |") :].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(COLUMNS)
    assert HEADERS_TYPE in table.replace(": ", ":").replace(", v", ",v")


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    assert f"less than {KEPT_BYTES_MAX // MIB} MiB" in SECTION
    assert f"beyond {STAGED_MEMORY_BYTES_MAX // MIB} MiB" in SECTION
    assert f"up to {TRANSACTION_BYTES_MAX // MIB} MiB" in SECTION
    assert f"at most {PUBLICATION_BYTES_MAX // MIB} MiB" in SECTION
    assert f"for {WRITER_IDLE_MS // (24 * 3600 * 1000)} days" in SECTION
    assert f"up to {STAGES_MAX:,} tasks" in SECTION
    assert STAGE_IDLE_MS_MAX == 6 * 3600 * 1000 and "six hours" in SECTION


def test_the_examples_run(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, [b"first", b"second"])
    reader = spark.read.format("headrace").option("kafka.bootstrap.servers", broker.address)
    names: dict[str, object] = {"spark": spark, "orders": reader.option("subscribe", topic).load()}
    for block in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL):
        code = re.sub(
            r'"orders(\.\w+)?"', rf'"{topic}\1"', block.replace("127.0.0.1:8815", broker.address).replace('"out/', f'"{tmp_path}/')
        )
        exec(compile(code, "docs/spark.md, Write", "exec"), names)
    assert values(flight_client, f"{topic}.loud") == ["FIRST", "SECOND"]
    for copy in ("copy", "first", "second"):
        assert values(flight_client, f"{topic}.{copy}") == ["first", "second"]
    append_once = names["append_once"]
    assert callable(append_once)
    append_once(names["orders"], 0)  # as after a crash between the commit of the table and that of the checkpoint
    assert DeltaTable(tmp_path / "orders-table").to_pyarrow_table(columns=["value"]).to_pydict() == {"value": ["first", "second"]}


@pytest.mark.parametrize("name", ["txnAppId", "txnVersion", "kafka.delivery.timeout.ms"])
def test_the_page_tells_what_the_options_of_the_sink_are_for(name: str) -> None:
    assert f"`{name}`" in SECTION
