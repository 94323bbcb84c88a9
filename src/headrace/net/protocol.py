"""Protocols of a listener, detected by the first bytes of a connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.sessions.contract import FramedSession, WatchedLink
from headrace.wire.sniff import Sniff

__all__ = ["Peer", "ServedProtocol", "Sniff", "choose"]


class Peer(WatchedLink, Protocol):
    """The link of a session, with the identity and addresses of the connection."""

    @property
    def identity(self) -> str | None:
        """The name in the client certificate, if one was required."""

    @property
    def local(self) -> str:
        """The local address of the connection."""

    @property
    def is_relayed(self) -> bool:
        """Whether another broker relays the connection to this one."""

    def replace_session(self, session: FramedSession) -> None:
        """End the session and let this one continue."""

    def logged_in(self, user: str, *, is_admin: bool) -> str | None:
        """Count the connection for this user after a login. Return the reason for closing it, or None."""


@dataclass(frozen=True, slots=True)
class ServedProtocol:
    """`sniff` gets all bytes received so far, at least one; `open` creates the session.

    `needs_login` returns, at the login deadline, whether a peer without a login has no permission at all. `error_pause_seconds` delays the
    close of a connection for an error that the protocol cannot report.
    """

    name: str
    sniff: Callable[[bytes], Sniff]
    open: Callable[[Peer], FramedSession]
    needs_login: Callable[[], bool] = lambda: False
    error_pause_seconds: float = 0.0


def choose(protocols: Sequence[ServedProtocol], first: bytes) -> ServedProtocol | Sniff:
    """Return the protocol of these first bytes, `Sniff.MORE` to wait for more, or `Sniff.NO` if no protocol matches.

    The first protocol that returns `YES` wins, even if others need more bytes: `YES` is certain.
    """
    answer = Sniff.NO
    for protocol in protocols:
        match protocol.sniff(first):
            case Sniff.YES:
                return protocol
            case Sniff.MORE:
                answer = Sniff.MORE
    return answer
