"""What a FlyMQ peer is told when something cannot be done: the texts its clients know, and Headrace's own for the rest."""

from __future__ import annotations

from headrace.errors import (
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
    """FlyMQ knows a group by its topic; without a commit there is none."""

    code = "unknown_group"

    def __init__(self, topic: str, group: str) -> None:
        super().__init__(f"consumer group not found: {topic}:{group}" if topic else f"consumer group not found: {group}")


def error_reply(error: BrokerError) -> Failure:
    """The ERROR for a request the broker refused."""
    match error:
        case UnknownTopic():
            return Failure(f"topic not found: {error.topic}")
        case UnknownPartition():
            return Failure(f"partition {error.partition} not found")
        case OffsetOutOfRange():
            return Failure(f"offset {error.wanted} out of range")
        case NotAuthorized():
            return Failure(f"unauthorized: {error}")
        case DiskFull() | StorageFailed() | Unavailable():
            # A client that reads the first words knows whether to come again.
            return Failure(f"{error.code.replace('_', ' ')}: {error}")
        case _:
            return Failure(str(error))


def publish_error_reply(error: BrokerError) -> Failure:
    """As `refusal`, in the words PRODUCE uses."""
    if isinstance(error, UnknownPartition):
        return Failure(f"partition {error.partition} out of range")
    return error_reply(error)


def not_understood(event: Malformed | UnknownOpcode) -> Failure:
    """The ERROR for a frame that never became a request."""
    match event:
        case Malformed():
            return Failure(f"invalid binary format: {event.reason}")
        case UnknownOpcode():
            return Failure(f"unknown opcode: {event.opcode}")
