"""Interfaces between a session and its connection.

A session is the state of one connection: it turns received bytes into broker calls and their results into bytes to send. It holds no
socket. The connection (`net/`) holds the socket and knows no protocol. All calls are made on the event loop and return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class Link(Protocol):
    """The connection as its session sees it."""

    @property
    def peer(self) -> str:
        """Address of the peer, for logs and principals."""

    def send(self, frames: bytes) -> None:
        """Queue the bytes. Never blocks and never fails; after `close` or on a lost connection the bytes are dropped."""

    def close(self, reason: str, *, error: bool = True) -> None:
        """Send the queued bytes, then close. Nothing is received after this call.

        The reason is logged. The part before its first colon is also a counter label, so numbers and names belong after the colon.
        Only the first call has an effect.
        """

    def pause_reading(self) -> None:
        """Pause reading. Pauses are counted: n pauses need n resumes. Bytes that the socket has already delivered may still arrive."""

    def resume_reading(self) -> None: ...

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait in this process to be sent.

        A session that streams data stops while this is above `limits.OUTPUT_HIGH_WATER_BYTES`. The connection then calls `drained`.
        """


@dataclass(frozen=True, slots=True)
class Login:
    """Frames that make the coordinator know the peer of a connection as this broker does."""

    frames: Sequence[bytes] = ()
    """Each is answered by one frame, which the peer does not get: it has its answers."""
    answer_bytes: Callable[[bytes], int] = len
    """Returns the size of the first answer in these bytes, 0 if it is incomplete. Raises `WireError` if it refuses the login."""


class Handed(Enum):
    """Outcome of a handover."""

    OVER = auto()
    """The coordinator serves the connection. The session has ended."""
    HERE = auto()
    """This broker is the coordinator now."""
    REFUSED = auto()
    """No coordinator can be reached, or it does not accept the connection."""


class Handover(Protocol):
    """Passes a connection on to the coordinator."""

    async def __call__(self, login: Login, unserved: Callable[[], bytes]) -> Handed:
        """Log in at the coordinator, then replace the session by a relay. `unserved` is called in between: it ends the work of the
        session and returns the requests that the coordinator gets first. It raises `WireError` if they cannot be passed on."""


class WatchedLink(Link, Protocol):
    """A connection that can tell whether its peer has left."""

    @property
    def has_peer_left(self) -> bool:
        """Whether the peer has closed its side or the connection is lost, even while reading is paused. Costs a system call: use it for
        long work only."""


class StreamedLink(Link, Protocol):
    """A link whose transport reports which bytes the peer has received."""

    def when_acknowledged(self, callback: Callable[[], None]) -> None:
        """Call back once, when the peer has acknowledged everything sent. Never called after the end of the link. A second call replaces
        the first."""

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Call back once, after the connection had its turn to send. Never called after the end of the link."""


class Session(Protocol):
    """State of one connection. No method raises because of bytes that the peer sent."""

    def receive(self, data: bytes) -> None:
        """Handle bytes from the peer, in order and cut anywhere. Bad input closes the link with a reason."""

    def drained(self) -> None:
        """Resume sending: the output was above its high-water mark and is now below the low one."""

    def closing(self) -> None:
        """Complete the received requests, accept no new ones, then close the link. Called when the server drains or the peer has finished
        sending."""

    def lost(self) -> None:
        """Release everything: the connection is lost. Called exactly once, as the last call."""


class FramedSession(Session, Protocol):
    """A session whose peer sends frames."""

    @property
    def held_bytes(self) -> int:
        """Bytes received of an incomplete frame. The connection uses them to detect a peer that sends too slowly."""

    @property
    def owes_reply(self) -> bool:
        """Whether a reply is sent as soon as received records are on disk. The connection leaves the TCP acknowledgement to it."""
