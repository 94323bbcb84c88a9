"""Members of groups: GROUP_JOIN, GROUP_TAKE, GROUP_SETTLE and GROUP_LEAVE.

A member belongs to its connection: it leaves its group when the connection ends. The reply to a GROUP_SETTLE is sent when the progress of
the group is durable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.broker import Broker, Member, Mode, Principal, SettlementPolicy
from headrace.broker.groups.members import Start
from headrace.errors import BrokerError, InvalidRequest, LimitExceeded
from headrace.limits import FLYMQ_FETCH_BYTES_MAX, FLYMQ_PAYLOAD_BYTES_MAX, SUBSCRIPTIONS_PER_CONNECTION_MAX
from headrace.sessions.flymq.reading import MessageTooLarge
from headrace.wire.flymq.messages import (
    ACK,
    ACK_UP_TO,
    NACK,
    Done,
    GroupJoin,
    GroupJoined,
    GroupLeave,
    GroupSettle,
    GroupSettled,
    GroupTake,
    GroupTaken,
    Reply,
    TakenRecord,
)

RECORDS_MAX: Final = 10_000
"""Most records of one reply."""
WAIT_MS_MAX: Final = 1_000
"""Longest wait of a GROUP_TAKE. Later requests of the connection wait as well."""
_RECORD_OVERHEAD_BYTES: Final = 32
_ORDERED: Final = SettlementPolicy(ack_timeout_ms=300_000, attempts_max=0, dead_letters=False)
SHARED: Final = SettlementPolicy()
"""Settlement in a shared group, by default."""
_STARTS: Final[dict[str, Start]] = {"earliest": "earliest", "latest": "latest"}
_MODES: Final[dict[str, Mode | None]] = {"": None, "ordered": "ordered", "shared": "shared"}


class UnknownMember(BrokerError):
    """The member is not one of this connection: it has left, or joined on an earlier connection."""

    code = "unknown_member"

    def __init__(self, member: int) -> None:
        super().__init__(f"group member not found: {member}; join again")


class MemberHandlers:
    """Members of one connection. `who` returns the current principal, `shared` is the policy in a shared group."""

    def __init__(self, broker: Broker, who: Callable[[], Principal], address: str, shared: SettlementPolicy) -> None:
        self._broker, self._who, self._address, self._shared = broker, who, address, shared
        self._members: dict[int, Member] = {}

    async def join(self, request: GroupJoin) -> Reply:
        if len(self._members) >= SUBSCRIPTIONS_PER_CONNECTION_MAX:
            raise LimitExceeded(f"{SUBSCRIPTIONS_PER_CONNECTION_MAX} members on one connection: the limit is reached")
        if request.mode not in _MODES:
            raise InvalidRequest(f"unknown group mode: {request.mode}; expected ordered or shared")
        mode = _MODES[request.mode]
        member = self._broker.join(
            self._who(),
            request.group,
            request.topic,
            policy=self._shared if mode == "shared" else _ORDERED,
            mode=mode,
            partitions=None if request.partition < 0 else [request.partition],
            start=await self._start(request),
            address=self._address,
        )
        self._members[member.id] = member
        return GroupJoined(member.id, member.mode)

    async def _start(self, request: GroupJoin) -> Start:
        if request.start in _STARTS:
            return _STARTS[request.start]
        if request.start == "offset":
            return request.target
        if request.start != "timestamp":
            raise InvalidRequest(f"unknown start: {request.start}; expected earliest, latest, offset or timestamp")
        partitions = range(self._broker.topic(self._who(), request.topic).partitions)
        return {
            partition: await self._broker.offset_for_time(self._who(), request.topic, partition, request.target) for partition in partitions
        }

    async def take(self, request: GroupTake) -> Reply:
        member = self._find(request.member)
        if request.records_max < 1:
            raise InvalidRequest(f"{request.records_max} records: expected at least 1")
        count = min(request.records_max, RECORDS_MAX)
        bytes_max = FLYMQ_FETCH_BYTES_MAX - _RECORD_OVERHEAD_BYTES * min(count, member.credit)
        taken = await member.take(count, bytes_max, wait_ms=min(request.wait_ms, WAIT_MS_MAX))
        if len(taken) == 1:
            size_bytes = len(taken[0].key or b"") + len(taken[0].value or b"")
            if size_bytes + 2 * _RECORD_OVERHEAD_BYTES > FLYMQ_PAYLOAD_BYTES_MAX:
                member.nack([taken[0].id])
                raise MessageTooLarge(taken[0].offset, size_bytes)
        return GroupTaken(
            [TakenRecord(one.partition, one.offset, one.attempt, one.timestamp, one.key or b"", one.value or b"") for one in taken]
        )

    async def settle(self, request: GroupSettle) -> Reply:
        member = self._find(request.member)
        ids = member.ids_at([(at.partition, at.offset) for at in request.places])
        if request.kind == ACK:
            known = member.ack(ids)
        elif request.kind == NACK:
            known = member.nack(ids)
        elif request.kind == ACK_UP_TO:
            known = [id > 0 for id in ids]
            for at in request.places:
                member.ack_below(at.partition, at.offset + 1)
        else:
            raise InvalidRequest(f"unknown kind of settlement: {request.kind}")
        await member.flush()
        return GroupSettled(known)

    async def leave(self, request: GroupLeave) -> Reply:
        member = self._find(request.member)
        del self._members[request.member]
        await member.close()
        return Done(True, "left the group")

    def leave_all(self) -> None:
        """Leave all groups: the connection has ended or another user has logged in."""
        members, self._members = self._members, {}
        for member in members.values():
            member.close()

    def _find(self, id: int) -> Member:
        member = self._members.get(id)
        if member is None:
            raise UnknownMember(id)
        return member
