"""Limits of concurrent calls, and detection of stalled ones.

    headers received ─► opening (a thread waits for the first message) ─► opened (the peer is known) ─► ended

A call is counted when its headers arrive: gRPC has assigned it a thread by then, and a call beyond the limit releases it immediately.
Calls that wait for the first message of their peer have their own limit. A few calls beyond the limit are reserved for administrators.

A server cannot end a gRPC call, so a peer that neither reads nor writes occupies a thread indefinitely. When the limit is reached, the
connection of the call that has waited longest for its peer is closed, if it has waited long enough.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from headrace.errors import Unavailable
from headrace.limits import FLIGHT_CALLS_RESERVED, FLIGHT_OPENING_CALLS_MAX, FLIGHT_OPENING_SECONDS_MAX, FLIGHT_STALL_SECONDS_MAX


class Call:
    """A call in progress. Written by its own thread, read by others."""

    __slots__ = ("_clock", "began", "carries_rows", "is_cut", "is_opening", "peer", "waits_since")

    def __init__(self, clock: Callable[[], float], *, is_opening: bool) -> None:
        self.peer, self.carries_rows, self._clock = "", False, clock
        self.began = clock()
        self.is_opening = is_opening
        """Whether a thread waits for the first message of the peer."""
        self.waits_since: float | None = None
        """When the call began to wait for the peer; None while the server works."""
        self.is_cut = False

    def peers_turn(self) -> None:
        self.waits_since = self._clock()

    def our_turn(self) -> None:
        self.waits_since = None


class Calls:
    """The calls in progress. Thread-safe. `cut` closes the connection of a peer."""

    def __init__(
        self, count_max: int, *, cut: Callable[[str], object] = lambda peer: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count_max, self._cut, self._clock = count_max, cut, clock
        self._lock = threading.Lock()
        self._under_way: set[Call] = set()
        self.refused: Counter[str] = Counter()
        """Calls that failed, by error code. Approximate: threads add to it without a lock."""
        self.begun = self.carriers_begun = 0
        """Calls since the endpoint was opened, and those that carry rows."""

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def carriers_under_way(self) -> int:
        with self._lock:
            return sum(call.carries_rows for call in self._under_way)

    def begin(self, peer: str = "", *, carries_rows: bool = False) -> Call:
        """Count a call whose peer is known. Raises `Unavailable` beyond the limit."""
        call = self.arrive()
        self.opened(call, peer, carries_rows=carries_rows)
        return call

    def arrive(self, *, is_opening: bool = False, is_admin: bool = False) -> Call:
        """Count a call when its headers arrive; `is_opening`: the peer must send a message first. Raises `Unavailable`."""
        with self._lock:
            count_max = self._count_max + (FLIGHT_CALLS_RESERVED if is_admin else 0)
            if is_opening and not is_admin and self._opening() >= FLIGHT_OPENING_CALLS_MAX:
                raise Unavailable(f"{FLIGHT_OPENING_CALLS_MAX} calls already wait for the first message of their peers")
            if len(self._under_way) < count_max:
                call = Call(self._clock, is_opening=is_opening)
                self._under_way.add(call)
                self.begun += 1
                return call
            stalled = self._stalled()
        if stalled is not None:
            self._cut(stalled.peer)
        raise Unavailable(f"{count_max} calls are already in progress")

    def opened(self, call: Call, peer: str, *, carries_rows: bool = False) -> None:
        """Record that the call is in progress."""
        with self._lock:
            call.peer, call.is_opening = peer, False
            self.carriers_begun += carries_rows and not call.carries_rows
            call.carries_rows = call.carries_rows or carries_rows

    def _opening(self) -> int:
        return sum(call.is_opening for call in self._under_way)

    @property
    def late_openings(self) -> int:
        """Calls whose peer has taken too long to send the first message."""
        before = self._clock() - FLIGHT_OPENING_SECONDS_MAX
        with self._lock:
            return sum(call.is_opening and call.began <= before for call in self._under_way)

    @property
    def peers(self) -> list[str]:
        """The peers of the calls in progress, ordered by their oldest call."""
        with self._lock:
            served = sorted((call for call in self._under_way if call.peer), key=lambda call: call.began)
        return list(dict.fromkeys(call.peer for call in served))

    def _stalled(self) -> Call | None:
        """Return the call that has waited longest for its peer."""
        before = self._clock() - FLIGHT_STALL_SECONDS_MAX
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
