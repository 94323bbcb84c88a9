"""Transactions: runs for several partitions and a group's offsets, committed as one append."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.broker.publish import Published
from headrace.records import Run


class Transaction:
    """Staged in memory, invisible until it is committed."""

    id: str | None

    def publish(self, topic: str, run: Run, partition: int | None = None) -> None:
        """Stage a run. Raises as `Broker.publish` does at once, and `InvalidTransaction`."""
        raise NotImplementedError

    def commit_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Stage a group's offsets; they become durable with the records."""
        raise NotImplementedError

    async def commit(self) -> list[Published]:
        """All of it or nothing. One `Published` for each `publish`, in order.

        After a retriable error (`DiskFull`) the transaction is still open and may be committed again."""
        raise NotImplementedError

    def abort(self) -> None:
        """Forget it all. Idempotent; does nothing to a transaction that has ended."""
        raise NotImplementedError
