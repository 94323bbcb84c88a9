"""What an operator may choose about the BlipMQ protocol. The defaults are the numbers BlipMQ's clients were written for."""

from __future__ import annotations

from dataclasses import dataclass

from headrace import limits


@dataclass(frozen=True, slots=True)
class BlipMqSettings:
    """The names follow BlipMQ's own configuration where it has one."""

    retry_backoff_ms: int = 100
    """How long a first delivery may wait for its ACK; each further one may wait twice as long as the one before."""
    max_retries: int = 3
    """Deliveries of one message. After the last one's time is up the message goes to the topic's dead letters."""
    subscription_idle_ms: int = 10 * 60 * 1000
    """A subscription that no open connection has used for so long is forgotten. Zero: never."""
    compat_silent_poll: bool = False
    """A POLL of an unknown subscription gets no answer, as from the original, instead of a NACK 404."""
    login_seconds: float = limits.HANDSHAKE_SECONDS_MAX
    """From the first bytes of a connection to its successful AUTH. Zero: no deadline."""
    in_flight_bytes_max: int = limits.IN_FLIGHT_BYTES_MAX
    """Published and not yet durable on one connection; above it the socket is not read."""
