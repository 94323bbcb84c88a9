"""What every client can be asked, whatever protocol it speaks.

`headrace.connect` returns a `Client`. A verb that a protocol does not have raises `NotSupported`, which says what to use instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from headrace.clients.messages import Gap, Key, Message, MessageBatch, Receipt, Settlement, Start
from headrace.records import Headers


class Subscription(Protocol):
    """A topic that is followed: an asynchronous iterator of messages that ends when it or its client is closed."""

    topic: str
    gaps: list[Gap]
    """Where it went on elsewhere than it asked, if the protocol tells."""

    def __aiter__(self) -> AsyncIterator[Message]: ...

    async def __anext__(self) -> Message: ...

    def batches(self) -> AsyncIterator[MessageBatch]:
        """The same in columns, as they come: the fast way. Do not mix with iterating over single messages."""

    async def commit(self) -> None:
        """Everything that was given out is dealt with. Raises `NothingToSettle` if nobody keeps account of it."""

    def seek(self, offset: int, *, partition: int = 0) -> None:
        """Go on from another offset. Its group, if any, stays where it is until the next commit."""

    async def close(self) -> None:
        """End the iteration. With automatic settlement everything that was given out counts as dealt with."""


class Client(Protocol):
    """One connection that is sought again when it is lost. For one event loop.

    What has no answer when a connection is lost is sent again on the next one: delivery is at least once.
    """

    @property
    def is_connected(self) -> bool: ...

    @property
    def unacknowledged(self) -> int:
        """Records published and not acknowledged."""

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> Receipt:
        """Returns when the broker has acknowledged the record, with its place where the protocol tells it."""

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None
    ) -> asyncio.Future[list[Receipt]]:
        """Publish values that leave together, and do not wait for the acknowledgement, only for room in the window."""

    async def publish_many(
        self, topic: str, values: Iterable[bytes] | AsyncIterable[bytes], *, key: Key = None, partition: int | None = None
    ) -> int:
        """Publish all values, as fast as the window allows; returns how many, when the last is acknowledged."""

    async def flush(self) -> None:
        """Returns when everything asked so far is answered."""

    async def fetch(
        self, topic: str, offset: Start = "start", *, partition: int = 0, group: str | None = None, records_max: int | None = None
    ) -> list[Message]:
        """Records from a place on, or from the group's committed offset if that is behind it; an empty list when there are none."""

    async def subscribe(
        self,
        topic: str,
        start: Start = "end",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
    ) -> Subscription:
        """Follow a topic, or one partition of it. A group goes on from where it has committed, and starts at `start` if nowhere."""

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """The group will read on at `offset`. Durable when it returns."""

    async def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        """Where the group will read on; None if it has never committed there."""

    async def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        """Move a group to an offset or to a time (Unix ms); returns the offset."""

    async def offset_for_time(self, topic: str, timestamp: int, *, partition: int = 0) -> int:
        """The first record at or after a time (Unix ms); the end if there is none."""

    async def create_topic(self, topic: str, *, partitions: int = 1) -> None: ...

    async def delete_topic(self, topic: str) -> None: ...

    async def topics(self) -> list[str]: ...

    async def ping(self) -> None:
        """Returns when the server has answered."""

    async def close(self, timeout: float = 10.0) -> None:
        """Wait for the outstanding acknowledgements, then close.

        Raises `OutcomeUnknown` if some did not come in time, and `NotSent` if records never left.
        """

    def abandon(self) -> tuple[int, int]:
        """Close at once. Returns how many records were sent without an answer, and how many were never sent."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None: ...
