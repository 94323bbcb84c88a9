"""Background work of a group consumer: it commits the progress, and moves records without attempts left to the dead letters.

A commit holds the lowest unsettled offset of each partition, many steps in one commit. Both are retried after a failure: unsettled
records keep their state, so a retry loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace.broker.dead_letters.dead_letters import DeadLetter, DeadLetters
from headrace.broker.groups.offsets import Groups
from headrace.broker.groups.progress import Entry, PartitionProgress, Row, State
from headrace.broker.settings import Clock, Later, Timer
from headrace.engine.contract import Engine
from headrace.errors import BrokerError

_RETRY_SECONDS: Final = 1.0
_MOVES_AT_ONCE: Final = 100

Spawn: TypeAlias = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
Bodies: TypeAlias = Callable[[int, Iterable[Entry]], Awaitable[dict[int, Row]]]
"""Reads the records of these entries of a partition, by offset. Records that no longer exist are missing."""


@dataclass(frozen=True, slots=True)
class GroupContext:
    """Parts of the broker that every `GroupConsumer` needs."""

    engine: Engine
    groups: Groups
    dead_letters: DeadLetters
    clock: Clock
    later: Later
    commit_ms: int


class ProgressCommits:
    """Commits the progress of a group on a topic."""

    def __init__(self, context: GroupContext, group: str, topic: str, partitions: Mapping[int, PartitionProgress], spawn: Spawn) -> None:
        self._context, self._group, self._topic, self._partitions, self._spawn = context, group, topic, partitions, spawn
        self._timer: Timer | None = None
        self._lock = asyncio.Lock()
        self._is_over = False

    def soon(self) -> None:
        """Commit within `commit_ms`: there is progress."""
        if self._timer is None:
            self._within(self._context.commit_ms / 1000)

    def retry(self) -> None:
        """Commit after a pause: a commit has failed."""
        self._within(_RETRY_SECONDS)

    def stop(self) -> None:
        """Commit nothing more: a successor may already own the group."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    async def commit(self) -> None:
        """Commit everything settled so far."""
        async with self._lock:
            behind = {progress: progress.floor for progress in self._partitions.values() if progress.floor != progress.committed}
            if not behind or self._is_over:
                return
            groups = self._context.groups
            commits = groups.commits(self._group, {(self._topic, progress.partition): floor for progress, floor in behind.items()})
            for progress, floor in behind.items():
                progress.committing = floor
            try:
                await groups.put(commits)
                for progress, floor in behind.items():
                    progress.committed = floor
            finally:
                for progress in behind:
                    progress.committing = None

    def _within(self, seconds: float) -> None:
        if self._timer is None and not self._is_over:
            self._timer = self._context.later(seconds, self._commit_in_background)

    def _commit_in_background(self) -> None:
        self._timer = None
        self._spawn(self._try_commit())

    async def _try_commit(self) -> None:
        try:
            await self.commit()
        except Exception as failure:
            self.retry()
            if not isinstance(failure, BrokerError):
                raise


class DeadLetterMoves:
    """Moves records to the dead letters of their topic, and settles them afterwards."""

    def __init__(self, context: GroupContext, topic: str, bodies: Bodies, settle: Callable[[Entry], None], spawn: Spawn) -> None:
        self._context, self._topic, self._bodies, self._settle, self._spawn = context, topic, bodies, settle, spawn
        self._entries: list[Entry] = []
        self._task: asyncio.Task[None] | None = None
        self._retry_timer: Timer | None = None
        self._is_over = False

    def add(self, entry: Entry) -> None:
        """Move this record, which is marked as dead."""
        self._entries.append(entry)
        self._start()

    async def finish(self) -> None:
        """Wait for the moves in progress."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """Move nothing more."""
        self._is_over = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()

    def _start(self) -> None:
        if self._task is None and self._retry_timer is None and not self._is_over:
            self._task = self._spawn(self._move_all())

    async def _move_all(self) -> None:
        try:
            while self._entries and not self._is_over:
                await self._move(self._entries[:_MOVES_AT_ONCE])
        except Exception as failure:
            if not self._is_over:
                self._retry_timer = self._context.later(_RETRY_SECONDS, self._retry)
            if not isinstance(failure, BrokerError):
                raise
        finally:
            self._task = None

    def _retry(self) -> None:
        self._retry_timer = None
        self._start()

    async def _move(self, dead: Sequence[Entry]) -> None:
        letters: list[DeadLetter] = []
        for partition in sorted({entry.progress.partition for entry in dead}):
            mine = [entry for entry in dead if entry.progress.partition == partition]
            rows = await self._bodies(partition, mine)
            letters += (_letter(entry, rows[entry.offset]) for entry in mine if entry.offset in rows)
        if letters:
            await self._context.dead_letters.append(self._topic, letters)
        del self._entries[: len(dead)]
        for entry in dead:
            if entry.state is State.DEAD:
                self._settle(entry)


def _letter(entry: Entry, row: Row) -> DeadLetter:
    return DeadLetter(row, entry.progress.partition, entry.attempt, entry.reason, entry.first_failure, entry.last_failure)
