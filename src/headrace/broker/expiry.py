"""Periodic removal of idle producers and of stages whose writer is silent."""

from __future__ import annotations

import asyncio

from headrace.broker.health import supervise
from headrace.broker.publishing.producers import Producers
from headrace.broker.settings import Later, Timer
from headrace.broker.writers.stages import Stages
from headrace.engine.contract import Health
from headrace.errors import BrokerError


class Expiry:
    """Timer of the removal."""

    def __init__(self, health: Health, producers: Producers, stages: Stages, later: Later, every_ms: int) -> None:
        self._health, self._producers, self._stages = health, producers, stages
        self._later, self._every_ms = later, every_ms
        self._timer: Timer | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    def start(self) -> None:
        if not self._is_stopped:
            self._timer = self._later(self._every_ms / 1000, self._begin)

    def stop(self) -> None:
        """Begin no more rounds."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def finished(self) -> None:
        """Wait for the end of the latest round."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def now(self) -> None:
        await self._producers.expire()
        await self._stages.expire()

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._round())
        supervise(self._health, "expiry of idle producers and stages", self._task)

    async def _round(self) -> None:
        try:
            await self.now()
        except BrokerError:
            pass  # a write that meets a full or failed disk reports it; the next round retries
        finally:
            self.start()
