"""Results of a publish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from headrace.errors import BrokerError


@dataclass(slots=True)
class Published:
    """Position of a published batch."""

    partition: int
    """Partition of the first record."""
    base_offset: int
    """Offset of the first record."""
    count: int
    timestamp: int
    """Unix ms of the first record."""
    placements: list[tuple[int, int]] | None = None
    """(partition, offset) of each record if the batch is not contiguous in one partition, else None. `requirements.NOWHERE` for a
    record that the topic's rule moved to the dead letters."""

    def placement(self, index: int) -> tuple[int, int]:
        """Return (partition, offset) of the record with this index in the batch."""
        if self.placements is not None:
            return self.placements[index]
        return self.partition, self.base_offset + index


@dataclass(slots=True)
class PublishedEach:
    """Positions of independent records."""

    partitions: list[int]
    offsets: list[int]
    timestamp: int
    """Unix ms of all of them."""
    failed: dict[int, BrokerError]
    """Records that were not published, by index."""


class Landing:
    """Future result of a publish: those methods of `asyncio.Future` that sessions use, at a fraction of its cost. It calls back without a
    turn of the loop, and cannot be awaited."""

    __slots__ = ("_callback", "_is_done", "error")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._is_done = False
        self._callback: Callable[[Landing], object] | None = None

    def done(self) -> bool:
        return self._is_done

    def cancelled(self) -> bool:
        return False

    def exception(self) -> BaseException | None:
        assert self._is_done
        return self.error

    def add_done_callback(self, callback: Callable[[Landing], object]) -> None:
        """Call back when it is done, which it is not yet. There is one callback at most."""
        assert not self._is_done and self._callback is None
        self._callback = callback

    def fail(self, error: BaseException) -> None:
        """Set the error. `call_back` follows."""
        self.error, self._is_done = error, True

    def call_back(self) -> None:
        if self._callback is not None:
            self._callback(self)


class PublishedOne(Landing):
    """Future result of the publish of a single record."""

    __slots__ = ("offset", "partition", "timestamp")

    def __init__(self, partition: int) -> None:
        # As in `Landing`. There is one for each single record, and the call would take as long as the rest.
        self.error, self._is_done, self._callback = None, False, None
        self.partition = partition
        self.offset = self.timestamp = 0
        """Of the record, when it is done without an error."""

    def result(self) -> Published:
        assert self._is_done
        if self.error is not None:
            raise self.error
        return Published(self.partition, self.offset, 1, self.timestamp)

    def land(self, offset: int, timestamp: int) -> None:
        """Set the position. `call_back` follows."""
        self.offset, self.timestamp, self._is_done = offset, timestamp, True


class PublishedTogether(Landing):
    """Future result of a transaction."""

    __slots__ = ("_published",)

    def __init__(self) -> None:
        super().__init__()
        self._published: list[Published] = []

    def result(self) -> list[Published]:
        """Return the position of each batch."""
        assert self._is_done
        if self.error is not None:
            raise self.error
        return self._published

    def land(self, published: list[Published]) -> None:
        """Set the positions. `call_back` follows."""
        self._published, self._is_done = published, True


Outcome: TypeAlias = asyncio.Future[Published] | PublishedOne
"""A publish in flight."""
