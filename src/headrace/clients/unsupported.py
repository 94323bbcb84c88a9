"""Client methods that a protocol may lack.

The client of a protocol overrides the methods it supports. The others raise `NotSupported` with an alternative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from headrace.clients.errors import NotSupported
from headrace.clients.messages import DelayedReceipt, Message, Receipt, Start, Transaction

READERS: Final = "flymq:// and rustlog:// do, on the same topics"


class BaseClient:
    """Base of all clients."""

    protocol: ClassVar[str]
    instead: ClassVar[Mapping[str, str]] = {}
    """Alternatives for unsupported methods, by method name."""

    def _unsupported(self, method: str, what: str, otherwise: str = READERS) -> NotSupported:
        return NotSupported(self.protocol, what, self.instead.get(method, otherwise))

    async def fetch(
        self, topic: str, offset: Start = "earliest", *, partition: int = 0, group: str | None = None, records_max: int | None = None
    ) -> list[Message]:
        raise self._unsupported("fetch", "fetching from an offset")

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        raise self._unsupported("commit", "groups")

    async def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        raise self._unsupported("commit", "groups")

    async def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        raise self._unsupported("commit", "groups")

    async def offset_for_time(self, topic: str, timestamp: int, *, partition: int = 0) -> int:
        raise self._unsupported("offset_for_time", "looking up times", "flymq:// does, on the same topics")

    async def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        raise self._unsupported("create_topic", "creating topics")

    async def delete_topic(self, topic: str) -> None:
        raise self._unsupported("delete_topic", "deleting topics", "flymq:// does")

    async def publish_with_ttl(
        self, topic: str, value: bytes, *, ttl_ms: int, key: bytes | None = None, partition: int | None = None
    ) -> Receipt:
        raise self._unsupported("publish_with_ttl", "a time to live per record", "flymq:// does")

    async def publish_delayed(
        self, topic: str, value: bytes, *, delay_ms: int, key: bytes | None = None, partition: int | None = None
    ) -> DelayedReceipt:
        raise self._unsupported("publish_delayed", "delayed messages", "flymq:// does")

    async def cancel_delayed(self, id: str, *, topic: str = "") -> None:
        raise self._unsupported("publish_delayed", "delayed messages", "flymq:// does")

    def transaction(self) -> Transaction:
        raise self._unsupported("transaction", "transactions", "flymq:// and fujin:// do")

    async def topics(self) -> list[str]:
        raise self._unsupported("topics", "listing topics")
