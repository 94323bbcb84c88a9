"""Errors of a FlyMQ server, matched by text: the protocol has no useful codes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from headrace.clients.errors import OutcomeUnknown, Refused, UnknownGroup
from headrace.errors import (
    DiskFull,
    EntryExists,
    HeadraceError,
    IncompatibleSchema,
    InvalidRecord,
    InvalidTopicName,
    InvalidTransaction,
    LoginFailed,
    NoSuchEntry,
    NotAuthorized,
    NotCoordinator,
    OffsetOutOfRange,
    RecordTooLarge,
    StorageFailed,
    TopicExists,
    Unavailable,
    UnknownMessage,
    UnknownPartition,
    UnknownSchema,
    UnknownTopic,
)
from headrace.wire.flymq.messages import Failure

_END_UNKNOWN: Final = 2**63 - 1
"""The server reports the requested offset but not the bounds."""

_Meaning = Callable[[re.Match[str], str], HeadraceError]

_MEANINGS: Final[tuple[tuple[re.Pattern[str], _Meaning], ...]] = tuple(
    (re.compile(pattern, re.DOTALL), meaning)
    for pattern, meaning in (
        (r"topic not found(?:: (.*))?", lambda found, topic: UnknownTopic(topic or found[1] or "")),
        (r"partition (-?\d+) (?:not found|out of range)", lambda found, topic: UnknownPartition(topic, int(found[1]))),
        (r"offset (\d+) out of range", lambda found, topic: OffsetOutOfRange(wanted=int(found[1]), first=0, end=_END_UNKNOWN)),
        (r"topic name ", lambda found, topic: InvalidTopicName(found.string)),
        (
            r"record of (\d+) bytes exceeds the limit of (\d+)",
            lambda found, topic: RecordTooLarge(size_bytes=int(found[1]), bytes_max=int(found[2])),
        ),
        (
            r"unauthorized: (.*) may not (\w+) (.*)$",
            lambda found, topic: NotAuthorized(principal=found[1], action=found[2], resource=found[3]),
        ),
        (r"topic '(.*)' already exists", lambda found, topic: TopicExists(topic or found[1])),
        (r"schema not found: (.*?)(?: v(\d+))?$", lambda found, topic: UnknownSchema(found[1], int(found[2] or 0))),
        (
            r"not compatible with (.*?) v(\d+): (.*)",
            lambda found, topic: IncompatibleSchema(found[1], int(found[2]), (found[3],)),
        ),
        (r"schema validation failed: (.*)", lambda found, topic: InvalidRecord(index=0, faults=(found[1],), schema="")),
        (r"message not found: (.*)", lambda found, topic: UnknownMessage(found[1])),
        (r"transaction not found|transaction '", lambda found, topic: InvalidTransaction(found.string)),
        (r"consumer group not found", lambda found, topic: UnknownGroup(found.string)),
        (r'(user|role|rule|key|ACL|writer) "(.*)" not found', lambda found, topic: NoSuchEntry(found[1], found[2])),
        (r'(user|role|key) "(.*)" already exists', lambda found, topic: EntryExists(found[1], found[2])),
        (r"invalid username or password", lambda found, topic: LoginFailed()),
        (r"disk full: (.*)", lambda found, topic: DiskFull(found[1])),
        (r"outcome unknown: (.*?)(?:; the outcome is unknown)?$", lambda found, topic: OutcomeUnknown(1, found[1])),
        (r"storage failed: (.*)", lambda found, topic: StorageFailed(found[1])),
        (r"not coordinator: (?:.* is at (.*))?", lambda found, topic: NotCoordinator(found[1] or "")),
        (r"unavailable: (.*)", lambda found, topic: Unavailable(found[1])),
    )
)


def error_of(failure: Failure, topic: str = "") -> HeadraceError:
    """Return the matching broker error, or `Refused` with the server's text. `topic` is that of the request: texts may be truncated."""
    for pattern, meaning in _MEANINGS:
        found = pattern.match(failure.message)
        if found is not None:
            return meaning(found, topic)
    return Refused(code=failure.code, text=failure.message)
