"""The interface of all clients, independent of the protocol.

`headrace.connect` returns a `Client`. A method that a protocol does not have raises `NotSupported`, which names an alternative.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from headrace.clients.messages import DelayedReceipt, Gap, GroupMode, Key, Message, MessageBatch, Receipt, Settlement, Start, Transaction
from headrace.records import Headers


class Subscription(Protocol):
    """Asynchronous iterator over the messages of a topic. Ends when it or its client is closed."""

    topic: str
    gaps: list[Gap]
    """Offsets where reading resumed elsewhere than requested, if the protocol reports them."""

    def __aiter__(self) -> AsyncIterator[Message]: ...

    async def __anext__(self) -> Message: ...

    def batches(self) -> AsyncIterator[MessageBatch]:
        """Iterate over batches of columns, which is faster. Do not mix with iterating over single messages."""

    async def commit(self) -> None:
        """Settle every message delivered so far. Raises `NothingToSettle` without a group."""

    def seek(self, offset: int, *, partition: int = 0) -> None:
        """Continue at another offset. The committed offset of the group changes with the next commit."""

    async def close(self) -> None:
        """End the iteration. Automatic settlement settles every message delivered so far."""


class Client(Protocol):
    """A connection that reconnects when it is lost. Belongs to one event loop.

    Requests without a reply are sent again on the next connection: delivery is at least once.
    """

    @property
    def is_connected(self) -> bool: ...

    @property
    def unacknowledged(self) -> int:
        """Number of records published and not acknowledged."""

    async def publish(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout: float | None = None,
    ) -> Receipt:
        """Publish a record and wait for the acknowledgement, at most `timeout` seconds; None: the client's `publish_seconds`.

        The receipt has partition, offset and timestamp if the protocol reports them. Raises the broker's error, and after the deadline
        `NotSent` or `OutcomeUnknown`.
        """

    async def send(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> asyncio.Future[Receipt]:
        """Publish a record. Waits for room in the window, not for the acknowledgement."""

    async def send_many(
        self, topic: str, values: Sequence[bytes], *, key: Key = None, partition: int | None = None, headers: Headers = ()
    ) -> asyncio.Future[list[Receipt]]:
        """Publish values as one batch. Waits for room in the window, not for the acknowledgement."""

    async def publish_many(
        self,
        topic: str,
        values: Iterable[bytes] | AsyncIterable[bytes],
        *,
        key: Key = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout: float | None = None,
    ) -> int:
        """Publish all values as fast as the window allows. Returns their number once the last is acknowledged.

        If the broker refuses a record, sends no further ones and raises `RecordRefused` with its index and the number of records that
        were kept. Each record has `timeout` seconds, as in `publish`.
        """

    async def publish_with_ttl(
        self, topic: str, value: bytes, *, ttl_ms: int, key: bytes | None = None, partition: int | None = None
    ) -> Receipt:
        """Publish a record that expires after `ttl_ms`; 0 uses the topic's setting."""

    async def publish_delayed(
        self, topic: str, value: bytes, *, delay_ms: int, key: bytes | None = None, partition: int | None = None
    ) -> DelayedReceipt:
        """Publish a record after a delay. Durable on return."""

    async def cancel_delayed(self, id: str, *, topic: str = "") -> None:
        """Cancel a delayed message. Raises `UnknownMessage` if it is not waiting."""

    def transaction(self) -> Transaction:
        """Return a transaction. Entering it begins, leaving it commits, or rolls back after an exception."""

    async def flush(self) -> None:
        """Wait until every request sent so far has a reply."""

    async def fetch(
        self, topic: str, offset: Start = "earliest", *, partition: int = 0, group: str | None = None, records_max: int | None = None
    ) -> list[Message]:
        """Return records from `offset`, or from the group's committed offset if that is higher. An empty list means none."""

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
        """Follow a topic or one partition. A group resumes at its committed offset, or begins at `start` if it has none.

        The members of a group share the records. `mode` is that of the group; None: the one it has, or the default of the protocol.
        """

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """Commit `offset` as the next one the group reads. Durable on return."""

    async def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        """Return the next offset the group reads; None if it has never committed in the partition."""

    async def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        """Move a group to an offset or to a time (Unix ms). Returns the new offset."""

    async def offset_for_time(self, topic: str, timestamp: int, *, partition: int = 0) -> int:
        """Return the offset of the first record at or after a time (Unix ms); the end offset if there is none."""

    async def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Create a topic."""

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic with its records."""

    async def topics(self) -> list[str]:
        """Return the names of all visible topics."""

    async def ping(self) -> None:
        """Wait for one reply from the server."""

    async def close(self, timeout: float = 10.0) -> None:
        """Wait for outstanding acknowledgements, then close.

        Raises `OutcomeUnknown` if some are missing after `timeout`, and `NotSent` if records were never sent.
        """

    def abandon(self) -> tuple[int, int]:
        """Close immediately. Returns the number of records sent without a reply, and of records never sent."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None: ...
