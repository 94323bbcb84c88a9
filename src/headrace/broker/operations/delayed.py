"""Broker operations of delayed messages."""

from __future__ import annotations

from headrace.broker.authorizer import ANONYMOUS, Action, Authorizer, Principal
from headrace.broker.delayed import Delayed, DelayedEntry, Schedule, Waiting
from headrace.broker.publishing.publish import Publisher
from headrace.broker.schema_checks import settled
from headrace.broker.timers import Clock
from headrace.broker.topics import Topics
from headrace.errors import NotAuthorized, UnknownMessage
from headrace.records import Headers, RecordBatch


class DelayedOperations:
    """Part of `Broker`."""

    _authorizer: Authorizer
    _topics: Topics
    _publisher: Publisher
    _schedule: Schedule
    _clock: Clock

    async def publish_delayed(
        self,
        who: Principal,
        topic: str,
        value: bytes | None,
        *,
        delay_ms: int,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        ttl_ms: int = 0,
    ) -> tuple[str, int]:
        """Publish after a delay (negative: none). Durable when it returns (id, Unix ms of delivery). Raises as `publish` does, and
        `LimitExceeded` when too many messages wait."""
        route = self._publisher.route(who, topic)
        self._schedule.check(delay_ms, ttl_ms)
        await settled(lambda: route.check(RecordBatch([value])))
        if partition is not None:
            self._topics.find_partition(topic, partition)
        due = self._clock() + max(0, delay_ms)
        return await self._schedule.add(Delayed(route.topic, due, who.name, value, key, headers, partition, ttl_ms)), due

    def delayed(self, who: Principal, topic: str | None = None, *, count_max: int | None = None) -> list[DelayedEntry]:
        """Return the waiting messages of one topic or (None) of all, by time: all, or the next `count_max`. Messages of other owners
        are included for topics that this principal may read or delete."""
        seen: dict[str, bool] = {}

        def is_seen(one: Waiting) -> bool:
            name = one.message.topic
            if name not in seen:
                seen[name] = topic in (None, name) and any(
                    self._authorizer.allows(who, action, "topic", name) for action in (Action.READ, Action.DELETE)
                )
            return seen[name] or (topic in (None, name) and who.name != ANONYMOUS and self._owns(who, one.message))

        return [self._delayed_entry(who, one) for one in self._schedule.waiting(is_seen, count_max)]

    def _delayed_entry(self, who: Principal, one: Waiting) -> DelayedEntry:
        message = one.message
        is_own = self._owns(who, message)
        key = message.key if is_own or self._authorizer.allows(who, Action.READ, "topic", message.topic) else None
        owner = message.owner if is_own or self._authorizer.allows(who, Action.DELETE, "topic", message.topic) else None
        return DelayedEntry(one.id, message.topic, message.due, len(message.value or b""), key, owner)

    async def cancel_delayed(self, who: Principal, id: str, *, topic: str | None = None) -> None:
        """Cancel a message; it is not delivered after this returns. Allowed for its owner and for principals that may delete its topic.
        Raises `UnknownMessage` if it is not waiting, is in another topic, or may not be cancelled by this principal. The error is the same,
        so that guessing reveals nothing."""
        waiting = self._schedule.find(id)
        message = waiting.message
        if topic not in (None, message.topic):
            raise UnknownMessage(id)
        if not self._owns(who, message):
            try:
                self._authorizer.check(who, Action.DELETE, "topic", message.topic)
            except NotAuthorized:
                raise UnknownMessage(id) from None
        await self._schedule.cancel(waiting)

    def _owns(self, who: Principal, message: Delayed) -> bool:
        """Return whether the principal owns the message. An API key of the owner whose scopes exclude the topic does not."""
        return who.name == message.owner and self._authorizer.allows(who, Action.PUBLISH, "topic", message.topic)
