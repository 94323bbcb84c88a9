"""Numbered subscriptions that outlive connections, for protocols that have them.

The table stores which principal follows which topic under which group, and which numbers were used. Delivery is the protocol's task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.broker.tables import Table
from headrace.engine.contract import Engine

_IDS_RESERVED: Final = 1_024
"""Numbers are reserved on disk in blocks, so that none is reused, not even one of a subscription that existed only in memory."""


@dataclass(frozen=True, slots=True)
class SubscriptionRow:
    """Row of one subscription."""

    topic: str
    owner: str
    """Name of a principal."""
    group: str


class SubscriptionBook:
    """Durable subscriptions of one protocol. Loaded when the engine is open."""

    def __init__(self, engine: Engine, protocol: str) -> None:
        self._rows = Table(engine, f"__{protocol}_subscriptions", tuple[int], SubscriptionRow)
        self._ids = Table(engine, f"__{protocol}_ids", tuple[str], int)
        self._next_id = self._ids_end = 1
        self._reserving = asyncio.Lock()

    async def load(self) -> Mapping[int, SubscriptionRow]:
        """Load the table and return the subscriptions by number."""
        await self._rows.load()
        await self._ids.load()
        self._next_id = self._ids_end = self._ids.rows.get(("reserved",), 1)
        return {id: row for (id,), row in self._rows.rows.items()}

    async def put(self, changes: Mapping[int, SubscriptionRow | None]) -> None:
        """Store or (None) delete subscriptions atomically. Durable when it returns."""
        await self._rows.put([((id,), row) for id, row in changes.items()])

    async def new_id(self) -> int:
        """Return a number that was never used before."""
        async with self._reserving:
            if self._next_id == self._ids_end:
                await self._ids.put([(("reserved",), self._ids_end + _IDS_RESERVED)])
                self._ids_end += _IDS_RESERVED
            self._next_id += 1
            return self._next_id - 1
