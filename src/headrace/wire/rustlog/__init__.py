"""RustLog: length-prefixed requests and replies in two dialects, JSON and binary, selected by each frame.

`codec` is the entry point for both roles, `messages` has the messages, `errors` the error texts. `sniff` detects the protocol on a port
that several protocols share.
"""

from __future__ import annotations

from headrace.wire.rustlog.codec import (
    FETCH_BYTES_MAX,
    Deferred,
    Incoming,
    Received,
    Refused,
    ReplyDecoder,
    RequestDecoder,
    decode_in_steps,
    encode_reply,
    encode_request,
    fetch_reply,
    frame,
    produce_requests,
)
from headrace.wire.rustlog.messages import Dialect, Reply, Request, Undecodable
from headrace.wire.rustlog.sniff import sniff

__all__ = [
    "FETCH_BYTES_MAX",
    "Deferred",
    "Dialect",
    "Incoming",
    "Received",
    "Refused",
    "Reply",
    "ReplyDecoder",
    "Request",
    "RequestDecoder",
    "Undecodable",
    "decode_in_steps",
    "encode_reply",
    "encode_request",
    "fetch_reply",
    "frame",
    "produce_requests",
    "sniff",
]
