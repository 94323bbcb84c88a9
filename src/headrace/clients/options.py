"""Options of a connection that all protocols share."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.clients.messages import OnState
from headrace.clients.tls import TlsOptions
from headrace.limits import MIB
from headrace.retry import TIMEOUT_SECONDS, Backoff, exponential


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a connection. A login that the protocol cannot carry raises `NotSupported`."""

    user: str = ""
    """User to log in as on every connection; empty: no login with a password."""
    password: str = field(default="", repr=False)
    api_key: bytes | str = field(default="", repr=False)
    """API key to log in with on every connection, instead of user and password."""
    connect_seconds: float = 5.0
    publish_seconds: float = TIMEOUT_SECONDS
    """Deadline of a publish, including reconnecting; 0: none."""
    refused_connections_max: int = 10
    """Connections in a row that the server may end without serving a request before the client gives up; 0: no limit."""
    window_records_max: int = 65_536
    window_bytes_max: int = 8 * MIB
    """Bounds of records and requests without a reply; further ones wait."""
    tls: TlsOptions | None = None
    backoff: Backoff = exponential()
    on_state: OnState = lambda state, reason: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReplyOptions(ClientOptions):
    """Options of a protocol whose replies arrive in the order of requests, and whose subscriptions poll."""

    resend_writes: bool = True
    """Whether to send writes without a reply again on a new connection. Otherwise they fail with `OutcomeUnknown`."""
    reply_seconds: float = 30.0
    """Longest wait for a reply before the connection counts as lost."""
    ping_seconds: float = 5.0
    """Interval of pings on an idle connection."""
    window_bytes_max: int = 16 * MIB
    poll_seconds_min: float = 0.01
    poll_seconds_max: float = 0.5
    """Bounds of the delay between polls, which doubles while there are no new records."""
