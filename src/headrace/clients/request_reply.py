"""Base of clients whose replies arrive in the order of requests: requests are pipelined, subscriptions poll.

A timer probes an idle connection and drops one whose oldest request has waited too long.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar

from headrace.clients.api import Subscription
from headrace.clients.arguments import check_count, check_text, wrong
from headrace.clients.errors import InvalidArgument, NotSupported
from headrace.clients.messages import GroupMode, Message, MessageBatch, Settlement, Start, check_start
from headrace.clients.options import RequestReplyOptions
from headrace.clients.polling import PollingSubscription, Read
from headrace.clients.reconnecting import StreamClient
from headrace.clients.window import Window

_Options = TypeVar("_Options", bound=RequestReplyOptions)


class RequestReplyClient(StreamClient[_Options]):
    """Request-reply client."""

    def __init__(self, host: str, port: int, options: _Options, window: Window[Any]) -> None:
        super().__init__(host, port, options, window)
        self._received_at = 0.0
        self._probing: asyncio.Task[None] | None = None

    @abstractmethod
    async def ping(self) -> None: ...

    @abstractmethod
    async def first_offset(self, topic: str, *, partition: int = 0) -> int: ...

    @abstractmethod
    async def end_offset(self, topic: str, *, partition: int = 0) -> int: ...

    def _note_received(self) -> None:
        self._received_at = self._loop.time()

    def _begin_watch(self) -> None:
        """Start the timer and send a first request: a server with a shared port detects the protocol by it."""
        self._note_received()
        self._probe()
        self._watch()

    def _probe(self) -> None:
        if len(self._window) == 0 and self._probing is None:
            self._probing = self._loop.create_task(self.ping())
            self._probing.add_done_callback(self._probed)

    def _probed(self, task: asyncio.Task[None]) -> None:
        self._probing = None
        if not task.cancelled():
            task.exception()  # an error is a reply too; `_lost` handles a lost connection

    def _watch(self) -> None:
        stream = self._stream
        assert stream is not None, "the timer stops with its connection"
        silent_seconds = self._loop.time() - self._received_at
        if len(self._window) and silent_seconds >= self._options.reply_seconds:
            stream.drop(f"no reply for {silent_seconds:.0f} s")
            return
        if silent_seconds >= self._options.ping_seconds:
            self._probe()
        self._schedule(min(self._options.ping_seconds, self._options.reply_seconds) / 2, self._watch)

    # Reading.

    @abstractmethod
    async def read(self, topic: str, offset: int, *, partition: int = 0, records_max: int | None = None) -> tuple[MessageBatch, int]:
        """Fetch columns and the next offset to read."""

    @abstractmethod
    async def _partitions(self, topic: str) -> Sequence[int]: ...

    async def fetch(
        self, topic: str, offset: Start = "earliest", *, partition: int = 0, group: str | None = None, records_max: int | None = None
    ) -> list[Message]:
        """Return records from `offset`, or from the group's committed offset if that is higher. An empty list means none."""
        begin = await self._next_to_read(topic, partition, offset, group)
        check_count("records_max", records_max)
        batch, _ = await self.read(topic, begin, partition=partition, records_max=records_max)
        return [batch.message(index) for index in range(min(len(batch), records_max or len(batch)))]

    async def subscribe(
        self,
        topic: str,
        start: Start = "latest",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
        mode: GroupMode | None = None,
    ) -> Subscription:
        """Follow a topic or one partition from `"earliest"`, `"latest"` (only new records), an offset or a time.

        A group resumes at its committed offset. `Message.ack` and `Subscription.commit` commit its progress; `settlement="auto"`
        commits a fetched batch when the iteration requests the next one. The group stores offsets and has no members: every subscription
        receives all records.
        """
        if mode is not None:
            raise NotSupported(self.protocol, "members of groups", "flymq:// does, on the same topics")
        return await self._poll(topic, start, partition, group, settlement, lambda at, offset: self.read(topic, offset, partition=at))

    async def _poll(
        self, topic: str, start: Start, partition: int | None, group: str | None, settlement: Settlement, read: Read
    ) -> PollingSubscription:
        check_place(topic, partition, group)
        check_start(start)
        if settlement == "auto" and group is None:
            raise InvalidArgument("automatic settlement needs a group")
        positions = {
            number: await self._start(topic, number, start, group)
            for number in (await self._partitions(topic) if partition is None else [partition])
        }
        return PollingSubscription(
            self, read, topic, positions, group=group, settlement=settlement, idle_seconds=lambda rounds: poll_pause(rounds, self._options)
        )

    async def _start(self, topic: str, partition: int, start: Start, group: str | None) -> int:
        """Return the first offset of a subscription: that of the group, or the start position."""
        known = None if group is None else await self.committed(topic, group=group, partition=partition)
        return await self._place(topic, partition, start) if known is None else known

    async def _place(self, topic: str, partition: int, start: Start) -> int:
        """Return the offset of a start position."""
        if isinstance(start, int):
            return start
        if isinstance(start, datetime):
            return await self.offset_for_time(topic, int(start.timestamp() * 1000), partition=partition)
        if start == "earliest":
            return await self.first_offset(topic, partition=partition)
        return await self.end_offset(topic, partition=partition)

    async def _next_to_read(self, topic: str, partition: int, offset: Start, group: str | None) -> int:
        """Return where a fetch begins: the requested offset, or the group's committed offset if that is higher."""
        check_place(topic, partition, group)
        check_start(offset)
        known = None if group is None else await self.committed(topic, group=group, partition=partition)
        if known is not None and not isinstance(offset, int):
            return known
        return max(await self._place(topic, partition, offset), known or 0)

    async def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        """Move the group to an offset, or to the first record at or after a time (Unix ms), or the end offset if there is none.

        Returns the new offset.
        """
        if (offset is None) == (timestamp is None):
            raise InvalidArgument("seek to an offset or to a timestamp")
        if offset is None:
            assert timestamp is not None
            offset = await self.offset_for_time(topic, timestamp, partition=partition)
        await self.commit(topic, offset, group=group, partition=partition)
        return offset


def check_place(topic: object, partition: object, group: object) -> None:
    check_text("topic", topic)
    check_count("partition", partition)
    if group is not None and not isinstance(group, str):
        wrong("group", "str", group)


def poll_pause(rounds: int, options: RequestReplyOptions) -> float:
    """Return the delay before the next poll of a subscription that has read everything."""
    return min(options.poll_seconds_min * 2.0 ** min(rounds, 32), options.poll_seconds_max)
