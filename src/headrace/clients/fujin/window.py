"""Window of unanswered writes. Fujin answers each WRITE separately, in any order, by correlation id (cid).

Cids number the records after the wait for room: they follow the order of entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown
from headrace.records import Headers

_CIDS = 1 << 32


@dataclass(slots=True)
class Written:
    """A batch of unanswered writes. `done` resolves with the last reply, and fails with the first error."""

    name: str
    values: dict[bytes, bytes]
    """Unanswered values by cid, in order."""
    headers: Headers
    """Headers of each record."""
    done: asyncio.Future[None]
    failure: Exception | None = None
    was_sent: bool = False


class WriteWindow:
    """Window bounded by records and bytes. Writers wait for room in FIFO order."""

    def __init__(self, *, records_max: int, bytes_max: int) -> None:
        self._records_max, self._bytes_max = records_max, bytes_max
        self._by_cid: dict[bytes, Written] = {}
        self._batches: dict[int, Written] = {}
        """Batches by identity, in order of entry."""
        self._bytes = 0
        self._next = 0
        self._entry_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of unanswered writes."""
        return len(self._by_cid)

    async def enter(self, name: str, values: Sequence[bytes], headers: Headers = ()) -> Written:
        """Wait for room. A batch larger than the window enters when the window is empty. Raises `ClientClosed`."""
        size_bytes = sum(map(len, values))
        async with self._entry_lock:
            while not self._has_room(len(values), size_bytes) and not self._is_closed:
                self._changed.clear()
                await self._changed.wait()
            if self._is_closed:
                raise ClientClosed("the client is closed")
            cids = [(number % _CIDS).to_bytes(4, "big") for number in range(self._next, self._next + len(values))]
            self._next += len(values)
            batch = Written(name, dict(zip(cids, values, strict=True)), headers, asyncio.get_running_loop().create_future())
            self._batches[id(batch)] = batch
            self._by_cid.update(dict.fromkeys(cids, batch))
            self._bytes += size_bytes
            return batch

    def answer(self, cids: Iterable[bytes], failure: Exception | None = None) -> int:
        """Complete writes. Returns how many of them were unanswered."""
        count = 0
        for cid in cids:
            batch = self._by_cid.pop(cid, None)
            if batch is None:
                continue
            count += 1
            self._bytes -= len(batch.values.pop(cid))
            batch.failure = batch.failure or failure
            if not batch.values:
                self._finish(batch)
        self._changed.set()
        return count

    def unanswered(self) -> Iterator[Written]:
        return iter(list(self._batches.values()))

    async def emptied(self) -> None:
        """Wait until every write is answered or the window is closed."""
        while self._by_cid and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> tuple[int, int]:
        """Fail the remaining writes. Returns the number of records sent without a reply, and of records never sent."""
        self._is_closed = True
        unknown = unsent = 0
        for batch in list(self._batches.values()):
            count = len(batch.values)
            unknown, unsent = (unknown + count, unsent) if batch.was_sent else (unknown, unsent + count)
            batch.failure = OutcomeUnknown(count) if batch.was_sent else NotSent(count)
            self._finish(batch)
        self._by_cid.clear()
        self._bytes = 0
        self._changed.set()
        return unknown, unsent

    def _finish(self, batch: Written) -> None:
        del self._batches[id(batch)]
        if batch.done.done():
            return
        if batch.failure is None:
            batch.done.set_result(None)
        else:
            batch.done.set_exception(batch.failure)
            batch.done.exception()  # retrieved: `close` reports it even if the future is never awaited

    def _has_room(self, count: int, size_bytes: int) -> bool:
        return not self._by_cid or (len(self._by_cid) + count <= self._records_max and self._bytes + size_bytes <= self._bytes_max)
