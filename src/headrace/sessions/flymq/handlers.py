"""Handlers of all FlyMQ requests except PRODUCE.

FlyMQ identifies a group by its topic: `T:G`. In Headrace a group has one name over all topics. So a FlyMQ group is the set of offsets that
a group has committed on one topic, and it exists from the first commit on that topic.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, Final, TypeAlias

from headrace.broker import Broker, Principal, SettlementPolicy
from headrace.errors import InvalidRequest, TopicExists, UnknownTopic
from headrace.limits import PARTITIONS_PER_TOPIC_MAX
from headrace.sessions.flymq.cluster import ClusterHandlers, Node
from headrace.sessions.flymq.dead_letters import DeadLetterHandlers
from headrace.sessions.flymq.delayed import DelayedHandlers
from headrace.sessions.flymq.errors import UnknownGroup
from headrace.sessions.flymq.extensions import BrokerHandlers
from headrace.sessions.flymq.members import SHARED, MemberHandlers
from headrace.sessions.flymq.reading import ReadHandlers
from headrace.sessions.flymq.schemas import SchemaHandlers
from headrace.sessions.flymq.staging import OFFSET_MAX
from headrace.sessions.flymq.transactions import TransactionHandlers
from headrace.sessions.turns import Turns
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import schema_messages as s
from headrace.wire.flymq.messages import (
    ClusterMetadata,
    Commit,
    Consume,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    DescribeGroup,
    Done,
    Fetch,
    GetLag,
    GetOffset,
    GroupEntry,
    GroupJoin,
    GroupLeave,
    GroupList,
    GroupSettle,
    GroupTake,
    LagReply,
    ListGroups,
    ListTopics,
    Metadata,
    OffsetReply,
    PartitionBounds,
    PartitionOffset,
    Reply,
    ResetOffset,
    SeekToTimestamp,
    Subscribe,
    TopicList,
    TopicMetadata,
)

_LEADER: Final = 0
"""Number of the only node in METADATA."""
_GROUPS_A_TURN: Final = 256
"""Groups handled in one turn of the loop: there may be tens of thousands."""
_FIRST: Final = frozenset({"earliest", "beginning"})
_END: Final = frozenset({"latest", "end", ""})
_COMMITTED: Final = frozenset({"commit", "committed"})


Handler: TypeAlias = Callable[[Any], Awaitable[Reply]]


class _Current:
    """The principal of a connection, which a login changes."""

    __slots__ = ("who",)

    def __init__(self, who: Principal) -> None:
        self.who = who


class Handlers:
    """Requests of one principal. Reads and publishes leave nothing that refers back to the session or to this object, so both are freed
    when the connection ends: a garbage collection of a hundred sessions would stop the event loop for milliseconds."""

    def __init__(
        self,
        broker: Broker,
        who: Principal,
        node: Node,
        turns: Turns,
        is_over: Callable[[], bool] = lambda: False,
        address: str = "",
        shared: SettlementPolicy = SHARED,
    ) -> None:
        """`is_over` tells whether the peer no longer waits for replies. `address` is that of the peer. `shared` is for members of shared
        groups."""
        self._broker, self._node = broker, node
        self._current = current = _Current(who)

        def find_who() -> Principal:
            return current.who

        self._find_who = find_who
        self.transactions = TransactionHandlers(broker, find_who)
        self.members = MemberHandlers(broker, find_who, address, shared)
        self.reading = ReadHandlers(broker, find_who, turns, is_over)

    @property
    def who(self) -> Principal:
        return self._current.who

    @who.setter
    def who(self, who: Principal) -> None:
        self._current.who = who

    def find(self, request: type) -> Handler | None:
        """Return the handler of a type of requests."""
        if issubclass(request, Fetch):
            return self.reading.fetch
        if issubclass(request, Consume):
            return self.reading.consume
        return self._others.get(request)

    @cached_property
    def _others(self) -> dict[type, Handler]:
        """Handlers of requests other than reads. Most connections need none: they publish or read."""
        members = self.members
        return {
            CreateTopic: self._create_topic,
            Metadata: self._metadata,
            Subscribe: self._subscribe,
            Commit: self.transactions.commit_offset,
            ListTopics: self._list_topics,
            DeleteTopic: self._delete_topic,
            GetOffset: self._get_offset,
            ResetOffset: self._reset_offset,
            ListGroups: self._list_groups,
            DescribeGroup: self._describe_group,
            GetLag: self._get_lag,
            DeleteGroup: self._delete_group,
            SeekToTimestamp: self._seek_to_timestamp,
            GroupJoin: members.join,
            GroupTake: members.take,
            GroupSettle: members.settle,
            GroupLeave: members.leave,
            **self._advanced(),
        }

    def _advanced(self) -> dict[type, Handler]:
        broker, who, node = self._broker, self._find_who, self._node
        dead_letters, delayed = DeadLetterHandlers(broker, who), DelayedHandlers(broker, who)
        cluster, schemas = ClusterHandlers(broker, who, node), SchemaHandlers(broker, who)
        return {
            s.RegisterSchema: schemas.register,
            s.GetSchema: schemas.get,
            s.ListSchemas: schemas.list,
            s.ValidateSchema: schemas.validate,
            s.ProduceWithSchema: schemas.produce,
            s.DeleteSchema: schemas.delete,
            v.FetchDlq: dead_letters.fetch,
            v.ReplayDlq: dead_letters.replay,
            v.PurgeDlq: dead_letters.purge,
            v.CancelDelayed: delayed.cancel,
            v.TxnRollback: self.transactions.rollback,
            v.ClusterJoin: cluster.join,
            v.ClusterLeave: cluster.leave,
            v.ClusterStatus: cluster.status,
            ClusterMetadata: cluster.metadata,
            v.BrokerCall: BrokerHandlers(broker, who, node.report).call,
        }

    def abandon(self) -> None:
        """Abort the transactions and leave the groups: the connection has ended or another user has logged in."""
        self.transactions.abort_all()
        self.members.leave_all()

    def end(self) -> None:
        """Do the same at the end of the connection, and release its session."""
        self.abandon()
        self.reading.end()

    # Topics.

    async def _create_topic(self, request: CreateTopic) -> Reply:
        partitions = request.partitions or 1
        if not 1 <= partitions <= PARTITIONS_PER_TOPIC_MAX:
            raise InvalidRequest(f"{partitions} partitions: expected 1 to {PARTITIONS_PER_TOPIC_MAX}")
        try:
            await self._broker.create_topic(self.who, request.topic, partitions=partitions)
        except TopicExists:
            return Done(True, "topic already exists")
        return Done(True, "topic created")

    async def _delete_topic(self, request: DeleteTopic) -> Reply:
        try:
            await self._broker.delete_topic(self.who, request.topic)
        except UnknownTopic:
            return Done(True, "topic does not exist")
        return Done(True, "topic deleted")

    async def _list_topics(self, request: ListTopics) -> Reply:
        slices = await self._broker.listed(self.who, lambda topics: [topic.name for topic in topics])
        return TopicList([name for names in slices for name in names])

    async def _metadata(self, request: Metadata) -> Reply:
        topic = self._broker.topic(self.who, request.topic)
        bounds = [self._broker.bounds(self.who, topic.name, partition) for partition in range(topic.partitions)]
        return TopicMetadata(topic.name, [PartitionBounds(index, _LEADER, held.first, held.end) for index, held in enumerate(bounds)])

    # Groups.

    async def _subscribe(self, request: Subscribe) -> Reply:
        offset = self._named_place(request.topic, request.partition, request.mode.word)
        if offset is None and request.mode.word in _COMMITTED:
            offset = self._broker.committed(self.who, request.group, request.topic, request.partition)
            if offset is None:
                offset = self._broker.bounds(self.who, request.topic, request.partition).first
        if offset is None:
            raise InvalidRequest(f"unknown subscribe mode: {request.mode.word}")
        return OffsetReply(offset)

    def _named_place(self, topic: str, partition: int, mode: str) -> int | None:
        """Return the offset of a mode. Reads the bounds in every mode, so that an unknown topic is an error."""
        bounds = self._broker.bounds(self.who, topic, partition)
        if mode in _FIRST:
            return bounds.first
        return bounds.end if mode in _END else None

    async def _move(self, group: str, topic: str, partition: int, offset: int) -> None:
        self._check_place(partition, offset)
        await self._broker.commit(self.who, group, {(topic, partition): offset})

    def _check_place(self, partition: int, offset: int) -> None:
        if not 0 <= offset <= OFFSET_MAX:
            raise InvalidRequest(f"offset {offset} out of range")
        if partition < 0:
            raise InvalidRequest(f"partition {partition} not found")

    async def _get_offset(self, request: GetOffset) -> Reply:
        for entry in self._entries(request.group):
            if entry.topic == request.topic:
                return OffsetReply(next((at.offset for at in entry.offsets if at.partition == request.partition), 0))
        raise UnknownGroup(request.topic, request.group)

    async def _reset_offset(self, request: ResetOffset) -> Reply:
        offset = self._named_place(request.topic, request.partition, request.mode.word or "?")
        if request.mode.word == "offset":
            offset = request.target
        elif request.mode.word == "timestamp":
            offset = await self._broker.offset_for_time(self.who, request.topic, request.partition, request.target)
        if offset is None:
            raise InvalidRequest(f"unknown reset mode: {request.mode.word}")
        self._check_place(request.partition, offset)
        await self._broker.reset_group(self.who, request.group, {(request.topic, request.partition): offset})
        return Done(True, f"offset reset to {offset}")

    async def _seek_to_timestamp(self, request: SeekToTimestamp) -> Reply:
        offset = await self._broker.offset_for_time(self.who, request.topic, request.partition, request.timestamp)
        if request.group:
            await self._move(request.group, request.topic, request.partition, offset)
        return OffsetReply(offset)

    async def _get_lag(self, request: GetLag) -> Reply:
        end = self._broker.bounds(self.who, request.topic, request.partition).end
        committed = self._broker.committed(self.who, request.group, request.topic, request.partition)
        if committed is None:
            committed = self._broker.bounds(self.who, request.topic, request.partition).first
        return LagReply(committed, committed, end, max(0, end - committed))

    async def _list_groups(self, request: ListGroups) -> Reply:
        entries: list[GroupEntry] = []
        for number, group in enumerate(self._broker.groups(self.who)):
            entries += self._entries(group)
            if number % _GROUPS_A_TURN == 0:
                await asyncio.sleep(0)
        return GroupList(sorted(entries, key=lambda entry: (entry.topic, entry.group)))

    async def _describe_group(self, request: DescribeGroup) -> Reply:
        return self._entry(request)

    async def _delete_group(self, request: DeleteGroup) -> Reply:
        entry = self._entry(request)
        await self._broker.delete_group(self.who, entry.group, topic=entry.topic)
        return Done(True, "group deleted")

    def _entry(self, request: DescribeGroup) -> GroupEntry:
        """Return what the group has committed on the topic; without a topic, on its first one."""
        for entry in self._entries(request.group):
            if request.topic in ("", entry.topic):
                return entry
        raise UnknownGroup(request.topic, request.group)

    def _entries(self, group: str) -> list[GroupEntry]:
        """Return one entry for each topic that the group has committed on, by name."""
        by_topic: dict[str, list[PartitionOffset]] = {}
        for lag in self._broker.lag(self.who, group):
            if lag.committed is not None:
                by_topic.setdefault(lag.topic, []).append(PartitionOffset(lag.partition, lag.committed))
        members = Counter(member.topic for member in self._broker.members(self.who, group))
        return [GroupEntry(topic, group, members[topic], offsets) for topic, offsets in by_topic.items()]
