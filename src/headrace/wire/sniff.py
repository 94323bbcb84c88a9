"""What the first bytes of a connection say about its protocol."""

from __future__ import annotations

from enum import Enum


class Sniff(Enum):
    """The answer of one protocol to the first bytes of a connection."""

    YES = "yes"
    """These bytes are the start of an exact message of this protocol."""
    NO = "no"
    """Whatever follows, this is another protocol."""
    MORE = "more"
    """The bytes so far fit; more are needed to tell."""
