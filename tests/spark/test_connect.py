"""docs/spark.md, Spark Connect and Declarative Pipelines: the examples run, against the Connect server of the shared session."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from headrace.flight.client import FlightClient
from tests.spark.rows import publish
from tests.spark.serving import FlightBroker
from tests.spark.sink.reading import values

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")


def blocks(title: str) -> list[str]:
    """Return the code of a section."""
    return re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0], re.DOTALL)


def connect_address(spark: SparkSession) -> str:
    assert spark._jvm is not None
    service = getattr(spark._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$")
    return f"127.0.0.1:{getattr(service, 'MODULE$').localPort()}"


def run(*arguments: str, directory: Path, **environment: str) -> str:
    """Run a client in its own process: this one has a session that is not remote."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_client_of_spark_connect_and_a_declarative_pipeline_read_and_write_topics(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, server = fresh_topic(), connect_address(spark)
    table = topic.replace("-", "_")
    publish(flight_client, topic, [b"first", b"second"])

    def adapted(block: str) -> str:
        block = block.replace("127.0.0.1:8815", broker.address).replace("127.0.0.1:15002", server).replace("/srv/shop", str(tmp_path))
        block = block.replace('"subscribe", "orders"', f'"subscribe", "{topic}"').replace('"orders.loud"', f'"{topic}.loud"')
        return block.replace("def orders()", f"def {table}()").replace('.table("orders")', f'.table("{table}")')

    (client,) = blocks("Spark Connect")
    assert run("-c", adapted(client), directory=tmp_path) == "2\n"

    project, definitions = map(adapted, blocks("Declarative Pipelines"))
    (tmp_path / "spark-pipeline.yml").write_text(project)
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "orders.py").write_text(definitions)
    # The program that the script `spark-pipelines` starts, without two more processes of Java.
    command = ("-m", "pyspark.pipelines.cli", "run")
    assert "Run is COMPLETED" in run(*command, directory=tmp_path, SPARK_REMOTE=f"sc://{server}")
    assert values(flight_client, f"{topic}.loud") == ["FIRST", "SECOND"]
    assert spark.read.table(table).count() == 2
    publish(flight_client, topic, [b"third"])
    run(*command, directory=tmp_path, SPARK_REMOTE=f"sc://{server}")
    assert values(flight_client, f"{topic}.loud") == ["FIRST", "SECOND", "THIRD"]
    spark.sql(f"DROP TABLE {table}")
