"""What a session and its connection may ask of each other.

A session is the state of one connection: bytes in, broker verbs, bytes out. It holds no socket. The connection (`net/`) holds the
socket and knows no protocol. Everything here happens on the event loop, in plain calls.
"""

from __future__ import annotations

from typing import Protocol


class Link(Protocol):
    """The connection, as its session sees it."""

    @property
    def peer(self) -> str:
        """The address of the other side, for logs and principals."""

    def send(self, frames: bytes) -> None:
        """Queue; never blocks and never fails. After `close` or on a lost connection the bytes are dropped."""

    def close(self, reason: str, *, error: bool = True) -> None:
        """Send what is queued, then close; nothing is received any more.

        The reason goes to the log; the part before its first colon is also counted, so keep numbers and names behind a colon.
        The first call wins.
        """

    def pause_reading(self) -> None:
        """Counted: n pauses need n resumes. At most what the socket had already delivered still arrives."""

    def resume_reading(self) -> None: ...

    @property
    def unsent_bytes(self) -> int:
        """What waits for the peer in this process.

        A session that feeds data on and on stops while this is above `limits.OUTPUT_HIGH_WATER_BYTES`: `drained` will be called.
        """


class WatchedLink(Link, Protocol):
    """A connection that can tell whether its peer is still there."""

    @property
    def has_peer_left(self) -> bool:
        """Whether the peer has closed its side or the connection is lost; known even while reading is paused. Asks the kernel: not for
        every request, but for work that takes long."""


class Session(Protocol):
    """One connection's state. No method may raise because of what the peer sent."""

    def receive(self, data: bytes) -> None:
        """Bytes from the peer, in order, cut anywhere. Bad input closes the link with a reason."""

    def drained(self) -> None:
        """The output was above its high-water mark and is now below the low one: feed again."""

    def closing(self) -> None:
        """The server drains, or the peer has finished sending: complete what was received, take nothing new, then close the link."""

    def lost(self) -> None:
        """The connection is gone, for whatever reason: release everything. Called exactly once, and last."""


class FramedSession(Session, Protocol):
    """A session whose peer sends frames, which may come in pieces."""

    @property
    def held_bytes(self) -> int:
        """What has come of a frame that is not whole yet. The connection watches over it: a frame must not take for ever."""
