"""What an operator may choose about the Fujin protocol.

A *connector* gives a name on the wire its meaning. A name without a connector is the topic of that name, and the readers of one name
share a group of that name: each message goes to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace import limits
from headrace.wire.fujin import WriteForm


@dataclass(frozen=True, slots=True)
class ReaderConnector:
    """Where a reader's messages come from."""

    topics: tuple[str, ...]
    group: str
    start: Literal["earliest", "latest"] = "earliest"
    """Where a group begins that has never read the topic."""


@dataclass(frozen=True, slots=True)
class Connectors:
    """Names and their meaning. Readers' and writers' names have nothing to do with each other."""

    readers: Mapping[str, ReaderConnector] = field(default_factory=dict)
    writers: Mapping[str, str] = field(default_factory=dict)
    """The topic of each writer's name."""
    only_named: bool = False
    """Whether names that are not listed are refused instead of taken for topics."""

    def reader(self, name: str) -> ReaderConnector | None:
        found = self.readers.get(name)
        if found is not None or self.only_named:
            return found
        return ReaderConnector((name,), name)

    def writer(self, name: str) -> str | None:
        return self.writers.get(name) if self.only_named else self.writers.get(name, name)


@dataclass(frozen=True, slots=True)
class FujinSettings:
    """The defaults are the original's where it has one."""

    connectors: Connectors = Connectors()
    write_form: WriteForm = WriteForm.AUTO
    """Whether a WRITE carries headers. The protocol does not say; see `headrace.wire.fujin.frames`."""
    message_bytes_max: int = limits.FUJIN_MESSAGE_BYTES_MAX
    in_flight_bytes_max: int = limits.IN_FLIGHT_BYTES_MAX
    """Written and not yet durable on one stream before it is no longer read."""
    fetch_wait_ms: int = 500
    """How long a FETCH waits for its first message. An empty reply confuses the original's client for good."""
    ack_timeout_ms: int = 30_000
    """How long a message may wait for its ACK or NACK before it comes again."""
    backoff_ms: int = 1_000
    """What a message waits after its first NACK; it doubles with each further one."""
    backoff_max_ms: int = 60_000
    attempts_max: int = 5
    """Deliveries of one message before it goes to the dead letters. Zero: no limit."""
    transaction_timeout_ms: int = 60_000
    stop_seconds: float = 5.0
    """How long a client may take to disconnect after a STOP."""
    doubt_seconds: float = 0.05
    """How long an empty value may be the beginning of headers."""
