"""One broker and one Spark session for all tests of a process: starting them takes seconds, using them milliseconds.

A test that takes `spark` is put into one group, so that `pytest -n 2 --dist loadgroup` runs all of them in the same process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.serving import BulkBroker, session_settings, shadow_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.bulk.client import BulkClient

HERE = Path(__file__).parent
_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BulkBroker]:
    """A broker as a process of its own; `broker.address` is its bulk lane. Its data directory is verified at the end."""
    with BulkBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture(scope="session")
def bulk(broker: BulkBroker) -> Iterator[BulkClient]:
    from headrace.bulk.client import BulkClient, Servers

    with BulkClient(Servers.parse(broker.address)) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses; the topic is not made."""
    return f"{re.sub(r'[^a-z0-9]+', '-', request.node.name.lower())[:60]}-{next(_numbers)}"


@pytest.fixture
def fresh_topic(bulk: BulkClient, topic: str) -> Callable[..., str]:
    """Make a topic: `fresh_topic(partitions=3)`; with a name added if a test needs several."""

    def make(suffix: str = "", *, partitions: int = 1) -> str:
        bulk.create_topic(topic + suffix, partitions)
        return topic + suffix

    return make


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The Spark session of this process, `local[2]`, with the format `headrace` registered."""
    from headrace.spark import session

    directory = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPARK_HOME", str(shadow_home(directory / "home")))
        environment.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        running = session("tests", "local[2]", **session_settings(directory))
        yield running
        running.stop()
