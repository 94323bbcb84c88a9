"""Whether readers follow the large appends of a log.

Large appends go past the page cache (`storage/direct.py`), because most are read later or never. If a reader follows the end of the log,
its next read would have to wait for the disk, so they then go through the cache.
"""

from __future__ import annotations

from typing import Final

from headrace.limits import MIB

FOLLOWED_BYTES: Final = 256 * MIB
"""A reader follows a log as long as it is not this far behind its end; one that is twice as far behind does not. A micro-batch of a
million rows is 100 MB."""


class Followed:
    """The position of the readers of one log. Readers and the writer use it without a lock: a late answer only costs time."""

    __slots__ = ("_bytes", "_latest", "_older", "_read")

    def __init__(self) -> None:
        self._read = -1
        """The highest offset that was asked for."""
        self._older = self._latest = 0
        """Ends of the log, at least `FOLLOWED_BYTES` apart."""
        self._bytes = 0
        """Size of the large appends since `_latest`."""

    @property
    def is_followed(self) -> bool:
        return self._read >= self._older

    def read(self, offset: int) -> None:
        if offset > self._read:
            self._read = offset

    def appended(self, size_bytes: int, end: int) -> None:
        self._bytes += size_bytes
        if self._bytes >= FOLLOWED_BYTES:
            self._older, self._latest, self._bytes = self._latest, end, 0
