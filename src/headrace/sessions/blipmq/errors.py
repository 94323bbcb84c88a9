"""Every NACK of the BlipMQ protocol: code and text, word for word as BlipMQ's clients know them.

| code | to the client |
|---|---|
| 400 | its request is wrong; sending it again will not help |
| 401 | it is not, or not rightly, authenticated, or may not do this |
| 404 | what it names is not there (any more) |
| 426 | it speaks another version of the protocol |
| 500 | the broker cannot do it now; try again later |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.errors import BrokerError
from headrace.limits import SUBSCRIPTIONS_PER_CONNECTION_MAX
from headrace.wire.blipmq import FrameType


@dataclass(frozen=True, slots=True)
class NackReason:
    """What a NACK says."""

    code: int
    text: str


UNAUTHENTICATED: Final = NackReason(401, "unauthenticated")
INVALID_KEY: Final = NackReason(401, "invalid API key")
VERSION_MISMATCH: Final = NackReason(426, "unsupported protocol version")
HELLO_REPEATED: Final = NackReason(400, "HELLO already performed")
HELLO_MISSING: Final = NackReason(400, "HELLO not performed")
AUTH_REPEATED: Final = NackReason(400, "already authenticated")
EMPTY_TOPIC: Final = NackReason(400, "empty topic")
INVALID_QOS: Final = NackReason(400, "invalid QoS value")
SUBSCRIPTION_ZERO: Final = NackReason(400, "subscription_id must be non-zero")
TOO_MANY_SUBSCRIPTIONS: Final = NackReason(400, f"too many subscriptions: the limit is {SUBSCRIPTIONS_PER_CONNECTION_MAX}")
UNKNOWN_SUBSCRIPTION: Final = NackReason(404, "unknown subscription or delivery tag")
INVALID_PAYLOAD: Final = {kind: NackReason(400, f"invalid {kind.name} payload") for kind in FrameType}

# By `BrokerError.code`. What is not named is the broker's own trouble, and so a 500.
_CODES: Final = {
    "invalid_request": 400,
    "invalid_topic_name": 400,
    "limit_exceeded": 400,
    "record_too_large": 400,
    "invalid_record": 400,
    "not_authorized": 401,
    "unknown_topic": 404,
    "unknown_partition": 404,
}
# How BlipMQ's own words for a failed write begin.
_WRITE_FAILURES: Final = {
    "disk_full": "I/O error: ",
    "storage_failed": "I/O error: ",
    "corrupt_data": "log corruption: ",
    "unavailable": "wal writer stopped: ",
}


def reason_of(error: BrokerError) -> NackReason:
    """The NACK for a request the broker refused."""
    return NackReason(_CODES.get(error.code, 500), str(error))


def publish_reason_of(error: BrokerError) -> NackReason:
    """The same for a PUBLISH, where every 500 is a durable publish that failed."""
    found = reason_of(error)
    if found.code != 500:
        return found
    return NackReason(500, f"durable publish failed: {_WRITE_FAILURES.get(error.code, '')}{error}")
