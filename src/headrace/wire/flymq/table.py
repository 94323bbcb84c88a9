"""Opcodes and their layouts: everything that this release supports. A new opcode is a new row.

A row has the request, the reply and, if it differs from the specification's, the reply of the original.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

from headrace.wire.flymq import access, cluster, core, dead_letters, delayed, groups, schemas, transactions
from headrace.wire.flymq import access_messages as a
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import messages as m
from headrace.wire.flymq import schema_messages as s
from headrace.wire.flymq.failure import decode_failure, encode_failure
from headrace.wire.flymq.fetching import SdkLayout, SpecLayout
from headrace.wire.flymq.fields import Field, Reader
from headrace.wire.flymq.framing import frame
from headrace.wire.flymq.opcodes import Dialect, Opcode
from headrace.wire.flymq.produce import encode_batch, encode_metadata, read_metadata


@dataclass(frozen=True, slots=True)
class Row:
    """Messages of one opcode."""

    opcode: Opcode
    message: type
    request: Field[Any]
    reply: Field[Any]
    sdk_reply: Field[Any] | None = None
    answer: Opcode | None = None
    """Opcode of the reply, if it differs from that of the request."""

    def reply_layout(self, dialect: Dialect) -> Field[Any]:
        return self.sdk_reply if self.sdk_reply is not None and dialect is not Dialect.SPEC else self.reply


_SDK_FETCHED = SdkLayout()

ROWS: Final[Iterable[Row]] = (
    Row(Opcode.CONSUME, m.Consume, core.CONSUME, core.CONSUMED),
    Row(Opcode.CREATE_TOPIC, m.CreateTopic, core.CREATE_TOPIC, core.DONE),
    Row(Opcode.METADATA, m.Metadata, core.METADATA, core.TOPIC_METADATA),
    Row(Opcode.SUBSCRIBE, m.Subscribe, core.SUBSCRIBE, core.OFFSET),
    Row(Opcode.COMMIT, m.Commit, core.COMMIT, core.DONE),
    Row(Opcode.FETCH, m.Fetch, core.FETCH, SpecLayout(), _SDK_FETCHED),
    Row(Opcode.LIST_TOPICS, m.ListTopics, core.LIST_TOPICS, core.TOPIC_LIST),
    Row(Opcode.DELETE_TOPIC, m.DeleteTopic, core.DELETE_TOPIC, core.DONE),
    Row(Opcode.CONSUME_ZERO_COPY, m.ConsumeZeroCopy, core.CONSUME_ZERO_COPY, core.CONSUMED),
    Row(Opcode.FETCH_BINARY, m.FetchBinary, core.FETCH_BINARY, _SDK_FETCHED),
    Row(Opcode.BROKER, v.BrokerCall, access.BROKER, access.BROKER_REPLY),
    Row(Opcode.REGISTER_SCHEMA, s.RegisterSchema, schemas.REGISTER_SCHEMA, schemas.SCHEMA_ENTRY),
    Row(Opcode.GET_SCHEMA, s.GetSchema, schemas.GET_SCHEMA, schemas.SCHEMA_REPLY),
    Row(Opcode.LIST_SCHEMAS, s.ListSchemas, schemas.LIST_SCHEMAS, schemas.SCHEMA_ENTRIES),
    Row(Opcode.VALIDATE_SCHEMA, s.ValidateSchema, schemas.VALIDATE_SCHEMA, schemas.VALIDATED),
    Row(Opcode.PRODUCE_WITH_SCHEMA, s.ProduceWithSchema, schemas.PRODUCE_WITH_SCHEMA, delayed.PLACED),
    Row(Opcode.DELETE_SCHEMA, s.DeleteSchema, schemas.DELETE_SCHEMA, core.DONE),
    Row(Opcode.FETCH_DLQ, v.FetchDlq, dead_letters.FETCH_DLQ, dead_letters.DLQ_ENTRIES),
    Row(Opcode.REPLAY_DLQ, v.ReplayDlq, dead_letters.REPLAY_DLQ, core.DONE),
    Row(Opcode.PURGE_DLQ, v.PurgeDlq, dead_letters.PURGE_DLQ, core.DONE),
    Row(Opcode.PRODUCE_DELAYED, v.ProduceDelayed, delayed.PRODUCE_DELAYED, delayed.SCHEDULED),
    Row(Opcode.CANCEL_DELAYED, v.CancelDelayed, delayed.CANCEL_DELAYED, core.DONE),
    Row(Opcode.PRODUCE_WITH_TTL, v.ProduceWithTtl, delayed.PRODUCE_WITH_TTL, delayed.PLACED),
    Row(Opcode.TXN_BEGIN, v.TxnBegin, transactions.TXN_BEGIN, transactions.TXN_BEGUN),
    Row(Opcode.TXN_COMMIT, v.TxnCommit, transactions.TXN_COMMIT, transactions.TXN_ENDED),
    Row(Opcode.TXN_ROLLBACK, v.TxnRollback, transactions.TXN_ROLLBACK, transactions.TXN_ENDED),
    Row(Opcode.TXN_PRODUCE, v.TxnProduceBatch, transactions.TXN_PRODUCE, delayed.PLACED),
    Row(Opcode.CLUSTER_JOIN, v.ClusterJoin, cluster.CLUSTER_JOIN, core.DONE),
    Row(Opcode.CLUSTER_LEAVE, v.ClusterLeave, cluster.CLUSTER_LEAVE, core.DONE),
    Row(Opcode.CLUSTER_STATUS, v.ClusterStatus, cluster.CLUSTER_STATUS, cluster.CLUSTER_REPORT),
    Row(Opcode.CLUSTER_METADATA, m.ClusterMetadata, cluster.CLUSTER_METADATA, cluster.CLUSTER_TOPICS),
    Row(Opcode.GET_OFFSET, m.GetOffset, groups.GET_OFFSET, core.OFFSET),
    Row(Opcode.RESET_OFFSET, m.ResetOffset, groups.RESET_OFFSET, core.DONE),
    Row(Opcode.LIST_GROUPS, m.ListGroups, groups.LIST_GROUPS, groups.GROUP_LIST),
    Row(Opcode.DESCRIBE_GROUP, m.DescribeGroup, groups.DESCRIBE_GROUP, groups.GROUP_ENTRY),
    Row(Opcode.GET_LAG, m.GetLag, groups.GET_LAG, groups.LAG),
    Row(Opcode.DELETE_GROUP, m.DeleteGroup, groups.DELETE_GROUP, core.DONE),
    Row(Opcode.SEEK_TO_TIMESTAMP, m.SeekToTimestamp, groups.SEEK_TO_TIMESTAMP, core.OFFSET),
    Row(Opcode.GROUP_JOIN, m.GroupJoin, groups.GROUP_JOIN, groups.GROUP_JOINED),
    Row(Opcode.GROUP_TAKE, m.GroupTake, groups.GROUP_TAKE, groups.GROUP_TAKEN),
    Row(Opcode.GROUP_SETTLE, m.GroupSettle, groups.GROUP_SETTLE, groups.GROUP_SETTLED),
    Row(Opcode.GROUP_LEAVE, m.GroupLeave, groups.GROUP_LEAVE, core.DONE),
    Row(Opcode.AUTH, a.Auth, access.AUTH, access.AUTH_REPLY, access.AUTH_REPLY_SDK, Opcode.AUTH_RESPONSE),
    Row(Opcode.WHOAMI, a.WhoAmI, access.WHOAMI, access.IDENTITY),
    Row(Opcode.USER_CREATE, a.UserCreate, access.USER_CREATE, access.USER_ENTRY),
    Row(Opcode.USER_DELETE, a.UserDelete, access.USER_DELETE, core.DONE),
    Row(Opcode.USER_UPDATE, a.UserUpdate, access.USER_UPDATE, core.DONE),
    Row(Opcode.USER_LIST, a.UserList, access.USER_LIST, access.USER_ENTRIES),
    Row(Opcode.USER_GET, a.UserGet, access.USER_GET, access.USER_ENTRY),
    Row(Opcode.ACL_SET, a.AclSet, access.ACL_SET, access.ACL_DONE),
    Row(Opcode.ACL_GET, a.AclGet, access.ACL_GET, access.ACL_ENTRY),
    Row(Opcode.ACL_DELETE, a.AclDelete, access.ACL_DELETE, access.ACL_DONE),
    Row(Opcode.ACL_LIST, a.AclList, access.ACL_LIST, access.ACL_ENTRIES),
    Row(Opcode.PASSWORD_CHANGE, a.PasswordChange, access.PASSWORD_CHANGE, core.DONE),
    Row(Opcode.ROLE_LIST, a.RoleList, access.ROLE_LIST, access.ROLE_ENTRIES),
    Row(Opcode.ACCESS, a.AccessCall, access.ACCESS, access.ACCESS_REPLY),
    Row(Opcode.AUDIT_QUERY, a.AuditQuery, access.AUDIT_QUERY, access.AUDIT_PAGE),
    Row(Opcode.AUDIT_EXPORT, a.AuditExport, access.AUDIT_EXPORT, access.AUDIT_FILE),
    Row(Opcode.AUDIT_QUERY_SDK, a.AuditQuerySdk, access.AUDIT_QUERY_SDK, access.AUDIT_PAGE),
    Row(Opcode.AUDIT_EXPORT_SDK, a.AuditExportSdk, access.AUDIT_EXPORT_SDK, access.AUDIT_FILE),
)

BY_OPCODE: Final = {int(row.opcode): row for row in ROWS}
_BY_MESSAGE: Final = {row.message: row for row in ROWS}
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
