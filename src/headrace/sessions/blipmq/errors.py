"""NACKs of the BlipMQ protocol. The codes and texts are those of the original.

| code | meaning for the client |
|---|---|
| 400 | the request is wrong; do not retry |
| 401 | not authenticated, or not authorized |
| 404 | the subscription or topic does not exist |
| 426 | unsupported protocol version |
| 500 | the broker cannot do it now; retry later |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.errors import BrokerError
from headrace.limits import SUBSCRIPTIONS_PER_CONNECTION_MAX
from headrace.wire.blipmq import FrameType


@dataclass(frozen=True, slots=True)
class NackReason:
    """Code and text of a NACK."""

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

# By `BrokerError.code`. Every other code is a 500.
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
# BlipMQ's prefixes for failed writes.
_WRITE_FAILURES: Final = {
    "disk_full": "I/O error: ",
    "storage_failed": "I/O error: ",
    "outcome_unknown": "I/O error: ",
    "corrupt_data": "log corruption: ",
    "unavailable": "wal writer stopped: ",
}


def reason_of(error: BrokerError) -> NackReason:
    """Return the NACK for an error of the broker."""
    return NackReason(_CODES.get(error.code, 500), str(error))


def publish_reason_of(error: BrokerError) -> NackReason:
    """Return the NACK for a failed PUBLISH, where every 500 is a failed durable publish."""
    found = reason_of(error)
    if found.code != 500:
        return found
    return NackReason(500, f"durable publish failed: {_WRITE_FAILURES.get(error.code, '')}{error}")
