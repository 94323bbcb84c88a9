"""Appends that wait for the writer, and which of them the next flush takes.

    stage() ─▶ urgent, others ─▶ take() ─┬─ a flush of the writer
                                         └─ a large append, which another thread writes to its segments first

A large append is made of bulk appends: those that arrive in chunks of half a megabyte or more. While it is written, appends to other
logs pass it. An append to one of its logs is held until it is committed, and so is everything staged later for the same logs. So the
appends to one log are written in the order in which they were staged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from headrace.errors import BrokerError, Unavailable
from headrace.limits import KIB, MIB
from headrace.records import Ack, AnyBatch, Appended, AppendedEach
from headrace.storage.partition import Partition
from headrace.storage.pending import Pending, place_each
from headrace.storage.singles import Singles

FLUSH_BYTES_MAX: Final = 2 * MIB
"""Size of one flush, which bounds the wait of the next append. A flush always takes at least one append."""
LARGE_BYTES_MAX: Final = 8 * MIB
"""Size of one large append that is made of several. It bounds the wait of the next append to the same log."""
BULK_BYTES_MIN: Final = 512 * KIB
"""Size from which on an append may be part of a large one."""

_SPREAD_A_LOG_MAX: Final = 4
"""Records of a log above which one batch for all of them is smaller and encoded faster."""
_PASSED_MAX: Final = 64
"""Small appends that a large one looks past for more of its kind."""

LateBatch: TypeAlias = Callable[[Sequence[Appended]], AnyBatch]
Done: TypeAlias = Callable[["list[Appended] | BrokerError"], None]
DoneEach: TypeAlias = Callable[["AppendedEach | BrokerError"], None]

Completion: TypeAlias = tuple[Callable[[Any], None], "list[Appended] | AppendedEach | BrokerError"]
"""The `done` of an append, and its result."""


@dataclass(slots=True)
class Staged:
    """One atomic append that waits for the writer."""

    appends: Sequence[tuple[int, AnyBatch | LateBatch]]
    ack: Ack
    now: int
    done: Done
    size_bytes: int

    def logs(self) -> Iterable[int]:
        return [log for log, _ in self.appends]


@dataclass(slots=True)
class StagedEach:
    """Independent records that wait for the writer: each value goes to the log with the same index."""

    logs_of: Sequence[int]
    values: Sequence[bytes]
    keys: Sequence[bytes | None] | None
    ack: Ack
    now: int
    done: DoneEach
    size_bytes: int

    def logs(self) -> Iterable[int]:
        return self.logs_of


AnyStaged: TypeAlias = Staged | StagedEach


@dataclass(slots=True)
class Placed:
    """Appends of one flush that have their offsets."""

    items: list[AnyStaged]
    now: int
    small: bool
    """Whether all of them together are below the size of one batch."""
    pending: dict[int, Pending] = field(default_factory=dict)
    singles: Singles = field(default_factory=Singles)
    is_spread: bool = False
    """Whether independent records without keys go to `singles` instead of `pending`."""
    completions: dict[Ack, list[Completion]] = field(default_factory=lambda: {Ack.NONE: [], Ack.WRITTEN: [], Ack.DURABLE: []})

    def place_each(self, item: StagedEach, partitions: Mapping[int, Partition]) -> AppendedEach:
        """Assign offsets to independent records."""
        answer, logs = AppendedEach([], self.now), item.logs_of
        if self.is_spread and item.keys is None:
            missing = self.singles.place(logs, item.values, partitions, self.pending, answer.offsets)
        else:
            missing = place_each(logs, item.values, item.keys, partitions, self.pending, answer.offsets)
        for index in missing:
            answer.failed[index] = Unavailable(f"log {logs[index]} was deleted before the append was written")
        return answer


def are_spread(staged: Sequence[AnyStaged], value_bytes_max: int) -> bool:
    """Return whether the independent records of a flush go to so many logs that most of these get few. None exceeds `value_bytes_max`."""
    logs = set[int]()
    count = 0
    for item in staged:
        if isinstance(item, StagedEach) and item.keys is None:
            if max(map(len, item.values), default=0) > value_bytes_max:
                return False
            logs.update(item.logs_of)
            count += len(item.logs_of)
    return 0 < count <= len(logs) * _SPREAD_A_LOG_MAX


class Waiting:
    """Appends that wait for the writer. `add` may be called by any thread, the rest only by the writer."""

    def __init__(self, large_bytes: int) -> None:
        self.bulk_bytes_min = min(large_bytes, BULK_BYTES_MIN)
        self._large_bytes = large_bytes
        self._staged: deque[AnyStaged] = deque()
        self._urgent: deque[AnyStaged] = deque()
        """Appends that are written before the others."""
        self._held: list[AnyStaged] = []
        """Appends that wait for the large append that is being written, before all of `_staged`."""
        self._blocked: set[int] = set()
        """Logs of that large append and of the held appends."""
        self._is_writing_large = False
        self._latest: set[int] = set()
        """Logs of the latest large append. What follows is most likely large too, and its first bytes need not wait for the rest."""
        self._bulk_bytes = 0
        """Size of the bulk appends in `_staged` and `_held`."""
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._staged or self._urgent or self._held)

    def add(self, item: AnyStaged, *, urgent: bool) -> None:
        self.size_bytes += item.size_bytes
        if urgent:
            self._urgent.append(item)
            return
        if self._is_bulk(item):
            self._bulk_bytes += item.size_bytes
        self._staged.append(item)

    def take(self) -> list[AnyStaged]:
        """Take the appends of the next flush. Urgent ones get their own flush, so that they do not wait for the rest."""
        drained: list[AnyStaged] = []
        size, waiting = 0, self._urgent or self._staged
        while waiting and size < FLUSH_BYTES_MAX:
            item = waiting.popleft()
            if self._is_writing_large and (self._is_bulk(item) or not self._blocked.isdisjoint(item.logs())):
                self._held.append(item)
                self._blocked.update(item.logs())
                continue
            size += item.size_bytes
            drained.append(item)
            if waiting is self._staged and self._is_bulk(item):
                self._bulk_bytes -= item.size_bytes
        self.size_bytes -= size
        return drained

    def take_large(self) -> list[AnyStaged]:
        """Take bulk appends that together are a large one, with smaller ones between them; none if there are not enough. `release`
        follows."""
        if self._is_writing_large or not self._bulk_bytes or (self._bulk_bytes < self._large_bytes and not self._latest):
            return []
        seen: list[AnyStaged] = []
        passed: list[AnyStaged] = []
        taken: list[AnyStaged] = []
        size, bulk_bytes, logs, overtaken = 0, 0, set(self._latest), set[int]()
        while self._staged and size < LARGE_BYTES_MAX and len(passed) < _PASSED_MAX:
            item = self._staged.popleft()
            seen.append(item)
            is_bulk = self._is_bulk(item)
            if (is_bulk or _may_join(item, logs)) and overtaken.isdisjoint(item.logs()):
                taken.append(item)
                size += item.size_bytes
                if is_bulk:
                    bulk_bytes += item.size_bytes
                    logs.update(item.logs())
            else:
                passed.append(item)
                overtaken.update(item.logs())
        is_large = size >= self._large_bytes or all(self._latest.issuperset(item.logs()) for item in taken)
        if not bulk_bytes or not is_large:
            self._staged.extendleft(reversed(seen))
            return []
        self._staged.extendleft(reversed(passed))
        self._is_writing_large = True
        for item in taken:
            self._blocked.update(item.logs())
        self._latest = set(self._blocked)
        self.size_bytes -= size
        self._bulk_bytes -= bulk_bytes
        return taken

    def release(self) -> None:
        """Let the held appends go on, after the large append is committed or has failed."""
        self._is_writing_large = False
        self._blocked.clear()
        self._staged.extendleft(reversed(self._held))
        self._held.clear()

    def _is_bulk(self, item: AnyStaged) -> bool:
        return isinstance(item, Staged) and item.ack is Ack.DURABLE and item.size_bytes >= self.bulk_bytes_min


def _may_join(item: AnyStaged, logs: set[int]) -> bool:
    """Return whether an append of any size may be part of a large one to these logs, as the last chunk of a record batch is."""
    return isinstance(item, Staged) and item.ack is Ack.DURABLE and logs.issuperset(item.logs())
