"""What all clients give and tell, whatever protocol they speak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from headrace.records import Headers


@dataclass(frozen=True, slots=True)
class Message:
    """One record as a client sees it. What its protocol does not carry is None or empty."""

    topic: str
    partition: int
    offset: int
    value: bytes
    key: bytes | None = None
    headers: Headers = ()
    timestamp: int | None = None
    """Unix ms, by the broker's clock."""


@dataclass(slots=True)
class MessageRun:
    """Adjacent records of one partition, column by column: for whoever has many to handle."""

    topic: str
    partition: int
    offsets: Sequence[int]
    values: list[bytes]
    keys: Sequence[bytes | None] | None = None
    """None when no record has a key, or the protocol has none."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where the broker has put a record."""

    topic: str
    partition: int
    offset: int
    timestamp: int | None = None
    """Unix ms, by the broker's clock; None where the protocol does not say."""


class ConnectionState(StrEnum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    """Lost, and being sought again."""
    CLOSED = "closed"
    """By the user, for good."""


OnState: TypeAlias = Callable[[ConnectionState, str], None]
"""Told of every change, with a reason for people. Called on the loop; must not raise."""
