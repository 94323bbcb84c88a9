"""The audit log: who did what, when, through which protocol, with which result.

It is the internal topic `__audit`. No protocol can write, delete or read it as a topic; only administrators can query it. A change of
users, rules or keys and its event are one append, so every change has its event. Logins and denials are recorded without waiting for
the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import msgspec

from headrace.broker.authorizer import Principal
from headrace.engine.contract import Ack, Appended, Engine, TopicConfig, Write
from headrace.errors import BrokerError, InvalidRequest, OffsetOutOfRange
from headrace.limits import AUDIT_EVENTS_WAITING_MAX, AUDIT_QUERY_EVENTS_MAX
from headrace.records import RecordBatch

TOPIC: Final = "__audit"
_SEGMENT_BYTES: Final = 16 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One event. Never holds a secret."""

    type: str
    """login, denial, topic, group, user, role, acl, key or audit."""
    action: str
    user: str
    protocol: str
    address: str
    resource: str
    result: str
    """success, failure, allowed or denied."""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Noted:
    """A stored event with its offset and time."""

    offset: int
    time_ms: int
    event: Event


@dataclass(frozen=True, slots=True)
class Query:
    """Filter of events; an empty or 0 field matches all. Times are Unix ms, the end is exclusive."""

    start_ms: int = 0
    end_ms: int = 0
    types: Collection[str] = ()
    user: str = ""
    resource: str = ""
    result: str = ""
    search: str = ""
    limit: int = 100
    skip: int = 0

    def wants(self, noted: Noted) -> bool:
        event = noted.event
        return (
            (not self.end_ms or noted.time_ms < self.end_ms)
            and noted.time_ms >= self.start_ms
            and (not self.types or event.type in self.types)
            and (not self.user or event.user == self.user)
            and (not self.resource or event.resource == self.resource)
            and (not self.result or event.result == self.result)
            and (not self.search or self.search.casefold() in _words(event))
        )


@dataclass(frozen=True, slots=True)
class Found:
    """Matching events, newest first. `total` counts all matches."""

    events: list[Noted]
    total: int

    def has_more(self, query: Query) -> bool:
        return self.total > query.skip + len(self.events)


class Audit:
    """Loaded when the engine is open."""

    def __init__(self, engine: Engine, clock: Callable[[], int], *, retention_ms: int) -> None:
        self._engine, self._clock = engine, clock
        self._config = TopicConfig(ack=Ack.DURABLE, retention_ms=retention_ms, segment_bytes=_SEGMENT_BYTES)
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(Event).decode
        self._waiting: set[asyncio.Future[list[Appended]]] = set()
        self._dropped = 0

    async def load(self) -> None:
        known = self._engine.topics().get(TOPIC)
        if known is None:
            await self._engine.create_topic(TOPIC, 1, self._config, internal=True)
        elif known.config != self._config and self._engine.ownership.is_owner:
            await self._engine.alter_topic(TOPIC, config=self._config)

    def write(self, event: Event) -> Write:
        """Return the event as part of the append that it describes."""
        return Write(TOPIC, 0, RecordBatch([self._encode(event)]))

    def note(self, event: Event) -> None:
        """Record an event without waiting. When the disk is too slow, events are dropped and their number is recorded."""
        if len(self._waiting) >= AUDIT_EVENTS_WAITING_MAX:
            self._dropped += 1
            return
        writes = [self.write(event)]
        if self._dropped:
            writes.append(self.write(Event("audit", "drop", "", "internal", "", "", "failure", {"events": str(self._dropped)})))
            self._dropped = 0
        try:
            staged = self._engine.append(writes)
        except BrokerError as failure:
            _log.error("audit event lost", extra={"reason": str(failure)})
            return
        self._waiting.add(staged)
        staged.add_done_callback(self._noted)

    async def drain(self) -> None:
        """Wait until everything recorded so far is on disk or has failed."""
        if self._waiting:
            await asyncio.wait(set(self._waiting))

    async def find(self, query: Query) -> Found:
        """Read the requested time span and return the matches. Raises `InvalidRequest` for a page that is too large."""
        if not 0 < query.limit <= AUDIT_QUERY_EVENTS_MAX or query.skip < 0:
            raise InvalidRequest(f"count must be 1 to {AUDIT_QUERY_EVENTS_MAX} and skip must not be negative")
        await self.drain()
        matching: list[Noted] = []
        keep, total = query.limit + query.skip, 0
        position, end = await self._engine.offset_for_time(TOPIC, 0, query.start_ms), self._engine.bounds(TOPIC, 0).end
        while position < end:
            try:
                batches = await self._engine.read(TOPIC, 0, position, bytes_max=_READ_BYTES)
            except OffsetOutOfRange as error:
                position = max(position + 1, error.first)  # retention deleted records just now
                continue
            if not batches:
                break
            for batch in batches:
                for offset, time, value in zip(batch.offsets(), batch.timestamps(), batch.values(), strict=True):
                    noted = Noted(offset, time, self._decode(value or b"{}"))
                    if query.wants(noted):
                        total += 1
                        matching.append(noted)
                if len(matching) > 2 * keep:
                    del matching[:-keep]
            position = batches[-1].next_offset
        newest = matching[::-1][:keep]
        return Found(newest[query.skip :], total)

    def _noted(self, staged: asyncio.Future[list[Appended]]) -> None:
        self._waiting.discard(staged)
        if not staged.cancelled() and (failure := staged.exception()) is not None:
            _log.error("audit event lost", extra={"reason": str(failure)})


def event_of(who: Principal, address: str, type: str, action: str, resource: str, result: str, **details: str) -> Event:
    if who.credential.startswith("key:"):
        details = {**details, "key": who.credential.removeprefix("key:")}
    return Event(type, action, who.name, who.protocol, address, resource, result, details)


def _words(event: Event) -> str:
    words = [event.type, event.action, event.user, event.protocol, event.address, event.resource, event.result]
    return "\n".join([*words, *event.details, *event.details.values()]).casefold()
