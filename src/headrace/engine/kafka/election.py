"""Election of the broker that owns the tables, by the membership of a Kafka group.

All brokers of one prefix join the group `PREFIXheadrace-coordinator` and subscribe to a topic with one partition. Kafka assigns the
partition to one of them: the owner. When its heartbeats stop for the session timeout, Kafka assigns the partition to another broker. The
assignor leaves it where it is when a broker joins. A broker that comes back after its session does not claim it. Each member tells the
group the addresses at which it serves clients, and each assignment carries those of the owner, as text:

    a:9092 flymq=a:9092 rustlog=a:9092 flight=a:8815          the address for clients, then the listeners for other brokers

The election decides who tries; the transactional id decides who may write. The new owner starts a producer with the same id, which gets
a new epoch, and Kafka refuses every later write of the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import errors as kafka_errors
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from headrace.errors import Unavailable

_SESSION_MS: Final = 6_000
"""The shortest that Kafka allows by default. A paused owner is replaced within 10 s."""
_HEARTBEAT_MS: Final = 1_000
_CLAIM: Final = b"owner "
"""Precedes the addresses in the metadata of the member that is the owner."""


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # the library has no types
    def __init__(self, revoked: Callable[[], None], assigned: Callable[[bool], None]) -> None:
        self._revoked, self._assigned = revoked, assigned

    def on_partitions_revoked(self, revoked: Iterable[object]) -> None:
        self._revoked()

    def on_partitions_assigned(self, assigned: Iterable[object]) -> None:
        self._assigned(bool(list(assigned)))


class _Assignor(AbstractPartitionAssignor):  # type: ignore[misc]  # the library has no types
    """Leaves the partition with the member that claims to have it. The library uses the class itself, so each member has its own."""

    name = "headrace-owner"
    version = 0
    election: ClassVar[Election]

    @classmethod
    def assign(cls, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
        claiming = sorted(member for member, metadata in members.items() if metadata.user_data.startswith(_CLAIM))
        owner = (claiming or sorted(members))[0]
        topic, places = members[owner].subscription[0], members[owner].user_data.removeprefix(_CLAIM)
        return {
            member: ConsumerProtocolMemberAssignment(cls.version, [(topic, [0])] if member == owner else [], places) for member in members
        }

    @classmethod
    def metadata(cls, topics: Iterable[str]) -> Any:
        return ConsumerProtocolMemberMetadata(cls.version, list(topics), cls.election.introduction())

    @classmethod
    def on_assignment(cls, assignment: Any) -> None:
        address, _, listeners = (assignment.user_data or b"").decode().partition(" ")
        cls.election.owner_address = address
        cls.election.owner_listeners = dict(word.split("=", 1) for word in listeners.split() if "=" in word)


class Election:
    """Membership of one broker. `decided` is called with whether it is the owner, after every election."""

    def __init__(self, arguments: dict[str, Any], topic: str, group: str, decided: Callable[[bool], None]) -> None:
        self._arguments = {name: value for name, value in arguments.items() if name != "request_timeout_ms"}
        self._topic, self._group, self._decided = topic, group, decided
        self._consumer: Any = None
        self._first: asyncio.Event = asyncio.Event()
        self._is_over = False
        self.is_owner = False
        self.places = ""
        """Where this broker serves clients."""
        self._introduced = ""
        """`places` when this broker last joined."""
        self.owner_address = ""
        self.owner_listeners: Mapping[str, str] = {}

    @property
    def member_id(self) -> str:
        """Name that Kafka gave to this member. No other member has it, now or later."""
        return str(self._consumer._coordinator.member_id)

    async def join(self) -> None:
        """Join the group and wait for the first election. Raises `Unavailable` if Kafka does not answer."""
        assignor = type("Assignor", (_Assignor,), {"election": self})
        self._consumer = AIOKafkaConsumer(
            group_id=self._group,
            session_timeout_ms=_SESSION_MS,
            heartbeat_interval_ms=_HEARTBEAT_MS,
            rebalance_timeout_ms=_SESSION_MS,
            max_poll_interval_ms=24 * 3600 * 1000,  # it reads no records
            enable_auto_commit=False,
            partition_assignment_strategy=(assignor,),
            **self._arguments,
        )
        self._consumer.subscribe([self._topic], listener=_Listener(self._rebalancing, self._assigned))
        try:
            await self._consumer.start()
        except (kafka_errors.KafkaError, OSError) as failure:
            await self.leave()
            raise Unavailable(f"Kafka: cannot join the group {self._group}: {str(failure) or type(failure).__name__}") from None
        await self._first.wait()

    def advertise(self, address: str, listeners: Mapping[str, str]) -> None:
        """Tell the group the addresses of this broker."""
        places = " ".join((address, *(f"{protocol}={place}" for protocol, place in listeners.items())))
        if self._consumer is not None and places != self.places:
            self.places = places
            self._consumer._coordinator.request_rejoin()

    def introduction(self) -> bytes:
        """Return what the other members learn about this one when it joins."""
        self._introduced = self.places
        return _CLAIM + self.places.encode() if self.is_owner else self.places.encode()

    async def leave(self) -> None:
        """Leave the group, so that another broker can take over at once."""
        self._is_over, self.is_owner = True, False
        if self._consumer is not None:
            with contextlib.suppress(kafka_errors.KafkaError, OSError):
                await self._consumer.stop()
            self._consumer = None

    def _rebalancing(self) -> None:
        """The group begins a new generation. A member that Kafka has removed, because it was paused or cut off, has no id any more: another
        broker may own the tables since."""
        if self.is_owner and self._consumer is not None and not self._consumer._coordinator.member_id:
            self._assigned(False)

    def _assigned(self, is_owner: bool) -> None:
        if not self._is_over:
            self.is_owner = is_owner
            self._first.set()
            self._decided(is_owner)
            if self._introduced != self.places and self._consumer is not None:
                self._consumer._coordinator.request_rejoin()  # the library forgets one that was requested while it joined
