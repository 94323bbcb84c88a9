"""Subscription of a member of a group: the broker shares the records of the topic among the members.

In an *ordered* group the member receives whole partitions in order, and acknowledging a record settles all earlier ones of its partition.
In a *shared* group each record goes to any member and is acknowledged by itself. The member belongs to the connection: after a lost
connection the subscription joins again, and the broker delivers again what was not settled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol

from headrace.clients.errors import ClientClosed, NotSupported, Refused
from headrace.clients.messages import Gap, Message, MessageBatch, Settlement
from headrace.clients.polling import pause
from headrace.retry import chance
from headrace.wire.flymq import messages as m

_UNKNOWN_MEMBER: Final = "group member not found"
_SHARED_IDLE_SECONDS_MAX: Final = 0.1
"""Average time between two requests of a member of a shared group that receives nothing."""


class MemberCalls(Protocol):
    """The methods of a client that a subscription uses."""

    async def join_group(self, request: m.GroupJoin) -> m.GroupJoined: ...

    async def take_from_group(self, member: int, records_max: int) -> list[m.TakenRecord]: ...

    async def settle_in_group(self, member: int, kind: int, places: list[m.PartitionOffset]) -> list[bool]: ...

    async def leave_group(self, member: int) -> None: ...


class GroupSubscription:
    """Asynchronous iterator over the records that the broker gives to this member. Created by `FlyMqClient.subscribe`."""

    def __init__(
        self,
        calls: MemberCalls,
        request: m.GroupJoin,
        joined: m.GroupJoined,
        *,
        settlement: Settlement,
        records_max: int,
        idle_seconds: Callable[[int], float],
    ) -> None:
        self.topic, self.group = request.topic, request.group
        self.gaps: list[Gap] = []
        """Empty: the broker continues at the first record it has."""
        self._calls, self._request, self._joined = calls, request, joined
        self._settlement, self._records_max, self._idle_seconds = settlement, records_max, idle_seconds
        self._batches: deque[MessageBatch] = deque()
        self._taken = 0
        self._idle_rounds = 0
        """Requests without a record since the last that returned as many as it asked for, or any in an ordered group."""
        self._handed_out: dict[tuple[int, int], int] = {}
        """Delivered, unsettled records: (partition, offset) → the member that received it."""
        self._settled: dict[int, int] = {}
        """Offset of the last settled record of an ordered group, by partition."""
        self._closed = asyncio.Event()

    @property
    def mode(self) -> str:
        return self._joined.mode

    # Settlement.

    async def commit(self) -> None:
        """Settle every record delivered so far. Durable on return."""
        await self._settle(m.ACK, list(self._handed_out))

    async def ack(self, message: Message) -> bool:
        """Settle this record; in an ordered group also all earlier ones of its partition. Durable on return.

        Returns False if the broker has given the record to another member: it is delivered again.
        """
        place = _place(message)
        if self.mode == "shared":
            return (await self._settle(m.ACK, [place]))[0]
        partition, offset = place
        if place not in self._handed_out and offset <= self._settled.get(partition, -1):
            return True
        earlier = [known for known in self._handed_out if known[0] == partition and known < place]
        is_known = (await self._settle(m.ACK, [*earlier, place]))[-1]
        if is_known:
            self._settled[partition] = max(offset, self._settled.get(partition, -1))
        return is_known

    async def nack(self, message: Message) -> bool:
        """Request another delivery of this record."""
        return (await self._settle(m.NACK, [_place(message)]))[0]

    async def _settle(self, kind: int, places: Sequence[tuple[int, int]]) -> list[bool]:
        member = self._joined.member
        mine = [place for place in places if self._handed_out.get(place) == member]
        for place in places:
            self._handed_out.pop(place, None)
        if not mine:
            return [False] * len(places)
        try:
            known = await self._calls.settle_in_group(member, kind, [m.PartitionOffset(*place) for place in mine])
        except Refused as error:
            if not error.text.startswith(_UNKNOWN_MEMBER):
                raise
            return [False] * len(places)
        answers = dict(zip(mine, known, strict=True))
        return [answers.get(place, False) for place in places]

    def seek(self, offset: int, *, partition: int = 0) -> None:
        raise NotSupported("FlyMQ", "moving one member of a group", "seek of the client moves the whole group")

    # Reading.

    async def batches(self) -> AsyncIterator[MessageBatch]:
        """Iterate over the batches as received, which is faster. Do not mix with iterating over single messages."""
        while (batch := await self._next_batch()) is not None:
            self._batches.popleft()
            self._hand_out(batch, range(len(batch)))
            yield batch

    def __aiter__(self) -> GroupSubscription:
        return self

    async def __anext__(self) -> Message:
        batch = await self._next_batch()
        if batch is None:
            raise StopAsyncIteration
        index, self._taken = self._taken, self._taken + 1
        if self._taken == len(batch):
            self._batches.popleft()
            self._taken = 0
        self._hand_out(batch, [index])
        return batch.message(index, self)

    def _hand_out(self, batch: MessageBatch, indexes: Sequence[int]) -> None:
        assert batch.partition is not None, "a batch of a group has a partition"
        self._handed_out.update(((batch.partition, batch.offsets[index]), self._joined.member) for index in indexes)

    async def _next_batch(self) -> MessageBatch | None:
        try:
            while not self._batches and not self._closed.is_set():
                if self._settlement == "auto" and self._handed_out:
                    await self.commit()
                records = await self._take()
                self._batches.extend(_batches(self.topic, records))
                if not records:
                    await pause(self._pause_seconds(), self._closed)
                    self._idle_rounds += 1
                elif self.mode == "ordered" or len(records) == self._records_max:
                    self._idle_rounds = 0
        except ClientClosed:
            self._closed.set()
        return None if self._closed.is_set() else self._batches[0]

    def _pause_seconds(self) -> float:
        """Return the time to the next request. Members of a shared group ask equally often, at random times: otherwise the one that
        received the last record would ask first again and receive all of a slow stream."""
        seconds = self._idle_seconds(self._idle_rounds)
        if self.mode == "ordered":
            return seconds
        return min(seconds, _SHARED_IDLE_SECONDS_MAX) * (0.5 + chance())

    async def _take(self) -> list[m.TakenRecord]:
        try:
            return await self._calls.take_from_group(self._joined.member, self._records_max)
        except Refused as error:
            if not error.text.startswith(_UNKNOWN_MEMBER):
                raise
        self._handed_out.clear()
        self._settled.clear()
        self._joined = await self._calls.join_group(self._request)
        return []

    async def close(self) -> None:
        """Leave the group and end the iteration. Automatic settlement settles every delivered record, including the last."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._batches.clear()
        try:
            if self._settlement == "auto":
                await self.commit()
            await self._calls.leave_group(self._joined.member)
        except Refused as error:
            if not error.text.startswith(_UNKNOWN_MEMBER):
                raise


def _place(message: Message) -> tuple[int, int]:
    assert message.partition is not None and message.offset is not None, "a message of a group has partition and offset"
    return message.partition, message.offset


def _batches(topic: str, records: Sequence[m.TakenRecord]) -> list[MessageBatch]:
    """Return the records in batches of one partition each."""
    batches: list[MessageBatch] = []
    for record in records:
        if not batches or batches[-1].partition != record.partition:
            batches.append(MessageBatch(topic, record.partition, [], [], []))
        batch = batches[-1]
        assert isinstance(batch.offsets, list) and isinstance(batch.keys, list)
        batch.offsets.append(record.offset)
        batch.values.append(record.value)
        batch.keys.append(record.key or None)
    return batches
