"""Error replies for FlyMQ peers: the original's texts where it has one, otherwise Headrace's own."""

from __future__ import annotations

from headrace.errors import (
    AppendUnknown,
    BrokerError,
    DiskFull,
    NotAuthorized,
    OffsetOutOfRange,
    StorageFailed,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from headrace.wire.flymq.messages import Failure, Malformed, UnknownOpcode


class UnknownGroup(BrokerError):
    """FlyMQ identifies a group by its topic. A group without a commit on the topic does not exist."""

    code = "unknown_group"

    def __init__(self, topic: str, group: str) -> None:
        super().__init__(f"consumer group not found: {topic}:{group}" if topic else f"consumer group not found: {group}")


def error_reply(error: BrokerError) -> Failure:
    """Return the ERROR for an error of the broker."""
    match error:
        case UnknownTopic():
            return Failure(f"topic not found: {error.topic}")
        case UnknownPartition():
            return Failure(f"partition {error.partition} not found")
        case OffsetOutOfRange():
            return Failure(f"offset {error.wanted} out of range")
        case NotAuthorized():
            return Failure(f"unauthorized: {error}")
        case DiskFull() | AppendUnknown() | StorageFailed() | Unavailable():
            # Clients recognise a retriable error by its first words.
            return Failure(f"{error.code.replace('_', ' ')}: {error}")
        case _:
            return Failure(str(error))


def publish_error_reply(error: BrokerError) -> Failure:
    """Return the ERROR with the texts of PRODUCE."""
    if isinstance(error, UnknownPartition):
        return Failure(f"partition {error.partition} out of range")
    return error_reply(error)


def not_understood(event: Malformed | UnknownOpcode) -> Failure:
    """Return the ERROR for a frame that is no request."""
    match event:
        case Malformed():
            return Failure(f"invalid binary format: {event.reason}")
        case UnknownOpcode():
            return Failure(f"unknown opcode: {event.opcode}")
