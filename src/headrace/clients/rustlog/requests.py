"""Requests without a reply, and errors in replies. RustLog replies in the order of the requests.

After a lost connection they are sent again in order. Reads and commits are idempotent; records may be written twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from headrace.clients.errors import OutcomeUnknown, Refused
from headrace.clients.messages import Receipt
from headrace.clients.window import Batch, Window
from headrace.errors import (
    HeadraceError,
    InvalidRequest,
    InvalidTopicName,
    NotAuthorized,
    NotCoordinator,
    OffsetOutOfRange,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from headrace.wire.rustlog import Reply, Request
from headrace.wire.rustlog import errors as codes
from headrace.wire.rustlog.messages import ErrorReply, Ping, Produce, ProduceReply

_OUT_OF_RANGE: Final = re.compile(r"offset out of range: requested (\d+), partition base (\d+)$")
_NOT_AUTHORIZED: Final = re.compile(r"not authorized: (.*) may not (\w+) (.*)$", re.DOTALL)
_RECORD: Final = re.compile(r"\brecord (\d+): ")
_END_UNKNOWN: Final = 2**63 - 1
"""The server reports the first offset but not the end offset."""


class Call(Batch):
    """One request. `count` is the number of records to write, which the server writes or refuses together."""

    __slots__ = ("frame", "offsets", "request")

    def __init__(self, request: Request, frame: bytes) -> None:
        super().__init__(len(request.records) if isinstance(request, Produce) else 0, len(frame))
        self.request, self.frame = request, frame
        self.offsets: Sequence[int] = ()

    @property
    def is_ping(self) -> bool:  # type: ignore[override]  # an attribute of other entries
        return isinstance(self.request, Ping)

    @property
    def records(self) -> int:
        return self.count

    @property
    def weight(self) -> int:
        return 1

    def receipts(self) -> list[Receipt]:
        assert isinstance(self.request, Produce)
        return [Receipt(self.request.topic, self.request.partition, offset) for offset in self.offsets]


class Calls(Window[Call]):
    """Requests without a reply, oldest first. Bounded by their number and bytes."""

    def oldest(self) -> Call | None:
        """Return the request that the next reply belongs to."""
        return self._entries[0] if self._entries and self._entries[0].was_sent else None

    def answered(self, reply: Reply) -> None:
        """Complete the oldest request."""
        call = self._entries.popleft()
        self._shrink(1, call.size_bytes)
        if isinstance(reply, ProduceReply):
            call.offsets = reply.offsets
        elif isinstance(reply, ErrorReply) and call.count:
            error = error_of(call.request, reply)
            call.refuse(_index_of(reply.message, call.count), error, call.count)
        if call.count:
            call.settle()
        else:
            call.resolve(reply)

    def give_up_writes(self) -> None:
        """Fail sent writes instead of sending them again: the server may have executed them."""
        self.drop(lambda call: call.was_sent and call.count > 0, lambda call: OutcomeUnknown(call.count))


def _index_of(text: str, count: int) -> int:
    """Return the index of the record that the text of an error names; 0 if it concerns all of them."""
    found = _RECORD.search(text)
    return min(int(found[1]), count - 1) if found else 0


def error_of(request: Request, error: ErrorReply) -> HeadraceError:
    """Return the matching broker error, or `Refused` with the server's text. JSON errors have no codes: the text decides."""
    text, code = error.message, error.code
    topic, partition = getattr(request, "topic", ""), getattr(request, "partition", 0)
    if code == codes.NO_PARTITION or (code == 0 and text.startswith(codes.JSON_NO_PARTITION)):
        return UnknownPartition(topic, partition)
    if found := _OUT_OF_RANGE.search(text):
        return OffsetOutOfRange(wanted=int(found[1]), first=int(found[2]), end=_END_UNKNOWN)
    if code == codes.TOPIC_EXISTS or (code == 0 and text == codes.topic_exists(topic).message):
        return TopicExists(topic)
    if text.startswith("DescribeTopic failed: "):
        return UnknownTopic(topic)
    if text.startswith("DescribePartition failed: "):
        return UnknownPartition(topic, partition)
    if text.startswith("Invalid topic name: "):
        return InvalidTopicName(text)
    if text.startswith("Invalid partition count: "):
        return InvalidRequest(text)
    if found := _NOT_AUTHORIZED.match(text):
        return NotAuthorized(principal=found[1], action=found[2], resource=found[3])
    if NotCoordinator.TEXT in text:
        return NotCoordinator(text.rpartition(" is at ")[2] if " is at " in text else "")
    if code == codes.UNAVAILABLE:
        return Unavailable(text)
    return Refused(code=code, text=text)
