"""What all clients give and tell, whatever protocol they speak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import TracebackType
from typing import Literal, Protocol, TypeAlias

from headrace.clients.errors import NothingToSettle
from headrace.records import Headers

Start: TypeAlias = Literal["start", "end"] | int | datetime
"""Where to begin: the oldest record, only what is yet to come, an offset, or the first record at or after a time."""
Settlement: TypeAlias = Literal["explicit", "auto"]
"""Who says that a message is dealt with: the user, or the iteration itself when it asks for what follows."""
Key: TypeAlias = bytes | Callable[[bytes], bytes | None] | None
"""For many records: the key of all of them, or what gives the key of a value."""


class Settler(Protocol):
    """Whoever gave a message out and can tell the broker what became of it."""

    async def ack(self, message: Message) -> bool: ...

    async def nack(self, message: Message) -> bool: ...


@dataclass(frozen=True, slots=True)
class Message:
    """One record as a client sees it. What its protocol does not carry is None or empty."""

    topic: str
    partition: int | None
    offset: int | None
    value: bytes
    key: bytes | None = None
    headers: Headers = ()
    timestamp: int | None = None
    """Unix ms, by the broker's clock."""
    settler: Settler | None = field(default=None, compare=False, repr=False)

    async def ack(self) -> bool:
        """Done with it. A group then goes on behind it, so that all before it in its partition count as done, too.

        False: it was delivered so long ago that it may come again. Raises `NothingToSettle` if nobody waits for an answer.
        """
        return await self._settler().ack(self)

    async def nack(self) -> bool:
        """Deliver it again. Raises `NotSupported` where the protocol only knows silence."""
        return await self._settler().nack(self)

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        """Acknowledged when the block ends well; otherwise left as it is, to come again."""
        if failure is None:
            await self.ack()

    def _settler(self) -> Settler:
        if self.settler is None:
            raise NothingToSettle(self.topic)
        return self.settler


@dataclass(slots=True)
class MessageBatch:
    """Adjacent records of one partition, column by column: for whoever has many to handle."""

    topic: str
    partition: int | None
    """None where the protocol does not say."""
    offsets: Sequence[int]
    """Empty where the protocol does not say."""
    values: list[bytes]
    keys: Sequence[bytes | None] | None = None
    """None when no record has a key, or the protocol has none."""

    def __len__(self) -> int:
        return len(self.values)

    def message(self, index: int, settler: Settler | None = None) -> Message:
        """One of them."""
        offset = self.offsets[index] if self.offsets else None
        key = None if self.keys is None else self.keys[index]
        return Message(self.topic, self.partition, offset, self.values[index], key, settler=settler)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The broker has acknowledged a record. Where it has put it is None where the protocol does not say."""

    topic: str
    partition: int | None = None
    offset: int | None = None
    timestamp: int | None = None
    """Unix ms, by the broker's clock."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A reader went on elsewhere than it asked: retention overtook it (`got` is higher), or the log is shorter than it was."""

    asked: int
    got: int
    partition: int = 0


class ConnectionState(StrEnum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    """Lost, and being sought again."""
    CLOSED = "closed"
    """By the user, for good."""


OnState: TypeAlias = Callable[[ConnectionState, str], None]
"""Told of every change, with a reason for people. Called on the loop; must not raise."""
