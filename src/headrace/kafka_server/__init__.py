"""Real Kafka servers for tests, the demo and benchmarks: `with Cluster(folder, count=3) as cluster: cluster.bootstrap`.

`jars.py` resolves and checks the jars, `cluster.py` starts and stops the nodes. Needs Java 17 and the extra `spark`, whose package ships
the resolver. `tools/kafka` is the same as a command.
"""

from __future__ import annotations

from headrace.kafka_server.cluster import Cluster, KafkaFailed, Node
from headrace.kafka_server.jars import JarsUnavailable

__all__ = ["Cluster", "JarsUnavailable", "KafkaFailed", "Node"]
