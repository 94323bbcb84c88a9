"""A door: one protocol a listener may speak, told apart from the others by a connection's first bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.sessions.contract import FramedSession, WatchedLink
from headrace.wire.sniff import Sniff

__all__ = ["Door", "Sniff", "Visitor", "choose"]


class Visitor(WatchedLink, Protocol):
    """Somebody at a door: a link, and what the connection knows about the two sides of it."""

    @property
    def identity(self) -> str | None:
        """Whom the peer's certificate names, if one was asked for."""

    @property
    def local(self) -> str:
        """The address of ours that the peer came to."""

    def logged_in(self, user: str, *, is_admin: bool) -> str | None:
        """Count the connection for this user, whom the peer has shown to be. Returns why it cannot be kept; None: it can."""


@dataclass(frozen=True, slots=True)
class Door:
    """`sniff` sees the first bytes of a connection (at least one, all that have come so far); `open` makes its session.

    `needs_login` says, when the deadline for logging in has passed, whether a peer that has not done so can do nothing here.
    """

    name: str
    sniff: Callable[[bytes], Sniff]
    open: Callable[[Visitor], FramedSession]
    needs_login: Callable[[], bool] = lambda: False


def choose(doors: Sequence[Door], first: bytes) -> Door | Sniff:
    """The door these first bytes belong to, `Sniff.MORE` to wait for more, `Sniff.NO` if no door will have them.

    The first door that says yes wins: a door says so only when it is sure, so nobody waits for one that still wonders.
    """
    answer = Sniff.NO
    for door in doors:
        match door.sniff(first):
            case Sniff.YES:
                return door
            case Sniff.MORE:
                answer = Sniff.MORE
    return answer
