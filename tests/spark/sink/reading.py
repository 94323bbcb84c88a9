"""What a topic holds, as lists."""

from __future__ import annotations

from typing import Any

from headrace.bulk.client import BulkClient


def rows(bulk: BulkClient, topic: str, *columns: str) -> list[list[Any]]:
    """Of all partitions, one after another."""
    found: list[list[Any]] = []
    for partition, state in enumerate(bulk.describe([topic])[topic].partitions):
        for batch in bulk.read(topic, partition, state.first, state.end, columns=columns):
            found += [list(row) for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
    return found


def values(bulk: BulkClient, topic: str) -> list[str]:
    return [value.decode() for (value,) in rows(bulk, topic, "value")]
