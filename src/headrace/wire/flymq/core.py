"""Layouts of the core requests (0x02–0x0B) and of their replies; PRODUCE, the hot path, has its own module.

    CONSUME        topic s16, partition i32, offset u64                           → key b32, value b32
    CREATE_TOPIC   topic s16, partitions i32                                      → done
    METADATA       topic s16                                                      → topic s16, list of bounds
    SUBSCRIBE      topic s16, group s16, partition i32, mode                      → offset u64
    COMMIT         topic s16, group s16, partition i32, offset u64, [transaction s16] → done
    FETCH          topic s16, partition i32, offset u64, max i32, [filter s16]    → see `fetching.py`
    LIST_TOPICS    –                                                              → list of s16
    DELETE_TOPIC   topic s16                                                      → done

Bounds are partition i32, leader i32, first offset u64, end offset u64.
`done` is success bool, message s16. The original sends the bool alone, so the message may be missing.
"""

from __future__ import annotations

from headrace.errors import InvalidRequest
from headrace.wire.flymq.fields import B32, BOOL, I32, S8, S16, U64, Layout, Reader, Repeated, Trailing
from headrace.wire.flymq.messages import (
    Commit,
    Consume,
    Consumed,
    ConsumeZeroCopy,
    CreateTopic,
    DeleteTopic,
    Done,
    Fetch,
    FetchBinary,
    ListTopics,
    Metadata,
    Mode,
    OffsetReply,
    PartitionBounds,
    Subscribe,
    TopicList,
    TopicMetadata,
)


class ModeField:
    """A word as s16 (the specification) or s8 (the original).

    No word is longer than 255 bytes, so an s16 starts with a zero byte. An s8 that starts with a zero byte is an empty word at the end.
    """

    def read(self, reader: Reader, /) -> Mode:
        narrow = reader.peek() != 0 or reader.left == 1
        return Mode((S8 if narrow else S16).read(reader), narrow)

    def write(self, value: Mode, /) -> bytes:
        if len(value.word.encode()) > 255:
            raise InvalidRequest("a mode has at most 255 bytes")
        return (S8 if value.narrow else S16).write(value.word)


class ExactText:
    """An optional text after the last field. It fills the rest of the payload; anything else there is ignored."""

    def read(self, reader: Reader, /) -> str:
        if reader.left < 2 or int.from_bytes(reader.payload[reader.at : reader.at + 2], "big") != reader.left - 2:
            return ""
        return S16.read(reader)

    def write(self, value: str, /) -> bytes:
        return S16.write(value) if value else b""


MODE = ModeField()
_NO_PATTERN: str | None = None

CONSUME = Layout(Consume, topic=S16, partition=I32, offset=U64)
CONSUME_ZERO_COPY = Layout(ConsumeZeroCopy, topic=S16, partition=I32, offset=U64)
CREATE_TOPIC = Layout(CreateTopic, topic=S16, partitions=I32)
METADATA = Layout(Metadata, topic=S16)
SUBSCRIBE = Layout(Subscribe, topic=S16, group=S16, partition=I32, mode=MODE)
COMMIT = Layout(Commit, topic=S16, group=S16, partition=I32, offset=U64, transaction=ExactText())
FETCH = Layout(Fetch, topic=S16, partition=I32, offset=U64, records_max=I32, pattern=Trailing(S16, _NO_PATTERN))
FETCH_BINARY = Layout(FetchBinary, topic=S16, partition=I32, offset=U64, records_max=I32, pattern=Trailing(S16, _NO_PATTERN))
LIST_TOPICS = Layout(ListTopics)
DELETE_TOPIC = Layout(DeleteTopic, topic=S16)

CONSUMED = Layout(Consumed, key=B32, value=B32)
DONE = Layout(Done, success=BOOL, message=Trailing(S16, "", always=True))
OFFSET = Layout(OffsetReply, offset=U64)
TOPIC_LIST = Layout(TopicList, topics=Repeated(S16))
TOPIC_METADATA = Layout(
    TopicMetadata,
    topic=S16,
    partitions=Repeated(Layout(PartitionBounds, partition=I32, leader=I32, first=U64, end=U64)),
)
