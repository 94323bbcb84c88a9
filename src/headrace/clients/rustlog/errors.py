"""Errors of a RustLog server: matched by code in the binary dialect, by text in JSON, which has no codes."""

from __future__ import annotations

import re
from typing import Final, NoReturn

from headrace.clients.errors import Refused
from headrace.errors import (
    InvalidRequest,
    InvalidTopicName,
    NotAuthorized,
    OffsetOutOfRange,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from headrace.wire.rustlog import Request
from headrace.wire.rustlog import errors as codes
from headrace.wire.rustlog.messages import ErrorReply

_OUT_OF_RANGE: Final = re.compile(r"offset out of range: requested (\d+), partition base (\d+)$")
_NOT_AUTHORIZED: Final = re.compile(r"not authorized: (.*) may not (\w+) (.*)$", re.DOTALL)
_END_UNKNOWN: Final = 2**63 - 1
"""The server reports the first offset but not the end offset."""


def raise_error(request: Request, error: ErrorReply) -> NoReturn:
    """Raise the matching broker error, or `Refused` with the server's text."""
    text, code = error.message, error.code
    topic, partition = getattr(request, "topic", ""), getattr(request, "partition", 0)
    if code == codes.NO_PARTITION or (code == 0 and text.startswith(codes.JSON_NO_PARTITION)):
        raise UnknownPartition(topic, partition)
    if found := _OUT_OF_RANGE.search(text):
        raise OffsetOutOfRange(wanted=int(found[1]), first=int(found[2]), end=_END_UNKNOWN)
    if code == codes.TOPIC_EXISTS or (code == 0 and text == codes.topic_exists(topic).message):
        raise TopicExists(topic)
    if text.startswith("DescribeTopic failed: "):
        raise UnknownTopic(topic)
    if text.startswith("DescribePartition failed: "):
        raise UnknownPartition(topic, partition)
    if text.startswith("Invalid topic name: "):
        raise InvalidTopicName(text)
    if text.startswith("Invalid partition count: "):
        raise InvalidRequest(text)
    if found := _NOT_AUTHORIZED.match(text):
        raise NotAuthorized(principal=found[1], action=found[2], resource=found[3])
    if code == codes.UNAVAILABLE:
        raise Unavailable(text)
    raise Refused(code=code, text=text)
