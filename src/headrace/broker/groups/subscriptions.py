"""Subscriptions that have a number and outlive connections, for protocols that know such a thing.

The book keeps who follows which topic under which group, and which numbers were given. How a subscription delivers is its protocol's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.broker.tables import Table
from headrace.engine.contract import Engine

_IDS_RESERVED: Final = 1_024
"""Numbers are reserved on disk in blocks: none is ever given twice, not even for a subscription that was only in memory."""


@dataclass(frozen=True, slots=True)
class SubscriptionRow:
    """One subscription as the table keeps it."""

    topic: str
    owner: str
    """The name of a principal."""
    group: str


class SubscriptionBook:
    """The durable subscriptions of one protocol. Loaded when the engine is open."""

    def __init__(self, engine: Engine, protocol: str) -> None:
        self._rows = Table(engine, f"__{protocol}_subscriptions", tuple[int], SubscriptionRow)
        self._ids = Table(engine, f"__{protocol}_ids", tuple[str], int)
        self._next_id = self._ids_end = 1
        self._reserving = asyncio.Lock()

    async def load(self) -> Mapping[int, SubscriptionRow]:
        """What the book holds, by number."""
        await self._rows.load()
        await self._ids.load()
        self._next_id = self._ids_end = self._ids.rows.get(("reserved",), 1)
        return {id: row for (id,), row in self._rows.rows.items()}

    async def put(self, changes: Mapping[int, SubscriptionRow | None]) -> None:
        """Enter or, with None, strike out; all of it or nothing. Durable when it returns."""
        await self._rows.put([((id,), row) for id, row in changes.items()])

    async def new_id(self) -> int:
        """A number that was never given before."""
        async with self._reserving:
            if self._next_id == self._ids_end:
                await self._ids.put([(("reserved",), self._ids_end + _IDS_RESERVED)])
                self._ids_end += _IDS_RESERVED
            self._next_id += 1
            return self._next_id - 1
