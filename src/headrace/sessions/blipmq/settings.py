"""Settings of the BlipMQ protocol. The defaults are those of the original."""

from __future__ import annotations

from dataclasses import dataclass

from headrace import limits


@dataclass(frozen=True, slots=True)
class BlipMqSettings:
    """The names follow the original's configuration where it has one."""

    retry_backoff_ms: int = 100
    """ACK timeout of the first delivery. It doubles with each further delivery."""
    max_retries: int = 3
    """Deliveries of one message. After the last one times out, the message goes to the topic's dead letters."""
    subscription_idle_ms: int = 10 * 60 * 1000
    """A subscription that no open connection has used for this long is removed. Zero disables the removal."""
    compat_silent_poll: bool = False
    """Send no reply to a POLL of an unknown subscription, as the original does, instead of a NACK 404."""
    login_seconds: float = limits.HANDSHAKE_SECONDS_MAX
    """Deadline for AUTH, counted from the first bytes of a connection. Zero disables it."""
    in_flight_bytes_max: int = limits.IN_FLIGHT_BYTES_MAX
    """Published bytes of one connection that are not durable yet. Above this the socket is not read."""
