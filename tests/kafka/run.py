"""Run tests with a Kafka cluster below every broker process: `python -m tests.kafka.run [ARGUMENTS OF PYTEST]`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.kafka_server import Cluster


def main() -> int:
    """Start one Kafka node, run pytest, and stop the node."""
    with tempfile.TemporaryDirectory(prefix="kafka-") as folder, Cluster(Path(folder)) as cluster:
        command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, "TEST_KAFKA": cluster.bootstrap}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
