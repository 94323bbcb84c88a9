"""Broker operations of dead letters."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.authorizer import Action, Authorizer, Principal
from headrace.broker.dead_letters.dead_letters import SUFFIX, DeadLetterEntry, DeadLetters, Replayed
from headrace.broker.dead_letters.moves import Moves
from headrace.broker.names import check_name
from headrace.broker.publishing.publish import Publisher
from headrace.broker.topics import Topics
from headrace.errors import InvalidRequest
from headrace.limits import DEAD_LETTERS_MOVED_MAX, DEAD_LETTERS_REPLAYED_MAX, FETCH_BYTES_MAX


class DeadLetterOperations:
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
        self._authorizer.check(who, Action.READ, "topic", topic + SUFFIX)
        return await self._dead_letters.entries(topic, records_max, bytes_max, after, replayed)

    def dead_letter_counts(self, who: Principal) -> dict[str, int]:
        """Return the number of waiting dead letters by topic, for topics that this principal may see."""
        seen = [topic.name for topic in self._topics.visible() if self._authorizer.allows_topic(who, topic.name)]
        names = [name.removesuffix(SUFFIX) for name in seen if name.endswith(SUFFIX)]
        return {name: self._dead_letters.count(name) for name in names if name}

    async def move_to_dead_letters(self, who: Principal, topic: str, partition: int, offset: int, *, error: str = "") -> None:
        """Copy a record to the dead letters. Raises `UnknownMessage` if it no longer exists."""
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._authorizer.check(who, Action.PUBLISH, "topic", topic + SUFFIX)
        self._topics.find_partition(topic, partition)
        await self._dead_letters.move(topic, partition, offset, "moved", error)

    async def move_many_to_dead_letters(
        self, who: Principal, topic: str, entries: Sequence[tuple[int, int, str]], *, reason: str = "pipeline"
    ) -> int:
        """Copy records, each (partition, offset, error), to the dead letters. Returns how many are new for this reason, so a
        repeated call is harmless. Records that no longer exist are skipped."""
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
        self._authorizer.check(who, Action.READ, "topic", topic + SUFFIX)
        if not 0 < len(set(ids)) <= DEAD_LETTERS_REPLAYED_MAX:
            raise InvalidRequest(f"a replay takes 1 to {DEAD_LETTERS_REPLAYED_MAX} dead letters")
        return await self._dead_letters.replay(self._publisher.route(who, topic), ids)

    async def purge_dead_letters(self, who: Principal, topic: str) -> int:
        """Delete all dead letters of a topic and return how many were waiting. Does nothing if there are none."""
        self._authorizer.check(who, Action.DELETE, "topic", topic + SUFFIX)
        return await self._dead_letters.purge(topic)
