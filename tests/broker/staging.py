"""Staging and publishing in one call, for the tests of exactly-once writers."""

from __future__ import annotations

from headrace.broker import Publication, StageSize
from headrace.records import Run
from tests.broker.stand import ANN, Stand


async def put(
    stand: Stand, handle: str, *values: str, topic: str = "t", app: str = "q", run_id: str = "", order: int = 0, partition: int = 0
) -> StageSize:
    """Stage and seal."""
    run = Run([value.encode() for value in values])
    await stand.broker.stage(ANN, handle, topic, run, app=app, run_id=run_id, order=order, partition=partition)
    return await stand.broker.seal(ANN, handle)


async def publish(stand: Stand, version: int, *handles: str, app: str = "q", run_id: str = "") -> Publication:
    return await stand.broker.publish_staged(ANN, app, version, handles, run_id=run_id)
