"""Appends of one write, as the gathered records of a turn are: the path of most requests, so it is compiled."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.checks import check_batch
from headrace.engine.contract import Ack, Appended, Write
from headrace.records import RecordBatch
from headrace.storage.store import Store

Place = tuple[str, int]
"""Topic and partition."""


class SingleWrites:
    """Stages writes in the store. `known` has the log and the ack level of places, `find` adds one to it."""

    __slots__ = ("_clock", "_find", "_known", "_store")

    def __init__(
        self, store: Store, known: dict[Place, tuple[int, Ack]], find: Callable[[Place], tuple[int, Ack]], clock: Callable[[], int]
    ) -> None:
        self._store, self._known, self._find, self._clock = store, known, find, clock

    def append(self, write: Write, done: Callable[[list[Appended] | BaseException], None]) -> None:
        """Implement `Engine.append_then`."""
        batch = write.batch
        assert isinstance(batch, RecordBatch)
        place = (write.topic, write.partition)
        known = self._known.get(place)
        log, ack = self._find(place) if known is None else known
        write.size_bytes = size_bytes = check_batch(batch)
        self._store.stage([(log, batch)], ack=ack, now=self._clock(), done=done, size_bytes=size_bytes)
