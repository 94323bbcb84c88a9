"""BlipMQ's wire format for both roles: `frames` describes it, `decoder` and `encoder` implement it, `sniff` detects it."""

from headrace.wire.blipmq.decoder import Decoder, answer_bytes
from headrace.wire.blipmq.frames import (
    PROTOCOL_VERSION,
    AckBatch,
    Auth,
    FrameType,
    Hello,
    Malformed,
    Message,
    Nack,
    Ping,
    PollBatch,
    Pong,
    PublishBatch,
    Subscribe,
)
from headrace.wire.blipmq.sniff import sniff

__all__ = [
    "PROTOCOL_VERSION",
    "AckBatch",
    "Auth",
    "Decoder",
    "FrameType",
    "Hello",
    "Malformed",
    "Message",
    "Nack",
    "Ping",
    "PollBatch",
    "Pong",
    "PublishBatch",
    "Subscribe",
    "answer_bytes",
    "sniff",
]
