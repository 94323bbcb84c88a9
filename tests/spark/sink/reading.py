"""Contents of a topic as lists."""

from __future__ import annotations

from typing import Any

from headrace.flight.client import FlightClient


def rows(flight_client: FlightClient, topic: str, *columns: str) -> list[list[Any]]:
    """Return the values of all partitions, one after another."""
    found: list[list[Any]] = []
    for partition, state in enumerate(flight_client.describe([topic])[topic].partitions):
        for batch in flight_client.read(topic, partition, state.first, state.end, columns=columns):
            found += [list(row) for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
    return found


def values(flight_client: FlightClient, topic: str) -> list[str]:
    return [value.decode() for (value,) in rows(flight_client, topic, "value")]
