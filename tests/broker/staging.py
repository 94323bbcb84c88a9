"""Staging and publishing in one call, for the tests of exactly-once writers."""

from __future__ import annotations

from headrace.broker import Publication, StageSize
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness


async def put(
    harness: Harness, handle: str, *values: str, topic: str = "t", writer: str = "q", epoch: str = "", order: int = 0, partition: int = 0
) -> StageSize:
    """Stage and seal."""
    batch = RecordBatch([value.encode() for value in values])
    await harness.broker.stage(ANN, handle, topic, batch, writer=writer, epoch=epoch, order=order, partition=partition)
    return await harness.broker.seal(ANN, handle)


async def publish(harness: Harness, version: int, *handles: str, writer: str = "q", epoch: str = "") -> Publication:
    return await harness.broker.publish_staged(ANN, writer, version, handles, epoch=epoch)
