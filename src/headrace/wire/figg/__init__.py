"""Figg protocol: frames, decoder for both roles, encoder, and detection by the first bytes."""

from headrace.wire.figg import encode
from headrace.wire.figg.decode import Decoder, client_decoder, server_decoder, sniff
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
