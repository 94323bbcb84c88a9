"""Error texts of RustLog in both dialects.

The JSON texts are those of the specification. The binary texts and codes are those of the original broker, word for word, because clients
and log searches depend on them. Codes 403 and 503 are additions: the original has no authorization and no retriable errors.
"""

from __future__ import annotations

from typing import Final

from headrace.limits import RUSTLOG_FRAME_BYTES_MAX
from headrace.wire.rustlog.messages import Dialect, ErrorReply

FRAME, DECODE, FETCH_FAILED, COMMIT_FAILED = 1, 2, 4, 5
NO_PARTITION, TOPIC_EXISTS, INVALID_TOPIC, NO_TOPIC_TO_DESCRIBE, NO_PARTITION_TO_DESCRIBE = 10, 11, 12, 13, 14
NOT_AUTHORIZED, INTERNAL, UNAVAILABLE = 403, 500, 503

JSON_PARSE: Final = "failed to parse request: "
JSON_NO_PARTITION: Final = "partition not found: "
JSON_OUT_OF_RANGE: Final = "offset out of range: "
BINARY_OUT_OF_RANGE: Final = "Fetch failed: offset out of range: "


def bad_length(dialect: Dialect, length: int, length_max: int = RUSTLOG_FRAME_BYTES_MAX) -> ErrorReply:
    """Return the error that is sent before the connection is closed."""
    limit = f"{length_max}" if length_max == RUSTLOG_FRAME_BYTES_MAX else f"{length_max} for a peer without rights"
    if dialect is Dialect.JSON:
        if length == 0:
            return ErrorReply(f"{JSON_PARSE}empty frame", FRAME)
        return ErrorReply(f"max frame size exceeded: {length} bytes (max {limit})", FRAME)
    if length == 0:
        return ErrorReply("Frame error: invalid protocol: zero-length frame", FRAME)
    return ErrorReply(f"Frame error: frame too large: {length} bytes (max: {limit})", FRAME)


def undecodable(dialect: Dialect, reason: str) -> ErrorReply:
    """Return the error for a payload that is no request. The connection stays open."""
    return ErrorReply((JSON_PARSE if dialect is Dialect.JSON else "Decode error: ") + reason, DECODE)


def no_partition(dialect: Dialect, topic: str, partition: int) -> ErrorReply:
    start = JSON_NO_PARTITION if dialect is Dialect.JSON else "Topic or partition does not exist: "
    return ErrorReply(f"{start}topic={topic}, partition={partition}", NO_PARTITION)


def offset_out_of_range(dialect: Dialect, requested: int, base: int) -> ErrorReply:
    start = JSON_OUT_OF_RANGE if dialect is Dialect.JSON else BINARY_OUT_OF_RANGE
    return ErrorReply(f"{start}requested {requested}, partition base {base}", FETCH_FAILED)


def fetch_failed(dialect: Dialect, reason: str, *, retriable: bool = False) -> ErrorReply:
    return ErrorReply(f"{'fetch' if dialect is Dialect.JSON else 'Fetch'} failed: {reason}", UNAVAILABLE if retriable else FETCH_FAILED)


def record_does_not_fit(dialect: Dialect, offset: int, size_bytes: int, *, fits_binary: bool) -> ErrorReply:
    """Return the error for a record, written through another protocol, that fits no frame. It names the offset, so that the reader can skip
    it."""
    way = "use the binary codec" if fits_binary else "read it through another protocol"
    return fetch_failed(dialect, f"the record at offset {offset} has {size_bytes} bytes and fits no {dialect.value} frame, {way}")


def write_failed(dialect: Dialect, reason: str, *, retriable: bool = False) -> ErrorReply:
    start = "failed" if dialect is Dialect.JSON else "Failed"
    return ErrorReply(f"{start} to write record: {reason}", UNAVAILABLE if retriable else INTERNAL)


def commit_failed(dialect: Dialect, reason: str, *, retriable: bool = False) -> ErrorReply:
    start = "offset" if dialect is Dialect.JSON else "Offset"
    return ErrorReply(f"{start} commit failed: {reason}", UNAVAILABLE if retriable else COMMIT_FAILED)


# Requests that only the original has. Their texts are the same in both dialects.


def topic_exists(topic: str) -> ErrorReply:
    return ErrorReply(f"Topic '{topic}' already exists", TOPIC_EXISTS)


def invalid_partition_count(count: int) -> ErrorReply:
    return ErrorReply(f"Invalid partition count: {count}", INVALID_TOPIC)


def invalid_topic_name(reason: str) -> ErrorReply:
    return ErrorReply(f"Invalid topic name: {reason}", INVALID_TOPIC)


def no_topic_to_describe(topic: str) -> ErrorReply:
    return ErrorReply(f"DescribeTopic failed: Topic '{topic}' not found", NO_TOPIC_TO_DESCRIBE)


def no_partition_to_describe(topic: str, partition: int) -> ErrorReply:
    return ErrorReply(f"DescribePartition failed: Partition {partition} not found in topic '{topic}'", NO_PARTITION_TO_DESCRIBE)


def not_authorized(reason: str) -> ErrorReply:
    return ErrorReply(f"not authorized: {reason}", NOT_AUTHORIZED)


def topic_creation_failed(reason: str, *, retriable: bool) -> ErrorReply:
    return ErrorReply(f"Topic creation failed: {reason}", UNAVAILABLE if retriable else INTERNAL)


def internal(reason: str, *, retriable: bool) -> ErrorReply:
    return ErrorReply(f"internal error: {reason}", UNAVAILABLE if retriable else INTERNAL)
