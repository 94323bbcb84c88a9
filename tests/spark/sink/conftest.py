"""Fixtures for writes to the broker of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.spark.serving import FlightBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Write = Callable[..., None]


@pytest.fixture
def write(broker: FlightBroker) -> Write:
    """Return `write(frame, topic=…)`, a batch write in append mode."""

    def write(frame: DataFrame, **options: str) -> None:
        frame.write.format("headrace").options(**{"kafka.bootstrap.servers": broker.address, **options}).mode("append").save()

    return write
