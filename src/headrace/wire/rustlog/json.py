"""JSON dialect: one object whose only key names the message, as Rust's serde encodes an enum.

    {"Produce":{"topic":"orders","partition":0,"records":[[10,20],[30,40]]}}     bytes are arrays of integers
    {"Produce":{"offsets":[0,1]}}
    "Ping"                                                                       a message without fields is a bare string

Types are strict: a number is an integer without fraction or exponent, inside the range of its field; true is not 1. Unknown
fields are ignored; missing fields are errors. The key is split off first and the value is decoded into its typed struct. This is the
fastest way, and it also detects a second key: only the closing brace may follow the first value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Any, Final, NoReturn

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.errors import InvalidRequest
from headrace.limits import RUSTLOG_DECODE_STEP_BYTES, RUSTLOG_PRODUCE_RECORDS_MAX
from headrace.wire.rustlog import messages as m
from headrace.wire.rustlog.messages import Undecodable

_U64_MAX: Final = 2**64 - 1
_U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_U64 = Annotated[int, Meta(ge=0)]  # the upper bound does not fit a Meta: `_u64` checks it

_HEAD = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*("(?:[^"\\]|\\.){0,64}")[ \t\r\n]*:')
_SPACE: Final = b" \t\r\n"
_PRODUCE_BYTES_PLAIN: Final = 2 * RUSTLOG_PRODUCE_RECORDS_MAX
"""A shorter Produce cannot hold too many records."""
_OTHER_ARRAYS_MAX: Final = 1_024
"""Brackets in a payload that do not belong to records: in names and in unknown fields."""


class _Produce(Struct):
    topic: str
    partition: _U32
    records: list[list[int]]


class _ProduceHead(Struct):
    topic: str
    partition: _U32
    records: Raw


class _Fetch(Struct):
    topic: str
    partition: _U32
    offset: _U64
    max_bytes: _U64
    group_id: str | None = None


class _OffsetCommit(Struct):
    topic: str
    partition: _U32
    group_id: str
    offset: _U64


class _OffsetFetch(Struct):
    topic: str
    partition: _U32
    group_id: str


class _CreateTopic(Struct):
    topic: str
    partition_count: _U32


class _DescribeTopic(Struct):
    topic: str


class _DescribePartition(Struct):
    topic: str
    partition: _U32


class _NoFields(Struct):
    pass


class _Offsets(Struct):
    offsets: list[_U64]


class _Record(Struct):
    offset: _U64
    payload: list[int]


class _Records(Struct):
    records: list[_Record]
    next_offset: _U64


class _Success(Struct):
    success: bool


class _Offset(Struct):
    offset: _U64 | None


class _Topics(Struct):
    topics: list[tuple[str, _U32]]


class _TopicDescription(Struct):
    topic: str
    partition_count: _U32
    partitions: list[tuple[_U32, _U64]]


class _PartitionDescription(Struct):
    topic: str
    partition: _U32
    high_watermark: _U64


class _Metrics(Struct):
    metrics: str


class _Error(Struct):
    message: str


def _u64(value: int, field: str) -> int:
    if value > _U64_MAX:
        raise Undecodable(f"Expected `int` <= {_U64_MAX} - at `$.{field}`")
    return value


def _bytes(arrays: list[list[int]], field: str, first_index: int = 0) -> list[bytes]:
    try:
        return list(map(bytes, arrays))
    except (ValueError, OverflowError):
        wrong = next(index for index, array in enumerate(arrays, first_index) if array and not 0 <= min(array) <= max(array) <= 255)
        raise Undecodable(f"Expected bytes, integers from 0 to 255 - at `$.{field}[{wrong}]`") from None


# Requests


def _check_count(records: Sequence[object]) -> None:
    if len(records) > RUSTLOG_PRODUCE_RECORDS_MAX:
        raise Undecodable(f"too many records: {len(records)} (max {RUSTLOG_PRODUCE_RECORDS_MAX})")


def _produce(body: _Produce) -> m.Produce:
    _check_count(body.records)
    return m.Produce(body.topic, body.partition, _bytes(body.records, "records"))


def _fetch(body: _Fetch) -> m.Fetch:
    offset, max_bytes = _u64(body.offset, "offset"), _u64(body.max_bytes, "max_bytes")
    return m.Fetch(body.topic, body.partition, offset, max_bytes, body.group_id or "")


def _offset_commit(body: _OffsetCommit) -> m.OffsetCommit:
    return m.OffsetCommit(body.topic, body.partition, body.group_id, _u64(body.offset, "offset"))


_Shapes = dict[str, tuple[msgspec.json.Decoder[Any], Callable[[Any], Any]]]


def _shape(body: Any, build: Callable[[Any], Any]) -> tuple[msgspec.json.Decoder[Any], Callable[[Any], Any]]:
    return msgspec.json.Decoder(body), build


_NAMED_REQUESTS: Final[_Shapes] = {
    "Produce": _shape(_Produce, _produce),
    "Fetch": _shape(_Fetch, _fetch),
    "OffsetCommit": _shape(_OffsetCommit, _offset_commit),
    "OffsetFetch": _shape(_OffsetFetch, lambda body: m.OffsetFetch(body.topic, body.partition, body.group_id)),
    "CreateTopic": _shape(_CreateTopic, lambda body: m.CreateTopic(body.topic, body.partition_count)),
    "DescribeTopic": _shape(_DescribeTopic, lambda body: m.DescribeTopic(body.topic)),
    "DescribePartition": _shape(_DescribePartition, lambda body: m.DescribePartition(body.topic, body.partition)),
    "ListTopics": _shape(_NoFields | None, lambda body: m.ListTopics()),
    "MetricsFetch": _shape(_NoFields | None, lambda body: m.MetricsFetch()),
    "Ping": _shape(_NoFields | None, lambda body: m.Ping()),
}
_BARE_REQUESTS: Final[dict[str, Callable[[], m.Request]]] = {"ListTopics": m.ListTopics, "MetricsFetch": m.MetricsFetch, "Ping": m.Ping}


def decode_request(payload: bytes) -> m.Request:
    """Decode the request of a non-empty payload. Raises `Undecodable` for any other payload."""
    request: m.Request = _decode(payload, _NAMED_REQUESTS, _BARE_REQUESTS, "request")
    return request


_PRODUCE_HEAD: Final[_Shapes] = {"Produce": _shape(_ProduceHead, lambda body: body)}
_ARRAYS = msgspec.json.Decoder(list[list[int]])
_PATH = re.compile(r"\$\[(\d+)\](?:\[(\d+)\])?")


def decode_request_in_steps(payload: bytes, step_bytes: int = RUSTLOG_DECODE_STEP_BYTES) -> Generator[None, None, m.Request]:
    """Decode as `decode_request` does, and yield after every `step_bytes` of the records of a Produce. Raises `Undecodable`."""
    head = _HEAD.match(payload)
    if head is None or head[1] != b'"Produce"':
        return decode_request(payload)
    body: _ProduceHead = _decode(payload, _PRODUCE_HEAD, {}, "request")
    text = bytes(body.records).strip(_SPACE)
    if not text.startswith(b"["):
        return decode_request(payload)  # fails at the first byte of the records
    yield
    records = yield from _records_in_steps(text, step_bytes)
    _check_count(records)
    return m.Produce(body.topic, body.partition, records)


def _records_in_steps(text: bytes, step_bytes: int) -> Generator[None, None, list[bytes]]:
    """Decode a JSON array of arrays. Each step ends at a comma, between two records or inside one, and closes what is open there."""
    records: list[bytes] = []
    open_record: bytearray | None = None
    start, stop = len(b"["), 0
    while stop >= 0:
        stop = text.find(b",", start + step_bytes)
        chunk = text[start:stop].rstrip(_SPACE)  # without a comma it ends before the last bracket
        is_cut = stop >= 0 and not chunk.endswith(b"]")
        chunk = (b"[" if open_record is None else b"[[") + chunk + (b"]]" if is_cut else b"]")
        arrays = _arrays(chunk, len(records), len(open_record or b""))
        if open_record is not None:
            open_record += arrays[0]
            if is_cut and len(arrays) == 1:
                start = stop + 1
                yield
                continue
            arrays[0] = bytes(open_record)
        open_record = bytearray(arrays.pop()) if is_cut else None
        records += arrays
        start = stop + 1
        yield
    return records


def _arrays(chunk: bytes, records_before: int, bytes_before: int) -> list[bytes]:
    """Decode records. `bytes_before` of the first one are in an earlier chunk."""
    try:
        return _bytes(_ARRAYS.decode(chunk), "records", records_before)
    except msgspec.ValidationError as error:

        def path(found: re.Match[str]) -> str:
            record, byte = int(found[1]), f"[{int(found[2]) + bytes_before * (found[1] == '0')}]" if found[2] else ""
            return f"$.records[{record + records_before}]{byte}"

        raise Undecodable(_PATH.sub(path, str(error))) from None
    except msgspec.DecodeError:  # the syntax of the whole is right: a string, an object or a deeper array is cut
        raise Undecodable("Expected arrays of integers - at `$.records`") from None


# Replies


def _produced(body: _Offsets) -> m.ProduceReply:
    offsets = body.offsets
    if not offsets:
        return m.ProduceReply(range(0))
    _u64(max(offsets), "offsets")
    dense = range(offsets[0], offsets[0] + len(offsets))
    return m.ProduceReply(dense if offsets == list(dense) else offsets)


def _fetched(body: _Records) -> m.FetchReply:
    following = _u64(body.next_offset, "next_offset")
    offsets = [record.offset for record in body.records]
    _u64(max(offsets, default=0), "records")
    dense = range(following - len(offsets), following)
    values = _bytes([record.payload for record in body.records], "records")
    return m.FetchReply(dense if offsets == list(dense) else offsets, values, following)


def _offset_fetched(body: _Offset) -> m.OffsetFetchReply:
    return m.OffsetFetchReply(None if body.offset is None else _u64(body.offset, "offset"))


def _topic_described(body: _TopicDescription) -> m.DescribeTopicReply:
    return m.DescribeTopicReply(body.topic, body.partition_count, body.partitions)


def _partition_described(body: _PartitionDescription) -> m.DescribePartitionReply:
    return m.DescribePartitionReply(body.topic, body.partition, _u64(body.high_watermark, "high_watermark"))


_NAMED_REPLIES: Final[_Shapes] = {
    "Produce": _shape(_Offsets, _produced),
    "Fetch": _shape(_Records, _fetched),
    "OffsetCommit": _shape(_Success, lambda body: m.OffsetCommitReply(body.success)),
    "OffsetFetch": _shape(_Offset, _offset_fetched),
    "CreateTopic": _shape(_Success, lambda body: m.CreateTopicReply(body.success)),
    "ListTopics": _shape(_Topics, lambda body: m.ListTopicsReply(body.topics)),
    "DescribeTopic": _shape(_TopicDescription, _topic_described),
    "DescribePartition": _shape(_PartitionDescription, _partition_described),
    "Metrics": _shape(_Metrics, lambda body: m.MetricsReply(body.metrics)),
    "Error": _shape(_Error, lambda body: m.ErrorReply(body.message)),
    "Pong": _shape(_NoFields | None, lambda body: m.Pong()),
}
_BARE_REPLIES: Final[dict[str, Callable[[], m.Reply]]] = {"Pong": m.Pong}


def decode_reply(payload: bytes) -> m.Reply:
    """Decode the reply of a non-empty payload. Raises `Undecodable` for any other payload."""
    reply: m.Reply = _decode(payload, _NAMED_REPLIES, _BARE_REPLIES, "response")
    return reply


# The envelope


class _AnyObject(Struct):
    """Decoding into this type checks the syntax of the whole payload and keeps only the field of another dialect."""

    type: Raw = Raw()


_ANY_OBJECT = msgspec.json.Decoder(_AnyObject)
_ANY_TEXT = msgspec.json.Decoder(str)


def _decode(payload: bytes, named: _Shapes, bare: dict[str, Callable[[], Any]], role: str) -> Any:
    try:
        if not payload.isascii():
            payload.decode()  # strings in unknown fields would otherwise not be checked
        head = _HEAD.match(payload)
        if head is None:
            return _bare(payload, bare, role)
        name = _ANY_TEXT.decode(head[1])
        if name not in named:
            _raise_unknown(payload, name, role)
        decoder, build = named[name]
        return build(decoder.decode(_value(payload, head.end())))
    except Undecodable:
        raise
    except UnicodeDecodeError as error:
        raise Undecodable(f"invalid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise Undecodable("nested too deeply") from None
    except msgspec.ValidationError as error:
        raise Undecodable(str(error)) from None
    except msgspec.DecodeError as error:
        _raise_malformed(payload, str(error), role)


def _value(payload: bytes, start: int) -> memoryview:
    """Return the bytes between the colon and the last closing brace."""
    stop = len(payload.rstrip(_SPACE)) - 1
    if payload[stop] != 0x7D:
        raise msgspec.DecodeError("no closing brace")
    if stop - start > _PRODUCE_BYTES_PLAIN and payload.count(b"[") > RUSTLOG_PRODUCE_RECORDS_MAX + _OTHER_ARRAYS_MAX:
        raise Undecodable(f"too many records: over {RUSTLOG_PRODUCE_RECORDS_MAX}")  # before a list is allocated for each
    return memoryview(payload)[start:stop]


def _bare(payload: bytes, bare: dict[str, Callable[[], Any]], role: str) -> Any:
    if payload.lstrip(_SPACE)[:1] != b'"':
        _ANY_OBJECT.decode(payload)
        raise Undecodable(f"the object does not name a {role}")
    name = _ANY_TEXT.decode(payload)
    if name not in bare:
        raise Undecodable(f"unknown {role}: {name}")
    return bare[name]()


def _raise_unknown(payload: bytes, name: str, role: str) -> NoReturn:
    if bytes(_ANY_OBJECT.decode(payload).type).startswith(b'"'):
        raise Undecodable(f'a {role} with a "type" member is not supported, write {{"Ping":{{}}}} for {{"type":"Ping"}}')
    raise Undecodable(f"unknown {role}: {name}")


def _raise_malformed(payload: bytes, reason: str, role: str) -> NoReturn:
    """Raise the error for the whole payload: `reason` counts positions from the first value, and reports a second member as trailing
    characters."""
    try:
        _ANY_OBJECT.decode(payload)
    except msgspec.ValidationError:
        raise Undecodable(reason) from None
    except msgspec.DecodeError as error:
        raise Undecodable(str(error)) from None
    except RecursionError:
        raise Undecodable("nested too deeply") from None
    if "trailing characters" in reason:
        reason = f"one {role} expected, the object has more members"
    raise Undecodable(reason)


# Encoding. msgspec encodes lists of small integers about three times as fast as joining a table of texts.

_ENCODER = msgspec.json.Encoder()


def encode_request(request: m.Request) -> bytes:
    """Encode the payload. Raises `InvalidRequest` for a name that is not UTF-8."""
    try:
        return _ENCODER.encode(_request_object(request))
    except UnicodeEncodeError:
        raise InvalidRequest(f"a name of {type(request).__name__} cannot be written as UTF-8") from None


def _request_object(request: m.Request) -> Any:
    match request:
        case m.Produce(topic, partition, records):
            return {"Produce": _Produce(topic, partition, list(map(list, records)))}
        case m.Fetch(topic, partition, offset, max_bytes, group):
            return {"Fetch": _Fetch(topic, partition, offset, max_bytes, group or None)}
        case m.OffsetCommit(topic, partition, group, offset):
            return {"OffsetCommit": _OffsetCommit(topic, partition, group, offset)}
        case m.OffsetFetch(topic, partition, group):
            return {"OffsetFetch": _OffsetFetch(topic, partition, group)}
        case m.CreateTopic(topic, count):
            return {"CreateTopic": _CreateTopic(topic, count)}
        case m.DescribeTopic(topic):
            return {"DescribeTopic": _DescribeTopic(topic)}
        case m.DescribePartition(topic, partition):
            return {"DescribePartition": _DescribePartition(topic, partition)}
        case m.ListTopics() | m.MetricsFetch() | m.Ping():
            return type(request).__name__


def encode_reply(reply: m.Reply) -> bytes:
    """Encode the payload."""
    return _ENCODER.encode(_reply_object(reply))


def _reply_object(reply: m.Reply) -> Any:
    match reply:
        case m.ProduceReply(offsets):
            return {"Produce": _Offsets(list(offsets))}
        case m.FetchReply(offsets, values, following):
            return {"Fetch": _Records(list(map(_Record, offsets, map(list, values))), following)}
        case m.OffsetCommitReply(success):
            return {"OffsetCommit": _Success(success)}
        case m.OffsetFetchReply(offset):
            return {"OffsetFetch": _Offset(offset)}
        case m.CreateTopicReply(success):
            return {"CreateTopic": _Success(success)}
        case m.ListTopicsReply(topics):
            return {"ListTopics": _Topics(topics)}
        case m.DescribeTopicReply(topic, count, partitions):
            return {"DescribeTopic": _TopicDescription(topic, count, partitions)}
        case m.DescribePartitionReply(topic, partition, watermark):
            return {"DescribePartition": _PartitionDescription(topic, partition, watermark)}
        case m.MetricsReply(metrics):
            return {"Metrics": _Metrics(metrics)}
        case m.Pong():
            return "Pong"
        case m.ErrorReply(message):
            return {"Error": _Error(message)}


# Sizes without encoding.

_DIGITS_1: Final = bytes(range(10))
_DIGITS_2: Final = bytes(range(100))
_RECORD_FRAME_BYTES: Final = len(b'{"offset":,"payload":[]},')
FETCH_REPLY_OVERHEAD_BYTES: Final = len(b'{"Fetch":{"records":[],"next_offset":18446744073709551615}}')


def array_bytes(value: bytes) -> int:
    """Return the size of the text between the brackets: one to three digits for each byte, and the commas."""
    size = len(value)
    return 2 * size - (size > 0) + len(value.translate(None, _DIGITS_1)) + len(value.translate(None, _DIGITS_2))


def produced_record_bytes(value: bytes) -> int:
    """Return the size of a record of a Produce request with its brackets and comma."""
    return 3 + array_bytes(value)


def record_bytes(offset: int, value: bytes) -> int:
    """Return the size of a record of a Fetch reply with its comma."""
    return _RECORD_FRAME_BYTES + len(str(offset)) + array_bytes(value)


def records_bytes_at_most(values: Sequence[bytes]) -> int:
    """Return an upper bound of the sum of `record_bytes`, from the lengths alone."""
    return 4 * sum(map(len, values)) + (_RECORD_FRAME_BYTES + len(str(_U64_MAX))) * len(values)
