"""One broker in memory for all tests of a module that do not change what is around them; each takes a topic of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from headrace.flight.client import FlightClient
from tests.flight.stand import Stand, standing

_numbers = itertools.count()


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with standing() as made:
        yield made


@pytest.fixture
def flight_client(stand: Stand) -> Iterator[FlightClient]:
    with stand.client() as client:
        yield client


@pytest.fixture
def topic(stand: Stand) -> str:
    """One partition, nothing in it."""
    return stand.topic(f"topic-{next(_numbers)}")


@pytest.fixture
def wide(stand: Stand) -> str:
    """Five partitions, nothing in them."""
    return stand.topic(f"wide-{next(_numbers)}", 5)
