"""`headrace bench compare --engine kafka`: Headrace and Kafka's own clients on one cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.kafka
@pytest.mark.xdist_group("kafka")
def test_headrace_on_kafka_is_compared_with_clients_of_kafka_on_the_same_cluster(tmp_path: Path) -> None:
    small = ["--records", "2000", "--repeat", "1", "--protocols", "figg", "--dir", str(tmp_path), "-o", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "bench", "compare", "--engine", "kafka", *small],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert {"headrace figg publish", "headrace figg consume", "aiokafka publish", "kafka java publish"} < figures.keys()
    assert figures["publish: headrace figg ÷ aiokafka"]["target"]
    ratio, ours = figures["consume: headrace figg ÷ raw Fetch"], figures["headrace figg consume"]
    assert ratio["target"] and ratio["value"] == ours["value"] / figures["raw Fetch consume, topic of headrace figg"]["value"]
    assert "broker CPU µs/record" in ours["notes"]
