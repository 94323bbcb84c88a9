from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.engine.kafka.engine import KafkaEngine
from headrace.kafka_server import Cluster
from tests.engine.subjects import SUBJECTS, Clock, Subject, kafka_engine

KAFKA = pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.xdist_group("kafka")])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test over each engine that has the capabilities of its mark `needs`."""
    if "subject" in metafunc.fixturenames:
        needs = [name for mark in metafunc.definition.iter_markers("needs") for name in mark.args]
        has_kafka = all(getattr(KafkaEngine.capabilities, name) for name in needs) and not metafunc.definition.get_closest_marker("local")
        metafunc.parametrize("subject", [*SUBJECTS, KAFKA] if has_kafka else list(SUBJECTS), indirect=True)


@pytest.fixture
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    """Each engine in turn, open, on an empty directory or under an unused prefix, and with a manual clock."""
    clock = Clock()
    if request.param == "kafka":
        cluster: Cluster = request.getfixturevalue("kafka")
        build = kafka_engine(cluster.bootstrap, clock)
    else:
        build = SUBJECTS[request.param](tmp_path, clock)
    subject = Subject(build, clock)
    await subject.engine.open()
    yield subject
    await subject.engine.close()
