"""A pipeline runs on a cluster with the same file and another `--master`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headrace.flight.client import FlightClient, Servers
from tests.spark.cluster.standalone import Standalone
from tests.spark.serving import FlightBroker, session_settings

PIPELINE = """
[sources.orders]
topic = "orders"
format = "json"
schema = "id long, amount double"
expect = { "an id is not negative" = "id >= 0" }

[steps.priced]
python = "prices:priced"

[sinks.records]
from = "priced"
kind = "topic"
topic = "orders.priced"

[sinks.table]
from = "priced"
kind = "delta"
path = "table"
"""
STEP = """
RATE = 2.0


def doubled(batches):
    for frame in batches:
        yield frame.assign(amount=frame.amount * RATE)


def priced(orders):
    return orders.select("id", "amount").mapInPandas(doubled, "id long, amount double")
"""


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.xdist_group("cluster")
def test_a_pipeline_runs_on_a_cluster_and_resumes(tmp_path: Path, cluster: Standalone) -> None:
    file = tmp_path / "p.toml"
    file.write_text(PIPELINE, encoding="utf-8")
    (tmp_path / "prices.py").write_text(STEP, encoding="utf-8")
    with FlightBroker(tmp_path / "broker") as broker:
        with FlightClient(Servers.parse(broker.address)) as flight_client:
            flight_client.create_topic("orders", 2)
            for first in (0, 10):
                values = [json.dumps({"id": id, "amount": id}).encode() for id in (*range(first, first + 10), -1)]
                flight_client.append("orders", [pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})])
                run(file, cluster, broker)
            states = flight_client.describe(["orders.priced", "orders.dlq"])
            assert [sum(each.end for each in state.partitions) for state in states.values()] == [20, 2]
    rows = DeltaTable(tmp_path / "table").to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["amount"]) for row in rows) == [(id, id * 2.0) for id in range(20)]


def run(file: Path, cluster: Standalone, broker: FlightBroker) -> None:
    """Run a command in an environment without an active virtual environment."""
    settings = session_settings(file.parent / "spark") | cluster.conf
    conf = [f"--conf={key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "headrace", "pipeline", "run", str(file), "--once", "--master", cluster.master, *conf]
    environment = {**os.environ, "HEADRACE_PIPELINES": str(file.parent / "entries"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["SPARK_HOME"] = str(cluster.home)
    environment.pop("PYSPARK_PYTHON", None)
    done = subprocess.run([*command, "--servers", broker.address], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
