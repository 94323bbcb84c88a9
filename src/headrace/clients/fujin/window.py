"""Window of unanswered writes. Fujin answers each WRITE separately, in any order, by correlation id (cid).

Cids number the records after the wait for room: they follow the order of entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.clients.messages import Receipt
from headrace.clients.window import Batch, Window
from headrace.errors import HeadraceError
from headrace.records import Headers

_CIDS = 1 << 32


class Written(Batch):
    """A batch of unanswered writes."""

    __slots__ = ("_first", "headers", "name", "values")

    def __init__(self, name: str, values: Sequence[bytes], headers: Headers) -> None:
        super().__init__(len(values), sum(map(len, values)))
        self.name, self.headers = name, headers
        """`headers` are those of each record."""
        self.values: dict[bytes, bytes] = dict(zip(_cids(0, len(values)), values, strict=True))
        """Unanswered values by cid, in order."""
        self._first = 0

    def number(self, first: int) -> None:
        self._first = first
        self.values = dict(zip(_cids(first, self.count), self.values.values(), strict=True))

    @property
    def records(self) -> int:
        return len(self.values)

    def receipts(self) -> list[Receipt]:
        return [Receipt(self.name)] * self.count

    def refuse_cid(self, cid: bytes, failure: HeadraceError) -> None:
        self.refuse((int.from_bytes(cid, "big") - self._first) % _CIDS, failure)


class WriteWindow(Window[Written]):
    """Window of writes by cid."""

    def __init__(self, *, records_max: int, bytes_max: int) -> None:
        super().__init__(records_max=records_max, bytes_max=bytes_max)
        self._by_cid: dict[bytes, Written] = {}
        self._next = 0

    def _admit(self, entry: Written) -> None:
        entry.number(self._next)
        self._next += entry.count
        self._by_cid.update(dict.fromkeys(entry.values, entry))
        super()._admit(entry)

    def _forget(self, entry: Written) -> None:
        for cid in entry.values:
            self._by_cid.pop(cid, None)

    def answer(self, cids: Iterable[bytes], failure: HeadraceError | None = None) -> int:
        """Complete writes. Returns how many of them were unanswered."""
        count = 0
        for cid in cids:
            batch = self._by_cid.pop(cid, None)
            if batch is None:
                continue
            count += 1
            size_bytes = len(batch.values.pop(cid))
            batch.size_bytes -= size_bytes
            self._shrink(1, size_bytes)
            if failure is not None:
                batch.refuse_cid(cid, failure)
            if not batch.values:
                self._entries.remove(batch)
                batch.settle()
        self._changed.set()
        return count


def _cids(first: int, count: int) -> list[bytes]:
    return [(number % _CIDS).to_bytes(4, "big") for number in range(first, first + count)]
