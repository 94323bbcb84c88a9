"""Binary dialect: a type byte, then big-endian fields.

    request                                                reply
    01  topic, u32 partition, u32 n, n × bytes             01  u64 base offset, u32 n
    02  group, topic, u32 partition, u64 offset, u32 max   02  u32 n, n × bytes, u64 next offset
    03  group, topic, u32 partition, u64 offset            03  u8 success
    04  group, topic, u32 partition                        04  u8 has, u64 offset if has = 1
    05  topic, u32 partition count                         05  u8 success
    06                                                     06  u32 n, n × (topic, u32 partitions)
    07  topic                                              07  topic, u32 count, u32 n, n × (u32 id, u64 high watermark)
    08  topic, u32 partition                               08  topic, u32 partition, u64 high watermark
    09                                                     09  u32 size, Prometheus text
    ff  ping                                               ff  pong
                                                           fe  u16 code, u16 size, text

`topic` and `group` are a u16 size and UTF-8, `bytes` a u32 size and the bytes. Bytes after a complete request are ignored.
The error texts are those of the original, word for word, because its users search their logs for them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from headrace.columns import EQUAL_ROWS_MIN, equal_rows, equal_size
from headrace.errors import InvalidRequest
from headrace.limits import RUSTLOG_PRODUCE_RECORDS_MAX
from headrace.wire.rustlog import messages as m
from headrace.wire.rustlog.messages import Undecodable

PRODUCE, FETCH, OFFSET_COMMIT, OFFSET_FETCH, CREATE_TOPIC, LIST_TOPICS, DESCRIBE_TOPIC, DESCRIBE_PARTITION, METRICS_FETCH = range(1, 10)
ERROR, PING = 0xFE, 0xFF
REQUESTS: Final[frozenset[int]] = frozenset((*range(PRODUCE, METRICS_FETCH + 1), PING))
REPLIES: Final[frozenset[int]] = REQUESTS | {ERROR}

_U8, _U16, _U32, _U64 = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")
_PRODUCED = struct.Struct(">BQI")
_FETCHED = struct.Struct(">BI")
_WATERMARK = struct.Struct(">IQ")
_PLACE = struct.Struct(">IQI")
"""Partition, offset and maximum of a Fetch."""
_ONE_RECORD = struct.Struct(">III")
"""Partition, record count and size of the first record of a Produce."""
RECORD_OVERHEAD_BYTES: Final = _U32.size
FETCH_REPLY_OVERHEAD_BYTES: Final = _FETCHED.size + _U64.size
assert _PRODUCED.size == 13 and FETCH_REPLY_OVERHEAD_BYTES == 13
_PAGE_ROWS_MAX: Final = 16
_PAGE_VALUE_BYTES_MAX: Final = 1_024
"""Largest reply that is encoded in one call, if its records have equal sizes."""


class _Fields:
    """Reads one payload from front to back. Every length is checked against the remaining bytes before it is used."""

    __slots__ = ("at", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload, self.at = payload, 1

    def number(self, kind: struct.Struct, name: str) -> int:
        if len(self.payload) < self.at + kind.size:
            raise Undecodable(f"decode error: missing {name}")
        (value,) = kind.unpack_from(self.payload, self.at)
        self.at += kind.size
        return int(value)

    def text(self, name: str, size_of: struct.Struct = _U16) -> str:
        size = self.number(size_of, f"{name} length")
        raw = self.payload[self.at : self.at + size]
        if len(raw) < size:
            raise Undecodable(f"decode error: truncated {name}")
        self.at += size
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise Undecodable(f"decode error: invalid utf8 {name}: {_utf8_fault(error)}") from None

    def records(self, count: int) -> list[bytes]:
        """Read `count` sized records. Nothing is allocated for a wrong count."""
        same = self._records_of_one_size(count)
        if same is not None:
            return same
        payload, at, end = self.payload, self.at, len(self.payload)
        unpack = _U32.unpack_from
        records: list[bytes] = []
        for _ in range(count):
            if at + 4 > end:
                raise Undecodable("decode error: truncated record length")
            (size,) = unpack(payload, at)
            at += 4
            stop = at + size
            if stop > end:
                raise Undecodable("decode error: truncated record")
            records.append(payload[at:stop])
            at = stop
        self.at = at
        return records

    def _records_of_one_size(self, count: int) -> list[bytes] | None:
        """Read records of equal size in one C loop, which is two to three times as fast. Return None if their sizes differ."""
        if count < 2 or len(self.payload) - self.at < 4:
            return None
        (size,) = _U32.unpack_from(self.payload, self.at)
        stop = self.at + count * (4 + size)
        if stop > len(self.payload):
            return None
        pairs = struct.iter_unpack(f">I{size}s", memoryview(self.payload)[self.at : stop])
        records = [record for record_size, record in pairs if record_size == size]
        if len(records) != count:
            return None
        self.at = stop
        return records


def _utf8_fault(error: UnicodeDecodeError) -> str:
    """Return the error text of the original's standard library."""
    if error.reason == "unexpected end of data":
        return f"incomplete utf-8 byte sequence from index {error.start}"
    return f"invalid utf-8 sequence of {error.end - error.start} bytes from index {error.start}"


# Requests


def decode_request(payload: bytes) -> m.Request:
    """Decode the request of a non-empty payload. Raises `Undecodable`."""
    decode = _REQUESTS.get(payload[0])
    if decode is None:
        raise Undecodable(f"unknown request type: {payload[0]}")
    return decode(_Fields(payload))


def _produce(fields: _Fields) -> m.Produce:
    single = _single_produce(fields.payload)
    if single is not None:
        return single
    topic, partition = fields.text("topic"), fields.number(_U32, "partition")
    count = fields.number(_U32, "record count")
    if count > RUSTLOG_PRODUCE_RECORDS_MAX:
        raise Undecodable(f"decode error: too many records: {count} (max: {RUSTLOG_PRODUCE_RECORDS_MAX})")
    return m.Produce(topic, partition, fields.records(count))


def _single_produce(payload: bytes) -> m.Produce | None:
    """Decode a complete request with one record: the hot path. None for any other; the fields one by one find what is missing."""
    if len(payload) < 3:
        return None
    topic_end = 3 + (payload[1] << 8) + payload[2]
    value_start = topic_end + _ONE_RECORD.size
    if value_start > len(payload):
        return None
    partition, count, size = _ONE_RECORD.unpack_from(payload, topic_end)
    value_end = value_start + size
    if count != 1 or value_end > len(payload):
        return None
    try:
        topic = payload[3:topic_end].decode()
    except UnicodeDecodeError:
        return None
    return m.Produce(topic, partition, [payload[value_start:value_end]])


def _fetch(fields: _Fields) -> m.Fetch:
    payload, end = fields.payload, len(fields.payload)
    # The hot path: a complete request. The fields one by one find what is missing.
    if end > 4:
        group_end = 3 + (payload[1] << 8) + payload[2]
        if group_end + 2 < end:
            topic_end = group_end + 2 + (payload[group_end] << 8) + payload[group_end + 1]
            if topic_end + _PLACE.size <= end:
                try:
                    group, topic = payload[3:group_end].decode(), payload[group_end + 2 : topic_end].decode()
                except UnicodeDecodeError:
                    pass
                else:
                    partition, offset, max_bytes = _PLACE.unpack_from(payload, topic_end)
                    return m.Fetch(topic, partition, offset, max_bytes, group)
    group, topic, partition = fields.text("group_id"), fields.text("topic"), fields.number(_U32, "partition")
    return m.Fetch(topic, partition, fields.number(_U64, "offset"), fields.number(_U32, "max_bytes"), group)


def _offset_commit(fields: _Fields) -> m.OffsetCommit:
    group, topic, partition = fields.text("group"), fields.text("topic"), fields.number(_U32, "partition")
    return m.OffsetCommit(topic, partition, group, fields.number(_U64, "offset"))


def _offset_fetch(fields: _Fields) -> m.OffsetFetch:
    group, topic = fields.text("group"), fields.text("topic")
    return m.OffsetFetch(topic, fields.number(_U32, "partition"), group)


_REQUESTS: Final[dict[int, Callable[[_Fields], m.Request]]] = {
    PRODUCE: _produce,
    FETCH: _fetch,
    OFFSET_COMMIT: _offset_commit,
    OFFSET_FETCH: _offset_fetch,
    CREATE_TOPIC: lambda fields: m.CreateTopic(fields.text("topic"), fields.number(_U32, "partition count")),
    LIST_TOPICS: lambda fields: m.ListTopics(),
    DESCRIBE_TOPIC: lambda fields: m.DescribeTopic(fields.text("topic")),
    DESCRIBE_PARTITION: lambda fields: m.DescribePartition(fields.text("topic"), fields.number(_U32, "partition")),
    METRICS_FETCH: lambda fields: m.MetricsFetch(),
    PING: lambda fields: m.Ping(),
}


def encode_request(request: m.Request) -> bytes:
    """Encode the payload. Raises `InvalidRequest` for a name or number that does not fit its field."""
    try:
        return _request_payload(request)
    except struct.error as error:
        raise InvalidRequest(f"a field of {type(request).__name__} is out of range: {error}") from None


def _request_payload(request: m.Request) -> bytes:
    match request:
        case m.Produce(topic, partition, records):
            head = (_U8.pack(PRODUCE), _name(topic), _U32.pack(partition), _U32.pack(len(records)))
            return b"".join(chain(head, _sized(records, equal_size(records))))
        case m.Fetch(topic, partition, offset, max_bytes, group):
            tail = (_U32.pack(partition), _U64.pack(offset), _U32.pack(max_bytes))
            return b"".join((_U8.pack(FETCH), _name(group), _name(topic), *tail))
        case m.OffsetCommit(topic, partition, group, offset):
            return b"".join((_U8.pack(OFFSET_COMMIT), _name(group), _name(topic), _U32.pack(partition), _U64.pack(offset)))
        case m.OffsetFetch(topic, partition, group):
            return b"".join((_U8.pack(OFFSET_FETCH), _name(group), _name(topic), _U32.pack(partition)))
        case m.CreateTopic(topic, count):
            return b"".join((_U8.pack(CREATE_TOPIC), _name(topic), _U32.pack(count)))
        case m.DescribeTopic(topic):
            return _U8.pack(DESCRIBE_TOPIC) + _name(topic)
        case m.DescribePartition(topic, partition):
            return b"".join((_U8.pack(DESCRIBE_PARTITION), _name(topic), _U32.pack(partition)))
        case m.ListTopics():
            return _U8.pack(LIST_TOPICS)
        case m.MetricsFetch():
            return _U8.pack(METRICS_FETCH)
        case m.Ping():
            return _U8.pack(PING)


def _name(text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{text!r} cannot be written as UTF-8") from None
    return _U16.pack(len(raw)) + raw


def produced_record_bytes(value: bytes) -> int:
    """Return the encoded size of a record of a Produce request."""
    return RECORD_OVERHEAD_BYTES + len(value)


def _sized(records: Sequence[bytes], size: int | None) -> Iterable[bytes | bytearray]:
    """Return the records, each after its size; `size` is that of all, if known."""
    if size is not None and len(records) >= EQUAL_ROWS_MIN:
        return (equal_rows(records, size, _U32.pack(size)),)
    return chain.from_iterable(zip(map(_U32.pack, map(len, records)), records, strict=True))


# Replies


def decode_reply(payload: bytes) -> m.Reply:
    """Decode the reply of a non-empty payload. Raises `Undecodable`."""
    decode = _REPLIES.get(payload[0])
    if decode is None:
        raise Undecodable(f"unknown response type: {payload[0]}")
    return decode(_Fields(payload))


def _produced(fields: _Fields) -> m.ProduceReply:
    base = fields.number(_U64, "base offset")
    return m.ProduceReply(range(base, base + fields.number(_U32, "record count")))


def _fetched(fields: _Fields) -> m.FetchReply:
    count = fields.number(_U32, "record count")
    values = fields.records(count)
    following = fields.number(_U64, "next_offset")
    if following < count:
        raise Undecodable(f"decode error: {count} records cannot end at offset {following}")
    return m.FetchReply(range(following - count, following), values, following)


def _topics(fields: _Fields) -> m.ListTopicsReply:
    count = fields.number(_U32, "topic count")
    topics: list[tuple[str, int]] = []
    while len(topics) < count:
        topics.append((fields.text("topic"), fields.number(_U32, "partition count")))
    return m.ListTopicsReply(topics)


def _topic_described(fields: _Fields) -> m.DescribeTopicReply:
    topic, count = fields.text("topic"), fields.number(_U32, "partition count")
    listed = fields.number(_U32, "partition list length")
    partitions: list[tuple[int, int]] = []
    while len(partitions) < listed:
        partitions.append((fields.number(_U32, "partition"), fields.number(_U64, "high_watermark")))
    return m.DescribeTopicReply(topic, count, partitions)


def _partition_described(fields: _Fields) -> m.DescribePartitionReply:
    topic, partition = fields.text("topic"), fields.number(_U32, "partition")
    return m.DescribePartitionReply(topic, partition, fields.number(_U64, "high_watermark"))


def _offset_fetched(fields: _Fields) -> m.OffsetFetchReply:
    return m.OffsetFetchReply(fields.number(_U64, "offset") if fields.number(_U8, "has_offset") else None)


def _error(fields: _Fields) -> m.ErrorReply:
    code = fields.number(_U16, "error code")
    return m.ErrorReply(fields.text("message"), code)


_REPLIES: Final[dict[int, Callable[[_Fields], m.Reply]]] = {
    PRODUCE: _produced,
    FETCH: _fetched,
    OFFSET_COMMIT: lambda fields: m.OffsetCommitReply(fields.number(_U8, "success") != 0),
    OFFSET_FETCH: _offset_fetched,
    CREATE_TOPIC: lambda fields: m.CreateTopicReply(fields.number(_U8, "success") != 0),
    LIST_TOPICS: _topics,
    DESCRIBE_TOPIC: _topic_described,
    DESCRIBE_PARTITION: _partition_described,
    METRICS_FETCH: lambda fields: m.MetricsReply(fields.text("metrics", _U32)),
    PING: lambda fields: m.Pong(),
    ERROR: _error,
}


def encode_reply(reply: m.Reply) -> bytes:
    """Encode the payload. Names and numbers come from the broker and always fit."""
    match reply:
        case m.ProduceReply(offsets):
            base = _dense_start(offsets, offsets[-1] + 1 if offsets else 0)
            return _PRODUCED.pack(PRODUCE, base, len(offsets))
        case m.FetchReply(offsets, values, following, value_size):
            _dense_start(offsets, following)
            return b"".join(chain((_FETCHED.pack(FETCH, len(values)),), _sized(values, value_size), (_U64.pack(following),)))
        case m.OffsetCommitReply(success):
            return bytes((OFFSET_COMMIT, success))
        case m.OffsetFetchReply(offset):
            return bytes((OFFSET_FETCH, 0)) if offset is None else bytes((OFFSET_FETCH, 1)) + _U64.pack(offset)
        case m.CreateTopicReply(success):
            return bytes((CREATE_TOPIC, success))
        case m.ListTopicsReply(topics):
            head = (_U8.pack(LIST_TOPICS), _U32.pack(len(topics)))
            return b"".join(chain(head, (_name(name) + _U32.pack(count) for name, count in topics)))
        case m.DescribeTopicReply(topic, count, partitions):
            head3 = (_U8.pack(DESCRIBE_TOPIC), _name(topic), _U32.pack(count), _U32.pack(len(partitions)))
            return b"".join(chain(head3, (_WATERMARK.pack(*pair) for pair in partitions)))
        case m.DescribePartitionReply(topic, partition, watermark):
            return b"".join((_U8.pack(DESCRIBE_PARTITION), _name(topic), _WATERMARK.pack(partition, watermark)))
        case m.MetricsReply(metrics):
            raw = metrics.encode()
            return b"".join((_U8.pack(METRICS_FETCH), _U32.pack(len(raw)), raw))
        case m.Pong():
            return _U8.pack(PING)
        case m.ErrorReply(message, code):
            return b"".join((_U8.pack(ERROR), _U16.pack(code), _name(message)))


def encode_page(reply: m.FetchReply) -> bytes | None:
    """Encode the whole frame of a few records of one size in one call. None: `encode_reply` encodes the payload."""
    values, size = reply.values, reply.value_size
    count = len(values)
    if size is None or not 0 < count <= _PAGE_ROWS_MAX or size > _PAGE_VALUE_BYTES_MAX:
        return None
    _dense_start(reply.offsets, reply.next_offset)
    page = _page(count, size)
    cells: list[Any] = [size] * (2 * count)
    cells[1::2] = values
    return page.pack(page.size - 4, FETCH, count, *cells, reply.next_offset)


@lru_cache(256)
def _page(count: int, size: int) -> struct.Struct:
    return struct.Struct(">IBI" + f"I{size}s" * count + "Q")


def _dense_start(offsets: Sequence[int], end: int) -> int:
    """Return the first offset. Readers of this dialect count the offsets, so a gap would shift every later one."""
    if isinstance(offsets, range) and (not offsets or (offsets.step == 1 and offsets.stop == end)):
        return offsets.start
    start = end - len(offsets)
    assert offsets == range(start, end) or list(offsets) == list(range(start, end)), "the binary dialect cannot carry a gap"
    return start
