"""Broker operations of dead letters and delayed messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from headrace.broker.authorizer import ANONYMOUS, Action, Authorizer, Principal
from headrace.broker.coordinated import Coordinated
from headrace.broker.dead_letters.dead_letters import SUFFIX, DeadLetterEntry, DeadLetters, Replayed
from headrace.broker.dead_letters.moves import Moves
from headrace.broker.delayed import DelayedEntry, Schedule, StagedMessages
from headrace.broker.delayed_batches import Delayed, Waiting
from headrace.broker.publishing.publish import Publisher
from headrace.broker.schema_checks import settled
from headrace.broker.settings import Clock
from headrace.broker.topics import Topics, check_name
from headrace.errors import InvalidRequest, NotAuthorized, UnknownMessage
from headrace.limits import DEAD_LETTERS_MOVED_MAX, DEAD_LETTERS_REPLAYED_MAX, FETCH_BYTES_MAX
from headrace.records import Headers, RecordBatch


class DeadLetterOperations(Coordinated):
    """Part of `Broker`."""

    _authorizer: Authorizer
    _topics: Topics
    _publisher: Publisher
    _dead_letters: DeadLetters
    _moves: Moves

    async def dead_letters(
        self, who: Principal, topic: str, *, records_max: int, bytes_max: int = FETCH_BYTES_MAX, after: str = "", replayed: bool = False
    ) -> list[DeadLetterEntry]:
        """Return the dead letters of a topic from the oldest on, or after the id `after`; replayed ones only if requested. Empty
        without a dead-letter topic."""
        self.check_coordinator()
        self._authorizer.check(who, Action.READ, "topic", topic + SUFFIX)
        return await self._dead_letters.entries(topic, records_max, bytes_max, after, replayed)

    def dead_letter_counts(self, who: Principal) -> dict[str, int]:
        """Return the number of waiting dead letters by topic, for topics that this principal may see. Empty if this broker is not the
        coordinator."""
        if not self.is_coordinator:
            return {}
        names = [topic.name for topic in self._topics.visible() if topic.name.endswith(SUFFIX)]
        seen = [name.removesuffix(SUFFIX) for name in names if self._authorizer.allows_topic(who, name)]
        return {name: self._dead_letters.count(name) for name in seen if name}

    async def move_to_dead_letters(self, who: Principal, topic: str, partition: int, offset: int, *, error: str = "") -> None:
        """Copy a record to the dead letters. Raises `UnknownMessage` if it no longer exists."""
        self.check_coordinator()
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._authorizer.check(who, Action.PUBLISH, "topic", topic + SUFFIX)
        self._topics.find_partition(topic, partition)
        await self._dead_letters.move(topic, partition, offset, "moved", error)

    async def move_many_to_dead_letters(
        self, who: Principal, topic: str, entries: Sequence[tuple[int, int, str]], *, reason: str = "pipeline"
    ) -> int:
        """Copy records, each (partition, offset, error), to the dead letters. Returns how many are new for this reason, so a
        repeated call is harmless. Records that no longer exist are skipped."""
        self.check_coordinator()
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._authorizer.check(who, Action.PUBLISH, "topic", topic + SUFFIX)
        check_name("reason", reason)
        if len(entries) > DEAD_LETTERS_MOVED_MAX:
            raise InvalidRequest(f"a move takes at most {DEAD_LETTERS_MOVED_MAX} records")
        self._topics.find(topic)
        wanted: dict[int, dict[int, str]] = {}
        for partition, offset, error in entries:
            wanted.setdefault(partition, {})[offset] = error
        for partition in wanted:
            self._topics.find_partition(topic, partition)
        return await self._moves.move(topic, wanted, reason)

    async def replay(self, who: Principal, topic: str, ids: Sequence[str]) -> Replayed:
        """Publish dead letters again with their keys and headers, and mark them, in one append. Raises `UnknownMessage` if one does not
        exist or was replayed; then none is published."""
        self.check_coordinator()
        self._authorizer.check(who, Action.READ, "topic", topic + SUFFIX)
        if not 0 < len(set(ids)) <= DEAD_LETTERS_REPLAYED_MAX:
            raise InvalidRequest(f"a replay takes 1 to {DEAD_LETTERS_REPLAYED_MAX} dead letters")
        return await self._dead_letters.replay(self._publisher.route(who, topic), ids)

    async def discard_dead_letters(self, who: Principal, topic: str, ids: Sequence[str]) -> None:
        """Mark dead letters as done without publishing them. Raises `UnknownMessage` if one does not exist or is done; then none is."""
        self.check_coordinator()
        self._authorizer.check(who, Action.DELETE, "topic", topic + SUFFIX)
        if not 0 < len(set(ids)) <= DEAD_LETTERS_REPLAYED_MAX:
            raise InvalidRequest(f"a discard takes 1 to {DEAD_LETTERS_REPLAYED_MAX} dead letters")
        await self._dead_letters.discard(topic, ids)

    async def purge_dead_letters(self, who: Principal, topic: str) -> int:
        """Delete all dead letters of a topic and return how many were waiting. Does nothing if there are none."""
        self.check_coordinator()
        self._authorizer.check(who, Action.DELETE, "topic", topic + SUFFIX)
        return await self._dead_letters.purge(topic)


class DelayedOperations(Coordinated):
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
        stage = partial(self.stage_delayed, who, topic, [value], [delay_ms], [key], [partition], headers=headers, ttl_ms=ttl_ms)
        staged = await settled(stage)
        await asyncio.shield(staged.outcome)
        return staged.ids[0], staged.dues[0]

    def stage_delayed(
        self,
        who: Principal,
        topic: str,
        values: Sequence[bytes | None],
        delays_ms: Sequence[int],
        keys: Sequence[bytes | None],
        partitions: Sequence[int | None],
        *,
        headers: Headers = (),
        ttl_ms: int = 0,
    ) -> StagedMessages:
        """Publish messages of one topic after a delay each, without waiting: all of them or, raising at once as `publish` does, none."""
        self.check_coordinator()
        route, now, owner = self._publisher.route(who, topic), self._clock(), who.name
        self._schedule.check(max(delays_ms), ttl_ms)
        for partition in set(partitions) - {None}:
            assert partition is not None
            self._topics.find_partition(topic, partition)
        route.check(RecordBatch(values))
        dues = [now + delay if delay > 0 else now for delay in delays_ms]
        return self._schedule.stage(topic, owner, values, dues, keys, partitions, headers, ttl_ms)

    def delayed(self, who: Principal, topic: str | None = None, *, count_max: int | None = None) -> list[DelayedEntry]:
        """Return the waiting messages of one topic or (None) of all, by time: all, or the next `count_max`. Messages of other owners
        are included for topics that this principal may read or delete."""
        self.check_coordinator()
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
        self.check_coordinator()
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
