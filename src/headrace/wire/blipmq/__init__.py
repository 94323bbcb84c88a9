"""BlipMQ's wire format, for servers and clients: `frames` draws it, `decoder` and `encoder` speak it, `sniff` recognises it."""

from headrace.wire.blipmq.decoder import Decoder
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
    "sniff",
]
