"""Opcodes and their layouts: everything that this release supports. A new opcode is a new row.

A row has the request, the reply and, if it differs from the specification's, the reply of the original. `Trailing` fields are those that a
peer may leave out. The specification names the groups, clusters, users and ACLs without layouts: theirs follow the original's clients.
Only Headrace has SEEK_TO_TIMESTAMP, ACCESS and BROKER.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Protocol, cast

from headrace.errors import WireError
from headrace.wire.flymq import access_messages as a
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import messages as m
from headrace.wire.flymq import schema_messages as s
from headrace.wire.flymq import transactions
from headrace.wire.flymq.fetching import ConsumedLayout, PlaceLayout, SdkLayout, SpecLayout
from headrace.wire.flymq.fields import B32, BOOL, I32, I64, S8, S16, U8, U32, U64, Field, Layout, Repeated, Trailing
from headrace.wire.flymq.framing import BINARY, GZIP, decode_failure, encode_failure, frame
from headrace.wire.flymq.opcodes import Dialect, Opcode
from headrace.wire.flymq.produce import encode_batch, encode_metadata, read_metadata
from headrace.wire.flymq.reader import Reader
from headrace.wire.flymq.special import (
    MODE,
    CancelLayout,
    ExactText,
    GroupLayout,
    ProduceLayout,
    ReplayLayout,
    ReportLayout,
    ResetLayout,
    SeekLayout,
    Sized,
    TypeField,
)


class Request(Field[Any], Protocol):
    """Layout of a request, with the class of its message."""

    @property
    def message(self) -> type[Any]: ...


@dataclass(frozen=True, slots=True)
class Row:
    """Messages of one opcode."""

    opcode: Opcode
    request: Request
    reply: Field[Any]
    sdk_reply: Field[Any] | None = None
    answer: Opcode | None = None
    """Opcode of the reply, if it differs from that of the request."""

    def reply_layout(self, dialect: Dialect) -> Field[Any]:
        return self.sdk_reply if self.sdk_reply is not None and dialect is not Dialect.SPEC else self.reply


NAMES: Final = Repeated(S16)
_DONE: Final = Layout(m.Done, success=BOOL, message=Trailing(S16, "", always=True))
"""The original sends the bool alone, so the message may be missing."""
_OFFSET: Final = Layout(m.OffsetReply, offset=U64)
_NO_PATTERN: Final[str | None] = None
_CONSUME: Final[dict[str, Field[Any]]] = {"topic": S16, "partition": I32, "offset": U64}
_FETCH: Final[dict[str, Field[Any]]] = {
    **{"topic": S16, "partition": I32, "offset": U64, "records_max": I32},
    "pattern": Trailing(S16, _NO_PATTERN),
}
_SDK_FETCHED: Final = SdkLayout()
_BOUNDS: Final = Layout(m.PartitionBounds, partition=I32, leader=I32, first=U64, end=U64)
_PLACES: Final = Repeated(Layout(m.PartitionOffset, partition=I32, offset=U64))
_GROUP_ENTRY: Final = Layout(m.GroupEntry, topic=S16, group=S16, members=U32, offsets=_PLACES)
_TAKEN: Final = Layout(m.TakenRecord, partition=I32, offset=U64, attempt=U32, timestamp=I64, key=B32, value=B32)
# Only Headrace has key, partition, id and time of delivery. The offset of a delayed message is 0, since it has none yet.
_PLACE: Final[dict[str, Field[Any]]] = {
    **{"topic": S16, "partition": I32, "offset": U64, "timestamp": I64, "key_size": I32, "value_size": I32}
}
_PLACED: Final = Layout(v.Placed, **_PLACE)
_SCHEDULED: Final = Layout(v.Scheduled, **_PLACE, message=Trailing(S16, "", always=True), deliver_at=Trailing(I64, 0, always=True))
_AFTER: Final[dict[str, Field[Any]]] = {"key": Trailing(B32, b"", always=True), "partition": Trailing(I32, m.AUTO, always=True)}
_SCHEMA_ENTRY: Final = Layout(s.SchemaEntry, name=S16, type=S8, version=U32)
_SCHEMA_REPLY: Final = Layout(
    s.SchemaReply,
    entries=Repeated(_SCHEMA_ENTRY),
    id=Trailing(S16, "", always=True),
    definition=Trailing(B32, b"", always=True),
    compatibility=Trailing(S8, "", always=True),
    created=Trailing(I64, 0, always=True),
)
# Details are fields that the original's entry does not have. They follow the list of entries, where its clients ignore them.
_DLQ_ENTRY: Final = Layout(v.DlqEntry, id=S16, value=B32, error=S16, attempts=I32)
_DLQ_TIMES: Final[dict[str, Field[Any]]] = {"first_failure": I64, "last_failure": I64, "replayed_at": I64}
_DLQ_HEADERS: Final = Repeated(Layout(v.Header, name=S16, value=B32))
_DLQ_DETAIL: Final = Layout(v.DlqDetail, key=B32, partition=I32, offset=I64, **_DLQ_TIMES, headers=_DLQ_HEADERS)
_NO_DETAILS: Final[list[v.DlqDetail]] = []
# Only clients of the original send CLUSTER_METADATA, to find the partitions of a topic.
_LEADERSHIP: Final = Layout(
    m.PartitionLeadership, partition=I32, leader=S16, address=S16, epoch=U64, state=S16, replicas=NAMES, in_sync=NAMES
)
_TOPIC_LEADERSHIP: Final = Layout(m.TopicLeadership, topic=S16, partitions=Repeated(_LEADERSHIP))
_USER: Final[dict[str, Field[Any]]] = {
    **{"user": S16, "password": S16, "old_password": S16, "roles": NAMES},
    "enabled": Trailing(BOOL, True, always=True),
}
# Times are Unix seconds.
_USER_ENTRY: Final = Layout(a.UserEntry, user=S16, roles=NAMES, permissions=NAMES, enabled=BOOL, created=I64, updated=I64)
_ACL_DONE: Final = Layout(a.AclDone, success=BOOL, topic=S16)
_ACL: Final[dict[str, Field[Any]]] = {"topic": S16, "exists": BOOL, "public": BOOL}
_ACL_ROW: Final = Layout(a.AclRow, **_ACL, users=NAMES, roles=NAMES)
# Start and end are Unix seconds, 0: open.
_QUERY: Final[dict[str, Field[Any]]] = {
    **{"start": I64, "end": I64, "types": NAMES, "user": S16, "resource": S16, "result": S16, "search": S16},
    **{"limit": I32, "offset": I32},
}
_AUDIT_QUERY: Final = Layout(a.AuditQuery, **_QUERY)
_EVENT_TEXTS: Final = dict.fromkeys(("type", "user", "address", "resource", "action", "result", "node"), S16)
_DETAILS: Final[Field[Any]] = Repeated(Layout(a.Detail, name=S16, value=S16))
_EVENT: Final = Layout(a.AuditEvent, id=S16, time=I64, **_EVENT_TEXTS, details=_DETAILS)
_AUDIT_PAGE: Final = Layout(a.AuditPage, events=Repeated(Sized(_EVENT)), total=I32, more=BOOL)
_AUDIT_FILE: Final = Layout(a.AuditFile, format=S16, content=B32)
_AUTH_REPLY: Final = Layout(a.AuthReply, success=BOOL, error=S16, user=S16, roles=NAMES)
_AUTH_REPLY_SDK: Final = Layout(a.AuthReply, success=BOOL, user=S16, roles=Repeated(S8), error=S16)
_CALL: Final[dict[str, Field[Any]]] = {"operation": S16, "body": B32}

ROWS: Final[Iterable[Row]] = (
    Row(Opcode.CONSUME, PlaceLayout(m.Consume, "iQ", **_CONSUME), ConsumedLayout()),
    Row(Opcode.CREATE_TOPIC, Layout(m.CreateTopic, topic=S16, partitions=I32), _DONE),
    Row(Opcode.METADATA, Layout(m.Metadata, topic=S16), Layout(m.TopicMetadata, topic=S16, partitions=Repeated(_BOUNDS))),
    Row(Opcode.SUBSCRIBE, Layout(m.Subscribe, topic=S16, group=S16, partition=I32, mode=MODE), _OFFSET),
    Row(Opcode.COMMIT, Layout(m.Commit, topic=S16, group=S16, partition=I32, offset=U64, transaction=ExactText()), _DONE),
    Row(Opcode.FETCH, PlaceLayout(m.Fetch, "iQi", **_FETCH), SpecLayout(), _SDK_FETCHED),
    Row(Opcode.LIST_TOPICS, Layout(m.ListTopics), Layout(m.TopicList, topics=NAMES)),
    Row(Opcode.DELETE_TOPIC, Layout(m.DeleteTopic, topic=S16), _DONE),
    Row(Opcode.CONSUME_ZERO_COPY, PlaceLayout(m.ConsumeZeroCopy, "iQ", **_CONSUME), ConsumedLayout()),
    Row(Opcode.FETCH_BINARY, PlaceLayout(m.FetchBinary, "iQi", **_FETCH), _SDK_FETCHED),
    Row(Opcode.BROKER, Layout(v.BrokerCall, **_CALL), Layout(v.BrokerReply, body=B32)),
    Row(
        Opcode.REGISTER_SCHEMA,
        Layout(s.RegisterSchema, name=S16, type=TypeField(), definition=B32, compatibility=Trailing(S8, "")),
        _SCHEMA_ENTRY,
    ),
    Row(Opcode.GET_SCHEMA, Layout(s.GetSchema, name=S16, version=Trailing(U32, 0, always=True)), _SCHEMA_REPLY),
    Row(
        Opcode.LIST_SCHEMAS,
        Layout(s.ListSchemas, name=Trailing(S16, "", always=True)),
        Layout(s.SchemaEntries, schemas=Repeated(_SCHEMA_ENTRY)),
    ),
    Row(Opcode.VALIDATE_SCHEMA, Layout(s.ValidateSchema, name=S16, value=B32), Layout(s.Validated, valid=BOOL, errors=NAMES)),
    Row(Opcode.PRODUCE_WITH_SCHEMA, ProduceLayout(), _PLACED),
    Row(Opcode.DELETE_SCHEMA, Layout(s.DeleteSchema, name=S16, version=Trailing(U32, 0, always=True)), _DONE),
    Row(
        Opcode.FETCH_DLQ,
        Layout(v.FetchDlq, topic=S16, records_max=I32, after=Trailing(S16, "", always=True), replayed=Trailing(BOOL, False, always=True)),
        Layout(v.DlqEntries, entries=Repeated(_DLQ_ENTRY), details=Trailing(Repeated(_DLQ_DETAIL), _NO_DETAILS, always=True)),
    ),
    Row(Opcode.REPLAY_DLQ, ReplayLayout(), _DONE),
    Row(Opcode.PURGE_DLQ, Layout(v.PurgeDlq, topic=S16), _DONE),
    Row(Opcode.PRODUCE_DELAYED, Layout(v.ProduceDelayed, topic=S16, value=B32, delay_ms=I64, **_AFTER), _SCHEDULED),
    Row(Opcode.CANCEL_DELAYED, CancelLayout(), _DONE),
    Row(Opcode.PRODUCE_WITH_TTL, Layout(v.ProduceWithTtl, topic=S16, value=B32, ttl_ms=I64, **_AFTER), _PLACED),
    Row(Opcode.TXN_BEGIN, transactions.TXN_BEGIN, transactions.TXN_BEGUN),
    Row(Opcode.TXN_COMMIT, transactions.TXN_COMMIT, transactions.TXN_ENDED),
    Row(Opcode.TXN_ROLLBACK, transactions.TXN_ROLLBACK, transactions.TXN_ENDED),
    Row(Opcode.TXN_PRODUCE, transactions.TXN_PRODUCE, _PLACED),
    Row(Opcode.CLUSTER_JOIN, Layout(v.ClusterJoin, peer=S16), _DONE),
    Row(Opcode.CLUSTER_LEAVE, Layout(v.ClusterLeave), _DONE),
    Row(Opcode.CLUSTER_STATUS, Layout(v.ClusterStatus), ReportLayout()),
    Row(
        Opcode.CLUSTER_METADATA,
        Layout(m.ClusterMetadata, topic=Trailing(S16, "", always=True)),
        Layout(m.ClusterTopics, cluster=S16, topics=Repeated(_TOPIC_LEADERSHIP)),
    ),
    Row(Opcode.GET_OFFSET, Layout(m.GetOffset, topic=S16, group=S16, partition=I32), _OFFSET),
    Row(Opcode.RESET_OFFSET, ResetLayout(), _DONE),
    Row(Opcode.LIST_GROUPS, Layout(m.ListGroups), Layout(m.GroupList, groups=Repeated(_GROUP_ENTRY))),
    Row(Opcode.DESCRIBE_GROUP, GroupLayout(m.DescribeGroup), _GROUP_ENTRY),
    Row(
        Opcode.GET_LAG,
        Layout(m.GetLag, topic=S16, group=S16, partition=I32),
        Layout(m.LagReply, current=U64, committed=U64, latest=U64, lag=U64),
    ),
    Row(Opcode.DELETE_GROUP, GroupLayout(m.DeleteGroup), _DONE),
    Row(Opcode.SEEK_TO_TIMESTAMP, SeekLayout(), _OFFSET),
    Row(
        Opcode.GROUP_JOIN,
        Layout(m.GroupJoin, topic=S16, group=S16, mode=S16, partition=I32, start=S16, target=I64),
        Layout(m.GroupJoined, member=U64, mode=S16),
    ),
    Row(Opcode.GROUP_TAKE, Layout(m.GroupTake, member=U64, records_max=I32, wait_ms=I32), Layout(m.GroupTaken, records=Repeated(_TAKEN))),
    Row(Opcode.GROUP_SETTLE, Layout(m.GroupSettle, member=U64, kind=U8, places=_PLACES), Layout(m.GroupSettled, known=Repeated(BOOL))),
    Row(Opcode.GROUP_LEAVE, Layout(m.GroupLeave, member=U64), _DONE),
    Row(Opcode.AUTH, Layout(a.Auth, user=S16, password=S16), _AUTH_REPLY, _AUTH_REPLY_SDK, Opcode.AUTH_RESPONSE),
    Row(Opcode.WHOAMI, Layout(a.WhoAmI), Layout(a.Identity, authenticated=BOOL, user=S16, roles=NAMES, permissions=NAMES)),
    Row(Opcode.USER_CREATE, Layout(a.UserCreate, **_USER), _USER_ENTRY),
    Row(Opcode.USER_DELETE, Layout(a.UserDelete, user=S16), _DONE),
    Row(Opcode.USER_UPDATE, Layout(a.UserUpdate, **_USER), _DONE),
    Row(Opcode.USER_LIST, Layout(a.UserList), Layout(a.UserEntries, users=Repeated(_USER_ENTRY))),
    Row(Opcode.USER_GET, Layout(a.UserGet, user=S16), _USER_ENTRY),
    Row(Opcode.ACL_SET, Layout(a.AclSet, topic=S16, public=BOOL, users=NAMES, roles=NAMES), _ACL_DONE),
    Row(Opcode.ACL_GET, Layout(a.AclGet, topic=S16), Layout(a.AclEntry, **_ACL, default_public=BOOL, users=NAMES, roles=NAMES)),
    Row(Opcode.ACL_DELETE, Layout(a.AclDelete, topic=S16), _ACL_DONE),
    Row(Opcode.ACL_LIST, Layout(a.AclList), Layout(a.AclEntries, acls=Repeated(_ACL_ROW), default_public=BOOL)),
    Row(Opcode.PASSWORD_CHANGE, Layout(a.PasswordChange, **_USER), _DONE),
    Row(
        Opcode.ROLE_LIST,
        Layout(a.RoleList),
        Layout(a.RoleEntries, roles=Repeated(Layout(a.RoleEntry, role=S16, permissions=NAMES, description=S16))),
    ),
    Row(Opcode.ACCESS, Layout(a.AccessCall, **_CALL), Layout(a.AccessReply, body=B32)),
    Row(Opcode.AUDIT_QUERY, _AUDIT_QUERY, _AUDIT_PAGE),
    Row(Opcode.AUDIT_EXPORT, Layout(a.AuditExport, query=Sized(_AUDIT_QUERY), format=S16), _AUDIT_FILE),
    Row(Opcode.AUDIT_QUERY_SDK, Layout(a.AuditQuerySdk, **_QUERY), _AUDIT_PAGE),
    Row(Opcode.AUDIT_EXPORT_SDK, Layout(a.AuditExportSdk, query=Sized(_AUDIT_QUERY), format=S16), _AUDIT_FILE),
)

BY_OPCODE: Final = {int(row.opcode): row for row in ROWS}
_BY_MESSAGE: Final = {row.request.message: row for row in ROWS}
_BY_ANSWER: Final = BY_OPCODE | {int(row.answer): row for row in ROWS if row.answer is not None}
"""Whether a server may also reply with the opcode of the request."""

SPOKEN: Final = frozenset(BY_OPCODE) | {int(Opcode.PRODUCE)}
"""PRODUCE has no row: its frames are decoded and encoded in batches."""


def opcode_of(request: m.Request) -> int:
    return Opcode.PRODUCE if isinstance(request, m.ProduceBatch) else _BY_MESSAGE[type(request)].opcode


def encode_request(request: m.Request) -> bytes:
    """Return the frame of a request, or the frames of a batch."""
    if isinstance(request, m.ProduceBatch):
        return encode_batch(request)
    if isinstance(request, v.TxnProduceBatch):
        return transactions.encode_batch(request)
    row = _BY_MESSAGE[type(request)]
    return frame(row.opcode, row.request.write(request))


def encode_received(event: m.RequestEvent) -> bytes:
    """Return the frames of a decoded request, or of a batch of them. Raises `WireError` for one that was not understood."""
    match event:
        case m.Malformed() | m.Broken():
            raise WireError("the frame was not understood, so it cannot be encoded")
        case m.UnknownOpcode(opcode):
            return frame(opcode, b"")
        case m.Packed(opcode, payload):
            return frame(opcode, payload, BINARY | GZIP)
        case m.CommitBatch():
            return b"".join(map(encode_request, event.commits()))
        case v.DelayedBatch():
            return b"".join(map(encode_request, event.messages()))
        case v.TxnBeginBatch():
            return b"".join(map(encode_request, event.requests()))
        case v.TxnWholeBatch():
            return b"".join(map(encode_request, event.split(len(event))[0]))
        case m.ProduceMany():
            return b"".join(map(encode_request, event.batches()))
        case m.ProduceBatch() if event.ttls is not None:
            keys, partitions = event.keys or repeat(None), event.partitions or repeat(m.AUTO)
            rows = zip(event.values, event.ttls, keys, partitions, strict=False)
            return b"".join(encode_request(v.ProduceWithTtl(event.topic, value, ttl, key or b"", place)) for value, ttl, key, place in rows)
        case _:
            return encode_request(event)


def encode_reply(opcode: int, reply: m.Reply, dialect: Dialect = Dialect.SPEC) -> bytes:
    """Return the reply frame for this opcode, or the frames for a batch."""
    if isinstance(reply, m.RecordMetadataBatch):
        return encode_metadata(reply, opcode)
    if isinstance(reply, m.Failure):
        return encode_failure(reply, dialect)
    row = BY_OPCODE[opcode]
    return frame(row.answer or opcode, row.reply_layout(dialect).write(reply))


def decode_reply(reply: m.ReplyFrame, dialect: Dialect = Dialect.SPEC) -> m.Reply:
    """Decode a reply. `dialect` is that of the reply. Raises `WireError`, and `KeyError` for an opcode without requests."""
    if reply.opcode == Opcode.ERROR:
        return decode_failure(reply.payload)
    reader = Reader(reply.payload)
    if reply.opcode == Opcode.PRODUCE:
        return read_metadata(reader)
    return cast(m.Reply, _BY_ANSWER[reply.opcode].reply_layout(dialect).read(reader))
