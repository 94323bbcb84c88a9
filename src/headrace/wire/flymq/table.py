"""Opcode → layouts: everything this release speaks, as data. A new opcode is a new row.

A row gives the request, the reply and, where the original's reply differs from the specification's, that one too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

from headrace.wire.flymq import cluster, core, groups
from headrace.wire.flymq import messages as m
from headrace.wire.flymq.failure import decode_failure, encode_failure
from headrace.wire.flymq.fetching import SdkLayout, SpecLayout
from headrace.wire.flymq.fields import Field, Reader
from headrace.wire.flymq.framing import frame
from headrace.wire.flymq.opcodes import Dialect, Opcode
from headrace.wire.flymq.produce import encode_metadata, encode_run, read_metadata


@dataclass(frozen=True, slots=True)
class Row:
    """What one opcode means."""

    opcode: Opcode
    message: type
    request: Field[Any]
    reply: Field[Any]
    sdk_reply: Field[Any] | None = None

    def reply_layout(self, dialect: Dialect) -> Field[Any]:
        return self.sdk_reply if self.sdk_reply is not None and dialect is Dialect.SDK else self.reply


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
    Row(Opcode.CLUSTER_METADATA, m.ClusterMetadata, cluster.CLUSTER_METADATA, cluster.CLUSTER_TOPICS),
    Row(Opcode.GET_OFFSET, m.GetOffset, groups.GET_OFFSET, core.OFFSET),
    Row(Opcode.RESET_OFFSET, m.ResetOffset, groups.RESET_OFFSET, core.DONE),
    Row(Opcode.LIST_GROUPS, m.ListGroups, groups.LIST_GROUPS, groups.GROUP_LIST),
    Row(Opcode.DESCRIBE_GROUP, m.DescribeGroup, groups.DESCRIBE_GROUP, groups.GROUP_ENTRY),
    Row(Opcode.GET_LAG, m.GetLag, groups.GET_LAG, groups.LAG),
    Row(Opcode.DELETE_GROUP, m.DeleteGroup, groups.DELETE_GROUP, core.DONE),
    Row(Opcode.SEEK_TO_TIMESTAMP, m.SeekToTimestamp, groups.SEEK_TO_TIMESTAMP, core.OFFSET),
)

BY_OPCODE: Final = {int(row.opcode): row for row in ROWS}
_BY_MESSAGE: Final = {row.message: row for row in ROWS}

SPOKEN: Final = frozenset(BY_OPCODE) | {int(Opcode.PRODUCE)}
"""PRODUCE has no row: its frames are read and written by the run."""


def opcode_of(request: m.Request) -> int:
    return Opcode.PRODUCE if isinstance(request, m.ProduceRun) else _BY_MESSAGE[type(request)].opcode


def encode_request(request: m.Request) -> bytes:
    """The frame of a request, or the frames of a run."""
    if isinstance(request, m.ProduceRun):
        return encode_run(request)
    row = _BY_MESSAGE[type(request)]
    return frame(row.opcode, row.request.write(request))


def encode_reply(opcode: int, reply: m.Reply, dialect: Dialect = Dialect.SPEC) -> bytes:
    """The frame that answers a request of this opcode, or the frames that answer a run."""
    if isinstance(reply, m.RecordMetadataRun):
        return encode_metadata(reply)
    if isinstance(reply, m.Failure):
        return encode_failure(reply, dialect)
    return frame(opcode, BY_OPCODE[opcode].reply_layout(dialect).write(reply))


def decode_reply(reply: m.ReplyFrame, dialect: Dialect = Dialect.SPEC) -> m.Reply:
    """What a reply says. `dialect` is the one its request was answered in. Raises `WireError`, `KeyError` for an opcode never asked."""
    if reply.opcode == Opcode.ERROR:
        return decode_failure(reply.payload)
    reader = Reader(reply.payload)
    if reply.opcode == Opcode.PRODUCE:
        return read_metadata(reader)
    return cast(m.Reply, BY_OPCODE[reply.opcode].reply_layout(dialect).read(reader))
