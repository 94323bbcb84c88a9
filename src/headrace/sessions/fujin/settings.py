"""Settings of the Fujin protocol.

A *connector* maps a name on the wire to topics and a group. A name without a connector is a topic, and the readers of that name form a
group of the same name: each message goes to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace import limits
from headrace.wire.fujin import WriteForm


@dataclass(frozen=True, slots=True)
class ReaderConnector:
    """Source of a reader's messages."""

    topics: tuple[str, ...]
    group: str
    start: Literal["earliest", "latest"] = "earliest"
    """Position of a group that has never read the topic."""
    mode: Literal["ordered", "shared"] | None = None
    """Mode of the group. None: as the group does, and shared if the reader is its first member."""


@dataclass(frozen=True, slots=True)
class Connectors:
    """Connectors by name. Reader names and writer names are independent."""

    readers: Mapping[str, ReaderConnector] = field(default_factory=dict)
    writers: Mapping[str, str] = field(default_factory=dict)
    """Topic of each writer name."""
    only_named: bool = False
    """Whether a name without a connector is an error instead of a topic."""

    def reader(self, name: str) -> ReaderConnector | None:
        found = self.readers.get(name)
        if found is not None or self.only_named:
            return found
        return ReaderConnector((name,), name)

    def writer(self, name: str) -> str | None:
        return self.writers.get(name) if self.only_named else self.writers.get(name, name)


@dataclass(frozen=True, slots=True)
class FujinSettings:
    """Settings of a listener. The defaults are the original's where it has one."""

    connectors: Connectors = Connectors()
    write_form: WriteForm = WriteForm.AUTO
    """Whether a WRITE carries headers. The protocol does not tell; see `headrace.wire.fujin.frames`."""
    message_bytes_max: int = limits.FUJIN_MESSAGE_BYTES_MAX
    in_flight_bytes_max: int = limits.IN_FLIGHT_BYTES_MAX
    """Written bytes of one stream that are not durable yet. Above this the stream is not read."""
    fetch_wait_ms: int = 500
    """Time a FETCH waits for its first message. An empty reply breaks the original's client."""
    ack_timeout_ms: int = 30_000
    """Time a message may wait for its ACK or NACK before it is redelivered."""
    backoff_ms: int = 1_000
    """Redelivery delay after the first NACK. It doubles with each further one."""
    backoff_max_ms: int = 60_000
    attempts_max: int = 5
    """Deliveries of one message before it goes to the dead letters. Zero: no limit."""
    transaction_timeout_ms: int = 60_000
    stop_seconds: float = 5.0
    """Time a client may take to disconnect after a STOP."""
    doubt_seconds: float = 0.05
    """Time in which an empty value may turn out to be the start of headers."""
