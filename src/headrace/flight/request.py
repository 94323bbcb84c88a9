"""Tickets, commands, actions and their replies on the Flight endpoint, all in JSON.

    GetFlightInfo   descriptor path [topic] or [topic, partition], or command = a `Range`     → endpoints with tickets
    DoGet           ticket = a `Range`                                                         → record batches of stored columns
    DoPut           descriptor path [topic], or command = an `Append`, `Stage` or `Letters`    → one JSON reply as metadata
    DoAction        type = the name of an action, body = its fields                            → one JSON reply

Unknown fields are errors: a misspelt `partiton` must not read the wrong partition. Requests are checked before anything is allocated.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
import pyarrow as pa

from headrace.errors import InvalidRequest
from headrace.limits import (
    FETCH_WAIT_MS_MAX,
    FLIGHT_READ_ROWS_MAX,
    FLIGHT_REQUEST_BYTES_MAX,
    GROUP_NAME_BYTES_MAX,
    PARTITIONS_MAX,
    PARTITIONS_PER_TOPIC_MAX,
    WRITER_IDLE_MS,
)

DEFAULT_PORT: Final = 8815
HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
READ_SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", TIMESTAMP),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
    ]
)
"""The columns that a reader may select, with the names and types of Spark's Kafka source."""
ALL: Final = tuple(READ_SCHEMA.names)
STORED: Final = ("key", "value", "offset", "timestamp", "headers")
"""The columns that the server sends. The client adds the others, which are constant within a range."""
TIMESTAMP_TYPE: Final = 1
"""Kafka's LogAppendTime: the broker sets the timestamp when it appends a record."""

_OFFSET_MAX: Final = (1 << 63) - 1
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
"""Only the length is checked here; the broker validates names."""
Partition = Annotated[int, msgspec.Meta(ge=0, lt=PARTITIONS_PER_TOPIC_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)]
Millis = Annotated[int, msgspec.Meta(ge=-_OFFSET_MAX, le=_OFFSET_MAX)]
WaitMs = Annotated[int, msgspec.Meta(ge=0, le=FETCH_WAIT_MS_MAX)]
Group = Annotated[str, msgspec.Meta(min_length=1, max_length=GROUP_NAME_BYTES_MAX)]
Handle = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Names = Annotated[list[Name], msgspec.Meta(max_length=PARTITIONS_MAX)]
Handles = Annotated[list[Handle], msgspec.Meta(max_length=PARTITIONS_MAX)]
Places = Annotated[dict[Name, dict[Partition, Offset]], msgspec.Meta(max_length=PARTITIONS_MAX)]
"""Topic → partition → offset."""


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """Base class of requests."""


class Range(Request):
    """Rows of one partition with start <= offset < stop. Without `stop`: up to the end of the partition at the call."""

    topic: Name
    partition: Partition = 0
    start: Offset | None = None
    """None: the earliest offset."""
    stop: Offset | None = None
    columns: Annotated[list[str], msgspec.Meta(max_length=len(STORED))] | None = None
    """Of `STORED`; None: all of them."""
    rows_max: Annotated[int, msgspec.Meta(ge=1, le=FLIGHT_READ_ROWS_MAX)] = 65_536
    """Rows of one record batch."""


class Append(Request, tag_field="operation", tag="append"):
    """Append rows with the column `value` and optionally `key`, `headers`, `partition`, `timestamp`. Without a partition, the key
    selects it."""

    topic: Name
    partition: Partition | None = None


class Stage(Request, tag_field="operation", tag="stage"):
    """Like `Append`, but the rows become visible when the handle is published. Without `topic`, the column `topic` has it."""

    handle: Handle
    writer: Name
    topic: Name | None = None
    epoch: Annotated[str, msgspec.Meta(max_length=256)] = ""
    order: Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)] = 0


class Letters(Request, tag_field="operation", tag="dead_letters"):
    """Move records to the dead letters of their topic. Columns `partition`, `offset`, `error`, `reason`."""

    topic: Name


Put = Append | Stage | Letters


class Topics(Request):
    """Return the names of all topics that the caller may see."""


class Describe(Request):
    """Return the partitions and bounds of these topics, or of all topics that the caller may see."""

    topics: Names | None = None


class Split(Request):
    """Divide a range, at batch boundaries where there are any."""

    topic: Name
    partition: Partition
    start: Offset
    stop: Offset
    parts: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class LocalFile(Request):
    """Return the path of a file that the caller can open exactly if it can read the files of the broker; null if it cannot."""

    machine: Annotated[str, msgspec.Meta(max_length=256)]
    """Id of the caller's machine."""


class Locate(Request):
    """Return where batches of a range lie in files, for a caller that can read them. DoGet has all other rows."""

    topic: Name
    partition: Partition
    start: Offset
    stop: Offset


class Commit(Request):
    """Commit the next offsets of a group: topic → partition → offset. Durable when the reply arrives."""

    group: Group
    offsets: Places


class Committed(Request):
    """Return the committed offsets of a group in a topic: partition → offset."""

    group: Group
    topic: Name


class OffsetForTime(Request):
    """Return for each partition the first offset at or after a time (Unix ms); null if there is none."""

    topic: Name
    times: dict[Partition, Millis]


class Wait(Request):
    """Reply like `describe` when an end offset exceeds the given one, a partition is missing in `ends`, or the time has elapsed."""

    ends: Places
    wait_ms: WaitMs


class Schema(Request):
    """Return the schema that the topic requires and its other versions, to decode older values; null: no schema."""

    topic: Name
    version: Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)] = 0
    """Another version than the required one; 0: the required one."""


class CreateTopic(Request):
    """Create a topic with the broker's defaults."""

    name: Name
    partitions: Annotated[int, msgspec.Meta(ge=1, le=PARTITIONS_PER_TOPIC_MAX)] = 1


class EnsureTopic(Request):
    """Create a topic if it does not exist and the broker allows automatic creation."""

    name: Name


class Publish(Request):
    """Make all rows staged under these handles visible atomically. A version at or below the last one has no effect."""

    writer: Name
    version: Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)]
    handles: Handles
    epoch: Annotated[str, msgspec.Meta(max_length=256)] = ""
    remember_ms: Annotated[int, msgspec.Meta(ge=0, le=WRITER_IDLE_MS)] = 0
    """Time for which the broker remembers the version for a repeated request; 0: the default."""


class Drop(Request):
    """Drop the rows staged under these handles. Return how many handles existed."""

    handles: Handles


class Status(Request):
    """Return the overview of the broker, as far as the caller may see it (`headrace.overview.Overview`)."""


class TopicCounters(Request):
    """Return size and traffic of every topic that the caller may see (`headrace.overview.TopicCounters`)."""


class LastVersion(Request):
    """Return the last version that a writer has published; null: none."""

    writer: Name


ACTIONS: Final[dict[str, type[Request]]] = {
    "topics": Topics,
    "describe": Describe,
    "split": Split,
    "local_file": LocalFile,
    "locate": Locate,
    "commit": Commit,
    "committed": Committed,
    "offset_for_time": OffsetForTime,
    "wait": Wait,
    "schema": Schema,
    "create_topic": CreateTopic,
    "ensure_topic": EnsureTopic,
    "publish": Publish,
    "drop": Drop,
    "last_version": LastVersion,
    "status": Status,
    "topic_counters": TopicCounters,
}

T = TypeVar("T")
_ENCODER: Final = msgspec.json.Encoder()


def decode(raw: bytes, kind: type[T], what: str) -> T:
    """Decode JSON. Raises `InvalidRequest`, which names the invalid field."""
    if len(raw) > FLIGHT_REQUEST_BYTES_MAX:
        raise InvalidRequest(f"{what} of {len(raw)} bytes exceeds the limit of {FLIGHT_REQUEST_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as failure:
        raise InvalidRequest(f"{what}: {failure}") from None
    except RecursionError:
        raise InvalidRequest(f"{what}: nested too deeply") from None


def decode_put(raw: bytes) -> Put:
    """Decode the command of a DoPut. Raises `InvalidRequest`."""
    put: Put = decode(raw, Put, "command")  # type: ignore[arg-type]  # msgspec accepts a union
    return put


def encode(message: object) -> bytes:
    return _ENCODER.encode(message)


def encode_place(offset: int) -> bytes:
    """Encode the metadata of a record batch of DoGet: the offset to resume at after a lost connection."""
    return offset.to_bytes(8, "little")


def decode_place(metadata: pa.Buffer | None) -> int:
    return int.from_bytes(b"" if metadata is None else metadata.to_pybytes(), "little")


def stored_schema(columns: tuple[str, ...]) -> pa.Schema:
    """Return the schema of these columns, in this order."""
    return pa.schema([READ_SCHEMA.field(name) for name in columns])


def check_stored(columns: list[str] | None) -> tuple[str, ...]:
    """Check the selected columns. Raises `InvalidRequest` for an unknown or duplicate column."""
    if columns is None:
        return STORED
    for index, name in enumerate(columns):
        if name not in STORED:
            raise InvalidRequest(f"unknown column {name[:60]!r}; expected {', '.join(STORED)}")
        if name in columns[:index]:
            raise InvalidRequest(f"duplicate column {name!r}")
    if not columns:
        raise InvalidRequest(f"no columns selected; expected some of {', '.join(STORED)}")
    return tuple(columns)
