"""Broker operations of groups: committed offsets, members and lag."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from headrace.broker.authorizer import Action, Authorizer, Principal
from headrace.broker.coordinated import Coordinated
from headrace.broker.groups.members import GroupConsumers, Member, MemberEntry, SettlementPolicy, Start
from headrace.broker.groups.membership import Identity, Mode
from headrace.broker.groups.offsets import GroupLag, Groups
from headrace.broker.meters import Meters
from headrace.broker.publishing.publish import Publisher
from headrace.broker.tables import Staged
from headrace.broker.topics import Topics
from headrace.errors import InvalidRequest


class GroupOperations(Coordinated):
    """Part of `Broker`: each method checks the permission."""

    _authorizer: Authorizer
    _topics: Topics
    _publisher: Publisher
    _groups: Groups
    _consumers: GroupConsumers
    meters: Meters

    def _check_sees(self, who: Principal, topic: str) -> None:
        raise NotImplementedError

    async def commit(self, who: Principal, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commit the next offset to read, by (topic, partition). Durable when it returns. An offset may decrease. Members of
        the group continue there."""
        if offsets:
            await asyncio.shield(self.stage_commit(who, group, offsets))
        else:
            self._check_commit(who, group, offsets)

    def stage_commit(self, who: Principal, group: str, offsets: Mapping[tuple[str, int], int]) -> Staged:
        """Commit as `commit` does, without waiting: what is published or committed after this call follows it in the log. Raises at once
        what is known at once."""
        self._check_commit(who, group, offsets)
        self._publisher.gathering.send()
        return self._groups.change(self._groups.commits(group, offsets))

    def committed(self, who: Principal, group: str, topic: str, partition: int) -> int | None:
        """Return the committed offset; None if there is none."""
        self.check_coordinator()
        self._authorizer.check(who, Action.DESCRIBE, "group", group)
        self._check_sees(who, topic)
        self._topics.find_partition(topic, partition)
        return self._groups.committed(group, topic, partition)

    def lag(self, who: Principal, group: str) -> list[GroupLag]:
        """Return one entry per partition of the topics that the group reads, for the topics that this principal may see."""
        self._authorizer.check(who, Action.DESCRIBE, "group", group)
        lags = self._groups.lag(group, self._consumers.topics(group))
        return [lag for lag in lags if self._authorizer.allows_topic(who, lag.topic)]

    def members(self, who: Principal, group: str) -> list[MemberEntry]:
        """Return the members of a group, for the topics that this principal may see."""
        self.check_coordinator()
        self._authorizer.check(who, Action.DESCRIBE, "group", group)
        return [member for member in self._consumers.members(group) if self._authorizer.allows_topic(who, member.topic)]

    def groups(self, who: Principal) -> list[str]:
        """Return the groups with committed offsets that this principal may see, by name."""
        return [group for group in self._groups.names() if self._authorizer.allows(who, Action.DESCRIBE, "group", group)]

    async def delete_group(self, who: Principal, group: str, *, topic: str | None = None, force: bool = False) -> None:
        """Forget the group's offsets in one topic or (None) in all. Raises `GroupHasMembers`; `force` ends its members instead."""
        self.check_coordinator()
        self._authorizer.check(who, Action.DELETE, "group", group)
        if not force:
            self._consumers.check_idle(group, topic)
        self._consumers.expel(group, topic, InvalidRequest(f"group {group!r} was deleted"))
        await self._groups.delete(group, topic)

    async def reset_group(self, who: Principal, group: str, offsets: Mapping[tuple[str, int], int], *, force: bool = False) -> None:
        """Commit offsets as `commit` does, unless the group has members in one of the topics: raises `GroupHasMembers`. With `force` the
        members continue at the new offsets."""
        self._check_commit(who, group, offsets)
        if not force:
            for topic in {topic for topic, _ in offsets}:
                self._consumers.check_idle(group, topic)
        await self._groups.put(self._groups.commits(group, offsets))

    def join(
        self,
        who: Principal,
        group: str,
        topic: str,
        *,
        policy: SettlementPolicy,
        mode: Mode | None = None,
        default_mode: Mode = "ordered",
        partitions: Sequence[int] | None = None,
        start: Start = "latest",
        address: str = "",
    ) -> Member:
        """Join a group as a member that takes records of a topic. A group begins at its committed offset if there is one, else at `start`.

        Without a `mode` the member takes that of the group or, if it is the first one, `default_mode`."""
        self.check_coordinator()
        self._check_takes(who, group, topic)
        self._publisher.check_open()
        member = self._consumers.join(
            Identity(who.protocol, who.name, address or who.address),
            group,
            topic,
            self._topics.find(topic).partitions,
            policy,
            mode=mode,
            default_mode=default_mode,
            partitions=partitions,
            start=start,
        )
        member.tracer = self._publisher.tracer
        member.meter = self.meters.meter(topic, who.protocol)
        member.guard(who, partial(self._check_takes, group=group, topic=topic))
        return member

    def _check_takes(self, who: Principal, group: str, topic: str) -> None:
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._authorizer.check(who, Action.COMMIT, "group", group)

    def _check_commit(self, who: Principal, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        self.check_coordinator()
        self._authorizer.check(who, Action.COMMIT, "group", group)
        for topic, partition in offsets:
            self._authorizer.check(who, Action.READ, "topic", topic)
            self._topics.find_partition(topic, partition)
