"""FlyMQ's wire format for both roles.

Read in this order: `framing` (the frame), `opcodes`, `messages`, `fields` (the fields of payloads), `core`, `groups` and `cluster`
(layouts), `table` (opcode → layouts), `produce` and `fetching` (the two hot paths), `failure`, `decoder`.
"""

from __future__ import annotations

from headrace.wire.flymq.decoder import ReplyDecoder, RequestDecoder
from headrace.wire.flymq.framing import answer_bytes, encode_failure, sniff
from headrace.wire.flymq.messages import speaks_sdk
from headrace.wire.flymq.opcodes import Dialect, Opcode
from headrace.wire.flymq.table import decode_reply, encode_received, encode_reply, encode_request, opcode_of

__all__ = [
    "Dialect",
    "Opcode",
    "ReplyDecoder",
    "RequestDecoder",
    "answer_bytes",
    "decode_reply",
    "encode_failure",
    "encode_received",
    "encode_reply",
    "encode_request",
    "opcode_of",
    "sniff",
    "speaks_sdk",
]
