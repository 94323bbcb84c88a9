"""Start a Kafka cluster in a temporary directory, print its addresses, stop it at Ctrl-C: `tools/kafka [COUNT]`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from headrace.kafka_server import Cluster, JarsUnavailable, KafkaFailed


def main() -> int:
    """Run until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="tools/kafka", description="Start a Kafka cluster for trying out. Its data is deleted at the end."
    )
    parser.add_argument("count", nargs="?", type=int, default=1, choices=(1, 3), help="number of nodes (default: 1)")
    count = parser.parse_args().count
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="kafka-") as folder, Cluster(Path(folder), count) as cluster:
            print(cluster.bootstrap, flush=True)
            signal.pause()
    except (JarsUnavailable, KafkaFailed) as error:
        print(f"tools/kafka: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
