"""Committed offsets of groups, in Kafka's own groups.

The group NAME is the Kafka group PREFIX + NAME, so Kafka's tools show its lag, and a Kafka consumer with that group id continues where a
member of ours stopped. An offset is committed as part of a transaction of the owner of the tables. The metadata of a commit is the Unix
ms of the commit in decimal digits.

Kafka consumers commit too: `refresh` reads the groups in turns and reports what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from headrace.engine.contract import Commits, OffsetKey, OffsetsWrite
from headrace.engine.kafka.cluster import Cluster
from headrace.engine.kafka.names import Names

_GROUPS_PER_TURN: Final = 20


class KafkaOffsets:
    """Implements `OffsetStore`."""

    def __init__(self, cluster: Cluster, names: Names, own_group: str) -> None:
        self._cluster, self._names, self._own_group = cluster, names, own_group
        self._known: dict[str, dict[OffsetKey, tuple[int, int]]] = {}
        self._unread: list[str] = []
        self._staged: dict[str, int] = {}
        """Commits of each group that are not finished. A refresh must not report what they are about to replace."""
        self._finished = 0
        self.changed: Callable[[Commits], None] = lambda commits: None

    async def load(self) -> Commits:
        self._known.clear()
        for group in await self._groups():
            await self._read(group)
        return [(key, row) for rows in self._known.values() for key, row in rows.items()]

    def write(self, commits: Commits) -> OffsetsWrite:
        return OffsetsWrite(commits)

    async def refresh(self) -> None:
        """Read some groups, and report the offsets that others have committed or deleted."""
        if not self._unread:
            self._unread = await self._groups()
        turn, self._unread = self._unread[:_GROUPS_PER_TURN], self._unread[_GROUPS_PER_TURN:]
        for group in turn:
            before, finished = dict(self._known.get(group, {})), self._finished
            if self._staged.get(group):
                continue
            after = await self._rows(group)
            if self._staged.get(group) or finished != self._finished:
                continue
            self._known[group] = after
            news: Commits = [(key, row) for key, row in after.items() if before.get(key, (-1, 0))[0] != row[0]]
            news += [(key, None) for key in before.keys() - after.keys()]
            if news:
                self.changed(news)

    def stage(self, commits: Commits) -> None:
        """Note commits that an append carries."""
        for group in {key[0] for key, _ in commits}:
            self._staged[group] = self._staged.get(group, 0) + 1

    def finish(self, commits: Commits, *, is_done: bool) -> None:
        """Note the end of that append."""
        self._finished += 1
        for group in {key[0] for key, _ in commits}:
            self._staged[group] -= 1
        if is_done:
            for key, row in commits:
                rows = self._known.setdefault(key[0], {})
                if row is None:
                    rows.pop(key, None)
                else:
                    rows[key] = row

    def to_kafka(self, commits: Commits) -> dict[str, dict[tuple[str, int], tuple[int, str]]]:
        """Return Kafka group → place → offset and metadata, without deletions. The last commit of a place counts."""
        found: dict[str, dict[tuple[str, int], tuple[int, str]]] = {}
        for (group, topic, partition), row in commits:
            if row is not None:
                found.setdefault(self._names.prefix + group, {})[self._names.to_kafka(topic), partition] = row[0], str(row[1])
        return found

    async def delete(self, commits: Commits) -> None:
        """Delete the offsets whose row is None."""
        doomed: dict[str, list[tuple[str, int]]] = {}
        for (group, topic, partition), row in commits:
            if row is None:
                doomed.setdefault(self._names.prefix + group, []).append((self._names.to_kafka(topic), partition))
        for kafka_group, places in doomed.items():
            await self._cluster.delete_offsets(kafka_group, places)

    async def _groups(self) -> list[str]:
        prefix = self._names.prefix
        return [name.removeprefix(prefix) for name in await self._cluster.groups() if name.startswith(prefix) and name != self._own_group]

    async def _read(self, group: str) -> None:
        self._known[group] = await self._rows(group)

    async def _rows(self, group: str) -> dict[OffsetKey, tuple[int, int]]:
        rows: dict[OffsetKey, tuple[int, int]] = {}
        for (kafka_topic, partition), (offset, metadata) in (await self._cluster.group_offsets(self._names.prefix + group)).items():
            topic = self._names.from_kafka(kafka_topic)
            if topic is not None and offset >= 0:
                rows[group, topic, partition] = offset, int(metadata) if metadata.isdigit() else 0
        return rows


def split(writes: Sequence[object]) -> Commits:
    """Return the commits of all writes that carry some."""
    return [commit for write in writes if isinstance(write, OffsetsWrite) for commit in write.commits]
