"""How many calls are under way: bounded, and known to whoever wants to use a quiet moment."""

from __future__ import annotations

import threading

from headrace.errors import Unavailable


class Calls:
    """Used by many threads."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._lock = threading.Lock()
        self.under_way = 0
        self.begun = 0
        """Since the lane was opened."""

    def begin(self) -> None:
        """Raises `Unavailable` for one too many."""
        with self._lock:
            if self.under_way >= self._count_max:
                raise Unavailable(f"{self._count_max} calls are being served already")
            self.under_way += 1
            self.begun += 1

    def end(self) -> None:
        with self._lock:
            self.under_way -= 1
