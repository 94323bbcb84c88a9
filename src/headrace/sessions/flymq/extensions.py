"""Operations of BROKER, an opcode that only Headrace has. Arguments and results are JSON.

| operation | arguments | result |
|---|---|---|
| topic.list | | topics |
| topic.counters | | size and traffic of each topic: see `headrace.overview.TopicCounters` |
| topic.describe | topic | topic |
| topic.create | topic, partitions, config | topic |
| topic.alter | topic, partitions, config | topic |
| topic.delete | topic | {} |
| group.list | | [group] |
| group.lag | group | [{topic, partition, committed, end, lag, moved_at}]; committed is null without a commit |
| group.members | group | [{topic, protocol, user, address, mode, partitions, unsettled, credit, is_stalled}] |
| group.reset | group, topic, offsets {partition: offset}, force | {} |
| group.delete | group, force | {} |
| dlq.list | | [{topic, waiting}] |
| dlq.replay | topic, ids | {id: [partition, offset]} |
| dlq.discard | topic, ids | {} |
| delayed.list | topic, limit | [{id, topic, due, owner, key, size}], earliest first, 1,000 by default; null: hidden |
| writer.list | | [{writer, version, at, epoch, is_publishing}] |
| writer.forget | writer | {} |
| stage.list | | [{handle, writer, records, size_bytes, by_topic, age_ms, is_sealed}] |
| stage.drop | handles | {dropped} |
| schema.… | | see `schemas.py` |
| record.… | | see `records.py` |
| status | | see `headrace.overview.Overview` |

A topic is {name, partitions: [{first, end}], config}. Settings that `config` does not name keep their value, or their default.
Unlike CREATE_TOPIC and DELETE_TOPIC, topic.create fails for a name that exists and topic.delete for one that does not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from headrace.broker import Ack, Broker, Cleanup, Principal, Topic, TopicConfig
from headrace.broker.overview import Report, overview, topic_counters
from headrace.errors import InvalidRequest
from headrace.limits import DELAYED_LIST_MAX
from headrace.sessions.flymq.errors import UnknownGroup
from headrace.sessions.flymq.records import RecordCalls
from headrace.sessions.flymq.schemas import SchemaCalls
from headrace.wire.flymq.advanced_messages import BrokerCall, BrokerReply
from headrace.wire.flymq.messages import Reply


class _Arguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of all operations. Each operation uses some of them."""


class _Nothing(_Arguments):
    pass


class _Named(_Arguments):
    topic: str


class _Filtered(_Arguments):
    topic: str | None = None


class _Next(_Filtered):
    limit: Annotated[int, msgspec.Meta(ge=1, le=DELAYED_LIST_MAX)] = 1_000


class _Config(_Arguments, omit_defaults=True):
    ack: Ack | msgspec.UnsetType = msgspec.UNSET
    cleanup: Cleanup | msgspec.UnsetType = msgspec.UNSET
    retention_ms: int | msgspec.UnsetType = msgspec.UNSET
    retention_bytes: int | msgspec.UnsetType = msgspec.UNSET
    segment_bytes: int | msgspec.UnsetType = msgspec.UNSET
    tombstone_retention_ms: int | msgspec.UnsetType = msgspec.UNSET
    ttl_ms: int | msgspec.UnsetType = msgspec.UNSET
    dead_letter_expired: bool | msgspec.UnsetType = msgspec.UNSET
    compress: bool | msgspec.UnsetType = msgspec.UNSET
    encrypt: bool | msgspec.UnsetType | None = msgspec.UNSET

    def over(self, base: TopicConfig) -> TopicConfig:
        """Return the settings named here, with the rest from `base`."""
        return replace(base, **{name: value for name, value in msgspec.structs.asdict(self).items() if value is not msgspec.UNSET})


class _Shaped(_Arguments):
    topic: str
    partitions: int | None = None
    config: _Config = msgspec.field(default_factory=_Config)


class _Grouped(_Arguments):
    group: str


class _Forced(_Grouped):
    force: bool = False


class _Reset(_Forced, kw_only=True):
    topic: str
    offsets: dict[int, int]


class _Replayed(_Arguments):
    topic: str
    ids: list[str]


class _Writer(_Arguments):
    writer: str


class _Handles(_Arguments):
    handles: list[str]


_Operation = Callable[[Any], Awaitable[object]]
"""Returns the result, or its JSON as bytes."""


class BrokerHandlers:
    """Operations by name. `who` returns the current principal."""

    def __init__(self, broker: Broker, who: Callable[[], Principal], report: Report = dict) -> None:
        """`report` returns the facts of the server process."""
        self._broker = broker
        self._who = who
        self._report = report
        self.operations: dict[str, tuple[type[Any], _Operation]] = {
            "topic.list": (_Nothing, self._list_topics),
            "topic.counters": (_Nothing, self._topic_counters),
            "topic.describe": (_Named, self._describe_topic),
            "topic.create": (_Shaped, self._create_topic),
            "topic.alter": (_Shaped, self._alter_topic),
            "topic.delete": (_Named, self._delete_topic),
            "group.list": (_Nothing, self._list_groups),
            "group.lag": (_Grouped, self._lag),
            "group.members": (_Grouped, self._members),
            "group.reset": (_Reset, self._reset_group),
            "group.delete": (_Forced, self._delete_group),
            "dlq.list": (_Nothing, self._list_dead_letters),
            "dlq.replay": (_Replayed, self._replay),
            "dlq.discard": (_Replayed, self._discard),
            "delayed.list": (_Next, self._list_delayed),
            "writer.list": (_Nothing, self._list_writers),
            "writer.forget": (_Writer, self._forget_writer),
            "stage.list": (_Nothing, self._list_stages),
            "stage.drop": (_Handles, self._drop_stages),
            "status": (_Nothing, self._status),
            **SchemaCalls(broker, who).operations,
            **RecordCalls(broker, who).operations,
        }

    async def call(self, request: BrokerCall) -> Reply:
        found = self.operations.get(request.operation)
        if found is None:
            raise InvalidRequest(f"unknown operation {request.operation[:40]!r}")
        arguments_type, operation = found
        try:
            arguments = msgspec.json.decode(request.body or b"{}", type=arguments_type)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"{request.operation}: {error}") from None
        result = await operation(arguments)
        return BrokerReply(result if isinstance(result, bytes) else msgspec.json.encode(result))

    async def _list_topics(self, arguments: _Nothing) -> object:
        # Encoded slice by slice too, and copied once: the reply for 10,000 topics has 3 MB.
        slices = await self._broker.listed(self._who(), lambda topics: msgspec.json.encode([self._shown(one) for one in topics])[1:-1])
        parts = [part for encoded in slices for part in (b",", encoded)]
        return b"".join((b"[", *parts[1:], b"]"))

    async def _describe_topic(self, arguments: _Named) -> object:
        return self._shown(self._broker.topic(self._who(), arguments.topic))

    async def _create_topic(self, arguments: _Shaped) -> object:
        config = arguments.config.over(self._broker.topic_defaults)
        partitions = 1 if arguments.partitions is None else arguments.partitions
        return self._shown(await self._broker.create_topic(self._who(), arguments.topic, partitions=partitions, config=config))

    async def _alter_topic(self, arguments: _Shaped) -> object:
        config = arguments.config.over(self._broker.topic(self._who(), arguments.topic).config)
        return self._shown(await self._broker.alter_topic(self._who(), arguments.topic, partitions=arguments.partitions, config=config))

    async def _delete_topic(self, arguments: _Named) -> object:
        await self._broker.delete_topic(self._who(), arguments.topic)
        return {}

    def _shown(self, topic: Topic) -> object:
        bounds = [self._broker.bounds(self._who(), topic.name, partition) for partition in range(topic.partitions)]
        return {
            "name": topic.name,
            "partitions": [{"first": held.first, "end": held.end} for held in bounds],
            "config": topic.config,
        }

    async def _list_groups(self, arguments: _Nothing) -> object:
        return self._broker.groups(self._who())

    async def _lag(self, arguments: _Grouped) -> object:
        lags = self._broker.lag(self._who(), arguments.group)
        if not lags:
            raise UnknownGroup("", arguments.group)
        return lags

    async def _members(self, arguments: _Grouped) -> object:
        return self._broker.members(self._who(), arguments.group)

    async def _reset_group(self, arguments: _Reset) -> object:
        offsets = {(arguments.topic, partition): offset for partition, offset in arguments.offsets.items()}
        await self._broker.reset_group(self._who(), arguments.group, offsets, force=arguments.force)
        return {}

    async def _delete_group(self, arguments: _Forced) -> object:
        if arguments.group not in self._broker.groups(self._who()):
            raise UnknownGroup("", arguments.group)
        await self._broker.delete_group(self._who(), arguments.group, force=arguments.force)
        return {}

    async def _list_dead_letters(self, arguments: _Nothing) -> object:
        return [{"topic": topic, "waiting": count} for topic, count in self._broker.dead_letter_counts(self._who()).items()]

    async def _replay(self, arguments: _Replayed) -> object:
        return (await self._broker.replay(self._who(), arguments.topic, arguments.ids)).placements

    async def _discard(self, arguments: _Replayed) -> object:
        await self._broker.discard_dead_letters(self._who(), arguments.topic, arguments.ids)
        return {}

    async def _list_delayed(self, arguments: _Next) -> object:
        return [
            {
                "id": one.id,
                "topic": one.topic,
                "due": one.due,
                "owner": one.owner,
                "key": None if one.key is None else one.key.decode(errors="replace"),
                "size": one.size_bytes,
            }
            for one in self._broker.delayed(self._who(), arguments.topic, count_max=arguments.limit)
        ]

    async def _list_writers(self, arguments: _Nothing) -> object:
        return self._broker.writers(self._who())

    async def _forget_writer(self, arguments: _Writer) -> object:
        await self._broker.forget_writer(self._who(), arguments.writer)
        return {}

    async def _list_stages(self, arguments: _Nothing) -> object:
        return self._broker.stages(self._who())

    async def _drop_stages(self, arguments: _Handles) -> object:
        return {"dropped": await self._broker.drop_staged(self._who(), arguments.handles)}

    async def _status(self, arguments: _Nothing) -> object:
        return await overview(self._broker, self._who(), self._report())

    async def _topic_counters(self, arguments: _Nothing) -> object:
        return await topic_counters(self._broker, self._who())
