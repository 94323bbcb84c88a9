"""How many calls are under way: bounded, and known to whoever wants to use a quiet moment.

gRPC gives a server no way to end a call, and a peer that neither reads nor writes holds its place as long as it likes. So where all
places are taken, the call that has waited the longest for its peer, if that is long enough, loses its connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from headrace.errors import Unavailable
from headrace.limits import BULK_STALL_SECONDS_MAX


class Call:
    """One that is being served. Used by the thread of the call, looked at by others."""

    __slots__ = ("_clock", "carries_rows", "is_cut", "peer", "waits_since")

    def __init__(self, peer: str, carries_rows: bool, clock: Callable[[], float]) -> None:
        self.peer, self.carries_rows, self._clock = peer, carries_rows, clock
        self.waits_since: float | None = None
        """When it became the peer's turn; None while it is ours."""
        self.is_cut = False

    def peers_turn(self) -> None:
        self.waits_since = self._clock()

    def our_turn(self) -> None:
        self.waits_since = None


class Calls:
    """Used by many threads. `cut` ends the connection of a peer."""

    def __init__(
        self, count_max: int, *, cut: Callable[[str], object] = lambda peer: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count_max, self._cut, self._clock = count_max, cut, clock
        self._lock = threading.Lock()
        self._under_way: set[Call] = set()
        self.carriers_begun = 0
        """Calls that carry rows, since the lane was opened."""

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def carriers_under_way(self) -> int:
        with self._lock:
            return sum(call.carries_rows for call in self._under_way)

    def begin(self, peer: str = "", *, carries_rows: bool = False) -> Call:
        """Raises `Unavailable` for one too many; there may be room for it a moment later."""
        with self._lock:
            stalled = None
            if len(self._under_way) < self._count_max:
                call = Call(peer, carries_rows, self._clock)
                self._under_way.add(call)
                self.carriers_begun += carries_rows
                return call
            stalled = self._stalled()
        if stalled is not None:
            self._cut(stalled.peer)
        raise Unavailable(f"{self._count_max} calls are being served already")

    def _stalled(self) -> Call | None:
        """The one that has waited the longest for its peer."""
        before = self._clock() - BULK_STALL_SECONDS_MAX
        waiting = [
            (since, id(call), call)
            for call in self._under_way
            if not call.is_cut and (since := call.waits_since) is not None and since <= before
        ]
        if not waiting:
            return None
        found = min(waiting)[2]
        found.is_cut = True
        return found

    def end(self, call: Call) -> None:
        with self._lock:
            self._under_way.discard(call)
