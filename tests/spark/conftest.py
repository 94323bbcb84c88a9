"""Fixtures: one broker and one Spark session for all tests of a process, because their start takes seconds.

All tests that use `spark` are in one xdist group, so that `pytest -n 2 --dist loadgroup` runs them in the same process.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.fast_start import spark_home
from tests.spark.serving import CONNECT_SETTINGS, FlightBroker, session_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.flight.client import FlightClient

HERE = Path(__file__).parent
_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlightBroker]:
    """Start a broker process; `broker.address` is its Flight endpoint. Its data directory is verified at the end."""
    with FlightBroker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture(scope="session")
def flight_client(broker: FlightBroker) -> Iterator[FlightClient]:
    from headrace.flight.client import FlightClient, Servers

    with FlightClient(Servers.parse(broker.address)) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """Return a unique topic name without creating the topic."""
    return f"{re.sub(r'[^a-z0-9]+', '-', request.node.name.lower())[:60]}-{next(_numbers)}"


@pytest.fixture
def fresh_topic(flight_client: FlightClient, topic: str) -> Callable[..., str]:
    """Create a topic: `fresh_topic(partitions=3)`; a suffix distinguishes several topics of one test."""

    def make(suffix: str = "", *, partitions: int = 1) -> str:
        flight_client.create_topic(topic + suffix, partitions)
        return topic + suffix

    return make


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Return the Spark session of this process, `local[2]`, with the format `headrace` registered. It also serves Spark Connect."""
    from headrace.spark import session

    directory = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPARK_HOME", str(spark_home()))
        environment.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        running = session("tests", "local[2]", **session_settings(directory), **CONNECT_SETTINGS)
        yield running
        running.stop()
