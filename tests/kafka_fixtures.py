"""Fixtures: one Kafka node and one Kafka cluster of three nodes for all tests of a process.

All tests that use them have the marker `kafka` and are in one xdist group, so that `pytest -n 2 --dist loadgroup` starts Kafka once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from headrace.kafka_server import Cluster

FIXTURES: Final = frozenset(("kafka", "kafka_cluster"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        used = FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if used:
            item.add_marker(pytest.mark.kafka)
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group("kafka"))


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start one Kafka node; tests use their own topics and prefixes."""
    with Cluster(tmp_path_factory.mktemp("kafka")) as running:
        yield running


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start three Kafka nodes. A test that kills or pauses one starts or resumes it again before it ends."""
    with Cluster(tmp_path_factory.mktemp("kafka-cluster"), count=3) as running:
        yield running
