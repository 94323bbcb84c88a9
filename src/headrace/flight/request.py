"""What travels on the Flight endpoint besides Arrow: tickets, commands, actions and their answers, all of them JSON.

    GetFlightInfo   descriptor path [topic] or [topic, partition], or command = a `Range`     → endpoints with tickets
    DoGet           ticket = a `Range`                                                         → record batches of stored columns
    DoPut           descriptor path [topic], or command = an `Append`, `Stage` or `Letters`    → one JSON answer as metadata
    DoAction        type = the name of a verb, body = its fields                               → one JSON answer

Unknown fields are refused: a misspelt `partiton` must not read the wrong one. Everything is checked before anything is allocated.
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
"""What a reader may ask for. The names and types are those of Spark's Kafka source."""
ALL: Final = tuple(READ_SCHEMA.names)
STORED: Final = ("key", "value", "offset", "timestamp", "headers")
"""What the server sends. The rest is the same for all rows of a range, and made by the client."""
TIMESTAMP_TYPE: Final = 1
"""As Kafka counts: the log stamps its records when it appends them."""

_OFFSET_MAX: Final = (1 << 63) - 1
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
"""Whether it is a good name is the broker's question; this only bounds it."""
Partition = Annotated[int, msgspec.Meta(ge=0, lt=PARTITIONS_PER_TOPIC_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)]
Millis = Annotated[int, msgspec.Meta(ge=-_OFFSET_MAX, le=_OFFSET_MAX)]
WaitMs = Annotated[int, msgspec.Meta(ge=0, le=FETCH_WAIT_MS_MAX)]
Group = Annotated[str, msgspec.Meta(min_length=1, max_length=GROUP_NAME_BYTES_MAX)]
Handle = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Names = Annotated[list[Name], msgspec.Meta(max_length=PARTITIONS_MAX)]
Handles = Annotated[list[Handle], msgspec.Meta(max_length=PARTITIONS_MAX)]
Places = Annotated[dict[Name, dict[Partition, Offset]], msgspec.Meta(max_length=PARTITIONS_MAX)]
"""Topic → partition → offset; of no more topics than there can be, since each of them is asked about."""


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """Anything a client sends."""


class Range(Request):
    """Rows of one partition with start <= offset < stop. Without `stop`: to the end as it is at the call."""

    topic: Name
    partition: Partition = 0
    start: Offset | None = None
    """None: the first there is."""
    stop: Offset | None = None
    columns: Annotated[list[str], msgspec.Meta(max_length=len(STORED))] | None = None
    """Of `STORED`; None: all of them."""
    rows_max: Annotated[int, msgspec.Meta(ge=1, le=FLIGHT_READ_ROWS_MAX)] = 65_536
    """Rows of one record batch."""


class Append(Request, tag_field="verb", tag="append"):
    """Columns `value`, and where wanted `key`, `headers`, `partition`, `timestamp`. Without either `partition`, keys decide."""

    topic: Name
    partition: Partition | None = None


class Stage(Request, tag_field="verb", tag="stage"):
    """As `Append`, but nothing is seen before the handle is published. Without `topic`, a column `topic` says where to."""

    handle: Handle
    writer: Name
    topic: Name | None = None
    epoch: Annotated[str, msgspec.Meta(max_length=256)] = ""
    order: Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)] = 0


class Letters(Request, tag_field="verb", tag="dead_letters"):
    """Move records to the dead letters of their topic. Columns `partition`, `offset`, `error`, `reason`."""

    topic: Name


Put = Append | Stage | Letters


class Topics(Request):
    """The names of all topics that the caller may see."""


class Describe(Request):
    """Partitions and bounds of these topics; of all that the caller may see, if none is named."""

    topics: Names | None = None


class Split(Request):
    """A range as several, cut where batches begin."""

    topic: Name
    partition: Partition
    start: Offset
    stop: Offset
    parts: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Commit(Request):
    """The next offsets to read of a group: topic → partition → offset. Durable when answered."""

    group: Group
    offsets: Places


class Committed(Request):
    """What a group has committed in a topic: partition → offset."""

    group: Group
    topic: Name


class OffsetForTime(Request):
    """For each partition the first offset at or after a time (Unix ms); null where there is none."""

    topic: Name
    times: dict[Partition, Millis]


class Wait(Request):
    """Answer like `describe` once an end lies beyond the one given here, or a partition is not among those given, or the time is over."""

    ends: Places
    wait_ms: WaitMs


class Schema(Request):
    """What the topic requires of its values, with other versions of it to read older values by; null: nothing."""

    topic: Name
    version: Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)] = 0
    """Another version than the one required."""


class CreateTopic(Request):
    """A new topic, with the broker's defaults."""

    name: Name
    partitions: Annotated[int, msgspec.Meta(ge=1, le=PARTITIONS_PER_TOPIC_MAX)] = 1


class EnsureTopic(Request):
    """A topic, created if it is not there and the broker allows that."""

    name: Name


class Publish(Request):
    """Everything staged under these handles becomes readable at once. A version at or below the last one changes nothing."""

    writer: Name
    version: Annotated[int, msgspec.Meta(ge=0, le=_OFFSET_MAX)]
    handles: Handles
    epoch: Annotated[str, msgspec.Meta(max_length=256)] = ""
    remember_ms: Annotated[int, msgspec.Meta(ge=0, le=WRITER_IDLE_MS)] = 0
    """How long the application may come back to ask whether it was published; 0: as long as any."""


class Drop(Request):
    """Forget what is staged under these handles; says how many there were."""

    handles: Handles


class LastVersion(Request):
    """The last version that an application has published; null: none."""

    writer: Name


ACTIONS: Final[dict[str, type[Request]]] = {
    "topics": Topics,
    "describe": Describe,
    "split": Split,
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
}

T = TypeVar("T")
_ENCODER: Final = msgspec.json.Encoder()


def decode(raw: bytes, kind: type[T], what: str) -> T:
    """Raises `InvalidRequest` with what is wrong and where."""
    if len(raw) > FLIGHT_REQUEST_BYTES_MAX:
        raise InvalidRequest(f"{what} of {len(raw)} bytes exceeds the limit of {FLIGHT_REQUEST_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as failure:
        raise InvalidRequest(f"{what}: {failure}") from None
    except RecursionError:
        raise InvalidRequest(f"{what}: nested too deeply") from None


def decode_put(raw: bytes) -> Put:
    """The command of a DoPut. Raises `InvalidRequest`."""
    put: Put = decode(raw, Put, "command")  # type: ignore[arg-type]  # a union is no type object, but msgspec takes it
    return put


def encode(message: object) -> bytes:
    return _ENCODER.encode(message)


def encode_place(offset: int) -> bytes:
    """What rides on each record batch of a DoGet: the offset to read on at, should the line break behind it."""
    return offset.to_bytes(8, "little")


def decode_place(metadata: pa.Buffer | None) -> int:
    return int.from_bytes(b"" if metadata is None else metadata.to_pybytes(), "little")


def stored_schema(columns: tuple[str, ...]) -> pa.Schema:
    """The schema of these columns, in this order."""
    return pa.schema([READ_SCHEMA.field(name) for name in columns])


def check_stored(columns: list[str] | None) -> tuple[str, ...]:
    """Raises `InvalidRequest` for a column that the server does not send, or that is asked for twice."""
    if columns is None:
        return STORED
    for index, name in enumerate(columns):
        if name not in STORED:
            raise InvalidRequest(f"no column {name[:60]!r}; there are {', '.join(STORED)}")
        if name in columns[:index]:
            raise InvalidRequest(f"column {name!r} is asked for twice")
    if not columns:
        raise InvalidRequest("no column is asked for")
    return tuple(columns)
