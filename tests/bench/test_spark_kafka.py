"""`headrace bench spark --against kafka`: Spark over a topic of Headrace and over the same rows in Kafka."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.xdist_group("kafka")
def test_spark_reads_the_same_rows_from_headrace_and_from_kafka_in_one_session(tmp_path: Path) -> None:
    small = ["--rows", "4000", "--per-trigger", "1000", "--repeat", "1", "--dir", str(tmp_path), "-o", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "bench", "spark", "--against", "kafka", *small],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}
    for read in ("batch read, value", "stream read, seven columns, 1,000 rows a trigger"):
        assert figures[f"{read} ÷ kafka"]["value"] == figures[read]["value"] / figures[f"{read}: kafka"]["value"]
    assert figures["stream read, value, 1,000 rows a trigger: kafka"]["notes"]["addBatch ms"] > 0
