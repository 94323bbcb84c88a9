"""docs/pipelines.md: its tables equal those of the code, and its examples run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from headrace.errors import TopicExists
from headrace.flight.client import FlightClient
from headrace.spark.pipelines import load
from headrace.spark.pipelines.keys import SECTIONS
from tests.spark.pipelines.conftest import Runs
from tests.spark.pipelines.test_running import dead_letters, publish, records
from tests.spark.serving import FlightBroker

PAGE = (Path(__file__).parent.parent.parent.parent / "docs" / "pipelines.md").read_text(encoding="utf-8")


def example(name: str) -> str:
    [text] = re.findall(rf"```\w+\n(# {re.escape(name)}\n.*?)```", PAGE, re.DOTALL)
    return str(text)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_on_the_page_as_the_code_explains_it(section: str) -> None:
    heading = section if section.startswith("pipeline") else f"{section}.NAME"
    [table] = re.findall(rf"^### \[{re.escape(heading)}\]\n\n(\|.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
    expected = ["| key | value | meaning |", "|---|---|---|"]
    for name, key in SECTIONS[section].items():
        required = " (required)" if key.required else ""
        expected.append(f"| `{name}`{required} | {key.expected} | {key.text} |")
    assert table.splitlines() == expected


@pytest.fixture
def orders(flight_client: FlightClient) -> Callable[..., None]:
    """Create the topic of the page; return a function that publishes orders."""
    try:
        flight_client.create_topic("orders")
    except TopicExists:
        pass

    def send(*amounts: float) -> None:
        for amount in amounts:
            minute = int(abs(amount)) % 60
            publish(flight_client, "orders", {"id": 1, "customer": "c", "amount": amount, "at": f"2026-11-15T10:{minute:02}:00Z"})

    return send


def test_the_examples_of_the_page_run(
    orders: Callable[..., None], flight_client: FlightClient, broker: FlightBroker, run: Runs, tmp_path: Path
) -> None:
    (tmp_path / "orders.toml").write_text(example("orders.toml"))
    pipeline = load(tmp_path / "orders.toml", servers=broker.address)
    orders(1.5, 2.5, 2.5, -1.0)
    publish(flight_client, "orders", b"no json")
    run(pipeline)
    orders(2.25, 3.5)
    run(pipeline)
    rows = DeltaTable(tmp_path / "totals").to_pyarrow_table().to_pylist()
    assert {row["minute"].minute: (row["orders"], row["total"]) for row in rows} == {1: (1, 1.5), 2: (3, 7.25), 3: (1, 3.5)}
    latest = {row["minute"]: row["total"] for row in records(flight_client, "orders.by_minute")}
    assert sorted(latest.values()) == [1.5, 3.5, 7.25]
    # Two sinks have read the bad records in two queries, and each is one dead letter.
    found = dead_letters(flight_client, "orders")
    assert len(found) == 2
    assert b"no json" in found

    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "orders.py").write_text(example("orders.py"))
    run(load(tmp_path / "orders.py", servers=broker.address))
    gross = duckdb.sql(f"select gross from '{tmp_path}/gross/*.parquet' order by 1")
    assert gross is not None
    assert [amount for (amount,) in gross.fetchall()] == [round(amount * 1.19, 2) for amount in (1.5, 2.25, 2.5, 2.5, 3.5)]
    assert len(dead_letters(flight_client, "orders")) == 2
