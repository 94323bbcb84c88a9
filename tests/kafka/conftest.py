"""One Headrace broker on one Kafka node, for the tests that show the protocols on Kafka."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.kafka_server import Cluster
from tests.protocols.peers import Broker, serving


@pytest.fixture(scope="session")
def broker(kafka: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    engine = ["--engine", "kafka", "--set", f"kafka.bootstrap={kafka.bootstrap}"]
    # A slow machine must not make a broker deliver again.
    patient = ["--set", "blipmq.retry_backoff=10m", "--set", "flymq.ack_timeout=10m"]
    with serving(tmp_path_factory.mktemp("on-kafka"), *engine, "--listen-flight", "127.0.0.1:0", *patient) as running:
        yield running
