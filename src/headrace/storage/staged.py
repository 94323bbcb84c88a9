"""Appends that wait for the writer, and which of them the next flush takes.

    stage() ─▶ urgent, others ─▶ take() ─┬─ a flush of the writer
                                         └─ a large append, which another thread writes to its segments first

A large append is made of bulk appends: those that arrive in chunks of half a megabyte or more. While it is written, appends to other
logs pass it. An append to one of its logs is held until it is committed, and so is everything staged later for the same logs. So the
appends to one log are written in the order in which they were staged.

A small append does not wait for the bytes of others either: small appends to logs that no larger append waits for are flushed before the
larger ones. Every second flush takes what was staged first, whatever its size. For a while after a small append has passed larger ones,
flushes are short, because the next small append waits for the flush that is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from headrace.errors import BrokerError, Unavailable
from headrace.limits import KIB, MIB
from headrace.records import Ack, AnyBatch, Appended, AppendedEach
from headrace.storage.batch import Built
from headrace.storage.partition import Partition
from headrace.storage.pending import Pending, pending_value, place_each, single_value
from headrace.storage.singles import Singles

FLUSH_BYTES_MAX: Final = 1 * MIB
"""Size of one flush, which bounds the wait of the next append. A flush always takes at least one append."""
SHORT_FLUSH_BYTES_MAX: Final = 128 * KIB
"""Size of one flush of larger appends while small ones pass them."""
SHORT_FLUSHES: Final = 64
"""Flushes of that size after a small append has passed larger ones: 50 ms of a flood. Without small appends it is flushed at full size."""
LARGE_BYTES_MAX: Final = 8 * MIB
"""Size of one large append that is made of several. It bounds the wait of the next append to the same log."""
BULK_BYTES_MIN: Final = 512 * KIB
"""Size from which on an append may be part of a large one."""
SMALL_BYTES_MAX: Final = 64 * KIB
"""Size up to which an append is flushed before larger ones to other logs."""

_SPREAD_A_LOG_MAX: Final = 4
"""Records of a log above which one batch for all of them is smaller and encoded faster."""
_PASSED_MAX: Final = 64
"""Appends that a flush looks past for more of the kind that it takes."""

LateBatch: TypeAlias = Callable[[Sequence[Appended]], AnyBatch]
Done: TypeAlias = Callable[["list[Appended] | BrokerError"], None]
DoneEach: TypeAlias = Callable[["AppendedEach | BrokerError"], None]

Completion: TypeAlias = tuple[Callable[[Any], None], "list[Appended] | AppendedEach | BrokerError"]
"""The `done` of an append, and its result."""


class Staged:
    """One atomic append that waits for the writer."""

    __slots__ = ("ack", "appends", "done", "now", "size_bytes")

    def __init__(self, appends: Sequence[tuple[int, AnyBatch | LateBatch]], ack: Ack, now: int, done: Done, size_bytes: int) -> None:
        self.appends = appends
        self.ack, self.now, self.done, self.size_bytes = ack, now, done, size_bytes

    @property
    def count(self) -> int:
        """Number of batches."""
        return len(self.appends)

    def logs(self) -> Iterable[int]:
        return [log for log, _ in self.appends]


class StagedEach:
    """Independent records that wait for the writer: each value goes to the log with the same index."""

    __slots__ = ("ack", "done", "keys", "logs_of", "now", "size_bytes", "values")

    def __init__(
        self,
        logs_of: Sequence[int],
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None,
        ack: Ack,
        now: int,
        done: DoneEach,
        size_bytes: int,
    ) -> None:
        self.logs_of, self.values, self.keys = logs_of, values, keys
        self.ack, self.now, self.done, self.size_bytes = ack, now, done, size_bytes

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.logs_of)

    def logs(self) -> Iterable[int]:
        return self.logs_of


AnyStaged: TypeAlias = Staged | StagedEach


class Placed:
    """Appends of one flush that have their offsets."""

    __slots__ = ("is_durable", "is_small", "is_spread", "items", "now", "pending", "singles", "waiting")

    def __init__(self, items: list[AnyStaged], now: int, *, is_small: bool, is_spread: bool) -> None:
        self.items, self.now = items, now
        self.is_small = is_small
        """Whether all of them together are below the size of one batch."""
        self.is_spread = is_spread
        """Whether single records without keys go to `singles` instead of `pending`."""
        self.pending: dict[int, Pending] = {}
        self.singles = Singles()
        self.waiting: list[Completion] = []
        """Completions that wait for the frame. Those of appends with `Ack.NONE` do not."""
        self.is_durable = False
        """Whether one of them waits for the sync."""

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

    def add(self, log: int, partition: Partition, batch: AnyBatch, single_bytes_max: int) -> None:
        """Add a batch of an atomic append, which gets the next offsets of its log. A value of up to `single_bytes_max` bytes is a single
        record."""
        ahead = self.pending.get(log)
        if ahead is not None:
            ahead.add(batch)
        elif (value := single_value(batch, single_bytes_max)) is None:
            self.pending[log] = Pending(partition, partition.next, [batch])
        elif self.is_spread and not (partition.options.compress or partition.options.encrypt):
            self.singles.add(log, partition, value)
        else:
            pending_value(self.pending, log, partition, value)
        partition.next += len(batch.values)

    def choose_large(self, large_bytes: int) -> None:
        """Decide which logs get a large append, after all appends are placed."""
        # Single records before it in the same flush come to the tail, and the segment must not overtake them.
        before = set(self.singles.logs)
        for log, ahead in self.pending.items():
            ahead.is_large = log not in before and _is_large(ahead, large_bytes)


def _is_large(ahead: Pending, large_bytes: int) -> bool:
    # Compaction reads its log while the writer appends, and must find each batch in the journal or in a synced segment.
    if not ahead.batches or ahead.partition.options.compact:
        return False
    return sum([batch.size_bytes for batch in ahead.batches]) >= large_bytes


class Written:
    """Batches of the frame of one flush."""

    __slots__ = ("batches", "others", "partitions", "singles")

    def __init__(self, singles: tuple[int, bytes]) -> None:
        self.singles = singles
        """Number and bytes of the batches of `Singles`."""
        self.partitions: list[Partition] = []
        """Logs that get one batch of values only."""
        self.batches: list[Built] = []
        """Of `partitions`, in the same order."""
        self.others: list[tuple[Partition, list[Built]]] = []


def are_spread(staged: Sequence[AnyStaged], value_bytes_max: int) -> bool:
    """Return whether the independent records of a flush, and its atomic appends to several logs, go to so many logs that most get few. None
    of the independent records exceeds `value_bytes_max`."""
    spread = [item for item in staged if (item.keys is None if isinstance(item, StagedEach) else len(item.appends) > 1)]
    logs_min = -(-sum([item.count for item in spread]) // _SPREAD_A_LOG_MAX)
    logs = set[int]()
    for item in spread:
        if len(logs) < logs_min:
            logs.update(item.logs())
        if isinstance(item, StagedEach) and max(map(len, item.values), default=0) > value_bytes_max:
            return False
    return 0 < logs_min <= len(logs)


class Waiting:
    """Appends that wait for the writer. `add` may be called by any thread, the rest only by the writer."""

    def __init__(self, large_bytes: int) -> None:
        self.bulk_bytes_min = min(large_bytes, BULK_BYTES_MIN)
        self._small_bytes_max = min(SMALL_BYTES_MAX, self.bulk_bytes_min - 1)
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
        self._larger = 0
        """Appends in `_staged` and `_held` that are not small."""
        self._has_passed = False
        """Whether the latest flush had small appends only, which passed larger ones."""
        self._short_flushes = 0
        """Number of the next flushes that are short."""
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._staged or self._urgent or self._held)

    def add(self, item: AnyStaged, *, urgent: bool) -> None:
        self.size_bytes += item.size_bytes
        if urgent:
            self._urgent.append(item)
            return
        self._count(item, 1)
        self._staged.append(item)

    def take(self) -> list[AnyStaged]:
        """Take the appends of the next flush. Urgent ones get their own flush, so that they do not wait for the rest."""
        drained: list[AnyStaged] = []
        if self._larger and not self._urgent and not self._has_passed:
            drained = self._take_small()
        self._has_passed = bool(drained)
        if drained:
            self._short_flushes = SHORT_FLUSHES
            return drained
        size, waiting = 0, self._urgent or self._staged
        bytes_max = SHORT_FLUSH_BYTES_MAX if self._short_flushes else FLUSH_BYTES_MAX
        self._short_flushes = max(0, self._short_flushes - 1)
        while waiting and size < bytes_max:
            item = waiting.popleft()
            if self._is_writing_large and (self._is_bulk(item) or not self._blocked.isdisjoint(item.logs())):
                if waiting is self._urgent:
                    self._count(item, 1)
                self._held.append(item)
                self._blocked.update(item.logs())
                continue
            size += item.size_bytes
            drained.append(item)
            if waiting is self._staged:
                self._count(item, -1)
        self.size_bytes -= size
        return drained

    def _take_small(self) -> list[AnyStaged]:
        """Take small appends that no larger one to the same log precedes, unless all of them share their logs with the larger ones: then
        they would gain nothing."""
        seen: list[AnyStaged] = []
        passed: list[AnyStaged] = []
        taken: list[AnyStaged] = []
        size, overtaken = 0, set(self._blocked)
        while self._staged and size < FLUSH_BYTES_MAX and len(passed) < _PASSED_MAX:
            item = self._staged.popleft()
            seen.append(item)
            if item.size_bytes <= self._small_bytes_max and overtaken.isdisjoint(item.logs()):
                taken.append(item)
                size += item.size_bytes
            else:
                passed.append(item)
                overtaken.update(item.logs())
        if not passed or not any([overtaken.isdisjoint(item.logs()) for item in taken]):
            self._staged.extendleft(reversed(seen))
            return []
        self._staged.extendleft(reversed(passed))
        self.size_bytes -= size
        return taken

    def _count(self, item: AnyStaged, sign: int) -> None:
        """Count an append that comes to `_staged` or `_held` (1), or leaves them (-1)."""
        if self._is_bulk(item):
            self._bulk_bytes += sign * item.size_bytes
        if item.size_bytes > self._small_bytes_max:
            self._larger += sign

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
            self._count(item, -1)
        self._latest = set(self._blocked)
        self.size_bytes -= size
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
