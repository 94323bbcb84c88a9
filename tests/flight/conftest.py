"""One in-memory broker per module, for tests that change only their own topic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from headrace.flight.client import FlightClient
from tests.flight.harness import Harness, running_harness

_numbers = itertools.count()


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with running_harness() as made:
        yield made


@pytest.fixture
def flight_client(harness: Harness) -> Iterator[FlightClient]:
    with harness.client() as client:
        yield client


@pytest.fixture
def topic(harness: Harness) -> str:
    """Return an empty topic with one partition."""
    return harness.topic(f"topic-{next(_numbers)}")


@pytest.fixture
def wide(harness: Harness) -> str:
    """Return an empty topic with five partitions."""
    return harness.topic(f"wide-{next(_numbers)}", 5)
