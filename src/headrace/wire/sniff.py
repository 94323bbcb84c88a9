"""Result of a protocol check on the first bytes of a connection."""

from __future__ import annotations

from enum import Enum


class Sniff(Enum):
    """Result of one protocol's check."""

    YES = "yes"
    """The bytes are the start of a valid message of this protocol."""
    NO = "no"
    """The connection uses another protocol, whatever follows."""
    MORE = "more"
    """The bytes match so far, but more are needed."""
