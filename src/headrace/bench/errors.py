"""Errors that end a benchmark; the message is printed as one line."""

from __future__ import annotations

from headrace.errors import HeadraceError


class BenchFailed(HeadraceError):
    """The benchmark stopped: a peer died, closed the connection or answered with an error."""


class PeerMissing(BenchFailed):
    """A required program or library is not installed. The message says how to install it."""
