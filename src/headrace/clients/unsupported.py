"""What no protocol does in full: the verbs of a client that its protocol may lack.

A protocol's client overrides what it can do; the rest raises `NotSupported` with the way to have it nevertheless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from headrace.clients.errors import NotSupported
from headrace.clients.messages import Message, Start

READERS: Final = "flymq:// and rustlog:// do, on the same topics"


class PartialClient:
    """The base of all clients."""

    protocol: ClassVar[str]
    instead: ClassVar[Mapping[str, str]] = {}
    """By verb: what to do where this protocol cannot."""

    def _lacks(self, verb: str, what: str, otherwise: str = READERS) -> NotSupported:
        return NotSupported(self.protocol, what, self.instead.get(verb, otherwise))

    async def fetch(
        self, topic: str, offset: Start = "start", *, partition: int = 0, group: str | None = None, records_max: int | None = None
    ) -> list[Message]:
        raise self._lacks("fetch", "fetching from an offset")

    async def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        raise self._lacks("commit", "groups")

    async def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        raise self._lacks("commit", "groups")

    async def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        raise self._lacks("commit", "groups")

    async def offset_for_time(self, topic: str, timestamp: int, *, partition: int = 0) -> int:
        raise self._lacks("offset_for_time", "looking up times", "flymq:// does, on the same topics")

    async def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        raise self._lacks("create_topic", "creating topics")

    async def delete_topic(self, topic: str) -> None:
        raise self._lacks("delete_topic", "deleting topics", "flymq:// does")

    async def topics(self) -> list[str]:
        raise self._lacks("topics", "listing topics")
