"""Written and not answered. Fujin answers each WRITE by itself, in any order, so what is left of a run is known by its cids.

Cids are the numbers of the records, which are given after the wait for room: their order is the order of entry.
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
    """A run whose records wait for their answers; `done` is set when all have come, and fails with the first refusal."""

    name: str
    values: dict[bytes, bytes]
    """By cid, in order; what is answered is taken out."""
    headers: Headers
    """Of each of them."""
    done: asyncio.Future[None]
    failure: Exception | None = None
    was_sent: bool = False


class WriteWindow:
    """Bounded by records and by bytes; whoever wants to write more waits, first come, first served."""

    def __init__(self, *, records_max: int, bytes_max: int) -> None:
        self._records_max, self._bytes_max = records_max, bytes_max
        self._by_cid: dict[bytes, Written] = {}
        self._runs: dict[int, Written] = {}
        """By identity, in order of entry."""
        self._bytes = 0
        self._next = 0
        self._in_line = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Records not answered."""
        return len(self._by_cid)

    async def enter(self, name: str, values: Sequence[bytes], headers: Headers = ()) -> Written:
        """A run larger than the whole window enters when the window is empty. Raises `ClientClosed`."""
        size_bytes = sum(map(len, values))
        async with self._in_line:
            while not self._has_room(len(values), size_bytes) and not self._is_closed:
                self._changed.clear()
                await self._changed.wait()
            if self._is_closed:
                raise ClientClosed("the client is closed")
            cids = [(number % _CIDS).to_bytes(4, "big") for number in range(self._next, self._next + len(values))]
            self._next += len(values)
            batch = Written(name, dict(zip(cids, values, strict=True)), headers, asyncio.get_running_loop().create_future())
            self._runs[id(batch)] = batch
            self._by_cid.update(dict.fromkeys(cids, batch))
            self._bytes += size_bytes
            return batch

    def answer(self, cids: Iterable[bytes], failure: Exception | None = None) -> int:
        """These are answered; how many of them were still waited for."""
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
        return iter(list(self._runs.values()))

    async def emptied(self) -> None:
        """Wait until nothing is unanswered, or the window is closed."""
        while self._by_cid and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> tuple[int, int]:
        """Fail what is left. Returns how many records were sent without an answer, and how many were never sent."""
        self._is_closed = True
        unknown = unsent = 0
        for batch in list(self._runs.values()):
            count = len(batch.values)
            unknown, unsent = (unknown + count, unsent) if batch.was_sent else (unknown, unsent + count)
            batch.failure = OutcomeUnknown(count) if batch.was_sent else NotSent(count)
            self._finish(batch)
        self._by_cid.clear()
        self._bytes = 0
        self._changed.set()
        return unknown, unsent

    def _finish(self, batch: Written) -> None:
        del self._runs[id(batch)]
        if batch.done.done():
            return
        if batch.failure is None:
            batch.done.set_result(None)
        else:
            batch.done.set_exception(batch.failure)
            batch.done.exception()  # whoever does not await it hears of it from the client's `close`

    def _has_room(self, count: int, size_bytes: int) -> bool:
        return not self._by_cid or (len(self._by_cid) + count <= self._records_max and self._bytes + size_bytes <= self._bytes_max)
