"""The Figg protocol: frames, their decoder for both roles, their encoder, and how to know one by its first bytes."""

from headrace.wire.figg import encode
from headrace.wire.figg.decode import Decoder, client_decoder, server_decoder
from headrace.wire.figg.frames import (
    AckBatch,
    Attach,
    Attached,
    ClientMessage,
    DataBatch,
    Detach,
    Detached,
    Kind,
    Ping,
    Pong,
    PublishBatch,
    ServerMessage,
)
from headrace.wire.figg.sniff import sniff

__all__ = [
    "AckBatch",
    "Attach",
    "Attached",
    "ClientMessage",
    "DataBatch",
    "Decoder",
    "Detach",
    "Detached",
    "Kind",
    "Ping",
    "Pong",
    "PublishBatch",
    "ServerMessage",
    "client_decoder",
    "encode",
    "server_decoder",
    "sniff",
]
