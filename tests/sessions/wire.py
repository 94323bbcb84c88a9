"""A connection without a socket, for sessions."""

from __future__ import annotations

import asyncio


class Wire:
    """A `WatchedLink` that records its calls."""

    peer = "test:1"

    def __init__(self) -> None:
        self.sent = bytearray()
        self.sends = 0
        self.closed: tuple[str, bool] | None = None
        self.pauses = 0
        self.pauses_ever = 0
        self.unsent_bytes = 0
        self.has_peer_left = False
        self.changed = asyncio.Event()

    def send(self, frames: bytes) -> None:
        if self.closed is None:
            self.sent += frames
            self.sends += 1
            self.changed.set()

    def close(self, reason: str, *, error: bool = True) -> None:
        if self.closed is None:
            self.closed = (reason, error)
            self.changed.set()

    def pause_reading(self) -> None:
        self.pauses += 1
        self.pauses_ever += 1

    def resume_reading(self) -> None:
        self.pauses -= 1
        assert self.pauses >= 0, "a resume without its pause"
