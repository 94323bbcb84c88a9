"""Why a benchmark cannot go on; the text is the one line that the user sees."""

from __future__ import annotations

from headrace.errors import HeadraceError


class BenchFailed(HeadraceError):
    """The run could not be finished: a peer died, closed the connection or answered with an error."""


class PeerMissing(BenchFailed):
    """A program or library that the command needs is not installed; the text says how to get it."""
