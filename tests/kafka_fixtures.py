"""Fixtures: one Kafka node and one Kafka cluster of three nodes for all tests of a process.

`make test-kafka` sets TEST_KAFKA to the addresses of a running cluster: every broker process of a test then keeps its log there.

All tests that use them have the marker `kafka` and are in one xdist group, so that `pytest -n 2 --dist loadgroup` starts Kafka once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from headrace.kafka_server import Cluster

FIXTURES: Final = frozenset(("kafka", "kafka_cluster"))


def kafka_arguments(data: Path) -> list[str]:
    """Return the arguments of a broker for the cluster of TEST_KAFKA; none without it. Each directory has a prefix of its own."""
    bootstrap = os.environ.get("TEST_KAFKA", "")
    prefix = f"t{hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:12]}."
    return ["--engine", "kafka", "--set", f"kafka.bootstrap={bootstrap}", "--set", f"kafka.prefix={prefix}"] if bootstrap else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        used = FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if used:
            item.add_marker(pytest.mark.kafka)
            # A test that also uses Spark runs where the Spark session is.
            if item.get_closest_marker("xdist_group") is None and "spark" not in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group("kafka"))


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start one Kafka node, with a second listener that wants TLS and SASL; tests use their own topics and prefixes."""
    from tests.kafka import secured  # it loads Kafka's client

    folder = tmp_path_factory.mktemp("kafka")
    with Cluster(folder, secured=secured.listener(folder / "certificates")) as running:
        yield running


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start three Kafka nodes. A test that kills or pauses one starts or resumes it again before it ends."""
    with Cluster(tmp_path_factory.mktemp("kafka-cluster"), count=3) as running:
        yield running
