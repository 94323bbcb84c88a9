"""Messages, receipts and connection states, independent of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

from headrace.clients.errors import InvalidArgument, NothingToSettle
from headrace.records import Headers

Start: TypeAlias = Literal["earliest", "latest"] | int | datetime
"""Start position: the oldest record, only new records, an offset, or the first record at or after a time."""
Settlement: TypeAlias = Literal["explicit", "auto"]
"""Explicit: the user settles messages. Auto: the iteration settles a message when it requests the next one."""
GroupMode: TypeAlias = Literal["ordered", "shared"]
"""Ordered: each partition belongs to one member of the group. Shared: each record goes to any member."""
Key: TypeAlias = bytes | Callable[[bytes], bytes | None] | None
"""Key of all records, or a function from value to key."""


def check_start(start: object) -> None:
    """Raise `InvalidArgument` for what is not a start position."""
    if not isinstance(start, (str, int, datetime)) or isinstance(start, bool):
        raise InvalidArgument(f"start: expected 'earliest', 'latest', an offset or a datetime, got {type(start).__name__}")
    if isinstance(start, str) and start not in ("earliest", "latest"):
        raise InvalidArgument(f"start position {start!r}: expected 'earliest', 'latest', an offset or a datetime")


class Settler(Protocol):
    """Settles the messages that a subscription or a fetch has delivered."""

    async def ack(self, message: Message) -> bool: ...

    async def nack(self, message: Message) -> bool: ...


@dataclass(frozen=True, slots=True)
class ReceivedRecord:
    """Fields of a received record. Those that the protocol does not carry are None or empty."""

    topic: str
    partition: int | None
    offset: int | None
    value: bytes
    key: bytes | None = None
    headers: Headers = ()
    timestamp: int | None = None
    """Unix ms, by the broker's clock."""


@dataclass(frozen=True, slots=True)
class Message(ReceivedRecord):
    """One received record, which can be acknowledged if it was delivered to a group or awaits an acknowledgement."""

    settler: Settler | None = field(default=None, compare=False, repr=False)

    async def ack(self) -> bool:
        """Acknowledge the message. For a group this commits the next offset, which also settles all earlier ones of the partition.

        Returns False if the delivery has expired: the message may be delivered again. Raises `NothingToSettle`.
        """
        return await self._settler().ack(self)

    async def nack(self) -> bool:
        """Request another delivery. Raises `NotSupported` if the protocol has no negative acknowledgement."""
        return await self._settler().nack(self)

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        """Acknowledge the message if the block succeeds. Otherwise it is delivered again."""
        if failure is None:
            await self.ack()

    def _settler(self) -> Settler:
        if self.settler is None:
            raise NothingToSettle(self.topic)
        return self.settler


@dataclass(slots=True)
class MessageBatch:
    """Adjacent records of one partition in columns."""

    topic: str
    partition: int | None
    """None if the protocol does not report it."""
    offsets: Sequence[int]
    """Empty if the protocol does not report them."""
    values: list[bytes]
    keys: Sequence[bytes | None] | None = None
    """None if no record has a key or the protocol has no keys."""

    def __len__(self) -> int:
        return len(self.values)

    def message(self, index: int, settler: Settler | None = None) -> Message:
        """Return the message at `index`."""
        offset = self.offsets[index] if self.offsets else None
        key = None if self.keys is None else self.keys[index]
        return Message(self.topic, self.partition, offset, self.values[index], key, settler=settler)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Acknowledgement of a record. Partition, offset and timestamp are None if the protocol does not report them."""

    topic: str
    partition: int | None = None
    offset: int | None = None
    timestamp: int | None = None
    """Unix ms, by the broker's clock."""


@dataclass(frozen=True, slots=True)
class DelayedReceipt:
    """Receipt of a delayed message, which the broker publishes at `deliver_at` (Unix ms) unless cancelled by its id."""

    id: str
    topic: str
    deliver_at: int


class Transaction(Protocol):
    """Records of several topics that become visible atomically: at the end of the block, or not at all if it fails."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None: ...

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> None:
        """Stage a record. It becomes visible with the commit."""

    async def commit_offset(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """Stage the next offset of a group, which takes effect with the commit. Raises `NotSupported`."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A reader resumed elsewhere than requested: retention removed records (`actual` is higher), or the log is shorter than before."""

    expected: int
    actual: int
    partition: int = 0


class ConnectionState(StrEnum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    """Lost; the client reconnects."""
    CLOSED = "closed"
    """Closed by the user; the client does not reconnect."""


OnState: TypeAlias = Callable[[ConnectionState, str], None]
"""Callback for state changes, with a human-readable reason. Runs on the event loop and must not raise."""
